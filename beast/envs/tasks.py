"""Several tasks in one run: each environment of a group is one of a task's, and all have one agent."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from beast.envs.agents import WidthDoesNotFit
from beast.envs.reference_scores import DMLAB, SETS, Reference, reference_of
from beast.envs.spaces import in_a_line, parts_by_name
from beast.errors import InputError

OF_A_TASK = {"env", "env_kwargs", "random", "human"}  # what a file of --tasks says of one
HOW = 'a JSON object such as {"easy": {"env": "FrozenLake-v1", "env_kwargs": {"map_name": "4x4"}}, "hard": …}'


@dataclass(frozen=True)
class Task:
    """What a task's environments are, and which returns its scores are measured by."""

    name: str
    env: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reference: Reference | None = None


def tasks_of(env: str, tasks: str = "") -> list[Task]:
    """The tasks of `--env A,B` or of what `with_tasks` has made of --tasks; one where there is one environment."""
    if tasks:
        return [_task(name, each) for name, each in json.loads(tasks).items()]
    seen: Counter[str] = Counter()
    found = []
    for given in env.split(","):
        ids, kwargs = SETS.get(given, ([given], {}))
        for name in ids:
            seen[name] += 1
            own_name = name if seen[name] == 1 else f"{name}#{seen[name]}"
            found.append(Task(own_name, name, kwargs, reference_of(name)))
    return found


def mean_score(tasks: Iterable[Task], scores: Iterable[float]) -> float:
    """The mean of the tasks' scores. Levels of DMLab count 1 at most, as in the published "mean capped" scores (arXiv
    1802.01561), so that a level which is far beyond a human hides no other."""
    return float(np.mean([min(x, 1.0) if task.env.startswith(DMLAB) else x for task, x in zip(tasks, scores)]))


def short_names(names: list[str], length: int = 20) -> list[str]:
    """At most so many characters of each name, from its end or its beginning where these differ between all, and else
    with its number before it."""
    bare = [name.rpartition("/")[2] for name in names]
    for cut in (slice(length), slice(-length, None)):
        if len({name[cut] for name in bare}) == len(names):
            return [name[cut] for name in bare]
    return [f"{number}:{name[: length - 3]}" for number, name in enumerate(bare)]


def changed(flags, **values):
    """A copy of flags: those of an env server are a namespace, all others of a dataclass."""
    known: Any = flags
    return replace(known, **values) if is_dataclass(flags) else type(flags)(**{**vars(flags), **values})


def with_tasks(flags, *, is_env_known: bool = True):
    """The flags with the content of the file of --tasks instead of its name, and the ids of its environments as --env.

    Raises InputError for a file that cannot be read or says something else than tasks, and for a --task that there is
    not, once --env is known."""
    if flags.tasks and not flags.tasks.startswith("{"):
        try:
            text = Path(flags.tasks).read_text(encoding="utf-8")
            told = json.loads(text)
        except (OSError, ValueError) as error:
            raise InputError(f"--tasks {flags.tasks}: {error}; write it as {HOW}") from error
        is_right = isinstance(told, dict) and told and all(map(_is_task, told.values()))
        if not is_right:
            raise InputError(f"--tasks {flags.tasks}: it has {str(told)[:200]}; write it as {HOW}")
        for name, each in told.items():
            if each["env"] in SETS:
                count = len(SETS[each["env"]][0])
                raise InputError(
                    f"--tasks {flags.tasks}: {name} has the env {each['env']}, which stands for {count} tasks: "
                    f"give --env {each['env']}, or list those that you want"
                )
        flags = changed(flags, tasks=json.dumps(told))
    found = tasks_of(flags.env, flags.tasks)
    if any(not each.env for each in found):
        raise InputError(f"--env {flags.env}: between two commas there is no id")
    names = [each.name for each in found]
    if is_env_known and flags.task and flags.task not in names:
        raise InputError(f"--task {flags.task}: there is no such task; there are {', '.join(names)}")
    env = ",".join(each.env for each in found) if flags.tasks else flags.env
    return flags if env == flags.env else changed(flags, env=env)


def with_kwargs_first(flags, kwargs: Mapping[str, Any]):
    """The flags, with these arguments of the environments before those that tasks have of their own."""
    tasks = tasks_of(flags.env, flags.tasks)
    if not any(task.env_kwargs.keys() & kwargs.keys() for task in tasks):
        return flags
    told = {
        task.name: {
            "env": task.env, "env_kwargs": {**task.env_kwargs, **kwargs},
            **(task.reference._asdict() if task.reference else {}),
        }
        for task in tasks
    }  # fmt: skip
    return changed(flags, tasks=json.dumps(told))


def of_actor(flags, actor: int):
    """The flags of one actor: with --balance compute it plays one task, and each task has equally many actors."""
    if getattr(flags, "balance", "samples") == "samples" or flags.task:
        return flags
    names = [each.name for each in tasks_of(flags.env, flags.tasks)]
    return changed(flags, task=names[actor % len(names)]) if len(names) > 1 else flags


def check_balance(flags) -> None:
    """Raise InputError where the tasks cannot share the actors or the environments of a group equally."""
    num_tasks = len(tasks_of(flags.env, flags.tasks))
    is_by_actor = getattr(flags, "balance", "samples") == "compute" and not flags.task
    if is_by_actor and flags.num_actors % num_tasks:
        raise InputError(
            f"--balance compute --num_actors {flags.num_actors}: each of the {num_tasks} tasks has actors of its own: "
            f"give a multiple of {num_tasks}, or --balance samples, where each actor plays all tasks"
        )


def _is_task(told: Any) -> bool:
    numbers = [told[name] for name in ("random", "human") if name in told] if isinstance(told, dict) else []
    return (
        isinstance(told, dict) and told.keys() <= OF_A_TASK and isinstance(told.get("env"), str) and len(numbers) != 1
        and isinstance(told.get("env_kwargs", {}), dict) and "," not in told["env"]
        and all(type(x) in (int, float) and math.isfinite(x) for x in numbers) and len({*numbers}) == len(numbers)
    )  # fmt: skip


def _task(name: str, told: dict) -> Task:
    reference = Reference(told["random"], told["human"]) if "random" in told else reference_of(told["env"])
    return Task(name, told["env"], told.get("env_kwargs", {}), reference)


class TaskColumns(VectorEnv):
    """A vector env of several tasks: of n tasks, column e·n + t is environment e of task t. Neighbours have different
    tasks, as batches are of neighbours.

    All tasks have equal spaces. Where arrays that they observe differ in the last axis only, such as the channels of
    images, the shorter ones are filled up with zeros. `task_numbers` has the task of each column.
    """

    def __init__(self, make: Mapping[str, Callable[[int], VectorEnv]], num_envs: int, only: str = ""):
        """`make[name](n)` makes n environments of a task. `only`: make all of them of this task, with the spaces of
        all. Raises WidthDoesNotFit unless the tasks divide `num_envs`, and InputError where they cannot share a net."""
        self.names = list(make)
        count = len(make)
        if not only and num_envs % count:
            raise WidthDoesNotFit(f"{num_envs} environments for {count} tasks: give a multiple of {count}", count)
        made: dict[str, VectorEnv] = {}
        described: dict[str, _Described] = {}
        try:
            for name in make:
                size = num_envs if only == name else 1 if only else num_envs // count
                env = make[name](size)
                if not only or name == only:
                    made[name] = env
                described[name] = _described(env)
                if name not in made:
                    env.close()  # before the next one is made: 30 games at once may not fit
            spaces_of = described.values()
            self.single_observation_space = _joint([each.observation for each in spaces_of], self.names)
            self.single_action_space = _equal([each.action for each in spaces_of], self.names)
            self._check(described)
        except BaseException:
            for env in made.values():
                env.close()
            raise
        self.envs = list(made.values())
        self.num_envs = num_envs
        self._columns = [slice(t, None, len(made)) for t in range(len(made))]
        self.task_numbers = np.zeros(num_envs, np.int32)
        for columns, name in zip(self._columns, made):
            self.task_numbers[columns] = self.names.index(name)
        first = self.envs[0]
        known = {key: _common(env.metadata.get(key) for env in self.envs) for key in ("atari_backend", "render_fps")}
        self.metadata = {
            "autoreset_mode": _mode(first), "env_id": ",".join(self.names), "tasks": self.names,
            "frames_per_step": _common(env.metadata.get("frames_per_step", 1) for env in self.envs) or 1,
            **{key: value for key, value in known.items() if value},
        }  # fmt: skip
        self.render_mode = first.render_mode
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._batch = self._new_batch()
        if not isinstance(self.single_observation_space, spaces.Box):
            self.observe_into = None  # type: ignore[assignment]

    @functools.cached_property
    def observation_space(self) -> Space:
        """Made when it is asked for: it may be large."""
        return batch_space(self.single_observation_space, self.num_envs)

    def _new_batch(self) -> Any:
        return create_empty_array(self.single_observation_space, self.num_envs)

    def observe_into(self, array: np.ndarray) -> None:
        """Have the next reset or step write its observations [K, *shape] into this array, and return it."""
        self._batch = array

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        infos: dict = {}
        for env, columns in zip(self.envs, self._columns):
            observations, info = env.reset(seed=seed, options=options)
            seed = None if seed is None else seed + env.num_envs
            self._write(observations, columns)
            _spread(info, columns, self.num_envs, infos)
        return self._batch, infos

    def step(self, actions):
        infos: dict = {}
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for env, columns in zip(self.envs, self._columns):
            observations, rewards[columns], terminated[columns], truncated[columns], info = env.step(
                _rows(actions, columns)
            )
            self._write(observations, columns)
            _spread(info, columns, self.num_envs, infos)
        return self._batch, rewards, terminated, truncated, infos

    def render(self):
        frames: list = [None] * self.num_envs
        for env, columns in zip(self.envs, self._columns):
            frames[columns] = list(env.render())
        return tuple(frames)

    def close_extras(self, **kwargs) -> None:
        for env in self.envs:
            env.close()

    def _write(self, observations, columns: slice) -> None:
        parts = parts_by_name(self.single_observation_space, observations)
        for name, whole in parts_by_name(self.single_observation_space, self._batch).items():
            part = np.asarray(parts[name])
            if part.shape[1:] == whole.shape[1:]:
                whole[columns] = part
            else:
                whole[columns, ..., : part.shape[-1]] = part
                whole[columns, ..., part.shape[-1] :] = 0

    def _check(self, described: dict[str, "_Described"]) -> None:
        """Raise InputError for tasks that cannot be stepped together."""
        modes = {name: each.mode for name, each in described.items()}
        if len({*modes.values()}) > 1:
            raise InputError(f"tasks have the autoreset modes {modes}: make all of them with the same one")
        is_padded = any(each.observation != self.single_observation_space for each in described.values())
        if is_padded and AutoresetMode.SAME_STEP in modes.values():
            raise InputError("tasks with autoreset mode SAME_STEP need equal observation spaces: give NEXT_STEP")
        for name, each in described.items():
            if each.agents > 1:
                raise InputError(f"{name} has several agents: tasks are for one agent an environment")


class _Described(NamedTuple):
    """What all tasks have to know of one's environments."""

    observation: Space
    action: Space
    mode: Any
    agents: int


def _described(env: VectorEnv) -> _Described:
    agents = (env.metadata or {}).get("agents", 1)
    return _Described(env.single_observation_space, env.single_action_space, _mode(env), agents)


def _mode(env: VectorEnv) -> Any:
    return getattr(env.unwrapped, "autoreset_mode", None) or (env.metadata or {}).get("autoreset_mode")


def _common(values) -> Any:
    """The value that all have, or None."""
    found = {*values}
    return found.pop() if len(found) == 1 else None


def _rows(nest, columns: slice):
    """Some rows of a batch of actions."""
    if isinstance(nest, Mapping):
        return {key: _rows(part, columns) for key, part in nest.items()}
    return tuple(_rows(part, columns) for part in nest) if isinstance(nest, tuple) else nest[columns]


def _spread(infos: Mapping, columns: slice, num_envs: int, whole: dict) -> None:
    """Write the infos of a task's environments into those of all, as gymnasium has them: `_key` says who has a key."""
    count = len(range(num_envs)[columns])
    for key, value in infos.items():
        if isinstance(value, Mapping):
            if not isinstance(whole.get(key, {}), dict):
                continue  # another task's is no dictionary
            _spread(value, columns, num_envs, whole.setdefault(key, {}))
        elif not isinstance(value, np.ndarray) or value.shape[:1] != (count,):
            continue  # it is not of each environment
        else:
            shape = (num_envs, *value.shape[1:])
            array = whole.setdefault(key, np.zeros(shape, value.dtype))
            if not isinstance(array, np.ndarray) or array.shape != shape:
                continue  # another task's differ
            if array.dtype != value.dtype:
                kinds = {array.dtype.kind, value.dtype.kind}
                is_like = len(kinds) == 1 or kinds <= set("biuf")  # numbers
                array = whole[key] = array.astype(np.result_type(array, value) if is_like else object)
            array[columns] = value
        if not key.startswith("_") and f"_{key}" not in infos:
            whole.setdefault(f"_{key}", np.zeros(num_envs, bool))[columns] = True


def _equal(found: list[Space], names: list[str]) -> Space:
    for name, space in zip(names, found):
        if space != found[0]:
            raise InputError(
                f"{name} has the action space {in_a_line(space)}, {names[0]} has {in_a_line(found[0])}: tasks share a "
                "policy, so make them equal (MinAtar's -v0 has all actions; else wrap an environment)"
            )
    return found[0]


def _joint(found: list[Space], names: list[str]) -> Space:
    """An observation space that has room for all of them. Raises InputError, which names two that do not fit."""
    first = found[0]
    if all(space == first for space in found):
        return first
    for name, space in zip(names, found):
        if isinstance(first, spaces.Dict) and isinstance(space, spaces.Dict) and space.keys() == first.keys():
            continue
        is_alike = isinstance(first, spaces.Box) and isinstance(space, spaces.Box) and space.dtype == first.dtype
        if not (is_alike and first.shape and space.shape[:-1] == first.shape[:-1] and len(space.shape)):
            raise InputError(
                f"{name} observes {in_a_line(space)}, {names[0]} {in_a_line(first)}: tasks share a net, so make them "
                "equal but for the last axis (--resize, --grayscale and --frame_stack do it for images; else wrap an "
                "environment)"
            )
    if isinstance(first, spaces.Dict):
        return spaces.Dict({key: _joint([space[key] for space in found], names) for key in first})
    longest: Any = max(found, key=lambda space: space.shape[-1])
    low, high = longest.low.copy(), longest.high.copy()
    for space in found:
        shorter: Any = space
        inside = (..., slice(shorter.shape[-1]))
        low[inside], high[inside] = np.minimum(low[inside], shorter.low), np.maximum(high[inside], shorter.high)
        beyond = (..., slice(shorter.shape[-1], None))  # zeros
        low[beyond], high[beyond] = np.minimum(low[beyond], 0), np.maximum(high[beyond], 0)
    return spaces.Box(low, high, dtype=longest.dtype.type)
