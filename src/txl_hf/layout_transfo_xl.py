"""How a model lies on disk: tensors in the legacy layout, its code and its card beside them; and how it is read back.

Tensors have the names and shapes of the legacy `transformers` model, so that its checkpoints load as they are, and
what is saved loads there.
"""

import filecmp
import hashlib
import json
import mmap
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_transfo_xl import TransfoXLConfig
from .unpickle_transfo_xl import (
    Machine,
    Name,
    StandIn,
    UnsafePickleError,
    checksum_differs,
    read_directory,
    shown,
)
from .unpickle_transfo_xl import load as load_pickle

__all__ = ["CheckpointError", "TransfoXLLayoutMixin", "is_repo_id", "model_card", "plain_markdown"]

# How much memory a head that a checkpoint lacks may take, beside twice the size of the checkpoint.
NEW_BYTES = 1 << 30
MOST_NAMES = 16


class _Split(WeightConverter):
    """One tensor on disk, several in memory, each with a storage of its own: safetensors does not load into a model
    whose weights are parts of a larger storage, as accelerate does to resume. Quantizers get them one by one, each in
    a list as from a file: most would keep the first alone.
    """

    def convert(self, layer_name: str, model=None, config=None, hf_quantizer=None, loading_info=None):
        tensors = super().convert(layer_name, model, config, None, loading_info)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if hf_quantizer is None or self.quantization_operation is None:
            return tensors
        missing = loading_info.missing_keys if loading_info else None
        quantized: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            quantized |= self.quantization_operation.convert(
                {name: [tensor]}, full_layer_name=name, model=model, config=config, missing_keys=missing,
                source_patterns=self.source_patterns, target_patterns=self.target_patterns,
            )  # fmt: skip
        return quantized


# Each entry is (on disk, in memory), where modules have the field's names.
register_checkpoint_conversion_mapping(
    TransfoXLConfig.model_type,
    [
        WeightRenaming("crit.", "lm_head."),
        WeightRenaming("word_emb.", "embed_tokens."),
        WeightRenaming(r"emb_projs.(\d+)(?!\.weight)", r"emb_projs.\1.weight"),
        WeightRenaming(r"out_projs.(\d+)(?!\.weight)", r"out_projs.\1.weight"),
        WeightRenaming("cluster_weight", "clusters.weight"),
        WeightRenaming("cluster_bias", "clusters.bias"),
        WeightRenaming("dec_attn.layer_norm", "self_attn_layer_norm"),
        WeightRenaming("dec_attn.r_net", "self_attn.r_proj"),
        WeightRenaming("dec_attn.o_net", "self_attn.o_proj"),
        WeightRenaming("dec_attn.r_w_bias", "self_attn.content_bias"),
        WeightRenaming("dec_attn.r_r_bias", "self_attn.position_bias"),
        # All layers share these. In the checkpoint of a TransfoXLModel their names have no prefix.
        WeightRenaming("(?<!dec_attn.)r_w_bias", "(?<!self_attn.)content_bias"),
        WeightRenaming("(?<!dec_attn.)r_r_bias", "(?<!self_attn.)position_bias"),
        WeightRenaming("pos_ff.CoreNet.0", "mlp.up_proj"),
        WeightRenaming("pos_ff.CoreNet.3", "mlp.down_proj"),
        WeightRenaming("pos_ff.layer_norm", "mlp_layer_norm"),
        # The legacy model has no gates: it would leave them out, with a warning.
        WeightRenaming("dec_attn.gate", "self_attn_gate"),
        WeightRenaming("pos_ff.gate", "mlp_gate"),
        # The PyTorch original has q_net and kv_net where positions are absolute. These are read but never written: on
        # the way back the pattern (?!) matches nothing.
        WeightRenaming("dec_attn.q_net", "self_attn.q_proj(?!)"),
        _Split(
            "dec_attn.kv_net.weight",
            ["self_attn.k_proj.weight(?!)", "self_attn.v_proj.weight(?!)"],
            operations=[Chunk(dim=0)],
        ),
        _Split(
            "dec_attn.qkv_net.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            operations=[Chunk(dim=0)],
        ),
    ],
    overwrite=True,
)

AUTO_MAP = {
    "AutoConfig": "configuration_transfo_xl.TransfoXLConfig",
    "AutoModel": "modeling_transfo_xl.TransfoXLModel",
    "AutoModelForCausalLM": "modeling_transfo_xl.TransfoXLForCausalLM",
    "AutoModelForSequenceClassification": "modeling_transfo_xl.TransfoXLForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_transfo_xl.TransfoXLForTokenClassification",
}
# The task under which the Hub lists a model. It cannot tell the task from code that comes with the model.
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
# These fields of a card describe the weights, wherever they lie, so that a copy of the weights takes them along.
CARRIED = ("base_model", "datasets", "eval_results", "language", "license", "model_name", "tags")
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


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that does not fit the model; `transformers` raises a RuntimeError where shapes differ."""


class TransfoXLLayoutMixin(PreTrainedModel):
    """Loading from and saving in the legacy layout."""

    # The original keeps the frequencies of the sinusoids in its checkpoints, and legacy transformers a copy of shared
    # biases in each layer.
    _keys_to_ignore_on_load_unexpected = [r"pos_emb\.inv_freq", r"self_attn\.(content|position)_bias"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """As in `transformers`, but a checkpoint that lacks a tensor of the model is an error.

        A head that the checkpoint lacks as a whole is new and is initialised, as usual, unless `config.architectures`
        says that it was saved with one. With `output_loading_info` the missing tensors are listed there and are no
        error, nor are they where there is no checkpoint at all (`state_dict={}`).

        Raises:
            CheckpointError: tensors are missing or have another shape, or a file is damaged, packed or holds more than
                tensors; the message names them. Nothing in a file is ever run.
        """
        name = pretrained_model_name_or_path
        try:
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except (CheckpointError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if type(error) is ValueError:
                # An argument is wrong. One damaged file in a thousand raises this too, and keeps torch's message.
                raise
            # Files are also opened before `_load_pretrained_model`, to see their dtype.
            problems = _file_problems(_weight_files(name, kwargs.get("subfolder", "")))
            if not problems and isinstance(error, SafetensorError | UnpicklingError):  # of a file in the Hub's cache
                problems = [f"{name}: its weights are truncated or damaged: download them again"]
            if not problems:
                raise
            raise CheckpointError("; ".join(problems)) from None  # torch would advise to load it unsafely
        missing = set(info["missing_keys"])
        saved_as = set(model.config.architectures or ())
        for head, alias in (("lm_head", "TransfoXLLMHeadModel"), ("score", None)):
            # A checkpoint that was saved with this head has lost what is missing; others never had it.
            if hasattr(model, head) and not saved_as & {type(model).__name__, alias}:
                names = {f"{head}.{name}" for name, _ in getattr(model, head).named_parameters()}
                names -= set(model.all_tied_weights_keys)
                missing -= names if names <= missing else set()
        if missing and not output_loading_info and (name is not None or kwargs.get("state_dict")):
            source = "state_dict" if name is None else f"checkpoint {name}"
            raise CheckpointError(f"the {source} lacks {_listed(missing)}")
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """As in `transformers`, which knows here which files it reads, be they in a folder or in the Hub's cache."""
        files = list(checkpoint_files or ()) if state_dict is None else []
        if packed := [f"{file}: {problem}" for file in files if (problem := _packing_problem(file)) is not None]:
            raise CheckpointError("; ".join(packed))
        try:
            info, offload = PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, *args, **kwargs
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            if problems := _file_problems(files):
                raise CheckpointError("; ".join(problems)) from None
            raise
        if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            shapes = [f"{key} is {tuple(found)}, not {tuple(right)}" for key, found, right in info.mismatched_keys]
            where = load_config.pretrained_model_name_or_path
            raise CheckpointError(f"the checkpoint {where} does not fit the model: {_listed(shapes, '; ')}")
        # A tied tensor of another shape counts as missing, so that it is tied, not compared with what it is tied to.
        tied = set(model.all_tied_weights_keys)
        info.missing_keys |= {key for key, *_ in info.mismatched_keys if key in tied}
        if files:
            _check_room(model, info.missing_keys - tied, files, load_config.pretrained_model_name_or_path)
        return info, offload

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs):
        """As in torch; the names and joined tensors of a file that `save_pretrained` wrote are understood too.

        `Trainer` hands such files over as they are when it resumes or loads its best model.
        """
        return super().load_state_dict(_from_disk_layout(state_dict, self.state_dict().keys()), *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs):
        """As in `transformers`: weights, configuration, and what loads them where this package is not installed: the
        code, and an `auto_map` for all heads. Tensors have their legacy names, or those in memory where
        `quantization_config` has quantised them. A model card is written unless there is one that somebody has written
        in: one that was generated, of this or another model, is generated anew.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file: name a folder")
        self.config.auto_map = dict(AUTO_MAP)
        # The configuration says what loading ties, and may have changed since the model was made.
        tied = self.get_expanded_tied_weights_keys()
        untied = (self._tied_weights_keys or {}).keys() - tied.keys()
        if untied and kwargs.get("state_dict") is None:
            kwargs["state_dict"] = self.state_dict()
        if kwargs.get("state_dict") is not None:
            # transformers leaves out tensors that share memory. Tied ones that were gathered from shards share none.
            kwargs["state_dict"] = _without_copies(kwargs["state_dict"], tied, untied)
        if getattr(self, "hf_quantizer", None) is not None:
            # Quantised matrices have scales and more beside them, which joining q, k and v would leave behind.
            kwargs["save_original_format"] = False
        card = Path(save_directory, "README.md")
        # With `push_to_hub` transformers overwrites a card that somebody has written with one of its own.
        pushes = kwargs.get("push_to_hub") and is_main_process
        self._own_card = card.read_bytes() if pushes and card.is_file() and not _is_generated(card) else None
        variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
        whole = Path(save_directory, f"model{variant}.safetensors")
        index = Path(save_directory, f"model.safetensors.index{variant}.json")
        before = whole.stat().st_mtime_ns if whole.exists() else None
        present_class = type(self)
        # torch gives a sharded model a class of its own, whose code would be saved in place of ours.
        self.__class__ = next(cls for cls in present_class.__mro__ if not cls.__module__.startswith("torch."))
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = present_class
            if self._own_card is not None:
                card.write_bytes(self._own_card)
            del self._own_card
        is_old = before is not None and whole.exists() and whole.stat().st_mtime_ns == before
        if is_main_process and is_old and index.exists():
            # The single file is of an earlier model, and would be loaded instead of the shards just written.
            whole.unlink()
        if self._is_adapted():
            # transformers has saved the adapter alone, which the card of a whole model would not describe.
            return
        if is_main_process:
            _write_code(save_directory)
        if is_main_process and (not card.exists() or _is_generated(card)):
            name = kwargs.get("repo_id") or Path(save_directory).name
            self.write_model_card(card, name, **self._known_of_weights(card.parent, name))

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args, **kwargs):
        # `transformers` has put a card there: that of the repository, which is kept where somebody has written in it,
        # or one that does not say how to load the model. It has the tags of the call.
        if self._is_adapted():
            return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)
        _write_code(working_dir)
        card, token = Path(working_dir, "README.md"), kwargs.get("token")
        on_hub = HfApi(token=token).file_exists(repo_id, "README.md")
        # `save_pretrained` sets it where it pushes; `push_to_hub` has a folder of its own, without a card.
        own_card = getattr(self, "_own_card", None)
        if own_card is not None and (not on_hub or _is_generated(card)):
            card.write_bytes(own_card)
        elif not on_hub or _is_generated(card):
            known = self._known_of_weights(card.parent, repo_id)
            given = ModelCard.load(card).data.tags or []
            self.write_model_card(card, repo_id, **known | {"tags": [*known.get("tags", []), *given]})
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _is_adapted(self) -> bool:
        """Whether transformers saves an adapter of the model, that of `add_adapter`, in place of the model."""
        return getattr(self, "_hf_peft_config_loaded", False)

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
        path.write_text(card + SIGNATURE.format(digest=_digest(card)), encoding="utf-8")

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

    def _known_of_weights(self, folder: Path, repo_id: str) -> dict[str, Any]:
        """What the card in the folder that this model came from knows, its results among it, where the weights that
        now lie in another one are the same, byte by byte; what they began as otherwise.
        """
        source = Path(self.name_or_path or folder)
        weights = sorted(path.name for path in folder.glob("model*.safetensors"))
        same = (source / "README.md").is_file() and not folder.samefile(source) and weights
        if not same or not all((source / name).is_file() for name in weights):
            return self.began_as(folder, repo_id)
        if not all(filecmp.cmp(source / name, folder / name, shallow=False) for name in weights):
            return self.began_as(folder, repo_id)
        data = _card_data(source / "README.md")
        origin = f"Its weights are those of {plain_markdown(source.resolve().name)}."
        return {"origin": origin} | {name: data[name] for name in CARRIED if data.get(name)}


def _write_code(folder: str | os.PathLike):
    """Copy what `AUTO_MAP` names. Of a class that is derived from ours, transformers copies the derived one's file."""
    modeling = Path(__file__).with_name("modeling_transfo_xl.py")
    for file in (modeling, *map(Path, get_relative_import_files(modeling))):
        shutil.copyfile(file, Path(folder, file.name))


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


def _without_copies(
    state_dict: Mapping[str, Tensor], tied: Mapping[str, str], untied: Iterable[str]
) -> dict[str, Tensor]:
    """All of a state dict but the tensors that equal what they are tied to; `tied` has the names of both.

    One of a head that PEFT has trained in full and merged, or that somebody has untied, has such a name and does not.
    Those in `untied` get a memory of their own.
    """
    kept = dict(state_dict)
    kept |= {name: kept[name].clone() for name in untied if name in kept and not kept[name].is_meta}
    for name, source in tied.items():
        tensor, other = state_dict.get(name), state_dict.get(source)
        # Offloaded tensors are not here to be compared; transformers knows which of them are tied.
        if tensor is None or other is None or tensor.is_meta or other.is_meta:
            continue
        if tensor.dtype == other.dtype and torch.equal(tensor, other.to(tensor.device)):
            del kept[name]
    return kept


def _check_room(model: PreTrainedModel, missing: Iterable[str], files: Iterable[str], name: str):
    """Raise a CheckpointError where a configuration of a few bytes claims a model that the files do not hold.

    What is missing is made anew before anyone is told of it: a head should be, a thousand layers should not.
    """
    absent = {key: model.get_parameter_or_buffer(key) for key in missing}
    size = sum(tensor.nbytes for tensor in absent.values())
    if size > 2 * sum(os.path.getsize(file) for file in files) + NEW_BYTES:
        raise CheckpointError(
            f"the checkpoint {name} lacks {_listed(absent)}, {size / 1e9:.0f} GB in all: its config.json is that of "
            "another model"
        )


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    """The first names in order, and how many there are besides."""
    names = sorted(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return separator.join(names[:MOST_NAMES]) + more


def _digest(card: str) -> str:
    return hashlib.blake2b(card.encode(), digest_size=8).hexdigest()


def _is_generated(path: Path) -> bool:
    """Whether a card is as `write_model_card` left it, of whatever model."""
    try:
        *card, signature = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError):
        return False
    return signature == SIGNATURE.format(digest=_digest("".join(card)))


def _from_disk_layout(state_dict: Mapping[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """Names in memory for names on disk; what has its name in memory already, one of `own`, stays."""
    mapping = get_checkpoint_conversion_mapping(TransfoXLConfig.model_type)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    converted = {}
    for name, tensor in state_dict.items():
        if name in own:
            # A subclass may have names in memory of which a part reads like a name on disk.
            converted[name] = tensor
            continue
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        converter = next((c for c in converters if c.source_patterns[0] in name), None)
        if converter is None:
            converted[name] = tensor
            continue
        parts = converter.target_patterns
        for part, chunk in zip(parts, tensor.tensor_split(len(parts)), strict=True):
            converted[name.replace(converter.source_patterns[0], part)] = chunk
    return converted


# ---- files that cannot be read ----


class _Listing(Machine):
    """Runs the pickle of a checkpoint for its errors alone; its tensors become stand-ins."""

    def refer(self, identity: object) -> StandIn:
        return StandIn(Name("torch", "Storage"))


def _weight_files(name: str | os.PathLike | None, subfolder: str) -> list[str]:
    if name is None or not os.path.isdir(name):
        return []
    folder = Path(name, subfolder)
    patterns = ("pytorch_model*.bin", "*.safetensors", "*.index*.json")
    return sorted(str(path) for pattern in patterns for path in folder.glob(pattern))


def _file_problems(files: Iterable[str]) -> list[str]:
    """What is wrong with files of weights, one sentence each that begins with the file."""
    return [f"{file}: {problem}" for file in files if (problem := _file_problem(file)) is not None]


def _file_problem(file: str) -> str | None:
    if not Path(file).exists():
        # transformers names a file that it looked for in vain.
        return None
    if file.endswith(".json"):
        return _index_problem(file)
    if file.endswith(".safetensors"):
        try:
            with safe_open(file, "pt"):
                return None
        except (SafetensorError, OSError) as error:
            return f"truncated or damaged ({error}): copy or download it again"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        try:
            load_pickle(file, _Listing())
        except UnsafePickleError as problem:
            reason = str(problem).removeprefix(f"{Path(file).name}: ").removeprefix(f"{Path(file).name} ")
        except OSError as problem:
            reason = str(problem)
        else:
            reason = f"torch raises {type(error).__name__}"
        return f"truncated or damaged, or no checkpoint: {reason}"
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        return "no checkpoint, which is a dictionary of tensors"
    return None


def _index_problem(file: str) -> str | None:
    """What is wrong with the list of weights in several files."""
    try:
        index = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"truncated or damaged ({error}): copy or download it again"
    parts = [index.get(name) for name in ("metadata", "weight_map")] if isinstance(index, dict) else []
    if not all(isinstance(part, dict) for part in parts) or not parts:
        return "no index of weights, which is a JSON object with the objects metadata and weight_map"
    return None


def _packing_problem(file: str) -> str | None:
    """What is wrong with an archive that torch would map all the same, and load as weights whatever is there."""
    try:
        if file.endswith(".safetensors") or not zipfile.is_zipfile(file):
            return None
    except zipfile.BadZipFile as error:  # from the question itself, which loading would ask again
        return f"truncated or damaged ({error}): copy or download it again"
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            records = read_directory(Path(file), data)
        except UnsafePickleError as error:
            return f"{error}; unpack it and write it with torch.save"
        except (zipfile.BadZipFile, ValueError, struct.error):
            return None  # loading the file will say what is wrong
        with memoryview(data) as content:
            for record in records.values():
                with content[record.begin : record.begin + record.length] as part:
                    if checksum_differs(zlib.crc32(part), record.checksum):
                        return (
                            f"damaged: the checksum of record {shown(record.name)} does not match; download it again"
                        )
    return None
