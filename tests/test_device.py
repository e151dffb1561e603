"""Environments of tensors: their rollouts, and what is learned from them, are those of the same ones in arrays."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from lock_step import metrics_of

import monobeast
from beast.clock import Laps
from beast.envs import env_metrics, probe
from beast.envs.env_metrics import EnvMetrics
from beast.envs.groups import EnvGroup, Games, next_row
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.envs.spaces import EnvSpaces, env_actions
from beast.envs.tensors import OfArrays
from beast.errors import InputError, OutOfMemory
from beast.feeds import device
from beast.feeds.device import TensorEnvs, TensorGroup, TensorMemory, to_env_actions
from beast.feeds.feed import Consumer
from beast.feeds.shared_memory import SharedMemoryFeed
from examples.tensor_envs import CartPoles

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


class Walk:
    """Environments that count: their seed, episode, step and last action. Episodes end and are cut off by turns, and
    every third end is one of a life."""

    def __init__(self, num_envs: int, same_step: bool = False, final: bool = True):
        self.num_envs, self.device = num_envs, CPU
        mode = AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": mode, "env_id": "Walk"}
        self.single_observation_space = spaces.Dict(
            {"place": spaces.Box(-np.inf, np.inf, (3,), np.float32), "last": spaces.Discrete(5)}
        )
        self.single_action_space = spaces.Discrete(3, start=1)
        self.same_step, self.final = same_step, final

    def _shown(self) -> dict:
        seeds = self.seeds.float()
        return {"place": torch.stack([seeds, self.episode.float(), self.t.float()], 1), "last": self.last.clone()}

    def reset(self, *, seed=None):
        self.seeds = torch.arange(self.num_envs) + (seed or 0) % 1000
        self.episode, self.t, self.last = (torch.zeros(self.num_envs, dtype=torch.int64) for _ in range(3))
        self.over = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._shown(), {}

    def step(self, actions):
        assert actions.dtype == torch.int64 and actions.min() >= 1 and actions.max() <= 3
        begins = torch.zeros_like(self.over) if self.same_step else self.over
        self.t = torch.where(begins, 0, self.t + 1)
        self.episode += begins
        self.last = torch.where(begins, 0, actions)
        reward = torch.where(begins, 7.0, (actions == self.t % 3 + 1).float())  # that of a reset counts for nothing
        ends = ~begins & (self.t >= 3 + (self.seeds + self.episode) % 4)
        cut = ends & (self.episode % 2 == 0)
        self.over = ends
        info = {"life_over": ends & (self.episode % 3 == 2), "is_success": self.last == 2, "length": self.t * 1.0}
        info["metrics"] = {"seed": self.seeds, "parts": {"episode": self.episode.clone()}}
        if self.same_step:
            if self.final:
                info |= {"final_obs": self._shown(), "_final_obs": ends & (self.seeds % 2 == 0)}
            self.t, self.last = torch.where(ends, 0, self.t), torch.where(ends, 0, self.last)
            self.episode += ends
        return self._shown(), reward, ends & ~cut, cut, info

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("same_step", [False, True])
def test_torch_and_numpy_make_the_same_rows(same_step):
    random = np.random.default_rng(1)
    arrays = Games(*(random.random((2, 12)) < 0.5), random.random(12), random.integers(0, 9, 12, np.int32))
    tensors = Games(*map(torch.from_numpy, arrays))
    for _ in range(50):
        ended, over, absent = random.random((3, 12)) < 0.3
        given = random.normal(size=12), ended, over & ended, absent
        found, arrays = next_row(np, arrays, *given, 3, same_step)
        row, tensors = next_row(torch, tensors, *map(torch.from_numpy, given), 3, same_step)
        for name, x in found.items():
            assert row[name].numpy().dtype == x.dtype and np.array_equal(row[name].numpy(), x), name
        assert all(np.array_equal(x, y.numpy()) for x, y in zip(arrays, tensors))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary(3),
        spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 3])]),
        spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(3, start=2)}),
        spaces.Box(np.array([-2, 0, -np.inf]), np.array([5, np.inf, 1]), dtype=np.float32),
        spaces.Box(-3, 3, (2, 2), np.float64),
    ],
    ids=str,
)
def test_actions_of_tensors_are_those_of_arrays(space):
    random = np.random.default_rng(2)
    actions = probe.random_actions(space, 5, random)
    if isinstance(space, spaces.Box):
        actions *= 1.5  # a policy's noise goes beyond the bounds
    expected, found = env_actions(space, actions), to_env_actions(space, CPU)(torch.from_numpy(actions))
    pairs = [(expected, found)]
    if isinstance(expected, (dict, tuple)):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        pairs = [(expected[key], found[key]) for key in keys]
    for x, y in pairs:
        assert y.numpy().dtype == x.dtype and np.array_equal(x, y.numpy())


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_rows_of_tensors_are_those_of_arrays(same_step, final):
    group = EnvGroup(Walk(6, same_step, final), metrics="length, nothing")
    fields = rollout_fields(group.spaces)
    memory = TensorMemory(fields, 1, 40, 6, CPU)
    other = TensorGroup(Walk(6, same_step, final), group.spaces, memory, "length, nothing")
    told = EnvMetrics(), EnvMetrics()
    expected = {name: np.zeros((6, *shape), dtype) for name, (shape, dtype) in fields.items()}
    row = probe.nest_observations(expected)
    random = np.random.default_rng(3)
    group.reset(5, row)
    other.reset(5, 0, 0)
    for t in range(41):
        if t:
            row["action"][...] = random.integers(0, 3, 6)
            memory.arrays["action"][0, t] = torch.from_numpy(row["action"])
            group.step(row["action"], row)
            other.step(0, t)
            told[0].add(env_metrics.encode(group.ended) or b"{}")
            told[1].add((t % 7 == 0 and other.take_told()) or b"{}")
        cut = row["truncated"] & ~row["terminated"]
        for name in (name for name, x in fields.items() if name not in ("action", "policy_logits", "baseline")):
            if name in ("policy_version", "group", "life", "env_number"):
                continue
            found = memory.arrays[name][0, t].numpy()
            columns = cut if name.startswith("final_obs/") else slice(None)
            assert np.array_equal(found[columns], expected[name][columns]), (t, name)
    told[1].add(other.take_told())
    expected, found = (each.take() for each in told)
    assert found == expected and found.keys() == {
        "env/is_success", "env/length", "env/seed", "env/parts/episode", "stats/env_games",
    }  # fmt: skip
    assert (memory.arrays["truncated"][0] & ~memory.arrays["terminated"][0]).any() or (same_step and not final)


def train(tmp_path, monkeypatch, on_device: bool, same_step=False, **changes):
    flags = monobeast.Flags(
        env="Walk", num_actors=1, group_width=8, batch_width=8, unroll_length=6, hidden_size=32, core_size=16,
        total_steps=1500, device="cpu", deterministic=True, tensorboard=False, root=str(tmp_path),
        name=f"{on_device}", log_steps=500,
    )  # fmt: skip
    monkeypatch.setattr(monobeast, "create_env", lambda flags, num_envs: Walk(num_envs, same_step))
    if not on_device:
        monkeypatch.setattr(probe, "is_of_tensors", lambda env: False)
    run = monobeast.train(replace(flags, **changes)).directory
    monkeypatch.undo()
    assert ("MB of slots on cpu" in (run / "out.log").read_text()) == on_device
    return torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"core": "lstm"},
        {"batch_width": 4},
        {"batch_width": 16, "num_slots": 6},
        {"num_actors": 2, "stagger": True},
        {"num_actors": 3, "stagger": True, "batch_width": 16, "core": "lstm"},
        {"same_step": True},
        {"same_step": True, "core": "gru", "epochs": 2, "minibatches": 2},
    ],
    ids=lambda changes: "-".join(f"{name}={x}" for name, x in changes.items()) or "as it is",
)
def test_the_same_is_learned_on_the_device_to_the_bit(tmp_path, monkeypatch, changes):
    state = train(tmp_path, monkeypatch, True, **changes)
    expected = train(tmp_path, monkeypatch, False, **changes)
    counts, others = ({**each["counts"], "seconds": 0} for each in (state, expected))
    assert counts == others and counts["steps"] >= 1500
    assert state["net"].keys() == expected["net"].keys()
    assert all(torch.equal(x, expected["net"][name]) for name, x in state["net"].items())
    assert any(x.std() > 0 for name, x in state["net"].items() if "weight" in name)


@pytest.mark.parametrize("update_seconds, stagger", [(0.0, True), (0.02, True), (0.0, False)])
def test_groups_that_run_free_stay_apart_though_the_learner_stands_still_at_times(update_seconds, stagger):
    """Poles in tensors, acting in one thread and a learner that takes so long in another."""
    steps, groups, width = 16, 4, 8
    found = probe_env(lambda flags, num_envs: CartPoles(num_envs), monobeast.Flags(env="CartPoles"))
    memory = TensorMemory(rollout_fields(found), groups + 1, steps, width, CPU)
    poles = TensorEnvs(lambda flags, n: CartPoles(n), None, found, memory, groups, lambda group, life: group)
    consumer = Consumer(CPU, (), lambda: 0, lambda games: None, Laps())
    feed = SharedMemoryFeed(consumer, memory, poles, width, stagger=stagger)
    begun, turn = [], 0  # in which turn of all groups a rollout began
    begin = feed.tensors.begin
    feed.tensors.begin = lambda *args: (begun.append(turn / groups), begin(*args))  # type: ignore[method-assign]

    def learn() -> None:
        for number, _ in enumerate(feed.rollouts()):
            time.sleep(0.2 if number % 40 == 30 else update_seconds)
            if number == 120:
                feed.close()

    learner = threading.Thread(target=learn)
    learner.start()
    for rows in feed.acting():
        turn += 1
        number = rows.inputs["done"].shape[1]
        action = torch.randint(2, (1, number))
        rows.answer(action, torch.zeros(1, number, 2), torch.zeros(1, number), 0, ())
    learner.join()
    between = np.diff(begun[8:])
    if stagger:
        assert np.mean(between >= 2) > 0.8, "four steps are even"
    else:
        assert np.mean(between >= 2) < 0.6, "three of four begin about when the one before them does"


MAKES = "    return envs.make(flags.env, num_envs, **(envs.options(flags) | overrides))\n"
EDIT = """    from beast.device import choose_device
    from examples.tensor_envs import CartPoles

    return CartPoles(num_envs, choose_device(flags.device, flags.amp)[0])
"""


def test_cart_poles_are_learned_that_torch_balances(tmp_path):
    text = Path(monobeast.__file__).read_text()
    assert text.count(MAKES) == 1 and EDIT in (ROOT / "docs/device.md").read_text()
    fork = tmp_path / "fork.py"
    fork.write_text(text.replace(MAKES, EDIT))
    command = [sys.executable, str(fork), "--num_actors", "1", "--group_width", "64", "--batch_width", "64"]
    command += ["--unroll_length", "16", "--vtrace_lambda", "0.95", "--epochs", "2", "--minibatches", "2"]
    command += ["--learning_rate", "3e-3", "--normalize_returns", "on", "--device", "cpu", "--no_tensorboard"]
    command += ["--total_steps", "120000", "--name", "poles"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    rows = metrics_of(tmp_path / "runs/poles")
    assert float(rows[-1]["charts/episodic_return"]) >= 150, "poles of an untrained policy fall after 20 steps"
    playing = [*command[:2], "--mode", "test", "--name", "poles", "--episodes", "20", "--greedy"]
    subprocess.run(playing, check=True, cwd=tmp_path, env=environment)
    assert json.loads((tmp_path / "runs/poles/test.json").read_text())["mean"] >= 150


class LikeManiSkill(Walk):
    """Calls the last observations as ManiSkill does."""

    def step(self, actions):
        *result, info = super().step(actions)
        return *result, {"final_observation": info["final_obs"], "_final_observation": info["_final_obs"]}


class LikeBrax(Walk):
    """Has the calls of Brax's wrapper for torch."""

    def seed(self, seed):
        self.next_seed = seed

    def reset(self):
        return super().reset(seed=self.next_seed)[0]

    def step(self, actions):
        observation, reward, terminated, truncated, _ = super().step(actions)
        return observation, reward, (terminated | truncated).float(), {"truncation": truncated.float()}


def test_the_wrappers_of_the_page_give_what_a_group_takes():
    names: dict = {"AutoresetMode": AutoresetMode, "torch": torch}
    for block in re.findall(r"```python\n(class .*?)```", (ROOT / "docs/device.md").read_text(), re.DOTALL):
        exec(block, names)
    for wrapper, inner, has_final in ((names["Mani"], LikeManiSkill, True), (names["Brax"], LikeBrax, False)):
        found = spaces_of(lambda width: wrapper(inner(width, same_step=True)))
        memory = TensorMemory(rollout_fields(found), 1, 40, 4, CPU)
        group = TensorGroup(wrapper(inner(4, same_step=True)), found, memory)
        other = EnvGroup(Walk(4, same_step=True, final=has_final))
        row = probe.nest_observations({name: np.zeros((4, *x), dtype) for name, (x, dtype) in other.fields.items()})
        other.reset(5, row)
        group.reset(5, 0, 0)
        for t in range(1, 41):
            memory.arrays["action"][0, t] = t % 3
            group.step(0, t)
            other.step(np.full(4, t % 3), row)
            for name in ("reward", "done", "terminated", "truncated"):
                assert memory.arrays[name][0, t].tolist() == row[name].tolist(), name
        assert row["episode_step"].any() and memory.arrays["terminated"].any() and memory.arrays["truncated"].any()


def test_rows_tell_the_task_of_each_column_and_what_an_environment_finds_out_later_is_raised():
    found = spaces_of(Walk)
    memory, walk = TensorMemory(rollout_fields(found), 1, 2, 4, CPU), Walk(4)
    walk.task_numbers = np.array([0, 1, 0, 1], np.int32)
    group = TensorGroup(walk, found, memory)
    group.reset(1, 0, 0)
    memory.arrays["action"].zero_()
    group.step(0, 1)
    assert memory.arrays["task"][0, :2].tolist() == [[0, 1, 0, 1]] * 2
    assert group.take_told() == b""

    def check() -> None:
        raise RuntimeError("it has stood still for a second")

    walk.check = check
    with pytest.raises(RuntimeError, match="stood still"):
        group.take_told()


class Broken(Walk):
    def step(self, actions):
        if (self.t > 2).any():
            raise RuntimeError("the simulator has exploded")
        return super().step(actions)


class OtherShape(Walk):
    def step(self, actions):
        observation, *others = super().step(actions)
        return {**observation, "place": observation["place"][:, :2]}, *others


class NoSpaces:
    device = CPU

    def __init__(self, num_envs: int):
        self.num_envs = num_envs


class Elsewhere(Walk):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.device = torch.device("meta")


def spaces_of(make) -> EnvSpaces:
    return probe_env(lambda flags, num_envs: make(num_envs), monobeast.Flags(env="Walk"))


@pytest.mark.parametrize(
    "make, message",
    [
        (NoSpaces, "has a device, so it is an environment of tensors, and has no single_observation_space"),
        (OtherShape, "gave 'place' float32 of shape (2, 2)"),
        (Broken, "the simulator has exploded"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_the_run(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        spaces_of(make)


@pytest.mark.parametrize(
    "make, message",
    [
        (Elsewhere, "an environment on meta, and nets compute on cpu: make it on the device that --device names"),
        (lambda width: Walk(width + 1), "create_env(flags, 4) gave 5 environments"),
        (lambda width: OfArrays(Walk(width)), "gave OfArrays, its first call an environment of tensors"),
    ],
)
def test_what_later_calls_give_has_to_fit_the_memory(make, message):
    found = spaces_of(Walk)
    with pytest.raises(InputError, match=re.escape(message)):
        TensorGroup(make(4), found, TensorMemory(rollout_fields(found), 1, 2, 4, CPU))


def test_a_row_of_another_shape_is_named():
    found = spaces_of(Walk)
    group = TensorGroup(OtherShape(4), found, TensorMemory(rollout_fields(found), 1, 2, 4, CPU))
    group.reset(1, 0, 0)
    group.memory.arrays["action"].zero_()
    with pytest.raises(InputError, match=r"OtherShape gave 'place' of shape \[4, 2\], its space is"):
        group.step(0, 1)


def test_an_environment_that_raises_ends_the_run_and_all_are_closed(tmp_path, monkeypatch, capfd):
    made = []

    def create_env(flags, num_envs):
        made.append(Walk(num_envs) if len(made) == 0 else Broken(num_envs))
        return made[-1]

    flags = monobeast.Flags(env="Walk", device="cpu", root=str(tmp_path), name="run", tensorboard=False, num_actors=1)
    monkeypatch.setattr(monobeast, "create_env", create_env)
    with pytest.raises(SystemExit):
        monobeast.train(flags)
    assert "the simulator has exploded" in capfd.readouterr().err
    assert len(made) == 3 and all(env.is_closed for env in made)


def test_groups_wait_for_slots_and_are_woken():
    found = spaces_of(Walk)
    memory = TensorMemory(rollout_fields(found), 2, 2, 4, CPU)
    memory.arrays["action"].zero_()
    envs = TensorEnvs(lambda flags, num_envs: Walk(num_envs), None, found, memory, 2, lambda group, life: group)
    assert [envs.wait(0), envs.wait(0), envs.wait(0)] == [([0], []), ([1], []), ([], [])]
    envs.go(1, 0, 0)
    assert envs.wait(10) == ([1], []) and memory.arrays["obs/place"][0, 0, :, 0].tolist() == [1, 2, 3, 4]
    threading.Timer(0.05, envs.wake).start()
    began = time.monotonic()
    assert envs.wait(60) == ([], []) and time.monotonic() - began < 30
    envs.close()


def test_slots_that_do_not_fit_are_refused_with_their_size(monkeypatch):
    monkeypatch.setattr(device, "available_memory", lambda: 10_000)
    with pytest.raises(OutOfMemory, match="need 0 MB and 0 MB are free on cpu: use a smaller --num_slots"):
        TensorMemory(rollout_fields(spaces_of(Walk)), 20, 20, 8, CPU)


def test_a_row_that_nobody_wrote_shows_and_rows_overlap():
    memory = TensorMemory(rollout_fields(EnvGroup(Walk(2, same_step=True)).spaces), 2, 3, 2, CPU)
    assert memory.arrays["obs/place"].isnan().all() and memory.arrays["done"].all()
    assert (memory.arrays["obs/last"] == 2**63 - 1).all() and not memory.arrays["final_obs/place"].any()
    memory.arrays["reward"][0, -1] = torch.tensor([3.0, 4.0])
    memory.repeat_last_row(0, 1)
    assert memory.rollout(1)["reward"][0].tolist() == [3, 4] and "policy_logits" not in memory.rollout(1)
    assert memory.num_bytes == sum(x.nbytes for x in memory.arrays.values())
