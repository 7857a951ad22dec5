"""The output of a run of `txl-train`: its settings, log and plot, its best model, and the scores of that model."""

import dataclasses
import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..data.loading import find_device
from ..evaluation.cards import RESULTS, SCORED, origin, to_results, weights_digest, write_model_card
from ..evaluation.language_model import evaluate_language_model, figures
from ..evaluation.reading import Reading
from ..files import disk_errors, name_of, whole_file, write_text
from .recipe import RECIPE, DataArguments, read_recipe

LOG, PLOT = "log.jsonl", "training.png"
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
# Seconds of steps that are timed to predict the whole time; of a short run a tenth is enough.
SECONDS_MEASURED = 5


class RunReport(TrainerCallback):
    """Prints what is trained and how long it will take, writes settings, log and plot, and asks for a checkpoint of
    each model that is the best so far."""

    def __init__(self, trainer: Any, settings: dict[str, Any], metric: str):
        """Args:
        trainer: a `TransfoXLTrainer`. settings: of the run, as in a recipe. metric: of `figures`, the one to plot.
        """
        self.trainer, self.settings, self.metric = trainer, settings, metric
        self.output = Path(trainer.args.output_dir)
        # The first step is not timed, because it may compile.
        self.timed, self.seconds, self.expected = -1, 0.0, False

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step > state.max_steps:
            raise ValueError(
                f"{state.max_steps} steps are fewer than the {state.global_step} that {self.output} has done "
                f"(--max_steps or --num_train_epochs): give {state.global_step} or more"
            )
        if state.is_world_process_zero:
            self._write_settings(state.global_step)
            self._write_log(state)
            print(self._describe(args, state), file=sys.stderr)

    def _write_settings(self, step: int):
        """Write the settings of the run, and print those that change at this step."""
        before = read_recipe(self.output / RECIPE) if step else self.settings
        for name in sorted((self.settings.keys() | before.keys()) - {"output"}):
            if (old := before.get(name)) != (new := self.settings.get(name)):
                print(f"from step {step} on {name} is {new}, until then {old}", file=sys.stderr)
        (self.output / RESULTS).unlink(missing_ok=True)
        write_text(self.output / RECIPE, yaml.safe_dump(self.settings, sort_keys=False))

    def _describe(self, args, state) -> str:
        """One line on the run."""
        stream = self.trainer.train_dataset
        parameters = self.trainer.accelerator.unwrap_model(self.trainer.model).num_parameters()
        begun = f" from step {state.global_step:,}" if state.global_step else ""
        left_out = f", but for its last {stream.dropped_tokens:,}" if stream.dropped_tokens else ""
        return (
            f"training {parameters / 1e6:.1f} M parameters on {args.world_size} × {args.device.type} in "
            f"{PRECISIONS[self.trainer.accelerator.mixed_precision]}{begun}: {state.max_steps:,} steps of "
            f"{stream.batch_size * stream.segment_length:,} tokens, {state.max_steps / stream.steps:.1f} epochs of a "
            f"text of {len(stream.token_ids):,} tokens{left_out}"
        )

    def on_step_begin(self, args, state, control, **kwargs):
        self.since = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # `on_log` refuses a loss that is not finite before the step is saved.
        control.should_log |= control.should_save or control.should_evaluate
        if state.is_world_process_zero and not self.expected:
            self._expect(args, state.max_steps - state.global_step)

    def _expect(self, args, left: int):
        """Print once how long the steps that are left will take."""
        self.timed += 1
        self.seconds += time.perf_counter() - self.since if self.timed else 0
        if not self.timed or (self.seconds < SECONDS_MEASURED and self.timed * 10 < left + self.timed):
            return
        self.expected, each, stream = True, self.seconds / self.timed, self.trainer.train_dataset
        speed = f"{stream.batch_size * stream.segment_length / each:,.0f} tokens a second"
        left_out = "the validations" + (" and what a longer memory will cost" if args.mem_warmup_ratio else "")
        tqdm.write(
            f"expected time: {timedelta(seconds=round(left * each))} more, at {speed}, without {left_out}",
            file=sys.stderr,
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        loss = logs.get("loss", logs.get("eval_loss", 0.0))
        if not math.isfinite(loss):
            which = "the loss" if "loss" in logs else "the validation loss"
            raise FloatingPointError(f"{which} is {loss} before step {state.global_step + 1}: lower --learning_rate")
        if state.is_world_process_zero:
            self._write_log(state)

    def _write_log(self, state) -> list[dict[str, Any]]:
        """Write what Trainer has logged as lines of JSON, and return them."""
        lines: list[dict[str, Any]] = []
        for logs in state.log_history:
            if "loss" in logs:
                kept = {name: value for name, value in logs.items() if name != "epoch"}
            elif "eval_loss" in logs:
                kept = {"tokens": lines[-1]["tokens"] if lines else 0, "validation_loss": logs["eval_loss"]}
                kept |= figures(logs["eval_loss"], "validation_")
            else:
                continue
            lines.append({"step": logs["step"], "tokens": kept.pop("tokens"), **kept})
        write_text(self.output / LOG, "".join(json.dumps(line) + "\n" for line in lines))
        return lines

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if args.save_strategy != SaveStrategy.NO:
            control.should_save |= state.best_metric is None or metrics["eval_loss"] < state.best_metric
        if state.is_world_process_zero:
            plot(self._write_log(state), self.output / PLOT, self.metric)


def save_best(trainer: Any, tokenizer: Any):
    """Save the model that a training ended with, or the average of its weights, with its tokenizer."""
    output = Path(trainer.args.output_dir)
    with trainer.averaged(), disk_errors(output):
        state_dict = trainer.accelerator.get_state_dict(trainer.model, unwrap=False)
        if trainer.is_world_process_zero():
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            model.save_pretrained(output, state_dict=state_dict, repo_id=name_of(output))
            tokenizer.save_pretrained(output)


def finish(output: Path, texts: dict[str, Any], readings: list[Reading], data: DataArguments):
    """Print the scores of the model in the output folder, and write them, where there are none yet: of validation and
    test text, and of the latter by each other reading."""
    if not (output / RESULTS).exists():
        model = AutoModelForCausalLM.from_pretrained(output).to(find_device(None))

        def score(split: str, reading: Reading) -> dict[str, Any]:
            found = evaluate_language_model(model, texts[split], **vars(reading))
            return {**dataclasses.asdict(found), **figures(found.nll)}

        scores: dict[str, Any] = {split: score(split, readings[0]) for split in SCORED}
        scores["memory_lengths"] = [score("test", reading) for reading in readings[1:]]
        settings = {"parameters": model.num_parameters(), "loss": data.loss}
        names = ("attn_type", "tgt_len", "mem_len", "ext_len")
        scores["model"] = {name: getattr(model.config, name) for name in names} | settings
        scores |= origin() | {"weights": weights_digest(output)}
        results = to_results({split: scores[split] for split in SCORED}, name_of(data.data or ""))
        name = name_of(output)
        write_model_card(output / "README.md", model, name, model_name=name, eval_results=results)
        # Last, because it marks a finished run.
        write_text(output / RESULTS, json.dumps(scores, indent=1) + "\n")
    found, metric = json.loads((output / RESULTS).read_text(encoding="utf-8")), data.metric
    for split in SCORED:
        print(f"{split}: {metric} {found[split][metric]:.3f}")
    for result in found["memory_lengths"]:
        print(f"test with memory {result['memory_length']}: {metric} {result[metric]:.3f}")
    parameters = found["model"]["parameters"]
    print(f"the model, of {parameters / 1e6:.1f} M parameters, is in {output}; its figures are in {output / RESULTS}")
    print(f'to write with it: txl-generate {output} --prompt "…"')


def plot(log: list[dict[str, float]], path: Path, metric: str):
    """Plot training and validation against the number of trained tokens."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
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
