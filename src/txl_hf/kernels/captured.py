"""CUDA graphs for all segments of a text, once the memory is full.

A GPU computes a short segment in less time than Python launches its hundreds of kernels. Segments of one length with a
full memory have the same kernels on the same tensors, except the ids: one captured graph launches them together. A few
graphs take turns, each for another place of the memory in its buffers: one alone would have to move it each time.

Letters: B batch, L segment, M the memory's length, K = M + L keys, D = `d_model`, H heads, Dh head width.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.utils import logging

from ..transfo_xl.attention_transfo_xl import find_backend
from ..transfo_xl.cache_transfo_xl import MemoryCache, decoding_state_of
from ..transfo_xl.modeling_transfo_xl import TransfoXLModel
from .cache_layers import FixedMemoryLayer

logger = logging.get_logger(__name__)

# Segments launched one by one before captures, of which each takes about as long as its graph saves in as many.
SEGMENTS_BEFORE = 8
# Graphs at most: with n of them one segment in n moves the memory, but each takes a capture.
MOST_GRAPHS = 4
# Tokens of a segment, in all rows, above which the GPU takes longer to compute than Python to launch.
MOST_TOKENS = 8192
# Packages whose modules only launch kernels, because a graph replays the kernels of a module without its Python code.
PACKAGES = ("torch", __name__.partition(".")[0])
HOOKS = ("transformers", PACKAGES[1])

Step = Callable[[], Any]

_capturing = threading.Lock()


def why_not_captured(transformer: TransfoXLModel, ids: Tensor) -> str | None:
    """The reason why a graph cannot replace a call of the model without its head with ids (B, L); None if it can."""
    if ids.device.type not in RECORDERS:
        return f"there are no graphs on {ids.device.type}"
    if ids.numel() > MOST_TOKENS:
        return f"a segment of {ids.numel()} tokens keeps a GPU busy for longer than it takes to launch"
    if is_in_torch_dispatch_mode():
        return "a dispatch mode of PyTorch's sees what is launched, and would not see a graph"
    if reason := why_not_kernels_alone(transformer):
        return reason
    for name, tensor in (*transformer.named_parameters(), *transformer.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.device != ids.device:
            return f"{name} is a {type(tensor).__name__} on {tensor.device}"
    return None


def why_not_kernels_alone(transformer: TransfoXLModel) -> str | None:
    """The reason why a call of the model may run Python code, which a graph would leave out; None if it does not."""
    backend = transformer.config._attn_implementation
    if not find_backend(backend).captures:
        return f"attn_implementation={backend!r} may compute with Python"
    if _is_foreign(positions := transformer.config.positions):
        return f"{positions.__name__}, which encodes positions, may compute with Python"
    for name, module in transformer.named_modules():
        if _is_foreign(type(module)):
            return f"{name} is a {type(module).__name__} of {type(module).__module__}, which may compute with Python"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Hooks of transformers collect hidden states if a call requests them, and do nothing otherwise; hooks of this
        # package launch kernels.
        if hasattr(module, "_hf_hook") or any(hook.__module__.partition(".")[0] not in HOOKS for hook in hooks):
            return f"{name} has a hook, which is to be called for every segment"
        if "forward" in vars(module):
            return f"{name} has a forward of its own, which is to be called for every segment"
    return None


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in PACKAGES


class SegmentsAlike:
    """Reads segments by graphs, once a model has read enough segments of one shape with a full memory.

    Args:
        transformer: the model, in evaluation mode and without gradients.
        memory_length: M.
    """

    def __init__(self, transformer: TransfoXLModel, memory_length: int):
        self._transformer, self._memory_length = transformer, memory_length
        self._shape: torch.Size | None = None
        self._alike, self._given_up = 0, False
        self._ids: Tensor | None = None
        self._layers: list[FixedMemoryLayer] = []
        # Column before which the memory ends → the graph of a segment there, and that column after it.
        self._graphs: dict[int, tuple[Step, int]] = {}

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    def read(self, ids: Tensor, resets: Tensor | None) -> Tensor | None:
        """(B, L, D) states by a graph, in a new tensor; None where no graph has a segment of this shape."""
        # No graphs behind `resets`, which may give the memory a mask, or behind a segment of another shape, which may
        # leave the memory elsewhere.
        if resets is not None or (self._graphs and ids.shape != self._shape):
            self._given_up, self._graphs = True, {}
        if not self._graphs or self._ids is None:
            return None
        run, end = self._graphs[self._layers[0].end]
        self._ids.copy_(ids)
        states = run().clone()
        self._keep(end)
        return states

    def saw(self, ids: Tensor, cache: object, launch: Callable[[Tensor], Tensor]) -> None:
        """Count a launched segment, and capture graphs after enough segments of one shape.

        Args:
            ids: (B, L). cache: the memory after the segment.
            launch: reads a segment, (B, L) ids → (B, L, D) states, with the same cache.
        """
        if self._given_up or self.is_captured or not isinstance(cache, MemoryCache):
            return
        is_alike = ids.shape == self._shape and _is_full(cache, self._memory_length)
        self._shape, self._alike = ids.shape, self._alike + 1 if is_alike else 0
        graphs = min(MOST_GRAPHS, -(-self._memory_length // ids.shape[1]))
        if self._alike == SEGMENTS_BEFORE:
            if reason := why_not_captured(self._transformer, ids):
                self._given_up = True
                logger.info(f"segments are launched one by one: {reason}")
            else:
                # One layer after the other, so that few buffers are there twice.
                for i, layer in enumerate(cache.layers):
                    cache.layers[i] = FixedMemoryLayer(layer, graphs * ids.shape[1])
        elif self._alike == SEGMENTS_BEFORE + graphs:
            # A segment was launched at each place before, so that all kernels are compiled.
            self._capture(ids.clone(), cache, launch)

    def _capture(self, ids: Tensor, cache: MemoryCache, launch: Callable[[Tensor], Tensor]) -> None:
        state, self._ids, self._layers = decoding_state_of(cache), ids, cache.layers
        projected, now, length = dict(state.rel_keys), self._layers[0].end, ids.shape[1]
        counted, shared = self._layers[0].cumulative_length, shared_by_graphs(ids.device)
        # Each capture moves the layers on, as a launch does: the first begins where the room is used up.
        ends = range(self._memory_length + length, now + 1, length)
        for before, end in zip((now, *ends), ends, strict=False):
            run = capture(lambda: launch(ids), ids.device, "segments are launched one by one", **shared)
            if run is None:
                self._given_up = True
                break
            self._graphs[before] = run, end
        self._keep(now)
        for layer in self._layers:
            # Those behind an error have not counted the segment.
            layer.cumulative_length = counted
        if self._given_up or any(state.rel_keys[layer] is not projected.get(layer) for layer in state.rel_keys):
            # A capture computes nothing. What it left must not be used after an error, nor where weights were changed
            # meanwhile, so that it projected `rel_keys` again.
            self._given_up, self._graphs, state.distances, state.rel_keys = True, {}, None, {}
        # Later calls may drop other references to what the graphs read.
        self._held = projected, state.distances

    def _keep(self, end: int) -> None:
        """Let the memory of each layer end before column `end` of its buffers."""
        for layer in self._layers:
            layer.keep(end)


def shared_by_graphs(device: torch.device, priority: int = 0) -> dict[str, Any]:
    """A stream and memory for graphs that never run at the same time, as arguments of their recorder."""
    if device.type != "cuda":
        return {}
    return {"stream": torch.cuda.Stream(device, priority=priority), "pool": torch.cuda.graph_pool_handle()}


def capture(step: Step, device: torch.device, instead: str, **shared: Any) -> Step | None:
    """The graph of a step, with what it shares (`shared_by_graphs`); None, after a warning that says what is done
    `instead`, where none can be captured. Autocast's cache is off, so that the graph casts the weights itself: other
    threads share and clear cached casts.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return RECORDERS[device.type](step, device, **shared)
    except Exception as error:
        # Any error, because CUDA, its driver and PyTorch raise several types.
        logger.warning_once(f"{instead}, as no graph of them was captured: {error}")
        return None
    finally:
        torch.set_autocast_cache_enabled(cached)


def _is_full(cache: MemoryCache, length: int) -> bool:
    """Whether there are `length` keys in each layer, all of them real."""
    if decoding_state_of(cache).key_mask is not None:
        return False
    return all(layer.is_initialized and layer.keys.shape[2] == length for layer in cache.layers)


class _UndrawnGraph(torch.cuda.CUDAGraph):
    """A graph without random numbers, during whose capture other threads may draw. Other captures bind the generator,
    which all threads share, to the graph: a thread that draws then gets an error, or the same numbers again."""

    def capture_begin(self, *args, **kwargs):
        # A clone of the state, because the graph keeps the generator state that it finds.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawing = generator.graphsafe_get_state()
        generator.graphsafe_set_state(drawing.clone_state())
        try:
            super().capture_begin(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(drawing)


def _record(
    step: Step,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
    draws: bool = False,
) -> Step:
    """A function that runs the kernels of `step` on a GPU, and returns the same tensors each time.

    Args:
        stream: the stream of the capture; None: a new one.
        pool: a memory pool shared with graphs that never run at the same time; None: a new one.
        draws: whether `step`, and so each replay, draws random numbers from the default generator.
    """
    with torch.cuda.device(device), _capturing:
        graph, before = torch.cuda.CUDAGraph() if draws else _UndrawnGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream() if stream is None else stream
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        fresh = generator.clone_state() if draws else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = step()
        except Exception:
            if fresh is not None:
                # The state before the capture, because that of a failed capture cannot draw outside of captures.
                generator.graphsafe_set_state(fresh)
            raise
        finally:
            # The stream before, because after an error PyTorch leaves the capture's stream current.
            torch.cuda.set_stream(before)

    def replay() -> Any:
        graph.replay()
        return result

    return replay


# Functions that capture a step, by device type.
RECORDERS: dict[str, Callable[..., Step]] = {"cuda": _record}
