"""Environments of torch tensors: stepped where nets compute, into rollouts that never leave the device.

The feed is that of one machine (shared_memory.py). Here are what it needs in place of shared memory and of actors.
"""

import collections
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from beast.envs import env_metrics
from beast.envs.groups import Games, close, next_row
from beast.envs.masks import MASK
from beast.envs.rows import OBJECTIVE, REWARD_TERMS, written_by
from beast.envs.spaces import CATEGORICAL, EnvSpaces, category_sizes, choices, in_a_line, parts_by_name
from beast.envs.tensors import is_of_tensors
from beast.errors import InputError, OutOfMemory, first_line
from beast.feeds.memory import REMEDY, Fields, SlotArrays, unwritten
from beast.machine import available_memory

TOLD_SECONDS = 1.0  # between two looks at what games have told


class TensorMemory(SlotArrays):
    """The slots of rollouts as tensors on a device.

    It is what `RolloutMemory` is in shared memory. Raises OutOfMemory where the device has not so much.
    """

    def __init__(self, fields: Fields, num_slots: int, unroll_length: int, group_width: int, device: torch.device):
        self.fields, self.num_slots = fields, num_slots
        self.unroll_length, self.group_width = unroll_length, group_width
        shapes = {name: (num_slots, unroll_length + 1, group_width, *shape) for name, (shape, _) in fields.items()}
        self.num_bytes = sum(math.prod(shapes[name]) * np.dtype(dtype).itemsize for name, (_, dtype) in fields.items())
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        if self.num_bytes > free:
            needed = f"the rollout slots need {self.num_bytes / 1e6:.0f} MB"
            raise OutOfMemory(f"{needed} and {free / 1e6:.0f} MB are free on {device}: {REMEDY}")
        self.arrays: dict[str, Tensor] = {}
        try:
            for name, (_, dtype) in fields.items():
                value, kind = unwritten(name, dtype), getattr(torch, dtype)
                self.arrays[name] = torch.full(shapes[name], value, dtype=kind, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the rollout slots need {self.num_bytes / 1e6:.0f} MB: {first_line(error)}: {REMEDY}"
            ) from error

    def rollout(self, slot: int) -> dict:
        """The numbers [T+1, K] of one slot as numpy arrays, without the observations; on a GPU a copy."""
        fields = (name for name, (shape, _) in self.fields.items() if not shape and "/" not in name)
        return {name: self.arrays[name][slot].cpu().numpy() for name in fields}


class TensorGroup:
    """One environment of tensors, each of whose results is written into a row of a rollout, as `EnvGroup` writes those
    of arrays. No step makes the host wait for a GPU."""

    def __init__(self, env: Any, spaces: EnvSpaces, memory: TensorMemory, metrics: str = ""):
        """`metrics` are names of more numbers in the infos, as in `EnvGroup`. Raises InputError for an environment of
        other tensors than the memory's."""
        if not is_of_tensors(env):
            raise InputError(f"create_env() gave {type(env).__name__}, its first call an environment of tensors")
        self.env, self.spaces, self.memory = env, spaces, memory
        device = memory.arrays["reward"].device
        if (env.device.type, env.device.index or 0) != (device.type, device.index or 0):
            raise InputError(f"create_env() gave an environment on {env.device}, and nets compute on {device}: "
                             "make it on the device that --device names")  # fmt: skip
        if env.num_envs != memory.group_width:
            raise InputError(f"create_env(flags, {memory.group_width}) gave {env.num_envs} environments")
        self._actions = to_env_actions(spaces.action, device)
        self._metrics = env_metrics.keys_of(metrics)
        self._task = torch.as_tensor(getattr(env, "task_numbers", 0), device=device)
        self._told: dict[str, Tensor] = {}  # of each number that games have told: its sum, and how many there were
        self._others = [name for name in (*written_by("env"), REWARD_TERMS, OBJECTIVE) if name in memory.arrays]

    def reset(self, seed: int, slot: int, row: int) -> None:
        """Begin new episodes and write their first row."""
        observations, info = self.env.reset(seed=seed)
        arrays = self._arrays(slot, row)
        self._write(observations, arrays, "obs")
        nothing = torch.zeros_like(arrays["done"])
        zeros = arrays["episode_return"].double().zero_(), arrays["episode_step"].clone().zero_()
        self._games = Games(nothing, nothing, *zeros)
        row_fields = dict.fromkeys(("reward", "terminated", "truncated", "episode_return", "episode_step"), 0)
        self._write_numbers({**row_fields, "done": True}, info, arrays)

    def step(self, slot: int, row: int) -> None:
        """Step by the actions of the row and write what came of it."""
        arrays = self._arrays(slot, row)
        observations, reward, terminated, truncated, info = self.env.step(self._actions(arrays["action"]))
        self._write(observations, arrays, "obs")
        width = self.memory.group_width
        reward = reward.reshape(width).double()
        terminated, truncated = (x.reshape(width).bool() for x in (terminated, truncated))
        ended = terminated | truncated
        game_over = ended & ~info["life_over"] if "life_over" in info else ended
        for name, x in _numbers({key: info[key] for key in self._metrics if key in info}):
            told = torch.stack([x.reshape(width).double().where(game_over, 0).sum(), game_over.sum()])
            self._told[name] = self._told[name] + told if name in self._told else told
        nobody = torch.zeros_like(ended)
        same_step = self.spaces.final_observations
        computed, self._games = next_row(torch, self._games, reward, ended, game_over, nobody, 1, same_step)
        if same_step:
            has_last = info.get("_final_obs", torch.ones_like(ended)) if "final_obs" in info else nobody
            if "final_obs" in info:
                self._write(info["final_obs"], arrays, "final_obs")
            terminated = terminated | (truncated & ~has_last)
        self._write_numbers({**computed, "terminated": terminated, "truncated": truncated}, info, arrays)

    def take_told(self) -> bytes:
        """Numbers of the games that have ended since the last call, as `env_metrics.encode` writes them. Waits for a
        GPU, and raises what the environment's `check` does."""
        if hasattr(self.env, "check"):
            self.env.check()
        told, self._told = self._told, {}
        sums = {name: x.tolist() for name, x in told.items()}
        sums = {name: x if math.isfinite(x[0]) else "no finite number" for name, x in sums.items() if x[1]}
        return json.dumps(sums).encode() if sums else b""

    def close(self) -> None:
        if hasattr(self.env, "close"):
            close(self.env)

    def _arrays(self, slot: int, row: int) -> dict[str, Tensor]:
        return {name: x[slot, row] for name, x in self.memory.arrays.items()}

    def _write(self, observations: Any, arrays: dict[str, Tensor], kind: str) -> None:
        for name, part in parts_by_name(self.env.single_observation_space, observations).items():
            if MASK == name.partition(".")[0]:
                arrays[f"{kind}/{MASK}"].copy_(part.reshape(self.memory.group_width, -1) != 0)
            elif part.shape != arrays[f"{kind}/{name}"].shape:
                space = in_a_line(self.env.single_observation_space)
                raise InputError(
                    f"{type(self.env).__name__} gave {name!r} of shape {list(part.shape)}, its space is {space}"
                )
            else:
                arrays[f"{kind}/{name}"].copy_(part)

    def _write_numbers(self, computed: dict, info: dict, arrays: dict[str, Tensor]) -> None:
        computed["task"] = self._task
        for name in self._others:
            value = computed[name] if name in computed else info.get(name, math.nan if name == OBJECTIVE else 0)
            arrays[name].copy_(value) if isinstance(value, Tensor) else arrays[name].fill_(value)


def to_env_actions(space: Space, device: torch.device) -> Callable[[Tensor], Any]:
    """What takes actions of a rollout to those of an environment, as `spaces.env_actions`, on the device. A category
    that the space does not have is not looked for: a policy draws none, and to look would make the host wait."""
    if isinstance(space, CATEGORICAL):
        start = torch.as_tensor(getattr(space, "start", 0), device=device)
        dtype, shape = getattr(torch, str(np.dtype(space.dtype))), choices(space).shape
        return lambda actions: (actions.reshape(-1, *shape) + start).to(dtype)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        keys = list(space) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        makers = {key: to_env_actions(space[key], device) for key in keys}
        widths = [len(category_sizes(space[key])) for key in keys]

        def parts(actions: Tensor) -> Any:
            made = {key: makers[key](part) for key, part in zip(keys, actions.split(widths, dim=1))}
            return made if isinstance(space, spaces.Dict) else tuple(made.values())

        return parts
    assert isinstance(space, spaces.Box)  # no other is supported
    low, high = (torch.as_tensor(x, dtype=torch.float64, device=device) for x in (space.low, space.high))
    bounded = low.isfinite() & high.isfinite()

    def scaled(actions: Tensor) -> Tensor:
        actions = actions.reshape(-1, *space.shape).double()
        inside = torch.where(bounded, low + (actions + 1) / 2 * (high - low), actions)
        return torch.clamp(inside, low, high).to(getattr(torch, str(space.dtype)))

    return scaled


def _numbers(infos: dict, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names and tensors [K] of what games tell. Those of `metrics` have the names that they have there."""
    for key, x in infos.items():
        whole = f"{name}/{key}" if name else "" if key == "metrics" else str(key)
        if isinstance(x, dict):
            yield from _numbers(x, whole)
        elif isinstance(x, Tensor):
            yield whole or "metrics", x


class TensorEnvs:
    """Steps groups of environments of tensors in the thread that acts: see `Actors`.

    On a GPU each group has a stream of its own, in which it steps while nets compute for the other one. `wait` hands
    out a group when its step is done, so the host is ahead of the device by one step of a group at most, and no action
    is chosen by older weights than it seems.
    """

    processes: list = []
    workers: dict = {}
    total_restarts = 0

    def __init__(
        self, create_env: Callable, flags: Any, spaces: EnvSpaces, memory: TensorMemory, num_groups: int, seed: Callable
    ):
        self.num_groups = num_groups
        self.told: list[bytes] = []
        self._to_close = contextlib.ExitStack()
        self._device = memory.arrays["reward"].device
        self._groups = []
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) if on_gpu else None for _ in range(num_groups)]
        for number in range(num_groups):
            with self._in_stream(number):
                env = create_env(flags, memory.group_width)
                group = TensorGroup(env, spaces, memory, getattr(flags, "env_metrics", ""))
            self._to_close.callback(group.close)
            self._groups.append(group)
        self._seeds = [seed(number, 0) for number in range(num_groups)]
        self._ready: collections.deque = collections.deque((number, None) for number in range(num_groups))
        self._is_awake = threading.Event()
        self._told_at = [time.monotonic()] * num_groups

    def go(self, group: int, slot: int, row: int) -> None:
        done = None
        with self._in_stream(group):
            self._groups[group].step(slot, row) if row else self._groups[group].reset(self._seeds[group], slot, row)
            if self._streams[group]:
                done = torch.cuda.Event(blocking=True)
                done.record(self._streams[group])
        self._ready.append((group, done))

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        if not self._ready:  # all groups wait for slots
            self._is_awake.wait(timeout)
        self._is_awake.clear()
        if not self._ready:
            return [], []
        group, done = self._ready.popleft()
        if done:
            done.synchronize()
            torch.cuda.current_stream(self._device).wait_event(done)
        if time.monotonic() - self._told_at[group] > TOLD_SECONDS:
            self._told_at[group] = time.monotonic()
            with self._in_stream(group):
                self.told += filter(None, [self._groups[group].take_told()])
        return [group], []

    def wake(self) -> None:
        self._is_awake.set()

    def close(self) -> None:
        self._to_close.close()

    @contextlib.contextmanager
    def _in_stream(self, group: int):
        """What is queued within it comes after all that this thread's stream has queued."""
        if own := self._streams[group]:
            own.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(own) if own else contextlib.nullcontext():
            yield
