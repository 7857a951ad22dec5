"""What an `attn_type` means: how a model knows where its tokens stand, with a class for each.

A class says what its encoding learns, what it adds to the hidden states, what it tells the attention of each layer,
and whether a memory may precede the segment. Another encoding is another class in `POSITIONS`; attention takes a
score per distance (`rel_bias`), a key per distance (`rel_key`), or both.

Letters: B batch, L segment, K = m + L keys (memory, then segment), D = `d_model`, H heads, Dh head width.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .linear_transfo_xl import reads_columns_sooner, working_dtype
from .operators_transfo_xl import is_exporting

__all__ = ["POSITIONS", "Distances", "KeptDistances", "Positions", "sinusoid", "sinusoids_of_distances"]


def sinusoid(positions: Tensor, width: int) -> Tensor:
    """R of the paper: sines, then cosines, of the positions at geometric frequencies.

    Args:
        positions: (K,) fp32 or fp64. width: even.

    Returns:
        (K, width), of the positions' type.
    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype) / width
    # Rounded as in all the originals: at distance 1,000 another order of these operations is 1e-4 off in the angle.
    angles = torch.outer(positions, 1 / 10000.0**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sinusoids_of_distances(key_length: int, embeds: Tensor, clamp_len: int) -> Tensor:
    """R for the distances K - 1, …, 0: (K, D), of the type of `embeds` (…, D); those beyond `clamp_len` share one.

    Distances are counted in fp32 at least: bf16 has no 301.
    """
    dtype = torch.promote_types(embeds.dtype, torch.float32)
    distances = torch.arange(key_length - 1, -1, -1, device=embeds.device, dtype=dtype)
    if clamp_len > 0:
        distances = distances.clamp(max=clamp_len)
    return sinusoid(distances, embeds.shape[-1]).to(embeds.dtype)


def _different(key_length: int, most: int | None) -> int:
    """How many of the distances K - 1, …, 0 have a key of their own, if `most` differ; None: all do.

    All have in a graph for any K, an export's or a trace's, where K is no number.
    """
    graph = torch.jit.is_tracing() or is_exporting(unknown=torch.compiler.is_compiling())
    return key_length if most is None or graph else min(key_length, most)


# How many steps optimisers have taken, all together: a fused one writes to weights whose versions do not tell.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


@functools.cache
def _watch_optimizers() -> None:
    """Let every optimiser of the process count its steps, from the first call on."""
    register_optimizer_step_post_hook(_count_step)


@dataclass
class KeptDistances:
    """The sinusoids as each layer has projected them, so that calls share them while its weight stays as it is.

    Args:
        positions: (n, D), furthest distance first; distances beyond `clamp_len` share one.
        rel_keys: for each layer W_R R, (H, n, Dh).
        weights: for each layer W_R, and when it projected them its version, the steps of optimisers and the type of
            products.
    """

    positions: Tensor | None = None
    clamp_len: int = -1
    rel_keys: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, tuple[weakref.ref[Tensor], tuple[int | None, int, torch.dtype]]] = field(default_factory=dict)

    def rel_key(self, layer: int, weight: Any, project: Callable[[], Tensor]) -> Tensor:
        """W_R R of a layer: what it projects now, or has projected before, as a cache takes its keys and values.

        Another weight, another version of it, a step of an optimiser, or another type, as autocast begins or ends,
        projects anew. What writes through `.data` goes unnoticed. A graph cannot ask, and a quantised layer may have
        no tensor to be asked for.
        """
        known = layer in self.rel_keys
        if isinstance(weight, Tensor) and not torch.compiler.is_compiling():
            _watch_optimizers()
            # A tensor of inference mode counts no versions: whether it was written to nobody knows.
            written = None if weight.is_inference() else weight._version
            version = written, _optimizer_steps, working_dtype(weight)
            before = self.weights.get(layer)
            if written is None or before is None or before[0]() is not weight or before[1] != version:
                known, self.weights[layer] = False, (weakref.ref(weight), version)
        if not known:
            self.rel_keys[layer] = _in_place(project())
        return self.rel_keys[layer]

    def forget(self):
        """Let the next call project all anew."""
        self.positions, self.rel_keys, self.weights = None, {}, {}

    def crop(self, length: int):
        """Keep the nearest `length` distances, of a static cache, whose graph knows them by their number."""
        if self.positions is not None and len(self.positions) > length:
            self.positions = self.positions[-length:].contiguous()
            self.rel_keys = {layer: _in_place(keys[:, -length:]) for layer, keys in self.rel_keys.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptDistances":
        # Nothing writes to what has been projected, so that the texts that go on from one cache share it.
        return replace(self, rel_keys=dict(self.rel_keys), weights=dict(self.weights))

    def __getstate__(self) -> dict[str, Any]:
        # A cache is pickled without the model's weights.
        return self.__dict__ | {"weights": {}}


def _in_place(keys: Tensor) -> Tensor:
    """(H, n, Dh), laid out as one query reads them in the least time. A CUDA graph knows them by where they lie: it
    would copy others each time that it is replayed."""
    if torch.compiler.is_compiling():
        return keys.contiguous()
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2) if reads_columns_sooner(keys) else keys.contiguous()
    torch._dynamo.mark_static_address(keys)
    return keys


class Distances(NamedTuple):
    """What tells the attention of a layer of distances.

    Attributes:
        positions: (n, D) sinusoids or (n, H, Dh) learned keys, furthest distance first. With fewer than K, all further
            distances share the first one.
        content_bias, position_bias, rel_bias: see `relative_attention`.
        kept: keeps the sinusoids as each layer has projected them, for later calls. None: they are of this call.
    """

    positions: Tensor | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    rel_bias: Tensor | None = None
    kept: KeptDistances | None = None


class Positions:
    """An encoding: the interface, and for each method what most encodings need, nothing."""

    # Whether positions are counted from each query, so that a memory may precede the segment. The others are the
    # paper's baselines, whose positions are counted from the segment's last real token.
    recurrent = True
    # Whether, with `pre_lnorm`, what the queries are made of is normalised too.
    normalizes_queries = True
    # Whether there are rows to learn, so many as the configuration's `max_klen`.
    learned = False
    # Whether the heads together are as wide as the hidden states.
    spans_heads = False

    @classmethod
    def check_segment(cls, length: int, config: Any, given: str = "the call") -> None:
        """Refuse more tokens at once than there are positions for.

        Raises:
            ValueError: names `given`, by which so many are read.
        """

    @staticmethod
    def add_to_model(model: Any) -> None:
        """Give a `TransfoXLModel` what all layers learn together."""

    @staticmethod
    def add_to_attention(attention: Any) -> None:
        """Give a layer's `TransfoXLAttention` what it learns of its own: `r_proj` and biases."""

    @staticmethod
    def enter_model(model: Any, embeds: Tensor, clamp_len: int, key_mask: Tensor | None) -> Tensor:
        """What the first layer sees of the embeddings: (B, L, D). `key_mask`: (B, K) bool, real keys; None: all."""
        return embeds

    @staticmethod
    def enter_layer(model: Any, layer: int, hidden_states: Tensor, key_mask: Tensor | None) -> Tensor:
        """What a layer sees of the hidden states: (B, L, D). `key_mask`: see `enter_model`."""
        return hidden_states

    @staticmethod
    def distances(
        model: Any, key_length: int, embeds: Tensor, kept: KeptDistances | None, clamp_len: int, mem_len: int
    ) -> list[Distances]:
        """For each layer what tells its attention of the distances K - 1, …, 0. Those that share a key by `clamp_len`
        need but one.

        Args:
            key_length: K.
            embeds: (B, L, D), for their type and device.
            kept: keeps what does not change between calls.
            clamp_len, mem_len: the lengths of this call.
        """
        return [Distances()] * model.config.n_layer


class RelativeSinusoids(Positions):
    """The paper's (Section 3.3): the key of a distance is W_k,R R, and u and v are each layer's or, without `untie_r`,
    everybody's."""

    @staticmethod
    def add_to_model(model: Any) -> None:
        if not model.config.untie_r:
            _add_biases(model)

    @staticmethod
    def add_to_attention(attention: Any) -> None:
        config = attention.config
        attention.r_proj = nn.Linear(config.d_model, config.n_head * config.d_head, bias=False)
        if config.untie_r:
            _add_biases(attention)

    @staticmethod
    def distances(
        model: Any, key_length: int, embeds: Tensor, kept: KeptDistances | None, clamp_len: int, mem_len: int
    ) -> list[Distances]:
        most = clamp_len + 1 if clamp_len > 0 else None
        if kept is None:
            if model.position_dropout.training:
                # Dropout draws for each distance by itself.
                most = None
            length = _different(key_length, most)
            positions = model.position_dropout(sinusoids_of_distances(length, embeds, clamp_len))
        else:
            # At once as many as a full memory needs, so that a growing one asks for them only once.
            length = _different(max(key_length, mem_len + 1), most)
            if kept.positions is None or len(kept.positions) < length or kept.clamp_len != clamp_len:
                kept.positions = sinusoids_of_distances(length, embeds, clamp_len)
                kept.rel_keys, kept.clamp_len = {}, clamp_len
            positions = kept.positions
        shared = Distances(positions, kept=kept)
        if not model.config.untie_r:
            shared = shared._replace(content_bias=model.content_bias, position_bias=model.position_bias)
        return [shared] * model.config.n_layer


class RelativeLearned(Positions):
    """Of Shaw et al. (2018), as the authors' code has it: a learned key and a learned score for each distance."""

    learned = True

    @staticmethod
    def add_to_model(model: Any) -> None:
        config = model.config
        model.content_bias = nn.Parameter(torch.empty(config.n_layer, config.n_head, config.d_head))
        model.r_emb = _learned_rows(config)
        model.r_bias = nn.Parameter(torch.empty(config.n_layer, config.n_positions, config.n_head))

    @staticmethod
    def distances(
        model: Any, key_length: int, embeds: Tensor, kept: KeptDistances | None, clamp_len: int, mem_len: int
    ) -> list[Distances]:
        learned = model.config.n_positions
        furthest = min(clamp_len, learned) if clamp_len > 0 else learned
        length = _different(key_length, furthest)
        rows = learned - 1 - torch.arange(length - 1, -1, -1, device=embeds.device).clamp(max=furthest - 1)
        return [
            Distances(model.r_emb[i, rows], model.content_bias[i], rel_bias=model.r_bias[i, rows].T)
            for i in range(model.config.n_layer)
        ]


class AbsoluteSinusoids(Positions):
    """Of Vaswani et al. (2017): sinusoids are added to the embeddings."""

    recurrent = False
    # The original normalises what keys and values are made of, but not the queries.
    normalizes_queries = False

    @staticmethod
    def enter_model(model: Any, embeds: Tensor, clamp_len: int, key_mask: Tensor | None) -> Tensor:
        return embeds + _of_real_tokens(sinusoids_of_distances(embeds.shape[1], embeds, clamp_len), key_mask)


class AbsoluteLearned(Positions):
    """Of Al-Rfou et al. (2018): every layer adds positions that it has learned."""

    recurrent = False
    normalizes_queries = False
    learned = True
    spans_heads = True

    @classmethod
    def check_segment(cls, length: int, config: Any, given: str = "the call") -> None:
        if length > config.n_positions:
            raise ValueError(
                f"{given} reads {length} tokens at once, but the model learned max_klen={config.max_klen} absolute "
                "positions (tgt_len + ext_len + mem_len)"
            )

    @staticmethod
    def add_to_model(model: Any) -> None:
        model.r_emb = _learned_rows(model.config)

    @staticmethod
    def enter_model(model: Any, embeds: Tensor, clamp_len: int, key_mask: Tensor | None) -> Tensor:
        AbsoluteLearned.check_segment(embeds.shape[1], model.config)
        return embeds

    @staticmethod
    def enter_layer(model: Any, layer: int, hidden_states: Tensor, key_mask: Tensor | None) -> Tensor:
        return hidden_states + _of_real_tokens(model.r_emb[layer, -hidden_states.shape[1] :].flatten(1), key_mask)


# By `attn_type`, as the authors number them.
POSITIONS: dict[int, type[Positions]] = {
    0: RelativeSinusoids,
    1: RelativeLearned,
    2: AbsoluteSinusoids,
    3: AbsoluteLearned,
}


def _of_real_tokens(positions: Tensor, key_mask: Tensor | None) -> Tensor:
    """The positions of a segment's tokens, counted from each row's last real one: padding behind it has that one's.

    Args:
        positions: (L, D), the furthest first. key_mask: (B, L) bool, which tokens are real; None: all.

    Returns:
        (B, L, D), or (L, D) for all rows alike.
    """
    if key_mask is None:
        return positions
    # A trace must not be bound to this length, which `len` would be a number of.
    length = positions.shape[0]
    columns = torch.arange(length, device=positions.device)
    last = (columns * key_mask).amax(-1, keepdim=True)
    return positions[(columns + length - 1 - last).clamp(max=length - 1)]


def _add_biases(module: Any) -> None:
    """u and v, (H, Dh)."""
    heads = (module.config.n_head, module.config.d_head)
    module.content_bias = nn.Parameter(torch.empty(heads))
    module.position_bias = nn.Parameter(torch.empty(heads))


def _learned_rows(config: Any) -> nn.Parameter:
    """(n_layer, max_klen, H, Dh), the furthest position first."""
    return nn.Parameter(torch.empty(config.n_layer, config.n_positions, config.n_head, config.d_head))
