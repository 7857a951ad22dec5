"""The memory as projected keys and values: caches, of any class of `transformers`, their masks, and other state.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, H heads, Dh = `d_head`.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin

from .attention_transfo_xl import OPERATORS, working_dtype
from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import make_key_mask, zeros_in_front
from .positions_transfo_xl import Distances

# The name by which `generate` passes a cache and finds it in outputs: from transformers 5.24 on `cache`.
_BY_GENERATE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _BY_GENERATE else "past_key_values"


def chosen_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache argument of a call, by either of its names; a ValueError for both, or for no cache of a decoder."""
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are two names of one thing: give one of them")
    given = past_key_values if cache is None else cache
    if given is not None and not (isinstance(given, Cache) and hasattr(given, "layers")):
        raise ValueError(
            f"past_key_values are of type {type(given).__name__}: give what a call with use_cache=True returned, or a "
            "new MemoryCache(model.config); states are mems="
        )
    return given


@dataclass
class DecodingState:
    """State beside the keys and values of a cache: its attribute `decoding_state`.

    Args:
        initial_length: how many states of memory, older than the text, the cache started from.
        key_mask: which keys are real; None: all. On a growing cache (B, n) bool, of the n keys up to token `end` of
            the text; later ones are real. On a static cache (B, m) bool, into which compiled graphs write.
        padding: (B,) int, tokens of padding that the cache holds as zero states, see `OpenPadding`; None: none.
        distances: for each layer the nearest `reach` distances, for calls with this `clamp_len`.
        rel_keys: for each layer, by its number, W_R R of these distances, (H, n, Dh).
        made_with, versions: weak references to the weights W_R of `rel_keys`, and what `has_distances` compares.
        projected: the most distances of a product so far, because products of fewer may round differently.
    """

    initial_length: int = 0
    key_mask: Tensor | None = None
    end: int = 0
    padding: Tensor | None = None
    distances: list[Distances] | None = None
    reach: int = 0
    clamp_len: int = -1
    rel_keys: dict[int, Tensor] = field(default_factory=dict)
    projected: int = 0
    made_with: list[Any] = field(default_factory=list)
    versions: Any = None

    def has_distances(self, reach: int, clamp_len: int, weights: list[Tensor | None], others: Any) -> bool:
        """Whether distances are stored that these weights, W_R of each layer or None, projected with their present
        values, and with `others`, on which a projection depends too; distances of another origin are dropped."""
        # A graph cannot compare weights. A tensor of inference mode has no version, so that it may have changed.
        graph = torch.compiler.is_compiling()
        tensors = [] if graph else [weight for weight in weights if isinstance(weight, Tensor)]
        versions = [None if weight.is_inference() else weight._version for weight in tensors]
        same = len(self.made_with) == len(tensors) and self.versions == (others, versions) and None not in versions
        same = same and all(made() is weight for made, weight in zip(self.made_with, tensors, strict=True))
        if self.distances is not None and self.reach >= reach and self.clamp_len == clamp_len and (graph or same):
            return True
        self.distances, self.reach, self.clamp_len, self.rel_keys = None, reach, clamp_len, {}
        self.made_with, self.versions = [weakref.ref(weight) for weight in tensors], (others, versions)
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodingState":
        # Copies of a cache share the distances, because nothing writes into them.
        key_mask = None if self.key_mask is None else self.key_mask.clone()
        return replace(self, key_mask=key_mask, rel_keys=dict(self.rel_keys))

    def __getstate__(self) -> dict[str, Any]:
        # A cache is pickled without the model's weights.
        return self.__dict__ | {"made_with": []}


def static_address(tensor: Tensor) -> Tensor:
    """The tensor, marked so that CUDA graphs read it at its address instead of copying it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


# Methods of a cache that select rows, by name, each with a function that selects the same rows of a tensor.
_PICKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reorder_cache": lambda states, rows: states.index_select(0, rows.to(states.device)),
    "batch_select_indices": lambda states, rows: states[rows],
    "batch_repeat_interleave": lambda states, repeats: states.repeat_interleave(repeats, dim=0),
}


def _pick_rows(method: str, layers: Sequence[Any], state: DecodingState, rows: Tensor | int) -> None:
    """Apply a method of `_PICKS` to a cache: to the keys and values of its layers, and to its masks."""
    pick = _PICKS[method]
    for layer in layers:
        if hasattr(layer, method):
            getattr(layer, method)(rows)
        elif layer.is_initialized:
            # Static layers have no other method than `reorder_cache`.
            layer.keys, layer.values = pick(layer.keys, rows), pick(layer.values, rows)
    for name in ("key_mask", "padding"):
        if (of_rows := getattr(state, name)) is not None:
            setattr(state, name, pick(of_rows, rows))


class ProjectedMemory(Cache):
    """Base class of the caches of this package. Its length is that of the text, without the memory before the text,
    because `generate` skips as many tokens of its input."""

    decoding_state: DecodingState

    def reorder_cache(self, beam_idx: Tensor):
        _pick_rows("reorder_cache", self.layers, self.decoding_state, beam_idx)

    def batch_select_indices(self, indices: Tensor):
        _pick_rows("batch_select_indices", self.layers, self.decoding_state, indices)

    def batch_repeat_interleave(self, repeats: int):
        _pick_rows("batch_repeat_interleave", self.layers, self.decoding_state, repeats)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) - self.decoding_state.initial_length

    def is_filled(self) -> bool:
        """Whether it has any keys, also those of a memory whose text was cropped."""
        return self.decoding_state.initial_length + self.get_seq_length() > 0

    def order_of_keys(self, segment_length: int, key_length: int, may_differ: bool) -> Tensor | None:
        """`AttentionInputs.order`, (K,) int, of the keys that the next call returns; None, and always unless they
        `may_differ`: order of time."""
        return None

    def end_call(self, mem_len: int) -> None:
        """Prepare the next call, after one whose memory has `mem_len` states at most."""

    def sort_keys(self) -> None:
        """Sort the keys of all layers by time, where they are in another order."""

    def reset(self):
        super().reset()
        self.decoding_state = DecodingState()


class MemoryCache(ProjectedMemory, DynamicCache):
    """A cache for the projected memory of every layer, empty at first, that grows until it holds M keys."""

    def __init__(self, config: TransfoXLConfig, mem_len: int | None = None):
        """`config` is the model's. `mem_len` is M, at least 1; None: `config.mem_len`."""
        super().__init__(config=config)
        window = 1 + (config.mem_len if mem_len is None else mem_len)
        self.layers = [OPERATORS.cache_layer(window) for _ in range(config.n_layer)]
        self.decoding_state = DecodingState()


def attach_state(cache: Cache, state: DecodingState) -> None:
    """Attach the state to a cache, which selects rows of masks with rows of keys from now on."""
    cache.decoding_state = state
    if not isinstance(cache, ProjectedMemory):
        # Other classes select rows of keys and values alone. The functions refer to the layers, because a cycle of
        # references would keep the cache alive after its use.
        for method in _PICKS:
            setattr(cache, method, partial(_pick_rows, method, cache.layers, state))


def decoding_state_of(cache: Cache) -> DecodingState:
    """The state of a cache of any class; a new one where the cache has none."""
    if not hasattr(cache, "decoding_state"):
        # Another process or program has filled the cache.
        attach_state(cache, DecodingState())
    return cache.decoding_state


def is_filled(cache: Cache) -> bool:
    """Whether a cache has any keys."""
    return cache.is_filled() if isinstance(cache, ProjectedMemory) else cache.get_seq_length() > 0


def text_length(cache: Cache) -> int:
    """How many tokens the cache has seen besides the memory that it started from."""
    length = cache.get_seq_length()
    return length if isinstance(cache, ProjectedMemory) else length - decoding_state_of(cache).initial_length


def check_cache(cache: Cache, config: TransfoXLConfig, mem_len: int, embeds: Tensor) -> None:
    """Raise a ValueError unless a cache fits the model and a call of `embeds`, (B, L, D), with its memory."""
    # Layers that have not run hold no keys: a cache may have more layers than the model.
    held = [layer.keys for layer in cache.layers if layer.is_initialized and layer.keys.dim() == 4]
    is_ours = isinstance(cache, ProjectedMemory)
    layers = len(cache.layers) if is_ours else len(held)
    if layers and layers != config.n_layer:
        raise ValueError(f"past_key_values have {layers} layers, but the model has n_layer={config.n_layer}")
    # Sliding layers of transformers keep one key less than their window, too; others grow without an end.
    rooms = (getattr(layer, "sliding_window", None) or getattr(layer, "max_cache_len", None) for layer in cache.layers)
    room = next((room for room in rooms if room is not None), mem_len + 1)
    if room <= mem_len:
        raise ValueError(
            f"past_key_values keep {room - 1} keys, but this call has mem_len={mem_len}: make them for as many, as "
            f"with {type(cache).__name__ if is_ours else 'MemoryCache'}(model.config, {mem_len}), or let "
            f"lengths=MemoryLengths(mem_len={room - 1}) be that of the call"
        )
    for states in (*held[:1], decoding_state_of(cache).key_mask):
        if states is not None and len(states) != len(embeds):
            raise ValueError(
                f"past_key_values hold a memory of {len(states)} rows, but this batch has {len(embeds)}: pick or "
                "repeat rows with past_key_values.reorder_cache, or make new ones"
            )
    if not held:
        return
    keys, computed = held[0], working_dtype(embeds)
    if (keys.shape[1], keys.shape[3]) != (config.n_head, config.d_head):
        raise ValueError(
            f"past_key_values hold keys of {keys.shape[1]} heads of {keys.shape[3]}, but the model has "
            f"n_head={config.n_head} and d_head={config.d_head}"
        )
    if torch.compiler.is_compiling():
        return
    if not cache.is_compileable and cache.get_seq_length(0) != cache.get_seq_length(config.n_layer - 1):
        raise ValueError(
            "past_key_values hold tokens of a call that ended inside the layers, by Ctrl-C or for want of memory: "
            "call past_key_values.reset() and read the text anew"
        )
    # Keys are written into a static cache; concatenation in another gives the wider type, which autocast casts.
    wide = keys.dtype if cache.is_compileable else torch.promote_types(keys.dtype, computed)
    if wide != computed and (cache.is_compileable or computed == embeds.dtype):
        raise ValueError(
            f"past_key_values hold keys of {keys.dtype}, but the model computes in {computed} here: go on as it was "
            "begun, or make new ones"
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
    # Negative padding cuts: in front keys older than the memory, at the end tokens that a crop has removed.
    return F.pad(state.key_mask, (memory_length - state.key_mask.shape[1] - later, later), value=True)


def cached_key_mask(
    attention_mask: Tensor | None,
    cache: Cache,
    mem_len: int,
    batch_size: int,
    segment_length: int,
    memory_mask: Tensor | None,
    is_grown: bool = False,
) -> tuple[int, Tensor | None]:
    """m and which of the m + L keys are real, (B, m + L) bool or None, for a cache that holds a memory.

    Args:
        memory_mask: the cache's mask of its keys, (B, ≥ m) bool or None.
        is_grown: whether `attention_mask` is known to have a column for each token of the text.
    """
    m = min(held_keys(cache, segment_length), mem_len)
    if memory_mask is not None:
        memory_mask = memory_mask[:, memory_mask.shape[1] - m :]
    # The package's static cache counts on the device: a graph cannot read the number, and the host would wait for it.
    is_static = isinstance(cache, ProjectedMemory) and cache.is_compileable
    is_grown = is_grown or (torch.compiler.is_compiling() and is_static)
    seen, more = None if is_grown else partial(text_length, cache), is_grown or m == mem_len
    masks, lengths = (attention_mask, memory_mask), (segment_length, m)
    return m, make_key_mask(*masks, batch_size, *lengths, fewer=is_grown, more=more, text_length=seen)


def held_keys(cache: Cache, segment_length: int) -> int:
    """How many keys a cache has before those of a segment are added."""
    return cache.get_mask_sizes(segment_length, 0)[0] - segment_length


def clear_hidden(
    cache: Cache, key_mask: Tensor, attention_mask: Tensor | None, segment_length: int, config: TransfoXLConfig
) -> Tensor | None:
    """Zero the keys and values that a call is the first to hide, because an overflow passes through a mask (0 × NaN);
    in a row whose keys are all hidden now, which starts fresh, those that were hidden before, too.

    Args:
        key_mask: (B, m + L) bool, which keys are real, by the cache and the `attention_mask` of a call.

    Returns:
        `zeros_in_front` of the mask, with `initial_memory="zeros"`: queries see these keys as zero states.

    Raises:
        ValueError: with `pre_lnorm`, keys of an earlier text would have to become those of zero states, not zeros.
    """
    m, seen, zeros = key_mask.shape[1] - segment_length, text_length(cache), config.initial_memory == "zeros"
    before, hidden, padding = remembered_mask(cache, m), ~key_mask[:, :m], decoding_state_of(cache).padding
    fresh = hidden.all(dim=1, keepdim=True)
    front = zeros_in_front(attention_mask, segment_length, m + segment_length, before) if zeros else None
    if before is not None:
        hidden = hidden & (before | fresh)
    if padding is not None:
        # Padding, and the keys before it, are zero states already.
        places = torch.arange(seen - m, seen, device=padding.device)
        hidden = hidden & ~((places < padding[:, None]) & (padding[:, None] > 0))
    if hidden.any():
        as_zeros = fresh if front is None else fresh | front[:, :m]
        if zeros and config.pre_lnorm and (hidden & as_zeros).any():
            raise ValueError(
                "attention_mask begins a text behind keys that past_key_values hold already: with pre_lnorm and "
                'initial_memory="zeros" use a new cache, or mems'
            )
        clear_keys(cache, hidden)
    return front


def clear_keys(cache: Cache, hidden: Tensor) -> None:
    """Zero keys and values where `hidden`, (B, n) bool of the last n keys, is True."""
    if isinstance(cache, ProjectedMemory):
        cache.sort_keys()
    for layer in cache.layers:
        # A cache may hold more keys than the memory, and layers that have not run hold none.
        if layer.is_initialized and layer.keys.numel():
            there = F.pad(hidden, (layer.keys.shape[2] - hidden.shape[1], 0))[:, None, :, None].to(layer.keys.device)
            if cache.is_compileable or may_write(layer.keys):
                # In place, because graphs read a static cache at fixed addresses, and a buffer keeps its room.
                for states in (layer.keys, layer.values):
                    states.masked_fill_(there, 0)
            else:
                layer.keys, layer.values = (states.masked_fill(there, 0) for states in (layer.keys, layer.values))


def stop_gradients(cache: Cache) -> None:
    """Let no gradient flow from a later call into what a cache holds now: SG of the paper, as for mems."""
    for layer in cache.layers:
        if layer.is_initialized and (layer.keys.requires_grad or layer.values.requires_grad):
            if not cache.is_compileable:
                # Copies, because later calls write into them, and this call's backward pass needs the old values.
                layer.keys, layer.values = layer.keys.detach().clone(), layer.values.detach().clone()
            elif not torch.compiler.is_compiling():
                # In place, because graphs read fixed addresses; a graph cannot detach tensors of its gradients.
                layer.keys.detach_()
                layer.values.detach_()


def may_write(states: Tensor) -> bool:
    """Whether states may be written to: no backward pass needs them, and no ended inference mode has made them, which
    a graph cannot check."""
    if torch.is_grad_enabled() or states.requires_grad:
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not states.is_inference()
