"""The policies of a run: those that learn, frozen past ones as opponents, and who beat whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import Any

import numpy as np
from torch import nn

from beast.device import Fence
from beast.learn.published import acting_copy, own_copy
from beast.population.ratings import ratings
from beast.population.routing import Played

RESULTS = 100  # latest games of each pair that count


class Past:
    """A policy as it once was."""

    def __init__(self, net: nn.Module, parent: int, steps: int):
        self.net, self.acting, self.parent, self.steps = net, acting_copy(net), parent, steps
        self.written = Fence(next(net.parameters()).device)  # by the thread that trains, for the one that acts
        self.written.set()


class Population:
    """Of N nets for each kind of agents, kind i has the live policies i·N to i·N+N-1, which learn.

    Every `every` steps of a live policy its weights are frozen as a past one, whose number is used once. When there are
    more than `size` of a kind, and than two of each parent, every second one of each parent is dropped and `every`
    doubles for that kind, so that the rest covers the run evenly. `at_once` of those of a kind may be drawn, others
    every quarter of `every`. A game that has begun is played to its end, also by a policy that was dropped meanwhile.
    """

    def __init__(
        self, nets: list[nn.Module], every: int, size: int, at_once: int, random: np.random.Generator,
        num_kinds: int = 1,
    ):  # fmt: skip
        self._each, self._num_kinds = len(nets) // num_kinds, num_kinds
        self._drawn: list[int] = []
        self._nets, self._size, self._at_once, self._random = nets, size, at_once, random
        self._every = [every] * num_kinds
        self._all: dict[int, Past] = {}  # a dropped one may still play a game
        self._kept: list[int] = []
        self._dropped: set[int] = set()  # at the last time that policies were
        self._next_number, self._frozen_at, self._drawn_at = len(nets), [0] * len(nets), [0] * num_kinds
        self.results: dict[tuple[int, int], deque[float]] = {}  # of the first one, newest last: 1, 0.5 or 0

    def net(self, number: int) -> nn.Module:
        """A past policy's, to act with."""
        past = self._all[number]
        past.written.wait()
        return past.acting

    def live(self, kind: int = 0) -> list[int]:
        """The policies of a kind of agents that learn."""
        return list(range(kind * self._each, (kind + 1) * self._each))

    def past(self, kind: int = 0) -> list[int]:
        """The past policies of a kind of agents that may be drawn now."""
        return [number for number in self._drawn if self.kind_of(number) == kind]

    def kind_of(self, number: int) -> int:
        """The kind of agents that a policy plays, -1 if there is no such policy."""
        if number in self._all:
            number = self._all[number].parent
        return number // self._each if 0 <= number < len(self._nets) else -1

    def grow(self, policy: int, steps: int, playing: Set[int] = frozenset()) -> None:
        """Freeze a live policy's weights after so many steps of it, if that is due, and draw who may be `past`.
        `playing` are the policies of the games that go on."""
        kind = self.kind_of(policy)
        if not self._every[kind]:
            return
        if steps - self._frozen_at[policy] >= self._every[kind]:
            self._frozen_at[policy] = steps
            self._free(playing)
            number, self._next_number = self._next_number, self._next_number + 1
            self._all[number] = Past(own_copy(self._nets[policy]).requires_grad_(False), policy, steps)
            self.inherit(policy, number)
            self._kept.append(number)
            if len(self._of_kind(kind)) > max(self._size, 2 * self._each):
                self._thin_out(kind)
        if steps - self._drawn_at[kind] >= self._every[kind] / 4 or not self.past(kind):
            self._drawn_at[kind] = steps
            self._draw(kind)

    def _of_kind(self, kind: int) -> list[int]:
        return [number for number in self._kept if self.kind_of(number) == kind]

    def _thin_out(self, kind: int) -> None:
        self._every[kind] *= 2
        for parent in self.live(kind):
            own = [number for number in self._kept if self._all[number].parent == parent]
            dropped = own[-2::-2]  # the newest one stays
            self._kept = [number for number in self._kept if number not in dropped]

    def _free(self, playing: Set[int]) -> None:
        """Forget the nets of policies that were dropped so long ago that no game can begin with them."""
        for number in self._dropped - playing - {*self._drawn}:
            del self._all[number]
        self._dropped = {*self._all} - {*self._kept}

    def _draw(self, kind: int) -> None:
        kept = self._of_kind(kind)
        chosen = self._random.choice(kept, min(self._at_once, len(kept)), replace=False).tolist() if kept else []
        others = [number for number in self._drawn if self.kind_of(number) != kind]
        self._drawn = others + sorted(chosen)  # at once: games of another thread begin meanwhile

    def inherit(self, parent: int, child: int) -> None:
        """A policy that has another one's weights begins with its results."""
        for pair in [pair for pair in self.results if child in pair]:
            del self.results[pair]
        for (first, second), results in list(self.results.items()):
            if first == parent and second != child:
                self.results[child, second] = deque(results, maxlen=RESULTS)
            if second == parent and first != child:
                self.results[first, child] = deque(results, maxlen=RESULTS)

    def record(self, games: list[list[Played]]) -> None:
        """Note who beat whom: for each two seats of a game, the one with the higher score."""
        for game in games:
            for one in game:
                for other in (other for other in game if other.policy != one.policy):
                    point = 0.5 + 0.5 * float(np.sign(one.score - other.score))
                    self.results.setdefault((one.policy, other.policy), deque(maxlen=RESULTS)).append(point)

    def payoff(self) -> dict[str, Any]:
        """Who has won how many points of how many games against whom, and the ratings that follow (ratings.py)."""
        numbers = [*range(len(self._nets)), *self._kept]
        points, games = np.zeros((2, len(numbers), len(numbers)))
        for i, first in enumerate(numbers):
            for j, second in enumerate(numbers):
                results = self.results.get((first, second), ())
                points[i, j], games[i, j] = sum(results), len(results)
        of_past = {number: self._all[number] for number in self._kept}
        return {
            "policies": numbers,
            "parents": [of_past[n].parent if n in of_past else None for n in numbers],
            "steps": [of_past[n].steps if n in of_past else None for n in numbers],
            "ratings": ratings(points).tolist(), "points": points.tolist(), "games": games.astype(int).tolist(),
        }  # fmt: skip

    def state_dict(self) -> dict:
        kept = {*range(len(self._nets)), *self._kept}
        return {
            "every": list(self._every), "next_number": self._next_number, "past": list(self._drawn),
            "frozen_at": list(self._frozen_at), "drawn_at": list(self._drawn_at),
            "draws": self._random.bit_generator.state,
            "kept": [
                {"number": number, "parent": past.parent, "steps": past.steps, "net": past.net.state_dict()}
                for number, past in self._all.items()
                if number in kept
            ],
            "results": [[*pair, list(x)] for pair, x in self.results.items() if kept.issuperset(pair)],
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned."""
        self._every, self._next_number, self._drawn = list(state["every"]), state["next_number"], list(state["past"])
        self._frozen_at, self._drawn_at = list(state["frozen_at"]), list(state["drawn_at"])
        self._random.bit_generator.state = state["draws"]
        for saved in state["kept"]:
            net = own_copy(self._nets[saved["parent"]]).requires_grad_(False)
            net.load_state_dict(saved["net"])
            self._all[saved["number"]] = Past(net, saved["parent"], saved["steps"])
        self._kept = [saved["number"] for saved in state["kept"]]
        self.results = {(a, b): deque(results, maxlen=RESULTS) for a, b, results in state["results"]}
