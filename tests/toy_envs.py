"""Tiny environments for tests, registered on import: `toy_envs:Counting-v0` and so on, with tests/ on the path."""

from __future__ import annotations

import ctypes
import subprocess
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.envs import training_progress
from beast.envs.probe import SEED
from beast.envs.spaces import category_sizes


class Counting(gymnasium.Env):
    """Observes [seed, episode, step of the episode]; pays the number of the step.

    Episodes last 1 to `max_length` steps, drawn from the seed; half of them terminate, the others are truncated. With
    `lasts` all last so many steps, and end as `terminates` says.
    """

    def __init__(self, max_length: int = 7, lasts: int = 0, terminates: bool = True):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.max_length, self.fixed = max_length, lasts and (lasts, terminates)
        self.name, self.episode = 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.name, self.episode = seed, -1
        self.episode, self.count = self.episode + 1, 0
        self.length = int(self.np_random.integers(1, self.max_length + 1))
        self.terminates = bool(self.np_random.integers(2))
        if self.fixed:
            self.length, self.terminates = self.fixed
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        ends = self.count == self.length
        return self._observation(), float(self.count), ends and self.terminates, ends and not self.terminates, {}

    def _observation(self):
        return np.array([self.name, self.episode, self.count], np.float32)


class Telling(gymnasium.Env):
    """Games of 3 steps, whose infos tell their number, and how far training was when they began."""

    def __init__(self, level: float = 1.0, render_mode=None):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        self.level, self.render_mode, self.game = level, render_mode, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.count, self.training = self.game + 1, 0, training_progress()
        return np.zeros(2, np.float32), {"metrics": {"game": -1000.0}}

    def step(self, action):
        self.count += 1
        numbers = {"game": float(self.game), "level": self.level, "half": self.count / 2}
        numbers |= {"steps": self.training.steps, "difficulty": self.training.told.get("difficulty", -1.0)}
        if self.game >= 2:
            numbers["late"] = np.float32(7)
        infos = {"metrics": numbers, "is_success": self.game % 2 == 1, "found": {"wood": 2, "iron": 0}}
        return np.zeros(2, np.float32), 1.0, self.count == 3, False, infos

    def render(self):
        return np.full((40, 30, 3), 50 * self.count, np.uint8)


class MemoryCue(gymnasium.Env):
    """Shows a cue, then nothing for `delay` steps, then asks: +1 for the action equal to the cue, else -1.

    Observes [cue is 0, cue is 1, hush, asked]. Without a memory the mean return is 0. A model that sees its last action
    could hand the cue on in it from step to step; so in the step after the cue (hush) action 1 costs 1.
    """

    def __init__(self, delay: int = 3):
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.count = int(self.np_random.integers(2)), 0
        observation = np.zeros(4, np.float32)
        observation[self.cue] = 1
        return observation, {}

    def step(self, action):
        hush, asked = self.count == 1, self.count == self.delay + 1
        self.count += 1
        observation = np.array([0, 0, self.count == 1, self.count == self.delay + 1], np.float32)
        if asked:
            reward = 1.0 if action == self.cue else -1.0
        else:
            reward = -1.0 if hush and action == 1 else 0.0
        return observation, reward, asked, False, {}


class _Matching(gymnasium.Env):
    """Eight rounds of showing something and paying for the action that matches it; the best return is 8."""

    rounds = 8

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._show(), {}

    def step(self, action):
        reward = self._pay(action)
        self.count += 1
        return self._show(), reward, self.count == self.rounds, False, {}


class MultiDiscrete(_Matching):
    """Shows two numbers, below 3 and below 4, one-hot; each that the action repeats pays one half."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 1, (7,), np.float32)
        self.action_space = spaces.MultiDiscrete([3, 4])

    def _show(self):
        self.shown = self.np_random.integers([3, 4])
        observation = np.zeros(7, np.float32)
        observation[[self.shown[0], 3 + self.shown[1]]] = 1
        return observation

    def _pay(self, action):
        return float(np.mean(np.asarray(action) == self.shown))


class Tuple(MultiDiscrete):
    """The same, with a Tuple for an action space whose second number counts from 10."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4, start=10)))

    def _pay(self, action):
        return super()._pay([action[0], action[1] - 10])


class Buttons(_Matching):
    """Shows two buttons and a direction, one-hot; each of the three that the action repeats pays a third."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 1, (5,), np.float32)
        self.action_space = spaces.Dict(buttons=spaces.MultiBinary(2), direction=spaces.Discrete(3, start=7))

    def _show(self):
        self.shown = self.np_random.integers([2, 2, 3])
        return np.concatenate([self.shown[:2], np.eye(3)[self.shown[2]]]).astype(np.float32)

    def _pay(self, action):
        assert action in self.action_space
        return float(np.mean([*(action["buttons"] == self.shown[:2]), action["direction"] - 7 == self.shown[2]]))


class Dict(_Matching):
    """Which half of an image is bright and the sign of a number make one of four actions: both parts are needed."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {"image": spaces.Box(0, 255, (8, 8, 1), np.uint8), "number": spaces.Box(-1, 1, (1,), np.float32)}
        )
        self.action_space = spaces.Discrete(4)

    def _show(self):
        half, sign = self.np_random.integers(2, size=2)
        self.shown = 2 * half + sign
        image = np.zeros((8, 8, 1), np.uint8)
        image[4 * half : 4 * half + 4] = 255
        return {"image": image, "number": np.array([2.0 * sign - 1], np.float32)}

    def _pay(self, action):
        return float(action == self.shown)


class Mission(gymnasium.Space):
    """As MiniGrid's: a space of a kind of its own, whose elements are texts."""

    def sample(self, mask=None, probability=None):
        return "go to the door"

    def contains(self, x):
        return isinstance(x, str)


class Nested(_Matching):
    """Pays for the sum of two numbers below 2, one in a Tuple within a Dict within a Dict; with texts beside it."""

    def __init__(self):
        pair = spaces.Tuple((spaces.Discrete(2, start=5), spaces.Box(-1, 1, (2,), np.float32)))
        self.observation_space = spaces.Dict(
            {
                "inner": spaces.Dict({"pair": pair, "flags": spaces.MultiBinary(3)}),
                "sizes": spaces.MultiDiscrete([2, 3]),
                "hint": spaces.Text(20),
                "mission": Mission(),
            }
        )
        self.action_space = spaces.Discrete(3)

    def _show(self):
        first, second = self.np_random.integers(2, size=2)
        self.shown = first + second
        inner = {"pair": (5 + first, np.zeros(2, np.float32)), "flags": np.ones(3, np.int8)}
        return {"inner": inner, "sizes": np.array([second, 2]), "hint": "add", "mission": "go to the door"}

    def _pay(self, action):
        return float(action == self.shown)


class Masked(gymnasium.Env):
    """Forbids choices, others in each step, and raises where one is taken; an episode's last mask forbids all.

    The mask is told in observations or in infos, flat or nested as the action space `actions` is. Episodes terminate
    after 5 steps or are truncated after 3. Pays 1 for the first of all choices.
    """

    ACTIONS = {
        "Discrete": spaces.Discrete(4, start=-1),
        "MultiDiscrete": spaces.MultiDiscrete([2, 4]),
        "MultiBinary": spaces.MultiBinary(3),
        "Tuple": spaces.Tuple((spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 2]), spaces.Discrete(3))),
        "Dict": spaces.Dict({"turn": spaces.Discrete(3), "buttons": spaces.MultiBinary(2)}),
    }

    def __init__(self, actions: str = "Discrete", is_in_infos: bool = False, is_nested: bool = False):
        self.action_space, self.is_in_infos, self.is_nested = self.ACTIONS[actions], is_in_infos, is_nested
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        if not is_in_infos:
            mask = spaces.MultiBinary(sum(category_sizes(self.action_space)))
            if is_nested:
                mask = self._nested(np.zeros(mask.n), lambda part: spaces.MultiBinary(len(part)))
                mask = spaces.Dict(mask) if isinstance(mask, dict) else spaces.Tuple(mask)
            self.observation_space = spaces.Dict({"action_mask": mask, "numbers": self.observation_space})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.choice([3, 5]))
        return self._observation()

    def step(self, action):
        categories = self._categories(self.action_space, action)
        choices = np.array(categories) + np.cumsum([0, *category_sizes(self.action_space)])[:-1]
        if not self.allowed[choices].all():
            raise RuntimeError(f"action {action} is forbidden")
        self.count += 1
        observation, info = self._observation()
        ends = self.count == self.length
        return observation, float(categories[0] == 0), ends and self.length == 5, ends and self.length == 3, info

    def _observation(self):
        parts = []
        for size in category_sizes(self.action_space):
            part = self.np_random.integers(2, size=size)
            part[self.np_random.integers(size)] = 1
            parts.append(part)
        self.allowed = np.concatenate(parts).astype(np.int8)
        shown = self.allowed * np.int8(self.count < 5)
        mask = self._nested(shown, np.array) if self.is_nested else shown
        numbers = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.is_in_infos:
            return numbers, {"action_mask": mask}
        return {"numbers": numbers, "action_mask": mask}, {}

    def _nested(self, flat, make):
        """One part of the flat mask for each part of the action space, made by `make`."""
        is_dict, is_tuple = isinstance(self.action_space, spaces.Dict), isinstance(self.action_space, spaces.Tuple)
        if not (is_dict or is_tuple):
            return make(flat)
        inner = self.action_space.items() if is_dict else enumerate(self.action_space)
        parts, first = {}, 0
        for key, space in inner:
            parts[key] = make(flat[first : (first := first + sum(category_sizes(space)))])
        return parts if is_dict else tuple(parts.values())

    def _categories(self, space, action) -> list[int]:
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            keys = space.keys() if isinstance(space, spaces.Dict) else range(len(space))
            return [category for key in keys for category in self._categories(space[key], action[key])]
        return np.ravel(action - getattr(space, "start", 0)).tolist()


class Pixel(gymnasium.Env):
    """Costs nothing: one Atari-sized image that never changes, episodes of 50 steps, no reward."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.image = np.arange(4 * 84 * 84, dtype=np.uint32).astype(np.uint8).reshape(4, 84, 84)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.image, {}

    def step(self, action):
        self.count += 1
        return self.image, 0.0, self.count == 50, False, {}


class AtStep(Counting):
    """Misbehaves in the `n`th step since it was made, in whatever episode; for `probe_env` only in its first."""

    def __init__(self, n: int = 50):
        super().__init__()
        self.steps_left, self.is_seen = n, n == 1

    def step(self, action):
        self.steps_left -= self.is_seen or self.name not in (SEED, SEED + 1)
        if self.steps_left == 0:
            self.misbehave()
        return super().step(action)

    def misbehave(self):
        raise NotImplementedError


class CrashAtStep(AtStep):
    def misbehave(self):
        raise RuntimeError("this toy breaks here")


class Hang(AtStep):
    """Sleeps for an hour."""

    def misbehave(self):
        time.sleep(3600)


class HangWithGil(Hang):
    """The same with the GIL, as an endless loop in C does."""

    def misbehave(self):
        ctypes.PyDLL(None).sleep(3600)
        super().misbehave()


class HangsBesideProcess(Hang):
    """Hangs beside a process that it starts in that step."""

    def misbehave(self):
        subprocess.Popen(["sleep", "1000"])
        super().misbehave()


class CrashInReset(Counting):
    """Cannot be reset, but with the seed of `probe_env`."""

    def reset(self, *, seed=None, options=None):
        if seed not in (SEED, SEED + 1, None):
            raise RuntimeError("this toy cannot be reset")
        return super().reset(seed=seed)


class SlowReset(Counting):
    """Takes half a second to begin, when it is given a seed."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            time.sleep(0.5)
        return super().reset(seed=seed)


class StartsProcess(Counting):
    """Starts a process of its own, as simulators do, and ends it in `close`."""

    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "1000"])

    def close(self):
        self.simulator.kill()
        self.simulator.wait()


class NaNAtStep(Counting):
    """From the `n`th step since it was made, `what` is NaN in the one environment whose first seed is `seed`."""

    def __init__(self, seed: int = 0, what: str = "reward", n: int = 100):
        super().__init__()
        self.seed, self.what, self.steps_left = seed, what, n

    def step(self, action):
        observation, reward, *ends = super().step(action)
        self.steps_left -= 1
        if self.name == self.seed and self.steps_left < 0:
            observation, reward = (observation, np.nan) if self.what == "reward" else (observation * np.nan, reward)
        return observation, reward, *ends


for _toy in (
    Counting,
    Telling,
    MemoryCue,
    MultiDiscrete,
    Tuple,
    Buttons,
    Dict,
    Nested,
    Masked,
    Pixel,
    CrashAtStep,
    CrashInReset,
    SlowReset,
    Hang,
    HangWithGil,
    StartsProcess,
    HangsBesideProcess,
):
    gymnasium.register(f"{_toy.__name__}-v0", f"toy_envs:{_toy.__name__}")
