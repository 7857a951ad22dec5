"""Adaptive input and adaptive softmax over frequency-sorted bins of the vocabulary.

The vocabulary is cut at `cutoffs` into bins; bin i has embeddings of width `d_embed // div_val**i`, projected to the
width of the model (Baevski and Auli, 2019). In the softmax (Grave et al., 2017), bin 0 and one entry for each further
bin ("cluster") form the head; the probability of a token in bin i is that of its cluster times that within the bin.

With div_val = 1 all bins have one width and share one table of embeddings.

Every parameter is read in the forward of the module that owns it, so that offloading and sharding hooks see it.
"""

import math
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_transfo_xl import TransfoXLConfig

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveLogSoftmax",
    "InputProjection",
    "OutputLayer",
    "OutputProjection",
    "check_labels",
]


# A cluster this much (in nats) below the k-th best token is skipped. There is a margin because what follows rounds: a
# temperature divides, beam search adds the scores of the text before, and neither may make different tokens equal.
PRUNING_MARGIN = 1e-3


class InputProjection(nn.Module):
    """From the width of a bin, (..., d_i), to that of the model, (..., D).

    This and `OutputProjection` store (D, d_i), so that the two can be tied. They are no `nn.Linear`: whoever adapts or
    replaces those would change both ends of a tie in different ways.
    """

    def __init__(self, width: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, width))

    def forward(self, embeds: Tensor) -> Tensor:
        return F.linear(embeds, self.weight)


class OutputProjection(InputProjection):
    """From the width of the model, (..., D), to that of a bin, (..., d_i)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.weight.T)


class OutputLayer(nn.Module):
    """Logits of the tokens [start, end) of a table, so that one table can serve all bins."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden_states: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        return F.linear(hidden_states, self.weight[start:end], self.bias[start:end])

    def to_linear(self) -> nn.Linear:
        """The whole table as the layer that `transformers` can resize; the parameters are shared."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


def _is_projected(config: TransfoXLConfig, width: int) -> bool:
    """Whether a bin of this width has a projection; otherwise it is the identity and has no parameter."""
    return width != config.d_model or (config.div_val > 1 and config.proj_same_dim)


def _tables(config: TransfoXLConfig) -> list[tuple[int, int]]:
    """(tokens, width) of each table of embeddings: one for each bin, or one for all with div_val = 1."""
    if config.div_val == 1:
        return [(config.vocab_size, config.d_embed)]
    return [(end - start, width) for start, end, width in config.bins]


class AdaptiveEmbedding(nn.Module):
    """Token embeddings of all bins, projected to D and scaled by √D as in the original."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.scale = config.d_model**0.5
        self.emb_layers = nn.ModuleList(nn.Embedding(tokens, width) for tokens, width in _tables(config))
        self.emb_projs = nn.ModuleList(
            InputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, width in _tables(config)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """
        Args:
            input_ids: (B, L) int, each in [0, V).

        Returns:
            (B, L, D).

        Raises:
            IndexError: an id lies outside the vocabulary.
        """
        _check_range(input_ids, self.config.vocab_size, "input_ids", IndexError)
        dtype = self.emb_layers[0].weight.dtype
        if len(self.emb_layers) == 1:
            return self.emb_projs[0](self.emb_layers[0](input_ids)).to(dtype) * self.scale
        # Every bin embeds every token and the right one is kept: the projections are small beside the layers, and
        # selecting tokens by bin would make the host wait for the device once for each bin.
        parts = []
        for (start, end, _), embed, project in zip(self.config.bins, self.emb_layers, self.emb_projs, strict=True):
            outside = (input_ids < start) | (input_ids >= end)
            bin_embeds = project(embed((input_ids - start).clamp(0, end - start - 1)))
            parts.append(bin_embeds.masked_fill(outside[..., None], 0))
        # Under autocast the projections return a narrower type than the memory has.
        return reduce(torch.add, parts).to(dtype) * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities and losses from hidden states. Logits are normalised in fp32 whatever the model's dtype."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.out_layers = nn.ModuleList(
            OutputLayer(nn.Parameter(torch.empty(tokens, width)), nn.Parameter(torch.zeros(tokens)))
            for tokens, width in _tables(config)
        )
        # The softmax can have a projection for each bin though the tokens share one table.
        self.out_projs = nn.ModuleList(
            OutputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, _, width in config.bins
        )
        if config.cutoffs:
            self.clusters = nn.Linear(config.d_embed, len(config.cutoffs))

    def log_prob(self, hidden_states: Tensor, top_k: int | None = None) -> Tensor:
        """
        Args:
            hidden_states: (..., D).
            top_k: only the `top_k` most probable tokens of each row have to be right. No token is more probable than
                its cluster, so a cluster less probable than the k-th best token found so far holds none of them: it
                is not computed, and its probability is spread evenly over its tokens. So the probabilities still sum
                to 1, and whoever looks at no more than the k best tokens finds exactly what he would find in the
                whole. None: all tokens are right.

        Returns:
            Log-probabilities of the whole vocabulary, (..., V) fp32.
        """
        head = self._head_logits(hidden_states).log_softmax(-1)
        if not self.config.cutoffs:
            return head
        # What saves reading a table from memory on a CPU would make the host wait for any other device.
        prunes = top_k is not None and head.device.type == "cpu" and not torch.compiler.is_compiling()
        parts = [head[..., : self.config.cutoffs[0]]]
        best = _best(parts[0], top_k) if prunes else None
        for i, (start, end, _) in list(enumerate(self.config.bins))[1:]:
            cluster = head[..., self.config.cutoffs[0] + i - 1, None]
            if prunes and best.shape[-1] == top_k and (cluster < best[..., -1:] - PRUNING_MARGIN).all():
                parts.append((cluster - math.log(end - start)).expand(*cluster.shape[:-1], end - start))
                continue
            parts.append(cluster + self._bin_logits(hidden_states, i).log_softmax(-1))
            if prunes:
                best = _best(torch.cat([best, _best(parts[-1], top_k)], dim=-1), top_k)
        return torch.cat(parts, dim=-1)

    def forward(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods of the targets; a token's cost is that of the head and of its own bin only.

        Args:
            hidden_states: (N, D).
            targets: (N,) int in [0, V), or -100 to ignore.

        Returns:
            (N,) fp32 in target order, 0 where ignored.

        Raises:
            ValueError: a target is neither -100 nor a token.
        """
        check_labels(targets, self.config.vocab_size)
        head_targets = targets
        for i, (start, end, _) in list(enumerate(self.config.bins))[1:]:
            head_targets = head_targets.masked_fill(
                (targets >= start) & (targets < end), self.config.cutoffs[0] + i - 1
            )
        nll = F.cross_entropy(self._head_logits(hidden_states), head_targets, reduction="none")
        for i, (start, end, _) in list(enumerate(self.config.bins))[1:]:
            inside = (targets >= start) & (targets < end)
            if torch.compiler.is_compiling():
                # A graph has no room for "as many tokens as there are in this bin": all of them, and ignore the rest.
                bin_targets = (targets - start).masked_fill(~inside, -100)
                nll = nll + F.cross_entropy(self._bin_logits(hidden_states, i), bin_targets, reduction="none")
            else:
                # Also without any token inside, so that the bin's parameters get a gradient (zero) on every process.
                rows = inside.nonzero().squeeze(1)
                bin_logits = self._bin_logits(hidden_states.index_select(0, rows), i)
                bin_nll = F.cross_entropy(bin_logits, targets.index_select(0, rows) - start, reduction="none")
                nll = nll.index_add(0, rows, bin_nll)
        return nll

    def _head_logits(self, hidden_states: Tensor) -> Tensor:
        """Bin 0 and the clusters: (..., cutoffs[0] + n_clusters) fp32, or (..., V) without cutoffs."""
        projected = self.out_projs[0](hidden_states)
        if not self.config.cutoffs:
            return self.out_layers[0](projected).float()
        head = self.out_layers[0](projected, 0, self.config.cutoffs[0])
        return torch.cat([head, self.clusters(projected)], dim=-1).float()

    def _bin_logits(self, hidden_states: Tensor, i: int) -> Tensor:
        """Bin i ≥ 1: (..., tokens of the bin) fp32."""
        projected = self.out_projs[i](hidden_states)
        if len(self.out_layers) > 1:
            return self.out_layers[i](projected).float()
        start, end, _ = self.config.bins[i]
        return self.out_layers[0](projected, start, end).float()


def _best(log_probs: Tensor, k: int) -> Tensor:
    """The k highest of (..., n), or all of them if there are fewer, highest first."""
    return log_probs.topk(min(k, log_probs.shape[-1])).values


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise a ValueError if a label is neither -100 nor in [0, V)."""
    _check_range(labels.masked_fill(labels == -100, 0), vocab_size, "labels", ValueError)


def _check_range(ids: Tensor, vocab_size: int, name: str, error: type[Exception]) -> None:
    if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if low < 0 or high >= vocab_size:
        wrong = int(low) if low < 0 else int(high)
        raise error(f"{name} holds {wrong}, outside the vocabulary [0, {vocab_size})")
