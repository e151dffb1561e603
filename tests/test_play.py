"""`--mode test`: games with a saved net, and videos of them."""

import dataclasses
import importlib
import json
import math
import os

import gymnasium
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lock_step import new_learner, new_net, small_flags
from PIL import Image

import monobeast
from beast.errors import InputError
from beast.run import checkpoint, evaluation


@pytest.fixture
def saved(tmp_path):
    """`saved(**flags)` writes the checkpoint of a net with these flags, and returns those to play it with."""

    def save(**changes):
        flags, path = small_flags(**changes), tmp_path / "checkpoint.pt"
        checkpoint.save(path, {"config": dataclasses.asdict(flags), **new_learner(flags).state_dict()})
        return monobeast.Flags(mode="test", checkpoint=str(path), episodes=12)

    return save


def test_test_mode_plays_whole_games_with_given_seeds_and_writes_them_down(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", core="lstm", total_steps=1000, tensorboard=False)
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


def test_test_mode_tells_for_how_many_steps_the_net_was_trained(tmp_path):
    flags, path = small_flags(mode="test", name="run", episodes=1), tmp_path / "checkpoint.pt"
    learner = new_learner(flags)
    learner.steps, learner.updates = 1234, 5
    checkpoint.save(path, {"config": dataclasses.asdict(flags), **learner.state_dict()})
    assert monobeast.test(dataclasses.replace(flags, checkpoint=str(path)))["steps"] == 1234


COUNTING = {"env": "toy_envs:Counting-v0", "env_kwargs": '{"max_length": 3}'}


def test_games_are_played_with_the_environment_flags_that_are_given_and_test_json_says_it(saved, tmp_path, capsys):
    flags = saved(**COUNTING)
    played = monobeast.test(flags)
    assert max(played["lengths_in_steps"]) == 3 and played["differs_from_training"] == {}
    played = monobeast.test(dataclasses.replace(flags, env_kwargs='{"max_length": 1}'))
    assert played["lengths_in_steps"] == [1] * 12 and "played with --env_kwargs" in capsys.readouterr().out
    assert played == json.loads((tmp_path / "test.json").read_text())
    change = {"played": '{"max_length": 1}', "trained": '{"max_length": 3}'}
    assert played["differs_from_training"] == {"env_kwargs": change}
    played = monobeast.test(flags, given={"env_kwargs"})  # the default, `{}` on the command line
    assert max(played["lengths_in_steps"]) == 7 and played["differs_from_training"]["env_kwargs"]["played"] == ""
    others = ('{"max_length": 2}', "same={}")
    played = monobeast.test(dataclasses.replace(flags, eval_env_kwargs=others))
    assert played["differs_from_training"]["env_kwargs"]["played"] == '{"max_length": 2}'
    assert played["others"]["same"]["differs_from_training"] == {}
    twin = {"env": "toy_envs:Telling-v0", "env_kwargs": ""}
    with pytest.raises(InputError, match=r"^--env toy_envs:Telling-v0 .*: its spaces .* are obs Box.*\(2,\).*\(3,\)"):
        monobeast.test(dataclasses.replace(flags, **twin), given=twin)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"env": "CartPole-v1", "env_kwargs": ""}, "--env CartPole-v1 .*its spaces are not those that the agent has"),
        ({"sticky_actions": 0.5}, "sticky_actions is for Atari ids"),
        ({"frame_stack": 2}, "frame_stack is for images"),
    ],
)
def test_environment_flags_that_do_not_fit_the_agent_are_refused_in_one_line(saved, given, message):
    flags = saved(**COUNTING)
    with pytest.raises(InputError, match=message) as raised:
        monobeast.test(dataclasses.replace(flags, **given), given=given)
    assert "\n" not in str(raised.value)


def test_bounds_are_no_reason_to_refuse_an_environment(saved):
    played = monobeast.test(dataclasses.replace(saved(env="Pendulum-v1"), env_kwargs='{"g": 1.0}', episodes=1))
    assert played["differs_from_training"]["env_kwargs"]["played"] == '{"g": 1.0}'
    narrow = spaces.Box(-1, 1, (3,), np.float32)

    class Narrow(toy_envs.Counting):
        def __init__(self):
            super().__init__(max_length=2)
            self.observation_space = narrow

    def create_env(flags, num_envs, **overrides):
        assert flags.env
        return SyncVectorEnv([Narrow] * num_envs)

    assert max(monobeast.test(saved(**COUNTING), create_env)["lengths_in_steps"]) <= 2


def test_flags_of_a_forks_own_environment_count_as_far_as_it_looks_at_them(saved, capsys):
    @dataclasses.dataclass
    class Flags(monobeast.Flags):
        level: int = 1

    def create_env(flags, num_envs, **overrides):
        return SyncVectorEnv([lambda: toy_envs.Counting(flags.level)] * num_envs)

    flags = Flags(**vars(saved(**COUNTING)))
    played = monobeast.test(dataclasses.replace(flags, level=2, discount=0.5, noops=3), create_env)
    assert max(played["lengths_in_steps"]) == 2 and played["differs_from_training"] == {
        "level": {"played": 2, "trained": 1}
    }
    assert "--noops 3: create_env() does not look at it" in capsys.readouterr().err


@pytest.mark.parametrize("agent", ["monobeast", "polybeast", "r2d2"])
def test_every_agent_says_which_flags_its_command_line_has(agent, run_main, monkeypatch):
    if agent == "polybeast":
        pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
    calls = []
    monkeypatch.setattr(evaluation, "play_checkpoint", lambda *_, given, **options: calls.append(given))
    words = ["--mode=test", "--name", "x", "--env-kwargs", "{}", "--no_greedy", "--sticky_actions=0.5"]
    code, output = run_main(importlib.import_module(agent), *words)
    assert code == 0 and {"env_kwargs", "greedy", "sticky_actions", "name"} <= calls[0] and "noops" not in calls[0]


# ------------------------------------------------------------------------------------ games that do not end


class Sometimes(gymnasium.Env):
    """Every other game ends, after two steps; the others never do. Infos tell the number of the game."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
        self.render_mode, self.game = render_mode, -1

    def reset(self, *, seed=None, options=None):
        self.game, self.count = self.game + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        ends = self.count == 2 and self.game % 2 == 0
        return np.zeros(2, np.float32), 1.0, ends, False, {"metrics": {"game": self.game}} if ends else {}

    def render(self):
        return np.full((40, 30, 3), self.count, np.uint8)


def make_sometimes(mode, num_envs, **overrides):
    return SyncVectorEnv([lambda: Sometimes(**overrides)] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("width", [1, 3])
def test_a_game_that_does_not_end_is_cut_and_the_next_one_begins(mode, width, monkeypatch):
    flags = small_flags(env="toy_envs:Telling-v0", episodes=4 * width, max_game_steps=5, core="lstm")
    monkeypatch.setattr(evaluation, "MAX_WIDTH", width)
    played = evaluation.play(lambda num_envs: make_sometimes(mode, num_envs), new_net(flags), flags)
    ended, cut = (2.0, 2, {"game": 0.0}, False), (5.0, 5, {}, True)
    assert [tuple(game) for game in played] == [ended, cut, (2.0, 2, {"game": 2.0}, False), cut] * width


def test_what_a_game_tells_after_it_was_cut_is_not_told_of_the_next_one():
    class Waiting(Sometimes):  # the first game of the second environment ends while it waits for those of the first
        def __init__(self, lengths):
            super().__init__()
            self.lengths = lengths

        def step(self, action):
            observation, reward, *_ = super().step(action)
            ends = self.count == self.lengths[min(self.game, 1)]
            return observation, reward, ends, False, {"metrics": {"game": self.game}} if ends else {}

    flags = small_flags(env="toy_envs:Telling-v0", episodes=4, max_game_steps=5)
    make = lambda _: SyncVectorEnv([lambda: Waiting([4, 4]), lambda: Waiting([7, 2])])  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "MAX_WIDTH", 2)
        *_, cut, after = evaluation.play(make, new_net(flags), flags)
    assert cut.is_cut and not after.is_cut and after.length == 2 and after.numbers["game"] > 0


def test_a_game_that_ends_at_the_limit_is_whole(saved):
    flags = dataclasses.replace(saved(env="toy_envs:Telling-v0"), episodes=3)
    assert monobeast.test(dataclasses.replace(flags, max_game_steps=3))["games_cut"] == 0
    played = monobeast.test(dataclasses.replace(flags, max_game_steps=2))
    assert played["games_cut"] == 3 and played["lengths_in_steps"] == [2, 2, 2]


def test_console_test_json_and_evaluations_tell_how_many_games_were_cut_and_a_film_ends(saved, tmp_path, capsys):
    def create_env(flags, num_envs, **overrides):
        return make_sometimes(AutoresetMode.NEXT_STEP, num_envs, **overrides)

    film = tmp_path / "film.gif"
    flags = saved(env="toy_envs:Telling-v0")
    flags = dataclasses.replace(flags, episodes=4, max_game_steps=6, video=str(film))
    played = monobeast.test(flags, create_env)
    assert (played["games_cut"], played["max_game_steps"], played["lengths_in_steps"]) == (2, 6, [2, 6, 2, 6])
    assert "cut off after 6 steps, as if truncated (--max_game_steps): 2 of 4 games" in capsys.readouterr().out
    assert evaluation._metrics_of(played, "eval")["eval/games_cut"] == 2
    with Image.open(film) as image:
        assert image.n_frames == 2, "the first game alone"
    evaluations = evaluation.Evaluations(tmp_path, flags, 7, print)
    assert "--max_game_steps 6" in " ".join(evaluations._command)
