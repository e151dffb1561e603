"""Several tasks in one run, on a GPU: the twin of `beast.envs.tasks.TaskColumns` for environments of tensors."""

from typing import Any

import torch
from torch import Tensor

from beast.envs.tasks import TaskColumns
from beast.errors import InputError


class TensorTasks(TaskColumns):
    """Environments of tensors of several tasks, whose observations are of one shape. They are stepped one task after
    the other. Infos that not all tasks have are left out."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.device = self.envs[0].device
        if any(env.single_observation_space != self.single_observation_space for env in self.envs):
            self.close()
            raise InputError(
                "tasks on a GPU need equal observation spaces: give all the same --resize and --frame_stack"
            )

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        found = []
        for env in self.envs:
            found.append(env.reset(seed=seed, options=options))
            seed = None if seed is None else seed + env.num_envs
        observations, infos = zip(*found)
        return _columns(observations), _infos(infos)

    def step(self, actions: Tensor):
        found = [env.step(actions[columns]) for env, columns in zip(self.envs, self._columns)]
        *results, infos = zip(*found)
        return *map(_columns, results), _infos(infos)

    def check(self) -> None:
        for env in self.envs:
            env.check()

    def _new_batch(self) -> None:
        """None is kept."""


def _columns(parts: Any) -> Tensor:
    """Of n tasks' tensors [K/n, …] one [K, …], in the order of `TaskColumns`."""
    return torch.stack(parts, dim=1).flatten(0, 1)


def _infos(infos: Any) -> dict[str, Tensor]:
    names = [name for name in infos[0] if all(isinstance(info.get(name), Tensor) for info in infos)]
    return {name: _columns([info[name] for info in infos]) for name in names}
