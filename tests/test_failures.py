"""What happens when something dies: real processes, real signals."""

import contextlib
import fcntl
import glob
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from programs import Program
from waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


class Training:
    """A training run as a user starts it, and what it left behind."""

    def __init__(self, tmp_path, *flags: str, code: str = ""):
        self.run = tmp_path / "run"
        command = ["--env", "CartPole-v1", "--root", str(tmp_path), "--name", "run", "--no_tensorboard"]
        command += ["--num_actors", "2", "--group_width", "4", "--batch_width", "4", "--log_steps", "1000", *flags]
        script = ROOT / "monobeast.py"
        if code:  # a fork of the file, in miniature
            script = tmp_path / "fork.py"
            script.write_text(
                f"import sys; sys.path.insert(0, {str(ROOT)!r}); import monobeast\n{code}\nmonobeast.main()"
            )
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "BEAST_TEST_RUN": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.began = time.monotonic()
        self.process = Program([str(script), *command], cwd=tmp_path, env=environment, output=tmp_path / "output")
        self.tmp_path = tmp_path

    def family(self) -> list[psutil.Process]:
        """All processes of this run: the main one, and those that share a mark in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                is_marked = process.environ().get("BEAST_TEST_RUN") == str(self.tmp_path)
                if (is_marked or process.pid == self.process.pid) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def actors(self) -> list[psutil.Process]:
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # it has just ended
                found += [process] if "--beast-actor" in process.cmdline() else []
        return found

    def wait_until_training(self) -> None:
        """Until it has started and two rows of metrics are written; `self.start_seconds` is how long that took."""
        self.wait_for(lambda: (self.run / "metrics.csv").exists() and len(self.rows()) >= 2, "two rows of metrics")
        self.start_seconds = time.monotonic() - self.began

    def rows(self) -> list[str]:
        return (self.run / "metrics.csv").read_text().splitlines()[1:]

    def wait_for(self, condition, what: str) -> None:
        def is_so() -> bool:
            assert self.process.poll() is None, f"exited with {self.process.returncode} before {what}:\n{self.text()}"
            return condition()

        wait_until(is_so, lambda: f"{what}\n{self.text()}")

    def text(self) -> str:
        return self.process.text()

    def left_in_shared_memory(self) -> set[str]:
        """What is there since this run began and no process uses: tests beside this one use shared memory, too."""
        names = set(os.listdir("/dev/shm")) - self.shared_memory
        for maps in glob.glob("/proc/[0-9]*/maps") if names else []:
            with contextlib.suppress(OSError):  # it has just ended
                used = Path(maps).read_text()
                names = {name for name in names if f"/dev/shm/{name}" not in used}
        return names

    def end(self) -> int:
        """The exit code, after a check that nothing is left behind."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running {PATIENCE:.0f} s later:\n{self.text()}") from None
        wait_until(lambda: not self.family(), "processes left behind")
        wait_until(lambda: not self.left_in_shared_memory(), "shared memory left behind")
        return code

    def end_promptly(self) -> int:
        """The same of a run that has a reason to end now, after a check that it does not take long for it."""
        began = time.monotonic()
        code = self.end()
        took = time.monotonic() - began
        limit = max(PROMPTLY, 2 * (self.start_seconds - 1))
        assert took < limit, f"took {took:.1f} s to end, more than {limit:.1f}:\n{self.text()}"
        return code


# Seconds: the promise of README.md, "How it works", and one for other jobs of the machine. On a busy machine the limit
# grows with what the start took there: with all imports done an idle machine starts in two seconds at most, and ends in
# one.
PROMPTLY = 3.0


# Ctrl-C ends a shell's loop over runs, too, if the run dies of it.
@pytest.mark.parametrize("number, code", [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_run_that_a_signal_ends_writes_a_checkpoint_and_its_closing_lines(tmp_path, number, code):
    training = Training(tmp_path)
    training.wait_until_training()
    training.process.send_signal(number)
    assert training.end_promptly() == code, training.text()
    assert (training.run / "checkpoint.pt").exists()
    assert "stopped at step" in training.text() and "Traceback" not in training.text()


def test_a_shell_that_runs_one_seed_after_the_other_stops_at_ctrl_c(tmp_path):
    run = f"{sys.executable} {ROOT / 'monobeast.py'} --env CartPole-v1 --root . --name $seed --no_tensorboard"
    shell = subprocess.Popen(
        ["bash", "-c", f"for seed in 1 2; do {run} --log_steps 1000 --num_actors 1; done"],
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "1" / "metrics.csv"
    try:
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1)
        os.killpg(shell.pid, signal.SIGINT)  # as a terminal does
        wait_until(lambda: shell.poll() is not None or (tmp_path / "2").exists())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.wait() in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (tmp_path / "1" / "checkpoint.pt").exists() and not (tmp_path / "2").exists()


def test_a_second_ctrl_c_ends_the_run_quietly_while_it_saves(tmp_path):
    code = """
import time
from beast.run import checkpoint
def save(path, state):
    print("saving", flush=True)
    time.sleep(600)
checkpoint.save = save
"""
    training = Training(tmp_path, code=code)
    training.wait_until_training()
    training.process.send_signal(signal.SIGINT)
    training.wait_for(lambda: "saving" in training.text(), "the save")
    training.process.send_signal(signal.SIGINT)
    assert training.end_promptly() == -signal.SIGINT
    assert "Traceback" not in training.text()


def test_a_run_whose_terminal_closes_saves_and_ends_with_code_0(tmp_path):
    arguments = ["--env", "CartPole-v1", "--root", str(tmp_path), "--name", "run", "--log_steps", "1000"]
    main, other = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, str(ROOT / "monobeast.py"), *arguments, "--no_tensorboard"],
        stdin=other, stdout=other, stderr=other, preexec_fn=take_terminal,
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(other)
    metrics = tmp_path / "run" / "metrics.csv"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1)
    os.close(main)  # the kernel sends SIGHUP, and writing fails from now on
    assert process.wait(PATIENCE) == 0
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert "stopped at step" in (tmp_path / "run" / "out.log").read_text()


FULL_DISK = """
from beast import files
from beast.run import checkpoint, metrics
def full(path, mode="r", **options):
    return open(path if "r" in mode else "/dev/full", mode, **options)
save, write = checkpoint.save, metrics.Metrics.write
saved = []  # steps of the checkpoints that lie on the disk; best.pt may be written before the first
def save_and_note(path, state):
    save(path, state)
    if path.name == "checkpoint.pt":
        saved.append(state["counts"]["steps"])
checkpoint.save = save_and_note
"""


@pytest.mark.parametrize(
    "where, code",
    [
        ("metrics.csv: metrics cannot be written", """
def write_full(self, step, values, rows=[]):
    rows.append(step)
    is_full = len(rows) >= 5 and any(saved)
    if is_full and "open" not in vars(files):
        self._file = full("", "a")
        self._writer = metrics.csv.DictWriter(self._file, self._writer.fieldnames)
    try:
        write(self, step, values)
    finally:  # not before: a checkpoint that is due might be the first to fail
        if is_full:
            files.open = full
metrics.Metrics.write = write_full
"""),
        ("checkpoint.pt: cannot be written", """
def save_full(path, state):
    if path.name == "checkpoint.pt" and any(saved):
        files.open = full
    save_and_note(path, state)
checkpoint.save = save_full
"""),
    ],
)  # fmt: skip
def test_a_full_disk_in_mid_run_is_one_message_and_the_older_checkpoint_stays(tmp_path, where, code):
    training = Training(tmp_path, "--checkpoint_minutes", "0.01", code=FULL_DISK + code)
    assert training.end() == 1
    text = training.text()
    assert where in text and text.count("No space left on device") == 1 and "Traceback" not in text, text
    assert "checkpoint" in text and "stopped at step" in text
    import torch

    assert torch.load(training.run / "checkpoint.pt", weights_only=True)["counts"]["steps"] > 0


def test_a_killed_actor_is_restarted_and_training_goes_on(tmp_path):
    training = Training(tmp_path)
    training.wait_until_training()
    killed = training.actors()[0]
    killed.kill()
    training.wait_for(
        lambda: len(training.actors()) == 2 and killed.pid not in [a.pid for a in training.actors()], "successor"
    )
    rows = len(training.rows())
    training.wait_for(lambda: len(training.rows()) >= rows + 5, "rows after the restart")
    assert "was killed by signal 9 (SIGKILL)" in training.text()
    training.process.send_signal(signal.SIGTERM)
    assert training.end_promptly() == 0


def test_a_killed_actor_that_may_not_be_restarted_ends_the_run_and_is_named(tmp_path):
    training = Training(tmp_path, "--max_env_restarts", "0")
    training.wait_until_training()
    training.actors()[0].kill()
    assert training.end_promptly() == 1
    assert re.search(r"actor \d was killed by signal 9", training.text())
    assert (training.run / "checkpoint.pt").exists()


def test_an_environment_that_raises_ends_the_run_with_its_own_traceback_once_restarts_are_used_up(tmp_path):
    training = Training(tmp_path, "--env", "toy_envs:CrashAtStep-v0", "--max_env_restarts", "1")
    assert training.end() == 1
    text = training.text()
    assert "Restarting it (1 of --max_env_restarts 1)" in text
    assert "toy_envs.py" in text and "Traceback" in text, "the environment's own traceback is told"
    assert "It was restarted 1 times" in text


def test_an_environment_that_cannot_be_reset_ends_the_run_with_its_own_traceback(tmp_path):
    training = Training(tmp_path, "--env", "toy_envs:CrashInReset-v0", "--max_env_restarts", "1")
    assert training.end() == 1
    assert "toy_envs.py" in training.text() and "Traceback" in training.text()


def test_an_environment_that_hangs_counts_as_dead_after_the_timeout(tmp_path):
    flags = ["--env", "toy_envs:Hang-v0", "--num_actors", "1", "--max_env_restarts", "0", "--env_timeout", "2"]
    training = Training(tmp_path, *flags)
    assert training.end() == 1
    assert "did not answer for 2 s (--env_timeout)" in training.text()
    seconds = float(re.search(r"where the ([\d.]+) seconds went", training.text())[1])
    stages = re.search(r"^ +actor 0 +(.*)$", training.text(), re.MULTILINE)[1]
    shares = {name: float(share) for name, share in (stage.split() for stage in stages.split(" · "))}
    assert sum(shares.values()) == pytest.approx(100, abs=3), shares
    assert shares["step"] / 100 * seconds > 1, "the actor did not tell of the step that never ended"


def test_an_exception_in_the_learner_ends_the_run_with_its_traceback_and_a_checkpoint(tmp_path):
    code = """
def compute_loss(*arguments, original=monobeast.compute_loss, calls=[]):
    calls.append(None)
    if len(calls) > 50:
        raise ValueError("fifty updates are enough")  # a fork's own mistake, not the user's input
    return original(*arguments)
monobeast.compute_loss = compute_loss
"""
    training = Training(tmp_path, code=code)
    assert training.end() == 1
    assert "ValueError: fifty updates are enough" in training.text() and "Traceback" in training.text()
    assert "fifty updates are enough" in (training.run / "out.log").read_text()
    assert (training.run / "checkpoint.pt").exists()


def test_an_exception_in_inference_ends_the_run_with_its_traceback(tmp_path):
    code = """
def newest(self, original=monobeast.PublishedWeights.newest, calls=[]):
    calls.append(None)
    if len(calls) > 500:
        raise RuntimeError("no more actions")
    return original(self)
monobeast.PublishedWeights.newest = newest
"""
    training = Training(tmp_path, code=code)
    assert training.end() == 1
    assert "RuntimeError: no more actions" in training.text()


def test_what_an_environment_started_itself_ends_with_its_actor(tmp_path):
    training = Training(tmp_path, "--env", "toy_envs:StartsProcess-v0")
    training.wait_until_training()
    assert any("sleep" in process.name() for process in training.family())
    training.actors()[0].kill()  # this one cannot close its environments
    training.wait_for(lambda: "Restarting it" in training.text(), "restart")
    training.process.send_signal(signal.SIGTERM)
    assert training.end_promptly() == 0


def test_actors_end_with_a_main_process_that_was_killed(tmp_path):
    training = Training(tmp_path)
    training.wait_until_training()
    assert len(training.actors()) == 2
    training.process.kill()
    assert training.end_promptly() == -signal.SIGKILL


def test_what_a_hanging_environment_started_ends_with_a_main_process_that_was_killed(tmp_path):
    training = Training(tmp_path, "--env", "toy_envs:HangsBesideProcess-v0")
    training.wait_for(lambda: any("sleep" in process.name() for process in training.family()), "first step")
    training.process.kill()
    assert training.end() == -signal.SIGKILL


def test_updates_with_nan_are_skipped_and_counted_and_too_many_in_a_row_stop_the_run(tmp_path):
    code = """
def compute_loss(*arguments, original=monobeast.compute_loss, calls=[]):
    calls.append(None)
    loss, *others = original(*arguments)
    return loss * (float("nan") if len(calls) % 10 == 0 or len(calls) > 100 else 1), *others
monobeast.compute_loss = compute_loss
"""
    training = Training(tmp_path, "--max_bad_updates", "3", code=code)
    assert training.end() == 1
    assert "NaN or Inf in 3 updates in a row (--max_bad_updates 3)" in training.text()
    import torch

    state = torch.load(training.run / "checkpoint.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["net"].values() if tensor.is_floating_point())
    assert state["counts"]["bad_updates"] == 10 + 2 or state["counts"]["bad_updates"] == 10 + 3
