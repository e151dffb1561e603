"""What the net takes from its inputs: nothing across the beginning of an episode, images centered by those before."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

import monobeast
import r2d2
from beast.envs.spaces import is_image
from beast.errors import InputError
from beast.learn.layers import ResidualBlock
from beast.learn.normalization import Observations, describe_encoders
from beast.learn.published import acting_copy
from beast.learn.recurrent import Core
from beast.run import checkpoint

T, B = 7, 3


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_a_row_sees_the_past_of_its_own_episode_only(core):
    flags = monobeast.Flags(hidden_size=32, core=core, core_size=5, reward_clip=1.0)
    torch.manual_seed(1)
    net = monobeast.Net({"obs": spaces.Box(-1, 1, (2,))}, spaces.Discrete(3), flags).eval()
    done = torch.zeros(T, B, dtype=torch.bool)
    done[4, 0] = done[0, 1] = True  # column 2 goes on
    reward, action = 0.1 * torch.ones(T, B), torch.zeros(T, B, dtype=torch.int64)
    inputs = {"obs": {"obs": torch.randn(T, B, 2)}, "reward": reward, "action": action, "done": done}
    core_state = tuple(torch.randn_like(part) for part in net.initial_state(B))
    before = torch.cat([x.reshape(T, B, -1) for x in net(inputs, core_state)[:2]], dim=-1)  # [T, B, outputs]

    def changed_rows(core_state=core_state, **changes):
        outputs = torch.cat([x.reshape(T, B, -1) for x in net({**inputs, **changes}, core_state)[:2]], dim=-1)
        return (outputs != before).any(-1)  # NaN differs from everything

    # The last reward and action of one row show in it, and with a core in the rows after it, too.
    last_reward, last_action = reward.clone(), action.clone()
    last_reward[4], last_action[4] = torch.nan, 2
    for changes in ({"reward": last_reward}, {"action": last_action}):
        changed = changed_rows(**changes)
        assert not changed[:4].any() and not changed[:, 0].any()
        assert changed[4, 1:].all() and changed[5:, 1:].all() == (core != "none")
    if core != "none":
        changed = changed_rows(core_state=tuple(torch.full_like(part, torch.nan) for part in core_state))
        assert changed[:4, 0].all() and not changed[4:, 0].any()
        assert not changed[:, 1].any() and changed[:, 2].all()


@pytest.mark.parametrize("shape", [(10, 10, 4), (3, 40, 40)])
def test_images_are_centered_by_the_last_rows_of_the_batches_observed_before(shape):
    space, flags = {"obs": spaces.Box(0, 255, shape, np.uint8)}, monobeast.Flags(hidden_size=32, reward_clip=1.0)
    torch.manual_seed(1)
    net = monobeast.Net(space, spaces.Discrete(2), flags)
    inputs = {"reward": torch.zeros(T, B), "action": torch.zeros(T, B, dtype=torch.int64)}
    inputs["done"] = torch.zeros(T, B, dtype=torch.bool)
    last_rows = []
    for _ in range(3):
        inputs["obs"] = {"obs": torch.randint(256, (T, B, *shape), dtype=torch.uint8)}
        statistics = copy.deepcopy(net.state_dict())
        acting, values, _ = copy.deepcopy(net).eval()(inputs, ())
        with torch.no_grad():
            net(inputs, ())
        net.eval()(inputs, ())
        torch.testing.assert_close(net.train()(inputs, ())[:2], (acting, values), rtol=0, atol=0)
        torch.testing.assert_close(net.state_dict(), statistics, rtol=0, atol=0)

        net.observe(inputs["obs"])
        last_rows.append(inputs["obs"]["obs"][-1] / 255)
        seen = torch.cat(last_rows)
        seen = seen if shape[0] == 3 else seen.permute(0, 3, 1, 2)
        center = net.encoders[0].center
        unit = seen.std(0, correction=0) + (0.2 if shape[0] == 3 else 0.01)  # a grid's numbers may all be small
        torch.testing.assert_close(center.scale, 1 / 255 / (unit + 1e-5 * seen.mean(0)), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(center.mean, seen.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(center.variance, seen.var(0, correction=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", ["shallow", "deep"])
@pytest.mark.parametrize("image, channels", [
    ((210, 160, 3), 3), ((3, 210, 160), 3), ((4, 84, 84), 4), ((10, 10, 10), 10),
    ((7, 7, 20), 20), ((20, 7, 7), 20), ((10, 10, 16), 16), ((7, 9, 40), 40),  # more channels than pixels in a row
    ((5, 5, 16), 16), ((6, 7, 2), 2), ((5, 5, 5), 5), ((5, 7, 26), 26), ((84, 84, 128), 128),
    ((3, 30, 320), 3), ((30, 320, 3), 3), ((12, 30, 320), 12), ((3, 16, 100), 3), ((1, 8, 64), 1),  # wide
    ((84, 84), 1), ((30, 320), 1), ((4, 64, 64, 3), 12), ((4, 3, 64, 64), 12), ((4, 84, 84, 1), 4),
    ((2, 3, 30, 320), 6),
])  # fmt: skip
def test_convolutions_slide_over_height_and_width(image, channels, net):
    flags = monobeast.Flags(hidden_size=32, reward_clip=1.0, net=net)
    net = monobeast.Net({"obs": spaces.Box(0, 255, image, np.uint8)}, spaces.Discrete(2), flags)
    assert net.encoders[0].convolutions[0].in_channels == channels


def test_the_images_of_a_stack_lie_in_the_channels_one_after_the_other():
    images = torch.randint(256, (T, B, 2, 40, 50, 3), dtype=torch.uint8)
    for x in (images, images.movedim(-1, -3)):  # channels last, and first
        seen = Observations(spaces.Box(0, 255, x.shape[2:], np.uint8), True, False)(x)
        assert torch.equal(seen, images.movedim(-1, -3).flatten(2, 3) * (1 / 255))
    gray = torch.rand(T, B, 40, 50)
    assert torch.equal(Observations(spaces.Box(0, 1, (40, 50)), True, False)(gray), gray.unsqueeze(2))


def test_the_channels_that_a_flag_names_are_those_of_the_net_and_older_runs_guess_as_they_did():
    for channels, found in (("auto", 6), ("first", 6), ("last", 320), ("legacy", 320)):
        flags = monobeast.Flags(hidden_size=32, reward_clip=1.0, channels=channels)
        net = monobeast.Net({"obs": spaces.Box(0, 255, (6, 30, 320), np.uint8)}, spaces.Discrete(2), flags)
        assert net.encoders[0].convolutions[0].in_channels == found
    for shape in ((84, 84), (4, 64, 64, 3)):
        assert is_image(spaces.Box(0, 255, shape, np.uint8)) and not is_image(spaces.Box(0, 255, shape), "legacy")


@pytest.mark.parametrize("space", [
    spaces.Box(0, 255, (21, 79), np.uint8), spaces.Box(-np.inf, np.inf, (50, 30)), spaces.Box(0, 255, (8, 8), np.uint8),
    spaces.MultiDiscrete(np.full((40, 40, 3), 2)), spaces.Box(0, 255, (40,), np.uint8), spaces.Discrete(3),
    spaces.Box(0, 1, (3, 3, 2), np.int8), spaces.Box(0, 255, (4, 9, 3), np.uint8), spaces.MultiBinary((2, 4, 4)),
])  # fmt: skip
def test_matrices_boards_text_screens_and_categories_are_no_images(space):
    assert not is_image(space)


@pytest.mark.parametrize("dtype, largest", [(np.float32, 255), (np.float64, 1), (np.int64, 255), (np.uint16, 65535)])
@pytest.mark.parametrize("normalize", [True, False])
def test_images_of_any_numbers_with_bounds_are_seen_as_those_of_bytes_are(dtype, largest, normalize):
    images = torch.randint(256, (T, B, 40, 40, 3), dtype=torch.uint8)
    theirs = (images * (largest / 255)).to(torch.from_numpy(np.zeros(1, dtype)).dtype)
    seen = []
    for x, space in (
        (images, spaces.Box(0, 255, (40, 40, 3), np.uint8)), (theirs, spaces.Box(0, largest, (40, 40, 3), dtype)),
    ):  # fmt: skip
        center = Observations(space, True, normalize)
        center.observe(x)
        seen.append(center(x))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=1e-3)


def test_older_weights_of_images_that_are_no_bytes_see_the_numbers_as_they_were():
    space, x = spaces.Box(0, 255, (40, 40, 3)), 255 * torch.rand(T, B, 40, 40, 3)
    flags = monobeast.validate(monobeast.Flags(hidden_size=32, reward_clip=1.0))
    net = monobeast.Net({"obs": space}, spaces.Discrete(2), flags)
    statistics = ("count", "mean", "variance", "scale", "offset", "unit")
    state = {name: y for name, y in net.state_dict().items() if name.split(".")[-1] not in statistics}
    for _ in range(2):
        net = monobeast.Net({"obs": space}, spaces.Discrete(2), flags)
        checkpoint.load_weights(net, state, "older.pt")
        net.observe({"obs": x})
        assert torch.equal(net.encoders[0].center(x), x.movedim(-1, -3))
        state = net.state_dict()


@pytest.mark.parametrize("dtype, high", [(np.int8, 100), (np.int32, 10**6), (np.int64, 10**9), (np.uint8, 200)])
def test_vectors_of_integers_reach_the_net_as_their_twins_of_floats_do(dtype, high):
    x = torch.randint(100, (T, B, 4))
    seen = []
    for space in (spaces.Box(0, high, (4,), dtype), spaces.Box(-np.inf, np.inf, (4,))):
        center = Observations(space, False, True)
        center.observe(x.to(torch.from_numpy(np.zeros(1, space.dtype)).dtype))
        seen.append(center(x))
    torch.testing.assert_close(seen[0], seen[1], rtol=0.05, atol=0.05)
    assert seen[0].std() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("agent", [monobeast, r2d2])
def test_the_start_line_names_what_becomes_of_each_part_of_an_observation(agent):
    parts = {
        "camera": spaces.Box(0, 255, (3, 30, 320), np.uint8), "numbers": spaces.Box(-1, 1, (3,)),
        "kind": spaces.Discrete(60_000),
    }  # fmt: skip
    flags = agent.Flags(hidden_size=32, reward_clip=1.0) if agent is monobeast else agent.Flags(hidden_size=32)
    told = describe_encoders(agent.Net(parts, spaces.Discrete(2), flags))
    assert told == [
        "camera [3, 30, 320] by convolutions over 3 channels of 30 x 320", "numbers [3] by an MLP",
        "kind 60,000 one-hot numbers by an MLP, which makes the net slow: show it fewer numbers, or give it an "
        "embedding",
    ]  # fmt: skip
    assert describe_encoders(torch.nn.Linear(1, 1)) == []


def test_the_last_reward_reaches_the_net_in_the_scale_of_the_loss():
    space = {"obs": spaces.Box(-1, 1, (2,))}
    inputs = {"obs": {"obs": torch.zeros(1, 3, 2)}, "done": torch.zeros(1, 3, dtype=torch.bool)}
    inputs |= {"action": torch.zeros(1, 3, dtype=torch.int64), "reward": torch.tensor([[0.4, 4.0, -40.0]])}
    seen = []
    net = monobeast.Net(space, spaces.Discrete(2), monobeast.Flags(hidden_size=32, reward_clip=0.0, reward_scale=0.1))
    net.policy.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    net(inputs, ())
    torch.testing.assert_close(seen[0][0, :, -3], torch.tensor([0.04, 0.4, -1.0]))


@pytest.mark.parametrize("space", [
    spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 4]),
    spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[5, 0], [0, 7]]),
])  # fmt: skip
def test_choices_are_observed_one_hot_whatever_their_shape(space):
    flags = monobeast.Flags(hidden_size=32, reward_clip=1.0)
    net, seen = monobeast.Net({"obs": space}, spaces.Discrete(2), flags), []
    net.encoders[0].head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    space.seed(1)
    observed = [space.sample() for _ in range(T * B)]
    net(vector_inputs(torch.as_tensor(np.stack(observed)).view(T, B, *space.shape)), ())
    expected = np.stack([spaces.flatten(space, x) for x in observed])
    np.testing.assert_array_equal(seen[0].flatten(0, 1), expected)


FLOATS, NUMBERS = spaces.Box(-np.inf, np.inf, (2, 3), np.float64), spaces.Box(0, 255, (4,), np.uint8)


def net_of_vectors(part: spaces.Box = FLOATS, **changes) -> monobeast.Net:
    torch.manual_seed(1)
    flags = monobeast.validate(monobeast.Flags(hidden_size=32, reward_clip=1.0, **changes))
    return monobeast.Net({"numbers": NUMBERS, "obs": part}, spaces.Discrete(2), flags)


def vector_inputs(obs: torch.Tensor) -> dict:
    zeros = torch.zeros(obs.shape[:2])
    other = torch.full((*obs.shape[:2], 4), 255, dtype=torch.uint8)
    return {"obs": {"numbers": other, "obs": obs}, "reward": zeros, "done": zeros.bool(), "action": zeros.long()}


def test_vectors_of_floats_reach_the_net_in_units_of_their_running_deviation_clipped_to_10():
    net, seen = net_of_vectors(), []
    for encoder in net.encoders:
        encoder.head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    all_rows = []
    for update in range(3):
        obs = torch.randn(T, B, 2, 3, dtype=torch.float64) * torch.tensor([1e-2, 1.0, 1e3]) + update
        net.eval()(vector_inputs(obs), ())
        net.train()(vector_inputs(obs), ())
        net.observe(vector_inputs(obs)["obs"])
        numbers, before, numbers_again, trained = seen[-4:]
        assert numbers.eq(1).all() and numbers_again.eq(1).all(), "an integer has its own unit"
        assert torch.equal(before, trained), "the statistics are those of earlier batches"
        all_rows.append(obs.flatten(2).flatten(0, 1).float())
        rows = torch.cat(all_rows)
        net.eval()(vector_inputs(obs), ())
        expected = (all_rows[-1] - rows.mean(0)) / (rows.std(0, correction=0) + 1e-4)
        torch.testing.assert_close(seen[-1].flatten(0, 1), expected.clamp(-10, 10), rtol=1e-3, atol=1e-3)
    net(vector_inputs(torch.tensor([-1e9, 1e9, torch.inf, -torch.inf, torch.nan, 0]).view(1, 1, 2, 3)), ())
    clipped = seen[-1].flatten()
    assert clipped[:2].tolist() == [-10, 10] and not clipped[2:5].isfinite().any(), "a bad update still shows"


def test_numbers_that_are_not_finite_stay_out_of_the_running_statistics():
    center = net_of_vectors().encoders[1].center
    x = torch.randn(T, B, 6)
    center.observe(x)
    mean, variance = center.mean.clone(), center.variance.clone()
    center.observe(torch.full((T, B, 6), torch.nan))
    center.observe(torch.full((T, B, 6), torch.inf))
    center.observe(torch.full((T, B, 6), 3e38))  # has no square
    torch.testing.assert_close(center.mean, mean)
    assert (center.variance > 0).all() and (center.variance <= variance).all()


def test_a_large_constant_becomes_0_up_to_rounding():
    center = net_of_vectors().encoders[1].center
    for _ in range(5):
        center.observe(12345.678 + torch.zeros(T, B, 6))
    assert center(12345.678 + torch.zeros(T, B, 6)).abs().max() < 0.05


def test_vectors_are_left_as_they_are_without_normalize_observations():
    net, obs = net_of_vectors(normalize_observations=False), torch.randn(T, B, 2, 3, dtype=torch.float64)
    assert not [*net.encoders[1].center.buffers()]
    assert torch.equal(net.encoders[1].center(obs), obs.flatten(2).float())
    before = net(vector_inputs(obs), ())[:2]
    net.observe(vector_inputs(obs)["obs"])
    torch.testing.assert_close(net(vector_inputs(obs), ())[:2], before, rtol=0, atol=0)


def test_older_weights_without_statistics_stay_without_them_in_every_later_checkpoint():
    older, obs = net_of_vectors(normalize_observations=False), 5 + torch.randn(T, B, 2, 3, dtype=torch.float64)
    expected = older(vector_inputs(obs), ())[:2]
    state = older.state_dict()
    for _ in range(2):
        net = net_of_vectors()
        assert net.encoders[1].center.mean is not None
        assert not checkpoint.differences(net, state)
        checkpoint.load_weights(net, state, "older.pt")
        for _ in range(2):
            torch.testing.assert_close(net(vector_inputs(obs), ())[:2], expected, rtol=0, atol=0)
            net.observe(vector_inputs(obs)["obs"])
        state = net.state_dict()


def test_image_statistics_begin_anew_where_only_the_image_has_another_shape(tmp_path):
    flags = monobeast.validate(monobeast.Flags(hidden_size=32))
    older, net = (
        monobeast.Net({"obs": spaces.Box(0, 255, (channels, 36, 36), np.uint8)}, spaces.Discrete(2), flags)
        for channels in (4, 1)
    )
    checkpoint.save(tmp_path / "older.pt", {"net": older.state_dict()})
    assert "center.mean" in checkpoint.load_fitting_weights(net, tmp_path / "older.pt")
    assert torch.equal(net.encoders[0].head[0].weight, older.encoders[0].head[0].weight)
    assert net.encoders[0].center.count is not None and net.encoders[0].center.count == 0


def test_statistics_begin_anew_beside_weights_of_another_shape(tmp_path):
    older = net_of_vectors(spaces.Box(-1, 1, (5,), np.float32))
    older.observe(vector_inputs(torch.randn(T, B, 5))["obs"])
    checkpoint.save(tmp_path / "older.pt", {"net": older.state_dict()})
    net = net_of_vectors()
    told = checkpoint.load_fitting_weights(net, tmp_path / "older.pt")
    assert "encoders.1.center.mean [5] (this net has [6])" in told
    assert torch.equal(net.encoders[0].head[0].weight, older.encoders[0].head[0].weight)
    assert net.encoders[1].center.count == 0
    net = net_of_vectors()
    net.observe(vector_inputs(torch.randn(T, B, 2, 3))["obs"])
    assert net.encoders[1].center.count == T * B
    checkpoint.save(tmp_path / "newer.pt", {"net": net.state_dict()})
    fresh = net_of_vectors()
    checkpoint.load_fitting_weights(fresh, tmp_path / "newer.pt")
    torch.testing.assert_close(fresh.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_separate_values_have_encoders_of_their_own_and_no_core():
    space, flags = spaces.Box(-1, 1, (2,)), monobeast.Flags(hidden_size=32, value_net="separate", reward_clip=1.0)
    net = monobeast.Net({"obs": space}, spaces.Discrete(3), flags)
    inputs = {"obs": {"obs": torch.randn(4, 5, 2)}, "done": torch.zeros(4, 5, dtype=torch.bool)}
    inputs |= {"action": torch.zeros(4, 5, dtype=torch.int64), "reward": torch.zeros(4, 5)}
    for output, own, other in ((0, net.encoders, net.value_encoders), (1, net.value_encoders, net.encoders)):
        net.zero_grad()
        net(inputs, ())[output].square().sum().backward()
        assert all(weight.grad is None for weight in other.parameters())
        assert all(weight.grad.abs().sum() > 0 for weight in own.parameters())
    net.observe(inputs["obs"])
    assert net.encoders[0].center.count == net.value_encoders[0].center.count == 4 * 5, "both follow what they see"
    shared = monobeast.Net({"obs": space}, spaces.Discrete(3), monobeast.Flags(hidden_size=32, reward_clip=1.0))
    assert not shared.value_encoders and not any("value" in name for name in shared.state_dict())
    with pytest.raises(InputError, match="--value_net separate --core gru: values would have no memory"):
        monobeast.validate(monobeast.Flags(value_net="separate", core="gru"))


def test_continuous_actions_begin_with_the_deviation_that_was_asked_for():
    flags = monobeast.Flags(hidden_size=32, initial_std=0.5, reward_clip=1.0)
    net = monobeast.Net({"obs": spaces.Box(-1, 1, (2,))}, spaces.Box(-3, 3, (4,)), flags).eval()
    inputs = {"obs": {"obs": torch.randn(1, 5, 2)}, "done": torch.zeros(1, 5, dtype=torch.bool)}
    logits, _, _ = net(inputs | {"action": torch.zeros(1, 5, 4), "reward": torch.zeros(1, 5)}, ())
    torch.testing.assert_close(logits.chunk(2, dim=-1)[1].exp(), torch.full((1, 5, 4), 0.5), rtol=0.1, atol=0)
    with pytest.raises(InputError, match="--initial_std 8.0: it must lie between 0.0068 and 7.38"):
        monobeast.validate(monobeast.Flags(initial_std=8.0))


@pytest.mark.parametrize("value_net", ["shared", "separate"])
def test_what_one_part_of_an_observation_means_may_depend_on_another(value_net):
    """The right action, and the value, say whether the two parts are equal. No sum over the parts can tell."""
    torch.manual_seed(1)
    flags = monobeast.validate(monobeast.Flags(hidden_size=32, reward_clip=1.0, value_net=value_net))
    net = monobeast.Net({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}, spaces.Discrete(2), flags)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    a, b = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
    inputs = {"obs": {"a": a, "b": b}, "reward": torch.zeros(1, 4), "action": 0 * a, "done": torch.ones(1, 4).bool()}
    equal = (a == b)[0].long()
    for _ in range(200):
        logits, values, _ = net(inputs, ())
        loss = torch.nn.functional.cross_entropy(logits[0], equal) + (values[0] - equal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (logits[0].argmax(-1) == equal).all() and (values[0] - equal).abs().max() < 0.2


def test_images_are_flattened_in_the_order_height_width_channels():
    flags, seen = monobeast.Flags(hidden_size=32, reward_clip=1.0), []
    net = monobeast.Net({"obs": spaces.Box(0, 255, (4, 44, 44), np.uint8)}, spaces.Discrete(2), flags)
    encoder = net.encoders[0]
    encoder.convolutions.register_forward_hook(lambda *x: seen.append(x[2]))
    encoder.head.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    encoder(torch.randint(256, (1, 3, 4, 44, 44), dtype=torch.uint8))
    assert seen[0].shape[2:] == (2, 2) and torch.equal(seen[1], seen[0].permute(0, 2, 3, 1).flatten(1))


def test_a_residual_block_adds_to_what_it_gets_and_the_nature_net_has_its_size():
    block, x = ResidualBlock(3), torch.randn(2, 3, 5, 5)
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(block(x), x)
    flags = monobeast.Flags(reward_clip=1.0, normalize_returns="off")
    net = monobeast.Net({"obs": spaces.Box(0, 255, (4, 84, 84), np.uint8)}, spaces.Discrete(6), flags)
    convolutions = (8 * 8 * 4 + 1) * 32 + (4 * 4 * 32 + 1) * 64 + (3 * 3 * 64 + 1) * 64
    heads = (512 + 6 + 1 + 1) * (6 + 1)  # of features, last action and last reward
    assert sum(p.numel() for p in net.parameters()) == convolutions + (7 * 7 * 64 + 1) * 512 + heads


def test_an_lstm_begins_by_remembering():
    assert Core("lstm", 3, 4).bias_ih_l0.tolist() == [0] * 4 + [1] * 4 + [0] * 8


def test_a_net_computes_in_bf16_only_where_it_has_images_or_an_lstm():
    for space, core, expected in (
        (spaces.Box(-1, 1, (3,)), "none", False),
        (spaces.Box(-1, 1, (3,)), "gru", False),
        (spaces.Box(-1, 1, (3,)), "lstm", True),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), "none", True),
    ):
        net = monobeast.Net({"obs": space}, spaces.Discrete(3), monobeast.Flags(reward_clip=1.0, core=core), amp=True)
        acting = acting_copy(net)
        assert net.amp == expected and (torch.bfloat16 in {x.dtype for x in acting.parameters()}) == expected
