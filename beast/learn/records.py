"""What each of several tasks has come to: steps, and the last games."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch
from torch import Tensor

from beast.envs.groups import finished_episodes
from beast.envs.tasks import Task, mean_score
from beast.learn.normalization import task_of
from beast.learn.ranks import Game

LATEST = 100  # games of a task that its means are of
OF_GAMES = ("done", "terminated", "truncated", "episode_step", "episode_return", "reward", "counts")  # fields


class TaskRecords:
    """Steps and the latest games of each task; of one task alone nothing is kept."""

    def __init__(self, tasks: list[Task]):
        tasks = tasks if len(tasks) > 1 else []
        self.names = [task.name for task in tasks]
        self._tasks, self._references = tasks, [task.reference for task in tasks]
        self.steps, self.episodes = [0] * len(tasks), [0] * len(tasks)
        self._games: list[deque[tuple[float, int]]] = [deque(maxlen=LATEST) for _ in tasks]  # return and length

    def steps_in(self, batch: dict, steps: Tensor) -> Tensor:
        """How many of the `steps`, bool [T, B], are of each task; empty for what a replay holds, whose steps were
        counted when they came."""
        if not self.names or "task" not in batch:
            return torch.zeros(0, device=steps.device)
        task = task_of(batch, len(self.names))[:-1]
        return torch.zeros(len(self.names), device=task.device).index_add_(0, task.flatten(), steps.flatten().float())

    def named(self, counts: Tensor) -> dict[str, Tensor]:
        """What `steps_in` has found, as numbers of an update."""
        return {f"task/{number}": x for number, x in enumerate(counts.unbind())}

    def count_steps(self, numbers: dict) -> None:
        """Take what `named` has added out of the numbers of an update."""
        for number in range(len(self.names)):
            self.steps[number] += int(numbers.pop(f"task/{number}", 0))

    def games_in(self, rows: dict) -> list[Game]:
        """The games that ended in a rollout's `rows`, numpy arrays [T+1, B]."""
        if not self.names:
            return [Game(*game, 0) for game in finished_episodes(rows)]
        of_column = rows["task"][0].clip(0, len(self.names) - 1)
        games = []
        for number in np.unique(of_column).tolist():
            own = {name: rows[name][:, of_column == number] for name in OF_GAMES if name in rows}
            games += [Game(*game, number) for game in finished_episodes(own)]
        return games

    def record_games(self, games: list[Game]) -> None:
        for game in games if self.names else []:
            self.episodes[game.task] += 1
            self._games[game.task].append((game.episode_return, game.length))

    def score(self) -> float:
        """The mean of the tasks' mean returns, normalized where all have reference scores; -inf until 100 games, spread
        over all of them, have ended."""
        least = math.ceil(LATEST / max(len(self.names), 1))
        if any(len(games) < least for games in self._games):
            return -math.inf
        if scores := self._scores():
            return mean_score(self._tasks, scores)
        return float(np.mean([float(np.mean([x for x, _ in games])) for games in self._games]))

    def numbers(self) -> dict[str, float]:
        """What a row of metrics says of each task, and `charts/score`, the mean of their normalized scores."""
        found: dict[str, float] = {}
        for number, name in enumerate(self.names):
            found |= {f"task/{name}/steps": self.steps[number], f"task/{name}/episodes": self.episodes[number]}
            if games := self._games[number]:
                returns, lengths = (float(np.mean(x)) for x in zip(*games))
                found |= {f"task/{name}/episodic_return": returns, f"task/{name}/episodic_length": lengths}
        scores = self._scores()
        found |= {f"task/{name}/score": x for name, x in zip(self.names, scores)}
        return found | ({"charts/score": mean_score(self._tasks, scores)} if scores else {})

    def _scores(self) -> list[float]:
        """Of each task; none where one has no reference or no game has ended yet."""
        if not all(self._references) or not all(self._games):
            return []
        return [
            reference.score(float(np.mean([x for x, _ in games])))
            for reference, games in zip(self._references, self._games)
            if reference
        ]

    def table(self) -> str:
        """Return, length and steps of each task, in lines."""
        rows = [("task", "return", "length", "steps", "games", "score")]
        scores: list[float] = self._scores() or [math.nan] * len(self.names)
        for number, name in enumerate(self.names):
            returns, lengths = (np.mean(x) for x in zip(*self._games[number] or [(math.nan, math.nan)]))
            counts = f"{self.steps[number]:,}", f"{self.episodes[number]:,}"
            rows.append((name, f"{returns:.2f}", f"{lengths:.0f}", *counts, f"{scores[number]:.3f}"))
        columns = list(zip(*rows))[: None if self._scores() else -1]
        widths = [max(map(len, column)) for column in columns]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in zip(*columns)]
        return "\n".join(lines)

    def state_dict(self) -> dict:
        return {
            name: {"steps": self.steps[number], "episodes": self.episodes[number], "games": list(self._games[number])}
            for number, name in enumerate(self.names)
        }

    def load_state_dict(self, state: dict) -> None:
        for number, name in enumerate(self.names):
            if own := state.get(name):
                self.steps[number], self.episodes[number] = own["steps"], own["episodes"]
                self._games[number].extend(own["games"])
