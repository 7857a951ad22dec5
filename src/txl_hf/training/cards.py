"""The card that `TransfoXLTrainer` writes of its model, and what lies beside the weights that it pushes."""

import filecmp
import re
import shutil
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from transformers import Trainer
from transformers.modelcard import TrainingSummary
from transformers.trainer_utils import HubStrategy

from ..evaluation.cards import (
    METRICS,
    RESULTS,
    base_model_of,
    is_generated,
    plain_markdown,
    results_of_folder,
    to_results,
    write_model_card,
)
from ..transfo_xl.layout_transfo_xl import TransfoXLLayoutModel

# Where Trainer's own card begins to tell of the training itself, until its end.
PROCEDURE = "\n## Training procedure\n"
# The split and the data set of an evaluation that nobody has named.
HELD_OUT, TRAINING = ("validation", "held-out text"), ("train", "training text")


def create_model_card(
    trainer: Any,
    model: TransfoXLLayoutModel,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> None:
    """Write the model card of `TransfoXLTrainer.create_model_card` to the output directory, in place of any other: the
    package's card, with the training procedure as Trainer's own card describes it.

    Its results come from `results.json` in the output directory, if that was written after training began; otherwise
    from the evaluations of the model as it is now. The split is `train` if the evaluation read the training text,
    else `validation`, or the names in `eval_dataset`. Figures of other weights (before the last steps, or of an
    earlier run) are left out.

    Args:
        trainer: the TransfoXLTrainer whose output directory gets the card.
        model: its model, unwrapped.
        license: by default the license of the base model on the Hub.
        tasks: one task, under which the Hub files the model; by default that of its head.
        dataset_tags: identifiers of data sets on the Hub, for its search.
        dataset: display names of the data sets. The card says that the model was trained on them; results are of the
            first.
        dataset_args: for each the name of its configuration, as `load_dataset` takes it.

    Raises:
        ValueError: there are several tasks, or more `dataset_args` than data sets.
    """
    on_hub, called, configurations = _as_list(dataset_tags), _as_list(dataset), _as_list(dataset_args)
    datasets = called or on_hub
    if len(configurations) > len(datasets):
        raise ValueError(
            f"dataset_args={dataset_args!r} has {len(configurations)} for {len(datasets)} data set(s): give "
            "dataset or dataset_tags for each"
        )
    if len(_as_list(tasks)) > 1:
        raise ValueError(f"tasks={tasks!r}: the Hub files a model under one, give that alone")
    if not trainer.is_world_process_zero():
        return
    path = Path(trainer.args.output_dir, "README.md")
    name = model_name or path.parent.resolve().name
    named = next(iter(on_hub or called), None)
    results = card_results(trainer, named)
    if called:
        results = [replace(result, dataset_name=called[0]) for result in results]
    if configurations:
        results = [replace(result, dataset_config=configurations[0]) for result in results]
    repository = trainer.hub_model_id or name
    base_model = finetuned_from or base_model_of(model, repository).get("base_model")
    # It looks the licence up, under a name that is never empty: by default it takes that of the folder.
    summary = TrainingSummary.from_trainer(trainer, license=license, model_name=name, finetuned_from=base_model)
    data: dict[str, Any] = {
        "origin": _trained_on(datasets, configurations),
        "training": _evaluated(trainer) + "".join(summary.to_model_card().partition(PROCEDURE)[1:]),
        "language": language,
        "license": summary.license,
        "base_model": base_model,
        "datasets": on_hub or None,
        "model_name": name if results else None,
        "eval_results": results or None,
        **_tokenizer(trainer),
    }
    if tasks:
        data["pipeline_tag"] = _as_list(tasks)[0]
    write_model_card(path, model, repository, _as_list(tags), **data)


def card_results(trainer: Any, dataset: str | None) -> list[EvalResult]:
    """The figures of a TransfoXLTrainer's model as it is now.

    Args:
        dataset: what it was evaluated on; by default that is said without a name.
    """
    folder = Path(trainer.args.output_dir)
    # What was written before this training began is of other weights.
    written = (folder / RESULTS).stat().st_mtime if (folder / RESULTS).exists() else 0.0
    if trainer.trained_since < written and (found := results_of_folder(folder, dataset or HELD_OUT[1])):
        return found
    splits: dict[str, list[EvalResult]] = {}
    for logs in evaluations_of_now(trainer):
        for name in filter(re.compile("eval_(.*_)?perplexity").fullmatch, logs):
            prefix = name.removesuffix("_perplexity")
            figures = {figure: logs[f"{prefix}_{figure}"] for figure in METRICS if f"{prefix}_{figure}" in logs}
            read = TRAINING if trainer.of_training.get((prefix, logs["step"])) else HELD_OUT
            split = prefix.removeprefix("eval").removeprefix("_") or read[0]
            splits[split] = to_results({split: figures}, dataset or read[1])
    return [result for found in splits.values() for result in found]


def evaluations_of_now(trainer: Trainer) -> list[dict[str, Any]]:
    """The entries of a Trainer's log that were measured on the weights that its model has now."""
    state, history = trainer.state, trainer.state.log_history
    # Trainer reloads the best checkpoint when a training has come to its end, which the entry with `total_flos` marks.
    # (`train_runtime` does not: with `include_num_input_tokens_seen` every entry can have it.)
    ended = next((i for i, logs in enumerate(history) if "total_flos" in logs), None)
    if ended is None or not trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
        return [logs for logs in history if logs.get("step") == state.global_step]
    return [logs for logs in history[:ended] if logs.get("step") == state.best_global_step] + history[ended:]


def complete_push(trainer: Trainer, model: TransfoXLLayoutModel, checkpoint: str) -> None:
    """Put the code that loads a model beside what Trainer pushes of its checkpoint, and a card in place of none or of
    a generated one.

    It takes along weights and configuration alone, so that nobody could load them before the end.

    Args:
        trainer: whose output directory is pushed. model: its model, unwrapped. checkpoint: the folder.
    """
    if not _pushes_now(trainer):
        return
    output, repository = Path(trainer.args.output_dir), trainer.hub_model_id
    for file in Path(checkpoint).glob("*.py"):
        copy = output / file.name
        if not copy.exists() or not filecmp.cmp(file, copy, shallow=False):
            shutil.copyfile(file, copy)
    card = output / "README.md"
    if not card.exists() or is_generated(card):
        # Results in the folder are of other weights: these are copied after this.
        write_model_card(card, model, repository, **_tokenizer(trainer))


def _pushes_now(trainer: Trainer) -> bool:
    """Whether Trainer pushes a checkpoint now, by its own rule. Only the first process pushes."""
    if not trainer.is_world_process_zero() or trainer.args.hub_strategy == HubStrategy.END:
        return False
    push = trainer.push_in_progress
    return push is None or push.is_done() or trainer.args.hub_always_push


def _tokenizer(trainer: Trainer) -> dict[str, Any]:
    """For a card, that there is a tokenizer where the Trainer saves one; otherwise the folder tells."""
    return {} if trainer.processing_class is None else {"tokenizer": True}


def _trained_on(datasets: list[str], configurations: list[str]) -> str:
    """A sentence in Markdown on the data sets, each with its configuration where it has one; none without any."""
    named = [
        plain_markdown(dataset) + (f" ({plain_markdown(configuration)})" if configuration else "")
        for dataset, configuration in zip_longest(datasets, configurations)
    ]
    return f"It was trained on {', '.join(named)}." if named else ""


def _evaluated(trainer: Trainer) -> str:
    """A sentence in Markdown with the figures of the model as it is now; none where it was not evaluated."""
    figures = {
        name: value
        for logs in evaluations_of_now(trainer)
        for name, value in logs.items()
        if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
    }
    listed = [f"`{name}` {value:.4f}" for name, value in figures.items() if isinstance(value, float)]
    return f"\nIts evaluation: {', '.join(listed)}.\n" if listed else ""


def _as_list(values: str | list[str] | None) -> list[str]:
    return [values] if isinstance(values, str) else list(values or [])
