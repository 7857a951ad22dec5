"""Adaptive input and adaptive softmax over frequency-sorted bins of the vocabulary.

The vocabulary is cut at `cutoffs` into bins; bin i has embeddings of width `d_embed // div_val**i`, projected to the
width of the model (Baevski and Auli, 2019). In the softmax (Grave et al., 2017), bin 0 and one entry for each further
bin ("cluster") form the head; the probability of a token in bin i is that of its cluster times that within the bin.

With div_val = 1 all bins have one width and share one table of embeddings.

Every parameter is read in the forward of the module that owns it, so that offloading and sharding hooks see it.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention_transfo_xl import OPERATORS
from .configuration_transfo_xl import TransfoXLConfig
from .positions_transfo_xl import is_exporting

# `log_prob(top_k=…)` skips a cluster this much (in nats) below the k-th best token. The margin is there because later
# steps round: a temperature divides, beam search adds the scores of the text before, and neither may make different
# tokens equal.
PRUNING_MARGIN = 1e-3
# Of fewer logits than this the losses are computed by the plain operations, which are as fast then.
FEW_LOGITS = 2**18


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
    """A table of tokens, (n, d_i), with their biases, (n,). One table can serve all bins.

    `layer(function, *arguments)` is `function(weight, bias, *arguments)`: the softmax says what is to be done with the
    table, and does it here, where hooks see the parameters being read.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, function: Callable, *arguments) -> Any:
        return function(self.weight, self.bias, *arguments)

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


def _first_tied_projection(config: TransfoXLConfig) -> int | None:
    """The first bin whose projections are tied though the tables are not, or None."""
    if config.tie_word_embeddings:
        return None
    ties = zip(config.tie_projs or (), config.bins, strict=True)
    return next((i for i, (tie, (_, _, width)) in enumerate(ties) if tie and _is_projected(config, width)), None)


class AdaptiveEmbedding(nn.Module):
    """Token embeddings of all bins, projected to D and scaled by √D as in the original."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.scale = config.d_model**0.5
        self.bins = config.bins
        self.emb_layers = nn.ModuleList(nn.Embedding(tokens, width) for tokens, width in _tables(config))
        self.emb_projs = nn.ModuleList(
            InputProjection(width, config.d_model) if _is_projected(config, width) else nn.Identity()
            for _, width in _tables(config)
        )

    @property
    def weight(self) -> nn.Parameter:
        """The first table, or the first tied projection where no tables are tied.

        Whoever shards the model (accelerate) puts the embedding and the softmax together if their `weight` is one.
        """
        tied = _first_tied_projection(self.config)
        projection = 0 if self.config.div_val == 1 else tied
        return self.get_parameter("emb_layers.0.weight" if tied is None else f"emb_projs.{projection}.weight")

    def forward(self, input_ids: Tensor) -> Tensor:
        """
        Args:
            input_ids: (B, L) int, each in [0, V).

        Returns:
            (B, L, D).

        Raises:
            IndexError: an id lies outside the vocabulary. In a compiled call that is a RuntimeError, and a single
                token is not looked at.
        """
        _check_range(input_ids, self.config.vocab_size, "input_ids", IndexError)
        dtype = self.emb_layers[0].weight.dtype
        if len(self.emb_layers) == 1:
            return self.emb_projs[0](self.emb_layers[0](input_ids)).to(dtype) * self.scale
        # Every bin embeds every token and the right one is kept: the projections are small beside the layers, and
        # selecting tokens by bin would make the host wait for the device once for each bin.
        parts = []
        for (start, end, _), embed, project in zip(self.bins, self.emb_layers, self.emb_projs, strict=True):
            place = input_ids - start
            inside = place.clamp(0, end - start - 1)
            # Nothing is projected to nothing, and before the projection there is less to write.
            parts.append(project(embed(inside).masked_fill((place != inside)[..., None], 0)))
        # Under autocast the projections return a narrower type than the hidden states have.
        return reduce(torch.add, parts).to(dtype) * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities and losses from hidden states. Logits are normalised in fp32, or in fp64 if the model is."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.config = config
        self.bins = config.bins
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

    @property
    def weight(self) -> nn.Parameter:
        """See `AdaptiveEmbedding.weight`."""
        tied = _first_tied_projection(self.config)
        return self.get_parameter("out_layers.0.weight" if tied is None else f"out_projs.{tied}.weight")

    @property
    def bias(self) -> nn.Parameter:
        """The biases of all tokens, (V,), which belong to `weight`: whoever fuses head and loss (TRL) reads the two.

        Raises:
            AttributeError: the softmax is more than hidden states times one table: there are cutoffs or a projection.
        """
        if self.config.cutoffs or not isinstance(self.out_projs[0], nn.Identity):
            raise AttributeError("a softmax with cutoffs or projections is no single table with a bias")
        return self.get_parameter("out_layers.0.bias")

    def forward(
        self,
        hidden_states: Tensor,
        targets: Tensor | None = None,
        top_k: int | None = None,
        by_bin: Any = None,
    ) -> Tensor:
        """`nll` of the targets, or `log_prob` without any: sharding gathers the parameters for a forward."""
        if targets is None:
            return self.log_prob(hidden_states, top_k)
        return self.nll(hidden_states, targets, by_bin)

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
        head = self.logits(hidden_states, 0).log_softmax(-1)
        if not self.config.cutoffs:
            return head
        # What saves reading a table from memory on a CPU would make the host wait for any other device.
        prunes = head.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.jit.is_tracing()
        k = top_k if top_k is not None and prunes else 0
        parts = [head[..., : self.config.cutoffs[0]]]
        best = _best(parts[0], k)
        for i, (start, end, _) in list(enumerate(self.bins))[1:]:
            cluster = head[..., self.config.cutoffs[0] + i - 1, None]
            if 0 < k == best.shape[-1] and (cluster < best[..., -1:] - PRUNING_MARGIN).all():
                parts.append((cluster - math.log(end - start)).expand(*cluster.shape[:-1], end - start))
                continue
            parts.append(cluster + self.logits(hidden_states, i).log_softmax(-1))
            if k > 0:
                best = _best(torch.cat([best, _best(parts[-1], k)], dim=-1), k)
        return torch.cat(parts, dim=-1)

    def nll(self, hidden_states: Tensor, targets: Tensor, by_bin: Any = None) -> Tensor:
        """Negative log-likelihoods of the targets; a token's cost is that of the head and of its own bin only.

        Args:
            hidden_states: (N, D).
            targets: (N,) int in [0, V), or -100 to ignore.
            by_bin: the result of `sort_targets(targets)`, if it was called before.

        Returns:
            (N,) fp32 in target order, 0 where ignored.
        """
        many = targets.numel() * self.config.vocab_size > FEW_LOGITS and not torch.jit.is_tracing()
        if many and OPERATORS.nll is not None:
            return OPERATORS.nll(self, hidden_states, targets, by_bin)
        return self.plain_nll(hidden_states, targets)

    def sort_targets(self, targets: Tensor) -> Any:
        """Check the targets, (N,), and prepare `nll` before the layers run, so that it need not wait for a GPU later.

        Raises:
            ValueError: a target is neither -100 nor in [0, V). A GPU raises a RuntimeError, later, and so may a
                compiled call.
        """
        _check_range(targets.masked_fill(targets == -100, 0), self.config.vocab_size, "labels", ValueError)
        many = targets.numel() * self.config.vocab_size > FEW_LOGITS
        return OPERATORS.sort_targets(self, targets) if many and OPERATORS.sort_targets is not None else None

    def plain_nll(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """`nll` by cross-entropies: of the head for all tokens, and of each further bin for its own tokens."""
        nll = F.cross_entropy(self.logits(hidden_states, 0), self.head_targets(targets), reduction="none")
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        for i, (start, end, _) in list(enumerate(self.bins))[1:]:
            inside = (targets >= start) & (targets < end)
            if in_graph:
                # A graph has one shape, so that each bin computes all tokens and ignores the rest.
                of_bin = (targets - start).masked_fill(~inside, -100)
                nll = nll + F.cross_entropy(self.logits(hidden_states, i), of_bin, reduction="none")
            else:
                # A bin without any token too, so that its parameters get a gradient (zero) on every process.
                rows = inside.nonzero()[:, 0]
                logits, of_bin = self.logits(hidden_states[rows], i), targets[rows] - start
                nll = nll.index_add(0, rows, F.cross_entropy(logits, of_bin, reduction="none"))
        return nll

    def head_targets(self, targets: Tensor) -> Tensor:
        """(N,) in the head: the token itself, or the cluster of its bin; -100 stays."""
        if not self.config.cutoffs:
            return targets
        first, *others = self.config.cutoffs
        return reduce(torch.add, [targets >= cutoff for cutoff in others], targets.clamp(max=first))

    def logits(self, hidden_states: Tensor, i: int) -> Tensor:
        """(..., tokens of bin i) fp32, of hidden states (..., D); behind those of bin 0 the clusters."""
        projected = self.out_projs[i](hidden_states)
        layer = self.out_layers[i if len(self.out_layers) > 1 else 0]
        start, end, _ = self.bins[i]
        rows = (start, end) if len(self.out_layers) == 1 else (0, end - start)
        found = layer(_logits, projected, *rows)
        if i == 0 and self.config.cutoffs:
            found = torch.cat([found, self.clusters(projected)], dim=-1)
        return found.to(torch.promote_types(found.dtype, torch.float32))


def wide(logits: Tensor) -> Tensor:
    """Logits, (…), in the type in which they are normalised: fp32, or fp64 where the model computes in it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logits(weight: Tensor, bias: Tensor, hidden_states: Tensor, start: int, end: int) -> Tensor:
    """(..., d_i) → (..., end - start), the logits of the tokens [start, end) of a table."""
    return OPERATORS.product(hidden_states, weight[start:end], bias[start:end])


def _best(log_probs: Tensor, k: int) -> Tensor:
    """The k highest of (..., n), or all of them if there are fewer, highest first."""
    return log_probs.amax(-1, keepdim=True) if k == 1 else log_probs.topk(min(k, log_probs.shape[-1])).values


def check_labels(labels: Tensor, size: int, of: str = "the vocabulary") -> None:
    """Raise a ValueError if a label is neither -100 nor in [0, size), the numbers `of` what it is one of."""
    _check_range(labels.masked_fill(labels == -100, 0), size, "labels", ValueError, of)


def _check_range(ids: Tensor, size: int, name: str, error: type[Exception], of: str = "the vocabulary") -> None:
    if ids.is_meta or ids.numel() == 0 or torch.jit.is_tracing():
        return
    if torch.compiler.is_compiling():
        # Not in an exported graph, of which torch 2.6 cannot tell, nor for the single tokens of decoding, which a
        # model has chosen, nor for the many calls of torch.func.vmap.
        looks = torch.compiler.is_dynamo_compiling() and not is_exporting() and ids.shape[-1] > 1
        if looks and not torch._C._functorch.is_batchedtensor(ids):
            inside = (ids >= 0) & (ids < size)
            torch._assert_async(inside.all(), f"{name} outside {of} [0, {size})")
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        # torch.func.vmap: the numbers of many calls at once, which none of them can look at.
        return
    low, high = ids.aminmax()
    if ids.is_cuda:
        # As for any embedding there: the device stops, and the host has not had to wait for it.
        torch._assert_async((low >= 0) & (high < size), f"{name} outside {of} [0, {size})")
    elif low < 0 or high >= size:
        raise error(f"{name} holds {int(low if low < 0 else high)}, outside {of} [0, {size})")
