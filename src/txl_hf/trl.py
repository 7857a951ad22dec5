"""TRL's trainers on a model with cutoffs or projections: `use_own_softmax(trainer)` before `trainer.train()`.

TRL multiplies hidden states by one table, `lm_head.weight`, in a `forward` that it puts into every model, and fails
with an AttributeError where a softmax has cutoffs or a projection before its table (`d_embed` other than `d_model`, or
`div_val` above 1). `use_own_softmax` puts another `forward` in its place, which calls the model's own softmax. It
computes the distributions of all scored tokens at once: take shorter rows or smaller batches where that is too much.
"""

import functools
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from trl.trainer.utils import FusedCausalLMOutput

from .transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM


def use_own_softmax(trainer: Any) -> None:
    """Let the model of a trainer, and its reference model, compute TRL's per-token figures by their own softmax.

    A model whose softmax is one table, and any other than ours, keeps TRL's `forward`.

    Args:
        trainer: one of TRL's, before it is trained: SFT, DPO, KTO, GRPO, RLOO.
    """
    temperature = getattr(trainer, "temperature", 1.0)
    in_fp32 = getattr(trainer.args, "cast_lm_head_to_fp32", False)
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        model = trainer.accelerator.unwrap_model(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if isinstance(model, TransfoXLForCausalLM) and not hasattr(model.lm_head, "bias"):
            set_fused_forward(model, temperature, in_fp32, trainer.accelerator.autocast)


def set_fused_forward(
    model: TransfoXLForCausalLM,
    temperature: float = 1.0,
    in_fp32: bool = False,
    autocast: type[AbstractContextManager] | Any = nullcontext,
) -> None:
    """Give a model a `forward` that takes `fused_lm_head=True` and returns TRL's `FusedCausalLMOutput` then.

    Args:
        temperature: of the distributions. in_fp32: compute them in fp32, whatever parameters and autocast are.
        autocast: the accelerator's context for the fused computations.
    """

    # `generate` reads in the signature which arguments it may pass.
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return type(self).forward(self, *args, **kwargs)
        with autocast():
            hidden_states = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state
            if shift_labels is None:
                hidden_states, targets = hidden_states[:, :-1], labels[:, 1:]
            else:
                targets = shift_labels
            mask = targets != -100
            scored = hidden_states[mask]
            log_probs = _in_fp32(self.lm_head, scored) if in_fp32 else self.lm_head(scored).float()
        found = _distributions(log_probs, targets[mask], temperature)
        per_token = {name: values.new_zeros(mask.shape).masked_scatter(mask, values) for name, values in found.items()}
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(loss=-per_token["log_probs"].sum() / count, label_mask=mask, **per_token)

    model.forward = types.MethodType(forward, model)


def _in_fp32(lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
    """(N, D) → (N, V) log-probabilities, computed in fp32 whatever the parameters and autocast are."""
    parameters = {name: parameter.float() for name, parameter in lm_head.named_parameters()}
    with torch.autocast(hidden_states.device.type, enabled=False):
        return functional_call(lm_head, parameters, (hidden_states.float(),))


def _distributions(log_probs: Tensor, targets: Tensor, temperature: float) -> dict[str, Tensor]:
    """TRL's figures of the distributions (N, V) of N scored tokens, at a temperature: (N,) each."""
    if temperature != 1.0:
        log_probs = F.log_softmax(log_probs / temperature, dim=-1)
    detached = log_probs.detach()
    return {
        "log_probs": log_probs.gather(-1, targets[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "log_sum_sq_probs": (2 * detached).logsumexp(-1),
        # The logits are log-probabilities.
        "mean_logits": detached.mean(-1),
        "is_top1": detached.argmax(-1) == targets,
    }
