"""Layers of `MemoryCache`, in place of transformers' sliding layer: one that does not copy its keys for every token,
and one whose keys stay where they are, for a CUDA graph.

Letters: B batch, L segment, M = `mem_len` memory at most, K = M + L keys, H heads, Dh = `d_head`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..transfo_xl.attention_transfo_xl import OPERATORS
from ..transfo_xl.cache_transfo_xl import may_write


def _view_of_buffer(name: str) -> property:
    """Keys or values of a `MemoryCacheLayer`, (B, H, ≤ M, Dh); None before the first update.

    Setting them leaves no room, because states that are set (reordered, cropped, moved) are no view of the buffer.
    """

    def set_states(layer: "MemoryCacheLayer", states: Tensor):
        setattr(layer, name, states)
        layer._room = 0

    return property(lambda layer: getattr(layer, name), set_states)


class MemoryCacheLayer(DynamicSlidingWindowLayer):
    """A sliding layer whose keys are in a buffer with room for M more after them; when the room is used up, the last M
    are copied to the front of a new buffer."""

    keys, values = _view_of_buffer("_keys"), _view_of_buffer("_values")
    _buffers: list[Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append (B, H, L, Dh) keys and values to those of the memory; return all, and store the last M."""
        length, memory_length = key_states.shape[2], self.sliding_window - 1
        fits = length <= self._room and may_write(self._buffers[0]) and self._buffers[0].dtype == key_states.dtype
        if self.record_past or not fits:
            found = super().update(key_states, value_states, *args, **kwargs)
            # No room with gradients, because keys that a backward pass may need are not written to.
            if not self.record_past and not torch.is_grad_enabled():
                self._buffers = [F.pad(states, (0, 0, 0, memory_length)) for states in (self.keys, self.values)]
                self._keep(self.keys.shape[2], self.keys.shape[2], memory_length)
            return found
        self.cumulative_length += length
        seen, end, room = self.keys.shape[2] + length, self.end + length, self._room - length
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, self.end, length).copy_(states)
        self._keep(min(seen, memory_length), end, room)
        keys, values = (buffer.narrow(2, end - seen, seen) for buffer in self._buffers)
        return keys, values

    def _keep(self, length: int, end: int, room: int):
        """Let keys and values be the last `length` up to column `end` of the buffers, behind which there is room."""
        # `narrow`, because it takes a third of the time of an index, in each layer for each token.
        self.keys, self.values = (buffer.narrow(2, end - length, length) for buffer in self._buffers)
        self.end, self._room = end, room


class FixedMemoryLayer(MemoryCacheLayer):
    """The keys and values of a full memory, in buffers (B, H, M + room, Dh) that stay where they are, because graphs
    read fixed addresses: when the room is used up, the last M are moved to the front. M ≥ 1; the memory ends before
    column `end`."""

    def __init__(self, layer: DynamicSlidingWindowLayer, room: int):
        """Args: layer: the layer whose M keys and values are copied. room: number of keys that fit behind them."""
        super().__init__(layer.sliding_window)
        self.lazy_initialization(layer.keys, layer.values)
        self.cumulative_length = layer.cumulative_length
        self._buffers = [F.pad(states, (0, 0, 0, room)) for states in (layer.keys, layer.values)]
        self.keep(layer.keys.shape[2])

    def keep(self, end: int) -> None:
        """Let the memory be the M keys and values before column `end` of the buffers."""
        self._keep(self.sliding_window - 1, end, self._buffers[0].shape[2] - end)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """As `MemoryCacheLayer.update`. Only more keys than there is room for behind M get new buffers."""
        memory_length = self.sliding_window - 1
        if key_states.shape[2] > self._room:
            for buffer, states in zip(self._buffers, (self.keys, self.values), strict=True):
                overlaps = self.end < 2 * memory_length
                buffer.narrow(2, 0, memory_length).copy_(states.clone() if overlaps else states)
            self.keep(memory_length)
        # In the memory's type, to which `torch.cat` promotes: a given memory may be wider than what autocast computes.
        key_states, value_states = key_states.to(self.keys.dtype), value_states.to(self.values.dtype)
        return super().update(key_states, value_states, *args, **kwargs)


OPERATORS.cache_layer = MemoryCacheLayer
