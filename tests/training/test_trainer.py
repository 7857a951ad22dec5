"""TransfoXLTrainer: memory from step to step, exact means, refusals, evaluation, checkpoints, two processes."""

import json
import logging
import math
import os
import random
import re
import shutil
import signal
import time
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional as F

pytest.importorskip("accelerate")

from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import set_seed

import launcher
import txl_hf.training.trainer
from host_reads import count_host_reads
from models import small_config
from trainer_process import (
    UnevenStream,
    be_refused,
    make_arguments,
    make_model,
    make_text,
    predict_sequences,
    read_losses,
    run,
    start,
    text_stream,
)
from txl_hf import (
    TokenStream,
    TransfoXLForCausalLM,
    TransfoXLForTokenClassification,
    TransfoXLTokenizer,
    TransfoXLTrainer,
    evaluate_language_model,
)
from txl_hf.evaluation.cards import write_model_card
from txl_hf.kernels import captured
from txl_hf.memories import memory_of
from txl_hf.training.arguments import TransfoXLTrainingArguments
from txl_hf.training.checkpoints import last_checkpoint
from txl_hf.training.memory import MEMS_NAME, read_position
from txl_hf.training.trainer import check_special_tokens

CPU_0 = "Trainer loads an optimizer to cpu:0 here, which torch refuses"
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 0.1}

SAVING = {"save_strategy": "steps", "save_steps": 5, "max_steps": 12}


def logged(trainer: TransfoXLTrainer, name: str = "loss") -> list[float]:
    return [logs[name] for logs in trainer.state.log_history if name in logs]


def make_trainer(path, model=None, stream=None, model_changes=None, trainer=None, **changes) -> TransfoXLTrainer:
    return TransfoXLTrainer(
        model or make_model(**(model_changes or {})),
        make_arguments(path, **changes),
        train_dataset=TokenStream(make_text(301), 5, 4) if stream is None else stream,
        **(trainer or {}),
    )


@pytest.mark.filterwarnings("error:.*pin_memory.*")
def test_without_a_gpu_no_memory_is_pinned(tmp_path):
    make_trainer(tmp_path, max_steps=1, use_cpu=False).train()


def losses_by_hand(stream, steps: int, dtype=torch.float32, **model_changes) -> list[float]:
    """SGD with memory written out: what one process with all streams in one batch gives."""
    model, losses = make_model(**model_changes).to(dtype).train(), []
    for step in range(steps):
        if step % stream.steps == 0:
            stream.set_epoch(step // stream.steps)
            memory = {}
        first = step % stream.steps * stream.batch_size
        items = [stream[first + row] for row in range(stream.batch_size)]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        output = model(**batch, **memory)
        memory = memory_of(output)
        output.loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= SGD["learning_rate"] * parameter.grad
                parameter.grad = None
        losses.append(output.loss.item())
    return losses


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [transformers.TrainingArguments, TransfoXLTrainingArguments])
def test_small_steps_are_captured_by_default_and_the_log_says_so(tmp_path, monkeypatch, caplog, recorder, kind):
    """Also with the arguments of Trainer; on a CPU a recorder takes the place of CUDA's graphs."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, "txl_hf")

    def losses(**changes):
        given = {"max_steps": 6, "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
        given |= SGD | {"per_device_train_batch_size": 4}
        arguments = kind(str(tmp_path), **given | changes)
        model, text = make_model(cutoffs=[], div_val=1), TokenStream(make_text(301), 5, 4)
        trainer = TransfoXLTrainer(model, arguments, train_dataset=text)
        trainer.train()
        return logged(trainer)

    with_graphs = losses()
    assert recorder.recorded > 0
    said = [record.message for record in caplog.records if "launched as CUDA graphs" in record.message]
    assert said == [
        "layers compiled: False (compile_layers); steps of equal shapes launched as CUDA graphs: True (cuda_graphs)"
    ]
    del captured.RECORDERS["cpu"]
    assert losses() == pytest.approx(with_graphs, rel=1e-5)


def test_an_evaluation_reads_its_sums_at_its_end(tmp_path, monkeypatch):
    """On a GPU the host would wait for them at every step."""
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": TokenStream(make_text(61), 5, 4)})
    counts = count_host_reads(monkeypatch, trainer, "compute_loss")
    assert trainer.evaluate()["eval_tokens"] == 60
    assert counts == [0, 0, 0]


@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_step_reads_no_number_of_a_tensor(tmp_path, monkeypatch, changes):
    """On a GPU the host would wait for it. Trainer reads losses alone, for `logging_nan_inf_filter` and logs."""
    trainer = make_trainer(tmp_path, max_steps=3, **changes)
    counts = [count_host_reads(monkeypatch, trainer, name) for name in ("get_batch_samples", "training_step")]
    trainer.train()
    # To begin an epoch a loader draws a number.
    assert counts[0][1:] == [0, 0] and counts[1] == [0, 0, 0]


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(TokenStream, marks=pytest.mark.slow), UnevenStream],
    ids=["all-targets", "uneven-targets"],
)
def test_steps_go_on_with_the_memory_of_their_streams(tmp_path, kind, accumulation):
    """Over the end of an epoch, where memory begins anew; the exact mean however uneven the micro-batches."""
    stream = kind(make_text(301), 5, 4)
    trainer = make_trainer(
        tmp_path,
        stream=stream,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        **SGD,
    )
    trainer.train()
    expected = losses_by_hand(stream, 20)
    assert stream.steps == 15
    np.testing.assert_allclose(logged(trainer), expected, rtol=1e-5)
    without = losses_by_hand(stream, 20, mem_len=0)
    assert abs(without[3] / expected[3] - 1) > 1e-3, "memory matters here"


@pytest.mark.parametrize(
    "model_changes",
    [{"mem_len": 0}, {"initial_memory": "zeros"}, {"attn_type": 1}, {"pre_lnorm": True}, {"mem_len": 3}],
    ids=["no-memory", "zeros", "shaw", "pre-norm", "short-memory"],
)
def test_models_of_other_kinds_train_as_the_loop_by_hand(tmp_path, model_changes):
    """In fp64, where rounding moves nothing across the kink of a ReLU."""
    model = make_model(**model_changes).double()
    trainer = make_trainer(tmp_path, model=model, max_steps=8, **SGD)
    trainer.train()
    expected = losses_by_hand(trainer.train_dataset, 8, torch.float64, **model_changes)
    np.testing.assert_allclose(logged(trainer), expected, rtol=1e-6)


def test_a_tokenizer_is_saved_and_pads_nothing(tmp_path):
    tokenizer = TransfoXLTokenizer.from_symbols("abc", mode="characters")
    assert tokenizer.pad_token is None
    trainer = make_trainer(tmp_path, trainer={"processing_class": tokenizer}, **(SAVING | {"max_steps": 5}))
    trainer.train()
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-5").get_vocab() == tokenizer.get_vocab()


def test_low_rank_adapters(tmp_path):
    """And resumed, where checkpoints hold adapters alone."""
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(make_model(dropout=0.1), config)

    whole = make_trainer(tmp_path, model=adapted(), **SAVING)
    whole.train()
    resumed = make_trainer(tmp_path, model=adapted(), **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert logged(resumed)[5:] == logged(whole)[5:] and len(logged(whole)) == 12


def test_muon_and_a_rate_that_is_stable_and_then_goes_down(tmp_path):
    """Through what Trainer takes, and resumed."""
    pytest.importorskip("pytorch_optimizer")
    muon = {"optimizer": "muon", "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}}

    def make() -> TransfoXLTrainer:
        return make_trainer(tmp_path, make_model(dropout=0.1), save_total_limit=3, **muon, **schedule, **SAVING)

    whole = make()
    whole.train()
    assert type(whole.optimizer.optimizer).__name__ == "Muon"
    rates = logged(whole, "learning_rate")
    assert rates[0] == 0 and rates[2:9] == [3e-3] * 7 and rates[9] > rates[10] > rates[11] > 0
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert logged(resumed) == logged(whole) and len(logged(whole)) == 12


def test_iterable_datasets(tmp_path):
    """Trusted to be step-major; they say how many streams there are."""

    class Iterable(torch.utils.data.IterableDataset):
        batch_size = 4

        def __iter__(self):
            return (stream[index] for index in range(len(stream)))

    stream = TokenStream(make_text(301), 5, 4)
    make_trainer(tmp_path, stream=Iterable(), **SGD, **SAVING).train()
    trainer = make_trainer(tmp_path, stream=Iterable(), **SGD, **SAVING)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    np.testing.assert_allclose(logged(trainer), losses_by_hand(stream, 12), rtol=1e-5)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_segments_of_varying_length(tmp_path, workers):
    """In every epoch others; resumed in the middle of the second or third as if nothing had happened."""

    def make():
        stream = TokenStream(make_text(301), 12, 4, varlen_seed=0)
        saving = SAVING | {"save_steps": 3, "max_steps": 3 * stream.steps - 1}
        return make_trainer(tmp_path, stream=stream, dataloader_num_workers=workers, **SGD, **saving)

    trainer = make()
    trainer.train()
    steps, total = trainer.train_dataset.steps, trainer.state.max_steps
    np.testing.assert_allclose(logged(trainer), losses_by_hand(trainer.train_dataset, total), rtol=1e-5)
    same = TokenStream(make_text(301), 12, 4, varlen_seed=0)
    same.set_epoch = lambda epoch: None
    assert abs(losses_by_hand(same, steps + 1)[-1] / logged(trainer)[steps] - 1) > 1e-3, "epochs differ"
    for step in range(steps + 1, total, 3 if workers == 0 else total):
        resumed = make()
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step - step % 3}"))
        assert logged(resumed) == logged(trainer)


@pytest.mark.parametrize("mem_len", [0, 6])
def test_extended_context(tmp_path, mem_len):
    """Tokens that are read again have no target, and enter the memory only when they are read for the last time."""
    stream, changes = TokenStream(make_text(301), 5, 4, ext_len=3), {"ext_len": 3, "mem_len": mem_len}
    trainer = make_trainer(tmp_path, stream=stream, model_changes=changes, max_steps=18, **SGD)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), losses_by_hand(stream, 18, **changes), rtol=1e-5)
    assert trainer.evaluate(stream)["eval_tokens"] == 300


class PaddedStream(TokenStream):
    """Now and then a token of a stream is padding."""

    def __getitem__(self, index: int) -> dict:
        item = super().__getitem__(index)
        mask = torch.arange(5) != index % 7
        shift_labels = item["shift_labels"].masked_fill(~mask, -100)
        return item | {"attention_mask": mask.long(), "shift_labels": shift_labels}


def test_what_is_padding_stays_so_in_later_steps_and_after_resuming(tmp_path):
    stream = PaddedStream(make_text(301), 5, 4)
    expected = losses_by_hand(stream, 12)
    trainer = make_trainer(tmp_path, stream=stream, **SGD, **SAVING)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), expected, rtol=1e-5)
    resumed = make_trainer(
        tmp_path / "more",
        stream=stream,
        max_steps=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **SGD,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    np.testing.assert_allclose(logged(resumed)[5:], expected[5:], rtol=1e-5)


def test_a_stream_that_overflows_in_fp16_goes_on(tmp_path):
    """Its states leave the memory masked; GradScaler skips the step, but would not heal what is remembered."""
    model = make_model(dropout=0.0).half()
    trainer = make_trainer(tmp_path, model=model)
    stream = trainer.train_dataset
    steps = [torch.stack([stream[4 * step + row]["input_ids"] for row in range(4)]) for step in range(4)]
    model.eval()
    with torch.no_grad():
        for step, input_ids in enumerate(steps):
            embeds = model.get_input_embeddings()(input_ids)
            if step == 1:
                embeds[0, 3] = torch.inf
            _, outputs = trainer.compute_loss(model, {"inputs_embeds": embeds, "labels": input_ids}, True)
            assert outputs.losses[1:].isfinite().all()
            assert outputs.losses[0].isfinite().all() or step == 1
            masked = trainer._memory.memories[0]["mems_mask"]
            assert masked.all() == (step in (0, 3)), "until it is too old to be remembered"


def test_extended_context_that_the_model_does_not_share(tmp_path):
    for in_stream, in_model in ((3, 0), (0, 3)):
        stream = TokenStream(make_text(301), 5, 4, ext_len=in_stream)
        message = f"_dataset reads ext_len={in_stream} tokens again.*make the stream with ext_len={in_model}"
        trainer = make_trainer(tmp_path, stream=stream, model_changes={"ext_len": in_model})
        with pytest.raises(ValueError, match="train" + message):
            trainer.train()
        with pytest.raises(ValueError, match="eval" + message):
            trainer.evaluate(stream)
        free = make_trainer(tmp_path, stream=stream, model_changes={"ext_len": in_model, "mem_len": 0}, max_steps=1)
        free.train()


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
        {"dataloader_num_workers": 1},
        {"train_sampling_strategy": "sequential"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_change_no_loss(tmp_path, changes):
    torch.compiler.reset()
    # A layer is compiled as another.
    layers = {"n_layer": 1} if "torch_compile" in changes else {}
    trainer = make_trainer(tmp_path, model_changes=layers, max_steps=4, **SGD, **changes)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), losses_by_hand(trainer.train_dataset, 4, **layers), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_trains_as_the_loop_by_hand(tmp_path, dtype):
    """Under autocast, with weights in fp32 and in bf16: memory comes back in what the model computes."""
    trainer = make_trainer(tmp_path, model=make_model().to(dtype), max_steps=6, bf16=True, **SGD)
    trainer.train()
    np.testing.assert_allclose(logged(trainer), losses_by_hand(trainer.train_dataset, 6), rtol=0.05)


@pytest.mark.parametrize(
    ("model_changes", "dtype"),
    [
        pytest.param({}, torch.bfloat16, marks=pytest.mark.slow),
        ({"initial_memory": "zeros"}, torch.bfloat16),
        pytest.param({"pre_lnorm": True}, torch.float32, marks=pytest.mark.slow),
    ],
    ids=["default", "zeros", "pre-norm"],
)
def test_memory_stays_in_the_type_of_autocast(tmp_path, dtype, model_changes):
    """Bit for bit as the model returned it, before accelerate widened it; and evaluated so, and resumed."""

    class Watching(TransfoXLTrainer):
        def _carried(self, memory, detach=True):
            kept = super()._carried(memory, detach)
            for states, before in zip(kept["mems"], memory["mems"], strict=True):
                assert states.dtype == dtype and torch.equal(states.float(), before)
            return kept

    class Wide(TransfoXLTrainer):
        def _carried(self, memory, detach=True):
            return super()._carried(memory, detach) | {"mems": tuple(states.detach() for states in memory["mems"])}

    def train(kind, resume=False) -> list[list[float]]:
        arguments = make_arguments(tmp_path, bf16=True, eval_strategy="steps", eval_steps=6, **SAVING)
        stream, held_out = TokenStream(make_text(301), 5, 4), TokenStream(make_text(41), 5, 4)
        trainer = kind(make_model(**model_changes), arguments, train_dataset=stream, eval_dataset=held_out)
        trainer.train(resume_from_checkpoint=resume)
        return [logged(trainer), logged(trainer, "eval_loss")]

    whole = train(Wide)
    assert train(Watching, str(tmp_path / "checkpoint-10")) == train(Watching) == whole


def test_a_batch_without_targets_is_no_nan(tmp_path):
    class Silent(TokenStream):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return {"input_ids": item["input_ids"], "shift_labels": item["shift_labels"].fill_(-100)}

    trainer = make_trainer(tmp_path, stream=Silent(make_text(301), 5, 4), max_steps=2)
    trainer.train()
    assert logged(trainer) == [0, 0] and all(p.isfinite().all() for p in trainer.model.parameters())


def test_logs_hold_perplexity_bits_and_speed(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, logging_steps=2)
    trainer.train()
    for logs in trainer.state.log_history[:2]:
        assert logs["perplexity"] == pytest.approx(math.exp(logs["loss"]))
        assert logs["bits_per_token"] == pytest.approx(logs["loss"] / math.log(2))
        assert logs["tokens_per_second"] > 0


def test_a_loss_of_ones_own_is_what_is_logged_and_evaluated(tmp_path):
    """Beside it, an evaluation has what the text's likelihood gives, and a log of training has none."""

    def hundredfold(outputs, labels, num_items_in_batch=None):
        return 100 * outputs.losses.mean()

    model, found = make_model(), {}
    for name, loss in (("likelihood", None), ("own", hundredfold)):
        trainer = make_trainer(tmp_path, model=model, max_steps=1, trainer={"compute_loss_func": loss})
        found[name] = trainer.evaluate(TokenStream(make_text(301), 5, 4))
    for name in ("perplexity", "bits_per_token", "tokens"):
        assert found["own"][f"eval_{name}"] == pytest.approx(found["likelihood"][f"eval_{name}"])
    assert found["own"]["eval_loss"] == pytest.approx(100 * found["likelihood"]["eval_loss"], rel=1e-2)
    trainer.train()
    assert "perplexity" not in trainer.state.log_history[-2] and trainer.state.log_history[-2]["loss"] > 100


@pytest.mark.parametrize(
    "changes", [{"cutoffs": [], "div_val": 1}, {"output_logits": True}], ids=["one bin", "cutoffs"]
)
def test_a_loss_of_ones_own_gets_the_labels_of_a_stream(tmp_path, changes):
    """As `Trainer` promises; it got None."""

    def likelihood(outputs, labels, num_items_in_batch=None):
        found = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return found / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    logs = []
    for loss in (None, likelihood):
        trainer = make_trainer(
            tmp_path, model=make_model(**changes), max_steps=3, logging_steps=1, trainer={"compute_loss_func": loss}
        )
        trainer.train()
        logs.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert trainer.compute_loss_func is loss
    assert logs[1] == pytest.approx(logs[0], rel=1e-4) and len(logs[0]) == 3


# --- gradients through the memory ------------------------------------------------------------------------------------


def by_hand_through_memory(stream, segments: int, steps: int, detach_mems=False, **model_changes) -> list[float]:
    """SGD on the losses of several segments, of which each has the memory of the one before with its graph."""
    model, losses, memory = make_model(**model_changes), [], {}
    for step in range(steps):
        items = [stream[step * stream.batch_size + row] for row in range(stream.batch_size)]
        loss, tokens = 0, 0
        for part in range(segments):
            batch = {name: torch.stack([item[name].chunk(segments)[part] for item in items]) for name in items[0]}
            output = model(**batch, **memory, detach_mems=detach_mems)
            memory = memory_of(output)
            loss, tokens = loss + output.losses.sum(), tokens + batch["input_ids"].numel()
        memory["mems"] = tuple(states.detach() for states in memory["mems"])
        (loss / tokens).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= SGD["learning_rate"] * parameter.grad
                parameter.grad = None
        losses.append(loss.item() / tokens)
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_go_back_through_the_memory_of_several_segments(tmp_path, accumulation):
    """With a memory that is shorter than a step's text, and across its steps."""
    given = {**SGD, "max_steps": 6, "per_device_train_batch_size": 4 // accumulation}
    given["gradient_accumulation_steps"] = accumulation

    def losses(segments: int | None, mem_len: int = 6) -> list[float]:
        changes = {} if segments is None else {"backprop_segments": segments}
        stream, model_changes = TokenStream(make_text(301), 9, 4), {"mem_len": mem_len}
        trainer = make_trainer(tmp_path, stream=stream, model_changes=model_changes, **given, **changes)
        trainer.train()
        assert not any(states.requires_grad for states in trainer.model(torch.ones(1, 9, dtype=torch.long)).mems)
        return logged(trainer)

    found, stream = losses(3), TokenStream(make_text(301), 9, 4)
    assert found == pytest.approx(by_hand_through_memory(stream, 3, 6), abs=2e-5)
    assert found != pytest.approx(by_hand_through_memory(stream, 3, 6, detach_mems=True), abs=1e-3)
    assert losses(1) == losses(None), "bit for bit"
    # Where the memory holds all that was read, a step of three segments is one of a long segment.
    assert losses(3, mem_len=54) == pytest.approx(losses(1, mem_len=54), abs=2e-5)


@pytest.mark.slow
def test_two_processes_go_back_through_the_memory_as_one(tmp_path):
    given = {**SGD, "max_steps": 6, "backprop_segments": 2}
    for processes in (1, 2):
        (output := tmp_path / str(processes)).mkdir()
        sizes = {f"per_device_{split}_batch_size": 4 // processes for split in ("train", "eval")}
        assert set(run(processes, output=output, **sizes, **given)) == {0}
    one, two = ([loss for _, _, loss, _ in read_losses(tmp_path / str(n))] for n in (1, 2))
    assert two == pytest.approx(one, abs=2e-5) and len(one) == 6


def test_a_step_of_several_segments_leaves_a_memory_that_checkpoints_hold(tmp_path):
    given = {**SAVING, "backprop_segments": 2, "optim": "sgd"}
    whole = make_trainer(tmp_path / "whole", stream=TokenStream(make_text(301), 10, 4), **given)
    whole.train()
    resumed = make_trainer(tmp_path / "whole", stream=TokenStream(make_text(301), 10, 4), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    assert logged(resumed)[-2:] == logged(whole)[-2:]


@pytest.mark.parametrize(
    ("changes", "model_changes", "trainer", "message"),
    [
        ({}, {"ext_len": 2}, {}, "backprop_segments=2 reads an item as several segments, which goes with no ext_len"),
        ({}, {}, {"compute_loss_func": lambda *given, **more: None}, "goes with no compute_loss_func: set it to 1"),
    ],
)
def test_what_does_not_go_with_several_segments_is_refused(tmp_path, changes, model_changes, trainer, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, model_changes=model_changes, trainer=trainer, backprop_segments=2, **changes)
    with pytest.raises(ValueError, match="--backprop_segments is 0, but must be at least 1"):
        make_trainer(tmp_path, backprop_segments=0)


def test_items_without_aligned_labels_are_no_segments(tmp_path):
    class Sentences(TokenStream):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"]
            return {"input_ids": ids, "labels": ids}

    trainer = make_trainer(tmp_path, stream=Sentences(make_text(301), 10, 4), backprop_segments=2, max_steps=1)
    with pytest.raises(ValueError, match="backprop_segments=2 cuts items.*has no shift_labels: set it to 1"):
        trainer.train()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*set it to 0"),
        ({"dataloader_num_workers": 1, "dataloader_in_order": False}, "in_order=True"),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "dataloader_persistent_workers in TrainingArguments",
        ),
    ],
)
def test_settings_that_break_continuity_name_the_fix(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, stream=TokenStream(make_text(301), 5, 4), **changes).train()


@pytest.mark.parametrize("metric", ["perplexity", "eval_perplexity", "eval_here_perplexity", "bits_per_token"])
def test_the_worst_checkpoint_is_not_called_the_best(tmp_path, metric):
    with pytest.raises(ValueError, match=f"'{metric}' is the better the lower.*set greater_is_better=False"):
        make_trainer(tmp_path, metric_for_best_model=metric)
    trainer = make_trainer(tmp_path, metric_for_best_model=metric, greater_is_better=False)
    assert trainer.args.metric_for_best_model == metric


@pytest.mark.parametrize("metric", ["accuracy", "tokens_per_second"])
def test_a_figure_that_is_the_better_the_greater_may_tell_the_best_checkpoint(tmp_path, metric):
    assert make_trainer(tmp_path, metric_for_best_model=metric).args.greater_is_better


def test_special_tokens_that_the_model_lacks_are_refused_before_training(tmp_path):
    """Trainer gives them to the configuration, which could not be saved. Resizing is all that they wait for."""
    tokenizer = TransfoXLTokenizer.from_symbols([str(token) for token in range(61)], mode="whitespace")
    known = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model, settings = make_model(vocab_size=known), {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    arguments = make_arguments(tmp_path, label_names=["shift_labels"], **settings)
    data = {"train_dataset": TokenStream(make_text(301), 5, 4), "data_collator": default_data_collator}
    trainer = TransfoXLTrainer(model, arguments, processing_class=tokenizer, **data)
    with pytest.raises(ValueError, match=rf"pad_token='<pad>' .* {known}, .*\[0, {known}\): call .*resize_token_em"):
        trainer.train()
    assert model.config.pad_token_id is None
    model.resize_token_embeddings(len(tokenizer))
    trainer.train()
    assert TransfoXLForCausalLM.from_pretrained(tmp_path / "checkpoint-1").config.pad_token_id == known


def test_special_tokens_are_asked_of_no_model_of_vectors():
    tokenizer = TransfoXLTokenizer.from_symbols(["a"], mode="whitespace")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    check_special_tokens(small_config(vocab_size=0, cutoffs=[], input_size=3), tokenizer)


def test_datasets_that_say_nothing_of_streams(tmp_path):
    items = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 8
    with pytest.raises(ValueError, match="train_dataset is a list without batch_size.*TokenStream.*Trainer"):
        make_trainer(tmp_path, stream=items).train()
    with pytest.raises(ValueError, match="eval_dataset is a list"):
        make_trainer(tmp_path).evaluate(items)


def test_items_without_targets_are_no_evaluation(tmp_path):
    class Unlabelled(TokenStream):
        def __getitem__(self, index):
            return {"input_ids": super().__getitem__(index)["input_ids"]}

    held_out = Unlabelled(make_text(81), 5, 4)
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": held_out})
    assert trainer.get_eval_dataloader().dataset is held_out
    with pytest.raises(ValueError, match=r"label_names=\['labels'\], but the items have input_ids, and no labels"):
        trainer.evaluate()


@pytest.mark.parametrize("label", ["shift_labels", "labels"])
def test_items_without_the_labels_that_are_named_are_no_evaluation(tmp_path, label):
    """Trainer would predict without a loss then, and so without the memory."""

    class Unlabelled(TokenStream):
        def __getitem__(self, index):
            return {"input_ids": super().__getitem__(index)["input_ids"]}

    trainer = make_trainer(tmp_path, label_names=[label])
    with pytest.raises(ValueError, match=rf"label_names=\['{label}'\], but the items have input_ids, and no {label}"):
        trainer.predict(Unlabelled(make_text(81), 5, 4))


def test_a_mean_of_the_means_of_processes_is_refused(tmp_path, monkeypatch):
    arguments = make_arguments(tmp_path, average_tokens_across_devices=False)
    TransfoXLTrainer(make_model(), arguments, train_dataset=TokenStream(make_text(301), 5, 4))
    monkeypatch.setattr(type(arguments), "world_size", 2)
    with pytest.raises(ValueError, match="average_tokens_across_devices=False.*set it to True"):
        TransfoXLTrainer(make_model(), arguments, train_dataset=TokenStream(make_text(301), 5, 4))


@pytest.mark.parametrize("trainer_class", [TransfoXLTrainer, Trainer])
def test_a_model_of_a_derived_class_has_the_loss_of_its_base(tmp_path, trainer_class):
    """Trainer tells by the name of a class whether the first label of a row is a target."""

    class Mine(TransfoXLForCausalLM):
        pass

    class Labelled(TokenStream):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"]
            return {"input_ids": ids, "labels": ids}

    found = []
    for model_class in (TransfoXLForCausalLM, Mine):
        model = model_class(make_model().config)
        model.load_state_dict(make_model().state_dict())
        trainer = trainer_class(
            model, make_arguments(tmp_path, max_steps=2), train_dataset=Labelled(make_text(81), 5, 4)
        )
        trainer.train()
        found.append(logged(trainer))
    assert found[0] == found[1] and len(found[0]) == 2


def test_a_memory_that_becomes_shorter(tmp_path):
    """The states that it can no longer hold are left out, whoever has made it so."""

    class ShrinkingMemory(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.reset_memory_length(max(0, 6 - 2 * state.global_step))

    trainer = make_trainer(
        tmp_path, max_steps=5, model_changes={"mem_len": 6}, trainer={"callbacks": [ShrinkingMemory()]}
    )
    trainer.train()
    assert len(logged(trainer)) == 5 and trainer.model.config.mem_len == 0


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_is_that_of_the_text(tmp_path):
    """Every token once, with memory; a last segment and a stream that are shorter weigh what they do."""
    text = make_text(48)
    held_out = TokenStream(text, 5, 1, keep_remainder=True)
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": held_out}, per_device_eval_batch_size=1)
    metrics = trainer.evaluate()
    expected = evaluate_language_model(trainer.model, text, segment_length=5)
    assert metrics["eval_tokens"] == expected.tokens == 47
    assert metrics["eval_loss"] == pytest.approx(expected.nll, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    assert metrics["eval_bits_per_token"] == pytest.approx(expected.bits_per_token, rel=1e-5)


def test_an_evaluation_says_how_much_of_its_text_it_leaves_out(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(txl_hf.training.trainer.logger, "warning_once", said.append)
    for options in ({}, {"keep_remainder": True}):
        held_out = TokenStream(make_text(48), 5, 2, **options)
        make_trainer(tmp_path, per_device_eval_batch_size=2).get_eval_dataloader(held_out)
    assert said == [
        "eval_dataset leaves out 7 tokens at the end of its text, which the figures are not of: make it with "
        "keep_remainder=True"
    ]


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_device_train_batch_size": 2},
            "1 process.* set the loader's batch size to 4 .per_device_train_batch_si",
        ),
        ({"gradient_accumulation_steps": 2}, "2 accumulation step.* set the loader's batch size to 2 "),
        ({"gradient_accumulation_steps": 3}, "batch_size=4, which .* cannot share: make it a multiple of 3"),
    ],
)
def test_a_wrong_training_batch_size_is_found_before_the_first_step(tmp_path, changes, message, iterable):
    stream = (text_stream if iterable else TokenStream)(make_text(301), 5, 4)
    with pytest.raises(ValueError, match=f"train_dataset: .*{message}"):
        make_trainer(tmp_path, stream=stream, **changes).train()


@pytest.mark.parametrize("named", [False, True])
def test_a_wrong_evaluation_batch_size_is_found_before_the_first_step(tmp_path, named, monkeypatch):
    monkeypatch.setattr(TransfoXLTrainer, "training_step", None)
    held_out = TokenStream(make_text(81), 5, 1)
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": {"held-out": held_out} if named else held_out})
    with pytest.raises(ValueError, match="eval_dataset: .*set the loader's batch size to 1 "):
        trainer.train()


def test_evaluation_leaves_the_memory_of_the_training_alone(tmp_path):
    held_out = {"a": TokenStream(make_text(41), 5, 4), "b": UnevenStream(make_text(41), 5, 4)}
    trainers = [
        make_trainer(tmp_path, max_steps=8, trainer={"eval_dataset": held_out}, **changes, **SGD)
        for changes in ({}, {"eval_strategy": "steps", "eval_steps": 2})
    ]
    for trainer in trainers:
        trainer.train()
    assert logged(trainers[0]) == logged(trainers[1])
    assert len(logged(trainers[1], "eval_a_loss")) == len(logged(trainers[1], "eval_b_loss")) == 4


@pytest.mark.parametrize("kind", ["TextStream", "varying lengths"])
def test_an_evaluation_of_the_training_stream_leaves_the_training_alone(tmp_path, kind):
    """It is of the first epoch, from its beginning, while the training is in the middle of its second."""

    def make():
        return (
            text_stream(make_text(301), 5, 4)
            if kind == "TextStream"
            else TokenStream(make_text(301), 12, 4, varlen_seed=0)
        )

    losses, evaluations = [], {"eval_strategy": "steps", "eval_steps": 2}
    for changes in ({}, evaluations):
        stream = make()
        trainer = make_trainer(tmp_path, stream=stream, trainer={"eval_dataset": stream}, **changes, **SGD)
        trainer.train()
        losses.append(logged(trainer))
    assert losses[0] == losses[1] and trainer.state.global_step == 20 > len(list(make())) // 4
    again = trainer.evaluate()["eval_loss"]
    assert again == trainer.evaluate(make())["eval_loss"] == logged(trainer, "eval_loss")[-3]


def test_an_evaluation_that_never_ends_is_refused(tmp_path):
    endless = text_stream(make_text(301), 5, 4, epochs=None)
    message = "is a TextStream with epochs=None, which never ends: make it with epochs=1"
    with pytest.raises(ValueError, match=f"eval_dataset {message}"):
        make_trainer(tmp_path, trainer={"eval_dataset": {"held-out": endless}}).train()
    trainer = make_trainer(tmp_path, stream=endless)
    with pytest.raises(ValueError, match=f"eval_dataset {message}"):
        trainer.evaluate(endless)
    with pytest.raises(ValueError, match=f"test_dataset {message}"):
        trainer.predict(endless)


@pytest.mark.parametrize("label", ["labels", "shift_labels"])
def test_either_label_alone_gives_an_evaluation_loss(tmp_path, label):
    class Labelled(TokenStream):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return item if label == "shift_labels" else {"input_ids": item["input_ids"], "labels": item["input_ids"]}

    stream = Labelled(make_text(81), 5, 4)
    trainer = make_trainer(tmp_path, stream=stream, max_steps=2, trainer={"eval_dataset": stream})
    trainer.train()
    assert trainer.evaluate()["eval_tokens"] == (80 if label == "shift_labels" else 64)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_an_evaluation_of_a_classifier_is_the_mean_over_its_labels(tmp_path):
    """Also over one label in a step and four in another; and it is no perplexity."""

    class Labelled(TokenStream):
        def __getitem__(self, index):
            ids = super().__getitem__(index)["input_ids"]
            return {"input_ids": ids, "labels": (ids % 3).where(torch.arange(5) > index // self.batch_size, -100)}

    set_seed(0)
    model = TransfoXLForTokenClassification(small_config(num_labels=3))
    stream = Labelled(make_text(81), 5, 4)
    trainer = make_trainer(tmp_path, model, stream, max_steps=2)
    trainer.train()
    metrics = trainer.evaluate(stream)
    memory, losses = {}, []
    for step in range(4):
        items = [stream[4 * step + row] for row in range(4)]
        ids, labels = (torch.stack([item[name] for item in items]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            output = model.eval()(ids, labels=labels, **memory)
        memory = memory_of(output)
        losses += output.losses[labels != -100].tolist()
    assert metrics["eval_tokens"] == len(losses) == 4 * (4 + 3 + 2 + 1)
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert not [name for logs in (metrics, *trainer.state.log_history) for name in logs if "perplexity" in name]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("classes", [3, 1], ids=["classes", "numbers"])
def test_an_evaluation_of_sequences_is_the_mean_over_those_that_have_a_label(tmp_path, classes, processes):
    """Only the last segment of each has: segments without one would count as losses of zero."""
    rows = 4 // processes
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    if processes == 1:
        predict_sequences(tmp_path, classes, **sizes)
    else:
        started = launcher.start(predict_sequences, processes, output=tmp_path, classes=classes, **sizes)
        assert launcher.join(started) == [0, 0]
    scores, labels, metrics, history = torch.load(tmp_path / "found.pt", weights_only=False)
    scores, labels = torch.tensor(scores)[-4:], torch.tensor(labels)[-4:]
    expected = F.cross_entropy(scores, labels) if classes > 1 else F.mse_loss(scores[:, 0], labels)
    assert metrics["test_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["test_tokens"] == 4
    assert not [name for logs in (metrics, *history) for name in logs if "perplexity" in name]


@pytest.mark.parametrize("model_changes", [{}, {"output_logits": True}], ids=["default", "output_logits"])
def test_predictions_are_logits_alone(tmp_path, model_changes):
    """Also those of a model with cutoffs, which with labels computes none unless it is asked to."""
    shapes = []

    def compute_metrics(prediction):
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = make_trainer(tmp_path, model_changes=model_changes, trainer={"compute_metrics": compute_metrics})
    metrics = trainer.evaluate(TokenStream(make_text(81), 5, 4))
    assert shapes == [((16, 5, 61), (16, 5))] and 0 <= metrics["eval_accuracy"] <= 1
    assert trainer.predict(TokenStream(make_text(81), 5, 4)).predictions.shape == (16, 5, 61)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    trainer = make_trainer(
        tmp_path,
        trainer={
            "eval_dataset": TokenStream(make_text(41, seed=1), 5, 4),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
        },
        max_steps=400,
        learning_rate=0.3,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
    )
    trainer.train()
    assert trainer.state.global_step < 400
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and best.is_dir()
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(logged(trainer, "eval_loss")), rel=1e-6)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2 and not list(tmp_path.glob("_*"))


def test_the_best_checkpoint_of_a_folder_that_was_moved(tmp_path):
    """It is found, not removed, and loaded at the end."""

    def train(folder, resume=False, **steps) -> TransfoXLTrainer:
        trainer = make_trainer(
            tmp_path / folder,
            trainer={"eval_dataset": TokenStream(make_text(41, seed=1), 5, 4), "callbacks": [At(**steps)]},
            metric_for_best_model="loss",
            greater_is_better=True,
            load_best_model_at_end=True,
            eval_strategy="steps",
            eval_steps=1,
            save_total_limit=2,
            **SGD | SAVING | {"save_steps": 1, "max_steps": 6},
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train("before", should_training_stop=3)
    (tmp_path / "before").rename(tmp_path / "after")
    trainer = train("after", resume=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "after" / "checkpoint-1")
    assert {path.name for path in (tmp_path / "after").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-6"}
    losses = logged(trainer, "eval_loss")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6) and max(losses) == losses[0]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run with checkpoints 5, 10 and 12, its losses, and those of the steps to 20 that follow."""
    path = tmp_path_factory.mktemp("saved")
    make_trainer(path, **SGD, **SAVING).train()
    return path, losses_by_hand(TokenStream(make_text(301), 5, 4), 20)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resuming_with_other_accumulation(tmp_path, saved_run, accumulation, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = make_trainer(
        tmp_path,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        **SGD,
    )
    trainer.train(resume_from_checkpoint=str(saved_run[0] / "checkpoint-10"))
    np.testing.assert_allclose(logged(trainer)[10:], saved_run[1][10:], rtol=1e-5)
    assert "missing keys" not in caplog.text, "tied tensors are written once"


class At(TrainerCallback):
    """Sets something of the control at the end of a step."""

    def __init__(self, **steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        for name, step in self.steps.items():
            if state.global_step == step:
                setattr(control, name, True)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_text_without_a_length_is_resumed_in_its_later_epochs(tmp_path, accumulation):
    """At the end of an epoch and in its middle."""
    size = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}

    def train(folder, resume=False, **steps) -> list[float]:
        trainer = make_trainer(
            tmp_path / folder,
            make_model(dropout=0.1),
            text_stream(make_text(301), 5, 4),
            max_steps=33,
            trainer={"callbacks": [At(**steps)]},
            **size,
        )
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer)

    assert len(list(text_stream(make_text(301), 5, 4))) == 13 * 4
    whole = train("whole")
    assert len(whole) == 33
    for step in (13, 17, 29):
        train(str(step), should_save=step, should_training_stop=step)
        assert train(str(step), resume=True) == whole


@pytest.mark.parametrize("accumulation", [1, 2])
def test_another_text_that_begins_as_the_one_before_is_noticed_on_resuming(tmp_path, accumulation):
    """All documents but the first are others; with the same ones it goes on, on other micro-batches too."""
    size = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    tokens = make_text(301)
    stop = {"callbacks": [At(should_save=6, should_training_stop=6)]}
    make_trainer(tmp_path, stream=text_stream(tokens, 5, 4), max_steps=9, trainer=stop).train()
    other = torch.cat([tokens[:7], tokens[7:].flip(0)])
    with pytest.raises(ValueError, match="the state is of other texts: the first .* give the same, in the same order"):
        make_trainer(tmp_path, stream=text_stream(other, 5, 4), max_steps=9, **size).train(resume_from_checkpoint=True)
    trainer = make_trainer(tmp_path, stream=text_stream(tokens, 5, 4), max_steps=9, **size)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 9


def test_at_the_end_of_an_epoch_nothing_is_remembered(tmp_path):
    """Of a text with a length and of one without."""
    for stream in (TokenStream(make_text(261), 5, 4), text_stream(make_text(301), 5, 4)):
        make_trainer(tmp_path, stream=stream, max_steps=27, save_strategy="epoch").train()
        for step, epoch in ((13, 1), (26, 2)):
            position = read_position(tmp_path / f"checkpoint-{step}")
            assert (position["epoch"], position["step"]) == (epoch, 0)
            assert load_file(tmp_path / f"checkpoint-{step}" / MEMS_NAME) == {}


def test_epochs_that_a_callback_ends(tmp_path):
    """A run is resumed in the epoch that it was in, where it was."""

    def train(folder, resume=False, **steps) -> list[float]:
        trainer = make_trainer(tmp_path / folder, trainer={"callbacks": [At(**steps)]})
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer)

    whole = train("whole", should_epoch_stop=3)
    train("stopped", should_epoch_stop=3, should_save=5, should_training_stop=5)
    assert train("stopped", resume=True) == whole and len(whole) == 3 + 15


def test_an_epoch_that_a_callback_ended_is_over_for_its_checkpoint(tmp_path):
    def train(folder, resume=False, **steps) -> list[float]:
        trainer = make_trainer(
            tmp_path / folder, save_strategy="epoch", trainer={"callbacks": [At(should_epoch_stop=3, **steps)]}
        )
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer)

    whole = train("whole")
    train("stopped", should_training_stop=3)
    position = read_position(tmp_path / "stopped" / "checkpoint-3")
    assert (position["epoch"], position["step"]) == (1, 0)
    assert load_file(tmp_path / "stopped" / "checkpoint-3" / MEMS_NAME) == {}
    assert train("stopped", resume=True) == whole


def test_a_text_that_was_begun_anew_is_gone_on_with(tmp_path):
    """After `ignore_data_skip` a step of the text is another than that of the training."""
    trainers = []
    for resume, stop, skip in ((False, 4, False), (True, 7, True), (True, 12, False)):
        callbacks = [At(should_save=stop, should_training_stop=stop)]
        trainers.append(make_trainer(tmp_path, max_steps=12, ignore_data_skip=skip, trainer={"callbacks": callbacks}))
        trainers[-1].train(resume_from_checkpoint=resume)
    whole = make_trainer(tmp_path, max_steps=12, ignore_data_skip=True)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(trainers[-1]) == logged(whole) and len(logged(whole)) == 12


class GrowingMemory(TrainerCallback):
    """A function of the step, so that nothing else has to be resumed."""

    def __init__(self, *lengths: int):
        self.lengths = lengths

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.reset_memory_length(self.lengths[len(self.lengths) * state.global_step // state.max_steps])


def test_a_memory_that_grows_in_training(tmp_path):
    """With one length it is as without a schedule; in each phase it is resumed bit for bit."""

    def losses(name, *lengths, **resuming):
        trainer = make_trainer(tmp_path / name, trainer={"callbacks": [GrowingMemory(*lengths)]}, **SGD, **SAVING)
        trainer.train(**resuming)
        return logged(trainer)

    constant = make_trainer(tmp_path / "none", **SGD, **SAVING)
    constant.train()
    assert losses("constant", constant.model.config.mem_len) == logged(constant)
    whole = losses("growing", 2, constant.model.config.mem_len)
    assert whole != logged(constant)
    for step in (5, 10):
        checkpoint = str(tmp_path / "growing" / f"checkpoint-{step}")
        assert losses("resumed", 2, constant.model.config.mem_len, resume_from_checkpoint=checkpoint) == whole


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_on_sigterm_is_resumed_bit_for_bit(tmp_path, event):
    """Wherever in a step it is asked for: weights, memory and random numbers are of one moment."""

    def make() -> TransfoXLTrainer:
        return make_trainer(tmp_path, make_model(dropout=0.1), max_steps=8, enable_jit_checkpoint=True)

    class Asking(TrainerCallback):
        def ask(self, args, state, control, **kwargs):
            manager.is_checkpoint_requested |= state.global_step == 4

    whole, asking = make(), Asking()
    whole.train()
    setattr(asking, event, asking.ask)
    stopped = make()
    [sigterm] = (each for each in stopped.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    manager = sigterm.jit_manager
    stopped.callback_handler.callbacks.insert(0, asking)
    stopped.train()
    step = 4 if event == "on_step_end" else 5
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    resumed = make()
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed)[step - 8 :] == logged(whole)[step:] and len(logged(whole)) == 8


@pytest.mark.parametrize("damage", ["truncated", "missing", "unlisted"])
def test_incomplete_checkpoints_are_skipped(tmp_path, saved_run, monkeypatch, damage):
    shutil.copytree(saved_run[0], tmp_path, dirs_exist_ok=True)
    for step in (10, 12):
        folder = tmp_path / f"checkpoint-{step}"
        if damage == "truncated":
            (folder / "optimizer.pt").write_bytes(b"")
        else:
            (folder / ("rng_state.pth" if damage == "missing" else "checkpoint_files.json")).unlink()
    warnings = []
    monkeypatch.setattr(txl_hf.training.checkpoints.logger, "warning", warnings.append)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert len(warnings) == 2 and all("incomplete" in warning for warning in warnings)
    with pytest.raises(ValueError, match="checkpoint-12 cannot be resumed: it is incomplete"):
        make_trainer(tmp_path, **SGD).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    trainer = make_trainer(tmp_path, **SGD)
    trainer.train(resume_from_checkpoint=True)
    np.testing.assert_allclose(logged(trainer)[5:], saved_run[1][5:], rtol=1e-5)


def test_nothing_to_resume(tmp_path, saved_run):
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="does not exist"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    make_trainer(tmp_path, save_only_model=True, **SAVING).train()
    with pytest.raises(ValueError, match="holds the model only"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    with pytest.raises(ValueError, match="resume with the same text, batch size"):
        make_trainer(tmp_path, stream=TokenStream(make_text(401), 5, 4)).train(
            resume_from_checkpoint=str(saved_run[0] / "checkpoint-10")
        )


def test_no_checkpoint_holds_the_token_of_the_hub(tmp_path):
    trainer = make_trainer(tmp_path, hub_token="hf_secret", **(SAVING | {"max_steps": 5}))
    trainer.train()
    trainer.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin"} <= {path.name for path in files}
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]
    assert trainer.args.hub_token == "hf_secret"
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert saved.max_steps == 5 and saved.hub_token is None


def test_the_card_of_the_trainer_says_task_code_and_results(tmp_path):
    """Also where another model's card lies; what somebody has written stays in what `save_model` leaves."""
    make_model(d_inner=40).save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": TokenStream(make_text(41, seed=1), 5, 4)}, max_steps=1)
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card(language="en", license="mit", dataset_tags="some/corpus", tags="mine", model_name="name")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag == "text-generation" and card.data.tags == ["transformer-xl", "transfo-xl", "mine"]
    assert (card.data.language, card.data.license, card.data.datasets) == ("en", "mit", ["some/corpus"])
    assert 'AutoModelForCausalLM.from_pretrained("name", trust_remote_code=True)' in card.text
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["perplexity"] == pytest.approx(logged(trainer, "eval_perplexity")[-1], abs=1e-3)
    assert "Its weights" not in card.text and card.data.base_model is None, "it began as nothing that was saved"


class Pushes:
    """In the place of the Hub: what lay in the folder at each push."""

    def __init__(self, monkeypatch, done: bool = True):
        self.folders, self.done = [], done
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda *args, **kwargs: self)

    def create_repo(self, *args, **kwargs):
        return SimpleNamespace(repo_id="user/name")

    def upload_folder(self, folder_path, **kwargs):
        self.folders.append({path.name: path.read_bytes() for path in Path(folder_path).iterdir() if path.is_file()})
        job = Future()
        if self.done:
            job.set_result(None)
        return job


@pytest.mark.parametrize("trained", ["whole", "in a search", "an adapter"])
def test_each_push_brings_the_code_and_the_card_of_a_whole_model(tmp_path, monkeypatch, trained):
    pushes, model = Pushes(monkeypatch), make_model()
    if trained == "an adapter":
        model.add_adapter(pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"]))
    hub = {"push_to_hub": True, "hub_model_id": "user/name", "save_steps": 1, "max_steps": 2}
    arguments = make_arguments(tmp_path, label_names=["shift_labels"], **SAVING | hub)
    trainer = TransfoXLTrainer(model, arguments, train_dataset=TokenStream(make_text(301), 5, 4))
    if trained == "in a search":
        # Its checkpoints lie in a folder for each trial.
        monkeypatch.setattr(Trainer, "_get_output_dir", lambda self, trial: f"{self.args.output_dir}/run-1")
    trainer.train()
    trainer.push_to_hub()
    assert len(pushes.folders) == 3 and not list(tmp_path.rglob("_unfinished*"))
    for folder in pushes.folders:
        described = b"trust_remote_code=True" in folder.get("README.md", b"")
        if trained == "an adapter":
            assert not described and "adapter_model.safetensors" in folder
        else:
            assert described and {"modeling_transfo_xl.py", "config.json", "model.safetensors"} <= folder.keys()


@pytest.mark.parametrize("own", [False, True])
def test_a_pushed_card_is_that_of_the_model_until_somebody_writes_one(tmp_path, monkeypatch, own):
    pushes, model, card = Pushes(monkeypatch), make_model(), tmp_path / "README.md"
    write_model_card(card, make_model(vocab_size=100))
    before = "My model" if own else card.read_text()
    card.write_text(before)
    hub = {"push_to_hub": True, "hub_model_id": "user/name", "save_steps": 1, "max_steps": 1}
    arguments = make_arguments(tmp_path, label_names=["shift_labels"], **SAVING | hub)
    TransfoXLTrainer(model, arguments, train_dataset=TokenStream(make_text(301), 5, 4)).train()
    [pushed] = (folder["README.md"].decode() for folder in pushes.folders)
    assert pushed == before if own else f"over a vocabulary of {model.config.vocab_size}," in pushed
    assert "over a vocabulary of 100," not in pushed


def test_of_several_processes_one_completes_a_push(tmp_path, monkeypatch):
    """The others have no repository, and know nothing of its pushes."""
    pushes = Pushes(monkeypatch)
    monkeypatch.setattr(Trainer, "is_world_process_zero", lambda self: False)
    hub = {"push_to_hub": True, "hub_model_id": "user/name", "save_steps": 1, "max_steps": 1}
    arguments = make_arguments(tmp_path, label_names=["shift_labels"], **SAVING | hub)
    trainer = TransfoXLTrainer(make_model(), arguments, train_dataset=TokenStream(make_text(301), 5, 4))
    trainer.train()
    assert not hasattr(trainer, "push_in_progress") and not pushes.folders
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".py", ".md")]


def test_a_card_that_is_not_finished_takes_no_place(tmp_path, monkeypatch):
    """One that is cut short would pass for somebody's own, and stay."""
    model = make_model()

    def fail(descriptor):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "fsync", fail)
        write_model_card(tmp_path / "README.md", model, "user/name")
    assert not list(tmp_path.iterdir())
    write_model_card(tmp_path / "README.md", model, "user/name")
    assert "trust_remote_code=True" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_card_names_its_data_sets(tmp_path, evaluated):
    """With results or without; one that is on the Hub also where it searches."""
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": TokenStream(make_text(41, seed=1), 5, 4)})
    if evaluated:
        trainer.evaluate()
    cards = {}
    for given in (
        {"dataset": "my texts"},
        {"dataset": ["my <texts>", "others"]},
        {"dataset_tags": "some/corpus"},
        {"dataset_tags": "some/corpus", "dataset": "Some Corpus", "tasks": "feature-extraction"},
    ):
        trainer.create_model_card(model_name="name", **given)
        card = ModelCard.load(tmp_path / "README.md")
        [sentence] = re.findall("It was trained on (.*)[.]", card.text)
        results = {(result.dataset_name, result.dataset_type) for result in card.data.eval_results or []}
        cards[sentence] = card.data.get("datasets"), card.data.pipeline_tag, results
    task = "text-generation"
    expected = {
        "my texts": (None, task, {("my texts", "my texts")}),
        "my &#60;texts&#62;, others": (None, task, {("my <texts>", "my <texts>")}),
        "some/corpus": (["some/corpus"], task, {("some/corpus", "some/corpus")}),
        "Some Corpus": (["some/corpus"], "feature-extraction", {("Some Corpus", "some/corpus")}),
    }
    assert cards == {name: (*data, results if evaluated else set()) for name, (*data, results) in expected.items()}


def results_of_card(folder) -> dict[str, float]:
    found = ModelCard.load(folder / "README.md").data.eval_results or []
    return {result.dataset_split: result.metric_value for result in found if result.metric_type == "perplexity"}


def test_a_card_has_no_figures_of_other_weights(tmp_path):
    """Not those of an evaluation before the training; those of now it has."""
    make_model().save_pretrained(tmp_path)
    held_out = {name: TokenStream(make_text(41, seed=seed), 5, 4) for seed, name in enumerate(("here", "there"))}
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": held_out}, max_steps=1)
    trainer.evaluate()
    trainer.train()
    trainer.create_model_card()
    assert results_of_card(tmp_path) == {}
    metrics = trainer.evaluate()
    trainer.create_model_card()
    figures = {name: metrics[f"eval_{name}_perplexity"] for name in held_out}
    assert results_of_card(tmp_path) == pytest.approx(figures, rel=1e-4)
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None


# The best model is an early one: that of the greatest loss.
BEST_IS_EARLY = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "learning_rate": 0.1,
    "max_steps": 4,
}


@pytest.mark.parametrize("changes", [{}, {"include_num_input_tokens_seen": "all"}], ids=str)
def test_the_best_model_has_the_figures_of_its_step_and_those_since(tmp_path, changes):
    """Of the text that chose it, and of one that is evaluated when it has been loaded."""
    validation, test = (TokenStream(make_text(41, seed=seed), 5, 4) for seed in (1, 2))
    trainer = make_trainer(tmp_path, trainer={"eval_dataset": validation}, **BEST_IS_EARLY, **changes)
    trainer.train()
    assert trainer.state.best_global_step < 4
    expected = {"evaluation": max(logged(trainer, "eval_perplexity"))}
    trainer.create_model_card()
    assert results_of_card(tmp_path) == pytest.approx(expected, rel=1e-4)
    expected["test"] = trainer.evaluate(test, metric_key_prefix="eval_test")["eval_test_perplexity"]
    trainer.create_model_card()
    assert results_of_card(tmp_path) == pytest.approx(expected, rel=1e-4)


class Interrupted(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_training_that_was_interrupted_has_the_figures_of_its_last_step(tmp_path):
    """The best model, which is loaded at the end, it has not."""
    text = TokenStream(make_text(41, seed=1), 5, 4)
    data = {"train_dataset": TokenStream(make_text(301), 5, 4), "eval_dataset": text}
    settings = make_arguments(tmp_path, label_names=["shift_labels"], **BEST_IS_EARLY)
    trainer = TransfoXLTrainer(make_model(), settings, callbacks=[Interrupted()], **data)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.best_global_step is not None
    trainer.create_model_card()
    assert results_of_card(tmp_path) == {}
    expected = {"evaluation": trainer.evaluate()["eval_perplexity"]}
    trainer.create_model_card()
    assert results_of_card(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_a_card_names_what_the_weights_began_as(tmp_path):
    """By its name on the Hub; what a user says comes first."""
    for name, options in (("user/base", {}), ("user/base", {"finetuned_from": "user/other"})):
        model = make_model()
        model.name_or_path = name
        make_trainer(tmp_path / "first", model=model, max_steps=1).create_model_card(**options)
        data = ModelCard.load(tmp_path / "first" / "README.md").data
        assert data.base_model == options.get("finetuned_from", "user/base")
        model.save_pretrained(tmp_path / "first")


def test_a_run_that_is_done_stays_so(tmp_path, saved_run):
    shutil.copytree(saved_run[0], tmp_path, dirs_exist_ok=True)
    trainer = make_trainer(tmp_path, **SGD, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 12


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path, saved_run):
    shutil.copytree(saved_run[0] / "checkpoint-5", tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "of-an-earlier-run").touch()
    make_trainer(tmp_path, **SGD, **SAVING, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-12", "run.json"]


def kill_and_resume(path: Path, kills: int, seed: int, **arguments):
    """Kill a run so often, or until it is done, resume it, and compare every loss on the way with a whole run."""
    chance = random.Random(seed)
    arguments = {
        "model": {"dropout": 0.2, "dropatt": 0.1},
        "tokens": 261,
        "max_steps": 30,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 1,
    } | arguments
    whole, killed = path / "whole", path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert set(run(output=whole, **arguments)) == {0}
    for _ in range(kills):
        checkpoint = last_checkpoint(killed)
        resume = checkpoint is not None
        if resume and checkpoint.endswith(f"-{arguments['max_steps']}"):
            break
        running = start(output=killed, resume=resume, kill_at=chance.randrange(40), **arguments)
        while all(process.is_alive() for process in running):
            time.sleep(0.002)
        for process in running:
            process.kill()
            process.join()
        assert -signal.SIGKILL in [process.exitcode for process in running]
    assert set(run(output=killed, resume=last_checkpoint(killed) is not None, **arguments)) == {0}
    expected = {(name, step): rest for name, step, *rest in read_losses(whole)}
    found = read_losses(killed)
    assert {(name, step) for name, step, *_ in found} == set(expected)
    for name, step, *rest in found:
        assert rest == expected[name, step], f"{name} of step {step}"


def test_killed_and_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path):
    kill_and_resume(tmp_path, kills=5, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"eval_steps": 3, "save_steps": 1},
        pytest.param(
            {"processes": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
            marks=pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason=CPU_0),
        ),
    ],
    ids=["plain", "accumulation", "every-step", "two-processes"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_often(tmp_path, arguments, seed):
    kill_and_resume(tmp_path, kills=30, seed=seed, **arguments)


# --- processes -------------------------------------------------------------------------------------------------------

TWO = {"processes": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}


ONE = {
    "stream": UnevenStream,
    "tokens": 301,
    "eval_strategy": "steps",
    "eval_steps": 7,
    "save_strategy": "steps",
    "save_steps": 7,
    "lr_scheduler_type": "constant",
}
ACCUMULATED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}


def sharded(state_dict_type: str) -> dict:
    config = {"transformer_layer_cls_to_wrap": ["TransfoXLLayer"], "state_dict_type": state_dict_type}
    return {"fsdp": True, "fsdp_config": config}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of training and evaluation of one process over the end of an epoch, and its checkpoints."""
    path = tmp_path_factory.mktemp("one-process")
    assert run(output=path, **ONE) == [0]
    return path


def compare(found: list, expected: list):
    assert [line[:2] for line in found] == [line[:2] for line in expected]
    np.testing.assert_allclose([line[2] for line in found], [line[2] for line in expected], rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"ddp_find_unused_parameters": False}, marks=pytest.mark.slow),
        ACCUMULATED,
        pytest.param({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4,
                      "per_device_eval_batch_size": 4}, marks=pytest.mark.slow),
        sharded("FULL_STATE_DICT"),
        pytest.param(sharded("SHARDED_STATE_DICT"), marks=pytest.mark.slow),
        pytest.param(sharded("FULL_STATE_DICT") | ACCUMULATED, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp-accumulated", "ddp-split", "fsdp2", "fsdp2-sharded-checkpoint", "fsdp2-accumulated"],
)  # fmt: skip
def test_two_processes_give_the_losses_of_one(tmp_path, one_process, changes):
    """Also with uneven targets and batches without a target in the last bin, which need no search for unused
    parameters; and when they resume."""
    expected = read_losses(one_process)
    arguments = ONE | TWO | changes
    assert run(output=tmp_path, **arguments) == [0, 0]
    compare(read_losses(tmp_path), expected)
    if "fsdp" not in changes and Version(transformers.__version__) < Version("5.23"):
        return  # See CPU_0.
    for step in (14, 20):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "losses.jsonl").unlink()
    assert run(output=tmp_path, resume=True, **arguments) == [0, 0]
    compare(read_losses(tmp_path), [line for line in expected if line[1] > 7])


@pytest.fixture(scope="module")
def text_on_one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("text-on-one-process")
    assert run(output=path, **TEXT) == [0]
    return path


TEXT = {"stream": text_stream, "max_steps": 18, "eval_strategy": "steps", "eval_steps": 7} | SGD
SPLIT = {
    "accelerator_config": {"split_batches": True},
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        ACCUMULATED,
        pytest.param(SPLIT, marks=pytest.mark.slow),
        pytest.param({"accelerator_config": {"dispatch_batches": False}}, marks=pytest.mark.slow),
    ],
    ids=["dispatched", "accumulated", "split", "not-dispatched"],
)
def test_two_processes_read_a_text_stream_as_one(tmp_path, text_on_one_process, changes):
    """Over the end of an epoch."""
    assert run(output=tmp_path, **TEXT | TWO | changes) == [0, 0]
    compare(read_losses(tmp_path), read_losses(text_on_one_process))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 4}, "batch size is 4, but .* set the loader's batch size to 2 "),
        (SPLIT | {"per_device_train_batch_size": 2}, "batch size is 2, but .*, with split_batches=True to 4"),
    ],
    ids=["dispatched", "split"],
)
def test_two_processes_refuse_a_text_stream_of_another_size(tmp_path, changes, message):
    assert launcher.join(launcher.start(be_refused, output=tmp_path, **TEXT | TWO | changes)) == [0, 0]
    for rank in range(2):
        refused = (tmp_path / f"refused-{rank}").read_text()
        assert re.match(f"train_dataset: the loader's {message}", refused)


ZERO_2 = {
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@pytest.mark.slow  # It compiles an operation.
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("changes", [{}, ACCUMULATED], ids=["plain", "accumulated"])
def test_sharded_by_deepspeed(tmp_path, one_process, changes):
    """Two processes under ZeRO-2 give the losses of one, also when they resume."""
    expected, arguments = read_losses(one_process), ONE | TWO | changes | {"deepspeed": ZERO_2}
    assert run(output=tmp_path, **arguments) == [0, 0]
    compare(read_losses(tmp_path), expected)
    for step in (14, 20):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "losses.jsonl").unlink()
    assert run(output=tmp_path, resume=True, **arguments) == [0, 0]
    compare(read_losses(tmp_path), [line for line in expected if line[1] > 7])


def test_another_number_of_processes_on_resuming(tmp_path, one_process):
    expected = [line for line in read_losses(one_process) if line[1] > 7]
    assert run(output=tmp_path, **ONE | TWO | ACCUMULATED | {"max_steps": 7}) == [0, 0]
    changes = [{}] if Version(transformers.__version__) < Version("5.23") else [{}, TWO]
    for number, change in enumerate(changes):
        source, output = (one_process, tmp_path)[change == {}], tmp_path / str(number)
        shutil.copytree(source / "checkpoint-7", output / "checkpoint-7")
        assert set(run(output=output, resume=True, **ONE | {"max_steps": 20} | change)) == {0}
        compare(read_losses(output), expected)


def test_a_sharded_model_is_saved_as_what_it_is(tmp_path):
    assert run(output=tmp_path, **ONE | TWO | sharded("FULL_STATE_DICT") | {"max_steps": 7}) == [0, 0]
    saved = tmp_path / "checkpoint-7"
    assert (saved / "modeling_transfo_xl.py").exists() and not list(saved.glob("_*"))
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    held_out = UnevenStream(make_text(201, seed=1), 5, 4, keep_remainder=True)
    [then] = [line[2] for line in read_losses(tmp_path) if line[:2] == ["eval_loss", 7]]
    assert make_trainer(tmp_path, model=model).evaluate(held_out)["eval_loss"] == pytest.approx(then, rel=1e-5)


def test_a_search_is_for_the_loss_or_what_the_user_says(tmp_path, monkeypatch):
    """Trainer's default would add up the figures that an evaluation gains."""
    monkeypatch.setattr(Trainer, "hyperparameter_search", lambda self, space, objective, trials: (objective, trials))

    def objective(**options):
        options["eval_dataset"] = TokenStream(make_text(81), 5, 4)
        trainer = make_trainer(tmp_path, max_steps=1, trainer=options)
        found, trials = trainer.hyperparameter_search(None, None, 7)
        assert trials == 7
        # As in a trial: before it has trained, it says how long a model takes to be prepared, too.
        trainer.train()
        return trainer, found

    trainer, found = objective()
    metrics = trainer.evaluate()
    assert {"eval_tokens", "eval_perplexity"} <= metrics.keys() and found(metrics) == metrics["eval_loss"]
    with pytest.raises(ValueError, match="compute_objective is missing: say which figures of compute_metrics"):
        objective(compute_metrics=lambda prediction: {"accuracy": 0.25})
    assert trainer.hyperparameter_search(None, len, 7) == (len, 7)
