"""TRL's trainers on a model with cutoffs or projections: `import txl_hf.trl` before a trainer is made.

TRL multiplies hidden states by one table, `lm_head.weight`, in a head of its own that it puts into every model. A
softmax with cutoffs, or with a projection before its table (`d_embed` other than `d_model`, or `div_val` above 1), is
more than that, and TRL fails there with an AttributeError. With this module imported, such models get a head that asks
their own softmax; all others keep TRL's. It computes the whole distribution of each scored token, as TRL does, but all
of them at once: take shorter rows or smaller batches where that is too much.
"""

import functools
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from trl.trainer import utils

from .transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

__all__ = ["add_own_lm_head"]

_add_fused_lm_head = utils.add_fused_lm_head


def add_own_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """What TRL calls to put its fused head into a model, with the same arguments."""
    # A softmax that is one table has the bias that belongs to it.
    if not isinstance(model, TransfoXLForCausalLM) or hasattr(model.lm_head, "bias"):
        _add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)
        return
    # A copy of the model takes its method along, and computes with the weights of its own.
    bound = model.forward
    is_method = isinstance(bound, types.MethodType)
    forward = bound.__func__ if is_method else lambda self, *args, **kwargs: bound(*args, **kwargs)

    # `generate` looks in the signature for what it may pass on.
    @functools.wraps(type(model).forward)
    def fused_forward(
        self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs
    ):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return forward(self, *args, **kwargs)
        hidden_states = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state
        if shift_labels is None:
            hidden_states, targets = hidden_states[:, :-1], labels[:, 1:]
        else:
            targets = shift_labels
        mask = targets != -100
        scored = hidden_states[mask]
        log_probs = _in_fp32(self.lm_head, scored) if cast_lm_head_to_fp32 else self.lm_head(scored).float()
        found = _distributions(log_probs, targets[mask], temperature)
        per_token = {name: values.new_zeros(mask.shape).masked_scatter(mask, values) for name, values in found.items()}
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return utils.FusedCausalLMOutput(
            loss=-per_token["log_probs"].sum() / count,
            label_mask=mask,
            **{name: per_token[name] for name in ("log_probs", *outputs)},
        )

    model.forward = types.MethodType(fused_forward, model)


def _in_fp32(lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
    """(N, D) → (N, V) log-probabilities, computed in fp32 whatever the parameters and autocast are."""
    parameters = {name: parameter.float() for name, parameter in lm_head.named_parameters()}
    with torch.autocast(hidden_states.device.type, enabled=False):
        return functional_call(lm_head, parameters, (hidden_states.float(),))


def _distributions(log_probs: Tensor, targets: Tensor, temperature: float) -> dict[str, Tensor]:
    """What TRL asks of the distributions (N, V) of N scored tokens, at a temperature: (N,) each."""
    if temperature != 1.0:
        log_probs = F.log_softmax(log_probs / temperature, dim=-1)
    detached = log_probs.detach()
    return {
        "log_probs": log_probs.gather(-1, targets[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "log_sum_sq_probs": (2 * detached).logsumexp(-1),
        # There are no logits but these, which are shifted so that they are log-probabilities.
        "mean_logits": detached.mean(-1),
        "is_top1": detached.argmax(-1) == targets,
    }


for _module in [module for name, module in sys.modules.items() if name.startswith("trl.")]:
    # Whoever has imported it by name.
    if vars(_module).get("add_fused_lm_head") is _add_fused_lm_head:
        vars(_module)["add_fused_lm_head"] = add_own_lm_head
