"""Several learners of one run: what they learn is what one with all their columns learns, and none is left waiting."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import psutil
import pytest
import test_r2d2
import torch
from lock_step import LockStep, metrics_of, new_learner, small_flags
from namespaces import LEARNER_ADDRESS
from programs import Program, free_ports
from waiting import PATIENCE, wait_until

import monobeast
import multibeast
import r2d2
from beast.envs.rows import is_final
from beast.errors import InputError, WorkerFailure
from beast.learn import normalization, ranks
from beast.learn.nests import map_tensors
from beast.learn.ranks import Round, decide
from beast.learn.replay import RatioLimiter
from beast.run.flags import ServerFlags
from beast.run.training import Training

ROOT = Path(__file__).resolve().parent.parent
UPDATES, B = 6, 4

# What each rank runs: updates on its columns of recorded rollouts. The arguments are a directory, and whether
# minibatches are parts of a batch rather than drawn from it.
LEARN = """
import json, sys, torch
from pathlib import Path
import monobeast
import r2d2
from beast.envs.probe import probe_env
from beast.learn import normalization, ranks
from beast.learn.nests import columns

place, deal = Path(sys.argv[1]), json.loads(sys.argv[2])
flags = ranks.join(monobeast.Flags(**json.loads((place / "flags.json").read_text())))
spaces = torch.load(place / "spaces.pt", weights_only=False)
torch.manual_seed(flags.seed)
learner = monobeast.make_learner(flags, spaces)
learner.net.load_state_dict(torch.load(place / "start.pt"))
if deal:  # minibatches of the same columns, whoever has them
    def minibatches(batch, state, count):
        width = batch["done"].shape[1] // count
        for first in range(0, count * width, width):
            yield columns(batch, first, width), tuple(x[:, first : first + width] for x in state)
    monobeast.minibatches = minibatches
told = []
for batch, state in torch.load(place / "batches.pt", weights_only=False):
    number, width = ranks.number(), batch["done"].shape[1] // ranks.size()
    part, own = columns(batch, number * width, width), tuple(x[:, number * width : (number + 1) * width] for x in state)
    measured = learner.measure(part)
    try:
        counted = learner.count(measured, monobeast.update(flags, learner, part, own))
    except FloatingPointError as error:
        told.append(str(error).partition(";")[0])
        break
    told.append([learner.steps, counted.is_bad, counted.lag_max, counted.metrics["losses/total_loss"],
                 counted.metrics["losses/entropy"], counted.metrics["stats/policy_lag_mean"]])
torch.save({"net": learner.net.state_dict(), "told": told}, place / f"rank{ranks.number()}.pt")
ranks.leave()
"""

LEARN_R2D2 = """
import json, sys, numpy, torch
from pathlib import Path
import r2d2
from beast.learn import normalization, ranks
from beast.learn.nests import columns
from beast.learn.replay import Sample

place = Path(sys.argv[1])
flags = ranks.join(r2d2.Flags(**json.loads((place / "flags.json").read_text())))
learner = r2d2.make_learner(flags, torch.load(place / "spaces.pt", weights_only=False))
start = torch.load(place / "start.pt")
for net in (learner.net, learner.target):
    net.load_state_dict(start)
told = []
for rows, state, weights in torch.load(place / "batches.pt", weights_only=False):
    number, width = ranks.number(), len(weights) // ranks.size()
    own = slice(number * width, (number + 1) * width)
    part, ids = columns(rows, number * width, width), numpy.zeros(width, int)
    batch = learner._with_target_q(flags, Sample(ids, ids, weights[own], part, tuple(x[:, own] for x in state)))
    outcome, _ = r2d2.update(flags, learner, batch)
    told.append([float(outcome.metrics["losses/total_loss"]), float(outcome.grad_norm)])
torch.save({"net": learner.net.state_dict(), "told": told}, place / f"rank{ranks.number()}.pt")
ranks.leave()
"""


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }  # fmt: skip


@contextlib.contextmanager
def started(words: list[str], place: Path, size: int = 2, codes: dict[int, list[str]] | None = None):
    """So many ranks that run `python words`, whose output goes to files; killed at the end."""
    (port,) = free_ports(1)
    processes = []
    try:
        for rank in range(size):
            command = (codes or {}).get(rank) or words
            environment = variables(rank, size, port) | {"BEAST_TEST_RANKS": str(place)}
            processes.append(Program(command, cwd=place, env=environment, output=place / f"output{rank}"))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(PATIENCE)


def text(place: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(place.glob("output?")))


def learn(place: Path, flags, spaces, start: dict, batches: list, size: int, deal=False, script=LEARN) -> list[dict]:
    """What each of so many ranks comes to."""
    place.mkdir()
    (place / "flags.json").write_text(json.dumps(dataclasses.asdict(flags)))
    for name, x in (("spaces", spaces), ("start", start), ("batches", batches)):
        torch.save(x, place / f"{name}.pt")
    (place / "learn.py").write_text(script)
    with started([str(place / "learn.py"), str(place), json.dumps(deal)], place, size) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0] * size, text(place)
    return [torch.load(place / f"rank{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "toy_envs:Dict-v0", "core": "lstm", "normalize_returns": "on", "reward_scale": 3.0},
        {"env": "CartPole-v1", "optimizer": "rmsprop", "reduction": "sum", "ppo_clip": 0.0, "learning_rate": 1e-4},
        {"env": "toy_envs:Counting-v0", "epochs": 2, "minibatches": 2, "normalize_returns": "on"},
        {"env": "toy_envs:Counting-v0,toy_envs:Counting-v0", "normalize_returns": "on", "value_net": "separate"},
    ],
    ids=["images", "sums", "minibatches", "tasks"],
)
def test_two_ranks_learn_what_one_with_all_columns_learns(tmp_path, changes):
    flags = small_flags(**changes, group_width=2 * B, batch_width=2 * B, amp="off", device="cpu")
    test = LockStep(flags)
    start = map_tensors(torch.clone, test.net.state_dict())
    batches = []
    for number in range(UPDATES):
        batch, state = test.next_rollout()
        batch = map_tensors(torch.clone, batch)
        batch["terminated"][2:4, : number % 3] = True  # of the first rank alone: fewer transitions count there
        batch["policy_version"] += torch.arange(2 * B, dtype=torch.int32) - 9
        batches.append((batch, tuple(x.clone() for x in state)))
    has_parts = flags.minibatches > 1
    own = dataclasses.replace(flags, batch_width=B)
    each = learn(tmp_path / "two", own, test.spaces, start, batches, 2, has_parts)
    if has_parts:  # part i of one rank has the columns of both ranks' parts i
        order = torch.arange(2 * B).view(2, flags.minibatches, -1).transpose(0, 1).flatten()
        batches = [
            (map_tensors(lambda x: x[:, order], batch), tuple(x[:, order] for x in state)) for batch, state in batches
        ]
    (one,) = learn(tmp_path / "one", flags, test.spaces, start, batches, 1, has_parts)
    assert each[0]["told"] == each[1]["told"]
    torch.testing.assert_close(each[0]["net"], each[1]["net"], rtol=0, atol=0)
    moved = 0.0
    for name, x in one["net"].items():
        torch.testing.assert_close(each[0]["net"][name], x, rtol=1e-6, atol=1e-6, msg=name)
        moved = max(moved, float((x.float() - start[name].float()).abs().max()))
    assert moved > 1e-4
    for two, alone in zip(each[0]["told"], one["told"]):
        assert two == pytest.approx(alone, rel=1e-3, abs=1e-6)


def test_two_ranks_of_r2d2_learn_what_one_with_all_sequences_learns(tmp_path):
    flags = test_r2d2.small_flags(batch_width=2 * B, core="lstm")
    test = test_r2d2.LockStep(flags)
    test.store(40)
    test.close()
    start, ids = map_tensors(torch.clone, test.learner.net.state_dict()), test.sequences()
    batches = []
    for number in range(UPDATES):
        rows, state = test.replay.gather(ids[number * 2 * B : (number + 1) * 2 * B], torch.device("cpu"))
        batches.append((map_tensors(torch.clone, rows), tuple(x.clone() for x in state), torch.rand(2 * B)))
    own = dataclasses.replace(flags, batch_width=B)
    each = learn(tmp_path / "two", own, test.spaces, start, batches, 2, script=LEARN_R2D2)
    (one,) = learn(tmp_path / "one", flags, test.spaces, start, batches, 1, script=LEARN_R2D2)
    torch.testing.assert_close(each[0]["net"], each[1]["net"], rtol=0, atol=0)
    torch.testing.assert_close(each[0]["net"], one["net"], rtol=1e-6, atol=1e-6)
    assert torch.tensor(each[0]["told"]).allclose(torch.tensor(one["told"]), rtol=1e-4)
    assert max(float((x - start[name]).abs().max()) for name, x in one["net"].items() if x.is_floating_point()) > 1e-4


@pytest.mark.parametrize(
    "changes, count", [({}, 6), ({"normalize_returns": "on"}, 8), ({"epochs": 2, "minibatches": 2}, 15)], ids=str
)
def test_an_update_takes_few_messages(monkeypatch, changes, count):
    flags = small_flags(**{"normalize_returns": "off", **changes})
    test, messages = LockStep(flags), []
    batch, state = test.next_rollout()
    for module in (ranks, normalization):
        monkeypatch.setattr(module, "size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *operation: messages.append(x.numel()))
    test.learner.measure(batch)
    monobeast.update(flags, test.learner, batch, state)
    assert len(messages) == count, "of the batch 1, of a minibatch's loss 2, of PopArt 2, of gradients 1, of inputs 2"


def test_a_nan_on_one_rank_skips_the_update_of_all(tmp_path):
    flags = small_flags(group_width=2 * B, batch_width=2 * B, amp="off", device="cpu", max_bad_updates=2)
    test = LockStep(flags)
    start = map_tensors(torch.clone, test.net.state_dict())
    batches = []
    for is_bad in (False, True, False, True, True):
        batch, state = test.next_rollout()
        batch = map_tensors(torch.clone, batch)
        batch["reward"][1, 2 * B - 1] = torch.nan if is_bad else 0  # of the second rank
        batches.append((batch, state))
    each = learn(tmp_path / "two", dataclasses.replace(flags, batch_width=B), test.spaces, start, batches, 2)
    assert [[bad for _, bad, *_ in one["told"][:-1]] for one in each] == [[False, True, False, True]] * 2
    end = "loss or gradients were NaN or Inf in 2 updates in a row (--max_bad_updates 2)"
    assert [one["told"][-1] for one in each] == [end] * 2
    torch.testing.assert_close(each[0]["net"], each[1]["net"], rtol=0, atol=0)
    assert all(x.isfinite().all() for x in each[0]["net"].values() if x.is_floating_point())


def test_the_mean_lag_is_the_ranks_own_over_what_counts_and_then_that_of_all(monkeypatch):
    test = LockStep(small_flags())
    batch, _ = test.next_rollout()
    test.learner.updates = 10
    batch["policy_version"].fill_(4)
    batch["policy_version"][:, 0] = -90
    batch["counts"] = torch.ones_like(batch["done"])
    batch["counts"][:, 0] = False
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *operation: x.mul_(3))  # the other has twice as much
    measured = test.learner.measure(batch)
    assert measured.lag_mean == 9 and measured.steps == 3 * (test.flags.unroll_length * 3)


def test_all_wait_a_moment_for_a_rank_without_a_batch_and_then_go_on_without_it():
    has, none, long, never = (
        Round(0, 1, 0, 0, 0, 0, 0, []),
        Round(0, 0, 1, 0, 0, 0, 0, []),
        Round(0, 0, 9, 0, 0, 0, 0, []),
        Round(0, -1, 99, 0, 0, 0, 0, []),
    )
    leaves = Round(1, 1, 0, 0, 0, 0, 0, [])
    assert [decide(rounds) for rounds in ([has, has], [has, none], [has, long], [long, long], [has, never])] == [
        "go", "hold", "go", "hold", "hold",
    ]  # fmt: skip
    assert decide([has, leaves]) == decide([never, leaves]) == "end"


def test_a_rank_without_a_batch_takes_part_with_final_rows_alone_none_of_them_old():
    batch, _ = LockStep(small_flags()).next_rollout()
    batch["truncated"][1] = batch["done"][2] = True
    before = map_tensors(torch.clone, batch)
    found = ranks.void(batch, 17)
    assert not is_final(found["done"], found["terminated"], found["truncated"]).logical_not().any()
    assert not found["counts"].any() and (found["policy_version"] == 17).all()
    assert found["obs"].keys() == batch["obs"].keys()
    torch.testing.assert_close(batch, before, rtol=0, atol=0)


def test_a_rank_that_takes_part_with_nothing_tells_the_statistics_of_observations_nothing(monkeypatch):
    test = LockStep(small_flags(env="CartPole-v1"))
    batch, _ = test.next_rollout()
    batch["reward"][1] = torch.nan  # of a broken environment
    test.net.observe(batch["obs"])
    before = map_tensors(torch.clone, test.net.state_dict())
    found = ranks.void(batch, 3)
    assert found["reward"].isfinite().all()
    test.net.observe(found["obs"], found["counts"])
    torch.testing.assert_close(test.net.state_dict(), before, rtol=0, atol=0)
    test.net.observe(batch["obs"])
    assert any(not torch.equal(x, before[name]) for name, x in test.net.state_dict().items())


def test_all_ranks_take_the_learning_rate_from_the_steps_of_rank_0(monkeypatch):
    flags = small_flags(total_steps=1000)
    test = LockStep(flags)
    test.learner.steps = 300  # a checkpoint of rank 0 has counted an update early
    monkeypatch.setattr(ranks, "exchange", lambda own: [own._replace(steps=400.0), own])
    rounds = ranks.Rounds(Stalls(), test.learner, lambda: False)
    assert rounds._round(True) == "go"
    monobeast.update(flags, test.learner, *test.next_rollout())
    assert test.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.6 * flags.learning_rate)
    assert test.learner.steps == 300


def test_a_rank_whose_first_batch_is_not_finite_takes_part_with_nothing(monkeypatch):
    flags = small_flags(env="CartPole-v1", core="lstm", reward_scale=3.0)
    test = LockStep(flags)
    batch, state = test.next_rollout()
    batch, state = map_tensors(torch.clone, batch), tuple(x.clone() for x in state)
    for x in (batch["reward"], batch["policy_logits"], batch["obs"]["obs"]):
        x.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, 3e38])
    state[0][0, 0] = torch.nan
    rounds = ranks.Rounds(Stalls(), test.learner, lambda: False)
    rounds._source, verdicts = iter([(batch, state)]), iter(["go", "go", "end"])
    monkeypatch.setattr(rounds, "_round", lambda has: next(verdicts))
    _, (rollout, core_state) = rounds.rollouts()
    outcome = monobeast.update(flags, test.learner, rollout, core_state)
    assert not outcome.is_bad and outcome.metrics["losses/policy_loss"] == 0 == outcome.metrics["losses/value_loss"]


def test_ranks_whose_weights_differ_by_more_than_rounding_end(monkeypatch):
    learner = LockStep(small_flags()).learner
    rounds = ranks.Rounds(Stalls(), learner, lambda: False)
    own = sum(abs(number) for x in learner.net.parameters() for number in x.flatten().tolist())
    for factor, differ in ((1 + 2e-6, True), (1 - 2e-6, True), (1 + 5e-7, False), (1 - 5e-7, False)):
        monkeypatch.setattr(ranks, "exchange", lambda own, x=factor: [own, own._replace(weights=own.weights * x)])
        learner.updates = 2 * ranks.UPDATES_BETWEEN_CHECKS - 1
        assert rounds._round(True) == "go", "they are compared now and then"
        learner.updates += 1
        if not differ:
            assert rounds._round(True) == "go", "as processors of two kinds may"
            continue
        with pytest.raises(WorkerFailure, match="differ after 2,000 updates: their absolute sums are ") as caught:
            rounds._round(True)
        found = [float(x) for x in re.findall(r"\d+\.\d+", str(caught.value))]
        assert found == pytest.approx([own, own * factor], rel=1e-12)


class Stalls:
    """A feed without rollouts, and what it was asked for."""

    def __init__(self):
        self.closed, self.limits = threading.Event(), []

    def rollouts(self, limit):
        self.limits.append(limit)
        return iter(())


def test_ranks_that_all_lack_batches_rest_and_an_update_is_no_lack(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    learner = types.SimpleNamespace(
        updates=0, untold_games=list, laps=mock.Mock(), updating=threading.Lock(), take_games=lambda games: None
    )
    feed, verdicts = Stalls(), iter(["go", "hold", "hold", "end"])
    rounds = ranks.Rounds(feed, learner, lambda: False)
    rounds._source = iter([({"done": torch.zeros(1)}, ())])
    monkeypatch.setattr(rounds, "_round", lambda has: next(verdicts))
    for _ in rounds.rollouts():
        now[0] += 100  # an update takes its time
        assert feed.limits == []
    assert feed.limits == [ranks.WAIT, ranks.WAIT, ranks.WAIT]
    rounds, feed.limits[:] = ranks.Rounds(feed, learner, lambda: False), []
    rounds._first, verdicts = ({"x": torch.zeros(1)}, ()), iter(["hold", "hold", "end"])
    monkeypatch.setattr(rounds, "_round", lambda has: next(verdicts))
    now[0] += 100
    assert not list(rounds.rollouts()) and feed.limits == [0.0, ranks.WAIT, ranks.WAIT], "nobody trains meanwhile"


@pytest.mark.parametrize(
    "flags, rank, found",
    [
        ({"addresses": ("a:1", "b:1", "c:1")}, 0, {"addresses": ("a:1", "c:1")}),
        ({"addresses": ("a:1", "b:1", "c:1")}, 1, {"addresses": ("b:1",)}),
        ({"listen": "127.0.0.1:4441"}, 1, {"listen": "127.0.0.1:4442"}),
        ({"addresses": ("a:1",)}, 1, "--addresses has 1 env servers for 2 ranks: each rank needs one"),
        ({"listen": "unix:/tmp/x"}, 1, "--listen unix:/tmp/x with 2 ranks: give host:port"),
    ],
)
def test_each_rank_has_env_servers_of_its_own(monkeypatch, flags, rank, found):
    servers = pytest.importorskip("beast.run.servers")
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(ranks, "number", lambda: rank)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    given = ServerFlags(**flags)
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            servers.own_servers(given)
    else:
        assert servers.own_servers(given) == dataclasses.replace(given, **found)


def test_weights_to_begin_with_are_read_by_rank_0_alone(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run", tensorboard=False, init_from="a file of rank 0")
    learner = new_learner(flags)
    weights = {name: torch.ones_like(x) for name, x in learner.net.state_dict().items()}
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(ranks, "number", lambda: 1)
    monkeypatch.setattr(ranks, "share", lambda own: {"state": {"net": weights}, "num_starts": 1, "resumed": False})
    training = Training("mono", flags, learner, set(), 1)
    torch.testing.assert_close(learner.net.state_dict(), weights)
    training.cleanup.close()


# What each rank runs: the start of a run, whose action noise it writes.
NOISE = """
import sys, tempfile, torch, monobeast
from beast.learn import ranks
tempfile.tempdir = "."
def weights():
    return sum(x.view(torch.int32).sum().item() for x in training.learner.net.state_dict().values())
from beast.run.training import Training, prepare

flags, spaces = prepare(monobeast.Flags(env="CartPole-v1", root="runs", name="run", tensorboard=False, device="cpu"),
                        monobeast.create_env, monobeast.validate)
torch.manual_seed(ranks.number())
with Training("mono", flags, monobeast.make_learner(flags, spaces), set(), 1) as training:
    print("noise", training.generator.get_state().sum().item(), training.env_seed(0, 0), training.run.num_starts,
          training.learner.steps, weights())
    with torch.no_grad():
        next(training.learner.net.parameters()).view(-1)[7] = 0.1  # as if it had learned
    training.learner.steps = 77
    print("saved", weights())
    training.save()
"""


def test_ranks_begin_with_the_same_weights_and_noise_and_seeds_of_their_own_at_every_start(tmp_path):
    seen, saved = [], []
    (tmp_path / "noise.py").write_text(NOISE)
    for _ in range(2):
        with started([str(tmp_path / "noise.py")], tmp_path) as processes:
            assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
        seen += [line.split()[1:] for line in text(tmp_path).splitlines() if line.startswith("noise")]
        saved += [line.split()[1] for line in text(tmp_path).splitlines() if line.startswith("saved")]
    noise, seeds, starts, steps, weights = zip(*seen)
    assert starts == ("1", "1", "2", "2") and steps == ("0", "0", "77", "77")
    assert len({*seeds}) == 4
    assert noise[2] == noise[0], "rank 0 goes on with its noise"
    assert len({*noise}) == 3
    assert weights[0] == weights[1] != weights[2] == weights[3] == saved[0], "to the bit, though each draws its own"
    assert not list(tmp_path.glob("beast-rank*"))


def test_what_rank_0_refuses_ends_the_others_with_the_same_line(tmp_path):
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    (run / "checkpoint.pt").touch()
    (tmp_path / "noise.py").write_text(
        NOISE.replace("with Training", "from beast.errors import exit_with_message\nwith exit_with_message(), Training")
    )
    began = time.monotonic()
    with started([str(tmp_path / "noise.py")], tmp_path) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [1, 1], text(tmp_path)
    assert time.monotonic() - began < 30
    refusal = f"{run}: there is a checkpoint.pt but no config.json"
    assert f"error: {refusal}" in (tmp_path / "output0").read_text()
    told = (tmp_path / "output1").read_text()
    assert f"rank 1: error: rank 0: {refusal}" in told and "Traceback" not in told
    assert not list(tmp_path.glob("beast-rank*"))


JOIN = """
import sys, tempfile, monobeast
from dataclasses import replace
from beast.errors import exit_with_message
from beast.learn import ranks
from beast.run.training import prepare
tempfile.tempdir = "."

def create_env(flags, num_envs, **overrides):  # differs, whatever --env says
    return monobeast.create_env(replace(flags, env=sys.argv[3]), num_envs, **overrides)

with exit_with_message():
    flags = monobeast.Flags(device="cpu", learning_rate=float(sys.argv[1]), num_actors=int(sys.argv[2]))
    prepare(flags, create_env, monobeast.validate)
    print("has begun")
    ranks.leave()
"""


def test_ranks_with_other_flags_or_environments_are_refused_by_what_differs(tmp_path):
    (tmp_path / "join.py").write_text(JOIN)
    script, env = str(tmp_path / "join.py"), "CartPole-v1"
    for rate, other, refusal in (
        ("1e-4", env, ""),
        ("3e-4", env, "--learning_rate 0.0003 (rank 0 has 0.0001)"),
        ("1e-4", "Acrobot-v1", "action Discrete(3) (rank 0 has Discrete(2)), "),
    ):
        code = int(bool(refusal))
        with started([script, "1e-4", "2", env], tmp_path, codes={1: [script, rate, "1", other]}) as processes:
            assert [process.wait(PATIENCE) for process in processes] == [code, code], text(tmp_path)
        told = [(tmp_path / f"output{rank}").read_text() for rank in range(2)]
        assert (f"rank 1: error: {refusal}" in told[1] and told[0].startswith(f"error: rank 1: {refusal}")) or not code
        assert ("has begun" in text(tmp_path)) == (not refusal) and "Traceback" not in text(tmp_path)
        assert "start all ranks with the same flags and environments" in told[0] or not code
    assert not list(tmp_path.glob("beast-rank*"))


def test_a_rank_that_has_nothing_stores_nothing_and_knows_what_the_others_store(monkeypatch):
    flags = test_r2d2.small_flags(replay_ratio=1.0)
    test = test_r2d2.LockStep(flags)
    test.store(4)
    rollout, state = test.next_rollout()
    nothing, before = ranks.void(rollout, 0), (test.replay.num_sequences(), test.learner.steps)
    limiter = RatioLimiter(flags.replay_ratio, flags.batch_width * flags.trained * 2, 32)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *operation: x.add_(32))  # of the other
    r2d2.store(flags, test.learner, test.replay, limiter, nothing, state)
    assert (test.replay.num_sequences(), test.learner.steps) == (before[0], before[1] + 32)
    for _ in range(2):
        assert not limiter.may_update()
        r2d2.store(flags, test.learner, test.replay, limiter, nothing, state)
    updates = 0
    while limiter.may_update():
        limiter.add_update()
        updates += 1
    assert updates == 1, "64 steps after the fill, and 2 x 4 sequences of 8 transitions an update"
    test.close()


# --- whole runs ------------------------------------------------------------------------------------------------------

RUN = [
    str(ROOT / "monobeast.py"), "--env", "CartPole-v1", "--name", "run", "--root", "runs", "--num_actors", "1",
    "--group_width", "8", "--no_tensorboard", "--log_steps", "500", "--device", "cpu",
]  # fmt: skip


def rows(place: Path) -> list[dict]:
    path = place / "runs/run/metrics.csv"
    return metrics_of(path.parent) if path.exists() else []


def wait_until_training(place: Path, processes) -> None:
    wait_until(
        lambda: len(rows(place)) >= 2 or any(process.poll() is not None for process in processes), lambda: text(place)
    )
    assert all(process.poll() is None for process in processes), text(place)


# Gives another rank up after 10 seconds.
IMPATIENT = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import monobeast; from beast.learn import ranks\n"
    "ranks.TIMEOUT = 10.0\nmonobeast.main()\n"
)


def actors_of(process) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "--beast-actor" in child.cmdline()]


def left_behind(place: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_one = process.environ().get("BEAST_TEST_RANKS") == str(place)
            found += [process] if is_one and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def test_ranks_train_to_the_last_step_resume_and_have_one_directory(tmp_path):
    with started([*RUN, "--total_steps", "4000"], tmp_path) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    last = rows(tmp_path)[-1]
    assert 4000 <= int(last["step"]) < 4700 and "resumed" not in text(tmp_path)
    told = [(tmp_path / f"output{rank}").read_text() for rank in range(2)]
    stops = [line.partition("stopped at ")[2][:50] for out in told for line in out.splitlines() if "stopped at" in line]
    assert len(stops) == 2 and stops[0] == stops[1], "steps, and the mean return of both ranks' games"
    assert all(line.startswith("rank 1: ") for line in told[1].splitlines()) and "beast-rank" not in told[1]
    assert "learner" in told[0] and "learner" not in told[1], "the table of stages"
    state = torch.load(tmp_path / "runs/run/checkpoint.pt", weights_only=True)
    assert state["counts"]["steps"] == int(last["step"]) and os.listdir(tmp_path / "runs") == ["run"]
    assert "learner_wait" in str(last.keys()) and float(last["time/learner_round"]) > 0
    with started([*RUN, "--total_steps", "6000"], tmp_path) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    assert f"resumed at step {state['counts']['steps']:,}" in text(tmp_path)
    alone = subprocess.run([sys.executable, *RUN], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert alone.returncode == 1 and "--ranks 1 (the run has 2)" in alone.stderr
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    "which, number",
    [
        pytest.param([0], signal.SIGTERM, marks=pytest.mark.on_demand),
        ([1], signal.SIGTERM),
        ([0, 1], signal.SIGTERM),
        pytest.param([0, 1], signal.SIGINT, marks=pytest.mark.on_demand),
    ],
    ids=str,
)
def test_a_signal_to_one_rank_ends_all_after_the_same_update(tmp_path, which, number):
    with started(RUN, tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        for rank in which:
            processes[rank].send_signal(number)
        began, code = time.monotonic(), 0 if number == signal.SIGTERM else -number
        assert [process.wait(PATIENCE) for process in processes] == [code, code], text(tmp_path)
        assert time.monotonic() - began < 15
    told = [line.partition("stopped at ")[2][:20] for line in text(tmp_path).splitlines() if "stopped at" in line]
    assert len(told) == 2 and told[0] == told[1] and (tmp_path / "runs/run/checkpoint.pt").exists()
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_when_a_rank_is_killed(tmp_path, rank):
    with started(RUN, tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        processes[rank].kill()
        began = time.monotonic()
        assert processes[1 - rank].wait(PATIENCE) == 1, text(tmp_path)
        assert time.monotonic() - began < 20
    assert rank == 0 or (tmp_path / "runs/run/checkpoint.pt").exists()
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.long
def test_a_rank_that_is_stopped_for_a_while_is_waited_for_and_one_without_actors_is_not(tmp_path):
    with started(RUN, tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(2)
        before = len(rows(tmp_path))
        time.sleep(2)
        assert len(rows(tmp_path)) <= before + 1, "it waits"
        processes[1].send_signal(signal.SIGCONT)
        wait_until(lambda: len(rows(tmp_path)) > before + 2, lambda: text(tmp_path))
        for actor in actors_of(processes[1]):
            actor.suspend()
        time.sleep(ranks.PATIENCE + 2)
        before = len(rows(tmp_path))
        wait_until(lambda: len(rows(tmp_path)) > before + 3, lambda: text(tmp_path))
        last = rows(tmp_path)[-1]
        assert float(last["stats/slowest_rank"]) == 1 and 0.9 < float(last["stats/learner_wait"]) < 1.1
        for actor in actors_of(processes[1]):
            actor.kill()  # it is started anew
        wait_until(lambda: float(rows(tmp_path)[-1]["stats/learner_wait"]) < 0.4, lambda: text(tmp_path))
        for actor in actors_of(processes[1]):
            actor.suspend()
        time.sleep(ranks.PATIENCE / 2)
        before = len(rows(tmp_path))
        processes[0].terminate()  # while it is waited for
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    assert len(rows(tmp_path)) <= before + 1
    wait_until(lambda: not left_behind(tmp_path))


def test_a_rank_whose_environments_may_not_start_again_ends_all(tmp_path):
    with started([*RUN, "--max_env_restarts", "0"], tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        for actor in actors_of(processes[1]):
            actor.kill()
        assert [process.wait(PATIENCE) for process in processes] == [1, 1], text(tmp_path)
    log = (tmp_path / "runs/run/out.log").read_text()
    assert "rank 1: " in log and "0 times (--max_env_restarts 0)" in log
    assert (tmp_path / "runs/run/checkpoint.pt").exists()
    wait_until(lambda: not left_behind(tmp_path))


def test_a_signal_before_the_first_batch_ends_all(tmp_path):
    with started(RUN, tmp_path) as processes:
        wait_until(lambda: "parameters on cpu" in text(tmp_path), lambda: text(tmp_path))
        processes[1].terminate()
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    assert text(tmp_path).count("stopped at step 0:") == 2 and (tmp_path / "runs/run/checkpoint.pt").exists()


@pytest.mark.long
def test_torchrun_starts_all_ranks_again_when_one_dies(tmp_path):
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    words = "-m torch.distributed.run --nnodes 1 --nproc_per_node 2 --max-restarts 1 --rdzv-backend c10d".split()
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", *RUN, "--total_steps", "12000"]
    with open(tmp_path / "output0", "w") as output:
        launcher = subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until_training(tmp_path, [launcher])
        of_ranks = [child for child in psutil.Process(launcher.pid).children() if "monobeast" in str(child.cmdline())]
        of_ranks[1].kill()
        assert launcher.wait(PATIENCE) == 0, text(tmp_path)
    finally:
        launcher.kill()
        launcher.wait()
    assert int(rows(tmp_path)[-1]["step"]) >= 12000 and "resumed at step" in text(tmp_path)


@pytest.mark.on_demand  # waits for timeouts
def test_a_rank_that_hangs_ends_the_others(tmp_path):
    (tmp_path / "training.py").write_text(IMPATIENT)
    with started([str(tmp_path / "training.py"), *RUN[1:]], tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        processes[1].send_signal(signal.SIGSTOP)
        assert processes[0].wait(PATIENCE) == 1 and "another rank has ended or cannot be reached" in text(tmp_path)
        assert (tmp_path / "runs/run/checkpoint.pt").exists()
        processes[1].send_signal(signal.SIGCONT)
        assert processes[1].wait(PATIENCE) == 1
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.on_demand
def test_ranks_are_equal_to_the_bit_in_two_runs(tmp_path):
    found = []
    for name in ("one", "other"):
        place = tmp_path / name
        place.mkdir()
        with started([*RUN, "--deterministic", "--total_steps", "4000"], place) as processes:
            assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(place)
        state = torch.load(place / "runs/run/checkpoint.pt", weights_only=True)
        shown = [{key: x for key, x in row.items() if key.startswith(("losses", "charts/epis"))} for row in rows(place)]
        found.append(({name: x.tolist() for name, x in state["net"].items()}, state["counts"]["steps"], shown))
    assert found[0] == found[1] and len(found[0][2]) > 5


@pytest.mark.on_demand  # waits for timeouts
def test_a_cut_link_is_waited_for_and_ends_both_sides_when_it_stays_cut(tmp_path, hosts):
    training = tmp_path / "training.py"
    training.write_text(IMPATIENT)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, place in enumerate((hosts.learner, hosts.envs)):
            environment = variables(rank, 2, 29_500) | {
                "MASTER_ADDR": LEARNER_ADDRESS, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "GLOO_SOCKET_IFNAME": hosts.ends[rank], "BEAST_TEST_RANKS": str(tmp_path),
            }  # fmt: skip
            output = stack.enter_context(open(tmp_path / f"output{rank}", "w"))
            command = [*place, sys.executable, str(training), *RUN[1:]]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until_training(tmp_path, processes)
        with hosts.cut():
            time.sleep(1)
            before = len(rows(tmp_path))
            time.sleep(2)
            assert len(rows(tmp_path)) == before, "the link is not cut"
        wait_until(lambda: len(rows(tmp_path)) > before + 2, lambda: text(tmp_path))
        with hosts.cut():
            began = time.monotonic()
            assert [process.wait(PATIENCE) for process in processes] == [1, 1], text(tmp_path)
            assert 5 < time.monotonic() - began < 30
    for rank in range(2):
        assert "another rank has ended or cannot be reached" in (tmp_path / f"output{rank}").read_text()
    steps = torch.load(tmp_path / "runs/run/checkpoint.pt", weights_only=True)["counts"]["steps"]
    assert steps >= int(rows(tmp_path)[-1]["step"]), "nothing is lost"
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize("function", ["compute_loss", "scale_rewards"], ids=["learning", "acting"])
def test_an_exception_in_one_rank_ends_all_with_its_text(tmp_path, function):
    fork = tmp_path / "fork.py"
    fork.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import monobeast\n"
        f"def broken(*arguments, original=monobeast.{function}, calls=[]):\n"
        "    is_counted = arguments[-1].shape[0] == 1 if len(arguments) == 2 else True  # acting alone\n"
        "    calls += [None] * is_counted\n"
        "    return original(*arguments) if len(calls) < 50 or not is_counted else 1 / 0\n"
        f"monobeast.{function} = broken\nmonobeast.main()\n"
    )
    with started(RUN, tmp_path, codes={1: [str(fork), *RUN[1:]]}) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [1, 1], text(tmp_path)
    assert "ZeroDivisionError" in (tmp_path / "output1").read_text()
    told = (tmp_path / "output0").read_text()
    assert "rank 1: Traceback" in told and "ZeroDivisionError" in told and "RuntimeError" not in told
    assert "ZeroDivisionError" in (tmp_path / "runs/run/out.log").read_text()
    assert (tmp_path / "runs/run/checkpoint.pt").exists()
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["r2d2.py", "--preset", "vector", "--total_steps", "4000"],
        pytest.param(["polybeast.py", "--num_servers", "1", "--total_steps", "4000"], marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_the_other_programs_have_ranks_too(tmp_path, words):
    pytest.importorskip("libbeast") if words[0] == "polybeast.py" else None
    words = [str(ROOT / words[0]), *words[1:], "--env", "CartPole-v1", "--name", "run", "--no_tensorboard"]
    with started([*words, "--log_steps", "500", "--device", "cpu"], tmp_path) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    told = [line.partition("stopped at ")[2][:20] for line in text(tmp_path).splitlines() if "stopped at" in line]
    last = rows(tmp_path)[-1]
    assert len(told) == 2 and told[0] == told[1] and int(last["step"]) >= 4000
    if words[0].endswith("r2d2.py"):
        flags = json.loads((tmp_path / "runs/run/config.json").read_text())
        trained = float(last["stats/updates"]) * 2 * flags["batch_width"] * flags["trained"]
        steps = int(last["step"]) * (flags["group_width"] - flags["eval_columns"]) / flags["group_width"]
        assert 0.5 * (steps - flags["min_fill"]) < trained / flags["replay_ratio"] <= steps - flags["min_fill"]
    wait_until(lambda: not left_behind(tmp_path))


SLOW = """
import os, time, gymnasium, toy_envs
class Slow(toy_envs.Counting):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if os.environ["RANK"] == "1" and self.steps > 6:  # more than one rollout, less than a sequence
            time.sleep(1)
        return super().step(action)
gymnasium.register("Slow-v0", Slow)
"""


def test_ranks_of_r2d2_make_no_update_before_all_have_a_sequence(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "agent.py").write_text("import slow, r2d2\nif __name__ == '__main__':\n    r2d2.main()\n")
    words = ["agent.py", "--env", "Slow-v0", "--name", "run", "--no_tensorboard", "--device", "cpu"]
    words += "--total_steps 2000 --group_width 8 --unroll_length 4 --stride 4 --burn_in 4 --trained 12".split()
    words += "--min_fill 200 --batch_width 4 --replay_ratio 1 --log_steps 500".split()
    with started(words, tmp_path) as processes:
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    assert text(tmp_path).count("stopped at step 2,0") == 2 and rows(tmp_path) == [], "of updates"
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.on_demand  # PolyBeast without ranks has tests of the same that are quick
def test_ranks_train_on_when_an_env_server_is_killed_or_stopped(tmp_path):
    pytest.importorskip("libbeast", exc_type=ImportError)
    words = [str(ROOT / "polybeast.py"), "--num_servers", "1", *RUN[1 : RUN.index("--num_actors")]]

    def server_of(process) -> psutil.Process:
        """Of that rank, the one that runs now."""

        def find() -> psutil.Process | None:
            children = psutil.Process(process.pid).children()
            return next((child for child in children if "polybeast_env.py" in " ".join(child.cmdline())), None)

        return wait_until(find, lambda: text(tmp_path))

    def wait_for_rows(count: int) -> None:
        before = len(rows(tmp_path))
        wait_until(lambda: len(rows(tmp_path)) >= before + count, lambda: text(tmp_path))

    with started([*words, "--log_steps", "500", "--no_tensorboard", "--device", "cpu"], tmp_path) as processes:
        wait_until_training(tmp_path, processes)
        for process in processes:
            killed = server_of(process)
            killed.kill()
            wait_for_rows(2)
            wait_until(lambda: server_of(process) != killed, lambda: text(tmp_path))
        server = server_of(processes[1])
        server.suspend()
        time.sleep(ranks.PATIENCE + 2)
        wait_for_rows(3)
        server.resume()
        wait_for_rows(3)
        processes[0].terminate()
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.on_demand  # it waits longer than a message between ranks may take
def test_env_servers_may_come_to_one_rank_minutes_after_those_of_another(tmp_path):
    pytest.importorskip("libbeast", exc_type=ImportError)
    (port,) = free_ports(1)
    words = [str(ROOT / "polybeast.py"), "--listen", f"127.0.0.1:{port}", *RUN[3 : RUN.index("--num_actors")]]
    words += ["--total_steps", "20000", "--no_tensorboard", "--device", "cpu"]
    with contextlib.ExitStack() as to_close, started(words, tmp_path) as processes:
        for rank in range(2):
            serve = [sys.executable, str(ROOT / "polybeast_env.py"), "--env", "CartPole-v1", "--group_width", "8"]
            server = subprocess.Popen([*serve, "--learner", f"127.0.0.1:{port + rank}"], stdout=subprocess.DEVNULL)
            to_close.callback(server.wait)
            to_close.callback(server.kill)
            if rank == 0:
                time.sleep(ranks.TIMEOUT + 10)
                assert [process.poll() for process in processes] == [None, None], text(tmp_path)
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], text(tmp_path)
    wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize(
    "environment, changes, message",
    [
        ({"MASTER_PORT": None}, {}, "MASTER_PORT are not set: use torchrun"),
        ({}, {"auto": True}, "--auto with 2 ranks: it measures this machine, which the others share"),
        ({}, {"cuda_graphs": True}, "--cuda_graphs with 2 ranks: a recording cannot hold the ranks' messages"),
        ({}, {"save_replay": True}, "--save_replay with 2 ranks: rank 0 would keep the others waiting"),
        ({}, {"mode": "test"}, "--mode test with 2 ranks: ranks train; start one process"),
        ({}, {"num_policies": 2}, "WORLD_SIZE is 2: several ranks train one policy; start one process"),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, {},
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)  # fmt: skip
def test_what_ranks_cannot_have_is_refused(tmp_path, monkeypatch, environment, changes, message):
    for name, value in {**variables(0, 2, 1), **environment}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    kinds = {"save_replay": r2d2.Flags, "num_policies": multibeast.flags_of(monobeast)}
    flags = kinds.get(next(iter(changes), ""), monobeast.Flags)(**changes, root=str(tmp_path))
    with pytest.raises(InputError, match=message):
        ranks.join(flags)
