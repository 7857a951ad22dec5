"""The memory of a text is kept between calls of generate, as `txl-serve` calls it, and changes nothing it writes."""

import threading
import time

import pytest
import torch
from transformers import GenerationConfig

from txl_hf import TransfoXLTokenizer
from txl_hf.integrations.conversations import Conversations, Reply, Turns

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)
DRAWN = GenerationConfig(max_new_tokens=20, do_sample=True, top_k=0, temperature=3.0)


@pytest.fixture
def conversations(make_model):
    """Of a model that remembers all that these texts hold, and how many tokens each of its calls has read."""
    model = make_model(mem_len=200, tgt_len=5, eos_token_id=None)
    model.transformer.register_forward_pre_hook(lambda module, given: reads.append(given[0].shape[1]))
    reads = []
    return Conversations(model, limit=2**30), reads


def turn(conversations: Conversations, ids: torch.Tensor, config=GREEDY, **settings) -> torch.Tensor:
    return conversations.generate(ids, generation_config=config, **settings)


def alone(conversations: Conversations, ids: torch.Tensor) -> torch.Tensor:
    """The text of `generate`, which keeps no memory between calls."""
    return conversations.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY)


def test_a_turn_reads_what_is_new_and_writes_what_a_whole_reading_writes(conversations, make_ids):
    talk, reads = conversations
    ids = make_ids(1, 23)
    for length in (0, 4, 1, 7):
        ids = torch.cat([ids, make_ids(1, length, seed=length)], dim=1)
        expected = alone(talk, ids)
        reads.clear()
        found = turn(talk, ids)
        assert torch.equal(found, expected)
        # Segments as in training; each token of the text and of the reply but its last once, from the memory on.
        assert max(reads) <= 5
        assert sum(reads) == (23 + 5 if length == 0 else length + 1 + 5)
        ids = found


@pytest.mark.parametrize("same_length", [False, True], ids=["all of a segment", "same_length"])
@pytest.mark.parametrize("initial_memory", ["zeros", "empty"])
@pytest.mark.parametrize("mem_len", [3, 12], ids="M={}".format)
def test_a_memory_that_is_full_goes_on_as_it_would_have(mem_len, initial_memory, same_length, make_model, make_ids):
    """Also where it began with zeros. The same segments are read, since generate alone reads a prompt in one."""
    sizes = {"mem_len": mem_len, "tgt_len": 5, "same_length": same_length, "initial_memory": initial_memory}
    model = make_model(**sizes, eos_token_id=None)
    talk, whole = Conversations(model, limit=2**30), make_ids(1, 41)
    for length in (11, 26, 41):
        found = turn(talk, whole[:, :length])
        # 10, 25 and 40 tokens are whole segments.
        expected = turn(Conversations(model, limit=0), whole[:, :length])
        assert torch.equal(found, expected)
    assert len(talk.kept) == 6


def test_a_seed_is_of_one_reply(conversations, make_ids):
    talk, _ = conversations
    ids, replies = make_ids(1, 9), []
    for seed in (1, 2, 1):
        before = torch.get_rng_state()
        replies.append(turn(talk, ids, DRAWN, seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(replies[0], replies[2]) and not torch.equal(replies[0], replies[1])
    assert not torch.equal(turn(talk, ids, DRAWN), turn(talk, ids, DRAWN)), "without one they differ"


def test_texts_begin_behind_a_memory_that_is_given(conversations, make_ids):
    """Each from the same place, as if the text of the memory stood in front of it, of which it is no part."""
    talk, reads = conversations
    book, prompts = make_ids(1, 20), [make_ids(1, length, seed=length) for length in (7, 1, 7)]
    with torch.no_grad():
        start = talk.model(book, use_cache=True).past_key_values
    reader = Conversations(talk.model, limit=2**30, start=start)
    for ids in (*prompts, torch.cat([prompts[0], make_ids(1, 3)], dim=1)):
        expected = alone(talk, torch.cat([book, ids], dim=1))[:, 20:]
        reads.clear()
        found = turn(reader, ids)
        assert torch.equal(found, expected)
        assert sum(reads) <= ids.shape[1] + 5
    assert start.get_seq_length() == 20


def test_another_reply_to_the_same_prompt_goes_on_from_the_prompt(conversations, make_ids):
    talk, reads = conversations
    ids = make_ids(1, 30)
    first = turn(talk, ids)
    reads.clear()
    edited = torch.cat([ids, make_ids(1, 3, seed=9)], dim=1)
    assert torch.equal(turn(talk, edited), alone(talk, edited))
    assert sum(reads[: reads.index(33)]) == 4 + 5
    assert torch.equal(turn(talk, ids), first)


def test_texts_share_nothing_and_old_ones_are_forgotten(conversations, make_ids):
    talk, reads = conversations
    texts = [make_ids(1, 12, seed=seed) for seed in range(4)]
    turn(talk, texts[3])
    talk.limit = 3 * talk.nbytes
    for text in texts:
        assert torch.equal(turn(talk, text), alone(talk, text))
        assert talk.nbytes <= talk.limit
    assert len(talk.kept) == 6, "two of each of the last three"
    reads.clear()
    turn(talk, texts[0])
    assert sum(reads) == 12 + 5
    reads.clear()
    turn(talk, texts[3])
    assert sum(reads) == 1 + 5


def test_a_memory_takes_no_more_than_its_keys_and_values(conversations, make_ids):
    """The buffer that a cache decodes in has room for as many again."""
    talk, _ = conversations
    turn(talk, make_ids(1, 30))
    prompt, reply = talk.kept.values()
    for memory, length in ((prompt, 29), (reply, 35)):
        tensors = memory.tensors.values()
        size = 2 * 2 * 16 * 4 * length  # keys and values, two layers, d_model
        assert sum(states.untyped_storage().nbytes() for states in tensors) == size
        assert memory.nbytes == size
    assert talk.nbytes == prompt.nbytes + reply.nbytes + 4 * (29 + 35)


def test_what_is_larger_than_all_memories_together_is_not_kept(conversations, make_ids):
    talk, _ = conversations
    for limit, kept in ((0, 0), (2 * 2 * 16 * 4 * 9 + 4 * 9, 1)):
        talk.limit = limit
        assert torch.equal(turn(talk, make_ids(1, 10)), alone(talk, make_ids(1, 10)))
        assert len(talk.kept) == kept


def test_a_prompt_of_one_token_and_a_model_without_memory_have_nothing_to_keep(conversations, make_model, make_ids):
    talk, _ = conversations
    assert turn(talk, make_ids(1, 1)).shape == (1, 7) and len(talk.kept) == 1
    forgetful = Conversations(make_model(mem_len=0, eos_token_id=None), limit=2**30)
    assert torch.equal(turn(forgetful, make_ids(1, 6)), alone(forgetful, make_ids(1, 6)))
    assert not forgetful.kept


def test_a_reply_that_is_broken_off_keeps_the_prompt(conversations, make_ids):
    talk, reads = conversations
    ids = make_ids(1, 20)
    found = turn(talk, ids, is_over=lambda: len(reads) == 4 + 3)
    assert torch.equal(found, alone(talk, ids)[:, :23]), "the segments of 19 tokens, and three more"
    reads.clear()
    assert torch.equal(turn(talk, ids), alone(talk, ids))
    assert reads[0] == 1


def test_a_prompt_is_given_up_between_two_segments(conversations, make_ids):
    talk, reads = conversations
    assert torch.equal(turn(talk, make_ids(1, 50), is_over=lambda: len(reads) == 3), make_ids(1, 50))
    assert reads == [5, 5, 5] and not talk.kept


def test_replies_that_are_written_at_the_same_time_are_those_of_each_alone(conversations, make_ids):
    """Each in its turn, with random numbers of its own."""
    talk, reads = conversations
    texts, found = [make_ids(1, 30 + 10 * seed, seed=seed) for seed in range(4)], {}
    expected = [turn(Conversations(talk.model, 0), text, DRAWN, seed=seed) for seed, text in enumerate(texts)]

    def write(seed: int):
        found[seed] = turn(talk, texts[seed], DRAWN, seed=seed)

    with talk.turns:
        threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while len(talk.turns._queue) < 5:
            time.sleep(0.01)
        reads.clear()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(4))
    # The shortest prompt, of six segments, is read while the longest has read six of its own.
    assert reads[:24].count(5) >= 20 and reads.index(1) < 28


def test_turns_are_taken_in_the_order_of_asking():
    turns, order = Turns(), []

    def ask(name: str):
        with turns:
            for _ in range(3):
                order.append(name)
                turns.pass_on()

    with turns:
        threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
        for count, thread in enumerate(threads, start=1):
            thread.start()
            while len(turns._queue) <= count:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert "".join(order) == "abcabcabc" and not turns.are_wanted


MARKS = ["<eos>", "<unk>", *"\"'!,.", "&quot;", "&apos;", "@-@", "&apos;s", *"the prince said no yes".split()]
SYMBOLS = {
    "moses": MARKS,
    "whitespace": ["<eos>", "<unk>", *"the old prince said well".split()],
    "lm1b": ["<S>", "<UNK>", *"the old prince said well".split()],
    "characters": [*"abc .\n\u00e9\u2603"],
    "bytes": [*map(str, "o\u00e9\u2603\U0001f600 ".encode()), "10"],
}


def written(tokenizer, ids: list[int], **settings) -> tuple[list[str], Reply]:
    """The pieces of a reply of these tokens, as generate has it ask after each."""
    pieces: list[str] = []
    reply = Reply(tokenizer, pieces.append, **{"most": len(ids)} | settings)
    for count in range(1, len(ids) + 1):
        if bool(reply(torch.tensor([ids[:count]])).all()):
            break
    return pieces, reply


@pytest.mark.parametrize("mode", SYMBOLS)
def test_the_pieces_of_a_reply_are_its_text(mode):
    """Which side a quotation mark is of depends on all before it in its line; a character may end in its middle."""
    lines = {"line_ends": True, "eos_token": "<eos>"} if mode in ("moses", "whitespace") else {}
    tokenizer = TransfoXLTokenizer.from_symbols(list(dict.fromkeys(SYMBOLS[mode])), mode=mode, **lines)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(SYMBOLS[mode]), (300 if seed == 0 else 40,), generator=generator)
        ids = (ids % len(tokenizer)).tolist()
        pieces, reply = written(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
        assert len(pieces) > 3 and all(pieces)
        assert reply.finish_reason == "length" and reply.tokens == ids


@pytest.fixture
def letters():
    return TransfoXLTokenizer.from_symbols([*"abcdefghijklmnopqrstuvwxyz ."], mode="characters")


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["cd"], "ab"),
        (["xyz", "ef", "d"], "abc"),
        (["a"], ""),
        (["cde", "bcdef"], "ab"),
        (["abx", "cdx"], "abcdefab"),
        (["fab"], "abcde"),
    ],
    ids=str,
)
def test_a_stop_string_ends_a_reply_and_none_of_it_is_sent(letters, stops, expected):
    pieces, reply = written(letters, letters("abcdefab")["input_ids"], stops=stops)
    assert "".join(pieces) == expected
    assert reply.finish_reason == ("length" if expected == "abcdefab" else "stop")


def test_a_reply_ends_with_its_last_token(letters):
    ids = letters("abcdef")["input_ids"]
    for settings, text, reason in (
        ({"most": 4}, "abcd", "length"),
        ({"ends": [ids[2]]}, "abc", "stop"),
        ({"most": 3, "ends": [ids[2]]}, "abc", "stop"),
    ):
        pieces, reply = written(letters, ids, **settings)
        assert ("".join(pieces), reply.finish_reason) == (text, reason)
        # Some devices go on for one token.
        assert bool(reply(torch.tensor([ids])).all()) and "".join(pieces) == text


def test_a_reply_that_is_given_up_sends_what_it_has(letters):
    ids = letters("abcdef")["input_ids"]
    pieces, reply = written(letters, ids[:3], most=6)
    assert reply.finish_reason is None and "".join(pieces) == "ab"
    reply.end()
    assert ("".join(pieces), reply.finish_reason) == ("abc", "length")
    empty = Reply(letters, pieces.append, most=1)
    empty.end()
    assert empty.finish_reason == "length"
