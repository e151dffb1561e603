"""The agent's net and its rollouts on real environments."""

import shutil

import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from gymnasium import spaces
from lock_step import LockStep, new_net, small_flags, spaces_of

from beast.envs.rows import nest_observations, rollout_fields
from beast.learn.distributions import distribution
from beast.learn.nests import map_tensors
from beast.learn.normalization import Observations
from beast.learn.published import acting_copy
from monobeast import Net


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"core": "lstm"},
        {"core": "gru"},
        {"env": "Pendulum-v1", "core": "lstm"},
        {"env": "toy_envs:Tuple-v0"},
        {"env": "toy_envs:Dict-v0", "core": "lstm"},
        {"env": "PongNoFrameskip-v4", "group_width": 1, "batch_width": 1, "unroll_length": 4},
    ],
)
def test_recomputing_a_rollout_with_the_weights_that_made_it_gives_ratio_one_and_the_stored_values(changes):
    lock_step = LockStep(small_flags(**changes))
    for _ in range(30):
        rollout, core_state = lock_step.next_rollout()
        with torch.no_grad():
            policy_logits, values, _ = lock_step.net(rollout, core_state)
        stored, actions = rollout["policy_logits"][1:], rollout["action"][1:]
        log_probs = [
            distribution(lock_step.net.action_space, p).log_prob(actions) for p in (policy_logits[:-1], stored)
        ]
        torch.testing.assert_close((log_probs[0] - log_probs[1]).exp(), torch.ones_like(values[1:]), rtol=0, atol=1e-5)
        torch.testing.assert_close(policy_logits[:-1], stored, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)
        # As training would: a later version of the weights, images centered by what was seen since.
        lock_step.net.observe(rollout["obs"])
        lock_step.weights.publish(lock_step.net, 1)
        lock_step.next_rollout(), lock_step.next_rollout(), lock_step.next_rollout()


def test_rollouts_overlap_by_one_row_and_follow_one_another_without_a_gap():
    """The counting environment tells its own number, episode and step in every observation."""
    lock_step = LockStep(small_flags(env="toy_envs:Counting-v0", group_width=3, batch_width=3))
    last_rows: dict = {}
    seen_ends = 0
    for _ in range(200):
        rollout, _ = lock_step.next_rollout()
        rollout = map_tensors(lambda x: x.clone(), rollout)
        observations = rollout["obs"]["obs"]  # [T+1, K, 3]: environment, episode, step of the episode
        key = tuple(observations[0, :, 0].tolist())
        if key in last_rows:
            map_tensors(
                lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0),
                last_rows[key],
                map_tensors(lambda x: x[0], rollout),
            )
        last_rows[key] = map_tensors(lambda x: x[-1], rollout)
        assert (observations[:, :, 0] == observations[0, :, 0]).all(), "columns keep their environments"
        episode, step = observations[:, :, 1], observations[:, :, 2]
        torch.testing.assert_close(rollout["episode_step"].float(), step, rtol=0, atol=0)
        assert (rollout["done"] == (step == 0)).all()
        ended = rollout["terminated"] | rollout["truncated"]
        assert (ended[:-1] == rollout["done"][1:]).all(), "a final row is followed by a first row, and nothing else is"
        assert (episode[1:] == episode[:-1] + rollout["done"][1:]).all()
        assert (step[1:] == torch.where(rollout["done"][1:], 0, step[:-1] + 1)).all()
        seen_ends += int(ended.sum())
    assert len(last_rows) == 2 and seen_ends > 50


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_the_stored_core_state_is_the_one_before_row_zero_in_every_slot_of_a_long_run(core):
    """Held against a recurrent net that walks each environment's whole history, row after row, from its start."""
    lock_step = LockStep(small_flags(core=core))
    states: dict = {}
    used_slots = set()
    for number in range(40):
        rollout, core_state = lock_step.next_rollout()
        used_slots.add(rollout["obs"]["obs"].data_ptr())
        group = int(rollout["group"][0, 0])
        assert group == number % 2, "two groups in lock-step, one after the other"
        walked = states.get(group, lock_step.net.initial_state(4))
        for mine, stored in zip(walked, core_state):
            torch.testing.assert_close(mine, stored, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for row in range(lock_step.flags.unroll_length):
                _, _, walked = lock_step.net(map_tensors(lambda x: x[row : row + 1], rollout), walked)  # noqa: B023
        states[group] = walked
    assert len(used_slots) == lock_step.flags.num_slots


def test_the_first_row_of_an_episode_forgets_even_a_core_state_of_nan():
    flags = small_flags(core="lstm")
    net = new_net(flags)
    row = {"obs": {"obs": torch.zeros(1, 2, 4)}, "reward": torch.tensor([[torch.nan, 0.0]])}
    row |= {"action": torch.zeros(1, 2, dtype=torch.int64), "done": torch.tensor([[True, False]])}
    poisoned = tuple(state.index_fill(1, torch.tensor([0]), torch.nan) for state in net.initial_state(2))
    policy_logits, values, core_state = net(row, poisoned)
    assert all(tensor.isfinite().all() for tensor in (policy_logits, values, *core_state))


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_rollout_gives_what_its_rows_give_one_by_one_wherever_episodes_begin(core):
    T, B = 7, 3
    flags = small_flags(core=core)
    torch.manual_seed(1)
    net = new_net(flags)
    rollout = {"obs": {"obs": torch.randn(T, B, 4)}, "reward": torch.randn(T, B), "action": torch.randint(2, (T, B))}
    rollout["done"] = torch.zeros(T, B, dtype=torch.bool)
    for row in (1, 3, 4, 6):
        rollout["done"][row, row % B] = True
    state = tuple(torch.randn_like(part) for part in net.initial_state(B))
    whole = net(rollout, state)
    rows = []
    for t in range(T):
        *outputs, state = net(map_tensors(lambda x, t=t: x[t : t + 1], rollout), state)
        rows.append(outputs)
    torch.testing.assert_close(whole, (*(torch.cat(parts) for parts in zip(*rows)), state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", ["shallow", "mlp"])
def test_every_kind_of_observation_reaches_the_model_in_units_near_one(net):
    kinds = {
        "walker/joints": spaces.Box(-1, 1, (3,)),
        "type": spaces.Discrete(500, start=7),
        "parts": spaces.MultiDiscrete([3, 4]),
        "bits": spaces.MultiBinary(5),
        "ram": spaces.Box(0, 255, (128,), np.uint8),
        "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
        "grid": spaces.Box(0, 1, (10, 10, 4), bool),
    }
    flags = small_flags(net=net)
    model = Net(kinds, spaces.Discrete(2), flags)
    highest = {
        name: torch.from_numpy(np.full((1, 2, *space.shape), space.high if hasattr(space, "high") else 0, space.dtype))
        for name, space in kinds.items()
        if isinstance(space, spaces.Box)
    }
    highest |= {"type": torch.full((1, 2), 506), "parts": torch.tensor([[[2, 3]] * 2]), "bits": torch.ones(1, 2, 5)}
    row = {"obs": highest, "reward": torch.zeros(1, 2), "done": torch.zeros(1, 2, dtype=torch.bool)}
    seen = []
    for encoder in model.encoders:
        first = next(m for m in encoder.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d)))
        first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().max()))
    model({**row, "action": torch.zeros(1, 2, dtype=torch.int64)}, ())
    assert len(seen) == len(kinds) and max(seen) <= 1


def test_images_are_centered_by_the_running_mean_and_deviation_of_all_that_was_seen():
    center = Observations(spaces.Box(0, 255, (2, 3, 3), np.uint8), is_image=True, normalize=True)
    images = torch.randint(0, 256, (50, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(center(images), images.float() / 255)
    for part in images.split([7, 13, 30]):
        before = center(part)
        rows = torch.stack([torch.zeros_like(part), part])
        torch.testing.assert_close(center(rows)[1], before, rtol=0, atol=0)
        center.observe(rows)  # the last row counts
    center(images.unsqueeze(0))
    seen = images.float() / 255
    expected = (seen - seen.mean(0)) / (seen.var(0, correction=0).sqrt() + center.floor)
    for _ in range(2):
        torch.testing.assert_close(center(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_copy_that_acts_gives_what_the_net_gives_to_the_bit_in_bf16_too(core):
    flags = small_flags(env="PongNoFrameskip-v4", core=core)
    net = new_net(flags, amp=True)
    images = torch.randint(0, 256, (1, 3, *spaces_of(flags).observations["obs"].shape), dtype=torch.uint8)
    inputs = {"obs": {"obs": images}, "reward": torch.randn(1, 3), "done": torch.zeros(1, 3, dtype=torch.bool)}
    inputs["action"] = torch.tensor([[0, 1, 2]])
    core_state = tuple(torch.randn_like(part) for part in net.initial_state(3))
    acting = acting_copy(net)
    assert {parameter.dtype for parameter in acting.parameters()} == {torch.float32, torch.bfloat16}
    with torch.no_grad():
        expected, found = (n(inputs, core_state) for n in (net, acting))
    map_tensors(lambda a, b: np.testing.assert_array_equal(a, b), found, expected)


@pytest.mark.parametrize(
    "env, backend, core",
    [
        ("CartPole-v1", "eager", "none"),
        ("CartPole-v1", "eager", "lstm"),
        pytest.param("toy_envs:Dict-v0", "aot_eager", "none", marks=pytest.mark.long),
        pytest.param("toy_envs:MultiDiscrete-v0", "aot_eager", "lstm", marks=pytest.mark.long),
        pytest.param("Pendulum-v1", "aot_eager", "gru", marks=pytest.mark.long),
        pytest.param("PongNoFrameskip-v4", "eager", "none", marks=pytest.mark.long),
        pytest.param("PongNoFrameskip-v4", "eager", "lstm", marks=pytest.mark.long),
        pytest.param(
            "MinAtar/Breakout-v1",
            "inductor",
            "none",
            marks=[pytest.mark.long, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")],
        ),
    ],
)
def test_the_net_compiles_in_one_piece(env, backend, core):
    flags = small_flags(env=env, core=core)
    net, fields = new_net(flags), rollout_fields(spaces_of(flags))
    torch._dynamo.reset()  # or it takes sizes for dynamic that changed from test to test
    compiled = torch.compile(net.forward, backend=backend, fullgraph=True)  # raises where a graph would break
    for T in (1, 9):
        batch = {k: torch.zeros(T, 4, *shape, dtype=getattr(torch, str(dtype))) for k, (shape, dtype) in fields.items()}
        batch = nest_observations(batch)
        state = net.initial_state(4)
        for ours, theirs in zip(compiled(batch, state)[:2], net(batch, state)[:2]):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("batch_width", [2, 8])
def test_every_batch_begins_with_the_core_state_of_its_own_columns(batch_width):
    lock_step = LockStep(small_flags(core="lstm", batch_width=batch_width))
    for _ in range(12):
        rollout, core_state = lock_step.next_rollout()
        with torch.no_grad():
            policy_logits, values, _ = lock_step.net(rollout, core_state)
        torch.testing.assert_close(policy_logits[:-1], rollout["policy_logits"][1:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)
