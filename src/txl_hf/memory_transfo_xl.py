"""The memory as a thing of its own: its padding, its masks, and the cache that holds it projected.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, D = `d_model`, H heads, Dh = `d_head`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .configuration_transfo_xl import TransfoXLConfig

__all__ = [
    "PADDING",
    "DecodingState",
    "MemoryCache",
    "MemoryCacheLayer",
    "MemoryLengths",
    "cached_key_mask",
    "decoding_state_of",
    "drop_idle_mask",
    "is_padding",
    "make_key_mask",
    "pad_memory",
    "remember_key_mask",
    "text_length",
]

# Padding in the memory is stored as -0, in every channel of every layer, which no layer computes: so a memory carries
# its own mask wherever it is gathered, saved or moved, and what was masked once stays masked.
PADDING = -0.0


@dataclass(frozen=True)
class MemoryLengths:
    """How far a call remembers and sees: fields of `TransfoXLConfig` that an evaluation may choose anew.

    They are arguments of a call, so that threads can share a model and use different ones.

    Attributes:
        mem_len, ext_len, clamp_len, same_length: as in the configuration. None: the configuration's.
    """

    mem_len: int | None = None
    ext_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None

    def of(self, config: TransfoXLConfig) -> "FilledLengths":
        """What holds in a call of a model: these lengths, and the configuration's for those that are None.

        Raises:
            ValueError: a length is negative, or the model's positions allow no memory.
        """
        filled = FilledLengths(
            mem_len=config.mem_len if self.mem_len is None else self.mem_len,
            ext_len=config.ext_len if self.ext_len is None else self.ext_len,
            clamp_len=config.clamp_len if self.clamp_len is None else self.clamp_len,
            same_length=config.same_length if self.same_length is None else self.same_length,
            counts_self=config.same_length_counts_self,
        )
        config.check_lengths(mem_len=filled.mem_len, ext_len=filled.ext_len)
        return filled


@dataclass(frozen=True)
class FilledLengths:
    """The lengths of one call, none of them missing: see `MemoryLengths.of`."""

    mem_len: int
    ext_len: int
    clamp_len: int
    same_length: bool
    counts_self: bool

    @property
    def window(self) -> int | None:
        """The furthest distance that a query sees, or None: all of the memory and of the segment up to itself.

        `same_length` gives every query as many keys as the memory is long. Without a memory that would be none, so
        that a segment is then read without this limit.
        """
        if not self.same_length or self.mem_len == 0:
            return None
        return self.mem_len - self.counts_self


def is_padding(mems: tuple[Tensor, ...]) -> Tensor:
    """(B, m) bool: which states of the memory are padding."""
    return ((mems[0] == 0) & mems[0].signbit()).all(dim=-1)


def pad_memory(states: Tensor, length: int) -> Tensor:
    """(B, m, D) → (B, length, D) with padding in front."""
    return F.pad(states, (0, 0, length - states.shape[1], 0), value=PADDING)


def drop_idle_mask(key_mask: Tensor | None) -> Tensor | None:
    """None for a mask that hides nothing, where that can be asked: no GPU is waited for, and no graph is made."""
    if key_mask is None or key_mask.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return key_mask
    return None if key_mask.all() else key_mask


class MemoryCacheLayer(DynamicSlidingWindowLayer):
    """A sliding layer that does not copy its M keys for every token.

    The keys lie in a buffer with room for M more behind them, so that a token is written once; when the room is used
    up, what is remembered moves to the front of a new buffer. Everything but `update` is the sliding layer's.
    """

    _keys: Tensor
    _key_buffer: Tensor
    _value_buffer: Tensor

    def __init__(self, sliding_window: int):
        self._room = 0
        super().__init__(sliding_window)

    @property
    def keys(self) -> Tensor:
        """(B, H, ≤ M, Dh), a view of the buffer; None before the first update."""
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor):
        # Whoever sets them (to reorder beams, to crop, to move them) leaves the buffers behind.
        self._keys, self._room = keys, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take (B, H, L, Dh) keys and values; return them behind those of the memory, and remember the last M."""
        length, memory_length = key_states.shape[2], self.sliding_window - 1
        if length > self._room or self.record_past or key_states.requires_grad:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            if not self.record_past and not key_states.requires_grad:
                self._make_room(memory_length)
            return keys, values
        self.cumulative_length += length
        seen = self.keys.shape[2] + length
        room = self._room - length
        self._end += length
        buffers = self._key_buffer, self._value_buffer
        # `narrow` takes a third of the time of an index, and this is done in each layer for each token.
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, self._end - length, length).copy_(states)
        kept = min(seen, memory_length)
        self.keys, self.values = (buffer.narrow(2, self._end - kept, kept) for buffer in buffers)
        self._room = room
        keys, values = (buffer.narrow(2, self._end - seen, seen) for buffer in buffers)
        return keys, values

    def _make_room(self, room: int):
        self._end = self.keys.shape[2]
        self._key_buffer, self._value_buffer = (F.pad(states, (0, 0, 0, room)) for states in (self.keys, self.values))
        self.keys, self.values, self._room = (
            self._key_buffer[:, :, : self._end],
            self._value_buffer[:, :, : self._end],
            room,
        )


@dataclass
class DecodingState:
    """What decoding needs beside the keys and values of a cache; `TransfoXLModel` attaches it as `decoding_state`.

    Args:
        initial_length: how many states of memory the cache started from. They are older than the text.
        key_mask: (B, n) bool, which of the last n keys up to token `end` of the text are real; None: all of them.
            Later keys are real unless a mask says otherwise. So what was masked once stays masked.
        end: see `key_mask`.
        positions: (n, D) sinusoids, furthest distance first; distances beyond `clamp_len` share one.
        rel_keys: for each layer W_R R, (H, n, Dh): it depends on the distances alone, so it is projected once.
    """

    initial_length: int = 0
    key_mask: Tensor | None = None
    end: int = 0
    positions: Tensor | None = None
    clamp_len: int = -1
    rel_keys: dict[int, Tensor] = field(default_factory=dict)

    def memory_mask(self, end: int, memory_length: int) -> Tensor | None:
        """(B, m) bool: which of the m keys before token `end` are real; None: all of them."""
        later = end - self.end
        if self.key_mask is None or later >= memory_length:
            return None
        # Widths below 0 cut: what lies before the memory, and what a crop has taken back.
        return F.pad(self.key_mask, (memory_length - self.key_mask.shape[1] - later, later), value=True)


class MemoryCache(DynamicCache):
    """A cache for the projected memory of every layer, empty at first.

    Its length is that of the text, without the memory from before the text, since `generate` skips so many tokens of
    its input. Rows are picked together with their masks.
    """

    def __init__(self, config: TransfoXLConfig, mem_len: int | None = None):
        """Args: config: the model's. mem_len: M ≥ 1, how much to remember. None: `config.mem_len`."""
        super().__init__(config=config)
        window = 1 + (config.mem_len if mem_len is None else mem_len)
        self.layers = [MemoryCacheLayer(window) for _ in range(config.n_layer)]
        self.decoding_state = DecodingState()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) - self.decoding_state.initial_length

    def reset(self):
        super().reset()
        self.decoding_state = DecodingState()

    def reorder_cache(self, beam_idx: Tensor):
        super().reorder_cache(beam_idx)
        self._pick_masks(lambda mask: mask.index_select(0, beam_idx.to(mask.device)))

    def batch_select_indices(self, indices: Tensor):
        super().batch_select_indices(indices)
        self._pick_masks(lambda mask: mask[indices])

    def batch_repeat_interleave(self, repeats: int):
        super().batch_repeat_interleave(repeats)
        self._pick_masks(lambda mask: mask.repeat_interleave(repeats, dim=0))

    def _pick_masks(self, pick: Callable[[Tensor], Tensor]):
        if self.decoding_state.key_mask is not None:
            self.decoding_state.key_mask = pick(self.decoding_state.key_mask)


def decoding_state_of(cache: Cache) -> DecodingState:
    """The state on any cache; one without anything where the cache has none."""
    if not hasattr(cache, "decoding_state"):
        # The cache was filled by another process or program.
        cache.decoding_state = DecodingState()
    return cache.decoding_state


def text_length(cache: Cache) -> int:
    """How many tokens the cache has seen besides the memory that it started from."""
    length = cache.get_seq_length()
    return length if isinstance(cache, MemoryCache) else length - decoding_state_of(cache).initial_length


def remember_key_mask(cache: Cache, key_mask: Tensor | None) -> None:
    """Keep what a segment's keys were masked by, (B, m + L) bool or None, once the cache has taken them."""
    if not _is_compiled_with(cache):
        state = decoding_state_of(cache)
        state.key_mask, state.end = key_mask, text_length(cache)


def cached_key_mask(
    attention_mask: Tensor | None, cache: Cache, mem_len: int, batch_size: int, segment_length: int
) -> tuple[int, Tensor | None]:
    """m and which of the m + L keys are real, (B, m + L) bool or None, for a cache that holds a memory."""
    memory_length = min(cache.get_mask_sizes(segment_length, 0)[0] - segment_length, mem_len)
    key_length, seen = memory_length + segment_length, text_length(cache)
    if _is_compiled_with(cache):
        # `prepare_inputs_for_generation` was here before.
        memory_mask = None
    else:
        memory_mask = decoding_state_of(cache).memory_mask(seen, memory_length)
    lengths = (segment_length, key_length, seen + segment_length)
    longer = memory_length == mem_len
    return memory_length, make_key_mask(
        attention_mask, memory_mask, batch_size, segment_length, memory_length, lengths, longer
    )


def _is_compiled_with(cache: Cache) -> bool:
    """Whether this is part of a graph with one shape for every step, which has no room for numbers that count."""
    return torch.compiler.is_compiling() and cache.is_compileable


def make_key_mask(
    attention_mask: Tensor | None,
    memory_mask: Tensor | None,
    batch_size: int,
    segment_length: int,
    memory_length: int,
    lengths: tuple[int, ...],
    longer: bool = False,
) -> Tensor | None:
    """Which of the m + L keys are real: (B, m + L) bool, or None for all of them.

    Args:
        attention_mask: (B, n), 1 = real, for the last n of the keys, or for more than the keys. None: all real.
        memory_mask: (B, m) bool, what the memory itself says. None: all real.
        lengths: the n that are right here. longer: whether any n beyond m + L is.

    Raises:
        ValueError: the mask has another shape.
    """
    if attention_mask is None:
        return None if memory_mask is None else F.pad(memory_mask, (0, segment_length), value=True)
    key_length = memory_length + segment_length
    length = attention_mask.shape[-1]
    fits = length in lengths or (longer and length > key_length)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or not fits:
        expected = " or ".join(f"({batch_size}, {n})" for n in sorted(set(lengths)))
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, but a segment of {segment_length} after a memory of "
            f"{memory_length} needs {expected}"
        )
    mask = attention_mask[:, -key_length:].bool()
    mask = F.pad(mask, (key_length - mask.shape[1], 0), value=True)
    if memory_mask is not None:
        mask = mask & F.pad(memory_mask, (0, segment_length), value=True)
    return mask
