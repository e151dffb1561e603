"""Presets are flags to begin with, and every command of docs/recipes.md trains."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

import beast
import monobeast
from beast.envs.spaces import spaces_by_name
from beast.learn.normalization import STATISTICS
from beast.run import command_line
from benchmarks.learning import RECIPES
from monobeast_presets import ABOUT, PRESETS

ROOT = Path(__file__).resolve().parent.parent

PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROW = r"^\| `(recipe-[a-z]+)`(?:, `pip install (\w+)[\w ]*`)?.*? \| `python monobeast.py (.*?)` \|"
ROWS = re.findall(ROW, PAGE, re.MULTILINE)
MODULES = {"box2d": "Box2D"}  # of packages that are called otherwise


@pytest.fixture
def parse(monkeypatch):
    """A function of a program's flags class and its arguments: the flags."""

    def parse(flags_class, *arguments: str):
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
        return command_line.parse(flags_class, None, PRESETS, ABOUT)

    return parse


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_flags_of_the_agent_from_the_command_line_and_from_python(parse, name):
    flags = monobeast.Flags(**PRESETS[name])
    assert parse(monobeast.Flags, "--preset", name) == parse(monobeast.Flags, f"--preset={name}") == flags
    assert monobeast.validate(flags).group_width == flags.group_width
    hints = get_type_hints(monobeast.Flags)
    for flag, value in PRESETS[name].items():
        assert not isinstance(hints[flag], type) or type(value) is hints[flag], f"--{flag} {value!r}"
    assert ABOUT.keys() == PRESETS.keys()


def test_flags_that_are_given_win_over_the_preset_wherever_they_stand(parse):
    expected = dataclasses.replace(monobeast.Flags(**PRESETS["continuous"]), epochs=7, seed=3, tensorboard=False)
    given = ["--epochs", "7", "--seed", "3", "--no_tensorboard"]
    assert parse(monobeast.Flags, *given, "--preset", "continuous") == expected
    assert parse(monobeast.Flags, "--preset", "continuous", *given) == expected
    assert expected.epochs != PRESETS["continuous"]["epochs"] != monobeast.Flags.epochs


@pytest.mark.parametrize("name", PRESETS)
def test_polybeast_takes_every_flag_of_a_preset_but_of_that_which_is_for_actors(parse, name):
    pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    import polybeast

    if name == "gpu_atari":
        with pytest.raises(SystemExit, match="this program has no flag --num_actors, --stagger"):
            parse(polybeast.Flags, "--preset", name)
        return
    assert parse(polybeast.Flags, "--preset", name) == polybeast.Flags(**PRESETS[name])


def test_a_flag_of_a_preset_that_the_program_lacks_is_refused(run_main, monkeypatch):
    monkeypatch.setitem(PRESETS, "memory", {"no_such_flag": 1})
    code, output = run_main(monobeast, "--preset", "memory")
    assert code == 1 and "no flag --no_such_flag" in output, output


@pytest.mark.parametrize("arguments", [["--preset", "vectors"], ["--preset=vectors"], ["--preset"]])
def test_an_unknown_preset_ends_in_one_line_that_names_the_known_ones(run_main, arguments):
    code, output = run_main(monobeast, *arguments)
    assert code == 1 and all(name in output for name in PRESETS)
    assert output.count("\n") == 1 and output.startswith("error: --preset"), output


def test_help_says_which_presets_there_are_and_the_defaults_of_one_that_is_given(run_main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, help_text = run_main(monobeast, "--help")
    for name, about in ABOUT.items():
        assert f"{name:<10}  {about}" in help_text
    _, help_text = run_main(monobeast, "--help", "--preset", "continuous")
    assert f"(default: {PRESETS['continuous']['epochs']})" in help_text.split("--epochs")[1][:500]


def test_a_run_with_a_preset_is_resumed_by_the_same_command(tmp_path, run_main):
    command = ["--preset", "discrete", "--env", "CartPole-v1", "--root", str(tmp_path), "--name", "run"]
    command += ["--no_tensorboard", "--deterministic", "--total_steps"]
    epochs = PRESETS["discrete"]["epochs"]
    for steps, expected in (("1000", f"in {epochs} epochs"), ("2000", "resumed at step 1,")):
        code, output = run_main(monobeast, *command, steps)
        assert code == 0 and expected in output, output
    code, output = run_main(monobeast, *command, "3000", "--epochs", "1")
    assert code == 1 and f"--epochs 1 (the run has {epochs})" in output


def test_the_commands_of_the_page_are_those_of_the_benchmark():
    assert {name: command for name, _, command in ROWS} == RECIPES
    assert {name for name in PRESETS} <= set(re.findall(r"--preset (\w+)", PAGE))


@pytest.mark.parametrize("name, package, command", ROWS, ids=[name for name, *_ in ROWS])
def test_every_recipe_trains_for_a_moment_and_plays(tmp_path, run_main, monkeypatch, name, package, command):
    monkeypatch.chdir(tmp_path)  # simulators leave files where they run
    if package:
        module = MODULES.get(package, package)
        pytest.importorskip(module, reason=f"pip install {package}", exc_type=ImportError)
    place = ["--root", str(tmp_path), "--name", "run"]
    small = "--group_width 4 --batch_width 4 --minibatches 2 --unroll_length 16 --total_steps 300".split()
    arguments = [*command.split(), *place, *small, "--no_tensorboard", "--deterministic", "--amp", "off"]
    code, output = run_main(monobeast, *arguments)
    assert code == 0 and "stopped at step" in output and "skipped" not in output, output
    policy = beast.load(str(tmp_path / "run" / "checkpoint.pt"))
    env = policy.make_env(2)
    actions, _ = policy.act(env.reset(seed=1)[0])
    env.step(actions)
    env.close()
    normalized = [encoder.center for encoder in policy.net.encoders if encoder.center.mean is not None]
    parts = [space for space in spaces_by_name(policy.observation_space).values() if space.shape]
    counted = [space for space in parts if np.issubdtype(space.dtype, np.floating) or space.dtype == np.uint8]
    assert len(normalized) == len(counted)
    assert counted or name == "recipe-minatar", "its images are of bool; all others are vectors or images of uint8"
    assert all(center.count > 0 for center in normalized)


def test_an_exported_net_says_the_same_and_has_the_statistics_of_observations(tmp_path, run_main, monkeypatch):
    export = importlib.import_module("examples.export")
    place = ["--root", str(tmp_path), "--name", "run", "--env", "examples.parcel:Parcel-v0", "--core", "lstm"]
    code, output = run_main(monobeast, *place, "--total_steps", "1000", "--no_tensorboard", "--deterministic")
    assert code == 0, output
    path, target = str(tmp_path / "run" / "checkpoint.pt"), str(tmp_path / "net.pt2")
    export.main(path, target)
    policy, exported = beast.load(path), torch.export.load(target).module()
    env = policy.make_env(5)
    inputs = policy.inputs(env.reset(seed=3)[0])
    env.close()
    assert policy.net.encoders[0].center.count > 0 and policy.net.encoders[1].center.count > 0
    torch.testing.assert_close(exported(*inputs), policy.net(*inputs))
    before = policy.net(*inputs)[0]
    for encoder in policy.net.encoders:
        for statistic in STATISTICS:
            encoder.center.register_buffer(statistic, None)
    assert not torch.allclose(policy.net(*inputs)[0], before, rtol=1e-3, atol=1e-6), "they matter"


def test_the_parcel_pays_at_the_door_of_its_address_and_costs_steps():
    from examples.parcel import MOVES, Parcel

    env, ends = Parcel(), set()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        assert env.observation_space.contains(observation)
        right = int(observation["address"][0] > 0)
        door, ended = right if seed % 2 else 1 - right, False
        while not ended:  # rows first, then columns
            where = [np.argwhere(observation["map"][:, :, channel])[0] for channel in (0, 1 + door)]
            row, column = where[1] - where[0]
            move = (int(row > 0) - int(row < 0), 0) if row else (0, int(column > 0) - int(column < 0))
            observation, reward, ended, truncated, _ = env.step(MOVES.index(move))
            assert not truncated and (ended or reward == -0.02)
        carrier = observation["map"][:, :, 0].astype(bool)
        is_right = bool(observation["map"][carrier, 1 + right])
        assert reward == pytest.approx(0.98 if is_right else -1.02)
        ends.add((seed % 2, is_right))
    assert {(1, True), (0, False)} <= ends
    env.reset(seed=1)
    assert [env.step(seed % 2)[3] for seed in range(50)][-1], "time is up"


def test_several_seeds_train_with_a_preset(tmp_path, run_main, monkeypatch):
    seeds, trained = importlib.import_module("examples.seeds"), []

    def train(flags):
        trained.append(flags)
        return monobeast.Result(1, 1, 0.0, 0.0, tmp_path, "")

    monkeypatch.setattr(monobeast, "train", train)
    code, output = run_main(seeds, "--preset", "memory", "--epochs", "9", "--seeds", "4", "5")
    assert code == 0, output
    expected = dataclasses.replace(monobeast.Flags(**PRESETS["memory"]), epochs=9)
    assert trained == [dataclasses.replace(expected, seed=seed, name=f"seeds-seed{seed}") for seed in (4, 5)]
