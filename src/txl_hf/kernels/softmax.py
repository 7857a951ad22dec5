"""Losses of the adaptive softmax over many logits, block by block, with a backward pass of their own.

The tokens are sorted by bin, which takes one transfer to the host; none with `fixed_capacities`, which a CUDA graph of
a step needs. A block of logits is in memory at a time; the backward pass computes it again, unless its logits were few
enough to be kept. Both passes are custom operators, so that torch.compile's graph does not break at shapes that depend
on the number of tokens in a bin.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..transfo_xl.adaptive_transfo_xl import AdaptiveLogSoftmax, check_labels, wide
from ..transfo_xl.attention_transfo_xl import OPERATORS, working_dtype
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from .operators import is_transformed, product
from .softmax_triton import (
    WORDS_AT_A_TIME,
    add_statistics,
    fuses,
    padded_empty_like,
    padded_product,
    padded_rows,
    with_padding,
    write_gradient,
)

# Logits of a bin (128 MB) up to which they are kept for the backward pass, which is 18 % faster on CPU. Others are
# computed in blocks of 16 MB, which a cache may hold, of MIN_BLOCK_WIDTH words at least: products of fewer are slow.
MAX_KEPT_LOGITS = 2**25
BLOCK_LOGITS, MIN_BLOCK_WIDTH = 2**22, 1024
# Logits (1 MB) whose rows go through all elementwise steps before the next rows, so that the steps read a cache.
CACHED_LOGITS = 2**18
# Bytes of a block on a GPU, where blocks are large, because each costs kernel launches and none fits a cache.
GPU_BYTES = 2**31


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which logits of this tensor's type are normalised: fp32 or fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


class TargetsByBin(NamedTuple):
    """The targets, (N,), sorted.

    Args:
        order: (N,), the indices that sort the targets: those to ignore, then bin after bin.
        ends: the numbers of targets below -100, below -99, below the first token of each bin, below V; on the host, or
            with `capacities` on the device.
        copied: the CUDA event after which `ends` is on the host; None: it is.
        capacities: see `fixed_capacities`.
    """

    order: Tensor
    ends: Tensor
    copied: Any = None
    capacities: tuple[int, ...] | None = None


# Set by `fixed_capacities`.
_CAPACITIES = ContextVar[tuple[int, ...] | None]("capacities", default=None)


def capacities_of_bins(config: TransfoXLConfig, targets: Tensor) -> tuple[int, ...] | None:
    """For each bin but the first a number of tokens, as many as it has among the targets or more; None: no cutoffs.

    A number is rounded up to a multiple of four to eight times its square root, N at most, because the numbers of a
    text's segments differ by about that, so that many steps of a training share a tuple. The host waits for the
    targets.
    """
    if not config.cutoffs:
        return None
    behind = torch.stack([(targets >= cutoff).sum() for cutoff in config.cutoffs]).tolist()
    return tuple(min(capacity_of(first - second), targets.numel()) for first, second in pairwise([*behind, 0]))


def capacity_of(count: int) -> int:
    """See `capacities_of_bins`."""
    unit = 16
    while unit < 4 * count**0.5:
        unit *= 2
    return max(1, -(-count // unit)) * unit


@contextmanager
def fixed_capacities(capacities: tuple[int, ...] | None) -> Iterator[None]:
    """A context in which each bin of the softmax but the first computes a fixed number of tokens; those beyond its
    targets have no loss. Shapes do not depend on the targets then, and the host reads no number.

    Args:
        capacities: for each of these bins, at least as many as its targets, and at most N; None: no fixed numbers.
            `AdaptiveLogSoftmax.sort_targets`, which has to be called in the context, checks the targets.
    """
    token = _CAPACITIES.set(capacities)
    try:
        yield
    finally:
        _CAPACITIES.reset(token)


def sort_targets(softmax: AdaptiveLogSoftmax, targets: Tensor) -> TargetsByBin:
    """The targets, (N,), by bin; the host does not wait for a GPU before `nll` needs the numbers."""
    targets = targets.long()
    in_order, order = targets.sort(stable=True)
    starts = [start for start, _, _ in softmax.bins]
    # Made on the device, because the host would wait for the copy of a list.
    ends = torch.stack([targets.new_full((), end) for end in (-100, -99, *starts, softmax.config.vocab_size)])
    ends = torch.searchsorted(in_order, ends)
    # torch.compile traces no ContextVar.
    if not torch.compiler.is_compiling() and (capacities := _CAPACITIES.get()) is not None:
        return TargetsByBin(order, ends, capacities=capacities)
    if not ends.is_cuda or torch.compiler.is_compiling():
        return TargetsByBin(order, ends.cpu() if ends.is_cuda else ends)
    copied, stream = torch.cuda.Event(), torch.cuda.current_stream(ends.device)
    ends = ends.to("cpu", non_blocking=True)
    # The stream is given, because an event defaults to the current device, which may not be that of the tensors.
    copied.record(stream)
    return TargetsByBin(order, ends, copied)


def nll(softmax: AdaptiveLogSoftmax, hidden_states: Tensor, targets: Tensor, by_bin: TargetsByBin | None) -> Tensor:
    """`AdaptiveLogSoftmax.nll`, block by block; with `create_graph=True` the backward pass raises a RuntimeError.

    Args:
        softmax: has the parameters. hidden_states: (N, D). targets: (N,). by_bin: `sort_targets(targets)`, or None.

    Returns:
        (N,) fp32 in target order, 0 where ignored.

    Raises:
        ValueError: a target is neither -100 nor a token.
    """
    few = targets.numel() * softmax.config.vocab_size <= MAX_KEPT_LOGITS
    if torch.compiler.is_compiling() and few:
        return softmax.plain_nll(hidden_states, targets)
    # PyTorch's own operators, because custom ones drop tangents silently and have no rule for vmap.
    if not torch.compiler.is_compiling() and is_transformed(hidden_states, *softmax.parameters()):
        return softmax.plain_nll(hidden_states, targets)
    by_bin = by_bin or sort_targets(softmax, targets)
    if by_bin.copied is not None:
        by_bin.copied.synchronize()
    hidden_states, targets = hidden_states.to(working_dtype(hidden_states)), targets.long()
    projected = [project(hidden_states) for project in softmax.out_projs]
    clusters = softmax.clusters(projected[0]) if softmax.config.cutoffs else None
    all_bins = list(range(len(projected)))
    shares = [all_bins] if len(softmax.out_layers) == 1 else [[i] for i in all_bins]
    losses = []
    # Also bins without any token, so that their parameters get a gradient (zero) on every process.
    for layer, share in zip(softmax.out_layers, shares, strict=True):
        starts = [softmax.bins[i][0] for i in share]
        # The range of table rows of each bin; a table of one bin begins with it.
        origin = starts[0] if len(softmax.out_layers) > 1 else 0
        ranges = [n - origin for i in share for n in softmax.bins[i][:2]]
        states = [projected[i] for i in share]
        of_head = (softmax.head_targets(targets), clusters) if 0 in share else (None, None)
        places = (by_bin.order, by_bin.ends, share, ranges, starts, by_bin.capacities, softmax.config.vocab_size)
        losses.append(layer(_bin_losses, states, targets, *of_head, *places))
    return reduce(torch.add, losses)


def _bin_losses(weight: Tensor, bias: Tensor, *inputs: Any) -> Tensor:
    """The losses of `losses_of_bins`, (N,) fp32, as a function that a layer of the softmax calls with its table."""
    # Nothing is kept in a graph, because the number of kept logits depends on the data.
    keeps = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not weight.is_meta
    return losses_of_bins(weight, bias, *inputs, keeps)[0]


class _Task(NamedTuple):
    """One softmax: n tokens over a range of the table's rows, then over the logits `clusters`.

    Args:
        rows: (n,), the indices of the tokens among all N, each once; None: all tokens, in their order.
        block: the range. hidden_states: (n, d_i). targets: (n,). start: the target that begins the range.
        clusters: (n, c), or None where there are none.
        extra: (n,) bool, which tokens have no loss; None: none.
    """

    rows: Tensor | None
    block: slice
    hidden_states: Tensor
    targets: Tensor
    start: int
    clusters: Tensor | None
    extra: Tensor | None = None

    def pick(self, tensor: Tensor) -> Tensor:
        """The rows of (N, …) of these tokens, (n, …)."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def place(self, tensor: Tensor, total: int) -> Tensor:
        """(n, …) among zeros for the other tokens, (N, …)."""
        if self.rows is None:
            return tensor
        return tensor.new_zeros(total, *tensor.shape[1:]).index_copy(0, self.rows, tensor)


class _Table(NamedTuple):
    """The first arguments of `losses_of_bins` and `gradients_of_bins`."""

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
    capacities: list[int] | None

    def tokens_of_bin(self, i: int, ends: Any) -> tuple[Tensor | None, Tensor | None]:
        """`rows` and `extra` of a task, by `TargetsByBin.ends`, as numbers without capacities. The head leaves ignored
        tokens out; with capacities they are extra ones."""
        if self.capacities is None:
            if i == 0:
                return self.order[ends[1] :] if ends[1] else None, None
            return self.order[ends[i + 2] : ends[i + 3]], None
        if i == 0:
            return None, self.targets == -100
        # The capacity is filled with the tokens that follow in the order, behind its end from its start on, so that
        # none occurs twice.
        places = ends[i + 2] + torch.arange(self.capacities[i - 1], device=self.order.device)
        return self.order[places % len(self.order)], places >= ends[i + 3]


def _tasks(table: _Table) -> Iterator[_Task]:
    """A task for each bin of a table."""
    ends = table.ends.tolist() if table.capacities is None else table.ends
    blocks = map(slice, table.ranges[::2], table.ranges[1::2])
    for i, states, block, start in zip(table.bins, table.hidden_states, blocks, table.starts, strict=True):
        rows, extra = table.tokens_of_bin(i, ends)
        columns = table.targets if i > 0 or table.head_targets is None else table.head_targets
        task = _Task(rows, block, states, columns, start, None, extra)
        of_cluster = None if i > 0 or table.clusters is None else task.pick(table.clusters)
        yield task._replace(hidden_states=task.pick(states), targets=task.pick(columns), clusters=of_cluster)


def _compute_losses(table: _Table, vocab_size: int, keeps: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `losses_of_bins`."""
    targets = table.targets
    # With capacities the device alone checks the targets, before the layers run (`AdaptiveLogSoftmax.sort_targets`).
    if table.capacities is None:
        ends = table.ends.tolist()
        if ends[0] > 0 or ends[2] > ends[1] or ends[-1] < len(targets):
            check_labels(targets.cpu(), vocab_size)
    wide = wide_dtype(table.hidden_states[0])
    losses: Tensor | None = None
    # For each bin, of each token's softmax so far: the log of the denominator, and the target's logit.
    statistics = targets.new_full((2, len(table.bins), len(targets)), -torch.inf, dtype=wide)
    kept: list[Tensor] = []
    with torch.autocast(table.weight.device.type, enabled=False):
        for task in _tasks(table):
            of_task = statistics[:, len(kept), : len(task.targets)]
            whole, kept_of_task = keeps and _may_be_kept(task), task.hidden_states.new_empty(0)
            for columns, logits, column_bias in _blocks(table.weight, table.bias, task, whole=whole):
                # The first block alone, because the next one is the clusters, which the caller keeps anyway.
                if whole and columns.start == 0:
                    kept_of_task = logits
                first = task.start + columns.start
                if fuses(task.hidden_states):
                    add_statistics(logits, column_bias, task.targets, of_task, first)
                else:
                    _add_statistics(logits, task.targets, of_task, first)
            loss = of_task[0] - of_task[1]
            if task.extra is not None:
                loss = loss.masked_fill(task.extra, 0)
                # So that all their probabilities are 0 in the backward pass.
                of_task[0].masked_fill_(task.extra, torch.inf)
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
    # Uninitialised, because the ranges cover the table, so that every row is written.
    grad_weight = torch.empty_like(weight) if wanted[0] else weight.new_empty(0)
    grad_bias = torch.empty_like(bias) if wanted[1] else bias.new_empty(0)
    grad_clusters, grad_states = weight.new_empty(0), []
    with torch.autocast(weight.device.type, enabled=False):
        for k, task in enumerate(_tasks(table)):
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
    # The head's logits alone, because a tail bin has as many, and a smaller product computes them again.
    return task.clusters is not None and logits * _element_size(task) <= GPU_BYTES


def _element_size(task: _Task) -> int:
    hidden = task.hidden_states
    return hidden.element_size() if fuses(hidden) else wide_dtype(hidden).itemsize


def _blocks(
    weight: Tensor, bias: Tensor, task: _Task, kept: Tensor | None = None, whole: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """For each block its columns, counted from `start`, its (n, width) logits, and the bias that the kernels add, None
    if the logits contain it. The clusters are the last block, in fp32. Callers may write into blocks but `kept`."""
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
        yield slice(size, size + clusters.shape[1]), clusters.to(wide_dtype(clusters), copy=True), None


def _add_statistics(logits: Tensor, targets: Tensor, statistics: Tensor, first: int) -> None:
    """`add_statistics` by PyTorch's operators."""
    for rows in _cached_rows(logits):
        normalizer, picked = statistics[:, rows]
        part = wide(logits[rows])
        column, inside = _column(targets[rows], first, part)
        picked.copy_(torch.where(inside, part.gather(1, column)[:, 0], picked))
        # Clamped, because where all words of a block are forbidden, ∞ - ∞ would be NaN.
        peak = part.amax(1).clamp_(min=torch.finfo(part.dtype).min)
        normalizer.copy_(torch.logaddexp(normalizer, peak + (part - peak[:, None]).exp_().sum(1).log_()))


def _write_gradient(
    logits: Tensor, targets: Tensor, normalizer: Tensor, gradient: Tensor, result: Tensor, first: int, sums: bool
) -> Tensor:
    """`write_gradient` by PyTorch's operators: (softmax - one-hot) · the row's `gradient`, into `result`, (n, width).

    Returns:
        The sum of `result` over the rows, (1, width), or (1, 0) without `sums`.
    """
    total = logits.new_zeros(1, logits.shape[1] if sums else 0, dtype=wide_dtype(logits))
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
    """All rows of (n, width) in slices that fit the cache of a CPU; on other devices, in one slice."""
    n, width = logits.shape
    step = max(1, CACHED_LOGITS // width) if logits.is_cpu else max(1, n)
    return (slice(first, first + step) for first in range(0, n, step))


def _column(targets: Tensor, first: int, block: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's column in a block, (n, 1), clamped if it is in another block, and whether it is in this, (n,)."""
    place = targets - first
    column = place.clamp(0, block.shape[1] - 1)
    return column[:, None], column == place


_INPUTS = (
    "Tensor weight, Tensor bias, Tensor[] hidden_states, Tensor targets, Tensor? head_targets, Tensor? clusters, "
    "Tensor order, Tensor ends, int[] bins, int[] ranges, int[] starts, int[]? capacities"
)


@torch.library.custom_op(
    "txl_hf::losses_of_bins",
    mutates_args=(),
    schema=f"({_INPUTS}, int vocab_size, bool keeps) -> (Tensor, Tensor, Tensor[])",
)
def losses_of_bins(*inputs):
    """Cross-entropies of several bins of one table, without their logits.

    Blocks of columns (tokens of the vocabulary) are computed one after the other, so that the table is read, and its
    gradient written, once for all bins: a slice for each bin would sum gradients as large as the table.

    Args:
        weight, bias: the table, (n, d) and (n,).
        hidden_states: for each bin (N, d), projected for it.
        targets: (N,) tokens, -100 to ignore. head_targets: (N,) columns of the head, if the head is one of the bins.
        clusters: (N, c), the head's logits of clusters, after those of its tokens.
        order, ends, capacities: see `TargetsByBin`.
        bins: their numbers. ranges: start and end of each bin in the table. starts: the first token of each bin.
        vocab_size: V. keeps: whether logits may be kept for the backward pass.

    Returns:
        The loss of each target, summed over the bins, (N,) fp32; for each bin the logs of the denominators, (N,),
        those of its tokens first; and the kept logits.

    Raises:
        ValueError: a target is neither -100 nor a token.
    """
    return _compute_losses(_Table(*inputs[:12]), *inputs[12:])


@losses_of_bins.register_fake
def _(weight, bias, hidden_states, targets, head_targets, clusters, order, ends, bins, *rest):
    losses = targets.new_empty(len(targets), dtype=wide_dtype(hidden_states[0]))
    return losses, losses.new_empty(len(bins), len(targets)), []


@torch.library.custom_op(
    "txl_hf::gradients_of_bins",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor normalizers, Tensor[] kept, Tensor gradient, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
)
def gradients_of_bins(*inputs):
    """Gradients of weight, bias, clusters and hidden_states; an empty tensor for one that is None or not wanted.

    Args:
        normalizers, kept: results of `losses_of_bins`. gradient: (N,), of its losses.
        wanted: whether the gradients of weight and bias are wanted.
    """
    return _compute_gradients(_Table(*inputs[:12]), *inputs[12:])


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
    weight, bias, hidden_states, *tensors, bins, ranges, starts, capacities, _, _ = inputs
    _, normalizers, kept = output
    ctx.save_for_backward(weight, bias, *tensors, normalizers, *hidden_states, *kept)
    ctx.constants = bins, ranges, starts, capacities
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_losses, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True needs a loss from logits: call the model with output_logits=True")
    bins = ctx.constants[0]
    if grad_losses is None:
        return (None, None, [None] * len(bins), *(None,) * 11)
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
        *(None,) * 8,
    )


losses_of_bins.register_autograd(_backward, setup_context=_save_for_backward)

OPERATORS.sort_targets, OPERATORS.nll = sort_targets, nll
