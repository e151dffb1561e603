"""What resets that take long cost a run, and what `--reset_ahead` gives: runs with and without it, in turn.

    python benchmarks/resets.py --env examples.crafter_env:Crafter-v0 --minutes 3 --rounds 2

Other arguments go to monobeast.py. Shares are of an actor's time after its start, the last row of metrics of each run.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("charts/SPS", "time/actor_reset", "time/actor_step", "time/actor_wait", "stats/learner_wait")


def measure(words: list[str], minutes: float, root: str, name: str) -> dict[str, float]:
    """Means of the metrics of a run of so many minutes over its second half."""
    command = [sys.executable, str(ROOT / "monobeast.py"), *words, "--root", root, "--name", name]
    command += ["--total_minutes", str(minutes), "--log_steps", "500", "--no_tensorboard"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    with open(Path(root, name, "metrics.csv")) as file:
        rows = list(csv.DictReader(file))
    rows = rows[len(rows) // 2 :]
    return {column: sum(float(row[column]) for row in rows) / len(rows) for column in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    flags, words = parser.parse_known_args()
    print("| | steps/s | resets | steps | waiting for actions | learner waits |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for number in range(flags.rounds):
            for label, more in (("", []), ("--reset_ahead", ["--reset_ahead"])):
                found = measure([*words, *more], flags.minutes, root, f"{number}{label}")
                speed, *shares = found.values()
                cells = [f"{speed:,.0f}", *(f"{100 * x:.0f} %" for x in shares)]
                print(f"| {label or 'as it is'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
