"""The model `txl` of lm_eval: its requests are read segment after segment, with memory."""

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import StoppingCriteria

from ..data.loading import ends_lines, load_tokenizer
from ..data.streams import check_sizes
from ..data.texts import encode_text
from ..evaluation.language_model import evaluate_language_model
from ..memories import memory_of, repeat_rows

# Logits of the rows that are read side by side: 256 MiB, and three times that while they are computed.
MOST_LOGITS = 1 << 26


class TransfoXLLM(HFLM):
    """A Transformer-XL for lm_eval; its `model_args` are these arguments and those of lm_eval's `hf`.

    Where a line ends in a token, line feeds are that token in contexts, continuations and generated texts.

    Args:
        pretrained: folder or Hub name.
        segment_length: tokens read in one pass. None: the model's `tgt_len`.
        memory_length, clamp_len, same_length: as in `evaluate_language_model`. None: the model's.
        max_gen_toks: how many tokens to generate where a task does not say.
        device: None, or a GPU on a machine without one: the device that there is.
        options: as for `HFLM`. `prefix_token_id` is the token before a text (bos or else eos), without which its first
            token is not scored. `batch_size` has no effect: the continuations of one context are read side by side.

    Raises:
        ValueError: the checkpoint is no whole Transformer-XL with a tokenizer, or a length is out of range.
    """

    max_gen_toks: int = 256

    def __init__(
        self,
        pretrained: str,
        segment_length: int | None = None,
        memory_length: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        **options,
    ):
        # The lengths are set in the configuration, so that `generate` uses them too.
        lengths = {"mem_len": memory_length, "clamp_len": clamp_len, "same_length": same_length}
        options |= {name: value for name, value in lengths.items() if value is not None}
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(pretrained, device=device, **options)
        if self.config.model_type != "transfo-xl":
            raise ValueError(f"pretrained={pretrained} is a {self.config.model_type}, not a Transformer-XL")
        # `architectures` of the file, because the loaded model names its own class.
        if not any(name.endswith(("CausalLM", "LMHeadModel")) for name in self.config.architectures or ["CausalLM"]):
            raise ValueError(f"{pretrained} is no whole language model: its weights lack lm_head.")
        # `_config` is the configuration with the lengths given above.
        self._config = self.model.config
        self.segment_length = self.config.tgt_len if segment_length is None else segment_length
        self.max_gen_toks = max_gen_toks
        check_sizes(segment_length=self.segment_length, max_gen_toks=max_gen_toks)

    def _create_tokenizer(self, pretrained, tokenizer, revision="main", trust_remote_code=False, **options):
        name = tokenizer or pretrained
        self.tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)

    def get_model_info(self) -> dict[str, Any]:
        """The settings that lm_eval writes beside its results."""
        lengths = {"memory_length": self.config.mem_len, "clamp_len": self.config.clamp_len}
        lengths |= {"segment_length": self.segment_length, "same_length": self.config.same_length}
        return {**super().get_model_info(), "model_dtype": str(self.model.dtype), **lengths}

    @property
    def _begins_lines(self) -> bool:
        """Whether the token that ends a line also begins the next."""
        return getattr(self.tokenizer, "mode", None) == "lm1b"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options) -> list[int]:
        """The ids of a text that may continue: its last line gets an end token only with a line feed."""
        if ends_lines(self.tokenizer) and not add_special_tokens:
            ids = encode_text(self.tokenizer, string).tolist()
            return ids if string.endswith("\n") else ids[:-1]
        return super().tok_encode(string, bool(add_special_tokens), **options)

    def tok_decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids, in which a token that ends lines is a line feed."""
        if not ends_lines(self.tokenizer):
            return super().tok_decode(tokens, skip_special_tokens)
        text = ""
        for ends, part in groupby(tokens, lambda token: token == self.tokenizer.eos_token_id):
            ids = list(part)
            lines = (len(ids) + 1) // 2 if self._begins_lines else len(ids)
            text += "\n" * lines if ends else super().tok_decode(ids, skip_special_tokens)
        return text

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context (without tokens: the prefix token) and of its continuation, to which white space
        between them belongs, as in lm_eval, and a token of both, as "unlikely" of "un" and "likely" in a vocabulary of
        words. Raises a ValueError for a continuation without tokens that is more than white space."""
        whole, alone = self.tok_encode(context + continuation), self.tok_encode(context.rstrip())
        shared = len(os.path.commonprefix([alone, whole]))
        parted = context != context.rstrip() or not continuation or continuation != continuation.lstrip()
        if 0 < shared == len(alone) and not parted and whole[shared - 1] == self.tokenizer.unk_token_id:
            # The unknown token may stand for a word that begins in the context, so it moves to the continuation.
            shared -= 1
        context_ids, token_ids = whole[:shared], whole[shared:]
        if not token_ids and continuation.strip():
            raise ValueError(f"the continuation {continuation!r:.80} of {context[-40:]!r} has no token")
        if context_ids or not token_ids:
            return context_ids, token_ids
        prefix = self._prefix()
        # A continuation that begins with the prefix token replaces it, as in lm_eval.
        return prefix, token_ids[1:] if token_ids[:1] == prefix else token_ids

    def _prefix(self) -> list[int]:
        if self.prefix_token_id is None:
            raise ValueError(
                "a context is empty, and the tokenizer has no bos or eos token to begin a text with: give one in "
                "model_args, prefix_token_id=…"
            )
        return [self.prefix_token_id]

    @torch.no_grad()
    def _read(self, token_ids: list[int]) -> dict[str, Any]:
        """The memory after some tokens, without the last `ext_len`, to be read again; {} where there is none yet."""
        memory: dict[str, Any] = {}
        for start in range(0, len(token_ids), self.segment_length):
            part = token_ids[max(0, start - self.config.ext_len) : start + self.segment_length]
            memory = memory_of(self.model.transformer(torch.tensor([part], device=self.device), **memory))
        return memory

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Minus the sum of `token_losses` of each text, read as `txl-evaluate` reads it, after the prefix token."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="read"):
            token_ids = encode_text(self.tokenizer, request.args[0]).tolist()
            prefix = [] if self.prefix_token_id is None else [self.prefix_token_id]
            if not (self._begins_lines and token_ids[:1] == prefix):
                token_ids = prefix + token_ids
            scored = len(token_ids) > 1
            result = evaluate_language_model(self.model, token_ids, self.segment_length) if scored else None
            found.append(0.0 if result is None else -result.nll * result.tokens)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether every token of it is the most probable one."""
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **options) -> list[tuple[float, bool]]:
        # A context, however long, is read once for all its continuations.
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, token_ids, _) in enumerate(requests):
            by_context[tuple(token_ids)].append(number)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for context, numbers in tqdm(by_context.items(), disable=disable_tqdm, desc="read"):
            answers = self._score(list(context), [requests[number][2] for number in numbers])
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        return found

    @torch.no_grad()
    def _score(self, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        if (longest := max(map(len, continuations))) == 0:
            return [(0.0, True)] * len(continuations)
        # The last token of the context predicts the first of a continuation. Without a memory each token is scored at
        # the end of a pass of its own over a segment, as in `generate`.
        step = self.segment_length if self.config.mem_len > 0 else 1
        again = self.config.ext_len + self.segment_length - step
        read = self._read(context[:-1]) if self.config.mem_len > 0 else {}
        ids = [torch.tensor(continuation, dtype=torch.int64) for continuation in continuations]
        targets = pad_sequence(ids, batch_first=True, padding_value=-100).to(self.device)
        found: list[tuple[float, bool]] = []
        for rows in targets.split(max(1, MOST_LOGITS // (min(step, longest) * self.config.vocab_size))):
            past = torch.tensor(context, device=self.device).expand(len(rows), -1)
            inputs = torch.cat([past, rows[:, :-1].clamp(min=0)], dim=1)
            memory = repeat_rows(read, len(rows))
            total, is_greedy = torch.zeros(len(rows), dtype=torch.float64), (rows == -100)
            for start in range(0, longest, step):
                labels = rows[:, start : start + step]
                begin, count = start + len(context) - 1, labels.shape[1]
                segment = inputs[:, max(0, begin - again) : begin + count]
                outputs = self.model(segment, **memory, logits_to_keep=count)
                memory, logits = memory_of(outputs), outputs.logits
                picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
                total += picked.masked_fill(labels == -100, 0).cpu().double().sum(1)
                is_greedy[:, start : start + step] |= logits.argmax(-1) == labels
            found += zip(total.tolist(), is_greedy.all(1).tolist(), strict=True)
        return found

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to one of the strings of `until`, the model's `generation_config.eos_token_id`, or
        `max_gen_toks` tokens. A token that ends lines is a line feed."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="generate"):
            found.append(self._generate(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _generate(self, context: str, given: dict[str, Any]) -> str:
        settings: dict[str, Any] = {**normalize_gen_kwargs(given, self.max_gen_toks)}
        until, length = settings.pop("until"), settings.pop("max_gen_toks")
        if not settings["do_sample"]:
            settings.pop("temperature", None)
        token_ids = self.tok_encode(context) or self._prefix()
        # `generate` reads the last segment from the memory of all others.
        read = 0 if self.config.mem_len == 0 else (len(token_ids) - 1) // self.segment_length * self.segment_length
        if read > 0:
            settings |= self._read(token_ids[:read])
        prompt = torch.tensor([token_ids[max(0, read - self.config.ext_len) :]], device=self.device)
        stop = _UntilStrings(self.tok_decode, until, prompt.shape[1])
        settings |= {"max_new_tokens": length, "stopping_criteria": [stop]}
        with ExitStack() as stack:
            if self.config.mem_len == 0:
                # `generate` would read the whole text for each token, and not a window as `_score` does.
                stack.callback(self.model.register_forward_pre_hook(self._cut_to_window, with_kwargs=True).remove)
            # A mask of ones, because a mask inferred from the ids would hide line ends if these are the pad token.
            sequences = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        written = sequences[0, prompt.shape[1] :].tolist()
        ends = settings.get("eos_token_id", self.model.generation_config.eos_token_id)
        # The token that ends the text is removed, even if it is a line feed.
        if written and written[-1] in (ends if isinstance(ends, list) else [ends]):
            written.pop()
        return stop.cut(self.tok_decode(written))

    def _cut_to_window(self, model, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        window = self.config.ext_len + self.segment_length
        return args, kwargs | {"input_ids": kwargs["input_ids"][:, -window:], "attention_mask": None}


class _UntilStrings(StoppingCriteria):
    """Stops where one of some strings is in the text generated after a prompt of `start` tokens."""

    def __init__(self, decode: Callable[[list[int]], str], strings: list[str], start: int):
        self._decode, self._strings, self._start = decode, [string for string in strings if string], start

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        texts = [self._decode(row[self._start :].tolist()) for row in input_ids]
        return torch.tensor([self.cut(text) != text for text in texts], device=input_ids.device)

    def cut(self, text: str) -> str:
        """The part of a text before the first of the strings."""
        return text[: min((text.index(string) for string in self._strings if string in text), default=len(text))]
