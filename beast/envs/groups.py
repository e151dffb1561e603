"""Groups: environments stepped together, each result written in place into a row of a rollout."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper

from beast.envs import env_metrics
from beast.envs.agents import ABSENT
from beast.envs.atari import LifeEpisodes
from beast.envs.masks import MASK, legal_choices, spaces_with_mask
from beast.envs.numbers import keep_numbers
from beast.envs.rows import OBJECTIVE, REWARD_TERMS, is_final, rollout_fields, written_by
from beast.envs.spaces import CATEGORICAL, EnvSpaces, choices, env_actions, in_a_line, misfit_observation, parts_by_name
from beast.envs.tensors import in_arrays
from beast.errors import InputError, raised
from beast.machine import CLOSING_SECONDS

# What infos of vector envs mean. gymnasium puts FINAL there from what single environments give at an end.
FINAL = {"final_obs", "final_info"}
OF_VECTOR_ENVS = {*FINAL, "_final_obs", "_final_info", "final_observation", "life_over"}


class EnvGroup:
    """Steps a vector env and writes each result into a row of a rollout; `spaces` and `fields` say what a row holds.

    A row is a dict of arrays: `row["obs"][name]` [K, *shape], and [K] of each field that environments write
    (rows.ROW_FIELDS). Each observation is copied once, from the vector env's array.

    Under SAME_STEP autoreset a row may have `row["final_obs"][name]` [K, *shape], too (docs/rollout.md). It means
    something only in columns whose episode this row truncates. An episode that is truncated without `info["final_obs"]`
    is marked as terminated, too, so that nothing is bootstrapped from what is not there.
    The part `action_mask` [K, choices] says what is legal (masks.py); `has_mask`: the infos of `env` may say it.

    Columns of agents that are not in their game now (agents.py) repeat their last row, without a reward: a final one,
    so nothing of them counts. Return and step are 0 of those that have not come yet.

    `episode_return` and `episode_step` are of whole games: a vector env whose episode may end within a game says so in
    `info["life_over"]` (bool [K], see `LifeEpisodes`). `ended` has column and numbers of each game that the newest row
    ends.
    """

    def __init__(self, env: VectorEnv, has_mask: bool = False, metrics: str = ""):
        """`metrics` are names of more numbers in the infos (--env_metrics), with commas between them. Raises
        InputError for a space that is not supported and for an env that does not reset itself."""
        env = in_arrays(env)
        keep_numbers(env)
        # ale-py 0.12.1 writes its mode into the dict that all vector env classes share, so the env's own attribute
        # comes first.
        mode = getattr(env.unwrapped, "autoreset_mode", None) or (env.metadata or {}).get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise InputError(
                f"autoreset mode of {env} is {mode}, expected AutoresetMode.NEXT_STEP or SAME_STEP: "
                'set metadata["autoreset_mode"] of the vector env to what it does, and let it reset itself'
            )
        self.env, self.num_envs = env, env.num_envs
        self._task, self._agents = getattr(env, "task_numbers", 0), (env.metadata or {}).get("agents", 1)
        observations = spaces_with_mask(env.single_observation_space, env.single_action_space, has_mask)
        # Wrappers of others may keep an observation for longer than its row lasts.
        inner = env.env if isinstance(env, LifeEpisodes) else env
        self._observe_into = None if isinstance(inner, VectorWrapper) else getattr(inner, "observe_into", None)
        same_step, whole = mode == AutoresetMode.SAME_STEP, env.single_observation_space
        self.spaces = EnvSpaces(observations, env.single_action_space, same_step, whole=whole)
        self._metrics = env_metrics.keys_of(metrics)
        self.ended: list[tuple[int, env_metrics.Numbers]] = []
        self.loses_final_obs = False  # whether an episode was truncated without its last observation
        self.fields, self._numbers = rollout_fields(self.spaces), list(written_by("env"))
        indices = {name: space for name, space in observations.items() if isinstance(space, CATEGORICAL)}
        starts = {name: np.asarray(getattr(space, "start", 0)) for name, space in indices.items()}
        self._limits = {name: (starts[name], starts[name] + choices(space)) for name, space in indices.items()}
        _tolerate(env)

    def reset(self, seed: int | None, row: dict) -> None:
        """Begin new episodes with seeds `seed`, `seed + 1`, … (below 2³¹), or any, and write their first row."""
        if self._observe_into:
            self._observe_into(row["obs"]["obs"])
        observations, info = self.env.reset(seed=seed if seed is None else int(seed))
        info = info if isinstance(info, dict) else {}
        self._write_observations(observations, row["obs"], info)
        for array in row.get("final_obs", {}).values():
            array[...] = 0
        absent = self._absent(info)
        self._games = Games(absent, absent, np.zeros(self.num_envs), np.zeros(self.num_envs, np.int32))
        self.ended = []
        self._objective = np.full(self.num_envs, np.nan)
        nothing_yet = dict.fromkeys(("reward", "terminated", "truncated", "episode_return", "episode_step"), 0)
        self._write_numbers({**nothing_yet, "done": ~absent, "terminated": absent, "task": self._task}, info, row)

    def step(self, actions: np.ndarray, row: dict) -> None:
        """Step all with `actions` [K, *action_shape] as a rollout stores them and write the row that came of it."""
        actions = env_actions(self.spaces.action, actions)
        if self._observe_into:
            self._observe_into(row["obs"]["obs"])
        try:
            observations, reward, terminated, truncated, info = self.env.step(actions)
            info = info if isinstance(info, dict) else {}
            self._write_observations(observations, row["obs"], info)
        except Exception as error:
            raise self._named(error) from error
        if np.size(reward := np.asarray(reward)) != self.num_envs:
            raise InputError(f"{name_of(self.env)}: rewards of shape {reward.shape} of {self.num_envs} environments")
        reward = reward.reshape(self.num_envs)
        terminated, truncated = (np.asarray(x, bool).reshape(self.num_envs) for x in (terminated, truncated))
        ended = terminated | truncated
        life_over = np.asarray(info.get("life_over", False))  # others may call something else so
        game_over = ended & ~life_over if life_over.dtype == bool else ended
        absent = self._absent(info)
        newly_over = game_over & ~absent
        self.ended = env_metrics.read_games(info, newly_over, self._metrics) if newly_over.any() else []
        same_step = self.spaces.final_observations
        computed, self._games = next_row(np, self._games, reward, ended, game_over, absent, self._agents, same_step)
        if "final_obs" in row and truncated.any():
            lost = truncated & ~self._write_final_observations(info, truncated, row["final_obs"])
            self.loses_final_obs |= bool((lost & ~terminated).any())
            terminated = terminated | lost
        computed |= {"terminated": terminated, "truncated": truncated, "task": self._task}
        self._write_numbers(computed, info, row)

    def close(self) -> None:
        close(self.env)

    def _absent(self, info: dict) -> np.ndarray:
        return np.asarray(info.get(ABSENT, np.zeros(self.num_envs, bool)))

    def _write_numbers(self, computed: dict, info: dict, row: dict) -> None:
        """Write the fields of ROW_FIELDS that environments write: those not `computed` here are in the infos, or 0."""
        for name in self._numbers:
            row[name][...] = computed[name] if name in computed else info.get(name, 0)
        if REWARD_TERMS in row:
            row[REWARD_TERMS][...] = info.get(REWARD_TERMS, 0)
        if OBJECTIVE in row:
            told = np.where(info.get("_true_objective", True), info.get("true_objective", np.nan), np.nan)
            is_held = self._absent(info) & (self._games.steps > 0)
            row[OBJECTIVE][...] = self._objective = np.where(is_held, self._objective, told)
        if "final_info" in info:
            for k in np.flatnonzero(computed["terminated"] | computed["truncated"]).tolist():
                for field, key, nothing in ((REWARD_TERMS, REWARD_TERMS, 0), (OBJECTIVE, "true_objective", np.nan)):
                    if field in row:
                        value = env_metrics.of_step(info, key, k)
                        row[field][k] = nothing if value is None else value

    def _write_observations(self, observations, fields: dict[str, np.ndarray], info: dict) -> None:
        for name, part in parts_by_name(self.env.single_observation_space, observations).items():
            if name in fields and name != MASK and part is not fields[name]:
                fields[name][...] = part
        if MASK in fields:
            fields[MASK][...] = self._legal(observations, info)
        self._check_limits(fields)

    def _named(self, error: Exception) -> Exception:
        """The exception, or what to tell instead where it came of an observation that is not of its space."""
        space = self.env.single_observation_space
        for number, observation in enumerate(getattr(self.env.unwrapped, "_env_obs", [])):  # SyncVectorEnv's newest
            if found := misfit_observation(space, observation):
                who = f"{name_of(self.env)}: environment {number} of its group"
                return InputError(f"{who} gave {found}: make both the same")
        return error

    def _legal(self, observations, info: dict) -> np.ndarray:
        space = self.env.single_observation_space
        return legal_choices(space, self.spaces.action, observations, info, self.num_envs)

    def _check_limits(self, fields: dict[str, np.ndarray], columns=slice(None)) -> None:
        """Raise InputError for an index outside of its space: it would end inference, and with it the whole run."""
        for name, (low, high) in self._limits.items():
            values = fields[name][columns]
            if (bad := (values < low) | (values >= high)).any():
                number = np.arange(self.num_envs)[columns][np.argwhere(bad)[0][0]]
                raise InputError(
                    f"{name_of(self.env)}: environment {number} of its group gave {values[bad][0]} in {name!r}, which "
                    f"is outside of the space {in_a_line(self.spaces.observations[name])}: declare one that has it "
                    "(for -1 give start=-1 and one choice more)"
                )

    def _write_final_observations(self, info: dict, truncated: np.ndarray, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Copy the last observations of truncated episodes; returns which of them there were, bool [K]."""
        name = "final_obs" if "final_obs" in info else "final_observation"  # that of gymnasium before 1.1
        final: Any = info.get(name)
        space = self.env.single_observation_space
        found = truncated & info.get(f"_{name}", final is not None)
        for k in np.flatnonzero(found):
            if isinstance(final, (dict, tuple)):  # arrays [K, …]
                last = {name: part[k] for name, part in parts_by_name(space, final).items()}
            else:  # K observations, as gymnasium's own vector envs give them
                last = parts_by_name(space, final[k])
            for name, part in last.items():
                if name in fields and name != MASK:
                    fields[name][k] = part
        if MASK in fields and found.any():
            fields[MASK][found] = self._legal(final, info.get("final_info", {}))[found]
        self._check_limits(fields, found)
        return found


class Games(NamedTuple):
    """Where the games of a group are after their newest row: arrays or tensors [K]."""

    was_final: Any  # NEXT_STEP: that row was the last of its episode,
    was_over: Any  # and of its game
    returns: Any  # float64
    steps: Any  # int32


def next_row(
    xp: Any, games: Games, reward, ended, game_over, absent, agents: int, same_step: bool
) -> tuple[dict, Games]:
    """Fields of the row that a step gave, and the games after it. `xp` is numpy or torch, `reward` float64 and all
    others bool, [K]; each `agents` columns are one game. No branch depends on data, so that a GPU's need not come."""
    done, new_game = ended, game_over
    if not same_step:
        # A life may end in the very step that began it (a frame limit). Both rows are final then: a row that is
        # `done` and ended would read as a SAME_STEP reset, and its void transition would be trained on.
        done, new_game = games.was_final & ~ended, games.was_over
        reward = xp.where(new_game, 0.0, reward)  # of a void step
        comes, was_over = (new_game & ~absent).reshape(-1, agents), new_game.reshape(-1, agents).all(1)
        begins = was_over & comes.any(1)  # also for those who come later
        new_game = (comes | begins.reshape(-1, 1)).reshape(-1)
    returns = xp.where(new_game, 0.0, games.returns + reward)
    steps = xp.where(new_game, 0, games.steps + ~absent)
    row = {"reward": reward, "done": done, "episode_return": returns, "episode_step": steps}
    return row, Games(ended, game_over, returns, steps)


def name_of(env: VectorEnv) -> str:
    """The id with which a vector env was made, or the class of its environments."""
    first = next(iter(getattr(env.unwrapped, "envs", [])), env)
    spec = env.spec or getattr(first, "spec", None)
    return (env.metadata or {}).get("env_id") or (spec.id if spec else type(first.unwrapped).__name__)


def close(env: VectorEnv) -> None:
    """Close a vector env. An exception is told in one line on stderr, and nothing else follows from it."""
    try:
        with _interrupted_after(CLOSING_SECONDS):
            env.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust's and a cancelled task are no Exceptions
        print(f"warning: {name_of(env)}: close() raised {raised(error)}", file=sys.stderr, flush=True)
        hangs = isinstance(error, TimeoutError)
        for single in getattr(env.unwrapped, "envs", []):  # those that were still to be closed
            with contextlib.suppress(BaseException), _interrupted_after(1 if hangs else CLOSING_SECONDS):
                single.close()
        with contextlib.suppress(Exception):
            env.closed = True  # or Python closes it once more when it collects it, and shows a traceback


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread where nothing else makes use of its alarm clock."""

    def interrupt(*_) -> None:
        raise TimeoutError(f"it took {seconds:g} s")

    is_free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not signal.getitimer(signal.ITIMER_REAL)[0]
    with contextlib.ExitStack() as to_undo:
        if is_free and threading.current_thread() is threading.main_thread():
            to_undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            to_undo.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield


def _tolerate(env: VectorEnv) -> None:
    """Have a vector env of gymnasium's, and those that it holds, take any infos, and rewards of shape (1,)."""
    own: Any = vars(env)
    if "_add_info" not in own:  # else this is done
        own_envs = own.get("envs", []) if isinstance(own.get("envs"), list) else []
        inner = [each for each in (*own.values(), *own_envs) if isinstance(each, VectorEnv)]
        if getattr(type(env), "_add_info", None) is VectorEnv._add_info:
            own["_add_info"] = _Infos(env)._add_info
        if isinstance(own.get("_rewards"), np.ndarray):
            own["_rewards"] = own["_rewards"].view(_Rewards)
        for each in inner:
            _tolerate(each)


class _Infos(VectorEnv):
    """Gathers infos as gymnasium does, but leaves out what does not fit together or is a vector env's to say."""

    def __init__(self, env: VectorEnv):
        self.num_envs = env.num_envs
        # The processes of an AsyncVectorEnv put FINAL into the infos of a new episode.
        self._left_out = {"life_over"} if isinstance(env, AsyncVectorEnv) else OF_VECTOR_ENVS

    def _add_info(self, infos: dict, info: Any, number: int) -> dict:
        if isinstance(info, Mapping) and info.keys() & self._left_out and info.keys() != FINAL:
            info = {key: value for key, value in info.items() if key not in self._left_out}
        try:
            return super()._add_info(infos, info, number)
        except Exception:  # of many types: a value of another shape or kind than that of another environment
            for key, value in info.items() if isinstance(info, Mapping) else ():
                try:
                    super()._add_info(infos, {key: value}, number)
                except Exception:
                    infos.pop(key, None)
                    infos.pop(f"_{key}", None)
            return infos


class _Rewards(np.ndarray):
    """Takes a reward of shape (1,), as continuous tasks compute it, for the number that it holds."""

    def __setitem__(self, index, reward):
        if type(reward) in (np.ndarray, list, tuple):
            if np.size(reward) != 1:
                raise InputError(f"environment {index} of its group gave the reward {reward!r:.80}: return one number")
            reward = np.asarray(reward).item()
        super().__setitem__(index, reward)


def finished_episodes(rows: dict) -> list[tuple[float, int]]:
    """Return and length in steps of each game that ended in a rollout [T+1, K], in the order of their ends.

    A game is counted with the row after its end, the first of the next game. Row 0 of a rollout repeats row T of the
    one before, so consecutive rollouts count each game once, under both autoreset conventions. A game that
    `EnvGroup.reset` cut off is not counted, nor is one of no steps: that of an agent that has not come yet.
    """
    ended = rows["terminated"] | rows["truncated"]
    begins = rows["episode_step"][1:] == 0
    next_step = is_final(rows["done"], rows["terminated"], rows["truncated"])[:-1] & begins  # [T, K]: t ends its game
    same_step = (ended & rows["done"])[1:] & begins  # row t+1 is both the last of this game and the first of the next
    returns = rows["episode_return"][:-1] + np.where(same_step, rows["reward"][1:], 0)
    lengths = rows["episode_step"][:-1] + same_step
    over = (next_step | same_step) & (lengths > 0)
    if "counts" in rows:  # only the games that ended by such a row's action
        over &= np.where(same_step, rows["counts"][1:], rows["counts"][:-1])
    return list(zip(returns[over].tolist(), lengths[over].tolist()))
