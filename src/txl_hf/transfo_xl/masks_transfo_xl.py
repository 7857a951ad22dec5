"""The arguments of a call: their types, where documents begin in a row, and the meaning of `attention_mask`.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# See `packed_starts`; `generate` writes position_ids itself, never the others.
PACKED_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
DOCUMENT_KEYWORDS = ("position_ids", *PACKED_KEYWORDS)
# Keywords that `capture_outputs` reads, that say where documents begin, and that `transformers` passes to every model:
# the last are ignored, because the memory, the documents and causality determine them.
KNOWN = {
    *("output_hidden_states", "output_attentions", *DOCUMENT_KEYWORDS),
    *("cache_position", "max_length_q", "max_length_k", "token_type_ids", "is_causal", "return_dict"),
}


def check_inputs(keywords: dict[str, Any], **tensors: Any) -> None:
    """Check the types of a call's arguments, and that each of `keywords`, which it does not name, is read.

    Raises:
        TypeError: a keyword is not known.
        ValueError: one of `tensors` is no torch.Tensor, `mems` are one instead of a tuple, or `is_causal=False`.
    """
    unread = sorted(name for name, value in keywords.items() if value is not None and name not in KNOWN)
    if unread:
        raise TypeError(f"forward() got keyword arguments that nothing reads: {', '.join(unread)}")
    if keywords.get("is_causal") is False:
        raise ValueError(
            "is_causal=False asks for tokens that see later ones, but this model reads from left to right"
        )
    mems = tensors.pop("mems", None)
    if isinstance(mems, Tensor):
        raise ValueError(f"mems are one tensor, {tuple(mems.shape)}, not a tuple of n_layer: give tuple(mems)")
    tensors |= {f"mems[{i}]": states for i, states in enumerate(mems or ())}
    tensors |= {name: keywords.get(name) for name in DOCUMENT_KEYWORDS}
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(value).__module__}.{type(value).__name__}")


def checked_inputs(
    config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, keywords: dict[str, Any], **tensors: Any
) -> Tensor:
    """The one of `input_ids`, (B, L), and `inputs_embeds`, (B, L, F), that a call gives, after `check_inputs`.

    Raises:
        ValueError: both or none are given, or with another shape or type than the model reads.
    """
    check_inputs(keywords, input_ids=input_ids, inputs_embeds=inputs_embeds, **tensors)
    if input_ids is None and inputs_embeds is not None:
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] == 0:
            raise ValueError(f"inputs_embeds are {tuple(inputs_embeds.shape)}, not (B, L, D) with at least one token")
        name, width = "d_model" if config.input_size is None else "input_size", inputs_embeds.shape[-1]
        if width != getattr(config, name):
            raise ValueError(f"inputs_embeds are {width} wide, not {name}={getattr(config, name)}")
        if not inputs_embeds.is_floating_point():
            raise ValueError(f"inputs_embeds are {inputs_embeds.dtype}, no floating-point vectors")
        return inputs_embeds
    if config.vocab_size == 0:
        raise ValueError("input_ids need a vocabulary, and vocab_size=0 means that there is none: give inputs_embeds")
    if input_ids is None or inputs_embeds is not None:
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids are {tuple(input_ids.shape)}, not (B, L) with at least one token")
    if input_ids.dtype not in (torch.long, torch.int):
        raise ValueError(f"input_ids are {input_ids.dtype}, not torch.long or torch.int")
    return input_ids


def find_resets(
    config: Any,
    mem_len: int,
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    resets: Tensor | None,
    keywords: dict[str, Any],
) -> Tensor | None:
    """(B, L) bool, where documents begin, by `resets`, the keywords of packed batches or both; None: nowhere.

    Raises:
        ValueError: `resets` have another shape or type, or the model cannot begin documents inside a segment.
    """
    documents = {name: keywords[name] for name in DOCUMENT_KEYWORDS if keywords.get(name) is not None}
    found: list[Tensor] = []
    if resets is not None:
        if resets.dtype != torch.bool or resets.shape != shape:
            raise ValueError(
                f"resets are {tuple(resets.shape)} of {resets.dtype}, but this segment needs {tuple(shape)} bool"
            )
        found.append(resets.to(device))
    if documents:
        found.append(packed_starts(shape, device, attention_mask, **documents))
    starts = functools.reduce(torch.logical_or, found)
    # Not checked in a graph or under `torch.func.vmap`, where the host cannot read numbers.
    if can_look(starts, gpu=True) and not bool(starts.any()):
        return None
    config.check_documents(" and ".join([*([] if resets is None else ["resets"]), *documents]), mem_len)
    return starts


def can_look(tensor: Tensor, gpu: bool = False) -> bool:
    """Whether the host may read numbers of a tensor: never in graphs and under `torch.func.vmap`; on a GPU, for which
    it would wait, with `gpu` alone."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.is_meta:
        return False
    on_host = gpu or tensor.device.type == "cpu"
    return on_host and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def drop_idle_mask(mask: Tensor | None) -> Tensor | None:
    """The mask, or None where the host can read that it hides nothing."""
    return None if mask is not None and can_look(mask) and bool(mask.all()) else mask


def real_tokens(attention_mask: Tensor, length: int) -> Tensor:
    """(B, n ≤ length) bool: which of the last `length` tokens a mask of the segment, or of more, marks as real."""
    return attention_mask[:, -length:] != 0


def packed_starts(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """(B, L) bool, where documents begin inside the rows of a segment, by keywords of `transformers` and TRL, one at
    least. A row's first token is never marked, because the memory decides whether it continues a text.

    Args:
        shape: (B, L). attention_mask: (B, ≥ L), 1 = real. Positions of padding are ignored.
        position_ids: (L,), (1, L) or (B, L) integers, which count on by one, from any number. A document begins with
            a number that is not above that of the real token before it.
        cu_seq_lens_q, cu_seq_lens_k: (n + 1,), where documents begin and end in the only row of the batch: from 0 on,
            to its end or to the padding there.
        seq_idx: (1, L) or (B, L), the number of the document that a token is of.

    Raises:
        ValueError: an argument has another shape or type, positions leave out numbers, or ends are out of order.
    """
    real, places = torch.ones(shape, dtype=torch.bool, device=device), torch.arange(shape[1], device=device)
    # A mask of another shape is ignored, because `Segment.open` refuses it.
    if attention_mask is not None and attention_mask[..., -shape[1] :].shape == shape:
        real = real_tokens(attention_mask, shape[1]).to(device)
    # For each token except the first: the place of the last real token before it, or -1.
    last = torch.where(real, places, -1).cummax(dim=1).values[:, :-1]

    def where(begins: Callable[[Tensor, Tensor], Tensor], numbers: Tensor) -> Tensor:
        """(B, L) bool: `begins` of each real token's number and the one before it."""
        before = numbers.gather(1, last.clamp(min=0))
        return F.pad(begins(numbers[:, 1:], before) & real[:, 1:] & (last >= 0), (1, 0))

    found = []
    if position_ids is not None:
        positions = _per_token("position_ids", position_ids, shape, device)
        # Steps at padding are not checked, because programs count positions of padding differently.
        skips = (positions[:, 1:] - positions[:, :-1] > 1) & real[:, 1:] & real[:, :-1]
        if not torch.compiler.is_compiling() and bool(skips.any()):
            raise ValueError("position_ids leave out positions: they must count on by one, and may restart")
        found.append(where(torch.le, positions))
    if seq_idx is not None:
        found.append(where(torch.ne, _per_token("seq_idx", seq_idx, shape, device)))
    for name, lengths in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if lengths is None:
            continue
        if lengths.dim() != 1 or lengths.is_floating_point() or shape[0] != 1:
            raise ValueError(
                f"{name} is {tuple(lengths.shape)} of {lengths.dtype} for {shape[0]} rows, but must be integers "
                "(documents + 1,), for a single row"
            )
        if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            given = lengths.tolist()
            if not given or given[0] != 0 or given[-1] > shape[1] or sorted(given) != given:
                raise ValueError(
                    f"{name} is {given[:8]} for {shape[1]} tokens, but must begin with 0, not fall, and end there"
                )
        # Only padding may follow the last end.
        found.append(where(torch.ne, torch.bucketize(places, lengths[1:].to(device, torch.long), right=True)[None]))
    return functools.reduce(torch.logical_or, found)


def _per_token(name: str, given: Tensor, shape: tuple[int, int], device: torch.device) -> Tensor:
    """(B, L) of numbers per token, given for all rows or for each."""
    rows = given[None] if given.dim() == 1 else given
    if rows.shape not in (shape, (1, shape[1])) or given.is_floating_point():
        wanted = " or ".join(dict.fromkeys(map(str, (tuple(shape), (1, shape[1])))))
        raise ValueError(f"{name} are {tuple(given.shape)} of {given.dtype}, but must be integers {wanted}")
    return rows.to(device).expand(shape)


def make_key_mask(
    attention_mask: Tensor | None,
    memory_mask: Tensor | None,
    batch_size: int,
    segment_length: int,
    memory_length: int,
    *,
    fewer: bool = False,
    more: bool = False,
    text_length: Callable[[], int] | None = None,
) -> Tensor | None:
    """Which of the m + L keys are real: (B, m + L) bool, or None for all of them.

    The last column is for the last key. Columns before the first key are ignored, and keys without a column are masked
    as in the memory. With `initial_memory="zeros"`, zeros in front are zero states before the text (`zeros_in_front`).
    A mask may have L columns (the segment) or m + L (the memory too). Other numbers depend on what precedes:

    | what precedes the segment | n, the number of columns |
    |---|---|
    | the initial memory, or nothing | none other |
    | `mems` or a cache that are full, m = M | any n > M + L: the whole text so far, and what preceded it (`more`) |
    | `mems`, with `initial_memory="zeros"` | any n between: a text shorter than its memory (`fewer`) |
    | a cache | the whole text's length, L and what the cache has seen (`text_length`) |
    | a cache, within `generate`, or a static one in a graph | any n ≥ L, as the text's length is not known (both) |

    Args:
        attention_mask: (B, n), 1 = real. memory_mask: (B, m) bool, of the memory itself. None: all real.

    Raises:
        ValueError: the mask has another shape or other values.
    """
    if attention_mask is None:
        return None if memory_mask is None else F.pad(memory_mask, (0, segment_length), value=True)
    key_length, columns = memory_length + segment_length, attention_mask.shape[-1]
    widths = {segment_length, key_length}
    # TorchDynamo does not trace `columns in range(…)` with symbolic bounds.
    fits = columns == segment_length or columns == key_length or (more and columns > key_length)
    fits = fits or (fewer and segment_length < columns < key_length)
    if not fits and text_length is not None:
        widths.add(text_length() + segment_length)
        fits = columns in widths
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or not fits:
        needed = " or ".join(f"({batch_size}, {n})" for n in sorted(widths))
        if fewer:
            needed = f"({batch_size}, n) with n from {segment_length} to {key_length}"
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, but a segment of {segment_length} after a memory of "
            f"{memory_length} needs {needed}{' or more columns' if more else ''}"
        )
    if segment_length > 1 or attention_mask.is_floating_point():
        # Not for a single token, because the mask of its text was checked before.
        _check_zeros_and_ones(attention_mask)
    mask = attention_mask[:, -key_length:].bool()
    mask = F.pad(mask, (key_length - mask.shape[1], 0), value=True)
    return mask if memory_mask is None else mask & F.pad(memory_mask, (0, segment_length), value=True)


def without_padding(targets: Tensor, attention_mask: Tensor | None, segment_length: int) -> Tensor:
    """(B, n) targets of the first n positions of a segment, -100 where the predicting position is padding; with
    n = L - 1, each is the next position's token, and -100 also where that is padding."""
    if attention_mask is None or attention_mask.dim() != 2:
        return targets
    real, length = real_tokens(attention_mask, segment_length), targets.shape[1]
    if real.shape != (targets.shape[0], segment_length):
        # `Segment.open` refuses it.
        return targets
    counts = real[:, :length] if length == segment_length else real[:, :-1] & real[:, 1:]
    return targets.masked_fill(~counts.to(targets.device), -100)


def zeros_in_front(
    attention_mask: Tensor | None, segment_length: int, key_length: int, memory_mask: Tensor | None = None
) -> Tensor | None:
    """(B, K) bool, the zeros with which a row of `attention_mask` begins: padding in front of its text. Keys of the
    segment, and those that `memory_mask`, (B, m), hides, are left out. None if the mask is of the segment alone."""
    if attention_mask is None or attention_mask.shape[1] <= segment_length:
        return None
    front = F.pad(attention_mask[:, :-segment_length].bool().cumsum(dim=1) == 0, (0, segment_length))[:, -key_length:]
    front = F.pad(front, (key_length - front.shape[1], 0))
    return front if memory_mask is None else front & F.pad(memory_mask.to(front.device), (0, segment_length))


class OpenPadding(NamedTuple):
    """Padding in front of texts, with `initial_memory="zeros"`: it becomes zero states like those of the memory, and
    as many of the oldest keys are hidden, so that a padded row equals the row alone.

    Attributes:
        seen, real: (B, m + L) bool, which keys queries see, and which are real, zero states among them.
        waiting: (B, L + 1) bool, whether a row's text has not begun after 0 … L tokens of the segment. States of
            tokens before the text, the last L columns, are zeros in every layer.
    """

    seen: Tensor
    real: Tensor
    waiting: Tensor

    @classmethod
    def of(cls, mask: Tensor, memory_length: int, begins: bool, front: Tensor | None) -> "OpenPadding":
        """
        Args:
            mask: (B, m + L) bool, False where a key is hidden or padding. memory_length: m.
            begins: whether all rows begin with this segment. A row whose memory is all hidden begins too.
            front: see `zeros_in_front`.
        """
        memory, segment = mask[:, :memory_length], mask[:, memory_length:]
        starts = ~memory.any(dim=1, keepdim=True)
        waiting = (starts | starts.new_tensor(begins)) & (F.pad(segment, (1, 0)).cumsum(dim=1) == 0)
        tokens = waiting[:, 1:]
        real = torch.cat([memory | starts, segment | tokens], dim=1)
        if front is not None:
            real = real | F.pad(front, (mask.shape[1] - front.shape[1], 0))
        seen = real & (torch.arange(mask.shape[1], device=mask.device) >= tokens.sum(dim=1, keepdim=True))
        return cls(seen, real, waiting)


def _check_zeros_and_ones(attention_mask: Tensor) -> None:
    """Raise a ValueError for other numbers than 1 = real and 0 = padding, as in a float mask that is added to scores.
    The host waits for a GPU with float masks alone; others are asserted there."""
    if attention_mask.dtype == torch.bool or attention_mask.numel() == 0 or not can_look(attention_mask, gpu=True):
        return
    if attention_mask.is_floating_point():
        if not bool(((attention_mask == 0) | (attention_mask == 1)).all()) or not bool(attention_mask.any()):
            raise ValueError(
                f"attention_mask is {attention_mask.dtype} and not made of 1 = real and 0 = padding: a mask that is "
                "added to scores, 0 = real, reads the other way round; give (mask == 0).long() instead"
            )
        return
    low, high = attention_mask.aminmax()
    message = "attention_mask holds {}, but 1 = real and 0 = padding: where documents begin, resets or seq_idx tell"
    if can_look(attention_mask):
        if low < 0 or high > 1:
            raise ValueError(message.format(int(low if low < 0 else high)))
    elif attention_mask.is_cuda:
        torch._assert_async((low >= 0) & (high <= 1), message.format("other numbers"))
