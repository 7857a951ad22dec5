"""Checkpoints of NVIDIA's DeepLearningExamples (PyTorch/LanguageModeling/Transformer-XL): `checkpoint_best.pt`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_hf.legacy.unpickle import StandIn

from . import kimiyoung_pytorch, torch_file, vocabulary
from .files import code_span, describe, find_file, state_dict_sources
from .layout import Checkpoint, ConversionError, Family, Source, Vocabulary

# Name in model_state (pytorch/mem_transformer.py, utils/proj_adaptive_softmax.py), legacy tensor, change of the
# tensor. All other names are those of kimiyoung_pytorch.
TABLE = [
    ("crit.out_layers_weights.{i}", "crit.out_layers.{i}.weight", None),
    ("crit.out_layers_biases.{i}", "crit.out_layers.{i}.bias", None),
    ("crit.shared_out_projs.{i}", None, None),  # a second name for word_emb.emb_projs.{i}
    *kimiyoung_pytorch.TABLE,
]
EXPECTED = "expected checkpoint_best.pt or checkpoint_last.pt, a dictionary with model_config and model_state"
# The arguments of the model's class, in model_config, that are fields of TransfoXLConfig, and their types.
_INTEGERS = "n_layer n_head d_model d_head d_inner div_val tgt_len ext_len mem_len attn_type clamp_len"
MODEL_CONFIG = {
    **dict.fromkeys(_INTEGERS.split(), int),
    **dict.fromkeys(("dropout", "dropatt"), float | int),
    **dict.fromkeys(("pre_lnorm", "same_length", "tie_weight"), bool),
    **dict.fromkeys(("cutoffs", "tie_projs"), list),
}


def read(checkpoint: Path, corpus: Path | None = None) -> Checkpoint:
    """Return the `Checkpoint` in NVIDIA's file or its folder. `corpus`, a pickled corpus or its folder, replaces the
    vocabulary that is in it. Raises ConversionError or UnsafePickleError.
    """
    path = find_file(Path(checkpoint), ("checkpoint_best.pt", "checkpoint_last.pt"), EXPECTED)
    saved = torch_file.load(path)
    if not (isinstance(saved, dict) and {"model_config", "model_state"} <= saved.keys()):
        raise ConversionError(f"{path} holds {describe(saved)}; {EXPECTED}")
    if not isinstance(saved["model_config"], dict):
        raise ConversionError(f"{path} has {describe(saved['model_config'])} for model_config; {EXPECTED}")
    fields = _fields(saved["model_config"])
    sources = state_dict_sources(saved["model_state"], f"model_state in {path}")
    if all(source.name.startswith("module.") for source in sources):  # saved while wrapped for several GPUs
        sources = [replace(source, name=source.name.removeprefix("module.")) for source in sources]
    return kimiyoung_pytorch.from_state(
        [_heads_apart(source, fields) for source in sources],
        fields,
        origin=f"the checkpoint {code_span(path.name)} of NVIDIA's DeepLearningExamples, Transformer-XL for PyTorch",
        symbols=_symbols(saved, corpus, path),
        table=TABLE,
    )


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    if isinstance(config.get("sample_softmax"), int) and config["sample_softmax"] > 0:
        raise ConversionError("the model was trained with a sampled softmax, which is not offered")
    fields = {}
    for name, kind in MODEL_CONFIG.items():
        if not isinstance(config.get(name), kind):
            raise ConversionError(f"model_config has no {name}, or one of the wrong kind")
        fields[name] = config[name]
    if not all(type(cutoff) is int for cutoff in fields["cutoffs"]):
        raise ConversionError("model_config has cutoffs that are no list of numbers")
    bins = len(fields["cutoffs"]) + 1
    if len(fields["tie_projs"]) < bins or not all(type(flag) is bool for flag in fields["tie_projs"]):
        raise ConversionError(f"model_config has no tie_projs of {bins} flags")
    fields["tie_projs"] = fields["tie_projs"][:bins]
    fields["tie_word_embeddings"] = fields.pop("tie_weight")
    return fields | {"same_length_counts_self": False}


def _heads_apart(source: Source, fields: dict[str, Any]) -> Source:
    """NVIDIA keeps the learned positions of attn_type 3 as (n_layer, K, D), the layout as (n_layer, K, H, D / H)."""
    if source.name == "r_emb" and len(source.shape) == 3:
        return source.reshaped((*source.shape[:2], fields["n_head"], fields["d_head"]))
    return source


def _symbols(saved: dict[str, Any], corpus: Path | None, path: Path) -> Vocabulary | None:
    arguments = saved.get("args")
    dataset = arguments.attributes.get("dataset") if isinstance(arguments, StandIn) else None
    dataset = dataset if isinstance(dataset, str) else None
    if corpus is not None:
        return vocabulary.read_corpus(corpus, dataset)[0]
    vocab = saved.get("vocab")
    if isinstance(vocab, StandIn) and "idx2sym" in vocab.attributes:
        return vocabulary.from_stand_in(vocab, dataset, path.name)
    return None


FAMILY = Family("nvidia", read)
