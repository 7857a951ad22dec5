"""Loading and saving: tensors with names and shapes of the legacy `transformers` model, and the code beside them."""

import os
import re
import shutil
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_transfo_xl import TransfoXLConfig


class _Split(WeightConverter):
    """One tensor on disk, several in memory, each with a storage of its own, because safetensors (accelerate) does not
    load into parts of a larger storage. Quantizers get them one by one, because most would keep the first alone."""

    def convert(self, layer_name: str, model=None, config=None, hf_quantizer=None, loading_info=None):
        # A part may be absent when saving joins them, because an offloaded model's tensors come one shard at a time.
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


# Each entry is (name on disk, name in memory); names in memory are those usual for modules.
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
        # Biases that all layers share. In the checkpoint of a TransfoXLModel their names have no prefix.
        WeightRenaming("(?<!dec_attn.)r_w_bias", "(?<!self_attn.)content_bias"),
        WeightRenaming("(?<!dec_attn.)r_r_bias", "(?<!self_attn.)position_bias"),
        WeightRenaming("pos_ff.CoreNet.0", "mlp.up_proj"),
        WeightRenaming("pos_ff.CoreNet.3", "mlp.down_proj"),
        WeightRenaming("pos_ff.layer_norm", "mlp_layer_norm"),
        # Gates, which the legacy model lacks.
        WeightRenaming("dec_attn.gate", "self_attn_gate"),
        WeightRenaming("pos_ff.gate", "mlp_gate"),
        # Names of the PyTorch original where positions are absolute; never written, because (?!) matches nothing.
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
# Tensors in checkpoints that are no weights here: frequencies of the sinusoids, and legacy copies of shared biases.
NOT_WEIGHTS = [r"pos_emb\.inv_freq", r"self_attn\.(content|position)_bias"]
# Tensors that a checkpoint has to have, in a model without a head and in one with it.
_OF_LAYER = r"(self_attn\.([qkvor]_proj|\w+_bias)|mlp\.(up|down)_proj|(self_attn|mlp)_(layer_norm|gate))"
_OWN = rf"(embed_tokens|embed_vectors|layers\.\d+\.{_OF_LAYER}|content_bias|position_bias|r_emb|r_bias)\b"
NEEDED_WITHOUT_HEAD = re.compile(_OWN)
NEEDED = re.compile(rf"transformer\.{_OWN}|lm_head\.(out_layers|out_projs|clusters)\.")
LANGUAGE_MODELS = {"TransfoXLForCausalLM", "TransfoXLLMHeadModel"}
MEND = "; ignore_mismatched_sizes=True makes these anew, for a model that is then trained"


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that does not fit the model; `transformers` raises a RuntimeError where shapes differ."""


class TransfoXLLayoutModel(PreTrainedModel):
    """Loading from and saving in the legacy layout."""

    _keys_to_ignore_on_load_unexpected = NOT_WEIGHTS

    def __init__(self, config: TransfoXLConfig, *args, **kwargs):
        # transformers finds the layout by `model_type`: a file's may differ, and a derived class's has none yet.
        config.model_type = own = type(config).model_type
        if get_checkpoint_conversion_mapping(own) is None:
            layout = get_checkpoint_conversion_mapping(TransfoXLConfig.model_type)
            register_checkpoint_conversion_mapping(own, layout)
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        output_loading_info=False,
        ignore_mismatched_sizes=False,
        **kwargs,
    ):
        """As in `transformers`, except that a checkpoint that lacks a tensor of the model is an error.

        Initialised are a classifier's matrix, modules of a derived class, and the softmax where the checkpoint was not
        saved with one. `ignore_mismatched_sizes=True` initialises all tensors that are missing or have another shape;
        `output_loading_info=True` lists missing ones.

        Raises:
            CheckpointError: tensors are missing or have another shape, and the message names them; or a file is
                damaged or holds more than tensors, none of which is ever run.
        """
        name = pretrained_model_name_or_path
        try:
            model, info = super().from_pretrained(
                name, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except (SafetensorError, UnpicklingError, EOFError):
            # Not torch's message, because that advises to load the file unsafely.
            raise CheckpointError(f"{name}: its weights are damaged or no tensors: download them again") from None
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            shapes = [f"{key} is {tuple(found)}, not {tuple(right)}" for key, found, right in info["mismatched_keys"]]
            raise CheckpointError(f"the checkpoint {name} does not fit the model: {_listed(shapes, '; ')}{MEND}")
        needed = NEEDED_WITHOUT_HEAD if model.base_model is model else NEEDED
        missing = {key for key in info["missing_keys"] if needed.match(key)}
        if not LANGUAGE_MODELS & {*(model.config.architectures or ())}:
            softmax = {key for key, _ in model.named_parameters() if key.startswith("lm_head.")}
            missing -= softmax if softmax - model.all_tied_weights_keys.keys() <= missing else set()
        has_checkpoint = name is not None or kwargs.get("state_dict")
        if missing and has_checkpoint and not (output_loading_info or ignore_mismatched_sizes):
            source = "state_dict" if name is None else f"checkpoint {name}"
            raise CheckpointError(f"the {source} lacks {_listed(missing)}{MEND}")
        return (model, info) if output_loading_info else model

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True):
        """As in `transformers`; a tied tensor of another shape on disk, which is left empty, counts as missing."""
        if missing_keys is not None:
            for target, source in self.all_tied_weights_keys.items():
                if self.get_parameter(target).is_meta and not self.get_parameter(source).is_meta:
                    missing_keys.add(target)
        super().tie_weights(missing_keys, recompute_mapping)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs):
        """As in torch; also names and joined tensors of a saved file, which `Trainer` passes when it resumes."""
        return super().load_state_dict(_from_disk_layout(state_dict, self.state_dict().keys()), *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs):
        """As in `transformers`, with the code and an `auto_map` for loading without this package. Tensors have their
        legacy names, or those in memory where they are quantised.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file: name a folder")
        self.config.auto_map = dict(AUTO_MAP)
        # Ties by the configuration, as loading reads it, because PEFT may have changed it: a tensor that is no longer
        # tied to another, but shares its memory, would be left out.
        tied = self.get_expanded_tied_weights_keys()
        if (state := kwargs.get("state_dict")) is not None:
            # Copies are found by value, because tensors gathered from shards share no memory. A tensor trained under a
            # tied name (PEFT) differs; an offloaded one has no values.
            kwargs["state_dict"] = {
                name: tensor
                for name, tensor in state.items()
                if name not in tied or tensor.is_meta or not torch.equal(tensor, state.get(tied[name], tensor[:0]))
            }
        if untied := (self._tied_weights_keys or {}).keys() - tied.keys():
            state = dict(kwargs.get("state_dict") or self.state_dict())
            kwargs["state_dict"] = state | {name: state[name].clone() for name in untied & state.keys()}
        if getattr(self, "hf_quantizer", None) is not None:
            # q, k and v are not joined, because that would drop the scales and other tensors of quantised matrices.
            kwargs["save_original_format"] = False
        present_class = type(self)
        # The class is restored meanwhile, because torch gives sharded models another one, whose code would be saved.
        self.__class__ = next(cls for cls in present_class.__mro__ if not cls.__module__.startswith("torch."))
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = present_class
        if is_main_process and not getattr(self, "_hf_peft_config_loaded", False):
            _remove_replaced_weights(Path(save_directory), kwargs.get("variant"))
            _write_code(save_directory)


def _remove_replaced_weights(folder: Path, variant: str | None):
    """Remove an old file beside new shards, or an old index beside a new file, because it would be loaded instead."""
    suffix = f".{variant}" if variant else ""
    in_shards = any(folder.glob(f"model{suffix}-?????-of-?????.safetensors"))
    replaced = f"model{suffix}.safetensors" if in_shards else f"model.safetensors.index{suffix}.json"
    (folder / replaced).unlink(missing_ok=True)


def _write_code(folder: str | os.PathLike):
    """Copy the files of `AUTO_MAP`, because transformers copies a derived class's file alone."""
    modeling = Path(__file__).with_name("modeling_transfo_xl.py")
    for file in (modeling, *map(Path, get_relative_import_files(modeling))):
        shutil.copyfile(file, Path(folder, file.name))


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    """The first 16 names in order, and the number of the others."""
    names = sorted(names)
    return separator.join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


def _from_disk_layout(state_dict: Mapping[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """`state_dict` with names in memory for names on disk, without `NOT_WEIGHTS`; names in `own` stay."""
    mapping = get_checkpoint_conversion_mapping(TransfoXLConfig.model_type)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    converted: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        # Own names stay, because a name in memory of a subclass may contain a name on disk.
        for renaming in () if name in own else renamings:
            name, _ = renaming.rename_source_key(name)
        joined = next((c for c in converters if name not in own and c.source_patterns[0] in name), None)
        if joined is not None:
            parts = [name.replace(joined.source_patterns[0], part) for part in joined.target_patterns]
            converted |= zip(parts, tensor.tensor_split(len(parts)), strict=True)
        elif name in own or not any(re.search(pattern, name) for pattern in NOT_WEIGHTS):
            converted[name] = tensor
    return converted
