"""The README says nothing that does not run or does not exist."""

import contextlib
import dataclasses
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import monobeast
import plot
import polybeast_env

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import throughput  # noqa: E402

README = (ROOT / "README.md").read_text()
# What other programs than Beast's are given in the README is theirs to check.
BEAST_COMMANDS = re.sub(r"(openssl|srun|#SBATCH)(.|\\\n)*?\n", "", README)
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git has, as a user's fresh clone."""
    path = tmp_path_factory.mktemp("clone")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, files):
        target = path / name.decode()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name.decode()).read_bytes())
    return path


@contextlib.contextmanager
def started(checkout: Path, command: str):
    """A README command, with this interpreter's virtual environment in the place of a new one; ended in any case."""
    words = command.replace(".venv/bin/", f"{sys.prefix}/bin/").split()
    if "\n" in command:  # a block that is pasted into a shell
        words = ["bash", "-e", "-c", command.replace("python ", f"{sys.executable} ")]
    elif words[0] == "make":  # -o: what is installed here is taken as complete
        words += [f"VENV={sys.prefix}", *(f"-o{sys.prefix}/.{stamp}" for stamp in ("train", "test", "libbeast"))]
    process = subprocess.Popen(
        words, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen, pattern: str, seconds: float) -> str:
    """What the process has printed until the pattern was in it."""
    output, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, output):
        assert time.monotonic() < deadline and process.poll() is None, output
        if select.select([process.stdout], [], [], 0.2)[0]:
            output += os.read(process.stdout.fileno(), 65536).decode()
    return output


@pytest.mark.parametrize("command, name", [("make train", "pong"), ("make train-poly", "pong-poly")])
def test_make_train_trains_pong_stops_on_ctrl_c_and_resumes(checkout, command, name):
    assert command in COMMANDS
    if "poly" in command:
        libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
        shutil.copy(libbeast.__file__, checkout)
    for expected in (r"steps/s", r"resumed at step [1-9]"):
        with started(checkout, command) as process:
            output = read_until(process, r"[1-9][\d,]* steps +\d+ %", seconds=120)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: make and the program both get it
            output += process.communicate(timeout=60)[0].decode()
        assert re.search(expected, output) and "stopped at step" in output, output
        assert "Traceback" not in output
    assert (checkout / "runs" / name / "checkpoint.pt").exists()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("make train", "make train-poly", "make test")])
def test_the_commands_for_a_trained_run_work(checkout, command):
    run = checkout / "runs" / "pong"
    assert (run / "checkpoint.pt").exists(), "needs the test above"
    if "plot" in command:  # which needs finished games: the metrics of a committed run
        (run / "metrics.csv").write_bytes((ROOT / "benchmarks" / "results" / "cartpole-seed1.csv").read_bytes())
    with started(checkout, command.replace("--episodes 10", "--episodes 1")) as process:
        if "tensorboard" in command:  # serves until it is stopped
            read_until(process, r"http://", seconds=60)
            return
        output = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0, output


def test_two_hosts_by_hand_train_as_the_readme_says(checkout):
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
    shutil.copy(libbeast.__file__, checkout)
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make a certificate with")
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = str(unused.getsockname()[1])
    blocks = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "hostA" in block]
    # This machine is both hosts, so the files need no copying.
    env_host, learner = (block.replace("hostA", "localhost").replace("4431", port) for block in blocks)
    with started(checkout, env_host) as server:
        read_until(server, rf"{port}", seconds=60)
        with started(checkout, learner) as process:
            read_until(process, r"[1-9][\d,]* steps +\d+ %", seconds=120)
            os.killpg(process.pid, signal.SIGINT)
            output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 0 and "stopped at step" in output, output
        assert server.poll() is None  # it waits for the next learner


def test_make_test_is_what_runs_these_tests():
    assert "make test" in COMMANDS and "make test" in (ROOT / ".ci" / "run").read_text()
    recipe = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest" in recipe and "ruff" in recipe


def test_every_flag_that_the_readme_names_exists():
    programs = (monobeast.Flags, plot.Flags, throughput.Options)
    known = {field.name for flags in programs for field in dataclasses.fields(flags)}
    known |= set(vars(polybeast_env.parse_flags([])))
    known |= set(
        re.findall(r"^    (\w+): ", (ROOT / "polybeast.py").read_text(), re.MULTILINE)
    )  # without libbeast, too
    known |= set(re.findall(r"^    (\w+): ", (ROOT / "benchmarks" / "peers" / "compare.py").read_text(), re.MULTILINE))
    named = set(re.findall(r"--([a-z_]+)", BEAST_COMMANDS)) - {"help", "logdir"}
    assert len(named) > 20
    assert named <= known, named - known


def test_every_diff_in_the_readme_changes_lines_that_exist():
    diffs = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert len(diffs) == 3
    source = [line.strip() for line in (ROOT / "monobeast.py").read_text().splitlines()]
    for diff in diffs:
        for line in diff.splitlines():
            words = line.strip()
            if words and not words.startswith("+"):
                assert words.lstrip("-").strip() in source, line
