"""The forward and the backward pass of a training step, launched together where a GPU would wait for Python.

A GPU computes a step of a thousand tokens several times faster than Python launches the thousands of kernels for it.
Steps of the same shapes launch the same kernels, on the same weights: captured in two CUDA graphs, these are launched
by two calls. What `torch.cuda.make_graphed_callables` says of weights, shapes and memory holds here too; it is not
used because it stops what other threads do, such as reading ahead, and fails on weights that have been trained before.
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton
from transformers.utils import logging

from ..kernels.attention_triton import why_triton_cannot_begin
from ..kernels.captured import MOST_TOKENS, RECORDERS, why_not_kernels_alone
from ..kernels.weights import ProductWeights
from ..transfo_xl.memory_transfo_xl import cloned_states, memory_of
from .arguments import TransfoXLTrainingArguments
from .regularization import Regularizer

logger = logging.get_logger(__name__)

# So many steps of a shape are launched kernel by kernel; to capture the next one takes as long as some four of them.
STEPS_BEFORE = 3
# Each graph has its own inputs and memory; activations and gradients are where those of the others are.
MOST_GRAPHS = 64

Memory = dict[str, Any]


def should_compile_layers(
    arguments: TransfoXLTrainingArguments, device: torch.device, model: Any, regularized: bool
) -> bool:
    """Whether `compile_layers` is set; where it is None, on a GPU that Triton runs on, of which the compiled kernels
    are, unless the whole model is compiled, dropouts are put around layers (`regularized`), or a module of the model
    has been hooked or replaced.
    """
    if arguments.compile_layers is not None:
        return arguments.compile_layers
    usual = device.type == "cuda" and not arguments.torch_compile and not regularized
    usual = usual and why_not_kernels_alone(getattr(model, "transformer", model)) is None
    return usual and has_triton() and why_triton_cannot_begin() is None


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each layer of a Transformer-XL in place; parameters keep their names. All layers are alike, so that one
    graph serves them, in a fraction of the time that the whole model takes, whose graph repeats them.
    """
    transformer: Any = getattr(model, "transformer", model)
    for layer in transformer.layers:
        layer.compile(backend=backend)


def uncompiled() -> AbstractContextManager:
    """A context in which compiled layers run as they are written: an evaluation has lengths of its own."""
    return torch.compiler.set_stance("force_eager")


def should_capture_steps(
    arguments: TransfoXLTrainingArguments,
    accelerator: Accelerator,
    model: nn.Module,
    document_end: Any | None,
    tokens: int,
) -> bool:
    """Whether `cuda_graphs` is set; where it is None, whether steps can be captured and Python is slower than the GPU.

    Args:
        model: behind its wrappers. document_end: token that ends a document of the text; None: it is one.
        tokens: that a step reads, or a part of one.

    Raises:
        ValueError: they cannot be captured, but are to be; it says why.
    """
    if arguments.cuda_graphs is False:
        return False
    reason = _why_not(arguments, accelerator, model, document_end)
    if arguments.cuda_graphs and reason:
        raise ValueError(f"--cuda_graphs: {reason}")
    return arguments.cuda_graphs or (reason is None and tokens <= MOST_TOKENS)


def _why_not(
    arguments: TransfoXLTrainingArguments, accelerator: Accelerator, model: Any, document_end: Any | None
) -> str | None:
    if accelerator.device.type not in RECORDERS:
        return f"there are no graphs on {accelerator.device.type}"
    if accelerator.distributed_type is not DistributedType.NO:
        return f"under {accelerator.distributed_type.value} gradients are exchanged while they are computed"
    if arguments.torch_compile:
        return "the whole model is compiled, with graphs if its backend makes some"
    if model.config.cutoffs:
        return "the host has to know how many targets each bin of the vocabulary has"
    if document_end is not None:
        return "the host has to know at each step whether a document ends in it (--document_end none)"
    if arguments.gradient_checkpointing:
        return "the host has to know what a layer draws that is computed twice (--gradient_checkpointing)"
    if arguments.backprop_segments > 1:
        return "gradients go through the memory of several segments (--backprop_segments)"
    return why_not_kernels_alone(getattr(model, "transformer", model))


class Forward(nn.Module):
    """The forward pass of a step, from tensors to tensors."""

    def __init__(
        self,
        model: nn.Module,
        autocast: Callable[[], AbstractContextManager],
        regularizer: Regularizer | None = None,
    ):
        """Args:
        model: language model, as it is prepared. autocast: what its calls are put into.
        regularizer: whose penalty is wanted.
        """
        super().__init__()
        self.model, self.autocast, self.regularizer = model, autocast, regularizer

    def forward(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """The sum of the losses and the penalty, which are scalars, and the memory that the next step goes on from.

        Args:
            inputs: of the model, (B, L) each, with `shift_labels`. memory: what the last step returned.
        """
        with self.autocast():
            outputs = self.model(**inputs, **memory)
        nll = outputs.losses.sum()
        penalty = torch.zeros_like(nll)
        if self.regularizer is not None:
            penalty = self.regularizer.penalty(inputs["shift_labels"], inputs.get("resets"))
        return nll, penalty, memory_of(outputs)


class CapturedSteps:
    """A `Forward` on a GPU that repeats shapes it has seen before as two CUDA graphs, with the same results.

    The numbers that are drawn are those that would be drawn without graphs.

    Attributes:
        graphs: by the shapes and types of what they are given.
    """

    def __init__(self, forward: Forward, steps_before: int = STEPS_BEFORE, dtype: torch.dtype | None = None):
        """Args:
        steps_before: so many of a shape are launched kernel by kernel.
        dtype: the type to which autocast casts weights, for all products of a graph at once; None: it casts none.
        """
        self._dtype = dtype
        self.graphs: dict[tuple, CapturedStep] = {}
        self._forward, self._steps_before, self._seen = forward, steps_before, Counter[tuple]()
        # A step's graphs run when those of the last step are done, and may use the same memory.
        self._shared: dict[str, Any] = {}
        self._gradients: Gradients | None = None
        self._given_up = False

    def __call__(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """As `Forward.forward`; the memory is in tensors of its own."""
        kind = tuple((tensor.shape, tensor.dtype) for tensor in _tensors_of(inputs, memory))
        self._seen[kind] += 1
        is_known = self._seen[kind] > self._steps_before and not self._given_up
        if is_known and kind not in self.graphs and len(self.graphs) < MOST_GRAPHS:
            if has_room(inputs["input_ids"].device):
                self._capture(kind, inputs, memory)
            else:
                self._given_up = True
                logger.warning_once(
                    "steps of other shapes than before are launched kernel by kernel: the memory of the GPU does not "
                    "hold their activations beside those of graphs"
                )
        if kind not in self.graphs:
            return self._forward(inputs, memory)
        nll, penalty, memory = self.graphs[kind](inputs, memory)
        return nll, penalty, cloned_states(memory)

    def _capture(self, kind: tuple, inputs: dict[str, Tensor], memory: Memory) -> None:
        device = inputs["input_ids"].device
        if device.type == "cuda" and not self._shared:
            # Streams go round among those of a priority. Where a graph ends that was captured on one, PyTorch takes
            # away what cuBLAS has in memory for it (from 2.12 on), and those of evaluations come and go.
            stream = torch.cuda.Stream(device, priority=-1)
            self._shared = {"stream": stream, "pool": torch.cuda.graph_pool_handle()}
        try:
            self._gradients = self._gradients or Gradients(self._forward, self._dtype)
            self.graphs[kind] = CapturedStep(self._forward, inputs, memory, self._gradients, self._shared)
        except Exception as error:
            # Whatever CUDA, its driver or this PyTorch refuses. What ends a capture says only that it was in vain.
            self._given_up, self._gradients = True, None
            self.graphs.clear()
            reason = error.__context__ or error
            logger.warning_once(f"steps are launched kernel by kernel, as no graph of them was captured: {reason}")


def has_room(device: torch.device) -> bool:
    """Whether what a step needs, beside weights and all else that stays, fits twice: what is launched cannot use the
    memory that graphs keep for their activations.
    """
    if device.type != "cuda":
        return True
    allocated = torch.cuda.memory_allocated(device)
    needed = torch.cuda.max_memory_allocated(device) - allocated
    # What is kept for later is given back before a capture.
    kept = torch.cuda.memory_reserved(device) - allocated
    return torch.cuda.mem_get_info(device)[0] + kept >= 2 * needed


class Gradients:
    """Where the graphs of all shapes add their gradients: they would be as large as all weights for each.

    Attributes:
        weights: by name, those that are trained. places: for each of them.
        products: the copies that products read, where all weights are trained and are cast.
    """

    def __init__(self, forward: Forward, dtype: torch.dtype | None = None):
        self.weights = {name: weight for name, weight in forward.named_parameters() if weight.requires_grad}
        self.places = [torch.zeros_like(weight) for weight in self.weights.values()]
        self.products: ProductWeights | None = None
        if dtype is not None and len(self.weights) == len(list(forward.parameters())):
            self.products = ProductWeights(self.weights, forward.model.config, dtype)

    def begin(self) -> None:
        """Forget what was added in steps before the present one, whose gradients are no weight's any more."""
        pairs = zip(self.weights.values(), self.places, strict=True)
        if forgotten := [place for weight, place in pairs if weight.grad is not place]:
            torch._foreach_zero_(forgotten)

    def hand_over(self, is_learned: list[bool]) -> None:
        """Make what was added the gradient of each weight that is learned, or add it to what was launched."""
        for weight, place, learned in zip(self.weights.values(), self.places, is_learned, strict=True):
            if not learned or weight.grad is place:
                continue
            if weight.grad is None:
                weight.grad = place
            else:
                weight.grad += place


class CapturedStep:
    """The graphs of the steps of some shapes: one of the forward pass, and one of the backward pass."""

    def __init__(
        self,
        forward: Forward,
        inputs: dict[str, Tensor],
        memory: Memory,
        gradients: Gradients,
        shared: dict[str, Any],
    ):
        """Args:
        inputs, memory: of a step of these shapes. gradients: to which its own are added.
        shared: where it is recorded, as recorders take it.
        """
        device = inputs["input_ids"].device
        record = functools.partial(RECORDERS[device.type], device=device, draws=True, **shared)
        # A graph reads where it was captured. The weights are where they are, but as leaves that no other step has
        # met: a capture would have to wait for the stream on which that one asked for their gradients.
        places = {name: tensor.clone() for name, tensor in inputs.items()}, cloned_states(memory)
        leaves: dict[str, Tensor] = {name: nn.Parameter(weight.detach()) for name, weight in gradients.weights.items()}
        losses: list[Tensor] = []
        products = gradients.products
        leaves |= {} if products is None else products.leaves()

        def compute() -> tuple[Tensor, Tensor, Memory]:
            if products is not None:
                products.renew()
            nll, penalty, memory = functional_call(forward, leaves, places)
            losses[:] = [loss for loss in (nll, penalty) if loss.requires_grad]
            return nll.detach(), penalty.detach(), memory

        def differentiate() -> tuple[Tensor | None, ...]:
            found = torch.autograd.grad(losses, list(leaves.values()), self._given, allow_unused=True)
            if products is None:
                return found
            return tuple(products.of_weights(dict(zip(leaves, found, strict=True))).values())

        def learn() -> None:
            found = differentiate()
            sums = [place for place, gradient in zip(gradients.places, found, strict=True) if gradient is not None]
            torch._foreach_add_(sums, [gradient for gradient in found if gradient is not None])

        # The numbers that are drawn here are drawn again when it runs.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if (stream := shared.get("stream")) is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # What is compiled for these shapes, or chosen by trying, is so before it is recorded.
                compute()
                self._given = [torch.ones_like(loss) for loss in losses]
                self._is_learned = [gradient is not None for gradient in differentiate()]
            self._forward, self._backward = record(compute), record(learn)
        self._places, self._gradients = _tensors_of(*places), gradients
        # What is differentiated by.
        self._asked = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """As `Forward.forward`; the next call returns the memory in the same tensors."""
        for place, tensor in zip(self._places, _tensors_of(inputs, memory), strict=True):
            place.copy_(tensor, non_blocking=True)
        nll, penalty, memory = self._forward()
        return *_Learned.apply(self.learn, nll, penalty, self._asked), memory

    def learn(self, *of_losses: Tensor) -> None:
        """Add to the gradients of the weights, given those of the sum of the losses and of the penalty."""
        # Where there is no penalty, it is no function of the weights.
        for place, gradient in zip(self._given, of_losses, strict=False):
            place.copy_(gradient)
        self._gradients.begin()
        self._backward()
        self._gradients.hand_over(self._is_learned)


class _Learned(torch.autograd.Function):
    """The losses that a graph has computed, of which another one learns where they are backpropagated."""

    @staticmethod
    def forward(ctx: Any, learn: Callable, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.learn = learn
        # Of tensors that the next step returns again, this one's history would be the next one's.
        return tensors[0].clone(), tensors[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_losses: Tensor) -> tuple[None, ...]:
        # Through autograd, each of hundreds of gradients would be copied and handed on by itself.
        ctx.learn(*of_losses)
        return None, None, None, None


def _tensors_of(inputs: dict[str, Tensor], memory: Memory) -> list[Tensor]:
    """Of a memory there is one for each layer, and may be a mask."""
    return [tensor for tensor in tree_leaves((inputs, memory)) if tensor is not None]
