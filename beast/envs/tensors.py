"""Environments of torch tensors, many in a batch, as simulators on a GPU are: what they are, and their arrays.

Such an environment has the attributes of a gymnasium.vector.VectorEnv and `device`, a torch.device. `reset(seed=…)` and
`step(actions)` take and return tensors on it that are valid until its next call (docs/device.md).
"""

from typing import Any

from gymnasium.vector import VectorEnv

from beast.envs.spaces import parts_by_name
from beast.errors import InputError


def is_of_tensors(env: Any) -> bool:
    """Whether its observations, rewards and ends are torch tensors."""
    is_torch = type(getattr(env, "device", None)).__module__.partition(".")[0] == "torch"
    return is_torch and not isinstance(env, OfArrays)


def in_arrays(env: Any) -> Any:
    """A vector env of numpy arrays: `env` itself, unless it is of tensors."""
    return OfArrays(env) if is_of_tensors(env) else env


class OfArrays(VectorEnv):
    """An environment of tensors as a vector env of arrays on the host, for evaluations and games in Python."""

    def __init__(self, env: Any):
        """Raises InputError where `env` lacks what a vector env has."""
        needed = ("num_envs", "single_observation_space", "single_action_space", "metadata", "reset", "step")
        if missing := [name for name in needed if not hasattr(env, name)]:
            raise InputError(
                f"{type(env).__name__} has a device, so it is an environment of tensors, and has no {missing[0]}"
            )
        self.of_tensors, self.num_envs, self.metadata = env, env.num_envs, env.metadata
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.spec, self.render_mode = getattr(env, "spec", None), getattr(env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        observations, info = self.of_tensors.reset(seed=seed)
        self._tensor = next(iter(parts_by_name(self.single_observation_space, observations).values()))  # of its device
        return on_host(observations), on_host(info)

    def step(self, actions):
        return on_host(self.of_tensors.step(_map(self._tensor.new_tensor, actions)))

    def render(self):
        return on_host(self.of_tensors.render())

    def close(self, **arguments) -> None:
        if hasattr(self.of_tensors, "close"):
            self.of_tensors.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_tensors, name)


def on_host(nest: Any) -> Any:
    """A nest whose tensors are numpy arrays."""
    return _map(lambda x: x.detach().cpu().numpy() if hasattr(x, "detach") else x, nest)


def _map(function: Any, nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _map(function, x) for key, x in nest.items()}
    return tuple(_map(function, x) for x in nest) if isinstance(nest, tuple) else function(nest)
