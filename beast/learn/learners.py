"""The learners of several policies, which a run takes for one."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from beast.envs.tasks import Task
from beast.learn.learner import Counted, Learner, Measured, Outcome


class Learners(Learner):
    """A learner for each policy. Its counts are sums over them, and its net has all their nets.

    `random` draws who plays whom; a checkpoint has its state, too, and that of `more`, by name.
    """

    def __init__(self, each: list[Learner], random: np.random.Generator, more: dict[str, Any] | None = None):
        super().__init__(nn.ModuleList(learner.net for learner in each), each[0].optimizer, each[0].max_bad_updates)
        self.each, self.random, self.more = each, random, more or {}
        self.nets = [learner.net for learner in each]
        for learner in each:
            learner.laps, learner.updating = self.laps, self.updating

    def count_update(self, policy: int, measured: Measured, outcome: Outcome) -> Counted | None:
        """Count an update of a policy; see `Learner.count`, whose error names the policy here."""
        try:
            counted = self.each[policy].count(measured, outcome)
        except FloatingPointError as error:
            raise FloatingPointError(f"policy {policy}: {error}") from error
        self._sum()
        if counted and len(self.each) > 1:
            counted.metrics.update({f"policy{policy}/{name}": x for name, x in counted.metrics.items()})
        self.bad_inputs = self.each[policy].bad_inputs
        return counted

    def settle(self, next_batch: dict | None = None) -> Counted | None:
        settled = [counted for learner in self.each if (counted := learner.settle(next_batch))]
        self._sum()
        return settled[-1] if settled else None

    def keep_tasks(self, tasks: list[Task]) -> None:
        super().keep_tasks(tasks)
        for learner in self.each:
            learner.keep_tasks(tasks)

    def _sum(self) -> None:
        for name in ("steps", "updates", "bad_updates"):
            setattr(self, name, sum(getattr(learner, name) for learner in self.each))
        self.tasks.steps = [sum(steps) for steps in zip(*(learner.tasks.steps for learner in self.each))]

    def record_games(self, rows: dict) -> None:
        super().record_games({**rows, "counts": rows["policy"] < len(self.each)})  # others are past policies'
        for policy, learner in enumerate(self.each):
            learner.record_games({**rows, "counts": rows["policy"] == policy})

    def best_policy(self) -> tuple[float, int]:
        """The highest mean return of a policy's last 100 games, and its number."""
        return max((learner.best_policy()[0], policy) for policy, learner in enumerate(self.each))

    def numbers(self) -> dict[str, float]:
        of_each = {f"policy{policy}/{name}": x for policy, learner in enumerate(self.each)
                   for name, x in {"stats/steps": learner.steps, **learner.numbers()}.items()}  # fmt: skip
        rates = [learner.optimizer.param_groups[0]["lr"] for learner in self.each]
        found = {**super().numbers(), "charts/learning_rate": float(np.mean(rates))}
        return {**found, **(of_each if len(self.each) > 1 else {})}

    def state_dict(self) -> dict:
        own = super().state_dict()
        del own["optimizer"]
        of_each = [learner.state_dict() for learner in self.each]
        for state in of_each:
            del state["net"], state["rng"]
        more = {name: part.state_dict() for name, part in self.more.items()}
        return {**own, **more, "policies": of_each, "draws": self.random.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        for learner, own in zip(self.each, state["policies"]):
            learner.load_state_dict({**own, "net": learner.net.state_dict(), "rng": state["rng"]})
        vars(self).update(state["counts"])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.tasks.load_state_dict(state.get("tasks", {}))
        self.random.bit_generator.state = state["draws"]
        for name, part in self.more.items():
            part.load_state_dict(state[name])
