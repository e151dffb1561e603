"""Presets: flags that suit a kind of task, to begin with. `--preset NAME`, or `Flags(**PRESETS[NAME])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beast.errors import InputError

# What --help says of each.
ABOUT = {
    "pixels": "image observations, discrete actions: MinAtar, VizDoom, Crafter",
    "discrete": "vectors, and actions to choose from: CartPole, LunarLander",
    "continuous": "vectors, and actions that are numbers: MuJoCo",
    "memory": "what was seen before decides: MiniGrid",
}

PRESETS: dict[str, dict[str, Any]] = {
    # Three seeds each: MinAtar/Breakout-v0 19.4, 20.7, 24.4 in 2,000,000 steps, VizdoomBasic-v1 80.9, 80.6, 80.4 in
    # 300,000, Parcel-v0 0.82, 0.81, 0.79 in 1,000,000; 20, 13 to 15 and 20 minutes on two cores, two or three runs at a
    # time. Crafter-v0 6.8, 6.8, 7.2 in 500,000; 113 minutes, three runs at a time beside much else.
    "pixels": {
        "batch_width": 32,
        "unroll_length": 32,
        "epochs": 4,
        "minibatches": 8,
        "hidden_size": 256,
        "vtrace_lambda": 0.95,
        "learning_rate": 5e-4,
    },
    # CartPole-v1 500 in 300,000 steps, LunarLander-v3 262, 266, 278 in 1,000,000 (three seeds each; 5 to 9 and 19
    # minutes on two cores, three or four runs at a time).
    "discrete": {
        "batch_width": 32,
        "unroll_length": 32,
        "epochs": 10,
        "minibatches": 8,
        "value_net": "separate",
        "hidden_size": 256,
        "discount": 0.995,
        "vtrace_lambda": 0.98,
        "learning_rate": 5e-4,
        "entropy_cost": 0.01,
    },
    # HalfCheetah-v5 5,270, 2,636, 6,167 and Hopper-v5 1,886, 445, 2,342 in 1,000,000 steps and 7 minutes (three seeds,
    # two runs at a time on two cores). Chosen by the runs of benchmarks/results/continuous-search.csv.
    "continuous": {
        "batch_width": 32,
        "unroll_length": 64,
        "epochs": 10,
        "minibatches": 8,
        "value_net": "separate",
        "hidden_size": 256,
        "initial_std": 0.5,
        "vtrace_lambda": 0.9,
        "learning_rate": 3e-4,
        "entropy_cost": 0.002,
    },
    # MiniGrid-MemoryS7-v0 0.88, 0.98, 0.97 in 1,000,000 steps (three seeds; 0.9 never, after 280,000 and 760,000), 52
    # minutes on two cores, three runs at a time beside much else.
    "memory": {
        "batch_width": 32,
        "unroll_length": 32,
        "epochs": 4,
        "minibatches": 8,
        "hidden_size": 256,
        "core": "lstm",
        "core_size": 128,
        "vtrace_lambda": 0.95,
        "learning_rate": 5e-4,
    },
}


def take(arguments: list[str], known: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The flags of `--preset NAME` among the arguments, and the arguments without it. Raises InputError for a name
    that is not `known`."""
    flags: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != "--preset":
            rest.append(word)
            continue
        name = name if equals else next(words, "")
        if name not in known:
            raise InputError(f"--preset {name}: an unknown name; there are {', '.join(known)}")
        flags |= known[name]
    return flags, rest


def describe(about: Mapping[str, str]) -> str:
    """What --help says of them."""
    lines = [f"    {name:<10}  {what}" for name, what in about.items()]
    return "\n".join(["--preset NAME takes other defaults, for tasks of a kind:", *lines])
