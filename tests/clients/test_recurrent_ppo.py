"""RecurrentPPO of stable-baselines3 with the model in the place of its LSTM: `examples/recurrent_ppo.py`."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from recall import Recall
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"width": 16, "layers": 2, "length": 4}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("recurrent_ppo")


def make_agent(example, environment, **changes):
    options = {"n_steps": 32, "batch_size": 128, "policy_kwargs": SIZES, "seed": 1, "device": "cpu"}
    return RecurrentPPO(example.TransfoXLPolicy, make_vec_env(environment, 8, seed=1), **(options | changes))


def test_sequences_of_the_buffer_are_what_was_seen_step_by_step(example):
    """Episodes begin and end anywhere in them, and are longer than the memory."""
    agent = make_agent(example, example.positions_of_cartpole, n_epochs=1, learning_rate=0.0)
    agent.learn(2 * 8 * 32)
    assert agent.rollout_buffer.episode_starts.sum() > 8
    compared = 0
    for batch in agent.rollout_buffer.get(50):
        seen = batch.mask > 0
        with torch.no_grad():
            values, log_probs, _ = agent.policy.evaluate_actions(
                batch.observations, batch.actions.long().flatten(), batch.lstm_states, batch.episode_starts
            )
        torch.testing.assert_close(log_probs[seen], batch.old_log_prob[seen], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values.flatten()[seen], batch.old_values[seen], atol=1e-5, rtol=1e-5)
        compared += int(seen.sum())
    assert compared == 8 * 32


@pytest.mark.parametrize("name", ["shared_lstm", "enable_critic_lstm", "n_lstm_layers", "lstm_hidden_size"])
def test_what_is_of_an_lstm_is_refused(example, name):
    with pytest.raises(ValueError, match=f"{name} is of an LSTM: TransfoXLPolicy takes width, layers and length"):
        make_agent(example, example.positions_of_cartpole, policy_kwargs=SIZES | {name: 1})


def test_it_learns_what_no_agent_without_memory_can(example, tmp_path):
    agent = make_agent(example, Recall, learning_rate=1e-2, n_epochs=4)
    before = [parameter.clone() for parameter in agent.policy.parameters()]
    agent.learn(4_000)
    names = [name for name, _ in agent.policy.named_parameters()]
    same = [
        name for name, old, new in zip(names, before, agent.policy.parameters(), strict=True) if torch.equal(old, new)
    ]
    assert same == [], "every parameter learned"
    mean, _ = evaluate_policy(agent, make_vec_env(Recall, 4, seed=100), n_eval_episodes=60)
    assert mean > 0.9, "by chance a third"
    agent.save(tmp_path / "agent")
    loaded = RecurrentPPO.load(tmp_path / "agent", device="cpu")
    state = again = begins = None
    for observation in np.eye(4, dtype=np.float32)[[[2, 1], [3, 3], [3, 3]]]:
        action, state = agent.predict(observation, state, begins, deterministic=True)
        other, again = loaded.predict(observation, again, begins, deterministic=True)
        assert (action == other).all()
        begins = np.zeros(2)
    assert action.tolist() == [2, 1]
