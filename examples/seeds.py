"""Train one seed after the other, and print what each came to.

    python -m examples.seeds --env CartPole-v1 --name cartpole --total_steps 100000 --seeds 1 2 3

Each seed is a run of its own (`cartpole-seed1` …), which the same command resumes; `python plot.py runs/cartpole-seed*`
draws them as one curve. `--preset` works as for monobeast.py. For a sweep over another flag, write another loop around
it.
"""

import sys
from dataclasses import dataclass, replace

import tyro

import monobeast
from beast.errors import exit_with_message
from beast.run.command_line import take_preset
from monobeast_presets import PRESETS


@dataclass
class Sweep:
    flags: tyro.conf.OmitArgPrefixes[monobeast.Flags]
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds, each a run of its own."""


def main() -> None:
    with exit_with_message():
        preset, arguments = take_preset(sys.argv[1:], PRESETS)
    defaults = Sweep(monobeast.Flags(**preset))
    sweep = tyro.cli(Sweep, args=arguments, default=defaults, description=__doc__, use_underscores=True)
    name = sweep.flags.name or "seeds"
    with exit_with_message():
        for seed in sweep.seeds:
            result = monobeast.train(replace(sweep.flags, seed=seed, name=f"{name}-seed{seed}"))
            print(f"seed {seed}: mean return {result.mean_return:.2f} after {result.steps:,} steps, {result.directory}")
            if result.stopped_by:
                break


if __name__ == "__main__":
    main()
