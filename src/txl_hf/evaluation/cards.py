"""What the folder of a model says of it: what it scored, as the model-index of its card, which the Hub reads."""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..transfo_xl.card_transfo_xl import saved_weights

__all__ = [
    "RESULTS",
    "SCORED",
    "origin",
    "read_results",
    "results_of_folder",
    "to_results",
    "weights_digest",
]

# What `txl-train` leaves beside the model.
RESULTS = "results.json"
# Of which a model of `txl-train` has figures.
SCORED = ("validation", "test")

METRICS = {"perplexity": "Perplexity", "bits_per_token": "Bits per token"}


def to_results(figures: Mapping[str, Mapping[str, Any]], dataset: str) -> list[EvalResult]:
    """The figures of one or more splits of a data set.

    Args:
        figures: for each split `perplexity` and `bits_per_token`, and with which lengths they were found.
        dataset: the data set's name.
    """
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split=split,
            dataset_args={name: values[name] for name in ("segment_length", "memory_length") if name in values},
            metric_type=metric,
            metric_name=name,
            metric_value=round(float(values[metric]), 4),
        )
        for split, values in figures.items()
        for metric, name in METRICS.items()
        if isinstance(values.get(metric), int | float)
    ]


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of the model in a folder, all files of theirs."""
    digest = hashlib.sha256()
    for path in saved_weights(folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_results(folder: Path) -> dict[str, Any]:
    """`results.json` of the model in a folder; nothing where there is none, or one of other weights.

    `"weights"`, the `weights_digest`, says of which it is. In a file without, as another program writes it, the times
    do: one that is older than the weights is of others.
    """
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results, dict):
            return {}
        if "weights" in results:
            return results if results["weights"] == weights_digest(folder) else {}
        written = path.stat().st_mtime_ns
        stale = any(weights.stat().st_mtime_ns > written for weights in saved_weights(folder))
    except (OSError, ValueError):
        return {}
    return {} if stale else results


def results_of_folder(folder: Path, dataset: str) -> list[EvalResult]:
    """What `results.json` says of the model in a folder, as `read_results` finds it; of what another program has
    written, what has the form of `to_results`."""
    results = read_results(folder)
    splits = {split: results.get(split) for split in SCORED}
    return to_results({split: values for split, values in splits.items() if isinstance(values, dict)}, dataset)


def origin() -> dict[str, Any]:
    """With what something was computed: versions, and the commit where the package runs from a repository."""
    # Of what is imported, which need not be installed (a folder on the path), and whose builds only the modules name.
    import torch
    import transformers

    from .. import __version__

    versions = {"txl-hf": __version__, "transformers": transformers.__version__, "torch": str(torch.__version__)}
    package = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", package, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True
        )
        tracked = subprocess.run(["git", "-C", package, "ls-files", "--error-unmatch", __file__], capture_output=True)
    except OSError:
        return {"versions": versions, "commit": None}
    known = found.returncode == 0 and tracked.returncode == 0
    return {"versions": versions, "commit": found.stdout.strip() if known else None}
