"""Encodings of positions, a class for each `attn_type`.

A class defines the parameters of its encoding, the terms that it adds to the hidden states and to each layer's
attention, and whether a memory may precede the segment. A new encoding is a new class in `POSITIONS`.

Letters: B batch, L segment, K = m + L keys (memory, then segment), D = `d_model`, H heads, Dh head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def is_exporting(unknown: bool = False) -> bool:
    """Whether torch.export is tracing; `unknown` up to PyTorch 2.6. By the private flag, because PyTorch 2.11's
    `torch.compiler.is_exporting()` is also True in torch.compile."""
    return getattr(torch.compiler, "_is_exporting_flag", unknown)


def sinusoid(positions: Tensor, width: int) -> Tensor:
    """R of the paper: sines, then cosines, of positions (K,), fp32 or fp64: (K, width), of their type."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype) / width
    # The originals' order of operations, because another one changes the angle at distance 1,000 by 1e-4.
    angles = torch.outer(positions, 1 / 10000.0**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sinusoids_of_distances(key_length: int, embeds: Tensor, clamp_len: int) -> Tensor:
    """R for the distances K - 1, …, 0: (K, D), of the type of `embeds` (…, D); beyond `clamp_len` they share a row."""
    # fp32 at least, because bf16 rounds distances above 256.
    dtype = torch.promote_types(embeds.dtype, torch.float32)
    distances = torch.arange(key_length - 1, -1, -1, device=embeds.device, dtype=dtype)
    if clamp_len > 0:
        distances = distances.clamp(max=clamp_len)
    return sinusoid(distances, embeds.shape[-1]).to(embeds.dtype)


def _is_symbol() -> bool:
    """Whether K is a symbol, which cannot be compared: in an export or a trace."""
    return torch.jit.is_tracing() or (torch.compiler.is_compiling() and is_exporting(unknown=True))


def draws(dropout: nn.Module) -> bool:
    """Whether a module of dropout, or one in its place, draws in this call."""
    return dropout.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1) > 0


def decay_of_distances(key_length: int, config: Any, embeds: Tensor) -> Tensor | None:
    """The score -2 ln(distance / `decay_len`) of the distances K - 1, …, 0, and 0 up to `decay_len`: (H, K), to be
    scaled as scores are, of the type of `embeds`. None if no distance is beyond `decay_len`.

    KERPLE (Chi et al., 2022, https://arxiv.org/abs/2205.09921) learns such scores from the first distance on. Here the
    distances of training have 0, so that any trained model can be given the decay.
    """
    if not (_is_symbol() or key_length - 1 > config.decay_len):
        return None
    dtype = torch.promote_types(embeds.dtype, torch.float32)
    distances = torch.arange(key_length - 1, -1, -1, device=embeds.device, dtype=dtype)
    scores = -2 * config.d_head**0.5 * (distances / config.decay_len).clamp(min=1).log()
    return scores.to(embeds.dtype).expand(config.n_head, -1)


class Distances(NamedTuple):
    """Terms that the attention of a layer adds to its scores for each distance.

    Attributes:
        positions: (n, D) sinusoids or (n, H, Dh) learned keys, furthest distance first, which all further ones share.
        content_bias, position_bias, rel_bias: see `AttentionInputs`; None: the layer's own, or none.
    """

    positions: Tensor | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    rel_bias: Tensor | None = None


class Positions:
    """The interface of an encoding, which adds nothing."""

    # Whether positions are counted from each query, so that a memory may precede the segment; else from the segment's
    # last real token.
    recurrent = True
    # Whether, with `pre_lnorm`, the input of the queries is normalised too.
    normalizes_queries = True
    # Whether the encoding learns rows, as many as the configuration's `max_klen`.
    learned = False
    # Whether the heads together must be as wide as the hidden states.
    spans_heads = False

    @classmethod
    def check_segment(cls, length: int, config: Any, given: str = "the call") -> None:
        """Raise a ValueError, which names `given`, unless each of `length` tokens read at once has a position."""

    @staticmethod
    def add_to_model(model: Any) -> None:
        """Add the parameters that all layers share to a `TransfoXLModel`."""

    @staticmethod
    def add_to_attention(attention: Any) -> None:
        """Add a layer's own parameters, `r_proj` and biases, to its `TransfoXLAttention`."""

    @staticmethod
    def enter_model(model: Any, embeds: Tensor, clamp_len: int, key_mask: Tensor | None) -> Tensor:
        """The first layer's input from the embeddings: (B, L, D). `key_mask`: (B, K) bool, real keys; None: all."""
        return embeds

    @staticmethod
    def enter_layer(model: Any, layer: int, hidden_states: Tensor, key_mask: Tensor | None) -> Tensor:
        """A layer's input from the hidden states: (B, L, D). `key_mask`: see `enter_model`."""
        return hidden_states

    @staticmethod
    def distances(model: Any, key_length: int, embeds: Tensor, clamp_len: int) -> list[Distances]:
        """For each layer the terms of the distances K - 1, …, 0; those beyond `clamp_len` share one row. `embeds`,
        (…, D), give type and device."""
        return [Distances()] * model.config.n_layer


class RelativeSinusoids(Positions):
    """The paper's encoding (Section 3.3): the key of a distance is W_k,R R; without `untie_r` layers share u and v."""

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
    def distances(model: Any, key_length: int, embeds: Tensor, clamp_len: int) -> list[Distances]:
        config, dropout, decay = model.config, model.position_dropout, None
        if config.decay_len > 0:
            decay = decay_of_distances(key_length, config, embeds)
            clamp_len = min(clamp_len, config.decay_len) if clamp_len > 0 else config.decay_len
        # Distances share no row under dropout, because it draws for each distance.
        shares = clamp_len > 0 and decay is None and not draws(dropout) and not _is_symbol()
        length = min(key_length, clamp_len + 1) if shares else key_length
        shared = Distances(dropout(sinusoids_of_distances(length, embeds, clamp_len)), rel_bias=decay)
        if config.untie_r:
            return [shared] * config.n_layer
        # A view for each layer, so that autograd adds the gradients of all layers in one operation.
        biases = (bias.expand(config.n_layer, -1, -1).unbind() for bias in (model.content_bias, model.position_bias))
        return [shared._replace(content_bias=u, position_bias=v) for u, v in zip(*biases, strict=True)]


class RelativeLearned(Positions):
    """The encoding of Shaw et al. (2018) in the authors' code: a learned key and a learned score for each distance."""

    learned = True

    @staticmethod
    def add_to_model(model: Any) -> None:
        config = model.config
        model.content_bias = nn.Parameter(torch.empty(config.n_layer, config.n_head, config.d_head))
        model.r_emb = _learned_rows(config)
        model.r_bias = nn.Parameter(torch.empty(config.n_layer, config.n_positions, config.n_head))

    @staticmethod
    def distances(model: Any, key_length: int, embeds: Tensor, clamp_len: int) -> list[Distances]:
        learned = model.config.n_positions
        furthest = min(clamp_len, learned) if clamp_len > 0 else learned
        length = key_length if _is_symbol() else min(key_length, furthest)
        rows = learned - 1 - torch.arange(length - 1, -1, -1, device=embeds.device).clamp(max=furthest - 1)
        return [
            Distances(model.r_emb[i, rows], model.content_bias[i], rel_bias=model.r_bias[i, rows].T)
            for i in range(model.config.n_layer)
        ]


class AbsoluteSinusoids(Positions):
    """The encoding of Vaswani et al. (2017): sinusoids are added to the embeddings."""

    recurrent = False
    # As in the original, which normalises the input of keys and values, but not that of queries.
    normalizes_queries = False

    @staticmethod
    def enter_model(model: Any, embeds: Tensor, clamp_len: int, key_mask: Tensor | None) -> Tensor:
        return embeds + _of_real_tokens(sinusoids_of_distances(embeds.shape[1], embeds, clamp_len), key_mask)


class AbsoluteLearned(Positions):
    """The encoding of Al-Rfou et al. (2018): every layer adds learned positions of its own."""

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
    """Positions, (L, D), of a segment's tokens, counted from each row's last real one by `key_mask`, (B, L) bool or
    None; later padding shares its position: (B, L, D), or (L, D) for all rows."""
    if key_mask is None:
        return positions
    # Not `len`, because a trace would record its number as a constant.
    length = positions.shape[0]
    columns = torch.arange(length, device=positions.device)
    last = (columns * key_mask).amax(-1, keepdim=True)
    return positions[(columns + length - 1 - last).clamp(max=length - 1)]


def _add_biases(module: Any) -> None:
    """Add u and v, (H, Dh) each, to a module."""
    heads = (module.config.n_head, module.config.d_head)
    module.content_bias = nn.Parameter(torch.empty(heads))
    module.position_bias = nn.Parameter(torch.empty(heads))


def _learned_rows(config: Any) -> nn.Parameter:
    """(n_layer, max_klen, H, Dh), the furthest position first."""
    return nn.Parameter(torch.empty(config.n_layer, config.n_positions, config.n_head, config.d_head))
