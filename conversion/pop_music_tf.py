"""Checkpoints of Pop Music Transformer (YatingMusic/remi, TensorFlow): `model.*` and `dictionary.pkl`.

The model derives from kimiyoung/transformer-xl's TensorFlow code: one embedding table and one softmax, Keras's layer
normalisation, and a ReLU behind the feed-forward's second layer too. A checkpoint does not hold settings.
"""

from pathlib import Path

from txl_hf.legacy.vocabulary import order_symbols

from . import torch_file
from .files import code_span, describe
from .kimiyoung_tf import LAYERS, find_prefix, read_bundle
from .layout import Checkpoint, ConversionError, Family, Source, Vocabulary, fields_from_shapes

# Variable under `transformer/` (modules.py), tensor of the legacy layout, change of the tensor. Keras numbers layers
# without a name from the second on.
TABLE = [
    ("normal_embed/lookup_table", "transformer.word_emb.emb_layers.0.weight", None),
    ("normal_embed/proj_W", "transformer.word_emb.emb_projs.0", Source.transposed),
    ("normal_softmax/bias", "crit.out_layers.0.bias", None),
    *LAYERS,
    ("layer_{l}/rel_attn/layer_normalization{_i}/gamma", "transformer.layers.{l}.dec_attn.layer_norm.weight", None),
    ("layer_{l}/rel_attn/layer_normalization{_i}/beta", "transformer.layers.{l}.dec_attn.layer_norm.bias", None),
    ("layer_{l}/ff/layer_normalization{_i}/gamma", "transformer.layers.{l}.pos_ff.layer_norm.weight", None),
    ("layer_{l}/ff/layer_normalization{_i}/beta", "transformer.layers.{l}.pos_ff.layer_norm.bias", None),
]
# Settings and quirks of model.py, with the epsilon of Keras's LayerNormalization.
SETTINGS = {"mem_len": 512, "tgt_len": 512, "clamp_len": -1, "same_length": False}
QUIRKS = {
    "initial_memory": "zeros",
    "same_length_counts_self": False,
    "layer_norm_epsilon": 1e-3,
    "mlp_output_relu": True,
}
DICTIONARY = "dictionary.pkl"


def read(checkpoint: Path, corpus: Path | None = None) -> Checkpoint:
    """Return the `Checkpoint` at a prefix such as `REMI-tempo-checkpoint/model`, or its folder. `corpus` is
    dictionary.pkl, if that is not beside it. Raises ConversionError, TensorBundleError or UnsafePickleError.
    """
    prefix = find_prefix(Path(checkpoint))
    tensors = read_bundle(prefix, TABLE)
    fields = fields_from_shapes(tensors) | SETTINGS | QUIRKS
    projected = "transformer.word_emb.emb_projs.0" in tensors
    fields |= {"cutoffs": [], "tie_word_embeddings": True, "tie_projs": [projected], "eos_token_id": None}
    dictionary = Path(corpus) if corpus is not None else prefix.with_name(DICTIONARY)
    return Checkpoint(
        fields=fields,
        tensors=tensors,
        vocabulary=read_dictionary(dictionary) if corpus is not None or dictionary.is_file() else None,
        origin=f"the checkpoint {code_span(prefix.name)} of Pop Music Transformer (YatingMusic/remi)",
        explained=dict.fromkeys(SETTINGS, "as its model.py has it"),
    )


def read_dictionary(path: Path) -> Vocabulary:
    """Return the events as a Vocabulary of words: a blank in an event's name becomes `_`. Raises ConversionError."""
    path = path / DICTIONARY if path.is_dir() else path
    if not path.is_file():
        raise ConversionError(f"{path} does not exist; expected the dictionary of events, {DICTIONARY}")
    dictionary = torch_file.load(path)
    ids = dictionary[0] if isinstance(dictionary, tuple | list) and dictionary else None
    if not isinstance(ids, dict) or not all(isinstance(event, str) for event in ids):
        raise ConversionError(f"{path} holds {describe(dictionary)}; expected the pair (event2word, word2event)")
    try:
        symbols = ["_".join(event.split()) for event in order_symbols(ids, str(path))]
    except ValueError as error:
        raise ConversionError(str(error)) from None
    if len(set(symbols)) < len(symbols):
        raise ConversionError(f"{path} has two events that differ in their blanks alone")
    return Vocabulary(symbols, "whitespace", lower_case=False)


FAMILY = Family("remi", read)
