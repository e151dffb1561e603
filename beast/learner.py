"""The learner: a net, its optimizer and the counts that its schedule follows. Model and loss come from the variant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from beast.profile import Laps
from beast.tensors import map_tensors


class Learner:
    """Trains `net` on rollouts; all that a checkpoint holds of the learning is in `state_dict`.

    `net` is a variant's `Net`: it has `action_space` and `observe(observations)`.

    `compute_loss(flags, net, action_space, batch, core_state)` gives a loss and statistics as tensors. `flags` has
    learning_rate, lr_decay, total_steps, grad_clip and max_bad_updates.
    """

    def __init__(self, flags, net: nn.Module, optimizer: torch.optim.Optimizer, compute_loss: Callable):
        self.flags, self.net, self.optimizer, self.compute_loss = flags, net, optimizer, compute_loss
        self.steps = self.updates = self.bad_updates = self.bad_updates_in_a_row = 0
        self.seconds = 0.0  # of training, all starts of the run together
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0
        self.best = -math.inf
        self.laps = Laps()
        self._statistics_queued: tuple[list[str], torch.Tensor, torch.cuda.Event] | None = None  # of the last update

    def learning_rate(self) -> float:
        left = max(1 - self.steps / self.flags.total_steps, 0.0) if self.flags.lr_decay == "linear" else 1.0
        return self.flags.learning_rate * left

    def update(self, batch: dict, core_state: tuple) -> dict[str, float]:
        """One step of the optimizer on rollouts [T+1, B, …]. A NaN or Inf in loss or gradients leaves all weights
        alone; FloatingPointError after too many of them in a row.

        Returns the statistics. On a GPU they are those of the update before (empty if `settle` has had them), counts
        and the learning rate's schedule are as late, and `observe` sees the images of bad updates, too: the host never
        waits for what it has just queued.
        """
        flags = self.flags
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        with self.net.register_forward_hook(lambda *_: self.laps.lap("forward")):
            loss, stats = self.compute_loss(flags, self.net, self.net.action_space, batch, core_state)
        self.laps.lap("loss")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.laps.lap("backward")
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), flags.grad_clip or math.inf)
        is_bad = ~(loss.detach().isfinite() & norm.isfinite())
        self._step_unless(is_bad)
        if loss.is_cuda or not is_bad:
            self.net.observe(map_tensors(lambda x: x[-1], batch["obs"]))
        void = ((batch["terminated"] | batch["truncated"]) & ~batch["done"])[:-1]
        lag = (self.updates - batch["policy_version"][1:]).float()
        stats |= {"losses/total_loss": loss.detach(), "losses/grad_norm": norm}
        stats |= {"stats/policy_lag_mean": lag.mean(), "stats/policy_lag_max": lag.max()}
        stats |= {"steps": (~void).sum(), "is_bad": is_bad}
        self.updates += 1
        values = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=loss.device) for x in stats.values()])
        self.laps.lap("optimizer")
        if loss.is_cuda:
            settled = self.settle()
            self.laps.lap("device")
            arrived = torch.empty(len(stats), pin_memory=True).copy_(values, non_blocking=True)
            self._statistics_queued = list(stats), arrived, torch.cuda.current_stream(loss.device).record_event()
        else:
            settled = self._count(dict(zip(stats, values.tolist())))
        if self.bad_updates_in_a_row >= flags.max_bad_updates:
            raise FloatingPointError(
                f"loss or gradients were NaN or Inf in {self.bad_updates_in_a_row} updates in a row "
                f"(--max_bad_updates {flags.max_bad_updates}); the last: {settled}. "
                "Lower --learning_rate or --grad_clip, or try --amp off."
            )
        return settled

    def settle(self) -> dict[str, float]:
        """Wait for the statistics of the update that a GPU has queued and count it; empty if there is none."""
        if self._statistics_queued is None:
            return {}
        (names, values, has_arrived), self._statistics_queued = self._statistics_queued, None
        has_arrived.synchronize()
        return self._count(dict(zip(names, values.tolist())))

    def _step_unless(self, is_bad: torch.Tensor) -> None:
        """The optimizer's step. A fused Adam looks at `is_bad` itself, on its device; for another the host has to."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):  # as torch's own GradScaler asks
            self.optimizer.grad_scale, self.optimizer.found_inf = None, is_bad.float()
            self.optimizer.step()
        elif not is_bad:
            self.optimizer.step()

    def _count(self, stats: dict[str, float]) -> dict[str, float]:
        """Count an update by its statistics."""
        self.steps += int(stats.pop("steps"))
        is_bad = bool(stats.pop("is_bad"))
        self.bad_updates += is_bad
        self.bad_updates_in_a_row = self.bad_updates_in_a_row + 1 if is_bad else 0
        return stats

    def record_episodes(self, finished: list[tuple[float, int]]) -> None:
        """Note the return and the length in steps of games that have ended."""
        for episode_return, length in finished:
            self.returns.append(episode_return)
            self.lengths.append(length)
            self.episodes += 1

    def state_dict(self) -> dict:
        """All that a later start needs to go on as if there had been no stop; on a GPU call `settle` first."""
        counts = ("steps", "updates", "bad_updates", "bad_updates_in_a_row", "seconds", "episodes", "best")
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": {name: getattr(self, name) for name in counts},
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        # A fused optimizer takes parameters and moments to lie in memory alike, whatever --channels_last was then.
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                if moment.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter).copy_(moment)
        for name, value in state["counts"].items():
            setattr(self, name, value)
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        torch.set_rng_state(state["rng"])
