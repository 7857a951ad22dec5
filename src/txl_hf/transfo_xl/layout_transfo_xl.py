"""How a model lies on disk: tensors in the legacy layout, its code beside them; and how it is read back.

Tensors have the names and shapes of the legacy `transformers` model, so that its checkpoints load as they are, and
what is saved loads there.
"""

import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import HfApi, ModelCard
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import get_relative_import_files

from .card_transfo_xl import CardedModel, Saved, card_on_hub, is_generated, keep_card, known_on_hub
from .configuration_transfo_xl import TransfoXLConfig
from .damaged_transfo_xl import file_problems, packing_problem, weight_files

__all__ = ["CheckpointError", "TransfoXLLayoutModel"]

# How much memory a head that a checkpoint lacks may take, beside twice the size of the checkpoint.
NEW_BYTES = 1 << 30
MOST_NAMES = 16
# A shard's name is that of the single file with its number in it.
SHARD = re.compile(r"(model.*)-\d{5}-of-\d{5}(\.safetensors)")


class _Split(WeightConverter):
    """One tensor on disk, several in memory, each with a storage of its own: safetensors does not load into a model
    whose weights are parts of a larger storage, as accelerate does to resume. Quantizers get them one by one, each in
    a list as from a file: most would keep the first alone.
    """

    def convert(self, layer_name: str, model=None, config=None, hf_quantizer=None, loading_info=None):
        # Joined on the way back, where transformers has an offloaded model's tensors one shard at a time.
        if absent := [name for name in self.source_patterns if name not in self.collected_tensors]:
            raise ValueError(f"{layer_name} cannot be joined without {', '.join(absent)}")
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


# What checkpoints hold besides the weights: the frequencies of the sinusoids, in the original's too, and in those of
# legacy transformers a copy of shared biases in each layer.
COMPUTED = [r"pos_emb\.inv_freq", r"self_attn\.(content|position)_bias"]


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that does not fit the model; `transformers` raises a RuntimeError where shapes differ."""


class TransfoXLLayoutModel(CardedModel):
    """Loading from and saving in the legacy layout."""

    _keys_to_ignore_on_load_unexpected = COMPUTED

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
            where = {key: kwargs[key] for key in ("subfolder", "variant") if key in kwargs}
            problems = file_problems(weight_files(name, **where))
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
        if packed := [f"{file}: {problem}" for file in files if (problem := packing_problem(file)) is not None]:
            raise CheckpointError("; ".join(packed))
        try:
            info, offload = PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, *args, **kwargs
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            if problems := file_problems(files):
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
        with ExitStack() as around:
            around.enter_context(self._without_class_of_shards())
            before = around.enter_context(self._keeping(card)) if is_main_process else None
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if not is_main_process or self._is_adapted():
            # An adapter is saved alone: the card of a whole model would not describe it, and its weights stay.
            return
        _remove_what_was_replaced(card.parent, kwargs.get("variant"))
        _write_code(save_directory)
        if not card.exists() or is_generated(card):
            name = kwargs.get("repo_id") or Path(os.path.abspath(save_directory)).name
            self.write_model_card(card, name, **self._known_of_weights(card.parent, name, before))

    @contextmanager
    def _without_class_of_shards(self) -> Iterator[None]:
        """torch gives a sharded model a class of its own, whose code would be saved in place of ours."""
        present_class = type(self)
        self.__class__ = next(cls for cls in present_class.__mro__ if not cls.__module__.startswith("torch."))
        try:
            yield
        finally:
            self.__class__ = present_class

    @contextmanager
    def _keeping(self, card: Path) -> Iterator[Saved | None]:
        """Keep a card that somebody has written, and what a generated one knows: with `push_to_hub` transformers
        writes one of its own over it."""
        self._own_card = card.read_bytes() if card.is_file() and not is_generated(card) else None
        self._before = self._saved_before(card.parent)
        try:
            yield self._before
        finally:
            if self._own_card is not None and card.read_bytes() != self._own_card:
                card.write_bytes(self._own_card)
            del self._own_card, self._before

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, files_timestamps: Mapping[str, float], **kwargs
    ):
        # `transformers` has put a card there: that of the repository, which is kept where somebody has written in it,
        # or one that does not say how to load the model. It has the tags of the call.
        if self._is_adapted():
            return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
        _write_code(working_dir)
        card, hub = Path(working_dir, "README.md"), HfApi(token=kwargs.get("token"))
        # A pull request is one to main.
        revision = None if kwargs.get("create_pr") else kwargs.get("revision")
        theirs = card_on_hub(hub, repo_id, revision)
        # `save_pretrained` sets these; `push_to_hub` has a folder of its own, without a card.
        own_card = getattr(self, "_own_card", None)
        given = ModelCard.load(card).data.tags or []
        if theirs is not None and not is_generated(theirs):
            if revision is not None:
                # What lies here is the card of main.
                keep_card(theirs, card, given, card_on_hub(hub, repo_id))
        elif own_card is not None:
            card.write_bytes(own_card)
        else:
            known = {} if theirs is None else known_on_hub(hub, repo_id, revision, theirs, card.parent)
            known |= self._known_of_weights(card.parent, repo_id, getattr(self, "_before", None))
            tags = dict.fromkeys([*known.get("tags", []), *given])
            self.write_model_card(card, repo_id, **known | {"tags": [*tags]})
        commit = super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
        revision = commit.pr_revision or kwargs.get("revision")
        files = {path.name: path.stat().st_mtime for path in card.parent.iterdir()}
        for whole in _in_shards(name for name, time in files.items() if time > files_timestamps.get(name, 0)):
            if hub.file_exists(repo_id, whole, revision=revision):
                # It would be loaded instead of the shards.
                hub.delete_file(whole, repo_id, revision=revision)
        return commit

    def _is_adapted(self) -> bool:
        """Whether transformers saves an adapter of the model, that of `add_adapter`, in place of the model."""
        return getattr(self, "_hf_peft_config_loaded", False)


def _remove_what_was_replaced(folder: Path, variant: str | None):
    """Remove the single file of weights beside shards that were written now, which would be loaded instead of them,
    or the list of shards beside a single file: transformers removes shards of an earlier save alone.
    """
    suffix = f".{variant}" if variant else ""
    whole, index = f"model{suffix}.safetensors", f"model.safetensors.index{suffix}.json"
    (folder / (whole if whole in _in_shards(os.listdir(folder)) else index)).unlink(missing_ok=True)


def _in_shards(names: Iterable[str]) -> set[str]:
    """The single files of weights in whose place there are shards among files of these names."""
    return {"".join(match.groups()) for name in names if (match := SHARD.fullmatch(name))}


def _write_code(folder: str | os.PathLike):
    """Copy what `AUTO_MAP` names. Of a class that is derived from ours, transformers copies the derived one's file."""
    modeling = Path(__file__).with_name("modeling_transfo_xl.py")
    for file in (modeling, *map(Path, get_relative_import_files(modeling))):
        shutil.copyfile(file, Path(folder, file.name))


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


def _from_disk_layout(state_dict: Mapping[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """Names in memory for names on disk, without what is `COMPUTED`; what has its name in memory already, one of
    `own`, stays."""
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
        if name not in own and any(re.search(pattern, name) for pattern in COMPUTED):
            continue
        converter = next((c for c in converters if c.source_patterns[0] in name), None)
        if converter is None:
            converted[name] = tensor
            continue
        parts = converter.target_patterns
        for part, chunk in zip(parts, tensor.tensor_split(len(parts)), strict=True):
            converted[name.replace(converter.source_patterns[0], part)] = chunk
    return converted
