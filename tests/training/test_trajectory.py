"""30 steps of SGD with memory from a legacy checkpoint follow what legacy transformers 4.35.2 computed.

tests/golden/make_trajectory.py wrote what they start from and what it computed.
"""

import json

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from goldens import golden
from trainer_process import make_arguments
from txl_hf import TokenStream, TransfoXLForCausalLM, TransfoXLTrainer
from txl_hf.memories import memory_of

FOLDER = golden("trajectory")
TOLERANCE = 2e-4


@pytest.fixture(params=["word", "char"])
def name(request) -> str:
    """Words with cutoffs and div_val 2, or characters with same_length and clamp_len."""
    return request.param


def expected(name: str) -> tuple[TokenStream, dict]:
    written = json.loads((FOLDER / name / "trajectory.json").read_text())
    return TokenStream(written["token_ids"], written["segment_length"], written["batch_size"]), written["runs"]


def follow(model: TransfoXLForCausalLM, stream: TokenStream, run: dict, carried: bool = True) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), run["learning_rate"])
    memory, losses = {}, []
    for batch in DataLoader(stream, batch_size=stream.batch_size):
        inputs = batch["input_ids"]
        labels = {"labels": inputs} if run["labels"] == "labels" else {"shift_labels": batch["shift_labels"]}
        output = model.train()(inputs, **(memory if carried else {}), **labels)
        memory = memory_of(output)
        optimizer.zero_grad()
        output.loss.backward()
        if run["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run["max_grad_norm"])
        optimizer.step()
        losses.append(output.loss.item())
    return losses


def furthest(found: list[float], losses: list[float]) -> float:
    assert len(found) == len(losses) == 30
    return max(abs(a - b) for a, b in zip(found, losses, strict=True))


@pytest.mark.parametrize("attn_implementation", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", ["plain", "clipped", "shifted inside"])
def test_a_loop_follows_the_legacy_model(name, run, attn_implementation):
    stream, runs = expected(name)
    model = TransfoXLForCausalLM.from_pretrained(FOLDER / name, attn_implementation=attn_implementation)
    assert furthest(follow(model, stream, runs[run]), runs[run]["losses"]) < TOLERANCE


@pytest.mark.parametrize("run", ["plain", "clipped"])
def test_the_trainer_follows_the_legacy_model(name, run, tmp_path):
    stream, runs = expected(name)
    arguments = make_arguments(
        tmp_path,
        max_steps=30,
        per_device_train_batch_size=stream.batch_size,
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=runs[run]["learning_rate"],
        max_grad_norm=runs[run]["max_grad_norm"],
    )
    model = TransfoXLForCausalLM.from_pretrained(FOLDER / name)
    trainer = TransfoXLTrainer(model, arguments, train_dataset=stream)
    trainer.train()
    found = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    assert furthest(found, runs[run]["losses"]) < TOLERANCE


def test_what_the_trajectory_would_notice(name):
    """It goes far; without memory, with other lengths or without clipping, the losses are others."""
    stream, runs = expected(name)
    losses = runs["plain"]["losses"]
    assert losses[0] - losses[-1] > 1
    model = TransfoXLForCausalLM.from_pretrained(FOLDER / name)
    assert furthest(follow(model, stream, runs["plain"], carried=False), losses) > 50 * TOLERANCE
    changes = {"clamp_len": -1, "same_length": False} if name == "char" else {"clamp_len": 10, "same_length": True}
    for setting, value in changes.items():
        model = TransfoXLForCausalLM.from_pretrained(FOLDER / name, **{setting: value})
        assert furthest(follow(model, stream, runs["plain"]), losses) > 5 * TOLERANCE, setting
    model = TransfoXLForCausalLM.from_pretrained(FOLDER / name)
    unclipped = follow(model, stream, runs["clipped"] | {"max_grad_norm": 0.0})
    assert furthest(unclipped, runs["clipped"]["losses"]) > 50 * TOLERANCE
