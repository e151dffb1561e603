"""Measures each stage of a run alone on this machine, and chooses the settings that follow from it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from beast.device import choose_device, wait_for
from beast.envs.rows import rollout_fields, written_by
from beast.envs.spaces import EnvSpaces, random_actions
from beast.feeds.actor import Actor
from beast.feeds.memory import RolloutMemory
from beast.feeds.slots import even_policy_lag
from beast.files import read_json, same_directory
from beast.learn.distributions import distribution
from beast.learn.learner import Learner
from beast.learn.nests import columns, join, map_tensors
from beast.learn.published import acting_copy, compiled
from beast.machine import usable_cores
from beast.run.directory import as_argument

TUNED = ("num_actors", "group_width", "num_slots", "amp", "learner_threads", "compile")  # the flags that are chosen
WIDTHS = (8, 16, 32, 64)  # group widths to measure
SECONDS = 1.0  # of each measurement, after its warm-up
# MonoBeast on Atari with 64 and more environments reached 0.81 to 0.96 of the steps/s that two cores can do if nothing
# waits (benchmarks/results).
WORK_CONSERVATION = 0.8
TIE_FRACTION = 0.95  # settings that reach this fraction of the best prediction tie; the least policy lag decides


class Cost(NamedTuple):
    """Seconds per agent step: wall time, and CPU time of all threads."""

    wall: float
    cpu: float


class Setting(NamedTuple):
    """Flags, the costs of the stages "env", "inference" and "learner", and the agent steps/s that follow from them."""

    flags: Any
    costs: dict[str, Cost]
    steps_per_second: float
    bottleneck: str


class Stages:
    """The stages of a run, each measured alone for `seconds`: stepping environments, choosing actions, learning."""

    def __init__(self, flags, create_env: Callable, spaces: EnvSpaces, seconds: float):
        self.flags, self._seconds = flags, seconds
        num_slots = max(flags.batch_width // flags.group_width, 1)
        memory = RolloutMemory(rollout_fields(spaces), num_slots, flags.unroll_length, flags.group_width)
        self._actions, self._masks = memory.arrays["action"], memory.arrays.get("obs/action_mask")
        self._choose = partial(random_actions, spaces.action, flags.group_width, np.random.default_rng(flags.seed))
        self._allowed: np.ndarray | None = None  # the mask of the latest row
        self._actor = Actor(create_env, flags, memory, {0: flags.seed})
        self.rollouts = [map_tensors(torch.from_numpy, memory.rollout(slot)) for slot in range(num_slots)]
        for name in written_by("agent"):
            memory.arrays[name][...] = 0
        uniform = torch.from_numpy(memory.arrays["policy_logits"])
        memory.arrays["action"][...] = distribution(spaces.action, uniform).sample()
        for slot in range(num_slots):
            self._simulate(slot, first_row=0)

    def env(self) -> Cost:
        """Stepping one group with random actions."""
        return self._measure(lambda: self._simulate(0))

    def inference(self, net: nn.Module) -> Cost:
        """Choosing one group's actions, row by row."""
        net = acting_copy(net, self.flags.compile)
        device = next(net.parameters()).device
        rollout = {name: self.rollouts[0][name] for name in ("obs", "reward", "done", "action")}
        state = map_tensors(lambda x: x.to(device), net.initial_state(self.flags.group_width))

        @torch.no_grad()
        def infer() -> None:
            for row in range(1, self.flags.unroll_length + 1):
                inputs = join([map_tensors(lambda x: x[row : row + 1], rollout)], device)
                distribution(net.action_space, net(inputs, state)[0]).sample()
            wait_for(device)

        return self._measure(infer)

    def learning(self, learner: Learner, update: Callable, num_threads: int = 1) -> Cost:
        """Updates on one group's rollout, or on as many rollouts as a batch needs.

        With the flag `compile` the learner's net stays compiled, and cannot be copied any more.
        """
        if self.flags.compile:
            learner.net.forward = compiled(learner.net.forward, dynamic=False)
        B, device = self.flags.batch_width, next(learner.net.parameters()).device
        state = map_tensors(lambda x: x.to(device), learner.net.initial_state(B))

        def learn() -> None:
            rollout = join(self.rollouts, device)
            for first in range(0, rollout["done"].shape[1], B):
                batch = columns(rollout, first, B)
                learner.count(learner.measure(batch), update(self.flags, learner, batch, state))
            wait_for(device)

        return self._measure(learn, len(self.rollouts), num_threads)

    def close(self) -> None:
        self._actor.close()

    def _simulate(self, slot: int, first_row: int = 1) -> None:
        for row in range(first_row, self.flags.unroll_length + 1):
            if self._allowed is not None:  # an environment may raise where its mask is not obeyed
                self._actions[slot, row] = self._choose(self._allowed)
            self._actor.write_row(0, slot, row)
            if self._masks is not None:
                self._allowed = self._masks[slot, row]

    def _measure(self, stage: Callable, num_rollouts: int = 1, num_threads: int = 1) -> Cost:
        """Medians over calls of `stage`, each of which handles `num_rollouts` rollouts of a group."""
        torch.set_num_threads(num_threads)
        stage()  # warm-up
        times = [(time.perf_counter(), time.process_time())]
        while len(times) == 1 or times[-1][0] < times[0][0] + self._seconds:
            stage()
            times.append((time.perf_counter(), time.process_time()))
        steps = num_rollouts * self.flags.group_width * self.flags.unroll_length
        return Cost(*(np.median(np.diff(times, axis=0), axis=0) / steps).tolist())


def settings_of_existing_run(flags):
    """The flags with the TUNED ones of the run of this name; None if it has no checkpoint to resume from."""
    directory = Path(flags.root) / flags.name
    if not (directory / "checkpoint.pt").exists():
        return None
    config = read_json(directory / "config.json", missing={})
    return replace(flags, **{name: config[name] for name in TUNED if name in config})


@same_directory()
def choose(flags, create_env, spaces, make_learner: Callable, update: Callable, validate: Callable) -> Any:
    """The flags with the fastest TUNED for this environment, model and machine. Prints a report of the measurements.

    The functions are the agent's; `validate(flags)` fills in `num_slots`. If the flags ask for `compile`, the chosen
    setting is measured with it, too, and compiles if that is clearly faster. The batch width is not tuned, as it
    changes what is learned.
    """
    device, has_bf16 = choose_device(flags.device, flags.amp)
    cores, is_gpu, B = usable_cores(), device.type == "cuda", flags.batch_width
    precisions = ["auto", "off"] if flags.amp == "auto" and has_bf16 else [flags.amp]
    threads = [1] if is_gpu else [1 << n for n in range(max(cores // 2, 1).bit_length())]
    together = spaces.agents * spaces.tasks
    widths = [K for K in sorted({*WIDTHS, flags.group_width}) if (K % B == 0 or B % K == 0) and K % together == 0]
    # A wider group gives updates that --max_policy_lag would never let it train on.
    widths = [K for K in widths if not flags.max_policy_lag or K // B - 1 <= flags.max_policy_lag]
    plain = replace(flags, compile=False, num_slots=0, stagger=False)  # which may not fit all widths
    learners = {amp: make_learner(replace(plain, amp=amp), spaces) for amp in precisions}
    learning: dict[tuple[str, int], Cost] = {}
    settings = []
    for K in widths:
        with contextlib.closing(Stages(replace(plain, group_width=K), create_env, spaces, SECONDS)) as stages:
            env = stages.env()
            inference = {amp: stages.inference(learner.net) for amp, learner in learners.items()}
            if not learning:  # once: it does not depend on the group width
                learning = {(amp, n): stages.learning(learners[amp], update, n) for amp in precisions for n in threads}
        for (amp, n), cost in learning.items():
            costs = {"env": env, "inference": inference[amp], "learner": cost}
            settings.append(predict(replace(stages.flags, amp=amp, learner_threads=n), costs, cores, is_gpu))
    enough = TIE_FRACTION * max(setting.steps_per_second for setting in settings)
    tied = [setting for setting in settings if setting.steps_per_second >= enough]
    best = min(tied, key=lambda setting: (lag_of(validate(setting.flags)), -setting.steps_per_second))
    if flags.compile:
        compiling = replace(best.flags, compile=True)
        learner, costs = make_learner(compiling, spaces), dict(best.costs)
        with contextlib.closing(Stages(compiling, create_env, spaces, SECONDS)) as stages:
            costs["inference"] = stages.inference(learner.net)
            costs["learner"] = stages.learning(learner, update, compiling.learner_threads)
        settings.append(predict(compiling, costs, cores, is_gpu))
        if TIE_FRACTION * settings[-1].steps_per_second > best.steps_per_second:
            best = settings[-1]
    chosen = validate(replace(best.flags, stagger=flags.stagger))
    print(report(chosen, best, settings))
    return chosen


def predict(flags, costs: dict[str, Cost], cores: int, one_gpu: bool = False) -> Setting:
    """The flags with as many actors as they need, and the speed and bottleneck that follow from the costs."""
    env, inference, learner = costs["env"], costs["inference"], costs["learner"]
    limits = {  # agent steps/s
        "inference": 1 / inference.wall,
        "learner": 1 / learner.wall,
        "all cores together": cores / (env.cpu + inference.cpu + learner.cpu),
    }
    if one_gpu:  # inference and learner share it; a conservative guess, as inference joins groups there
        limits["the GPU"] = 1 / (inference.wall + learner.wall)
    # A quarter more actors than needed, so that nobody waits for them, but no more than keep the cores busy. Where
    # environments themselves wait for something, that is more than one actor a core.
    needed = math.ceil(1.25 * WORK_CONSERVATION * min(limits.values()) * env.wall)
    num_actors = min(needed, math.ceil(cores * max(1.0, env.wall / max(env.cpu, 1e-9))), 1024)
    limits["actors"] = num_actors / env.wall
    bottleneck = min(limits, key=limits.__getitem__)
    return Setting(replace(flags, num_actors=num_actors), costs, WORK_CONSERVATION * limits[bottleneck], bottleneck)


def lag_of(flags) -> int:
    return even_policy_lag(flags.num_slots, flags.group_width, flags.batch_width)


def report(chosen, best: Setting, settings: list[Setting]) -> str:
    """A table of all settings, and what the chosen flags, those of the best one, promise."""
    lines = [" group   amp  threads  compile |    env  inference  learning  ms a step |  steps/s  bottleneck"]
    for setting in settings:
        flags, (env, inference, learner) = setting.flags, (1e3 * cost.wall for cost in setting.costs.values())
        lines.append(
            f"{flags.group_width:6} {flags.amp:>5} {flags.learner_threads:8} {'yes' if flags.compile else 'no':>8} | "
            f"{env:6.3f} {inference:10.3f} {learner:9.3f}            | "
            f"{setting.steps_per_second:8,.0f}  {setting.bottleneck}{'  <-' if setting is best else ''}"
        )
    # How long a group waits for its actions while one group of each actor waits, in an environment's steps.
    K = chosen.group_width
    waits = math.ceil(chosen.num_actors * K * best.costs["inference"].wall / best.costs["env"].wall)
    holds = "holds" if K > waits else "does not hold: actors wait for their actions"
    lines += [
        f"choose {as_arguments(chosen)}",
        f"predicted {best.steps_per_second:,.0f} steps/s; the bottleneck is: {best.bottleneck}",
        f"Sample Factory's rule, environments of an actor / 2 > ceil(t_inference / t_env): {K} > {waits} {holds}",
        f"policy lag where all groups are equally fast: up to {lag_of(chosen)} updates",
    ]
    if not settings[-1].flags.compile:
        lines.append("--compile was not measured: give it to have it measured, which takes a minute or two")
    return "\n".join(lines)


def as_arguments(flags) -> str:
    """The flags of TUNED as they are given on a command line."""
    return " ".join(as_argument(name, getattr(flags, name)) for name in TUNED)
