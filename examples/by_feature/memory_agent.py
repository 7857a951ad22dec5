"""An agent that remembers: PPO on tasks that show too little at a time, with Transformer-XL as its memory.

    python examples/by_feature/memory_agent.py --env repeat_previous --output runs/agents
    python examples/by_feature/memory_agent.py --env position_cartpole --memory gru --seed 2 --output runs/agents
    python examples/by_feature/memory_agent.py --table runs/agents
    python examples/by_feature/memory_agent.py --smoke

The loop is a single file, as CleanRL's are. What is added to PPO without a memory are three lines, marked (1) to (3):
the window of a rollout begins with one memory, which is kept; an observation that begins an episode says so, `resets`;
and an update reads the window at once from that memory, where the rollout read it step by step. Both give the same
policy, so that the first ratio of an update is 1. `--memory gru`, `lstm` and `none` are the same agent with a GRU, an
LSTM or nothing, of as many parameters.

Tasks of POPGym (`pip install popgym`) are `repeat_previous`, its easy one, `repeat_previous_medium` and
`repeat_previous_hard`, where the card of 3, 31 and 63 observations before is to be named; `count_recall`, how often a
colour was dealt; `autoencode`, where 52 cards are to be named backwards; `position_cartpole`, CartPole without its
velocities. `recall` needs no package. `--memory_length` counts the present observation: at least 4, 32, 64, 51 and 103
for the first five. In all of them but CartPole a reward depends on one action alone: `--gamma 0` ignores later ones.
Tasks of MiniGrid (`pip install minigrid`), such as `MiniGrid-MemoryS7-v0`, ask at a corridor's end for the object that
was seen at its beginning; of what the agent sees, 7 × 7 tiles, each is three vectors with a 1 in a place.

Every `--block` updates all episodes begin anew, from seeds of their own, and a checkpoint is written: a run that
goes on with `--resume` is the run that was not stopped. TensorBoard has the curves, and `--table` says how far a run
is that has not ended. At the end the agent plays held-out episodes, without chance in its choices,
and a Transformer-XL's policy is written to the run's folder as `agent`, which
`AutoModelForTokenClassification.from_pretrained` loads: `watch_agent.py`.
"""

import argparse
import importlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
from txl_hf.command_line import at_least_one, one_line_errors, positive

MEMORIES = ("transfo-xl", "gru", "lstm", "none")
# Tasks of POPGym: the module in popgym.envs and the class.
POPGYM = {
    "repeat_previous": ("repeat_previous", "RepeatPreviousEasy"),
    "repeat_previous_medium": ("repeat_previous", "RepeatPreviousMedium"),
    "repeat_previous_hard": ("repeat_previous", "RepeatPreviousHard"),
    "count_recall": ("count_recall", "CountRecallEasy"),
    "autoencode": ("autoencode", "AutoencodeEasy"),
    "position_cartpole": ("position_only_cartpole", "PositionOnlyCartPoleEasy"),
}
# Tasks of MiniGrid, by their ids.
MINIGRID = [f"MiniGrid-Memory{size}-v0" for size in ("S7", "S9", "S11", "S13", "S13Random", "S17Random")]
# What `--env` may be.
TASKS = ["recall", *POPGYM, *MINIGRID]
# No training has this seed.
HELD_OUT = 2**31
PARSER = common.Parser(__doc__)
PARSER.add_argument("--env", choices=TASKS)
PARSER.add_argument("--memory", choices=MEMORIES, default=MEMORIES[0], help="(%(default)s)")
PARSER.add_argument("--seed", type=int, default=1, help="(%(default)s)")
PARSER.add_argument("--steps", type=at_least_one, default=100_000, help="of all environments together (%(default)s)")
PARSER.add_argument("--output", type=Path, help="folder for this run's folder, ENV-MEMORY-SEED")
PARSER.add_argument("--resume", action="store_true", help="go on from the checkpoint of this run, if there is one")
PARSER.add_argument("--num_envs", type=at_least_one, default=32, help="(%(default)s)")
PARSER.add_argument("--window", type=at_least_one, default=64, help="steps between updates (%(default)s)")
PARSER.add_argument("--memory_length", type=at_least_one, default=16, help="observations remembered (%(default)s)")
PARSER.add_argument("--width", type=at_least_one, default=64, help="of the Transformer-XL (%(default)s)")
PARSER.add_argument("--layers", type=at_least_one, default=1, help="(%(default)s)")
PARSER.add_argument("--epochs", type=at_least_one, default=4, help="passes over a window (%(default)s)")
PARSER.add_argument("--minibatches", type=at_least_one, default=4, help="updates in a pass (%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=1e-3, help="at the start; it falls to 0 (%(default)s)")
PARSER.add_argument("--gamma", type=float, default=0.99, help="discount (%(default)s)")
PARSER.add_argument("--gae_lambda", type=float, default=0.95, help="(%(default)s)")
PARSER.add_argument("--clip", type=positive, default=0.2, help="of the ratio (%(default)s)")
PARSER.add_argument("--entropy", type=float, default=0.01, help="factor of the entropy (%(default)s)")
PARSER.add_argument("--block", type=at_least_one, default=10, help="updates between checkpoints (%(default)s)")
PARSER.add_argument("--episodes", type=at_least_one, default=128, help="held out, at the end (%(default)s)")
PARSER.add_argument("--table", type=Path, metavar="OUTPUT", help="instead: two tables and a picture of runs there")


def check(options: argparse.Namespace):
    """Raise a ValueError for options that do not go together."""
    if options.table is not None:
        return
    for name in ("env", "output"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name} is missing")
    if options.width % 8:
        raise ValueError(f"--width {options.width} must be a multiple of 8: the agent has four heads")
    if not 0 <= options.seed < HELD_OUT:
        raise ValueError(f"--seed {options.seed} must lie between 0 and {HELD_OUT - 1}")
    for name, share in (("gamma", options.gamma), ("gae_lambda", options.gae_lambda)):
        if not 0 <= share <= 1:
            raise ValueError(f"--{name} {share:g} must lie between 0 and 1")
    if not 0 <= options.entropy < math.inf:
        raise ValueError(f"--entropy {options.entropy:g} must be at least 0, and finite")
    if options.num_envs < options.minibatches:
        raise ValueError(f"--minibatches {options.minibatches} are more than --num_envs {options.num_envs}")
    if options.num_envs // options.minibatches * options.window < 2:
        raise ValueError(
            f"--window {options.window} leaves a minibatch one observation, whose advantage has no deviation: "
            "at least 2"
        )
    find_folder(options)


def find_folder(options: argparse.Namespace) -> Path:
    """That of the run. Raises a ValueError where another run's is."""
    folder: Path = options.output / f"{options.env}-{options.memory}-{options.seed}"
    if folder.exists() and not options.resume:
        raise ValueError(f"{folder} exists: go on with --resume, or choose another --output")
    return folder


if __name__ == "__main__":
    PARSER.refuse_first(check)

import numpy as np
import torch
from huggingface_hub import EvalResult, ModelCardData
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))

from study import keep_options
from txl_hf import TransfoXLConfig, TransfoXLForTokenClassification, TransfoXLModel
from txl_hf.files import whole_file, write_text
from txl_hf.memories import memory_of

with one_line_errors():
    from torch.utils.tensorboard import SummaryWriter


def smoke(folder: Path) -> list[str | Path]:
    sizes = ["--num_envs", "4", "--window", "16", "--width", "16", "--steps", "256", "--block", "2", "--episodes", "8"]
    return ["--env", "recall", "--output", folder / "agents", *sizes]


# Options that a run may be resumed with another value of.
RESULT = "result.json"
MAY_CHANGE = {"steps", "output", "resume", "episodes", "table", "smoke"}


# --- tasks -----------------------------------------------------------------------------------------------------------


class Recall:
    """Say what was shown the time before, of four things; 20 steps, each worth 1/19 of the reward."""

    things = actions = 4

    def reset(self, seed: int | None = None) -> tuple[int, dict]:
        self._shown = np.random.default_rng(seed).integers(self.things, size=21).tolist()
        self._step = 0
        return self._shown[0], {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        reward = 0.0 if self._step == 0 else (1 if action == self._shown[self._step - 1] else -1) / 19
        self._step += 1
        return self._shown[self._step], reward, self._step == 20, False, {}


class Environments:
    """Several of one task, each of which begins the next episode by itself."""

    def __init__(self, name: str, count: int):
        self._environments = [make_environment(name) for _ in range(count)]
        first = self._environments[0]
        # Of several things, the one that is shown becomes a vector with a 1 in its place.
        if isinstance(first, Recall):
            self._vector, self.features, self.actions = np.eye(first.things).__getitem__, first.things, first.actions
        else:
            from gymnasium.spaces import flatdim, flatten

            self._vector, self.features = partial(flatten, first.observation_space), flatdim(first.observation_space)
            self.actions = int(first.action_space.n)

    def reset(self, seeds: list[tuple[int, ...]]) -> Tensor:
        """(B, F), the first observation of an episode from each seed; later episodes follow from it too."""
        self._seeds = [np.random.default_rng(seed) for seed in seeds]
        self._returns = [0.0] * len(seeds)
        return self._encode([self._begin(i) for i in range(len(seeds))])

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, list[float | None]]:
        """Observations (B, F), rewards (B,), whether the observation begins an episode (B,), and returns of those
        that ended."""
        observations, rewards, begins, ended = [], [], [], []
        for i, (environment, action) in enumerate(zip(self._environments, actions.tolist(), strict=True)):
            observation, reward, terminated, truncated, _ = environment.step(action)
            self._returns[i] += reward
            over = terminated or truncated
            ended.append(self._returns[i] if over else None)
            observations.append(self._begin(i) if over else observation)
            rewards.append(reward)
            begins.append(over)
        return self._encode(observations), torch.tensor(rewards, dtype=torch.float32), torch.tensor(begins), ended

    def _begin(self, i: int):
        self._returns[i] = 0.0
        return self._environments[i].reset(seed=int(self._seeds[i].integers(2**31)))[0]

    def _encode(self, observations: list) -> Tensor:
        return torch.from_numpy(np.stack([self._vector(observation) for observation in observations])).float()


def make_environment(name: str):
    if name == "recall":
        return Recall()
    owner = "MiniGrid" if name in MINIGRID else "POPGym"
    try:
        if name in MINIGRID:
            import gymnasium
            from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

            return ImgObsWrapper(OneHotPartialObsWrapper(gymnasium.make(name)))
        module, kind = POPGYM[name]
        return getattr(importlib.import_module(f"popgym.envs.{module}"), kind)()
    except ImportError as error:
        raise ValueError(f"--env {name} is {owner}'s: pip install {owner.lower()} ({error})") from None


# --- agents ----------------------------------------------------------------------------------------------------------


class AgentMemory(nn.Module):
    """(B, T, F) observations and what was remembered → (B, T, width) states and what is to be remembered."""

    width: int

    def rows(self, state: dict, rows: Tensor) -> dict:
        """The memory of some rows of the batch."""
        return {name: tensor[rows] for name, tensor in state.items()}


class TransformerMemory(AgentMemory):
    """GTrXL: the state is what `mems` hold, and which of it is real."""

    def __init__(self, features: int, width: int, layers: int, length: int):
        super().__init__()
        config = TransfoXLConfig(
            vocab_size=0,
            input_size=features,
            d_model=width,
            n_head=4,
            d_head=width // 4,
            d_inner=2 * width,
            n_layer=layers,
            mem_len=length,
            # As many keys in a window as step by step.
            same_length=True,
            clamp_len=-1,
            initial_memory="empty",
            gating="gru",
            dropout=0.0,
            init_std=0.1,
        )
        self.model = TransfoXLModel(config)
        self.width = width

    def forward(self, observations: Tensor, resets: Tensor, state: dict) -> tuple[Tensor, dict]:
        outputs = self.model(inputs_embeds=observations, resets=resets, **state)
        cache = outputs.past_key_values
        return outputs.last_hidden_state, memory_of(outputs) if cache is None else {"past_key_values": cache}

    def rows(self, state: dict, rows: Tensor) -> dict:
        if not state:
            return {}
        mask = state["mems_mask"]
        mems = tuple(states[rows] for states in state["mems"])
        return {"mems": mems, "mems_mask": None if mask is None else mask[rows]}


class RecurrentMemory(AgentMemory):
    """A GRU or an LSTM: the state is (B, W), and the LSTM's cell, which a GRU leaves at 0."""

    def __init__(self, features: int, width: int, kind: type[nn.GRUCell] | type[nn.LSTMCell]):
        super().__init__()
        self.embed, self.cell, self.width = nn.Linear(features, width), kind(width, width), width

    def forward(self, observations: Tensor, resets: Tensor, state: dict) -> tuple[Tensor, dict]:
        zeros = observations.new_zeros(len(observations), self.width)
        hidden, cell = state.get("hidden", zeros), state.get("cell", zeros)
        inputs, states = self.embed(observations).tanh(), []
        for step in range(inputs.shape[1]):
            hidden, cell = (each.masked_fill(resets[:, step, None], 0) for each in (hidden, cell))
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = self.cell(inputs[:, step], (hidden, cell))
            else:
                hidden = self.cell(inputs[:, step], hidden)
            states.append(hidden)
        return torch.stack(states, 1), {"hidden": hidden, "cell": cell}


class NoMemory(AgentMemory):
    """Three layers, which see the present alone."""

    def __init__(self, features: int, width: int):
        super().__init__()
        sizes = [features, width, width, width]
        linear = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.layers = nn.Sequential(*(module for layer in linear for module in (layer, nn.Tanh())))
        self.width = width

    def forward(self, observations: Tensor, resets: Tensor, state: dict) -> tuple[Tensor, dict]:
        return self.layers(observations), {}


class Agent(nn.Module):
    """A policy and a value on top of a memory."""

    def __init__(self, memory: AgentMemory, actions: int):
        super().__init__()
        self.memory = memory
        self.actor, self.critic = nn.Linear(memory.width, actions), nn.Linear(memory.width, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)

    def forward(self, observations: Tensor, resets: Tensor, state: dict) -> tuple[Categorical, Tensor, dict]:
        """The policy and the value, (B, T), at each of the observations, (B, T, F), and the state after them.

        Args:
            resets: (B, T) bool, True where an observation begins an episode.
            state: what this returned for the observations before; empty: there were none.
        """
        hidden, state = self.memory(observations, resets, state)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden)[..., 0], state


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# From the width of an observation and of the states.
OTHERS: dict[str, Callable[[int, int], AgentMemory]] = {
    "gru": partial(RecurrentMemory, kind=nn.GRUCell),
    "lstm": partial(RecurrentMemory, kind=nn.LSTMCell),
    "none": NoMemory,
}


def make_agent(options: argparse.Namespace, features: int, actions: int) -> Agent:
    """With as many parameters, but for a few in a hundred, whichever memory it has."""
    wanted = Agent(TransformerMemory(features, options.width, options.layers, options.memory_length), actions)
    if options.memory == "transfo-xl":
        return wanted
    kind = OTHERS[options.memory]
    with torch.device("meta"):
        sizes = {width: count(Agent(kind(features, width), actions)) for width in range(4, 16 * options.width, 2)}
    return Agent(kind(features, min(sizes, key=lambda width: abs(sizes[width] - count(wanted)))), actions)


# --- PPO -------------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """The observations and actions of a window: (B, T, F) or (B, T) each; and the state that it began with."""

    observations: Tensor
    resets: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    state: dict


class Run:
    """A training, and its files in `folder`."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = find_folder(options)
        self.environments = Environments(options.env, options.num_envs)
        torch.manual_seed(options.seed)
        self.agent = make_agent(options, self.environments.features, self.environments.actions)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=options.learning_rate, eps=1e-5)
        self.steps_per_update = options.num_envs * options.window
        self.updates = max(1, options.steps // self.steps_per_update)
        self.update, self.curve, self.seconds = 0, [], 0.0
        checkpoint = self.folder / "checkpoint.pt"
        given = vars(options).keys() - MAY_CHANGE
        keep_options(self.folder / "options.json", {name: getattr(options, name) for name in given})
        if options.resume and checkpoint.exists():
            found = torch.load(checkpoint, weights_only=True)
            self.agent.load_state_dict(found["agent"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.update, self.curve, self.seconds = found["update"], found["curve"], found["seconds"]
            if self.update > self.updates:
                done = self.update * self.steps_per_update
                raise ValueError(f"--steps {options.steps} are fewer than the {done} that {self.folder} has done")

    def train(self):
        options = self.options
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.update < self.updates:
            # Of a run that goes on: its presence says that all is done.
            (self.folder / RESULT).unlink(missing_ok=True)
        writer = SummaryWriter(self.folder, purge_step=self.update * self.steps_per_update)
        total = self.updates * self.steps_per_update
        bar = tqdm(total=total, initial=self.update * self.steps_per_update, unit="step", desc=self.folder.name)
        first = self.update  # Within a block, where a finished run has more steps now.
        while self.update < self.updates:
            started = time.perf_counter()
            if self.update == first or self.update % options.block == 0:
                self.begin_block()
            for group in self.optimizer.param_groups:
                group["lr"] = options.learning_rate * (1 - self.update / self.updates)
            rollout, returns = self.play()
            figures = self.learn(rollout)
            self.update += 1
            self.seconds += time.perf_counter() - started
            bar.update(self.steps_per_update)
            if returns:
                figures["return"] = float(np.mean(returns))
                self.curve.append([self.update * self.steps_per_update, figures["return"]])
                bar.set_postfix_str(f"return {figures['return']:.3f}")
            for name, value in figures.items():
                writer.add_scalar(name, value, self.update * self.steps_per_update)
            if self.update % options.block == 0 or self.update == self.updates:
                self.save()
        bar.close()
        held_out = self.hold_out()
        writer.add_scalar("held_out", held_out, total)
        writer.close()
        result = {
            "env": options.env, "memory": options.memory, "seed": options.seed, "steps": total,
            "parameters": count(self.agent), "held_out": held_out, "episodes": options.episodes,
            "seconds": round(self.seconds, 1), "curve": self.curve,
        }  # fmt: skip
        write_text(self.folder / RESULT, json.dumps(result) + "\n")
        if isinstance(self.agent.memory, TransformerMemory):
            settings = json.loads((self.folder / "options.json").read_text(encoding="utf-8"))
            save_policy(self.folder / "agent", self.agent.memory, self.agent.actor, settings, result)
        print(f"{self.folder.name}: {held_out:.3f} on {options.episodes} held-out episodes")

    def begin_block(self):
        """All episodes begin anew, so that a checkpoint needs to hold none of them."""
        torch.manual_seed(self.options.seed + 1000 * self.update)
        seeds = [(self.options.seed, self.update, i) for i in range(self.options.num_envs)]
        self.observations = self.environments.reset(seeds)
        self.begins = torch.ones(self.options.num_envs, dtype=torch.bool)
        self.state: dict = {}

    def save(self):
        saved = {
            "agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict(),
            "update": self.update, "curve": self.curve, "seconds": self.seconds,
        }  # fmt: skip
        with whole_file(self.folder / "checkpoint.pt") as aside:
            torch.save(saved, aside)

    @torch.no_grad()
    def play(self) -> tuple[Rollout, list[float]]:
        """A window of every environment, and the returns of episodes that ended in it."""
        seen, returns, start = defaultdict(list), [], self.state  # (1) the one memory that the window begins with
        state = start | {"use_cache": True}  # A step reads it as keys and values, which are projected once.
        for _ in range(self.options.window):
            # (2) an observation that begins an episode forgets what was before.
            policy, value, state = self.agent(self.observations[:, None], self.begins[:, None], state)
            action = policy.sample()
            seen["observations"].append(self.observations)
            seen["resets"].append(self.begins)
            seen["actions"].append(action[:, 0])
            seen["log_probs"].append(policy.log_prob(action)[:, 0])
            seen["values"].append(value[:, 0])
            self.observations, rewards, self.begins, ended = self.environments.step(action[:, 0])
            seen["rewards"].append(rewards)
            returns += [each for each in ended if each is not None]
        _, following, _ = self.agent(self.observations[:, None], self.begins[:, None], state)
        window = {name: torch.stack(parts, 1) for name, parts in seen.items()}
        _, _, self.state = self.agent(window["observations"], window["resets"], start)
        advantages = self.advantages(window.pop("rewards"), window["values"], window["resets"], following[:, 0])
        return Rollout(**window, advantages=advantages, state=start), returns

    def advantages(self, rewards: Tensor, values: Tensor, resets: Tensor, following: Tensor) -> Tensor:
        """Generalised advantage estimates (Schulman et al., 2016), (B, T)."""
        advantages, advantage, begins = torch.zeros_like(rewards), torch.zeros_like(following), self.begins
        for step in reversed(range(rewards.shape[1])):
            goes_on = (~begins).float()
            delta = rewards[:, step] + self.options.gamma * following * goes_on - values[:, step]
            advantage = delta + self.options.gamma * self.options.gae_lambda * goes_on * advantage
            advantages[:, step], following, begins = advantage, values[:, step], resets[:, step]
        return advantages

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Clipped updates (Schulman et al., 2017) on rows of the window, each from its own memory."""
        clip, figures = self.options.clip, dict[str, float]()
        targets = rollout.values + rollout.advantages
        for _ in range(self.options.epochs):
            for rows in torch.randperm(self.options.num_envs).tensor_split(self.options.minibatches):
                state = self.agent.memory.rows(rollout.state, rows)
                # (3) the whole window at once.
                policy, values, _ = self.agent(rollout.observations[rows], rollout.resets[rows], state)
                ratio = (policy.log_prob(rollout.actions[rows]) - rollout.log_probs[rows]).exp()
                figures.setdefault("first_ratio", (ratio - 1).abs().max().item())
                advantage = rollout.advantages[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
                value_loss = (values - targets[rows]).square().mean() / 2
                entropy = policy.entropy().mean()
                self.optimizer.zero_grad()
                (value_loss - gain - self.options.entropy * entropy).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()
        return figures | {"value_loss": value_loss.item(), "entropy": entropy.item()}

    @torch.no_grad()
    def hold_out(self) -> float:
        """The mean return of episodes from seeds that no training has, by the most probable actions."""
        environments = Environments(self.options.env, self.options.episodes)
        observations = environments.reset([(HELD_OUT, i) for i in range(self.options.episodes)])
        begins, state = torch.ones(self.options.episodes, dtype=torch.bool), dict[str, Any]()
        returns: dict[int, float] = {}
        while len(returns) < self.options.episodes:
            policy, _, state = self.agent(observations[:, None], begins[:, None], state)
            observations, _, begins, ended = environments.step(policy.logits[:, 0].argmax(-1))
            # The first episode of each.
            returns = {i: each for i, each in enumerate(ended) if each is not None} | returns
        return float(np.mean(list(returns.values())))


def save_policy(folder: Path, memory: TransformerMemory, actor: nn.Linear, settings: dict, result: dict[str, Any]):
    """The policy as a model of transformers, a class for each action at each observation; with its card."""
    memory.model.config.num_labels = actor.out_features
    policy = TransfoXLForTokenClassification(memory.model.config)
    policy.transformer, policy.score = memory.model, actor
    policy.save_pretrained(folder)
    name, returned = f"{result['env']}-{result['seed']}", f"mean return of {result['episodes']} held-out episodes"
    measured = EvalResult(
        task_type="reinforcement-learning",
        dataset_type=result["env"],
        dataset_name=result["env"],
        metric_type="mean_reward",
        metric_name=returned,
        metric_value=round(result["held_out"], 4),
    )
    tags = ["transformer-xl", "reinforcement-learning"]
    data = ModelCardData(library_name="transformers", tags=tags, model_name=name, eval_results=[measured])
    text = f"""---
{data.to_yaml()}
---

# {name}

An agent with a memory, whose {returned} of `{result["env"]}` is {result["held_out"]:.3f}. With
`import txl_hf`, `AutoModelForTokenClassification.from_pretrained` loads it, and `watch_agent.py` plays it. Its inputs
are observations, `inputs_embeds`; the class with the highest logit is the action.

Trained by `memory_agent.py` for {result["steps"]:,} environment steps:
{", ".join(f"{option} {value}" for option, value in sorted(settings.items()))}.
"""
    write_text(folder / "README.md", text)


# --- table -----------------------------------------------------------------------------------------------------------


def tabulate(folder: Path):
    """agents.csv, a row for each finished run; curves.csv, the returns of all; agents.png, those of finished runs."""
    returns: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/checkpoint.pt")):
        found = torch.load(path, weights_only=True)
        begun = json.loads(path.with_name("options.json").read_text(encoding="utf-8"))
        run = {name: begun[name] for name in ("env", "memory", "seed")}
        returns += [run | {"steps": steps, "return": round(reached, 4)} for steps, reached in found["curve"]]
        if not (path.parent / RESULT).exists():
            reached = f", return {found['curve'][-1][1]:.3f}" if found["curve"] else ""
            print(f"{path.parent.name} goes on with --resume: {found['update']} updates{reached}")
    paths = sorted(folder.glob(f"*/{RESULT}"))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if not results:
        raise ValueError(f"--table {folder} holds no finished run")
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    for path, result in zip(paths, results, strict=True):
        found = json.loads(path.with_name("options.json").read_text(encoding="utf-8"))
        result |= {name: found[name] for name in ("memory_length", "window", "gamma")}
        found = {name: value for name, value in found.items() if name != "seed"}
        found |= {name: result[name] for name in ("steps", "episodes")}
        first = settings.setdefault((result["env"], result["memory"]), found)
        if other := [name for name in found if found[name] != first.get(name)]:
            raise ValueError(
                f"--table {folder} holds {result['env']}-{result['memory']} with {other[0]} {first.get(other[0])} and "
                f"{found[other[0]]}, which are no seeds of one agent: keep them in folders of their own"
            )
    rows = [{name: value for name, value in result.items() if name != "curve"} for result in results]
    of_curves = ["env", "memory", "seed", "steps", "return"]
    for name, columns, table in (("agents.csv", list(rows[0]), rows), ("curves.csv", of_curves, returns)):
        common.write_rows(folder / name, table, columns)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        runs[result["env"]][result["memory"]].append(result)
    for env, memories in runs.items():
        for memory, each in memories.items():
            held_out = [result["held_out"] for result in each]
            print(f"{env:>18} {memory:>11} {np.mean(held_out):7.3f} ± {np.std(held_out):.3f} of {len(each)} seeds")
    finished = {(result["env"], result["memory"], result["seed"]) for result in results}
    plot([row for row in returns if (row["env"], row["memory"], row["seed"]) in finished], folder / "agents.png")


def plot(rows: list[dict[str, Any]], path: Path):
    """Returns in training, a panel for each task: the mean of the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, dict[str, dict[Any, list[tuple[float, float]]]]] = {}
    for row in rows:
        seeds = curves.setdefault(row["env"], {}).setdefault(row["memory"], {})
        seeds.setdefault(row["seed"], []).append((float(row["steps"]) / 1e3, float(row["return"])))
    count = max(1, len(curves))
    figure, axes = plt.subplots(1, count, figsize=(5 * count, 4), layout="constrained", squeeze=False, sharey=True)
    for axis, (env, memories) in zip(axes[0], curves.items(), strict=False):
        for memory, seeds in memories.items():
            steps = np.linspace(0, max(points[-1][0] for points in seeds.values()), 60)[1:]
            each = [np.interp(steps, *np.array(points).T) for points in seeds.values()]
            label = f"{memory}, {len(each)} seed{'s' * (len(each) > 1)}"
            color = f"C{MEMORIES.index(memory)}"  # the same in all panels
            axis.plot(steps, np.mean(each, 0), color, linewidth=2, label=label)
            axis.fill_between(steps, np.min(each, 0), np.max(each, 0), color=color, alpha=0.2, linewidth=0)
        axis.set_title(env.replace("_", " "), fontsize=15)
        axis.set_xlabel("environment steps, thousands", fontsize=14)
        axis.tick_params(labelsize=13)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=13)
    axes[0, 0].set_ylabel("return of an episode", fontsize=14)
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=110, format="png")
    plt.close(figure)


def main():
    options = common.parse_arguments(PARSER, smoke)
    with one_line_errors():
        if options.table is not None:
            return tabulate(options.table)
        check(options)
        Run(options).train()


if __name__ == "__main__":
    main()
