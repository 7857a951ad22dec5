"""A layer of `MemoryCache` that does not copy its keys for every token, in place of transformers' sliding layer.

Letters: B batch, L segment, M = `mem_len` memory at most, H heads, Dh = `d_head`.
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
        seen, end, room = self.keys.shape[2] + length, self._end + length, self._room - length
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, self._end, length).copy_(states)
        self._keep(min(seen, memory_length), end, room)
        keys, values = (buffer.narrow(2, end - seen, seen) for buffer in self._buffers)
        return keys, values

    def _keep(self, length: int, end: int, room: int):
        """Let keys and values be the last `length` up to column `end` of the buffers, behind which there is room."""
        # `narrow`, because it takes a third of the time of an index, in each layer for each token.
        self.keys, self.values = (buffer.narrow(2, end - length, length) for buffer in self._buffers)
        self._end, self._room = end, room


OPERATORS.cache_layer = MemoryCacheLayer
