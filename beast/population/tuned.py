"""What each policy is trained with: its flags, its optimizer's numbers, its coefficients of the terms of a reward."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beast.envs.rows import REWARD_TERMS
from beast.errors import InputError
from beast.files import replace_file
from beast.learn.learners import Learners
from beast.population.pbt import BETA1, PBT, TUNABLE, Rules
from beast.population.routing import Played


class Tuned:
    """`flags` [N] are those of each policy. With --pbt they vary."""

    def __init__(
        self, flags: list, learners: Learners, terms: dict[str, float], validate: Callable, random: np.random.Generator,
        num_kinds: int = 1,
    ):  # fmt: skip
        """`flags` [N] are those of each policy without --pbt. `terms` are the reward's, with the coefficients that it
        is made of; `validate(flags)` raises InputError for flags that the agent does not take. Raises InputError for a
        number that cannot be tuned."""
        self.flags, self._given, self._run = list(flags), list(flags), flags[0]
        self._learners, self._terms, self._validate = learners, terms, validate
        self._rates = [list(learner.rates) for learner in learners.each]
        self._added = torch.zeros(len(self.flags) + 1, len(terms))  # to the coefficients in `terms`, by policy
        self.pbt: PBT | None = None
        if self._run.pbt:
            rules = {name: getattr(self._run, f"pbt_{name}") for name in Rules._fields}
            self.pbt = PBT(Rules(**rules), len(self.flags), self._defaults(), self._is_valid, random, num_kinds)
            learners.more["pbt"] = self.pbt

    def _defaults(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self._run.pbt_tune:
            if name == REWARD_TERMS:
                found |= {f"{REWARD_TERMS}.{term}": x for term, x in self._terms.items()}
            elif name == BETA1:
                group = self._learners.optimizer.param_groups[0]
                found |= {BETA1: group["betas"][0]} if "betas" in group else {}
            elif name in TUNABLE and hasattr(self._run, name):
                found[name] = float(getattr(self._run, name))
            else:
                raise InputError(f"--pbt_tune {name}: give some of {', '.join(sorted({*TUNABLE, REWARD_TERMS}))}")
        return found

    def _is_valid(self, values: dict[str, float]) -> bool:
        try:
            self._validate(self._with(self._run, values))
        except InputError:
            return False
        return 0 <= values.get(BETA1, 0) < 1

    def _with(self, flags: Any, values: dict[str, float]) -> Any:
        return replace(flags, **{name: x for name, x in values.items() if hasattr(flags, name)})

    def apply(self) -> None:
        """Give every policy its numbers. Call it when a checkpoint is loaded, and when policies were copied."""
        if not self.pbt:
            return
        added = torch.zeros_like(self._added)
        for policy, values in enumerate(self.pbt.values):
            learner = self._learners.each[policy]
            self.flags[policy] = self._with(self._given[policy], values)
            ratio = self.flags[policy].learning_rate / self._run.learning_rate
            learner.rates = [rate * ratio for rate in self._rates[policy]]
            for group in learner.optimizer.param_groups if BETA1 in values else ():
                group["betas"] = (values[BETA1], group["betas"][1])
            for index, (term, default) in enumerate(self._terms.items()):
                added[policy, index] = values.get(f"{REWARD_TERMS}.{term}", default) - default
        self._added = added

    def shape(self, row: dict) -> None:
        """Make the reward of a row [1, K] of the coefficients of the policy that acted; past policies have the
        environment's own."""
        added = self._added.to(row["reward"].device)
        row["reward"] += (row[REWARD_TERMS] * added[row["policy"].long().clamp(max=len(self.flags))]).sum(-1)

    def record(self, games: list[list[Played]]) -> None:
        """Note the objectives of games that have ended."""
        if not self.pbt:
            return
        for game in games:
            if len(game) == 1 and self._run.objective == "win":
                continue  # nobody has played against it
            for seat in (seat for seat in game if seat.policy < len(self.flags)):
                best = max((other.score for other in game if other is not seat), default=-np.inf)
                objective = float(seat.score > best) if self._run.objective == "win" else seat.score
                self.pbt.record(seat.policy, [objective])

    def event(self, steps: int) -> list[tuple[int, int]]:
        """The event that is due after so many steps of all policies, if one is: each policy that is replaced, and whose
        weights it gets. Call `apply` when it has them."""
        changes = self.pbt.event(steps) if self.pbt and self.pbt.is_due(steps) else []
        return [(change.policy, change.donor) for change in changes if change.donor != change.policy]

    def write(self, path: Path) -> None:
        """Write pbt.csv: a row for each policy and event."""
        text = io.StringIO()
        rows = self.pbt.history if self.pbt else []
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["event"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(path, lambda file: file.write(text.getvalue().encode()))
