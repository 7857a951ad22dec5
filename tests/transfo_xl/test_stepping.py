"""A window of observations read at once is what an agent saw step by step: PPO asks for the same policy in both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resets import cut

import launcher
import stepping_process
from models import BACKENDS, small_config
from txl_hf import TransfoXLModel
from txl_hf.memories import memory_of

# Without `same_length` an observation within a window sees the whole memory and the window up to itself, and step by
# step no more than the memory: these are equal only while the memory covers both.
VARIANTS = {
    "as many keys as the memory": {"same_length": True},
    "its own besides": {"same_length": True, "same_length_counts_self": False},
    "a memory that covers all": {"mem_len": 40},
    "shaw": {"attn_type": 1, "same_length": True},
    "decayed": {"same_length": True, "decay_len": 3},
    "clamped, shared biases, post norm": {"same_length": True, "clamp_len": 3, "untie_r": False},
}


def agent(variant, gating=None, backend="auto", **changes):
    torch.manual_seed(0)
    config = small_config(**({"vocab_size": 0, "input_size": 5, "gating": gating} | variant | changes))
    config._attn_implementation = backend
    return TransfoXLModel(config).eval()


@torch.no_grad()
def read(model, observations, resets, lengths, cached):
    """(B, T, D) of what is read in windows of these lengths, and the memory before each of them."""
    past, memories, states, start = {}, [], [], 0
    for length in lengths:
        part = slice(start, start + length)
        memories.append(past)
        outputs = model(inputs_embeds=observations[:, part], resets=resets[:, part], use_cache=cached, **past)
        past = {"past_key_values": outputs.past_key_values} if cached else memory_of(outputs)
        states.append(outputs.last_hidden_state)
        start += length
    return torch.cat(states, 1), memories


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@given(
    begins=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=18),
    cuts=st.lists(st.integers(1, 9), max_size=8),
    variant=st.sampled_from(sorted(VARIANTS)),
    gating=st.sampled_from([None, "gru"]),
    mem_len=st.integers(1, 7),
    cached=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_a_window_is_what_was_seen_step_by_step(begins, cuts, variant, gating, mem_len, cached):
    """Wherever episodes begin, at the first observation, each, or several in a row, and wherever windows are cut."""
    resets = torch.tensor(begins).T
    steps = resets.shape[1]
    model = agent({"mem_len": mem_len} | VARIANTS[variant], gating)
    observations = torch.randn(2, steps, 5, generator=torch.Generator().manual_seed(1))
    stepwise, memories = read(model, observations, resets, [1] * steps, cached=False)
    close(read(model, observations, resets, cut(steps, cuts), cached)[0], stepwise)
    # A window from the middle, with the one memory of its start: what an agent learns from.
    start = steps // 2
    window = slice(start, steps)
    outputs = model(inputs_embeds=observations[:, window], resets=resets[:, window], **memories[start])
    close(outputs.last_hidden_state, stepwise[:, window])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", [False, True], ids=["mems", "cache"])
@pytest.mark.parametrize("gating", [None, "gru"])
def test_every_backend(backend, cached, gating):
    model, observations = agent({"same_length": True}, gating, backend), torch.randn(3, 15, 5)
    resets = torch.zeros(3, 15, dtype=torch.bool)
    resets[0, 0] = resets[0, 7] = resets[1, 3:6] = resets[2, 14] = True
    expected, _ = read(agent({"same_length": True}, gating, "eager"), observations, resets, [1] * 15, False)
    for lengths in ([15], [4, 1, 1, 9], [1] * 15):
        close(read(model, observations, resets, lengths, cached)[0], expected)


def test_a_window_teaches_what_documents_alone_teach(make_model):
    """Gradients within a window do not cross the beginning of an episode, and none goes into its memory."""
    model, observations = agent({"same_length": True}, "gru"), torch.randn(1, 9, 5)
    resets = torch.zeros(1, 9, dtype=torch.bool)
    resets[0, 5] = True
    memory = memory_of(model(inputs_embeds=torch.randn(1, 4, 5)))
    gradients = []
    for parts in ([(slice(0, 9), memory)], [(slice(0, 5), memory), (slice(5, 9), {})]):
        model.zero_grad()
        for part, past in parts:
            begins = resets[:, part] if len(parts) == 1 else None
            model(
                inputs_embeds=observations[:, part], resets=begins, **past
            ).last_hidden_state.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-5)


@pytest.mark.slow
def test_two_processes_read_in_every_way_what_one_does(tmp_path):
    """Under DistributedDataParallel, each with its rows: step by step, in windows, at once; and what these teach."""
    started = launcher.start(stepping_process.save_all, 2, folder=tmp_path)
    assert launcher.join(started) == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    model = stepping_process.build()
    for way, lengths in stepping_process.WAYS.items():
        states, gradients = stepping_process.read(model, slice(None), lengths)
        close(torch.cat([part[way][0] for part in found]), states)
        close(found[0][way][0], found[0]["stepped"][0])
        close(found[1][way][0], found[1]["stepped"][0])
        for rank in (0, 1):
            for mean, whole in zip(found[rank][way][1], gradients, strict=True):
                torch.testing.assert_close(2 * mean, whole, atol=2e-4, rtol=2e-5)
    # An episode alone.
    observations, _ = stepping_process.episodes()
    alone = model(inputs_embeds=observations[1:2, 11:]).last_hidden_state[0]
    close(found[0]["packed"][0][1, 11:], alone.detach())


@torch.no_grad()
def test_episodes_that_begin_in_the_padding():
    """Rows of different lengths: what is padding may begin an episode, and the first real observation too."""
    model, observations = agent({"same_length": True}, "gru"), torch.randn(2, 8, 5)
    mask, resets = torch.ones(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :3], resets[0, 1], resets[1, 4] = 0, True, True
    memory = memory_of(model(inputs_embeds=torch.randn(2, 4, 5)))
    found = model(inputs_embeds=observations, attention_mask=mask, resets=resets, **memory)
    alone = model(inputs_embeds=observations[:1, 3:])
    close(found.last_hidden_state[:1, 3:], alone.last_hidden_state)
    # The memory after it too.
    following = torch.randn(2, 2, 5)
    after = model(inputs_embeds=following, **memory_of(found)).last_hidden_state[:1]
    close(after, model(inputs_embeds=following[:1], **memory_of(alone)).last_hidden_state)


def test_gradient_checkpointing_and_low_precision_know_of_episodes():
    observations, resets = torch.randn(2, 8, 5), torch.zeros(2, 8, dtype=torch.bool)
    resets[0, 3] = resets[1, 0] = True
    model = agent({"same_length": True}, "gru").train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(inputs_embeds=observations, resets=resets).last_hidden_state.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(expected, found)
    model = model.eval().bfloat16()
    with torch.no_grad():
        found = model(inputs_embeds=observations, resets=resets).last_hidden_state[:1, 3:]
        expected = model(inputs_embeds=observations[:1, 3:]).last_hidden_state
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_in_one_graph():
    model, observations = agent({"same_length": True}, "gru"), torch.randn(2, 8, 5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        resets = torch.rand(2, 8, generator=torch.Generator().manual_seed(seed)) < 0.3
        expected = model(inputs_embeds=observations, resets=resets)
        found = compiled(inputs_embeds=observations, resets=resets)
        close(found.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(found.mems_mask, expected.mems_mask)
