"""Which policy plays which environment, and batches for each of what it has played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from beast.envs.rows import OBJECTIVE
from beast.errors import InputError
from beast.feeds.memory import Fields
from beast.learn.nests import map_tensors

POLICY: Fields = {"policy": ((), "int32")}  # a field of rows beside those of rows.py: the policy that chose `action`


class Game(NamedTuple):
    """A game that begins."""

    env: int  # number of its environment
    num_envs: int  # in the run
    kinds: tuple[int, ...]  # of each seat, an agent of the environment: agents of one kind have equal spaces

    @property
    def seats(self) -> int:
        return len(self.kinds)


class Seats:
    """Says who plays. A policy is drawn when a game begins, for all its seats at once, and plays to the game's end."""

    def __init__(
        self, choose: Callable[[Game], list[int]], kind_of: Callable[[int], int], num_columns: int, group_width: int,
        kinds: tuple[int, ...] = (0,),
    ):  # fmt: skip
        """`choose(game)` names a policy for each seat, `kind_of(policy)` is its kind of agents, -1 if there is no
        such policy. `num_columns` are those of all groups together, `kinds` those of the seats of a game."""
        self._choose, self._kind_of, self._group_width, self._kinds = choose, kind_of, group_width, kinds
        self.count, self._num_games = len(kinds), num_columns // len(kinds)
        self._playing = np.zeros(num_columns, np.int64)  # the policy of each column

    def players(self, inputs: dict) -> np.ndarray:
        """The policies [N] that have to act on the rows of `Rows.inputs`. Raises InputError where `choose` names
        others than there are."""
        names = "policy", "group", "env_number", "done", "episode_step"
        policy, group, number, done, step = (inputs[name][0].cpu().numpy() for name in names)
        players = policy.copy()  # of the row before
        columns = group.astype(np.int64) * self._group_width + number
        for first in self.count * np.flatnonzero(begins(done, step, self.count)):
            game = Game(int(columns[first]) // self.count, self._num_games, self._kinds)
            players[first : first + self.count] = self._checked(game)
        self._playing[columns] = players
        return players

    def playing(self) -> set[int]:
        """The policies of the games that go on."""
        return set(self._playing.tolist())

    def _checked(self, game: Game) -> list[int]:
        chosen = self._choose(game)
        if tuple(map(self._kind_of, chosen)) != game.kinds:
            raise InputError(
                f"choose_policy gave {chosen} for {game}: give a policy of population.live(kind) or .past(kind) for "
                f"each of the {game.seats} seats"
            )
        return chosen


def begins(done: np.ndarray, episode_step: np.ndarray, seats: int) -> np.ndarray:
    """Whether a row begins a game, bool [E] of E environments with so many seats each, whose columns are [E * seats].
    An agent may come later: a game begins where no seat has made a step."""
    return done.reshape(-1, seats).any(1) & (episode_step == 0).reshape(-1, seats).all(1)


class Part(NamedTuple):
    """A seat's part of a game that has ended."""

    column: int
    policy: int
    episode_return: float
    objective: float  # NaN where the environment told none


def parts_of_game(rows: dict, t: int, columns: range) -> list[Part]:
    """Who took part in the game of these columns that ended before row t+1 of `rows` [T+1, K], numpy arrays, began the
    next one."""
    found = []
    for k in columns:
        # Where a step resets, that row has the last reward, success and policy of the game before.
        is_same_step = rows["done"][t + 1, k] and (rows["terminated"][t + 1, k] or rows["truncated"][t + 1, k])
        last = t + int(is_same_step)
        if rows["episode_step"][t, k] + is_same_step > 0:
            episode_return = rows["episode_return"][t, k] + is_same_step * rows["reward"][t + 1, k]
            found.append(Part(k, int(rows["policy"][last, k]), float(episode_return), float(rows[OBJECTIVE][last, k])))
    return found


class Played(NamedTuple):
    """A seat of a game that counts."""

    policy: int
    score: float


class Games:
    """Tells of the games that have ended. All seats of a game are scored by the same: by their objectives, or by their
    returns in a task whose environment has told none yet. Where it has, a game that lacks one has no result: it has
    crashed, or was cut. Nor does a game count that a policy has begun with weights which it has no more."""

    def __init__(self, num_policies: int, seats: int):
        self._seats, self._since = seats, [0] * num_policies
        self._have_objectives: set[int] = set()  # tasks
        self._first_versions: dict[int, np.ndarray] = {}  # of each group [K]: what began the games that it plays

    def forget(self, policy: int, version: int) -> None:
        """Count no games that a policy began before its weights had this version."""
        self._since[policy] = version

    def finished(self, rollout: dict) -> list[list[Played]]:
        """Of each game that ended in a rollout [T+1, K] the seats that took part. The next rollout, which repeats row
        T, has those that end in it."""
        names = "done", "episode_step", "terminated", "truncated", "episode_return", "reward", "policy", OBJECTIVE
        rows = {name: rollout[name].cpu().numpy() for name in (*names, "task", "group", "policy_version")}
        games, group = [], int(rows["group"][0, 0])
        versions = self._first_versions.get(group, rows["policy_version"][0])
        for t in range(len(rows["done"]) - 1):
            begun, ended = (begins(rows["done"][x], rows["episode_step"][x], self._seats) for x in (t, t + 1))
            versions = np.where(np.repeat(begun, self._seats), rows["policy_version"][t + 1], versions)
            for first in (self._seats * np.flatnonzero(ended)).tolist():
                parts, task = parts_of_game(rows, t, range(first, first + self._seats)), int(rows["task"][t, first])
                is_told = bool(parts) and not any(np.isnan(part.objective) for part in parts)
                if is_told:
                    self._have_objectives.add(task)
                is_old = any(versions[x.column] < self._since[x.policy] for x in parts if x.policy < len(self._since))
                if parts and not is_old and (is_told or task not in self._have_objectives):
                    games.append([Played(x.policy, x.objective if is_told else x.episode_return) for x in parts])
        self._first_versions[group] = versions
        return games


def by_policy(players: np.ndarray) -> list[tuple[int, Any]]:
    """Each policy of `players` [N] with its columns: a slice where they are neighbours, else an index."""
    return [(policy, as_slice(np.flatnonzero(players == policy))) for policy in np.unique(players).tolist()]


def as_slice(index: np.ndarray) -> slice | torch.Tensor:
    """An ascending index as a slice, if it has no gaps."""
    first, stop = int(index[0]), int(index[-1]) + 1
    return slice(first, stop) if stop - first == len(index) else torch.from_numpy(index)


def take(nest: Any, columns: slice | torch.Tensor) -> Any:
    """These columns of nested tensors [T, N, …]."""
    return map_tensors(lambda x: x[:, columns], nest)


def put_together(parts: list[tuple[Any, Any]], width: int) -> Any:
    """Nested tensors [T, width, …] of parts: (columns, tensors [T, n, …])."""

    def place(*pieces: torch.Tensor) -> torch.Tensor:
        whole = pieces[0].new_empty(len(pieces[0]), width, *pieces[0].shape[2:])
        for (columns, _), piece in zip(parts, pieces):
            whole[:, columns] = piece
        return whole

    if len(parts) == 1:
        return parts[0][1]
    return map_tensors(place, *(nest for _, nest in parts))


class Dealer:
    """Deals rollouts out as batches of one policy each. What does not fill a batch waits for the next rollout."""

    def __init__(self, num_policies: int, batch_width: int):
        self.batch_width = batch_width
        self._waiting: list[tuple | None] = [None] * num_policies
        self._since = [0] * num_policies

    def forget(self, policy: int, version: int) -> None:
        """Train a policy on nothing that its weights chose before they had this version."""
        self._waiting[policy], self._since[policy] = None, version

    def deal(self, rollout: dict, core_state: tuple) -> Iterator[tuple[int, dict, tuple]]:
        """(policy, batch [T+1, B, …], core state) of a rollout [T+1, K, …] and what has waited.

        A column that several policies have played goes to each of them. `batch["counts"]`, bool [T+1, B], are the rows
        whose action the policy has chosen; it is left out where these are all. Batches are valid as long as the
        rollout.
        """
        policy = rollout["policy"]
        for number in set(policy[1:].unique().tolist()) & set(range(len(self._waiting))):  # others are past ones
            own = (policy == number) & (rollout["policy_version"] >= self._since[number])
            if not own[1:].any():
                continue
            columns = as_slice(own[1:].any(0).nonzero().flatten().cpu().numpy())
            rows, state = take(({**rollout, "counts": own}, core_state), columns)
            # Another policy's, too, and an update may edit all but the observations. An index has copied already.
            if isinstance(columns, slice) and not own[1:, columns].all():
                rows = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in rows.items()}
            part = rows, state
            if waiting := self._waiting[number]:
                part = tuple(map_tensors(lambda *x: torch.cat(x, dim=1), *pair) for pair in zip(waiting, part))
            num_columns, first = part[0]["done"].shape[1], 0
            while first + self.batch_width <= num_columns:
                batch, state = take(part, slice(first, first + self.batch_width))
                if batch["counts"][1:].all():
                    del batch["counts"]
                yield number, batch, state
                first += self.batch_width
            rest = take(part, slice(first, num_columns))
            self._waiting[number] = map_tensors(torch.clone, rest) if first < num_columns else None
