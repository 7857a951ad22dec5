"""One CUDA graph for all segments of a text, once the memory is full.

A GPU computes a segment of few tokens faster than Python launches the hundreds of kernels for it. When every segment
is as long as the last one and follows as long a memory, these kernels are the same each time, on the same tensors but
for the ids: captured once, they are launched together.

Letters: B batch, L segment, M the memory's length, K = M + L keys, D = `d_model`, H heads, Dh head width.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import logging

from .memory_transfo_xl import MemoryCache, decoding_state_of
from .modeling_transfo_xl import TransfoXLModel

__all__ = ["RECORDERS", "SEGMENTS_BEFORE", "SegmentsAlike", "why_not_captured"]

logger = logging.get_logger(__name__)

# So many are launched one by one before a graph is captured, which takes about as long as it then saves in these.
SEGMENTS_BEFORE = 8
# Tokens of a segment, of all rows, from which on a GPU takes longer than Python does.
MOST_TOKENS = 8192
# Backends whose Python computes nothing but what it launches.
BACKENDS = ("auto", "eager", "sdpa", "txl_triton")
# Whose modules are known to do so too: a graph runs the kernels that a module has launched, and not the module.
PACKAGES = ("torch", "transformers_modules", __name__.partition(".")[0])

Step = Callable[[], Tensor]

_capturing = threading.Lock()


class FixedMemoryLayer(DynamicSlidingWindowLayer):
    """The keys and values of a full memory, (B, H, M, Dh) each, which stay where they are; M ≥ 1."""

    def __init__(self, layer: DynamicSlidingWindowLayer):
        """Args: layer: whose M keys and values it goes on from."""
        super().__init__(layer.sliding_window)
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (
            states.clone(memory_format=torch.contiguous_format) for states in (layer.keys, layer.values)
        )
        self.cumulative_length = layer.cumulative_length

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take (B, H, L, Dh) keys and values; return them behind those of the memory, (B, H, K, Dh), and remember the
        last M."""
        self.cumulative_length += key_states.shape[2]
        found = []
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            found.append(torch.cat([kept, states], dim=2))
            kept.copy_(found[-1][:, :, -kept.shape[2] :])
        return found[0], found[1]


def why_not_captured(transformer: TransfoXLModel, ids: Tensor) -> str | None:
    """Why a model without its head launches segments kernel by kernel; None if a graph does the same.

    Args:
        transformer: that reads. ids: (B, L), a segment.
    """
    if ids.device.type not in RECORDERS:
        return f"there are no graphs on {ids.device.type}"
    if ids.numel() > MOST_TOKENS:
        return f"a segment of {ids.numel()} tokens keeps a GPU busy for longer than it takes to launch"
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return "a mode of PyTorch's sees what is launched, and would not see a graph"
    if (backend := transformer.config._attn_implementation) not in BACKENDS:
        return f"attn_implementation={backend!r} may compute with Python"
    if torch.nn.modules.module._has_any_global_hook():
        return "there is a hook of all modules, which is to be called for every segment"
    for name, module in transformer.named_modules():
        package = type(module).__module__.partition(".")[0]
        if package not in PACKAGES:
            return f"{name} is a {type(module).__name__} of {package}, which may compute with Python"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Those by which transformers returns hidden states ask whether somebody wants them.
        if hasattr(module, "_hf_hook") or any(not str(hook.__module__).startswith("transformers.") for hook in hooks):
            return f"{name} has a hook, which is to be called for every segment"
    for name, tensor in (*transformer.named_parameters(), *transformer.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.device != ids.device:
            return f"{name} is a {type(tensor).__name__} on {tensor.device}"
    return None


class SegmentsAlike:
    """What watches a model read, and reads in its place when segments have been alike for long enough.

    Args:
        transformer: that reads, in evaluation mode and without gradients.
        memory_length: M.
        launch: what it does of a segment, (B, L) ids → (B, L, D) states, on a memory of its own.
    """

    def __init__(self, transformer: TransfoXLModel, memory_length: int, launch: Callable[[Tensor], Tensor]):
        self._transformer, self._memory_length, self._launch = transformer, memory_length, launch
        self._shape: torch.Size | None = None
        self._alike, self._given_up = 0, False
        self._ids: Tensor | None = None
        self._run: Step | None = None

    @property
    def is_captured(self) -> bool:
        return self._run is not None

    def read(self, ids: Tensor, resets: Tensor | None) -> Tensor | None:
        """(B, L, D), if there is a graph for such a segment; in a tensor of its own."""
        if self._run is None or self._ids is None or resets is not None or ids.shape != self._shape:
            return None
        self._ids.copy_(ids)
        return self._run().clone()

    def saw(self, ids: Tensor, resets: Tensor | None, cache: object) -> None:
        """A segment that was launched, and the cache that remembers it."""
        if self._given_up or self.is_captured or not isinstance(cache, MemoryCache):
            return
        is_alike = ids.shape == self._shape and resets is None and _is_full(cache, self._memory_length)
        self._shape, self._alike = ids.shape, self._alike + 1 if is_alike else 0
        if self._alike == SEGMENTS_BEFORE:
            self._given_up = why_not_captured(self._transformer, ids) is not None
            if not self._given_up:
                # Where they are now, keys and values stay.
                cache.layers = [FixedMemoryLayer(layer) for layer in cache.layers]
        elif self._alike > SEGMENTS_BEFORE:
            # One segment has been read on the memory where it is now: whatever it launches is compiled.
            self._capture(ids, cache)

    def _capture(self, ids: Tensor, cache: MemoryCache) -> None:
        self._ids = given = ids.clone()
        # What a longer segment would project anew, the graph reads where it is.
        held = cache, list(decoding_state_of(cache).distances.rel_keys.values())
        try:
            run = RECORDERS[ids.device.type](lambda: self._launch(given), ids.device)
        except RuntimeError as error:
            self._given_up = True
            logger.warning_once(f"segments are launched one by one, as no graph of them was captured: {error}")
        else:
            self._run, self._held = run, held


def _is_full(cache: MemoryCache, length: int) -> bool:
    """Whether there are `length` keys in each layer, all of them real."""
    if decoding_state_of(cache).key_mask is not None:
        return False
    return all(layer.is_initialized and layer.keys.shape[2] == length for layer in cache.layers)


def _record(step: Step, device: torch.device) -> Step:
    """A function that does on a GPU what `step` does, and returns the same tensor each time."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            # Other threads may read with the same model meanwhile.
            with _capturing, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = step()
        except BaseException:
            # Where capturing ends in an error, PyTorch leaves its stream in the place of this one, and a generator
            # that draws in graphs alone.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(before)
            raise

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


# By device type.
RECORDERS: dict[str, Callable[[Step, torch.device], Step]] = {"cuda": _record}
