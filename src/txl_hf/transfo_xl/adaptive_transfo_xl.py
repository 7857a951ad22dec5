"""Adaptive input and adaptive softmax over frequency-sorted bins of the vocabulary.

The vocabulary is cut at `cutoffs` into bins; bin i has embeddings of width d_i = `d_embed // div_val**i`, projected to
D, the width of the model (Baevski and Auli, 2019). With div_val = 1 all bins share one table. In the softmax (Grave et
al., 2017), bin 0 and one entry for each further bin ("cluster") form the head; the probability of a token in bin i is
that of its cluster times that within the bin. V is the size of the vocabulary.

Every parameter is read in the forward of the module that owns it, so that offloading and sharding hooks see it.
"""

from collections.abc import Callable
from functools import reduce
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from .attention_transfo_xl import OPERATORS
from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import can_look, without_padding
from .positions_transfo_xl import is_exporting

logger = logging.get_logger(__name__)

# Logits up to which `plain_nll` computes the losses, because it is as fast for so few.
FEW_LOGITS = 2**18


class InputProjection(nn.Module):
    """From the width of a bin, (..., d_i), to that of the model, (..., D). It can be tied to an `OutputProjection`; no
    `nn.Linear`, because code that adapts or replaces those would change two tied modules differently."""

    def __init__(self, width: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, width))

    def forward(self, embeds: Tensor) -> Tensor:
        return F.linear(embeds, self.weight)


class OutputProjection(InputProjection):
    """From the width of the model, (..., D), to that of a bin, (..., d_i)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.weight.T)


class OutputLayer(nn.Module):
    """A table of tokens, (n, d_i), with their biases, (n,). `layer(function, *arguments)` is `function(weight, bias,
    *arguments)`, so that hooks run before the parameters are read."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, function: Callable, *arguments) -> Any:
        return function(self.weight, self.bias, *arguments)


def _is_projected(config: TransfoXLConfig, width: int) -> bool:
    """Whether a bin of this width has a projection; otherwise it is the identity and has no parameter."""
    return width != config.d_model or (config.div_val > 1 and config.proj_same_dim)


def _tables(config: TransfoXLConfig) -> list[tuple[int, int]]:
    """(tokens, width) of each table of embeddings: one for each bin, or one for all with div_val = 1."""
    if config.div_val == 1:
        return [(config.vocab_size, config.d_embed)]
    return [(end - start, width) for start, end, width in config.bins]


def _first_tied_projection(config: TransfoXLConfig) -> int | None:
    """The first bin whose projections are tied though the tables are not, or None."""
    if config.tie_word_embeddings:
        return None
    ties = zip(config.tie_projs or (), config.bins, strict=True)
    return next((i for i, (tie, (_, _, width)) in enumerate(ties) if tie and _is_projected(config, width)), None)


class AdaptiveEmbedding(nn.Module):
    """Token embeddings of all bins, projected to D and scaled by √D as in the original."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.scale = config.d_model**0.5
        self.bins = config.bins
        self.emb_layers = nn.ModuleList(nn.Embedding(tokens, width) for tokens, width in _tables(config))
        self.emb_projs = nn.ModuleList(
            InputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, width in _tables(config)
        )

    @property
    def weight(self) -> nn.Parameter:
        """The first table or, where projections alone are tied, the first of these, because accelerate puts modules
        with the same `weight` on one device."""
        tied = _first_tied_projection(self.config)
        projection = 0 if self.config.div_val == 1 else tied
        return self.get_parameter("emb_layers.0.weight" if tied is None else f"emb_projs.{projection}.weight")

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, L, D) of ids (B, L).

        Raises:
            IndexError: an id is not in [0, V); a RuntimeError in a compiled call of several tokens.
        """
        _check_range(input_ids, self.config.vocab_size, "input_ids", IndexError)
        dtype = self.emb_layers[0].weight.dtype
        if len(self.emb_layers) == 1:
            return self.emb_projs[0](self.emb_layers[0](input_ids)).to(dtype) * self.scale
        # Every bin embeds every token, because the host would wait for the device to select the tokens of each.
        parts = []
        for (start, end, _), embed, project in zip(self.bins, self.emb_layers, self.emb_projs, strict=True):
            place = input_ids - start
            inside = place.clamp(0, end - start - 1)
            # Masked before the projection, where the tensor is narrower, because without a bias zeros stay zeros.
            parts.append(project(embed(inside).masked_fill((place != inside)[..., None], 0)))
        # Under autocast the projections return a narrower type than the embeddings have.
        return reduce(torch.add, parts).to(dtype) * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities and losses from hidden states. Logits are normalised in fp32, or in fp64 if the model is."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.bins = config.bins
        self.out_layers = nn.ModuleList(
            OutputLayer(nn.Parameter(torch.empty(tokens, width)), nn.Parameter(torch.zeros(tokens)))
            for tokens, width in _tables(config)
        )
        self.out_projs = nn.ModuleList(
            OutputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, _, width in config.bins
        )
        if config.cutoffs:
            self.clusters = nn.Linear(config.d_embed, len(config.cutoffs))

    @property
    def weight(self) -> nn.Parameter:
        """See `AdaptiveEmbedding.weight`."""
        tied = _first_tied_projection(self.config)
        return self.get_parameter("out_layers.0.weight" if tied is None else f"out_projs.{tied}.weight")

    @property
    def bias(self) -> nn.Parameter:
        """The biases of all tokens, (V,), which TRL reads. Raises an AttributeError with cutoffs or a projection."""
        if self.config.cutoffs or not isinstance(self.out_projs[0], nn.Identity):
            raise AttributeError("a softmax with cutoffs or projections is no single table with a bias")
        return self.get_parameter("out_layers.0.bias")

    def forward(
        self,
        hidden_states: Tensor,
        targets: Tensor | None = None,
        top_k: int | None = None,
        by_bin: Any = None,
    ) -> Tensor:
        """`nll` of the targets, else `log_prob`, in a forward, because sharding gathers the parameters for it."""
        if targets is None:
            return self.log_prob(hidden_states, top_k)
        return self.nll(hidden_states, targets, by_bin)

    def log_prob(self, hidden_states: Tensor, top_k: int | None = None) -> Tensor:
        """Log-probabilities, (..., V) fp32, of hidden states (..., D), exact for the `top_k` most probable tokens of
        each row at least; None: for all."""
        if top_k is not None and OPERATORS.log_prob is not None:
            return OPERATORS.log_prob(self, hidden_states, top_k)
        head = self.logits(hidden_states, 0).log_softmax(-1)
        if not self.config.cutoffs:
            return head
        first, clusters = head.tensor_split([self.config.cutoffs[0]], dim=-1)
        bins = (self.logits(hidden_states, i).log_softmax(-1) for i in range(1, len(self.bins)))
        return torch.cat([first, *(clusters[..., i, None] + words for i, words in enumerate(bins))], dim=-1)

    def nll(self, hidden_states: Tensor, targets: Tensor, by_bin: Any = None) -> Tensor:
        """Negative log-likelihoods, (N,) fp32, of targets (N,) in [0, V), or 0 where they are -100.

        Args:
            hidden_states: (N, D). by_bin: the result of `sort_targets(targets)`, if it was called before.
        """
        many = targets.numel() * self.config.vocab_size > FEW_LOGITS and not torch.jit.is_tracing()
        if many and OPERATORS.nll is not None:
            return OPERATORS.nll(self, hidden_states, targets, by_bin)
        return self.plain_nll(hidden_states, targets)

    def sort_targets(self, targets: Tensor) -> Any:
        """Check the targets, (N,), and prepare `nll` before the layers run, so that it need not wait for a GPU.

        Raises:
            ValueError: a target is neither -100 nor in [0, V); a RuntimeError, later, on a GPU or in a compiled call.
        """
        _check_range(targets.masked_fill(targets == -100, 0), self.config.vocab_size, "labels", ValueError)
        many = targets.numel() * self.config.vocab_size > FEW_LOGITS
        return OPERATORS.sort_targets(self, targets) if many and OPERATORS.sort_targets is not None else None

    def plain_nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """`nll` by cross-entropies: of the head for all tokens, and of each further bin for its own tokens."""
        nll = F.cross_entropy(self.logits(hidden_states, 0), self.head_targets(targets), reduction="none")
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        for i, (start, end, _) in list(enumerate(self.bins))[1:]:
            inside = (targets >= start) & (targets < end)
            if in_graph:
                # Each bin computes all tokens and ignores those of others, because a graph has fixed shapes.
                of_bin = (targets - start).masked_fill(~inside, -100)
                nll = nll + F.cross_entropy(self.logits(hidden_states, i), of_bin, reduction="none")
            else:
                # Also without any token, so that its parameters get a gradient (zero) on every process.
                rows = inside.nonzero()[:, 0]
                logits, of_bin = self.logits(hidden_states[rows], i), targets[rows] - start
                nll = nll.index_add(0, rows, F.cross_entropy(logits, of_bin, reduction="none"))
        return nll

    def head_targets(self, targets: Tensor) -> Tensor:
        """(N,) in the head: the token itself, or the cluster of its bin; -100 stays."""
        if not self.config.cutoffs:
            return targets
        first, *others = self.config.cutoffs
        return reduce(torch.add, [targets >= cutoff for cutoff in others], targets.clamp(max=first))

    def logits(self, hidden_states: Tensor, i: int) -> Tensor:
        """(..., tokens of bin i) fp32, of hidden states (..., D); the clusters follow those of bin 0."""
        projected = self.out_projs[i](hidden_states)
        layer = self.out_layers[i if len(self.out_layers) > 1 else 0]
        start, end, _ = self.bins[i]
        rows = (start, end) if len(self.out_layers) == 1 else (0, end - start)
        found = layer(_logits, projected, *rows)
        if i == 0 and self.config.cutoffs:
            found = torch.cat([found, self.clusters(projected)], dim=-1)
        return found.to(torch.promote_types(found.dtype, torch.float32))


class TransfoXLVocabularyModel(PreTrainedModel):
    """The tables of a model: `resize_token_embeddings`, and setters for other tables."""

    config: TransfoXLConfig

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> AdaptiveEmbedding:
        """As in `transformers`: tokens are added or removed at the end of the vocabulary, in the last bin.

        Raises:
            ValueError: fewer tokens than the last cutoff or a special token of the configuration needs, a multiple
                below 1, or a model without tokens. The model is unchanged.
        """
        if self.config.vocab_size == 0:
            raise ValueError("vocab_size=0 means that there are no token embeddings to resize")
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        vocab_size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            if pad_to_multiple_of < 1:
                raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1")
            vocab_size = -(-vocab_size // pad_to_multiple_of) * pad_to_multiple_of
        last_cutoff = self.config.cutoffs[-1] if self.config.cutoffs else 0
        if vocab_size <= last_cutoff:
            raise ValueError(
                f"new_num_tokens={vocab_size} leaves no token in the last bin, which starts at {last_cutoff}"
            )
        self.config.check_change("vocab_size", vocab_size)
        tokens = vocab_size if len(embeddings.emb_layers) == 1 else vocab_size - last_cutoff
        layer, head = embeddings.emb_layers[-1], getattr(self, "lm_head", None)
        # A single token has no deviation from which new ones could be drawn.
        mean_resizing = mean_resizing and len(layer.weight) > 1
        if head is not None:
            output = head.out_layers[-1]
            linear: Any = nn.Linear(output.weight.shape[1], output.weight.shape[0], device="meta")
            linear.weight, linear.bias = output.weight, output.bias
            # The head before the embeddings, because transformers resizes these in place.
            linear = self._get_resized_lm_head(linear, tokens, mean_resizing=mean_resizing)
        self._get_resized_embeddings(layer, tokens, mean_resizing=mean_resizing)
        if head is not None:
            head.out_layers[-1] = OutputLayer(linear.weight, linear.bias).requires_grad_(output.weight.requires_grad)
        self.config.vocab_size = vocab_size
        embeddings.bins = self.config.bins
        if head is not None:
            head.bins = self.config.bins
        # The present ties stay, because a checkpoint whose tensors differed was loaded untied.
        self.tie_weights(recompute_mapping=False)
        return embeddings

    def set_input_embeddings(self, value: nn.Module):
        """Use the weight of a plain table for the only bin; the model's scale and ties stay.

        Raises:
            ValueError: the model has several tables, or a projection, or the table has another size. The model is
                unchanged.
        """
        if not isinstance(value, nn.Embedding):
            return super().set_input_embeddings(value)
        self._take_table("set_input_embeddings", self.get_input_embeddings().emb_layers, value.weight)

    def set_output_embeddings(self, new_embeddings: nn.Module):
        """Use weight and bias (none: zeros) of a linear layer for the only bin; raises as `set_input_embeddings`."""
        if not isinstance(new_embeddings, nn.Linear):
            return super().set_output_embeddings(new_embeddings)
        [table] = self._take_table("set_output_embeddings", self.lm_head.out_layers, new_embeddings.weight)
        bias = torch.zeros_like(table.bias) if new_embeddings.bias is None else new_embeddings.bias
        table.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)

    def _take_table(self, method: str, tables: nn.ModuleList, weight: Any) -> nn.ModuleList:
        found: list[Any] = list(tables)
        shapes = [tuple(table.weight.shape) for table in found]
        if shapes != [tuple(weight.shape)] or self.config.cutoffs:
            raise ValueError(
                f"{method} was given a table of {tuple(weight.shape)}, but the model has {shapes}"
                f"{' behind cutoffs' if self.config.cutoffs else ''}: change the size by resize_token_embeddings, and "
                "write the weights of several bins into these tables"
            )
        found[0].weight = weight
        self.tie_weights(recompute_mapping=False)
        return tables


def wide(logits: Tensor) -> Tensor:
    """Logits, (…), in the type in which they are normalised: fp32, or fp64 where the model computes in it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logits(weight: Tensor, bias: Tensor, hidden_states: Tensor, start: int, end: int) -> Tensor:
    """(..., d_i) → (..., end - start), the logits of the tokens [start, end) of a table."""
    return OPERATORS.product(hidden_states, weight[start:end], bias[start:end])


def check_labels(labels: Tensor, size: int, of: str = "the vocabulary") -> None:
    """Raise a ValueError if a label is neither -100 nor in [0, size), the range that the message calls `of`."""
    _check_range(labels.masked_fill(labels == -100, 0), size, "labels", ValueError, of)


def _check_range(ids: Tensor, size: int, name: str, error: type[Exception], of: str = "the vocabulary") -> None:
    if ids.is_meta or ids.numel() == 0 or torch.jit.is_tracing():
        return
    if torch.compiler.is_compiling():
        # No assertion in exports (except strict ones of torch 2.6), in vmap, or for single tokens, chosen by a model.
        looks = torch.compiler.is_dynamo_compiling() and not is_exporting() and ids.shape[-1] > 1
        if looks and not torch._C._functorch.is_batchedtensor(ids):
            inside = (ids >= 0) & (ids < size)
            torch._assert_async(inside.all(), f"{name} outside {of} [0, {size})")
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        # Under torch.func.vmap numbers belong to many calls.
        return
    low, high = ids.aminmax()
    if ids.is_cuda:
        # So that the host does not wait.
        torch._assert_async((low >= 0) & (high < size), f"{name} outside {of} [0, {size})")
    elif low < 0 or high >= size:
        raise error(f"{name} holds {int(low if low < 0 else high)}, outside {of} [0, {size})")


# ---- labels of every head, and the losses that they have ----


def targets_of(
    inputs: Tensor, attention_mask: Tensor | None, labels: Any = None, shift_labels: Any = None
) -> tuple[Tensor, Tensor]:
    """Targets of the first positions of a segment, int64, (B, L) of shift_labels or (B, L - 1) of labels: as they are,
    and with -100 for padding (`without_padding`)."""
    for name, given in (("shift_labels", shift_labels), ("labels", labels)):
        if given is not None:
            check_targets(name, given, inputs)
    if shift_labels is not None:
        targets = shift_labels.long()
    else:
        targets = labels[:, 1:].long()
        if inputs.dim() == 2 and can_look(labels) and targets.numel():
            moved = labels.to(inputs.device)
            if torch.equal(moved[:, :-1], inputs[:, 1:]) and not torch.equal(moved, inputs):
                logger.warning_once(
                    "labels are input_ids that are shifted by one already, and are shifted once more here, so that "
                    "each token would learn the one after the next: give them as shift_labels"
                )
    if attention_mask is None:
        return targets, targets
    return targets, without_padding(targets, attention_mask, targets.shape[1] + int(shift_labels is None))


def check_targets(name: str, given: Tensor, inputs: Tensor):
    """Raise a ValueError if labels, (B, L), do not fit the inputs, (B, L, …), or are no integers."""
    if given.shape != inputs.shape[:2]:
        raise ValueError(f"{name} are {tuple(given.shape)}, but the inputs are {tuple(inputs.shape[:2])}")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"{name} are {given.dtype}, not token ids or classes")


def check_numbers(num_items_in_batch: Any, logits_to_keep: Any = 0, inputs: Tensor | None = None):
    """Raise a ValueError if the number of items is no number, or a kept position is outside the inputs, (B, L, …)."""
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor | Number):
        raise ValueError(f"num_items_in_batch={num_items_in_batch!r} must be a number or a tensor of one")
    if isinstance(logits_to_keep, int):
        return
    if not isinstance(logits_to_keep, Tensor) or logits_to_keep.is_floating_point():
        raise ValueError(f"logits_to_keep={logits_to_keep!r} must be an integer, or a tensor of positions")
    if isinstance(inputs, Tensor) and inputs.dim() > 1 and logits_to_keep.numel() and can_look(logits_to_keep):
        length = inputs.shape[1]
        if logits_to_keep.min() < -length or logits_to_keep.max() >= length:
            raise ValueError(f"logits_to_keep={logits_to_keep.tolist()} has a position outside of {length} tokens")


def labels_of_rows(labels: Tensor, rows: int, config: TransfoXLConfig) -> Tensor:
    """Labels in the dtype by which transformers' loss distinguishes them: classes int64, numbers floating-point."""
    num_labels = config.num_labels
    are_classes = config.problem_type == "single_label_classification"
    if config.problem_type is None:
        are_classes = num_labels > 1 and labels.shape != (rows, num_labels)
    one = are_classes or (num_labels == 1 and config.problem_type != "multi_label_classification")
    if labels.shape not in (((rows,), (rows, 1)) if one else ((rows, num_labels),)):
        needed = f"({rows},)" if one else f"({rows}, {num_labels})"
        if config.problem_type is None and num_labels > 1:
            needed += f", or ({rows}, {num_labels}) where several classes are to be told of each"
        raise ValueError(f"labels are {tuple(labels.shape)}, but {rows} rows need {needed}")
    if not are_classes:
        return labels if labels.is_floating_point() else labels.float()
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}, but classes are integers, such as torch.long")
    labels = labels.long()
    check_labels(labels, num_labels, "the classes")
    return labels


def mean_loss(losses: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The sum of the losses over the number of targets, or of a step's items, on any GPU; 0 without any target."""
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    count = count.clamp(min=1).to(losses.device) if isinstance(count, Tensor) else max(count, 1)
    return losses.sum() / count


def pick_losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    """(B, n) negative log-likelihoods out of (B, n, V) log-probabilities, 0 where the target is -100."""
    ignored = targets == -100
    picked = log_probs.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0]
    return -picked.masked_fill(ignored, 0)
