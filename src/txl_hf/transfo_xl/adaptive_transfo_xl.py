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

from .adaptive_transfo_xl_triton import (
    WORDS_AT_A_TIME,
    add_statistics,
    fuses,
    padded_empty_like,
    padded_product,
    padded_rows,
    with_padding,
    write_gradient,
)
from .configuration_transfo_xl import TransfoXLConfig
from .linear_transfo_xl import is_transformed, product, working_dtype
from .operators_transfo_xl import is_exporting, namespace_of

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveLogSoftmax",
    "InputProjection",
    "OutputLayer",
    "OutputProjection",
    "check_labels",
    "wide",
]


# A cluster this much (in nats) below the k-th best token is skipped. There is a margin because what follows rounds: a
# temperature divides, beam search adds the scores of the text before, and neither may make different tokens equal.
PRUNING_MARGIN = 1e-3

# No more logits of a bin than this (128 MB) are kept for the backward pass: on CPU that makes it 18 % faster than
# computing them again. Where they are more, or need no gradient, blocks of 16 MB, which a cache may hold, are computed
# one after the other; of fewer words than MIN_BLOCK_WIDTH the product would be slow.
MAX_KEPT_LOGITS = 2**25
BLOCK_LOGITS, MIN_BLOCK_WIDTH = 2**22, 1024
# Rows of so many logits (1 MB) go through all elementwise steps before the next ones: those wait for memory otherwise.
CACHED_LOGITS = 2**18
# A GPU has no cache to stay in, and what a block costs is launching its kernels: there it is so many bytes.
GPU_BYTES = 2**31


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
            IndexError: an id lies outside the vocabulary. In a compiled call that is a RuntimeError, and a single
                token is not looked at.
        """
        _check_range(input_ids, self.config.vocab_size, "input_ids", IndexError)
        dtype = self.emb_layers[0].weight.dtype
        if len(self.emb_layers) == 1:
            return self.emb_projs[0](self.emb_layers[0](input_ids)).to(dtype) * self.scale
        # Every bin embeds every token and the right one is kept: the projections are small beside the layers, and
        # selecting tokens by bin would make the host wait for the device once for each bin.
        parts = []
        for (start, end, _), embed, project in zip(self.config.bins, self.emb_layers, self.emb_projs, strict=True):
            place = input_ids - start
            inside = place.clamp(0, end - start - 1)
            # Nothing is projected to nothing, and before the projection there is less to write.
            parts.append(project(embed(inside).masked_fill((place != inside)[..., None], 0)))
        # Under autocast the projections return a narrower type than the hidden states have.
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

    def forward(
        self,
        hidden_states: Tensor,
        targets: Tensor | None = None,
        top_k: int | None = None,
        by_bin: "TargetsByBin | None" = None,
    ) -> Tensor:
        """`nll` of the targets, or `log_prob` without any: whoever gathers the parameters does so for a forward."""
        return self.log_prob(hidden_states, top_k) if targets is None else self.nll(hidden_states, targets, by_bin)

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

    def nll(self, hidden_states: Tensor, targets: Tensor, by_bin: "TargetsByBin | None" = None) -> Tensor:
        """Negative log-likelihoods of the targets; a token's cost is that of the head and of its own bin only.

        The tokens are sorted by bin, which takes one transfer to the host for all bins, and no more than a block of
        logits is held at a time. What depends on how many tokens a bin has is an operator to torch.compile, so that
        its graph goes on; but where there are few logits in all, the graph computes them.

        Args:
            hidden_states: (N, D).
            targets: (N,) int in [0, V), or -100 to ignore.
            by_bin: `sort_targets(targets)` if that has been called before: the host then has not to wait here.

        Returns:
            (N,) fp32 in target order, 0 where ignored. It can be differentiated once; with `create_graph=True` the
            backward pass is a RuntimeError.

        Raises:
            ValueError: a target is neither -100 nor a token. In a compiled call it may be a RuntimeError.
        """
        few = targets.numel() * self.config.vocab_size <= MAX_KEPT_LOGITS
        in_graph = torch.jit.is_tracing() or (torch.compiler.is_compiling() and few)
        # PyTorch drops the tangents of an operator that has none, without a word, and knows no rule for mapping it.
        if in_graph or (not torch.compiler.is_compiling() and is_transformed(hidden_states, *self.parameters())):
            return self._dense_nll(hidden_states, targets)
        return self._blockwise_nll(hidden_states, targets, by_bin or self.sort_targets(targets))

    def sort_targets(self, targets: Tensor) -> "TargetsByBin":
        """Which targets, (N,), each bin has; on a GPU nobody waits before the numbers are used."""
        targets = targets.long()
        in_order, order = targets.sort(stable=True)
        starts = [start for start, _, _ in self.config.bins]
        # Made on the device: a list would have to be copied there, for which the host waits.
        ends = torch.stack([targets.new_full((), end) for end in (-100, -99, *starts, self.config.vocab_size)])
        ends = torch.searchsorted(in_order, ends)
        if not ends.is_cuda or torch.compiler.is_compiling():
            return TargetsByBin(order, ends.cpu() if ends.is_cuda else ends)
        copied, stream = torch.cuda.Event(), torch.cuda.current_stream(ends.device)
        ends = ends.to("cpu", non_blocking=True)
        # By itself it is of the current device, where the tensors need not be.
        copied.record(stream)
        return TargetsByBin(order, ends, copied)

    def _blockwise_nll(self, hidden_states: Tensor, targets: Tensor, by_bin: "TargetsByBin") -> Tensor:
        hidden_states, targets = hidden_states.to(working_dtype(hidden_states)), targets.long()
        if by_bin.copied is not None:
            by_bin.copied.synchronize()
        projected = [project(hidden_states) for project in self.out_projs]
        clusters = self.clusters(projected[0]) if self.config.cutoffs else None
        all_bins = list(range(len(projected)))
        shares = [all_bins] if len(self.out_layers) == 1 else [[i] for i in all_bins]
        losses = []
        # Also bins without any token, so that their parameters get a gradient (zero) on every process.
        for layer, share in zip(self.out_layers, shares, strict=True):
            ranges = [number for i in share for number in self._table_range(i)]
            starts = [self.config.bins[i][0] for i in share]
            states = [projected[i] for i in share]
            of_head = (self._head_targets(targets), clusters) if 0 in share else (None, None)
            places = (by_bin, share, ranges, starts, self.config.vocab_size)
            losses.append(layer(_bin_losses, states, targets, *of_head, *places))
        return reduce(torch.add, losses)

    def _dense_nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """The same within a graph: every bin computes all tokens and ignores the rest."""
        if not torch.jit.is_tracing():
            check_labels(targets, self.config.vocab_size)
        nll = F.cross_entropy(self._head_logits(hidden_states), self._head_targets(targets), reduction="none")
        for i, (start, end, _) in list(enumerate(self.config.bins))[1:]:
            bin_targets = (targets - start).masked_fill((targets < start) | (targets >= end), -100)
            nll = nll + F.cross_entropy(self._bin_logits(hidden_states, i), bin_targets, reduction="none")
        return nll

    def _head_targets(self, targets: Tensor) -> Tensor:
        """(N,) in the head: the token itself, or the cluster of its bin; -100 stays."""
        if not self.config.cutoffs:
            return targets
        first, *others = self.config.cutoffs
        return reduce(torch.add, [targets >= cutoff for cutoff in others], targets.clamp(max=first))

    def _head_logits(self, hidden_states: Tensor) -> Tensor:
        """Bin 0 and the clusters: (..., cutoffs[0] + n_clusters) fp32, or (..., V) without cutoffs."""
        projected = self.out_projs[0](hidden_states)
        head = self.out_layers[0](_logits, projected, *self._table_range(0))
        if not self.config.cutoffs:
            return wide(head)
        return wide(torch.cat([head, self.clusters(projected)], dim=-1))

    def _bin_logits(self, hidden_states: Tensor, i: int) -> Tensor:
        """Bin i ≥ 1: (..., tokens of the bin) fp32."""
        layer = self.out_layers[i if len(self.out_layers) > 1 else 0]
        return wide(layer(_logits, self.out_projs[i](hidden_states), *self._table_range(i)))

    def _table_range(self, i: int) -> tuple[int, int]:
        """The rows of its table that bin i has."""
        start, end, _ = self.config.bins[i]
        return (start, end) if len(self.out_layers) == 1 else (0, end - start)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    """What logits are normalised in: fp32, or fp64 where the model computes in it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wide(logits: Tensor) -> Tensor:
    """Logits, (…), in the type in which they are normalised."""
    return logits.to(_wide_dtype(logits))


def _logits(weight: Tensor, bias: Tensor, hidden_states: Tensor, start: int, end: int) -> Tensor:
    """(..., d_i) → (..., end - start), the logits of the tokens [start, end) of a table."""
    return product(hidden_states, weight[start:end], bias[start:end])


class TargetsByBin(NamedTuple):
    """The targets, (N,), sorted.

    Args:
        order: (N,), where the targets stand that are in order: those to ignore, then bin after bin.
        ends: on the host, how many of them are less than -100, than -99, than the first token of each bin, than V.
        copied: when `ends` has arrived there; None: it has.
    """

    order: Tensor
    ends: Tensor
    copied: Any = None


def _bin_losses(
    weight: Tensor,
    bias: Tensor,
    hidden_states: list[Tensor],
    targets: Tensor,
    head_targets: Tensor | None,
    clusters: Tensor | None,
    by_bin: TargetsByBin,
    bins: list[int],
    ranges: list[int],
    starts: list[int],
    vocab_size: int,
) -> Tensor:
    """What the bins of a table add to the losses of the targets: (N,) fp32. See `losses_of_bins`."""
    # How many logits there are to keep is a number that a graph has no room for.
    keeps = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not weight.is_meta
    tensors = (weight, bias, hidden_states, targets, head_targets, clusters, by_bin.order, by_bin.ends)
    return losses_of_bins(*tensors, bins, ranges, starts, vocab_size, keeps)[0]


class _Task(NamedTuple):
    """What to normalise: n tokens over a range of the table and over `clusters`, logits that come after it.

    Args:
        rows: (n,), where the tokens stand among all N, or None: all of them are here, in their order.
        block: the range. hidden_states: (n, d_i). targets: (n,). start: the target that begins the range.
        clusters: (n, c), or None where there are none.
    """

    rows: Tensor | None
    block: slice
    hidden_states: Tensor
    targets: Tensor
    start: int
    clusters: Tensor | None

    def pick(self, tensor: Tensor) -> Tensor:
        """Of (N, …) what belongs to these tokens, (n, …)."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def place(self, tensor: Tensor, total: int) -> Tensor:
        """(n, …) among zeros for the other tokens, (N, …)."""
        if self.rows is None:
            return tensor
        return tensor.new_zeros(total, *tensor.shape[1:]).index_copy(0, self.rows, tensor)


class _Table(NamedTuple):
    """A table, its bins and their tokens: what both operators are given first. See `losses_of_bins`."""

    weight: Tensor
    bias: Tensor
    hidden_states: list[Tensor]
    targets: Tensor
    head_targets: Tensor | None
    clusters: Tensor | None
    order: Tensor
    ends: Tensor
    bins: list[int]
    ranges: list[int]
    starts: list[int]


def _tasks(table: _Table, ends: list[int]) -> Iterator[_Task]:
    """One for each bin of a table, whose `ends` are numbers here."""
    ignored, *ends = ends[1:]
    blocks = map(slice, table.ranges[::2], table.ranges[1::2])
    for i, states, block, start in zip(table.bins, table.hidden_states, blocks, table.starts, strict=True):
        # The head has every token that counts; it need not have them in order.
        rows = table.order[ends[i] : ends[i + 1]] if i > 0 else table.order[ignored:] if ignored else None
        columns = table.targets if i > 0 or table.head_targets is None else table.head_targets
        task = _Task(rows, block, states, columns, start, None)
        of_cluster = None if i > 0 or table.clusters is None else task.pick(table.clusters)
        yield task._replace(hidden_states=task.pick(states), targets=task.pick(columns), clusters=of_cluster)


def _read_ends(ends: Tensor, targets: Tensor, vocab_size: int) -> list[int]:
    """`TargetsByBin.ends` as numbers, after a look whether all targets are tokens."""
    counts = ends.tolist()
    if counts[0] > 0 or counts[2] > counts[1] or counts[-1] < len(targets):
        real = targets.masked_fill(targets == -100, 0)
        _raise_outside(int(real.min()), int(real.max()), vocab_size, "labels", ValueError)
    return counts


def _compute_losses(table: _Table, vocab_size: int, keeps: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `losses_of_bins`."""
    targets = table.targets
    wide = _wide_dtype(table.hidden_states[0])
    losses: Tensor | None = None
    # For each bin what is known of the softmax of its tokens: log of the denominator, and the target's logit.
    statistics = targets.new_full((2, len(table.bins), len(targets)), -torch.inf, dtype=wide)
    kept: list[Tensor] = []
    with torch.autocast(table.weight.device.type, enabled=False):
        for task in _tasks(table, _read_ends(table.ends, targets, vocab_size)):
            of_task = statistics[:, len(kept), : len(task.targets)]
            whole, kept_of_task = keeps and _may_be_kept(task), task.hidden_states.new_empty(0)
            for columns, logits, column_bias in _blocks(table.weight, table.bias, task, whole=whole):
                # The block behind it is the clusters, which are there anyway.
                if whole and columns.start == 0:
                    kept_of_task = logits
                first = task.start + columns.start
                if fuses(task.hidden_states):
                    add_statistics(logits, column_bias, task.targets, of_task, first)
                else:
                    _add_statistics(logits, task.targets, of_task, first)
            loss = of_task[0] - of_task[1]
            if losses is None:
                losses = task.place(loss, len(targets))
            else:
                assert task.rows is not None, "only the head has every token, and it comes first"
                losses.index_add_(0, task.rows, loss)
            kept.append(kept_of_task)
    assert losses is not None, "a table has a bin"
    return losses, statistics[0], kept if keeps else []


def _compute_gradients(
    table: _Table, normalizers: Tensor, kept: list[Tensor], gradient: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """See `gradients_of_bins`."""
    weight, bias, total = table.weight, table.bias, len(table.targets)
    # The ranges cover the table, so that every row is written.
    grad_weight = torch.empty_like(weight) if wanted[0] else weight.new_empty(0)
    grad_bias = torch.empty_like(bias) if wanted[1] else bias.new_empty(0)
    grad_clusters, grad_states = weight.new_empty(0), []
    with torch.autocast(weight.device.type, enabled=False):
        for k, task in enumerate(_tasks(table, table.ends.tolist())):
            hidden, fused = task.hidden_states, fuses(task.hidden_states)
            grad_hidden: Tensor | None = None
            normalizer, grad_loss = normalizers[k, : len(hidden)], task.pick(gradient)
            of_task = kept[k] if kept and kept[k].numel() else None
            for columns, logits, column_bias in _blocks(weight, bias, task, of_task):
                given = (task.targets, normalizer, grad_loss)
                first, spare = task.start + columns.start, logits is not of_task
                if fused:
                    grad_logits = logits if spare else padded_empty_like(logits)
                    sums = write_gradient(logits, column_bias, *given, grad_logits, first, wanted[1])
                else:
                    grad_logits = logits if spare else torch.empty_like(logits)
                    sums = _write_gradient(logits, *given, grad_logits, first, wanted[1])
                if task.clusters is not None and columns.start >= task.block.stop - task.block.start:
                    grad_clusters = task.place(grad_logits.to(task.clusters.dtype), total)
                    continue
                rows = slice(task.block.start + columns.start, task.block.start + columns.stop)
                if wanted[1]:
                    grad_bias[rows] = sums.sum(0)
                part = weight[rows].to(hidden.dtype)
                words = len(part)
                if fused:
                    part, grad_logits = padded_rows(part), with_padding(grad_logits)
                share = product(grad_logits, part.T)
                grad_hidden = share if grad_hidden is None else grad_hidden.to(normalizer.dtype).add_(share)
                if wanted[0] and grad_weight.dtype == hidden.dtype and len(part) == words:
                    torch.mm(grad_logits.T, hidden, out=grad_weight[rows])
                elif wanted[0]:
                    grad_weight[rows] = (grad_logits.T @ hidden)[:words]
            assert grad_hidden is not None, "a bin has tokens"
            grad_states.append(task.place(grad_hidden.to(hidden.dtype), total))
    return grad_weight, grad_bias, grad_clusters, grad_states


def _may_be_kept(task: _Task) -> bool:
    """Whether a task's logits may stay in memory until the backward pass."""
    logits = len(task.targets) * (task.block.stop - task.block.start)
    if task.hidden_states.device.type == "cpu":
        return logits <= MAX_KEPT_LOGITS
    # Those of the tail are as many, and a smaller product away.
    return task.clusters is not None and logits * _element_size(task) <= GPU_BYTES


def _element_size(task: _Task) -> int:
    hidden = task.hidden_states
    return hidden.element_size() if fuses(hidden) else _wide_dtype(hidden).itemsize


def _blocks(
    weight: Tensor, bias: Tensor, task: _Task, kept: Tensor | None = None, whole: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The columns, counted from start, the (n, width) logits of each block, and the bias that is to be added to them.

    The kernels add it; otherwise the logits have it. The clusters are the last block, and fp32. Whoever is given a
    block that is not `kept` may write into it.
    """
    hidden, (start, end) = task.hidden_states, (task.block.start, task.block.stop)
    rows, size, fused = len(hidden), end - start, fuses(hidden)
    if kept is not None:
        yield slice(0, size), kept, bias[task.block] if fused else None
    else:
        at_once = BLOCK_LOGITS if hidden.device.type == "cpu" else GPU_BYTES // _element_size(task)
        fitting = at_once // max(rows, 1) // WORDS_AT_A_TIME * WORDS_AT_A_TIME
        width = size if whole else max(MIN_BLOCK_WIDTH, fitting)
        for first in range(0, size, width):
            block = slice(start + first, min(start + first + width, end))
            columns = slice(first, block.stop - start)
            if fused:
                yield columns, padded_product(hidden, weight, block), bias[block]
            else:
                yield columns, product(hidden, weight[block].to(hidden.dtype), bias[block].to(hidden.dtype)), None
    if task.clusters is not None:
        clusters = task.clusters
        yield slice(size, size + clusters.shape[1]), clusters.to(_wide_dtype(clusters), copy=True), None


def _add_statistics(logits: Tensor, targets: Tensor, statistics: Tensor, first: int) -> None:
    """As the kernel of this name does it."""
    for rows in _cached_rows(logits):
        normalizer, picked = statistics[:, rows]
        part = wide(logits[rows])
        column, inside = _column(targets[rows], first, part)
        picked.copy_(torch.where(inside, part.gather(1, column)[:, 0], picked))
        # Where all words of a block are forbidden, ∞ - ∞ must not be computed.
        peak = part.amax(1).clamp_(min=torch.finfo(part.dtype).min)
        normalizer.copy_(torch.logaddexp(normalizer, peak + (part - peak[:, None]).exp_().sum(1).log_()))


def _write_gradient(
    logits: Tensor, targets: Tensor, normalizer: Tensor, gradient: Tensor, result: Tensor, first: int, sums: bool
) -> Tensor:
    """As `write_gradient` does it: (softmax - one-hot) · gradient of each row's loss, (n, width), into the result.

    Returns:
        Its sum over the rows, (1, width), if wanted.
    """
    total = logits.new_zeros(1, logits.shape[1] if sums else 0, dtype=_wide_dtype(logits))
    in_place = result.dtype == total.dtype
    for rows in _cached_rows(logits):
        probs = torch.sub(wide(logits[rows]), normalizer[rows, None], out=result[rows] if in_place else None).exp_()
        column, inside = _column(targets[rows], first, probs)
        probs.scatter_(1, column, probs.gather(1, column) - inside[:, None].to(probs.dtype))
        probs.mul_(gradient[rows, None])
        if not in_place:
            result[rows] = probs
        if sums:
            total += probs.sum(0)
    return total


def _cached_rows(logits: Tensor) -> Iterator[slice]:
    """All rows of (n, width), by as many as a cache of a CPU holds; other devices take them at once."""
    n, width = logits.shape
    step = max(1, CACHED_LOGITS // width) if logits.is_cpu else max(1, n)
    return (slice(first, first + step) for first in range(0, n, step))


def _column(targets: Tensor, first: int, block: Tensor) -> tuple[Tensor, Tensor]:
    """For each target its column in a block, (n, 1), some column if it is in another one, and whether it is, (n,)."""
    place = targets - first
    column = place.clamp(0, block.shape[1] - 1)
    return column[:, None], column == place


# The package and copies of this file that came with a checkpoint can live in one process, each with its operators.
_NAMESPACE = namespace_of(__name__)
_INPUTS = (
    "Tensor weight, Tensor bias, Tensor[] hidden_states, Tensor targets, Tensor? head_targets, Tensor? clusters, "
    "Tensor order, Tensor ends, int[] bins, int[] ranges, int[] starts"
)


@torch.library.custom_op(
    f"{_NAMESPACE}::losses_of_bins",
    mutates_args=(),
    schema=f"({_INPUTS}, int vocab_size, bool keeps) -> (Tensor, Tensor, Tensor[])",
)
def losses_of_bins(*inputs):
    """Cross-entropies of several bins of one table, without their logits.

    Blocks of columns (tokens of the vocabulary) are computed one after the other, so that the table is read, and its
    gradient written, once. The backward pass computes a block again, unless there were so few logits that they were
    kept. One operator does all bins of a table, because a slice for each would add up gradients of the whole table.
    To torch.compile it is one operation, with results of the same shapes however many tokens a bin has.

    Args:
        weight, bias: the table, (n, d) and (n,).
        hidden_states: for each bin (N, d), projected for it.
        targets: (N,) tokens, -100 to ignore. head_targets: (N,) columns of the head, if the head is one of the bins.
        clusters: (N, c), the logits of the head behind those of its tokens.
        order, ends: see `TargetsByBin`.
        bins: their numbers. ranges: start and end of each in the table. starts: the first token of each.
        vocab_size: V. keeps: whether logits may be kept for the backward pass.

    Returns:
        The sum of their losses, (N,) fp32; for each bin the logarithms of the denominators, (N,), those of its tokens
        first; and the logits that were kept.

    Raises:
        ValueError: a target is neither -100 nor a token.
    """
    return _compute_losses(_Table(*inputs[:11]), *inputs[11:])


@losses_of_bins.register_fake
def _(weight, bias, hidden_states, targets, head_targets, clusters, order, ends, bins, *rest):
    losses = targets.new_empty(len(targets), dtype=_wide_dtype(hidden_states[0]))
    return losses, losses.new_empty(len(bins), len(targets)), []


@torch.library.custom_op(
    f"{_NAMESPACE}::gradients_of_bins",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor normalizers, Tensor[] kept, Tensor gradient, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
)
def gradients_of_bins(*inputs):
    """Gradients of weight, bias, clusters and hidden_states; an empty tensor where none is wanted or there are none.

    Args:
        normalizers, kept: what `losses_of_bins` has returned. gradient: (N,), of its losses.
        wanted: whether those of weight and bias are.
    """
    return _compute_gradients(_Table(*inputs[:11]), *inputs[11:])


@gradients_of_bins.register_fake
def _(weight, bias, hidden_states, targets, head_targets, clusters, *rest):
    wanted = rest[-1]
    return (
        torch.empty_like(weight) if wanted[0] else weight.new_empty(0),
        torch.empty_like(bias) if wanted[1] else bias.new_empty(0),
        weight.new_empty(0) if clusters is None else torch.empty_like(clusters),
        [torch.empty_like(states) for states in hidden_states],
    )


def _save_for_backward(ctx, inputs, output):
    weight, bias, hidden_states, *tensors, bins, ranges, starts, _, _ = inputs
    _, normalizers, kept = output
    ctx.save_for_backward(weight, bias, *tensors, normalizers, *hidden_states, *kept)
    ctx.constants = bins, ranges, starts
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_losses, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True needs a loss from logits: call the model with output_logits=True")
    bins = ctx.constants[0]
    if grad_losses is None:
        return (None, None, [None] * len(bins), *(None,) * 10)
    weight, bias, targets, head_targets, clusters, order, ends, normalizers, *rest = ctx.saved_tensors
    hidden_states, kept = rest[: len(bins)], rest[len(bins) :]
    wanted = list(ctx.needs_input_grad[:2])
    tensors = (weight, bias, hidden_states, targets, head_targets, clusters, order, ends)
    grad_weight, grad_bias, grad_clusters, grad_states = gradients_of_bins(
        *tensors, *ctx.constants, normalizers, kept, grad_losses, wanted
    )
    return (
        grad_weight if wanted[0] else None,
        grad_bias if wanted[1] else None,
        grad_states,
        None,
        None,
        None if clusters is None else grad_clusters,
        *(None,) * 7,
    )


losses_of_bins.register_autograd(_backward, setup_context=_save_for_backward)


def _best(log_probs: Tensor, k: int) -> Tensor:
    """The k highest of (..., n), or all of them if there are fewer, highest first."""
    return log_probs.amax(-1, keepdim=True) if k == 1 else log_probs.topk(min(k, log_probs.shape[-1])).values


def check_labels(labels: Tensor, size: int, of: str = "the vocabulary") -> None:
    """Raise a ValueError if a label is neither -100 nor in [0, size), the numbers `of` what it is one of."""
    _check_range(labels.masked_fill(labels == -100, 0), size, "labels", ValueError, of)


def _check_range(ids: Tensor, size: int, name: str, error: type[Exception], of: str = "the vocabulary") -> None:
    if ids.is_meta or ids.numel() == 0:
        return
    if torch.compiler.is_compiling():
        # Not in an exported graph, of which torch 2.6 cannot tell, nor for the single tokens of decoding, which a
        # model has chosen, nor for the many calls of torch.func.vmap.
        looks = torch.compiler.is_dynamo_compiling() and not is_exporting() and ids.shape[-1] > 1
        if looks and not torch._C._functorch.is_batchedtensor(ids):
            inside = (ids >= 0) & (ids < size)
            torch._assert_async(inside.all(), f"{name} outside {of} [0, {size})")
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        # torch.func.vmap: the numbers of many calls at once, which none of them can look at.
        return
    low, high = ids.aminmax()
    if ids.is_cuda:
        # As for any embedding there: the device stops, and the host has not had to wait for it.
        torch._assert_async((low >= 0) & (high < size), f"{name} outside {of} [0, {size})")
        return
    _raise_outside(int(low), int(high), size, name, error, of)


def _raise_outside(
    low: int, high: int, size: int, name: str, error: type[Exception], of: str = "the vocabulary"
) -> None:
    if low < 0 or high >= size:
        raise error(f"{name} holds {low if low < 0 else high}, outside {of} [0, {size})")
