"""The card of a `TransfoXLTrainer`'s model, and the files that it pushes beside the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from transformers import Trainer
from transformers.dynamic_module_utils import custom_object_save
from transformers.modelcard import TrainingSummary

from ..evaluation.cards import (
    METRICS,
    base_model_of,
    is_generated,
    plain_markdown,
    to_results,
    write_model_card,
)
from ..files import name_of
from ..transfo_xl.layout_transfo_xl import TransfoXLLayoutModel

# Trainer's own card is copied into ours from this heading to its end.
PROCEDURE = "\n## Training procedure\n"


def create_model_card(
    trainer: Any,
    model: TransfoXLLayoutModel,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
) -> None:
    """Write a card to the output directory of a TransfoXLTrainer, in place of any other, with the training procedure
    of Trainer's own card, and the evaluations of the current weights as results.

    Args:
        model: the trainer's, unwrapped.
        license: by default that of the base model on the Hub.
        tasks: the model's task on the Hub; by default that of its head.
        dataset_tags: identifiers of data sets on the Hub.
        dataset: names of the data sets that it was trained on; results are of the first.
    """
    if not trainer.is_world_process_zero():
        return
    path = Path(trainer.args.output_dir, "README.md")
    name = model_name or name_of(path.parent)
    repository = trainer.hub_model_id or name
    on_hub, called = _as_list(dataset_tags), _as_list(dataset)
    base_model = finetuned_from or base_model_of(model, repository).get("base_model")
    # By default `from_trainer` takes the folder's name, which may be empty.
    summary = TrainingSummary.from_trainer(trainer, license=license, model_name=name, finetuned_from=base_model)
    results = card_results(trainer, next(iter(on_hub or called), "evaluation text"))
    if called:
        results = [replace(result, dataset_name=called[0]) for result in results]
    trained_on = ", ".join(map(plain_markdown, called or on_hub))
    options = _tokenizer(trainer) | ({"pipeline_tag": tasks} if tasks else {})
    write_model_card(
        path,
        model,
        repository,
        _as_list(tags),
        origin=f"It was trained on {trained_on}." if trained_on else "",
        training="".join(summary.to_model_card().partition(PROCEDURE)[1:]),
        language=language,
        license=summary.license,
        base_model=base_model,
        datasets=on_hub or None,
        model_name=name if results else None,
        eval_results=results or None,
        **options,
    )


def card_results(trainer: Trainer, dataset: str) -> list[EvalResult]:
    """The figures of a Trainer's model as it is now, on a data set of this name; evaluation sets are its splits."""
    state, history = trainer.state, trainer.state.log_history
    # After a training, whose entry alone has `total_flos`, Trainer reloads the best checkpoint.
    ended = next((i for i, logs in enumerate(history) if "total_flos" in logs), None)
    if ended is None or not trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
        of_now = [logs for logs in history if logs.get("step") == state.global_step]
    else:
        of_now = [logs for logs in history[:ended] if logs.get("step") == state.best_global_step] + history[ended:]
    splits: dict[str, dict[str, float]] = {}
    for logs in of_now:
        for prefix in (name.removesuffix("_bits_per_token") for name in logs if name.endswith("_bits_per_token")):
            split = prefix.removeprefix("eval").removeprefix("_") or "evaluation"
            splits[split] = {name: logs[f"{prefix}_{name}"] for name in METRICS}
    return to_results(splits, dataset)


def complete_push(trainer: Any, model: TransfoXLLayoutModel) -> None:
    """Write a model's code, and a card unless the user wrote one, to the output directory that its trainer pushes,
    beside the weights that Trainer copies from a checkpoint."""
    output = Path(trainer.args.output_dir)
    custom_object_save(model, output, config=model.config)
    card = output / "README.md"
    if not card.exists() or is_generated(card):
        write_model_card(card, model, trainer.hub_model_id, **_tokenizer(trainer))


def _tokenizer(trainer: Trainer) -> dict[str, Any]:
    """`tokenizer=True` for a card if the Trainer saves a tokenizer; otherwise the folder is searched."""
    return {} if trainer.processing_class is None else {"tokenizer": True}


def _as_list(values: str | list[str] | None) -> list[str]:
    return [values] if isinstance(values, str) else list(values or [])
