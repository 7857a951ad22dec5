"""The card of a model: what it is, where it comes from and how it is loaded, on a page beside the weights."""

import filecmp
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel

from .configuration_transfo_xl import TransfoXLConfig

__all__ = [
    "CardedModel",
    "card_on_hub",
    "is_generated",
    "is_repo_id",
    "keep_card",
    "known_on_hub",
    "model_card",
    "plain_markdown",
    "saved_weights",
]

# The task under which the Hub lists a model. It cannot tell the task from code that comes with the model.
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
# These fields of a card describe the weights, wherever they lie, so that a copy of the weights takes them along.
CARRIED = ("base_model", "datasets", "eval_results", "language", "license", "model_name", "tags")
# Those that say what the weights scored, and the fields of a configuration that this depends on beside the weights.
RESULTS = ("eval_results", "model_name")
SCORED_WITH = (
    "clamp_len",
    "ext_len",
    "initial_memory",
    "layer_norm_epsilon",
    "mem_len",
    "mlp_output_relu",
    "n_head",
    "pre_lnorm",
    "same_length",
    "same_length_counts_self",
)
MODEL_CARD = """---
{metadata}
---

# {title}

A Transformer-XL model ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)) with {config.n_layer} layers of width
{config.d_model} over {inputs}, which remembers {config.mem_len} hidden states per layer
(initial memory: {config.initial_memory}).
{origin}
The code is in this repository, so nothing needs to be installed beside `transformers`:

```python
from transformers import {imports}

model = {auto_class}.from_pretrained({name}, trust_remote_code=True)
{tokenizer}```

{memory}\
With the package `txl-hf` installed, `import txl_hf` takes the place of `trust_remote_code=True`. Lengths can be set
when loading: `mem_len=640, clamp_len=400, same_length=True`.
{training}"""
# A card says this because most models that its reader knows remember nothing between calls.
MEMORY = """\
A call returns what it remembers, and the next one goes on from there, so that a text has any length:
`outputs = model(first_ids)`, then `model(next_ids, mems=outputs.mems)`. `generate` does so by itself.

"""
# The last line of a generated card. Its digest tells whether somebody has written in the card since.
SIGNATURE = "<!-- Generated ({digest}); replaced with the model until something is written here. -->\n"


def model_card(
    repo_id: str,
    config: TransfoXLConfig,
    auto_class: str,
    origin: str = "",
    tokenizer: bool = False,
    tags: Iterable[str] = (),
    training: str = "",
    **data,
) -> str:
    """The card of a model: what it is, where it comes from, and how it is loaded.

    Args:
        repo_id (`str`): its name on the Hub, or its folder's. It may hold anything: it is escaped.
        config ([`TransfoXLConfig`]): its configuration.
        auto_class (`str`): the Auto class that loads it.
        origin (`str`, *optional*): Markdown on where the weights come from, for instance with [`plain_markdown`].
        tokenizer (`bool`, defaults to `False`): whether a tokenizer lies beside it.
        tags (`Iterable[str]`, *optional*): tags beside those of the architecture.
        training (`str`, *optional*): lines of Markdown on the training, for the end.
        data: more of `huggingface_hub.ModelCardData`: language, license, datasets, base_model, eval_results, …
    """
    known = {"library_name": "transformers", "pipeline_tag": TASKS.get(auto_class)} | data
    metadata = ModelCardData(tags=list(dict.fromkeys(["transformer-xl", config.model_type, *tags])), **known)
    name = json.dumps(repo_id)
    load_tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)\n"
    return MODEL_CARD.format(
        metadata=metadata.to_yaml(),
        title=plain_markdown(repo_id),
        config=config,
        inputs=f"a vocabulary of {config.vocab_size}" if config.vocab_size else "vectors, without a vocabulary",
        origin=f"\n{origin}\n" if origin else "",
        imports=f"{auto_class}, AutoTokenizer" if tokenizer else auto_class,
        auto_class=auto_class,
        name=name,
        tokenizer=load_tokenizer if tokenizer else "",
        memory=MEMORY if auto_class == "AutoModelForCausalLM" and config.mem_len > 0 else "",
        training=training,
    )


def plain_markdown(text: str) -> str:
    """`text` for a page in Markdown, where it means itself, whatever it holds: no link, no HTML, no other heading."""
    text = " ".join(text.split())
    return "".join(
        letter if letter.isalnum() or letter in " ./-_" else f"&#{ord(letter)};" if letter.isprintable() else "?"
        for letter in text
    )


class Saved(NamedTuple):
    """What a folder holds of a model: digests of its files of weights, what config.json says of `SCORED_WITH`, and the
    metadata of its card."""

    weights: dict[str, str]
    settings: dict[str, Any]
    card: dict[str, Any]


class CardedModel(PreTrainedModel):
    """A model that writes its own card."""

    def write_model_card(self, path: Path, repo_id: str, tags: Iterable[str] = (), **data):
        """Write a card for the Hub: the model's task and size, and the code that loads it.

        Args:
            path: the file.
            repo_id: the name under which the model will be loaded.
            tags: tags beside those of the architecture.
            data: `origin`, `training` and `tokenizer` of [`model_card`], the last by default whether a tokenizer lies
                beside the card or where the model was loaded from; more of `huggingface_hub.ModelCardData`: language,
                license, datasets, base_model, eval_results, …
        """
        beside = [path.parent] + [Path(self.name_or_path)] * bool(self.name_or_path)
        data.setdefault("tokenizer", any((folder / "tokenizer_config.json").exists() for folder in beside))
        card = model_card(repo_id, self.config, type(self)._auto_class or "AutoModel", tags=tags, **data)
        # One that is cut short would pass for somebody's own, and be kept.
        aside = path.with_name(f"_unfinished-{os.getpid()}-{path.name}")
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(card + SIGNATURE.format(digest=_digest(card)))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def began_as(self, folder: Path, repo_id: str) -> dict[str, Any]:
        """For [`write_model_card`] of a model that is not as it was loaded: what its weights began as.

        Args:
            folder: where the card will lie.
            repo_id: the name under which the model will be loaded.

        Returns:
            `base_model`, where that is on the Hub; `origin`, a sentence, where it is in another folder, whose card may
            know a `base_model`. Nothing for a model that was loaded from nowhere, or from where it is written.
        """
        source = Path(self.name_or_path)
        if not self.name_or_path or self.name_or_path == repo_id or folder.resolve() == source.resolve():
            return {}
        if not source.is_dir():
            return {"base_model": self.name_or_path} if is_repo_id(self.name_or_path) else {}
        # The folder's card may name a model that its weights came from; they are others now.
        origin = f"Its weights began as those of {plain_markdown(source.resolve().name)}."
        base_model = _card_data(source / "README.md").get("base_model")
        return {"origin": origin} | ({"base_model": base_model} if base_model else {})

    def _saved_before(self, folder: Path) -> Saved | None:
        """What a folder holds that this model is to be saved in again; None of one that it did not come from, or whose
        card knows nothing of the weights."""
        source = Path(self.name_or_path or folder)
        if not (is_generated(folder / "README.md") and source.is_dir() and folder.samefile(source)):
            return None
        card = _card_data(folder / "README.md")
        if not any(card.get(name) for name in CARRIED if name != "tags"):
            return None
        return Saved({path.name: _digest_of(path) for path in saved_weights(folder)}, _settings(folder), card)

    def _known_of_weights(self, folder: Path, repo_id: str, before: Saved | None) -> dict[str, Any]:
        """What the card in the folder that this model came from knows, its results among it, where the weights that
        now lie in another one, or there again, are the same, byte by byte; what they began as otherwise.

        Args:
            folder, repo_id: see `began_as`.
            before: see `_saved_before`.
        """
        source, weights = Path(self.name_or_path or folder), saved_weights(folder)
        if before is not None:
            same = all(before.weights.get(path.name) == _digest_of(path) for path in weights)
            origin, (_, settings, card) = {}, before
        elif (source / "README.md").is_file() and not folder.samefile(source):
            # Other weights differ in their first bytes, so that few are read.
            same = all(
                (source / path.name).is_file() and filecmp.cmp(source / path.name, path, shallow=False)
                for path in weights
            )
            origin = {"origin": f"Its weights are those of {plain_markdown(source.resolve().name)}."}
            settings, card = _settings(source), _card_data(source / "README.md")
        else:
            same = False
        if not (same and weights):
            return self.began_as(folder, repo_id)
        carried = CARRIED if _settings(folder) == settings else [name for name in CARRIED if name not in RESULTS]
        return origin | {name: card[name] for name in carried if card.get(name)}


def card_on_hub(hub: HfApi, repo_id: str, revision: str | None = None) -> Path | None:
    """A copy of the card that a branch has; None where there is none."""
    if not hub.file_exists(repo_id, "README.md", revision=revision):
        return None
    return Path(hub.hf_hub_download(repo_id, "README.md", revision=revision))


def keep_card(theirs: Path, card: Path, tags: Iterable[str], main: Path | None) -> None:
    """Put the card that somebody has written on a branch into the place of main's, with the tags that this has more
    than it had on main."""
    known = set() if main is None else {*(_card_data(main).get("tags") or [])}
    kept = ModelCard.load(theirs)
    kept.data.tags = [*dict.fromkeys([*(kept.data.tags or []), *(tag for tag in tags if tag not in known)])] or None
    kept.save(card)


def known_on_hub(hub: HfApi, repo_id: str, revision: str | None, theirs: Path, folder: Path) -> dict[str, Any]:
    """What the generated card of a repository knows of what takes its place; its results, where the weights in the
    folder are those on the Hub, byte by byte."""
    card = _card_data(theirs)
    carried = [name for name in CARRIED if name not in RESULTS]
    if card.get("eval_results"):
        weights = saved_weights(folder)
        found = hub.get_paths_info(repo_id, [path.name for path in weights], revision=revision)
        there = {info.path: info.lfs.sha256 for info in found if getattr(info, "lfs", None)}
        same = weights and all(there.get(path.name) == _digest_of(path, "sha256") for path in weights)
        if same and hub.file_exists(repo_id, "config.json", revision=revision):
            config = hub.hf_hub_download(repo_id, "config.json", revision=revision)
            if _settings(Path(config).parent) == _settings(folder):
                carried += RESULTS
    return {name: card[name] for name in carried if card.get(name)}


def saved_weights(folder: Path) -> list[Path]:
    """The files of weights that `save_pretrained` has written to a folder."""
    return sorted(folder.glob("model*.safetensors"))


def _digest_of(file: Path, kind: str = "blake2b") -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, kind).hexdigest()


def _settings(folder: Path) -> dict[str, Any]:
    """What config.json says of `SCORED_WITH`; nothing where it is another program's."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {name: config.get(name) for name in SCORED_WITH}
    except (OSError, ValueError, AttributeError):
        return {}


def _card_data(card: Path) -> dict[str, Any]:
    """The metadata of a card; nothing where there is none of the Hub's, whoever wrote it."""
    try:
        return vars(ModelCard.load(card).data)
    except (OSError, ValueError):
        return {}


def is_repo_id(name: str) -> bool:
    """Whether something on the Hub may have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _digest(card: str) -> str:
    return hashlib.blake2b(card.encode(), digest_size=8).hexdigest()


def is_generated(path: Path) -> bool:
    """Whether a card is as `write_model_card` left it, of whatever model."""
    try:
        *card, signature = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError):
        return False
    return signature == SIGNATURE.format(digest=_digest("".join(card)))
