from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
from lock_step import metrics_of, small_flags
from programs import Program
from waiting import PATIENCE, wait_until

import monobeast
import r2d2
from beast import machine
from beast.envs.env_metrics import EnvMetrics
from beast.envs.probe import probe_env
from beast.errors import InputError, MissingPackage
from beast.learn.learner import Counted
from beast.run import checkpoint, command_line, directory, evaluation
from beast.run import console as console_module
from beast.run.console import Console
from beast.run.directory import Run, describe_machine
from beast.run.evaluation import Evaluations
from beast.run.metrics import COLUMNS, Metrics

ROOT = Path(__file__).parent.parent
CONFIG = {"env": "Pong", "seed": 1, "widths": (16, 8), "total_steps": 100, "video": ""}


def start(root, config=CONFIG, name="pong", **changes):
    run = Run(root, name, {**config, **changes}, resume_free={"total_steps"})
    run.record_start()
    return run


def test_a_run_writes_every_flag_and_what_the_result_may_depend_on(tmp_path):
    run = start(tmp_path)
    assert run.path == tmp_path / "pong" and not run.resumed and run.num_starts == 1
    assert run.checkpoint_path == run.path / "checkpoint.pt" and run.best_path == run.path / "best.pt"
    config = json.loads((run.path / "config.json").read_text())
    assert config == {**CONFIG, "widths": [16, 8]} and list(config) == list(CONFIG)
    (meta,) = json.loads((run.path / "meta.json").read_text())["starts"]
    assert meta["argv"] == sys.argv
    assert {"torch", "numpy", "gymnasium", "python"} <= set(meta["versions"])
    assert meta["cores"] >= 1 and meta["memory_gb"] > 0 and meta["cpu"] and isinstance(meta["gpus"], list)
    run.close()


def test_a_resume_whose_checkpoint_does_not_fit_leaves_the_files_of_the_run_as_they_are(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=100, tensorboard=False)
    monobeast.train(flags)
    config, meta = tmp_path / "run/config.json", tmp_path / "run/meta.json"
    old = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in old.items() if name != "hidden_size"}))
    before = config.read_bytes(), meta.read_bytes()  # of a fork that had no such flag
    with pytest.raises(InputError, match="checkpoint.pt: these are the weights of another net") as kept:
        monobeast.train(dataclasses.replace(flags, hidden_size=2 * flags.hidden_size, total_steps=200))
    assert kept.tb, "a notebook keeps a failed start alive, too; it holds no lock"
    assert (config.read_bytes(), meta.read_bytes()) == before
    monobeast.train(dataclasses.replace(flags, total_steps=200))


def test_a_hangup_that_nohup_ignores_does_not_end_a_run(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False)
    learner = monobeast.make_learner(flags, probe_env(monobeast.create_env, flags))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not training._signal and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_of_the_main_loop_is_logged_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    def no_process(*_):
        raise OSError("no more processes")

    monkeypatch.setattr(evaluation.Evaluations, "start", no_process)
    with pytest.raises(SystemExit) as end:
        monobeast.train(small_flags(root=str(tmp_path), name="run", eval_minutes=1e-9, tensorboard=False))
    log = (tmp_path / "run/out.log").read_text()
    assert end.value.code == 1 and "OSError: no more processes" in log and "stopped at step" in log
    assert (tmp_path / "run/checkpoint.pt").exists()


def test_best_is_written_before_the_checkpoint_that_says_how_good_it_is(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False)
    learner = monobeast.make_learner(flags, probe_env(monobeast.create_env, flags))
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        written = []
        monkeypatch.setattr(checkpoint, "save", lambda path, state: written.append(path.name))
        learner.returns.extend([3.0] * learner.returns.maxlen)
        training.save()
        assert written == ["best.pt", "checkpoint.pt"] and learner.best == 3.0
        # While evaluations choose best.pt, the mean of the games is remembered all the same: a start without them goes
        # on from it.
        training._evaluations = types.SimpleNamespace(
            result=lambda: {"eval/episodic_return": 5.0},
            is_due=lambda: False,
            mean=5.0,
            state={"net": {}},
            policy=-1,
            film_path=tmp_path / "missing",
        )
        learner.returns.extend([4.0] * learner.returns.maxlen)
        training.save()
        assert written[2:] == ["checkpoint.pt"] and learner.best == 4.0
        monkeypatch.setattr(checkpoint, "save", lambda path, state: Path(tmp_path, "missing").read_bytes())
        with pytest.raises(FileNotFoundError):  # a disk that is full, say
            training._evaluate()
        assert learner.best_eval == -math.inf, "best.pt is still an older one"


def test_no_environment_variable_is_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "a-very-secret-value")
    run = start(tmp_path)
    run.log("hello")
    run.close()
    for file in run.path.iterdir():
        assert "a-very-secret-value" not in file.read_text() and "MY_API_TOKEN" not in file.read_text()


def test_commit_and_changes_of_a_checkout_are_recorded(tmp_path, monkeypatch):
    def git(*command):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "beast").mkdir()
    (tmp_path / "model.py").write_text("layers = 2\n")
    monkeypatch.setattr(directory, "__file__", str(tmp_path / "beast" / "run" / "directory.py"))
    git("init", "-q")
    assert describe_machine()["commit"] is None and describe_machine()["diff"] is None
    git("add", "-A")
    git("commit", "-qm", "first")
    assert len(describe_machine()["commit"]) == 40 and describe_machine()["diff"] == ""
    (tmp_path / "model.py").write_text("layers = 3\n")
    assert "-layers = 2\n+layers = 3" in describe_machine()["diff"]
    assert describe_machine()["untracked"] == {}
    for name, text in (("my_env.py", "reward = 1\n"), ("token", "secret"), ("large.py", 200_000 * "#"), ("a.log", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "gone.py").symlink_to("nowhere")
    untracked = dict.fromkeys((".gitignore", "token", "large.py", "binary.py", "gone.py"))
    assert describe_machine()["untracked"] == {**untracked, "my_env.py": "reward = 1\n"}
    for index in range(30):
        (tmp_path / f"m{index:02}.py").write_text(90_000 * "#")
    texts = [text for text in describe_machine()["untracked"].values() if text]
    assert 900_000 < sum(map(len, texts)) <= 1_000_000, "all files together have a limit, too"


def test_a_run_with_a_checkpoint_is_resumed_and_remembers_its_starts(tmp_path):
    run = start(tmp_path)
    run.checkpoint_path.touch()
    run.close()
    run = start(tmp_path, total_steps=200, new_flag=7)
    assert run.resumed and run.num_starts == 2
    assert len(json.loads((run.path / "meta.json").read_text())["starts"]) == 2
    assert json.loads((run.path / "config.json").read_text())["total_steps"] == 200
    run.close()


def test_a_run_that_stopped_before_its_first_checkpoint_begins_anew(tmp_path):
    start(tmp_path).close()
    run = start(tmp_path, seed=2)
    assert not run.resumed and run.num_starts == 1
    assert json.loads((run.path / "config.json").read_text())["seed"] == 2
    run.close()


def test_flags_that_contradict_the_run_are_refused_by_name_all_at_once(tmp_path):
    run = start(tmp_path)
    run.checkpoint_path.touch()
    run.close()
    before = (run.path / "config.json").read_text(), (run.path / "meta.json").read_text()
    with pytest.raises(ValueError) as error:
        start(tmp_path, seed=2, video="a.mp4", total_steps=5)
    message = str(error.value)
    assert "--seed 2 (the run has 1)" in message and "--video a.mp4 (the run has )" in message
    assert "another --name" in message and "resume this one with --seed 1 --video ''" in message
    assert "total_steps" not in message and "widths" not in message
    assert before == ((run.path / "config.json").read_text(), (run.path / "meta.json").read_text())
    start(tmp_path).close()  # the refused start has left no lock


def test_the_remedies_can_be_typed_as_they_stand(tmp_path, monkeypatch):
    values = {"center_images": False, "pin_actors": True, "addresses": ("a:1", "unix:/b c")}
    run = start(tmp_path, **values)
    run.checkpoint_path.touch()
    run.close()
    with pytest.raises(InputError) as error:
        start(tmp_path, center_images=True, pin_actors=False, addresses=())
    remedies = "--no_center_images --pin_actors --addresses a:1 'unix:/b c'"
    assert str(error.value).endswith(f"resume this one with {remedies}")
    monkeypatch.setattr(sys, "argv", ["r2d2.py", *shlex.split(remedies)])
    typed = command_line.parse(r2d2.Flags, None, {}, {})
    assert {name: getattr(typed, name) for name in values} == values


def test_a_run_of_another_program_is_refused_by_the_programs_name(tmp_path):
    run = start(tmp_path, variant="mono")
    run.checkpoint_path.touch()
    run.close()
    with pytest.raises(InputError, match="monobeast.py began this run; train on with that") as error:
        start(tmp_path, variant="poly", seed=2)
    assert "--variant" not in str(error.value)


def test_a_checkpoint_without_its_flags_is_not_overwritten(tmp_path):
    (tmp_path / "pong").mkdir()
    (tmp_path / "pong" / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match="checkpoint.pt but no config.json"):
        start(tmp_path)
    (tmp_path / "pong" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: damaged"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_that_is_no_single_directory_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="--name"):
        start(tmp_path, name=name)


def test_a_root_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another --root"):
        start(tmp_path / "file")


def test_a_run_whose_files_cannot_be_written_is_refused_and_left_unlocked(tmp_path):
    (tmp_path / "pong" / "config.json").mkdir(parents=True)
    with pytest.raises(InputError, match="config.json: cannot be written .*Is a directory.*permissions"):
        start(tmp_path)
    (tmp_path / "pong" / "config.json").rmdir()
    start(tmp_path).close()


def test_a_directory_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory.fcntl, "flock", refuse)
    start(tmp_path).close()
    assert "is on a file system without locks: start no second process" in capsys.readouterr().err


def test_train_returns_what_the_run_came_to_and_leaves_signals_as_they_were(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    flags = small_flags(root=str(tmp_path), name="run", total_steps=4000, log_steps=1000, tensorboard=False)
    result = monobeast.train(flags)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    state = checkpoint.load(result.directory / "checkpoint.pt")
    assert result.directory == tmp_path / "run" and result.stopped_by == ""
    assert 4000 <= result.steps == state["counts"]["steps"] and result.updates == state["counts"]["updates"]
    assert result.mean_return == pytest.approx(sum(state["returns"]) / len(state["returns"]))
    assert result.best == state["counts"]["best"] > 5
    assert math.isnan(monobeast.train(dataclasses.replace(flags, name="short", total_steps=1)).best)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_train_but_not_the_program_that_called_it(tmp_path, monkeypatch, number):
    def infer(*arguments, original=monobeast.infer):
        os.kill(os.getpid(), number)
        original(*arguments)

    monkeypatch.setattr(monobeast, "infer", infer)
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False)
    if number == signal.SIGTERM:
        assert monobeast.train(flags).stopped_by == "SIGTERM"
    else:
        with pytest.raises(KeyboardInterrupt):
            monobeast.train(flags)
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_sigterm_that_comes_again_does_no_more_than_the_first(tmp_path, monkeypatch):
    def infer(*arguments, original=monobeast.infer):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        original(*arguments)

    monkeypatch.setattr(monobeast, "infer", infer)
    reached: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: reached.append(number))
    try:
        result = monobeast.train(small_flags(root=str(tmp_path), name="run", tensorboard=False))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.stopped_by == "SIGTERM" and not reached, "what would have ended the process"


def test_the_code_of_the_page_on_runs_trains(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block.replace("20_000", "500, num_actors=1, tensorboard=False"), {})
    assert capsys.readouterr().out.endswith("runs/cartpole\n")


def test_seeds_are_trained_one_after_the_other(tmp_path):
    command = f"{sys.executable} -m examples.seeds --env CartPole-v1 --name cart --seeds 3 5 --total_steps 500"
    command += f" --root {tmp_path} --num_actors 1 --no_tensorboard"
    output = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = output.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed 3", "seed 5"], output
    for seed in (3, 5):
        assert json.loads((tmp_path / f"cart-seed{seed}" / "config.json").read_text())["seed"] == seed


HOLD = """
import sys, time
from beast.run.directory import Run
run = Run(sys.argv[1], "pong", {})
print("locked", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_train_in_one_directory_and_kill_9_releases_the_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on .* is training in this run's directory"):
            start(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        start(tmp_path).close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_limits_of_a_container_count(tmp_path, monkeypatch):
    path = {"/sys/fs/cgroup/cpu.max": tmp_path / "cpu.max", "/sys/fs/cgroup/memory.max": tmp_path / "memory.max"}
    monkeypatch.setattr(machine, "Path", lambda name: path.get(name, Path(name)))
    cores, free = machine.usable_cores(), machine.available_memory()
    for cpu, number in (("max 100000", cores), ("50000 100000", 1), ("100000000 100000", cores)):
        path["/sys/fs/cgroup/cpu.max"].write_text(cpu + "\n")
        assert machine.usable_cores() == number
    for limit, least, most in (("max", free / 2, math.inf), ("1000000", 1e6, 1e6)):
        path["/sys/fs/cgroup/memory.max"].write_text(limit + "\n")
        assert least <= machine.available_memory() <= most
    path["/proc/meminfo"] = tmp_path / "meminfo"
    path["/proc/meminfo"].write_text("MemTotal:        9000 kB\nMemFree:   7 kB\nMemAvailable:     500 kB\n")
    assert machine.available_memory() == 500 * 1024, "the kernel's kB has 1024 bytes"


def test_a_log_line_goes_to_the_file_with_the_time_and_to_stderr(tmp_path, capsys):
    run = start(tmp_path)
    run.log("first")
    run.log("second")
    run.close()
    lines = (run.path / "out.log").read_text().splitlines()
    assert [line[20:] for line in lines] == ["first", "second"] and lines[0][:2] == "20"
    assert capsys.readouterr().err == "first\nsecond\n"


def test_metrics_are_in_the_file_when_write_returns(tmp_path):
    metrics = Metrics(tmp_path, None, tensorboard=False)
    metrics.write(10, {"frames": 40, "hours": 0.1, "losses/entropy": 1 / 3})
    (row,) = metrics_of(tmp_path)
    assert row["step"] == "10" and row["frames"] == "40" and row["losses/entropy"] == "0.333333333"
    assert row["charts/episodic_return"] == ""
    assert tuple(row) == COLUMNS
    metrics.close()


def test_large_counts_keep_all_their_digits(tmp_path):
    metrics = Metrics(tmp_path, None, tensorboard=False)
    metrics.write(12_345_678_901, {"frames": 49_382_715_604})
    assert metrics_of(tmp_path)[0]["frames"] == "49382715604" and metrics_of(tmp_path)[0]["step"] == "12345678901"
    metrics.close()


def test_a_name_that_turns_up_later_becomes_a_column_and_no_row_is_lost(tmp_path):
    metrics = Metrics(tmp_path, None, tensorboard=False)
    metrics.write(10, {"hours": 0.1})
    metrics.write(20, {"stats/mine": 2.5})
    metrics.write(30, {"hours": 0.3, "stats/mine": 3.5})
    assert [(row["step"], row["hours"], row["stats/mine"]) for row in metrics_of(tmp_path)] == [
        ("10", "0.1", ""),
        ("20", "", "2.5"),
        ("30", "0.3", "3.5"),
    ]
    metrics.close()


def test_a_resume_drops_the_rows_that_the_crash_lost_and_a_row_cut_short(tmp_path):
    metrics = Metrics(tmp_path, None, tensorboard=False)
    for step in (10, 20, 30):
        metrics.write(step, {"stats/mine": float(step)})
    metrics.close()
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("15" + "," * len(COLUMNS) + "6")  # all of its columns, but of 6.25 only the 6
    metrics = Metrics(tmp_path, 20, tensorboard=False)
    metrics.write(25, {"stats/mine": 25.0})
    metrics.close()
    found = [(row["step"], row["stats/mine"]) for row in metrics_of(tmp_path)]
    assert found == [("10", "10"), ("20", "20"), ("25", "25")]


def test_a_new_run_begins_a_new_file(tmp_path):
    for _ in range(2):
        metrics = Metrics(tmp_path, None, tensorboard=False)
        metrics.write(10, {"hours": 0.1})
        metrics.close()
    assert len(metrics_of(tmp_path)) == 1


def test_tensorboard_has_the_same_numbers_and_forgets_those_lost_by_a_crash(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, None)
    for step in (10, 20, 30):
        metrics.write(step, {"charts/SPS": float(step)})
    metrics.close()
    metrics = Metrics(tmp_path, 20)
    metrics.write(25, {"charts/SPS": 25.0})
    metrics.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("charts/SPS")] == [(10, 10), (20, 20), (25, 25)]


def test_track_without_wandb_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match="--track needs .*pip install wandb"):
        Metrics(tmp_path, None, tensorboard=False, track=True)


def test_track_mirrors_the_rows_and_takes_up_the_same_wandb_run_on_resume(tmp_path, monkeypatch):
    inits, logged = [], []
    fake_run = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **options: inits.append(options) or fake_run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (None, 10, None):
        metrics = Metrics(tmp_path, resume_step, tensorboard=False, track=True, project="mine")
        metrics.write(20, {"hours": 0.5})
        metrics.close()
    assert logged[0] == {"step": 20, "hours": 0.5}
    ids = [options["id"] for options in inits]
    assert ids[0] == ids[1] != ids[2] and {options["project"] for options in inits} == {"mine"}


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock.now)
    return clock


def lines_of(capsys, console, clock, begin, steps_per_second, seconds, values=None, warm_up=0):
    step = begin
    for second in range(seconds):
        clock.now += 1
        step += steps_per_second if second >= warm_up else 0
        console.update(step, values or {})
    return capsys.readouterr().err.splitlines()


def test_plain_lines_come_at_most_every_ten_seconds_and_name_steps_and_frames(clock, capsys):
    console = Console(10_000, 0, frames_per_step=4)
    values = {
        **{"charts/episodic_return": -12.345, "stats/policy_lag_mean": 1.25, "stats/policy_lag_max": 3.0},
        **{"stats/learner_wait": 0.031, "stats/actor_wait": 0.4},
    }
    lines = lines_of(capsys, console, clock, 0, 100, 31, values)
    assert len(lines) == 3
    assert lines[-1] == (
        " 3,000 steps  30 % |    100 steps/s |     400 frames/s | mean return   -12.35 | lag  1.2 max  3 updates"
        " | waiting: learner  3 % actors 40 % | 0:01:10 left"
    )
    assert len({len(line) for line in lines}) == 1, "the columns are not aligned"


def test_speed_and_time_left_are_right_after_a_resume_and_a_warm_up(clock, capsys):
    console = Console(2_000_000, 0, frames_per_step=1, start_step=1_000_000)
    lines = lines_of(capsys, console, clock, 1_000_000, 1000, 100, warm_up=50)
    assert "  1,000 steps/s |" in lines[-1] and "frames" not in lines[-1]
    assert lines[-1].endswith("0:15:50 left")  # 950,000 steps
    assert lines[0].endswith("?:??:?? left")
    console.update(1_050_000, {}, final=True)
    assert "  1,000 steps/s |" in (last := capsys.readouterr().err) and last.endswith("in 0:01:40\n")


def test_time_left_is_that_of_whichever_limit_comes_first(clock, capsys):
    console = Console(10**9, 10, frames_per_step=1, start_minutes=4)
    assert lines_of(capsys, console, clock, 0, 1000, 60)[-1].endswith("0:05:00 left")


def test_the_live_line_fits_the_terminal_and_messages_go_above_it(tmp_path):
    script = """
import time
from beast.run.console import Console, tell
console = Console(10_000_000, 0, frames_per_step=4)
values = {"charts/episodic_return": 1.0, "stats/policy_lag_mean": 1.0, "stats/learner_wait": 0.1}
for step in (10, 20):
    console.update(step, values, final=True)
tell("a message")
console.close()
"""
    pty = pytest.importorskip("pty")
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=other, env=environment, timeout=PATIENCE)
    os.close(other)
    output = b""
    try:
        while chunk := os.read(main, 65536):
            output += chunk
    except OSError:  # Linux reports the end of a terminal this way
        pass
    os.close(main)
    text = output.decode()
    assert done.returncode == 0, text
    assert "a message" in text and "\x1b[2K" in text, "the line was not redrawn in place"
    assert "20 steps" in text and "mean return" in text and "waiting" not in text and "…" not in text


def test_evaluations_play_whole_games_with_seeds_of_their_own_and_choose_best_pt(tmp_path):
    words = [str(ROOT / "monobeast.py"), "--env", "CartPole-v1", "--root", str(tmp_path), "--name", "run"]
    words += ["--num_actors", "1", "--log_steps", "500", "--no_tensorboard", "--total_minutes", "10"]
    words += ["--deterministic"]  # which leaves a core to the evaluations, whose niceness is 19
    words += ["--eval_minutes", "0.01", "--eval_episodes", "3"]
    process = Program(words, cwd=ROOT, env=dict(os.environ), output=tmp_path / "output")
    run, niceness, seeds = tmp_path / "run", set(), set()

    def rows() -> list[dict]:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if str(run / "eval/checkpoint.pt") in words:
                    niceness.add(child.nice())
                    seeds.add(words[words.index("--seed") + 1])
        return [row for row in metrics_of(run) if row.get("eval/step")] if (run / "metrics.csv").exists() else []

    try:
        wait_until(lambda: len(rows()) >= 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    found = metrics_of(run)
    evaluated = [row for row in found if row.get("eval/step")]
    assert len(evaluated) < len(found), "an evaluation is in one row"
    for row in evaluated:
        assert float(row["eval/episodes"]) == 3 and float(row["eval/step"]) <= float(row["step"])
        assert float(row["eval/episodic_return"]) == float(row["eval/episodic_length"]) > 5, "CartPole pays 1 a step"
    returns = {int(float(row["eval/step"])): float(row["eval/episodic_return"]) for row in evaluated}
    best = checkpoint.load(run / "best.pt")["counts"]
    assert returns.get(best["steps"], math.inf) >= max(returns.values())  # or one that ended after the last row
    newest = checkpoint.load(run / "checkpoint.pt")["counts"]
    assert newest["best_eval"] >= max(returns.values()) - 1e-3  # the CSV has nine digits
    assert 19 in niceness
    assert len(seeds) == 1 and "1" not in seeds and not (run / "test.json").exists()


def test_every_evaluation_gets_a_row_however_rarely_rows_are_written(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=10**6, log_steps=10**6, tensorboard=False)
    learner = monobeast.make_learner(flags, probe_env(monobeast.create_env, flags))
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        training._metrics = Metrics(training.run.path, None, tensorboard=False)
        training._feed = types.SimpleNamespace(measure=lambda seconds, shares: {}, env_metrics=EnvMetrics())
        training._row_steps, training._row_began = 0, time.monotonic() - 1
        found = {"eval/episodic_return": -1.0, "eval/step": 0}
        training._evaluations = types.SimpleNamespace(
            result=lambda: found, is_due=lambda: False, mean=-1.0, film_path=tmp_path / "missing"
        )
        learner.best_eval = 0.0
        for learner.steps in (100, 200):
            training._gather(Counted(False, 0.0, {"losses/grad_norm": 1.0, "stats/policy_lag_max": 0.0}))
            training._evaluate()
        training._metrics.close()
    assert [(row["step"], row["eval/step"]) for row in metrics_of(training.run.path)] == [("100", "0"), ("200", "0")]


def test_an_evaluation_that_fails_is_logged_and_training_goes_on(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", eval_minutes=1e-9, tensorboard=False)
    logged: list[str] = []
    evaluations = Evaluations(tmp_path, flags, 7, logged.append)
    assert evaluations.is_due() and evaluations.result() == {}
    evaluations.start({"config": {}})
    assert not evaluations.is_due()
    wait_until(lambda: evaluations._process.popen.poll() is not None)
    assert evaluations.result() == {} and evaluations.is_due()
    assert len(logged) == 1 and logged[0].startswith("the evaluation exited with code 1; what it printed last:")
    evaluations.start({"config": {}})
    running = evaluations._process.popen
    evaluations.close()
    assert running.poll() == -signal.SIGKILL


def test_an_evaluation_without_a_standard_error_counts_and_one_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run", eval_minutes=1e-9, tensorboard=False)
    logged: list[str] = []
    evaluations = Evaluations(tmp_path, flags, 7, logged.append)
    written = {
        "mean": math.inf,
        "standard_error": None,
        "returns": [1.0, math.inf],
        "lengths_in_steps": [5],
        "steps": 9,
    }
    script = f"import json; json.dump({written!r}, open({str(evaluations._result_path)!r}, 'w'))"
    monkeypatch.setattr(evaluations, "_command", [sys.executable, "-c", f"from math import inf; {script}"])
    evaluations.start({"config": {}})
    wait_until(lambda: evaluations._process.popen.poll() is not None)
    found = evaluations.result()
    assert found["eval/episodic_return"] == math.inf and math.isnan(found["eval/standard_error"]) and not logged

    monkeypatch.setattr(evaluation, "LEAST_PATIENCE", 0.5)
    monkeypatch.setattr(evaluations, "_command", [sys.executable, "-c", "import time; time.sleep(1000)"])
    evaluations.start({"config": {}})
    assert evaluations.result() == {} and not evaluations.is_due()
    time.sleep(0.6)
    assert evaluations.result() == {} and evaluations.is_due()
    assert len(logged) == 1 and "took more than" in logged[0]
