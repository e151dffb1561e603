"""Presets are flags to begin with, and every command of docs/recipes.md trains."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import monobeast
from beast.run import command_line
from beast.run.presets import ABOUT, PRESETS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def parse(monkeypatch):
    """A function of a program's flags class and its arguments: the flags."""

    def parse(flags_class, *arguments: str):
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
        return command_line.parse(flags_class, None)

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


def test_polybeast_takes_those_flags_of_a_preset_that_it_has(parse):
    pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    import polybeast

    known = {field.name for field in dataclasses.fields(polybeast.Flags)}
    own = {name: value for name, value in PRESETS["continuous"].items() if name in known}
    assert parse(polybeast.Flags, "--preset", "continuous") == polybeast.Flags(**own)
    assert len(own) > 5


@pytest.mark.parametrize("arguments", [["--preset", "vectors"], ["--preset=vectors"], ["--preset"]])
def test_a_preset_that_there_is_not_ends_in_one_line_that_names_those_that_there_are(run_main, arguments):
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
    for steps, expected in (("1000", "in 4 epochs"), ("2000", "resumed at step 1,")):
        code, output = run_main(monobeast, *command, steps)
        assert code == 0 and expected in output, output
    code, output = run_main(monobeast, *command, "3000", "--epochs", "1")
    assert code == 1 and "--epochs 1 (the run has 4)" in output
