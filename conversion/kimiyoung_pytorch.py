"""Checkpoints of the PyTorch original (kimiyoung/transformer-xl, pytorch/): `model.pt`, a pickled module."""

from pathlib import Path
from typing import Any

from txl_hf.legacy.unpickle import StandIn

from . import torch_file, vocabulary
from .files import code_span, describe, find_file, state_dict_sources
from .layout import (
    Checkpoint,
    ConversionError,
    Family,
    Source,
    Vocabulary,
    drop_copies,
    fields_from_shapes,
    map_names,
    tying_fields,
)

# Name in the module's state dict (pytorch/mem_transformer.py), tensor of the legacy layout, change of the tensor.
TABLE = [
    ("pos_emb.inv_freq", None, None),
    ("crit.cluster_weight", "crit.cluster_weight", Source.flipped),
    ("crit.cluster_bias", "crit.cluster_bias", Source.flipped),
    ("crit.out_layers.{i}.weight", "crit.out_layers.{i}.weight", None),
    ("crit.out_layers.{i}.bias", "crit.out_layers.{i}.bias", None),
    ("crit.out_projs.{i}", "crit.out_projs.{i}", None),
    ("word_emb.emb_layers.{i}.weight", "transformer.word_emb.emb_layers.{i}.weight", None),
    ("word_emb.emb_projs.{i}", "transformer.word_emb.emb_projs.{i}", None),
    ("r_w_bias", "transformer.r_w_bias", None),
    ("r_r_bias", "transformer.r_r_bias", None),
    ("r_emb", "transformer.r_emb", None),
    ("r_bias", "transformer.r_bias", None),
    ("layers.{l}.dec_attn.{name}", "transformer.layers.{l}.dec_attn.{name}", None),
    ("layers.{l}.pos_ff.{name}", "transformer.layers.{l}.pos_ff.{name}", None),
]
EXPECTED = "expected model.pt, the module pickled by the original's train.py"
# Settings that the checkpoint holds.
TRAINED = ("mem_len", "clamp_len", "same_length", "tgt_len")
MAX_MODULES, MAX_NAME = 10_000, 200  # the largest published model has 500 parts, in names of 40 characters


def read(checkpoint: Path, corpus: Path | None = None) -> Checkpoint:
    """Return the `Checkpoint` in a model.pt or its folder, or of a pickled corpus alone. `corpus` is a pickled corpus,
    cache.pt or cache.pkl, or its folder. Raises ConversionError or UnsafePickleError.
    """
    path = find_file(Path(checkpoint), ("model.pt", "cache.pt", "cache.pkl"), EXPECTED)
    model = torch_file.load(path)
    if isinstance(model, StandIn) and "vocab" in model.attributes:
        symbols, _ = vocabulary.read_corpus(path)
        return Checkpoint({}, {}, origin=f"the corpus {code_span(path.name)}", vocabulary=symbols)
    if isinstance(model, dict) and "model_state" in model:
        raise ConversionError(f"{path} is a checkpoint of NVIDIA's (--from nvidia); {EXPECTED}")
    for _ in range(2):  # wrapped for several GPUs, for fp16, or for both
        model = _modules(model).get("module", model)
    if not {"word_emb", "layers"} <= _modules(model).keys():
        raise ConversionError(f"{path} holds {describe(model)}; {EXPECTED}")
    return from_state(
        state_dict_sources(_named_tensors(model), path),
        _module_fields(model),
        origin=f"the PyTorch checkpoint {code_span(path.name)} of kimiyoung/transformer-xl",
        symbols=vocabulary.read_corpus(corpus)[0] if corpus is not None else None,
    )


def from_state(
    sources: list[Source],
    fields: dict[str, Any],
    origin: str,
    symbols: Vocabulary | None = None,
    table: list[tuple] = TABLE,
) -> Checkpoint:
    """Return the `Checkpoint` of a state dict of this original's layout. `fields` are those that shapes do not decide,
    `cutoffs` among them.
    """
    tensors = map_names(sources, table)
    sizes = fields_from_shapes(tensors)
    for name, value in sizes.items():
        # `div_val` is not compared, because one table without cutoffs has the same shape for any.
        if fields.get(name, value) != value and name != "div_val":
            raise ConversionError(f"the checkpoint says {name} {fields[name]}, its shapes say {value}")
    fields = {"initial_memory": "empty", "same_length_counts_self": True} | sizes | fields
    if "tie_projs" not in fields:
        fields |= tying_fields(tensors, fields)
    drop_copies(tensors, fields)
    explained = dict.fromkeys(TRAINED, "as the checkpoint was trained")
    return Checkpoint(fields, tensors, origin, symbols, explained=explained)


def _modules(module: object) -> dict[str, Any]:
    modules = module.attributes.get("_modules") if isinstance(module, StandIn) else None
    return modules if isinstance(modules, dict) else {}


def _named_tensors(model: StandIn) -> dict[str, torch_file.StoredTensor]:
    """Return {name: StoredTensor} as the module's state_dict() would have it."""
    tensors: dict[str, torch_file.StoredTensor] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    seen = 0
    while pending:
        prefix, module = pending.pop()
        seen += 1
        for kind in ("_parameters", "_buffers"):
            owned = module.attributes.get(kind) if isinstance(module, StandIn) else None
            for name, tensor in owned.items() if isinstance(owned, dict) else ():
                if isinstance(tensor, torch_file.StoredTensor):
                    tensors[f"{prefix}{name}"] = tensor
        # A hostile file may nest a module in itself, or list one a million times.
        if seen + len(pending) + len(_modules(module)) > MAX_MODULES or len(prefix) > MAX_NAME:
            raise ConversionError(f"the pickled module has more than {MAX_MODULES} parts")
        pending += [(f"{prefix}{name}.", child) for name, child in _modules(module).items()]
    return tensors


def _module_fields(model: StandIn) -> dict[str, Any]:
    word_emb, layer = _child(model, "word_emb"), _child(_child(model, "layers"), "0")
    attention = _child(layer, "dec_attn")
    norm = _child(attention, "layer_norm")
    cutoffs = _attribute(word_emb, "cutoffs", list)
    if not cutoffs or not all(type(cutoff) is int for cutoff in cutoffs):
        raise ConversionError("the pickled module has cutoffs that are no list of numbers")
    fields = {name: _attribute(model, name, int) for name in ("n_head", "d_head", "n_layer", "d_embed", "attn_type")}
    fields |= {name: _attribute(model, name, int) for name in ("tgt_len", "ext_len", "mem_len", "clamp_len")}
    if _attribute(model, "sample_softmax", int) > 0:
        raise ConversionError("the model was trained with a sampled softmax, which is not offered")
    return fields | {
        "cutoffs": cutoffs[:-1],  # the module appends the vocabulary's size
        "div_val": _attribute(word_emb, "div_val", int),
        "same_length": _attribute(model, "same_length", bool),
        "pre_lnorm": bool(_attribute(attention, "pre_lnorm", bool | None)),
        "dropout": float(_attribute(_child(model, "drop"), "p", int | float)),
        "dropatt": float(_attribute(_child(attention, "dropatt"), "p", int | float)),
        "layer_norm_epsilon": float(_attribute(norm, "eps", int | float)),
    }


def _child(module: object, name: str) -> Any:
    if name not in _modules(module):
        raise ConversionError(f"the pickled module has no part {name}; {EXPECTED}")
    return _modules(module)[name]


def _attribute(module: object, name: str, kind: Any) -> Any:
    value = module.attributes.get(name) if isinstance(module, StandIn) else None
    if not isinstance(value, kind):
        raise ConversionError(f"the pickled module's attribute {name} is missing or of the wrong kind")
    return value


FAMILY = Family("kimiyoung-pytorch", read)
