"""VizDoom's scenarios as small gray images, the screen alone: `--env examples.vizdoom_gray:Gray/VizdoomBasic-v1`.

A screen [240, 320, 3] becomes [60, 80, 1], each pixel the mean of 4 x 4 in all colors. All ids of the package
that end in -v1 are here.
"""

from functools import partial

import gymnasium
import numpy as np
import vizdoom.gymnasium_wrapper  # noqa: F401  registers its environments
from gymnasium import spaces


class Gray(gymnasium.ObservationWrapper):
    """The screen alone, gray, a quarter as high and wide."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        height, width, _ = env.observation_space["screen"].shape
        self.observation_space = spaces.Box(0, 255, (height // 4, width // 4, 1), np.uint8)

    def observation(self, observation):
        height, width, _ = self.observation_space.shape
        blocks = observation["screen"].reshape(height, 4, width, 4, 3)
        return blocks.mean((1, 3, 4), dtype=np.float32).astype(np.uint8)[..., None]


def make(env_id: str, frame_skip: int = 4, **kwargs) -> gymnasium.Env:
    """The scenario of this id; the arguments are the package's own."""
    return Gray(gymnasium.make(env_id, disable_env_checker=True, frame_skip=frame_skip, **kwargs))


for _id in [name for name in gymnasium.registry if name.startswith("Vizdoom") and name.endswith("-v1")]:
    gymnasium.register(f"Gray/{_id}", partial(make, _id))
