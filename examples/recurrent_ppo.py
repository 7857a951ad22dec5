"""Transformer-XL in the place of the LSTM in RecurrentPPO of stable-baselines3.

    pip install sb3-contrib
    python examples/recurrent_ppo.py --steps 100000 --output runs/recurrent-ppo

RecurrentPPO hands a state of two tensors (layers, environments, size) from step to step, keeps it for each step, and
learns from sequences that begin with the state of their first. `Memory` takes the LSTM's place: its state is what each
layer remembers and, in the second tensor, which of it is of the present episode. A sequence is read at once, and is
what was seen step by step (`same_length=True`). The task is CartPole without its velocities, which have to be
remembered.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_hf import TransfoXLConfig, TransfoXLModel
from txl_hf.command_line import CommandParser, at_least_one, new_path, one_line_errors

with one_line_errors():
    import gymnasium
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

States = tuple[Tensor, Tensor]


class Memory(nn.Module):
    """The object that the policy and its buffer take for an LSTM of `num_layers` with states of `hidden_size`."""

    def __init__(self, features: int, width: int, layers: int, length: int):
        super().__init__()
        self.input_size, self.num_layers, self.hidden_size = features, layers, length * width
        self.width, self.length = width, length
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

    def forward(self, features: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """(B, T, F) and where episodes start, (B, T), to (B, T, width); `states` are (layers, B, hidden_size) each."""
        remembered, real = states[0].unflatten(-1, (self.length, self.width)), states[1][0, :, : self.length] > 0
        outputs = self.model(
            inputs_embeds=features, mems=tuple(remembered), mems_mask=real, resets=starts.to(torch.bool)
        )
        remembered = torch.stack(outputs.mems).flatten(2)
        real = torch.ones_like(real) if outputs.mems_mask is None else outputs.mems_mask
        marks = F.pad(real.to(remembered.dtype), (0, self.hidden_size - self.length)).expand_as(remembered)
        # The buffer is of numbers: what is not real is marked, so that it need not be NaN.
        return outputs.last_hidden_state, (remembered.nan_to_num(0.0), marks)


class TransfoXLPolicy(RecurrentActorCriticPolicy):
    """An actor and a critic with a `Memory` each: `policy_kwargs` are `width`, `layers` and `length`."""

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        lr_schedule: Callable[[float], float],
        width: int = 64,
        layers: int = 1,
        length: int = 16,
        **kwargs,
    ):
        if of_lstm := kwargs.keys() & {
            "lstm_hidden_size",
            "n_lstm_layers",
            "shared_lstm",
            "enable_critic_lstm",
            "lstm_kwargs",
        }:
            raise ValueError(f"{min(of_lstm)} is of an LSTM: TransfoXLPolicy takes width, layers and length")
        super().__init__(observation_space, action_space, lr_schedule, lstm_hidden_size=width, **kwargs)
        self.lstm_actor = Memory(self.features_dim, width, layers, length)
        self.lstm_critic = Memory(self.features_dim, width, layers, length)
        self.lstm_hidden_state_shape = (layers, 1, length * width)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    @staticmethod
    def _process_sequence(features: Tensor, states: States, starts: Tensor, memory: Memory) -> tuple[Tensor, States]:
        rows = states[0].shape[1]
        hidden, states = memory(features.view(rows, -1, memory.input_size), states, starts.view(rows, -1))
        return hidden.flatten(0, 1), states


def positions_of_cartpole() -> gymnasium.Env:
    """CartPole of which the cart's position and the pole's angle are seen."""
    env = gymnasium.make("CartPole-v1")
    box = gymnasium.spaces.Box(-5, 5, (2,), np.float32)
    return gymnasium.wrappers.TransformObservation(env, lambda observation: observation[[0, 2]], box)


def main():
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_one, default=100_000, help="of all environments (%(default)s)")
    parser.add_argument("--output", type=new_path, required=True, help="where the agent is written")
    options = parser.parse_args()
    agent = RecurrentPPO(
        TransfoXLPolicy,
        make_vec_env(positions_of_cartpole, 8, seed=1),
        n_steps=64,
        batch_size=256,
        n_epochs=4,
        learning_rate=1e-3,
        seed=1,
        verbose=1,
    )
    agent.learn(options.steps)
    agent.save(options.output / "agent")
    mean, spread = evaluate_policy(agent, make_vec_env(positions_of_cartpole, 8, seed=1000), n_eval_episodes=32)
    print(f"return {mean:.1f} ± {spread:.1f} of 32 episodes, at most 500")


if __name__ == "__main__":
    main()
