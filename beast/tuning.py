"""What each stage of a run costs by itself on this machine, and the settings that follow from it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from beast import runs
from beast.actors import Actor
from beast.distributions import distribution, policy_width
from beast.learner import Learner
from beast.machine import choose_device
from beast.rollout import RolloutMemory, max_policy_lag
from beast.tensors import columns, join, map_tensors, rollout_fields

# Of the steps/s that the cores could do if nothing ever waited, what runs reach: 0.83 and more on two cores
# (benchmarks/results), and a bit less is promised.
WORK_CONSERVATION = 0.8
SECONDS = 15.0  # of measuring, all settings together
WIDTHS = (8, 16, 32, 64)  # of groups, that are tried
AS_GOOD = 0.95  # of the best prediction: settings that reach it are equally fast, and the least policy lag decides


TUNED = ("num_actors", "group_width", "num_slots", "amp", "learner_threads", "compile")  # the flags that are chosen


@dataclass(frozen=True)
class Cost:
    """Seconds per agent step: as the clock runs, and of all threads' CPU time."""

    wall: float
    cpu: float


class Stages:
    """The stages of a run, one at a time: stepping environments, choosing actions, learning."""

    def __init__(self, flags, create_env: Callable, spaces: tuple[dict, object]):
        """`spaces` are the observation spaces by name and the action space."""
        self.flags = flags
        self._action_space = spaces[1]
        K, num_slots = flags.group_width, max(flags.batch_width // flags.group_width, 1)
        memory = RolloutMemory(rollout_fields(*spaces), num_slots, flags.unroll_length, K)
        self._actor = Actor(create_env, flags, memory, {0: flags.seed})
        self._rollouts = [memory.rollout(slot) for slot in range(num_slots)]
        chances = torch.zeros(flags.unroll_length, K, policy_width(self._action_space))  # all actions alike
        self._actions = distribution(self._action_space, chances).sample().numpy()
        for slot, rollout in enumerate(self._rollouts):
            for name in ("action", "policy_logits", "baseline", "policy_version"):
                rollout[name][...] = 0
            self._actor.write_row(0, slot, 0)
            self._simulate(slot)

    def env(self, seconds: float) -> Cost:
        """Stepping one group with random actions."""
        return self._cost(lambda: self._simulate(0), 1, seconds)

    def inference(self, net: nn.Module, seconds: float) -> Cost:
        """Choosing one group's actions, row by row."""
        net = net.inference_copy()
        if self.flags.compile:
            net.forward = torch.compile(net.forward)
        device, rollout = next(net.parameters()).device, map_tensors(torch.from_numpy, self._rollouts[0])
        rollout = {name: rollout[name] for name in ("obs", "reward", "done", "action")}
        state = tuple(part.to(device) for part in net.initial_state(self.flags.group_width))

        @torch.no_grad()
        def infer() -> None:
            for row in range(1, self.flags.unroll_length + 1):
                inputs = join([map_tensors(lambda x, row=row: x[row : row + 1], rollout)], device)
                distribution(self._action_space, net(inputs, state)[0]).sample()

        return self._cost(infer, 1, seconds, device)

    def learning(self, learner: Learner, seconds: float, num_threads: int = 1) -> Cost:
        """Updates on one group's rollout, or on as many as a batch is wide. With the flag `compile` the learner's net
        stays compiled, so let nobody copy it any more."""
        if self.flags.compile:
            learner.net.forward = torch.compile(learner.net.forward)
        B, device = self.flags.batch_width, next(learner.net.parameters()).device
        state = tuple(part.to(device) for part in learner.net.initial_state(B))

        def learn() -> None:
            rollout = join([map_tensors(torch.from_numpy, rollout) for rollout in self._rollouts], device)
            for first in range(0, rollout["done"].shape[1], B):
                learner.update(columns(rollout, first, B), state)

        return self._cost(learn, len(self._rollouts), seconds, device, num_threads)

    def close(self) -> None:
        """End the environments."""
        self._actor.close()

    def _simulate(self, slot: int) -> None:
        for row in range(1, self.flags.unroll_length + 1):
            self._rollouts[slot]["action"][row] = self._actions[row - 1]
            self._actor.write_row(0, slot, row)

    def _cost(self, stage: Callable, num_rollouts: int, seconds: float, device=None, num_threads: int = 1) -> Cost:
        """Medians over the calls of `stage`, each of them `num_rollouts` rollouts of a group."""
        torch.set_num_threads(num_threads)
        if self.flags.compile:
            stage()
        walls, cpus, deadline = [], [], math.inf
        while not walls or time.perf_counter() < deadline:
            wall, cpu = time.perf_counter(), time.process_time()
            stage()
            if device and device.type == "cuda":
                torch.cuda.synchronize(device)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            if deadline == math.inf:
                deadline = time.perf_counter() + seconds
                if walls[0] < seconds:  # it was the warm-up; a call that takes longer has to do
                    walls, cpus = [], []
        steps = num_rollouts * self.flags.group_width * self.flags.unroll_length
        return Cost(statistics.median(walls) / steps, statistics.median(cpus) / steps)


@dataclass(frozen=True)
class Setting:
    """One way to run, what its stages cost by themselves, and the agent steps/s that it is predicted to reach."""

    flags: dict[str, object]  # all of TUNED but num_slots, which follows from them
    costs: dict[str, Cost]
    steps_per_second: float
    bottleneck: str


def of_the_run(flags):
    """The flags with the setting of the run of this name; None if it has no checkpoint to be resumed from."""
    directory = Path(flags.root) / flags.name
    if not (directory / "checkpoint.pt").exists():
        return None
    config = runs.read_json(directory / "config.json", missing={})
    return replace(flags, **{name: config[name] for name in TUNED if name in config})


def choose(flags, create_env: Callable, spaces: tuple[dict, object], make_learner: Callable, validate: Callable):
    """The flags with the fastest TUNED for this environment, model and machine, and a report of what was measured.

    `make_learner(flags)` makes a new Learner, `validate(flags)` fills in `num_slots`; the rest as for Stages. Takes
    about 40 seconds, or more where environments are slow to make; where the flags ask for `compile`, the chosen setting
    is measured with it, too, which takes a minute or two more, and keeps it if that is clearly faster. The width of an
    update stays: that is a matter of learning.
    """
    cores = runs.usable_cores()
    device, is_bf16 = choose_device(flags.device, flags.amp)
    precisions = ["auto", "off"] if flags.amp == "auto" and is_bf16 else [flags.amp]
    threads = [1 << n for n in range(max(cores // 2, 1).bit_length())] if device.type == "cpu" else [1]
    B = flags.batch_width
    widths = [K for K in sorted({*WIDTHS, flags.group_width}) if K % B == 0 or B % K == 0]
    seconds = SECONDS / (len(widths) * (1 + len(precisions)) + len(precisions) * len(threads))  # warm-ups come on top
    plain = replace(flags, compile=False)
    learners = {amp: make_learner(replace(plain, amp=amp)) for amp in precisions}
    learning: dict[str, dict[int, Cost]] = {}
    settings = []
    for K in widths:
        with contextlib.closing(Stages(replace(plain, group_width=K), create_env, spaces)) as stages:
            env = stages.env(seconds)
            for amp, learner in learners.items():
                inference = stages.inference(learner.net, seconds)
                if amp not in learning:
                    learning[amp] = {n: stages.learning(learner, seconds, n) for n in threads}
                for n, cost in learning[amp].items():
                    costs = {"env": env, "inference": inference, "learner": cost}
                    chosen = {"group_width": K, "amp": amp, "learner_threads": n, "compile": False}
                    settings.append(_predict(chosen, costs, cores, device.type == "cuda"))
    fastest = max(setting.steps_per_second for setting in settings)
    tuned = [
        (setting, validate(replace(flags, num_slots=0, **setting.flags)))
        for setting in settings
        if setting.steps_per_second >= AS_GOOD * fastest
    ]
    best, best_flags = min(tuned, key=lambda pair: (_lag(pair[1]), -pair[0].steps_per_second))
    if flags.compile:
        compiled = replace(best_flags, compile=True)
        learner = make_learner(compiled)
        with contextlib.closing(Stages(compiled, create_env, spaces)) as stages:
            costs = {
                "env": best.costs["env"],
                "inference": stages.inference(learner.net, seconds),
                "learner": stages.learning(learner, seconds, compiled.learner_threads),
            }
        settings.append(_predict({**best.flags, "compile": True}, costs, cores, device.type == "cuda"))
        if AS_GOOD * settings[-1].steps_per_second > best.steps_per_second:
            best = settings[-1]
            best_flags = validate(replace(compiled, num_slots=0, **best.flags))
    return best_flags, _report(best, best_flags, settings)


def _lag(flags) -> int:
    return max_policy_lag(flags.num_slots, flags.group_width, flags.batch_width)


def _predict(chosen: dict[str, object], costs: dict[str, Cost], cores: int, one_gpu: bool = False) -> Setting:
    """What comes of these flags, and the actors that they need."""
    env, inference, learner = (costs[stage] for stage in ("env", "inference", "learner"))
    limits = {  # agent steps/s
        "inference": 1 / inference.wall,
        "learner": 1 / learner.wall,
        "all cores together": cores / (env.cpu + inference.cpu + learner.cpu),
    }
    if one_gpu:  # for both; a conservative guess, as inference joins groups there
        limits["the GPU"] = 1 / (inference.wall + learner.wall)
    # A quarter more than they need to keep up, so that it is not the actors that the others wait for; no more than
    # keep the cores busy, which is more than one a core for environments that wait for something themselves.
    needed = math.ceil(1.25 * WORK_CONSERVATION * min(limits.values()) * env.wall)
    num_actors = min(needed, math.ceil(cores * max(1.0, env.wall / max(env.cpu, 1e-9))), 1024)
    limits["actors"] = num_actors / env.wall
    bottleneck = min(limits, key=limits.get)
    return Setting({**chosen, "num_actors": num_actors}, costs, WORK_CONSERVATION * limits[bottleneck], bottleneck)


def _report(best: Setting, flags, settings: list[Setting]) -> str:
    lines = [" group   amp  threads  compile |    env  inference  learning  ms a step |  steps/s  bottleneck"]
    for setting in settings:
        env, inference, learner = (1e3 * setting.costs[stage].wall for stage in ("env", "inference", "learner"))
        lines.append(
            f"{setting.flags['group_width']:6} {setting.flags['amp']:>5} {setting.flags['learner_threads']:8} "
            f"{'yes' if setting.flags['compile'] else 'no':>8} | "
            f"{env:6.3f} {inference:10.3f} {learner:9.3f}            | "
            f"{setting.steps_per_second:8,.0f}  {setting.bottleneck}{'  <-' if setting is best else ''}"
        )
    # How long a group waits for its actions where one of each actor's groups is waiting, too, in steps of one env.
    K = flags.group_width
    waits = math.ceil(flags.num_actors * K * best.costs["inference"].wall / best.costs["env"].wall)
    holds = "holds" if K > waits else "does not hold: actors wait for their actions"
    lines += [
        "choose " + as_arguments(flags),
        f"predicted {best.steps_per_second:,.0f} steps/s; the bottleneck is: {best.bottleneck}",
        f"Sample Factory's rule, environments of an actor / 2 > ceil(t_inference / t_env): {K} > {waits} {holds}",
        f"policy lag, collected / trained in an update - 1: at most {_lag(flags)} updates",
    ]
    if not settings[-1].flags["compile"]:
        lines.append("--compile was not measured: give it, and it will be, which takes a minute or two more")
    return "\n".join(lines)


def as_arguments(flags) -> str:
    """The flags of TUNED as they are given on a command line."""
    values = {name: getattr(flags, name) for name in TUNED}
    switch = "--compile" if values.pop("compile") else "--no_compile"
    return " ".join([*(f"--{name} {value}" for name, value in values.items()), switch])
