"""MiniGrid's memory tasks as those of `examples/by_feature/memory_agent.py`."""

import importlib
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
LEFT, RIGHT, FORWARD = 0, 1, 2


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("memory_agent")


@pytest.mark.parametrize("size", ["S7", "S13Random", "S17Random"])
def test_a_tile_is_three_vectors_with_a_1_in_a_place(module, size):
    environments = module.Environments(f"MiniGrid-Memory{size}-v0", 8)
    assert (environments.features, environments.actions) == (7 * 7 * (11 + 6 + 3), 7)
    seeds = [(7, i) for i in range(8)]
    first = environments.reset(seeds)
    assert torch.equal(first, environments.reset(seeds)) and len(first.unique(dim=0)) > 1
    for observations in (first, environments.step(torch.full((8,), FORWARD))[0]):
        tiles = observations.unflatten(1, (7, 7, 20)).split([11, 6, 3], dim=-1)
        assert all(torch.equal(part.sum(-1), torch.ones(8, 7, 7)) for part in tiles)


def test_one_of_the_two_ends_of_the_corridor_is_rewarded(module):
    """Walks to the left and to the right, from the same seeds: of the agent's place and direction at the start."""
    walks = []
    for turn in (LEFT, RIGHT):
        environments = module.Environments("MiniGrid-MemoryS7-v0", 8)
        environments.reset([(7, i) for i in range(8)])
        returns: dict[int, float] = {}
        for action in [FORWARD] * 4 + [turn] + [FORWARD] * 2:
            _, _, begins, ended = environments.step(torch.full((8,), action))
            returns = {i: each for i, each in enumerate(ended) if begins[i]} | returns
        walks.append([returns[i] for i in range(8)])
    assert all(sorted(map(bool, both)) == [False, True] for both in zip(*walks, strict=True))
    assert {bool(each) for each in walks[0]} == {False, True}, "which of them, the object at the beginning says"


def test_an_agent_learns_from_windows_what_it_did_step_by_step(module, tmp_path):
    sizes = ["--num_envs", "4", "--window", "10", "--width", "16", "--memory_length", "8"]
    given = ["--env", "MiniGrid-MemoryS7-v0", "--output", str(tmp_path), *sizes]
    run = module.Run(module.PARSER.parse_args(given))
    run.begin_block()
    for _ in range(3):
        assert run.learn(run.play()[0])["first_ratio"] < 1e-5
