"""Atari games on our own emulator, in the shape of `ale_py.vector_env.AtariVectorEnv`, equal to it where compared."""

from __future__ import annotations

import difflib
import enum
import functools
import hashlib
import inspect
import math
import numbers
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from beast.envs.ale import read_palette, read_rom
from beast.errors import InputError, MissingPackage

try:
    import libatari
except ImportError as error:
    libatari = None
    WHY_NO_MODULE = f"the extension libatari cannot be loaded ({error}): `make libatari` or `pip install .` builds it"

REWARD, LIVES, FRAME_NUMBER, EPISODE_FRAME_NUMBER, ERROR = range(5)  # rows of the numbers that the pool writes
ERRORS = {1: "an instruction that stops the processor", 2: "a start script that never ends"}


class Unsupported(InputError):
    """What ale-py's vector env has and this one has not."""


Action = enum.IntEnum(  # as in ale_py.Action
    "Action",
    "NOOP FIRE UP RIGHT LEFT DOWN UPRIGHT UPLEFT DOWNRIGHT DOWNLEFT UPFIRE RIGHTFIRE LEFTFIRE DOWNFIRE UPRIGHTFIRE "
    "UPLEFTFIRE DOWNRIGHTFIRE DOWNLEFTFIRE",
    start=0,
)


@functools.cache
def known_games() -> dict[str, dict[str, Any]]:
    """Name of the ROM -> what the emulator knows of the game: its minimal set of actions, rows of its screen, md5 …"""
    return {game["name"]: game for game in libatari.games()} if libatari else {}


EXACT_GAMES = frozenset(name for name, game in known_games().items() if game.get("is_exact"))  # csrc/atari/games.h


def why_not(game: str) -> str:
    """Why this emulator cannot stand in for ale-py in `game` (the name of its ROM); empty if it can."""
    if libatari is None:
        return WHY_NO_MODULE
    if game not in EXACT_GAMES:
        return f"{game} is not on the list of games that were shown to be exact (csrc/atari/games.h)"
    try:
        rom = read_rom(game)
    except (OSError, MissingPackage) as error:
        return f"the ROM of {game} cannot be read ({error})"
    if hashlib.md5(rom, usedforsecurity=False).hexdigest() != known_games()[game]["md5"]:
        return f"the ROM of {game} is another one than ale-py 0.12.1 brings"
    return ""


def refuse_unknown(arguments: Iterable[str]) -> None:
    """Raise InputError for a name that is no argument of `AtariVectorEnv`."""
    known = [name for name in inspect.signature(AtariVectorEnv).parameters if name != "others"]
    for name in (name for name in arguments if name not in known):
        if name in ("mode", "difficulty"):
            default = f"Atari games are played in their default {name}, as in ale-py's vector env"
            raise InputError(f"{name}: {default}: leave it out")
        raise InputError(f"AtariVectorEnv takes no {name!r}; its arguments are {', '.join(known)}")


def _as_array(given) -> np.ndarray:
    """What was given as an array; one of objects, which no check takes, where its rows have different lengths."""
    try:
        return np.asarray(given)
    except ValueError:
        return np.empty((), object)


def _nearest(game: str) -> str:
    """Which games were meant by a name that there is not."""
    words = game.rpartition("/")[2].removesuffix("NoFrameskip-v4").removesuffix("-v5")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
    if near := difflib.get_close_matches(name, known_games(), n=3, cutoff=0.7):
        return f"give the name of a ROM: {' or '.join(near[:1] if near[0] == name else near)}"
    return f"its games are {', '.join(sorted(known_games()))}"


def checked_seeds(seed: int | Sequence[int] | np.ndarray, width: int) -> np.ndarray:
    """The seeds of so many environments, int64 [width]. Raises InputError for others than `AtariVectorEnv` takes."""
    seeds = _as_array(seed)
    if not np.issubdtype(seeds.dtype, np.integer):
        raise InputError(f"seed is {seed!r}: give whole numbers from 0 to 2147483647")
    if seeds.ndim == 0:
        seeds = np.array([int(seeds) + k for k in range(width)])
    if seeds.shape != (width,):
        raise InputError(f"seed has the shape {seeds.shape}: give one number, or {width}, one per environment")
    if (seeds < 0).any() or (seeds >= 2**31).any():
        raise InputError(f"the seeds {seeds.min()} to {seeds.max()} are not all from 0 to 2147483647")
    return seeds.astype(np.int64)


class AtariVectorEnv(VectorEnv):
    """Atari games stepped together in this process; see `ale_py.vector_env.AtariVectorEnv` for its arguments.

    Observations are uint8 [num_envs, stack_num, img_height, img_width], or [..., 3] in color. Rewards and infos are
    int32. With `num_threads=1` steps and resets run in the calling thread, but `send` starts one; 0 takes a thread per
    core. Beyond ale-py's:

    - `observe_into(array)` has steps and resets write their observations there, without a copy;
    - `clone_state` and `restore_state` take environments back, or to other processes;
    - `render_mode="rgb_array"` renders in color what the newest image shows.

    Games are played in their default mode and difficulty, as in ale-py's vector env. With `life_loss_info` under
    SAME_STEP autoreset a lost life has its own last observation in `final_obs`, where ale-py 0.12.1 writes none.

    Not supported are `continuous` actions, `thread_affinity_offset`, images larger than the screen, a `batch_size` that
    does not divide `num_envs`, games for two players, `xla()` and the attribute `ale`. A seed of -1 is refused.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(
        self, game: str, num_envs: int, *, batch_size: int = 0, num_threads: int = 0, thread_affinity_offset: int = -1,
        max_num_frames_per_episode: int = 108_000, repeat_action_probability: float = 0.0,
        full_action_space: bool = False, continuous: bool = False, continuous_action_threshold: float = 0.5,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP, img_height: int = 84, img_width: int = 84,
        grayscale: bool = True, stack_num: int = 4, frameskip: int = 4, maxpool: bool = True, noop_max: int = 30,
        episodic_life: bool = False, life_loss_info: bool = False, reward_clipping: bool = True,
        use_fire_reset: bool = True, render_mode: str | None = None, unlisted: bool = False, **others,
    ):  # fmt: skip
        """`unlisted` takes a game, or a ROM of it, that was not shown to be exact. Raises InputError for an invalid
        argument, MissingPackage where the emulator is not built, OSError where the ROM cannot be read."""
        if libatari is None:
            raise MissingPackage(WHY_NO_MODULE)
        refuse_unknown(others)
        if not isinstance(game, str) or game not in known_games():
            raise InputError(f"the emulator knows no game {game!r}; {_nearest(str(game))}")
        if not known_games()[game]["has_rules"]:
            raise Unsupported(f"{game} has no rules for one player: it would never end, and reward nothing")
        if not unlisted and (reason := why_not(game)):
            raise Unsupported(f"{reason}: unlisted=True plays it all the same, --atari_backend ale plays it on ale-py")
        minimal_actions, rows, is_pal = (known_games()[game][name] for name in ("actions", "height", "is_pal"))
        limits = {  # argument: value, lowest, highest
            "num_envs": (num_envs, 1, 2**20), "batch_size": (batch_size, 0, num_envs),
            "num_threads": (num_threads, 0, 1024), "repeat_action_probability": (repeat_action_probability, 0, 1),
            "max_num_frames_per_episode": (max_num_frames_per_episode, 1, 10**9), "stack_num": (stack_num, 1, 1024),
            "frameskip": (frameskip, 1, 10**6), "noop_max": (noop_max, 0, 10**6),
            "img_height": (img_height, 1, math.inf), "img_width": (img_width, 1, math.inf),
        }  # fmt: skip
        for name, (value, lowest, highest) in limits.items():
            kind = numbers.Real if name == "repeat_action_probability" else numbers.Integral
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InputError(f"{name} is {value!r}: give {'a' if kind is numbers.Real else 'a whole'} number")
            if not lowest <= value <= highest:
                raise InputError(f"{name} is {value}: it must lie between {lowest} and {highest}")
        switches = {
            "full_action_space": full_action_space, "continuous": continuous, "grayscale": grayscale,
            "maxpool": maxpool, "episodic_life": episodic_life, "life_loss_info": life_loss_info,
            "reward_clipping": reward_clipping, "use_fire_reset": use_fire_reset, "unlisted": unlisted,
        }  # fmt: skip
        for name, value in switches.items():
            if not isinstance(value, (bool, np.bool_)):
                raise InputError(f"{name} is {value!r}: give True or False")
        if batch_size and num_envs % batch_size:
            raise Unsupported(f"batch_size {batch_size} does not divide num_envs {num_envs}: ale-py can do that")
        if img_height > rows or img_width > 160:
            size = f"img_height {img_height} and img_width {img_width}"
            raise Unsupported(f"{size}: Beast's emulator only scales down, to at most {rows} and 160")
        if continuous or thread_affinity_offset != -1:
            name = "continuous" if continuous else "thread_affinity_offset"
            raise Unsupported(f"{name} is not supported by Beast's emulator, ale-py has it")
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"render_mode is {render_mode!r}: it is None or 'rgb_array'")
        modes = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
        self.autoreset_mode = next((mode for mode in modes if autoreset_mode in (mode, mode.value)), None)
        if self.autoreset_mode is None:
            raise InputError(f"autoreset_mode is {autoreset_mode}: it is AutoresetMode.NEXT_STEP or SAME_STEP")

        self.num_envs, self.batch_size, self.render_mode = num_envs, batch_size or num_envs, render_mode
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self._actions = [action for action in Action if full_action_space or action in minimal_actions]
        self.settings: dict[str, Any] = {  # as libatari has them
            "frame_skip": frameskip, "max_pool": maxpool, "stack": stack_num, "height": img_height, "width": img_width,
            "grayscale": grayscale, "keeps_rgb": render_mode is not None, "noop_max": noop_max,
            "fire_reset": use_fire_reset, "episodic_life": episodic_life, "life_loss_info": life_loss_info,
            "clip_rewards": reward_clipping, "same_step": self.autoreset_mode == AutoresetMode.SAME_STEP,
            "max_frames": max_num_frames_per_episode, "sticky": repeat_action_probability,
            "actions": [int(action) for action in self._actions],
        }  # fmt: skip
        needs_palette = is_pal or not grayscale or render_mode is not None  # the emulator knows NTSC's luminances only
        palette = read_palette(is_pal) if needs_palette else np.empty(0, np.uint8)
        threads = min(num_threads or os.cpu_count() or 1, self.batch_size)
        self._pool = libatari.Pool(read_rom(game), game, num_envs, threads, palette, self.settings)

        shape = (stack_num, img_height, img_width, *(() if grayscale else (3,)))
        self.single_observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = spaces.Discrete(len(self._actions))
        self.action_space = batch_space(self.single_action_space, self.batch_size)
        self._all_ids = np.arange(num_envs, dtype=np.int32)
        self._out: np.ndarray | None = None
        self._finished: deque[_Results] = deque()  # that recv() has not returned yet
        self._running: _Results | None = None
        self._received: np.ndarray | None = None  # environments that the next send() is for

    @functools.cached_property
    def observation_space(self) -> spaces.Space:
        """Made when it is asked for: it has 112 KB for every environment."""
        return batch_space(self.single_observation_space, self.batch_size)

    def get_action_set(self) -> list[Action]:
        """What the action of each index does."""
        return list(self._actions)

    @property
    def bytes_per_env(self) -> int:
        """Memory of one environment beside the observations that it writes."""
        return self._pool.bytes_per_env

    def observe_into(self, array: np.ndarray | None) -> None:
        """Have resets and steps write their observations into `array` from now on, and return it.

        It is a writable uint8 array of the observations' shape in which each environment's lie in one piece; None goes
        back to a new array each time. It is for `reset` without a mask and for `step`. Raises InputError for another
        array, and where `batch_size` is less than `num_envs`.
        """
        if array is not None:
            if self.batch_size < self.num_envs:
                raise InputError(
                    f"observe_into() needs batch_size == num_envs: they are {self.batch_size}, {self.num_envs}"
                )
            shape = (self.num_envs, *self.single_observation_space.shape)
            if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != shape:
                given = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else repr(array)
                raise InputError(f"observe_into() was given {given}: give a uint8 array of shape {shape}")
            if not array.flags.writeable:
                raise InputError("observe_into() was given an array that is read-only: give a writable one")
            if not array[0].flags.c_contiguous or (self.num_envs > 1 and array.strides[0] < array[0].nbytes):
                raise InputError(
                    f"observe_into() was given an array of strides {array.strides}: give one in which the environments "
                    "follow each other, each in one piece"
                )
        self._out = array

    def reset(
        self, *, seed: int | Sequence[int] | np.ndarray | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Begin new episodes, in all environments or where `options["reset_mask"]` (bool [num_envs]) says so.

        A number is the first environment's seed, the next has one more, and so on; an array has one for each that is
        reset. Seeded environments begin as if they were made anew. Without a seed all generators go on; if one of those
        that are reset never was before, all of them draw their seeds from the system. Raises InputError for an invalid
        seed or mask, which changes nothing, and RuntimeError where a ROM stops its console.
        """
        self._refuse_closed()
        if options and "reset_mask" in options:
            return self._reset_some(seed, options["reset_mask"])
        results = self._new_results(self._all_ids, self._out)
        seeds = None if seed is None else checked_seeds(seed, self.num_envs)
        self._collect()
        self._finished.clear()
        self._reset(results, seeds)
        if self.batch_size < self.num_envs:
            for begin in range(0, self.num_envs, self.batch_size):
                self._finished.append(results.part(slice(begin, begin + self.batch_size)))
            results = self._finished.popleft()
        self._received = results.ids
        return results.observations, results.info()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Step the environments of the last observations by one action each, an index into `get_action_set()`.

        Raises InputError for actions of a wrong value or shape, RuntimeError where a ROM stops its console.
        """
        if self.batch_size < self.num_envs:
            self.send(actions)
            return self.recv()
        ids, actions = self._checked_actions(actions)
        results = self._new_results(ids, self._out)
        self._call(self._pool.step, results, actions)
        return self._returned(results)

    def send(self, actions: np.ndarray) -> None:
        """Start to step the environments that `reset` or `recv` returned last. Raises InputError as `step` does."""
        ids, actions = self._checked_actions(actions)
        self._collect()
        results = self._new_results(ids, None)
        self._call(self._pool.start_step, results, actions)
        self._running, self._received = results, None

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """The results of the next `batch_size` environments, in the order in which they were sent. Raises InputError if
        there are none, RuntimeError where a ROM stops its console."""
        self._refuse_closed()
        if not self._finished:
            self._collect()
        if not self._finished:
            raise InputError("recv() without anything under way: call reset() or send() first")
        results = self._finished.popleft()
        self._received = results.ids
        return self._returned(results)

    def render(self) -> np.ndarray | None:
        """The newest images in color, uint8 [num_envs, rows, 160, 3] with the game's 210 to 250 rows; None without
        render_mode="rgb_array"."""
        return self._pool.rgb() if self.render_mode else None

    def ram(self) -> np.ndarray:
        """The consoles' memory, uint8 [num_envs, 128]."""
        return self._pool.ram()

    def clone_state(self, ids: Sequence[int] | None = None) -> list[bytes]:
        """The states of environments (all of them by default), generators and stacks included."""
        return [self._pool.clone(int(index)) for index in self._checked_ids(ids)]

    def restore_state(
        self, states: Sequence[bytes], ids: Sequence[int] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take environments (all by default) back to cloned states; returns their observations and infos.

        The states may come from another process whose environments have the same game and settings. Steps under way are
        dropped. Raises InputError for other and for damaged states, and where `batch_size` is less than `num_envs`,
        before anything is changed.
        """
        self._refuse_closed()
        if self.batch_size < self.num_envs:
            raise InputError(
                f"restore_state() needs batch_size == num_envs: they are {self.batch_size}, {self.num_envs}"
            )
        which = self._checked_ids(ids)
        if not isinstance(states, (Sequence, np.ndarray)):
            raise InputError(f"the states are {states!r:.80}: give a list of those that clone_state() has returned")
        if len(states) != len(which):
            raise InputError(f"{len(states)} states for {len(which)} environments: give one for each")
        try:
            for state in states:
                if not isinstance(state, bytes):
                    raise ValueError(f"a state is {state!r:.80}: give bytes that clone_state() has returned")
                self._pool.check_state(state)
        except ValueError as error:
            raise InputError(str(error)) from error
        self._collect()
        self._finished.clear()  # of before
        for index, state in zip(which, states):
            self._pool.restore(int(index), state)
        if all(self._pool.was_reset):
            self._received = self._all_ids
        return self._observe(which)

    def close_extras(self, **kwargs) -> None:
        self._pool.wait()

    def __reduce__(self):
        raise TypeError("environments cannot be pickled: clone_state() gives bytes, and restore_state() takes them")

    def _refuse_closed(self) -> None:
        if self.closed:
            raise InputError("the environments are closed: make others")

    def _checked_ids(self, ids) -> np.ndarray:
        array = self._all_ids if ids is None else _as_array(ids)
        if array.size == 0:
            array = array.astype(np.int32)  # an empty list is one of floats
        is_list = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
        if not is_list or (array < 0).any() or (array >= self.num_envs).any():
            raise InputError(f"ids are {ids!r}: give a list of environments' numbers, from 0 to {self.num_envs - 1}")
        return array.astype(np.int32)

    def _reset(self, results: _Results, seeds: np.ndarray | None) -> None:
        if seeds is None and np.asarray(self._pool.was_reset)[results.ids].all():
            self._call(self._pool.reset, results, np.empty(0, np.int64))
        else:
            if seeds is None:
                seeds = np.random.SeedSequence().generate_state(len(results.ids)).astype(np.int64)
            self._call(self._pool.seeded_reset, results, seeds)
        self._raise_errors(results)

    def _reset_some(self, seed, mask) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (self.num_envs,):
            raise InputError(f"reset_mask is {mask!r}: it is a bool array of shape ({self.num_envs},)")
        if self.batch_size < self.num_envs or (self._received is None and not mask.all()):
            raise InputError("reset_mask needs batch_size == num_envs and a reset of all environments before it")
        if self._received is None:
            return self.reset(seed=seed)
        chosen = self._all_ids[mask]
        if len(chosen):
            seeds = None if seed is None else checked_seeds(seed, len(chosen))
            self._reset(self._new_results(chosen, None), seeds)
        return self._observe(self._all_ids)

    def _checked_actions(self, actions) -> tuple[np.ndarray, np.ndarray]:
        """The environments that are stepped next, and their actions, whose values the pool checks."""
        if self._received is None:
            raise InputError("there are no observations to act on: call reset() first, or recv() after send()")
        self._refuse_closed()
        actions = _as_array(actions)
        if actions.shape != self._received.shape or not np.issubdtype(actions.dtype, np.integer):
            wanted = f"give integers of shape {self._received.shape}, one for each environment"
            raise InputError(f"actions are {actions.dtype} of shape {actions.shape}: {wanted}")
        return self._received, actions.astype(np.int64)

    def _new_results(self, ids: np.ndarray, out: np.ndarray | None) -> _Results:
        shape = (len(ids), *self.single_observation_space.shape)
        final = np.empty(shape, np.uint8) if self.autoreset_mode == AutoresetMode.SAME_STEP else None
        return _Results(ids, np.empty(shape, np.uint8) if out is None else out, final)

    def _call(self, function, results: _Results, actions_or_seeds: np.ndarray) -> None:
        arrays = results.observations, results.final_observations, results.numbers, results.flags
        try:
            function(results.ids, actions_or_seeds, *arrays)
        except ValueError as error:
            raise InputError(str(error)) from error

    def _collect(self) -> None:
        """Wait for what is under way."""
        if self._running is not None:
            self._pool.wait()
            self._finished.append(self._running)
            self._running = None

    def _raise_errors(self, results: _Results) -> None:
        errors = results.numbers[ERROR]
        if errors.any():
            k = int(np.flatnonzero(errors)[0])
            raise RuntimeError(f"environment {results.ids[k]} cannot go on: its ROM has {ERRORS[int(errors[k])]}")

    def _returned(self, results: _Results):
        self._raise_errors(results)
        terminated, truncated = results.flags
        return results.observations, results.numbers[REWARD], terminated, truncated, results.info()

    def _observe(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        results = _Results(ids, np.empty((len(ids), *self.single_observation_space.shape), np.uint8), None)
        self._pool.observe(ids, results.observations, results.numbers)
        return results.observations, results.info()


class _Results:
    """What a reset or step of environments `ids` [n] writes."""

    def __init__(self, ids, observations, final_observations, numbers=None, flags=None):
        self.ids, self.observations, self.final_observations = ids, observations, final_observations
        self.numbers = np.zeros((5, len(ids)), np.int32) if numbers is None else numbers
        self.flags = np.zeros((2, len(ids)), bool) if flags is None else flags

    def part(self, which: slice) -> _Results:
        return _Results(self.ids[which], self.observations[which], None, self.numbers[:, which], self.flags[:, which])

    def info(self) -> dict[str, np.ndarray]:
        names = ("lives", "frame_number", "episode_frame_number")
        info = {"env_id": self.ids.copy(), **dict(zip(names, self.numbers[LIVES:ERROR]))}
        if self.final_observations is not None and self.flags.any():
            info["final_obs"] = self.final_observations
        return info
