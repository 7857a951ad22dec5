"""TRL's trainers on the model: their fused loss is the model's own, with and without cutoffs; packed rows are read
document by document.
"""

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import txl_hf.trl  # noqa: F401 -- the head of models with cutoffs
from models import small_model
from txl_hf import TransfoXLForCausalLM, TransfoXLTokenizer

WORDS = [f"word{i}" for i in range(57)]
SPECIALS = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
KINDS = {"one softmax": {"cutoffs": [], "div_val": 1}, "cutoffs": {"cutoffs": [9, 30], "div_val": 2}}
COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


@pytest.fixture
def tokenizer():
    return TransfoXLTokenizer.from_symbols([*SPECIALS.values(), *WORDS], mode="whitespace", **SPECIALS)


@pytest.fixture(params=KINDS)
def model(request, tokenizer, tmp_path):
    """From a folder, where DPO looks for what it compares the model with."""
    made = small_model(vocab_size=len(tokenizer), mem_len=40, eos_token_id=0, pad_token_id=2, **KINDS[request.param])
    made.save_pretrained(tmp_path / "model")
    return TransfoXLForCausalLM.from_pretrained(tmp_path / "model")


def text(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def own_loss(model, rows: list[list[int]]) -> float:
    """The mean over all tokens of all rows, each row by itself."""
    model.eval()
    with torch.no_grad():
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).losses.flatten() for row in rows]
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_supervised_fine_tuning(model, tokenizer, tmp_path, packing):
    lengths = (9, 14, 5, 11) if packing else (9, 14)
    data = Dataset.from_dict({"text": [text(length, length) for length in lengths]})
    settings = COMMON | {"per_device_train_batch_size": 1 if packing else 2}
    arguments = SFTConfig(str(tmp_path), packing=packing, max_length=64, **settings)
    rows = [[*tokenizer(line)["input_ids"], 0] for line in data["text"]]
    expected = own_loss(model, rows)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    if packing:
        assert len(trainer.train_dataset) == 1
    trainer.train()
    first, second = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert first == pytest.approx(expected, rel=1e-3) and second < first


def test_preferences(model, tokenizer, tmp_path):
    data = Dataset.from_dict(
        {name: [text(5, seed + i) for i in range(4)] for seed, name in enumerate(["prompt", "chosen", "rejected"])}
    )
    arguments = DPOConfig(str(tmp_path), max_length=32, **COMMON)
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    # Before the first step the model is its own reference.
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[1] != losses[0]


def test_rewards(model, tokenizer, tmp_path):
    data = Dataset.from_dict({"prompt": [text(4, i) for i in range(4)]})
    arguments = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, temperature=0.7, **COMMON)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [float(len(set(written))) for written in completions],
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    logged = [line for line in trainer.state.log_history if "reward" in line]
    assert len(logged) == 2 and all(0 < line["entropy"] < 5 for line in logged)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_distribution_at_a_temperature(tokenizer):
    """What TRL computes from one table, and what our head computes from a softmax."""
    ours, theirs = (small_model(vocab_size=60, **kind) for kind in (KINDS["one softmax"], KINDS["one softmax"]))
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    names = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
    txl_hf.trl._add_fused_lm_head(theirs, temperature=0.7, outputs=names)
    ours.config.cutoffs = [10**9]
    txl_hf.trl.add_own_lm_head(ours, temperature=0.7, outputs=names)
    ours.config.cutoffs = []
    labels = ids.masked_fill(ids < 5, -100)
    found, expected = (model(ids, labels=labels, fused_lm_head=True) for model in (ours, theirs))
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5)
    for name in names:
        assert torch.allclose(getattr(found, name).float(), getattr(expected, name).float(), atol=1e-4), name
