"""Train a variant in stages, so that one run shows what each of them costs the others.

    python benchmarks/staged.py monobeast 8,8,8 --env BreakoutNoFrameskip-v4 --name staged

For 8 seconds from when every environment has filled a rollout, the net gives all actions the same chance and the
learner throws the rollouts away (simulation), for the next 8 the net chooses the actions (+ inference), then the
learner learns, too (+ learning), and the run ends. All else is as in a user's run, data path and metrics included,
where `stats/stage` counts from 0. Fewer numbers leave out the last stages.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from beast.learner import Learner  # noqa: E402
from beast.tensors import PublishedWeights  # noqa: E402
from beast.training import Training  # noqa: E402


class Clock:
    """Which stage it is: the first until `begin` and for its length from there on."""

    def __init__(self, lengths: list[float]):
        self._ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        self._began = 0.0

    def begin(self) -> None:
        self._began = self._began or time.monotonic()

    def stage(self) -> int:
        return sum(time.monotonic() - self._began >= end for end in self._ends) if self._began else 0

    def is_over(self) -> bool:
        return self.stage() == len(self._ends)


def leave_out_inference(net_class: type, clock: Clock) -> None:
    """In stage 0 a forward pass gives all actions the same chance and a value of 1, whatever is observed."""
    forward = net_class.forward

    def staged(self, inputs, core_state):
        if clock.stage() > 0:
            return forward(self, inputs, core_state)
        T, B = inputs["done"].shape
        device = inputs["done"].device
        chances = torch.zeros(T, B, self.policy.out_features, device=device)
        return chances, torch.ones(T, B, device=device), core_state

    net_class.forward = staged


def leave_out_learning(clock: Clock, num_envs: int) -> None:
    """Before stage 2 an update counts its steps and that is all. The first one that completes a rollout of each of
    `num_envs` environments begins the clock."""
    update, publish = Learner.update, PublishedWeights.publish
    num_running = 0

    def staged(self, batch, core_state):
        nonlocal num_running
        if num_running < num_envs:
            num_running += int((batch["baseline"][0] == 0).sum())  # nobody has valued what led to a first observation
            if num_running >= num_envs:
                clock.begin()
        if clock.stage() > 1:
            return update(self, batch, core_state)
        void = ((batch["terminated"] | batch["truncated"]) & ~batch["done"])[:-1]
        self.steps += int((~void).sum())
        return {"losses/grad_norm": 0.0, "stats/policy_lag_mean": 0.0, "stats/policy_lag_max": 0.0}

    Learner.update = staged
    PublishedWeights.publish = lambda *arguments: publish(*arguments) if clock.stage() > 1 else None


def follow(clock: Clock) -> None:
    """Tell the stage in the metrics, and end the run after the last one."""
    conduct = Training.conduct

    def staged(self, works, wake_all, measure, introduction):
        def measure_stage(seconds, shares):
            return {**measure(seconds, shares), "stats/stage": clock.stage()}

        conduct(self, works, wake_all, measure_stage, introduction)

    Training.conduct, Training.finished = staged, lambda self: clock.is_over()


def main(variant: str, lengths: str, arguments: list[str]) -> None:
    import tyro

    module = importlib.import_module(variant)
    clock = Clock([float(length) for length in lengths.split(",")])
    leave_out_inference(module.Net, clock)
    flags = tyro.cli(module.Flags, args=arguments, use_underscores=True)
    is_mono = variant == "monobeast"
    num_groups = (
        flags.num_actors * module.GROUPS_PER_ACTOR if is_mono else flags.num_servers * module.STREAMS_PER_SERVER
    )
    if getattr(flags, "addresses", None) or getattr(flags, "auto", False):
        sys.exit("error: --addresses and --auto: the number of environments has to be known; give --group_width")
    leave_out_learning(clock, num_groups * flags.group_width)
    follow(clock)
    module.train(flags)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
