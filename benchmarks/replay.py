"""What the replay costs beside an update: the time to store a rollout, to draw a batch and to write its priorities.

    python benchmarks/replay.py

Measures R2D2's `paper` preset (64 sequences of 40 + 80 rows) and its defaults, each on one thread of the CPU, with
random images of 84 x 84 in stacks of 4. Writes medians to benchmarks/results/r2d2-replay.md and prints them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from gymnasium import spaces

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import r2d2  # noqa: E402
from beast.envs.rows import nest_observations, rollout_fields  # noqa: E402
from beast.envs.spaces import EnvSpaces  # noqa: E402
from beast.learn.replay import RatioLimiter, make_replay  # noqa: E402
from beast.machine import cpu_model, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402
from r2d2_presets import PRESETS  # noqa: E402

NUM_GROUPS = 4
HEAD = "settings", "an update's sequences", "rollout", "store a rollout, ms", "draw a batch, ms", "update, ms"
HEAD += "write its priorities, ms", "drawing : update", "GB a million steps"


@dataclass
class Options:
    """Measure the replay."""

    rounds: int = 5
    """Updates that are measured."""
    replay_gb: float = 1.0
    output: Path = ROOT / "benchmarks" / "results" / "r2d2-replay.md"


def main(options: Options) -> None:
    commit = code_version(ROOT)  # before anybody edits it
    torch.set_num_threads(1)
    rows = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for name, flags in (("--preset paper", r2d2.Flags(**PRESETS["paper"])), ("the defaults", r2d2.Flags())):
        rows.append(measure(name, replace(flags, replay_gb=options.replay_gb, device="cpu"), options.rounds))
    given = [f"--rounds {options.rounds}"] if options.rounds != Options.rounds else []
    lines = [
        "# What the replay of R2D2 costs beside an update",
        "",
        f"`{' '.join(['python benchmarks/replay.py', *given])}`, {cpu_model()}, {usable_cores()} cores, one thread, "
        f"commit {commit}. Medians of {options.rounds} updates; in a run the batch is drawn beside the update.",
        "",
        *rows,
    ]
    options.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def measure(name: str, flags: r2d2.Flags, rounds: int) -> str:
    """A row of the table."""
    image = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    env_spaces = EnvSpaces({"obs": image}, spaces.Discrete(6))
    learner = r2d2.make_learner(flags, env_spaces)
    sizes = [x.shape[-1] for x in learner.net.initial_state(1)]
    replay = make_replay(replace(flags, total_steps=10**9), env_spaces, sizes, NUM_GROUPS, learner.random)
    random, U, K = np.random.default_rng(1), flags.unroll_length, flags.group_width
    arrays = {name: np.zeros((U + 1, K, *shape), dtype) for name, (shape, dtype) in rollout_fields(env_spaces).items()}
    images = random.integers(256, size=(U + 4, K, 84, 84), dtype=np.uint8)
    images[:3] = 0  # before the first of a game
    arrays["obs/obs"][...] = np.stack([images[age : age + U + 1] for age in range(4)], axis=2)
    arrays["episode_step"][...] = np.arange(U + 1)[:, None]
    rollout = nest_observations({name: torch.from_numpy(array) for name, array in arrays.items()})
    state = learner.net.initial_state(K)
    limiter = RatioLimiter(1.0, 1, 0)
    stored = []
    for number in range(NUM_GROUPS * (replay.num_blocks + 2)):  # the rings wrap
        rollout["group"][...] = number % NUM_GROUPS
        rollout["episode_step"] += U if number and number % NUM_GROUPS == 0 else 0
        began = time.perf_counter()
        r2d2.store(flags, learner, replay, limiter, rollout, state)
        stored.append(time.perf_counter() - began)
    laps = []
    for _ in range(rounds + 1):
        times = [time.perf_counter()]
        sample = replay.sample(flags.batch_width, torch.device("cpu"))
        times.append(time.perf_counter())
        target_q = learner.target(sample.rows, sample.core_state)[0][flags.burn_in :]
        _, priorities = r2d2.update(flags, learner, r2d2.Batch(sample, target_q))
        times.append(time.perf_counter())
        replay.update(sample.ids, sample.generations, priorities.numpy())
        times.append(time.perf_counter())
        laps.append(np.diff(times))
    drawing, update, writing = 1000 * np.median(laps[1:], axis=0)  # the first round warms up
    sizes = f"{flags.batch_width} x ({flags.burn_in} + {flags.trained})", f"{U} x {K}"
    times = f"{1000 * median(stored):.2f}", f"{drawing:.2f}", f"{update:.1f}", f"{writing:.2f}"
    shares = f"{100 * drawing / update:.1f} %", f"{replay.bytes_of_step / 1e3:.2f}"
    return f"| {' | '.join([name, *sizes, *times, *shares])} |"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
