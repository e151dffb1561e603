"""PolyBeast: the same agent as MonoBeast, trained through real env servers."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import types
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from env_hosts import ServerProcess
from programs import Program
from waiting import PATIENCE, wait_until

import beast
import monobeast

pytest.importorskip("libbeast", reason="libbeast is not built: pip install .")
from lock_step import metrics_of, new_learner, new_net, small_flags, spaces_of

import polybeast
import polybeast_env
from beast.envs.rows import rollout_fields
from beast.feeds import remote
from beast.feeds.remote import SeenObservations
from beast.learn.nests import map_tensors
from beast.run import checkpoint, servers
from beast.run.flags import EnvFlags
from beast.run.training import consumer_of

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--group_width", "4", "--batch_width", "4", "--unroll_length", "8", "--hidden_size", "64", "--core_size", "32"]


def test_an_edit_of_the_agents_file_is_what_both_variants_train(tmp_path):
    """A fork's edits of net, loss and update, in a copy of the checkout."""
    fork = tmp_path / "fork"
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns(".*", "runs", "build", "benchmarks", "tests", "csrc"))
    agent = (fork / "monobeast.py").read_text()
    edits = {
        "        is_separate = self.flags.value_net": "        x = x * self.gain\n",
        "        self.baseline = orthogonal(": "        self.gain = nn.Parameter(torch.full((), 0.5))\n",
        '            "losses/total_loss": ': '            "losses/edited_loss": loss.detach() * 0 + 17,\n',
        "            step = Outcome(": '            metrics["losses/edited_update"] = grad_norm * 0 + 19\n',
    }
    for line, edit in edits.items():
        assert agent.count(line) == 1
        agent = agent.replace(line, edit + line)
    (fork / "monobeast.py").write_text(agent)
    for script in ("monobeast.py", "polybeast.py"):
        words = [str(fork / script), "--root", str(tmp_path), "--name", "run", "--env", "CartPole-v1", *SMALL]
        words += ["--no_tensorboard", "--total_steps", "300", "--log_steps", "100", "--optimizer", "rmsprop"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = Program(words, cwd=tmp_path, env=environment, output=tmp_path / "output")
        output = finish(process)
        assert process.returncode == 0, output
        written = rows(tmp_path)[-1]
        assert float(written["losses/edited_loss"]) == 17 and float(written["losses/edited_update"]) == 19
        gain = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["net"]["gain"]
        assert float(gain) != 0.5, "the edited net was trained"
        shutil.rmtree(tmp_path / "run")


def start(tmp_path, *arguments: str) -> Program:
    words = [str(ROOT / "polybeast.py"), "--root", str(tmp_path), "--name", "run", "--no_tensorboard", *SMALL]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return Program([*words, *arguments], cwd=Path.cwd(), env=environment, output=tmp_path / "output")


def finish(process: Program) -> str:
    process.wait(PATIENCE)
    return process.text()


@pytest.fixture
def run_here(tmp_path, run_main, monkeypatch):
    """A function of arguments: exit code and output of the same run in this process."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")  # of the env servers
    return partial(run_main, polybeast, "--root", str(tmp_path), "--name", "run", "--no_tensorboard", *SMALL)


def rows(tmp_path) -> list[dict]:
    return metrics_of(tmp_path / "run")


def test_it_trains_with_servers_of_its_own_resumes_and_plays(tmp_path, run_here):
    arguments = ["--env", "CartPole-v1", "--core", "lstm", "--log_steps", "200"]
    process = start(tmp_path, *arguments, "--total_steps", "600")
    output = finish(process)
    assert process.returncode == 0, output
    code, output = run_here(*arguments, "--total_steps", "1200", "--server_niceness", "5")
    assert code == 0 and "resumed at step 6" in output, output
    steps = [int(row["step"]) for row in rows(tmp_path)]
    assert steps == sorted(steps) and steps[-1] >= 1200
    code, output = run_here("--mode", "test", "--episodes", "3")
    assert code == 0 and "over 3 whole games" in output, output
    assert len(json.loads((tmp_path / "run" / "test.json").read_text())["returns"]) == 3
    assert not [process for process in running_servers() if str(tmp_path) in process]


def test_the_columns_that_wait_are_counted_at_every_update_of_a_row_of_metrics(tmp_path, monkeypatch):
    size, sizes = remote.libbeast.BatchingQueue.size, []

    def counted(queue):
        sizes.append(size(queue))
        return sizes[-1]

    monkeypatch.setattr(remote.libbeast.BatchingQueue, "size", counted)
    flags = {"env": "CartPole-v1", "root": str(tmp_path), "name": "run", "group_width": 4, "batch_width": 2}
    polybeast.train(polybeast.Flags(**flags, total_steps=10_000, log_steps=1000, tensorboard=False))
    first, momentary = 0, 0
    for row in rows(tmp_path)[:-1]:
        last = int(row["stats/updates"]) - 1  # a row is written before the learner comes for the next batch
        mean = float(row["stats/queue_waiting_columns"])
        assert mean == pytest.approx(np.mean(sizes[first:last])), row["step"]
        momentary += mean == sizes[last - 1]
        first = last
    assert first > 200 and momentary < len(rows(tmp_path)) - 1, "some rows must tell a mean from a look"


def test_the_learner_finds_on_the_device_what_inference_saw_there(tmp_path, monkeypatch):
    begin, find = SeenObservations.__init__, SeenObservations.find
    found: list[bool] = []

    def begin_keeping(self, num_observations, device):
        begin(self, num_observations, device, is_keeping=True)

    def compare(self, observations, numbers):
        on_device = find(self, observations, numbers)
        map_tensors(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), on_device, observations)
        found.append(all(on_device[name] is not observations[name] for name in observations))
        return on_device

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # of the env servers
    monkeypatch.setattr(SeenObservations, "__init__", begin_keeping)
    monkeypatch.setattr(SeenObservations, "find", compare)
    flags = {"env": "toy_envs:Dict-v0", "root": str(tmp_path), "name": "run", "group_width": 4, "batch_width": 2}
    flags |= {"unroll_length": 8, "hidden_size": 64}
    polybeast.train(polybeast.Flags(**flags, total_steps=3600, log_steps=1000, tensorboard=False))
    assert len(found) >= 200 and sum(found) > 0.9 * len(found)


def test_observations_that_are_kept_no_longer_come_from_the_rollout():
    T, K = 3, 3
    seen = SeenObservations(37, torch.device("cpu"), is_keeping=True)  # 3 does not divide the 74 that are kept
    observations = torch.arange(60 * K).view(60, K, 1)
    numbers = torch.cat([seen.keep({"obs": row.unsqueeze(0)}) for row in observations])  # 60 rows, one by one
    assert len(numbers.unique()) == numbers.numel()
    for first in range(60 - T):
        mine = {"obs": observations[first : first + T + 1].clone()}
        with_numbers = torch.cat([torch.zeros(1, K, dtype=torch.int64), numbers[first : first + T]])
        out = seen.find(mine, with_numbers)
        assert torch.equal(out["obs"], observations[first : first + T + 1])
        assert (out["obs"] is not mine["obs"]) == (int(numbers[first].min()) >= int(numbers[-1].max()) + 1 - 37)


def running_servers() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "polybeast_env.py" in line]


def servers_of(pid: int) -> list[int]:
    return [int(line.split()[0]) for line in running_servers() if int(line.split()[1]) == pid]


def learned_steps(tmp_path, more_than: int = 0):
    path = tmp_path / "run" / "metrics.csv"
    return path.exists() and [int(row["step"]) for row in rows(tmp_path) if int(row["step"]) > more_than]


ENDLESS = ["--env", "CartPole-v1", "--total_steps", "1000000000", "--log_steps", "500"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_ends_it_with_a_checkpoint_and_no_server_left(tmp_path, number, code):
    process = start(tmp_path, *ENDLESS)
    wait_until(lambda: learned_steps(tmp_path))
    servers = servers_of(process.pid)
    assert len(servers) == 2
    process.send_signal(number)
    output = finish(process)
    assert process.returncode == code and "stopped at step" in output and "Traceback" not in output, output
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert not set(servers) & {int(line.split()[0]) for line in running_servers()}


def test_a_checkpoint_is_loaded_with_the_environments_of_the_env_server(tmp_path, run_here, monkeypatch):
    code, output = run_here("--env", "CartPole-v1", "--total_steps", "200")
    assert code == 0, output
    made = []
    monkeypatch.setattr(
        polybeast, "create_env", lambda flags, *rest: made.append(flags) or polybeast_env.create_env(flags, *rest)
    )
    path = str(tmp_path / "run" / "checkpoint.pt")
    policy = beast.load(path)
    assert policy.steps >= 200 and not made, "the checkpoint has the spaces"
    policy.make_env(1).close()
    assert made[0].env == "CartPole-v1" and made[0].group_width == policy.flags.group_width
    state = checkpoint.load(path)
    assert state["agent"] == "polybeast"
    checkpoint.save(path, {**state, "agent": "monobeast"})  # as older versions called it
    assert isinstance(beast.load(path).flags, polybeast.Flags)


def test_a_killed_learner_leaves_no_server(tmp_path):
    process = start(tmp_path, *ENDLESS)
    wait_until(lambda: learned_steps(tmp_path))
    servers = servers_of(process.pid)
    process.kill()
    process.wait(PATIENCE)
    wait_until(lambda: not set(servers) & {int(line.split()[0]) for line in running_servers()})


def test_a_killed_server_is_replaced_and_training_goes_on(tmp_path):
    process = start(tmp_path, *ENDLESS)
    try:
        wait_until(lambda: learned_steps(tmp_path))
        os.kill(servers_of(process.pid)[0], signal.SIGKILL)
        wait_until(lambda: [row for row in rows(tmp_path) if float(row["stats/env_restarts"]) > 0])
        steps = int(rows(tmp_path)[-1]["step"])
        wait_until(lambda: learned_steps(tmp_path, steps + 2000))
        wait_until(lambda: "connected again" in (tmp_path / "run" / "out.log").read_text())
        assert len(servers_of(process.pid)) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    assert process.returncode == 0 and "exit code -9" in output and "Restarting" in output, output
    assert "connected again: all 4 streams" in output[output.index("Reconnecting") :], output


def test_rollouts_of_a_server_that_stood_still_are_dropped_and_counted_by_max_policy_lag(tmp_path):
    process = start(tmp_path, *ENDLESS, "--max_policy_lag", "40")
    try:
        steps = wait_until(lambda: learned_steps(tmp_path))[-1]
        server = servers_of(process.pid)[0]
        os.kill(server, signal.SIGSTOP)
        steps = wait_until(lambda: learned_steps(tmp_path, steps + 3000))[-1]  # 94 updates of 32 steps
        dropped = float(rows(tmp_path)[-1]["stats/dropped_rollouts"])
        os.kill(server, signal.SIGCONT)
        wait_until(lambda: float(rows(tmp_path)[-1]["stats/dropped_rollouts"]) > dropped)
        wait_until(lambda: learned_steps(tmp_path, steps + 1000))
    finally:
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    assert process.returncode == 0, output
    assert max(float(row["stats/policy_lag_max"]) for row in rows(tmp_path)) <= 40


@pytest.mark.parametrize("env", ["toy_envs:CrashAtStep-v0", "toy_envs:CrashInReset-v0"])
def test_an_environment_that_keeps_failing_ends_the_run_with_its_traceback(tmp_path, env):
    process = start(tmp_path, "--env", env, "--max_env_restarts", "1", "--total_steps", "1000000")
    output = finish(process)
    assert process.returncode == 1, output
    assert "Traceback" in output and "toy_envs.py" in output, output


@pytest.mark.parametrize(
    "env, why", [("Hang", "its environment hangs"), ("HangWithGil", "kept Python's GIL for longer than --gil_timeout")]
)
def test_a_server_whose_environment_hangs_is_replaced_and_training_goes_on(tmp_path, env, why):
    arguments = ["--env", f"toy_envs:{env}-v0", "--env_kwargs", '{"n": 20}', "--total_steps", "200"]
    arguments += ["--num_servers", "1", "--max_env_restarts", "100"]
    arguments += ["--env_timeout", "1.5", "--server_arguments=--gil_timeout 1.5"]
    process = start(tmp_path, *arguments)  # a life of the 8 environments has 160 steps
    output = finish(process)
    assert process.returncode == 0, output
    assert why in output and "Restarting it" in output, output


def test_a_slow_start_shows_how_many_environments_are_reset(run_here, monkeypatch):
    monkeypatch.setattr(remote, "PROGRESS_SECONDS", 0.3)
    code, output = run_here("--env", "toy_envs:SlowReset-v0", "--num_servers", "1", "--total_steps", "100")
    assert code == 0 and "resetting environments: 0 of 8" in output, output
    assert "connected again" not in output, "nothing was lost"


def test_streams_that_are_back_are_told_of_once_after_they_were_lost(monkeypatch):
    monkeypatch.setattr(remote, "PROGRESS_SECONDS", -1)
    lines: list[str] = []
    feed = remote.RemoteFeed.__new__(remote.RemoteFeed)
    feed._log = lines.append
    feed._is_lost, feed.num_streams, feed._listener = threading.Event(), 4, None
    connected = iter([0, 3, 4, 4, "lost", 3, 4, 4, 3])  # the last one is a stream that is lost and not yet told of

    def counters():
        if (streams := next(connected)) == "lost":
            remote._tell_lost(feed._log, feed._is_lost, "a stream was lost")
            streams = next(connected)
        return {"streams_connected": streams}

    left = iter([False] * 8)
    feed.pool = types.SimpleNamespace(counters=counters)
    monkeypatch.setattr(feed, "_exchange", lambda: None)
    feed.closed = types.SimpleNamespace(wait=lambda seconds: next(left, True))
    feed._group_width = 16
    feed.watch()
    assert lines == [
        "resetting environments: 0 of 64",
        "resetting environments: 48 of 64",
        "a stream was lost",
        "connected environments: 48 of 64",
        "connected again: all 4 streams",
    ]


def test_a_feed_is_freed_when_its_training_is_over(tmp_path):
    learner = new_learner(small_flags())
    feed = remote.RemoteFeed(
        consumer_of(learner, 0), learner.net.action_space, [f"unix:{tmp_path}/nobody"], None, None, unroll_length=8,
        group_width=4, batch_width=4, queue_width=4, inference_width=0, log=print, min_streams=1, connect_timeout=0.1,
    )  # fmt: skip
    with pytest.raises(ConnectionError):
        feed.pool.run()
    feed.close()
    is_there = weakref.ref(feed)
    del feed
    gc.collect()
    assert not is_there()


@pytest.mark.parametrize(
    "share, num_streams, expected", [(0.28, 50, 14), (0.07, 100, 7), (0.5, 3, 2), (1.0, 7, 7), (0.281, 50, 15)]
)
def test_min_envs_is_the_least_number_of_streams_with_that_share(monkeypatch, share, num_streams, expected):
    told = {}
    monkeypatch.setattr(servers, "RemoteFeed", lambda *rest, **options: told.update(options) or mock.Mock())
    flags = polybeast.Flags(min_envs=share, listen="unix:/nowhere", max_streams=num_streams)
    connection = servers.Connection(flags, mock.Mock(), {}, addresses=[], protection={})
    training = mock.Mock(learner=new_learner(small_flags()))
    training.env_seed.return_value = 77  # another one in each start
    servers.make_feed(training, connection, flags.batch_width)
    assert told["min_streams"] == expected and told["seed"] == 77


def test_a_learner_says_which_server_it_waits_for(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr(servers, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(servers, "CONNECT_SECONDS", 1.0)
    address = f"unix:{tmp_path / 'nobody'}"
    code, output = run_here("--addresses", address, "--env_timeout", "2")
    assert code == 1 and output.startswith(f"waiting for the env server at {address}, for 2 s"), output
    assert f"{address}: not reached within 2 s" in output and "Traceback" not in output, output


def test_ctrl_c_ends_a_learner_that_waits_for_a_server(tmp_path):
    process = start(tmp_path, "--addresses", f"unix:{tmp_path / 'nobody'}", "--env_timeout", "1000")
    printed = wait_until(process.text)
    assert printed.startswith("waiting for the env server"), printed
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    finish(process)
    assert process.returncode == -signal.SIGINT and time.monotonic() - began < PATIENCE / 4


def test_an_environment_that_the_servers_have_not_is_refused(tmp_path, run_here):
    with ServerProcess(tmp_path, "CartPole-v1", "--group_width", "4") as server:
        code, output = run_here("--addresses", server.address, "--env", "Acrobot-v1", "--total_steps", "100")
        assert code == 1 and "--env Acrobot-v1: the env server at" in output and "has CartPole-v1" in output, output
        given = f"--env={polybeast.Flags.env}"  # what it is by default, too
        code, output = run_here("--addresses", server.address, given, "--total_steps", "100")
        assert code == 1 and f"--env {polybeast.Flags.env}: the env server at" in output, output
        for env in ([], ["--env", "CartPole-v1"]):
            code, output = run_here("--addresses", server.address, *env, "--total_steps", "100", "--log_steps", "50")
            assert code == 0, output


def test_own_arguments_of_the_env_server_reach_create_env_here_and_there(run_here):
    code, output = run_here("--env", "CartPole-v1", "--server_arguments=--no_such_flag 3")
    assert code != 0 and "--no_such_flag" in output, output
    code, output = run_here("--env", "CartPole-v1", "--total_steps", "500", "--server_arguments=--max_streams 3")
    assert code == 0, output


@pytest.mark.parametrize("env", ["toy_envs:Nested-v0", "Blackjack-v1"])
def test_nested_observations_and_tuples_train(tmp_path, run_here, env):
    code, output = run_here("--env", env, "--num_servers", "1", "--total_steps", "500", "--log_steps", "200")
    assert code == 0 and rows(tmp_path), output


def test_the_choices_of_the_environment_reach_its_servers_and_what_is_played(tmp_path, run_here):
    arguments = ["--env", "toy_envs:Counting-v0", "--env_kwargs", '{"max_length": 2}', "--num_servers", "1"]
    code, output = run_here(*arguments, "--total_steps", "500", "--log_steps", "200")
    assert code == 0, output
    assert 1 < float(rows(tmp_path)[-1]["charts/episodic_length"]) <= 2
    code, output = run_here("--mode", "test", "--episodes", "20")
    assert code == 0 and max(json.loads((tmp_path / "run" / "test.json").read_text())["lengths_in_steps"]) == 2, output
    flags = polybeast.Flags(
        env="ALE/Pong-v5", env_kwargs='{"maxpool": false}', env_metrics="score,distance", frame_stack=2, frame_skip=3,
        resize=40, grayscale="off", sticky_actions=0.5, noops=0, episodic_life="on",
        full_action_space="on", atari_backend="beast", tasks='{"a b": {"env": "ALE/Pong-v5"}}', task="a b",
        reset_ahead=True,
    )  # fmt: skip
    parsed = polybeast_env.parse_flags(servers.command_line(flags))
    changed = {field.name: getattr(flags, field.name) for field in dataclasses.fields(EnvFlags)}
    assert changed.items() <= vars(parsed).items() and parsed.group_width == 16
    defaults = vars(polybeast_env.parse_flags([]))
    assert not changed.items() & defaults.items(), "each was given another value"
    assert dataclasses.asdict(EnvFlags()).items() <= defaults.items()


@pytest.mark.parametrize("where", ["infer", "learn"])
def test_an_exception_in_inference_or_learning_ends_the_run_with_its_traceback(tmp_path, where):
    broken = "compute_loss" if where == "learn" else "distribution"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import monobeast, polybeast
calls = []
def fail(*arguments, original=monobeast.{broken}):
    calls.append(1)
    if len(calls) > 20:
        raise RuntimeError("broken on purpose")
    return original(*arguments)
monobeast.{broken} = fail
polybeast.main()
"""
    script = tmp_path / "broken.py"
    script.write_text(code)
    words = [str(script), "--root", str(tmp_path), "--name", "run", "--no_tensorboard", *SMALL, *ENDLESS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    process = Program(words, cwd=Path.cwd(), env=environment, output=tmp_path / "output")
    output = finish(process)
    assert process.returncode == 1, output
    assert "broken on purpose" in output and "fail" in output, output
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", "Pnog-v4"], "no environment is called"),
        (["--group_width", "4", "--batch_width", "3"], "one must divide the other"),
        (["--queue_width", "2"], "--queue_width 2"),
        (["--inference_width", "2"], "--inference_width 2"),
        (["--addresses", "unix:/nowhere", "--token_file", "/nowhere"], "--token_file /nowhere"),
        (["--addresses", "unix:/nowhere", "--tls_ca", __file__], f"--tls_ca {__file__} holds no certificate: "),
        (["--addresses", "a,b"], "'a,b' is neither unix:/path nor host:port, as 127.0.0.1:4431 is; put spaces"),
        (["--addresses", "a:1,b:2"], "'a:1,b:2' is neither unix:/path nor host:port"),
        (["--addresses", "a:1", "b"], "'b' is neither unix:/path nor host:port"),
        (["--token_file", __file__], "are for env servers started elsewhere"),
        (["--tls_ca", __file__], "are for env servers started elsewhere"),
        (["--insecure"], "are for env servers started elsewhere"),
        (["--listen", "unix:/nowhere/a", "--tls_ca", __file__], "with --listen give it to the env servers, and here"),
        (["--env_timeout", "inf"], "--env_timeout inf: it must lie between 1e-06 and 900000.0"),
        (["--env_timeout", "999999"], "--env_timeout 999999.0: it must lie between 1e-06 and 900000.0"),
    ],
)
def test_impossible_flags_are_refused_in_one_line(run_here, arguments, message):
    code, output = run_here(*arguments)
    assert code == 1 and message in output and "Traceback" not in output, output


def test_batches_of_env_servers_are_what_docs_rollout_says(tmp_path, monkeypatch):
    """The learner's batches are MonoBeast's: overlapping rows, recomputable policy, lag recorded.

    The weights hardly change, and no statistics do."""
    batches = []
    original = monobeast.compute_loss

    def keep(flags, net, batch, core_state):
        with torch.no_grad():
            batches.append(map_tensors(torch.clone, batch))
        return original(flags, net, batch, core_state)

    monkeypatch.setattr(monobeast, "compute_loss", keep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    flags = polybeast.Flags(
        env="toy_envs:Dict-v0", root=str(tmp_path), name="run", group_width=4, batch_width=4, unroll_length=8,
        hidden_size=64, num_servers=1, total_steps=2000, learning_rate=1e-12, tensorboard=False, amp="off",
        center_images=False, normalize_observations=False,
    )  # fmt: skip
    polybeast.train(flags)
    assert len(batches) > 20
    mono_flags = small_flags(env=flags.env, hidden_size=64, center_images=False, normalize_observations=False)
    net, fields = new_net(mono_flags), set(rollout_fields(spaces_of(mono_flags)))
    net.load_state_dict(checkpoint.load(tmp_path / "run" / "checkpoint.pt")["net"])
    last_rows: dict[int, dict] = {}
    assert {name if not name.startswith("obs/") else "obs" for name in fields} == set(batches[0])
    assert net.names == list(batches[0]["obs"])
    for batch in batches:
        assert batch["done"].shape == (9, 4) and batch["action"].shape[:2] == (9, 4)
        assert batch["policy_version"].dtype == torch.int32
        with torch.no_grad():
            policy_logits, values, _ = net(batch, ())
        torch.testing.assert_close(policy_logits[:-1], batch["policy_logits"][1:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:-1], batch["baseline"][1:], rtol=1e-4, atol=1e-4)
        (group,) = batch["group"].unique().tolist()
        first = map_tensors(lambda x: x[0], batch)
        map_tensors(
            lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), last_rows.setdefault(group, first), first
        )
        last_rows[group] = map_tensors(lambda x: x[-1], batch)
    assert len(last_rows) == 2
    versions = np.concatenate([batch["policy_version"][1:].flatten() for batch in batches])
    assert versions.min() == 0 and versions.max() > 10
