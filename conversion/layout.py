"""The layout every family is converted to, the state dict of the legacy `transformers` model; and what the families
share: names by a table, sizes from shapes, and the second copies that tied weights have in state dicts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from txl_hf import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)

Shapes: TypeAlias = dict[str, tuple[int, ...]]

# The model's class by the part above the layers: the language model's softmax, a classifier's matrix, or nothing.
MODELS: dict[str, type[TransfoXLPreTrainedModel]] = {
    "softmax": TransfoXLForCausalLM,
    "classifier": TransfoXLForSequenceClassification,
    "none": TransfoXLModel,
}


class ConversionError(Exception):
    """The checkpoint cannot be converted; the message is one line that says what was found and what was expected."""


@dataclass(frozen=True)
class Source:
    """One tensor of an original checkpoint: `read` fetches it, `name` is its name in the original.

    Sources with the same `place`, unless that is None, are the same memory.
    """

    name: str
    shape: tuple
    read: Callable[[], torch.Tensor]
    place: object = None

    def transposed(self) -> "Source":
        """The transpose, because TensorFlow's matrices are (in, out), torch's (out, in)."""
        return Source(self.name, self.shape[::-1], lambda: self.read().t().contiguous())

    def flipped(self) -> "Source":
        """Tail clusters in reverse, because the PyTorch originals number them from the last to the first (quirk 3)."""
        return Source(self.name, self.shape, lambda: self.read().flip(0))

    def layer(self, index: int) -> "Source":
        """The part of one layer, because TensorFlow stacks the layers: (n_layer, …) -> (…)."""
        return Source(self.name, self.shape[1:], lambda: self.read()[index].clone())

    def reshaped(self, shape: tuple) -> "Source":
        return Source(self.name, shape, lambda: self.read().reshape(shape))


@dataclass(frozen=True)
class Vocabulary:
    """`symbols[i]` is the symbol with id i; `mode` is how TransfoXLTokenizer splits text into them."""

    symbols: list
    mode: str
    lower_case: bool

    @property
    def eos_token(self) -> str | None:
        return next((symbol for symbol in ("<eos>", "<S>") if symbol in self.symbols), None)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.symbols.index(self.eos_token)


@dataclass
class Checkpoint:
    """The content of a checkpoint, from a family's reader.

    `fields` are arguments of TransfoXLConfig; `explained` says for some of them where the value comes from; `tensors`
    maps names of the legacy layout to `Source`, and is empty for a vocabulary alone; `origin` completes the model
    card's "The weights are those of"; `tokenizer` is a folder that TransfoXLTokenizer loads; `head`, one of `MODELS`.
    """

    fields: dict
    tensors: dict
    origin: str
    vocabulary: Vocabulary | None = None
    tokenizer: Path | None = None
    head: str = "softmax"
    generation: GenerationConfig | None = None
    explained: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint: its name for `--from`, and `read(checkpoint, corpus)`, which raises ConversionError."""

    name: str
    read: Callable[[Path, Path | None], Checkpoint]


def map_names(sources: list[Source], table: list[tuple]) -> dict[str, Source]:
    """Return {legacy name: Source} by the first row of a table that matches. A name that none matches is an error.

    A row is (original name, legacy name or None to leave it out, method of Source or None). `{i}` stands for a number,
    `{_i}` for one behind `_` or nothing, `{name}` for anything.
    """
    rows = [(_pattern(original), target, change) for original, target, change in table]
    tensors = {}
    for source in sources:
        for pattern, target, change in rows:
            match = pattern.fullmatch(source.name)
            if match is None:
                continue
            if target is not None:
                tensors[target.format(**match.groupdict())] = change(source) if change else source
            break
        else:
            raise ConversionError(f"the checkpoint has a tensor {source.name}, which the model has not")
    return tensors


def _pattern(original: str) -> re.Pattern:
    pattern = re.escape(original).replace(r"\{name\}", "(?P<name>.+)").replace(r"\{_i\}", "(_[0-9]+)?")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", pattern))


def legacy_tensors(config: TransfoXLConfig, head: str = "softmax") -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors that a model of `config` with this `head` would save; but of models without
    recurrence, q_net and kv_net apart, as the originals have them.
    """
    with torch.device("meta"):
        model = MODELS[head](config)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    prefix = "transformer." if head == "none" else ""
    shapes = {f"{prefix}{name}": tuple(t.shape) for name, t in revert_weight_conversion(model, tensors).items()}
    if config.attn_type in (2, 3):
        for name in [name for name in shapes if name.endswith("dec_attn.qkv_net.weight")]:
            rows, width = shapes.pop(name)
            shapes[name.replace("qkv_net", "q_net")] = (rows // 3, width)
            shapes[name.replace("qkv_net", "kv_net")] = (2 * rows // 3, width)
    return shapes


def check_complete(tensors: dict[str, Source], config: TransfoXLConfig, head: str = "softmax") -> None:
    """Raise ConversionError, naming it, for the first tensor that is missing, left over or of another shape."""
    expected = legacy_tensors(config, head)
    for name, shape in expected.items():
        if name not in tensors:
            raise ConversionError(f"the checkpoint has no tensor for {name} {list(shape)}")
        if tuple(tensors[name].shape) != tuple(shape):
            source = tensors[name]
            raise ConversionError(f"{source.name} has shape {list(source.shape)} where {list(shape)} was expected")
    for name in tensors.keys() - expected.keys():
        raise ConversionError(f"the checkpoint has a tensor {tensors[name].name}, which the model has not")


def fields_from_shapes(tensors: dict[str, Source]) -> dict:
    """Return the TransfoXLConfig fields that names and shapes decide: not `cutoffs` where there is one table of
    embeddings, nor the heads of `attn_type` 2.
    """
    shape = {name: source.shape for name, source in tensors.items()}
    layers = {int(name.split(".")[2]) for name in shape if name.startswith("transformer.layers.")}
    tables = sorted(int(name.split(".")[3]) for name in shape if name.startswith("transformer.word_emb.emb_layers."))
    for name in (
        "transformer.word_emb.emb_layers.0.weight",
        "transformer.layers.0.dec_attn.o_net.weight",
        "transformer.layers.0.pos_ff.CoreNet.0.weight",
    ):
        if len(shape.get(name, ())) != 2:
            raise ConversionError(f"the checkpoint has no matrix for {name}")
    if layers != set(range(len(layers))) or tables != list(range(len(tables))):
        raise ConversionError("the checkpoint leaves out a layer or an embedding table")
    fields = {
        "n_layer": len(layers),
        "d_model": shape["transformer.layers.0.dec_attn.o_net.weight"][0],
        "d_inner": shape["transformer.layers.0.pos_ff.CoreNet.0.weight"][0],
    }
    return fields | _bin_fields(shape, len(tables), fields["d_model"]) | _attention_fields(shape)


def _bin_fields(shape: Shapes, n_tables: int, d_model: int) -> dict[str, Any]:
    tables = [shape[f"transformer.word_emb.emb_layers.{i}.weight"] for i in range(n_tables)]
    ends = [sum(rows for rows, _ in tables[: i + 1]) for i in range(n_tables)]
    fields: dict[str, Any] = {"vocab_size": ends[-1], "d_embed": tables[0][1], "div_val": 1}
    projected = "transformer.word_emb.emb_projs.0" in shape
    if n_tables > 1:
        fields["cutoffs"] = ends[:-1]
        fields["div_val"] = tables[0][1] // max(tables[1][1], 1)
        own_width = [i for i, (_, width) in enumerate(tables) if width == d_model]
        fields["proj_same_dim"] = all(f"transformer.word_emb.emb_projs.{i}" in shape for i in own_width)
    elif projected and tables[0][1] == d_model:
        fields["div_val"] = 2  # only bins of falling width are projected at the model's own width
    return fields


def _attention_fields(shape: Shapes) -> dict[str, Any]:
    if "transformer.r_emb" in shape:
        n_head, d_head = shape["transformer.r_emb"][2:]
        attn_type = 1 if "transformer.r_bias" in shape else 3
        return {
            "attn_type": attn_type,
            "n_head": n_head,
            "d_head": d_head,
            "untie_r": False,
            "max_klen": shape["transformer.r_emb"][1],
        }
    if "transformer.layers.0.dec_attn.r_net.weight" not in shape:
        return {"attn_type": 2, "untie_r": False}
    untied = "transformer.layers.0.dec_attn.r_w_bias"
    name = untied if untied in shape else "transformer.r_w_bias"
    if len(shape.get(name, ())) != 2:
        raise ConversionError(f"the checkpoint has no bias of shape (heads, head size) for {name}")
    n_head, d_head = shape[name]
    return {"attn_type": 0, "n_head": n_head, "d_head": d_head, "untie_r": name == untied}


def tying_fields(tensors: dict[str, Source], fields: dict) -> dict:
    """Return `tie_word_embeddings` and `tie_projs` as the tensors show them: tied ones have the same values."""
    weights = [name for name in tensors if re.fullmatch(r"crit\.out_layers\.[0-9]+\.weight", name)]
    tie_projs = []
    for i in range(len(fields["cutoffs"]) + 1):
        name = f"crit.out_projs.{i}"
        # Without a projection the flag has no effect; the originals then tie all except the first.
        tie_projs.append(_is_copy(tensors, name, fields) if name in tensors else i > 0)
    return {"tie_word_embeddings": all(_is_copy(tensors, name, fields) for name in weights), "tie_projs": tie_projs}


def drop_copies(tensors: dict[str, Source], fields: dict) -> None:
    """Remove the second copies of tied weights. Raises ConversionError for one with other values than the first."""
    for name in list(tensors):
        if not _is_tied(name, fields):
            continue
        if not _is_copy(tensors, name, fields):
            raise ConversionError(f"{tensors[name].name} is not equal to the weight that the settings tie it to")
        del tensors[name]


def _is_tied(name: str, fields: dict[str, Any]) -> bool:
    if re.fullmatch(r"crit\.out_layers\.[0-9]+\.weight", name):
        return fields["tie_word_embeddings"]
    if match := re.fullmatch(r"crit\.out_projs\.([0-9]+)", name):
        return int(match[1]) < len(fields["tie_projs"]) and fields["tie_projs"][int(match[1])]
    return bool(re.fullmatch(r"transformer\.layers\.[0-9]+\.dec_attn\.r_[wr]_bias", name)) and not fields["untie_r"]


def _is_copy(tensors: dict[str, Source], name: str, fields: dict[str, Any]) -> bool:
    first = name.replace("crit.out_layers", "transformer.word_emb.emb_layers")
    first = re.sub(r"^transformer\.layers\.[0-9]+\.dec_attn\.", "transformer.", first)
    if name.startswith("crit.out_projs."):
        # With one embedding table there is one projection, for all bins.
        first = f"transformer.word_emb.emb_projs.{name.split('.')[2] if fields['div_val'] > 1 else 0}"
    if first not in tensors or tensors[first].shape != tensors[name].shape:
        return False
    if tensors[name].place is not None and tensors[name].place == tensors[first].place:
        return True
    one, other = tensors[first].read(), tensors[name].read()
    # NaN is not equal to NaN, so elements that are NaN in both count as equal.
    return one.dtype == other.dtype and bool(((one == other) | (one.isnan() & other.isnan())).all())
