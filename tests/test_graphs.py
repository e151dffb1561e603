"""--cuda_graphs without a GPU: a recording repeats the operations of a call, Python's part of it does not run again."""

import gc
import threading
import time
import unittest.mock

import pytest
import test_r2d2
import torch
from lock_step import new_learner, small_flags, spaces_of
from torch.utils._python_dispatch import TorchDispatchMode

import monobeast
import r2d2
from beast.envs.rows import nest_observations, rollout_fields
from beast.errors import InputError
from beast.learn.graphs import WARM_UP, Graphs, leaves
from beast.learn.published import PublishedWeights, compiled


class Tape(TorchDispatchMode):
    """What torch.cuda.CUDAGraph does on a GPU: `replay` repeats the operations on the memory that they had."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with")
        results = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(leaves(as_tuple(results)), leaves(as_tuple(again))):
                old.copy_(new)


def as_tuple(results) -> tuple:
    found = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(x for x in found if isinstance(x, torch.Tensor))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """The streams of the recordings, as torch deals them: 32 of each priority, in turn."""
    used, dealt = [], {}

    def deal(priority=0):
        dealt[priority] = dealt.get(priority, -1) + 1
        return priority, dealt[priority] % 32

    def graph(tape, stream, capture_error_mode):
        used.append(stream)
        return tape

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "Stream", deal)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return used


def test_a_recording_repeats_the_operations_for_new_arguments_and_its_results_are_the_callers():
    calls = []

    def function(pair, scale):
        calls.append(len(pair["a"]))
        return {"sum": (pair["a"] + pair["b"]) * scale}

    recorded = Graphs()
    results = [
        recorded.call(function, {"a": torch.arange(n) + 1.0, "b": torch.ones(n) * k}, torch.tensor(k))
        for k in range(1, WARM_UP + 4)
        for n in (2, 3)  # shapes in turn have recordings of their own
    ]
    expected = [[k * (i + 1.0 + k) for i in range(n)] for k in range(1, WARM_UP + 4) for n in (2, 3)]
    assert [x["sum"].tolist() for x in results] == expected, "no call writes over what another one returned"
    assert calls == [2, 3] * (WARM_UP + 1)


def test_what_cannot_be_recorded_is_refused_by_name_and_garbage_is_collected_again():
    def waits(x):
        return x + x.sum().item()

    recorded, x = Graphs(), torch.ones(3)
    for _ in range(WARM_UP):
        assert recorded.call(waits, x).tolist() == [4, 4, 4]
    with pytest.raises(InputError, match=r"^--cuda_graphs: .*waits cannot be recorded.*is capturing\. Change it, or"):
        recorded.call(waits, x)
    assert gc.isenabled()


def test_no_garbage_is_collected_while_a_graph_is_recorded():
    enabled = []

    def function(x):
        enabled.append(gc.isenabled())
        return x + 1

    recorded = Graphs()
    for _ in range(WARM_UP + 2):
        recorded.call(function, torch.ones(1))
    assert enabled == [True] * WARM_UP + [False] and gc.isenabled()


def test_no_recording_of_many_is_made_on_a_stream_that_a_thread_works_on(streams):
    learner = torch.cuda.Stream()
    recorded = Graphs()
    for n in range(40):
        for _ in range(WARM_UP + 1):
            recorded.call(torch.neg, torch.ones(n))
    assert len(streams) == 40 and learner not in streams


def random_batch(flags, B: int) -> dict:
    """A rollout [T+1, B] of CartPole."""
    generator = torch.Generator().manual_seed(B)
    rows = {
        name: torch.rand(flags.unroll_length + 1, B, *shape, generator=generator).mul(2).to(getattr(torch, str(dtype)))
        for name, (shape, dtype) in rollout_fields(spaces_of(flags)).items()
    }
    ends = torch.rand(flags.unroll_length + 1, B, generator=generator) < 0.2
    return nest_observations(rows | {"done": ends, "terminated": ends, "truncated": torch.zeros_like(ends)})


def assert_equal(ours: torch.nn.Module, theirs: torch.nn.Module, before: list) -> None:
    for x, y in zip(ours.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(x, y)
    assert any((x - y).abs().max() > 1e-4 for x, y in zip(before, ours.parameters())), "nothing was learned"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"core": "lstm"},
        {"minibatches": 2, "epochs": 2, "normalize_returns": "on"},
        {"ppo_clip": 0.2, "value_net": "separate"},
    ],
)
def test_recorded_updates_of_monobeast_are_those_of_an_update_that_is_not_recorded(changes):
    flags = small_flags(**changes)
    plain, recorded = new_learner(flags), new_learner(flags)
    recorded.net.load_state_dict(plain.net.state_dict())
    recorded.graphs = Graphs(recorded.net.parameters())
    before = [x.clone() for x in plain.net.parameters()]
    for number in range(8):
        B = 2 if number == 6 else 4  # a warm-up between replays, whose gradients lie elsewhere
        norms = []
        for learner in (plain, recorded):
            torch.manual_seed(number)  # deals the minibatches
            batch, state = random_batch(flags, B), learner.net.initial_state(B)
            norms.append(monobeast.update(flags, learner, batch, state).grad_norm)
        torch.testing.assert_close(*norms)
    assert recorded.graphs._recordings
    assert_equal(recorded.net, plain.net, before)


def test_recorded_updates_of_r2d2_are_those_of_an_update_that_is_not_recorded():
    flags = test_r2d2.small_flags()
    plain, recorded = test_r2d2.new_learner(flags), test_r2d2.new_learner(flags)
    recorded.graphs = Graphs(recorded.net.parameters())
    before = [x.clone() for x in plain.net.parameters()]
    for number in range(7):
        found = []
        for learner in (plain, recorded):
            rows, state = test_r2d2.random_batch(flags, seed=number)
            weights = torch.rand(6, generator=torch.Generator().manual_seed(number))
            batch = test_r2d2.batch_of(flags, learner, rows, state, weights)
            outcome, priorities = r2d2.update(flags, learner, batch)
            found.append((priorities, outcome.grad_norm))
        torch.testing.assert_close(*found)
    assert len(recorded.graphs._recordings) == 1
    assert_equal(recorded.net, plain.net, before)


def test_a_recorded_net_acts_with_the_weights_that_were_published_last():
    flags = small_flags(core="lstm")
    learner = new_learner(flags)
    weights = PublishedWeights(learner.net, 0, is_recorded=True)
    inputs, state = random_batch(flags, 4), learner.net.initial_state(4)
    for version in range(1, 2 * WARM_UP + 5):
        for parameter in learner.net.parameters():
            parameter.data += 0.01
        weights.publish(learner.net, version)
        with torch.no_grad(), weights.newest() as (net, _):
            torch.testing.assert_close(net(inputs, state), learner.net(inputs, state))


def test_without_a_gpu_the_flag_is_refused(tmp_path):
    flags = small_flags(root=str(tmp_path), device="cpu", deterministic=False, cuda_graphs=True)
    with pytest.raises(InputError, match="--cuda_graphs with --device cpu: there is no GPU to record them; leave it"):
        monobeast.train(flags)


def test_one_thread_at_a_time_compiles(monkeypatch):
    compiling, most = [], []

    def slow(forward):
        def call(x):
            compiling.append(x)
            most.append(len(compiling))
            time.sleep(0.05)
            compiling.remove(x)
            return forward(x)

        return call

    monkeypatch.setattr(torch, "compile", slow)
    nets = [compiled(lambda x: x + 1) for _ in range(3)]
    threads = [threading.Thread(target=net, args=(torch.ones(k),)) for k, net in enumerate(nets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_a_compiled_net_may_be_called_while_another_thread_traces():
    net = compiled(lambda x: x + 1)
    assert net(torch.ones(2)).tolist() == [2, 2]
    with unittest.mock.patch.object(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True):  # the whole process's
        assert net(torch.ones(2)).tolist() == [2, 2]
