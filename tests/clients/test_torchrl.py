"""TorchRL with the model in the place of its GRUModule: `examples/torchrl_ppo.py`."""

import pytest
import torch
from recall import Recall
from torchrl.modules import set_recurrent_mode

import torchrl_ppo as example
from scripts import run_script


def make_memory(features: int) -> example.Memory:
    """Of 2 layers that remember 4 observations, with weights by which outputs differ."""
    torch.manual_seed(1)
    memory = example.Memory(features, width=16, layers=2, length=4)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_(0, 0.4)
    return memory


@pytest.fixture
def rollout():
    """Of CartPole's positions, 8 environments for 50 steps after 10 others: (memory, agent, what was seen)."""
    memory = make_memory(2)
    agent = example.make_agent(memory, actions=2)
    environments = example.make_environments(example.positions_of_cartpole, 8, memory, seed=1)
    with torch.no_grad():
        seen = environments.rollout(60, agent, break_when_any_done=False)
    assert seen["is_init"][:, 1:].sum() > 8
    return memory, agent, seen[:, 10:]


@pytest.mark.parametrize(("first", "last"), [(0, 50), (0, 1), (7, 8), (7, 31), (23, 50)])
def test_a_window_is_what_was_seen_step_by_step(rollout, first, last):
    """Episodes begin and end anywhere in it, and are longer than the memory."""
    memory, _, seen = rollout
    window = seen[:, first:last].clone()
    with torch.no_grad(), set_recurrent_mode(True):
        at_once = memory(window.exclude("embed"))["embed"]
        torch.testing.assert_close(at_once, seen["embed"][:, first:last], atol=1e-5, rtol=1e-5)
        window["is_init"] = torch.zeros_like(window["is_init"])
        window["memory"] = torch.zeros_like(window["memory"])
        forgetful = memory(window)["embed"]
    assert (forgetful - at_once).abs().max() > 1e-2, "the state and the resets are read"


def test_a_window_of_one_environment_is_that_of_many(rollout):
    memory, _, seen = rollout
    with torch.no_grad(), set_recurrent_mode(True):
        alone = memory(seen[3].exclude("embed"))["embed"]
        several = memory(seen.exclude("embed").unflatten(0, (2, 4)))["embed"]
    torch.testing.assert_close(alone, seen["embed"][3], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(several.flatten(0, 1), seen["embed"], atol=1e-5, rtol=1e-5)


def test_values_and_advantages_of_windows_are_those_of_the_steps(rollout):
    _, agent, seen = rollout
    estimate = example.make_estimate(agent)
    expected, following = seen["state_value"].clone(), seen["state_value"][:, 1:]
    with torch.no_grad():
        estimate(seen.exclude("state_value", "embed"))
        found = estimate(seen.exclude("state_value", "embed"))
    torch.testing.assert_close(found["state_value"], expected, atol=1e-5, rtol=1e-5)
    goes_on = ~seen["next", "done"][:, :-1]
    torch.testing.assert_close(found["next", "state_value"][:, :-1][goes_on], following[goes_on], atol=1e-5, rtol=1e-5)


def test_it_learns_what_no_agent_without_memory_can(tmp_path):
    torch.manual_seed(1)
    memory = example.Memory(4, width=16, layers=2, length=4)
    agent = example.make_agent(memory, actions=3)
    before = [parameter.clone() for parameter in agent.parameters()]
    example.train(agent, example.make_environments(Recall, 8, memory, seed=1), 6_000, window=32, learning_rate=3e-3)
    names = [name for name, _ in agent.named_parameters()]
    same = [name for name, old, new in zip(names, before, agent.parameters(), strict=True) if torch.equal(old, new)]
    assert same == [], "every parameter learned"
    held_out = example.make_environments(Recall, 60, memory, seed=100)
    assert example.evaluate(agent, held_out, steps=3) > 0.9, "by chance a third"
    torch.save(agent.state_dict(), tmp_path / "agent.pt")
    other = example.Memory(4, width=16, layers=2, length=4)
    loaded = example.make_agent(other, actions=3)
    loaded.load_state_dict(torch.load(tmp_path / "agent.pt"))
    assert example.evaluate(loaded, example.make_environments(Recall, 60, other, seed=100), steps=3) > 0.9


def test_the_command(tmp_path):
    process = run_script("examples/torchrl_ppo.py", "--steps", "512", "--output", tmp_path / "agent.pt")
    assert process.returncode == 0, process.stderr
    assert "of 8 episodes, at most 500" in process.stdout
    assert "module.0.model.layers.0.self_attn.q_proj.weight" in torch.load(tmp_path / "agent.pt")
