"""PolyBeast: the same agent as MonoBeast, trained through real env servers."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments

import monobeast

pytest.importorskip("libbeast", reason="libbeast is not built: pip install .")
from test_monobeast import LockStep, small_flags

import polybeast
from beast.tensors import SeenObservations, map_tensors

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--group_width", "4", "--batch_width", "4", "--unroll_length", "8", "--hidden_size", "64", "--core_size", "32"]


def poly_flags(flags: monobeast.Flags) -> polybeast.Flags:
    """The same agent."""
    known = {field.name for field in dataclasses.fields(polybeast.Flags)}
    return polybeast.Flags(**{k: v for k, v in dataclasses.asdict(flags).items() if k in known})


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "toy_envs:Dict-v0", "core": "lstm"},
        {"env": "toy_envs:Tuple-v0", "core": "gru", "ppo_clip": 0.0, "reduction": "sum"},
        {"env": "Pendulum-v1", "optimizer": "rmsprop"},
        {"env": "MinAtar/Breakout-v0"},
        {"env": "PongNoFrameskip-v4", "net": "deep", "group_width": 2, "batch_width": 2, "unroll_length": 4},
    ],
)
def test_both_variants_give_identical_outputs_loss_gradients_and_step_on_the_same_batch(changes):
    flags = small_flags(**changes)
    lock_step = LockStep(flags)
    for _ in range(3):
        _, rollout, core_state = lock_step.next_rollout()
    results = []
    for variant, variant_flags in ((monobeast, flags), (polybeast, poly_flags(flags))):
        net = variant.Net(*monobeast.probe_env(flags), variant_flags)
        net.load_state_dict(lock_step.net.state_dict())
        optimizer = variant.make_optimizer(variant_flags, net)
        outputs = net(rollout, core_state)
        loss, stats = variant.compute_loss(variant_flags, net, lock_step.action_space, rollout, core_state)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in net.parameters()]
        optimizer.step()
        leaves: list = []
        map_tensors(leaves.append, (outputs, stats, tuple(gradients), tuple(net.state_dict().values())))
        results.append([*leaves, loss])
    assert len(results[0]) == len(results[1]) > 20
    for mono, poly in zip(*results):
        assert torch.equal(torch.as_tensor(mono), torch.as_tensor(poly))


def start(tmp_path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "polybeast.py"), "--root", str(tmp_path), "--name", "run", "--no_tensorboard"]
    return subprocess.Popen(
        [*command, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )


def finish(process: subprocess.Popen, seconds: float = 120) -> str:
    output = process.communicate(timeout=seconds)[0]
    return output


def rows(tmp_path) -> list[dict]:
    with open(tmp_path / "run" / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_it_trains_with_servers_of_its_own_resumes_and_plays(tmp_path):
    arguments = ["--env", "CartPole-v1", "--core", "lstm", "--log_steps", "500"]
    process = start(tmp_path, *arguments, "--total_steps", "2000")
    output = finish(process)
    assert process.returncode == 0, output
    process = start(tmp_path, *arguments, "--total_steps", "4000")
    output = finish(process)
    assert process.returncode == 0 and "resumed at step 2," in output, output
    steps = [int(row["step"]) for row in rows(tmp_path)]
    assert steps == sorted(steps) and steps[-1] >= 4000
    process = start(tmp_path, "--mode", "test", "--episodes", "3")
    output = finish(process)
    assert process.returncode == 0 and "over 3 whole games" in output, output
    assert len(json.loads((tmp_path / "run" / "test.json").read_text())["returns"]) == 3
    assert not [process for process in running_servers() if str(tmp_path) in process]


def test_the_columns_that_wait_are_counted_at_every_update_of_a_row_of_metrics(tmp_path, monkeypatch):
    size, sizes = polybeast.libbeast.BatchingQueue.size, []

    def counted(queue):
        sizes.append(size(queue))
        return sizes[-1]

    monkeypatch.setattr(polybeast.libbeast.BatchingQueue, "size", counted)
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
    polybeast.train(polybeast.Flags(**flags, total_steps=10_000, log_steps=1000, tensorboard=False))
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


def wait_for(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return result


def learned_steps(tmp_path, more_than: int = 0):
    path = tmp_path / "run" / "metrics.csv"
    return path.exists() and [int(row["step"]) for row in rows(tmp_path) if int(row["step"]) > more_than]


ENDLESS = ["--env", "CartPole-v1", "--total_steps", "1000000000", "--log_steps", "500"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_exit_code_0_a_checkpoint_and_no_server_left(tmp_path, number):
    process = start(tmp_path, *ENDLESS)
    wait_for(lambda: learned_steps(tmp_path))
    servers = servers_of(process.pid)
    assert len(servers) == 2
    process.send_signal(number)
    output = finish(process, 10)
    assert process.returncode == 0 and "stopped at step" in output and "Traceback" not in output, output
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert not set(servers) & {int(line.split()[0]) for line in running_servers()}


def test_a_killed_learner_leaves_no_server(tmp_path):
    process = start(tmp_path, *ENDLESS)
    wait_for(lambda: learned_steps(tmp_path))
    servers = servers_of(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not set(servers) & {int(line.split()[0]) for line in running_servers()}, 10)


def test_a_killed_server_is_replaced_and_training_goes_on(tmp_path):
    process = start(tmp_path, *ENDLESS)
    try:
        wait_for(lambda: learned_steps(tmp_path))
        os.kill(servers_of(process.pid)[0], signal.SIGKILL)
        wait_for(lambda: [row for row in rows(tmp_path) if float(row["stats/env_restarts"]) > 0])
        steps = int(rows(tmp_path)[-1]["step"])
        wait_for(lambda: learned_steps(tmp_path, steps + 2000))
        assert len(servers_of(process.pid)) == 2
    finally:
        process.send_signal(signal.SIGINT)
        output = finish(process, 20)
    assert process.returncode == 0 and "exit code -9" in output and "Restarting" in output, output


@pytest.mark.parametrize("env", ["toy_envs:CrashAtStep-v0", "toy_envs:CrashInReset-v0"])
def test_an_environment_that_keeps_failing_ends_the_run_with_its_traceback(tmp_path, env):
    process = start(tmp_path, "--env", env, "--max_env_restarts", "1", "--total_steps", "1000000")
    output = finish(process)
    assert process.returncode == 1, output
    assert "Traceback" in output and "toy_envs.py" in output, output


def test_a_server_whose_environment_hangs_is_replaced_and_training_goes_on(tmp_path):
    arguments = ["--env", "toy_envs:Hang-v0", "--env_timeout", "1", "--num_servers", "1", "--max_env_restarts", "100"]
    process = start(tmp_path, *arguments, "--total_steps", "700", "--log_steps", "200")  # a life has 50 rows
    output = finish(process)
    assert process.returncode == 0, output
    assert output.count("its environment hangs") >= 1 and "Restarting it" in output, output


def test_own_arguments_of_the_env_server_reach_create_env_here_and_there(tmp_path):
    process = start(tmp_path, "--env", "CartPole-v1", "--server_arguments=--no_such_flag 3")
    output = finish(process)
    assert process.returncode != 0 and "--no_such_flag" in output, output
    process = start(tmp_path, "--env", "CartPole-v1", "--total_steps", "500", "--server_arguments=--max_streams 3")
    output = finish(process)
    assert process.returncode == 0, output


@pytest.mark.parametrize("where", ["infer", "learn"])
def test_an_exception_in_inference_or_learning_ends_the_run_with_its_traceback(tmp_path, where):
    broken = "compute_loss" if where == "learn" else "distribution"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import polybeast
calls = []
def fail(*arguments, original=polybeast.{broken}):
    calls.append(1)
    if len(calls) > 20:
        raise RuntimeError("broken on purpose")
    return original(*arguments)
polybeast.{broken} = fail
polybeast.main()
"""
    script = tmp_path / "broken.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script), "--root", str(tmp_path), "--name", "run", "--no_tensorboard", *SMALL, *ENDLESS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    assert done.returncode == 1, done.stderr
    assert "broken on purpose" in done.stderr and "fail" in done.stderr, done.stderr
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", "Pnog-v4"], "no environment is called"),
        (["--group_width", "4", "--batch_width", "3"], "one must divide the other"),
        (["--queue_width", "2"], "--queue_width 2"),
        (["--inference_width", "2"], "--inference_width 2"),
        (["--token_file", "/nowhere"], "--token_file /nowhere"),
        (["--addresses", "unix:/nowhere/socket", "--env_timeout", "2"], "unix:/nowhere/socket"),
    ],
)
def test_impossible_flags_are_refused_in_one_line(tmp_path, arguments, message):
    process = start(tmp_path, *arguments)
    output = finish(process)
    assert process.returncode == 1, output
    assert message in output and "Traceback" not in output, output


def test_every_row_of_a_batch_reaches_the_learner_as_section_3_says(tmp_path, monkeypatch):
    """The learner's batches are MonoBeast's: overlapping rows, recomputable policy, lag recorded."""
    batches = []
    original = polybeast.compute_loss

    def keep(flags, net, action_space, batch, core_state):
        with torch.no_grad():
            batches.append(map_tensors(torch.clone, batch))
        return original(flags, net, action_space, batch, core_state)

    monkeypatch.setattr(polybeast, "compute_loss", keep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    flags = polybeast.Flags(
        env="toy_envs:Dict-v0", root=str(tmp_path), name="run", group_width=4, batch_width=4, unroll_length=8,
        hidden_size=64, num_servers=1, total_steps=2000, learning_rate=1e-12, tensorboard=False, amp="off",
    )  # fmt: skip
    polybeast.train(flags)
    assert len(batches) > 20
    net = polybeast.Net(*monobeast.probe_env(monobeast.Flags(env=flags.env)), flags)
    fields = set(monobeast.rollout_fields(*monobeast.probe_env(monobeast.Flags(env=flags.env))))
    assert {name if not name.startswith("obs/") else "obs" for name in fields} == set(batches[0])
    assert net.names == list(batches[0]["obs"])
    for batch in batches:
        assert batch["done"].shape == (9, 4) and batch["action"].shape[:2] == (9, 4)
        assert batch["policy_version"].dtype == torch.int32
    versions = np.concatenate([batch["policy_version"][1:].flatten() for batch in batches])
    assert versions.min() == 0 and versions.max() > 10
