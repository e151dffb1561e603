"""The forks of examples/forks are diffs that apply to monobeast.py as it is, and do what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from lock_step import metrics_of
from programs import Program
from waiting import PATIENCE

import beast
from beast.run.policy import import_agent

ROOT = Path(__file__).resolve().parent.parent
FORKS = ROOT / "examples" / "forks"


@pytest.fixture
def fork(tmp_path):
    """A function of a fork's name: the patched agent's file."""

    if not shutil.which("patch"):
        pytest.skip("patch is not installed")

    def fork(name: str) -> Path:
        shutil.copy(ROOT / "monobeast.py", tmp_path)
        with open(FORKS / f"{name}.diff") as diff:
            command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"]
            subprocess.run(command, cwd=tmp_path, stdin=diff, check=True, capture_output=True)
        return (tmp_path / "monobeast.py").rename(tmp_path / f"{name}_agent.py")

    return fork


def train(agent: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and log of a run of the agent in its own directory."""
    words = [str(agent), "--name", "run", "--no_tensorboard", "--deterministic", *arguments]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment, output = {**os.environ, "PYTHONPATH": paths}, agent.parent / "output"
    process = Program(words, cwd=agent.parent, env=environment, output=output)
    return process.wait(PATIENCE), process.text()


SMALL = ["--group_width", "4", "--batch_width", "4", "--hidden_size", "64"]


def test_every_fork_is_tested_here():
    source = Path(__file__).read_text()
    assert len(list(FORKS.glob("*.diff"))) == 4
    assert all(f'fork("{path.stem}")' in source for path in FORKS.glob("*.diff"))


def test_the_transformer_sees_its_memory_in_the_episode_alike_in_acting_and_learning_and_trains(fork, tmp_path):
    agent = fork("transformer")
    Transformer = import_agent(str(agent), "").Transformer
    torch.manual_seed(1)
    T, B, M, units = 12, 2, 3, 8
    core = Transformer(5, units, M, heads=2)
    torch.nn.init.normal_(core.distance)
    x, begins = torch.randn(T, B, 5), torch.zeros(T, B, 1, dtype=torch.bool)
    begins[0], begins[7, 0] = True, True
    state = tuple(torch.randn_like(part) if part.shape[-1] == units else part for part in core.initial_state(B))
    output, _ = core(x, begins, state)
    stepped = []
    for t in range(T):
        row, state = core(x[t : t + 1], begins[t : t + 1], state)
        stepped.append(row)
    torch.testing.assert_close(torch.cat(stepped), output)

    changed = x.clone()
    changed[5] += 1
    differs = (core(changed, begins, core.initial_state(B))[0] - output).abs().amax(-1) > 1e-6  # [T, B]
    assert differs[:, 0].tolist() == [t in (5, 6) for t in range(T)], "an episode begins in row 7"
    assert differs[:, 1].tolist() == [t in (5, 6, 7, 8) for t in range(T)], "and here it goes on, beyond the memory"

    arguments = ["--env", "toy_envs:MemoryCue-v0", *SMALL, "--core", "transformer", "--core_size", "16"]
    code, log = train(agent, *arguments, "--core_memory", "4", "--total_steps", "1000")
    assert code == 0 and "stopped at step 1," in log, log
    state = torch.load(tmp_path / "runs" / "run" / "checkpoint.pt", weights_only=True)
    assert state["net"]["core.distance"].shape == (5, 4)


def test_the_bonus_of_random_network_distillation_falls_as_observations_become_known(fork, tmp_path):
    arguments = ["--env", "CartPole-v1", *SMALL, "--total_steps", "6000", "--log_steps", "500"]
    code, log = train(fork("rnd"), *arguments, "--learning_rate", "1e-3", "--lr_decay", "none")
    assert code == 0, log
    novelty = [float(row["losses/novelty"]) for row in metrics_of(tmp_path / "runs" / "run")]
    assert 0 < novelty[-1] < 0.5 * novelty[0], novelty
    weights = torch.load(tmp_path / "runs" / "run" / "checkpoint.pt", weights_only=True)["net"]
    names = [name for name in weights if name.startswith("novelty.random.") and name.endswith("weight")]
    torch.manual_seed(1)
    agent = import_agent(str(tmp_path / "rnd_agent.py"), "")
    flags = agent.validate(agent.Flags(env="CartPole-v1", hidden_size=64))
    observations = {"obs": spaces.Box(-1.0, 1.0, (4,))}
    fresh = agent.Net(observations, spaces.Discrete(2), flags).state_dict()
    assert len(names) == 2 and all(torch.equal(weights[name], fresh[name]) for name in names), "it stays as it began"


def test_a_dict_environment_of_ones_own_trains(fork, tmp_path):
    agent = fork("dict_env")
    code, log = train(agent, *SMALL, "--total_steps", "1000")
    assert code == 0 and "run: Parcel" in log, log
    policy = beast.load(str(tmp_path / "runs" / "run" / "checkpoint.pt"), str(agent))
    assert {name: space.shape for name, space in policy.observation_space.items()} == {
        "address": (2,),
        "map": (6, 6, 3),
    }
    assert all(encoder.center.count > 0 for encoder in policy.net.encoders), "both parts reached the net"


def test_with_the_curriculum_games_become_harder_with_the_returns(fork, tmp_path):
    arguments = ["--env", "toy_envs:Telling-v0", *SMALL, "--total_steps", "800", "--log_steps", "100"]
    code, log = train(fork("curriculum"), *arguments)
    assert code == 0, log
    rows = metrics_of(tmp_path / "runs" / "run")
    assert float(rows[-1]["env/difficulty"]) == pytest.approx(3 / 500), "each game returns 3"
    assert float(rows[0]["env/difficulty"]) < 0, "the first games began before there were returns"
