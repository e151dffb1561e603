"""`train`: whole runs, their determinism, resuming, limits, threads and metrics."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from lock_step import games, metrics_of, new_learner, small_flags
from waiting import PATIENCE

import monobeast
import r2d2
from beast.clock import Laps
from beast.device import num_learner_threads, use_threads
from beast.envs.env_metrics import EnvMetrics
from beast.feeds import shared_memory
from beast.feeds.memory import RolloutMemory
from beast.feeds.slots import SlotTensors
from beast.learn.learner import Counted
from beast.run import checkpoint
from beast.run.directory import Run

ROOT = Path(__file__).resolve().parent.parent


def metric_rows(path: Path) -> list[str]:
    """All of metrics.csv but the columns that hold times."""
    lines = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()]

    def is_timed(name: str) -> bool:
        return name in ("hours", "charts/SPS") or name.startswith(("time/", "cores/")) or name.endswith("_wait")

    return [",".join(value for name, value in zip(lines[0], line) if not is_timed(name)) for line in lines]


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_two_deterministic_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_differs(tmp_path, core):
    outputs = {}
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        monobeast.train(
            small_flags(
                root=str(tmp_path), name=name, seed=seed, core=core, total_steps=1000, log_steps=125, tensorboard=False
            )
        )
        outputs[name] = metric_rows(tmp_path / name)
    assert len(outputs["first"]) >= 8
    assert outputs["first"] == outputs["second"]
    assert outputs["first"] != outputs["other"]
    weights = [checkpoint.load(tmp_path / name / "checkpoint.pt")["net"] for name in ("first", "second")]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


def test_a_run_of_the_same_name_goes_on_and_refuses_flags_that_contradict_it(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, log_steps=250, tensorboard=False)
    monobeast.train(flags)
    monobeast.train(dataclasses.replace(flags, total_steps=2000))
    steps = [int(float(line.split(",")[0])) for line in metric_rows(tmp_path / "run")[1:]]
    assert steps == sorted(set(steps)) and steps[-1] >= 2000
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]["steps"] >= 2000
    with pytest.raises(ValueError, match=r"--discount 0\.5 \(the run has 0\.99\)"):
        monobeast.train(dataclasses.replace(flags, discount=0.5))


def test_the_lag_of_a_real_run_is_recorded_and_old_rollouts_are_dropped_and_counted(tmp_path):
    flags = small_flags(
        root=str(tmp_path),
        name="run",
        deterministic=False,
        num_actors=2,
        batch_width=2,
        total_steps=3000,
        log_steps=500,
        max_policy_lag=3,
    )
    monobeast.train(dataclasses.replace(flags, tensorboard=False))
    rows = metrics_of(tmp_path / "run")
    lags = [float(row["stats/policy_lag_max"]) for row in rows]
    assert float(rows[0]["stats/policy_lag_bound"]) == 3
    assert 0 < max(lags) <= 3
    assert float(rows[-1]["stats/dropped_rollouts"]) > 0
    assert all(float(row["stats/policy_lag_mean"]) <= float(row["stats/policy_lag_max"]) for row in rows)


def test_total_minutes_stop_a_run_and_count_over_all_its_starts(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_minutes=0.02, deterministic=False, tensorboard=False)
    monobeast.train(flags)
    counts = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]
    assert counts["seconds"] >= 60 * 0.02
    monobeast.train(flags)
    again = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]
    assert again["updates"] <= counts["updates"] + 1, "a run whose minutes are used up trains no further"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "Pendulum-v1", "reward_scale": 0.1},
        {"env": "toy_envs:MultiDiscrete-v0"},
        {"env": "toy_envs:Buttons-v0"},
        {"env": "toy_envs:Dict-v0", "core": "gru"},
        {"env": "toy_envs:Nested-v0"},
        {"env": "Blackjack-v1"},
        {"env": "FrozenLake-v1"},
        {"env": "MinAtar/Breakout-v0", "batch_width": 8},
        {"ppo_clip": 0.2, "optimizer": "rmsprop", "reduction": "sum", "lr_decay": "none"},
        {"env": "PongNoFrameskip-v4", "net": "deep", "group_width": 1, "batch_width": 2, "unroll_length": 4},
        {"env": "PongNoFrameskip-v4", "net": "mlp", "group_width": 2, "batch_width": 1, "unroll_length": 4},
        {
            "env": "PongNoFrameskip-v4",
            "amp": "on",
            "channels_last": False,
            "group_width": 1,
            "batch_width": 1,
            "unroll_length": 4,
        },
    ],
)
def test_every_kind_of_model_action_and_observation_trains_a_few_updates(tmp_path, changes):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=100, log_steps=20, tensorboard=False, **changes)
    monobeast.train(flags)
    counts = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]
    assert counts["steps"] >= 100 and counts["bad_updates"] == 0


def test_a_batch_of_several_groups_and_a_group_of_several_batches_train_on_every_column_once(monkeypatch, tmp_path):
    monkeypatch.setattr(monobeast.Training, "env_seed", lambda self, group, life: 100 * group)
    for K, B in ((4, 2), (4, 4), (2, 6)):
        trained: list = []
        original = monobeast.update

        def update(flags, learner, batch, core_state, trained=trained, original=original):
            trained.append(batch["obs"]["obs"][1:, :, :].clone())  # [T, B, 3]
            return original(flags, learner, batch, core_state)

        monkeypatch.setattr(monobeast, "update", update)
        flags = small_flags(
            env="toy_envs:Counting-v0", group_width=K, batch_width=B, root=str(tmp_path), name=f"{K}-{B}"
        )
        monobeast.train(dataclasses.replace(flags, total_steps=1000, log_steps=10_000, tensorboard=False))
        monkeypatch.setattr(monobeast, "update", original)
        assert all(batch.shape[1] == B for batch in trained)
        rows = torch.cat([batch.flatten(0, 1) for batch in trained])
        assert len(rows) >= 1000
        assert len(torch.unique(rows, dim=0)) == len(rows), "each step of each environment once"


def test_the_choices_of_the_environment_belong_to_a_run(tmp_path):
    flags = small_flags(
        root=str(tmp_path), name="run", env="toy_envs:Counting-v0", env_kwargs='{"max_length":3}', total_steps=100,
        tensorboard=False,
    )  # fmt: skip
    monobeast.train(flags)
    monobeast.train(small_flags(**{**dataclasses.asdict(flags), "env_kwargs": '{ "max_length": 3 }'}))
    for name, value in (("env_kwargs", '{"max_length": 4}'), ("frame_skip", 2), ("noops", 3)):
        with pytest.raises(ValueError, match=f"--{name} "):
            Run(tmp_path, "run", {"variant": "mono", **dataclasses.asdict(dataclasses.replace(flags, **{name: value}))})
    monobeast.test(dataclasses.replace(flags, mode="test", episodes=20, env_kwargs=""))
    lengths = json.loads((tmp_path / "run" / "test.json").read_text())["lengths_in_steps"]
    assert max(lengths) == 3, "games are played in the run's environment"


@pytest.mark.parametrize(
    "changes", [{"core": "lstm"}, {"batch_width": 2}, {"batch_width": 8}, {"env": "toy_envs:Dict-v0"}]
)
def test_slots_with_a_twin_on_the_device_train_to_the_bit_as_those_in_shared_memory_alone(
    tmp_path, monkeypatch, changes
):
    """What a GPU's slots do, but for streams and fences: the twin is on the CPU here."""
    uploaded: list[tuple[int, int]] = []
    original = SlotTensors.upload

    def upload(self, slot, row):
        uploaded.append((slot, row))
        original(self, slot, row)

    monkeypatch.setattr(SlotTensors, "upload", upload)
    states = []
    for is_twin in (False, True):
        uploaded.clear()
        monkeypatch.setattr(
            shared_memory, "SlotTensors", lambda *args, is_twin=is_twin: SlotTensors(*args, is_twin=is_twin)
        )
        flags = small_flags(root=str(tmp_path), name=f"twin-{is_twin}", total_steps=800, tensorboard=False, **changes)
        monobeast.train(flags)
        states.append(checkpoint.load(tmp_path / flags.name / "checkpoint.pt"))
    assert states[0]["counts"]["steps"] == states[1]["counts"]["steps"] >= 800
    for a, b in zip(states[0]["net"].values(), states[1]["net"].values()):
        assert torch.equal(a, b)
    num_groups, T = flags.num_actors * monobeast.GROUPS_PER_ACTOR, flags.unroll_length
    rows: dict[int, list[int]] = {slot: [] for slot in range(flags.num_slots)}
    for slot, row in uploaded:
        rows[slot].append(row)
    assert sum(written.count(0) for written in rows.values()) == num_groups, "a row that is repeated goes up once"
    for written in rows.values():
        later = [row for row in written if row > 0]
        assert later == [1 + index % T for index in range(len(later))], "each row once, in order"


def test_inference_reads_observations_in_shared_memory_and_so_does_the_learner_where_a_batch_is_of_one_group(
    tmp_path, monkeypatch
):
    for K, B, is_shared in ((4, 4, True), (4, 2, True), (4, 8, False)):
        places: dict[bool, set] = {False: set(), True: set()}  # is it the learner's pass -> is it in a slot
        memories: list[RolloutMemory] = []
        init, forward = RolloutMemory.__init__, monobeast.Encoder.forward

        def remember(self, *args, init=init, memories=memories):
            init(self, *args)
            memories.append(self)

        def watch(self, x, forward=forward, memories=memories, places=places):
            offset = x.data_ptr() - memories[0].buffer.ctypes.data
            places[torch.is_grad_enabled()].add(0 <= offset < memories[0].num_bytes)
            return forward(self, x)

        monkeypatch.setattr(RolloutMemory, "__init__", remember)
        monkeypatch.setattr(monobeast.Encoder, "forward", watch)
        flags = small_flags(group_width=K, batch_width=B, root=str(tmp_path), name=f"{K}-{B}", tensorboard=False)
        monobeast.train(dataclasses.replace(flags, total_steps=500))
        assert places == {False: {True}, True: {is_shared}}
        monkeypatch.undo()


def test_a_thread_computes_on_as_many_cores_as_it_was_given_whatever_another_thread_is_given_later():
    inference_is_set, learner_is_set = threading.Event(), threading.Event()

    def inference() -> int:
        use_threads(1)
        inference_is_set.set()
        assert learner_is_set.wait(PATIENCE)
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(inference)
        assert inference_is_set.wait(PATIENCE)
        threads.submit(use_threads, 3).result()
        learner_is_set.set()
        assert found.result() == 1
        threads.submit(use_threads, torch.get_num_threads()).result()


def test_the_learner_takes_half_of_the_cores_that_it_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 8, 9, 11}, raising=False)
    assert num_learner_threads(monobeast.Flags()) == 2
    assert num_learner_threads(monobeast.Flags(learner_threads=5)) == 5


@pytest.mark.parametrize("agent", [monobeast, r2d2])
def test_compile_is_asked_for_the_forward_pass_and_the_run_goes_on_with_it(tmp_path, monkeypatch, agent):
    calls = []

    def compiled(forward, **options):
        return lambda *arguments: calls.append(torch.is_grad_enabled()) or forward(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    own = {"compile": True, "total_steps": 1000, "log_steps": 500, "tensorboard": False}
    agent.train(small_flags(agent, root=str(tmp_path), name="run", **own))
    assert sum(calls) >= 5, "every update's forward pass"
    assert len(calls) - sum(calls) >= 5, "and those of inference"
    assert "time/learner_forward" in (tmp_path / "run" / "metrics.csv").read_text()


COUNT_FAULTS = """
import resource, statistics, sys
import monobeast

faults, update = [], monobeast.update

def counted(*arguments):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    stats = update(*arguments)
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return stats

monobeast.update = counted
monobeast.train(monobeast.Flags(
    env="BreakoutNoFrameskip-v4", root=sys.argv[1], name="run", batch_width=32, amp="off", total_steps=8000,
    tensorboard=False,
))
print(statistics.median(faults[len(faults) // 2 :]))  # the first ones find room for all that they need
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's page faults, with glibc's malloc")
def test_an_update_gets_no_fresh_memory_from_the_kernel(tmp_path):
    output = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert float(output) < 500, "where malloc gives memory back it is above 15,000"


def test_every_group_life_start_and_seed_has_environments_of_its_own(tmp_path):
    seeds, noise = [], []
    for name, seed in (("a", 1), ("a", 1), ("b", 2)):  # the second is another start of "a"
        flags = small_flags(root=str(tmp_path), name=name, seed=seed)
        with monobeast.Training("mono", flags, new_learner(flags), set(), frames_per_step=1) as training:
            noise.append(training.generator.initial_seed())
            seeds += [training.env_seed(group, life) for group in range(3) for life in range(3)]
            training.save()
    assert len(set(seeds)) == 27 and noise[0] != noise[2]


def test_best_pt_keeps_the_best_and_is_left_to_evaluations_where_there_are_any(tmp_path):
    for name, evaluations in (("a", None), ("b", object())):
        flags = small_flags(root=str(tmp_path), name=name)
        learner = new_learner(flags)
        with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
            training._evaluations = evaluations
            for mean in (5.0, 3.0):
                learner.record_games(games(*[(mean, 10)] * 100))
                learner.steps += 1
                training.save()
            assert training.run.best_path.exists() == (evaluations is None)
            assert evaluations or checkpoint.load(training.run.best_path)["counts"]["steps"] == 1


def test_a_checkpoints_state_is_a_copy_taken_between_two_updates(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run")
    learner, locked = new_learner(flags), []
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        kept = training._state()["net"]["policy.weight"]
        learner.net.policy.weight.data.add_(1)
        assert not torch.equal(kept, learner.net.policy.weight)
        state = training._state
        monkeypatch.setattr(training, "_state", lambda: locked.append(learner.updating.locked()) or state())
        training.save()
    assert locked == [True]


def test_checkpoints_are_minutes_apart(tmp_path, monkeypatch):
    limits = {"total_minutes": 0.03, "checkpoint_minutes": 0.004}
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False, **limits)
    closed, saves = threading.Event(), []
    feed = types.SimpleNamespace(
        close=closed.set,
        laps=Laps(),
        workers={},
        cores={},
        measure=lambda *_: {},
        description="",
        env_metrics=EnvMetrics(),
    )
    with monobeast.Training("mono", flags, new_learner(flags), set(), frames_per_step=1) as training:
        monkeypatch.setattr(training, "save", lambda: saves.append(1))
        training.run_threads(feed, infer=closed.wait, learn=closed.wait, introduction="")
    assert len(saves) >= 2, "one of them at the end"


@pytest.mark.parametrize("module", [monobeast, r2d2])
def test_every_seed_has_initial_weights_of_its_own(monkeypatch, tmp_path, module):
    nets, original = [], module.make_learner

    def stop(*arguments):
        nets.append(list(original(*arguments).net.parameters()))
        raise InterruptedError

    monkeypatch.setattr(module, "make_learner", stop)
    for seed in (1, 2, 1):
        with pytest.raises(InterruptedError):
            module.train(module.Flags(env="CartPole-v1", seed=seed, root=str(tmp_path), num_actors=1))
    assert [all(map(torch.equal, nets[0], net)) for net in nets] == [True, False, True]


def test_metrics_average_the_good_updates_since_the_last_row(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False)
    learner = new_learner(flags)
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        training._feed, training._row_steps = types.SimpleNamespace(measure=lambda *_: {}, env_metrics=EnvMetrics()), 0
        training._metrics = types.SimpleNamespace(write=lambda *row: None)
        for steps, losses in ((100, (1.0, math.nan)), (1100, (3.0, 5.0))):
            training._row_began, learner.steps = time.monotonic() - 10, steps
            for loss in losses:
                metrics = {"losses/grad_norm": loss, "losses/total_loss": loss, "stats/policy_lag_max": 0.0}
                training._gather(Counted(math.isnan(loss), 0.0, metrics))
            training._write_metrics()
            expected = {100: 1.0, 1100: 4.0}[steps]
            assert training.latest["losses/total_loss"] == expected, "a row has only what came after the one before it"
        assert training.latest["charts/SPS"] == pytest.approx(100, rel=0.05)
