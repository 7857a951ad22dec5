"""Checkpoints of the PyTorch original (kimiyoung/transformer-xl, pytorch/): `model.pt`, a pickled module."""

from pathlib import Path

import unpickle
import vocabulary
from layout import Checkpoint, ConversionError, Source, drop_copies, fields_from_shapes, map_names, tying_fields

# Name in the module's state dict (pytorch/mem_transformer.py), tensor of the legacy layout, what changes.
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
MAX_DEPTH = 16  # the original nests six modules; a hostile file may nest a module in itself


def read(checkpoint, corpus=None):
    """Return the `Checkpoint` at `checkpoint`, a model.pt or the folder that holds it.

    `corpus` is the pickled corpus (cache.pt, cache.pkl) or its folder. Raises ConversionError or UnsafePickleError.
    """
    path = find_file(Path(checkpoint), ("model.pt",), EXPECTED)
    model = unpickle.load(path)
    if isinstance(model, dict) and "model_state" in model:
        raise ConversionError(f"{path} is a checkpoint of NVIDIA's (--from nvidia); {EXPECTED}")
    while "module" in _modules(model):  # wrapped for several GPUs or for fp16
        model = _modules(model)["module"]
    if not {"word_emb", "layers"} <= _modules(model).keys():
        raise ConversionError(f"{path} holds {vocabulary.describe(model)}; {EXPECTED}")
    return from_state(
        [Source(name, tensor.shape, tensor.read, tensor.place) for name, tensor in _named_tensors(model)],
        _module_fields(model),
        origin=f"the PyTorch checkpoint `{path.name}` of kimiyoung/transformer-xl",
        symbols=vocabulary.read_corpus(corpus)[0] if corpus is not None else None,
    )


def from_state(sources, fields, origin, symbols=None, table=TABLE):
    """Return the `Checkpoint` of a state dict of this original's layout.

    `sources` is a list of Source, `fields` what its shapes do not say: TransfoXLConfig fields, `cutoffs` among them.
    """
    tensors = map_names(sources, table)
    sizes = fields_from_shapes(tensors)
    for name, value in sizes.items():
        if fields.get(name, value) != value and name not in ("attn_type", "div_val", "max_klen"):
            raise ConversionError(f"the checkpoint says {name} {fields[name]}, its shapes say {value}")
    fields = {"initial_memory": "empty", "same_length_counts_self": True} | sizes | fields
    if "tie_projs" not in fields:
        fields |= tying_fields(tensors, fields)
    drop_copies(tensors, fields)
    explained = dict.fromkeys(("mem_len", "clamp_len", "same_length", "tgt_len"), "as the checkpoint was trained")
    return Checkpoint(fields, tensors, origin, symbols, explained=explained)


def find_file(path, names, expected):
    """Return `path`, or the first of the file `names` in it where it is a folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise ConversionError(f"{path} does not exist; {expected}")
    for name in names:
        if (path / name).is_file():
            return path / name
    content = sorted(entry.name for entry in path.iterdir())
    listed = ", ".join(content[:4]) + (", …" if len(content) > 4 else "")
    raise ConversionError(f"{path} is a folder of {len(content)} files ({listed}); {expected}")


def _modules(module):
    modules = module.attributes.get("_modules") if isinstance(module, unpickle.StandIn) else None
    return modules if isinstance(modules, dict) else {}


def _named_tensors(module, prefix="", depth=0):
    """Yield (name, StoredTensor) as the module's state_dict() would name them."""
    if depth > MAX_DEPTH:
        raise ConversionError(f"the pickled modules are nested more than {MAX_DEPTH} deep")
    for kind in ("_parameters", "_buffers"):
        tensors = module.attributes.get(kind) if isinstance(module, unpickle.StandIn) else None
        for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
            if isinstance(tensor, unpickle.StoredTensor):
                yield f"{prefix}{name}", tensor
    for name, child in _modules(module).items():
        yield from _named_tensors(child, f"{prefix}{name}.", depth + 1)


def _module_fields(model):
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


def _child(module, name):
    if name not in _modules(module):
        raise ConversionError(f"the pickled module has no part {name}; {EXPECTED}")
    return _modules(module)[name]


def _attribute(module, name, kind):
    value = module.attributes.get(name) if isinstance(module, unpickle.StandIn) else None
    if not isinstance(value, kind):
        raise ConversionError(f"the pickled module's attribute {name} is missing or of the wrong kind")
    return value
