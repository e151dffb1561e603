"""What only a GPU can show; skipped where there is none."""

import copy
import csv
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from lock_step import new_net, spaces_of, step
from test_kernels import CASES, V5, assert_equal, compare, make_both

import monobeast
from beast import envs
from beast.device import pin_memory
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.errors import InputError
from beast.feeds.device import TensorGroup, TensorMemory
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.feeds.slots import SlotTensors
from beast.learn.graphs import WARM_UP, Graphs
from beast.learn.nests import map_tensors
from examples.tensor_envs import CartPoles

NO_LIBBEAST = "libbeast is not built: make libbeast"
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


def test_slots_that_cannot_be_pinned_are_reported_and_the_next_kernel_runs():
    memory = RolloutMemory({"reward": ((), "float32")}, 3, 20, 16)
    unpin, messages = pin_memory(memory.buffer, torch.device("cuda"), print), []
    pin_memory(memory.buffer, torch.device("cuda"), messages.append)()  # CUDA refuses to pin memory twice
    assert len(messages) == 1 and "slots are not pinned" in messages[0]
    assert (torch.ones(1, device="cuda") + 1).item() == 2
    unpin()


def test_outputs_on_a_gpu_are_those_on_a_cpu():
    flags = monobeast.validate(monobeast.Flags(env="PongNoFrameskip-v4", core="lstm"))
    net, observation_spaces = new_net(flags), spaces_of(flags).observations
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


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("variant", ["monobeast", "polybeast", "r2d2"])
def test_a_run_trains_on_a_gpu_and_resumes_there(tmp_path, variant, cuda_graphs):
    if variant == "polybeast":
        pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    module = pytest.importorskip(variant)
    for total_steps in (20_000, 40_000):
        flags = {"env": "PongNoFrameskip-v4", "device": "cuda", "root": str(tmp_path), "name": "run"}
        flags |= {"cuda_graphs": cuda_graphs}
        flags |= {"min_fill": 5000, "replay_gb": 0.3} if variant == "r2d2" else {}
        module.train(module.Flags(**flags, total_steps=total_steps, log_steps=5000, tensorboard=False))
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) >= 40_000
    assert all(np.isfinite(float(row["losses/total_loss"])) for row in rows)


def random_batch(flags) -> dict:
    """A rollout of Pong [T+1, B] on the GPU."""
    T, B = flags.unroll_length, flags.batch_width
    zeros = torch.zeros(T + 1, B)
    batch = {
        "obs": {"obs": torch.randint(0, 256, (T + 1, B, 4, 84, 84), dtype=torch.uint8)},
        **{name: zeros.bool() for name in ("done", "terminated", "truncated")},
        **{name: zeros for name in ("baseline", "episode_return")},
        **{name: zeros.int() for name in ("episode_step", "policy_version", "group", "env_number", "life")},
        "reward": torch.randn(T + 1, B),
        "action": torch.randint(0, 6, (T + 1, B)),
        "policy_logits": torch.zeros(T + 1, B, 6),
    }
    return map_tensors(lambda x: x.cuda(), batch)


@pytest.mark.parametrize("flags", [{}, {"core": "lstm"}, {"minibatches": 2, "epochs": 2, "normalize_returns": "on"}])
def test_recorded_updates_are_those_of_an_update_that_is_not_recorded(flags):
    flags = {"env": "PongNoFrameskip-v4", "device": "cuda", "amp": "off", "lr_decay": "none", **flags}
    flags = monobeast.validate(monobeast.Flags(**flags))
    torch.manual_seed(1)
    batches = [random_batch(flags) for _ in range(8)]
    plain, recorded = (monobeast.make_learner(flags, spaces_of(flags)) for _ in range(2))
    recorded.net.load_state_dict(plain.net.state_dict())
    recorded.graphs = Graphs(recorded.net.parameters())
    for number, batch in enumerate(batches):
        if number == 6:  # other shapes in between: a warm-up, whose gradients lie elsewhere
            batch = map_tensors(lambda x: x[:, :2], batch)
        norms = []
        for learner in (plain, recorded):
            torch.manual_seed(number)  # deals the minibatches
            state = tuple(x[:, : batch["done"].shape[1]].cuda() for x in learner.net.initial_state(flags.batch_width))
            norms.append(monobeast.update(flags, learner, batch, state).grad_norm.item())
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        for ours, theirs in zip(recorded.net.state_dict().values(), plain.net.state_dict().values()):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert recorded.graphs._recordings


def test_what_cannot_be_recorded_is_refused_by_name_and_the_gpu_goes_on():
    def waits(x):
        return x + x.sum().item()

    graphs, x = Graphs(), torch.ones(3, device="cuda")
    for _ in range(WARM_UP):
        assert graphs.call(waits, x).tolist() == [4, 4, 4]
    with pytest.raises(InputError, match="--cuda_graphs: .*waits cannot be recorded"):
        graphs.call(waits, x)
    assert (x + 1).tolist() == [2, 2, 2]


def test_an_update_does_not_make_the_host_wait_and_its_numbers_come_with_the_next_one():
    flags = monobeast.validate(monobeast.Flags(env="PongNoFrameskip-v4", device="cuda", max_bad_updates=2))
    learner = monobeast.make_learner(flags, spaces_of(flags))
    T, B = flags.unroll_length, flags.batch_width
    batch = random_batch(flags)
    assert step(flags, learner, batch, ()) is None
    torch.cuda.set_sync_debug_mode("error")
    try:
        counted = step(flags, learner, batch, ())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counted and np.isfinite(counted.metrics["losses/total_loss"]) and learner.steps == T * B
    batch["reward"] = batch["reward"] * torch.nan
    before = [parameter.clone() for parameter in learner.net.parameters()]
    step(flags, learner, batch, ())
    step(flags, learner, batch, ())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.net.parameters()))
    with pytest.raises(FloatingPointError, match="in 2 updates in a row"):
        step(flags, learner, batch, ())
    learner.settle()
    assert learner.steps == 5 * T * B and learner.bad_updates == 3


@pytest.mark.parametrize("num_actors", [1, 3])
def test_rows_go_up_once_and_the_learner_sees_what_the_actors_wrote(tmp_path, monkeypatch, num_actors):
    uploads: list[tuple[int, int]] = []
    upload, rollouts = SlotTensors.upload, SharedMemoryFeed.rollouts

    def count(self, slot, row):
        uploads.append((slot, row))
        upload(self, slot, row)

    def compare(self, limit=None):
        """The default group of 16 gives four batches; they are compared when the last one was trained."""
        taken, take = [], self._take
        self._take = lambda *arguments: taken.clear() or taken.extend(take(*arguments)) or taken
        batches = []
        for batch, core_state in rollouts(self, limit):
            batches.append(map_tensors(torch.clone, batch))
            yield batch, core_state
            if len(batches) < 4:
                continue
            slot = self.memory.rollout(taken[0])
            for name in ("reward", "done", "terminated", "truncated"):
                seen = torch.cat([batch[name] for batch in batches], dim=1).cpu().numpy()
                np.testing.assert_array_equal(seen, slot[name])
            images = torch.cat([batch["obs"]["obs"] for batch in batches], dim=1).cpu().numpy()
            np.testing.assert_array_equal(images, slot["obs"]["obs"])
            batches.clear()

    monkeypatch.setattr(SlotTensors, "upload", count)
    monkeypatch.setattr(SharedMemoryFeed, "rollouts", compare)
    flags = {"env": "PongNoFrameskip-v4", "device": "cuda", "root": str(tmp_path), "num_actors": num_actors}
    monobeast.train(monobeast.Flags(**flags, name="run", total_steps=20_000, log_steps=5000, tensorboard=False))
    # A group's first row, and then rows 1 to T of each rollout: row 0 of the next one is copied on the GPU.
    assert sum(row == 0 for _, row in uploads) == num_actors * monobeast.GROUPS_PER_ACTOR
    for slot in {slot for slot, _ in uploads}:
        later = [row for s, row in uploads if s == slot and row > 0]
        assert later == [1 + index % 20 for index in range(len(later))], "each row once, in order"


def test_polybeast_finds_on_the_gpu_what_inference_has_uploaded(tmp_path, monkeypatch):
    pytest.importorskip("libbeast", reason=NO_LIBBEAST, exc_type=ImportError)
    import polybeast
    from beast.feeds.remote import SeenObservations

    find, uploads = SeenObservations.find, []

    def compare(self, observations, numbers):
        uploads.append(int(numbers[1:].min()) < self._next - self._half)
        on_gpu = find(self, observations, numbers)
        map_tensors(lambda a, b: np.testing.assert_array_equal(a.cpu().numpy(), b.numpy()), on_gpu, observations)
        return on_gpu

    monkeypatch.setattr(SeenObservations, "find", compare)
    flags = {"env": "PongNoFrameskip-v4", "device": "cuda", "root": str(tmp_path), "name": "run"}
    polybeast.train(polybeast.Flags(**flags, total_steps=20_000, log_steps=5000, tensorboard=False))
    assert len(uploads) > 100 and sum(uploads) < 0.1 * len(uploads)


def test_inference_does_not_write_over_what_the_learner_has_yet_to_read():
    pytest.importorskip("libbeast", reason=NO_LIBBEAST, exc_type=ImportError)
    from beast.feeds.remote import SeenObservations

    device = torch.device("cuda")
    learner, inference = torch.cuda.Stream(), torch.cuda.Stream()
    seen = SeenObservations(8, device)
    rollout = torch.arange(5).view(5, 1, 1)
    with torch.cuda.stream(inference):
        numbers = torch.cat([torch.zeros(1, 1).long(), *(seen.keep({"obs": x[None].cuda()}) for x in rollout[:4])])
        inference.synchronize()
    with torch.cuda.stream(learner):
        torch.cuda._sleep(10**9)  # clock cycles: an update that takes long
        found = seen.find({"obs": rollout}, numbers)
    with torch.cuda.stream(inference):
        for _ in range(16):
            seen.keep({"obs": torch.full((1, 1, 1), 99, device=device)})
    torch.cuda.synchronize()
    assert torch.equal(found["obs"].cpu(), rollout)


def test_a_thread_works_on_while_another_records_more_graphs_than_torch_has_streams():
    learner, ended, copies = torch.cuda.Stream(), threading.Event(), []

    def work():
        with torch.cuda.stream(learner):
            while not ended.is_set():
                copies.append(torch.ones(8).cuda().sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        recorded = Graphs()
        for n in range(40):
            for _ in range(WARM_UP + 2):
                assert recorded.call(torch.neg, torch.ones(n + 1, device="cuda")).sum().item() == -n - 1
    finally:
        ended.set()
        thread.join()
    assert len(recorded._recordings) == 40 and set(copies) == {8.0}


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_compiled_run_trains(tmp_path, core):
    flags = {
        "env": "PongNoFrameskip-v4",
        "device": "cuda",
        "root": str(tmp_path),
        "name": "run",
        "compile": True,
        "core": core,
    }
    monobeast.train(monobeast.Flags(**flags, total_steps=10_000, log_steps=2000, tensorboard=False))
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert all(np.isfinite(float(row["losses/total_loss"])) for row in csv.DictReader(file))


def test_environments_of_tensors_are_stepped_as_on_a_cpu_and_the_host_does_not_wait(monkeypatch):
    starts = torch.linspace(-0.04, 0.04, 32).reshape(8, 4)
    monkeypatch.setattr(CartPoles, "_starts", lambda poles: starts[: poles.num_envs].to(poles.device))
    spaces = probe_env(lambda flags, num_envs: CartPoles(num_envs), monobeast.Flags(env="CartPoles-v0"))
    groups = []
    for device in map(torch.device, ("cpu", "cuda")):
        memory = TensorMemory(rollout_fields(spaces), 1, 60, 8, device)
        groups.append(TensorGroup(CartPoles(8, device), spaces, memory))
        groups[-1].reset(1, 0, 0)
        memory.arrays["action"].copy_((torch.arange(61)[:, None] // 3 + torch.arange(8)) % 2)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for row in range(1, 61):
                groups[-1].step(0, row)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    on_cpu, on_gpu = (group.memory.arrays for group in groups)
    for name in ("obs/obs", "reward", "done", "terminated", "episode_return", "episode_step"):
        torch.testing.assert_close(on_gpu[name].cpu(), on_cpu[name], rtol=1e-4, atol=1e-4)
    assert on_cpu["terminated"].any()


def test_an_agent_trains_on_environments_of_tensors_on_the_gpu(tmp_path):
    flags = monobeast.Flags(
        env="examples.tensor_envs:CartPoles-v0", env_kwargs='{"device": "cuda"}', device="cuda", root=str(tmp_path),
        name="run", num_actors=1, group_width=256, batch_width=256, vtrace_lambda=0.95, learning_rate=3e-3, epochs=2,
        minibatches=2, hidden_size=256, normalize_returns="on", tensorboard=False,
    )  # fmt: skip
    for total_steps in (500_000, 1_000_000):
        result = monobeast.train(replace(flags, total_steps=total_steps))
    assert result.steps >= 1_000_000 and result.mean_return >= 150, "poles of an untrained policy fall after 20 steps"


# Games: benchmarks/gpu.py runs those with "games" in their names first.
@pytest.mark.parametrize("game, lanes, arguments", CASES, ids=[game for game, _, _ in CASES])
def test_games_on_the_gpu_are_those_of_the_pool(game, lanes, arguments):
    _, ends = compare(game, lanes, 200, 300, device="cuda", **{"max_num_frames_per_episode": 250, **arguments})
    assert ends > 100


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_lanes_of_a_warp_change_nothing_in_games_on_the_gpu(lanes):
    _, ends = compare("seaquest", lanes, 100, 333, device="cuda", **V5, max_num_frames_per_episode=120)
    assert ends > 100


def test_games_whose_frames_end_early_are_drawn_again_on_the_gpu():
    _, ends = compare("journey_escape", 8, 100, 300, device="cuda", **V5, max_num_frames_per_episode=120)
    assert ends > 100


@pytest.mark.parametrize("seed", [None, 5])
def test_resets_of_some_games_on_the_gpu_are_those_of_the_pool(seed):
    env, pool = make_both("pong", 64, device="cuda", max_num_frames_per_episode=30, autoreset_mode="SameStep")
    random = np.random.default_rng(3)
    assert_equal(env.reset(seed=17), pool.reset(seed=17), "reset")
    for number in range(60):
        actions = random.integers(0, 6, 64)
        assert_equal(env.step(torch.from_numpy(actions).cuda()), pool.step(actions), f"step {number}")
        if number % 4 == 3:
            given = {"seed": seed, "options": {"reset_mask": random.random(64) < 0.4}}
            assert_equal(env.reset(**given), pool.reset(**given), "some")


def test_games_in_two_streams_on_the_gpu_are_those_of_the_pool():
    pairs = [make_both("qbert", 256, device="cuda", max_num_frames_per_episode=40) for _ in range(2)]
    streams, random = [torch.cuda.Stream() for _ in pairs], np.random.default_rng(1)
    for (env, pool), seed in zip(pairs, (1, 900)):
        assert_equal(env.reset(seed=seed), pool.reset(seed=seed), "reset")
    for number in range(60):
        found = []
        for (env, pool), stream in zip(pairs, streams):  # both are queued before either is looked at
            actions = random.integers(0, 6, 256)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append((env.step(torch.from_numpy(actions).cuda()), pool.step(actions)))
        torch.cuda.synchronize()
        for each in found:
            assert_equal(*each, f"step {number}")


def test_several_games_on_the_gpu_are_the_columns_that_they_are_on_the_host():
    ids = "PongNoFrameskip-v4,BreakoutNoFrameskip-v4"
    env, on_cpu = (envs.make(ids, 64, atari_backend=backend) for backend in ("cuda", "beast"))
    random = np.random.default_rng(5)
    assert_equal(env.reset(seed=1), on_cpu.reset(seed=1), "reset")
    for number in range(100):
        actions = random.integers(0, 18, 64)
        assert_equal(env.step(torch.from_numpy(actions).cuda()), on_cpu.step(actions), f"step {number}")


def test_a_step_of_games_on_the_gpu_does_not_make_the_host_wait():
    env = envs.make("BreakoutNoFrameskip-v4", 64, atari_backend="cuda")  # with episodes that are lives
    env.reset(seed=0)
    actions = torch.zeros(64, dtype=torch.int64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            env.step(actions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    env.check()
    assert torch.cuda.memory_allocated() == before
    env.step(actions + 6)
    with pytest.raises(RuntimeError, match="environment 0 of breakout on cuda:0 .* an action that it has not"):
        env.check()


def test_an_agent_trains_on_games_of_the_gpu_resumes_and_is_tested(tmp_path, monkeypatch):
    flags = monobeast.Flags(
        env="BreakoutNoFrameskip-v4", atari_backend="cuda", device="cuda", root=str(tmp_path), name="run", num_actors=1,
        group_width=512, batch_width=256, learning_rate=1e-3, tensorboard=False, stagger=True,
    )  # fmt: skip
    for total_steps in (200_000, 400_000):
        result = monobeast.train(replace(flags, total_steps=total_steps))
    assert result.steps >= 400_000 and np.isfinite(result.mean_return)
    words = ["--mode", "test", "--root", str(tmp_path), "--name", "run", "--episodes", "2"]
    monkeypatch.setattr(sys, "argv", ["monobeast.py", *words])
    monobeast.main()
    assert (tmp_path / "run/test.json").exists()
