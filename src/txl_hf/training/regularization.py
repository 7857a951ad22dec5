"""Regularisers for small corpora, as the Penn Treebank and WikiText-2 recipes need them. Off by default.

* Locked dropout (Gal and Ghahramani, 2016, https://arxiv.org/abs/1512.05287; Merity et al., 2017,
  https://arxiv.org/abs/1708.02182, Section 4.2): one mask for all positions of a row, drawn anew in every forward.
* Word dropout (the same, Sections 5 and 4.3): whole words of the embedding, except padding and the first token of a
  segment or of a document in it, which may see nothing else: its state would be zero, and each LayerNorm multiplies
  the gradient of a zero by 1/√ε = 316, which after sixteen layers is beyond fp32.
* Activation regularisation, AR, and temporal activation regularisation, TAR (Merity et al., 2017, Section 4.6).

Hooks and modules of a model do this, so that it is saved and loaded like any other.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..command_line import option
from ..transfo_xl.masks_transfo_xl import DOCUMENT_KEYWORDS, packed_starts
from ..transfo_xl.modeling_transfo_xl import TransfoXLModel

_RATES = ("word_dropout", "input_dropout", "attention_dropout", "mlp_dropout", "output_dropout")
# Names of the arguments that a call may give by position.
_INPUTS = tuple(inspect.signature(TransfoXLModel.forward).parameters)[1:]


@dataclass
class RegularizationArguments:
    """Rates in [0, 1) and coefficients from 0 on; others are a ValueError. Each rate above 0 except `word_dropout`
    replaces `config.dropout`.
    """

    word_dropout: float = option("Rate at which whole words of the embedding are dropped in a forward.", 0.0)
    input_dropout: float = option("Rate of locked dropout of the embedded input, in place of config.dropout.", 0.0)
    attention_dropout: float = option("Rate of locked dropout of attention's output, in place of config.dropout.", 0.0)
    mlp_dropout: float = option(
        "Rate of locked dropout in and after the feed-forward, in place of config.dropout.", 0.0
    )
    output_dropout: float = option("Rate of locked dropout of the final output, in place of config.dropout.", 0.0)
    ar: float = option("Coefficient of the mean square of the dropped final output (AR).", 0.0)
    tar: float = option("Coefficient of the mean square of the final output's steps in time (TAR).", 0.0)

    def __post_init__(self):
        for name in _RATES:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        for name in ("ar", "tar"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0")


class LockedDropout(nn.Dropout1d):
    """Dropout of whole channels of (B, L, D).

    Attributes:
        masks: of the calls to come, (B, 1, D) of 0 or 1 / (1 - p); a call without one draws its own.
    """

    masks: Sequence[Tensor] = ()

    def forward(self, states: Tensor) -> Tensor:
        if not (self.training and self.masks):
            return super().forward(states.transpose(1, 2)).transpose(1, 2)
        mask, *self.masks = self.masks
        return states * mask.to(states)


def regularize(model: nn.Module, arguments: RegularizationArguments) -> "Regularizer":
    """Regularise a model in place, in training mode only.

    Memory holds the inputs of the layers: for the first layer, embeddings with the dropout of the call that read them.

    Args:
        model: Transformer-XL with any head, bare or wrapped (PEFT, DDP, …); before it is compiled or sharded.

    Raises:
        ValueError: there is no Transformer-XL in the model.
    """
    return Regularizer(model, arguments)


class Regularizer:
    """Result of `regularize`: computes the penalty to add to the loss."""

    def __init__(self, model: nn.Module, arguments: RegularizationArguments):
        transformer = next((module for module in model.modules() if isinstance(module, TransfoXLModel)), None)
        if transformer is None:
            raise ValueError(f"there is no Transformer-XL in the {type(model).__name__} that is to be regularised")
        self.arguments = arguments
        self._transformer = transformer
        # Locked dropouts, with the widths of their masks in a forward; and 1 - p of each channel.
        self._locked: list[tuple[LockedDropout, tuple[int, ...]]] = []
        self._kept = torch.empty(0)
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._begins: Tensor | None = None

        width, inner = transformer.config.d_model, transformer.config.d_inner
        self._lock(transformer, "input_dropout", arguments.input_dropout, width)
        for layer in transformer.layers:
            self._lock(layer.get_submodule("self_attn"), "dropout", arguments.attention_dropout, width)
            self._lock(layer.get_submodule("mlp"), "dropout", arguments.mlp_dropout, inner, width)
        self._lock(transformer, "output_dropout", arguments.output_dropout, width)
        if self._locked:
            self._kept = torch.cat([torch.full((sum(widths),), 1 - lock.p) for lock, widths in self._locked])
            transformer.input_dropout.register_forward_pre_hook(self._draw_masks)
        if arguments.word_dropout:
            if transformer.config.vocab_size == 0:
                raise ValueError("word_dropout drops words, but vocab_size=0 means that there are none: set it to 0")
            transformer.register_forward_pre_hook(self._see_what_begins, with_kwargs=True)
            transformer.embed_tokens.register_forward_hook(self._drop_words)
        if arguments.ar or arguments.tar:
            transformer.output_dropout.register_forward_hook(self._keep_outputs)
        if any(vars(arguments).values()):
            # Code that was compiled before does not check for hooks.
            torch.compiler.reset()

    def penalty(self, shift_labels: Tensor | None = None, resets: Tensor | None = None) -> Tensor:
        """AR and TAR of the last forward in training mode: a scalar in fp32, to be added to its loss. With h the final
        output and m its dropout: ar · mean((m h)²) + tar · mean((h_t - h_(t-1))²).

        Args:
            shift_labels: (B, L), of which positions that are -100 are left out. None: all count.
            resets: (B, L) bool, those of the forward. TAR leaves out the step from a document to the next.

        Raises:
            RuntimeError: there was no forward in training mode.
            ValueError: shift_labels or resets are not those of the last forward.
        """
        if not (self.arguments.ar or self.arguments.tar):
            return torch.zeros((), device=self._transformer.device)
        if self._outputs is None:
            raise RuntimeError("penalty() is that of the last forward in training mode, but there was none")
        raw, dropped = (states.float() for states in self._outputs)
        everywhere = torch.ones(raw.shape[:2], device=raw.device)
        counted = everywhere if shift_labels is None else (shift_labels != -100).to(raw.device)
        goes_on = everywhere if resets is None else ~resets.to(raw.device)
        for name, given in (("shift_labels", counted), ("resets", goes_on)):
            if given.shape != raw.shape[:2]:
                raise ValueError(f"{name} are {tuple(given.shape)}, but the forward was {tuple(raw.shape[:2])}")
        steps = _mean((raw[:, 1:] - raw[:, :-1]).square().mean(-1), counted[:, 1:] * counted[:, :-1] * goes_on[:, 1:])
        return self.arguments.ar * _mean(dropped.square().mean(-1), counted) + self.arguments.tar * steps

    def __getstate__(self) -> dict[str, Any]:
        """The state without tensors that have a graph, which cannot be copied."""
        return self.__dict__ | {"_outputs": None, "_begins": None}

    def _lock(self, parent: nn.Module, name: str, rate: float, *widths: int):
        if rate:
            lock = LockedDropout(rate).train(getattr(parent, name).training)
            setattr(parent, name, lock)
            self._locked.append((lock, widths))

    def _draw_masks(self, input_dropout: nn.Module, args: tuple[Tensor]):
        """Draw all masks of a forward at once: to launch a draw on a GPU takes longer than to draw."""
        # A checkpointed layer, which is computed again later, draws the same only by itself.
        if not input_dropout.training or self._transformer.gradient_checkpointing:
            return
        self._kept = self._kept.to(args[0].device)
        masks = torch.bernoulli(self._kept.expand(len(args[0]), 1, -1)) / self._kept
        together = masks.split([sum(widths) for _, widths in self._locked], dim=-1)
        for (lock, widths), masks in zip(self._locked, together, strict=True):
            lock.masks = masks.split(widths, dim=-1)

    def _see_what_begins(self, transformer: nn.Module, args: tuple, kwargs: dict):
        """Record the tokens that begin inside the segment; the model itself refuses wrong shapes."""
        self._begins = None
        given = dict(zip(_INPUTS, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        ids, mask, resets = (given.get(name) for name in ("input_ids", "attention_mask", "resets"))
        if ids is None or ids.dim() != 2 or not transformer.training:
            return
        found = [resets]
        if documents := {name: given[name] for name in DOCUMENT_KEYWORDS if name in given}:
            found.append(packed_starts(tuple(ids.shape), ids.device, mask, **documents))
        if mask is not None and mask[..., -ids.shape[1] :].shape == ids.shape:
            # Padding, and the token behind it.
            real = mask[:, -ids.shape[1] :].to(ids.device) != 0
            found.append(~real | ~F.pad(real, (1, 0))[:, :-1])
        fitting = [
            begins.to(ids.device)
            for begins in found
            if begins is not None and begins.dtype == torch.bool and begins.shape == ids.shape
        ]
        self._begins = functools.reduce(torch.logical_or, fitting) if fitting else None

    def _drop_words(self, embed_tokens: nn.Module, args: tuple, embeds: Tensor) -> Tensor:
        # Not rows of the tables, which a tied softmax reads too.
        begins, self._begins = self._begins, None
        if not embed_tokens.training:
            return embeds
        words = F.dropout(embeds.new_ones(self._transformer.config.vocab_size), self.arguments.word_dropout)
        kept = words[args[0]]
        if begins is not None and begins.shape == kept.shape:
            kept = kept.masked_fill(begins.to(kept.device), 1)
        kept[..., :1] = 1
        return embeds * kept[..., None]

    def _keep_outputs(self, dropout: nn.Module, args: tuple, dropped: Tensor):
        if dropout.training:
            self._outputs = args[0], dropped


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of the (B, n) values that count; 0 where none does."""
    return (values * counted).sum() / counted.sum().clamp(min=1)
