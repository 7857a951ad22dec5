"""What a run of `txl-train` leaves: the folder of the run, its log and plot, and what the finished model scores."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
import yaml  # type: ignore[import-untyped]
from accelerate import Accelerator
from filelock import FileLock
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..data.streams import text_fingerprint
from ..evaluation.cards import (
    RESULTS,
    SCORED,
    is_generated,
    origin,
    to_results,
    weights_digest,
    write_model_card,
)
from ..evaluation.language_model import LanguageModelEvaluation, evaluate_language_model, figures
from ..evaluation.reading import LENGTHS
from ..files import LOCK_NAME, UNFINISHED_PREFIX, lock_folder, name_of, options_that_differ, whole_file, write_text
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .arguments import (
    RECIPE,
    ArchitectureArguments,
    Arguments,
    EvaluationArguments,
    RunArguments,
    check_output,
    defaults_of_model,
)
from .checkpoints import RUN_NAME

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

LOG, PLOT, BEST, TRACKED = "log.jsonl", "training.png", "best", "tensorboard"
# Beside the best model: its step, its validation loss, what that is of, and what the run began as, for its card.
BEST_SCORE = "best.json"
# What a run writes into its folder: its own records, and a model and a tokenizer with their code; and a card.
WRITTEN = {
    *(LOG, PLOT, BEST, BEST_SCORE, TRACKED, RECIPE, RESULTS, RUN_NAME),
    *(CONFIG_NAME, GENERATION_CONFIG_NAME),
    *(path.name for path in (Path(__file__).parents[1] / "transfo_xl").glob("*_transfo_xl*.py")),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
WRITTEN_IN_PARTS = re.compile(
    rf"{PREFIX_CHECKPOINT_DIR}-\d+|{UNFINISHED_PREFIX}.*|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
# Options that nothing but the beginning of a run reads.
DRAWN = ("seed", "init", "init_range", "init_std", "proj_init_std", "model_name_or_path")

# --- folder ----------------------------------------------------------------------------------------------------------


def lock_output(output: Path, run: RunArguments) -> FileLock:
    """Make the folder of a run and keep other runs from it: what is returned holds it until this process ends."""
    output.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(output)
    # Another run may have begun there, and ended, since this one looked.
    check_output(output, run)
    return lock


def open_output(output: Path, arguments: Arguments, step: int, left: int):
    """Delete what an earlier run has written, or write the settings that it goes on with; what is new among them, or
    left where it is, is said.

    Results of a run that ends later now are removed, because their presence says that all is done.

    Args:
        step: the step of the checkpoint that the run goes on from; 0: it begins.
        left: how many steps are to come. None: what has trained the model stays as it was written.
    """
    if arguments.run.overwrite:
        left_alone = []
        for path in sorted(output.iterdir()):
            if not is_written(path):
                left_alone += [path.name] if path.name != LOCK_NAME else []
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if left_alone:
            print(f"left in {output}, as no run has written it: {', '.join(left_alone)}", file=sys.stderr)
    given = {name: value for name, value in arguments.as_dict().items() if name not in ("resume", "overwrite")}
    before = read_recipe(output / RECIPE) if step else given
    settings = given
    if step:
        # What a checkpoint has drawn already, and goes on with.
        settings = {name: given[name] for name in given if name not in DRAWN}
        settings |= {name: before[name] for name in DRAWN if name in before}
    if not left:
        scored = () if (output / RESULTS).exists() else vars(arguments.evaluation)
        settings = before | {name: given[name] for name in scored if name in given}
    for name in sorted((given.keys() | before.keys()) - {"output"}):
        old, new = before.get(name), given.get(name)
        if settings.get(name) != new:
            state = "goes on" if left else "is done"
            print(f"the run {state}: {name} stays {old}, and {new} changes nothing", file=sys.stderr)
        elif old != new:
            print(f"from step {step} on {name} is {new}, until then {old}", file=sys.stderr)
    if left:
        (output / RESULTS).unlink(missing_ok=True)
    write_text(output / RECIPE, yaml.safe_dump(settings, sort_keys=False))


def is_written(path: Path) -> bool:
    """Whether a file or folder in the folder of a run is the run's, by its name, or leads to where that was put."""
    if path.name == "README.md":
        return is_generated(path)
    return path.name in WRITTEN or WRITTEN_IN_PARTS.fullmatch(path.name) is not None


def changed_settings(output: Path, arguments: Arguments) -> str:
    """What makes another model or optimiser than that of the run in a folder, as its recipe has it; "" if nothing."""
    before, given = read_recipe(output / RECIPE), arguments.as_dict()
    if not before:
        return ""
    made = {entry.name for entry in dataclasses.fields(ArchitectureArguments)} - {*DRAWN} | {"optimizer"}
    # What is not said is as the model has it that the run began with, or else as make_config has it.
    began_with = before.get("model_name_or_path")
    unsaid = defaults_of_model(began_with)
    if began_with is None:
        del unsaid["d_embed"]
        unsaid["cutoffs"] = []

    def chosen(options: dict[str, Any]) -> dict[str, Any]:
        known = unsaid | options
        known.setdefault("d_embed", known["d_model"])
        return {name: known.get(name) for name in made}

    return options_that_differ(chosen(before), chosen(given))


def read_recipe(path: Path) -> dict[str, Any]:
    """What a run has written down, unless somebody has broken it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    return found if isinstance(found, dict) else {}


# --- scores ----------------------------------------------------------------------------------------------------------


def evaluate(
    model: TransfoXLForCausalLM,
    token_ids,
    arguments: EvaluationArguments,
    document_end: int | None,
    memory_length: int | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = False,
) -> LanguageModelEvaluation:
    """With the lengths of the recipe, or another memory length; by one process, or shared out among all."""
    return evaluate_language_model(
        model,
        token_ids,
        segment_length=arguments.eval_tgt_len or model.config.tgt_len,
        memory_length=arguments.eval_mem_len if memory_length is None else memory_length,
        batch_size=arguments.eval_batch_size,
        ext_len=arguments.eval_ext_len,
        clamp_len=arguments.eval_clamp_len,
        same_length=arguments.eval_same_length,
        document_end=document_end,
        accelerator=accelerator,
        progress=progress,
    )


def evaluate_alike(
    model: TransfoXLForCausalLM,
    token_ids,
    like: LanguageModelEvaluation,
    document_end: int | None,
    accelerator: Accelerator,
) -> LanguageModelEvaluation:
    """Of another model, as one was evaluated."""
    lengths = {name: getattr(like, name) for name in LENGTHS}
    return evaluate_language_model(model, token_ids, **lengths, document_end=document_end, accelerator=accelerator)


def score_of(evaluation: LanguageModelEvaluation, token_ids) -> dict[str, Any]:
    """What a loss is of: the text and how it was read. Only losses of the same can be compared."""
    settings = {name: value for name, value in dataclasses.asdict(evaluation).items() if name != "nll"}
    return {"text": text_fingerprint(token_ids), **settings}


def best_folder(output: Path) -> Path:
    """Where the best model is: aside until the run ends."""
    return output / BEST if (output / BEST).exists() else output


def read_best(output: Path) -> dict[str, Any] | None:
    """What is written beside the best model, {} if nothing; None: there is none.

    Raises:
        ValueError: what is written there says nothing of a model.
    """
    path = best_folder(output) / BEST_SCORE
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        kinds = {"step": int, "validation_loss": float, "of": dict, "began_as": dict}
        if isinstance(found, dict):
            found.setdefault("began_as", {})
        if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(
                f"{path} is damaged, it does not say what the best model's loss is: remove it, and the next "
                "validation chooses the best model anew"
            )
        return found
    return {} if (path.parent / CONFIG_NAME).exists() else None


def settle_best(output: Path, step: int):
    """End what a kill has left of `move_best`, and remove a best model of a step that comes again."""
    if not (output / BEST).exists():
        return
    if not (found := read_best(output)):
        move_best(output)
    elif found["step"] > step:
        print(f"the best model, of step {found['step']}, is chosen anew from step {step} on", file=sys.stderr)
        shutil.rmtree(output / BEST)


def move_best(output: Path):
    """Put the best model into its place. First goes what says which it is: a model without is being moved."""
    for path in sorted((output / BEST).iterdir(), key=lambda path: path.name != BEST_SCORE):
        os.replace(path, output / path.name)
    (output / RESULTS).unlink(missing_ok=True)
    (output / BEST).rmdir()


def read_results(path: Path) -> dict[str, Any]:
    """What the finished model scores. Raises a ValueError for what no run has written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = [*(found[split] for split in SCORED), *found["memory_lengths"], found["model"]]
        if all(isinstance(part, dict) for part in parts):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: remove it, and --resume scores the model again")


def finish(output: Path, texts: dict, arguments: Arguments, document_end: int | None):
    """Put the best model into its place, and say and write what it scores."""
    if (output / BEST).exists():
        move_best(output)
    if not (output / RESULTS).exists():
        model = AutoModelForCausalLM.from_pretrained(output).to("cuda" if torch.cuda.is_available() else "cpu")
        scores = score(model, texts, arguments, document_end) | {"weights": weights_digest(output)}
        results = to_results({split: scores[split] for split in SCORED}, name_of(arguments.data.data or ""))
        began_as = (read_best(output) or {}).get("began_as", {})
        write_model_card(
            output / "README.md", model, name_of(output), model_name=name_of(output), eval_results=results, **began_as
        )
        # Last, because it says that all is done.
        write_text(output / RESULTS, json.dumps(scores, indent=1) + "\n")
    found, metric = read_results(output / RESULTS), arguments.evaluation.metric
    for split in SCORED:
        print(f"{split}: {metric} {found[split][metric]:.3f}")
    for result in found["memory_lengths"]:
        print(f"test with memory {result['memory_length']}: {metric} {result[metric]:.3f}")
    parameters = found["model"]["parameters"]
    print(f"the model, of {parameters / 1e6:.1f} M parameters, is in {output}; its figures are in {output / RESULTS}")


def score(model: TransfoXLForCausalLM, texts: dict, arguments: Arguments, document_end: int | None) -> dict[str, Any]:
    """What a model scores on the validation and the test text, and with other memory lengths."""
    evaluation = arguments.evaluation
    results: dict[str, Any] = {
        split: describe(evaluate(model, texts[split], evaluation, document_end, progress=True)) for split in SCORED
    }
    results["memory_lengths"] = [
        describe(evaluate(model, texts["test"], evaluation, document_end, memory_length, progress=True))
        for memory_length in evaluation.eval_memory_lengths
    ]
    config = model.config
    results["model"] = {
        "attn_type": config.attn_type,
        "parameters": model.num_parameters(),
        "tgt_len": config.tgt_len,
        "mem_len": config.mem_len,
        "ext_len": config.ext_len,
        "loss": arguments.data.loss,
    }
    return results | origin()


def describe(evaluation: LanguageModelEvaluation) -> dict[str, float]:
    return {**dataclasses.asdict(evaluation), **figures(evaluation.nll)}


# --- log -------------------------------------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a log; what a killed process or a power cut left is none, and stops no run that goes on."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    # What is behind the last line feed is a line half-written.
    parsed = (_parse(line) for line in lines[:-1])
    return [line for line in parsed if isinstance(line, dict) and isinstance(line.get("step"), int)]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def cut_log(path: Path, step: int):
    """Forget the steps after a checkpoint, because they will come again."""
    kept = [line for line in read_log(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def plot(log: list[dict[str, float]], path: Path, metric: str):
    """Training and validation against the tokens learned from."""
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
