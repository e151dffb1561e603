"""MinAtar games without MinAtar's plotting libraries."""

import importlib.util
import os
import types
from importlib.machinery import SourceFileLoader

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.errors import MissingPackage

MINATAR_MODULES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MINATAR_GAMES = {module.title().replace("_", ""): module for module in MINATAR_MODULES}  # name in ids -> module


class MinAtar(gymnasium.Env):
    """A MinAtar game (Young and Tian 2019): bool images [10, 10, channels], sticky actions, no time limit.

    The game's module is loaded by its path: importing `minatar` would load matplotlib, seaborn and pandas (100 MB).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self, path: str, minimal_actions: bool, sticky_action_prob: float = 0.1, ramping: bool = True, render_mode=None
    ):
        module = types.ModuleType("minatar_game")
        SourceFileLoader(module.__name__, path).exec_module(module)
        self._game = module.Env(ramping=ramping)
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(6))
        self._sticky_action_prob, self._last_action = sticky_action_prob, 0
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(len(self._actions))
        self.observation_space = spaces.Box(0, 1, tuple(self._game.state_shape()), dtype=bool)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._game.random = np.random.RandomState(seed)
        self._game.reset()
        return self._game.state(), {}

    def step(self, action):
        if self._game.random.rand() >= self._sticky_action_prob:
            self._last_action = self._actions[action]
        reward, terminated = self._game.act(self._last_action)
        return self._game.state(), reward, terminated, False, {}

    def render(self) -> np.ndarray:
        """The state as an RGB image [10, 10, 3]: one gray per channel, the last channel that is set wins."""
        state = self._game.state()
        channels = state.shape[-1]
        shades = (state * np.arange(1, channels + 1)).max(-1) * (255 // channels)
        return np.repeat(shades[..., None], 3, axis=-1).astype(np.uint8)


def register_minatar(env_id: str) -> None:
    """Register all games with gymnasium. Raises MissingPackage, which names `env_id`, without MinAtar."""
    package = importlib.util.find_spec("minatar")  # finds it without importing it
    if package is None:
        raise MissingPackage(f"{env_id} needs MinAtar: pip install minatar")
    for name, module in MINATAR_GAMES.items():
        path = os.path.join(os.path.dirname(str(package.origin)), "environments", f"{module}.py")
        for registered, minimal_actions in ((f"MinAtar/{name}-v0", False), (f"MinAtar/{name}-v1", True)):
            if registered not in gymnasium.registry:
                kwargs = {"path": path, "minimal_actions": minimal_actions}
                gymnasium.register(registered, "beast.envs.minatar:MinAtar", order_enforce=False, kwargs=kwargs)
