"""The memory as hidden states: how a call reads and updates it, its mask and its lengths.

The memory of a call is `mems`, for each layer the states (B, m, D) that entered it before, and `mems_mask`, (B, m)
bool, which of them are real; None: all. Others are NaN, so that a call without the mask gives an error or NaN, never a
plausible number; with the mask they are read as zeros and hidden from every query.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, D = `d_model`, H heads,
Dh = `d_head`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from .attention_transfo_xl import BACKENDS, find_backend, hidden_keys
from .cache_transfo_xl import (
    DecodingState,
    ProjectedMemory,
    attach_state,
    cached_key_mask,
    check_cache,
    clear_hidden,
    clear_keys,
    decoding_state_of,
    held_keys,
    is_filled,
    remembered_mask,
    static_address,
    stop_gradients,
    text_length,
)
from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import OpenPadding, can_look, drop_idle_mask, make_key_mask, zeros_in_front


class FilledLengths(Protocol):
    """The lengths of one call, none of them None: a configuration, or a result of `MemoryLengths.of`."""

    mem_len: int
    ext_len: int
    clamp_len: int
    same_length: bool


@dataclass(frozen=True)
class MemoryLengths:
    """The lengths of memory and context in one call, so that threads can share a model and use different ones.

    Attributes:
        mem_len, ext_len, clamp_len, same_length: as in `TransfoXLConfig`. None: the configuration's.

    Raises:
        ValueError: a length is no integer (True is none), or same_length is neither True nor False.
    """

    mem_len: int | None = None
    ext_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None

    def __post_init__(self):
        for name in ("mem_len", "ext_len", "clamp_len"):
            length = getattr(self, name)
            if length is not None and (isinstance(length, bool) or not isinstance(length, Integral)):
                raise ValueError(f"{name}={length!r} must be an integer")
        if not isinstance(self.same_length, bool | None):
            raise ValueError(f"same_length={self.same_length!r} must be True or False")

    def of(self, config: TransfoXLConfig) -> FilledLengths:
        """These lengths, and the configuration's for those that are None.

        Raises:
            ValueError: `self` has another type, a length is negative, or the model's positions allow no memory.
        """
        # By name, because a copy of the class may have come with the weights.
        if type(self).__name__ != MemoryLengths.__name__:
            raise ValueError(
                f"lengths must be a txl_hf.MemoryLengths, not a {type(self).__name__}; a column of that name in a "
                "data set is given to the model as it is: rename it, or remove it"
            )
        given = {name: getattr(self, name) for name in ("mem_len", "ext_len", "clamp_len", "same_length")}
        filled: Any = MemoryLengths(**{k: getattr(config, k) if v is None else v for k, v in given.items()})
        config.check_lengths(mem_len=filled.mem_len, ext_len=filled.ext_len)
        return filled


class Memory(NamedTuple):
    """The memory that precedes a segment, with the mask of the call's keys.

    Attributes:
        states: for each layer (B, m, D), as given; None where there is no memory or a cache holds it.
        length: m.
        key_mask: (B, m + L) bool, which keys are real; None: all.
        begins: whether all texts begin with this segment.
        front: the result of `zeros_in_front`, with `initial_memory="zeros"` alone.
        is_covered: whether the call's `attention_mask` has a column for each key.
        older_mask: (B, n) bool or None, which keys of a cache before the last m are real, for longer memories.
    """

    states: Sequence[Tensor | None]
    length: int
    key_mask: Tensor | None
    begins: bool
    front: Tensor | None
    is_covered: bool
    older_mask: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """Inputs of a call beside its hidden states: made by `Segment.open` at the beginning, and only read afterwards.

    Attributes:
        length, key_length: L and m + L.
        cache: receives the keys and values of the call, or None.
        memory_mask: (B, m) bool, which states of the memory are real; None: all.
        text_mask: (B, m + L) bool, which keys the memory keeps as real; None: all.
        key_mask: (B, m + L) bool, which keys queries see; None: all. It differs from `text_mask` with `padding` alone.
        padding: see `OpenPadding`; None without a mask, and with `initial_memory="empty"`.
        first_key: (B, L) int, see `AttentionInputs`.
        implementation, attention: the backend's name and the fields of `AttentionInputs` that all layers share.
    """

    lengths: FilledLengths
    length: int
    key_length: int
    memory: Memory
    cache: Cache | None
    memory_mask: Tensor | None
    text_mask: Tensor | None
    key_mask: Tensor | None
    padding: OpenPadding | None
    first_key: Tensor | None
    implementation: str
    attention: dict[str, Any]

    @classmethod
    def open(
        cls,
        config: TransfoXLConfig,
        lengths: FilledLengths,
        embeds: Tensor,
        mems: tuple[Tensor, ...] | None,
        mems_mask: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        resets: Tensor | None,
        wants_attentions: bool,
    ) -> "Segment":
        """The record of a call; arguments as in `TransfoXLModel.forward`, which raises the same errors, with `embeds`,
        (B, L, D). `wants_attentions`: whether probabilities are returned, in order of time, as eager alone does."""
        implementation = "eager" if wants_attentions else config._attn_implementation
        backend = BACKENDS.get(implementation) or find_backend(implementation)
        if cache is not None:
            check_cache(cache, config, lengths.mem_len, embeds)
        if cache is not None and is_filled(cache):
            check_one_memory(mems, mems_mask)
            memory = _open_cache(config, lengths.mem_len, embeds, attention_mask, cache)
        else:
            memory = _open_states(config, lengths.mem_len, embeds, mems, mems_mask, attention_mask, cache)
        m, length, text_mask, first_key = memory.length, embeds.shape[1], memory.key_mask, None
        if resets is not None:
            text_mask, first_key = _begin_documents(text_mask, resets, m)
        key_mask = text_mask = None if text_mask is None else drop_idle_mask(text_mask)
        padding, memory_mask = None, None if text_mask is None else text_mask[:, :m]
        if text_mask is not None and m > 0 and config.initial_memory == "zeros":
            padding = OpenPadding.of(text_mask, m, memory.begins, memory.front)
            key_mask, text_mask = drop_idle_mask(padding.seen), padding.real
        # `same_length` gives every query as many keys as the memory is long; without a memory that would be none.
        limited = lengths.same_length and lengths.mem_len > 0
        window = lengths.mem_len - config.same_length_counts_self if limited else None
        order = hidden = None
        if isinstance(cache, ProjectedMemory):
            may_differ = backend.follows_order and first_key is None and not wants_attentions
            order = cache.order_of_keys(length, m + length, may_differ)
        if backend.needs_hidden:
            hidden = hidden_keys(length, m + length, window, key_mask, embeds.device, first_key, order)
        attention = {"window": window, "order": order, "hidden": hidden, "key_mask": key_mask, "first_key": first_key}
        masks = (memory_mask, text_mask, key_mask, padding, first_key)
        return cls(lengths, length, m + length, memory, cache, *masks, implementation, attention)

    def memory_of(self, layer: int, states: Tensor) -> Tensor | None:
        """A layer's memory, (B, m, D), on the device and in the dtype of `states`, with zeros where it is not real,
        because NaN times an attention weight of 0 is NaN; None where there is none."""
        memory = self.memory.states[layer]
        if memory is not None:
            memory = memory.to(states.device, states.dtype)
            memory = memory if self.memory_mask is None else hide_states(memory, self.memory_mask)
        return memory

    def real_after(self, tokens: int) -> Tensor | None:
        """Which keys are real after `tokens` tokens, without earlier documents: (B, m + L) bool; None: all."""
        if self.padding is not None:
            # A row with padding alone so far keeps no real state, so that the next segment is its first.
            return self.padding.real & ~self.padding.waiting[:, tokens : tokens + 1]
        if self.first_key is None or tokens == 0:
            return self.text_mask
        first_key = self.first_key[:, tokens - 1 : tokens]
        kept = torch.arange(self.key_length, device=first_key.device) >= first_key
        return kept if self.text_mask is None else kept & self.text_mask

    def remember(self, memory: Sequence[Any], entered: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """`mems` and `mems_mask`: the last M of the m + L states of each layer, (B, m, D) of `memory` and (B, L, D) of
        `entered`, without the last ext_len of the segment (Section 3.2); NaN where they are not real."""
        m, lengths = self.memory.length, self.lengths
        end = m + max(0, self.length - lengths.ext_len)
        start = max(0, end - lengths.mem_len)
        if start == m and end == start + self.length:
            # The memory becomes this segment; a copy, because the first input may be the caller's `inputs_embeds`.
            mems = (entered[0].clone(), *entered[1:])
        else:
            mems = tuple(
                torch.cat([old[:, start:], new[:, max(0, start - m) : end - m]], dim=1)
                for old, new in zip(memory, entered, strict=True)
            )
        if not torch.is_grad_enabled():
            mems = tuple(states.detach() for states in mems)
        # Without the last ext_len tokens' documents, because the next call reads these and their `resets` again.
        mask = self.text_mask
        if mask is not None or self.first_key is not None:
            mask = self.real_after(end - m)
        mems_mask = None if mask is None else drop_idle_mask(mask[:, start:end])
        if mems_mask is None:
            return mems, None
        # A copy, because the caller may set a row to False to begin it afresh.
        mems_mask, hidden = mems_mask.clone(), ~mems_mask[..., None]
        return tuple(states.masked_fill(hidden.to(states.device), torch.nan) for states in mems), mems_mask

    def remember_in_cache(self) -> None:
        """Store in the cache which of its keys, those of the call included, are real."""
        cache, mask = self.cache, self.real_after(self.length)
        assert cache is not None
        state = decoding_state_of(cache)
        if self.padding is not None and not torch.compiler.is_compiling():
            new = self.padding.waiting[:, 1:].sum(dim=1)
            state.padding = new if state.padding is None else state.padding + new
        if (older := self.memory.older_mask) is not None:
            if self.first_key is not None:
                older = older & (self.first_key[:, -1:] == 0)
            mask = torch.cat([older, older.new_ones(len(older), self.key_length) if mask is None else mask], dim=1)
        if self.first_key is not None and mask is not None:
            clear_keys(cache, ~mask)
        if torch.is_grad_enabled():
            stop_gradients(cache)
        if isinstance(cache, ProjectedMemory):
            cache.end_call(self.lengths.mem_len)
        if not cache.is_compileable:
            state.key_mask, state.end = drop_idle_mask(mask), text_length(cache)
            return
        if mask is not None:
            mask = drop_idle_mask(mask[:, 1 - cache.layers[0].max_cache_len :])
        if mask is None:
            state.key_mask = None
        elif not torch.compiler.is_compiling():
            # A copy, because a graph writes into it; contiguous, because the graph is compiled for these strides.
            state.key_mask = static_address(mask.clone(memory_format=torch.contiguous_format))
        elif state.key_mask is not None and state.key_mask.shape == mask.shape:
            state.key_mask.copy_(mask)
        elif self.first_key is not None or not self.memory.is_covered:
            # Otherwise the caller gives a mask of all keys with every token, as `generate` does, which is not stored,
            # because a graph cannot check whether it hides anything.
            state.key_mask = mask


def _open_cache(
    config: TransfoXLConfig, mem_len: int, embeds: Tensor, attention_mask: Tensor | None, cache: Cache
) -> Memory:
    """The memory of a call that continues a cache, where keys that it hides are cleared."""
    (rows, length, _), held, zeros = embeds.shape, held_keys(cache, embeds.shape[1]), config.initial_memory == "zeros"
    real, front, older_mask = remembered_mask(cache, held), None, None
    m, mask = cached_key_mask(attention_mask, cache, mem_len, rows, length, real)
    if mask is not None and (attention_mask is not None or zeros) and not torch.compiler.is_compiling():
        front = clear_hidden(cache, mask, attention_mask, length, config)
    if held > m:
        older_mask = embeds.new_ones(rows, held - m, dtype=torch.bool) if real is None else real[:, : held - m]
    is_covered = attention_mask is not None and attention_mask.shape[-1] >= m + length
    return Memory((None,) * config.n_layer, m, mask, False, front, is_covered, older_mask)


def _open_states(
    config: TransfoXLConfig,
    mem_len: int,
    embeds: Tensor,
    mems: tuple[Tensor, ...] | None,
    mems_mask: Tensor | None,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Memory:
    """The memory of a call with `mems` or at a text's beginning, which fills a cache if there is one."""
    rows, length = embeds.shape[:2]
    begins = mems is None and mems_mask is None
    if begins:
        mems = initial_memory(config, mem_len, rows, embeds.dtype, embeds.device)
    else:
        _check_mems(mems, mems_mask, config, mem_len, rows)
    m = 0 if mems is None else mems[0].shape[1]
    is_static, mask, front = cache is not None and cache.is_compileable, None, None
    columns = 0 if attention_mask is None else attention_mask.shape[-1]
    if attention_mask is not None or mems_mask is not None:
        if is_static and attention_mask is not None and columns == mem_len + length:
            # Columns of absent states are dropped, because a static cache starts full and the mask has its length.
            attention_mask = attention_mask[..., mem_len - m :]
        mems_mask, zeros = None if mems_mask is None else mems_mask.to(embeds.device), config.initial_memory == "zeros"
        fewer, more = not begins and zeros, not begins and m == mem_len
        mask = make_key_mask(attention_mask, mems_mask, rows, length, m, fewer=fewer, more=more)
        front = zeros_in_front(attention_mask, length, m + length, mems_mask) if zeros else None
    if is_static and m < mem_len:
        # Masked states fill the cache in front of the given ones.
        mask = embeds.new_ones(rows, m + length, dtype=torch.bool) if mask is None else mask
        mask = F.pad(mask, (mem_len - m, 0), value=False)
        mems, m = tuple(F.pad(states, (0, 0, mem_len - m, 0)) for states in mems or ()), mem_len
    if cache is not None:
        attach_state(cache, DecodingState(initial_length=m))
    return Memory(mems or (None,) * config.n_layer, m, mask, begins, front, columns >= m + length)


def _begin_documents(text_mask: Tensor | None, resets: Tensor, m: int) -> tuple[Tensor | None, Tensor]:
    """The mask of keys, (B, m + L) or None, and the first key of each token, (B, L), by `resets`, (B, L) bool."""
    positions = torch.arange(m, m + resets.shape[1], device=resets.device)
    first_key = torch.where(resets, positions, 0).cummax(dim=1).values
    if m > 0:
        # The memory of a row that begins with a document is hidden, whatever its states are.
        remembers = F.pad(~resets[:, :1].expand(-1, m), (0, resets.shape[1]), value=True)
        text_mask = remembers if text_mask is None else text_mask & remembers
    return text_mask, first_key


def check_one_memory(mems: tuple[Tensor, ...] | None, mems_mask: Tensor | None) -> None:
    """Raise a ValueError for mems, or their mask, beside a cache that is filled."""
    if mems is not None or mems_mask is not None:
        name = "mems_mask" if mems is None else "mems"
        raise ValueError(f"give {name} or past_key_values that hold a memory already, not both")


def split_mask(
    config: TransfoXLConfig,
    mem_len: int,
    inputs: Tensor,
    mems: tuple[Tensor, ...],
    mems_mask: Tensor | None,
    attention_mask: Tensor,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """`mems`, `mems_mask` and `attention_mask`, (B, L), from a mask of mems and text, `inputs` (B, L, …), together."""
    memory = _open_states(config, mem_len, inputs, mems, mems_mask, attention_mask, None)
    m, mask, front = memory.length, memory.key_mask, memory.front
    assert mask is not None, "made of an attention_mask"
    if front is not None:
        mask, mems = mask | front, tuple(hide_states(states, ~front[:, :m]) for states in mems)
    return mems, mask[:, :m], mask[:, m:].to(attention_mask.dtype)


def initial_memory(
    config: TransfoXLConfig, mem_len: int, batch_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...] | None:
    """The memory before the first segment: n_layer tensors (B, M, D) of zeros or (B, 0, D), or None if M = 0."""
    if mem_len == 0:
        return None
    length = mem_len if config.initial_memory == "zeros" else 0
    return (torch.zeros(batch_size, length, config.d_model, dtype=dtype, device=device),) * config.n_layer


def hide_states(states: Tensor, mask: Tensor) -> Tensor:
    """(B, n, D) with zeros, also in place of NaN, where the mask (B, n) is False."""
    return torch.where(mask[..., None].to(states.device), states, 0)


def _check_mems(
    mems: tuple[Tensor, ...] | None, mems_mask: Tensor | None, config: TransfoXLConfig, mem_len: int, rows: int
) -> None:
    """Raise a ValueError for mems, or their mask, that do not fit the model or the batch."""
    if mems is None:
        raise ValueError("mems_mask was given without the mems that it is of")
    if mem_len == 0:
        raise ValueError("mems were given, but mem_len=0 means that there is no memory")
    if len(mems) != config.n_layer:
        raise ValueError(f"mems hold {len(mems)} layers, but the model has n_layer={config.n_layer}")
    for i, states in enumerate(mems):
        if states.dim() != 3 or (states.shape[0], states.shape[2]) != (rows, config.d_model):
            raise ValueError(f"mems[{i}] is {tuple(states.shape)}, but this batch needs ({rows}, m, {config.d_model})")
        if states.shape[1] != mems[0].shape[1] or states.shape[1] > mem_len:
            raise ValueError(
                f"mems[{i}] holds {states.shape[1]} states, but all layers need the same number, "
                f"{mem_len} (mem_len) at most"
            )
        if not states.is_floating_point():
            raise ValueError(f"mems[{i}] is {states.dtype}, no floating-point states")
    if mems_mask is None:
        if can_look(mems[0]) and (missing := mems[0][..., 0].float().isnan()).any():
            row, position = missing.nonzero()[0].tolist()
            raise ValueError(
                f"mems hold NaN, in row {row} at state {position} first, but no mems_mask came with them: hand back "
                "mems_mask=outputs.mems_mask with mems=outputs.mems, since padded states are NaN; where nothing was "
                "padded, the states overflowed: txl_hf.mask_overflow(mems) gives the mask that hides them"
            )
    elif mems_mask.dtype != torch.bool or mems_mask.shape != mems[0].shape[:2]:
        raise ValueError(
            f"mems_mask is {tuple(mems_mask.shape)} of {mems_mask.dtype}, but these mems need "
            f"{tuple(mems[0].shape[:2])} bool"
        )
