"""Train a variant stage by stage, as standard input says, so that one run shows what each stage costs the others.

    { sleep 20; echo "+ inference"; sleep 8; echo "+ learning"; sleep 8; } |
        python benchmarks/staged.py monobeast --env BreakoutNoFrameskip-v4 --name staged

A run begins in its first stage, `simulation`: the net gives all actions the same chance, and the learner throws the
rollouts away. With `+ inference` the net chooses the actions; with `+ learning` the learner learns, too; `pause` holds
both until the next line. Where the input ends, so does the run. All else is as in a user's run, data path and metrics
included, where `stats/stage` counts the lines: 0 before the first one, and -1 until every environment has filled a
rollout. A restart of environments does not change that; `stats/env_restarts` tells of it.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import monobeast  # noqa: E402
import r2d2  # noqa: E402
from beast.feeds.actors import GROUPS_PER_ACTOR  # noqa: E402
from beast.learn import published  # noqa: E402
from beast.learn.learner import Counted, Learner, Outcome  # noqa: E402
from beast.learn.published import PublishedWeights  # noqa: E402
from beast.run.training import Training  # noqa: E402

STAGES = ("simulation", "+ inference", "+ learning")
PAUSE = "pause"


class Orders:
    """Which stage it is: the latest of those that `follow` was given."""

    def __init__(self):
        self.number, self.stage, self.is_over, self.error = 0, STAGES[0], False, ""
        self._changed = threading.Condition()

    def follow(self, lines: Iterable[str]) -> None:
        """Obey each line until there are no more, or one that is no order."""
        for line in lines:
            if line.strip() not in (*STAGES, PAUSE):
                self.error = f"{line.strip()!r} is no stage; it has to be one of {', '.join((*STAGES, PAUSE))}"
                break
            with self._changed:
                self.number, self.stage = self.number + 1, line.strip()
                self._changed.notify_all()
        self.end()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def have_reached(self, stage: str) -> bool:
        """Whether the order is this stage or a later one; waits while it is to pause."""
        with self._changed:
            self._changed.wait_for(lambda: self.stage != PAUSE or self.is_over)
            return self.stage != PAUSE and STAGES.index(self.stage) >= STAGES.index(stage)


def leave_out_inference(orders: Orders) -> None:
    """While it simulates, a net that acts gives all actions the same chance and a value of 1, whatever is observed."""
    make_copy = published.acting_copy

    def staged_copy(net: torch.nn.Module, *options: bool) -> torch.nn.Module:
        acting = make_copy(net, *options)
        forward = acting.forward

        def staged(inputs, core_state):
            if orders.have_reached("+ inference"):
                return forward(inputs, core_state)
            T, B = inputs["done"].shape
            device = inputs["done"].device
            if hasattr(acting, "num_actions"):  # R2D2 takes the action of the highest Q
                outputs = torch.rand(T, B, acting.num_actions, device=device)
            else:
                outputs = torch.zeros(T, B, acting.policy.out_features, device=device)
            return outputs, torch.ones(T, B, device=device), core_state

        acting.forward = staged
        return acting

    published.acting_copy = staged_copy


class LeavingOutLearning:
    """Before the stage `+ learning` an update counts its steps and that is all."""

    def __init__(self, orders: Orders, num_envs: int):
        self._orders, self._num_envs = orders, num_envs
        self._num_running, self._is_learning = 0, False
        # Bad: where a row of metrics holds real updates, too, it is theirs.
        metrics = {"losses/grad_norm": math.nan, "stats/policy_lag_mean": 0.0, "stats/policy_lag_max": 0.0}
        self._nothing = Counted(is_bad=True, lag_max=0.0, metrics=metrics)
        self._update, self._count, self._publish = monobeast.update, Learner.count, PublishedWeights.publish
        self._store = r2d2.store
        monobeast.update, r2d2.store = self._staged, self._staged_store
        self.training: Training | None = None
        Learner.count = lambda *arguments: self._count(*arguments) if self._is_learning else self._nothing
        PublishedWeights.publish = lambda *arguments: self._publish(*arguments) if self._is_learning else None

    def all_are_running(self) -> bool:
        """Whether each of the environments has filled a rollout."""
        return self._num_running >= self._num_envs

    def _staged(self, flags, learner: Learner, batch: dict, core_state: tuple) -> Outcome | None:
        if self._learns_from(batch):
            return self._update(flags, learner, batch, core_state)
        learner.steps += int(learner.measure(batch).steps)
        return None

    def _staged_store(self, flags, learner: Learner, replay, limiter, rollout: dict, core_state: tuple) -> None:
        """R2D2 makes its updates when the replay has got new rows; what is not stored leads to none."""
        if self._learns_from(rollout):
            return self._store(flags, learner, replay, limiter, rollout, core_state)
        learner.steps += int(learner.measure(rollout).steps)
        self.training.record(self._nothing)

    def _learns_from(self, rollout: dict) -> bool:
        if not self.all_are_running():
            # Nobody has valued what led to a first observation.
            self._num_running += int((rollout["baseline"][0] == 0).sum())
        self._is_learning = self._orders.have_reached("+ learning")
        return self._is_learning


def mark_stages_and_end(orders: Orders, learning: LeavingOutLearning) -> None:
    """Write the stage into the metrics, and end the run with its orders."""
    run_threads = Training.run_threads

    def staged(self, feed, **loops):
        measure, close = feed.measure, feed.close

        def measure_stage(seconds, shares):
            number = orders.number if learning.all_are_running() else -1
            return {**measure(seconds, shares), "stats/stage": number}

        def end_pause_and_close():
            orders.end()
            close()

        learning.training = self
        feed.measure, feed.close = measure_stage, end_pause_and_close
        return run_threads(self, feed, **loops)

    Training.run_threads, Training.finished = staged, lambda self: orders.is_over


def main(variant: str, arguments: list[str]) -> None:
    import tyro

    module = importlib.import_module(variant)
    flags = tyro.cli(module.Flags, args=arguments, use_underscores=True)
    if getattr(flags, "addresses", None) or getattr(flags, "auto", False):
        sys.exit("error: --addresses and --auto: the number of environments has to be known; give --group_width")
    if variant == "polybeast":
        from beast.run.servers import STREAMS_PER_SERVER  # which needs libbeast

        num_groups = flags.num_servers * STREAMS_PER_SERVER
    else:
        num_groups = flags.num_actors * GROUPS_PER_ACTOR
    if variant == "r2d2":  # the first update may come when each group has a sequence, so that none are in arrears
        rollouts = math.ceil((flags.burn_in + flags.trained) / flags.unroll_length) + 1
        flags.min_fill = rollouts * flags.unroll_length * num_groups * flags.group_width
    orders = Orders()
    leave_out_inference(orders)
    mark_stages_and_end(orders, LeavingOutLearning(orders, num_groups * flags.group_width))
    lines = open(0, closefd=False)  # not sys.stdin, which Python may not close while a thread reads it
    threading.Thread(target=orders.follow, args=[lines], daemon=True).start()
    module.train(flags)
    if orders.error:
        sys.exit(f"error: {orders.error}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
