"""Transformer-XL model configuration."""

import copy
import math
import sys
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .positions_transfo_xl import POSITIONS, Positions

logger = logging.get_logger(__name__)

CHOICES: dict[str, tuple[str | None, ...]] = {
    "init": ("normal", "uniform"),
    "initial_memory": ("zeros", "empty"),
    "gating": (None, "gru"),
    "problem_type": (None, "regression", "single_label_classification", "multi_label_classification"),
}
_SIZES = ("d_model", "d_embed", "n_head", "d_head", "d_inner", "n_layer", "div_val", "input_size", "max_klen")
_SCALES = ("layer_norm_epsilon", "init_range", "proj_init_std", "init_std")
_FINITE = sys.float_info.max
# (least, most) of each number; None, which some fields may be, is not compared.
RANGES: dict[str, tuple[float, float]] = {"vocab_size": (0, math.inf), "dropout": (0, 1), "dropatt": (0, 1)}
RANGES |= {"gate_bias": (-_FINITE, _FINITE)} | dict.fromkeys(_SCALES, (0, _FINITE))
RANGES |= dict.fromkeys(_SIZES, (1, math.inf))


@strict
class TransfoXLConfig(PreTrainedConfig):
    r"""
    Configuration of a Transformer-XL model (Dai et al., 2019, https://arxiv.org/abs/1901.02860). Fields of the legacy
    `transformers` configuration have their names and defaults, those of `transfo-xl-wt103`.

    Args:
        vocab_size (`int`, defaults to 267735):
            V, the number of tokens. 0: only `inputs_embeds` are read, and fields of tables and tokens have no effect.
        cutoffs (`list[int]`, defaults to `[20000, 40000, 200000]`):
            Where the bins of the adaptive input and softmax end; the last bin ends at `vocab_size`. Empty: one bin.
        d_model (`int`, defaults to 1024): D, the width of the hidden states; even, for the sinusoids.
        d_embed (`int`, defaults to 1024): Width of the embeddings of bin 0.
        n_head (`int`, defaults to 16): H, attention heads.
        d_head (`int`, defaults to 64): Width of a head; with `attn_type=3`, `n_head * d_head` must be `d_model`.
        d_inner (`int`, defaults to 4096): Width of the feed-forward layer.
        div_val (`int`, defaults to 4): Bin i has embeddings of width `d_embed // div_val**i`.
        pre_lnorm (`bool`, defaults to `False`): Layer normalisation before each sub-layer instead of after it.
        n_layer (`int`, defaults to 18): Number of layers.
        mem_len (`int`, defaults to 1600): M, the number of hidden states in the memory of a layer.
        clamp_len (`int`, defaults to 1000): Distances beyond it share one position; not positive: no clamping.
        decay_len (`int`, defaults to -1):
            The longest distance of training, `tgt_len + mem_len`, for memories that are longer afterwards: the weight
            of a key at a distance d beyond it is multiplied by (decay_len / d)² before the softmax normalises, and its
            position is that of `decay_len`. Not positive: no decay. For `attn_type=0`.
        same_length (`bool`, defaults to `True`):
            Every query sees as many keys as the memory is long; otherwise all of the memory and of the segment up to
            itself. `mem_len=0` sets no limit (legacy `transformers`: the mean of all keys, future ones too).
        proj_share_all_but_first (`bool`, defaults to `True`): Sets `tie_projs` where none is given.
        attn_type (`int`, defaults to 0):
            0: relative sinusoidal (Transformer-XL), 1: relative learned (Shaw et al. in the authors' code, with terms
            (a) to (d)), 2: absolute sinusoidal (Vaswani et al.), 3: absolute learned per layer (after Al-Rfou et al.).
            2 and 3 are the paper's baselines without recurrence: they need `mem_len=0`.
        sample_softmax (`int`, defaults to -1): Must not be positive: sampled softmax is not offered.
        adaptive (`bool`, defaults to `True`): Kept from the legacy configuration; `cutoffs` decides.
        dropout (`float`, defaults to 0.1): Dropout of embeddings, positions, sub-layer outputs and final states.
        dropatt (`float`, defaults to 0.0): Dropout of the attention probabilities.
        untie_r (`bool`, defaults to `True`): Biases u and v per layer instead of one pair for all layers.
        init (`str`, defaults to `"normal"`): `"normal"` with `init_std` or `"uniform"` within `init_range`.
        init_range (`float`, defaults to 0.01): See `init`.
        proj_init_std (`float`, defaults to 0.01): Standard deviation of the adaptive projections at the start.
        init_std (`float`, defaults to 0.02): See `init`.
        layer_norm_epsilon (`float`, defaults to 1e-5): Epsilon of the layer normalisation.
        eos_token_id (`int`, defaults to 0): End of text.
        tie_word_embeddings (`bool`, defaults to `True`): The softmax uses the embeddings as its weights.
        tie_projs (`list[bool]`, *optional*):
            For each bin whether the softmax uses the projection of the embeddings; after a single entry, that of bin
            0, all are `False`. None: `[False] + [proj_share_all_but_first] * len(cutoffs)`, updated with these fields.
        proj_same_dim (`bool`, defaults to `True`): With `div_val > 1`, project bins of width `d_model`, too.
        initial_memory (`str`, defaults to `"zeros"`):
            What precedes the first segment: `"zeros"`, M zero states that are attended to, or `"empty"`, nothing.
        same_length_counts_self (`bool`, defaults to `True`):
            With `same_length`, a query sees M keys, its own among them, or (`False`) M keys besides its own.
        mlp_output_relu (`bool`, defaults to `False`): A ReLU after the feed-forward, as in Pop Music Transformer.
        ext_len (`int`, defaults to 0):
            Last tokens of a segment that the next one repeats, so that `mems` leave them out, but no cache does.
        tgt_len (`int`, defaults to 128): Segment length of training.
        max_klen (`int`, *optional*):
            Rows of the learned positions of `attn_type` 1, where further distances use the furthest row, and 3, where
            no more tokens are read at once; by default `tgt_len + ext_len + mem_len`.
        output_logits (`bool`, defaults to `False`): Return logits beside a loss though the model has cutoffs.
        input_size (`int`, *optional*):
            Width of `inputs_embeds` with `vocab_size=0`, which are projected to `d_model`. None: `d_model`, as it is.
        gating (`str`, *optional*):
            `"gru"`: gates in place of the sums of sub-layers' inputs and outputs, and `pre_lnorm` (GTrXL, see
            `TransfoXLGate`). None: no gates.
        gate_bias (`float`, defaults to 2.0): b_g at the start; a larger one brings a layer nearer to the identity.

    Raises:
        ValueError: a field is invalid, or fields do not fit together; the message names them.
    """

    model_type = "transfo-xl"
    keys_to_ignore_at_inference = ["mems", "mems_mask", "past_key_values", "cache", "losses"]
    attribute_map = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "d_inner",
        "head_dim": "d_head",
        "tie_weight": "tie_word_embeddings",
    }

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    decay_len: int = -1
    same_length: bool = True
    proj_share_all_but_first: bool = True
    attn_type: int = 0
    sample_softmax: int = -1
    adaptive: bool = True
    dropout: float | int = 0.1
    dropatt: float | int = 0.0
    untie_r: bool = True
    init: str = "normal"
    init_range: float | int = 0.01
    proj_init_std: float | int = 0.01
    init_std: float | int = 0.02
    layer_norm_epsilon: float | int = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    tie_projs: list[bool] | None = None
    proj_same_dim: bool = True
    initial_memory: str = "zeros"
    same_length_counts_self: bool = True
    mlp_output_relu: bool = False
    ext_len: int = 0
    tgt_len: int = 128
    max_klen: int | None = None
    output_logits: bool = False
    input_size: int | None = None
    gating: str | None = None
    gate_bias: float | int = 2.0

    def __post_init__(self, **kwargs):
        # Aliases first, because what follows reads the fields.
        for alias in self.attribute_map.keys() & kwargs:
            value, kind = kwargs.pop(alias), type(getattr(self, alias))
            # Checked here, because `@strict` checks fields, but no aliases.
            if type(value) is not kind:
                raise ValueError(f"{alias}={value!r} must be {'True or False' if kind is bool else 'an integer'}")
            setattr(self, alias, value)
        self.cutoffs = list(self.cutoffs)
        if self.vocab_size == 0:
            self.cutoffs, self.tie_projs = [], []
            self.bos_token_id = self.eos_token_id = self.pad_token_id = None
        elif len(self.tie_projs) == 1:
            # The originals start from this list and leave the bins behind its end untied.
            self.tie_projs = self.tie_projs + [False] * len(self.cutoffs)
        elif self.div_val == 1 and self.d_embed == self.d_model:
            # Nothing is projected, so entries left over from other cutoffs are dropped.
            self.tie_projs = self.tie_projs[: len(self.cutoffs) + 1]
        if self.gating is not None:
            self.pre_lnorm = True
        self._warn_of_misspelt_fields(kwargs.keys())
        # Before `super().__post_init__`, which reads `layer_types`.
        self._validate_numbers()
        if self.max_klen is None and self.positions.learned:
            self.max_klen = self.n_positions
            if self.max_klen == 0:
                raise ValueError(
                    f"attn_type={self.attn_type} learns a position for each of max_klen keys, by default tgt_len + "
                    "ext_len + mem_len of them, which are all 0: give one of the four"
                )
        super().__post_init__(**kwargs)
        # Here too, because `@strict` wraps the errors of its validators into a type that is no ValueError.
        self.validate_architecture()

    def __setattr__(self, name, value):
        """As in `transformers`; a default `tie_projs` is updated with the fields that it depends on."""
        follows = name in ("vocab_size", "n_token", "cutoffs", "proj_share_all_but_first")
        follows = follows and self.__dict__.get("tie_projs") == self._default_tie_projs()
        super().__setattr__(name, value)
        if follows or (name == "tie_projs" and value is None):
            super().__setattr__("tie_projs", self._default_tie_projs())

    def _default_tie_projs(self) -> list[bool]:
        return [False] + [self.proj_share_all_but_first] * len(self.cutoffs) if self.vocab_size else []

    def _warn_of_misspelt_fields(self, names):
        """Warn of names near ours, because transformers keeps them unread; older files have names of generation."""
        own = [field.name for field in fields(type(self))]
        for name in names - GenerationConfig().to_dict().keys():
            near = [field for field in own if len(field) > 4 and name.startswith(field)]
            if near := near or get_close_matches(name, own, 1, cutoff=0.75):
                logger.warning(f"TransfoXLConfig has no field {name}, which changes nothing: did you mean {near[0]}?")

    @property
    def output_attentions(self) -> bool | None:
        """Whether to return attentions, under any backend, because eager computes such a call."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool):
        self._output_attentions = value

    def validate_output_attentions(self):
        """Replaces the check of `transformers`, which refuses any backend except eager."""

    def validate_architecture(self):
        """Part of the `@strict` validation: fields that fit together."""
        self._validate_numbers()
        self.check_lengths(mem_len=self.mem_len, ext_len=self.ext_len, tgt_len=self.tgt_len)
        if self.positions.spans_heads and self.n_head * self.d_head != self.d_model:
            raise ValueError(
                f"n_head={self.n_head} times d_head={self.d_head} must be d_model={self.d_model}: attn_type="
                f"{self.attn_type} adds its learned positions, (n_head, d_head) each, to the hidden states"
            )
        for name, choices in CHOICES.items():
            if (choice := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={choice!r} must be {' or '.join(map(repr, choices))}")
        if self.sample_softmax > 0:
            raise ValueError(
                f"sample_softmax={self.sample_softmax}: sampled softmax is not offered; use -1 with cutoffs instead"
            )
        if self.vocab_size > 0:
            self._validate_vocabulary()

    def check_change(self, name: str, value: Any):
        """Raise a ValueError unless the fields fit together with another value of this one, which is not set."""
        changed = copy.copy(self)
        setattr(changed, name, value)
        changed.validate_architecture()

    def _validate_numbers(self):
        for name, (least, most) in RANGES.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                limits = f"be at least {least}" if most == math.inf else f"lie between {least} and {most}"
                raise ValueError(f"{name}={number} must {limits}")
        if self.attn_type not in POSITIONS:
            raise ValueError(f"attn_type={self.attn_type} must be one of {', '.join(map(str, POSITIONS))}")
        if self.decay_len > 0 and self.attn_type != 0:
            raise ValueError(f"decay_len={self.decay_len} goes with attn_type=0, not {self.attn_type}: set it to -1")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd: the sinusoids need an even d_model")
        if self.input_size is not None and self.vocab_size > 0:
            raise ValueError(
                f"input_size={self.input_size} is the width of inputs_embeds of a model without tokens, but "
                f"vocab_size={self.vocab_size}: use vocab_size=0, or input_size=None"
            )

    def check_lengths(self, mem_len: int, **lengths: int):
        """Raise a ValueError unless these lengths, the configuration's own or those of one call, fit the model."""
        for name, length in {"mem_len": mem_len, **lengths}.items():
            if length < 0:
                raise ValueError(f"{name}={length} must not be negative")
        if not self.positions.recurrent and mem_len > 0:
            raise ValueError(
                f"attn_type={self.attn_type} has absolute positions and no recurrence: mem_len={mem_len} must be 0"
            )

    def check_documents(self, told_by: str, mem_len: int | None = None):
        """Raise a ValueError unless documents can begin inside a segment. `told_by`: the arguments that set where;
        `mem_len`: of one call, or None."""
        if not self.positions.recurrent:
            raise ValueError(
                f"{told_by} tell of documents that begin inside a segment, but attn_type={self.attn_type} counts "
                "positions from a row's last token: give each document a row of its own"
            )
        if self.initial_memory == "zeros" and (self.mem_len if mem_len is None else mem_len) > 0:
            raise ValueError(
                f"{told_by} tell of documents that begin inside a segment, but with initial_memory='zeros' each sees "
                "mem_len zero states, in whose places the row has other documents: give each document a row of its "
                "own, or use initial_memory='empty'"
            )

    def _validate_vocabulary(self):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(self, name)
            for token in ids if isinstance(ids, list | tuple) else [ids]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name}={ids} must lie in the vocabulary, [0, {self.vocab_size})")
        ends = [0, *self.cutoffs, self.vocab_size]
        if any(start >= end for start, end in zip(ends, ends[1:], strict=False)):
            raise ValueError(
                f"cutoffs={self.cutoffs} must be positive, increase and stay below vocab_size={self.vocab_size}; "
                "cutoffs=[] makes one bin of the vocabulary"
            )
        if self.d_embed // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(
                f"div_val={self.div_val} leaves bin {len(self.cutoffs)} without width: d_embed={self.d_embed} "
                f"divided {len(self.cutoffs)} times by it is below 1"
            )
        if len(self.tie_projs) != len(self.cutoffs) + 1:
            raise ValueError(
                f"tie_projs={self.tie_projs} must have one entry for each of the {len(self.cutoffs) + 1} bins"
            )

    @property
    def bins(self) -> list[tuple[int, int, int]]:
        """The bins of the adaptive input and softmax as (first token, end, embedding width); none without tokens."""
        if self.vocab_size == 0:
            return []
        ends = [0, *self.cutoffs, self.vocab_size]
        return [
            (start, end, self.d_embed // self.div_val**i)
            for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False))
        ]

    @property
    def positions(self) -> type[Positions]:
        """The class of positions that `attn_type` names."""
        return POSITIONS[self.attn_type]

    @property
    def n_positions(self) -> int:
        """The longest context of training, or `max_klen`: the length of windows for programs that carry no memory from
        one to the next (lm_eval's `hf`)."""
        return self.max_klen or self.tgt_len + self.ext_len + self.mem_len

    @property
    def sliding_window(self) -> int:
        """The window of transformers' sliding cache layers: M keys of the memory and the query's own."""
        return self.mem_len + 1

    @property
    def layer_types(self) -> list[str]:
        """Every layer's projected memory is a sliding window."""
        return ["sliding_attention"] * self.n_layer
