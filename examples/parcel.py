"""A task of one's own whose observation is a Dict of an image and a vector: `--env examples.parcel:Parcel-v0`."""

import gymnasium
import numpy as np
from gymnasium import spaces

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # rows, columns


class Parcel(gymnasium.Env):
    """Carry a parcel over a map to one of two doors. The image shows where all are, the address says which door.

    The right door pays 1, the wrong one costs 1, and each step costs 0.02. After 50 steps the episode is truncated.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, size: int = 8, render_mode: str | None = None):
        self.size, self.render_mode = size, render_mode
        self.observation_space = spaces.Dict(
            {
                "map": spaces.Box(0, 255, (size, size, 3), np.uint8),  # carrier, first door, second door
                "address": spaces.Box(-np.inf, np.inf, (2,), np.float32),  # which door, and how many steps are left
            }
        )
        self.action_space = spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cells = self.np_random.choice(self.size**2, 3, replace=False)
        self.carrier, *self.doors = (np.array(divmod(cell, self.size)) for cell in cells)
        self.right, self.steps_left = int(self.np_random.integers(2)), 50
        return self._observation(), {}

    def step(self, action):
        self.carrier = np.clip(self.carrier + MOVES[action], 0, self.size - 1)
        self.steps_left -= 1
        reached = [bool((self.carrier == door).all()) for door in self.doors]
        reward = -0.02 + reached[self.right] - reached[1 - self.right]
        return self._observation(), reward, any(reached), self.steps_left == 0, {}

    def render(self):
        return self._map()

    def _map(self) -> np.ndarray:
        image = np.zeros((self.size, self.size, 3), np.uint8)
        for channel, cell in enumerate((self.carrier, *self.doors)):
            image[(*cell, channel)] = 255
        return image

    def _observation(self):
        return {"map": self._map(), "address": np.array([2 * self.right - 1, self.steps_left], np.float32)}


gymnasium.register("Parcel-v0", Parcel)
