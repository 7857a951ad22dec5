"""`generate` by one CUDA graph a token, from the token's embedding to the choice of the next.

A GPU computes a token in a fraction of the time in which Python launches its hundreds of kernels. With a static cache
these are the same for every token, on the same tensors, so that one graph launches them. The loop is that of
`generate` for greedy search and sampling: it chooses the same tokens, and draws the same random numbers.

Letters: B batch, V vocabulary, M = `mem_len`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from ..transfo_xl.attention_transfo_xl import OPERATORS
from ..transfo_xl.cache_transfo_xl import CACHE_NAME, MemoryCache, decoding_state_of, is_filled
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .captured import RECORDERS, Step, capture, why_not_captured
from .static_cache import StaticMemoryCache

logger = logging.get_logger(__name__)

# Tokens launched kernel by kernel, which compiles all kernels; a capture takes about as long as one such token.
TOKENS_BEFORE = 2
# New tokens below which a graph saves no time.
FEWEST_TOKENS = 8
# Tokens between two checks by the host whether all texts have ended.
LOOK_EVERY = 16
# Warpers that only launch kernels, and read the scores alone; criteria that `Texts` implements.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, LogitNormalization)
CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


def decode(
    model: TransfoXLForCausalLM,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The result of `GenerationMixin._sample`, (B, n) token ids; None where `_sample` has to compute them.

    The random generator is ahead of `_sample`'s, because tokens are drawn until the host sees that all texts ended.

    Args:
        input_ids, processors, criteria, config: the arguments of `_sample`. kwargs: its other keywords.

    Raises:
        RuntimeError: scores of sampled tokens are NaN, as `torch.multinomial` raises it.
    """
    cache = kwargs.get(CACHE_NAME)
    is_default = type(cache) is MemoryCache and not is_filled(cache) and not hasattr(cache, "_is_user_defined")
    few = criteria.max_length is None or criteria.max_length - input_ids.shape[1] < FEWEST_TOKENS
    if input_ids.device.type not in RECORDERS or not is_default or few or config.is_assistant:
        return None
    if reason := why_not_decoded(model, input_ids, processors, criteria, config, kwargs):
        logger.info(f"tokens are launched kernel by kernel: {reason}")
        return None
    streamer, lengths = kwargs.get("streamer"), kwargs.get("lengths")
    cache = StaticMemoryCache(model.config, model._mem_len(lengths))
    read = {name: value for name, value in kwargs.items() if name not in ("streamer", "synced_gpus")}
    outputs = model._prefill(input_ids, config, read | {CACHE_NAME: cache})
    texts = Texts(model, cache, input_ids, processors, config, criteria.max_length, lengths)
    texts.draw()
    texts.take(outputs.logits)
    # Freed here, because the logits of a long prompt take more memory than anything else.
    del outputs
    if streamer is not None:
        streamer.put(texts.token[:, 0].cpu())
    texts.write(streamer)
    if streamer is not None:
        streamer.end()
    return texts.found()


def why_not_decoded(
    model: TransfoXLForCausalLM,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    kwargs: dict[str, Any],
) -> str | None:
    """The reason why a graph cannot replace `_sample` with these arguments; None if it can."""
    for entry in processors:
        if type(entry) not in WARPERS:
            return f"{type(entry).__name__} may compute with Python"
    for entry in criteria:
        if type(entry) not in CRITERIA:
            return f"{type(entry).__name__} is to be asked at every token"
    if config.return_dict_in_generate:
        return "return_dict_in_generate returns more than the texts"
    if kwargs.get("synced_gpus"):
        return "synced_gpus waits for other processes at every token"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size cuts the prompt"
    if model.training:
        return "the model is in training mode"
    if model.config.initial_memory == "zeros" and kwargs.get("attention_mask") is not None:
        return 'padding before an initial memory of "zeros" is looked for at every token'
    return why_not_captured(model, input_ids[:, :1])


class Texts:
    """Texts in generation; a step reads and writes tensors at fixed addresses alone, so that a graph can capture it.

    Attributes:
        ids: (B, n) token ids, valid in the columns before `place`, (1,). token: (B, 1), the last one.
        unfinished: (B,) bool. broken: (1,) bool, whether scores of sampled tokens were NaN.
    """

    def __init__(
        self,
        model: TransfoXLForCausalLM,
        cache: StaticMemoryCache,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        length: int,
        lengths: Any = None,
    ):
        """Args:
        cache: the cache after `input_ids`, (B, L). length: the greatest length of the texts.
        lengths: see `TransfoXLModel.forward`.
        """
        rows, self._begun = input_ids.shape
        device = input_ids.device
        self._model, self._cache, self._processors, self._lengths = model, cache, processors, lengths
        self._length, self._written = length, self._begun + 1
        self.ids = F.pad(input_ids, (0, length - self._begun))
        self.place = torch.full((1,), self._begun, device=device)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self.broken = torch.zeros(1, dtype=torch.bool, device=device)
        self._ends, self._pad = config._eos_token_tensor, config._pad_token_tensor
        # Drawn outside of the graph, because no other thread may draw during the capture of a graph that does.
        noise = torch.empty(rows, model.config.vocab_size, device=device)
        self._noise: Tensor | None = noise if config.do_sample else None
        self._key_mask = decoding_state_of(cache).key_mask

    def draw(self) -> None:
        """Draw the noise of the next choice, where tokens are sampled."""
        if self._noise is not None:
            self._noise.exponential_()

    def step(self) -> None:
        """Read the last token and choose the next: the step that a graph captures."""
        state: Any = decoding_state_of(self._cache)
        state.key_mask = self._key_mask
        options = {CACHE_NAME: self._cache, "use_cache": True, "lengths": self._lengths, "return_dict": True}
        logits = self._model(self.token, **options).logits
        if self._key_mask is not None:
            # The new mask is copied into the first one, because a graph reads the tensors of its capture.
            self._key_mask.copy_(state.key_mask)
            state.key_mask = self._key_mask
        self.take(logits)

    def take(self, logits: Tensor) -> None:
        """Choose each text's next token by the last position of (B, n, V) logits, and write it into `ids`."""
        scores = self._processors(self.ids, logits[:, -1].to(torch.float32, copy=True))
        if self._noise is not None:
            # The choice of `torch.multinomial`, which a graph cannot contain, because it checks on the host.
            probabilities = F.softmax(scores, dim=-1)
            chosen = (probabilities / self._noise).argmax(dim=-1)
            # One column is checked, because one NaN score makes the whole row of a softmax NaN.
            self.broken |= probabilities[:, 0].isnan().any()
        else:
            chosen = scores.argmax(dim=-1)
        if self._ends is not None:
            chosen = torch.where(self.unfinished, chosen, self._pad)
            self.unfinished &= (chosen[:, None] != self._ends).all(dim=-1)
        self.token.copy_(chosen[:, None])
        self.ids.index_copy_(1, self.place, self.token)
        self.place += 1

    def write(self, streamer: Any = None) -> None:
        """Generate until all texts have ended or have their greatest length; each token is passed to the streamer."""
        run: Step = self.step
        every, first = 1 if streamer is not None else LOOK_EVERY, self._written
        while self._written < self._length and not ((self._written - first) % every == 0 and self.has_ended()):
            if self._written - first == TOKENS_BEFORE:
                run = capture(self.step, self.ids.device, "tokens are launched kernel by kernel") or self.step
            self.draw()
            run()
            self._written += 1
            if streamer is not None:
                streamer.put(self.token[:, 0].cpu())

    def has_ended(self) -> bool:
        """Whether all texts have ended, for which the host waits for the device. Raises a RuntimeError if `broken`."""
        if bool(self.broken):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return self._ends is not None and not bool(self.unfinished.any())

    def found(self) -> Tensor:
        """(B, n) ids, up to the end of the longest text."""
        self.has_ended()
        new = self.ids[:, self._begun : self._written]
        if self._ends is None:
            return self.ids[:, : self._written]
        is_end = torch.isin(new, self._ends)
        lengths = torch.where(is_end.any(dim=1), is_end.long().argmax(dim=1) + 1, new.shape[1])
        return self.ids[:, : self._begun + int(lengths.max())]


OPERATORS.decode = decode
