"""A cache whose tensors stay at their addresses, as a graph needs it: the newest key overwrites the oldest (`Ring`),
where transformers' `StaticCache` copies all keys for every token. Attention rearranges the scores of distances to the
order of the slots (`AttentionInputs.order`).

Letters: B batch, L segment, M = `mem_len` memory at most, S = M + 1 slots, H heads, Dh = `d_head`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from ..transfo_xl.attention_transfo_xl import OPERATORS
from ..transfo_xl.cache_transfo_xl import DecodingState, ProjectedMemory, static_address
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig


class Ring:
    """The slot of the newest key, which the rings of all layers share.

    Attributes:
        slots: S.
        is_turning: whether tokens are written one by one, into the slot `newest`, since the slots were in order.
        newest: (1,) int, the slot of the newest key; after a call of several tokens the last slot, so that the slots
            are in order of time.
        turned: how many tokens have been written one by one; counted on the device, because a graph would be captured
            again for every value of a number on the host.
    """

    newest: Tensor
    _place: Tensor
    _skipped: Tensor
    _before: Tensor

    def __init__(self, slots: int):
        self.slots = slots
        self.is_turning = self._is_placed = False

    def place(self, device: torch.device):
        """Allocate the tensors on the device, once, because a graph reads fixed addresses."""
        if self._is_placed:
            return
        self.newest = torch.full((1,), self.slots - 1, device=device)
        # `_place` counts the steps of the ring, so that the newest key is in slot `_place` modulo `slots`; `_skipped`
        # counts the steps that wrote no token. `_before` has the slot before each slot.
        self._place, self._skipped = self.newest.clone(), self.newest.clone()
        self._before = torch.arange(-1, self.slots - 1, device=device)
        for tensor in (self.newest, self._place, self._skipped, self._before):
            static_address(tensor)
        self._is_placed = True

    @property
    def turned(self) -> int:
        return int(self._place - self._skipped) if self._is_placed else 0

    def turn(self) -> Tensor:
        """Advance by a slot, for one token of all layers.

        Returns:
            (S,) int, the place in time of each slot's key once the token has been written: 0 is the oldest.
        """
        self.is_turning = True
        torch.remainder(self._place.add_(1), self.slots, out=self.newest)
        return (self._before - self.newest).remainder(self.slots)

    def unroll(self, layers: Sequence["RingLayer"]):
        """Sort the keys of all layers by time, the newest last; this call does not turn the ring."""
        if not self.is_turning:
            return
        by_time = (self.newest + self._before + 2).remainder(self.slots)
        for layer in layers:
            for states in (layer.keys, layer.values):
                states.copy_(states.index_select(2, by_time.to(states.device)))
        rest = self.slots - 1 - self.newest
        self._place.add_(rest)
        self._skipped.add_(rest)
        self.newest.fill_(self.slots - 1)
        self.is_turning = False

    def reset(self):
        """Return to the state before any token was written one by one."""
        self.is_turning = False
        if self._is_placed:
            for tensor in (self.newest, self._place, self._skipped):
                tensor.fill_(self.slots - 1)


class RingLayer(StaticLayer):
    """The keys and values of a layer in the slots of a ring: (B, H, S, Dh) each.

    Before `Ring.turn` the last M slots hold the memory, in order of time.

    Attributes:
        is_filled: whether anything has been written.
        written_together: tokens written several at a time; `Ring` counts the others.
    """

    is_sliding = True
    keys: Tensor
    values: Tensor

    def __init__(self, ring: Ring):
        super().__init__(max_cache_len=ring.slots)
        self.ring = ring
        self.is_filled = False
        self.written_together = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.ring.place(key_states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (B, H, L, Dh) keys and values; return all that a query may see.

        After `Ring.turn`, with L = 1, these are the S slots in their order. Otherwise they are the memory, then the
        segment, in order of time, or in the first call the given keys alone, which contain the memory.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.ring.is_turning:
            slot = self.ring.newest.to(self.keys.device)
            self.keys.index_copy_(2, slot, key_states)
            self.values.index_copy_(2, slot, value_states)
            return self.keys, self.values
        is_first, self.is_filled = not self.is_filled, True
        self.written_together += key_states.shape[2]
        found = []
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            memory = kept[:, :, 1:]
            found.append(states if is_first else torch.cat([memory, states], dim=2))
            memory.copy_(found[-1][:, :, -memory.shape[2] :])
        return found[0], found[1]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove no token: 0 is the only number possible.

        Raises:
            NotImplementedError: another number, because the overwritten keys are lost.
        """
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a static cache takes no tokens back: what they replaced is gone; use a MemoryCache"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len - 1 + query_length, 0

    def get_seq_length(self) -> int:
        return self.written_together + self.ring.turned

    def reset(self) -> None:
        super().reset()
        self.ring.reset()
        self.is_filled, self.written_together = False, 0


class StaticMemoryCache(ProjectedMemory, StaticCache):
    """The cache of `generate(cache_implementation="static")`: one graph serves every token.

    It starts full, with masked states where there is no memory. Masked keys stay masked, except those that an
    `attention_mask` of all keys hides in a compiled call: give that mask to each compiled call.
    """

    def __init__(self, config: TransfoXLConfig, mem_len: int | None = None):
        """`config` is the model's. `mem_len` is M, at least 1; None: `config.mem_len`."""
        slots = 1 + (config.mem_len if mem_len is None else mem_len)
        super().__init__(config=config, max_cache_len=slots)
        self.ring = Ring(slots)
        self.layers = [RingLayer(self.ring) for _ in range(config.n_layer)]
        self.decoding_state = DecodingState()

    def is_filled(self) -> bool:
        # The host knows it without waiting for the device.
        return self.layers[0].is_filled

    def order_of_keys(self, segment_length: int, key_length: int, may_differ: bool) -> Tensor | None:
        if may_differ and self.is_filled() and segment_length == 1 and key_length == self.ring.slots:
            return self.ring.turn()
        self.sort_keys()
        return None

    def end_call(self, mem_len: int) -> None:
        """Keep the distances of a full memory alone, which a compiled step reads, at addresses of their own."""
        state, reach = self.decoding_state, 1 + mem_len
        if state.distances is None or state.reach <= reach:
            return
        # By identity, because layers may share a tensor, which is cropped once.
        cropped: dict[int, Tensor] = {}

        def crop(rows: Tensor | None, dim: int) -> Any:
            if rows is not None and id(rows) not in cropped:
                length = min(reach, rows.shape[dim])
                cropped[id(rows)] = static_address(rows.narrow(dim, -length, length).contiguous())
            return None if rows is None else cropped[id(rows)]

        state.reach = reach
        state.distances = [
            of_layer._replace(positions=crop(of_layer.positions, 0), rel_bias=crop(of_layer.rel_bias, 1))
            for of_layer in state.distances
        ]
        state.rel_keys = {layer: crop(rows, 1) for layer, rows in state.rel_keys.items()}

    def sort_keys(self) -> None:
        self.ring.unroll(self.layers)


OPERATORS.static_cache = StaticMemoryCache
