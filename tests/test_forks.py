"""The forks of examples/forks are diffs that apply to monobeast.py as it is, and do what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lock_step import metrics_of
from programs import Program
from waiting import PATIENCE

import beast
from beast.envs.spaces import EnvSpaces
from beast.learn.nests import map_tensors
from beast.run.policy import import_agent

ROOT = Path(__file__).resolve().parent.parent
FORKS = ROOT / "examples" / "forks"


@pytest.fixture
def fork(tmp_path):
    """A function of the name of a fork, and of the one `below` it that it changes: the patched agent's file."""

    if not shutil.which("patch"):
        pytest.skip("patch is not installed")

    def fork(name: str, below: str = "") -> Path:
        shutil.copy(ROOT / "monobeast.py", tmp_path)
        for each in filter(None, (below, name)):
            with open(FORKS / f"{each}.diff") as diff:
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
    assert len(list(FORKS.glob("*.diff"))) == 6
    assert all(f'fork("{path.stem}"' in source for path in FORKS.glob("*.diff"))


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


def test_what_has_imitated_does_as_it_was_shown_before_the_first_step_and_only_once(fork, tmp_path):
    shown = np.random.default_rng(1).integers([3, 4], size=(800, 2))
    ends = np.arange(800) % 8 == 7
    observations = np.concatenate([np.eye(3)[shown[:, 0]], np.eye(4)[shown[:, 1]]], axis=1)
    file = tmp_path / "shown.npz"
    np.savez(file, observations=observations, actions=shown, rewards=np.ones(800), episode_ends=ends)
    agent = fork("demonstrations")
    arguments = ["--env", "toy_envs:MultiDiscrete-v0", *SMALL, "--core", "lstm", "--core_size", "16"]
    arguments += ["--learning_rate", "1e-2", "--demonstrations", str(file)]
    for name, passes, lowest, highest in (("untaught", 0, 0.0, 0.5), ("taught", 20, 0.9, 1.0)):
        taught = ["--demonstration_passes", str(passes), "--name", name]
        code, log = train(agent, *arguments, *taught, "--total_steps", "100")
        assert code == 0 and "imitating" in log and "800 decisions of 100 episodes, mean return 8.00" in log, log
        policy = beast.load(str(tmp_path / "runs" / name / "imitation.pt"), str(agent))
        found, state = [], None
        for row in observations[:200]:
            actions, state = policy.act(row[None].astype(np.float32), state, 1.0, len(found) % 8 == 0, greedy=True)
            found.append(actions[0])
        assert lowest <= (np.array(found) == shown[:200]).all(1).mean() <= highest
        assert policy.steps == 0
    code, log = train(agent, *arguments, "--demonstration_passes", "20", "--name", "taught", "--total_steps", "200")
    assert code == 0 and "resumed at step" in log and "imitating" not in log, log


def test_a_core_that_imitates_remembers_what_an_episode_began_with(fork, tmp_path):
    agent = import_agent(str(fork("demonstrations")), "")
    cues = np.random.default_rng(1).integers(2, size=200)
    observations, actions = np.zeros((200, 4, 2), np.float32), np.zeros((200, 4), int)
    observations[:, 0, 0], observations[:, 3, 1], actions[:, 3] = 2.0 * cues - 1, 1.0, cues  # asked for in row 3
    ends = np.arange(800) % 4 == 3
    given = {"observations": observations.reshape(800, 2), "actions": actions.reshape(800), "rewards": np.zeros(800)}
    np.savez(tmp_path / "shown.npz", **given, episode_ends=ends)
    env_spaces = EnvSpaces({"obs": spaces.Box(-1.0, 1.0, (2,))}, spaces.Discrete(2))
    flags = agent.Flags(hidden_size=64, core="lstm", core_size=16, unroll_length=10, batch_width=4, learning_rate=0.01)
    flags = agent.validate(flags)
    torch.manual_seed(1)
    net = agent.Net(env_spaces.observations, env_spaces.action, flags)
    shown = agent.demonstrations.read(str(tmp_path / "shown.npz"), env_spaces)
    agent.imitate(flags, net, shown)
    center = net.encoders[0].center
    assert center.count == 800, "each decision is observed once"
    torch.testing.assert_close(center.mean, shown.rows["obs"]["obs"].mean(0), atol=1e-5, rtol=0)
    with torch.no_grad():
        policy_logits, _, _ = net(map_tensors(lambda x: x[:, None], shown.rows), net.initial_state(1))
    assert (policy_logits.argmax(-1)[:, 0] == shown.rows["target"]).float().mean() > 0.95


def test_the_bonus_has_values_and_a_discount_of_its_own_and_goes_on_through_ends(fork, tmp_path, monkeypatch):
    agent = import_agent(str(fork("two_values", below="rnd")), "")
    flags = agent.Flags(hidden_size=8, novelty_discount=0.5, novelty_bonus=2.0, normalize_advantages=False)
    flags = agent.validate(flags)
    net = agent.Net({"obs": spaces.Box(-1.0, 1.0, (4,))}, spaces.Discrete(2), flags)
    for head in (net.policy, net.baseline, net.novelty_baseline):  # the policy that acted, and values of 0
        torch.nn.init.zeros_(head.weight)
    monkeypatch.setattr(net.novelty, "relative", torch.ones_like)
    rows, columns = 5, 2
    ends = torch.zeros(rows, columns, dtype=torch.bool)
    ends[2] = True
    batch = {
        "obs": {"obs": torch.randn(rows, columns, 4)}, "reward": torch.zeros(rows, columns),
        "action": torch.zeros(rows, columns, dtype=torch.int64), "policy_logits": torch.zeros(rows, columns, 2),
        "terminated": ends, "truncated": torch.zeros_like(ends), "done": torch.roll(ends, 1, 0),
    }  # fmt: skip
    _, _, metrics = agent.compute_loss(flags, net, batch, ())
    targets = torch.tensor([2 + 1 + 0.5 + 0.25, 2 + 1 + 0.5, 2 + 1, 2])  # row 2 is the last of its episode
    assert metrics["losses/novelty_value_loss"].item() == pytest.approx(0.5 * targets.square().mean().item())
    decided = targets[[0, 1, 3]]  # row 2 decides nothing
    assert metrics["losses/policy_loss"].item() == pytest.approx(-decided.mean().item()), "advantages have the bonus"
    assert metrics["losses/value_loss"].item() == 0, "the rewards' values do not"

    code, log = train(tmp_path / "two_values_agent.py", "--env", "CartPole-v1", *SMALL, "--total_steps", "1000")
    assert code == 0, log
    assert float(metrics_of(tmp_path / "runs" / "run")[-1]["losses/novelty_value_loss"]) > 0
