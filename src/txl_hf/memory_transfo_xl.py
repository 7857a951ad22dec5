"""The memory as a thing of its own: how a call opens it and what it remembers, its mask, and the cache that holds it.

The memory of a call is `mems`, for each layer the states (B, m, D) that entered it before, and `mems_mask`, (B, m)
bool, which of them are real; None where all are. A state that is not real is NaN in every channel: whoever loses the
mask on the way gets an error or NaN, never a plausible number. Where the mask is there, hidden states are read as
zeros under a key mask, so that nothing of them spreads.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, D = `d_model`, H heads,
Dh = `d_head`.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .configuration_transfo_xl import TransfoXLConfig
from .positions_transfo_xl import KeptDistances
from .ring_transfo_xl import Ring, RingLayer

__all__ = [
    "CACHE_NAME",
    "DecodingState",
    "FilledLengths",
    "MemoryCache",
    "MemoryCacheLayer",
    "MemoryLengths",
    "OpenMemory",
    "StaticMemoryCache",
    "begin_documents",
    "cached_key_mask",
    "chosen_cache",
    "clear_hidden",
    "cloned_states",
    "decoding_state_of",
    "forget",
    "hide_states",
    "initial_memory",
    "is_filled",
    "latest_states",
    "mask_overflow",
    "memory_of",
    "open_memory",
    "order_of_keys",
    "real_states",
    "remember",
    "remember_key_mask",
    "text_length",
]

# The name under which `generate` passes a cache to a model and finds it in outputs: from transformers 5.24 on `cache`.
_BY_GENERATE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _BY_GENERATE else "past_key_values"


def chosen_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache that a call was given, by either of its names.

    Raises:
        ValueError: it was given by both, or is no cache of a decoder.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are two names of one thing: give one of them")
    given = past_key_values if cache is None else cache
    if given is not None and not (isinstance(given, Cache) and hasattr(given, "layers")):
        raise ValueError(
            f"past_key_values are of type {type(given).__name__}: give what a call with use_cache=True returned, or a "
            "new MemoryCache(model.config); states are mems="
        )
    return given


@dataclass(frozen=True)
class MemoryLengths:
    """How far a call remembers and sees: fields of `TransfoXLConfig` that an evaluation may choose anew.

    They are arguments of a call, so that threads can share a model and use different ones.

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


class OpenMemory(NamedTuple):
    """What a call reads beside its segment.

    Attributes:
        states: for each layer (B, m, D), as they were given, or None where there is no memory or a cache holds it.
        length: m.
        key_mask: (B, m + L) bool, which keys are real; None: all of them.
        first_key: (B, L), the first key that each token sees, of its document; None: 0.
        unread: how many keys a cache holds in front of the m, for calls of a longer memory.
    """

    states: tuple[Tensor | None, ...]
    length: int
    key_mask: Tensor | None
    first_key: Tensor | None = None
    unread: int = 0

    def of_layer(self, layer: int, segment: Tensor) -> Tensor | None:
        """(B, m, D) that a layer goes on from, None where there is none: where and as precise as its segment is.

        What is hidden is zeros: under a weight of 0 NaN would stay NaN.
        """
        states = self.states[layer]
        if states is None:
            return None
        states = states.to(segment.device, segment.dtype)
        if self.key_mask is None or self.length == 0:
            return states
        return hide_states(states, self.key_mask[:, : self.length])


def open_memory(
    config: TransfoXLConfig,
    lengths: FilledLengths,
    inputs_embeds: Tensor,
    mems: tuple[Tensor, ...] | None,
    mems_mask: Tensor | None,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> OpenMemory:
    """The memory that a segment, (B, L, D), goes on from; arguments as in `TransfoXLModel.forward`.

    Raises:
        ValueError: the memory or a mask does not fit the model or the segment.
    """
    batch_size, segment_length, _ = inputs_embeds.shape
    mem_len = lengths.mem_len
    if cache is not None and is_filled(cache):
        check_one_memory(mems, mems_mask)
        _check_rows(cache, batch_size)
        length, key_mask = cached_key_mask(attention_mask, cache, mem_len, batch_size, segment_length)
        if attention_mask is not None and not torch.compiler.is_compiling():
            clear_hidden(cache, key_mask, length)
        unread = _held(cache, segment_length) - length
        return OpenMemory((None,) * config.n_layer, length, drop_idle_mask(key_mask), unread=unread)

    if mems is not None or mems_mask is not None:
        _check_mems(mems, mems_mask, config, mem_len, batch_size)
    states = mems
    if states is None:
        states = initial_memory(config, mem_len, batch_size, inputs_embeds.dtype, inputs_embeds.device)
    if states is None:
        key_mask = make_key_mask(attention_mask, None, batch_size, segment_length, 0, (segment_length,))
        return OpenMemory((None,) * config.n_layer, 0, drop_idle_mask(key_mask))
    memory_length = states[0].shape[1]
    is_static = cache is not None and cache.is_compileable
    if is_static and attention_mask is not None and attention_mask.shape[-1] == mem_len + segment_length:
        # A static cache starts full, so that a mask of its length has columns of states that do not exist.
        attention_mask = attention_mask[..., mem_len - memory_length :]
    if mems is None:
        columns = (segment_length, memory_length + segment_length)
        key_mask = make_key_mask(attention_mask, None, batch_size, segment_length, memory_length, columns)
    else:
        if mems_mask is not None:
            mems_mask = mems_mask.to(inputs_embeds.device)
        key_mask = mask_of_mems(attention_mask, mems_mask, mems, segment_length, config, mem_len)
    if cache is not None:
        if is_static:
            _check_room(cache, mem_len)
            states, key_mask = _fill_up(states, key_mask, mem_len, inputs_embeds)
            memory_length = mem_len
        attach_state(cache, DecodingState(initial_length=memory_length))
    return OpenMemory(states, memory_length, drop_idle_mask(key_mask))


def check_one_memory(mems: tuple[Tensor, ...] | None, mems_mask: Tensor | None) -> None:
    """Raise a ValueError for mems, or their mask, beside a cache that is filled."""
    if mems is not None or mems_mask is not None:
        name = "mems_mask" if mems is None else "mems"
        raise ValueError(f"give {name} or past_key_values that hold a memory already, not both")


def mask_of_mems(
    attention_mask: Tensor | None,
    mems_mask: Tensor | None,
    mems: tuple[Tensor, ...],
    segment_length: int,
    config: TransfoXLConfig,
    mem_len: int,
) -> Tensor | None:
    """`make_key_mask` for a segment that goes on from mems, (B, m, D) each, which a mask may have columns of."""
    batch_size, memory_length = mems[0].shape[:2]
    columns: Collection[int] = (segment_length, memory_length + segment_length)
    if attention_mask is not None and config.initial_memory == "zeros":
        # Zeros precede the text, so that a mask of a text shorter than the memory has fewer columns than there are
        # keys. Without a mask nobody reads `columns`, and a range would bind an exported graph to one length.
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
) -> tuple[Tensor, Tensor]:
    """The `mems_mask` and the `attention_mask`, (B, length), of a mask that is of mems and text together.

    Raises:
        ValueError: as in a forward.
    """
    _check_mems(mems, mems_mask, config, mem_len, len(attention_mask))
    if mems_mask is not None:
        mems_mask = mems_mask.to(attention_mask.device)
    key_mask = mask_of_mems(attention_mask, mems_mask, mems, length, config, mem_len)
    assert key_mask is not None, "made of an attention_mask"
    return key_mask[:, :-length], key_mask[:, -length:].to(attention_mask.dtype)


def initial_memory(
    config: TransfoXLConfig, mem_len: int, batch_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...] | None:
    """What precedes the first segment: n_layer tensors (B, M, D) of zeros or (B, 0, D), or None if M = 0."""
    if mem_len == 0:
        return None
    length = mem_len if config.initial_memory == "zeros" else 0
    return (torch.zeros(batch_size, length, config.d_model, dtype=dtype, device=device),) * config.n_layer


def hide_states(states: Tensor, mask: Tensor) -> Tensor:
    """(B, n, D) with zeros, whatever there was, where the mask (B, n) is False."""
    return torch.where(mask[..., None].to(states.device), states, 0)


def begin_documents(memory: OpenMemory, resets: Tensor | None) -> OpenMemory:
    """The memory for a segment in which documents begin: where `resets`, (B, L) bool, is True."""
    if resets is None:
        return memory
    positions = torch.arange(memory.length, memory.length + resets.shape[1], device=resets.device)
    first_key = torch.where(resets, positions, 0).cummax(dim=1).values
    if memory.length == 0:
        return memory._replace(first_key=first_key)
    # A row that begins with a document reads nothing of its memory, whatever that holds.
    remembers = F.pad(~resets[:, :1].expand(-1, memory.length), (0, resets.shape[1]), value=True)
    key_mask = remembers if memory.key_mask is None else memory.key_mask & remembers
    return memory._replace(key_mask=drop_idle_mask(key_mask), first_key=first_key)


def forget(memory: OpenMemory, tokens: int) -> Tensor | None:
    """Which of the m + L keys are remembered after the first `tokens` of a segment: (B, m + L) bool; None: all."""
    if memory.first_key is None or tokens == 0:
        return memory.key_mask
    first_key = memory.first_key[:, tokens - 1 : tokens]
    kept = torch.arange(memory.length + memory.first_key.shape[1], device=first_key.device) >= first_key
    return kept if memory.key_mask is None else kept & memory.key_mask


@torch.no_grad()
def remember(
    opened: OpenMemory, memory: Sequence[Tensor], entered: Sequence[Tensor], lengths: FilledLengths
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The last M of the m + L states of each layer, without the last ext_len of the segment (Section 3.2).

    Args:
        opened: what the call went on from.
        memory, entered: n_layer tensors each, (B, m, D) and (B, L, D), that entered the layers.

    Returns:
        `mems`, NaN where they are not real, and `mems_mask`. No state is copied that need not be.
    """
    memory_length, segment_length = memory[0].shape[1], entered[0].shape[1]
    end = memory_length + max(0, segment_length - lengths.ext_len)
    start = max(0, end - lengths.mem_len)
    if start == memory_length and end == start + segment_length:
        # The segment is the memory. What entered the first layer may be the caller's, who may write there again.
        mems = (entered[0].detach().clone(), *(states.detach() for states in entered[1:]))
    else:
        mems = tuple(
            torch.cat([old[:, start:], new[:, max(0, start - memory_length) : end - memory_length]], dim=1).detach()
            for old, new in zip(memory, entered, strict=True)
        )
    # Tokens that are read again tell again where their documents begin.
    key_mask = forget(opened, end - memory_length)
    mems_mask = None if key_mask is None else drop_idle_mask(key_mask[:, start:end])
    if mems_mask is None:
        return mems, None
    # The caller gets a copy, in which it may set a row to False to begin it afresh.
    mems_mask = mems_mask.clone()
    return tuple(_mark(states, mems_mask) for states in mems), mems_mask


def memory_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The memory that a call has returned, as keyword arguments of the next one; nothing where there is none.

    Where NaN without a mask would be an error, a mask that hides nothing is written out: what is NaN because a
    training diverges is not padding whose mask was lost.
    """
    mems, mems_mask = outputs.get("mems"), outputs.get("mems_mask")
    if mems is None:
        return {}
    return {"mems": mems, "mems_mask": real_states(mems, mems_mask) if _can_ask(mems[0]) else mems_mask}


def latest_states(memory: dict[str, Any], mem_len: int) -> dict[str, Any]:
    """What `memory_of` returned, cut to the last `mem_len` states, which is all that a shorter memory holds."""
    mems, mems_mask = memory.get("mems"), memory.get("mems_mask")
    if mems is None or mems[0].shape[1] <= mem_len:
        return memory
    if mem_len == 0:
        return {}
    return {
        "mems": tuple(states[:, -mem_len:] for states in mems),
        "mems_mask": None if mems_mask is None else mems_mask[:, -mem_len:],
    }


def cloned_states(memory: dict[str, Any]) -> dict[str, Any]:
    """What `memory_of` returned, in tensors of its own: a captured graph writes its outputs to the same place at every
    step, and would overwrite what it is about to read."""
    if not memory:
        return memory
    mems, mems_mask = memory["mems"], memory["mems_mask"]
    return {
        "mems": tuple(states.clone() for states in mems),
        "mems_mask": None if mems_mask is None else mems_mask.clone(),
    }


def real_states(mems: tuple[Tensor, ...], mems_mask: Tensor | None = None) -> Tensor:
    """`mems_mask` where None too is written out: (B, m) bool."""
    if mems_mask is not None:
        return mems_mask
    return torch.ones(mems[0].shape[:2], dtype=torch.bool, device=mems[0].device)


def mask_overflow(mems: tuple[Tensor, ...], mems_mask: Tensor | None = None) -> Tensor | None:
    """`mems_mask` that also hides states which are not finite in some layer, as an overflow in fp16 leaves them.

    A stream that went on from such states would never be rid of them. Nothing is masked where nothing overflowed; to
    know that, the host waits for the device.

    Args:
        mems: n_layer tensors (B, m, D). mems_mask: (B, m) bool or None.

    Returns:
        (B, m) bool, or None: all are real.
    """
    device = mems[0].device if mems_mask is None else mems_mask.device
    finite = torch.stack([states.isfinite().all(dim=-1).to(device) for states in mems]).all(dim=0)
    if mems_mask is None:
        return None if finite.all() else finite
    return mems_mask & finite


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
    if mems_mask is None:
        _check_real(mems[0])
    elif mems_mask.dtype != torch.bool or mems_mask.shape != shape:
        raise ValueError(
            f"mems_mask is {tuple(mems_mask.shape)} of {mems_mask.dtype}, but these mems need {tuple(shape)} bool"
        )


def _check_real(states: Tensor):
    """Raise a ValueError for states without a mask that need one, where that can be asked: see `drop_idle_mask`."""
    if not _can_ask(states):
        return
    missing = states[..., 0].float().isnan()
    if missing.any():
        row, position = missing.nonzero()[0].tolist()
        raise ValueError(
            f"mems hold NaN, in row {row} at state {position} first, but no mems_mask came with them: hand back "
            "mems_mask=outputs.mems_mask with mems=outputs.mems, since padded states are NaN; where nothing was "
            "padded, the states overflowed"
        )


def _check_rows(cache: Cache, batch_size: int):
    # Ask a layer that holds keys: a cache may have more layers than have run.
    rows = next((len(layer.keys) for layer in cache.layers if layer.is_initialized and layer.keys.dim() == 4), None)
    if rows is not None and rows != batch_size:
        raise ValueError(
            f"past_key_values hold a memory of {rows} rows, but this batch has {batch_size}: pick or repeat rows, by "
            "their numbers, with past_key_values.reorder_cache"
        )
    mask = decoding_state_of(cache).key_mask
    if mask is not None and len(mask) != batch_size:
        raise ValueError(
            f"past_key_values hold a mask of {len(mask)} rows, but this batch has {batch_size}: rows of layers were "
            "picked without it; pick them with past_key_values.reorder_cache of a MemoryCache, which picks both"
        )


def _check_room(cache: Cache, mem_len: int):
    room = cache.layers[0].max_cache_len
    if room <= mem_len:
        raise ValueError(
            f"past_key_values have room for {room} keys, but mem_len={mem_len} needs a static cache of "
            f"max_cache_len={mem_len + 1} at least"
        )


def _fill_up(
    mems: tuple[Tensor, ...], key_mask: Tensor | None, length: int, segment: Tensor
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """A memory of (B, length, D) with masked states in front of what there is, and the mask of its keys, which is
    where the segment, (B, L, D), is."""
    memory_length = mems[0].shape[1]
    missing = length - memory_length
    if missing == 0:
        return mems, key_mask
    if key_mask is None:
        key_mask = segment.new_ones(len(segment), memory_length + segment.shape[1], dtype=torch.bool)
    key_mask = F.pad(key_mask, (missing, 0), value=False)
    return tuple(F.pad(states, (0, 0, missing, 0)) for states in mems), key_mask


def _can_ask(tensor: Tensor) -> bool:
    """Whether the host may look at numbers: no GPU is waited for, no graph is broken, and vmap has not hidden them."""
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return tensor.device.type == "cpu" and not graph and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def drop_idle_mask(key_mask: Tensor | None) -> Tensor | None:
    """None for a mask that hides nothing, where that can be asked."""
    if key_mask is None or not _can_ask(key_mask):
        return key_mask
    return None if key_mask.all() else key_mask


class MemoryCacheLayer(DynamicSlidingWindowLayer):
    """A sliding layer that does not copy its M keys for every token.

    The keys lie in a buffer with room for M more behind them, so that a token is written once; when the room is used
    up, what is remembered moves to the front of a new buffer. Everything but `update` is the sliding layer's.
    """

    _keys: Tensor
    _values: Tensor
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
        # Setting them (to reorder beams, to crop, to move them) leaves no room: they are no view of the buffer then.
        self._keys, self._room = keys, 0

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._values

    @values.setter
    def values(self, values: Tensor):
        self._values, self._room = values, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take (B, H, L, Dh) keys and values; return them behind those of the memory, and remember the last M."""
        length, memory_length = key_states.shape[2], self.sliding_window - 1
        if length > self._room or self.record_past or not self._fits(key_states):
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            # With gradients there is no use for room: nothing is written into keys that a backward pass may need.
            if not self.record_past and not torch.is_grad_enabled():
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

    def _fits(self, key_states: Tensor) -> bool:
        """Whether keys may be written into the buffer, and are what it holds."""
        return _may_write(self._key_buffer) and self._key_buffer.dtype == key_states.dtype

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
            Later keys are real unless a mask says otherwise. So what was masked once stays masked. On a static cache
            it is (B, m), of the keys that are there now, and a graph writes into it: it knows its tensors by where
            they lie, and has no numbers that count.
        end: see `key_mask`.
        distances: what tells the layers of them, projected once for many calls.
    """

    initial_length: int = 0
    key_mask: Tensor | None = None
    end: int = 0
    distances: KeptDistances = field(default_factory=KeptDistances)


# By the name of each method of a cache that picks rows: how to pick the same rows of a mask.
_PICKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reorder_cache": lambda mask, rows: mask.index_select(0, rows.to(mask.device)),
    "batch_select_indices": lambda mask, rows: mask[rows],
    "batch_repeat_interleave": lambda mask, repeats: mask.repeat_interleave(repeats, dim=0),
}


def _pick_rows(method: str, layers: Sequence[Any], state: DecodingState, rows: Tensor | int) -> None:
    """A method of `_PICKS` of a cache: of the keys and values of its layers, and of its mask."""
    for layer in layers:
        getattr(layer, method)(rows)
    if state.key_mask is not None:
        state.key_mask = _PICKS[method](state.key_mask, rows)


class _ProjectedMemory(Cache):
    """What is the same of every cache of ours.

    Its length is that of the text, without the memory from before the text, since `generate` skips so many tokens of
    its input.
    """

    decoding_state: DecodingState

    def reorder_cache(self, beam_idx: Tensor):
        _pick_rows("reorder_cache", self.layers, self.decoding_state, beam_idx)

    def batch_select_indices(self, indices: Tensor):
        _pick_rows("batch_select_indices", self.layers, self.decoding_state, indices)

    def batch_repeat_interleave(self, repeats: int):
        _pick_rows("batch_repeat_interleave", self.layers, self.decoding_state, repeats)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) - self.decoding_state.initial_length

    def reset(self):
        super().reset()
        self.decoding_state = DecodingState()


class MemoryCache(_ProjectedMemory, DynamicCache):
    """A cache for the projected memory of every layer, empty at first, that grows until it holds M keys."""

    def __init__(self, config: TransfoXLConfig, mem_len: int | None = None):
        """Args: config: the model's. mem_len: M ≥ 1, how much to remember. None: `config.mem_len`."""
        super().__init__(config=config)
        window = 1 + (config.mem_len if mem_len is None else mem_len)
        self.layers = [MemoryCacheLayer(window) for _ in range(config.n_layer)]
        self.decoding_state = DecodingState()


class StaticMemoryCache(_ProjectedMemory, StaticCache):
    """A cache whose tensors never move nor change their shapes, so that one graph serves every token: see `Ring`.

    It starts full, of masked states where there is no memory. `generate(cache_implementation="static")` takes it. What
    was masked stays masked in compiled calls too, but for what an `attention_mask` of all keys alone hides in them:
    it has to be given to each.
    """

    def __init__(self, config: TransfoXLConfig, mem_len: int | None = None):
        """Args: config: the model's. mem_len: M ≥ 1, how much to remember. None: `config.mem_len`."""
        slots = 1 + (config.mem_len if mem_len is None else mem_len)
        super().__init__(config=config, max_cache_len=slots)
        self.ring = Ring(slots)
        self.layers = [RingLayer(self.ring) for _ in range(config.n_layer)]
        self.decoding_state = DecodingState()

    @property
    def is_filled(self) -> bool:
        """Whether it has seen anything, which the host knows without asking the device."""
        return self.layers[0].is_filled

    def enter(self, segment_length: int, key_length: int, can_turn: bool) -> Tensor | None:
        """Before the layers of a call: see `order_of_keys`."""
        turns = can_turn and self.is_filled
        if turns and segment_length == 1 and key_length == self.ring.slots:
            return self.ring.turn()
        self.ring.unroll(self.layers)
        return None


def order_of_keys(cache: Cache | None, segment_length: int, key_length: int, can_turn: bool) -> Tensor | None:
    """What `relative_attention` calls `order`, for the keys that a cache is about to return: (K,) int, or None.

    Args:
        can_turn: whether keys may be out of order of time at all.
    """
    return cache.enter(segment_length, key_length, can_turn) if isinstance(cache, StaticMemoryCache) else None


def attach_state(cache: Cache, state: DecodingState) -> None:
    """Put the state on a cache, whose rows are picked with their masks from now on."""
    cache.decoding_state = state
    if not isinstance(cache, _ProjectedMemory):
        # A cache of another class picks rows of keys and values alone. The functions hold its layers and not the
        # cache itself, which would then refer to itself and outlive its use.
        for method in _PICKS:
            setattr(cache, method, partial(_pick_rows, method, cache.layers, state))


def decoding_state_of(cache: Cache) -> DecodingState:
    """The state on any cache; one without anything where the cache has none."""
    if not hasattr(cache, "decoding_state"):
        # Another process or program has filled the cache.
        attach_state(cache, DecodingState())
    return cache.decoding_state


def is_filled(cache: Cache) -> bool:
    """Whether a cache has seen anything."""
    return cache.is_filled if isinstance(cache, StaticMemoryCache) else cache.get_seq_length() > 0


def text_length(cache: Cache) -> int:
    """How many tokens the cache has seen besides the memory that it started from."""
    length = cache.get_seq_length()
    return length if isinstance(cache, _ProjectedMemory) else length - decoding_state_of(cache).initial_length


def remember_key_mask(cache: Cache, memory: OpenMemory, segment_length: int, attention_mask: Tensor | None) -> None:
    """Keep what the keys of a call are masked by from now on, once the cache has taken them.

    Args:
        memory: what the call went on from. attention_mask: as the call was given it.
    """
    state, key_mask = decoding_state_of(cache), _with_unread(cache, memory, segment_length)
    if memory.first_key is not None and key_mask is not None:
        _clear(cache, ~key_mask)
    if not cache.is_compileable:
        state.key_mask, state.end = key_mask, text_length(cache)
        return
    if key_mask is not None:
        key_mask = drop_idle_mask(key_mask[:, 1 - cache.layers[0].max_cache_len :])
    if key_mask is None:
        state.key_mask = None
    elif not torch.compiler.is_compiling():
        # A graph writes into it, so that it must not be the caller's mask, and was compiled for its strides, which
        # must not depend on the prompt.
        is_own = attention_mask is None and segment_length == 1
        state.key_mask = key_mask if is_own else key_mask.clone(memory_format=torch.contiguous_format)
        torch._dynamo.mark_static_address(state.key_mask)
    elif state.key_mask is not None and state.key_mask.shape == key_mask.shape:
        state.key_mask.copy_(key_mask)
    elif not _is_told_at_every_step(memory, segment_length, attention_mask):
        state.key_mask = key_mask


def _with_unread(cache: Cache, memory: OpenMemory, segment_length: int) -> Tensor | None:
    """What `forget` leaves of a call's keys, behind those that it did not read: (B, unread + m + L) bool or None."""
    key_mask, read = forget(memory, segment_length), memory.length + segment_length
    if memory.unread == 0:
        return key_mask
    # All but static caches have counted the segment by now.
    before = remembered_mask(cache, memory.unread + (memory.length if cache.is_compileable else read))
    unread = None if before is None else before[:, : memory.unread]
    if memory.first_key is not None:
        continues = (memory.first_key[:, -1:] == 0).expand(-1, memory.unread)
        unread = continues if unread is None else unread & continues
    if unread is None:
        return None if key_mask is None else F.pad(key_mask, (memory.unread, 0), value=True)
    return torch.cat([unread, unread.new_ones(len(unread), read) if key_mask is None else key_mask], dim=1)


def _is_told_at_every_step(memory: OpenMemory, segment_length: int, attention_mask: Tensor | None) -> bool:
    """Whether an `attention_mask` of all keys is all that can hide something.

    Whoever gives such a mask, as `generate` does, gives it to the next token too; and a graph cannot ask whether it
    hides anything, to keep it only then.
    """
    if attention_mask is None or memory.first_key is not None:
        return False
    return memory.states[0] is None and attention_mask.shape[1] >= memory.length + segment_length


def remembered_mask(cache: Cache, memory_length: int) -> Tensor | None:
    """(B, m) bool: which of the m keys that a cache holds are real; None: all of them."""
    state = decoding_state_of(cache)
    later = 0 if cache.is_compileable or state.key_mask is None else text_length(cache) - state.end
    if state.key_mask is None or later >= memory_length:
        return None
    # A width below 0 cuts: in front what lies before the memory, behind what a crop has taken back.
    return F.pad(state.key_mask, (memory_length - state.key_mask.shape[1] - later, later), value=True)


def cached_key_mask(
    attention_mask: Tensor | None,
    cache: Cache,
    mem_len: int,
    batch_size: int,
    segment_length: int,
    remembers: bool = True,
    is_grown: bool = False,
) -> tuple[int, Tensor | None]:
    """m and which of the m + L keys are real, (B, m + L) bool or None, for a cache that holds a memory.

    Args:
        remembers: whether it is also said what the cache remembers; else what `attention_mask` says alone.
        is_grown: whether the mask is known to have a column for each token of the text, as it has within `generate`.
    """
    memory_length = min(_held(cache, segment_length), mem_len)
    memory_mask = remembered_mask(cache, memory_length) if remembers else None
    columns: Collection[int] = (segment_length, memory_length + segment_length)
    more = 1 + memory_length + segment_length if memory_length == mem_len else None
    if is_grown or (torch.compiler.is_compiling() and isinstance(cache, StaticMemoryCache)):
        # The count of a static cache lies on the device. A graph cannot ask for it, and asking at every token within
        # `generate` would wait for a GPU.
        more = segment_length
    elif attention_mask is not None and attention_mask.shape[-1] not in columns:
        columns = (*columns, text_length(cache) + segment_length)
    key_mask = make_key_mask(attention_mask, memory_mask, batch_size, segment_length, memory_length, columns, more)
    return memory_length, key_mask


def _held(cache: Cache, segment_length: int) -> int:
    """How many keys a cache holds before it takes those of a segment."""
    return cache.get_mask_sizes(segment_length, 0)[0] - segment_length


def clear_hidden(cache: Cache, key_mask: Tensor | None, memory_length: int) -> None:
    """Zero the keys and values that are hidden from now on: an overflow would spread from behind a mask (0 × NaN).

    Args:
        key_mask: (B, m + L) bool or (B, m), which of the last m keys are real, and others; None: all.
        memory_length: m.
    """
    if key_mask is None:
        return
    hidden = ~key_mask[:, :memory_length]
    before = remembered_mask(cache, memory_length)
    if before is not None:
        hidden = hidden & before.to(hidden.device)
    if hidden.any():
        _clear(cache, hidden)


def _clear(cache: Cache, hidden: Tensor) -> None:
    """Zero keys and values where `hidden`, (B, n) bool of the last n keys, is True."""
    if isinstance(cache, StaticMemoryCache):
        cache.ring.unroll(cache.layers)
    for layer in cache.layers:
        # A cache may hold more keys than the memory, and layers that have not run hold none.
        if layer.is_initialized and layer.keys.numel():
            there = F.pad(hidden, (layer.keys.shape[2] - hidden.shape[1], 0))[:, None, :, None].to(layer.keys.device)
            if cache.is_compileable or _may_write(layer.keys):
                # Graphs know a static cache's tensors by where they lie, and a buffer keeps its room if nothing moves.
                for states in (layer.keys, layer.values):
                    states.masked_fill_(there, 0)
            else:
                layer.keys, layer.values = (states.masked_fill(there, 0) for states in (layer.keys, layer.values))


def _may_write(states: Tensor) -> bool:
    """Whether no backward pass may need them as they are, and they were not made by an inference mode that is over.

    Of inference mode a graph cannot ask.
    """
    if torch.is_grad_enabled() or states.requires_grad:
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not states.is_inference()


def make_key_mask(
    attention_mask: Tensor | None,
    memory_mask: Tensor | None,
    batch_size: int,
    segment_length: int,
    memory_length: int,
    columns: Collection[int],
    more: int | None = None,
) -> Tensor | None:
    """Which of the m + L keys are real: (B, m + L) bool, or None for all of them.

    Args:
        attention_mask: (B, n), 1 = real, for the last n of the keys, or for more than the keys. None: all real.
        memory_mask: (B, m) bool, what the memory itself says, also of keys without a column. None: all real.
        columns: the n that are right here. more: from which number on any n is. None: from none.

    Raises:
        ValueError: the mask has another shape or other values.
    """
    if attention_mask is None:
        return None if memory_mask is None else F.pad(memory_mask, (0, segment_length), value=True)
    key_length = memory_length + segment_length
    length = attention_mask.shape[-1]
    # TorchDynamo does not look for a number in a range whose ends it does not know.
    fits = columns.start <= length < columns.stop if isinstance(columns, range) else length in columns
    fits = fits or (more is not None and length >= more)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or not fits:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, but a segment of {segment_length} after a memory of "
            f"{memory_length} needs {_shapes(batch_size, columns)}{'' if more is None else ' or more columns'}"
        )
    if attention_mask.is_floating_point():
        _check_zeros_and_ones(attention_mask)
    elif segment_length > 1 and attention_mask.dtype != torch.bool:
        # A single token belongs to a text whose mask has been looked at before.
        _check_no_numbers(attention_mask)
    mask = attention_mask[:, -key_length:].bool()
    mask = F.pad(mask, (key_length - mask.shape[1], 0), value=True)
    if memory_mask is not None:
        mask = mask & F.pad(memory_mask, (0, segment_length), value=True)
    return mask


def _shapes(batch_size: int, columns: Collection[int]) -> str:
    if isinstance(columns, range):
        return f"({batch_size}, n) with n from {columns[0]} to {columns[-1]}"
    return " or ".join(f"({batch_size}, {n})" for n in sorted(set(columns)))


def _check_zeros_and_ones(attention_mask: Tensor):
    """Raise a ValueError for a float mask that is added to scores, where 0 says real.

    Masks of ones and zeros in floating point are common: PEFT writes the columns of its prompts so. They are few
    enough that a GPU may be waited for.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()) or not bool(attention_mask.any()):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} and not made of 1 = real and 0 = padding: a mask that is added "
            "to scores, 0 = real, reads the other way round; give (mask == 0).long() instead"
        )


def _check_no_numbers(attention_mask: Tensor):
    """Raise a ValueError for a mask of the numbers of documents, which packed batches of others have.

    A GPU is not waited for: it stops by itself. In a graph or under `torch.func.vmap` there are no numbers to look at.
    """
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if graph or attention_mask.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(attention_mask):
        return
    low, high = attention_mask.aminmax()
    message = "attention_mask holds {}, but 1 = real and 0 = padding: where documents begin, resets or seq_idx tell"
    if attention_mask.is_cuda:
        torch._assert_async((low >= 0) & (high <= 1), message.format("other numbers"))
    elif low < 0 or high > 1:
        raise ValueError(message.format(int(low if low < 0 else high)))
