"""Presets of monobeast.py and polybeast.py: `--preset NAME`, or `Flags(**PRESETS[NAME])` in Python."""

from __future__ import annotations

from typing import Any

# Returns are those of three seeds each; docs/results.md has the curves.
PRESETS: dict[str, dict[str, Any]] = {
    # MinAtar/Breakout-v0 19.4, 20.7, 24.4 in 2,000,000 steps, VizdoomBasic-v1 80.9, 80.6, 80.4 in 300,000, Parcel-v0
    # 0.82, 0.81, 0.79 in 1,000,000, Crafter-v0 6.8, 6.8, 7.2 in 500,000.
    "pixels": {
        "batch_width": 32, "unroll_length": 32, "epochs": 4, "minibatches": 8, "hidden_size": 256,
        "vtrace_lambda": 0.95, "learning_rate": 5e-4,
    },
    # CartPole-v1 500 in 300,000 steps, LunarLander-v3 262, 266, 278 in 1,000,000.
    "discrete": {
        "batch_width": 32, "unroll_length": 32, "epochs": 10, "minibatches": 8, "value_net": "separate",
        "hidden_size": 256, "discount": 0.995, "vtrace_lambda": 0.98, "learning_rate": 5e-4, "entropy_cost": 0.01,
    },
    # HalfCheetah-v5 5,270, 2,636, 6,167 and Hopper-v5 1,886, 445, 2,342 in 1,000,000 steps. Chosen by the runs of
    # benchmarks/results/continuous-search.csv.
    "continuous": {
        "batch_width": 32, "unroll_length": 64, "epochs": 10, "minibatches": 8, "value_net": "separate",
        "hidden_size": 256, "initial_std": 0.5, "vtrace_lambda": 0.9, "learning_rate": 3e-4, "entropy_cost": 0.002,
    },
    # MiniGrid-MemoryS7-v0 0.88, 0.98, 0.97 in 1,000,000 steps.
    "memory": {
        "batch_width": 32, "unroll_length": 32, "epochs": 4, "minibatches": 8, "hidden_size": 256, "core": "lstm",
        "core_size": 128, "vtrace_lambda": 0.95, "learning_rate": 5e-4,
    },
    # Games on the GPU: 16 groups, 2,048 environments, an update every 1.25 steps. After CuLE's fastest setting of a GPU
    # (arXiv 1907.08467, table 3), with wider batches and so a higher learning rate. Nobody has run it on a GPU.
    "gpu_atari": {
        "atari_backend": "cuda", "num_actors": 8, "group_width": 128, "batch_width": 128, "unroll_length": 20,
        "stagger": True, "learning_rate": 1e-3,
    },
}  # fmt: skip
ABOUT = {  # what --help says of each
    "pixels": "image observations, discrete actions: MinAtar, VizDoom, Crafter",
    "discrete": "vectors, and actions to choose from: CartPole, LunarLander",
    "continuous": "vectors, and actions that are numbers: MuJoCo",
    "memory": "what was seen before decides: MiniGrid",
    "gpu_atari": "Atari whose games a GPU steps, 2,048 at a time; nobody has run it",
}
