"""The card of a model, README.md beside its weights, and the results in it, which the Hub reads as its model-index."""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..files import is_repo_id, name_of, write_text

RESULTS = "results.json"  # written by `txl-train` beside the model, with figures of these splits
SCORED = ("validation", "test")
METRICS = {"perplexity": "Perplexity", "bits_per_token": "Bits per token"}
# Task of the Hub by Auto class, because the Hub cannot infer it from code that comes with a model.
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
# The last line of a card that `write_model_card` wrote.
SIGNATURE = "<!-- Written by txl-hf; remove this line to keep your own text. -->"
TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

A Transformer-XL model ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)) with {{ config.n_layer }} layers of width
{{ config.d_model }} over {{ inputs }}, which remembers {{ config.mem_len }} hidden states per layer
(initial memory: {{ config.initial_memory }}).
{%- if origin %}

{{ origin }}
{%- endif %}

The code is in this repository, so nothing needs to be installed beside `transformers`:

```python
from transformers import {{ auto_class }}{% if tokenizer %}, AutoTokenizer{% endif %}

model = {{ auto_class }}.from_pretrained({{ name }}, trust_remote_code=True)
{%- if tokenizer %}
tokenizer = AutoTokenizer.from_pretrained({{ name }}, trust_remote_code=True)
{%- endif %}
```
{%- if auto_class == "AutoModelForCausalLM" and config.mem_len > 0 %}

A call returns what it remembers, and the next one goes on from there, so that a text has any length:
`outputs = model(first_ids)`, then `model(next_ids, mems=outputs.mems)`. `generate` does so by itself.
{%- endif %}

With `txl-hf` installed, `import txl_hf` takes the place of `trust_remote_code=True`. Loading takes other lengths
than `mem_len={{ config.mem_len }}, clamp_len={{ config.clamp_len }}, same_length={{ config.same_length }}` too.
{%- if training %}

{{ training }}
{%- endif %}

{{ signature }}
"""


def write_model_card(
    path: Path,
    model: PreTrainedModel,
    repository: str | None = None,
    tags: Iterable[str] | None = None,
    origin: str = "",
    training: str = "",
    tokenizer: bool | None = None,
    **data,
) -> None:
    """Write a card for the Hub: the model's task and size, and the code that loads it.

    Args:
        path: of the card; an existing file is replaced.
        repository: the name under which it will be loaded; by default that of the folder.
        tags: beside those of the architecture.
        origin, training: Markdown on where the weights come from, and lines on the training for the end.
        tokenizer: whether a tokenizer is beside the card; by default the folder is searched.
        data: more of `huggingface_hub.ModelCardData`; `base_model` is by default the name on the Hub that the model
            was loaded from.
    """
    name, auto_class = repository or name_of(path.parent), type(model)._auto_class or "AutoModel"
    known: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": TASKS.get(auto_class)}
    all_tags = dict.fromkeys(["transformer-xl", model.config.model_type, *(tags or ())])
    card = ModelCard.from_template(
        ModelCardData(tags=[*all_tags], **known | base_model_of(model, name) | data),
        template_str=TEMPLATE,
        title=plain_markdown(name),
        name=json.dumps(name),
        config=model.config,
        inputs=f"a vocabulary of {model.config.vocab_size}" if model.config.vocab_size else "vectors",
        auto_class=auto_class,
        origin=origin,
        training=training,
        tokenizer=(path.parent / "tokenizer_config.json").exists() if tokenizer is None else tokenizer,
        signature=SIGNATURE,
    )
    write_text(path, str(card))


def base_model_of(model: PreTrainedModel, repository: str) -> dict[str, str]:
    """`base_model` for the card, if the model was loaded from the Hub under another name; else nothing."""
    source = model.name_or_path
    on_hub = source and source != repository and not Path(source).exists() and is_repo_id(source)
    return {"base_model": source} if on_hub else {}


def is_generated(path: Path) -> bool:
    """Whether `write_model_card` wrote this file: its last line is `SIGNATURE`."""
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").rstrip().endswith(SIGNATURE)


def plain_markdown(text: str) -> str:
    """`text` escaped for Markdown, so that it is shown as it is, without links, HTML and headings."""
    return "".join(
        letter if letter.isalnum() or letter in " ./-_" else f"&#{ord(letter)};" if letter.isprintable() else "?"
        for letter in " ".join(text.split())
    )


def to_results(figures: Mapping[str, Mapping[str, Any]], dataset: str) -> list[EvalResult]:
    """The figures of a data set: for each split `perplexity` and `bits_per_token`, and the lengths of its
    evaluation."""
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
    """SHA-256 of all `model*.safetensors` that `save_pretrained` has written to a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_results(folder: Path) -> dict[str, Any]:
    """`results.json` of the model in a folder; {} if there is none, or if its "weights" is not the `weights_digest` of
    the folder."""
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(results, dict) and results.get("weights", "") in ("", weights_digest(folder))
    return results if is_ours else {}


def origin() -> dict[str, Any]:
    """The versions and the commit (where the package runs from a repository) that computed a result."""
    from .. import __version__

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    tracked = git("ls-files", "--error-unmatch", __file__) is not None
    return {
        "versions": {"txl-hf": __version__, "transformers": transformers.__version__, "torch": str(torch.__version__)},
        "commit": git("describe", "--always", "--dirty", "--exclude=*") if tracked else None,
    }
