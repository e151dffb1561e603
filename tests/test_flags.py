"""Flags: their limits, their help and how a command line is read."""

import dataclasses
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from lock_step import small_flags

import monobeast
import r2d2
from beast.errors import InputError, exit_with_message
from beast.run import command_line
from beast.run.directory import Run
from monobeast import Flags

ROOT = Path(__file__).resolve().parent.parent


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
        (
            {"stagger": True, "batch_width": 8},
            "--stagger with --batch_width 8: .* each of the 2 groups of 4 columns.* less than 8, or --num_actors 2",
        ),
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
        (["--lr", "1e-3"], "--lr: this program has no such flag; give --learning_rate"),
        (["--num-envs=4"], "--num_envs: this program has no such flag; give --group_width"),
        (["--total_steps", "1.5"], "--total_steps 1.5: it must be a whole number, such as 1000000 or 1e6"),
        (["--noops=2.5"], "--noops 2.5: it must be a whole number"),
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
        default = default if field.default != () else ""  # of several words
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
        flags = command_line.parse(Own, None, {}, {})
    changes = {"level": 4, "tensorboard": False, "net": "mlp", "reward_clip": 2.5, "seed": 7, "discount": 0.5}
    assert flags == Own(**changes)
    known = command_line.read_source(Own)
    assert known["level"] == command_line.Flag("Mine", "How hard it is.")
    assert known["discount"].section == "The loss" and known["discount"].help.startswith("Discount of one")


@pytest.mark.parametrize(
    "env, clip, normalize",
    [("PongNoFrameskip-v4", 1.0, "off"), ("ALE/Pong-v5", 1.0, "off"), ("CartPole-v1", 0.0, "on")],
)
def test_rewards_are_clipped_for_atari_and_returns_normalized_elsewhere(env, clip, normalize):
    flags = monobeast.validate(Flags(env=env))
    assert (flags.reward_clip, flags.normalize_returns) == (clip, normalize)


@pytest.mark.parametrize("text, number", [("1e6", 10**6), ("2.5e3", 2500), ("1_000_000", 10**6), ("7.0", 7), ("9", 9)])
def test_a_whole_number_may_be_written_in_any_way(text, number, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--total_steps", text, f"--seed={text}", "--learning_rate", "1e-3"])
    flags = command_line.parse(Flags, None, {}, {})
    assert (flags.total_steps, flags.seed, flags.learning_rate) == (number, number, 1e-3)


def test_names_that_flags_have_elsewhere_stand_for_flags_of_an_agent_here():
    known = {field.name for agent in (monobeast, r2d2) for field in dataclasses.fields(agent.Flags)}
    assert set(command_line.ELSEWHERE.values()) <= known and not set(command_line.ELSEWHERE) & known


def test_what_stdout_cannot_write_ends_no_program(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with exit_with_message():
        print("mean 3 ± 1")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"mean 3 ? 1\n"


def test_a_name_that_is_no_text_in_this_locale_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"k\\udcc3\\udca4se': .*LC_ALL=C.UTF-8") as raised:
        Run(tmp_path, "k\udcc3\udca4se", {})
    str(raised.value).encode()
