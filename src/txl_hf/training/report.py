"""The output of a run of `txl-train`: its log and plot, its best model, and the scores of that model."""

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, TrainerCallback

from ..data.loading import find_device
from ..data.streams import TokenStream, text_fingerprint
from ..evaluation.cards import RESULTS, SCORED, origin, to_results, weights_digest, write_model_card
from ..evaluation.language_model import LanguageModelEvaluation, figures
from ..files import UNFINISHED_PREFIX, disk_errors, move_into_place, name_of, whole_file, write_text
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .arguments import DataArguments

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of the backend.

LOG, PLOT, BEST = "log.jsonl", "training.png", "best"
# File beside the best model: its step, its validation loss, and the text and settings of that loss.
BEST_SCORE = "best.json"
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
# Seconds of steps that are timed to predict the whole time; of a short run a tenth is enough.
SECONDS_MEASURED = 5


class RunReport(TrainerCallback):
    """Prints what is trained and how long it will take, writes the log, and saves the best model.

    Attributes:
        trainer: the `TransfoXLTrainer` that it reports of, to be set before training.
        best: the validation loss of the best model, in nats. best_of: `score_of` that loss.
    """

    trainer: Any

    def __init__(self, stream: TokenStream, validation: Any, tokenizer: Any, metric: str):
        """Args:
        stream: the training text. validation: token ids that evaluations score. metric: of `figures`, the one shown.
        """
        self.stream, self.validation, self.tokenizer, self.metric = stream, validation, tokenizer, metric
        self.best, self.best_of = math.inf, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.output, self.is_main = Path(args.output_dir), state.is_world_process_zero
        if self.is_main:
            settle_best(self.output, state.global_step)
        self.trainer.accelerator.wait_for_everyone()
        if (known := read_best(self.output)) is not None:
            self.best, self.best_of = known["validation_loss"], known["of"]
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, unit="step", desc="train", disable=not self.is_main
        )
        self.since: float | None = None
        self.measured, self.seconds, self.expected = 0, 0.0, False
        if self.is_main:
            lines = [self._line(logs) for logs in state.log_history]
            with disk_errors(self.output):
                write_text(self.output / LOG, "".join(lines))
            print(self._describe(args, state), file=sys.stderr)

    def _describe(self, args, state) -> str:
        """One line on the run: size of the model, devices, precision, and number of steps."""
        stream, parameters = self.stream, self.trainer.accelerator.unwrap_model(self.trainer.model).num_parameters()
        begun = f" from step {state.global_step:,}" if state.global_step else ""
        left_out = f", but for its last {stream.dropped_tokens:,}" if stream.dropped_tokens else ""
        return (
            f"training {parameters / 1e6:.1f} M parameters on {args.world_size} × {args.device.type} in "
            f"{PRECISIONS[self.trainer.accelerator.mixed_precision]}{begun}: {state.max_steps:,} steps of "
            f"{stream.batch_size * stream.segment_length:,} tokens, {state.max_steps / stream.steps:.1f} epochs of a "
            f"text of {len(stream.token_ids):,} tokens{left_out}"
        )

    def on_step_begin(self, args, state, control, **kwargs):
        # Timing restarts here, because validations and checkpoints run between two steps.
        self.since = time.perf_counter() if self.since is None else self.since

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        # A step that is saved or validated is logged, because the log refuses a loss that is not finite.
        control.should_log |= control.should_save or control.should_evaluate
        if not self.bar.disable and not self.expected and self.since is not None:
            self._expect(args, state)

    def _expect(self, args, state):
        """Print once how long the steps will take. The first step is left out, because it may compile."""
        now = time.perf_counter()
        if self.measured:
            self.seconds += now - self.since
        self.measured, self.since = self.measured + 1, None
        left, steps = state.max_steps - state.global_step, self.measured - 1
        if steps < 1 or (self.seconds < SECONDS_MEASURED and steps * 10 < left + steps):
            return
        self.expected = True
        each = self.seconds / steps
        speed = f"{self.stream.batch_size * self.stream.segment_length / each:,.0f} tokens a second"
        left_out = "without the validations"
        if args.mem_warmup_ratio:
            left_out += " and what a longer memory will cost"
        tqdm.write(
            f"expected time: {timedelta(seconds=round(left * each))} more, at {speed}, {left_out}", file=sys.stderr
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = logs.get("loss", logs.get("eval_loss", 0.0))
        if not math.isfinite(loss):
            # Refused before it replaces a checkpoint from which training can resume.
            where = "the loss is" if "loss" in logs else "the validation loss is"
            raise FloatingPointError(f"{where} {loss} before step {state.global_step + 1}: lower --learning_rate")
        if self.is_main and (line := self._line(state.log_history[-1])):
            with disk_errors(self.output), (self.output / LOG).open("a") as file:
                file.write(line)
            if "loss" in logs:
                speed = f"{logs['tokens_per_second']:.0f} tokens/s"
                self.bar.set_postfix_str(f"{self.metric} {logs[self.metric]:.2f}, {speed}")

    def _line(self, logs: dict[str, Any]) -> str:
        """An entry of Trainer's log as a line of ours; none for entries of neither training nor validation."""
        if "loss" in logs:
            kept = {name: value for name, value in logs.items() if name not in ("step", "tokens", "epoch")}
            self.tokens = logs["tokens"]
        elif "eval_loss" in logs:
            kept = {"validation_loss": logs["eval_loss"], **figures(logs["eval_loss"], "validation_")}
        else:
            return ""
        return json.dumps({"step": logs["step"], "tokens": self.tokens, **kept}) + "\n"

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        loss, of = metrics["eval_loss"], score_of(self.trainer.evaluation, self.validation)
        if self.best_of not in (None, of):
            if self.is_main:
                print("the best model is chosen anew: it was scored on another text, or otherwise", file=sys.stderr)
            self.best = math.inf
        if loss < self.best:
            self.best, self.best_of = loss, of
            self._save_best(state.global_step)
        if self.is_main:
            lines = filter(None, map(self._line, state.log_history))
            plot([json.loads(line) for line in lines], self.output / PLOT, self.metric)

    def _save_best(self, step: int):
        """Save the current model, or the average of its weights, in place of the best one."""
        trainer, aside = self.trainer, self.output / f"{UNFINISHED_PREFIX}-{BEST}" / BEST
        state_dict = trainer.accelerator.get_state_dict(trainer.model, unwrap=False)
        if self.is_main:
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            with disk_errors(self.output):
                shutil.rmtree(aside.parent, ignore_errors=True)
                aside.mkdir(parents=True)
                score = {"step": step, "validation_loss": self.best, "of": self.best_of}
                write_text(aside / BEST_SCORE, json.dumps(score, indent=1) + "\n")
                model.save_pretrained(aside, state_dict=state_dict, repo_id=name_of(self.output))
                self.tokenizer.save_pretrained(aside)
                move_into_place(aside, self.output / BEST)
                aside.parent.rmdir()
        trainer.accelerator.wait_for_everyone()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


# --- the best model --------------------------------------------------------------------------------------------------


def score_of(evaluation: LanguageModelEvaluation, token_ids: Any) -> dict[str, Any]:
    """The text and the settings of a validation loss. Losses can be compared only if both are equal."""
    settings = {name: value for name, value in dataclasses.asdict(evaluation).items() if name != "nll"}
    return {"text": text_fingerprint(token_ids), **settings}


def read_best(output: Path) -> dict[str, Any] | None:
    """The score beside the best model, which has a separate folder until the run ends; None: there is no best model.

    Raises:
        ValueError: the file is not one of a best model.
    """
    folder = output / BEST if (output / BEST).exists() else output
    path = folder / BEST_SCORE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    kinds = {"step": int, "validation_loss": float, "of": dict}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(
            f"{path} is damaged, it does not say what the best model's loss is: remove it, and the next validation "
            "chooses the best model anew"
        )
    return found


def settle_best(output: Path, step: int):
    """Finish a `move_best` that was killed, and remove a best model of a step that will be repeated."""
    if not (output / BEST).exists():
        return
    if (found := read_best(output)) is None:
        move_best(output)
    elif found["step"] > step:
        print(f"the best model, of step {found['step']}, is chosen anew from step {step} on", file=sys.stderr)
        shutil.rmtree(output / BEST)


def move_best(output: Path):
    """Move the best model to the output folder, `best.json` first: a model without it is being moved."""
    for path in sorted((output / BEST).iterdir(), key=lambda path: path.name != BEST_SCORE):
        os.replace(path, output / path.name)
    (output / RESULTS).unlink(missing_ok=True)
    (output / BEST).rmdir()


# --- scores ----------------------------------------------------------------------------------------------------------


def finish(output: Path, texts: dict[str, Any], evaluate: Callable, data: DataArguments):
    """Move the best model to the output folder, and print and write its scores.

    Args:
        evaluate: for a text and a memory length (or None) returns a function of a model.
    """
    if (output / BEST).exists():
        move_best(output)
    if not (output / RESULTS).exists():
        model = AutoModelForCausalLM.from_pretrained(output).to(find_device(None))
        scores = score(model, texts, evaluate, data) | {"weights": weights_digest(output)}
        results = to_results({split: scores[split] for split in SCORED}, name_of(data.data or ""))
        name = name_of(output)
        write_model_card(output / "README.md", model, name, model_name=name, eval_results=results)
        # Written last, because it marks a finished run.
        write_text(output / RESULTS, json.dumps(scores, indent=1) + "\n")
    found, metric = read_results(output / RESULTS), data.metric
    for split in SCORED:
        print(f"{split}: {metric} {found[split][metric]:.3f}")
    for result in found["memory_lengths"]:
        print(f"test with memory {result['memory_length']}: {metric} {result[metric]:.3f}")
    parameters = found["model"]["parameters"]
    print(f"the model, of {parameters / 1e6:.1f} M parameters, is in {output}; its figures are in {output / RESULTS}")
    print(f'to write with it: txl-generate {output} --prompt "…"')


def score(
    model: TransfoXLForCausalLM, texts: dict[str, Any], evaluate: Callable, data: DataArguments
) -> dict[str, Any]:
    """The scores of a model on the validation and the test text, and with other memory lengths."""

    def figures_of(split: str, memory_length: int | None = None) -> dict[str, float]:
        found = evaluate(texts[split], memory_length, progress=True)(model)
        return {**dataclasses.asdict(found), **figures(found.nll)}

    results: dict[str, Any] = {split: figures_of(split) for split in SCORED}
    results["memory_lengths"] = [figures_of("test", length) for length in data.eval_memory_lengths]
    config = model.config
    results["model"] = {
        "attn_type": config.attn_type,
        "parameters": model.num_parameters(),
        "tgt_len": config.tgt_len,
        "mem_len": config.mem_len,
        "ext_len": config.ext_len,
        "loss": data.loss,
    }
    return results | origin()


def plot(log: list[dict[str, float]], path: Path, metric: str):
    """Plot training and validation against the number of trained tokens."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, key, marker in (("training", metric, ""), ("validation", f"validation_{metric}", ".")):
        points = [(line["tokens"], line[key]) for line in log if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set_xlabel("tokens learned from")
    axes.set_ylabel(metric.replace("_", " "))
    if metric == "perplexity":
        axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=150)
    plt.close(figure)


def read_results(path: Path) -> dict[str, Any]:
    """The scores of the finished model. Raises a ValueError for a file that `txl-train` has not written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = [*(found[split] for split in SCORED), *found["memory_lengths"], found["model"]]
        if all(isinstance(part, dict) for part in parts):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: remove it, and --resume scores the model again")
