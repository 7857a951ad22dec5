"""The memory of a text is kept between calls of generate, as `txl-serve` calls it, and changes nothing it writes."""

import math

import pytest
import torch
from transformers import GenerationConfig

from txl_hf.integrations.conversations import NOTHING, SEED, Conversations, check_request

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)


@pytest.fixture
def conversations(make_model):
    """Of a model that remembers all that these texts hold, and how many tokens each of its calls has read."""
    model = make_model(mem_len=200, tgt_len=5, eos_token_id=None)
    model.transformer.register_forward_pre_hook(lambda module, given: reads.append(given[0].shape[1]))
    reads = []
    return Conversations(model, limit=2), reads


def turn(conversations: Conversations, ids: torch.Tensor, **settings) -> torch.Tensor:
    return conversations.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY, **settings
    )


def test_a_turn_reads_what_is_new_and_writes_what_a_whole_reading_writes(conversations, make_ids):
    talk, reads = conversations
    ids, whole = make_ids(1, 23), talk.generate_afresh
    for length in (0, 4, 1, 7):
        ids = torch.cat([ids, make_ids(1, length, seed=length)], dim=1)
        expected = whole(input_ids=ids, generation_config=GREEDY)
        reads.clear()
        found = turn(talk, ids)
        assert torch.equal(found, expected)
        # Segments as in training; each token of the text and of the reply but its last once, from the memory on.
        assert max(reads) <= 5
        assert sum(reads) == (23 + 5 if length == 0 else length + 1 + 5)
        ids = found


def test_no_cache_that_is_named_is_no_cache(conversations, make_ids):
    talk, _ = conversations
    ids = make_ids(1, 9)
    assert torch.equal(turn(talk, ids, past_key_values=None), turn(talk, ids))


def test_a_cache_that_is_handed_out_is_not_the_one_that_is_kept(conversations, make_ids):
    """Who has asked for it may go on with it."""
    talk, _ = conversations
    ids = make_ids(1, 9)
    output = turn(talk, ids, return_dict_in_generate=True)
    with torch.no_grad():
        talk.model(make_ids(1, 5, seed=1), past_key_values=output.past_key_values)
    following = torch.cat([output.sequences, make_ids(1, 3, seed=2)], dim=1)
    expected = talk.generate_afresh(input_ids=following, generation_config=GREEDY)
    assert torch.equal(turn(talk, following), expected)


def test_a_seed_is_of_one_reply(conversations, make_ids):
    talk, _ = conversations
    ids, replies = make_ids(1, 9), []
    for seed in (1, 2, 1):
        config = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=0, temperature=3.0)
        setattr(config, SEED, seed)
        before = torch.get_rng_state()
        replies.append(talk.generate(input_ids=ids, generation_config=config))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(replies[0], replies[2]) and not torch.equal(replies[0], replies[1])


def test_another_reply_to_the_same_prompt_goes_on_from_the_prompt(conversations, make_ids):
    talk, reads = conversations
    ids = make_ids(1, 30)
    first = turn(talk, ids)
    reads.clear()
    edited = torch.cat([ids, make_ids(1, 3, seed=9)], dim=1)
    assert torch.equal(turn(talk, edited), talk.generate_afresh(input_ids=edited, generation_config=GREEDY))
    assert sum(reads[: reads.index(33)]) == 4 + 5
    assert torch.equal(turn(talk, ids), first)


def test_texts_share_nothing_and_old_ones_are_forgotten(conversations, make_ids):
    talk, reads = conversations
    texts = [make_ids(1, 12, seed=seed) for seed in range(4)]
    for text in texts:
        assert torch.equal(turn(talk, text), talk.generate_afresh(input_ids=text, generation_config=GREEDY))
    assert len(talk.kept) == 4
    reads.clear()
    turn(talk, texts[0])
    assert sum(reads) == 12 + 5
    reads.clear()
    turn(talk, texts[3])
    assert sum(reads) == 1 + 5


def test_what_it_cannot_go_on_from_is_left_to_generate(conversations, make_model, make_ids):
    talk, _ = conversations
    beams = GenerationConfig(max_new_tokens=4, num_beams=3)
    uncached = GenerationConfig(max_new_tokens=4, do_sample=False, use_cache=False)
    lookup = GenerationConfig(max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with_padding = {"input_ids": make_ids(1, 6).masked_fill(padded == 0, 60), "pad_token_id": 60}
    with torch.no_grad():
        mems = talk.model(make_ids(1, 5, seed=3)).mems
    for given in (
        {"input_ids": make_ids(2, 6), "generation_config": GREEDY},
        {"input_ids": make_ids(1, 6), "generation_config": beams},
        {"input_ids": make_ids(1, 6), "generation_config": uncached},
        {"input_ids": make_ids(1, 6), "generation_config": lookup},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "num_beams": 3},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "cache_implementation": "static"},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "attention_mask": padded},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "mems": mems},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "resets": padded == 0},
        {"input_ids": make_ids(1, 6), "generation_config": GREEDY, "assistant_model": make_model(n_layer=1)},
        {**with_padding, "generation_config": GREEDY},
    ):
        assert torch.equal(talk.generate(**given), talk.generate_afresh(**given))
    talk.model.generation_config.num_beams = 3
    assert torch.equal(
        turn(talk, make_ids(1, 6)), talk.generate_afresh(input_ids=make_ids(1, 6), generation_config=GREEDY)
    )
    talk.model.generation_config.num_beams = None
    assert not talk.kept
    forgetful = Conversations(make_model(mem_len=0, eos_token_id=None), limit=2)
    assert turn(forgetful, make_ids(1, 6)).shape == (1, 12) and not forgetful.kept
    assert turn(talk, make_ids(1, 1)).shape == (1, 7)


def test_a_reply_that_is_broken_off_keeps_the_prompt(conversations, make_ids):
    talk, reads = conversations

    class Gone(Exception):
        pass

    class Streamer:
        def __init__(self):
            self.count = 0

        def put(self, tokens):
            self.count += 1
            if self.count == 4:
                raise Gone

        def end(self):
            raise AssertionError("the reply is broken off")

    ids = make_ids(1, 20)
    with pytest.raises(Gone):
        turn(talk, ids, streamer=Streamer())
    reads.clear()
    assert torch.equal(turn(talk, ids), talk.generate_afresh(input_ids=ids, generation_config=GREEDY))
    assert reads[0] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, but has to be an integer above 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens is '5'"),
        ({"max_output_tokens": 2.0}, "max_output_tokens is 2.0"),
        ({"temperature": -1}, "temperature is -1, but has to be a number of at least 0$"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 7}, "top_p is 7, but has to be a number of at least 0, and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"frequency_penalty": -1}, "frequency_penalty is -1, but has to be a number above -1"),
        ({"seed": 2**64}, f"seed is {2**64}, but has to be an integer of 64 bits"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"messages": None}, "messages is None, but has to be a list of messages, at least one"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi', but has to have a role and a content"),
        ({"messages": [{"role": "user", "content": 5}]}, r"the content of messages\[0\] is 5"),
        ({"n": 2}, "n is 2, which this server does not do: leave it out"),
        ({"logprobs": 5}, "logprobs is 5"),
        ({"response_format": {"type": "json_object"}}, "response_format is "),
    ],
    ids=str,
)
def test_a_request_that_will_not_do_is_refused_before_anything_is_read(body, message):
    with pytest.raises(ValueError, match=message):
        check_request(body, set(NOTHING))


def test_a_request_that_asks_for_nothing_else_passes():
    check_request({name: asked[0] for name, asked in NOTHING.items()}, set(NOTHING))
    check_request(
        dict.fromkeys(["max_tokens", "temperature", "seed", "top_p", "frequency_penalty", *NOTHING]), set(NOTHING)
    )
    check_request({"n": 3}, set())  # Of a server that reads it.
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": []}]
    check_request(
        {"messages": messages, "temperature": 0, "top_p": 1.0, "seed": -(2**63), "max_tokens": 1}, set(NOTHING)
    )
