"""The learner: a net, its optimizer, what they have done so far, and the weights that it hands to inference."""

from __future__ import annotations

import math
import threading
from collections import deque

import torch
from torch import nn

from beast.clock import Laps
from beast.envs.rows import is_final


class Learner:
    """A net and its optimizer, with counts of steps, updates and games. The agent's file has the update itself."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, max_bad_updates: int):
        self.net, self.optimizer, self.max_bad_updates = net, optimizer, max_bad_updates
        self.steps = self.updates = self.bad_updates = self.bad_updates_in_a_row = 0
        self.seconds = 0.0  # of training, all starts of the run together
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0
        self.best = self.best_eval = -math.inf  # mean return of the last 100 games, and of an evaluation
        self.first_env, self.group_width = 0, 1  # of the rollout in hand: its first environment, counted in its group
        self.bad_inputs = ""  # NaN and Inf that the environments gave to the latest bad updates
        self._batch: dict = {}  # the rollout in hand
        self._queued: tuple[dict, int, int] | None = None  # the rollout whose statistics are on their way
        self.laps = Laps()
        self.updating = threading.Lock()  # whoever holds it sees a learner between two updates
        self._on_their_way: tuple[list[str], torch.Tensor, torch.cuda.Event] | None = None  # a GPU's statistics

    def measure(self, batch: dict) -> dict[str, torch.Tensor]:
        """Steps in `batch` [T+1, B, …] and their policy lag in updates, on the device. The update may edit its batch:
        call this before it."""
        self._batch = batch
        final = is_final(batch["done"], batch["terminated"], batch["truncated"])[:-1]
        lag = (self.updates - batch["policy_version"][1:]).float()
        return {"stats/policy_lag_mean": lag.mean(), "stats/policy_lag_max": lag.max(), "steps": (~final).sum()}

    def count(self, stats: dict[str, torch.Tensor]) -> dict[str, float]:
        """Count an update by its statistics, scalar tensors, and return them as numbers.

        `steps` is how many it trained on, `is_bad` that it was skipped. On a GPU the numbers are those of the update
        before (empty if `settle` has had them), so the host never waits for what it has just queued. Raises
        FloatingPointError after `max_bad_updates` bad updates in a row.
        """
        self.updates += 1
        device = stats["steps"].device
        values = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=device) for x in stats.values()])
        self.laps.lap("optimizer")
        if device.type == "cuda":
            numbers = self.settle()
            self.laps.lap("device")
            arrived = torch.empty(len(stats), pin_memory=True).copy_(values, non_blocking=True)
            self._on_their_way = list(stats), arrived, torch.cuda.current_stream(device).record_event()
            # When they arrive its slot may hold newer rows.
            self._queued = {**self._batch, "group": self._batch["group"].clone()}, self.first_env, self.group_width
        else:
            numbers = self._count(dict(zip(stats, values.tolist())))
        if numbers and self.bad_updates_in_a_row >= self.max_bad_updates:
            remedy = "Lower --learning_rate or --grad_clip, or try --amp off, and resume the run."
            if self.bad_inputs:
                remedy = f"The environments gave what no net can learn from: {self.bad_inputs}. Mend them, and resume."
            raise FloatingPointError(
                f"loss or gradients were NaN or Inf in {self.bad_updates_in_a_row} updates in a row "
                f"(--max_bad_updates {self.max_bad_updates}); the last: {numbers}. {remedy}"
            )
        return numbers

    def settle(self) -> dict[str, float]:
        """Wait for the statistics of the update that a GPU has queued and count it; empty if there is none."""
        if self._on_their_way is None:
            return {}
        (names, values, has_arrived), self._on_their_way = self._on_their_way, None
        has_arrived.synchronize()
        return self._count(dict(zip(names, values.tolist())))

    def _count(self, stats: dict[str, float]) -> dict[str, float]:
        self.steps += int(stats.pop("steps"))
        is_bad = bool(stats.pop("is_bad"))
        self.bad_updates += is_bad
        self.bad_updates_in_a_row = self.bad_updates_in_a_row + 1 if is_bad else 0
        # A GPU has the next rollout in hand by now, which a broken environment may have spoiled, too.
        rollouts = [self._queued, (self._batch, self.first_env, self.group_width)]
        self._queued = None
        described = [describe_non_finite(*each) for each in rollouts if each and is_bad]
        self.bad_inputs = next(filter(None, described), self.bad_inputs if is_bad else "")
        return stats

    def record_episodes(self, finished: list[tuple[float, int]]) -> None:
        """Note the return and the length in steps of games that have ended."""
        self.episodes += len(finished)
        self.returns.extend(episode_return for episode_return, _ in finished)
        self.lengths.extend(length for _, length in finished)

    def state_dict(self) -> dict:
        """All that a later start needs to go on as if there had been no stop; on a GPU call `settle` first."""
        counts = ("steps", "updates", "bad_updates", "seconds", "episodes", "best", "best_eval")
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": {name: getattr(self, name) for name in counts},
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned. Bad updates in a row are counted anew: flags may have changed."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
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
        torch.set_rng_state(state["rng"])


def describe_non_finite(batch: dict, first_env: int, group_width: int) -> str:
    """Each float field of a rollout [T+1, B, …] that holds a NaN or Inf from an environment: its name, the first such
    environment's group and number there, and how many have one; empty if there is none.

    `first_env` is the number of the first column's environment in its group; a batch of any environments has
    `env_number` [T+1, B] instead.
    """
    observed = {f"observation {name!r}": x for kind in ("obs", "final_obs") for name, x in batch.get(kind, {}).items()}
    found = []
    for name, x in {**observed, "reward": batch.get("reward")}.items():
        if x is None or not x.is_floating_point():
            continue
        spoiled = ~x.isfinite().flatten(2).all(-1) if x.dim() > 2 else ~x.isfinite()  # [T+1, B]
        if spoiled.any():
            row, column = (int(index) for index in spoiled.nonzero()[0])
            number, group = (first_env + column) % group_width, int(batch["group"][row, column])
            number = int(batch["env_number"][row, column]) if "env_number" in batch else number
            found.append(
                f"NaN or Inf in {name} of environment {number} in group {group} "
                f"(in {int(spoiled.any(0).sum())} of {spoiled.shape[1]} environments of this update)"
            )
    return "; ".join(found)


def step_unless(optimizer: torch.optim.Optimizer, is_bad: torch.Tensor) -> None:
    """The optimizer's step, skipped if `is_bad`. A fused Adam decides on its device; for others the host waits."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # as torch's own GradScaler asks
        optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()
        optimizer.step()
    elif not is_bad:
        optimizer.step()
