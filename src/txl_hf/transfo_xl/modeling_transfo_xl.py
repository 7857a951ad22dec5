"""Transformer-XL (Dai et al., 2019, https://arxiv.org/abs/1901.02860) as a `transformers` model.

A text is read in segments. Each layer attends to the segment and to the memory: the hidden states that entered the
same layer while earlier segments were read (Section 3.2). The memory is explicit, in and out:

* `mems`, the states themselves, with `mems_mask`: for training and evaluation;
* `past_key_values`, the same states projected to keys and values: a `Cache` of `transformers`, for decoding.

Letters: B batch, L segment, m memory now, M = `mem_len` memory at most, K = m + L keys, D = `d_model`, H heads,
Dh = `d_head`, V vocabulary. u and v are the paper's biases, `content_bias` and `position_bias`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs

from .adaptive_transfo_xl import (
    AdaptiveEmbedding,
    AdaptiveLogSoftmax,
    InputProjection,
    OutputLayer,
    OutputProjection,
    TransfoXLVocabularyModel,
    check_labels,
    check_numbers,
    check_targets,
    labels_of_rows,
    mean_loss,
    pick_losses,
    targets_of,
    wide,
)
from .attention_transfo_xl import OPERATORS, AttentionInputs, attend, find_backend, working_dtype
from .cache_transfo_xl import (
    CACHE_NAME,
    DecodingState,
    MemoryCache,
    chosen_cache,
    decoding_state_of,
    is_filled,
    static_address,
)
from .configuration_transfo_xl import TransfoXLConfig
from .generation_transfo_xl import TransfoXLGenerationMixin
from .layout_transfo_xl import TransfoXLLayoutModel
from .masks_transfo_xl import DOCUMENT_KEYWORDS, checked_inputs, find_resets, real_tokens
from .memory_transfo_xl import FilledLengths, MemoryLengths, Segment, hide_states, initial_memory
from .positions_transfo_xl import Distances, draws

logger = logging.get_logger(__name__)

# Bytes up to which logits are returned beside a loss in evaluation mode, where `output_logits` is None.
MOST_LOGITS = 1 << 28


@dataclass
class TransfoXLModelOutput(ModelOutput):
    """
    Args:
        last_hidden_state: (B, L, D), the output of the last layer.
        mems: tuple of n_layer tensors (B, min(m + L, M), D), the memory after this segment, detached unless
            `detach_mems=False`, in autocast's dtype or, with `pre_lnorm`, that of the hidden states. Padding is NaN.
        past_key_values: the memory as projected keys and values, instead of `mems` with `use_cache=True`. Its name is
            `cache` from transformers 5.24 on.
        hidden_states: tuple of n_layer + 1 tensors (B, L, D), with `output_hidden_states=True`.
        attentions: tuple of n_layer tensors (B, H, L, m + L), with `output_attentions=True`.
        mems_mask: (B, min(m + L, M)) bool, which states of `mems` are real; None: all. Pass it to the next call with
            `mems`; set a row to False to begin it afresh.
    """

    last_hidden_state: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    mems_mask: Tensor | None = None
    if CACHE_NAME == "cache":
        cache: Cache | None = None
    else:
        past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class _HeadOutput(ModelOutput):
    """The fields that the outputs of all heads have."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    mems_mask: Tensor | None = None
    if CACHE_NAME == "cache":
        cache: Cache | None = None
    else:
        past_key_values: Cache | None = None
    # Before the outputs on request, because many programs expect those last.
    losses: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TransfoXLCausalLMOutput(_HeadOutput):
    """
    Args:
        loss: scalar fp32, with labels: the sum of `losses` over the number of targets.
        logits: (B, L, V) fp32 log-probabilities.
        mems, past_key_values, hidden_states, attentions, mems_mask: as in `TransfoXLModelOutput`.
        losses: (B, L - 1) with `labels` or (B, L) with `shift_labels`, fp32: the negative log-likelihood of each
            target in target order, 0 where ignored.
    """

    @property
    def prediction_scores(self) -> Tensor | None:
        """`logits` by the name that the legacy class gave them."""
        return self.logits


@dataclass
class TransfoXLSequenceClassifierOutput(_HeadOutput):
    """
    Args:
        loss: scalar, with labels.
        logits: (B, num_labels), the scores of the last real token; NaN in a row that has none.
        mems, past_key_values, hidden_states, attentions, mems_mask: as in `TransfoXLModelOutput`. losses: None.
    """


@dataclass
class TransfoXLTokenClassifierOutput(_HeadOutput):
    """
    Args:
        loss: scalar, with labels: the sum of `losses` over the number of labels.
        logits: (B, L, num_labels), the scores of each token.
        mems, past_key_values, hidden_states, attentions, mems_mask: as in `TransfoXLModelOutput`.
        losses: (B, L), fp32 or fp64 where the scores are, with labels: the cross-entropy of each, 0 where ignored.
    """


class TransfoXLMLP(nn.Module):
    """The position-wise feed-forward, (B, L, D) → (B, L, D)."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_inner)
        self.down_proj = nn.Linear(config.d_inner, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.output_relu = config.mlp_output_relu

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = OPERATORS.relu_dropout(self.dropout, OPERATORS.linear(self.up_proj, hidden_states))
        hidden_states = OPERATORS.linear(self.down_proj, hidden_states)
        return OPERATORS.dropout(self.dropout, hidden_states.relu() if self.output_relu else hidden_states)


class TransfoXLAttention(nn.Module):
    """Projections around `relative_attention` (Section 3.3). `r_proj` (the paper's W_k,R) and the biases exist if
    `config.positions` has them in each layer; the model passes in those that layers share."""

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # -1 for Dh, because CUDA graphs use weights whose heads are padded to a wider Dh.
        self.heads = (config.n_head, -1)
        width = config.n_head * config.d_head
        self.q_proj = nn.Linear(config.d_model, width, bias=False)
        self.k_proj = nn.Linear(config.d_model, width, bias=False)
        self.v_proj = nn.Linear(config.d_model, width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)
        self.r_proj: nn.Linear | None = None
        self.content_bias: nn.Parameter | None = None
        self.position_bias: nn.Parameter | None = None
        config.positions.add_to_attention(self)
        self.dropout = nn.Dropout(config.dropout)
        # Never called, because backends drop by its `p`; a module, so that TRL finds it when it turns dropouts off.
        self.dropatt = nn.Dropout(config.dropatt)

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor,
        memory: Tensor | None,
        distances: Distances,
        segment: Segment,
        state: DecodingState | None,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: (B, L, D), for the queries. context: (B, n, D), for the keys and values after `memory`.
            memory: (B, m, D), or None where `context` begins with it or there is none.
            distances: of this layer. segment: the masks, and the cache, which takes keys and values of `context`.
            state: where W_R R is stored for later calls; None: nowhere.

        Returns:
            (B, L, D), and the probabilities (B, H, L, K) where the backend has them.
        """
        if memory is None and context is hidden_states:
            query, key, value = OPERATORS.linear_after(None, context, [self.q_proj, self.k_proj, self.v_proj])
        else:
            query = OPERATORS.linear(self.q_proj, hidden_states)
            key, value = OPERATORS.linear_after(memory, context, [self.k_proj, self.v_proj])
        # (B, n, H·Dh) → (B, H, n, Dh).
        query, key, value = (states.unflatten(-1, self.heads).transpose(1, 2) for states in (query, key, value))
        if segment.cache is not None:
            key, value = segment.cache.update(key, value, self.layer_idx)
        rel_key = state.rel_keys.get(self.layer_idx) if state is not None else None
        if rel_key is None and distances.positions is not None:
            rel_key = distances.positions
            if self.r_proj is not None:
                if self.r_proj._forward_pre_hooks:
                    _check_adapters(self.r_proj)
                rel_key = OPERATORS.linear(self.r_proj, rel_key).unflatten(-1, self.heads)
            rel_key = rel_key.transpose(0, 1)
            if state is not None and self.r_proj is not None:
                rel_key = state.rel_keys[self.layer_idx] = static_address(OPERATORS.keep_layout(rel_key))
        if rel_key is not None:
            rel_key = _last(rel_key.to(query.dtype), 1, segment.key_length)
        inputs = AttentionInputs(
            query,
            # The last K, because a cache that drops no keys has more than the memory.
            _last(key, 2, segment.key_length),
            _last(value, 2, segment.key_length),
            scaling=self.config.d_head**-0.5,
            dropout=getattr(self.dropatt, "p", 0.0) if self.dropatt.training else 0.0,
            rel_key=rel_key,
            content_bias=distances.content_bias if self.content_bias is None else self.content_bias,
            position_bias=distances.position_bias if self.position_bias is None else self.position_bias,
            rel_bias=None if distances.rel_bias is None else _last(distances.rel_bias, 1, segment.key_length),
            **segment.attention,
        )
        attended, probabilities = attend(inputs, segment.implementation, self)
        attended = OPERATORS.linear(self.o_proj, attended.transpose(1, 2).flatten(2))
        return OPERATORS.dropout(self.dropout, attended), probabilities


def _check_adapters(r_proj: nn.Module) -> None:
    """Raise a ValueError where PEFT would treat distances as rows of a batch, with an adapter each."""
    for hook in r_proj._forward_pre_hooks.values():
        if {"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys():
            raise ValueError(
                "an adapter on r_proj, into which distances go, is the same for all rows and tokens: with "
                'adapter_names or activated LoRA leave it out by exclude_modules=["r_proj"]'
            )


class TransfoXLGate(nn.Module):
    """The GRU-like gate of GTrXL, in place of the sum of a sub-layer's input and output (Parisotto et al., 2020,
    https://arxiv.org/abs/1910.06764, Section 3.2). With x the input of the sub-layer and y its output:

        r = σ(W_r y + U_r x),    z = σ(W_z y + U_z x - b_g),    ĥ = tanh(W_g y + U_g (r ⊙ x)),
        g(x, y) = (1 - z) ⊙ x + z ⊙ ĥ.

    `y_proj` holds the rows of W_r, W_z and W_g in this order, `x_proj` those of U_r and U_z, `candidate_proj` is U_g,
    and `bias` b_g, which begins at `config.gate_bias`.
    """

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        width = config.d_model
        self.y_proj = nn.Linear(width, 3 * width, bias=False)
        self.x_proj = nn.Linear(width, 2 * width, bias=False)
        self.candidate_proj = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.full((width,), float(config.gate_bias)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, L, D) of x and y, (B, L, D) each."""
        r_of_y, z_of_y, h_of_y = OPERATORS.linear(self.y_proj, y).chunk(3, dim=-1)
        r_of_x, z_of_x = OPERATORS.linear(self.x_proj, x).chunk(2, dim=-1)
        r = torch.sigmoid(r_of_y + r_of_x)
        z = torch.sigmoid(z_of_y + z_of_x - self.bias)
        candidate = torch.tanh(h_of_y + OPERATORS.linear(self.candidate_proj, r * x))
        return (1 - z) * x + z * candidate


class TransfoXLLayer(GradientCheckpointingLayer):
    """One layer, by the equations at the end of Section 3.3. With h the segment, m the memory and h̃ = [m, h]:

        o = LayerNorm(h + W_o · attention of h to h̃),    the next h = LayerNorm(o + feed-forward(o)).

    With `pre_lnorm`, the inputs of attention and feed-forward are normalised instead of the sums. `gating` does so
    too, and replaces the sums by gates g (`TransfoXLGate`):

        o = g(h, ReLU(W_o · attention of LayerNorm(h) to LayerNorm(h̃))),
        the next h = g'(o, ReLU(feed-forward(LayerNorm(o)))).
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__()
        gated = config.gating is not None
        self.pre_lnorm = config.pre_lnorm or gated
        self.normalize_queries = config.positions.normalizes_queries or gated
        self.self_attn = TransfoXLAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.self_attn_gate = TransfoXLGate(config) if gated else None
        self.mlp = TransfoXLMLP(config)
        self.mlp_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.mlp_gate = TransfoXLGate(config) if gated else None

    def forward(
        self,
        hidden_states: Tensor,
        memory: Tensor | None,
        distances: Distances,
        segment: Segment,
        state: DecodingState | None,
    ) -> Tensor:
        """(B, L, D) → (B, L, D). `memory`: (B, m, D) states that entered this layer before, or None. The others: see
        `TransfoXLAttention.forward`."""
        if self.pre_lnorm:
            context = hidden_states if memory is None else torch.cat([memory, hidden_states], dim=1)
            context = self.self_attn_layer_norm(context)
            context = context.to(working_dtype(context))
            queries = _last(context, 1, segment.length) if self.normalize_queries else hidden_states
            attended = self.self_attn(queries, context, None, distances, segment, state)[0]
            hidden_states = _join(hidden_states, attended, self.self_attn_gate)
            return _join(hidden_states, self.mlp(self.mlp_layer_norm(hidden_states)), self.mlp_gate)
        # A norm under autocast of a GPU returns fp32, but the states keep the type of products.
        dtype = hidden_states.dtype
        attended = self.self_attn(hidden_states, hidden_states, memory, distances, segment, state)[0]
        hidden_states = self.self_attn_layer_norm(hidden_states + attended).to(dtype)
        return self.mlp_layer_norm(hidden_states + self.mlp(hidden_states)).to(dtype)


def _join(entered: Tensor, returned: Tensor, gate: TransfoXLGate | None) -> Tensor:
    """The sum of a sub-layer's input and output, or the gate of both."""
    return entered + returned if gate is None else gate(entered, returned.relu())


def _setting(name: str) -> property:
    """A field of the configuration as an attribute of the model, where the originals' scripts set it. An invalid value
    raises the configuration's error, and leaves the model unchanged."""

    def set_field(model: "TransfoXLPreTrainedModel", value):
        model.config.check_change(name, value)
        setattr(model.config, name, value)

    return property(lambda model: getattr(model.config, name), set_field)


class TransfoXLPreTrainedModel(TransfoXLVocabularyModel, TransfoXLLayoutModel):
    """Base class of all models: loading and saving, initial weights, resizing the vocabulary, an initial memory."""

    config: TransfoXLConfig
    config_class = TransfoXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    # Modules with tied tables are not split, because a device map cannot follow ties between parts of modules.
    _no_split_modules = ["TransfoXLLayer", "AdaptiveEmbedding", "AdaptiveLogSoftmax"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": TransfoXLLayer, "attentions": TransfoXLAttention}

    def __init__(self, config: TransfoXLConfig, *args, **kwargs):
        # Validated again, because `from_pretrained(mem_len=…)` sets fields after the first validation.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)
        if config.vocab_size == 0:
            self.main_input_name = "inputs_embeds"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        if isinstance(module, InputProjection):
            init.normal_(module.weight, 0.0, self.config.proj_init_std)
        elif isinstance(module, nn.Linear | nn.Embedding | OutputLayer):
            self._init_weight(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.normal_(module.weight, 1.0, self.config.init_std)
            init.zeros_(module.bias)
        elif isinstance(module, TransfoXLGate):
            init.constant_(module.bias, self.config.gate_bias)
        elif isinstance(module, TransfoXLAttention | TransfoXLModel):
            for name, parameter in module.named_parameters(recurse=False):
                if name == "r_bias":
                    init.zeros_(parameter)
                else:
                    self._init_weight(parameter)

    def _init_weight(self, weight: Tensor):
        if self.config.init == "uniform":
            init.uniform_(weight, -self.config.init_range, self.config.init_range)
        else:
            init.normal_(weight, 0.0, self.config.init_std)

    @property
    def embeddings(self) -> "TransfoXLModel":
        """For PEFT, which reads `embeddings.word_embeddings`."""
        return self.base_model

    @property
    def word_embeddings(self) -> AdaptiveEmbedding:
        """See `embeddings`."""
        return self.get_input_embeddings()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The backend's name; the package has more names than `transformers`, among them the default."""
        if requested_attention is None:
            return "auto"
        find_backend(requested_attention)
        return requested_attention

    def reset_memory_length(self, mem_len: int):
        """Remember `mem_len` states from now on; the caller cuts longer mems.

        Raises:
            ValueError: `mem_len` is negative, or the model's positions allow no memory. The model is unchanged.
        """
        self.mem_len = mem_len

    mem_len = _setting("mem_len")
    ext_len = _setting("ext_len")
    clamp_len = _setting("clamp_len")
    same_length = _setting("same_length")

    def init_mems(self, batch_size: int) -> tuple[Tensor, ...] | None:
        """The memory before the first segment: n_layer tensors (B, M, D) of zeros or (B, 0, D), each with a storage of
        its own, in the hidden states' type; None if M = 0."""
        first = self.first_parameter
        mems = initial_memory(self.config, self.config.mem_len, batch_size, first.dtype, first.device)
        return None if mems is None else tuple(states.clone() for states in mems)

    @property
    def first_parameter(self) -> nn.Parameter:
        """A parameter with the dtype and device of the first hidden states, neither quantised nor adapted."""
        if self.config.vocab_size > 0:
            return self.get_input_embeddings().emb_layers[0].weight
        return self.base_model.layers[0].self_attn_layer_norm.weight


class VectorEmbedding(nn.Linear):
    """From vectors of any floating-point type, (B, L, F), to the first layer's input, (B, L, D)."""

    def forward(self, vectors: Tensor) -> Tensor:
        # Under autocast a product returns a narrower type than the embeddings have.
        return super().forward(vectors.to(self.weight.dtype)).to(self.weight.dtype)


class TransfoXLModel(TransfoXLPreTrainedModel):
    """Transformer-XL without a head: hidden states and memory."""

    word_emb = property(lambda model: model.embed_tokens, doc="`embed_tokens` by its legacy name.")

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        if config.vocab_size > 0:
            self.embed_tokens = AdaptiveEmbedding(config)
        else:
            self._input_embed_layer = "embed_vectors"
            self.embed_vectors = (
                nn.Identity() if config.input_size is None else VectorEmbedding(config.input_size, config.d_model)
            )
        # Each place has a module of its own, so that each can be replaced by itself.
        self.input_dropout = nn.Dropout(config.dropout)
        self.position_dropout = nn.Dropout(config.dropout)
        self.output_dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransfoXLLayer(config, i) for i in range(config.n_layer))
        self._trained = 0
        self.positions = config.positions
        self.positions.add_to_model(self)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        lengths: MemoryLengths | None = None,
        mems_mask: Tensor | None = None,
        resets: Tensor | None = None,
        detach_mems: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TransfoXLModelOutput:
        """
        Args:
            input_ids: (B, L), the segment.
            mems: the memory, tuple of n_layer tensors (B, m, D), m ≤ M, of any floating-point type and on any device.
                None: see `config.initial_memory`.
            attention_mask: (B, n), 1 = real, 0 = padding, for the segment (n = L), the memory too (n = m + L) or the
                whole text so far: see `make_key_mask`. Padding is never attended to, now or later, and a padded row
                equals the row alone. A row whose memory columns are all 0 starts fresh.
            past_key_values: the memory as projected keys and values, continued in place. An empty one starts from
                `mems`, or from the initial memory. After weights have changed, reset it and read the text again.
            inputs_embeds: (B, L, D), instead of `input_ids`, on the scale of `get_input_embeddings()(input_ids)`; the
                only input of a model without tokens (`vocab_size=0`), (B, L, `input_size`) if that is set.
            use_cache: return `past_key_values` instead of `mems`.
            lengths: of this call, instead of the configuration's.
            mems_mask: (B, m) bool, which states of `mems` are real: `mems_mask` of the outputs that `mems` are from.
                None: all. Other states may have any values.
            resets: (B, L) bool, True at a token where another document or episode begins: each has the states, the
                memory and the gradients that it has alone. The host checks whether there is any, and waits for a GPU
                once. Needs relative positions and `initial_memory="empty"`.
            detach_mems: False: the `mems` that are returned keep their graph, for truncated backpropagation in time
                over as many calls as keep it. `past_key_values` never pass gradients.
            cache (in kwargs): `past_key_values` by its name from transformers 5.24 on.
            output_hidden_states, output_attentions (in kwargs): return these too.
            position_ids, cu_seq_lens_q, cu_seq_lens_k, seq_idx (in kwargs): resets, as collators write them for packed
                rows (`packed_starts`). The heads name two, because `Trainer` drops columns that a head does not name.

        Raises:
            ValueError: inputs that do not fit the model or each other; the message names them.
            TypeError: keyword arguments that nothing reads, except those that transformers passes to every model.
        """
        cache = kwargs.pop("cache", None)
        if cache is not None or past_key_values is not None:
            cache = chosen_cache(past_key_values, cache)
        others = {"attention_mask": attention_mask, "mems": mems, "mems_mask": mems_mask, "resets": resets}
        inputs = checked_inputs(self.config, input_ids, inputs_embeds, kwargs, **others)
        filled: FilledLengths = self.config if lengths is None else MemoryLengths.of(lengths, self.config)
        if input_ids is not None:
            embeds = self.embed_tokens(inputs)
        else:
            # Observations are often fp64, NumPy's default; with `input_size` the projection casts.
            embeds = inputs if self.config.input_size else inputs.to(self.first_parameter.dtype)
        if use_cache or cache is not None:
            cache = self._choose_cache(cache, filled.mem_len)
        if resets is not None or any(kwargs.get(name) is not None for name in DOCUMENT_KEYWORDS):
            (rows, length), device = embeds.shape[:2], embeds.device
            resets = find_resets(self.config, filled.mem_len, (rows, length), device, attention_mask, resets, kwargs)
        wants_attentions = bool(kwargs.get("output_attentions", self.config._output_attentions))
        segment = Segment.open(
            self.config, filled, embeds, mems, mems_mask, attention_mask, cache, resets, wants_attentions
        )

        if input_ids is None:
            embeds = self._enter_vectors(embeds, segment)
        hidden_states = self.positions.enter_model(self, embeds, filled.clamp_len, segment.key_mask)
        hidden_states = OPERATORS.dropout(self.input_dropout, hidden_states)
        distances, state = self._distances(segment, hidden_states)
        memory: list[Any] = []
        entered: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            hidden_states = self.positions.enter_layer(self, i, hidden_states, segment.key_mask)
            if segment.padding is not None:
                hidden_states = hide_states(hidden_states, ~segment.padding.waiting[:, 1:])
            if not self.config.pre_lnorm:
                # Products read them, whose type is autocast's; with `pre_lnorm` a norm does, in fp32.
                hidden_states = hidden_states.to(working_dtype(hidden_states))
            entered.append(hidden_states)
            memory.append(segment.memory_of(i, entered[i]))
            hidden_states = layer(hidden_states, memory[i], distances=distances[i], segment=segment, state=state)
        new_mems = new_mask = None
        if cache is not None:
            segment.remember_in_cache()
        elif filled.mem_len > 0:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_mems):
                new_mems, new_mask = segment.remember(memory, entered)
        return TransfoXLModelOutput(
            # In the type in which they entered, which a head outside of autocast takes.
            last_hidden_state=OPERATORS.dropout(self.output_dropout, hidden_states.to(embeds.dtype)),
            mems=new_mems,
            **{CACHE_NAME: cache},
            mems_mask=new_mask,
        )

    def _enter_vectors(self, embeds: Tensor, segment: Segment) -> Tensor:
        """The embeddings, (B, L, D), of a caller's vectors, (B, L, F)."""
        if segment.text_mask is not None:
            # Zeros at padding, because a caller's vectors may be NaN there, which would spread.
            embeds = hide_states(embeds, segment.text_mask[:, segment.memory.length :])
        if self.config.vocab_size > 0:
            return embeds
        embeds = self.embed_vectors(embeds)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and not embeds.requires_grad:
            # A reentrant checkpoint needs inputs that require gradients, which transformers sets for tables alone.
            if getattr(self._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", False):
                return embeds.detach().requires_grad_()
        return embeds

    def _distances(self, segment: Segment, states: Tensor) -> tuple[list[Distances], DecodingState | None]:
        """The distances of each layer; and the state of the cache, if that stores them for later calls."""
        # Distances have the dtype of the products that read them.
        like = states.new_empty(0, states.shape[-1], dtype=working_dtype(states))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A cache's W_R R is outdated after an optimizer's step, which follows a forward with gradients: those are
            # counted, because fused optimizers change weights without raising their `_version`.
            self._trained += 1
        if segment.cache is None or torch.is_grad_enabled() or draws(self.position_dropout):
            return self.positions.distances(self, segment.key_length, like, segment.lengths.clamp_len), None
        return self._kept_distances(segment, like, decoding_state_of(segment.cache))

    def _kept_distances(
        self, segment: Segment, like: Tensor, state: DecodingState
    ) -> tuple[list[Distances], DecodingState]:
        """`_distances` of a cache's state, made anew where they are too few or outdated."""
        clamp_len = segment.lengths.clamp_len
        # The distances of a full memory at once, because a growing one would compute them again for each token.
        reach = max(segment.key_length, segment.lengths.mem_len + 1)
        shares = clamp_len > 0 and not 0 < self.config.decay_len < reach
        reach = min(reach, clamp_len + 1) if shares else reach
        layers: list[Any] = list(self.layers)
        weights = [getattr(layer.self_attn.r_proj, "weight", None) for layer in layers]
        others = (self._trained, like.dtype, self.config.decay_len)
        if not state.has_distances(reach, clamp_len, weights, others):
            state.projected = max(reach, state.projected)
            state.distances = self.positions.distances(self, state.projected, like, clamp_len)
        assert state.distances is not None
        return state.distances, state

    def _choose_cache(self, cache: Cache | None, mem_len: int) -> Cache | None:
        """The cache of a call with `use_cache`: the given or a new one; None where the call cannot fill one."""
        if mem_len == 0:
            if cache is not None:
                raise ValueError("past_key_values hold a memory, but mem_len=0 means that there is none")
            return None
        if self.gradient_checkpointing and self.training:
            if cache is not None and is_filled(cache):
                raise ValueError(
                    "past_key_values hold a memory, but gradient checkpointing runs a layer twice in training mode "
                    "and reads no cache: give it as mems, or call model.eval() first"
                )
            logger.warning_once("gradient checkpointing runs a layer twice and cannot fill a cache: use_cache=False")
            return None
        return MemoryCache(self.config, mem_len) if cache is None else cache


class TransfoXLForCausalLM(TransfoXLPreTrainedModel, TransfoXLGenerationMixin):
    """Transformer-XL with the adaptive softmax over the next token."""

    crit = property(lambda model: model.lm_head, doc="`lm_head` by its legacy name.")

    def __init__(self, config: TransfoXLConfig):
        if config.vocab_size == 0:
            raise ValueError(
                f"{type(self).__name__} predicts tokens, but vocab_size=0 means that there are none: use "
                "TransfoXLModel or a classifier, or give the model a vocabulary"
            )
        super().__init__(config)
        # transformers derives it from the class name; by that of a subclass, `Trainer` counts a label too many a row.
        self.loss_type = "ForCausalLM"
        self.transformer = TransfoXLModel(config)
        self.lm_head = AdaptiveLogSoftmax(config)
        self._tied_weights_keys = self.get_expanded_tied_weights_keys()
        self._drop_output_logits()
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """{softmax parameter: embedding parameter to which it is tied}, by `tie_word_embeddings` and `tie_projs`."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        source, target = "transformer.embed_tokens", "lm_head"
        tied = {}
        if self.config.tie_word_embeddings:
            for i in range(len(self.lm_head.out_layers)):
                tied[f"{target}.out_layers.{i}.weight"] = f"{source}.emb_layers.{i}.weight"
        for i, tie in enumerate(self.config.tie_projs or ()):
            if tie and isinstance(self.lm_head.out_projs[i], OutputProjection):
                table = 0 if self.config.div_val == 1 else i
                tied[f"{target}.out_projs.{i}.weight"] = f"{source}.emb_projs.{table}.weight"
        return tied

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        lengths: MemoryLengths | None = None,
        mems_mask: Tensor | None = None,
        resets: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TransfoXLCausalLMOutput:
        """
        Args:
            labels: (B, L), shifted inside: token i predicts label i + 1. -100 is ignored, and so is padding by
                `attention_mask`, as a target and as a predicting token. The first token of a document inside a row is
                a target of the token before it, unless its label is -100.
            shift_labels (in kwargs): (B, L), targets aligned with the inputs already, instead of `labels`.
            num_items_in_batch (in kwargs): the divisor of the sum of the losses: the number of labels other than -100
                in all batches of a step, as `Trainer` counts them. Padding among them counts with this batch's mean.
            logits_to_keep: keep the logits of the last so many positions, or of the positions in a tensor; 0: all.
            output_logits: whether to return logits beside a loss; second derivatives need them. None: yes without
                cutoffs, with `config.output_logits`, and in evaluation mode if they take at most 256 MiB.
            logits_top_k (in kwargs): `top_k` of `AdaptiveLogSoftmax.log_prob`.
            others: see `TransfoXLModel.forward`.

        Raises:
            ValueError: a label is neither -100 nor in [0, V), or has another shape; and see `TransfoXLModel.forward`.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        logits_top_k = kwargs.pop("logits_top_k", None)
        # Arguments are checked before the cache receives the tokens.
        if num_items_in_batch is not None or not isinstance(logits_to_keep, int):
            check_numbers(num_items_in_batch, logits_to_keep, input_ids if inputs_embeds is None else inputs_embeds)
        given = targets = None
        if labels is not None or shift_labels is not None:
            both = {"labels": labels, "shift_labels": shift_labels}
            inputs = checked_inputs(self.config, input_ids, inputs_embeds, {}, attention_mask=attention_mask, **both)
            given, targets = targets_of(inputs, attention_mask, **both)
        if output_logits is None:
            output_logits = self.config.output_logits or not self.config.cutoffs
            output_logits = output_logits or (targets is not None and self._has_room_for_logits(targets.numel()))
        in_order = None
        if targets is not None and output_logits:
            check_labels(targets.flatten(), self.config.vocab_size)
        elif targets is not None:
            in_order = self.lm_head.sort_targets(targets.flatten())
        memory = {"mems": mems, "mems_mask": mems_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        masks = {"attention_mask": attention_mask, "resets": resets, "position_ids": position_ids, "seq_idx": seq_idx}
        kwargs |= {"inputs_embeds": inputs_embeds, "lengths": lengths, "return_dict": True}
        outputs = self.transformer(input_ids, **memory, **masks, **kwargs)
        hidden_states = outputs.last_hidden_state
        if given is None or targets is None:
            logits = self.lm_head(_keep(hidden_states, logits_to_keep), top_k=logits_top_k)
            return TransfoXLCausalLMOutput(logits=logits, **_without_last_state(outputs))
        logits = None
        if output_logits:
            logits = self.lm_head(hidden_states)
            losses = pick_losses(logits[:, : targets.shape[1]], targets.to(logits.device))
            logits = _keep(logits, logits_to_keep)
        else:
            predicting = hidden_states[:, : targets.shape[1]].flatten(0, 1)
            losses = self.lm_head(predicting, targets.flatten(), by_bin=in_order).view(targets.shape)
        loss = mean_loss(losses, targets, num_items_in_batch)
        if num_items_in_batch is not None and targets is not given:
            # Labels of padding cost the batch's mean, because `Trainer` counts them, and they have no loss here.
            loss = loss * ((given != -100).sum() / (targets != -100).sum().clamp(min=1)).to(loss.device)
        return TransfoXLCausalLMOutput(loss=loss, logits=logits, losses=losses, **_without_last_state(outputs))

    def _has_room_for_logits(self, tokens: int) -> bool:
        """Whether a loss comes with logits of so many tokens by default: in evaluation mode, up to 256 MiB."""
        if self.training or torch.compiler.is_compiling():
            return False
        if tokens * self.config.vocab_size * 4 <= MOST_LOGITS:
            return True
        logger.warning_once(
            "logits beside the loss would take more than 256 MiB and are left out: give output_logits=True for them"
        )
        return False


TransfoXLLMHeadModel = TransfoXLForCausalLM


class TransfoXLForSequenceClassification(TransfoXLPreTrainedModel):
    """Transformer-XL with a linear classifier on the last real token."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        # transformers derives it from the class name, which a subclass changes.
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels
        self.transformer = TransfoXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        lengths: MemoryLengths | None = None,
        mems_mask: Tensor | None = None,
        resets: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TransfoXLSequenceClassifierOutput:
        """
        Args:
            attention_mask: the last 1 of a row marks its last real token; without a mask that is the last other than
                `config.pad_token_id`, which may then pad on the right alone, or the last of `inputs_embeds`.
            labels: (B,) or (B, 1) classes, or `num_labels` numbers for each row, for regression or multi-label
                classification; by `config.problem_type`, or by their shape where that is None. The class -100, for a
                row without real tokens, is ignored; the number -100.0 is a label like others.
            num_items_in_batch (in kwargs): the number of labels other than -100 in a whole step, as `Trainer` counts
                them: the loss is this batch's part of the step's mean, and 0 where all its labels are -100.0.
            others: see `TransfoXLModel.forward`.

        Raises:
            ValueError: a batch of several rows with neither a mask nor a `pad_token_id`, labels of another shape, or
                classes that are no integers, or neither -100 nor in [0, num_labels).
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        others = {"attention_mask": attention_mask, "labels": labels}
        inputs = checked_inputs(self.config, input_ids, inputs_embeds, {}, **others)
        check_numbers(num_items_in_batch)
        if labels is not None:
            labels = labels_of_rows(labels, len(inputs), self.config)
        if input_ids is not None:
            if attention_mask is None and self.config.pad_token_id is None and len(input_ids) > 1:
                raise ValueError(
                    "a batch of several rows may hold padding: give attention_mask, or set config.pad_token_id"
                )
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            if attention_mask is None and self.config.pad_token_id is not None and not self.config.positions.recurrent:
                # A mask is made, because these positions are counted from the last real token, which it marks.
                real = input_ids != self.config.pad_token_id
                attention_mask = real.flip(1).cumsum(1).flip(1) > 0
        memory = {"mems": mems, "mems_mask": mems_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        masks = {"attention_mask": attention_mask, "resets": resets, "position_ids": position_ids, "seq_idx": seq_idx}
        kwargs |= {"inputs_embeds": inputs_embeds, "lengths": lengths, "return_dict": True}
        outputs = self.transformer(input_ids, **memory, **masks, **kwargs)
        scores = self.score(outputs.last_hidden_state)
        logits = self._of_last_real_token(scores, input_ids, attention_mask)
        loss = None
        if labels is not None:
            labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
            count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
            loss = self.loss_function(
                logits=scores, labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=count
            )
            if num_items_in_batch is not None and self.config.problem_type != "single_label_classification":
                # transformers' losses of numbers are means of the batch; `Trainer`'s count leaves out -100.0 too.
                loss = loss * (labels != -100).sum() / count
        return TransfoXLSequenceClassifierOutput(loss=loss, logits=logits, **_without_last_state(outputs, use_cache))

    def _of_last_real_token(self, scores: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """The last real token's scores, (B, num_labels) of (B, L, num_labels), NaN where a row has none."""
        segment_length = scores.shape[1]
        if attention_mask is not None:
            real = real_tokens(attention_mask, segment_length)
        elif self.config.pad_token_id is not None and input_ids is not None:
            real = input_ids != self.config.pad_token_id
        else:
            return scores[:, -1]
        real = real.to(scores.device)
        last = (torch.arange(segment_length, device=scores.device) * real).argmax(-1)
        found = scores[torch.arange(len(scores), device=scores.device), last]
        return found.masked_fill(~real.any(dim=-1, keepdim=True), torch.nan)


class TransfoXLForTokenClassification(TransfoXLPreTrainedModel):
    """Transformer-XL with a linear classifier on every token, which sees no later ones."""

    def __init__(self, config: TransfoXLConfig):
        if config.problem_type not in (None, "single_label_classification"):
            raise ValueError(
                f"{type(self).__name__} tells one class of each token, but problem_type={config.problem_type!r}: "
                "leave it out, or put a layer of your own on TransfoXLModel"
            )
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = TransfoXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        lengths: MemoryLengths | None = None,
        mems_mask: Tensor | None = None,
        resets: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TransfoXLTokenClassifierOutput:
        """
        Args:
            labels: (B, L), the class of each token, not shifted. -100 is ignored.
            num_items_in_batch (in kwargs): the divisor of the sum of the losses, instead of the number of labels.
            others: see `TransfoXLModel.forward`.

        Raises:
            ValueError: a label is neither -100 nor in [0, num_labels), or has another shape, or there is one class;
                and see `TransfoXLModel.forward`.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        check_numbers(num_items_in_batch)
        if labels is not None:
            inputs = checked_inputs(self.config, input_ids, inputs_embeds, {}, labels=labels)
            check_targets("labels", labels, inputs)
            if self.num_labels == 1:
                raise ValueError(
                    "labels of num_labels=1 teach nothing, since there is one class: give more, or take a loss of "
                    "your own of the logits"
                )
            check_labels(labels, self.num_labels, "the classes")
        memory = {"mems": mems, "mems_mask": mems_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        masks = {"attention_mask": attention_mask, "resets": resets, "position_ids": position_ids, "seq_idx": seq_idx}
        kwargs |= {"inputs_embeds": inputs_embeds, "lengths": lengths, "return_dict": True}
        outputs = self.transformer(input_ids, **memory, **masks, **kwargs)
        logits = self.score(outputs.last_hidden_state)
        loss, losses = None, None
        if labels is not None:
            targets = labels.to(logits.device, torch.long)
            losses = pick_losses(wide(logits).log_softmax(-1), targets)
            loss = mean_loss(losses, targets, num_items_in_batch)
        return TransfoXLTokenClassifierOutput(
            loss=loss, logits=logits, losses=losses, **_without_last_state(outputs, use_cache)
        )


def _without_last_state(outputs: TransfoXLModelOutput, use_cache: bool | None = None) -> dict[str, Any]:
    """The fields of the model's output that a head returns too; with an explicit `use_cache=False` a classifier
    returns no memory, because pipelines, which set it, cannot split the layers' tensors into rows."""
    left_out = {"last_hidden_state", *(("mems", "mems_mask") if use_cache is False else ())}
    return {name: value for name, value in outputs.items() if name not in left_out}


def _last(states: Tensor, dim: int, length: int) -> Tensor:
    """The last `length` of a dimension; the tensor itself if it has no more, because a slice copies backward."""
    return states if states.shape[dim] <= length else states.narrow(dim, -length, length)


def _keep(states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """(B, L, …) at the last `logits_to_keep` positions (0: all of them) or at the positions of a tensor."""
    return states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
