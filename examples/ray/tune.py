"""Search for flags on a Ray cluster, with several seeds of each setting.

    python examples/ray/tune.py --settings 8 --seeds 3 --root /shared/search \
        -- monobeast.py --env CartPole-v1 --total_steps 30000
    ray job submit --working-dir . -- python examples/ray/tune.py …

Each seed of a setting is a run and a process of its own, `setting0-seed1` …; the same command resumes them. ASHA ends
runs that are worse than most after as many steps. Edit SPACE for other flags.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for `beast`

from beast.run.metrics import read_rows  # noqa: E402

SPACE = {"learning_rate": tune.loguniform(1e-4, 1e-2), "entropy_cost": tune.loguniform(1e-3, 1e-1)}
RETURN = "charts/episodic_return"  # the mean of the last 100 games


def train(words: list[str], metrics: Path) -> None:
    """Run a training and report each row of its metrics."""
    # When Ray ends the trial, this thread is gone and the program gets SIGTERM.
    training, num_told = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", sys.executable, *words]), 0
    try:
        is_over = False
        while not is_over:
            is_over = training.poll() is not None  # before the last rows are read
            rows = read_rows(metrics)[1] if metrics.exists() else []
            for row in rows[num_told:]:
                if row[RETURN]:  # none before the first game has ended
                    tune.report({"step": int(row["step"]), "mean_return": float(row[RETURN])})
            num_told = len(rows)
            time.sleep(1)
    finally:
        training.terminate()
    if training.returncode:
        raise RuntimeError(f"{' '.join(words)} has ended with {training.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=8, help="points of SPACE to try (8)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--cpus", type=float, default=2, help="CPUs of a run (2)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a run (0)")
    parser.add_argument("--grace_steps", type=int, default=10_000, help="before ASHA ends a run (10000)")
    parser.add_argument("--root", required=True, help="directory of the runs, a whole path that all nodes see")
    parser.add_argument("command", nargs="+", help="after --: the program and its other flags")
    options = parser.parse_args()
    random, root = np.random.default_rng(0), Path(options.root)  # the same settings each time
    settings = [{name: x.sample(random_state=random) for name, x in SPACE.items()} for _ in range(options.settings)]

    def run(trial: dict) -> None:
        name = f"setting{trial['setting']}-seed{trial['seed']}"
        flags = {**settings[trial["setting"]], "seed": trial["seed"], "root": root, "name": name}
        train([*options.command, *(f"--{flag}={value}" for flag, value in flags.items())], root / name / "metrics.csv")

    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # commands are relative to where this starts
    found = tune.Tuner(
        tune.with_resources(run, {"cpu": options.cpus, "gpu": options.gpus}),
        param_space={name: tune.grid_search(list(numbers)) for name, numbers in {
            "setting": range(options.settings), "seed": range(1, options.seeds + 1)}.items()},
        tune_config=tune.TuneConfig(
            metric="mean_return", mode="max",
            scheduler=ASHAScheduler("step", max_t=10**12, grace_period=options.grace_steps),
        ),
        run_config=tune.RunConfig(storage_path=str(root / "ray"), name="search"),
    ).fit()  # fmt: skip
    ends = [[(0, -math.inf)] * options.seeds for _ in settings]  # step and return, by setting and seed
    for result in found:
        if metrics := result.metrics:
            at = result.config
            ends[at["setting"]][at["seed"] - 1] = metrics.get("step", 0), metrics.get("mean_return", -math.inf)
    furthest = max(step for seeds in ends for step, _ in seeds) or 1
    # A setting is as good as the mean of its seeds, never as its best one, and one that ASHA ended early is no winner.
    table = [(round(min(ends[i])[0] / furthest, 1), mean(x for _, x in ends[i]), i) for i in range(len(settings))]
    for share, value, i in sorted(table, reverse=True):
        each = ", ".join(f"{x:.2f}" for _, x in ends[i])
        print(f"setting{i}: mean return {value:.2f} ({each}) after {share:.0%} of the steps, {settings[i]}")


if __name__ == "__main__":
    main()
