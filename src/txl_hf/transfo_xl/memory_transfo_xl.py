"""The memory as hidden states: how a call reads and updates it, its mask and its lengths.

The memory of a call is `mems`, for each layer the states (B, m, D) that entered it before, and `mems_mask`, (B, m)
bool, which of them are real; None: all. A state that is not real is NaN in every channel, so that a call without the
mask gives an error or NaN, never a plausible number. With the mask, such states are read as zeros and hidden from
every query.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, D = `d_model`, H heads,
Dh = `d_head`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from .attention_transfo_xl import BACKENDS, find_backend, hidden_keys
from .cache_transfo_xl import (
    DecodingState,
    StaticMemoryCache,
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
    """The lengths of memory and context in a call: fields of `TransfoXLConfig` that an evaluation may override.

    An argument of a call, so that threads can share a model and use different lengths.

    Attributes:
        mem_len, ext_len, clamp_len, same_length: as in the configuration. None: the configuration's.

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
        """The lengths of a call of a model: these, and the configuration's for those that are None.

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


@dataclass(frozen=True)
class Segment:
    """Inputs of a call beside its hidden states: made by `Segment.open` at the beginning, and only read afterwards.

    Attributes:
        lengths: of the call, none of them None.
        length, memory_length, key_length: L, m and K.
        memory: for each layer the states (B, m, D) that entered it before, as they were given; None where there is no
            memory or `cache` holds it.
        cache: receives the keys and values of the call, or None.
        memory_mask: (B, m) bool, which states of the memory are real; None: all.
        text_mask: (B, m + L) bool, which keys the memory keeps as real; None: all.
        padding: padding in front of texts that zero states precede; None: there is none.
        first_key: (B, L) int, the first key that each token sees, of its document; None: 0.
        older_mask: (B, n) bool or None, which keys of `cache` before the last m are real, for longer memories.
        attention: arguments of `relative_attention` that all layers share.
        key_mask: (B, m + L) bool, which keys queries see; None: all. The same as `text_mask`, except for padding in
            front of a text that zero states precede: `OpenPadding.seen`.
    """

    lengths: FilledLengths
    length: int
    memory_length: int
    key_length: int
    memory: tuple[Tensor | None, ...]
    cache: Cache | None
    memory_mask: Tensor | None
    text_mask: Tensor | None
    padding: OpenPadding | None
    first_key: Tensor | None
    older_mask: Tensor | None
    attention: dict[str, Any]
    key_mask: Tensor | None

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
        """The record of a call; arguments as in `TransfoXLModel.forward`.

        Args:
            lengths: filled. embeds: (B, L, D). resets: (B, L) bool, where documents begin; None: nowhere.
            wants_attentions: whether probabilities are returned, in order of time, which eager alone does.

        Raises:
            ValueError: the memory or a mask does not fit the model or the segment.
        """
        implementation = "eager" if wants_attentions else config._attn_implementation
        backend = BACKENDS.get(implementation) or find_backend(implementation)
        batch_size, length, _ = embeds.shape
        filled, older_mask, front = cache is not None and is_filled(cache), None, None
        if cache is not None:
            check_cache(cache, config, lengths.mem_len, embeds)
        if filled:
            check_one_memory(mems, mems_mask)
            held = remembered_mask(cache, held_keys(cache, length))
            m, text_mask = cached_key_mask(attention_mask, cache, lengths.mem_len, batch_size, length, held)
            hides = attention_mask is not None or config.initial_memory == "zeros"
            if hides and text_mask is not None and not torch.compiler.is_compiling():
                front = clear_hidden(cache, text_mask, attention_mask, length, config)
            if (older := held_keys(cache, length) - m) > 0:
                older_mask = embeds.new_ones(batch_size, older, dtype=torch.bool) if held is None else held[:, :older]
            memory: tuple[Tensor | None, ...] = (None,) * config.n_layer
        else:
            memory, text_mask = _open_states(config, lengths, embeds, mems, mems_mask, attention_mask, cache)
            m = 0 if memory[0] is None else memory[0].shape[1]
        first_key = None
        if resets is not None:
            text_mask, first_key = _begin_documents(text_mask, resets, m)
        key_mask = text_mask = None if text_mask is None else drop_idle_mask(text_mask)
        padding, memory_mask = None, None if text_mask is None else text_mask[:, :m]
        if text_mask is not None and m > 0 and config.initial_memory == "zeros":
            if not filled:
                states = m if mems is None else mems[0].shape[1]
                front = zeros_in_front(attention_mask, length, states + length, mems_mask)
            padding = OpenPadding.of(text_mask, m, not filled and mems is None, front)
            key_mask, text_mask = drop_idle_mask(padding.seen), padding.real
        # `same_length` gives every query as many keys as the memory is long; without a memory that would be none.
        limited = lengths.same_length and lengths.mem_len > 0
        window = lengths.mem_len - config.same_length_counts_self if limited else None
        order = hidden = None
        if isinstance(cache, StaticMemoryCache):
            can_turn = backend.follows_order and first_key is None and not wants_attentions
            order = cache.order_of_keys(length, m + length, can_turn)
        if backend.needs_hidden:
            hidden = hidden_keys(length, m + length, window, key_mask, embeds.device, first_key, order)
        attention = {
            "implementation": implementation,
            "key_mask": key_mask,
            "window": window,
            "first_key": first_key,
            "order": order,
            "hidden": hidden,
        }
        masks = (memory_mask, text_mask, padding, first_key, older_mask)
        return cls(lengths, length, m, m + length, memory, cache, *masks, attention, key_mask)

    def memory_of(self, layer: int, states: Tensor) -> Tensor | None:
        """A layer's memory, (B, m, D), on the device and in the dtype of `states`; None where there is none.

        States that are not real are zeros here, because NaN times an attention weight of 0 is NaN.
        """
        memory = self.memory[layer]
        if memory is None:
            return None
        memory = memory.to(states.device, states.dtype)
        return memory if self.memory_mask is None else hide_states(memory, self.memory_mask)

    def real_after(self, tokens: int) -> Tensor | None:
        """Which of the m + L keys are real after the first `tokens` tokens, without earlier documents: (B, m + L)
        bool; None: all."""
        if self.padding is not None:
            # A row with padding alone so far keeps no real state, so that the next segment is its first.
            return self.padding.real & self.padding.begun[:, tokens : tokens + 1]
        if self.first_key is None or tokens == 0:
            return self.text_mask
        first_key = self.first_key[:, tokens - 1 : tokens]
        kept = torch.arange(self.key_length, device=first_key.device) >= first_key
        return kept if self.text_mask is None else kept & self.text_mask

    def remember(self, memory: Sequence[Any], entered: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The last M of the m + L states of each layer, without the last ext_len of the segment (Section 3.2).

        Args:
            memory, entered: n_layer tensors each, (B, m, D) and (B, L, D), that entered the layers.

        Returns:
            `mems`, NaN where they are not real, with a graph where gradients are enabled, and `mems_mask`. No state is
            copied that need not be.
        """
        m, lengths = self.memory_length, self.lengths
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
        # Without documents of the last ext_len tokens, because the next call reads these and their `resets` again.
        mask = self.text_mask
        if mask is not None or self.first_key is not None:
            mask = self.real_after(end - m)
        mems_mask = None if mask is None else drop_idle_mask(mask[:, start:end])
        if mems_mask is None:
            return mems, None
        # A copy, because the caller may set a row to False to begin it afresh.
        mems_mask = mems_mask.clone()
        return tuple(_mark(states, mems_mask) for states in mems), mems_mask

    def remember_in_cache(self, attention_mask: Tensor | None) -> None:
        """Store in the cache, after the keys of the call, which of its keys are real.

        Args:
            attention_mask: the call's argument.
        """
        cache, mask = self.cache, self.real_after(self.length)
        assert cache is not None
        state = decoding_state_of(cache)
        if self.padding is not None and not torch.compiler.is_compiling():
            new = self.padding.tokens.sum(dim=1)
            state.padding = new if state.padding is None else state.padding + new
        if self.older_mask is not None:
            older = self.older_mask
            if self.first_key is not None:
                older = older & (self.first_key[:, -1:] == 0)
            mask = torch.cat([older, older.new_ones(len(older), self.key_length) if mask is None else mask], dim=1)
        if self.first_key is not None and mask is not None:
            clear_keys(cache, ~mask)
        if torch.is_grad_enabled():
            stop_gradients(cache)
        if not cache.is_compileable:
            state.key_mask, state.end = drop_idle_mask(mask), text_length(cache)
            return
        state.crop_distances(1 + self.lengths.mem_len)
        if mask is not None:
            mask = drop_idle_mask(mask[:, 1 - cache.layers[0].max_cache_len :])
        if mask is None:
            state.key_mask = None
        elif not torch.compiler.is_compiling():
            # A copy, because a graph writes into it; contiguous, because the graph is compiled for these strides.
            state.key_mask = static_address(mask.clone(memory_format=torch.contiguous_format))
        elif state.key_mask is not None and state.key_mask.shape == mask.shape:
            state.key_mask.copy_(mask)
        elif self.first_key is not None or attention_mask is None or attention_mask.shape[1] < self.key_length:
            # Otherwise none is stored, because the caller gives a mask of all keys with every token, as `generate`
            # does, and a graph cannot check whether it hides anything.
            state.key_mask = mask


def _open_states(
    config: TransfoXLConfig,
    lengths: FilledLengths,
    embeds: Tensor,
    mems: tuple[Tensor, ...] | None,
    mems_mask: Tensor | None,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """The states of the memory, and the mask of the m + L keys, of a call with `mems` or at a text's beginning."""
    (batch_size, length, _), mem_len = embeds.shape, lengths.mem_len
    given = mems is not None or mems_mask is not None
    states = mems if given else initial_memory(config, mem_len, batch_size, embeds.dtype, embeds.device)
    if states is None and not given:
        return (None,) * config.n_layer, make_key_mask(attention_mask, None, batch_size, length, 0, (length,))
    m = 0 if states is None else states[0].shape[1]
    is_static = cache is not None and cache.is_compileable
    if is_static and attention_mask is not None and attention_mask.shape[-1] == mem_len + length:
        # Columns of absent states are dropped, because a static cache starts full and the mask has its length.
        attention_mask = attention_mask[..., mem_len - m :]
    if given:
        mask = mask_of_mems(attention_mask, mems_mask, mems, (batch_size, length), embeds.device, config, mem_len)
    else:
        mask = make_key_mask(attention_mask, None, batch_size, length, m, (length, m + length))
    if is_static and m < mem_len:
        # Masked states fill the cache in front of the given ones.
        if mask is None:
            mask = embeds.new_ones(batch_size, m + length, dtype=torch.bool)
        mask = F.pad(mask, (mem_len - m, 0), value=False)
        states = tuple(F.pad(of_layer, (0, 0, mem_len - m, 0)) for of_layer in states or ())
        m = mem_len
    if cache is not None:
        attach_state(cache, DecodingState(initial_length=m))
    assert states is not None, "mask_of_mems refuses a mask without mems"
    return states, mask


def _begin_documents(text_mask: Tensor | None, resets: Tensor, m: int) -> tuple[Tensor | None, Tensor]:
    """The mask of keys, (B, m + L) or None, and the first key of each token, (B, L), for documents that begin where
    `resets`, (B, L) bool, is True."""
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


def mask_of_mems(
    attention_mask: Tensor | None,
    mems_mask: Tensor | None,
    mems: tuple[Tensor, ...] | None,
    shape: tuple[int, int],
    device: torch.device,
    config: TransfoXLConfig,
    mem_len: int,
) -> Tensor | None:
    """`make_key_mask` for a segment of this shape, (B, L), after mems, (B, m, D), for which masks may have columns.

    Raises:
        ValueError: the mems or a mask do not fit the model or the segment.
    """
    _check_mems(mems, mems_mask, config, mem_len, shape[0])
    if mems is None or (attention_mask is None and mems_mask is None):
        return None
    (batch_size, segment_length), memory_length = shape, mems[0].shape[1]
    mems_mask = None if mems_mask is None else mems_mask.to(device)
    columns: Collection[int] = (segment_length, memory_length + segment_length)
    if attention_mask is not None and config.initial_memory == "zeros":
        # Fewer columns than keys are valid, for a text shorter than its memory, because zeros precede it. Only with a
        # mask, because a range would bind an exported graph to one length.
        columns = range(segment_length, memory_length + segment_length + 1)
    more = 1 + memory_length + segment_length if memory_length == mem_len else None
    return make_key_mask(attention_mask, mems_mask, batch_size, segment_length, memory_length, columns, more)


def split_mask(
    attention_mask: Tensor,
    mems_mask: Tensor | None,
    mems: tuple[Tensor, ...],
    config: TransfoXLConfig,
    mem_len: int,
    length: int,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """`mems`, `mems_mask` and `attention_mask`, (B, length), from a mask of mems and text together.

    Raises:
        ValueError: as in a forward.
    """
    shape = len(attention_mask), length
    key_mask = mask_of_mems(attention_mask, mems_mask, mems, shape, attention_mask.device, config, mem_len)
    assert key_mask is not None, "made of an attention_mask"
    front = zeros_in_front(attention_mask, length, key_mask.shape[1], mems_mask)
    if front is not None and config.initial_memory == "zeros":
        key_mask, mems = key_mask | front, tuple(hide_states(states, ~front[:, :-length]) for states in mems)
    return mems, key_mask[:, :-length], key_mask[:, -length:].to(attention_mask.dtype)


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


def _mark(states: Tensor, mask: Tensor) -> Tensor:
    """NaN in every channel of (B, m, D) where the mask (B, m) is False."""
    return states.masked_fill(~mask[..., None].to(states.device), torch.nan)


def _check_mems(
    mems: tuple[Tensor, ...] | None,
    mems_mask: Tensor | None,
    config: TransfoXLConfig,
    mem_len: int,
    batch_size: int,
):
    if mems is None:
        raise ValueError("mems_mask was given without the mems that it is of")
    if mem_len == 0:
        raise ValueError("mems were given, but mem_len=0 means that there is no memory")
    if len(mems) != config.n_layer:
        raise ValueError(f"mems hold {len(mems)} layers, but the model has n_layer={config.n_layer}")
    for i, states in enumerate(mems):
        if states.dim() != 3 or (states.shape[0], states.shape[2]) != (batch_size, config.d_model):
            raise ValueError(
                f"mems[{i}] is {tuple(states.shape)}, but this batch needs ({batch_size}, m, {config.d_model})"
            )
        if states.shape[1] != mems[0].shape[1] or states.shape[1] > mem_len:
            raise ValueError(
                f"mems[{i}] holds {states.shape[1]} states, but all layers need the same number, "
                f"{mem_len} (mem_len) at most"
            )
        if not states.is_floating_point():
            raise ValueError(f"mems[{i}] is {states.dtype}, no floating-point states")
    shape = mems[0].shape[:2]
    missing = mems[0][..., 0].float().isnan() if mems_mask is None and can_look(mems[0]) else None
    if missing is not None and missing.any():
        row, position = missing.nonzero()[0].tolist()
        raise ValueError(
            f"mems hold NaN, in row {row} at state {position} first, but no mems_mask came with them: hand back "
            "mems_mask=outputs.mems_mask with mems=outputs.mems, since padded states are NaN; where nothing was "
            "padded, the states overflowed: txl_hf.mask_overflow(mems) gives the mask that hides them"
        )
    if mems_mask is not None and (mems_mask.dtype != torch.bool or mems_mask.shape != shape):
        raise ValueError(
            f"mems_mask is {tuple(mems_mask.shape)} of {mems_mask.dtype}, but these mems need {tuple(shape)} bool"
        )
