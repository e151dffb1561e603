"""The loss against its definition, on rows that real groups of environments wrote."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Categorical, Independent, Normal

import monobeast
from beast.envs.groups import EnvGroup
from beast.envs.rows import written_by
from beast.learn.nests import map_tensors

NUM_ENVS = 5
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1.0, 1.0, (2,), np.float32)}
NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
FLAGS = monobeast.Flags(
    hidden_size=32, core_size=6, discount=0.9, vtrace_lambda=0.8, clip_rho=1.5, clip_pg_rho=0.7, reward_scale=0.5,
    reward_clip=1.0, baseline_cost=0.6, entropy_cost=0.05, normalize_observations=False,
)  # fmt: skip


# --- rows ----------------------------------------------------------------------------------------------------------


class Endings(gymnasium.Env):
    """Random observations and rewards. Episodes last 1 to 5 steps and terminate, are truncated, or both at once."""

    observation_space = OBSERVATIONS

    def __init__(self, action_space: spaces.Space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(1, 6))
        self.ending = [(True, False), (False, True), (True, True)][self.np_random.integers(3)]
        return self._observe(), {}

    def step(self, action):
        self.steps_left -= 1
        terminated, truncated = self.ending if self.steps_left == 0 else (False, False)
        return self._observe(), 3 * self.np_random.normal(), terminated, truncated, {}

    def _observe(self):
        return self.np_random.normal(size=3).astype(np.float32)


@functools.lru_cache
def play(autoreset: AutoresetMode, T: int, actions: str = "discrete", has_final_obs: bool = False) -> dict:
    """A batch [T+1, B, …] of consecutive rollouts side by side, played by a random policy."""
    rng, num_steps = np.random.default_rng(0), 20 * T if T > 1 else 40
    group = EnvGroup(SyncVectorEnv([lambda: Endings(ACTIONS[actions])] * NUM_ENVS, autoreset_mode=autoreset))
    rows = []
    for _ in range(num_steps + 1):
        # A row holds the action that led to it and the policy which chose that. Nothing may read those of a reset.
        policy = 0.4 * rng.normal(size=(NUM_ENVS, 4 if actions == "box" else 3)).astype(np.float32)
        if actions == "box":
            action = policy[:, :2] + np.exp(policy[:, 2:]) * rng.normal(size=(NUM_ENVS, 2)).astype(np.float32)
        else:
            action = rng.integers(3, size=NUM_ENVS)
        row = {name: np.zeros(NUM_ENVS, dtype) for name, dtype in written_by("env").items()}
        row |= {"obs": {"obs": np.zeros((NUM_ENVS, 3), np.float32)}, "policy_logits": policy, "action": action}
        if has_final_obs:  # where there is none, nothing may read it
            row["final_obs"] = {"obs": np.full((NUM_ENVS, 3), np.nan, np.float32)}
        group.step(action, row) if rows else group.reset(7, row)
        rows.append(row)
    group.close()

    def side_by_side(*history):  # row 0 of a rollout repeats row T of the one before
        rollouts = [np.stack(history[first : first + T + 1]) for first in range(0, num_steps, T)]
        return torch.from_numpy(np.concatenate(rollouts, axis=1))

    return map_tensors(side_by_side, *rows)


def new_net(flags: monobeast.Flags, actions: str, batch: dict) -> tuple[torch.nn.Module, tuple]:
    """A net that did not choose the batch's actions, and a core's state before row 0."""
    torch.manual_seed(1)
    net = monobeast.Net({"obs": OBSERVATIONS}, ACTIONS[actions], flags)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # a new one has next to no opinion on actions
    if flags.normalize_returns == "on":
        net.baseline.mean.fill_(-2.0)
        net.baseline.deviation.fill_(3.0)
    return net, tuple(torch.randn_like(part) for part in net.initial_state(batch["done"].shape[1]))


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_the_rows_that_the_loss_is_tested_on_hold_every_ending_in_every_place(autoreset, T):
    batch = play(autoreset, T, has_final_obs=autoreset == SAME_STEP)
    terminated, truncated = batch["terminated"], batch["truncated"]
    places = [slice(0, 1), slice(T, T + 1)] + ([slice(1, T)] if T > 1 else [])
    for ending in (terminated & ~truncated, truncated & ~terminated, terminated & truncated):
        assert all(ending[place].any() for place in places)
        assert (ending & batch["done"]).any() == (autoreset == SAME_STEP), "a first row that ends the episode before"
        assert (ending & ~batch["done"]).any() == (autoreset == NEXT_STEP), "a final row, from which nobody acts"
    lengths = batch["episode_step"][(terminated | truncated) & ~batch["done"]]
    assert autoreset == SAME_STEP or set(lengths.tolist()) == {1, 2, 3, 4, 5}
    if autoreset == SAME_STEP:
        final_obs = batch["final_obs"]["obs"]
        assert final_obs[truncated].isfinite().all() and final_obs.isnan().any()


# --- the definition ------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    loss: torch.Tensor
    stats: dict
    ratio: torch.Tensor  # [T, B]
    is_void: torch.Tensor  # [T, B]


def loss_by_definition(flags: monobeast.Flags, net: torch.nn.Module, batch: dict, core_state: tuple) -> Expected:
    """The loss in float64 with its gradient: V-trace by equation 1, transition by transition."""
    policy_parameters, values, final_values = outputs_row_by_row(net, batch, core_state)
    policy, behavior = (policy_of(net.action_space, p) for p in (policy_parameters[:-1], batch["policy_logits"][1:]))
    log_probs = policy.log_prob(batch["action"][1:])
    log_ratio = log_probs - behavior.log_prob(batch["action"][1:])
    ratio = log_ratio.exp()
    void, vs, advantages = targets_by_equation_1(flags, batch, ratio, values, final_values)
    counts = ~void
    count = int(counts.sum())
    if flags.normalize_advantages:
        of_the_update = advantages[counts].numpy()
        advantages = (advantages - of_the_update.mean()) / of_the_update.std()
    if flags.ppo_clip:
        highest, lowest = 1 + flags.ppo_clip, 1 / (1 + flags.ppo_clip)
        gains = advantages * torch.where(advantages > 0, ratio.clamp(max=highest), ratio.clamp(min=lowest))
    else:
        gains = ratio.detach().clamp(max=flags.clip_pg_rho) * advantages * log_probs
    policy_loss = -gains[counts].sum()
    value_loss = (vs - values[:-1])[counts].square().sum() / 2
    if flags.normalize_returns == "on":
        value_loss = value_loss / 3.0**2
    entropy = policy.entropy()[counts].sum()
    loss = policy_loss + flags.baseline_cost * value_loss - flags.entropy_cost * entropy
    is_clipped = (ratio - 1).abs() > (flags.ppo_clip or 0.2)
    errors = (vs - values[:-1])[counts].detach().numpy()
    stats = {
        "losses/return_mean": vs[counts].mean(),
        "losses/return_deviation": vs[counts].std(correction=0),
        "losses/policy_loss": policy_loss / count,
        "losses/value_loss": value_loss / count,
        "losses/entropy": entropy / count,
        "losses/approx_kl": (ratio - 1 - log_ratio)[counts].sum() / count,
        "losses/clipfrac": is_clipped[counts].sum() / count,
        "losses/explained_variance": torch.tensor(1 - errors.var() / vs[counts].numpy().var()),
    }
    loss = loss / count if flags.reduction == "mean" else loss
    return Expected(loss, {name: value.item() for name, value in stats.items()}, ratio.detach(), void)


def outputs_row_by_row(net, batch, core_state):
    """Policy parameters [T+1, B, W] and values [T+1, B] in float64, with a core's state zeroed here where an episode
    begins, and V [T+1, B] of the final observations that same-step resets replaced, or 0."""
    policies, values, final_values = [], [], []
    for t in range(len(batch["done"])):
        row = {name: batch[name][t : t + 1] for name in ("reward", "done", "action")}
        if "final_obs" in batch:
            last = {**row, "obs": {"obs": batch["final_obs"]["obs"][t : t + 1]}, "done": torch.zeros_like(row["done"])}
            final_values.append(net(last, core_state)[1].detach())
        else:
            final_values.append(torch.zeros_like(row["reward"]))
        core_state = tuple(part * ~row["done"].unsqueeze(-1) for part in core_state)
        policy, value, core_state = net({**row, "obs": {"obs": batch["obs"]["obs"][t : t + 1]}}, core_state)
        policies.append(policy)
        values.append(value)
    return (torch.cat(parts).double() for parts in (policies, values, final_values))


def policy_of(action_space, parameters):
    if action_space == ACTIONS["box"]:
        mean, log_std = parameters.double().chunk(2, dim=-1)
        return Independent(Normal(mean, log_std.exp()), 1)
    return Categorical(logits=parameters.double())


def targets_by_equation_1(flags, batch, ratio, values, final_values):
    """For each transition t -> t+1: is it void, v_t of equation 1 (arXiv 1802.01561), and r + gamma v_{t+1} - V_t."""
    T, B = ratio.shape
    gamma, lambda_ = flags.discount, flags.vtrace_lambda
    rewards = flags.reward_scale * batch["reward"].double()
    if flags.reward_clip:
        rewards = rewards.clip(-flags.reward_clip, flags.reward_clip)
    void, vs, advantages = torch.zeros(T, B, dtype=torch.bool), *torch.zeros(2, T, B, dtype=torch.float64)
    is_foreign = (~batch["counts"] if "counts" in batch else torch.zeros(T + 1, B, dtype=torch.bool)).tolist()
    for b in range(B):
        done, terminated, truncated = (batch[name][:, b].tolist() for name in ("done", "terminated", "truncated"))
        r, rho, V, V_final = (x[:, b].tolist() for x in (rewards[1:], ratio, values, final_values))

        def next_value(t):
            if terminated[t + 1]:
                return 0.0
            return V_final[t + 1] if done[t + 1] else V[t + 1]

        def goes_on(t):  # with a transition of the same episode and rollout
            return t + 1 < T and not (terminated[t + 1] or truncated[t + 1] or done[t + 1])

        def temporal_difference(t):
            return min(flags.clip_rho, rho[t]) * (r[t] + gamma * next_value(t) - V[t])

        def v(s):
            stop = s + 1
            while goes_on(stop - 1):
                stop += 1
            c = [lambda_ * min(1.0, rho[t]) for t in range(T)]
            return V[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * temporal_difference(t) for t in range(s, stop))

        for t in range(T):
            void[t, b] = (terminated[t] or truncated[t]) and not done[t] or is_foreign[t + 1][b]
            if not void[t, b]:
                vs[t, b] = v(t)
                advantages[t, b] = r[t] + gamma * (v(t + 1) if goes_on(t) else next_value(t)) - V[t]
    return void, vs, advantages


# --- the loss ------------------------------------------------------------------------------------------------------


def gradients(loss, net):
    return dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters()))))


def with_two_policies(batch: dict) -> tuple[dict, torch.Tensor]:
    """The batch, in which the policy that acts changes at random where a game begins, and whether a row is of the other
    policy's game, bool [T+1, B]. A row's action was chosen at the row before: `counts` says whether by this policy."""
    begins = batch["done"] & (torch.rand(batch["done"].shape, generator=torch.Generator().manual_seed(5)) < 0.5)
    is_foreign = begins.cumsum(0) % 2 == 1
    return {**batch, "counts": ~torch.cat([is_foreign[:1], is_foreign[:-1]])}, is_foreign


def check(autoreset, T, actions="discrete", has_final_obs=False, policies=1, **changes):
    flags = dataclasses.replace(FLAGS, **changes)
    batch = play(autoreset, T, actions, has_final_obs)
    if policies == 2:
        batch, _ = with_two_policies(batch)
        share = batch["counts"][1:].float().mean()
        assert 0.3 < share < 0.95 and (batch["counts"][1:] != batch["counts"][:-1]).any()
    net, core_state = new_net(flags, actions, batch)
    expected = loss_by_definition(flags, net, batch, core_state)
    assert expected.is_void.any() == (autoreset == NEXT_STEP or policies == 2)
    ratio = expected.ratio[~expected.is_void]
    assert (ratio < 0.7).any() and (ratio > 1.5).any(), "every clip of a ratio matters"
    loss, returns, stats = monobeast.compute_loss(flags, net, batch, core_state)
    assert returns == (stats["losses/return_mean"], stats["losses/return_deviation"])
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-4, abs=1e-5)
    seen, wanted = gradients(loss, net), gradients(expected.loss, net)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item(), msg=name)
    for name, value in expected.stats.items():
        assert stats[name].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


every_autoreset = pytest.mark.parametrize(
    "autoreset, has_final_obs",
    [(NEXT_STEP, False), (SAME_STEP, False), (SAME_STEP, True)],
    ids=["next_step", "same_step", "same_step_with_final_obs"],
)


@every_autoreset
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize(
    "ppo_clip, normalize_advantages, reduction", [*itertools.product([0.0, 0.2], [True, False], ["sum", "mean"])]
)
def test_loss_gradients_and_statistics_are_those_of_the_definition(
    autoreset, has_final_obs, T, ppo_clip, normalize_advantages, reduction
):
    check(
        autoreset, T, has_final_obs=has_final_obs, ppo_clip=ppo_clip, normalize_advantages=normalize_advantages,
        reduction=reduction,
    )  # fmt: skip


@every_autoreset
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize(
    "changes",
    [
        {"actions": "box"},
        {"actions": "box", "ppo_clip": 0.0, "core": "lstm"},
        {"core": "lstm"},
        {"normalize_returns": "on"},
        {"core": "gru", "normalize_advantages": False},
        {"vtrace_lambda": 1.0, "clip_rho": 1.0, "clip_pg_rho": 1.0, "ppo_clip": 0.0},
        {"reward_scale": 0.1, "reward_clip": 0.0},
        {"reward_scale": 3.0, "reward_clip": 0.5},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_so_they_are_with_other_actions_cores_clips_and_rewards(autoreset, has_final_obs, T, changes):
    check(autoreset, T, has_final_obs=has_final_obs, **changes)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_final_observations_get_the_core_state_of_their_own_row_however_far_apart_they_are(core):
    """A wide batch has a truncation in every row; in one of a single column most rows have none."""
    flags = dataclasses.replace(FLAGS, core=core, normalize_advantages=False)
    batch = play(SAME_STEP, 7, has_final_obs=True)
    net, all_states = new_net(flags, "discrete", batch)
    first_cuts = set()
    for column in range(20):
        one = map_tensors(lambda x, column=column: x[:, column, None], batch)
        core_state = tuple(part[:, column, None] for part in all_states)
        expected = loss_by_definition(flags, net, one, core_state).loss.item()
        loss, *_ = monobeast.compute_loss(flags, net, one, core_state)
        assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        first_cuts |= set((one["truncated"] & ~one["terminated"])[1:].nonzero()[:1, 0].tolist())
    assert len(first_cuts) > 3


class Watched(torch.nn.Module):
    """A net whose outputs keep their gradients."""

    def __init__(self, net):
        super().__init__()
        self.net, self.action_space = net, net.action_space

    def forward(self, inputs, core_state):
        self.policy, self.values, core_state = self.net(inputs, core_state)
        self.policy.retain_grad()
        self.values.retain_grad()
        return self.policy, self.values, core_state


@pytest.mark.parametrize("ppo_clip", [0.0, 0.2])
@pytest.mark.parametrize("T", [1, 7])
def test_a_final_row_has_no_gradient_nor_has_row_T_and_every_other_row_has_one(T, ppo_clip):
    batch = play(NEXT_STEP, T)
    flags = dataclasses.replace(FLAGS, ppo_clip=ppo_clip)
    net, core_state = new_net(flags, "discrete", batch)
    watched = Watched(net)
    monobeast.compute_loss(flags, watched, batch, core_state)[0].backward()
    final = batch["terminated"] | batch["truncated"]
    assert final[0].any() and final[-2].any() and final[-1].any()
    acted = ~final
    acted[-1] = False
    assert (watched.values.grad[acted] != 0).all() and (watched.values.grad[~acted] == 0).all()
    # Not a clipped ratio but the entropy gives every row its gradient.
    assert (watched.policy.grad[acted] != 0).any(-1).all() and (watched.policy.grad[~acted] == 0).all()


@every_autoreset
@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("ppo_clip", [0.0, 0.2])
def test_where_another_policy_acted_too_the_loss_is_that_of_the_own_transitions(
    autoreset, has_final_obs, core, ppo_clip
):
    check(autoreset, 7, has_final_obs=has_final_obs, policies=2, core=core, ppo_clip=ppo_clip)


@every_autoreset
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_nothing_of_another_policys_rows_reaches_loss_or_gradients(autoreset, has_final_obs, core):
    """Whatever finite numbers they hold, observations included."""
    flags = dataclasses.replace(FLAGS, core=core, normalize_returns="on")
    batch, is_foreign = with_two_policies(play(autoreset, 7, has_final_obs=has_final_obs))
    net, core_state = new_net(flags, "discrete", batch)
    loss, returns, stats = monobeast.compute_loss(flags, net, batch, core_state)
    before = gradients(loss, net)
    changed = map_tensors(torch.clone, batch)
    changed["obs"]["obs"][is_foreign] = 77.0
    changed["reward"][~batch["counts"]] = 1e4
    changed["action"][~batch["counts"]] = 2
    changed["policy_logits"][~batch["counts"]] = torch.tensor([0.0, 0.0, -1e5])
    again, returns_again, stats_again = monobeast.compute_loss(flags, net, changed, core_state)
    assert torch.equal(loss, again) and returns == returns_again and stats == stats_again
    after = gradients(again, net)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("actions", ["discrete", "box"])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_nothing_of_a_void_transition_reaches_loss_or_gradients(core, actions):
    """Neither its action, even one of probability 0, nor who chose it, nor its reward."""
    flags = dataclasses.replace(FLAGS, core=core)
    batch = play(NEXT_STEP, 7, actions).copy()
    net, core_state = new_net(flags, actions, batch)
    loss, _, stats = monobeast.compute_loss(flags, net, batch, core_state)
    before = gradients(loss, net)
    batch |= {name: batch[name].clone() for name in ("reward", "action", "policy_logits")}
    reset = batch["done"]
    batch["reward"][reset] = 1e4
    batch["action"][reset] = 1e3 if actions == "box" else 2
    batch["policy_logits"][reset] = torch.tensor([0.0, 0.0, -4.0, -4.0] if actions == "box" else [0.0, 0.0, -1e5])
    again, _, stats_again = monobeast.compute_loss(flags, net, batch, core_state)
    assert torch.equal(loss, again)
    assert stats == stats_again
    after = gradients(again, net)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_batch_of_nothing_but_void_transitions_has_loss_zero_and_no_gradient():
    batch = play(NEXT_STEP, 1)
    final = (batch["terminated"] | batch["truncated"])[0]
    batch = map_tensors(lambda x: x[:, final], batch)
    net, core_state = new_net(FLAGS, "discrete", batch)
    loss, _, stats = monobeast.compute_loss(FLAGS, net, batch, core_state)
    assert loss.item() == 0 and all(value.isfinite() for value in stats.values())
    assert all((gradient == 0).all() for gradient in gradients(loss, net).values())
