"""Adaptive input and adaptive softmax over frequency-sorted bins of the vocabulary.

The vocabulary is cut at `cutoffs` into bins; bin i has embeddings of width `d_embed // div_val**i`, projected to the
width of the model (Baevski and Auli, 2019). In the softmax (Grave et al., 2017), bin 0 and one entry for each further
bin ("cluster") form the head; the probability of a token in bin i is that of its cluster times that within the bin.

With div_val = 1 all bins have one width and share one table of embeddings.

Every parameter is read in the forward of the module that owns it, so that offloading and sharding hooks see it.
"""

import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_transfo_xl import TransfoXLConfig
from .linear_transfo_xl import product

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveLogSoftmax",
    "InputProjection",
    "OutputLayer",
    "OutputProjection",
    "check_labels",
]


# A cluster this much (in nats) below the k-th best token is skipped. There is a margin because what follows rounds: a
# temperature divides, beam search adds the scores of the text before, and neither may make different tokens equal.
PRUNING_MARGIN = 1e-3

# No more logits of a bin than this (128 MB) are kept for the backward pass: on CPU that makes it 18 % faster than
# computing them again. Where they are more, or need no gradient, blocks of so many are computed one after the other.
MAX_KEPT_LOGITS = 2**25
BLOCK_LOGITS, MIN_BLOCK_WIDTH = 2**22, 1024
# A GPU has no cache to stay in, and what a block costs is launching its kernels: so many fp32 logits are 1 GiB.
GPU_LOGITS = 2**28


class InputProjection(nn.Module):
    """From the width of a bin, (..., d_i), to that of the model, (..., D).

    This and `OutputProjection` store (D, d_i), so that the two can be tied. They are no `nn.Linear`: whoever adapts or
    replaces those would change both ends of a tie in different ways.
    """

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
    """A table of tokens, (n, d_i), with their biases, (n,). One table can serve all bins.

    `layer(function, *arguments)` is `function(weight, bias, *arguments)`: the softmax says what is to be done with the
    table, and does it here, where hooks see the parameters being read.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, function: Callable, *arguments) -> Any:
        return function(self.weight, self.bias, *arguments)

    def to_linear(self) -> nn.Linear:
        """The whole table as the layer that `transformers` can resize; the parameters are shared."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


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
        self.emb_layers = nn.ModuleList(nn.Embedding(tokens, width) for tokens, width in _tables(config))
        self.emb_projs = nn.ModuleList(
            InputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, width in _tables(config)
        )

    @property
    def weight(self) -> nn.Parameter:
        """The first table, or the first tied projection where no tables are tied.

        Whoever shards the model (accelerate) puts the embedding and the softmax together if their `weight` is one.
        """
        tied = _first_tied_projection(self.config)
        projection = 0 if self.config.div_val == 1 else tied
        return self.get_parameter("emb_layers.0.weight" if tied is None else f"emb_projs.{projection}.weight")

    def forward(self, input_ids: Tensor) -> Tensor:
        """
        Args:
            input_ids: (B, L) int, each in [0, V).

        Returns:
            (B, L, D).

        Raises:
            IndexError: an id lies outside the vocabulary.
        """
        _check_range(input_ids, self.config.vocab_size, "input_ids", IndexError)
        dtype = self.emb_layers[0].weight.dtype
        if len(self.emb_layers) == 1:
            return self.emb_projs[0](self.emb_layers[0](input_ids)).to(dtype) * self.scale
        # Every bin embeds every token and the right one is kept: the projections are small beside the layers, and
        # selecting tokens by bin would make the host wait for the device once for each bin.
        parts = []
        for (start, end, _), embed, project in zip(self.config.bins, self.emb_layers, self.emb_projs, strict=True):
            outside = (input_ids < start) | (input_ids >= end)
            bin_embeds = project(embed((input_ids - start).clamp(0, end - start - 1)))
            parts.append(bin_embeds.masked_fill(outside[..., None], 0))
        # Under autocast the projections return a narrower type than the memory has.
        return reduce(torch.add, parts).to(dtype) * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities and losses from hidden states. Logits are normalised in fp32, or in fp64 if the model is."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.out_layers = nn.ModuleList(
            OutputLayer(nn.Parameter(torch.empty(tokens, width)), nn.Parameter(torch.zeros(tokens)))
            for tokens, width in _tables(config)
        )
        # The softmax can have a projection for each bin though the tokens share one table.
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
        """The biases of all tokens, (V,), which belong to `weight`: whoever fuses head and loss (TRL) reads the two.

        Raises:
            AttributeError: the softmax is more than hidden states times one table: there are cutoffs or a projection.
        """
        if self.config.cutoffs or not isinstance(self.out_projs[0], nn.Identity):
            raise AttributeError("a softmax with cutoffs or projections is no single table with a bias")
        return self.get_parameter("out_layers.0.bias")

    def forward(self, hidden_states: Tensor, targets: Tensor | None = None, top_k: int | None = None) -> Tensor:
        """`nll` of the targets, or `log_prob` without any: whoever gathers the parameters does so for a forward."""
        return self.log_prob(hidden_states, top_k) if targets is None else self.nll(hidden_states, targets)

    def log_prob(self, hidden_states: Tensor, top_k: int | None = None) -> Tensor:
        """
        Args:
            hidden_states: (..., D).
            top_k: only the `top_k` most probable tokens of each row have to be right. No token is more probable than
                its cluster, so a cluster less probable than the k-th best token found so far holds none of them: it
                is not computed, and its probability is spread evenly over its tokens. So the probabilities still sum
                to 1, and whoever looks at no more than the k best tokens finds exactly what he would find in the
                whole. None: all tokens are right.

        Returns:
            Log-probabilities of the whole vocabulary, (..., V) fp32.
        """
        head = self._head_logits(hidden_states).log_softmax(-1)
        if not self.config.cutoffs:
            return head
        # What saves reading a table from memory on a CPU would make the host wait for any other device.
        prunes = head.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.jit.is_tracing()
        k = top_k if top_k is not None and prunes else 0
        parts = [head[..., : self.config.cutoffs[0]]]
        best = _best(parts[0], k)
        for i, (start, end, _) in list(enumerate(self.config.bins))[1:]:
            cluster = head[..., self.config.cutoffs[0] + i - 1, None]
            if 0 < k == best.shape[-1] and (cluster < best[..., -1:] - PRUNING_MARGIN).all():
                parts.append((cluster - math.log(end - start)).expand(*cluster.shape[:-1], end - start))
                continue
            parts.append(cluster + self._bin_logits(hidden_states, i).log_softmax(-1))
            if k > 0:
                best = _best(torch.cat([best, _best(parts[-1], k)], dim=-1), k)
        return torch.cat(parts, dim=-1)

    def nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods of the targets; a token's cost is that of the head and of its own bin only.

        The tokens are sorted by bin, which takes one transfer to the host for all bins, and no more than a block of
        logits is held at a time (see `_BinLosses`). A compiled graph ends before that and goes on behind it, unless
        there are few logits in all: then the graph computes them.

        Args:
            hidden_states: (N, D).
            targets: (N,) int in [0, V), or -100 to ignore.

        Returns:
            (N,) fp32 in target order, 0 where ignored. It can be differentiated once; with `create_graph=True` the
            backward pass is a RuntimeError.

        Raises:
            ValueError: a target is neither -100 nor a token.
        """
        few = targets.numel() * self.config.vocab_size <= MAX_KEPT_LOGITS
        if targets.is_meta or torch.jit.is_tracing() or (torch.compiler.is_compiling() and few):
            return self._dense_nll(hidden_states, targets)
        return self._blockwise_nll(hidden_states, targets)

    # How many tokens a bin has is known only when it runs, which a graph has no room for.
    @torch.compiler.disable
    def _blockwise_nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        bins = self._bins_of(targets)
        sizes = self._count(bins, targets)
        order = bins.argsort(stable=True)[: sum(sizes)]
        rows, row_targets = hidden_states.index_select(0, order), targets.index_select(0, order)

        projected = self.out_projs[0](rows)
        clusters = self.clusters(projected) if self.config.cutoffs else None
        head_targets = self._head_targets(row_targets, bins.index_select(0, order))
        tasks = [_BinTask(self._table_range(0), projected, head_targets, clusters)]
        # Also bins without any token, so that their parameters get a gradient (zero) on every process.
        parts = zip(rows.split(sizes), row_targets.split(sizes), strict=True)
        for i, (bin_rows, bin_targets) in list(enumerate(parts))[1:]:
            bin_targets = bin_targets - self.config.bins[i][0]
            tasks.append(_BinTask(self._table_range(i), self.out_projs[i](bin_rows), bin_targets))
        shares = [tasks] if len(self.out_layers) == 1 else [[task] for task in tasks]
        losses = [loss for layer, share in zip(self.out_layers, shares, strict=True) for loss in layer(_nll, share)]
        total = losses[0] + torch.cat([losses[0].new_zeros(sizes[0]), *losses[1:]])
        return total.new_zeros(len(targets)).index_copy(0, order, total)

    def _dense_nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """The same within a graph: every bin computes all tokens and ignores the rest."""
        bins = self._bins_of(targets)
        nll = F.cross_entropy(
            self._head_logits(hidden_states),
            self._head_targets(targets, bins).masked_fill(targets == -100, -100),
            reduction="none",
        )
        for i, (start, _, _) in list(enumerate(self.config.bins))[1:]:
            bin_targets = (targets - start).masked_fill(bins != i, -100)
            nll = nll + F.cross_entropy(self._bin_logits(hidden_states, i), bin_targets, reduction="none")
        return nll

    def _bins_of(self, targets: Tensor) -> Tensor:
        """(N,) the bin of each target; those to ignore are behind the last one."""
        bins = sum(((targets >= cutoff).long() for cutoff in self.config.cutoffs), torch.zeros_like(targets))
        return bins.masked_fill(targets == -100, len(self.config.bins))

    def _head_targets(self, targets: Tensor, bins: Tensor) -> Tensor:
        """(N,) in the head: the token itself, or the cluster of its bin."""
        if not self.config.cutoffs:
            return targets
        return torch.where(bins == 0, targets, self.config.cutoffs[0] - 1 + bins)

    def _count(self, bins: Tensor, targets: Tensor) -> list[int]:
        """How many tokens each bin has, after the targets have been checked: all in one transfer from the device."""
        if targets.numel() == 0:
            return [0] * len(self.config.bins)
        real = targets.masked_fill(targets == -100, 0)
        counts = [(bins == i).sum() for i in range(len(self.config.bins))]
        low, high, *sizes = torch.stack([real.min(), real.max(), *counts]).tolist()
        _raise_outside(low, high, self.config.vocab_size, "labels", ValueError)
        return sizes

    def _head_logits(self, hidden_states: Tensor) -> Tensor:
        """Bin 0 and the clusters: (..., cutoffs[0] + n_clusters) fp32, or (..., V) without cutoffs."""
        projected = self.out_projs[0](hidden_states)
        head = self.out_layers[0](_logits, projected, *self._table_range(0))
        if not self.config.cutoffs:
            return _wide(head)
        return _wide(torch.cat([head, self.clusters(projected)], dim=-1))

    def _bin_logits(self, hidden_states: Tensor, i: int) -> Tensor:
        """Bin i ≥ 1: (..., tokens of the bin) fp32."""
        layer = self.out_layers[i if len(self.out_layers) > 1 else 0]
        return _wide(layer(_logits, self.out_projs[i](hidden_states), *self._table_range(i)))

    def _table_range(self, i: int) -> tuple[int, int]:
        """The rows of its table that bin i has."""
        start, end, _ = self.config.bins[i]
        return (start, end) if len(self.out_layers) == 1 else (0, end - start)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    """What logits are normalised in: fp32, or fp64 where the model computes in it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(_wide_dtype(logits))


def _logits(weight: Tensor, bias: Tensor, hidden_states: Tensor, start: int, end: int) -> Tensor:
    """(..., d_i) → (..., end - start), the logits of the tokens [start, end) of a table."""
    return product(hidden_states, weight[start:end], bias[start:end])


class _BinTask(NamedTuple):
    """What to normalise: n tokens over the range of the table and over `clusters`, logits that come after it.

    Args:
        range: start and end in the table. hidden_states: (n, d_i). targets: (n,), counted from the start of the range.
        clusters: (n, c), or None where there are none.
    """

    range: tuple[int, int]
    hidden_states: Tensor
    targets: Tensor
    clusters: Tensor | None = None


def _nll(weight: Tensor, bias: Tensor, tasks: list[_BinTask]) -> tuple[Tensor, ...]:
    """The (n,) fp32 losses of each task."""
    inputs = []
    for task in tasks:
        hidden_states, device = task.hidden_states, task.hidden_states.device.type
        if torch.is_autocast_enabled(device):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
        inputs += [hidden_states, task.targets, task.clusters]
    return _BinLosses.apply(torch.is_grad_enabled(), weight, bias, [task.range for task in tasks], *inputs)


class _BinLosses(torch.autograd.Function):
    """Cross-entropies of several bins of one table, without their logits.

    Blocks of columns (tokens of the vocabulary) are computed one after the other, so that the table is read, and its
    gradient written, once. The backward pass computes a block again, unless there were so few logits that they were
    kept. One function does all bins of a table, because a slice for each would add up gradients of the whole table.
    """

    @staticmethod
    def forward(
        ctx, keeps: bool, weight: Tensor, bias: Tensor, ranges: list[tuple[int, int]], *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`inputs`: hidden_states (n, d_i), targets (n,) and clusters (n, c) or None of each range in turn."""
        losses: list[Tensor] = []
        saved: list[Tensor | None] = []
        with torch.autocast(weight.device.type, enabled=False):
            for (start, end), hidden, targets, clusters in zip(ranges, *(inputs[i::3] for i in range(3)), strict=True):
                most = MAX_KEPT_LOGITS if hidden.device.type == "cpu" else GPU_LOGITS
                kept, keep = None, keeps and len(hidden) * (end - start) <= most
                peak = torch.full_like(targets, -torch.inf, dtype=_wide_dtype(hidden))
                total, picked = torch.zeros_like(peak), torch.zeros_like(peak)
                for columns, logits in _blocks(weight, bias, start, end, hidden, clusters, whole=keep):
                    column, inside = _column(targets, columns)
                    picked = torch.where(inside, logits.gather(1, column)[:, 0], picked)
                    higher = torch.maximum(peak, logits.amax(1))
                    if keep and columns.start == 0:
                        kept, logits = logits, logits - higher[:, None]
                    else:
                        logits.sub_(higher[:, None])
                    total = total * (peak - higher).exp() + logits.exp_().sum(1)
                    peak = higher
                losses.append(peak - picked + total.log())
                saved += [hidden, targets, clusters, peak + total.log(), kept]
        ctx.ranges = ranges
        ctx.save_for_backward(weight, bias, *saved)
        return tuple(losses)

    @staticmethod
    def backward(ctx, *grad_losses: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs a loss from logits: call the model with output_logits=True")
        weight, bias, *saved = ctx.saved_tensors
        # The ranges cover the table, so that every row is written.
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        grad_inputs: list[Tensor | None] = []
        parts = zip(ctx.ranges, grad_losses, *(saved[i::5] for i in range(5)), strict=True)
        with torch.autocast(weight.device.type, enabled=False):
            for (start, end), grad, hidden, targets, clusters, normalizer, kept in parts:
                grad_hidden, grad_clusters = torch.zeros_like(hidden, dtype=_wide_dtype(hidden)), None
                for columns, logits in _blocks(weight, bias, start, end, hidden, clusters, kept):
                    probs = (
                        logits - normalizer[:, None] if logits is kept else logits.sub_(normalizer[:, None])
                    ).exp_()
                    column, inside = _column(targets, columns)
                    probs.scatter_(1, column, probs.gather(1, column) - inside[:, None].to(probs.dtype))
                    grad_logits = probs.mul_(grad[:, None])
                    if columns.start >= end - start:
                        grad_clusters = grad_logits.to(clusters.dtype)
                        continue
                    rows = slice(start + columns.start, start + columns.stop)
                    if grad_bias is not None:
                        grad_bias[rows] = grad_logits.sum(0)
                    grad_logits = grad_logits.to(hidden.dtype)
                    grad_hidden += product(grad_logits, weight[rows].to(hidden.dtype).T)
                    if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                        torch.mm(grad_logits.T, hidden, out=grad_weight[rows])
                    elif grad_weight is not None:
                        grad_weight[rows] = grad_logits.T @ hidden
                grad_inputs += [grad_hidden.to(hidden.dtype), None, grad_clusters]
        return None, grad_weight, grad_bias, None, *grad_inputs


def _blocks(
    weight: Tensor,
    bias: Tensor,
    start: int,
    end: int,
    hidden_states: Tensor,
    clusters: Tensor | None,
    kept: Tensor | None = None,
    whole: bool = False,
) -> Iterator[tuple[slice, Tensor]]:
    """The columns, counted from start, and the (n, width) fp32 logits of each block; the clusters are the last."""
    rows, size = len(hidden_states), end - start
    if kept is not None:
        yield slice(0, size), kept
    else:
        logits_at_once = BLOCK_LOGITS if hidden_states.device.type == "cpu" else GPU_LOGITS
        width = size if whole else max(MIN_BLOCK_WIDTH, logits_at_once // max(rows, 1))
        for first in range(0, size, width):
            block = slice(start + first, min(start + first + width, end))
            logits = product(hidden_states, weight[block].to(hidden_states.dtype), bias[block].to(hidden_states.dtype))
            yield slice(first, block.stop - start), _wide(logits)
    if clusters is not None:
        yield slice(size, size + clusters.shape[1]), clusters.to(_wide_dtype(clusters), copy=True)


def _column(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """For each target its column in a block, (n, 1), some column if it is in another one, and whether it is, (n,)."""
    inside = (targets >= columns.start) & (targets < columns.stop)
    return (targets - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], inside


def _best(log_probs: Tensor, k: int) -> Tensor:
    """The k highest of (..., n), or all of them if there are fewer, highest first."""
    return log_probs.amax(-1, keepdim=True) if k == 1 else log_probs.topk(min(k, log_probs.shape[-1])).values


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise a ValueError if a label is neither -100 nor in [0, V)."""
    _check_range(labels.masked_fill(labels == -100, 0), vocab_size, "labels", ValueError)


def _check_range(ids: Tensor, vocab_size: int, name: str, error: type[Exception]) -> None:
    if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        # torch.func.vmap: the numbers of many calls at once, which none of them can look at.
        return
    low, high = ids.aminmax()
    if ids.is_cuda:
        # As for any embedding there: the device stops, and the host has not had to wait for it.
        torch._assert_async((low >= 0) & (high < vocab_size), f"{name} outside the vocabulary [0, {vocab_size})")
        return
    _raise_outside(int(low), int(high), vocab_size, name, error)


def _raise_outside(low: int, high: int, vocab_size: int, name: str, error: type[Exception]) -> None:
    if low < 0 or high >= vocab_size:
        raise error(f"{name} holds {low if low < 0 else high}, outside the vocabulary [0, {vocab_size})")
