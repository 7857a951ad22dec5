"""The memory as keys and values that layers have projected: the caches that hold it for decoding, and their masks.

A cache of any class of `transformers` will do. What decoding needs beside its keys and values is in a `DecodingState`,
on the cache.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, H heads, Dh = `d_head`.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import make_key_mask
from .positions_transfo_xl import KeptDistances
from .ring_transfo_xl import Ring, RingLayer

__all__ = [
    "CACHE_NAME",
    "DecodingState",
    "MemoryCache",
    "MemoryCacheLayer",
    "StaticMemoryCache",
    "attach_state",
    "cached_key_mask",
    "check_cache",
    "chosen_cache",
    "clear_hidden",
    "clear_keys",
    "decoding_state_of",
    "held_keys",
    "is_filled",
    "order_of_keys",
    "remembered_mask",
    "stop_gradients",
    "text_length",
    "with_recorded",
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
    distances: KeptDistances = field(init=False)

    def __post_init__(self):
        # torch.compile makes an object of a class that it finds by a name, and of no default_factory.
        self.distances = KeptDistances()


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
    """Whether a cache holds anything: a memory too, whose text was taken back."""
    if isinstance(cache, StaticMemoryCache):
        return cache.is_filled
    initial = cache.decoding_state.initial_length if isinstance(cache, _ProjectedMemory) else 0
    return initial + cache.get_seq_length() > 0


def text_length(cache: Cache) -> int:
    """How many tokens the cache has seen besides the memory that it started from."""
    length = cache.get_seq_length()
    return length if isinstance(cache, _ProjectedMemory) else length - decoding_state_of(cache).initial_length


def check_cache(cache: Cache, filled: bool, config: TransfoXLConfig, mem_len: int, embeds: Tensor) -> None:
    """Check that a cache can hold the memory of a call, and that what it holds is of such a model.

    Args:
        filled: as `is_filled` says. mem_len: M of the call. embeds: (B, L, D), what it reads.

    Raises:
        ValueError: it cannot, and says why.
    """
    # Ask layers that hold keys: a cache may have more layers than have run.
    held = [layer.keys for layer in cache.layers if layer.is_initialized and layer.keys.dim() == 4]
    layers = len(cache.layers) if isinstance(cache, _ProjectedMemory) else len(held)
    if layers and layers != config.n_layer:
        raise ValueError(f"past_key_values have {layers} layers, but the model has n_layer={config.n_layer}")
    # Those of transformers that slide keep one key less than their window, too; others grow without an end.
    room = next((room for layer in cache.layers if (room := _room_of(layer)) is not None), mem_len + 1)
    if room <= mem_len:
        raise ValueError(
            f"past_key_values keep {room - 1} keys, but this call has mem_len={mem_len}: make them for as many, as "
            f"with {type(cache).__name__ if isinstance(cache, _ProjectedMemory) else 'MemoryCache'}(model.config, "
            f"{mem_len}), or let lengths=MemoryLengths(mem_len={room - 1}) be that of the call"
        )
    if held:
        _check_keys(held[0], cache, filled, config, embeds)


def _room_of(layer: Any) -> int | None:
    return getattr(layer, "sliding_window", None) or getattr(layer, "max_cache_len", None)


def _check_keys(keys: Tensor, cache: Cache, filled: bool, config: TransfoXLConfig, embeds: Tensor) -> None:
    """Check the (B, H, n, Dh) keys of a layer, which a static cache that was reset has too, and the mask of all."""
    rows, heads, _, width = keys.shape
    if (heads, width) != (config.n_head, config.d_head):
        raise ValueError(
            f"past_key_values hold keys of {heads} heads of {width}, but the model has n_head={config.n_head} and "
            f"d_head={config.d_head}"
        )
    if rows != len(embeds):
        mend = (
            "pick or repeat rows, by their numbers, with past_key_values.reorder_cache" if filled else "make new ones"
        )
        raise ValueError(f"past_key_values hold a memory of {rows} rows, but this batch has {len(embeds)}: {mend}")
    mask = decoding_state_of(cache).key_mask
    if mask is not None and len(mask) != len(embeds):
        raise ValueError(
            f"past_key_values hold a mask of {len(mask)} rows, but this batch has {len(embeds)}: rows of layers were "
            "picked without it; pick them with past_key_values.reorder_cache of a MemoryCache, which picks both"
        )
    if torch.compiler.is_compiling():
        return
    kind = embeds.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    computed = torch.get_autocast_dtype(kind) if casts else embeds.dtype
    if cache.is_compileable:
        # It keeps its tensors, which are written into.
        fits = keys.dtype == computed
    else:
        # It holds the wider type of what it is given, which autocast casts.
        fits = casts or torch.promote_types(keys.dtype, computed) == computed
    if not fits:
        mend = "go on as it was begun, or read the text anew" if filled else "make new ones"
        raise ValueError(
            f"past_key_values hold keys of {keys.dtype}, but the model computes in {computed} here: {mend}"
        )
    if cache.is_compileable and keys.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "past_key_values are static, and were filled within torch.inference_mode, outside of which nothing may be "
            "written into them: go on within it, or make new ones"
        )


def remembered_mask(cache: Cache, memory_length: int) -> Tensor | None:
    """(B, m) bool: which of the last m keys that a cache holds are real; None: all of them."""
    state = decoding_state_of(cache)
    later = 0 if cache.is_compileable or state.key_mask is None else text_length(cache) - state.end
    if state.key_mask is None or later >= memory_length:
        return None
    # A width below 0 cuts: in front what lies before the memory, behind what a crop has taken back.
    return F.pad(state.key_mask, (memory_length - state.key_mask.shape[1] - later, later), value=True)


def with_recorded(cache: Cache, key_mask: Tensor | None, read: int) -> Tensor | None:
    """The mask of all keys that a cache holds after a call, (B, n) bool: of the older ones too, which it has not read.

    When tokens are taken back (`crop`), the next call reads some of these.

    Args:
        key_mask: (B, read) bool or None, of the keys that the call has read, its own among them.
    """
    layer = cache.layers[0]
    # Others hold no more than they are read.
    if not getattr(layer, "record_past", False) or (held := layer.keys.shape[2]) <= read:
        return key_mask
    before = remembered_mask(cache, held)
    if before is not None:
        older = before[:, : held - read]
    elif key_mask is not None:
        older = key_mask.new_ones(len(key_mask), held - read)
    else:
        return None
    return torch.cat([older, older.new_ones(len(older), read) if key_mask is None else key_mask], dim=1)


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
    memory_length = min(held_keys(cache, segment_length), mem_len)
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


def held_keys(cache: Cache, segment_length: int) -> int:
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
        clear_keys(cache, hidden)


def clear_keys(cache: Cache, hidden: Tensor) -> None:
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


def stop_gradients(cache: Cache) -> None:
    """Let no gradient flow from a later call into what a cache holds now: SG of the paper, as for mems."""
    for layer in cache.layers:
        if not layer.is_initialized or not (layer.keys.requires_grad or layer.values.requires_grad):
            continue
        if cache.is_compileable:
            # These stay where they are: see `clear_keys`. A graph cannot detach what it has kept for its gradients.
            if not torch.compiler.is_compiling():
                layer.keys.detach_()
                layer.values.detach_()
        else:
            # Copies, since a later call may write into them what the backward pass of this one must not find.
            layer.keys, layer.values = (states.detach().clone() for states in (layer.keys, layer.values))


def _may_write(states: Tensor) -> bool:
    """Whether no backward pass may need them as they are, and they were not made by an inference mode that is over.

    Of inference mode a graph cannot ask.
    """
    if torch.is_grad_enabled() or states.requires_grad:
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not states.is_inference()
