"""Does it learn faster that slots are handed out just in time? Runs with it and without it in turn, with equal flags.

    python benchmarks/just_in_time.py                  # all runs that the results lack, one after the other: hours
    python benchmarks/just_in_time.py --tasks MinAtar  # those of one task: about a quarter of an hour

Without it, each slot that is free is handed out at once, so that rollouts wait for a learner that is slower than its
actors. The results have a row for each run: the return of its last fifth and of all of it, and how old weights were.
Runs have the machine for themselves: the policy lag depends on how fast actors and learner are.
"""

import argparse
import csv
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from lag import mean, train  # noqa: E402
from learning import TASKS as LEARNING  # noqa: E402

from beast.machine import cpu_model, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "just-in-time.csv"
TASKS = {
    "MinAtar": LEARNING["minatar-fast"],
    "Pong": "--env PongNoFrameskip-v4 --num_actors 2 --total_steps 2000000",
}
SEEDS = (1, 2, 3)
KINDS = ("just in time", "at once")
AT_ONCE = """from beast.feeds.slots import Slots
Slots._is_early = lambda slots: False
"""
COLUMNS = (
    *("task", "kind", "seed", "return", "return of all", "steps to half", "measured_lag", "steps/s", "minutes"),
    *("commit", "hardware"),
)


def fork() -> str:
    """The text of monobeast.py that hands out slots at once."""
    text, actors_end = (ROOT / "monobeast.py").read_text(), "\nrun_if_actor(Flags, create_env)\n"
    assert text.count(actors_end) == 1, "monobeast.py has changed"
    return text.replace(actors_end, f"{actors_end}{AT_ONCE}")


def run(task: str, kind: str, seed: int) -> dict:
    """A row of the results."""
    text = fork() if kind == "at once" else (ROOT / "monobeast.py").read_text()
    rows, minutes = train(text, [*TASKS[task].split(), "--log_steps", "20000", "--seed", str(seed)])
    returns = [
        (int(row["step"]), float(row["charts/episodic_return"])) for row in rows if row["charts/episodic_return"]
    ]
    first, last = returns[0][1], mean(rows[-len(rows) // 5 :], "charts/episodic_return")
    half = next((step for step, value in returns if value >= (first + last) / 2), 0)
    return {
        "task": task, "kind": kind, "seed": seed, "return": f"{last:.2f}",
        "return of all": f"{mean(rows, 'charts/episodic_return'):.2f}", "steps to half": half,
        "measured_lag": f"{mean(rows, 'stats/policy_lag_mean'):.1f}",
        "steps/s": f"{int(rows[-1]['step']) / (3600 * float(rows[-1]['hours'])):.0f}", "minutes": f"{minutes:.1f}",
        "commit": code_version(ROOT), "hardware": f"{cpu_model()}, {usable_cores()} cores",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    flags = parser.parse_args()
    done = []
    if RESULTS.exists():
        with open(RESULTS) as file:
            done = [(row["task"], row["kind"], int(row["seed"])) for row in csv.DictReader(file)]
    with open(RESULTS, "a") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for task, seed, kind in itertools.product(flags.tasks, SEEDS, KINDS):
            if (task, kind, seed) not in done:
                row = run(task, kind, seed)
                print(*row.values(), flush=True)
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
