"""Generation for `txl-serve` and `txl-generate`: replies go on from memories of earlier texts, several at a time."""

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from ..data.memory_files import HeldCache
from ..transfo_xl.cache_transfo_xl import CACHE_NAME, MemoryCache
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

# Replies of up to this many tokens are decoded after each token, of up to twice as many after every second, …
DECODED_AT_EVERY_TOKEN = 256


class Conversations:
    """`generate` that continues from the kept memory of an earlier text, and keeps the memories of new ones.

    The memory of a text is kept where its prompt ends and where its reply ends. A later prompt that begins with one of
    these texts is read from there on; no other text has any influence. Threads that call `generate` at the same time
    take turns, token by token and segment by segment.
    """

    def __init__(self, model: TransfoXLForCausalLM, limit: float, start: MemoryCache | None = None):
        """Args: limit: bytes of all memories that are kept; the least recently used are dropped.
        start: of one row, the memory before every text; None: none.
        """
        self.model, self.limit = model, limit
        self.start = None if start is None else HeldCache.of(start)
        if self.start is not None:
            # Tokens of `start` are before the texts and do not count in their lengths.
            self.start.counts["initial_length"] = self.start.counts["length"]
        self.devices = [model.device] if model.device.type == "cuda" else []  # besides the CPU
        self.turns = Turns()
        self.kept: OrderedDict[bytes, HeldCache] = OrderedDict()

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        is_over: Callable[[], bool] = lambda: False,
        seed: int | None = None,
        stopping_criteria: Sequence[StoppingCriteria] = (),
        **kwargs,
    ) -> Tensor:
        """The model's `generate`, of one row and one beam: (1, L) tokens and the tokens of the reply.

        Args:
            input_ids: (1, L), L ≥ 1, none of it padding.
            is_over: whether to stop now and keep the text so far; called between segments and between tokens.
            seed: of this reply; None: another one each time.
        """
        with self.turns, torch.random.fork_rng(self.devices):
            torch.manual_seed(random.getrandbits(64) if seed is None else seed)
            cache = None
            if self.model.config.mem_len > 0:
                cache = self.recall(input_ids)
                if not self.read(input_ids, cache, is_over):
                    return input_ids
                kwargs[CACHE_NAME] = cache
            between = [*stopping_criteria, _Between(self, is_over)]
            sequence = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                stopping_criteria=StoppingCriteriaList(between),
                **kwargs,
            )
            if cache is not None:
                # `generate` has not read the last token of the reply.
                self.keep(sequence[:, : cache.get_seq_length()], cache)
            return sequence

    def pause(self) -> None:
        """Let all waiting threads take a turn, and then restore the state of the random numbers."""
        if self.turns.are_wanted:
            with torch.random.fork_rng(self.devices):
                self.turns.pass_on()

    def read(self, input_ids: Tensor, cache: MemoryCache, is_over: Callable[[], bool]) -> bool:
        """Read all but the last token, whose logits `generate` needs, in segments of `tgt_len`, and keep the memory;
        whether all has been read."""
        unread = input_ids[:, cache.get_seq_length() : -1]
        if unread.shape[1] > 0:
            for segment in unread.split(self.model.config.tgt_len, dim=1):
                if is_over():
                    return False
                self.model(segment, past_key_values=cache, use_cache=True, logits_to_keep=1)
                self.pause()
        self.keep(input_ids[:, :-1], cache)
        return not is_over()

    def recall(self, input_ids: Tensor) -> MemoryCache:
        """A new cache with the memory of the longest text that these tokens continue, or else of `start`."""
        text, held = _as_bytes(input_ids), self.start
        beginnings = (known for known in self.kept if len(known) < len(text) and text.startswith(known))
        longest = max(beginnings, key=len, default=None)
        if longest is not None:
            self.kept.move_to_end(longest)
            held = self.kept[longest]
        return MemoryCache(self.model.config) if held is None else held.restore(self.model.config)

    def keep(self, input_ids: Tensor, cache: MemoryCache) -> None:
        """Keep a copy of the memory of a text, (1, L) tokens, where the limit allows it."""
        text = _as_bytes(input_ids)
        if text in self.kept:
            self.kept.move_to_end(text)
            return
        if not text:
            return
        nbytes = len(text) + sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        if nbytes > self.limit:
            return
        while self.kept and nbytes + self.nbytes > self.limit:
            self.kept.popitem(last=False)
        self.kept[text] = HeldCache.of(cache)

    @property
    def nbytes(self) -> int:
        """Bytes of all memories that are kept, with the tokens of their texts."""
        return sum(len(text) + held.nbytes for text, held in self.kept.items())


def _as_bytes(input_ids: Tensor) -> bytes:
    return input_ids.to("cpu", torch.int32).numpy().tobytes()


class _Between(StoppingCriteria):
    """Called between two tokens of `generate`: lets other threads take turns, and ends a reply that is over."""

    def __init__(self, conversations: Conversations, is_over: Callable[[], bool]):
        self.conversations, self.is_over = conversations, is_over

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        self.conversations.pause()
        return torch.full((len(input_ids),), self.is_over(), device=input_ids.device)


class Turns:
    """A lock that threads hold in the order in which they wait for it."""

    def __init__(self):
        self._next, self._queue = threading.Condition(), deque[object]()

    def __enter__(self):
        turn = object()
        with self._next:
            self._queue.append(turn)
            self._next.wait_for(lambda: self._queue[0] is turn)

    def __exit__(self, *_):
        with self._next:
            self._queue.popleft()
            self._next.notify_all()

    @property
    def are_wanted(self) -> bool:
        """Whether a thread waits for the lock while another holds it."""
        return len(self._queue) > 1

    def pass_on(self) -> None:
        """Release the lock, and wait for it behind all threads that wait already."""
        self.__exit__()
        self.__enter__()


class Reply(StoppingCriteria):
    """A stopping criterion that decodes the reply while `generate` writes it, and sends its text in pieces.

    Args:
        send: called with each piece of the text that no later token changes. All pieces together are the reply.
        most: tokens after which the reply ends, as `generate` has it. ends: tokens that end it.
        stops: strings that end it, and are no part of it.
        prompt: tokens that are decoded before the reply, so that its first word is spaced as within a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        send: Callable[[str], object],
        most: int,
        ends: Collection[int] | int | None = None,
        stops: Collection[str] = (),
        prompt: Sequence[int] = (),
    ):
        self.tokenizer, self.send = tokenizer, send
        self.most, self.stops = most, stops
        self.ends = ends if isinstance(ends, Collection) else [ends]
        self.prompt, self.tokens = list(prompt), list[int]()
        self._begins = len(tokenizer.decode(self.prompt, skip_special_tokens=True))
        self.finish_reason: str | None = None  # "stop", by a token or a string of its own, or "length"
        self._texts, self._sent = ("", ""), 0  # the last two that differ; how many characters have been sent

    def __call__(self, input_ids: Tensor, scores: Tensor | None = None, **kwargs) -> Tensor:
        # On some devices `generate` computes one more token before it reads this result.
        if self.finish_reason is None:
            self.tokens.append(int(input_ids[0, -1]))
            count = len(self.tokens)
            if self.tokens[-1] in self.ends or count == self.most:
                self.end()
            elif count % (1 + count // DECODED_AT_EVERY_TOKEN) == 0:
                self._write()
        return torch.full((len(input_ids),), self.finish_reason is not None, device=input_ids.device)

    def end(self) -> None:
        """Send the rest of the text, also where generation stops before its last token."""
        if self.finish_reason is None:
            self._write(is_last=True)

    def _write(self, is_last: bool = False) -> None:
        text = self.tokenizer.decode(self.prompt + self.tokens, skip_special_tokens=True)[self._begins :]
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.finish_reason, final = "stop", text[: min(places)]
        elif is_last:
            self.finish_reason = "stop" if self.tokens and self.tokens[-1] in self.ends else "length"
            final = text
        else:
            # The next token may join the last word, complete the bytes of the last character, or complete a stop
            # string that the last characters begin.
            if text != self._texts[1]:
                self._texts = (self._texts[1], text)
            final = commonprefix(self._texts).rstrip("\ufffd")
            begun = (n for stop in self.stops for n in range(1, len(stop)) if final.endswith(stop[:n]))
            final = final[: len(final) - max(begun, default=0)]
        if piece := final[self._sent :]:
            self._sent = len(final)
            self.send(piece)
