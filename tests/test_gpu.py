"""What only a GPU can show; skipped where there is none."""

import copy
import csv

import numpy as np
import pytest
import torch

import monobeast
from beast.machine import pin_memory
from beast.rollout import RolloutMemory
from beast.tensors import map_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_slots_are_pinned_and_released_again():
    memory = RolloutMemory({"obs/obs": ((84, 84, 4), "uint8"), "reward": ((), "float32")}, 3, 20, 16)
    tensors = [torch.from_numpy(array) for array in memory.arrays.values()]
    unpin = pin_memory(memory.buffer, torch.device("cuda"), print)
    assert all(tensor.is_pinned() for tensor in tensors)
    copied = tensors[1].to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(copied.cpu().numpy(), memory.arrays["reward"])
    unpin()
    assert not any(tensor.is_pinned() for tensor in tensors)


def test_outputs_on_a_gpu_are_those_on_a_cpu():
    flags = monobeast.Flags(env="PongNoFrameskip-v4", core="lstm")
    observation_spaces, action_space = monobeast.probe_env(flags)
    net = monobeast.Net(observation_spaces, action_space, flags)
    inputs = {
        "obs": {"obs": torch.randint(0, 256, (2, 3, *observation_spaces["obs"].shape), dtype=torch.uint8)},
        "reward": torch.randn(2, 3),
        "done": torch.tensor([[True, False, False], [False, True, False]]),
        "action": torch.zeros(2, 3, dtype=torch.int64),
    }
    expected = net(inputs, net.initial_state(3))
    on_gpu = map_tensors(lambda x: x.cuda(), (inputs, net.initial_state(3)))
    found = map_tensors(lambda x: x.cpu(), copy.deepcopy(net).cuda()(*on_gpu))
    map_tensors(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3), found, expected)


@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
def test_a_run_trains_on_a_gpu_and_resumes_there(tmp_path, variant):
    if variant == "polybeast":
        pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    module = pytest.importorskip(variant)
    for total_steps in (20_000, 40_000):
        flags = {"env": "PongNoFrameskip-v4", "device": "cuda", "root": str(tmp_path), "name": "run"}
        module.train(module.Flags(**flags, total_steps=total_steps, log_steps=5000, tensorboard=False))
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) >= 40_000
    assert all(np.isfinite(float(row["losses/total_loss"])) for row in rows)
