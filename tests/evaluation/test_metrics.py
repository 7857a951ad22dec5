"""The metric: sums over uneven batches and over two real processes, as evaluate_language_model has them."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import launcher
from models import small_model
from txl_hf import TokenStream, TransfoXLForCausalLM, evaluate_language_model
from txl_hf.evaluation.metrics import LanguageModelMetric

SEGMENT_LENGTH = 7
STREAMS = 2
VOCAB_SIZE = 20


@pytest.fixture
def make_metric(tmp_path):
    return partial(LanguageModelMetric, cache_dir=str(tmp_path))


def text() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (101,), generator=torch.Generator().manual_seed(0))


def tiny_model() -> TransfoXLForCausalLM:
    return small_model(vocab_size=VOCAB_SIZE, cutoffs=[], div_val=1, mem_len=10, init_std=0.5).eval()


@torch.no_grad()
def score(rows: range, metric: LanguageModelMetric) -> dict | None:
    """Score these streams of the text with memory, as the loop of a user does."""
    model, mems = tiny_model(), None
    stream = TokenStream(text(), SEGMENT_LENGTH, STREAMS, keep_remainder=True)
    for step in range(stream.steps):
        items = [stream[step * STREAMS + row] for row in rows]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        outputs = model(**batch, mems=mems)
        mems = outputs.mems
        metric.add_batch(nll=outputs.losses.sum(-1), tokens=(batch["shift_labels"] != -100).sum(-1))
    return metric.compute()


def save_score(folder: Path):
    rank = int(os.environ["RANK"])
    metric = LanguageModelMetric(num_process=2, process_id=rank, cache_dir=str(folder), experiment_id="two")
    torch.save(score(range(rank, rank + 1), metric), folder / f"{rank}.pt")


def reference() -> float:
    """Streams as TokenStream cuts them: one of 51 tokens, one of 51 that starts with the last of the other."""
    streams = [text()[:51], text()[50:]]
    results = [evaluate_language_model(tiny_model(), row, SEGMENT_LENGTH) for row in streams]
    return sum(result.nll * result.tokens for result in results) / 100


def test_batches_add_up_to_the_evaluation(make_metric):
    result = score(range(STREAMS), make_metric())
    assert result["tokens"] == 100
    assert result["nll"] == pytest.approx(reference(), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["bits_per_token"] == pytest.approx(result["nll"] / math.log(2))
    assert set(result) == {"nll", "tokens", "perplexity", "bits_per_token"}


def test_two_processes_add_up_to_one(tmp_path):
    assert launcher.join(launcher.start(save_score, 2, folder=tmp_path)) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert second is None
    assert first["tokens"] == 100
    assert first["nll"] == pytest.approx(reference(), rel=1e-6)


def test_entries_add_up(make_metric):
    """Also one by one, and without tokens, as those of a process that has no part of the text."""
    metric = make_metric()
    metric.add_batch(nll=[6.0, 4.0], tokens=[3, 5])
    metric.add(nll=torch.tensor(2.0), tokens=2)
    metric.add_batch(nll=[0.0], tokens=[0])
    result = metric.compute()
    assert result["nll"] == pytest.approx(12 / 10) and result["tokens"] == 10


def test_computed_at_once_and_again(make_metric):
    metric = make_metric()
    first = metric.compute(nll=[1.0], tokens=[2])
    assert first["nll"] == 0.5
    assert metric.compute(nll=[3.0], tokens=[2])["nll"] == 1.5, "what was computed is forgotten"


def test_bfloat16_and_huge_losses(make_metric):
    metric = make_metric()
    metric.add_batch(nll=torch.tensor([1e4, 1e4], dtype=torch.bfloat16), tokens=torch.tensor([1, 1]))
    assert metric.compute()["perplexity"] == math.inf


def test_an_entry_may_be_a_scalar_of_bfloat16(make_metric):
    metric = make_metric()
    metric.add(nll=torch.tensor(3.0, dtype=torch.bfloat16), tokens=torch.tensor(2))
    assert metric.compute()["nll"] == 1.5


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"nll": torch.ones(2, 3), "tokens": [3, 3]}, r"nll has shape \(2, 3\).*sum over the tokens"),
        ({"nll": [1.0], "tokens": [1, 2]}, r"\(1,\) and tokens \(2,\)"),
        ({"nll": [], "tokens": []}, "one entry at least"),
        ({"nll": [1.0], "tokens": [0.5]}, "whole number of tokens"),
        ({"nll": [1.0], "tokens": [-1]}, "whole number of tokens"),
        ({"nll": [1.0, 2.0], "tokens": [1, 0]}, "tokens that nll is summed over, 0 where nll is 0"),
        ({"nll": [math.nan], "tokens": [0]}, "0 where nll is 0"),
    ],
)
def test_bad_entries_are_named(make_metric, entries, message):
    with pytest.raises(ValueError, match=message):
        make_metric().add_batch(**entries)


def test_nothing_scored(make_metric):
    metric = make_metric()
    metric.add_batch(nll=[0.0], tokens=[0])
    with pytest.raises(ValueError, match="no token was scored"):
        metric.compute()
