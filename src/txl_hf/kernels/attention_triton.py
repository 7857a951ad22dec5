r"""Relative attention as Triton kernels that never hold L × K numbers (flash attention with the paper's four terms).

A program owns BLOCK_M queries of one head and walks over blocks of BLOCK_N keys with a running softmax. The terms (a)
+ (c) = (q + u)·k of a tile are one product. The terms (b) + (d) = (q + v)·W_R R depend on the distance, which differs
between the entries of a tile: entry (i, j) needs the rel_key row

    c = (L - 1 - i) + j,

so the tile reads the BLOCK_M + BLOCK_N - 1 rows from `first` = L - BLOCK_M - i0 + j0 on, where i0 and j0 are its first
query and key. With i and j counted within the tile, the entry needs row `first` + BLOCK_M - 1 - i + j.

**The shift within a tile.** Multiply q + v with BLOCK_N rows at a time: `low` has the scores of rows `first` … `first`
+ BLOCK_N - 1, `high` those of the next BLOCK_N. Row i of the tile is row i of [low, high] from column BLOCK_M - 1 - i
on: one gather, at addresses that do not depend on keys, masks or distances. The next block of keys starts BLOCK_N rows
further, so its `low` is this one's `high`: one new product a tile, three in all where flash attention has two.

**Backward.** The gradient of a tile's scores is shifted back by a gather too, where scattering would need atomics. Row
i uses the end of `low` and the beginning of `high`, BLOCK_N columns together, so one tile holds both in place: row i
of [gradient, gradient] from column BLOCK_N - BLOCK_M + 1 + i on. The part of `high` is kept for the next block of
keys, which has the other part of its rows. One kernel loops as the forward does, for the gradients of queries, rel_key
and the biases; the other loops over the queries for a block of keys and its values. All programs add to the gradients
of rel_key and the biases: atomically, or, with PyTorch's deterministic algorithms, in a fixed order into partial sums.
With `ONE_BACKWARD_KERNEL` the first adds, atomically too, to the gradients of keys and values, and there is no other.

Registers are the limit. Gathers within a warp (shuffles) need an index and two layout conversions for every entry;
through shared memory, as in `_pieces`, the addresses are constants. The backward kernels compute `low` again instead
of keeping it from tile to tile.

**Dropout.** A kernel of its own draws, before the forward pass, a bit for each score, which all three kernels read.
Drawn in the tiles from a seed, the bits would be drawn again by each kernel, in registers that its products need: half
as many instructions more for the same tile, and spills (counted in docs/performance-notes.md).

**Masks.** Every tile compares positions (the reason is at `_hide`); scores are scaled in the same instruction that
subtracts the row's maximum. The exponential is the hardware's, of base two. `first_key` never decreases along a row:
a block of queries reads keys from the beginning of its first query's document on, a block of keys reads queries up to
the last whose document begins no later.

**Both directions.** With `future` rel_key has R = K + `future` rows, entry (i, j) needs the same row as without, and
keys up to j = i + (K - L) + `future` are seen. A mask of queries and keys (`hidden`) is packed into a bit for each
pair, because tiles of bytes made the kernels spill. A query that sees nothing has the score 0 for all keys, at any
distance. Without `future` nothing of this is compiled.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..transfo_xl.attention_transfo_xl import AttentionInputs, Backend, first_repeated, register, working_dtype
from .operators import is_transformed

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LOG2_E = 1.4426950408889634
# Whether kernels run in Triton's interpreter, on the CPU; read at import, as Triton reads it when it decorates them.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
# Triton 3.3 gathers from a long vector by 4,600 shuffles a tile and spills 5 kB a thread; older ones have no tuples.
OLDEST_TRITON = (3, 4)
# CUDA's limit for the second dimension of a grid.
MOST_PROGRAMS = 65_535
# Limit of a tile's queries and keys, which tests lower so that short sequences span several tiles.
LARGEST_TILE = 128
# Whether one kernel computes all gradients, in 9 products a tile where two have 13. Off until a GPU has timed it
# (docs/performance-notes.md); with PyTorch's deterministic algorithms there are always two.
ONE_BACKWARD_KERNEL = False


def _why_not(inputs: AttentionInputs) -> str | None:
    if inputs.rel_key is None and inputs.rel_bias is not None:
        return "its kernels take a score per distance beside a key per distance only"
    if inputs.order is not None and (torch.is_grad_enabled() or inputs.future is not None):
        return "its backward pass and its future take keys in order of time"
    if inputs.score_bias is not None:
        return "its kernels add no score_bias"
    return why_not_triton(inputs.query)


def of_every_distance(inputs: AttentionInputs, spare: int = 0) -> AttentionInputs:
    """The inputs with a row for each of the K + future distances in `rel_key` and `rel_bias`, and `spare` more."""
    n = inputs.key.shape[2] + (inputs.future or 0) + spare
    both = (inputs.rel_key, inputs.rel_bias)
    rel_key, rel_bias = (None if rows is None else first_repeated(rows, n) for rows in both)
    return inputs._replace(rel_key=rel_key, rel_bias=rel_bias)


def is_default(query: Tensor) -> bool:
    """Whether `"auto"` prefers these kernels for a query (B, H, L, Dh): on NVIDIA's GPUs, in half precision, because
    others have not been timed. False under torch.func, which cannot map over their operators."""
    if not query.is_cuda or torch.version.hip is not None:
        return False
    is_half = working_dtype(query) in (torch.float16, torch.bfloat16)
    return is_half and (torch.compiler.is_compiling() or not is_transformed(query))


def why_not_triton(query: Tensor) -> str | None:
    """The reason why `triton_relative_attention` cannot take this query (B, H, L, Dh), or None if it can."""
    reason = why_no_kernels(query)
    return f"heads are {query.shape[-1]} wide, more than 128" if reason is None and query.shape[-1] > 128 else reason


def why_no_kernels(tensor: Tensor) -> str | None:
    """The reason why the package's Triton kernels cannot read this tensor, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{tensor.dtype} is not supported"
    if INTERPRETED:
        return None
    if tensor.device.type != "cuda":
        return f"the tensors are on {tensor.device.type}, not on a GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return why_triton_cannot_begin()


@torch.compiler.assume_constant_result
def why_triton_cannot_begin() -> str | None:
    """The reason why an installed Triton cannot launch kernels on this machine's GPU, or None if it can.

    Triton first builds a C module, with gcc or clang and the headers of Python, which small images lack.
    """
    return _try_driver()


@functools.cache
def _try_driver() -> str | None:
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        # Any error, because the compiler, the module's loader and Triton's search for a GPU raise several types.
        return f"Triton cannot begin: {' '.join(str(error).split()):.200}"
    logging.getLogger(__name__).info("Triton compiles kernels at their first call, and keeps them on the disk")
    return None


def triton_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """Relative attention without L × K numbers. Dropout draws one seed from PyTorch's generator of the device, so that
    `torch.manual_seed` repeats it, and stores a bit for each score: L · K / 8 bytes for each batch row and head.

    Raises:
        ValueError: the tensors are not supported, for the reason that `why_not_triton` gives; `scaling` is not
            positive, because the kernels find a row's largest score before they scale.
    """
    if inputs.scaling <= 0:
        raise ValueError(f"txl_triton cannot be used: scaling is {inputs.scaling}, not a positive number")
    inputs = of_every_distance(inputs)
    query, dtype = inputs.query, working_dtype(inputs.query)
    if reason := why_not_triton(query.to(dtype)):
        raise ValueError(f"txl_triton cannot be used: {reason}")
    seen = blind = None
    if inputs.future is not None and inputs.hidden is not None:
        seen, blind = _pack(inputs.hidden[:, 0].expand(-1, query.shape[2], inputs.key.shape[2]))
        inputs = _hiding_alone(inputs)
    rel_key = inputs.rel_key
    # fp32, because the interpreter multiplies the bits of bfloat16 numbers as if they were integers.
    inner_dtype = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    first_key = None if inputs.first_key is None else inputs.first_key.to(torch.int32)
    kept = None
    if inputs.dropout > 0:
        seed = torch.randint(2**62, (1,), device=query.device)
        shape = (*query.shape[:3], inputs.key.shape[2])
        kept = dropout_bits_op(seed, first_key, shape, inputs.window, inputs.future, inputs.dropout)
    width = query.shape[-1]
    rows = [
        None if tensor is None else tensor.to(inner_dtype) for tensor in (query, inputs.key, inputs.value, rel_key)
    ]
    rows += [inputs.content_bias, None if rel_key is None else inputs.position_bias]
    if width % 16 > 0:
        # Padded to a multiple of 16 numbers, because unaligned rows (41, 38) are read two bytes at a time.
        rows = [None if tensor is None else F.pad(tensor, (0, -width % 16)) for tensor in rows]
    masks = (None if rel_key is None else inputs.rel_bias, inputs.key_mask, first_key, kept, seen, blind)
    constants = (inputs.window, inputs.future, inputs.scaling, inputs.dropout, inputs.order)
    output, _ = relative_attention_op(*rows, *masks, *constants)
    return output[..., :width].to(dtype), None


def _pack(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """From `hidden`, (B or 1, L, K) bool, the visible pairs as bits, (B or 1, L, words) int32, and the queries that
    see nothing, (B or 1, L) bool, which have the bits of all keys."""
    blind, K = hidden.all(-1), hidden.shape[-1]
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=hidden.device)
    packed = []
    # Some rows at a time, because each operation allocates a byte for each pair.
    for some, nothing in zip(hidden.split(4096, 1), blind.split(4096, 1), strict=True):
        seen = F.pad(~some | nothing[..., None], (0, 32 * _words(K) - K)).unflatten(-1, (-1, 8))
        packed.append((seen * powers).sum(-1, dtype=torch.uint8))
    return torch.cat(packed, dim=1).view(torch.int32), blind


def _hiding_alone(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs whose only mask is `hidden`; `future` spans the segment, because a query that sees nothing takes the mean
    of all keys. Rows of distances beyond the given `future` repeat the last one, which changes no result."""
    L, K, future = inputs.query.shape[2], inputs.key.shape[2], inputs.future or 0
    inputs = inputs._replace(future=max(future, L - 1), window=None, key_mask=None, first_key=None)
    if future >= L - 1:
        return inputs
    last = torch.arange(K + L - 1, device=inputs.query.device).clamp(max=K + future - 1)
    both = (inputs.rel_key, inputs.rel_bias)
    rel_key, rel_bias = (None if rows is None else rows[:, last] for rows in both)
    return inputs._replace(rel_key=rel_key, rel_bias=rel_bias)


if triton is not None:
    # ------------------------------------------------------------------------------------------------- tiles

    @triton.jit
    def _load_rows(pointer, rows, row_count, stride, D: tl.constexpr, WIDTH: tl.constexpr):
        """(len(rows), WIDTH): rows clamped to 0 … row_count - 1, zero in columns from D on.

        No query sees a row outside, so it need only be finite; a mask would take longer than the products can hide.
        """
        columns = tl.arange(0, WIDTH)
        rows = tl.minimum(tl.maximum(rows, 0), row_count - 1)
        pointers = pointer + rows[:, None] * stride + columns[None, :]
        if D == WIDTH:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
        return tile

    @triton.jit
    def _store_rows(pointer, tile, rows, row_count, stride, D: tl.constexpr, WIDTH: tl.constexpr):
        columns = tl.arange(0, WIDTH)
        tl.store(
            pointer + rows[:, None] * stride + columns[None, :],
            tile.to(pointer.dtype.element_ty),
            mask=(rows < row_count)[:, None] & (columns < D)[None, :],
        )

    @triton.jit
    def _with_bias(query, bias, head, D: tl.constexpr, WIDTH: tl.constexpr):
        """q + u or q + v, rounded to the type of q as a product needs it."""
        if bias is not None:
            columns = tl.arange(0, WIDTH)
            row = tl.load(bias + head * D + columns, mask=columns < D, other=0.0)
            biased = (query.to(tl.float32) + row.to(tl.float32)[None, :]).to(query.dtype)
        else:
            biased = query
        return biased

    @triton.jit
    def _hide(scores, i0, j0, key_mask, first_key, seen, blind, masks, batch, L, K, words, window, future, order=None):
        """Scores with -∞ for the keys that a query does not see (`hidden_keys`).

        No branch skips tiles that are visible whole, because ptxas may then reuse the registers of q + u between the
        products of two iterations: with Triton 3.6, on an H200, all tiles of the forward kernel except the first had
        wrong queries. `tests/sass.py` detects this in machine code.
        """
        M: tl.constexpr = scores.shape[0]
        N: tl.constexpr = scores.shape[1]
        i = i0 + (K - L) + tl.arange(0, M)[:, None]
        j = j0 + tl.arange(0, N)[None, :]
        rows = tl.minimum(i0 + tl.arange(0, M), L - 1)
        if order is not None:
            j = tl.load(order + j, mask=j < K, other=K).to(tl.int32)
        if future is None:
            visible = j <= i
        else:
            visible = (j <= i + future) & (j < K)
        if window is not None:
            visible = visible & (j >= i - window)
        if first_key is not None:
            visible = visible & (j >= tl.load(first_key + batch * L + rows)[:, None])
            if future is not None:
                # The first position of each key's document.
                begins = tl.load(first_key + batch * L + (j - (K - L)), mask=(j >= K - L) & (j < K), other=0)
                visible = visible & (begins <= i)
        if key_mask is not None:
            real = tl.load(key_mask + batch * K + j, mask=j < K, other=0) != 0
            visible = (visible & real) | (j == i)
        if seen is not None:
            mask = batch % masks * L
            visible = visible & _bits(seen + mask * words, i0, j0, L, words, M, N)
            scores = tl.where(tl.load(blind + mask + rows)[:, None] != 0, 0.0, scores)
        return tl.where(visible, scores, -float("inf"))

    @triton.jit
    def _key_range(i0, first_key, batch, L, K, window, future, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        """Start, a multiple of BLOCK_N, and end of the keys that a block of queries sees."""
        start = 0
        if window is not None:
            start = tl.maximum(i0 + (K - L) - window, 0) // BLOCK_N * BLOCK_N
        if first_key is not None:
            start = tl.maximum(tl.load(first_key + batch * L + i0) // BLOCK_N * BLOCK_N, start)
        end = i0 + BLOCK_M
        if future is not None:
            end = tl.minimum(end + future, L)
            if first_key is not None:
                end = _end_of_queries(first_key + batch * L, i0 + BLOCK_M - 1 + (K - L), i0, end)
        return start, tl.minimum(end + (K - L), K)

    @triton.jit
    def _row_count(K, future):
        """R, the number of rows of rel_key."""
        return K if future is None else K + future

    @triton.jit
    def _end_of_queries(first_key, j, start, end):
        """The end of the queries in `start` … `end` - 1 whose document begins no later than key j, the first ones."""
        while start < end:
            middle = (start + end) // 2
            begun = tl.load(first_key + middle) <= j
            start = tl.where(begun, middle + 1, start)
            end = tl.where(begun, end, middle)
        return start

    @triton.jit
    def _distance_scores(
        query,
        rel_key,
        rel_bias,
        first,
        R,
        stride,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        PRECISION: tl.constexpr,
        order=None,
    ):
        """(b) + (d) by distance, before the shift: (queries, BLOCK) for the rows from `first` on.

        For a single query, row c belongs to key c; with `order` the row is that of the key's place in time.
        """
        rows = first + tl.arange(0, BLOCK)
        if order is not None:
            rows = tl.load(order + tl.minimum(tl.maximum(rows, 0), R - 1)).to(tl.int32)
        relative = _load_rows(rel_key, rows, R, stride, D, query.shape[1])
        scores = tl.dot(query, tl.trans(relative), input_precision=PRECISION)
        if rel_bias is not None:
            row = tl.load(rel_bias + tl.minimum(tl.maximum(rows, 0), R - 1))
            scores += row.to(tl.float32)[None, :]
        return scores

    @triton.jit
    def _pieces(left, right, start):
        """(M, N): N entries of row i of [left, right] from column `start`[i] on.

        A gather from one long vector goes through shared memory and returns the layout of the products. The vector
        holds squares of 8 × 8 entries. A warp, which holds pairs of columns in eight rows, writes a square without
        bank conflicts, and reads with at most two threads in a bank; a thread's addresses differ by constants, except
        within a square.
        """
        M: tl.constexpr = left.shape[0]
        N: tl.constexpr = left.shape[1]
        squares = tl.reshape(tl.join(left, right), (M // 8, 8, N // 8, 8, 2))
        vector = tl.reshape(tl.permute(squares, (0, 4, 2, 1, 3)), (2 * M * N,))
        i = tl.arange(0, M)
        j = tl.arange(0, N)
        column = start[:, None] + (j % 8)[None, :]
        place = (i // 8 * 16 * N + i % 8 * 8)[:, None] + column // 8 * 64 + column % 8 + (j // 8 * 64)[None, :]
        return tl.reshape(tl.gather(vector, tl.reshape(place, (M * N,)), axis=0), (M, N))

    @triton.jit
    def _shift(low, high):
        """Scores by distance, two blocks of rows, → scores by key (Appendix B within a tile)."""
        M: tl.constexpr = low.shape[0]
        return _pieces(low, high, -tl.arange(0, M) + (M - 1))

    @triton.jit
    def _position_scores(
        query, rel_key, rel_bias, first, R, stride, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
    ):
        """(b) + (d) of a tile by key, with `low` and `high` both computed."""
        low = _distance_scores(query, rel_key, rel_bias, first, R, stride, D, BLOCK, PRECISION)
        high = _distance_scores(query, rel_key, rel_bias, first + BLOCK, R, stride, D, BLOCK, PRECISION)
        return _shift(low, high)

    @triton.jit
    def _shift_back(gradient):
        """Gradient by key → gradient by distance, the parts of `low` and `high` joined in one tile."""
        M: tl.constexpr = gradient.shape[0]
        N: tl.constexpr = gradient.shape[1]
        return _pieces(gradient, gradient, tl.arange(0, M) + (N - M + 1))

    @triton.jit
    def _bits(bits, i0, j0, L, words, M: tl.constexpr, N: tl.constexpr):
        """(M, N): a tile of the bits of a head (kept by dropout, or visible), `words` numbers to a row."""
        WIDTH: tl.constexpr = 32 if N > 32 else N
        rows = tl.minimum(i0 + tl.arange(0, M), L - 1)
        tile = tl.load(bits + rows[:, None] * words + (j0 // 32 + tl.arange(0, N // WIDTH))[None, :])
        # Bit 8e + s of a word is column 8e + s. A thread holds columns that differ by 8: it shifts by its own s, and
        # masks with the constants 1 << 8e.
        bits = tile[:, :, None, None] >> (j0 % 32 + tl.arange(0, 8))[None, None, None, :]
        bits &= (1 << (tl.arange(0, WIDTH // 8) * 8))[None, None, :, None]
        return tl.reshape(bits, (M, N)) != 0

    @triton.jit(do_not_specialize=["H", "L", "K", "words", "window", "future", "threshold"])
    def _dropout_kernel(
        kept,
        seed,
        first_key,
        H,
        L,
        K,
        words,
        window,
        future,
        threshold,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
    ):
        """Draw the bits of a block of queries of one batch row and head, for the keys that it sees.

        A bit is 1 where a random number, as a signed one, is at least `threshold`. A call of Philox gives four
        numbers; its counter is j, i and the pair of batch row and head, so that draws do not depend on tiles.
        """
        blocks = tl.cdiv(L, BLOCK_M)
        i0 = tl.program_id(0) % blocks * BLOCK_M
        pair = tl.program_id(0) // blocks
        kept += pair.to(tl.int64) * L * words
        seed = tl.load(seed)
        zeros = tl.zeros((BLOCK_M, BLOCK_N // 32), tl.int32)
        i = i0 + tl.arange(0, BLOCK_M)[:, None]
        start, end = _key_range(i0, first_key, (pair // H).to(tl.int64), L, K, window, future, BLOCK_M, BLOCK_N)
        for j0 in range(start, end, BLOCK_N):
            column = j0 // 32 + tl.arange(0, BLOCK_N // 32)[None, :]
            word = zeros
            for quad in tl.static_range(8):
                # Seven rounds are the fewest that pass the tests of randomness in Salmon et al. 2011, section 4.3.
                drawn = tl.philox(seed, zeros + column * 8 + quad, zeros + i, zeros + pair, zeros, n_rounds=7)
                for k in tl.static_range(4):
                    number = drawn[k].to(tl.int32, bitcast=True)
                    word |= tl.where(number >= threshold, 1 << (4 * quad + k), 0)
            tl.store(kept + i * words + column, word, mask=(i < L) & (column < words))

    # ----------------------------------------------------------------------------------------------- forward

    @triton.jit(do_not_specialize=["H", "L", "K", "words", "masks", "window", "future"])
    def _forward_kernel(
        query,
        key,
        value,
        rel_key,
        content_bias,
        position_bias,
        rel_bias,
        key_mask,
        first_key,
        kept,
        seen,
        blind,
        order,
        output,
        log_sum,
        query_strides,
        key_strides,
        value_strides,
        rel_key_strides,
        output_strides,
        H,
        L,
        K,
        words,
        masks,
        window,
        future,
        scaling_log2,
        keep_scale,
        D: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """A block of queries of one batch row and head: attended values and log2 of the softmax's denominator."""
        blocks = tl.cdiv(L, BLOCK_M)
        # The last queries first, because they see most keys.
        i0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
        pair = tl.program_id(0) // blocks
        batch = (pair // H).to(tl.int64)
        head = (pair % H).to(tl.int64)
        query += batch * query_strides[0] + head * query_strides[1]
        key += batch * key_strides[0] + head * key_strides[1]
        value += batch * value_strides[0] + head * value_strides[1]
        output += batch * output_strides[0] + head * output_strides[1]
        if kept is not None:
            kept += pair.to(tl.int64) * L * words

        i = i0 + tl.arange(0, BLOCK_M)
        q = _load_rows(query, i, L, query_strides[2], D, WIDTH)
        q_content = _with_bias(q, content_bias, head, D, WIDTH)
        start, end = _key_range(i0, first_key, batch, L, K, window, future, BLOCK_M, BLOCK_N)
        R = _row_count(K, future)
        if order is not None:
            # All keys, because in a ring the oldest may be at any index.
            start = 0
        if rel_key is not None:
            rel_key += head * rel_key_strides[0]
            if rel_bias is not None:
                rel_bias += head * R
            q_position = _with_bias(q, position_bias, head, D, WIDTH)
            first = L - BLOCK_M - i0 + start
            low = _distance_scores(
                q_position, rel_key, rel_bias, first, R, rel_key_strides[1], D, BLOCK_N, PRECISION, order
            )

        maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        attended = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for j0 in range(start, end, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            k = _load_rows(key, j, K, key_strides[2], D, WIDTH)
            scores = tl.dot(q_content, tl.trans(k), input_precision=PRECISION)
            if rel_key is not None:
                first += BLOCK_N
                high = _distance_scores(
                    q_position, rel_key, rel_bias, first, R, rel_key_strides[1], D, BLOCK_N, PRECISION, order
                )
                scores += _shift(low, high)
                low = high
            scores = _hide(
                scores, i0, j0, key_mask, first_key, seen, blind, masks, batch, L, K, words, window, future, order
            )

            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # Shift 0 while a row has seen no key, because ∞ - ∞ would be NaN.
            shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum * scaling_log2)
            weights = tl.exp2(scores * scaling_log2 - shift[:, None])
            rescale = tl.exp2(maximum * scaling_log2 - shift)
            maximum = new_maximum
            total = total * rescale + tl.sum(weights, 1)
            if kept is not None:
                weights = tl.where(_bits(kept, i0, j0, L, words, BLOCK_M, BLOCK_N), weights, 0.0)
            v = _load_rows(value, j, K, value_strides[2], D, WIDTH)
            attended = tl.dot(weights.to(v.dtype), v, attended * rescale[:, None], input_precision=PRECISION)

        if kept is not None:
            attended *= keep_scale
        _store_rows(output, attended / total[:, None], i, L, output_strides[2], D, WIDTH)
        tl.store(log_sum + pair.to(tl.int64) * L + i, maximum * scaling_log2 + tl.log2(total), mask=i < L)

    # ---------------------------------------------------------------------------------------------- backward

    @triton.jit
    def _add_rows(pointer, tile, rows, inside, D: tl.constexpr):
        columns = tl.arange(0, tile.shape[1])
        pointers = pointer + rows[:, None] * D + columns[None, :]
        tl.atomic_add(pointers, tile, mask=inside[:, None] & (columns < D)[None, :], sem="relaxed")

    @triton.jit
    def _add_distance_gradient(
        gradient, query, d_rel_key, d_rel_bias, first, R, scaling, D: tl.constexpr, PRECISION: tl.constexpr
    ):
        """Add a (queries, distances) tile's share to the gradients of rel_key and rel_bias from row `first` on."""
        rows = first + tl.arange(0, gradient.shape[1])
        inside = (rows >= 0) & (rows < R)
        if d_rel_bias is not None:
            share = tl.sum(gradient.to(tl.float32), 0) * scaling
            tl.atomic_add(d_rel_bias + rows, share, mask=inside, sem="relaxed")
        if d_rel_key is not None:
            share = tl.dot(tl.trans(gradient), query, input_precision=PRECISION) * scaling
            _add_rows(d_rel_key, share, rows, inside, D)

    @triton.jit
    def _add_bias_gradient(pointer, gradient, scaling, D: tl.constexpr):
        columns = tl.arange(0, gradient.shape[1])
        tl.atomic_add(pointer + columns, tl.sum(gradient, 0) * scaling, mask=columns < D, sem="relaxed")

    @triton.jit(do_not_specialize=["B", "H", "L", "K", "words", "masks", "window", "future"])
    def _backward_query_kernel(
        query,
        key,
        value,
        rel_key,
        content_bias,
        position_bias,
        rel_bias,
        key_mask,
        first_key,
        kept,
        seen,
        blind,
        output,
        log_sum,
        d_output,
        delta,
        d_query,
        d_key,
        d_value,
        d_rel_key,
        d_content_bias,
        d_position_bias,
        d_rel_bias,
        query_strides,
        key_strides,
        value_strides,
        rel_key_strides,
        output_strides,
        d_output_strides,
        d_query_strides,
        B,
        H,
        L,
        K,
        words,
        masks,
        window,
        future,
        scaling,
        scaling_log2,
        keep_scale,
        PARTIAL: tl.constexpr,
        D: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Blocks of queries of one head: gradients of queries, rel_key and biases, and delta = Σ d_output · output.

        Each program takes every num_programs(1)-th block of queries of the batch, in order. With PARTIAL each program
        adds to sums of its own, else all programs add to the same. `d_key` and `d_value`, where given, are sums of all
        programs (B, H, K, D) in fp32.
        """
        blocks = tl.cdiv(L, BLOCK_M)
        # Neighbouring programs have different heads, so that programs that run at once add to different sums.
        head = tl.program_id(0).to(tl.int64)
        owner = head
        if PARTIAL:
            owner += tl.program_id(1).to(tl.int64) * H
        R = _row_count(K, future)
        if rel_key is not None:
            rel_key += head * rel_key_strides[0]
            if rel_bias is not None:
                rel_bias += head * R
            if d_rel_key is not None:
                d_rel_key += owner * R * D
            if d_rel_bias is not None:
                d_rel_bias += owner * R
        in_low = tl.arange(0, BLOCK_N)[None, :] >= BLOCK_M - 1 - tl.arange(0, BLOCK_M)[:, None]

        for item in range(tl.program_id(1), B * blocks, tl.num_programs(1)):
            i0 = (blocks - 1 - item % blocks) * BLOCK_M
            batch = (item // blocks).to(tl.int64)
            pair = batch * H + head
            key_head = key + batch * key_strides[0] + head * key_strides[1]
            value_head = value + batch * value_strides[0] + head * value_strides[1]

            i = i0 + tl.arange(0, BLOCK_M)
            q = _load_rows(
                query + batch * query_strides[0] + head * query_strides[1], i, L, query_strides[2], D, WIDTH
            )
            q_content = _with_bias(q, content_bias, head, D, WIDTH)
            d_out = _load_rows(
                d_output + batch * d_output_strides[0] + head * d_output_strides[1],
                i,
                L,
                d_output_strides[2],
                D,
                WIDTH,
            )
            out = _load_rows(
                output + batch * output_strides[0] + head * output_strides[1], i, L, output_strides[2], D, WIDTH
            )
            row_delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
            tl.store(delta + pair * L + i, row_delta, mask=i < L)
            # Rows from L on get probability 0, hence no gradient.
            row_log_sum = tl.load(log_sum + pair * L + i, mask=i < L, other=float("inf"))

            start, end = _key_range(i0, first_key, batch, L, K, window, future, BLOCK_M, BLOCK_N)
            d_q_content = tl.zeros((BLOCK_M, WIDTH), tl.float32)
            if rel_key is not None:
                q_position = _with_bias(q, position_bias, head, D, WIDTH)
                first = L - BLOCK_M - i0 + start
                d_joined_before = tl.zeros((BLOCK_M, BLOCK_N), q.dtype)
                d_q_position = tl.zeros((BLOCK_M, WIDTH), tl.float32)

            for j0 in range(start, end, BLOCK_N):
                j = j0 + tl.arange(0, BLOCK_N)
                k = _load_rows(key_head, j, K, key_strides[2], D, WIDTH)
                scores = tl.dot(q_content, tl.trans(k), input_precision=PRECISION)
                if rel_key is not None:
                    # The rows of `low`: the compiler loads them once where no atomic addition lies between.
                    relative = _load_rows(rel_key, first + tl.arange(0, BLOCK_N), R, rel_key_strides[1], D, WIDTH)
                    scores += _position_scores(
                        q_position, rel_key, rel_bias, first, R, rel_key_strides[1], D, BLOCK_N, PRECISION
                    )
                scores = _hide(
                    scores, i0, j0, key_mask, first_key, seen, blind, masks, batch, L, K, words, window, future
                )
                probabilities = tl.exp2(scores * scaling_log2 - row_log_sum[:, None])

                v = _load_rows(value_head, j, K, value_strides[2], D, WIDTH)
                d_probabilities = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
                weights = probabilities
                if kept is not None:
                    survives = _bits(kept + pair * L * words, i0, j0, L, words, BLOCK_M, BLOCK_N)
                    weights = tl.where(survives, probabilities, 0.0)
                    d_probabilities = tl.where(survives, d_probabilities, 0.0) * keep_scale
                if d_value is not None:
                    d_v = tl.dot(tl.trans(weights.to(d_out.dtype)), d_out, input_precision=PRECISION) * keep_scale
                    _add_rows(d_value + pair * K * D, d_v, j, j < K, D)
                d_scores = probabilities * (d_probabilities - row_delta[:, None])
                d_scores = d_scores.to(k.dtype)
                if d_key is not None:
                    d_k = tl.dot(tl.trans(d_scores), q_content, input_precision=PRECISION) * scaling
                    _add_rows(d_key + pair * K * D, d_k, j, j < K, D)
                d_q_content = tl.dot(d_scores, k, d_q_content, input_precision=PRECISION)

                if rel_key is not None:
                    if blind is not None:
                        # Scores of a query that sees nothing do not depend on distances.
                        rows = batch % masks * L + tl.minimum(i, L - 1)
                        d_scores = tl.where(tl.load(blind + rows)[:, None] != 0, 0.0, d_scores).to(k.dtype)
                    d_joined = _shift_back(d_scores)
                    # The other part of the rows of `low` is from the block before.
                    d_low = tl.where(in_low, d_joined, d_joined_before)
                    d_joined_before = d_joined
                    d_q_position = tl.dot(d_low, relative, d_q_position, input_precision=PRECISION)
                    _add_distance_gradient(d_low, q_position, d_rel_key, d_rel_bias, first, R, scaling, D, PRECISION)
                    first += BLOCK_N

            d_q = d_q_content
            if rel_key is not None:
                d_low = tl.where(in_low, tl.zeros_like(d_joined_before), d_joined_before)
                relative = _load_rows(rel_key, first + tl.arange(0, BLOCK_N), R, rel_key_strides[1], D, WIDTH)
                d_q_position = tl.dot(d_low, relative, d_q_position, input_precision=PRECISION)
                _add_distance_gradient(d_low, q_position, d_rel_key, d_rel_bias, first, R, scaling, D, PRECISION)
                if d_position_bias is not None:
                    _add_bias_gradient(d_position_bias + owner * D, d_q_position, scaling, D)
                d_q += d_q_position
            if d_content_bias is not None:
                _add_bias_gradient(d_content_bias + owner * D, d_q_content, scaling, D)
            _store_rows(
                d_query + batch * d_query_strides[0] + head * d_query_strides[1],
                d_q * scaling,
                i,
                L,
                d_query_strides[2],
                D,
                WIDTH,
            )
            if PARTIAL:
                # A barrier, because the next block adds to the same sums from other threads.
                tl.debug_barrier()

    @triton.jit(do_not_specialize=["H", "L", "K", "words", "masks", "window", "future"])
    def _backward_key_kernel(
        query,
        key,
        value,
        rel_key,
        content_bias,
        position_bias,
        rel_bias,
        key_mask,
        first_key,
        kept,
        seen,
        blind,
        log_sum,
        d_output,
        delta,
        d_key,
        d_value,
        query_strides,
        key_strides,
        value_strides,
        rel_key_strides,
        d_output_strides,
        d_key_strides,
        d_value_strides,
        H,
        L,
        K,
        words,
        masks,
        window,
        future,
        scaling,
        scaling_log2,
        keep_scale,
        D: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """A block of keys of one batch row and head: gradients of keys and values."""
        blocks = tl.cdiv(K, BLOCK_N)
        j0 = tl.program_id(0) % blocks * BLOCK_N
        pair = tl.program_id(0) // blocks
        batch = (pair // H).to(tl.int64)
        head = (pair % H).to(tl.int64)
        query += batch * query_strides[0] + head * query_strides[1]
        key += batch * key_strides[0] + head * key_strides[1]
        value += batch * value_strides[0] + head * value_strides[1]
        d_output += batch * d_output_strides[0] + head * d_output_strides[1]
        d_key += batch * d_key_strides[0] + head * d_key_strides[1]
        d_value += batch * d_value_strides[0] + head * d_value_strides[1]
        log_sum += pair.to(tl.int64) * L
        delta += pair.to(tl.int64) * L
        if kept is not None:
            kept += pair.to(tl.int64) * L * words
        R = _row_count(K, future)
        if rel_key is not None:
            rel_key += head * rel_key_strides[0]
            if rel_bias is not None:
                rel_bias += head * R

        j = j0 + tl.arange(0, BLOCK_N)
        k = _load_rows(key, j, K, key_strides[2], D, WIDTH)
        v = _load_rows(value, j, K, value_strides[2], D, WIDTH)
        d_k = tl.zeros((BLOCK_N, WIDTH), tl.float32)
        d_v = tl.zeros((BLOCK_N, WIDTH), tl.float32)
        # From the query at the first key (with `future`, the first that sees it) to the last that sees the last key.
        first_query = j0 - (K - L)
        if future is not None:
            first_query -= future
            if first_key is not None and j0 >= K - L:
                first_query = tl.maximum(first_query, tl.load(first_key + batch * L + j0 - (K - L)) - (K - L))
        start = tl.maximum(first_query, 0) // BLOCK_M * BLOCK_M
        end = L
        if window is not None:
            end = tl.minimum(j0 + BLOCK_N + window - (K - L), L)
        if first_key is not None:
            end = _end_of_queries(first_key + batch * L, j0 + BLOCK_N - 1, start, end)
        for i0 in range(start, end, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            q = _load_rows(query, i, L, query_strides[2], D, WIDTH)
            q_content = _with_bias(q, content_bias, head, D, WIDTH)
            scores = tl.dot(q_content, tl.trans(k), input_precision=PRECISION)
            if rel_key is not None:
                q_position = _with_bias(q, position_bias, head, D, WIDTH)
                first = L - BLOCK_M - i0 + j0
                scores += _position_scores(
                    q_position, rel_key, rel_bias, first, R, rel_key_strides[1], D, BLOCK_N, PRECISION
                )
            scores = _hide(scores, i0, j0, key_mask, first_key, seen, blind, masks, batch, L, K, words, window, future)
            row_log_sum = tl.load(log_sum + i, mask=i < L, other=float("inf"))
            probabilities = tl.exp2(scores * scaling_log2 - row_log_sum[:, None])

            d_out = _load_rows(d_output, i, L, d_output_strides[2], D, WIDTH)
            d_probabilities = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
            weights = probabilities
            if kept is not None:
                survives = _bits(kept, i0, j0, L, words, BLOCK_M, BLOCK_N)
                weights = tl.where(survives, probabilities, 0.0)
                d_probabilities = tl.where(survives, d_probabilities, 0.0) * keep_scale
            d_v = tl.dot(tl.trans(weights.to(d_out.dtype)), d_out, d_v, input_precision=PRECISION)
            row_delta = tl.load(delta + i, mask=i < L, other=0.0)
            d_scores = probabilities * (d_probabilities - row_delta[:, None])
            d_k = tl.dot(tl.trans(d_scores.to(q.dtype)), q_content, d_k, input_precision=PRECISION)
        if kept is not None:
            d_v *= keep_scale
        _store_rows(d_key, d_k * scaling, j, K, d_key_strides[2], D, WIDTH)
        _store_rows(d_value, d_v, j, K, d_value_strides[2], D, WIDTH)

    # ---------------------------------------------------------------------------------------------- launching

    # Queries (no more than keys: the shift has two blocks of distances) and keys of a tile, warps, stages, for heads
    # up to 64 and up to 128 wide: the fastest on an H200 for the recipes of NVIDIA and for the large model of enwik8.
    # `benchmarks/attention_kernel.py --sweep` times others.
    _TILES = {
        "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
        "backward_query": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2)},
        "backward_key": {64: (64, 64, 4, 2), 128: (32, 32, 4, 2)},
    }
    # For the first Blackwell, where Hopper's tile for heads of 128 would want 256 of 227 KiB. Compiled for sm_100.
    _BLACKWELL_TILES = _TILES | {"backward_query": {64: (64, 64, 4, 2), 128: (64, 64, 8, 1)}}
    # For GPUs before Hopper and after the first Blackwell: operands of products are in registers, and a program has
    # 99 KiB of shared memory, except on the A100. Compiled for sm_80 and sm_86.
    _REGISTER_TILES = {
        "forward": {64: (64, 64, 4, 2), 128: (32, 64, 8, 2)},
        "backward_query": {64: (32, 32, 4, 2), 128: (32, 32, 8, 2)},
        "backward_key": {64: (64, 64, 4, 2), 128: (32, 64, 8, 2)},
    }
    # For fp32, whose products have operands in registers on every GPU.
    _FP32_TILES = {
        "forward": {64: (32, 32, 8, 1), 128: (16, 16, 4, 1)},
        "backward_query": {64: (16, 16, 4, 1), 128: (16, 16, 4, 1)},
        "backward_key": {64: (16, 32, 4, 1), 128: (16, 16, 4, 1)},
    }

    # Queries and keys for which a program draws bits at a time.
    _DROPOUT_TILE = {"BLOCK_M": 32, "BLOCK_N": 256}

    def _capability(device: torch.device) -> tuple[int, int]:
        """The compute capability; for the interpreter, which can run every tile, Hopper's."""
        return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)

    def _tiles(device: torch.device, dtype: torch.dtype) -> dict[str, dict[int, tuple[int, int, int, int]]]:
        if dtype == torch.float32:
            return _FP32_TILES
        return {9: _TILES, 10: _BLACKWELL_TILES}.get(_capability(device)[0], _REGISTER_TILES)

    def _tile(kernel: str, query: Tensor) -> dict[str, int]:
        L, D = query.shape[-2:]
        width = max(16, triton.next_power_of_2(D))
        queries, keys, warps, stages = _tiles(query.device, query.dtype)[kernel][max(width, 64)]
        return {
            "WIDTH": width,
            "BLOCK_M": min(queries, LARGEST_TILE, max(16, triton.next_power_of_2(L))),
            "BLOCK_N": min(keys, LARGEST_TILE),
            "num_warps": warps,
            "num_stages": stages,
        }

    def _can_read(tensor: Tensor) -> bool:
        """Whether columns have the stride 1, and 32 bits index the numbers of a head, as the kernels need it."""
        return tensor.stride(-1) == 1 and tensor.shape[-2] * tensor.stride(-2) < 2**31

    def _rows_in_order(tensor: Tensor) -> Tensor:
        return tensor if _can_read(tensor) else tensor.contiguous()

    def _strides(tensor: Tensor | None) -> tuple[int, ...]:
        return (0, 0) if tensor is None else tensor.stride()[:-1]

    # The first arguments of every operator: tensors that the kernels read by rows, and tensors that they read whole.
    _BY_ROWS = ("query", "key", "value", "rel_key")
    _WHOLE = ("content_bias", "position_bias", "rel_bias", "key_mask", "first_key", "kept", "seen", "blind")

    def _shared_arguments(*inputs) -> dict:
        """The arguments that all kernels have in common, tensors in a layout they can read."""
        *tensors, window, future, scaling, dropout = inputs
        given = dict(zip((*_BY_ROWS, *_WHOLE), tensors, strict=True))
        for names, lay_out in ((_BY_ROWS, _rows_in_order), (_WHOLE, Tensor.contiguous)):
            given |= {name: lay_out(given[name]) for name in names if given[name] is not None}
        query, key, seen = given["query"], given["key"], given["seen"]
        return given | {
            "masks": None if seen is None else len(seen),
            **{f"{name}_strides": _strides(given[name]) for name in _BY_ROWS},
            "H": query.shape[1],
            "L": query.shape[2],
            "K": key.shape[2],
            "words": _words(key.shape[2]),
            "window": window,
            "future": future,
            "scaling_log2": scaling * LOG2_E,
            "keep_scale": 1 / (1 - dropout) if dropout < 1 else 0.0,
            "D": query.shape[3],
            "PRECISION": _precision(query.dtype),
        }

    def _precision(dtype: torch.dtype) -> str:
        """The precision of fp32 products, as PyTorch is set; products of other dtypes ignore it."""
        matmul = torch.backends.cuda.matmul
        # PyTorch 2.9 and newer raise an error where `allow_tf32` is read after `fp32_precision` was set.
        inexact = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
        return "ieee" if dtype == torch.float32 and not inexact else "tf32"

    def _backward_arguments(log_sum: Tensor, d_output: Tensor, scaling: float) -> dict:
        """Further arguments of both kernels of the backward pass; the first kernel fills `delta`."""
        d_output = _rows_in_order(d_output)
        return {
            "log_sum": log_sum,
            "d_output": d_output,
            "delta": torch.empty_like(log_sum),
            "d_output_strides": _strides(d_output),
            "scaling": scaling,
        }

    def _empty_output(query: Tensor) -> tuple[Tensor, Tensor]:
        B, H, L, D = query.shape
        # In the layout of the output projection, with a position's heads side by side.
        output = torch.empty((B, L, H, D), dtype=query.dtype, device=query.device).transpose(1, 2)
        return output, torch.empty((B, H, L), dtype=torch.float32, device=query.device)

    def _empty_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Memory for the gradients of tensors, in their layout unless the kernels cannot read that."""
        empty = [torch.empty_like(tensor) for tensor in tensors]
        return tuple(
            gradient
            if _can_read(gradient)
            else torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
            for gradient in empty
        )

    # Custom operators, so that torch.compile does not trace them. A namespace for each copy of this file (`make
    # kernel` makes one), because one process may import several.
    _NAMESPACE = __name__.partition(".")[0]
    _SCHEMA = (
        "Tensor query, Tensor key, Tensor value, Tensor? rel_key, Tensor? content_bias, Tensor? position_bias, "
        "Tensor? rel_bias, Tensor? key_mask, Tensor? first_key, Tensor? kept, Tensor? seen, Tensor? blind, "
        "SymInt? window, SymInt? future, float scaling, float dropout"
    )

    @torch.library.custom_op(
        f"{_NAMESPACE}::dropout_bits",
        mutates_args=(),
        schema="(Tensor seed, Tensor? first_key, SymInt[] shape, SymInt? window, SymInt? future, float dropout)"
        " -> Tensor",
    )
    def dropout_bits_op(seed, first_key, shape, window, future, dropout):
        """A bit for each probability of `shape` (B, H, L, K): 1 where it survives dropout, any for unseen keys."""
        B, H, L, K = shape
        kept = _empty_bits(seed, shape)
        # As a signed number of 32 bits. Where p = 1, which has no threshold, `keep_scale` is 0.
        threshold = min(round(dropout * 2**32), 2**32 - 1) - 2**31
        with torch.cuda.device_of(seed):
            _dropout_kernel[(triton.cdiv(L, _DROPOUT_TILE["BLOCK_M"]) * B * H,)](
                kept,
                seed,
                None if first_key is None else first_key.contiguous(),
                H=H,
                L=L,
                K=K,
                words=_words(K),
                window=window,
                future=future,
                threshold=threshold,
                **_DROPOUT_TILE,
            )
        return kept

    @dropout_bits_op.register_fake
    def _(seed, first_key, shape, *_):
        return _empty_bits(seed, shape)

    def _empty_bits(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
        *rows, K = shape
        return torch.empty((*rows, _words(K)), dtype=torch.int32, device=seed.device)

    def _words(K: int) -> int:
        """Numbers of 32 bits for the bits of K keys, padded to every kernel's last tile and to 16 bytes."""
        return triton.cdiv(K, 128) * 4

    @torch.library.custom_op(
        f"{_NAMESPACE}::relative_attention", mutates_args=(), schema=f"({_SCHEMA}, Tensor? order) -> (Tensor, Tensor)"
    )
    def relative_attention_op(*inputs):
        """The attended values, and log2 of the softmax's denominators (B, H, L) for the backward pass."""
        *inputs, order = inputs
        query = inputs[0]
        B, H, L, _ = query.shape
        output, log_sum = _empty_output(query)
        tile = _tile("forward", query)
        with torch.cuda.device_of(query):
            _forward_kernel[(triton.cdiv(L, tile["BLOCK_M"]) * B * H,)](
                **_shared_arguments(*inputs),
                order=order,
                output=output,
                log_sum=log_sum,
                output_strides=_strides(output),
                **tile,
            )
        return output, log_sum

    @relative_attention_op.register_fake
    def _(query, *_):
        return _empty_output(query)

    @torch.library.custom_op(
        f"{_NAMESPACE}::relative_attention_backward",
        mutates_args=(),
        schema=f"({_SCHEMA}, Tensor output, Tensor log_sum, Tensor d_output, bool[] needed)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    )
    def relative_attention_backward_op(*arguments):
        """Gradients of the first seven arguments; an empty tensor for one that is None or not needed."""
        *inputs, output, log_sum, d_output, needed = arguments
        (query, key, value, *shared_by_batch), scaling = inputs[:7], inputs[-2]
        d_query, d_key, d_value = _empty_gradients(query, key, value)
        shared = _shared_arguments(*inputs) | _backward_arguments(log_sum, d_output, scaling)
        with torch.cuda.device_of(query):
            if ONE_BACKWARD_KERNEL and not torch.are_deterministic_algorithms_enabled():
                totals = [
                    torch.zeros(tensor.shape, dtype=torch.float32, device=query.device) if need else None
                    for tensor, need in zip((key, value), needed[1:3], strict=True)
                ]
                sums = _launch_backward_query(shared, output, d_query, shared_by_batch, needed[3:], *totals)
                for gradient, total in zip((d_key, d_value), totals, strict=True):
                    if total is not None:
                        gradient.copy_(total)
            else:
                sums = _launch_backward_query(shared, output, d_query, shared_by_batch, needed[3:])
                if needed[1] or needed[2]:
                    # After the first kernel, because this one reads its delta.
                    _launch_backward_key(shared, d_key, d_value)
        return d_query, d_key, d_value, *sums

    @relative_attention_backward_op.register_fake
    def _(*arguments):
        query, key, value, *shared_by_batch = arguments[:7]
        needed = arguments[-1]
        return (
            *_empty_gradients(query, key, value),
            *(
                torch.empty(tensor.shape if need else (0,), dtype=tensor.dtype, device=query.device)
                if tensor is not None
                else query.new_empty(0)
                for tensor, need in zip(shared_by_batch, needed[3:], strict=True)
            ),
        )

    def _launch_backward_query(
        shared: dict,
        output: Tensor,
        d_query: Tensor,
        tensors: Sequence[Tensor | None],
        needed: list[bool],
        d_key: Tensor | None = None,
        d_value: Tensor | None = None,
    ) -> list[Tensor]:
        """Fill `d_query` and delta; return the gradients of rel_key and the biases, empty where not needed. Add to
        `d_key` and `d_value`, sums (B, H, K, D) in fp32, where given."""
        query = shared["query"]
        B, H, L, D = query.shape
        tile = _tile("backward_query", query)
        work = B * triton.cdiv(L, tile["BLOCK_M"])
        partial = torch.are_deterministic_algorithms_enabled()
        programs = min(work, _partial_sums(H, shared["K"] + (shared["future"] or 0), D) if partial else MOST_PROGRAMS)
        sums = [
            torch.zeros(
                (programs, *tensor.shape) if partial else tensor.shape, dtype=torch.float32, device=query.device
            )
            if tensor is not None and need
            else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        d_rel_key, d_content_bias, d_position_bias, d_rel_bias = sums
        _backward_query_kernel[(H, programs)](
            **shared,
            output=output,
            d_query=d_query,
            d_key=d_key,
            d_value=d_value,
            d_rel_key=d_rel_key,
            d_content_bias=d_content_bias,
            d_position_bias=d_position_bias,
            d_rel_bias=d_rel_bias,
            output_strides=_strides(output),
            d_query_strides=_strides(d_query),
            B=B,
            PARTIAL=partial,
            **tile,
        )
        return [
            query.new_empty(0)
            if total is None or tensor is None
            else (total.sum(0) if partial else total).to(tensor.dtype)
            for total, tensor in zip(sums, tensors, strict=True)
        ]

    def _partial_sums(H: int, K: int, D: int) -> int:
        """The number of programs with sums of their own: enough to fill a GPU, in at most 256 MiB."""
        return max(1, min(256 // H, 2**26 // (H * K * D)))

    def _launch_backward_key(shared: dict, d_key: Tensor, d_value: Tensor) -> None:
        B, H, *_ = shared["query"].shape
        tile = _tile("backward_key", shared["query"])
        _backward_key_kernel[(triton.cdiv(shared["K"], tile["BLOCK_N"]) * B * H,)](
            **shared,
            d_key=d_key,
            d_value=d_value,
            d_key_strides=_strides(d_key),
            d_value_strides=_strides(d_value),
            **tile,
        )

    def _save_for_backward(ctx, inputs, output):
        *tensors, window, future, scaling, dropout, _ = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.constants = window, future, scaling, dropout
        ctx.set_materialize_grads(False)

    def _backward(ctx, d_output, _):
        *tensors, output, log_sum = ctx.saved_tensors
        if d_output is None:
            return (None,) * 17
        needed = list(ctx.needs_input_grad[:7])
        gradients = relative_attention_backward_op(*tensors, *ctx.constants, output, log_sum, d_output, needed)
        return *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), *(None,) * 10

    relative_attention_op.register_autograd(_backward, setup_context=_save_for_backward)


register(
    Backend(
        "txl_triton",
        triton_relative_attention,
        why_not=_why_not,
        suits=lambda inputs: is_default(inputs.query),
        follows_order=True,
        needs_hidden=False,
        captures=True,
        both_ways=True,
    )
)
