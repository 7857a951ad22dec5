"""The forward and the backward pass of a training step, launched together where a GPU would wait for Python.

A GPU computes a step of a thousand tokens several times faster than Python launches the thousands of kernels for it.
Steps of the same shapes launch the same kernels, on the same weights: captured in two CUDA graphs, these are launched
by two calls, with what `torch.cuda.make_graphed_callables` says of it.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.utils import logging

from ..captured import BACKENDS
from ..memory_transfo_xl import cloned_states, memory_of
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..regularization import Regularizer
from .arguments import RunArguments
from .compilation import is_compiled

__all__ = ["MOST_GRAPHS", "RECORDERS", "STEPS_BEFORE", "CapturedSteps", "Forward", "should_capture_steps"]

logger = logging.get_logger(__name__)

# So many steps of a shape are launched kernel by kernel; to capture the next one takes as long as some four of them.
STEPS_BEFORE = 3
# Each graph has gradients of its own, as large as all weights; activations are where those of other graphs are.
MOST_GRAPHS = 32

Memory = dict[str, Any]


def should_capture_steps(run: RunArguments, accelerator: Accelerator, model: TransfoXLForCausalLM) -> bool:
    """What `--cuda_graphs` says; by default wherever nothing is against it.

    Args:
        model: behind its wrappers.

    Raises:
        ValueError: there can be no graphs, but they were asked for.
    """
    if run.cuda_graphs is False:
        return False
    reason = _why_not(run, accelerator, model)
    if run.cuda_graphs and reason:
        raise ValueError(f"--cuda_graphs True: {reason}")
    return reason is None


def _why_not(run: RunArguments, accelerator: Accelerator, model: TransfoXLForCausalLM) -> str | None:
    if accelerator.device.type not in RECORDERS:
        return f"there are no graphs on {accelerator.device.type}"
    if accelerator.distributed_type is not DistributedType.NO:
        return f"under {accelerator.distributed_type.value} gradients are exchanged while they are computed"
    if is_compiled(accelerator):
        return "the whole model is compiled, with graphs if its backend makes some"
    if model.config.cutoffs:
        return "the host has to know how many targets each bin of the vocabulary has"
    if run.gradient_checkpointing:
        return "the host has to know what a layer draws that is computed twice (--gradient_checkpointing)"
    if (backend := model.config._attn_implementation) not in BACKENDS:
        return f"attention by {backend} may compute with Python"
    return None


class Forward(nn.Module):
    """The forward pass of a step, from tensors to tensors."""

    def __init__(
        self,
        model: nn.Module,
        autocast: Callable[[], AbstractContextManager],
        regularizer: Regularizer | None = None,
        compiled: bool = False,
    ):
        """Args:
        model: language model, as it is prepared. autocast: what its calls are put into.
        regularizer: whose penalty is wanted. compiled: whether the whole model is.
        """
        super().__init__()
        self.model, self.autocast, self.regularizer, self.compiled = model, autocast, regularizer, compiled

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
        return nll, penalty, memory_of(outputs, self.compiled)


class CapturedSteps:
    """What computes as a `Forward` on a GPU does, and launches what it has launched before as one graph.

    The next number that is drawn is the one that would be drawn without graphs.

    Attributes:
        graphs: by the shapes of what they are given.
    """

    def __init__(self, forward: Forward):
        self.graphs: dict[tuple, Callable] = {}
        self._forward, self._seen = forward, Counter[tuple]()
        self._pool: Any = None
        self._given_up = False

    def __call__(self, inputs: dict[str, Tensor], memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """As `Forward.forward`; the memory is in tensors of its own."""
        memory = _without_none(memory)
        shapes = _shapes_of(inputs | memory)
        self._seen[shapes] += 1
        is_known = self._seen[shapes] > STEPS_BEFORE and not self._given_up
        if is_known and shapes not in self.graphs and len(self.graphs) < MOST_GRAPHS:
            self._capture(shapes, inputs, memory)
        if shapes not in self.graphs:
            return self._forward(inputs, memory)
        nll, penalty, memory = self.graphs[shapes](inputs, memory, self._parameters())
        return nll, penalty, cloned_states(memory)

    def _parameters(self) -> list[nn.Parameter]:
        """What has gradients."""
        return [parameter for parameter in self._forward.parameters() if parameter.requires_grad]

    def _capture(self, shapes: tuple, inputs: dict[str, Tensor], memory: Memory) -> None:
        def step(inputs: dict[str, Tensor], memory: Memory, parameters: list[nn.Parameter]):
            nll, penalty, memory = self._forward(inputs, memory)
            return nll, penalty, _without_none(memory)

        # These stay the places that a graph reads.
        copies = {name: tensor.clone() for name, tensor in inputs.items()}, _without_none(cloned_states(memory))
        device = inputs["input_ids"].device
        try:
            self._pool, self.graphs[shapes] = RECORDERS[device.type](step, (*copies, self._parameters()), self._pool)
        except Exception as error:
            # Whatever CUDA, its driver or this PyTorch refuses.
            self._given_up = True
            self.graphs.clear()
            logger.warning_once(f"steps are launched kernel by kernel, as no graph of them was captured: {error}")


def _record(step: Callable, places: tuple, pool: Any) -> tuple[Any, Callable]:
    """A function that does on a GPU what `step` does with what is in `places`, and the memory that it shares."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    drawn, healthy = generator.get_state(), generator.graphsafe_get_state().clone_state()
    stream, pool = torch.cuda.current_stream(), pool or torch.cuda.graph_pool_handle()
    try:
        graphed = torch.cuda.make_graphed_callables(step, places, allow_unused_input=True, pool=pool)
    except Exception:
        # Where capturing ends in an error, PyTorch leaves its stream in the place of this one, and a generator that
        # draws nothing outside of a graph.
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(healthy)
        raise
    # What was computed to warm up has drawn too.
    generator.set_state(drawn)
    return pool, graphed


# By device type.
RECORDERS: dict[str, Callable[[Callable, tuple, Any], tuple[Any, Callable]]] = {"cuda": _record}


def _without_none(memory: Memory) -> Memory:
    """A graph is given tensors, and returns tensors."""
    return {name: states for name, states in memory.items() if states is not None}


def _shapes_of(tensors: dict[str, Any]) -> tuple:
    return tuple(
        (name, *(tuple(tensor.shape) for tensor in (given if isinstance(given, tuple) else (given,))))
        for name, given in tensors.items()
    )
