"""Steps of `generate` on a CPU that compute the clusters of the adaptive softmax in which a chosen token may be.

A CPU saves reading the tables of the other clusters from memory; the host would wait for any other device.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from ..transfo_xl.adaptive_transfo_xl import AdaptiveLogSoftmax
from ..transfo_xl.attention_transfo_xl import OPERATORS

# A cluster is skipped this much (in nats) below the k-th best token. The margin is needed because later steps round: a
# temperature divides, beam search adds earlier scores, and neither may make different tokens equal.
PRUNING_MARGIN = 1e-3


def loop_options(processors: LogitsProcessorList, config: GenerationConfig, kwargs: dict[str, Any]) -> dict[str, int]:
    """The argument `logits_top_k` for a loop of `generate`, or none where any token may matter.

    A temperature and a normalisation keep the order of the tokens; a minimum length removes the end tokens, so that as
    many more are needed. Any other processor, returned scores, and `synced_gpus`, whose processes gather the same
    sharded parameters, need all tokens.
    """
    if config.output_scores or config.output_logits or kwargs.get("synced_gpus"):
        return {}
    taken_away = 0
    for processor in processors:
        if type(processor) is TopKLogitsWarper:
            return {"logits_top_k": processor.top_k + taken_away}
        if type(processor) in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            taken_away += len(processor.eos_token_id)
        elif type(processor) not in (TemperatureLogitsWarper, LogitNormalization):
            return {}
    if config.do_sample:
        return {}
    if config.num_beams in (None, 1):
        return {"logits_top_k": 1 + taken_away}
    # transformers keeps max(2, 1 + number of end tokens) · num_beams candidates a step, so that enough beams continue
    # if every end token is among the best.
    ends = config._eos_token_tensor
    candidates = max(2, 1 + (0 if ends is None else len(ends))) * config.num_beams
    return {"logits_top_k": candidates + taken_away}


def log_prob(softmax: AdaptiveLogSoftmax, hidden_states: Tensor, top_k: int) -> Tensor:
    """`AdaptiveLogSoftmax.log_prob`, (..., V) fp32, where the `top_k` best tokens of each row have to be exact.

    No token is more probable than its cluster, so a cluster less probable than the k-th best token so far contains
    none of the best: its bin is not computed, and its probability is spread evenly over its tokens, so that the
    probabilities still sum to 1.
    """
    is_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not softmax.config.cutoffs or is_graph or hidden_states.device.type != "cpu":
        return softmax.log_prob(hidden_states)
    first = softmax.config.cutoffs[0]
    head = softmax.logits(hidden_states, 0).log_softmax(-1)
    parts = [head[..., :first]]
    best = _best(parts[0], top_k)
    for i, (start, end, _) in list(enumerate(softmax.bins))[1:]:
        cluster = head[..., first + i - 1, None]
        if best.shape[-1] == top_k and (cluster < best[..., -1:] - PRUNING_MARGIN).all():
            parts.append((cluster - math.log(end - start)).expand(*cluster.shape[:-1], end - start))
            continue
        parts.append(cluster + softmax.logits(hidden_states, i).log_softmax(-1))
        best = _best(torch.cat([best, _best(parts[-1], top_k)], dim=-1), top_k)
    return torch.cat(parts, dim=-1)


def _best(log_probs: Tensor, k: int) -> Tensor:
    """The k highest of (..., n), or all of them if there are fewer, highest first."""
    return log_probs.amax(-1, keepdim=True) if k == 1 else log_probs.topk(min(k, log_probs.shape[-1])).values


for function in (loop_options, log_prob):
    setattr(OPERATORS, function.__name__, function)
