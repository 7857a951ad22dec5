"""The forward and the backward pass of a training step, launched together where a GPU would wait for Python.

A GPU computes a step of a thousand tokens several times faster than Python launches its thousands of kernels. Steps of
the same shapes launch the same kernels on the same weights: two CUDA graphs launch them by two calls, on the
conditions of `torch.cuda.make_graphed_callables`, which is not used, because it stops other threads, such as those
that read ahead, and fails on weights trained before.
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from ..memories import cloned_states, memory_of
from ..transfo_xl import adaptive_transfo_xl
from .captured import RECORDERS, shared_by_graphs
from .softmax import capacities_of_bins, fixed_capacities
from .weights import ProductWeights

logger = logging.get_logger(__name__)

# Steps of a shape that are launched kernel by kernel before a capture, which takes as long as some four of them.
STEPS_BEFORE = 3
# Graphs of the same shapes share inputs and memory; all graphs share memory for activations and gradients.
MOST_GRAPHS = 64

Memory = dict[str, Any]


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each layer of a Transformer-XL in place; parameters keep their names. One graph serves all layers, in a
    fraction of the time that the whole model takes, whose graph repeats them."""
    transformer: Any = getattr(model, "transformer", model)
    for layer in transformer.layers:
        layer.compile(backend=backend)


def uncompiled() -> AbstractContextManager:
    """A context in which compiled layers run eagerly, because an evaluation has other lengths."""
    return torch.compiler.set_stance("force_eager")


class Forward(nn.Module):
    """The forward pass of a step, from tensors to tensors."""

    def __init__(
        self,
        model: nn.Module,
        autocast: Callable[[], AbstractContextManager],
        regularizer: Any = None,
    ):
        """Args:
        model: language model, as it is prepared. autocast: returns the context of its calls. regularizer: of
        `regularize`, computes the penalty; None: no penalty.
        """
        super().__init__()
        self.model, self.autocast, self.regularizer = model, autocast, regularizer

    def forward(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """The sum of the losses and the penalty, which are scalars, and the memory for the next step.

        Args:
            inputs: of the model, (B, L) each, with `shift_labels`. memory: the memory that the last step returned.
        """
        with self.autocast():
            outputs = self.model(**inputs, **memory)
        nll = outputs.losses.sum()
        penalty = torch.zeros_like(nll)
        if self.regularizer is not None:
            penalty = self.regularizer.penalty(inputs["shift_labels"], inputs.get("resets"))
        return nll, penalty, memory_of(outputs)


class CapturedSteps:
    """A `Forward` that repeats shapes it has seen before as two CUDA graphs, with the same results and random numbers.

    Attributes:
        graphs: a `CapturedStep` for the shapes and types of its inputs, and the capacities of the softmax's bins.
    """

    def __init__(self, forward: Forward, steps_before: int = STEPS_BEFORE, dtype: torch.dtype | None = None):
        """Args:
        steps_before: number of steps of a shape that are launched kernel by kernel.
        dtype: the type to which autocast casts weights, for all products of a graph at once; None: it casts none.
        """
        self._dtype = dtype
        self.graphs: dict[tuple, CapturedStep] = {}
        self._forward, self._steps_before, self._seen = forward, steps_before, Counter[tuple]()
        # Stream and memory of all graphs: a step's graphs run after those of the last step, so they may share memory.
        self._shared: dict[str, Any] = {}
        # Inputs and memory that the graphs of some shapes read.
        self._places: dict[tuple, tuple[dict[str, Tensor], Memory]] = {}
        self._gradients: Gradients | None = None
        self._given_up = False

    def __call__(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """As `Forward.forward`; the returned memory is in tensors of its own."""
        if self._given_up and not self.graphs:
            return self._forward(inputs, memory)
        # For mypy every attribute of an `nn.Module` is a tensor or a module.
        config: Any = self._forward.model.config
        capacities = None
        if config.cutoffs and not config.output_logits:
            if inputs["shift_labels"].numel() * config.vocab_size <= adaptive_transfo_xl.FEW_LOGITS:
                # The host waits for the numbers of targets in `AdaptiveLogSoftmax.plain_nll`.
                return self._forward(inputs, memory)
            capacities = capacities_of_bins(config, inputs["shift_labels"])
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors_of((inputs, memory)))
        with fixed_capacities(capacities):
            return self._step((shapes, capacities), inputs, memory)

    def _step(self, kind: tuple, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """`kind`: the shapes and types of inputs and memory, and the capacities of bins."""
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
        # A priority of its own, because streams of one priority are reused, and when a graph of an evaluation is
        # destroyed, PyTorch (from 2.12 on) frees cuBLAS's memory for the stream on which it was captured.
        self._shared = self._shared or shared_by_graphs(device, priority=-1)
        shapes = kind[0]
        try:
            self._gradients = self._gradients or Gradients(self._forward, self._dtype)
            if shapes not in self._places:
                own = {name: tensor.clone() for name, tensor in inputs.items()}
                self._places[shapes] = own, cloned_states(memory)
            self.graphs[kind] = CapturedStep(self._forward, *self._places[shapes], self._gradients, self._shared)
        except Exception as error:
            # Any error of CUDA, its driver or PyTorch. The error at the end of a capture has the cause as its context.
            self._given_up, self._gradients = True, None
            self.graphs.clear()
            self._places.clear()
            reason = error.__context__ or error
            logger.warning_once(f"steps are launched kernel by kernel, as no graph of them was captured: {reason}")


def has_room(device: torch.device) -> bool:
    """Whether the activations of a step fit twice beside all that stays, because kernels that are launched one by one
    cannot use the memory that graphs keep for their activations."""
    if device.type != "cuda":
        return True
    allocated = torch.cuda.memory_allocated(device)
    needed = torch.cuda.max_memory_allocated(device) - allocated
    # PyTorch frees its cached memory before a capture, so that memory counts as free.
    kept = torch.cuda.memory_reserved(device) - allocated
    return torch.cuda.mem_get_info(device)[0] + kept >= 2 * needed


class Gradients:
    """Gradient tensors that the graphs of all shapes share, because a set for each would be as large as all weights.

    Attributes:
        weights: the trained weights by name. places: a gradient tensor for each of them.
        products: copies of the weights in autocast's type, which products read, if all weights are trained and cast.
    """

    def __init__(self, forward: Forward, dtype: torch.dtype | None = None):
        self.weights = {name: weight for name, weight in forward.named_parameters() if weight.requires_grad}
        self.places = [torch.zeros_like(weight) for weight in self.weights.values()]
        self.products: ProductWeights | None = None
        if dtype is not None and len(self.weights) == len(list(forward.parameters())):
            self.products = ProductWeights(self.weights, forward.model.config, dtype)

    def begin(self) -> None:
        """Zero each place that is no weight's `grad` now, because it holds an old gradient."""
        pairs = zip(self.weights.values(), self.places, strict=True)
        if forgotten := [place for weight, place in pairs if weight.grad is not place]:
            torch._foreach_zero_(forgotten)

    def hand_over(self, is_learned: list[bool]) -> None:
        """Make the shared gradient the `grad` of each weight that is learned, or add it to its `grad`."""
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
        inputs, memory: of a step of these shapes; a call copies its own there, because a graph reads these addresses.
        gradients: shared gradients, to which the step adds its own.
        shared: stream and memory of the graphs, as arguments of the recorder.
        """
        device = inputs["input_ids"].device
        record = functools.partial(RECORDERS[device.type], device=device, draws=True, **shared)
        # Weights keep their addresses as new leaves, because a capture would have to wait for the stream on which an
        # earlier step used the old ones.
        leaves: dict[str, Tensor] = {name: nn.Parameter(weight.detach()) for name, weight in gradients.weights.items()}
        losses: list[Tensor] = []
        products = gradients.products
        leaves |= {} if products is None else products.leaves()

        def compute() -> tuple[Tensor, Tensor, Memory]:
            if products is not None:
                products.renew()
            nll, penalty, remembered = functional_call(forward, leaves, (inputs, memory))
            losses[:] = [loss for loss in (nll, penalty) if loss.requires_grad]
            return nll.detach(), penalty.detach(), remembered

        def differentiate() -> tuple[Tensor | None, ...]:
            found = torch.autograd.grad(losses, list(leaves.values()), self._given, allow_unused=True)
            if products is None:
                return found
            return tuple(products.of_weights(dict(zip(leaves, found, strict=True))).values())

        def learn() -> None:
            found = differentiate()
            sums = [place for place, gradient in zip(gradients.places, found, strict=True) if gradient is not None]
            torch._foreach_add_(sums, [gradient for gradient in found if gradient is not None])

        # The random numbers that are drawn here are drawn again when the graph runs.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if (stream := shared.get("stream")) is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # One run before recording, so that compilation and autotuning for these shapes are done.
                compute()
                self._given = [torch.ones_like(loss) for loss in losses]
                self._is_learned = [gradient is not None for gradient in differentiate()]
            self._forward, self._backward = record(compute), record(learn)
        self._places, self._gradients = [_tensors_of(tree) for tree in (inputs, memory)], gradients
        # An input of `_Learned` with `requires_grad`, so that autograd calls its backward.
        self._asked = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """As `Forward.forward`; the next call returns the memory in the same tensors."""
        # Each kind by one launch, which copies tensors of one dtype.
        for places, given in zip(self._places, (inputs, memory), strict=True):
            if places:
                torch._foreach_copy_(places, _tensors_of(given), non_blocking=True)
        nll, penalty, memory = self._forward()
        return *_Learned.apply(self.learn, nll, penalty, self._asked), memory

    def learn(self, *of_losses: Tensor) -> None:
        """Add to the gradients of the weights, from the gradients of the summed losses and of the penalty."""
        # `_given` omits a penalty of 0, because 0 has no gradient.
        for place, gradient in zip(self._given, of_losses, strict=False):
            place.copy_(gradient)
        self._gradients.begin()
        self._backward()
        self._gradients.hand_over(self._is_learned)


class _Learned(torch.autograd.Function):
    """The losses of a forward graph, whose backpropagation runs the backward graph."""

    @staticmethod
    def forward(ctx: Any, learn: Callable, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.learn = learn
        # Clones, because the next step returns the same tensors, whose grad_fn would be shared.
        return tensors[0].clone(), tensors[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_losses: Tensor) -> tuple[None, ...]:
        # `learn` sets all gradients at once, because autograd would copy each of hundreds by itself.
        ctx.learn(*of_losses)
        return None, None, None, None


def _tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of inputs and memories: of a memory one for each layer, and its mask if it has one."""
    return [tensor for tensor in tree_leaves(tree) if tensor is not None]
