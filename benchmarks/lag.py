"""What policy lag costs, and what corrects for it: returns in MinAtar with weights that are so many updates old.

    python benchmarks/lag.py                  # all runs that the results lack, one on each core: hours
    python benchmarks/lag.py --seeds 1        # those of one seed
    python benchmarks/lag.py --draw           # only the picture

Each run is a fork of monobeast.py in lock step, in which inference gets the weights of so many updates ago.
The results have a row for each run, with the lag that was measured: a rollout's first action is one update older.
"""

import argparse
import csv
import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from beast.machine import cpu_model, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lag.csv"
GAMES = ("Breakout", "SpaceInvaders")
LAGS = (0, 5, 20, 100)  # in updates
SEEDS = (1, 2, 3, 4, 5)
CORRECTIONS = {  # are there importance weights, and the clip of the policy's ratio
    "V-trace and clip": (True, 0.2),
    "clip alone": (False, 0.2),
    "V-trace alone": (True, 0.0),
    "neither": (False, 0.0),
}
STEPS = 600_000
FLAGS = "--deterministic --num_actors 1 --group_width 16 --batch_width 32 --hidden_size 128 --vtrace_lambda 0.95"
FLAGS += f" --entropy_cost 0.02 --learning_rate 2e-3 --normalize_returns off --total_steps {STEPS} --log_steps 20000"
# The fork's edits of monobeast.py.
PUBLISH = "weights.publish(learner.net, learner.updates)"
LATE = """kept.append((copy.deepcopy(learner.net), learner.updates))
            if len(kept) > {lag}:
                weights.publish(*kept.pop(0))"""
START = "    learner = training.learner\n    for batch, core_state in training.rollouts(feed):"
WEIGHTS = {  # of V-trace's targets and of the policy's gradient
    "log_rhos=log_rhos.detach().masked_fill": "log_rhos=torch.zeros_like(log_rhos).masked_fill",
    "ratio.detach().clamp(max=flags.clip_pg_rho) * advantages": "advantages",
}
COLUMNS = ("game", "lag", "correction", "seed", "return", "measured_lag", "entropy", "minutes", "commit")


def fork(lag: int, weigh: bool) -> str:
    """The text of monobeast.py with its edits."""
    edits = {START: START.replace("\n", "\n    kept: list = []\n", 1), PUBLISH: LATE.format(lag=lag)}
    text = (ROOT / "monobeast.py").read_text()
    for old, new in (edits if weigh else edits | WEIGHTS).items():
        assert text.count(old) == 1, f"monobeast.py has changed: {old}"
        text = text.replace(old, new)
    return text


def train(text: str, words: list[str]) -> tuple[list[dict], float]:
    """The rows of metrics of a run of this text as monobeast.py, and its minutes."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place, "monobeast.py")
        script.write_text(text)
        command = [sys.executable, str(script), *words, "--no_tensorboard", "--root", place, "--name", "run"]
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        minutes = (time.monotonic() - began) / 60
        with open(Path(place, "run", "metrics.csv")) as file:
            return list(csv.DictReader(file)), minutes


def mean(rows: list[dict], name: str) -> float:
    values = [float(row[name]) for row in rows if row[name]]
    return sum(values) / len(values)


def run(game: str, lag: int, correction: str, seed: int) -> dict:
    """A row of the results. Its return is the mean of the games that ended in the run's last fifth."""
    weigh, clip = CORRECTIONS[correction]
    words = ["--env", f"MinAtar/{game}-v0", "--ppo_clip", str(clip), *FLAGS.split(), "--seed", str(seed)]
    rows, minutes = train(fork(lag, weigh), words)
    rows = rows[-len(rows) // 5 :]
    names = "charts/episodic_return", "stats/policy_lag_mean", "losses/entropy"
    numbers = *(mean(rows, name) for name in names), minutes
    texts = (f"{x:.{digits}f}" for x, digits in zip(numbers, (2, 1, 3, 1)))
    return dict(zip(COLUMNS, (game, lag, correction, seed, *texts, code_version(ROOT))))


def read() -> list[dict]:
    if not RESULTS.exists():
        return []
    with open(RESULTS) as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def draw(rows: list[dict]) -> None:
    """The mean over seeds at each lag, and their lowest and highest, of the runs that there are."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, len(GAMES), figsize=(10, 4), layout="constrained")
    for plot, game in zip(plots, GAMES):
        for offset, correction in enumerate(CORRECTIONS):
            found: dict[int, list[float]] = {}
            for row in rows:
                if (row["game"], row["correction"]) == (game, correction):
                    found.setdefault(LAGS.index(int(row["lag"])), []).append(float(row["return"]))
            means = {place: sum(each) / len(each) for place, each in sorted(found.items())}
            ranges = [(mean - min(found[place]), max(found[place]) - mean) for place, mean in means.items()]
            x = [place + 0.06 * offset for place in means]
            plot.errorbar(x, list(means.values()), list(zip(*ranges)) or None, marker="o", capsize=3, label=correction)
        plot.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
        plot.set(title=f"MinAtar {game}", xlabel="policy lag in updates", ylabel="mean return", ylim=(0, None))
    plots[0].legend()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    flags = parser.parse_args()
    if not flags.draw:
        make(flags.seeds)
    draw(read())


def make(seeds: list[int]) -> None:
    """Make the runs that the results lack."""
    done = {(row["game"], int(row["lag"]), row["correction"], int(row["seed"])) for row in read()}
    wanted = [(*each, seed) for seed, *each in itertools.product(seeds, GAMES, LAGS, CORRECTIONS)]
    with ThreadPoolExecutor(usable_cores()) as pool, open(RESULTS, "a") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            file.write(f"# command: python benchmarks/lag.py\n# hardware: {cpu_model()}, {usable_cores()} cores\n")
            writer.writeheader()
        for row in pool.map(lambda each: run(*each), [each for each in wanted if each not in done]):
            print(*row.values(), flush=True)
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
