"""TRL's trainers on the model: their fused loss is the model's own, with and without cutoffs and projections; packed
rows are read document by document.
"""

import copy

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import txl_hf.trl
from models import small_model
from txl_hf import MemoryLengths, TransfoXLForCausalLM, TransfoXLTokenizer
from txl_hf.memories import memory_of

WORDS = [f"word{i}" for i in range(57)]
SPECIALS = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
KINDS = {
    "one softmax": {"cutoffs": [], "div_val": 1},
    "a projection": {"cutoffs": [], "div_val": 1, "d_embed": 8},
    "a square projection": {"cutoffs": [], "div_val": 2},
    "cutoffs": {"cutoffs": [9, 30], "div_val": 2},
}
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
    txl_hf.trl.use_own_softmax(trainer)
    if packing:
        assert len(trainer.train_dataset) == 1
    trainer.train()
    first, second = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert first == pytest.approx(expected, rel=1e-3) and second < first


def test_preferences(model, tokenizer, tmp_path):
    data = Dataset.from_dict(
        {name: [text(5, seed + i) for i in range(4)] for seed, name in enumerate(["prompt", "chosen", "rejected"])}
    )
    # TRL turns dropout off, that of the attention too.
    model = TransfoXLForCausalLM.from_pretrained(model.name_or_path, dropout=0.3, dropatt=0.3)
    arguments = DPOConfig(str(tmp_path), max_length=32, **COMMON)
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    txl_hf.trl.use_own_softmax(trainer)
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
    txl_hf.trl.use_own_softmax(trainer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    logged = [line for line in trainer.state.log_history if "reward" in line]
    assert len(logged) == 2 and all(0 < line["entropy"] < 5 for line in logged)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_distributions_are_those_of_the_logits(model, temperature, shifted):
    model.eval()
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids < 20, -100)
    log_probs = torch.log_softmax(model(ids).logits / temperature, dim=-1)
    targets = labels if shifted else labels[:, 1:]
    found = fused(model, ids, {"shift_labels" if shifted else "labels": labels}, temperature=temperature)
    compare(found, log_probs if shifted else log_probs[:, :-1], targets)
    assert found.mean_logits.shape == targets.shape and torch.equal(found.label_mask, targets != -100)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_a_head_in_fp32(model, under_autocast):
    """Of a model in bf16, or under autocast; its gradients are in the type of its weights."""
    model.eval()
    if not under_autocast:
        model.bfloat16()
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        hidden_states = model.transformer(ids).last_hidden_state.float()
        found = fused(model, ids, {"labels": ids}, in_fp32=True)
    log_probs = copy.deepcopy(model.lm_head).float()(hidden_states[:, :-1])
    compare(found, log_probs, ids[:, 1:])
    found.loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.lm_head.parameters())


def fused(model, ids, labels, **options):
    """The output of the model for the labels with our forward."""
    txl_hf.trl.set_fused_forward(model, **options)
    return model(ids, **labels, fused_lm_head=True)


def compare(found, log_probs, targets):
    """The fields of an output with log-probabilities (B, L, V); 0 where a target is ignored."""
    mask = targets != -100
    expected = {
        "log_probs": log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "log_sum_sq_probs": log_probs.exp().square().sum(-1).log(),
        "is_top1": (log_probs.argmax(-1) == targets).float(),
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name).float(), values * mask, atol=1e-4, rtol=1e-4, msg=name)
    torch.testing.assert_close(found.loss, -expected["log_probs"][mask].mean(), atol=1e-4, rtol=1e-4)


def test_generation_takes_what_it_took(model):
    """A memory and lengths, which `generate` looks for in the signature of `forward`."""
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    memory = memory_of(model(ids))
    given = {"lengths": MemoryLengths(mem_len=12), "max_new_tokens": 6, "do_sample": False, **memory}
    expected = model.generate(ids, **given)
    txl_hf.trl.set_fused_forward(model)
    assert torch.equal(model.generate(ids, **given), expected)


@pytest.mark.parametrize("model", [kind for kind in KINDS if kind != "one softmax"], indirect=True)
def test_a_copy_computes_with_its_own_weights(model):
    """TRL's own head, which a model of one softmax gets, computes with those of the model that was copied."""
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    txl_hf.trl.set_fused_forward(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not torch.allclose(copied(ids).logits, model(ids).logits)
