"""Checkpoints of the TensorFlow original (kimiyoung/transformer-xl, tf/): `model.ckpt-N.*` and `corpus-info.json`."""

import functools
import re
from pathlib import Path
from typing import Any

import torch

from . import vocabulary
from .files import code_span
from .layout import Checkpoint, ConversionError, Family, Source, fields_from_shapes, map_names
from .tf_checkpoint import TensorBundle

# Variable under `transformer/` (tf/model.py), tensor of the legacy layout, change of the tensor. Derived programs have
# the same names here.
LAYERS = [
    ("r_w_bias", "transformer.r_w_bias", None),
    ("r_r_bias", "transformer.r_r_bias", None),
    ("layer_{l}/rel_attn/qkv/kernel", "transformer.layers.{l}.dec_attn.qkv_net.weight", Source.transposed),
    ("layer_{l}/rel_attn/r/kernel", "transformer.layers.{l}.dec_attn.r_net.weight", Source.transposed),
    ("layer_{l}/rel_attn/o/kernel", "transformer.layers.{l}.dec_attn.o_net.weight", Source.transposed),
    ("layer_{l}/ff/layer_1/kernel", "transformer.layers.{l}.pos_ff.CoreNet.0.weight", Source.transposed),
    ("layer_{l}/ff/layer_1/bias", "transformer.layers.{l}.pos_ff.CoreNet.0.bias", None),
    ("layer_{l}/ff/layer_2/kernel", "transformer.layers.{l}.pos_ff.CoreNet.3.weight", Source.transposed),
    ("layer_{l}/ff/layer_2/bias", "transformer.layers.{l}.pos_ff.CoreNet.3.bias", None),
]
TABLE = [
    ("adaptive_embed/lookup_table", "transformer.word_emb.emb_layers.0.weight", None),
    ("adaptive_embed/proj_W", "transformer.word_emb.emb_projs.0", Source.transposed),
    ("adaptive_embed/cutoff_{i}/lookup_table", "transformer.word_emb.emb_layers.{i}.weight", None),
    ("adaptive_embed/cutoff_{i}/proj_W", "transformer.word_emb.emb_projs.{i}", Source.transposed),
    *LAYERS,
    ("layer_{l}/rel_attn/LayerNorm/gamma", "transformer.layers.{l}.dec_attn.layer_norm.weight", None),
    ("layer_{l}/rel_attn/LayerNorm/beta", "transformer.layers.{l}.dec_attn.layer_norm.bias", None),
    ("layer_{l}/ff/LayerNorm/gamma", "transformer.layers.{l}.pos_ff.layer_norm.weight", None),
    ("layer_{l}/ff/LayerNorm/beta", "transformer.layers.{l}.pos_ff.layer_norm.bias", None),
    ("adaptive_softmax/bias", "crit.out_layers.0.bias", None),
    ("adaptive_softmax/cutoff_{i}/b", "crit.out_layers.{i}.bias", None),
    ("adaptive_softmax/cutoff_{i}/proj", "crit.out_projs.{i}", Source.transposed),
    ("adaptive_softmax/cutoff_0/cluster_W", "crit.cluster_weight", None),
    ("adaptive_softmax/cutoff_0/cluster_b", "crit.cluster_bias", None),
]
# The optimizer's state: Adam keeps two slots per variable and two powers of its betas.
SKIPPED = re.compile(r"(.*/)?(Adam|Adam_1|beta1_power|beta2_power|global_step)")

# Settings with which the original's scripts evaluate the published models (tf/sota/*.sh): no checkpoint holds them.
PUBLISHED_EVALUATION = {
    "wt103": {"mem_len": 1600, "clamp_len": 1000, "same_length": True, "tgt_len": 128},
    "enwik8": {"mem_len": 3800, "clamp_len": 1000, "same_length": True, "tgt_len": 128},
    "text8": {"mem_len": 3800, "clamp_len": 1000, "same_length": True, "tgt_len": 128},
    "lm1b": {"mem_len": 128, "clamp_len": -1, "same_length": True, "tgt_len": 32},
}
EXPECTED = "expected model.ckpt-N (its .index and .data files) or the folder that holds it"


def read(checkpoint: Path, corpus: Path | None = None) -> Checkpoint:
    """Return the `Checkpoint` at a prefix such as `model.ckpt-0`, its `.index` file or its folder. `corpus` is the
    pickled corpus (cache.pkl), or a folder with it or corpus-info.json. Raises ConversionError, TensorBundleError or
    UnsafePickleError.
    """
    prefix = find_prefix(Path(checkpoint))
    tensors = read_bundle(prefix, TABLE)
    info = vocabulary.read_corpus_info(_folders(prefix, corpus))
    dataset = info.get("dataset")
    symbols = None
    if corpus is not None and not vocabulary.is_described_alone(Path(corpus)):
        symbols, dataset = vocabulary.read_corpus(corpus, dataset)
    fields = fields_from_shapes(tensors)
    fields |= _softmax_fields(tensors, fields)
    _compare(info, fields)
    published = dataset if dataset in PUBLISHED_EVALUATION else _likely_dataset(fields)
    fields |= PUBLISHED_EVALUATION[published]
    if published == "lm1b":
        fields["eos_token_id"] = None  # its vocabulary comes from a file, in an order of its own
    fields |= {"initial_memory": "zeros", "same_length_counts_self": False, "layer_norm_epsilon": 1e-12}
    reason = f"what the original evaluates {published} with"
    if published != dataset:
        reason += ", which has a softmax of this kind; the checkpoint does not say"
    named = f" ({code_span(dataset)})" if isinstance(dataset, str) else ""
    return Checkpoint(
        fields=fields,
        tensors=tensors,
        vocabulary=symbols,
        origin=f"the TensorFlow checkpoint {code_span(prefix.name)} of kimiyoung/transformer-xl{named}",
        explained=dict.fromkeys(PUBLISHED_EVALUATION[published], reason),
    )


def find_prefix(path: Path) -> Path:
    """Return the checkpoint's path without `.index`, for any of the paths a user may give."""
    if path.is_dir():
        return _prefix_in_folder(path)
    prefix = path.with_name(re.sub(r"\.(index|meta|data-[0-9]{5}-of-[0-9]{5})$", "", path.name))
    if prefix.with_name(f"{prefix.name}.index").is_file():
        return prefix
    found = "is no TensorFlow checkpoint" if path.exists() else "does not exist"
    raise ConversionError(f"{path} {found}; {EXPECTED}")


def _prefix_in_folder(folder: Path) -> Path:
    # TensorFlow's own pointer to the newest checkpoint; its path may be that of another machine.
    pointer = folder / "checkpoint"
    if pointer.is_file():
        match = re.search(r'^model_checkpoint_path: "(?:.*/)?([^"/]+)"', pointer.read_text(errors="replace"), re.M)
        if match and (folder / f"{match[1]}.index").is_file():
            return folder / match[1]
    indices = sorted(folder.glob("*.index"))
    if len(indices) == 1:
        return indices[0].with_suffix("")
    found = (
        f"{len(indices)} checkpoints ({', '.join(path.stem for path in indices[:4])})" if indices else "no .index file"
    )
    raise ConversionError(f"{folder} is a folder with {found}; {EXPECTED}")


def _folders(prefix: Path, corpus: Path | None) -> list[Path]:
    folders = [prefix.parent, prefix.parent.parent / "data"]  # the published archives keep it in data/ beside model/
    if corpus is not None:
        folders.insert(0, Path(corpus) if Path(corpus).is_dir() else Path(corpus).parent)
    return folders


def read_bundle(prefix: Path, table: list[tuple]) -> dict[str, Source]:
    """Return the tensors of the bundle at `prefix`, by `table`."""
    bundle = TensorBundle(prefix)
    sources = [
        Source(name, entry.shape, functools.partial(bundle.read, name))
        for name, entry in bundle.entries.items()
        if not SKIPPED.fullmatch(name)
    ]
    tensors = map_names(sources, [(f"transformer/{name}", target, change) for name, target, change in table])
    _stacked_biases_apart(tensors)
    return tensors


def _stacked_biases_apart(tensors: dict[str, Source]) -> None:
    """Split the biases that `untie_r` stores as one variable, a row for each layer, into a tensor for each layer."""
    for name in ("r_w_bias", "r_r_bias"):
        stacked = tensors.get(f"transformer.{name}")
        if stacked is not None and len(stacked.shape) == 3:  # untied: one row per layer
            if f"transformer.layers.{stacked.shape[0] - 1}.dec_attn.o_net.weight" not in tensors:
                raise ConversionError(f"{stacked.name} is for {stacked.shape[0]} layers, the checkpoint has others")
            del tensors[f"transformer.{name}"]
            for number in range(stacked.shape[0]):
                tensors[f"transformer.layers.{number}.dec_attn.{name}"] = stacked.layer(number)


def _softmax_fields(tensors: dict[str, Source], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `cutoffs` and the tying; with one embedding table, also join the biases of its bins in `tensors`."""
    biases: list[Source] = []
    while f"crit.out_layers.{len(biases)}.bias" in tensors:
        biases.append(tensors[f"crit.out_layers.{len(biases)}.bias"])
    cutoffs = fields.get("cutoffs", [])
    if fields["div_val"] == 1 and len(biases) > 1:
        ends = [sum(bias.shape[0] for bias in biases[: i + 1]) for i in range(len(biases))]
        cutoffs = ends[:-1]
        for i in range(len(biases)):
            del tensors[f"crit.out_layers.{i}.bias"]
        tensors["crit.out_layers.0.bias"] = Source(
            biases[0].name, (ends[-1],), lambda: torch.cat([bias.read() for bias in biases])
        )
    # A tied bin has no projection of its own; without cutoffs the softmax uses the embedding's. Where that has none
    # either, the flag has no effect and is the original's default: all but the first are tied.
    tie_projs = [f"crit.out_projs.{i}" not in tensors for i in range(len(cutoffs) + 1)]
    if "transformer.word_emb.emb_projs.0" not in tensors:
        tie_projs[0] = False
    return {"cutoffs": cutoffs, "tie_word_embeddings": True, "tie_projs": tie_projs}


def _compare(info: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise ConversionError where corpus-info.json contradicts the shapes: it belongs to another checkpoint."""
    cutoffs = info.get("cutoffs", fields["cutoffs"])
    if isinstance(cutoffs, list) and cutoffs[:1] == [0]:  # as data_utils.py writes it, with both ends
        cutoffs = cutoffs[1:-1]
    for name, value in (("vocab_size", info.get("vocab_size", fields["vocab_size"])), ("cutoffs", cutoffs)):
        if value != fields[name]:
            raise ConversionError(f"corpus-info.json says {name} {value}, the checkpoint's shapes say {fields[name]}")


def _likely_dataset(fields: dict[str, Any]) -> str:
    if not fields["cutoffs"]:
        return "enwik8"
    return "wt103" if fields.get("proj_same_dim", True) else "lm1b"


FAMILY = Family("kimiyoung-tf", read)
