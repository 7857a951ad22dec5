"""A task that no agent without memory can learn."""

import gymnasium
import numpy as np


class Recall(gymnasium.Env):
    """One of three signs is shown, then nothing twice; naming it then is worth 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign, self.time = int(self.np_random.integers(3)), 0
        return np.eye(4, dtype=np.float32)[self.sign], {}

    def step(self, action):
        self.time += 1
        ended = self.time == 3
        return np.eye(4, dtype=np.float32)[3], float(ended and action == self.sign), ended, False, {}
