"""The agent: rollouts, ratio, determinism, resuming, flags."""

import copy
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from gymnasium import spaces
from lock_step import LockStep, new_learner, new_net, small_flags, spaces_of, step

import monobeast
import r2d2
from beast.clock import Laps
from beast.envs.rows import nest_observations, rollout_fields
from beast.feeds import shared_memory
from beast.feeds.actors import ActorProcesses
from beast.feeds.memory import RolloutMemory
from beast.feeds.slots import SlotTensors
from beast.learn.distributions import distribution
from beast.learn.learner import Learner
from beast.learn.nests import map_tensors
from beast.learn.published import inference_copy
from beast.run import checkpoint, command_line
from beast.run.directory import Run
from beast.run.hardware import num_learner_threads, use_threads
from monobeast import Flags, Net

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"core": "lstm"},
        {"core": "gru"},
        {"env": "Pendulum-v1", "core": "lstm"},
        {"env": "toy_envs:Tuple-v0"},
        {"env": "toy_envs:Dict-v0", "core": "lstm"},
        {"env": "PongNoFrameskip-v4", "group_width": 1, "batch_width": 1, "unroll_length": 4},
    ],
)
def test_recomputing_a_rollout_with_the_weights_that_made_it_gives_ratio_one_and_the_stored_values(changes):
    lock_step = LockStep(small_flags(**changes))
    for _ in range(30):
        rollout, core_state = lock_step.next_rollout()
        with torch.no_grad():
            policy_logits, values, _ = lock_step.net(rollout, core_state)
        stored, actions = rollout["policy_logits"][1:], rollout["action"][1:]
        log_probs = [
            distribution(lock_step.net.action_space, p).log_prob(actions) for p in (policy_logits[:-1], stored)
        ]
        torch.testing.assert_close((log_probs[0] - log_probs[1]).exp(), torch.ones_like(values[1:]), rtol=0, atol=1e-5)
        torch.testing.assert_close(policy_logits[:-1], stored, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)
        # As training would: a later version of the weights, images centered by what was seen since.
        lock_step.net(rollout, core_state)
        lock_step.weights.publish(lock_step.net, 1)
        lock_step.next_rollout(), lock_step.next_rollout(), lock_step.next_rollout()


def test_rollouts_overlap_by_one_row_and_follow_one_another_without_a_gap():
    """The counting environment tells its own number, episode and step in every observation."""
    lock_step = LockStep(small_flags(env="toy_envs:Counting-v0", group_width=3, batch_width=3))
    last_rows: dict = {}
    seen_ends = 0
    for _ in range(200):
        rollout, _ = lock_step.next_rollout()
        rollout = map_tensors(lambda x: x.clone(), rollout)
        observations = rollout["obs"]["obs"]  # [T+1, K, 3]: environment, episode, step of the episode
        key = tuple(observations[0, :, 0].tolist())
        if key in last_rows:
            map_tensors(
                lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0),
                last_rows[key],
                map_tensors(lambda x: x[0], rollout),
            )
        last_rows[key] = map_tensors(lambda x: x[-1], rollout)
        assert (observations[:, :, 0] == observations[0, :, 0]).all(), "columns keep their environments"
        episode, step = observations[:, :, 1], observations[:, :, 2]
        torch.testing.assert_close(rollout["episode_step"].float(), step, rtol=0, atol=0)
        assert (rollout["done"] == (step == 0)).all()
        ended = rollout["terminated"] | rollout["truncated"]
        assert (ended[:-1] == rollout["done"][1:]).all(), "a final row is followed by a first row, and nothing else is"
        assert (episode[1:] == episode[:-1] + rollout["done"][1:]).all()
        assert (step[1:] == torch.where(rollout["done"][1:], 0, step[:-1] + 1)).all()
        seen_ends += int(ended.sum())
    assert len(last_rows) == 2 and seen_ends > 50


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_the_stored_core_state_is_the_one_before_row_zero_in_every_slot_of_a_long_run(core):
    """Held against a recurrent net that walks each environment's whole history, row after row, from its start."""
    lock_step = LockStep(small_flags(core=core))
    states: dict = {}
    used_slots = set()
    for number in range(40):
        rollout, core_state = lock_step.next_rollout()
        used_slots.add(rollout["obs"]["obs"].data_ptr())
        group = int(rollout["group"][0, 0])
        assert group == number % 2, "two groups in lock-step, one after the other"
        walked = states.get(group, lock_step.net.initial_state(4))
        for mine, stored in zip(walked, core_state):
            torch.testing.assert_close(mine, stored, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for row in range(lock_step.flags.unroll_length):
                _, _, walked = lock_step.net(map_tensors(lambda x: x[row : row + 1], rollout), walked)  # noqa: B023
        states[group] = walked
    assert len(used_slots) == lock_step.flags.num_slots


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
                root=str(tmp_path), name=name, seed=seed, core=core, total_steps=2000, log_steps=250, tensorboard=False
            )
        )
        outputs[name] = metric_rows(tmp_path / name)
    assert len(outputs["first"]) >= 8
    assert outputs["first"] == outputs["second"]
    assert outputs["first"] != outputs["other"]
    weights = [checkpoint.load(tmp_path / name / "checkpoint.pt")["net"] for name in ("first", "second")]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_resumed_learner_does_to_the_bit_what_it_would_have_done_without_the_stop(tmp_path, optimizer):
    flags = small_flags(core="lstm", optimizer=optimizer, total_steps=1000)
    lock_step = LockStep(flags)
    batches = []
    for _ in range(6):
        rollout, core_state = lock_step.next_rollout()
        batches.append((map_tensors(lambda x: x.clone(), rollout), core_state))

    def rate(learner: Learner, batch: dict, core_state: tuple) -> float:
        step(flags, learner, batch, core_state)
        return learner.optimizer.param_groups[0]["lr"]

    straight = new_learner(flags)
    for batch, core_state in batches[:3]:
        step(flags, straight, batch, core_state)
    straight.record_episodes([(1.5, 10), (2.5, 20)])
    checkpoint.save(tmp_path / "checkpoint.pt", straight.state_dict())
    after_the_save = torch.rand(3)
    rates = [rate(straight, *batch) for batch in batches[3:]]

    resumed = new_learner(flags)
    resumed.load_state_dict(checkpoint.load(tmp_path / "checkpoint.pt"))
    assert torch.equal(torch.rand(3), after_the_save), "the random number generator goes on where it was"
    assert list(resumed.returns) == [1.5, 2.5] and list(resumed.lengths) == [10, 20] and resumed.episodes == 2
    assert [rate(resumed, *batch) for batch in batches[3:]] == rates
    assert (resumed.steps, resumed.updates) == (straight.steps, straight.updates)
    for a, b in zip(straight.net.state_dict().values(), resumed.net.state_dict().values()):
        assert torch.equal(a, b)


def test_a_run_of_the_same_name_goes_on_and_refuses_flags_that_contradict_it(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=2000, log_steps=500, tensorboard=False)
    monobeast.train(flags)
    monobeast.train(dataclasses.replace(flags, total_steps=4000))
    steps = [int(float(line.split(",")[0])) for line in metric_rows(tmp_path / "run")[1:]]
    assert steps == sorted(set(steps)) and steps[-1] >= 4000
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]["steps"] >= 4000
    with pytest.raises(ValueError, match=r"--discount 0\.5 \(the run has 0\.99\)"):
        monobeast.train(dataclasses.replace(flags, discount=0.5))


def test_the_lag_of_a_real_run_is_recorded_and_old_rollouts_are_dropped_and_counted(tmp_path):
    flags = small_flags(
        root=str(tmp_path),
        name="run",
        deterministic=False,
        num_actors=2,
        batch_width=2,
        total_steps=10_000,
        log_steps=1000,
        max_policy_lag=3,
    )
    monobeast.train(dataclasses.replace(flags, tensorboard=False))
    lines = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    rows = [dict(zip(lines[0], line)) for line in lines[1:]]
    lags = [float(row["stats/policy_lag_max"]) for row in rows]
    assert float(rows[0]["stats/policy_lag_bound"]) == 3
    assert 0 < max(lags) <= 3
    assert float(rows[-1]["stats/dropped_rollouts"]) > 0
    assert all(float(row["stats/policy_lag_mean"]) <= float(row["stats/policy_lag_max"]) for row in rows)


def test_total_minutes_stop_a_run_and_count_over_all_its_starts(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_minutes=0.05, deterministic=False, tensorboard=False)
    monobeast.train(flags)
    counts = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]
    assert counts["seconds"] >= 60 * 0.05
    monobeast.train(flags)
    again = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]
    assert again["updates"] <= counts["updates"] + 1, "a run whose minutes are used up trains no further"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"group_width": 6, "batch_width": 4},
            r"--group_width 6 and --batch_width 4: one must divide the other.*--batch_width 2 or 6",
        ),
        ({"discount": 1.5}, r"--discount 1.5: it must lie between 0 and 1"),
        ({"num_actors": 0}, r"--num_actors 0: it must lie between 1 and 1024"),
        ({"learning_rate": -1.0}, r"--learning_rate -1.0"),
        ({"hidden_size": 3}, r"--hidden_size 3: it must lie between 4"),
        ({"seed": 2**31}, r"--seed 2147483648: it must lie between 0 and 1000000000"),
        ({"learning_rate": math.nan}, r"--learning_rate nan"),
        ({"num_slots": 1}, r"--num_slots 1: .* need at least 2"),
        ({"group_width": 1, "batch_width": 10**6}, r"--num_slots 2000000: at most 65536; use a wider --group_width"),
        ({"batch_width": 1, "max_policy_lag": 2}, r"--max_policy_lag 2: .* gives 4 updates.* give at least 3"),
    ],
)
def test_impossible_flags_are_refused_with_the_value_the_range_and_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small_flags(**changes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", "PongNoFrameskp-v4"], "PongNoFrameskip-v4"),
        (["--no_such_flag", "3"], "no_such_flag"),
        (["--net", "huge"], "shallow"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "mps"], "give cpu, cuda"),
        (["--env_kwargs", "{level: 3}"], "--env_kwargs '{level: 3}' is no JSON"),
        (
            ["--env", "toy_envs:CrashAtStep-v0", "--env_kwargs", '{"n": 1}'],
            "step() raised RuntimeError: this toy breaks",
        ),
        (["--env", "toy_envs:Counting-v0", "--env_kwargs", '{"length": 1}'], "unexpected keyword argument 'length'"),
        (["--frame_skip", "-1"], "--frame_skip -1: it must lie between 0 and 1000"),
        (["--sticky_actions", "2"], "--sticky_actions 2.0: it must lie between 0 and 1"),
        (["--mode", "test", "--name", "nothing"], "nothing"),
    ],
)
def test_a_wrong_command_line_ends_with_an_error_that_helps(tmp_path, run_main, arguments, message):
    if "cuda:7" in arguments and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    code, output = run_main(monobeast, "--root", str(tmp_path), *arguments)
    assert code != 0 and message in output and "Traceback" not in output


def test_every_flag_has_a_help_line_that_tells_its_default(run_main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # in a wider terminal the sections lie side by side
    code, help_text = run_main(monobeast, "--help")
    assert code == 0
    entries = {part.split(maxsplit=1)[0].strip(","): part for part in help_text.split("│ --")[1:]}
    for field in dataclasses.fields(Flags):
        words = " ".join(entries[field.name].replace("│", " ").split())
        assert len(words) > len(field.name) + 40, f"--{field.name} has no help"
        default = repr(field.default) if not isinstance(field.default, str) else (field.default or "''")
        assert f"(default: {default})" in words, f"--{field.name}: {words}"


def test_help_shows_the_sections_of_the_file(run_main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, help_text = run_main(monobeast, "--help")
    titles = [line.split("─")[1].strip() for line in help_text.splitlines() if line.startswith("╭")]
    assert titles[1:] == [
        *(
            "the environment options",
            "the run options",
            "limits options",
            "hardware options",
            "records options",
            "evaluation and test options",
        ),
        *("rollouts and batches options", "the agent options", "the loss options", "the optimizer options"),
        "actors options",
    ]
    loss = help_text.split("the loss options")[1].split("╭")[0]
    assert "--vtrace_lambda FLOAT" in loss and "--optimizer " not in loss


def test_help_imports_no_torch():
    command = [sys.executable, "-X", "importtime", "monobeast.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--vtrace_lambda" in done.stdout and "| tyro\n" in done.stderr.replace("|   ", "| ").replace("  ", "")
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in ("torch", "scipy")]


def test_help_ends_quietly_where_nobody_reads_it_any_more():
    reader, writer = os.pipe()
    os.close(reader)  # as `--help | head` does, a little later
    done = subprocess.run(
        [sys.executable, "monobeast.py", "--help"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.stderr == "" and done.returncode == 0


def test_flags_are_parsed_whatever_their_section_and_class():
    @dataclasses.dataclass
    class Own(monobeast.Flags):
        # Mine: of this test.
        level: int = 3
        """How hard it is."""
        discount: float = 0.5

    arguments = ["--level", "4", "--no_tensorboard", "--net", "mlp", "--reward_clip", "2.5", "--seed", "7"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["own.py", *arguments])
        flags = command_line.parse(Own, None)
    changes = {"level": 4, "tensorboard": False, "net": "mlp", "reward_clip": 2.5, "seed": 7, "discount": 0.5}
    assert flags == Own(**changes)
    known = command_line.read_source(Own)
    assert known["level"] == command_line.Flag("Mine", "How hard it is.")
    assert known["discount"].section == "The loss" and known["discount"].help.startswith("Discount of one")


def test_actors_do_not_import_torch_and_stay_small(tmp_path):
    flags = small_flags(env="PongNoFrameskip-v4", group_width=2, batch_width=2, max_env_restarts=0)
    memory = RolloutMemory(rollout_fields(spaces_of(flags)), 2, 4, 2)
    pool = ActorProcesses(monobeast.__file__, flags, memory, 2, lambda group, life: group, print)
    try:
        ready: list[int] = []
        while len(ready) < 2:
            ready += pool.wait(1.0)[0]
        pool.go(0, 0, 0)
        while not pool.wait(1.0)[0]:
            pass
        (pid,) = (process.popen.pid for process in pool.processes)
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        _, resident, shared = (int(pages) for pages in Path(f"/proc/{pid}/statm").read_text().split()[:3])
        assert (resident - shared) * os.sysconf("SC_PAGE_SIZE") < 200e6
    finally:
        pool.close()


def test_shared_memory_of_an_atari_environment_is_at_most_1300_kilobytes_with_the_defaults():
    flags = monobeast.validate(Flags())
    memory = RolloutMemory(rollout_fields(spaces_of(flags)), flags.num_slots, flags.unroll_length, flags.group_width)
    num_envs = flags.num_actors * monobeast.GROUPS_PER_ACTOR * flags.group_width
    assert flags.unroll_length == 20
    assert memory.num_bytes / num_envs <= 1.3e6


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "Pendulum-v1", "reward_scale": 0.1},
        {"env": "toy_envs:MultiDiscrete-v0"},
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
        monobeast.train(dataclasses.replace(flags, total_steps=2000, log_steps=10_000, tensorboard=False))
        monkeypatch.setattr(monobeast, "update", original)
        assert all(batch.shape[1] == B for batch in trained)
        rows = torch.cat([batch.flatten(0, 1) for batch in trained])
        assert len(rows) >= 2000
        assert len(torch.unique(rows, dim=0)) == len(rows), "each step of each environment once"


def test_test_mode_plays_whole_games_with_given_seeds_and_writes_them_down(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", core="lstm", total_steps=2000, tensorboard=False)
    monobeast.train(flags)
    flags = dataclasses.replace(flags, mode="test", episodes=7)
    results = [
        monobeast.test(dataclasses.replace(flags, **changes)) for changes in ({}, {}, {"seed": 9}, {"greedy": True})
    ]
    assert results[0]["returns"] == results[1]["returns"] != results[2]["returns"]
    assert all(len(result["returns"]) == 7 for result in results)
    assert results[0]["lengths_in_steps"] == results[0]["returns"], "CartPole pays one for each step"
    written = json.loads((tmp_path / "run" / "test.json").read_text())
    assert written["returns"] == results[-1]["returns"] and written["greedy"] is True
    assert written["mean"] == pytest.approx(np.mean(written["returns"]))
    assert written["standard_error"] == pytest.approx(np.std(written["returns"], ddof=1) / math.sqrt(7))


def test_playing_without_a_name_says_which_runs_there_are(tmp_path, run_main):
    code, output = run_main(monobeast, "--mode", "test", "--root", str(tmp_path))
    assert code == 1 and f"give its --name, or --checkpoint; {tmp_path} has none yet" in output, output
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").touch()
    os.utime(tmp_path / "older" / "checkpoint.pt", (0, 0))
    code, output = run_main(monobeast, "--mode", "test", "--root", str(tmp_path))
    assert code == 1 and f"{tmp_path} has newer, older" in output, output


def test_a_video_of_a_game_is_written(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    flags = small_flags(
        root=str(tmp_path), name="run", env="BreakoutNoFrameskip-v4", group_width=1, batch_width=1, total_steps=10
    )
    monobeast.train(dataclasses.replace(flags, tensorboard=False))
    monobeast.test(dataclasses.replace(flags, mode="test", episodes=1, video=str(tmp_path / "game.mp4")))
    import imageio

    frames = imageio.mimread(tmp_path / "game.mp4", memtest=False)
    assert len(frames) > 20 and frames[0].shape[2] == 3
    assert any((frame != frames[0]).any() for frame in frames)


def test_a_video_shows_the_environment_of_the_flags_and_frames_are_counted_by_its_skip(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    flags = small_flags(
        root=str(tmp_path), name="run", env="ALE/Breakout-v5", group_width=1, batch_width=1, total_steps=10,
        full_action_space="on", frame_skip=20, frame_stack=1, tensorboard=False,
    )  # fmt: skip
    monobeast.train(flags)
    names, *lines = (line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines())
    last = dict(zip(names, lines[-1]))
    assert float(last["frames"]) == 20 * float(last["step"])
    video = str(tmp_path / "game.mp4")
    result = monobeast.test(dataclasses.replace(flags, mode="test", episodes=1, video=video))
    import imageio

    reader = imageio.get_reader(video)
    assert reader.get_meta_data()["fps"] == 3 and reader.count_frames() == result["lengths_in_steps"][0]


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


def test_the_first_row_of_an_episode_forgets_even_a_core_state_of_nan():
    flags = small_flags(core="lstm")
    net = new_net(flags)
    row = {"obs": {"obs": torch.zeros(1, 2, 4)}, "reward": torch.tensor([[torch.nan, 0.0]])}
    row |= {"action": torch.zeros(1, 2, dtype=torch.int64), "done": torch.tensor([[True, False]])}
    poisoned = tuple(state.index_fill(1, torch.tensor([0]), torch.nan) for state in net.initial_state(2))
    policy_logits, values, core_state = net(row, poisoned)
    assert all(tensor.isfinite().all() for tensor in (policy_logits, values, *core_state))


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_rollout_gives_what_its_rows_give_one_by_one_wherever_episodes_begin(core):
    T, B = 7, 3
    flags = small_flags(core=core)
    torch.manual_seed(1)
    net = new_net(flags).eval()  # or each pass would enter the statistics
    rollout = {"obs": {"obs": torch.randn(T, B, 4)}, "reward": torch.randn(T, B), "action": torch.randint(2, (T, B))}
    rollout["done"] = torch.zeros(T, B, dtype=torch.bool)
    for row in (1, 3, 4, 6):
        rollout["done"][row, row % B] = True
    state = tuple(torch.randn_like(part) for part in net.initial_state(B))
    whole = net(rollout, state)
    rows = []
    for t in range(T):
        *outputs, state = net(map_tensors(lambda x, t=t: x[t : t + 1], rollout), state)
        rows.append(outputs)
    torch.testing.assert_close(whole, (*(torch.cat(parts) for parts in zip(*rows)), state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", ["shallow", "mlp"])
def test_every_kind_of_observation_reaches_the_model_in_units_near_one(net):
    kinds = {
        "walker/joints": spaces.Box(-1, 1, (3,)),
        "type": spaces.Discrete(500, start=7),
        "parts": spaces.MultiDiscrete([3, 4]),
        "bits": spaces.MultiBinary(5),
        "ram": spaces.Box(0, 255, (128,), np.uint8),
        "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
        "grid": spaces.Box(0, 1, (10, 10, 4), bool),
    }
    flags = small_flags(net=net)
    model = Net(kinds, spaces.Discrete(2), flags)
    highest = {
        name: torch.from_numpy(np.full((1, 2, *space.shape), space.high if hasattr(space, "high") else 0, space.dtype))
        for name, space in kinds.items()
        if isinstance(space, spaces.Box)
    }
    highest |= {"type": torch.full((1, 2), 506), "parts": torch.tensor([[[2, 3]] * 2]), "bits": torch.ones(1, 2, 5)}
    row = {"obs": highest, "reward": torch.zeros(1, 2), "done": torch.zeros(1, 2, dtype=torch.bool)}
    seen = []
    for encoder in model.encoders:
        first = next(m for m in encoder.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d)))
        first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().max()))
    model({**row, "action": torch.zeros(1, 2, dtype=torch.int64)}, ())
    assert len(seen) == len(kinds) and max(seen) <= 1


def test_images_are_centered_by_the_running_mean_and_deviation_of_all_that_was_seen():
    center = monobeast.Normalize((2, 3, 3), 1 / 255)
    images = torch.randint(0, 256, (50, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(center.eval()(images.float()), images.float() / 255)
    for part in images.split([7, 13, 30]):
        before = center.eval()(part.float())
        rows = torch.stack([torch.zeros_like(part), part]).float()  # the last row counts, after the output
        torch.testing.assert_close(center.train()(rows)[1], before, rtol=0, atol=0)
    with torch.no_grad():
        center(images.float().unsqueeze(0))
    seen = images.float() / 255
    expected = (seen - seen.mean(0)) / (seen.var(0, correction=0).sqrt() + center.floor)
    for _ in range(2):
        torch.testing.assert_close(center.eval()(images.float()), expected, rtol=1e-4, atol=1e-4)


def test_moments_follow_their_weights_when_a_resume_changes_the_memory_format():
    observation_spaces, action_space = {"obs": spaces.Box(0, 255, (4, 84, 84), np.uint8)}, spaces.Discrete(6)
    generator = torch.Generator().manual_seed(1)
    batch = {
        "obs": {"obs": torch.randint(0, 256, (4, 2, 4, 84, 84), dtype=torch.uint8, generator=generator)},
        "reward": torch.randn(4, 2, generator=generator),
        "action": torch.randint(0, 6, (4, 2), generator=generator),
        "policy_logits": torch.zeros(4, 2, 6),
        "policy_version": torch.zeros(4, 2, dtype=torch.int32),
        **{name: torch.zeros(4, 2, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
    }

    def flags_and_learner(channels_last: bool) -> tuple[Flags, Learner]:
        flags = monobeast.validate(Flags(channels_last=channels_last, learning_rate=1e-2, lr_decay="none"))
        torch.manual_seed(1)
        net = Net(observation_spaces, action_space, flags)
        return flags, Learner(net, monobeast.make_optimizer(flags, net), flags.max_bad_updates)

    flags, first = flags_and_learner(channels_last=True)
    for _ in range(3):
        step(flags, first, batch, ())
    state = copy.deepcopy(first.state_dict())
    weights = []
    for channels_last in (True, False):
        flags, resumed = flags_and_learner(channels_last)
        resumed.load_state_dict(copy.deepcopy(state))
        step(flags, resumed, batch, ())
        weights.append([parameter.detach().contiguous() for parameter in resumed.net.parameters()])
    for same, flipped in zip(*weights):
        torch.testing.assert_close(flipped, same, rtol=0, atol=2e-3)  # a step is 1e-2


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
        flags = small_flags(root=str(tmp_path), name=f"twin-{is_twin}", total_steps=1500, tensorboard=False, **changes)
        monobeast.train(flags)
        states.append(checkpoint.load(tmp_path / flags.name / "checkpoint.pt"))
    assert states[0]["counts"]["steps"] == states[1]["counts"]["steps"] >= 1500
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


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_copy_that_acts_gives_what_the_net_gives_to_the_bit_in_bf16_too(core):
    flags = small_flags(env="PongNoFrameskip-v4", core=core)
    net = new_net(flags, amp=True)
    images = torch.randint(0, 256, (1, 3, *spaces_of(flags).observations["obs"].shape), dtype=torch.uint8)
    inputs = {"obs": {"obs": images}, "reward": torch.randn(1, 3), "done": torch.zeros(1, 3, dtype=torch.bool)}
    inputs["action"] = torch.tensor([[0, 1, 2]])
    core_state = tuple(torch.randn_like(part) for part in net.initial_state(3))
    acting = inference_copy(net)
    assert {parameter.dtype for parameter in acting.parameters()} == {torch.float32, torch.bfloat16}
    with torch.no_grad():
        expected, found = (n(inputs, core_state) for n in (net, acting))
    map_tensors(lambda a, b: np.testing.assert_array_equal(a, b), found, expected)


@pytest.mark.parametrize("optimizer, moment", [("adam", "exp_avg_sq"), ("rmsprop", "square_avg")])
def test_an_update_with_nan_changes_no_weight_and_the_next_one_does(monkeypatch, optimizer, moment):
    flags = small_flags(optimizer=optimizer)
    lock_step = LockStep(flags)
    batch = map_tensors(lambda x: x.clone(), lock_step.next_rollout()[0])
    scale = [1.0]

    def compute_loss(*arguments, original=monobeast.compute_loss):
        loss, stats = original(*arguments)
        return loss * scale[0], stats

    monkeypatch.setattr(monobeast, "compute_loss", compute_loss)
    learner = new_learner(flags)
    net = learner.net
    for scale[0], bad_updates in ((1.0, 0), (math.nan, 1), (math.inf, 2), (1.0, 2)):
        before = [parameter.clone() for parameter in net.parameters()]
        moments = [state[moment].clone() for state in learner.optimizer.state.values()]
        step(flags, learner, batch, ())
        changed = any(not torch.equal(a, b) for a, b in zip(before, net.parameters()))
        assert changed == (scale[0] == 1.0)
        assert learner.bad_updates == bad_updates and learner.bad_updates_in_a_row == (0 if changed else bad_updates)
        if changed:
            continue
        if optimizer == "adam":
            assert {int(state["step"]) for state in learner.optimizer.state.values()} == {1}
        now = [state[moment] for state in learner.optimizer.state.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments, now))


def test_a_thread_computes_on_as_many_cores_as_it_was_given_whatever_another_thread_is_given_later():
    inference_is_set, learner_is_set = threading.Event(), threading.Event()

    def inference() -> int:
        use_threads(1)
        inference_is_set.set()
        learner_is_set.wait(10)
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(inference)
        inference_is_set.wait(10)
        threads.submit(use_threads, 3).result()
        learner_is_set.set()
        assert found.result() == 1
        threads.submit(use_threads, torch.get_num_threads()).result()


def test_the_learner_takes_half_of_the_cores_that_it_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 8, 9, 11}, raising=False)
    assert num_learner_threads(monobeast.Flags()) == 2
    assert num_learner_threads(monobeast.Flags(learner_threads=5)) == 5


class Arrived:
    """An event of a GPU that is over."""

    def synchronize(self):
        pass


def test_statistics_that_a_gpu_has_queued_are_counted_and_told_when_a_run_saves(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False, max_bad_updates=1)
    learner = new_learner(flags)
    names = ["losses/grad_norm", "stats/policy_lag_max", "steps", "is_bad"]
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        learner._on_their_way = names, torch.tensor([2.5, 3.0, 32.0, 1.0]), Arrived()
        training.save()  # and bad ones do not keep a run from saving
        assert training._gathered == [{"losses/grad_norm": 2.5, "stats/policy_lag_max": 3.0}]
        assert (learner.steps, learner.bad_updates, learner.bad_updates_in_a_row) == (32, 1, 1)
        training.save()
        assert len(training._gathered) == 1 and learner.steps == 32
    assert checkpoint.load(training.run.checkpoint_path)["counts"]["steps"] == 32


def test_a_nan_that_a_gpu_tells_late_is_that_of_its_own_rollout():
    learner = new_learner(small_flags(max_bad_updates=5))
    healthy = {"reward": torch.zeros(3, 4), "group": torch.full((3, 4), 7, dtype=torch.int32)}
    spoiled = {"reward": torch.zeros(3, 4), "group": torch.full((3, 4), 2, dtype=torch.int32)}
    spoiled["reward"][1, 3] = math.nan
    learner._on_their_way, learner._queued = (
        (["steps", "is_bad"], torch.tensor([8.0, 1.0]), Arrived()),
        (spoiled, 4, 16),
    )
    learner._batch, learner.first_env, learner.group_width = healthy, 8, 16
    learner.settle()
    assert "reward of environment 7 in group 2 (in 1 of 4 environments" in learner.bad_inputs
    learner._on_their_way = ["steps", "is_bad"], torch.tensor([8.0, 0.0]), Arrived()
    learner.settle()
    assert learner.bad_inputs == "" and learner.bad_updates == 1


def test_compile_is_asked_for_the_forward_pass_and_the_run_goes_on_with_it(tmp_path, monkeypatch):
    calls = []

    def compiled(forward):
        return lambda *arguments: calls.append(torch.is_grad_enabled()) or forward(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, log_steps=500, tensorboard=False)
    monobeast.train(dataclasses.replace(flags, compile=True))
    assert sum(calls) >= 5, "every update's forward pass"
    assert len(calls) - sum(calls) >= 5, "and those of inference"
    assert "time/learner_forward" in (tmp_path / "run" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "env, backend, core",
    [
        ("toy_envs:Dict-v0", "aot_eager", "none"),
        ("toy_envs:MultiDiscrete-v0", "aot_eager", "lstm"),
        ("Pendulum-v1", "aot_eager", "gru"),
        pytest.param(
            "MinAtar/Breakout-v1",
            "inductor",
            "none",
            marks=[pytest.mark.long, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")],
        ),
    ],
)
def test_the_net_compiles_in_one_piece(env, backend, core):
    flags = small_flags(env=env, core=core)
    net, fields = new_net(flags), rollout_fields(spaces_of(flags))
    torch._dynamo.reset()  # or it takes sizes for dynamic that changed from test to test
    compiled = torch.compile(net.forward, backend=backend, fullgraph=True)  # raises where a graph would break
    for T in (1, 9):
        batch = {k: torch.zeros(T, 4, *shape, dtype=getattr(torch, str(dtype))) for k, (shape, dtype) in fields.items()}
        batch = nest_observations(batch)
        state = net.initial_state(4)
        for ours, theirs in zip(compiled(batch, state)[:2], net(batch, state)[:2]):
            assert torch.allclose(ours, theirs, atol=1e-5)


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


@pytest.mark.parametrize("batch_width", [2, 4, 8])
@pytest.mark.parametrize("what, name", [("reward", "reward"), ("observation", "observation 'obs'")])
def test_nan_from_an_environment_is_told_with_its_number_and_group_and_not_blamed_on_the_learning_rate(
    tmp_path, monkeypatch, capfd, batch_width, what, name
):
    monkeypatch.setattr(monobeast.Training, "env_seed", lambda self, group, life: 100 * group)
    flags = small_flags(root=str(tmp_path), name="run", batch_width=batch_width, max_bad_updates=1)

    def create_env(flags, num_envs):
        return gymnasium.vector.SyncVectorEnv([lambda: toy_envs.NaNAtStep(102, what)] * num_envs)

    monkeypatch.setattr(monobeast, "create_env", create_env)
    with pytest.raises(SystemExit):
        monobeast.train(dataclasses.replace(flags, total_steps=5000, tensorboard=False))
    told = capfd.readouterr().err
    message = f"NaN or Inf in {name} of environment 2 in group 1 (in 1 of {batch_width} environments of this update)"
    assert message in told.split("updates in a row")[1] and "--learning_rate" not in told, told
    flags = dataclasses.replace(flags, name="more", max_bad_updates=10_000)
    monobeast.train(dataclasses.replace(flags, total_steps=1500, tensorboard=False))
    assert capfd.readouterr().err.count(f"an update was skipped: {message}") == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_return_that_is_no_number_does_not_stop_best_pt(tmp_path, bad):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False)
    learner = new_learner(flags)
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        for returns in ([bad], 99 * [1.0]):
            learner.record_episodes([(x, 10) for x in returns])
            training.save()
        assert not training.run.best_path.exists()
        learner.record_episodes([(2.0, 10)])  # the hundred games before it no longer hold the bad one
        training.save()
        assert checkpoint.load(training.run.best_path)["counts"]["best"] == pytest.approx(1.01)
    old = checkpoint.load(training.run.best_path)
    old["counts"]["best"] = math.inf  # as an earlier version saved it
    learner.load_state_dict(old)
    assert learner.best == -math.inf


@pytest.mark.parametrize("batch_width", [2, 8])
def test_every_batch_begins_with_the_core_state_of_its_own_columns(batch_width):
    lock_step = LockStep(small_flags(core="lstm", batch_width=batch_width))
    for _ in range(12):
        rollout, core_state = lock_step.next_rollout()
        with torch.no_grad():
            policy_logits, values, _ = lock_step.net(rollout, core_state)
        torch.testing.assert_close(policy_logits[:-1], rollout["policy_logits"][1:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)


def test_every_group_life_start_and_seed_has_environments_of_its_own(tmp_path):
    seeds, noise = [], []
    for name, seed in (("a", 1), ("a", 1), ("b", 2)):  # the second is another start of "a"
        flags = small_flags(root=str(tmp_path), name=name, seed=seed)
        with monobeast.Training("mono", flags, new_learner(flags), set(), frames_per_step=1) as training:
            noise.append(training.generator.initial_seed())
            seeds += [training.env_seed(group, life) for group in range(3) for life in range(3)]
            training.save()
    assert len(set(seeds)) == 27 and noise[0] != noise[2]


@pytest.mark.parametrize(
    "env, clip, normalize",
    [("PongNoFrameskip-v4", 1.0, "off"), ("ALE/Pong-v5", 1.0, "off"), ("CartPole-v1", 0.0, "on")],
)
def test_rewards_are_clipped_for_atari_and_returns_normalized_elsewhere(env, clip, normalize):
    flags = monobeast.validate(Flags(env=env))
    assert (flags.reward_clip, flags.normalize_returns) == (clip, normalize)


def test_best_pt_keeps_the_best_and_is_left_to_evaluations_where_there_are_any(tmp_path):
    for name, evaluations in (("a", None), ("b", object())):
        flags = small_flags(root=str(tmp_path), name=name)
        learner = new_learner(flags)
        with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
            training._evaluations = evaluations
            for mean in (5.0, 3.0):
                learner.record_episodes([(mean, 10)] * 100)
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
    feed = types.SimpleNamespace(close=closed.set, laps=Laps(), workers={}, cores={}, measure=lambda *_: {})
    with monobeast.Training("mono", flags, new_learner(flags), set(), frames_per_step=1) as training:
        monkeypatch.setattr(training, "save", lambda: saves.append(1))
        training.train(feed, closed.wait, closed.wait, "")
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


def test_what_was_played_says_after_how_many_steps(tmp_path):
    flags, path = small_flags(mode="test", name="run", episodes=1), tmp_path / "checkpoint.pt"
    learner = new_learner(flags)
    learner.steps, learner.updates = 1234, 5
    checkpoint.save(path, {"config": dataclasses.asdict(flags), **learner.state_dict()})
    assert monobeast.test(dataclasses.replace(flags, checkpoint=str(path)))["steps"] == 1234


def test_a_row_of_metrics_is_of_the_updates_since_the_last_one_but_for_skipped_ones(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False)
    learner = new_learner(flags)
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        training._feed, training._row_steps = types.SimpleNamespace(measure=lambda *_: {}), 0
        training._metrics = types.SimpleNamespace(write=lambda *row: None)
        for steps, losses in ((100, (1.0, math.nan)), (1100, (3.0, 5.0))):
            training._row_began, learner.steps = time.monotonic() - 10, steps
            for loss in losses:
                training._gather({"losses/grad_norm": loss, "losses/total_loss": loss, "stats/policy_lag_max": 0.0})
            training._write_metrics()
            expected = {100: 1.0, 1100: 4.0}[steps]
            assert training.latest["losses/total_loss"] == expected, "a row has only what came after the one before it"
        assert training.latest["charts/SPS"] == pytest.approx(100, rel=0.05)
