"""Two Triton kernels for the cross-entropy of a block of logits: statistics of its softmax, and its gradient.

PyTorch's operators read and write the logits eight times each way, in fp32. Here each pass reads them once, in the
product's dtype, and the backward pass writes the gradient once, in place if the caller passes the logits as output.
Both kernels add the bias, in fp32, and the second sums its gradient.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_triton import LOG2_E, why_no_kernels

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# A multiple of so many words, to which products on a GPU are padded: 19,997 take an H200 four times as long as 20,000.
WORDS_AT_A_TIME = 16
# Partial sums of the gradient of the bias, at most: as many programs share the rows of a block.
ROW_CHUNKS = 32
# Rows and columns of a tile of the gradient; columns that the forward pass reads at a time.
TILE = (16, 256)
COLUMNS = 4096


def fuses(hidden_states: Tensor) -> bool:
    """Whether the kernels take the logits of these states, (n, d): fp16, bf16 or fp32, on a GPU with Triton."""
    return hidden_states.device.type == "cuda" and why_no_kernels(hidden_states) is None


def _padding(count: int) -> int:
    return -count % WORDS_AT_A_TIME


def padded_rows(table: Tensor) -> Tensor:
    """(w, d), padded with rows of zeros to a multiple of `WORDS_AT_A_TIME`."""
    missing = _padding(len(table))
    return F.pad(table, (0, 0, 0, missing)) if missing else table


def padded_product(hidden_states: Tensor, table: Tensor, rows: slice) -> Tensor:
    """(n, d) · (w, d)ᵀ of some rows of a table, (n, w), as a view of rows that are padded with products of the table's
    next rows, because zeros would need a copy."""
    count = rows.stop - rows.start
    padded = table[rows.start : rows.stop + _padding(count)].to(hidden_states.dtype)
    return (hidden_states @ padded_rows(padded).T)[:, :count]


def padded_empty_like(logits: Tensor) -> Tensor:
    """Memory for as many logits, (n, w), in rows padded as by `padded_product`."""
    rows, columns = logits.shape
    return logits.new_empty(rows, columns + _padding(columns))[:, :columns]


def with_padding(logits: Tensor) -> Tensor:
    """The padded rows of which the logits, (n, w), are a view."""
    return logits.as_strided((len(logits), logits.stride(0)), (logits.stride(0), 1))


if triton is not None:
    _LOG2_E = tl.constexpr(LOG2_E)

    @triton.jit(do_not_specialize=["statistics_stride", "columns", "first"])
    def _statistics_kernel(
        logits, bias, targets, statistics, stride, statistics_stride, columns, first, BLOCK: tl.constexpr
    ):
        """Add one row's logits to its running log-sum-exp, and store its target's logit."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        statistics += row
        # The log-sum-exp of earlier columns is one more term of the sum.
        before = tl.load(statistics)
        peak = before
        total = 0.0
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            score = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
            if bias is not None:
                score += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            higher = tl.maximum(peak, tl.max(score, 0))
            # Shift 0 while all words so far are forbidden, because ∞ - ∞ would be NaN.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp2((peak - shift) * _LOG2_E) + tl.sum(tl.exp2((score - shift) * _LOG2_E), 0)
            peak = higher
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        total += tl.exp2((before - shift) * _LOG2_E)
        tl.store(statistics, shift + tl.log2(total) / _LOG2_E)
        target = tl.load(targets + row) - first
        here = (target >= 0) & (target < columns)
        picked = tl.load(logits + target, mask=here, other=0.0).to(tl.float32)
        if bias is not None:
            picked += tl.load(bias + target, mask=here, other=0.0).to(tl.float32)
        tl.store(statistics + statistics_stride, picked, mask=here)

    @triton.jit(do_not_specialize=["rows", "columns", "width", "first", "chunk"])
    def _gradient_kernel(
        logits,
        bias,
        targets,
        normalizer,
        gradient,
        output,
        bias_sums,
        stride,
        gradient_stride,
        output_stride,
        rows,
        columns,
        width,
        first,
        chunk,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
    ):
        """Some columns of `chunk` rows: (softmax - one-hot) · gradient of each row's loss, and its sums by column.

        The padding, from `columns` to `width`, is set to zero.
        """
        column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        stored = column < width
        # A tile of sums, added up once at the end, because a sum over rows waits for the slowest warp.
        sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        begin = tl.program_id(1) * chunk
        end = tl.minimum(begin + chunk, rows)
        for start in range(begin, end, BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS)
            there = row < end
            mask = there[:, None] & inside[None, :]
            place = row.to(tl.int64)[:, None]
            score = tl.load(logits + place * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
            if bias is not None:
                score += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            log_sum = tl.load(normalizer + row, mask=there, other=float("inf"))
            target = tl.load(targets + row, mask=there, other=-1) - first
            scale = tl.load(gradient + row * gradient_stride, mask=there, other=0.0)
            result = tl.exp2((score - log_sum[:, None]) * _LOG2_E)
            result = (result - tl.where(column[None, :] == target[:, None], 1.0, 0.0)) * scale[:, None]
            result = tl.where(mask, result, 0.0)
            if bias_sums is not None:
                sums += result
            tl.store(
                output + place * output_stride + column[None, :],
                result.to(output.dtype.element_ty),
                mask=there[:, None] & stored[None, :],
            )
        if bias_sums is not None:
            total = tl.sum(sums, 0)
            tl.store(bias_sums + tl.program_id(1).to(tl.int64) * columns + column, total, mask=inside)

    # Custom operators, so that profilers and dispatch modes of PyTorch see them.
    @torch.library.custom_op("txl_hf::add_statistics", mutates_args=("statistics",))
    def add_statistics(logits: Tensor, bias: Tensor | None, targets: Tensor, statistics: Tensor, first: int) -> None:
        """Add a block of logits to the statistics of each row's softmax, in place.

        Args:
            logits: (n, w) without the bias, the columns from `first` on. bias: (w,) or None.
            targets: (n,), a column each, in this block or another.
            statistics: (2, n) fp32, of the columns so far: log of the sum of exponentials, at first -∞; the target's
                logit.
        """
        rows, columns = logits.shape
        if rows == 0:
            return
        block = min(COLUMNS, triton.next_power_of_2(columns))
        with torch.cuda.device_of(logits):
            _statistics_kernel[(rows,)](
                logits,
                bias,
                # Contiguous, because the kernels take no stride of targets, which a slice of labels has.
                targets.contiguous(),
                statistics,
                logits.stride(0),
                statistics.stride(0),
                columns,
                first,
                BLOCK=block,
                num_warps=8 if block == COLUMNS else 4,
            )

    @add_statistics.register_fake
    def _(logits, bias, targets, statistics, first):
        return None

    @torch.library.custom_op("txl_hf::write_gradient", mutates_args=("output",))
    def write_gradient(
        logits: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        normalizer: Tensor,
        gradient: Tensor,
        output: Tensor,
        first: int,
        wants_sums: bool,
    ) -> Tensor:
        """Write a block's gradient of logits to `output`, (n, w), which may be the logits, and zeros to its padding.

        Args:
            logits, bias, targets, first: as for `add_statistics`.
            normalizer: (n,) fp32, log of the sum of the exponentials of all of a row's logits.
            gradient: (n,) fp32, of each row's loss.

        Returns:
            Partial sums of the gradient over the rows, (c, w) fp32; (0,) where they are not wanted.
        """
        rows, columns = logits.shape
        sums = logits.new_empty(_sums_shape(logits, wants_sums), dtype=torch.float32)
        if rows == 0:
            return sums
        chunk = triton.cdiv(rows, ROW_CHUNKS)
        with torch.cuda.device_of(logits):
            _gradient_kernel[(triton.cdiv(columns, TILE[1]), triton.cdiv(rows, chunk))](
                logits,
                bias,
                targets.contiguous(),
                normalizer,
                gradient,
                output,
                sums if wants_sums else None,
                logits.stride(0),
                gradient.stride(0),
                output.stride(0),
                rows,
                columns,
                max(columns, min(output.stride(0), columns + _padding(columns))),
                first,
                chunk,
                BLOCK_ROWS=TILE[0],
                BLOCK_COLUMNS=TILE[1],
                num_warps=8,
            )
        return sums

    @write_gradient.register_fake
    def _(logits, bias, targets, normalizer, gradient, output, first, wants_sums):
        return logits.new_empty(_sums_shape(logits, wants_sums), dtype=torch.float32)

    def _sums_shape(logits: Tensor, wanted: bool) -> tuple[int, ...]:
        rows, columns = logits.shape
        chunk = max(1, triton.cdiv(rows, ROW_CHUNKS))
        return (triton.cdiv(rows, chunk), columns) if wanted else (0,)

else:
    # Never called, because `fuses` is False.
    add_statistics = write_gradient = None  # type: ignore[assignment]
