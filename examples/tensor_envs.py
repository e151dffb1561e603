"""A batched torch environment: cart poles, thousands at once, on a CPU or a GPU.

docs/device.md says how an agent trains on it, and how to wrap a simulator of others.
"""

import math

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5  # m/s², kg, kg, m
FORCE, SECONDS, STEPS = 10.0, 0.02, 500  # N, of a step, of an episode
WIDTH, ANGLE = 2.4, math.radians(12)  # beyond which an episode ends


class CartPoles(VectorEnv):
    """Poles to balance on carts, as Barto, Sutton and Anderson (1983) describe them. An observation is position, speed,
    angle and its speed. Each step earns 1; the action pushes to the left or to the right."""

    def __init__(self, num_envs: int, device: str | torch.device = "cpu"):
        self.num_envs, self.device = num_envs, torch.device(device)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "env_id": "CartPoles-v0"}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self._random = torch.Generator(self.device)

    def reset(self, *, seed: int | None = None):
        if seed is not None:
            self._random.manual_seed(seed)
        self._state = self._starts()
        self._steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self._is_over = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self._state, {}

    def step(self, actions: torch.Tensor):
        """What was over begins anew, and its action is lost."""
        begins = self._is_over
        self._state = torch.where(begins[:, None], self._starts(), self._moved(actions))
        self._steps = torch.where(begins, 0, self._steps + 1)
        x, _, angle, _ = self._state.unbind(1)
        terminated = (x.abs() > WIDTH) | (angle.abs() > ANGLE)
        truncated = (self._steps >= STEPS) & ~terminated
        self._is_over = terminated | truncated
        return self._state, (~begins).float(), terminated, truncated, {}

    def _starts(self) -> torch.Tensor:
        return torch.empty(self.num_envs, 4, device=self.device).uniform_(-0.05, 0.05, generator=self._random)

    def _moved(self, actions: torch.Tensor) -> torch.Tensor:
        x, speed, angle, turn = self._state.unbind(1)
        sine, cosine, mass = angle.sin(), angle.cos(), CART + POLE
        push = (FORCE * (2 * actions - 1) + POLE * HALF_LENGTH * turn**2 * sine) / mass
        turning = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
        moving = push - POLE * HALF_LENGTH * turning * cosine / mass
        changes = torch.stack([speed, moving, turn, turning], dim=1)
        return self._state + SECONDS * changes


gymnasium.register("CartPoles-v0", vector_entry_point=CartPoles)
