from __future__ import annotations

import copy
import dataclasses
import importlib.util
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from gymnasium import spaces
from lock_step import small_flags, spaces_of
from torch import nn
from waiting import PATIENCE

import beast
import monobeast
from beast.envs import emulator
from beast.envs.masks import spaces_with_mask
from beast.envs.spaces import EnvSpaces
from beast.errors import InputError, MissingFile
from beast.run import checkpoint
from beast.run.checkpoint import describe_spaces, saved_spaces
from beast.run.policy import Policy


@pytest.fixture
def state():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "counts": {"steps": 1_000_000_000_000, "best": float("-inf")},
        "config": {"env": "Pong", "widths": [16, 8], "track": False, "video": None},
        "returns": (1.5, -2.0),
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def test_what_was_saved_is_loaded_to_the_bit(tmp_path, state):
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    loaded = checkpoint.load(tmp_path / "checkpoint.pt")
    assert same(loaded, state) and "beast_checkpoint" not in loaded
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_loading_runs_no_code_from_the_file(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path = tmp_path / "checkpoint.pt"
    torch.save({"beast_checkpoint": checkpoint.FORMAT, "net": Malicious()}, path)
    with pytest.raises(InputError, match="not a checkpoint of Beast's"):
        checkpoint.load(path)
    assert not (tmp_path / "owned").exists()


def test_no_message_repeats_torchs_advice_to_load_unsafely(tmp_path, state):
    path = tmp_path / "checkpoint.pt"
    for write in (lambda: path.write_text("a text"), lambda: torch.save(Path(), path)):
        write()
        with pytest.raises(InputError, match="checkpoint.pt: .*checkpoint") as refused:
            checkpoint.load(path)
        assert not any(word in str(refused.value).lower() for word in ("weights_only", "trust", "pickle.load"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, state, share):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, state)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"checkpoint\.pt: truncated, damaged or no checkpoint at all"):
        checkpoint.load(path)


def test_a_single_flipped_bit_in_the_weights_is_noticed(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"net": torch.full((1000,), 3.0)})
    content = bytearray(path.read_bytes())
    middle = bytes(content).index(np.float32(3).tobytes() * 500) + 1001
    content[middle] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="checksum"):
        checkpoint.load(path)


def test_foreign_and_missing_files_are_refused_and_say_what_to_do(tmp_path):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(MissingFile, match=r"checkpoint\.pt: there is no such checkpoint; .*train first"):
        checkpoint.load(path)
    with pytest.raises(MissingFile, match="no such checkpoint; give --init_from a checkpoint.pt") as error:
        checkpoint.load_fitting_weights(torch.nn.Linear(1, 1), path)
    assert "train first" not in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(tmp_path)
    for content in (b"some text\n", pickle.dumps({"beast_checkpoint": 1})):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no checkpoint at all.*or delete it to begin anew"):
            checkpoint.load(path)
        with pytest.raises(InputError, match="no checkpoint at all.*or another copy$"):  # of another run: keep it
            checkpoint.load(path, "--init_from")
    for foreign in ({"weight": torch.zeros(2)}, torch.zeros(2)):
        torch.save(foreign, path)
        with pytest.raises(InputError, match="no field beast_checkpoint"):
            checkpoint.load(path)


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path):
    torch.save({"beast_checkpoint": 99}, tmp_path / "checkpoint.pt")
    expected = f"format 99, and this version of Beast reads format {checkpoint.FORMAT}"
    with pytest.raises(InputError, match=expected):
        checkpoint.load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("bad", [np.float64(1.5), np.zeros(2), {1, 2}, io.BytesIO()])
def test_a_state_that_could_not_be_loaded_again_is_refused_when_saving(tmp_path, bad):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"steps": 1})
    with pytest.raises(TypeError, match=r"state\['stats'\]\[1\] is a "):
        checkpoint.save(path, {"stats": [0.0, bad]})
    assert checkpoint.load(path) == {"steps": 1}


def test_a_failed_save_leaves_the_old_checkpoint_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"steps": 1})

    def disk_full(state, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(InputError, match="No space left on device.*free space"):
        checkpoint.save(path, {"steps": 2})
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert checkpoint.load(path) == {"steps": 1}


def edited_run(tmp_path):
    """A run with another net than the one that its checkpoint is of: one layer more, a renamed one, other actions."""
    flags = small_flags(root=str(tmp_path), name="old", total_steps=500, tensorboard=False)
    monobeast.train(flags)

    class Edited(monobeast.Net):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.more = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
            self.value, self.policy = self.baseline, nn.Linear(20, 2)
            del self.baseline

        def forward(self, inputs, core_state):
            x = self.encoders[0](inputs["obs"]["obs"])
            return self.policy(torch.cat([x, inputs["reward"][..., None] * 0, x[..., :3]], -1)), x[..., 0], core_state

    return flags, Edited


def test_an_edited_net_with_an_old_checkpoint_is_told_what_differs(tmp_path, monkeypatch, run_main):
    flags, edited = edited_run(tmp_path)
    monkeypatch.setattr(monobeast, "Net", edited)
    expected = (
        r"old/checkpoint\.pt: these are the weights of another net; "
        r"missing in the checkpoint: more\.0\.weight, more\.0\.bias, more\.1\.weight and \d+ more; "
        r"unknown to this net: baseline\.weight, .* and 2 more; "
        r"of other shapes: policy\.weight \[2, \d+\] \(this net has \[2, 20\]\)\. .*--init_from .*checkpoint\.pt"
    )
    with pytest.raises(InputError, match=expected):
        monobeast.train(dataclasses.replace(flags, total_steps=1000))
    code, output = run_main(monobeast, "--mode", "test", "--root", str(tmp_path), "--name", "old")
    assert code == 1 and "Traceback" not in output and "more.0.weight" in output


def test_a_new_run_takes_over_what_fits_and_logs_what_does_not(tmp_path, monkeypatch, capfd):
    flags, edited = edited_run(tmp_path)
    path = str(tmp_path / "old" / "checkpoint.pt")
    old, began = checkpoint.load(path)["net"], []
    monkeypatch.setattr(monobeast, "Net", edited)
    init = monobeast.PublishedWeights.__init__
    monkeypatch.setattr(
        monobeast.PublishedWeights, "__init__",
        lambda self, net, *rest: began.append(copy.deepcopy(net.state_dict())) or init(self, net, *rest),
    )  # fmt: skip
    new = dataclasses.replace(flags, name="new", init_from=path)
    monobeast.train(new)
    told = capfd.readouterr().err
    assert f"weights are those of {path}; not taken over: missing in the checkpoint: more.0.weight" in told
    assert "unknown to this net: baseline.weight" in told
    assert "of other shapes: policy.weight" in told
    first = "encoders.0.head.0.weight"
    assert torch.equal(began[0][first], old[first]) and began[0]["policy.weight"].shape == (2, 20)
    monobeast.train(dataclasses.replace(new, total_steps=1000))
    assert not torch.equal(began[1][first], old[first]), "a run that is resumed has its own weights"
    with pytest.raises(InputError, match="none of its weights fits"):
        checkpoint.load_fitting_weights(nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    "changes",
    [
        {"core": "lstm"},
        {"env": "toy_envs:Dict-v0"},
        {"env": "toy_envs:Tuple-v0", "core": "gru"},
        {"env": "Pendulum-v1"},
    ],
)
def test_a_loaded_policy_plays_the_games_that_mode_test_plays(tmp_path, changes):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=500, tensorboard=False, **changes)
    monobeast.train(flags)
    path = str(tmp_path / "run" / "checkpoint.pt")
    with pytest.MonkeyPatch.context() as patch:  # as where its package is missing
        patch.delattr(monobeast.envs, "make")
        policy = beast.load(path)
    assert policy.steps >= 500 and policy.flags.core == flags.core and not policy.net.training
    assert policy.observation_space == spaces_of(flags).observations.get("obs", policy.observation_space)
    played = monobeast.test(dataclasses.replace(flags, checkpoint=path, greedy=True, episodes=4, seed=7))
    env = policy.make_env(4)
    observations, _ = env.reset(seed=7)
    state, reward, done, over = None, 0.0, False, np.zeros(4, bool)
    returns, is_playing = np.zeros(4), np.ones(4, bool)
    while is_playing.any():
        actions, state = policy.act(observations, state, reward, done, greedy=True)
        observations, reward, terminated, truncated, _ = env.step(actions)
        done, over = over, terminated | truncated
        returns += reward * is_playing
        is_playing &= ~over
    env.close()
    np.testing.assert_allclose(returns, played["returns"], rtol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 3), (1, 1, 4), ()])
def test_observations_of_another_shape_are_refused_by_a_loaded_policy(shape):
    flags = small_flags()
    env_spaces = spaces_of(flags)
    net = monobeast.Net(env_spaces.observations, env_spaces.action, flags)
    policy = Policy(net, env_spaces.observations["obs"], env_spaces, flags, 0, make_env=None)
    with pytest.raises(InputError, match=r"observations 'obs' of shape .*: expected \(N, 4\), those of N environments"):
        policy.act(np.zeros(shape, np.float32))
    assert policy.act(np.zeros((3, 4), np.float32))[0].shape == (3,)


def test_a_policy_is_loaded_where_the_emulator_that_it_was_trained_on_is_missing(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run", env="PongNoFrameskip-v4", atari_backend="ale", total_steps=1)
    learner = monobeast.make_learner(flags, spaces_of(flags))
    config = {**dataclasses.asdict(flags), "atari_backend": "beast"}
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"config": config, "agent": "monobeast", **learner.state_dict()})
    monkeypatch.setattr(emulator, "libatari", None)
    monkeypatch.setattr(emulator, "WHY_NO_MODULE", "not built", raising=False)
    assert beast.load(str(path)).make_env(1).reset(seed=1)[0].shape == (1, 4, 84, 84)


BOX = spaces.Box(-1, 1, (2,))


class OwnBox(spaces.Box):
    """May have more to say than JSON tells."""


KNOWN = {
    "image": spaces.Box(0, 255, (3, 4, 5), np.uint8),
    "unbounded": spaces.Box(np.array([-np.inf, 0.1], np.float32), np.array([np.inf, 1], np.float32)),
    "nested": spaces.Dict({"b": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2)]), "a": BOX}),
    "order": spaces.Dict([("z", BOX), ("a", spaces.MultiDiscrete([3, 4], start=[1, 2]))]),
    "mask": spaces.Dict({"numbers": BOX, "action_mask": spaces.MultiBinary(2)}),
}


@pytest.mark.parametrize("name, has_mask", [*((name, False) for name in KNOWN), ("image", True)])
def test_the_spaces_of_a_checkpoint_are_those_of_the_environment(name, has_mask, tmp_path):
    whole, action = KNOWN[name], spaces.Discrete(2)
    parts = spaces_with_mask(whole, action, has_mask)
    checkpoint.save(tmp_path / "x.pt", {"spaces": describe_spaces(EnvSpaces(parts, action, whole=whole))})
    found = saved_spaces(checkpoint.load(tmp_path / "x.pt"))
    assert found.whole == whole and found.action == action
    assert list(found.observations.items()) == list(parts.items()), "in this order"


@pytest.mark.parametrize(
    "whole",
    [
        None,
        OwnBox(-1, 1, (2,)),
        spaces.Dict({"a": BOX, "b": OwnBox(-1, 1, (2,))}),
        spaces.Dict({1: BOX}),
        spaces.Text(5),
    ],
)
def test_a_checkpoint_has_no_spaces_where_json_would_not_tell_all(whole):
    assert (
        describe_spaces(EnvSpaces({}, spaces.Discrete(2), whole=whole)) == {} and saved_spaces({"spaces": {}}) is None
    )
    assert describe_spaces(EnvSpaces({}, OwnBox(-1, 1, (2,)), whole=BOX)) == {}


def test_a_fork_is_found_by_its_name_or_its_file_and_no_checkpoint_brings_code(tmp_path, monkeypatch):
    (tmp_path / "my_fork.py").write_text(
        "from monobeast import *\nimport monobeast\nclass Net(monobeast.Net):\n    is_mine = True\n"
    )
    flags = small_flags(root=str(tmp_path), name="run", total_steps=100, tensorboard=False)
    monobeast.train(flags)
    path = str(tmp_path / "run" / "checkpoint.pt")
    state = checkpoint.load(path)
    assert state["agent"] == "monobeast" and type(beast.load(path).net) is monobeast.Net
    assert beast.load(path, agent=str(tmp_path / "my_fork.py")).net.is_mine
    checkpoint.save(path, {**state, "agent": "my_fork"})
    with pytest.raises(InputError, match="there is no .*my_fork.py, the agent's file"):
        beast.load(path)
    monkeypatch.syspath_prepend(tmp_path)
    assert beast.load(path).net.is_mine
    checkpoint.save(path, {**state, "agent": f"{tmp_path}/my_fork"})
    with pytest.raises(InputError, match="no name of a module"):
        beast.load(path)


def test_the_code_of_the_page_on_checkpoints_runs(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    if not importlib.util.find_spec("onnxscript"):
        assert "onnx" in blocks.pop()
    monkeypatch.chdir(tmp_path)
    monobeast.train(small_flags(name="pong", total_steps=100, core="lstm", tensorboard=False))
    names: dict = {}
    for block in blocks:
        exec(block, names)
    with torch.no_grad():
        expected = names["policy"].net(names["inputs"], names["policy"].inputs(np.zeros((1, 4)))[1])[:2]
    for x, y in zip((names["logits"], names["values"]), expected):
        torch.testing.assert_close(x, y)


def test_importing_beast_imports_no_torch():
    code = "import sys, beast; assert 'torch' not in sys.modules and callable(beast.load)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    for name in ("checkpoint.pt.tmp77", "best.pt.tmp77", "checkpoint.pt.old"):
        (tmp_path / name).write_bytes(b"half")
    checkpoint.save(tmp_path / "checkpoint.pt", {"steps": 1})
    assert sorted(os.listdir(tmp_path)) == ["best.pt.tmp77", "checkpoint.pt", "checkpoint.pt.old"]


KILL_WRITERS = """
import glob, os, random, signal, sys, time
import torch
from beast.run import checkpoint

torch.set_num_threads(1)  # OpenMP's threads do not live on in a forked writer
path, random = sys.argv[1], random.Random(0)
began = time.monotonic()
checkpoint.save(path, {"count": 0, "weights": torch.zeros(1_000_000)})
seconds_of_a_save = time.monotonic() - began
newest = interrupted = 0
for _ in range(30):
    writer = os.fork()
    if not writer:
        for count in range(newest + 1, 10**9):
            checkpoint.save(path, {"count": count, "weights": torch.full((1_000_000,), float(count))})
    while not glob.glob(path + ".tmp*"):
        time.sleep(0.001)
    time.sleep(random.uniform(0, 2 * seconds_of_a_save))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    interrupted += bool(glob.glob(path + ".tmp*"))
    state = checkpoint.load(path)
    assert (state["weights"] == state["count"]).all(), "a mixture of two checkpoints"
    assert state["count"] >= newest, "an older checkpoint came back"
    newest = state["count"]
print(interrupted, newest)
"""


def test_kill_9_during_saving_leaves_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILL_WRITERS, str(tmp_path / "checkpoint.pt")],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    interrupted, saved = map(int, done.stdout.split())
    assert interrupted >= 3, f"only {interrupted} of 30 kills hit a save: the test says nothing"
    assert saved >= 1


def test_a_net_takes_weights_without_what_its_modules_fill_in_themselves():
    flags = monobeast.Flags(hidden_size=32, reward_clip=0.0)
    spaces = {"obs": gymnasium.spaces.Box(-1, 1, (2,))}, gymnasium.spaces.Discrete(2)
    older = monobeast.Net(*spaces, flags)
    net = monobeast.Net(*spaces, dataclasses.replace(flags, normalize_returns="on"))
    assert not checkpoint.differences(net, older.state_dict())
    checkpoint.load_weights(net, older.state_dict(), "older.pt")
    assert torch.equal(net.baseline.weight, older.baseline.weight) and net.baseline.deviation == 1
