"""Population-based training: policies copy better ones, and vary what they are trained with (Jaderberg et al. 2017).

The rules are those of Sample Factory's paper (arXiv 2006.11751, section 4.3 and appendix A.3.1): who copies whom, and
which numbers follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from beast.errors import InputError

BETA1 = "adam_beta1"  # of the optimizer, no flag of an agent
# A factor changes the distance of these from 1.
BELOW_ONE = {"discount", "vtrace_lambda", BETA1}
TUNABLE = {
    *("learning_rate", "entropy_cost", "baseline_cost", "grad_clip", "ppo_clip", "clip_rho", "clip_pg_rho"),
    *BELOW_ONE,
}


class Rules(NamedTuple):
    """When and how a population changes."""

    start: int  # steps of a policy before the first event
    period: int  # steps of a policy between two events
    fraction: float  # of the policies: the best are kept, the worst may be replaced
    gap_absolute: float  # a policy is replaced if the better one's objective is higher by more than this,
    gap_relative: float  # and by more than this share of the larger one of both
    mutation_rate: float  # probability with which a number changes
    factor: tuple[float, float]  # it is multiplied or divided by a number drawn from here
    window: int  # latest games that make a policy's objective
    min_games: int  # with fewer since its weights were replaced, a policy is young: neither ranked nor touched
    keep_first: bool  # the first policy of a kind keeps the numbers that it was given, or that it copies


class Change(NamedTuple):
    """What an event does to a policy."""

    policy: int
    rank: int | None  # 0 is the best; None: young
    objective: float
    games: int
    what: str  # best, kept, mutated, replaced or young
    donor: int  # whose weights it has afterwards: its own number, unless it is replaced
    values: dict[str, float]  # what it is trained with afterwards


class PBT:
    """The numbers by name that each policy is trained with, and the events that change them."""

    def __init__(
        self, rules: Rules, num_policies: int, defaults: Mapping[str, float], is_valid: Callable[[dict], bool],
        random: np.random.Generator, num_kinds: int = 1,
    ):  # fmt: skip
        """Policies are ranked within their kind of agents. `is_valid(values)` says whether an agent takes such numbers:
        a mutation that it does not take is not made. All policies but the first of each kind begin with mutated
        `defaults`."""
        self._each = num_policies // num_kinds
        self.rules, self._is_valid, self._random = rules, is_valid, random
        self.windows = [deque[float](maxlen=rules.window) for _ in range(num_policies)]
        self.num_events, self.history = 0, list[dict]()  # rows of pbt.csv, one a policy and event
        self.values = [dict(defaults) for _ in range(num_policies)]
        for policy in range(num_policies):
            if not self._keeps(policy):
                self.values[policy] = self._mutate(dict(defaults))

    def record(self, policy: int, objectives: Sequence[float]) -> None:
        """Note the objectives of games that a policy has played. Raises InputError for one that is not finite."""
        if not all(map(math.isfinite, objectives)):
            raise InputError(f"policy {policy}: the objective of a game is {objectives}: give finite numbers")
        self.windows[policy].extend(objectives)

    def is_due(self, steps: int) -> bool:
        """Whether an event is due after so many steps of all policies together."""
        return steps >= len(self.values) * (self.rules.start + self.num_events * self.rules.period)

    def event(self, steps: int = 0) -> list[Change]:
        """Decide, by one snapshot of the objectives, what becomes of each policy after so many steps of all; take the
        new values over."""
        self.num_events += 1
        kinds = [range(first, first + self._each) for first in range(0, len(self.values), self._each)]
        changes = [change for kind in kinds for change in self._changes(kind)]
        for change in changes:
            self.values[change.policy] = change.values
            if change.donor != change.policy:
                self.windows[change.policy].clear()
            told = {name: x for name, x in change._asdict().items() if name != "values"}
            self.history.append({"event": self.num_events, "steps": steps, **told, **change.values})
        return changes

    def _changes(self, kind: range) -> list[Change]:
        """What becomes of the policies of a kind of agents."""
        games = {policy: len(self.windows[policy]) for policy in kind}
        objectives = {policy: float(np.mean(self.windows[policy])) if games[policy] else math.nan for policy in kind}
        old = [policy for policy in kind if games[policy] >= self.rules.min_games]
        ranked = sorted(old, key=lambda policy: (-objectives[policy], policy))
        count = math.ceil(self.rules.fraction * len(ranked))
        best, worst = ranked[:count], ranked[max(count, len(ranked) - count) :]
        changes = []
        for policy in kind:
            rank = ranked.index(policy) if policy in ranked else None
            what, donor, values = "young" if rank is None else "best", policy, dict(self.values[policy])
            if rank is not None and policy not in best:
                if policy in worst:
                    candidate = int(self._random.choice(best))
                    if self._is_better(objectives[candidate], objectives[policy]):
                        donor = candidate
                values = dict(self.values[donor])
                values = values if self._keeps(policy) else self._mutate(values)
                what = "replaced" if donor != policy else "mutated" if values != self.values[policy] else "kept"
            changes.append(Change(policy, rank, objectives[policy], games[policy], what, donor, values))
        return changes

    def _keeps(self, policy: int) -> bool:
        return self.rules.keep_first and policy % self._each == 0

    def _is_better(self, candidate: float, own: float) -> bool:
        gap = candidate - own
        return gap > self.rules.gap_absolute and gap > self.rules.gap_relative * max(abs(candidate), abs(own))

    def _mutate(self, values: dict[str, float]) -> dict[str, float]:
        """Each number alone, in the order of their names, so that one seed makes one series."""
        for name in sorted(values):
            changes, grows = self._random.random(2) < (self.rules.mutation_rate, 0.5)
            factor = self._random.uniform(*self.rules.factor)
            factor = factor if grows else 1 / factor
            new = 1 - (1 - values[name]) * factor if name in BELOW_ONE else values[name] * factor
            if changes and self._is_valid({**values, name: new}):
                values = {**values, name: new}
        return values

    def state_dict(self) -> dict:
        return {
            "num_events": self.num_events, "values": [dict(values) for values in self.values],
            "history": list(self.history),
            "windows": [list(window) for window in self.windows], "draws": self._random.bit_generator.state,
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned."""
        self.num_events, self.values = state["num_events"], [dict(values) for values in state["values"]]
        for window, objectives in zip(self.windows, state["windows"]):
            window.clear()
            window.extend(objectives)
        self.history = list(state["history"])
        self._random.bit_generator.state = state["draws"]
