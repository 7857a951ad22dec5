"""Perplexity that adds up over batches and processes, as a metric of `evaluate`."""

import math
from typing import Any

import evaluate
import torch
from datasets import Features, Value

from .language_model import figures


class LanguageModelMetric(evaluate.Metric):
    """Perplexity of a text whose parts are scored in batches and by several processes.

    An entry is a part of the text of any size, such as a row of a batch. `compute` returns, in process 0, `nll` (mean
    nats of a token), `perplexity`, `bits_per_token` and `tokens`; it raises a ValueError where no token was scored.

        metric = LanguageModelMetric()
        for batch in loader:
            losses = model(**batch).losses
            metric.add_batch(nll=losses.sum(-1), tokens=(batch["shift_labels"] != -100).sum(-1))
        print(metric.compute()["perplexity"])

    Args:
        num_process, process_id: the number of processes, and which of them this is. Each must add an entry, which may
            be empty (`nll=[0.0], tokens=[0]`).
        kwargs: as for `evaluate.Metric`: processes need the same `cache_dir` and `experiment_id`.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"nll": Value("float64"), "tokens": Value("int64")})
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", features=features)

    def add_batch(self, *, nll, tokens) -> None:
        """Add entries: their summed negative log-likelihoods in nats, (B,), and their numbers of tokens, (B,). Raises
        a ValueError unless these are one number an entry each, and `tokens` is 0 or more, and 0 only where `nll`
        is."""
        nll, tokens = (torch.as_tensor(values).detach().cpu() for values in (nll, tokens))
        if nll.ndim != 1 or nll.shape != tokens.shape or len(nll) == 0:
            raise ValueError(
                f"nll has shape {tuple(nll.shape)} and tokens {tuple(tokens.shape)}, but each must have one number an "
                "entry, and one entry at least: sum over the tokens of each"
            )
        if tokens.is_floating_point() or (tokens < 0).any() or (nll[tokens == 0] != 0).any():
            raise ValueError("tokens must be the whole number of tokens that nll is summed over, 0 where nll is 0")
        super().add_batch(nll=nll.double().numpy(), tokens=tokens.numpy())

    def add(self, *, nll, tokens) -> None:
        """Add one entry; see `add_batch`."""
        self.add_batch(nll=torch.as_tensor(nll)[None], tokens=torch.as_tensor(tokens)[None])

    def _compute(self, *, nll, tokens) -> dict[str, Any]:
        if (counted := sum(tokens)) == 0:
            raise ValueError("no token was scored: the entries added have tokens=0 altogether")
        mean = math.fsum(nll) / counted
        return {"nll": mean, **figures(mean), "tokens": counted}
