"""The memory as a thing of its own: how a call opens it and what it remembers, its mask and its lengths.

The memory of a call is `mems`, for each layer the states (B, m, D) that entered it before, and `mems_mask`, (B, m)
bool, which of them are real; None where all are. A state that is not real is NaN in every channel: whoever loses the
mask on the way gets an error or NaN, never a plausible number. Where the mask is there, hidden states are read as
zeros under a key mask, so that nothing of them spreads.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, D = `d_model`, H heads,
Dh = `d_head`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from .cache_transfo_xl import (
    DecodingState,
    attach_state,
    cached_key_mask,
    check_cache,
    clear_hidden,
    clear_keys,
    decoding_state_of,
    held_keys,
    is_filled,
    remembered_mask,
    text_length,
    with_recorded,
)
from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import make_key_mask

__all__ = [
    "FilledLengths",
    "MemoryLengths",
    "OpenMemory",
    "begin_documents",
    "check_one_memory",
    "cloned_states",
    "forget",
    "hide_states",
    "initial_memory",
    "latest_states",
    "mask_overflow",
    "memory_of",
    "open_memory",
    "real_states",
    "remember",
    "remember_key_mask",
    "split_mask",
]


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


def fill_lengths(lengths: MemoryLengths | None, config: TransfoXLConfig) -> FilledLengths:
    """What holds in a call that was given these lengths, or None.

    Raises:
        ValueError: they are something else; and as `MemoryLengths.of` does.
    """
    # A copy of the class may have come with the weights.
    if not isinstance(lengths, MemoryLengths | None) and type(lengths).__name__ != MemoryLengths.__name__:
        raise ValueError(
            f"lengths must be a txl_hf.MemoryLengths, not a {type(lengths).__name__}; a column of that name in a data "
            "set is given to the model as it is: rename it, or remove it"
        )
    return (lengths or MemoryLengths()).of(config)


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
    filled = cache is not None and is_filled(cache)
    if cache is not None:
        check_cache(cache, filled, config, mem_len, inputs_embeds)
    if cache is not None and filled:
        check_one_memory(mems, mems_mask)
        length, key_mask = cached_key_mask(attention_mask, cache, mem_len, batch_size, segment_length)
        if attention_mask is not None and not torch.compiler.is_compiling():
            clear_hidden(cache, key_mask, length)
        unread = held_keys(cache, segment_length) - length
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


def memory_of(outputs: Mapping[str, Any], compiled: bool = False) -> dict[str, Any]:
    """The memory that a call has returned, as keyword arguments of the next one; nothing where there is none.

    Where NaN without a mask would be an error, a mask that hides nothing is written out: what is NaN because a
    training diverges is not padding whose mask was lost.

    Args:
        compiled: whether the next call is, which would compute with a mask that hides nothing: none is written out.
    """
    mems, mems_mask = outputs.get("mems"), outputs.get("mems_mask")
    if mems is None:
        return {}
    is_asked = not compiled and _can_ask(mems[0])
    return {"mems": mems, "mems_mask": real_states(mems, mems_mask) if is_asked else mems_mask}


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
            "padded, the states overflowed: txl_hf.mask_overflow(mems) gives the mask that hides them"
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


def remember_key_mask(cache: Cache, memory: OpenMemory, segment_length: int, attention_mask: Tensor | None) -> None:
    """Keep what the keys of a call are masked by from now on, once the cache has taken them.

    Args:
        memory: what the call went on from. attention_mask: as the call was given it.
    """
    state, key_mask = decoding_state_of(cache), _with_unread(cache, memory, segment_length)
    if memory.first_key is not None and key_mask is not None:
        clear_keys(cache, ~key_mask)
    if not cache.is_compileable:
        read = memory.unread + memory.length + segment_length
        state.key_mask, state.end = with_recorded(cache, key_mask, read), text_length(cache)
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
