"""Perplexity that adds up over batches and processes, as a metric of `evaluate`."""

import math
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Features, Value

from .language_model import bits, figures, perplexity

__all__ = ["LanguageModelMetric"]

_INPUTS = """
Args:
    nll: summed negative log-likelihood of each entry in nats, (B,).
    tokens: scored tokens of each entry, (B,).
    words, characters: words and characters that these tokens stand for, (B,); each for all entries with tokens, or for
        none.

Returns of `compute`, in process 0 (None in others), a dict:
    nll: mean negative log-likelihood of a token, in nats.
    perplexity: exp(nll); infinite where that exceeds a float.
    bits_per_token: nll in bits.
    tokens: how many tokens were scored.
    perplexity_per_word, words; bits_per_character, characters: where they were counted.

Raises of `compute`:
    ValueError: no token was scored, or words or characters were counted for some entries only.

Example:

    >>> metric = LanguageModelMetric()
    >>> for batch in loader:
    ...     losses = model(**batch).losses
    ...     metric.add_batch(nll=losses.sum(-1), tokens=(batch["shift_labels"] != -100).sum(-1))
    >>> metric.compute()["perplexity"]
"""


class LanguageModelMetric(evaluate.Metric):
    """Perplexity of a text whose parts are scored in batches and by several processes.

    An entry is any part of the text: a token, a segment, a sequence. Sums are added up, so that the parts may be
    uneven. Nothing is fetched from the Hub.

    Args:
        num_process, process_id: how many processes score the text, and which of them this is. Each must add at least
            one entry, which may be empty (`nll=[0.0], tokens=[0]`).
        cache_dir, experiment_id: where the processes meet; the same in all of them.
        kwargs: as for `evaluate.Metric`.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Perplexity, bits per token and character, and perplexity per word.",
            citation="",
            inputs_description=_INPUTS,
            features=Features(
                {
                    "nll": Value("float64"),
                    "tokens": Value("int64"),
                    "words": Value("int64"),
                    "characters": Value("int64"),
                }
            ),
        )

    def add_batch(self, *, nll, tokens, words=None, characters=None) -> None:
        """Add several entries; see `inputs_description`.

        Raises:
            ValueError: an input is no list of numbers, is longer or shorter than `nll`, or a count is negative, or an
                entry without tokens costs something.
        """
        length = np.shape(_on_cpu(nll))[:1]
        inputs = {"nll": nll, "tokens": tokens, "words": words, "characters": characters}
        entries = {name: _entries(name, values, length) for name, values in inputs.items()}
        if (wrong := (entries["tokens"] == 0) & (entries["nll"] != 0)).any():
            i = int(wrong.argmax())
            raise ValueError(f"entry {i} has tokens=0 and nll={entries['nll'][i]}: both must be of the same tokens")
        super().add_batch(**entries)

    def add(self, *, nll, tokens, words=None, characters=None) -> None:
        """Add one entry; see `inputs_description`."""
        entry = {"nll": nll, "tokens": tokens, "words": words, "characters": characters}
        self.add_batch(**{name: None if value is None else [_on_cpu(value)] for name, value in entry.items()})

    def _compute(self, *, nll, tokens, words, characters) -> dict[str, Any]:
        total, counted = math.fsum(nll), sum(tokens)
        if counted == 0:
            raise ValueError("no token was scored: the entries added have tokens=0 altogether")
        mean = total / counted
        result = {"nll": mean, **figures(mean), "tokens": counted}
        if count := _total("words", words, tokens):
            result |= {"perplexity_per_word": perplexity(total / count), "words": count}
        if count := _total("characters", characters, tokens):
            result |= {"bits_per_character": bits(total / count), "characters": count}
        return result


def _total(name: str, counts: list[int | None], tokens: list[int]) -> int:
    """The sum of what was counted for all entries that have tokens, or for none: 0."""
    given = [count for count in counts if count is not None]
    missing = [i for i, count in enumerate(counts) if count is None and tokens[i]]
    if given and missing:
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise ValueError(
            f"{name} is missing for {len(missing)} of {len(counts)} entries ({shown}; the first is 0): count {name} "
            "for all, or for none"
        )
    return sum(given)


def _entries(name: str, values, length: tuple[int, ...]) -> np.ndarray:
    """A checked array, of None where nothing was counted."""
    if values is None and name in ("words", "characters"):
        return np.full(length, None)
    entries = np.asarray(_on_cpu(values))
    if entries.ndim != 1 or entries.shape != length:
        raise ValueError(
            f"{name} has shape {entries.shape}, but must have one number an entry, {length or '(B,)'}: "
            "sum over the tokens of each"
        )
    if entries.size == 0:
        raise ValueError(
            f"{name} is empty: give an entry at least, of nll=[0.0] and tokens=[0] where nothing was scored"
        )
    if entries.dtype.kind not in ("iuf" if name == "nll" else "iu"):
        raise ValueError(f"{name} must hold {'numbers' if name == 'nll' else 'whole numbers'}, not {entries.dtype}")
    if name != "nll" and (entries < 0).any():
        raise ValueError(f"{name}={entries.min()} is negative")
    return entries


def _on_cpu(values):
    if not isinstance(values, torch.Tensor):
        return values
    # numpy has no bfloat16, and not every device fp64.
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()
