"""The package's attention for transformers' Conformers and XLNet, which compute Section 3.3 in both directions.

transformers materialises (b) + (d) as (B, H, L, K + L - 1), in several copies; `use_relative_attention(model)` lets
the attention modules of one model compute blocks of queries instead, whose memory grows linearly with the length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .transfo_xl.attention_transfo_xl import relative_attention

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Names:
    """The attribute names of the parts of an attention module: projections of queries, keys, values, the output, and
    W_R of positions; biases u and v; the argument with the encodings, (1 or B, n, D), the furthest distance first; the
    width of a head; and dropout of probabilities and of positions, the latter drawn for each row of a batch."""

    projections: tuple[str, str, str, str, str]
    biases: tuple[str, str]
    positions: str
    head_dim: str
    dropout: Callable[[Any], float]
    position_dropout: Callable[[Any], float] = lambda module: 0.0


def _attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, biases: tuple[Tensor, Tensor], apart: bool, **options: Any
) -> Tensor:
    """Attended values, (B, L, H, Dh), of queries (B, H, L, Dh) and K keys and values. `rows`, W_R R, are (1 or B, n,
    H, Dh) from distance K - 1 on; with `apart` each row of the batch uses its own."""
    if apart and len(rows) > 1:
        parts = []
        for b in range(len(rows)):
            row = slice(b, b + 1)
            own = {name: t[row] if isinstance(t, Tensor) and len(t) > 1 else t for name, t in options.items()}
            parts.append(_attend(query[row], key[row], value[row], rows[row], biases, False, **own))
        return torch.cat(parts)
    L, K = query.shape[2], key.shape[2]
    future = min(L - 1, rows.shape[1] - K)
    rel_key = rows[0, : K + future].transpose(0, 1)
    options |= {"future": future, "implementation": "auto"}
    return relative_attention(query, key, value, rel_key, *biases, **options)[0].transpose(1, 2)


def _conformer(
    self: Any,
    names: Names,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of a Conformer's attention. The mask has True or 0 where a query sees a key."""
    heads = -1, getattr(self, names.head_dim)
    to_query, to_key, to_value, to_output, to_rows = (getattr(self, name) for name in names.projections)
    query, key, value = (
        projection(hidden_states).unflatten(-1, heads).transpose(1, 2) for projection in (to_query, to_key, to_value)
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    positions = kwargs[names.positions]
    apart = self.training and names.position_dropout(self) > 0
    rows = to_rows(positions if apart else positions[:1]).unflatten(-1, heads)
    hidden = None
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < 0
    attended = _attend(
        query,
        key,
        value,
        rows,
        tuple(getattr(self, name) for name in names.biases),
        apart,
        hidden=hidden,
        dropout=names.dropout(self) if self.training else 0.0,
    )
    return to_output(attended.flatten(2)), None


def _fastspeech(
    self: Any, names: Names, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`_conformer` with a mask of keys, (B, 1, K), 0 for padding."""
    if attention_mask is not None:
        attention_mask = (attention_mask != 0)[:, None].expand(-1, -1, hidden_states.shape[1], -1)
    return _conformer(self, names, hidden_states, attention_mask, **kwargs)


def _xlnet(
    self: Any,
    names: None,
    q_head: Tensor,
    k_head_h: Tensor,
    v_head_h: Tensor,
    k_head_r: Tensor,
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Tensor:
    """XLNet's `rel_attn_core`: the terms of Section 3.3 and one of segments, (L or K, B, H, Dh) → (L, B, H, Dh)."""
    query, key, value = (states.permute(1, 2, 0, 3) for states in (q_head, k_head_h, v_head_h))
    score_bias = None
    if seg_mat is not None:
        of_segment = torch.einsum("ibnd,snd->ibns", q_head + self.r_s_bias, self.seg_embed) * self.scale
        score_bias = torch.einsum("ijbs,ibns->bnij", seg_mat, of_segment)
    if attn_mask is not None:
        # An additive mask, so that a query that sees nothing has the same gradients as in XLNet.
        hiding = attn_mask.permute(2, 3, 0, 1) * (-65500 if attn_mask.dtype == torch.float16 else -1e30)
        score_bias = hiding if score_bias is None else score_bias + hiding
    p = self.dropout.p if self.training else 0.0
    # Without the first row, because no query and key have its distance, K.
    rows, biases = k_head_r[1:].transpose(0, 1), (self.r_w_bias, self.r_r_bias)
    attended = _attend(query, key, value, rows, biases, p > 0, scaling=self.scale, score_bias=score_bias, dropout=p)
    return attended.transpose(0, 1)


PARAKEET = Names(
    ("q_proj", "k_proj", "v_proj", "o_proj", "relative_k_proj"),
    ("bias_u", "bias_v"),
    "position_embeddings",
    "head_dim",
    dropout=lambda module: module.attention_dropout,
    position_dropout=lambda module: module.config.dropout_positions,
)
WAV2VEC2 = Names(
    ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos"),
    ("pos_bias_u", "pos_bias_v"),
    "relative_position_embeddings",
    "head_size",
    dropout=lambda module: module.dropout.p,
)
FASTSPEECH = Names(WAV2VEC2.projections, WAV2VEC2.biases, "pos_emb", "head_dim", dropout=WAV2VEC2.dropout)
# Classes by name, because some versions of transformers lack some: the replaced method, the replacement, its names.
SUPPORTED: dict[str, tuple[str, Callable[..., Any], Names | None]] = {
    "ParakeetEncoderAttention": ("forward", _conformer, PARAKEET),
    "NemotronAsrStreamingEncoderAttention": ("forward", _conformer, PARAKEET),
    "Wav2Vec2ConformerSelfAttention": ("forward", _conformer, WAV2VEC2),
    "Wav2Vec2BertSelfAttention": ("forward", _conformer, WAV2VEC2),
    "SeamlessM4TConformerSelfAttention": ("forward", _conformer, WAV2VEC2),
    "FastSpeech2ConformerAttention": ("forward", _fastspeech, FASTSPEECH),
    "XLNetRelativeAttention": ("rel_attn_core", _xlnet, None),
}


class RelativeMethod:
    """The replacement of a method in one attention module; a copy of the module has the method of its class again."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.name, self.run, self.names = SUPPORTED[type(module).__name__]
        functools.update_wrapper(self, getattr(type(module), self.name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self.module, "config", None)
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            return own_method(self.module, self.name)(*args, **kwargs)
        return self.run(self.module, self.names, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return own_method, (self.module, self.name)


def own_method(module: nn.Module, name: str) -> Any:
    """The method of a module's class."""
    return getattr(type(module), name).__get__(module)


def use_relative_attention(model: Model) -> Model:
    """Replace the attention of a model of transformers, modules of `SUPPORTED`, by this package's, in place, and
    return the model. Its copies and saved files are transformers' own, and so is a call with `output_attentions`.

    Raises:
        ValueError: the model has no such attention, or it is XLNet with `bi_data`.
    """
    found = [module for module in model.modules() if _has_relative_attention(module)]
    if not found:
        types = {getattr(module, "position_embeddings_type", "relative") for module in model.modules()} - {"relative"}
        other = f": position_embeddings_type is {' or '.join(map(repr, sorted(map(str, types))))}, not 'relative'"
        raise ValueError(
            f"{type(model).__name__} has no attention of Transformer-XL{other if types else ''}. "
            f"Supported are transformers' {', '.join(SUPPORTED)}"
        )
    if any(getattr(module, "bi_data", False) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} with bi_data=True has two orders of positions: use bi_data=False")
    for module in found:
        setattr(module, SUPPORTED[type(module).__name__][0], RelativeMethod(module))
    return model


def _has_relative_attention(module: nn.Module) -> bool:
    kind = type(module)
    named = kind.__name__ in SUPPORTED and kind.__module__.startswith("transformers.models.")
    return named and getattr(module, "position_embeddings_type", "relative") == "relative"


def restore_attention(model: Model) -> Model:
    """Undo `use_relative_attention`, in place, and return the model; other models stay unchanged."""
    for module in model.modules():
        for name in ("forward", "rel_attn_core"):
            if isinstance(vars(module).get(name), RelativeMethod):
                delattr(module, name)
    return model
