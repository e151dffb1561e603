"""Presets of r2d2.py: `--preset NAME`, or `Flags(**PRESETS[NAME])` in Python."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # CartPole-v1: 500 in 20 whole games after 80,000 steps with six of ten seeds, else 182 to 481 (docs/r2d2.md).
    # A quarter of the updates, twice the learning rate and rescaled values gave 500, 275 and 101 with three seeds.
    "vector": {
        "num_actors": 1, "group_width": 8, "unroll_length": 5, "trained": 10, "stride": 5, "core": "none",
        "head_size": 128, "normalize_observations": True, "min_fill": 2000, "replay_ratio": 16.0, "batch_width": 8,
        "discount": 0.99, "n_steps": 1, "rescale": False, "priority_exponent": 0.5, "importance_exponent": 0.5,
        "learning_rate": 5e-4, "optimizer_epsilon": 1e-5, "target_period": 50,
    },
    # Kapturowski et al. 2019, with SEED RL's replay ratio; for a GPU, and 29 GB of memory for the replay. Nobody has
    # run it here.
    "paper": {
        "num_actors": 8, "group_width": 16, "unroll_length": 40, "burn_in": 40, "trained": 80, "stride": 40,
        "batch_width": 64, "replay_gb": 29.0, "min_fill": 200_000, "replay_ratio": 0.75, "target_period": 2500,
        "core_size": 512, "head_size": 512, "center_images": False, "discount": 0.997, "learning_rate": 1e-4,
        "optimizer_epsilon": 1e-3, "grad_clip": 80.0, "full_action_space": "on",
    },
}  # fmt: skip
ABOUT = {  # what --help says of each
    "vector": "vectors, and few actions: CartPole",
    "paper": "Atari on a GPU: 256 environments, batches of 64 x 80 steps",
}
