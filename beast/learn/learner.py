"""The learner: a net, its optimizer, and what they have done so far."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from beast.clock import Laps
from beast.envs.rows import is_final
from beast.envs.tasks import Task
from beast.learn import ranks
from beast.learn.graphs import Graphs
from beast.learn.records import TaskRecords


class Measured(NamedTuple):
    """A batch before its update."""

    batch: dict  # [T+1, B, …]
    steps: Tensor  # how many it trains on, a scalar on the device
    lag_mean: Tensor  # policy lag in updates
    lag_max: Tensor
    task_steps: dict[str, Tensor] = {}  # of several tasks, by the number of each


class Outcome(NamedTuple):
    """What an optimizer step, or an update of several, came to: scalar tensors on the device."""

    is_bad: Tensor  # bool: a NaN or Inf in loss or gradients, so nothing was learned
    grad_norm: Tensor  # before it was clipped
    metrics: dict[str, Tensor]  # for the log, by name

    def then(self, later: Outcome) -> Outcome:
        """Of two steps of one update: the numbers of the first bad one, or else of the later one."""
        metrics = {name: torch.where(self.is_bad, self.metrics[name], x) for name, x in later.metrics.items()}
        norm = torch.where(self.is_bad, self.grad_norm, later.grad_norm)
        return Outcome(self.is_bad | later.is_bad, norm, metrics)


class Counted(NamedTuple):
    """An update whose numbers have arrived from the device."""

    is_bad: bool
    lag_max: float
    metrics: dict[str, float]


class Learner:
    """A net and its optimizer, with counts of steps, updates and games. The agent's file has the update itself."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, max_bad_updates: int):
        self.net, self.optimizer, self.max_bad_updates = net, optimizer, max_bad_updates
        self.nets = [net]  # several policies have one each (learners.py)
        self.rates = [group["lr"] for group in optimizer.param_groups]  # of the flags, whatever a checkpoint has
        self.steps = self.updates = self.bad_updates = self.bad_updates_in_a_row = 0
        self.agreed_steps: int | None = None  # of rank 0, where there are others
        self.waits: list[float] = []  # of each rank, its seconds without a batch since the start
        self.seconds = 0.0  # of training, all starts of the run together
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0
        self.best = self.best_eval = -math.inf  # mean return of the last 100 games, and of an evaluation
        self.compares_returns = True  # whether the policy with the higher mean return is the better one
        self.bad_inputs = ""  # NaN and Inf that the environments gave to the latest bad updates
        self.tasks = TaskRecords([])
        self._untold: list[ranks.Game] = []  # games of this rank that the others do not know of
        self.laps = Laps()
        self.graphs: Graphs | None = None  # --cuda_graphs
        self.updating = threading.Lock()  # whoever holds it sees a learner between two updates
        # On a GPU: the update whose numbers are on their way, its batch, and the event of their arrival.
        self._on_their_way: tuple[list[str], Tensor, torch.cuda.Event, dict] | None = None

    def keep_tasks(self, tasks: list[Task]) -> None:
        """Keep records of each of these tasks, where they are several."""
        self.tasks = TaskRecords(tasks)

    def call(self, function: Callable, *tensors):
        """`function(*tensors)`, with --cuda_graphs a recording of it (see `Graphs`)."""
        return self.graphs.call(function, *tensors) if self.graphs else function(*tensors)

    @property
    def schedule_steps(self) -> int:
        """Steps for schedules, of all ranks the same; of `steps` a GPU counts an update's earlier at a checkpoint."""
        return self.steps if self.agreed_steps is None else self.agreed_steps

    def measure(self, batch: dict) -> Measured:
        """Steps and policy lag of `batch` [T+1, B, …]. The update may edit its batch: call this before it."""
        steps = ~is_final(batch["done"], batch["terminated"], batch["truncated"])[:-1]
        lag = (self.updates - batch["policy_version"][1:]).float()
        lag_mean = lag.mean()
        if "counts" in batch:
            counts = batch["counts"][1:]  # the other rows have another policy's versions
            lag, steps = lag.where(counts, 0), steps & counts
            lag_mean = lag.sum() / counts.sum().clamp(min=1)
        own = steps.sum(), lag_mean, ranks.of_each(lag.max()), self.tasks.steps_in(batch, steps)
        total_steps, lags, lags_max, of_tasks = ranks.totals(*own)
        return Measured(batch, total_steps, lags / ranks.size(), lags_max.max(), self.tasks.named(of_tasks))

    def count_steps(self, batch: dict, steps: Tensor, some: Tensor) -> int:
        """Count the `steps`, bool [T, B], of all ranks' batches outside of an update, and return the total of `some`
        of them, a scalar."""
        all_steps, all_of_some, of_tasks = ranks.totals(steps.sum(), some, self.tasks.steps_in(batch, steps))
        self.steps += int(all_steps)
        self.tasks.count_steps(self.tasks.named(of_tasks))
        return int(all_of_some)

    def count(self, measured: Measured, outcome: Outcome) -> Counted | None:
        """Count an update, and return its numbers.

        On a GPU they are those of the update before (None if `settle` has had them), so the host never waits for what
        it has just queued. Raises FloatingPointError after `max_bad_updates` bad updates in a row.
        """
        self.updates += 1
        batch, device = measured.batch, measured.steps.device
        named = {"steps": measured.steps, "is_bad": outcome.is_bad}
        named |= {"stats/policy_lag_mean": measured.lag_mean, "stats/policy_lag_max": measured.lag_max}
        named |= {**outcome.metrics, "losses/grad_norm": outcome.grad_norm, **measured.task_steps}
        values = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=device) for x in named.values()])
        self.laps.lap("optimizer")
        if device.type == "cuda":
            counted = self.settle(batch)
            self.laps.lap("device")
            arrived = torch.empty(len(named), pin_memory=True).copy_(values, non_blocking=True)
            has_arrived = torch.cuda.current_stream(device).record_event()
            self._on_their_way = list(named), arrived, has_arrived, batch
        else:
            counted = self._count(dict(zip(named, values.tolist())), [batch])
        if counted and self.bad_updates_in_a_row >= self.max_bad_updates:
            remedy = "Lower --learning_rate or --grad_clip, or try --amp off, and resume the run."
            if self.bad_inputs:
                remedy = f"The environments gave what no net can learn from: {self.bad_inputs}. Mend them, and resume."
            raise FloatingPointError(
                f"loss or gradients were NaN or Inf in {self.bad_updates_in_a_row} updates in a row "
                f"(--max_bad_updates {self.max_bad_updates}); the last: {counted.metrics}. {remedy}"
            )
        return counted

    def settle(self, next_batch: dict | None = None) -> Counted | None:
        """Wait for the numbers of the update that a GPU has queued and count it; None if there is none."""
        if self._on_their_way is None:
            return None
        (names, values, has_arrived, batch), self._on_their_way = self._on_their_way, None
        has_arrived.synchronize()
        # A broken environment may have spoiled the next batch, too, which the learner has by now.
        return self._count(dict(zip(names, values.tolist())), [batch, next_batch or {}])

    def _count(self, numbers: dict[str, float], batches: list[dict]) -> Counted:
        self.steps += int(numbers.pop("steps"))
        self.tasks.count_steps(numbers)
        is_bad = bool(numbers.pop("is_bad"))
        self.bad_updates += is_bad
        self.bad_updates_in_a_row = self.bad_updates_in_a_row + 1 if is_bad else 0
        described = [describe_non_finite(batch) for batch in batches if is_bad]
        self.bad_inputs = next(filter(None, described), self.bad_inputs if is_bad else "")
        return Counted(is_bad, numbers["stats/policy_lag_max"], numbers)

    def record_games(self, rows: dict) -> None:
        """Note return and length in steps of the games that ended in a rollout's `rows`, numpy arrays [T+1, B]; with
        `rows["counts"]`, of those that ended by an action which counts."""
        games = self.tasks.games_in(rows)
        with self.updating:
            self.take_games(games)
            self._untold += games if ranks.size() > 1 else []

    def take_games(self, games: list[ranks.Game]) -> None:
        """Note games that have ended, of this rank or of others."""
        self.episodes += len(games)
        self.returns.extend(game.episode_return for game in games)
        self.lengths.extend(game.length for game in games)
        self.tasks.record_games(games)

    def untold_games(self) -> list[ranks.Game]:
        """Those of this rank since the last call."""
        games, self._untold = self._untold, []
        return games

    def best_policy(self) -> tuple[float, int]:
        """The mean return of the last 100 games, -inf before there are so many, and 0: the number of the policy. Of
        several tasks it is their mean score."""
        if self.tasks.names:
            return self.tasks.score(), 0
        return (float(np.mean(self.returns)) if len(self.returns) == self.returns.maxlen else -math.inf), 0

    def numbers(self) -> dict[str, float]:
        """What a row of metrics says of it, beside its updates."""
        found = {
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"], "stats/bad_updates": self.bad_updates,
            "stats/updates": self.updates, "stats/episodes": self.episodes,
        }  # fmt: skip
        if self.returns:
            found |= {
                "charts/episodic_return": float(np.mean(self.returns)),
                "charts/episodic_length": float(np.mean(self.lengths)),
            }
        return {**found, **self.tasks.numbers()}

    def state_dict(self) -> dict:
        """All that a later start needs to go on as if there had been no stop; on a GPU call `settle` first."""
        counts = ("steps", "updates", "bad_updates", "seconds", "episodes", "best", "best_eval")
        return {
            "net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
            "counts": {name: getattr(self, name) for name in counts},
            "returns": list(self.returns), "lengths": list(self.lengths), "rng": torch.get_rng_state(),
            "tasks": self.tasks.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned. Bad updates in a row are counted anew: flags may have changed."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate
        # A fused optimizer takes parameters and moments to lie in memory alike, whatever --channels_last was then.
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                if moment.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter).copy_(moment)
        vars(self).update({**state["counts"], "bad_updates_in_a_row": 0})  # earlier versions saved these, too
        if not math.isfinite(self.best):  # an infinite return that an earlier version took for the best
            self.best = -math.inf
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.tasks.load_state_dict(state.get("tasks", {}))
        torch.set_rng_state(state["rng"])


def describe_non_finite(batch: dict) -> str:
    """Each float field of a batch [T+1, B, …] that holds a NaN or Inf from an environment: its name, the first such
    environment's group and number there, and how many have one; empty if there is none."""
    observed = {f"observation {name!r}": x for kind in ("obs", "final_obs") for name, x in batch.get(kind, {}).items()}
    found = []
    for name, x in {**observed, "reward": batch.get("reward")}.items():
        if x is None or not x.is_floating_point():
            continue
        spoiled = ~x.isfinite().flatten(2).all(-1) if x.dim() > 2 else ~x.isfinite()  # [T+1, B]
        if spoiled.any():
            first = tuple(spoiled.nonzero()[0])
            found.append(
                f"NaN or Inf in {name} of environment {int(batch['env_number'][first])} in group "
                f"{int(batch['group'][first])} (in {int(spoiled.any(0).sum())} of {spoiled.shape[1]} environments of "
                "this update)"
            )
    return "; ".join(found)


def step_unless(optimizer: torch.optim.Optimizer, is_bad: torch.Tensor) -> None:
    """The optimizer's step, skipped if `is_bad`. A fused Adam decides on its device; for others the host waits."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # as torch's own GradScaler asks
        optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()
        optimizer.step()
    elif not is_bad:
        optimizer.step()
