"""The SLURM jobs of the docs on a real SLURM of one node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from programs import free_ports
from slurm_cluster import slurm
from waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.on_demand  # each waits for the end of a job's time


def job_of(page: str, **replaced: str) -> str:
    """The only job of a page, on one node, for three minutes, of CartPole."""
    (job,) = (
        x for x in re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL) if "#SBATCH" in x
    )
    job = re.sub(r"#SBATCH --(gpus-per-task|mem)=.*\n", "", job)
    job = re.sub(r"--nodes=\d+", "--nodes=1", re.sub(r"--cpus-per-task=\d+", "--cpus-per-task=1", job))
    job = job.replace("--time=04:00:00", "--time=00:03:00").replace("PongNoFrameskip-v4", "CartPole-v1")
    job = re.sub(r"python (\w+\.py)", rf"{sys.executable} {ROOT}/\1", job)
    for old, new in replaced.items():
        assert old in job
        job = job.replace(old, new)
    return job


class Job:
    """A batch job that has been queued."""

    def __init__(self, script: str, place: Path, environment: dict[str, str]):
        self.environment, self.output = environment, place / "output"
        (place / "job").write_text(script)
        words = ["sbatch", "--parsable", "--output", str(self.output), "--open-mode=append", str(place / "job")]
        self.number = subprocess.run(
            words, cwd=place, env=environment, check=True, capture_output=True, text=True
        ).stdout
        self.number = self.number.strip()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.text()), self.text)

    def state(self) -> str:
        words = ["scontrol", "show", "job", self.number]
        shown = subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True).stdout
        return re.search(r"JobState=(\w+)", shown)[1]

    def wait_for_end(self) -> None:
        """Until SLURM has ended it at its time, with code 0."""
        going_on = "PENDING", "RUNNING", "SIGNALING", "COMPLETING"
        wait_until(lambda: self.state() not in going_on, self.text, PATIENCE + 180)
        assert self.state() == "COMPLETED", self.text()


STEPS = r"[1-9][\d,]* steps +\d+ %"


def processes(place: Path, name: str) -> list[psutil.Process]:
    """Those of the jobs in `place` that run this program."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word.endswith(name) for word in process.cmdline()) and process.environ().get(
                "SLURM_SUBMIT_DIR"
            ) == str(place):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_ranks_start_again_where_one_is_killed_end_at_the_jobs_time_and_resume_in_the_next(tmp_path):
    script = job_of("ray.md", **{"--ntasks-per-node=4": "--ntasks-per-node=2", "sleep 10": "sleep 1"})
    script = script.replace('--name "pong"', '--name "pong" --total_steps 100000000 --no_tensorboard')
    with slurm(tmp_path) as environment:
        job = Job(script, tmp_path, environment)
        job.wait_for(STEPS)
        ranks = [each for each in processes(tmp_path, "monobeast.py") if each.environ().get("RANK") == "1"]
        min(ranks, key=lambda process: process.create_time()).kill()
        job.wait_for(rf"(?s)resumed at step [1-9].*{STEPS}")
        job.wait_for_end()
        stops = re.findall(r"stopped at step ([\d,]+)", job.text())
        assert len(stops) == 3 and stops[1] == stops[2] and not processes(tmp_path, "monobeast.py")
        again = Job(script, tmp_path, environment)
        again.wait_for(rf"(?s)stopped at step.*resumed at step {stops[2]}.*{STEPS}")
        subprocess.run(["scancel", "--signal=TERM", again.number], env=environment, check=True)
        again.wait_for_end()
        assert len(set(re.findall(r"stopped at step ([\d,]+)", again.text())[-2:])) == 1


def test_a_job_of_one_node_ends_at_its_time_with_a_checkpoint(tmp_path):
    script = job_of("runs.md").replace('--name "pong"', '--name "pong" --total_steps 100000000 --no_tensorboard')
    with slurm(tmp_path) as environment:
        job = Job(script, tmp_path, environment)
        job.wait_for(STEPS)
        job.wait_for_end()
    assert "stopped at step" in job.text() and "Traceback" not in job.text()
    assert (tmp_path / "runs/pong/checkpoint.pt").exists()


def test_a_learner_with_env_servers_on_the_nodes_trains_and_ends_with_a_checkpoint(tmp_path):
    pytest.importorskip("libbeast")
    (port,) = free_ports(1)
    replaced = {
        "--ntasks-per-node=8": "--ntasks-per-node=4",
        "servers_per_node=4": "servers_per_node=1",
        "4431": str(port),
    }
    script = job_of("polybeast.md", **replaced).replace('--name "pong"', '--name "pong" --root runs --no_tensorboard')
    with slurm(tmp_path) as environment:
        job = Job(script, tmp_path, environment)
        job.wait_for(STEPS)
        subprocess.run(["scancel", "--batch", "--signal=TERM", job.number], env=environment, check=True)
        job.wait_for_end()
        assert "stopped at step" in job.text() and "Traceback" not in job.text(), job.text()
        wait_until(lambda: not processes(tmp_path, "polybeast_env.py"))
    assert (tmp_path / "runs/pong/checkpoint.pt").exists() and not list(tmp_path.glob(".secrets-*"))
