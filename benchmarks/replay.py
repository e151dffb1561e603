"""What the replay costs beside an update: seconds to store a rollout, to draw a batch and to write its priorities.

    python benchmarks/replay.py                               # the paper's batch: 64 sequences of 40 + 80 rows
    python benchmarks/replay.py --batch_width 16 --burn_in 20 --trained 40 --core_size 256 --head_size 256

Random images of 84 x 84 in stacks of 4, on the CPU; medians over the rounds. Prints one line of figures.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from gymnasium import spaces

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import r2d2  # noqa: E402
from beast.envs.rows import EnvSpaces, rollout_fields  # noqa: E402
from beast.feeds.memory import nest_observations  # noqa: E402


@dataclass
class Options:
    """Measure the replay."""

    batch_width: int = 64
    burn_in: int = 40
    trained: int = 80
    core_size: int = 512
    head_size: int = 512
    replay_gb: float = 1.0
    rounds: int = 5
    threads: int = 1
    """Of torch."""


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    flags = r2d2.Flags(
        unroll_length=20, stride=20, batch_width=options.batch_width, burn_in=options.burn_in, trained=options.trained,
        core_size=options.core_size, head_size=options.head_size, replay_gb=options.replay_gb, total_steps=10**9,
        device="cpu",
    )  # fmt: skip
    image = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    env_spaces = EnvSpaces({"obs": image}, spaces.Discrete(6))
    learner = r2d2.make_learner(flags, env_spaces)
    replay = r2d2.make_replay(flags, env_spaces, learner, num_groups=4)
    random, U, K = np.random.default_rng(1), flags.unroll_length, flags.group_width
    arrays = {name: np.zeros((U + 1, K, *shape), dtype) for name, (shape, dtype) in rollout_fields(env_spaces).items()}
    arrays["obs/obs"][...] = random.integers(256, size=arrays["obs/obs"].shape)
    rollout = nest_observations({name: torch.from_numpy(array) for name, array in arrays.items()})
    rollout["episode_step"][...] = 100
    state = learner.net.initial_state(K)
    limiter = r2d2.RatioLimiter(1.0, 1, 0)
    stored = []
    for number in range(4 * (replay.num_blocks + 2)):  # the rings wrap
        rollout["group"][...] = number % 4
        began = time.perf_counter()
        r2d2.store(flags, learner, replay, limiter, rollout, state)
        stored.append(time.perf_counter() - began)
    seconds: dict[str, list[float]] = {"sample": [], "update": [], "priorities": []}
    for _ in range(options.rounds + 1):
        times = [time.perf_counter()]
        sample = replay.sample(flags.batch_width, torch.device("cpu"))
        times.append(time.perf_counter())
        target_q = learner.target(sample.batch, sample.core_state)[0][flags.burn_in :]
        _, priorities = r2d2.update(flags, learner, sample, target_q)
        times.append(time.perf_counter())
        replay.update(sample.ids, sample.generations, priorities.numpy())
        times.append(time.perf_counter())
        for (_, found), begin, end in zip(seconds.items(), times, times[1:]):
            found.append(end - begin)
    found = {name: 1000 * median(values[1:]) for name, values in seconds.items()}  # the first round warms up
    print(
        f"batch of {flags.batch_width} x ({flags.burn_in} + {flags.trained}) rows: sample {found['sample']:.1f} ms, "
        f"update {found['update']:.1f} ms, priorities {found['priorities']:.2f} ms: sampling is "
        f"{100 * found['sample'] / found['update']:.1f} % of an update; a rollout of {U} x {K} steps is stored in "
        f"{1000 * median(stored):.1f} ms; {replay.num_sequences():,} sequences in {replay.num_bytes / 1e9:.2f} GB, "
        f"{1e6 * replay.bytes_of_step / 1e9:.2f} GB a million steps"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
