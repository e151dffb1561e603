"""Demonstrations: what a file may have, how it is dealt into batches, and what imitates it."""

import importlib
import re
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import monobeast
from beast.envs.masks import MASK
from beast.envs.spaces import EnvSpaces, env_actions, spaces_by_name
from beast.errors import InputError, MissingFile
from beast.learn import demonstrations
from beast.run import checkpoint

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
COUNTING = EnvSpaces({"obs": BOX}, spaces.Discrete(2, start=5))


def arrays(count=6, **changes) -> dict[str, np.ndarray]:
    """Of two episodes, 0 to 3 and 4 to 5."""
    observations = np.arange(3 * count, dtype=np.float64).reshape(count, 3)
    ends = np.isin(np.arange(count), (3, 5))
    given = {"observations": observations, "actions": np.arange(count) % 2 + 5, "rewards": np.arange(count) / 4}
    return {**given, "episode_ends": ends, **changes}


@pytest.fixture
def read(tmp_path):
    def read(given: dict, env_spaces: EnvSpaces = COUNTING) -> demonstrations.Demonstrations:
        np.savez(tmp_path / "shown.npz", **given)
        return demonstrations.read(str(tmp_path / "shown.npz"), env_spaces)

    return read


def test_a_net_sees_the_last_action_and_reward_of_each_decision_and_is_to_choose_its_action(read):
    rows = read(arrays()).rows
    assert rows["obs"]["obs"].dtype == torch.float32 and torch.equal(rows["obs"]["obs"][:, 0], torch.arange(6) * 3.0)
    assert rows["target"].tolist() == [0, 1, 0, 1, 0, 1], "counted from 0"
    assert rows["action"][1:].tolist() == rows["target"][:-1].tolist()
    assert rows["reward"][1:].tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert rows["done"].tolist() == [True, False, False, False, True, False]


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32)),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.MultiDiscrete([3, 4], start=[1, -1]),
        spaces.MultiBinary(3),
        spaces.Dict(turn=spaces.Discrete(3, start=-1), buttons=spaces.MultiBinary(2)),
        spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 2]))),
    ],
)
def test_actions_that_are_stored_are_those_that_an_environment_takes(read, action_space):
    action_space.seed(1)
    taken = [action_space.sample() for _ in range(6)]
    parts = [demonstrations.parts_by_name(action_space, action) for action in taken]
    named = {demonstrations.array_name("actions", name): np.stack([part[name] for part in parts]) for name in parts[0]}
    given = {name: array for name, array in arrays().items() if name != "actions"}
    stored = read({**given, **named}, EnvSpaces({"obs": BOX}, action_space)).rows["target"]
    back = env_actions(action_space, stored.numpy())
    for name, array in demonstrations.parts_by_name(action_space, back).items():
        np.testing.assert_allclose(array, named[demonstrations.array_name("actions", name)], atol=1e-6)


LEGAL = EnvSpaces({"cards": spaces.MultiDiscrete([4, 4]), MASK: spaces.MultiBinary(2)}, spaces.Discrete(2))
STEERING = EnvSpaces({"obs": BOX}, spaces.Box(-1, 1, (1,), np.float32))
MASKED = {
    "observations/cards": np.ones((2, 2), int),
    f"observations/{MASK}": np.eye(2, dtype=np.int8),
    "actions": np.array([0, 1]),
    "rewards": np.zeros(2),
    "episode_ends": np.array([0, 1]),
}


@pytest.mark.parametrize(
    "env_spaces, given, message",
    [
        (COUNTING, {"x": np.zeros(1)}, r"has the arrays \['x'\], expected \['actions', 'episode_ends', 'observ"),
        (COUNTING, {name: x[:0] for name, x in arrays().items()}, r"rewards is empty: give a row for each decision"),
        (COUNTING, arrays(actions=np.zeros(7)), r"actions has the shape \(7,\), expected \(6,\): a row for each"),
        (COUNTING, arrays(actions=np.zeros(6)), r"actions has 0.0 in row 0, which is not in Discrete"),
        (COUNTING, arrays(actions=np.full(6, 5.5)), r"actions has 5.5 in row 0, .* Discrete\(2, start=5\): mend"),
        (COUNTING, arrays(observations=np.full((6, 3), np.nan)), r"observations has nan in row 0, which is not in Box"),
        (COUNTING, arrays(rewards=np.array([0, 0, np.inf, 0, 0, 0])), r"rewards has inf in row 2"),
        (COUNTING, arrays(episode_ends=np.full(6, 2)), r"episode_ends has 2 in row 0"),
        (COUNTING, arrays(actions=np.full(6, "left")), r"actions has the type <U4, expected numbers of Discrete"),
        (COUNTING, arrays(actions=np.full(6, {}, object)), r"cannot be read \(it holds Python objects\): write arrays"),
        (STEERING, arrays(actions=np.full((6, 1), 1.5)), r"actions has 1.5 in row 0, which is not in Box\(-1.0, 1.0"),
        (LEGAL, {**MASKED, "observations/cards": np.full((2, 2), 4)}, r"observations/cards has 4 in row 0"),
        (LEGAL, {**MASKED, "actions": np.array([0, 0])}, r"actions has 0 in row 1, which action_mask forbids: drop"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_with_array_row_and_value(read, tmp_path, env_spaces, given, message):
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "shown.npz")) + ": " + message) as told:
        read(given, env_spaces)
    assert "\n" not in str(told.value)


def test_the_code_of_the_page_on_demonstrations_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(demonstrations.__file__).parents[2] / "docs" / "demonstrations.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, {})
    cartpole = EnvSpaces({"obs": spaces.Box(-5, 5, (4,), np.float32)}, spaces.Discrete(2))
    assert "6 decisions of 2 episodes" in demonstrations.read("shown.npz", cartpole).description


def test_a_file_that_is_none_of_arrays_is_told(tmp_path):
    with pytest.raises(MissingFile, match="there is no such file; docs/demonstrations.md"):
        demonstrations.read(str(tmp_path / "none.npz"), COUNTING)
    for content in (b"", b"\x80\x04K\x01.", b"text"):
        (tmp_path / "text.npz").write_bytes(content)
        with pytest.raises(InputError, match="text.npz: cannot be read .*: write arrays of numbers") as told:
            demonstrations.read(str(tmp_path / "text.npz"), COUNTING)
        assert "allow_pickle" not in str(told.value)


def test_all_legal_is_what_a_mask_without_a_choice_says(read):
    nothing = {**MASKED, f"observations/{MASK}": np.zeros((2, 2), np.int8)}
    assert read(nothing, LEGAL).rows["target"].tolist() == [0, 1]


def test_columns_go_through_whole_episodes_one_after_the_other(read):
    batches = list(read(arrays()).rollouts(3, 2, passes=2, whole_episodes=True, seed=1))
    assert len(batches) == 2 and batches[0]["done"].shape == (3, 2)
    for column in range(2):
        rows = torch.cat([batch["obs"]["obs"][:, column, 0] / 3 for batch in batches]).int().tolist()
        done = torch.cat([batch["done"][:, column] for batch in batches]).tolist()
        for row, following, begins in zip(rows, rows[1:], done[1:]):
            assert begins == (row in (3, 5)) and (following in (0, 4) if begins else following == row + 1)


def test_single_decisions_are_drawn_as_often_as_each_other(read):
    batches = list(read(arrays()).rollouts(3, 2, passes=5, whole_episodes=False, seed=1))
    rows = torch.cat([batch["obs"]["obs"][..., 0].flatten() / 3 for batch in batches]).int()
    assert len(batches) == 5 and len(set(rows.tolist())) == 6
    passes = [batch["obs"]["obs"][:, 0, 0].div(3).tolist() for batch in read(arrays()).rollouts(6, 1, 4, False, 1)]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert len({tuple(each) for each in passes}) > 1, "in another order each time"


# ---------------------------------------------------------------------------------------- making such files


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_demonstrations_of_a_checkpoint_are_its_whole_games(tmp_path, monkeypatch, capsys, mode):
    def create_env(flags, num_envs, **overrides):
        makers = [lambda: toy_envs.Counting()] * num_envs
        return gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode)

    monkeypatch.setattr(monobeast, "create_env", create_env)
    flags = monobeast.validate(monobeast.Flags(hidden_size=8))
    net = monobeast.Net({"obs": BOX}, spaces.Discrete(2), flags)
    config = {**vars(flags), "variant": "mono"}
    state = {"config": config, "agent": "monobeast", "net": net.state_dict(), "counts": {"steps": 0}}
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    output = tmp_path / "shown.npz"
    demonstrate = importlib.import_module("examples.demonstrate")
    demonstrate.main(str(tmp_path / "checkpoint.pt"), str(output), 4)
    shown = demonstrations.read(str(output), EnvSpaces(spaces_by_name(BOX), spaces.Discrete(2)))
    assert "of 4 episodes, mean return" in capsys.readouterr().out
    observed = shown.rows["obs"]["obs"]
    begins = shown.rows["done"]
    assert (observed[begins, 2] == 0).all() and int(begins.sum()) == 4
    assert (observed[:, 2][1:][~begins[1:]] == observed[:, 2][:-1][~begins[1:]] + 1).all(), "each step once"
    assert (shown.rows["reward"][1:][~begins[1:]] == observed[:, 2][1:][~begins[1:]]).all(), "it pays the step's number"


def test_a_data_set_of_minari_becomes_demonstrations(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason='pip install "minari[hdf5]"')
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    from minari.data_collector import EpisodeBuffer

    env, random = gymnasium.make("CartPole-v1"), np.random.default_rng(1)
    games = []
    for game in range(3):
        count, ends = 5 + game, np.arange(5 + game) == 4 + game
        steps = {"rewards": list(range(count)), "terminations": list(ends), "truncations": [False] * count}
        observations = [random.uniform(-1, 1, 4).astype(np.float32) for _ in range(count + 1)]  # the last one, too
        actions = [int(action) for action in random.integers(2, size=count)]
        games.append(EpisodeBuffer(id=game, observations=observations, actions=actions, **steps))
    minari.create_dataset_from_buffers("cartpole/random-v0", games, env=env)
    importlib.import_module("examples.minari_demonstrations").main("cartpole/random-v0", str(tmp_path / "shown.npz"))
    of_cartpole = EnvSpaces(spaces_by_name(env.observation_space), env.action_space)
    shown = demonstrations.read(str(tmp_path / "shown.npz"), of_cartpole)
    assert shown.rows["target"].tolist() == [action for game in games for action in game.actions]
    expected = np.concatenate([game.observations[:-1] for game in games])
    assert np.array_equal(shown.rows["obs"]["obs"], expected)
    assert np.flatnonzero(shown.rows["done"]).tolist() == [0, 5, 11]


@pytest.mark.parametrize("name", ["demonstrate", "minari_demonstrations"])
def test_a_wrong_command_is_answered_by_the_right_one(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=f"usage: python -m examples.{name} "):
        importlib.import_module("runpy").run_module(f"examples.{name}", run_name="__main__")
