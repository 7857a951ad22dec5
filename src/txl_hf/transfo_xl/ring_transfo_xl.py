"""Keys and values that stay where they are: rings of M + 1 slots, of which a token writes one.

A static cache that keeps its keys in order of time has to move all of them for every token. In a ring the newest key
takes the place of the one that is forgotten, and it is the scores of the distances, one for each key, that are put in
the order of the slots (`AttentionInputs.order`). Where a slot lies in time is a number on the device, so that one
graph, and what a GPU has captured of it, serves every token.

Letters: B batch, H heads, Dh head width, M the memory's length, S = M + 1 slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

__all__ = ["Ring", "RingLayer"]


class Ring:
    """Where the rings of all layers have got to.

    Attributes:
        slots: S.
        is_turning: whether the layers are to write into the slot `newest`, in this call.
        newest: (1,) int, the slot of the newest key; between calls of many tokens the last one, so that the slots are
            in order of time.
        turned: how many tokens have been written one by one. The count lies on the device: a GPU's graph would be
            captured anew for every value of a number of the host.
    """

    newest: Tensor
    _place: Tensor
    _skipped: Tensor
    _before: Tensor

    def __init__(self, slots: int):
        self.slots = slots
        self.is_turning = False
        self._is_placed, self._has_turned = False, False

    def place(self, device: torch.device):
        """Make what lies on the device. A graph knows it by where it lies, so that this is done once."""
        if self._is_placed:
            return
        self.newest = torch.full((1,), self.slots - 1, device=device)
        # Imagine a line wound around the slots: `_place` is how far along it the newest key lies, and `_skipped` how
        # many steps of that way were taken without writing a token.
        self._place, self._skipped = self.newest.clone(), self.newest.clone()
        self._before = torch.arange(-1, self.slots - 1, device=device)
        if not torch.compiler.is_compiling():
            for tensor in (self.newest, self._place, self._skipped, self._before):
                torch._dynamo.mark_static_address(tensor)
        self._is_placed = True

    @property
    def turned(self) -> int:
        return int(self._place - self._skipped) if self._is_placed else 0

    def turn(self) -> Tensor:
        """Go on by a slot, for one token of all layers.

        Returns:
            (S,) int, the place in time of each slot's key when the token has been written: 0 is the oldest.
        """
        self.is_turning = self._has_turned = True
        torch.remainder(self._place.add_(1), self.slots, out=self.newest)
        return (self._before - self.newest).remainder(self.slots)

    def unroll(self, layers: Sequence["RingLayer"]):
        """Put the keys of all layers in order of time, the newest last, and let this call leave them so."""
        self.is_turning = False
        if not self._has_turned:
            return
        by_time = (self.newest + self._before + 2).remainder(self.slots)
        for layer in layers:
            for states in (layer.keys, layer.values):
                states.copy_(states.index_select(2, by_time.to(states.device)))
        rest = self.slots - 1 - self.newest
        self._place.add_(rest)
        self._skipped.add_(rest)
        self.newest.fill_(self.slots - 1)
        self._has_turned = False

    def reset(self):
        """As where nothing has been written one by one."""
        self.is_turning = self._has_turned = False
        if self._is_placed:
            for tensor in (self.newest, self._place, self._skipped):
                tensor.fill_(self.slots - 1)


class RingLayer(StaticLayer):
    """The keys and values of a layer in the slots of a ring: (B, H, S, Dh) each.

    Before `Ring.turn` the last M slots hold the memory, in order of time.

    Attributes:
        is_filled: whether anything has been written.
    """

    is_sliding = True
    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, ring: Ring):
        super().__init__(max_cache_len=ring.slots)
        self.ring = ring
        self.is_filled = False
        self._written_together = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.ring.place(key_states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take (B, H, L, Dh) keys and values; return all that a query may see.

        After `Ring.turn`, with L = 1, that are the S slots as they lie. Else it is the memory with the segment behind
        it, in order of time, but for the first keys, which bring a memory of their own.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.ring.is_turning:
            slot = self.ring.newest.to(self.keys.device)
            self.keys.index_copy_(2, slot, key_states)
            self.values.index_copy_(2, slot, value_states)
            return self.keys, self.values
        is_first, self.is_filled = not self.is_filled, True
        self._written_together += key_states.shape[2]
        found = []
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            memory = kept[:, :, 1:]
            found.append(states if is_first else torch.cat([memory, states], dim=2))
            memory.copy_(found[-1][:, :, -memory.shape[2] :])
        return found[0], found[1]

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing, where there is nothing to take back.

        Raises:
            NotImplementedError: there is: a slot has the newest of its keys alone.
        """
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a static cache takes no tokens back: what they replaced is gone; use a MemoryCache"
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = (states[indices, ...] for states in (self.keys, self.values))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (states.repeat_interleave(repeats, dim=0) for states in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len - 1 + query_length, 0

    def get_seq_length(self) -> int:
        return self._written_together + self.ring.turned

    def reset(self) -> None:
        super().reset()
        self.ring.reset()
        self.is_filled, self._written_together = False, 0
