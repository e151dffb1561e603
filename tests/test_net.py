"""What the net takes from its inputs: nothing across the beginning of an episode, images centered by those before."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

import monobeast

T, B = 7, 3


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_a_row_sees_the_past_but_for_the_first_row_of_an_episode_which_sees_nothing_of_it(core):
    flags = monobeast.Flags(hidden_size=32, core=core, core_size=5, reward_clip=1.0)
    torch.manual_seed(1)
    net = monobeast.Net({"obs": spaces.Box(-1, 1, (2,))}, spaces.Discrete(3), flags)
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
def test_a_training_pass_centers_images_by_those_of_earlier_passes_and_then_takes_in_its_last_row(shape):
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
        torch.testing.assert_close(net.state_dict(), statistics, rtol=0, atol=0)
        torch.testing.assert_close(net.train()(inputs, ())[:2], (acting, values), rtol=0, atol=0)

        last_rows.append(inputs["obs"]["obs"][-1] / 255)
        seen = torch.cat(last_rows)
        seen = seen if shape[0] == 3 else seen.permute(0, 3, 1, 2)
        center = net.encoders[0].center
        torch.testing.assert_close(center.mean, seen.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(center.variance, seen.var(0, correction=0), rtol=1e-4, atol=1e-5)
