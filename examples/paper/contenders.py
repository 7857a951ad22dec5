"""The models that the paper's tables compare, and three that it speaks of: naive recurrence, an LSTM, and a GPT-2.

Importing this registers what the package does not have with the Auto classes, so that all are loaded from folders.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from miniature import Sizes
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

__all__ = [
    "AbsoluteWithMemoryConfig",
    "AbsoluteWithMemoryForCausalLM",
    "LSTMConfig",
    "LSTMForCausalLM",
    "Row",
    "ROWS",
    "make_model",
    "sizes_of",
]

OURS, SHAW, VASWANI, AL_RFOU = range(4)


@dataclass(frozen=True)
class Row:
    """A row of a table: what is trained, and what the paper's model of that kind reached.

    Attributes:
        kind: "transfo-xl", "lstm" or "gpt2".
        recurrence: whether the segment before is remembered.
        encoding: an `attn_type`.
        loss: "full", or "half": only the second half of a segment is learned from.
        backprop: tokens that a gradient reaches, in segments.
        steps: optimiser steps, in those of the table: those that have another row's number of targets.
        shaw: "code" as the authors' code has the encoding after Shaw et al., with the terms (c) and (d) too; "paper"
            as the paper describes it, without them.
        paper: its perplexity at the attention length of training / the best one @ its attention length.
    """

    name: str
    recurrence: bool
    encoding: int
    loss: str = "full"
    backprop: float = 1.0
    steps: float = 1.0
    kind: str = "transfo-xl"
    shaw: str = "code"
    paper: str = "–"


# Tables 6 and 10 of the paper, then what it says in words, then what its Table 8 compares with.
ROWS = {
    row.name: row
    for row in (
        Row("recurrence-ours-full", True, OURS, paper="27.02 / 26.77 @ 500"),
        Row("recurrence-shaw-full", True, SHAW, paper="27.94 / 27.94 @ 256"),
        Row("recurrence-ours-half", True, OURS, "half", paper="28.69 / 28.33 @ 460"),
        Row("none-ours-full", False, OURS, paper="29.59 / 29.02 @ 260"),
        Row("none-ours-half", False, OURS, "half", paper="30.10 / 30.10 @ 120"),
        Row("none-shaw-full", False, SHAW, paper="29.75 / 29.75 @ 120"),
        Row("none-shaw-half", False, SHAW, "half", paper="30.50 / 30.50 @ 120"),
        Row("none-vaswani-half", False, VASWANI, "half", paper="30.97 / 30.97 @ 120"),
        Row("none-al-rfou-half", False, AL_RFOU, "half", paper="31.16 / 31.16 @ 120"),
        Row("none-ours-full-176", False, OURS, backprop=1.375, paper="– / 27.98 @ 400"),
        Row("none-ours-half-172", False, OURS, "half", backprop=1.34375, paper="– / 28.83 @ 120"),
        Row("none-vaswani-full", False, VASWANI),
        Row("none-al-rfou-full", False, AL_RFOU),
        Row("recurrence-vaswani-full", True, VASWANI),
        Row("recurrence-shaw-paper-full", True, SHAW, shaw="paper"),
        Row("recurrence-ours-half-longer", True, OURS, "half", steps=2),
        Row("none-ours-half-longer", False, OURS, "half", steps=2),
        Row("none-shaw-half-longer", False, SHAW, "half", steps=2),
        Row("none-vaswani-half-longer", False, VASWANI, "half", steps=2),
        Row("none-al-rfou-half-longer", False, AL_RFOU, "half", steps=2),
        Row("none-ours-full-176-shorter", False, OURS, backprop=1.375, steps=1 / 1.375),
        Row("none-ours-half-172-shorter", False, OURS, "half", backprop=1.34375, steps=1 / 1.375),
        Row("lstm", True, VASWANI, kind="lstm"),
        Row("gpt2", False, VASWANI, kind="gpt2"),
    )
}


def make_model(row: Row, sizes: Sizes, vocab_size: int) -> Any:
    """A new model of the row's kind; all have about as many parameters."""
    tgt_len, ext_len = segments(row, sizes)
    if row.kind == "lstm":
        return LSTMForCausalLM(LSTMConfig(vocab_size=vocab_size, d_model=sizes.width, n_layer=sizes.layers))
    if row.kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                # No position that no training has seen.
                n_positions=sizes.segment,
                n_embd=sizes.width,
                n_layer=sizes.layers,
                n_head=sizes.heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    naive = row.recurrence and row.encoding == VASWANI
    config = (AbsoluteWithMemoryConfig if naive else TransfoXLConfig)(
        vocab_size=vocab_size,
        cutoffs=[sizes.cutoff],
        div_val=1,
        d_model=sizes.width,
        d_embed=sizes.width,
        n_head=sizes.heads,
        d_head=sizes.width // sizes.heads,
        d_inner=4 * sizes.width,
        n_layer=sizes.layers,
        attn_type=row.encoding,
        mem_len=sizes.segment if row.recurrence else 0,
        tgt_len=tgt_len,
        ext_len=ext_len,
        clamp_len=-1,
        same_length=False,
        initial_memory="empty",
        # As the paper; most of the text is read less than once, so there is nothing to regularise.
        pre_lnorm=False,
        dropout=0.0,
        eos_token_id=None,
    )
    model = (AbsoluteWithMemoryForCausalLM if naive else TransfoXLForCausalLM)(config)
    if row.encoding == SHAW and row.shaw == "paper":
        for bias in (model.transformer.content_bias, model.transformer.r_bias):
            bias.requires_grad_(False).zero_()
    return model


def sizes_of(row: Row, sizes: Sizes) -> Sizes:
    """The sizes of a table as those of a row, which may have more steps or fewer."""
    return replace(sizes, steps=round(row.steps * sizes.steps))


def segments(row: Row, sizes: Sizes) -> tuple[int, int]:
    """tgt_len and ext_len: what is learned from in a segment, and what is read again before it."""
    length = 2 * round(row.backprop * sizes.segment / 2)
    return (length // 2, length // 2) if row.loss == "half" else (length, 0)


# ---- naive recurrence -------------------------------------------------------------------------------------------


class AbsoluteWithMemoryConfig(TransfoXLConfig):
    """Absolute positions with recurrence, which `TransfoXLConfig` refuses.

    The beginning of the paper's Section 3.3: h_τ+1 = f(h_τ, E_τ+1 + U_1:L). Each segment counts its positions anew, so
    that a state in the memory and one in the segment carry the same ones: the model cannot tell which is which.
    """

    model_type = "transfo-xl-absolute-with-memory"

    def check_lengths(self, mem_len: int, **lengths: int):
        super().check_lengths(mem_len=0, memory=mem_len, **lengths)


class AbsoluteWithMemoryForCausalLM(TransfoXLForCausalLM):
    config_class = AbsoluteWithMemoryConfig


AutoConfig.register(AbsoluteWithMemoryConfig.model_type, AbsoluteWithMemoryConfig)
AutoModelForCausalLM.register(AbsoluteWithMemoryConfig, AbsoluteWithMemoryForCausalLM)


# ---- LSTM -------------------------------------------------------------------------------------------------------


class LSTMConfig(PreTrainedConfig):
    model_type = "paper-lstm"

    def __init__(self, vocab_size: int = 100, d_model: int = 16, n_layer: int = 2, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.d_model, self.n_layer = vocab_size, d_model, n_layer


@dataclass
class LSTMOutput(ModelOutput):
    """loss: scalar, with labels. logits: (B, L, V). losses: (B, L), with labels. mems: the states h and c."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    losses: Tensor | None = None
    mems: tuple[Tensor, Tensor] | None = None


class LSTMForCausalLM(PreTrainedModel):
    """A word-level LSTM whose table is its softmax too; its state goes from segment to segment as a memory does."""

    config_class = LSTMConfig
    base_model_prefix = "lstm"
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.lstm = nn.LSTM(config.d_model, config.d_model, config.n_layer, batch_first=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module):
        # torch's own for the LSTM; a table that is a softmax too needs a small one.
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.1)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, shift_labels: Tensor | None = None, mems=None, **_) -> LSTMOutput:
        """input_ids, shift_labels: (B, L). mems: the states of the segment before."""
        hidden_states, state = self.lstm(self.embed_tokens(input_ids), mems)
        logits = self.lm_head(hidden_states)
        if shift_labels is None:
            return LSTMOutput(logits=logits, mems=tuple(part.detach() for part in state))
        losses = F.cross_entropy(logits.transpose(1, 2), shift_labels, reduction="none")
        loss = losses.sum() / shift_labels.ne(-100).sum()
        return LSTMOutput(loss, logits, losses, tuple(part.detach() for part in state))


AutoConfig.register(LSTMConfig.model_type, LSTMConfig)
AutoModelForCausalLM.register(LSTMConfig, LSTMForCausalLM)


def losses_of(model: Any, input_ids: Tensor, shift_labels: Tensor, mems=None) -> tuple[Tensor, Any]:
    """(B, L) losses in nats of any causal model, 0 where the label is -100, and what it remembers, if it does."""
    if isinstance(model, TransfoXLForCausalLM | LSTMForCausalLM):
        outputs = model(input_ids=input_ids, shift_labels=shift_labels, mems=mems)
        return outputs.losses, outputs.mems
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2).float(), shift_labels, reduction="none"), None


def uses_segment_end(model: nn.Module) -> bool:
    """Whether positions count from the segment's end, so that what a token sees depends on what follows it."""
    return isinstance(model, TransfoXLForCausalLM) and model.config.attn_type in (VASWANI, AL_RFOU)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
