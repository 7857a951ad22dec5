"""The class behind the model `txl` of lm_eval: its requests, each read with memory."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from tqdm.auto import tqdm
from transformers import StoppingCriteria

from ..command_line import hub_or_folder
from ..data.loading import ends_lines, load_language_model, load_tokenizer
from ..data.streams import check_sizes
from ..data.texts import encode_text
from ..evaluation.language_model import evaluate_language_model
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

__all__ = ["TransfoXLLM"]

# Numbers in the logits of what is read side by side: a quarter of a gigabyte, and thrice that while they are made.
MOST_LOGITS = 1 << 26


class TransfoXLLM(TemplateLM):
    """A Transformer-XL for lm_eval; its `model_args` are these arguments.

    Args:
        pretrained: folder or Hub name.
        segment_length: tokens read in one pass. None: the model's `tgt_len`.
        memory_length, clamp_len, same_length: as in `evaluate_language_model`. None: the model's.
        tokenizer: folder or Hub name. None: that of the model.
        prefix_token_id: the token before a text, so that its first one can be scored. None: the tokenizer's bos or
            else eos token. Without any, the first token of a text is not scored.
        max_gen_toks: how many tokens to generate where a task does not say.
        device, dtype: where and in what the model computes: "cuda", "bfloat16". None: a GPU if there is one (as for
            "cuda"), and the type of the checkpoint.
        revision: of `pretrained` on the Hub: branch, tag or commit. Of the tokenizer too, unless it is given.
        trust_remote_code: as for `from_pretrained`. This package's classes are taken before those in the checkpoint.
        batch_size, max_batch_size: taken for lm_eval's sake. The continuations of one context are read together, and
            different contexts one after the other, each with its own memory.

    Raises:
        FileNotFoundError: `pretrained` or `tokenizer` is a path that leads nowhere.
        ValueError: the checkpoint is no Transformer-XL, it has no tokenizer, or a length is out of range.
    """

    def __init__(
        self,
        pretrained: str,
        segment_length: int | None = None,
        memory_length: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        tokenizer: str | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        wanted = torch.device(device or "cuda")
        # lm_eval's command asks for "cuda" where its user asked for nothing.
        absent = wanted.type == "cuda" and not torch.cuda.is_available()
        self._device = torch.device("cpu") if absent else wanted
        lengths = {"mem_len": memory_length, "clamp_len": clamp_len, "same_length": same_length}
        # Loaded with its lengths, so that generate has them too.
        given = {name: value for name, value in lengths.items() if value is not None}
        for name in filter(None, (pretrained, tokenizer)):
            hub_or_folder(str(name))
        # lm_eval reads a revision of digits as a number.
        of_model = {"revision": str(revision)} if revision is not None else {}
        code = {"trust_remote_code": trust_remote_code}
        model = load_language_model(pretrained, dtype=dtype or "auto", **of_model, **code, **given)
        if not isinstance(model, TransfoXLForCausalLM):
            raise ValueError(f"pretrained={pretrained} is a {model.config.model_type}, not a Transformer-XL")
        self.model = model.to(self._device).eval()
        if tokenizer is None:
            self.tokenizer = load_tokenizer(pretrained, **of_model, **code)
        else:
            self.tokenizer = load_tokenizer(tokenizer, **code)
        self.segment_length = model.config.tgt_len if segment_length is None else segment_length
        self.max_gen_toks = max_gen_toks
        check_sizes(segment_length=self.segment_length, max_gen_toks=max_gen_toks)
        self._prefix_token_id = prefix_token_id
        self._pretrained = pretrained
        self.batch_size = batch_size

    @property
    def config(self):
        """The model's configuration."""
        return self.model.config

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path or self._pretrained).replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        tokenizer = self.tokenizer
        found = (self._prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        return next((token for token in found if token is not None), None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The ids of a text that may go on: those of `encode_text`, less the end of a line without line feed."""
        if ends_lines(self.tokenizer) and not add_special_tokens:
            ids = encode_text(self.tokenizer, string).tolist()
            return ids if string.endswith("\n") else ids[:-1]
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens), **kwargs)

    def tok_decode(self, tokens: list[int]) -> str:
        """The text of some ids; a token that ends lines is a line feed again."""
        if not ends_lines(self.tokenizer):
            return self.tokenizer.decode(tokens, skip_special_tokens=True)
        text = ""
        for ends, part in groupby(tokens, lambda token: token == self.tokenizer.eos_token_id):
            ids = list(part)
            # The token that ends a line in mode lm1b also begins the next.
            lines = (len(ids) + 1) // 2 if self._begins_lines else len(ids)
            text += "\n" * lines if ends else self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @property
    def _begins_lines(self) -> bool:
        return getattr(self.tokenizer, "mode", None) == "lm1b"

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes beside its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "segment_length": self.segment_length,
            "memory_length": self.config.mem_len,
            "clamp_len": self.config.clamp_len,
            "same_length": self.config.same_length,
        }

    # --- what lm_eval asks for ---------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text: minus the sum of `token_losses` of it after the prefix token.

        Its tokens are those of `encode_text`, as for `txl-evaluate`: with a token at each line's end, in vocabularies
        of words. Where such a token begins the lines too, it is the prefix token.
        """
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="read"):
            token_ids = encode_text(self.tokenizer, request.args[0]).tolist()
            prefix = [] if self.prefix_token_id is None else [self.prefix_token_id]
            if not (self._begins_lines and token_ids[:1] == prefix):
                token_ids = prefix + token_ids
            found.append(self._log_likelihood(token_ids) if len(token_ids) > 1 else 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _log_likelihood(self, token_ids: list[int]) -> float:
        result = evaluate_language_model(self.model, token_ids, self.segment_length)
        return -result.nll * result.tokens

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether every token of it is the most probable one.

        Raises:
            ValueError: a context has no tokens, and there is no prefix token; or a continuation has none that is more
                than white space.
        """
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both; of a context without tokens, the prefix token.

        A token that begins in the context and ends in the continuation is the continuation's: of "un" and "likely" in
        a vocabulary of words, "unlikely". White space between them is too, as lm_eval has it.
        """
        whole, alone = self.tok_encode(context + continuation), self.tok_encode(context.rstrip())
        shared = len(os.path.commonprefix([alone, whole]))
        parted = context != context.rstrip() or not continuation or continuation != continuation.lstrip()
        if 0 < shared == len(alone) and not parted and whole[shared - 1] == self.tokenizer.unk_token_id:
            # It may stand for a word of both.
            shared -= 1
        context_ids, token_ids = whole[:shared], whole[shared:]
        if not token_ids and continuation.strip():
            raise ValueError(f"the continuation {continuation!r:.80} of {context[-40:]!r} has no token")
        if context_ids or not token_ids:
            return context_ids, token_ids
        if self.prefix_token_id is None:
            raise ValueError(
                "a continuation has no context, and the tokenizer no bos or eos token to begin a text with: give one "
                "in model_args, prefix_token_id=…"
            )
        # As lm_eval has it, a continuation that begins with that token brings its own.
        return [self.prefix_token_id], token_ids[1:] if token_ids[0] == self.prefix_token_id else token_ids

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
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

    def _score(self, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        # The last token of the context predicts the first of a continuation; shorter ones end in padding.
        longest = max(map(len, continuations))
        if longest == 0:
            return [(0.0, True)] * len(continuations)
        # Without a memory each token is read behind as many as a segment holds, and is the last one of its pass, as in
        # `generate`.
        remembers = self.config.mem_len > 0
        step = self.segment_length if remembers else 1
        again = self.config.ext_len + self.segment_length - step
        mems = self._read(context[:-1]) if remembers else None
        # Many continuations may share a context, as the sentences of a task that has none do.
        rows = max(1, MOST_LOGITS // (min(step, longest) * self.config.vocab_size))
        groups = (continuations[start : start + rows] for start in range(0, len(continuations), rows))
        return [answer for group in groups for answer in self._score_group(context, group, mems, step, again)]

    def _score_group(
        self,
        context: list[int],
        continuations: list[list[int]],
        mems: tuple[torch.Tensor, ...] | None,
        step: int,
        again: int,
    ) -> list[tuple[float, bool]]:
        """As `_score`, of what is read side by side, `step` tokens at a time, each time behind `again` tokens that
        were read before."""
        longest = max(map(len, continuations))
        if longest == 0:
            return [(0.0, True)] * len(continuations)
        targets = torch.full((len(continuations), longest), -100)
        for row, continuation in zip(targets, continuations, strict=True):
            row[: len(continuation)] = torch.tensor(continuation)
        targets = targets.to(self._device)
        past = torch.tensor(context, device=self._device).expand(len(continuations), -1)
        inputs = torch.cat([past, targets[:, :-1].clamp(min=0)], dim=1)
        if mems is not None:
            mems = tuple(states.expand(len(continuations), -1, -1) for states in mems)
        losses, greedy = [], []
        for start in range(0, longest, step):
            labels = targets[:, start : start + step]
            begin, count = start + len(context) - 1, labels.shape[1]
            part = inputs[:, max(0, begin - again) : begin + count]
            outputs = self.model(part, mems=mems, logits_to_keep=count)
            mems, logits = outputs.mems, outputs.logits
            picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            losses.append(picked.masked_fill(labels == -100, 0).cpu().double())
            greedy.append((logits.argmax(-1) == labels) | (labels == -100))
        totals, all_greedy = torch.cat(losses, dim=1).sum(1), torch.cat(greedy, dim=1).all(1)
        return list(zip(totals.tolist(), all_greedy.tolist(), strict=True))

    @torch.no_grad()
    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of the strings of `until` comes, an eos token, or `max_gen_toks` tokens.

        The settings of a request are read as lm_eval reads them, and what it does not know is for `generate`. The eos
        token is the model's `generation_config.eos_token_id`; another that ends lines is a line feed.

        Raises:
            ValueError: a context has no tokens, and there is no prefix token.
        """
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
        token_ids = self.tok_encode(context) or [token for token in [self.prefix_token_id] if token is not None]
        if not token_ids:
            raise ValueError(
                "a context is empty, and the tokenizer has no bos or eos token to begin a text with: give one in "
                "model_args, prefix_token_id=…"
            )
        # All but the last segment, by segments; generate reads what is left from that memory.
        read = 0 if self.config.mem_len == 0 else (len(token_ids) - 1) // self.segment_length * self.segment_length
        prompt = torch.tensor([token_ids[max(0, read - self.config.ext_len) :]], device=self._device)
        memory = {} if read == 0 else {"mems": self._read(token_ids[:read])}
        stop = _UntilStrings(self.tok_decode, until, prompt.shape[1])
        # Not inferred from the ids: where the tokenizer pads by the token that ends lines, these would be hidden.
        mask = torch.ones_like(prompt)
        settings |= {"max_new_tokens": length, "stopping_criteria": [stop], **memory}
        with self._windows():
            sequences = self.model.generate(prompt, attention_mask=mask, **settings)
        written = sequences[0, prompt.shape[1] :].tolist()
        ends = settings.get("eos_token_id", self.model.generation_config.eos_token_id)
        # What ends the text is no part of it, and where it ends lines too, no line feed.
        if written and written[-1] in (ends if isinstance(ends, list) else [ends]):
            written.pop()
        return stop.cut(self.tok_decode(written))

    @contextmanager
    def _windows(self) -> Iterator[None]:
        """Without a memory `generate` reads the whole text for each token: let it read windows, as `_score` does."""
        window = self.config.ext_len + self.segment_length

        def cut(_, args, kwargs):
            # The mask hides nothing.
            return args, kwargs | {"input_ids": kwargs["input_ids"][:, -window:], "attention_mask": None}

        hook = self.model.register_forward_pre_hook(cut, with_kwargs=True) if self.config.mem_len == 0 else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _read(self, token_ids: list[int]) -> tuple[Tensor, ...] | None:
        """The memory after some tokens, without the last `ext_len`, to be read again; None where there is none yet."""
        mems = None
        for start in range(0, len(token_ids), self.segment_length):
            part = token_ids[max(0, start - self.config.ext_len) : start + self.segment_length]
            segment = torch.tensor([part], device=self._device)
            mems = self.model.transformer(segment, mems=mems).mems
        return mems

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


class _UntilStrings(StoppingCriteria):
    """Stops where one of some strings is in what has been generated behind a prompt of `start` tokens."""

    def __init__(self, decode: Callable[[list[int]], str], strings: list[str], start: int):
        self._decode, self._strings, self._start = decode, [string for string in strings if string], start

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        texts = [self._decode(row[self._start :].tolist()) for row in input_ids]
        return torch.tensor([self.cut(text) != text for text in texts], device=input_ids.device)

    def cut(self, text: str) -> str:
        """What comes before the first of the strings."""
        return text[: min((text.index(string) for string in self._strings if string in text), default=len(text))]
