"""Transformer-XL in the place of GRUModule in TorchRL.

    pip install torchrl gymnasium
    python examples/torchrl_ppo.py --steps 100000 --output runs/torchrl.pt

A collector calls a policy step by step, and carries what the policy writes under "next" to the following step; a loss
reads windows, (B, T), in `set_recurrent_mode`. `Memory` does both: its state is what each layer remembers and which of
that is of the present episode, and `is_init` of InitTracker says where episodes begin. A window is read at once from
the state of its first step, and is what was seen step by step (`same_length=True`). The task is CartPole without its
velocities, which have to be remembered.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from txl_hf import TransfoXLConfig, TransfoXLModel
from txl_hf.command_line import CommandParser, at_least_one, new_path, one_line_errors
from txl_hf.files import whole_file

with one_line_errors():
    import gymnasium
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModule, TensorDictModuleBase
    from torchrl.collectors import Collector
    from torchrl.data import Binary, Unbounded
    from torchrl.envs import (
        ExplorationType,
        GymWrapper,
        InitTracker,
        RewardSum,
        SerialEnv,
        TransformedEnv,
        set_exploration_type,
    )
    from torchrl.envs.transforms import TensorDictPrimer
    from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator, recurrent_mode
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE


class Memory(TensorDictModuleBase):
    """`observation`, `is_init` and the state, `memory` and `remembered`, to `embed`, of `width`, and the next state.

    The state is (layers, length, width), of numbers, and (length,), True where they are of the present episode. The
    next state is written step by step alone: windows are for learning, and leave that of the rollout.
    """

    in_keys = ["observation", "is_init", "memory", "remembered"]
    out_keys = ["embed", ("next", "memory"), ("next", "remembered")]

    def __init__(self, features: int, width: int, layers: int, length: int):
        super().__init__()
        self.model = TransfoXLModel(
            TransfoXLConfig(
                vocab_size=0,
                input_size=features,
                d_model=width,
                n_head=4,
                d_head=width // 4,
                d_inner=2 * width,
                n_layer=layers,
                mem_len=length,
                same_length=True,
                clamp_len=-1,
                initial_memory="empty",
                gating="gru",
                dropout=0.0,
            )
        )

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that begins every episode of an environment with an empty state."""
        config = self.model.config
        memory = Unbounded((config.n_layer, config.mem_len, config.d_model))
        remembered = Binary(config.mem_len, dtype=torch.bool)
        return TensorDictPrimer({"memory": memory, "remembered": remembered}, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        windows = recurrent_mode()
        rows = tensordict.reshape(-1, tensordict.shape[-1]) if windows else tensordict.reshape(-1, 1)
        outputs = self.model(
            inputs_embeds=rows["observation"],
            resets=rows["is_init"][..., 0],
            mems=rows["memory"][:, 0].unbind(1),
            mems_mask=rows["remembered"][:, 0],
        )
        tensordict["embed"] = outputs.last_hidden_state.view(*tensordict.shape, -1)
        if not windows:
            real = outputs.mems_mask
            memory = torch.stack(outputs.mems, 1).nan_to_num(0.0)
            real = torch.ones_like(rows["remembered"][:, 0]) if real is None else real
            tensordict["next", "memory"] = memory.view(*tensordict.shape, *memory.shape[1:])
            tensordict["next", "remembered"] = real.view(*tensordict.shape, -1)
        return tensordict


def positions_of_cartpole() -> gymnasium.Env:
    """CartPole of which the cart's position and the pole's angle are seen."""
    env = gymnasium.make("CartPole-v1")
    box = gymnasium.spaces.Box(-5, 5, (2,), np.float32)
    return gymnasium.wrappers.TransformObservation(env, lambda observation: observation[[0, 2]], box)


def make_environments(make: Callable[[], gymnasium.Env], count: int, memory: Memory, seed: int) -> TransformedEnv:
    """Several of one task, which carry the state of `memory`."""
    env = TransformedEnv(SerialEnv(count, lambda: GymWrapper(make(), categorical_action_encoding=True)))
    for transform in (InitTracker(), RewardSum(), memory.make_tensordict_primer()):
        env.append_transform(transform)
    env.set_seed(seed)
    return env


def make_agent(memory: Memory, actions: int) -> ActorValueOperator:
    """A policy and a value on top of one memory."""
    width = memory.model.config.d_model
    actor = TensorDictModule(nn.Linear(width, actions), in_keys=["embed"], out_keys=["logits"])
    policy = ProbabilisticActor(
        actor, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    return ActorValueOperator(memory, policy, ValueOperator(nn.Linear(width, 1), in_keys=["embed"]))


def make_estimate(agent: ActorValueOperator) -> GAE:
    """Advantages of windows, at most one episode of each ended by a limit of steps."""
    # Both values of a step are from one reading of the window: that of "next" lacks the first of an episode.
    return GAE(
        gamma=0.99,
        lmbda=0.95,
        value_network=agent.get_value_operator(),
        shifted=True,
        shifted_budget=2,
        average_gae=True,
    )


def train(agent: ActorValueOperator, environments: TransformedEnv, steps: int, window: int, learning_rate: float):
    """PPO, on windows of all environments, whose rows are the minibatches."""
    count = environments.batch_size[0]
    policy, estimate = agent.get_policy_operator(), make_estimate(agent)
    loss = ClipPPOLoss(policy, agent.get_value_operator(), entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2")
    optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
    frames = count * window
    total = max(1, steps // frames) * frames
    for rollout in Collector(environments, policy, frames_per_batch=frames, total_frames=total):
        with torch.no_grad():
            estimate(rollout)
        for _ in range(4):
            for rows in torch.randperm(count).tensor_split(min(4, count)):
                losses = loss(rollout[rows])
                optimizer.zero_grad()
                sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        ended = rollout["next", "done"]
        if ended.any():
            print(f"return {rollout['next', 'episode_reward'][ended].mean():.3f} of {int(ended.sum())} episodes")


@torch.no_grad()
def evaluate(agent: ActorValueOperator, environments: TransformedEnv, steps: int) -> float:
    """The mean return of the first episode of each, by the most probable actions; an episode has at most `steps`."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        played = environments.rollout(steps, agent.get_policy_operator(), break_when_any_done=False)
    ended = played["next", "done"][..., 0]
    first = ended & (ended.cumsum(1) == 1)
    return played["next", "episode_reward"][first].mean().item()


def main():
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_one, default=100_000, help="of all environments (%(default)s)")
    parser.add_argument("--output", type=new_path, required=True, help="where the agent's weights are written")
    options = parser.parse_args()
    torch.manual_seed(1)
    memory = Memory(features=2, width=64, layers=1, length=16)
    agent = make_agent(memory, actions=2)
    train(agent, make_environments(positions_of_cartpole, 8, memory, seed=1), options.steps, 64, 1e-3)
    with whole_file(options.output) as aside:
        torch.save(agent.state_dict(), aside)
    held_out = make_environments(positions_of_cartpole, 8, memory, seed=1000)
    print(f"return {evaluate(agent, held_out, 500):.1f} of 8 episodes, at most 500")


if __name__ == "__main__":
    main()
