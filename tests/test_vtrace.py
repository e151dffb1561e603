"""V-trace against its definition, against literal numbers, and against episodes computed one by one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from beast import vtrace

ROLLOUT_STEPS = 12
COLUMNS = 6


# --- the formula ---------------------------------------------------------------------------------------------------


def vtrace_by_definition(inputs, rho_clip, pg_rho_clip, lambda_):
    """Equation 1 as it stands, in numpy float64: for each s the sum over t of the products of discounts and c's."""
    log_rhos, discounts, rewards, values, bootstrap = (tensor.double().numpy() for tensor in inputs.values())
    steps = len(values)
    rhos = np.exp(log_rhos)
    clipped_rhos = rhos if rho_clip is None else np.minimum(rho_clip, rhos)
    pg_rhos = rhos if pg_rho_clip is None else np.minimum(pg_rho_clip, rhos)
    traces = lambda_ * np.minimum(1.0, rhos)
    all_values = np.concatenate([values, bootstrap[None]])
    deltas = clipped_rhos * (rewards + discounts * all_values[1:] - values)
    targets = all_values.copy()
    for s in range(steps):
        for t in range(s, steps):
            targets[s] += np.prod(discounts[s:t] * traces[s:t], axis=0) * deltas[t]
    return targets[:-1], pg_rhos * (rewards + discounts * targets[1:] - values)


def random_inputs(seed, steps=9, trailing=(4,)):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    done = torch.rand((steps, *trailing), generator=generator) < 0.2
    return {
        "log_rhos": 1.5 * normal(steps, *trailing),
        "discounts": 0.97 * (~done).float(),
        "rewards": normal(steps, *trailing),
        "values": 3 * normal(steps, *trailing),
        "bootstrap_value": 3 * normal(*trailing),
    }


def assert_close(seen, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(seen), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lambda_", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(("rho_clip", "pg_rho_clip"), [(1.0, 1.0), (3.7, 2.2), (0.5, 1.0), (None, None), (1.0, None)])
def test_vtrace_is_the_double_sum_of_its_definition(rho_clip, pg_rho_clip, lambda_):
    for seed in range(5):
        inputs = random_inputs(seed)
        seen = vtrace.from_importance_weights(
            **inputs, clip_rho_threshold=rho_clip, clip_pg_rho_threshold=pg_rho_clip, lambda_=lambda_
        )
        targets, advantages = vtrace_by_definition(inputs, rho_clip, pg_rho_clip, lambda_)
        assert_close(seen.vs, targets)
        assert_close(seen.pg_advantages, advantages)


def test_on_policy_vtrace_is_the_n_step_return():
    inputs = random_inputs(3)
    inputs["log_rhos"].zero_()
    seen = vtrace.from_importance_weights(**inputs)
    expected = inputs["bootstrap_value"]
    for t in reversed(range(len(inputs["values"]))):
        expected = inputs["rewards"][t] + inputs["discounts"][t] * expected
        assert_close(seen.vs[t], expected)
        assert_close(seen.pg_advantages[t], expected - inputs["values"][t])


def test_three_steps_by_hand():
    inputs = {
        "log_rhos": torch.tensor([[math.log(0.5)], [math.log(4.0)], [math.log(1.5)]]),
        "discounts": torch.tensor([[0.9], [0.8], [0.5]]),
        "rewards": torch.tensor([[1.0], [2.0], [3.0]]),
        "values": torch.tensor([[10.0], [20.0], [30.0]]),
        "bootstrap_value": torch.tensor([40.0]),
    }
    seen = vtrace.from_importance_weights(**inputs, clip_rho_threshold=2.0, clip_pg_rho_threshold=3.0, lambda_=0.5)

    vs_2 = 30 + 1.5 * (3 + 0.5 * 40 - 30)
    vs_1 = 20 + 2.0 * (2 + 0.8 * 30 - 20) + 0.8 * (0.5 * 1.0) * (vs_2 - 30)
    vs_0 = 10 + 0.5 * (1 + 0.9 * 20 - 10) + 0.9 * (0.5 * 0.5) * (vs_1 - 20)
    assert_close(seen.vs[:, 0], [vs_0, vs_1, vs_2])
    assert_close(
        seen.pg_advantages[:, 0],
        [0.5 * (1 + 0.9 * vs_1 - 10), 3.0 * (2 + 0.8 * vs_2 - 20), 1.5 * (3 + 0.5 * 40 - 30)],
    )


def test_one_step_by_hand():
    seen = vtrace.from_importance_weights(
        torch.zeros(1, 1), torch.full((1, 1), 0.99), torch.ones(1, 1), torch.full((1, 1), 2.0), torch.full((1,), 3.0)
    )
    assert_close(seen.vs, [[1 + 0.99 * 3]])
    assert_close(seen.pg_advantages, [[1 + 0.99 * 3 - 2]])


def test_a_weight_of_zero_leaves_the_value_and_stops_the_trace_without_nan():
    inputs = random_inputs(5)
    inputs["discounts"].fill_(0.97)
    inputs["log_rhos"][4] = -math.inf
    seen = vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert seen.vs.isfinite().all() and seen.pg_advantages.isfinite().all()
    assert torch.equal(seen.vs[4], inputs["values"][4])
    assert (seen.pg_advantages[4] == 0).all()

    inputs["rewards"][4:] += 1000
    after = vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert torch.equal(seen.vs[:5], after.vs[:5])
    assert not torch.equal(seen.vs[5:], after.vs[5:])


def test_bfloat16_inputs_are_computed_in_float32():
    rounded = {name: tensor.bfloat16() for name, tensor in random_inputs(1, steps=20).items()}
    seen = vtrace.from_importance_weights(**rounded)
    expected = vtrace.from_importance_weights(**{name: tensor.float() for name, tensor in rounded.items()})
    assert seen.vs.dtype == seen.pg_advantages.dtype == torch.float32
    assert torch.equal(seen.vs, expected.vs) and torch.equal(seen.pg_advantages, expected.pg_advantages)
    doubles = vtrace.from_importance_weights(**{name: tensor.double() for name, tensor in rounded.items()})
    assert doubles.vs.dtype == doubles.pg_advantages.dtype == torch.float32

    logits = torch.randn(20, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    actions = torch.zeros(20, 4, dtype=torch.int64)
    assert torch.equal(vtrace.action_log_probs(logits, actions), logits.float().log_softmax(-1)[..., 0])


def test_inputs_are_not_changed():
    inputs = random_inputs(2)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)


def test_targets_carry_no_gradient():
    inputs = {name: tensor.requires_grad_() for name, tensor in random_inputs(0).items()}
    seen = vtrace.from_importance_weights(**inputs)
    assert not seen.vs.requires_grad and not seen.pg_advantages.requires_grad


def test_trailing_dimensions_are_computed_one_by_one():
    inputs = random_inputs(7, trailing=(4, 3))
    inputs["log_rhos"] = inputs["log_rhos"][..., :1]
    inputs["discounts"] = inputs["discounts"][..., :1]
    seen = vtrace.from_importance_weights(**inputs)
    assert seen.vs.shape == seen.pg_advantages.shape == (9, 4, 3)
    for index in range(3):
        one = {name: tensor[..., min(index, tensor.shape[-1] - 1)] for name, tensor in inputs.items()}
        targets, advantages = vtrace_by_definition(one, 1.0, 1.0, 1.0)
        assert_close(seen.vs[..., index], targets)
        assert_close(seen.pg_advantages[..., index], advantages)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_rhos", (9, 4, 1)),
        ("log_rhos", (9,)),
        ("log_rhos", (9, 1)),
        ("discounts", (9, 3)),
        ("discounts", (1, 4)),
        ("rewards", (8, 4)),
        ("rewards", (10, 4)),
        ("bootstrap_value", (1, 4)),
        ("bootstrap_value", (3,)),
        ("bootstrap_value", ()),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(name, shape):
    inputs = random_inputs(0)
    inputs[name] = torch.zeros(shape)
    with pytest.raises(ValueError) as error:
        vtrace.from_importance_weights(**inputs)
    expected = [4] if name == "bootstrap_value" else [9, 4]
    assert f"{name} has shape {list(shape)}" in str(error.value) and f"{expected}" in str(error.value)


def test_arrays_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"values has shape \[9\], expected rank 2"):
        vtrace.from_importance_weights(**random_inputs(0, trailing=()))


def test_from_logits_weighs_by_the_ratio_of_both_softmaxes():
    generator = torch.Generator().manual_seed(4)
    behavior, target = torch.randn(2, 9, 4, 5, generator=generator)
    target.requires_grad_()
    actions = torch.randint(5, (9, 4), generator=generator)
    inputs = random_inputs(4)
    del inputs["log_rhos"]
    seen = vtrace.from_logits(
        behavior, target, actions, **inputs, clip_rho_threshold=2.0, clip_pg_rho_threshold=1.5, lambda_=0.8
    )

    def taken(logits):
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
        return (probabilities * (torch.arange(5) == actions[..., None])).sum(-1).log()

    assert_close(seen.behavior_action_log_probs, taken(behavior))
    assert_close(seen.target_action_log_probs.detach(), taken(target.detach()))
    assert_close(seen.log_rhos.detach(), taken(target.detach()) - taken(behavior))
    targets, advantages = vtrace_by_definition({"log_rhos": seen.log_rhos.detach(), **inputs}, 2.0, 1.5, 0.8)
    assert_close(seen.vs, targets)
    assert_close(seen.pg_advantages, advantages)
    assert not seen.vs.requires_grad and not seen.pg_advantages.requires_grad
    assert seen.target_action_log_probs.requires_grad


def test_from_logits_refuses_logits_that_do_not_fit():
    inputs = random_inputs(0)
    del inputs["log_rhos"]
    logits, actions = torch.zeros(9, 4, 5), torch.zeros(9, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"behavior_policy_logits has shape \[9, 4, 6\].*\[9, 4, 5\]"):
        vtrace.from_logits(torch.zeros(9, 4, 6), logits, actions, **inputs)
    with pytest.raises(ValueError, match=r"\[9, 4, 5\].*num_actions.*\[9, 4, 1\]"):
        vtrace.from_logits(logits, logits, actions[..., None], **inputs)


# --- the rows of a rollout -----------------------------------------------------------------------------------------


@dataclass
class Episode:
    """Observations 0..steps and the transitions between them, known apart from any rollout."""

    values: np.ndarray  # [steps + 1]: V of each observation, the final one included
    rewards: np.ndarray  # [steps]
    log_rhos: np.ndarray  # [steps]
    terminated: bool  # else truncated

    @property
    def steps(self) -> int:
        return len(self.rewards)


@dataclass
class Rows:
    """One environment's endless column of rows, and whose they are: `observed[t]` is (episode, step) of x_t."""

    done: list = field(default_factory=list)
    terminated: list = field(default_factory=list)
    truncated: list = field(default_factory=list)
    rewards: list = field(default_factory=list)
    values: list = field(default_factory=list)
    log_rhos: list = field(default_factory=list)  # of the transition that begins at the row
    observed: list = field(default_factory=list)

    def append(self, done, terminated, truncated, reward, value, log_rho, observed):
        self.done.append(done)
        self.terminated.append(terminated)
        self.truncated.append(truncated)
        self.rewards.append(reward)
        self.values.append(value)
        self.log_rhos.append(log_rho)
        self.observed.append(observed)


def random_episodes(rng, count):
    episodes = []
    for _ in range(count):
        steps = int(rng.integers(1, 8))
        episodes.append(
            Episode(
                values=3 * rng.normal(size=steps + 1),
                rewards=rng.normal(size=steps),
                log_rhos=rng.normal(size=steps),
                terminated=bool(rng.random() < 0.5),
            )
        )
    return episodes


def lay_out(episodes, autoreset):
    """The rows a vector environment shows of these episodes, one after the other."""
    rows = Rows()
    ending, last_reward = None, 0.0
    for number, episode in enumerate(episodes):
        same_step_ending = ending if autoreset == "same_step" else None
        for step in range(episode.steps):
            rows.append(
                done=step == 0,
                terminated=step == 0 and same_step_ending == "terminated",
                truncated=step == 0 and same_step_ending == "truncated",
                reward=episode.rewards[step - 1] if step > 0 else last_reward,
                value=episode.values[step],
                log_rho=episode.log_rhos[step],
                observed=(number, step),
            )
        ending = "terminated" if episode.terminated else "truncated"
        last_reward = episode.rewards[-1]
        if autoreset == "next_step":
            last = episode.steps
            rows.append(
                done=False,
                terminated=episode.terminated,
                truncated=not episode.terminated,
                reward=last_reward,
                value=episode.values[last],
                log_rho=5.0,  # an action that nobody took: nothing may depend on it
                observed=(number, last),
            )
            last_reward = 1e4  # gymnasium reports 0 at the reset; nothing may depend on that either
    return rows


def rollout_of(columns, starts):
    """Rows start..start+T of each column, stacked: name -> [T+1, B]."""
    batch = {}
    for name in ("done", "terminated", "truncated", "rewards", "values", "log_rhos"):
        cut = [getattr(rows, name)[start : start + ROLLOUT_STEPS + 1] for rows, start in zip(columns, starts)]
        dtype = torch.bool if name in ("done", "terminated", "truncated") else torch.float32
        batch[name] = torch.tensor(np.array(cut).T, dtype=dtype)
    return batch


def learner_targets(batch, gamma, **options):
    """What a learner does with a batch [T+1, B]."""
    mask, discounts = vtrace.transition_masks(batch["done"], batch["terminated"], batch["truncated"], gamma)
    log_rhos = batch["log_rhos"][:-1].masked_fill(~mask, -math.inf)
    returns = vtrace.from_importance_weights(
        log_rhos, discounts, batch["rewards"][1:], batch["values"][:-1], batch["values"][-1], **options
    )
    return mask, returns


def episode_targets(episode, first, stop, autoreset, gamma, lambda_=1.0):
    """Equation 1 over the transitions first..stop-1 of one episode by itself: (vs, advantage) of each."""
    values = episode.values.copy()
    if stop == episode.steps and (episode.terminated or autoreset == "same_step"):
        values[stop] = 0.0  # ended; a same-step reset leaves no final observation, whatever the reason was
    weights = np.minimum(1.0, np.exp(episode.log_rhos))
    deltas = weights * (episode.rewards + gamma * values[1:] - values[:-1])
    targets = values.copy()
    for s in range(first, stop):
        for t in range(s, stop):
            targets[s] += gamma ** (t - s) * np.prod(lambda_ * weights[s:t]) * deltas[t]
    return [
        (targets[s], weights[s] * (episode.rewards[s] + gamma * targets[s + 1] - values[s])) for s in range(first, stop)
    ]


def kind_of(episode, step, stop):
    """Which row of the matrix a transition is."""
    if step == episode.steps:
        return "void"
    if step + 1 == episode.steps:
        return "termination" if episode.terminated else "truncation"
    return "end of unroll" if step + 1 == stop else "ordinary step"


def expected_targets(columns, episodes, starts, autoreset, gamma, **options):
    """Every transition of the rollout, computed episode by episode: {(t, b): (kind, vs, advantage)}."""
    expected = {}
    for b, (rows, start) in enumerate(zip(columns, starts)):
        t = 0
        while t < ROLLOUT_STEPS:
            number, first = rows.observed[start + t]
            episode = episodes[b][number]
            if first == episode.steps:
                expected[t, b] = ("void", episode.values[first], 0.0)
                t += 1
                continue
            stop = min(episode.steps, first + ROLLOUT_STEPS - t)
            for step, target in enumerate(episode_targets(episode, first, stop, autoreset, gamma, **options), first):
                expected[t, b] = (kind_of(episode, step, stop), *target)
                t += 1
    return expected


def random_rollout(seed, autoreset, on_policy=False):
    rng = np.random.default_rng(seed)
    episodes = [random_episodes(rng, 20) for _ in range(COLUMNS)]
    if on_policy:
        for episode in (episode for column in episodes for episode in column):
            episode.log_rhos[:] = 0.0
    columns = [lay_out(column, autoreset) for column in episodes]
    starts = [int(rng.integers(len(rows.done) - ROLLOUT_STEPS)) for rows in columns]
    return episodes, columns, starts


both_conventions = pytest.mark.parametrize("autoreset", ["next_step", "same_step"])


@both_conventions
@pytest.mark.parametrize("options", [{}, {"lambda_": 0.9}])
def test_a_rollout_gives_each_step_what_its_episode_alone_gives(autoreset, options):
    gamma, kinds = 0.97, Counter()
    for seed in range(30):
        episodes, columns, starts = random_rollout(seed, autoreset)
        mask, seen = learner_targets(rollout_of(columns, starts), gamma, **options)
        expected = expected_targets(columns, episodes, starts, autoreset, gamma, **options)
        for (t, b), (kind, target, advantage) in expected.items():
            assert bool(mask[t, b]) == (kind != "void")
            assert seen.vs[t, b].item() == pytest.approx(target, rel=1e-4, abs=1e-4), (kind, t, b)
            assert seen.pg_advantages[t, b].item() == pytest.approx(advantage, rel=1e-4, abs=1e-4), (kind, t, b)
            kinds[kind, "first" if t == 0 else "last" if t == ROLLOUT_STEPS - 1 else "inside"] += 1
    for kind in ("termination", "truncation", "ordinary step", "end of unroll", "void"):
        met = {place for seen_kind, place in kinds if seen_kind == kind}
        possible = {
            "ordinary step": {"first", "inside"},  # the last is an end of unroll
            "end of unroll": {"last"},
            "void": {"first", "inside", "last"} if autoreset == "next_step" else set(),
        }
        assert met == possible.get(kind, {"first", "inside", "last"}), kind


@both_conventions
def test_on_policy_every_target_is_the_discounted_return_of_its_own_episode(autoreset):
    gamma = 0.9
    for seed in range(10):
        episodes, columns, starts = random_rollout(seed, autoreset, on_policy=True)
        mask, seen = learner_targets(rollout_of(columns, starts), gamma)
        for b, (rows, start) in enumerate(zip(columns, starts)):
            for t in range(ROLLOUT_STEPS):
                number, step = rows.observed[start + t]
                episode = episodes[b][number]
                stop = min(episode.steps, step + ROLLOUT_STEPS - t)
                ended = stop == episode.steps and (episode.terminated or autoreset == "same_step")
                value = 0.0 if ended and step < stop else episode.values[stop]
                for reward in reversed(episode.rewards[step:stop]):
                    value = reward + gamma * value
                assert seen.vs[t, b].item() == pytest.approx(value, rel=1e-4, abs=1e-4)
                assert bool(mask[t, b]) == (step < episode.steps)  # a void row keeps its value


@both_conventions
def test_no_value_or_reward_crosses_into_another_episode(autoreset):
    for seed in range(10):
        _, columns, starts = random_rollout(seed, autoreset)
        batch = rollout_of(columns, starts)
        _, before = learner_targets(batch, 0.97)
        for b, (rows, start) in enumerate(zip(columns, starts)):
            owners = [rows.observed[start + t][0] for t in range(ROLLOUT_STEPS + 1)]
            for changed in sorted(set(owners)):
                touched = {name: tensor.clone() for name, tensor in batch.items()}
                for t, owner in enumerate(owners):
                    if owner == changed:
                        touched["values"][t, b] += 1e5
                    if t > 0 and owners[t - 1] == changed:  # the reward at a row is of the transition into it
                        touched["rewards"][t, b] -= 1e5
                _, after = learner_targets(touched, 0.97)
                for t, owner in enumerate(owners[:-1]):
                    if owner != changed:
                        assert after.vs[t, b] == before.vs[t, b]
                        assert after.pg_advantages[t, b] == before.pg_advantages[t, b]
                    elif not (batch["terminated"] | batch["truncated"])[t, b] or batch["done"][t, b]:
                        assert after.vs[t, b] != before.vs[t, b]


@both_conventions
def test_the_last_step_of_an_unroll_has_a_gradient_and_a_void_transition_has_none(autoreset):
    voids = 0
    for seed in range(10):
        _, columns, starts = random_rollout(seed, autoreset)
        batch = rollout_of(columns, starts)
        batch["log_rhos"].zero_()
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(ROLLOUT_STEPS, COLUMNS, 3, generator=generator).requires_grad_()
        actions = torch.randint(3, (ROLLOUT_STEPS, COLUMNS), generator=generator)
        values = batch["values"].requires_grad_()
        mask, returns = learner_targets(batch, 0.97)
        policy_loss = -(vtrace.action_log_probs(logits, actions) * returns.pg_advantages).sum()
        value_loss = 0.5 * (returns.vs - values[:-1]).square().sum()
        (policy_loss + value_loss).backward()
        policy_gradient, value_gradient = logits.grad.abs().sum(-1), values.grad[:-1].abs()
        assert (policy_gradient[~mask] == 0).all() and (value_gradient[~mask] == 0).all()
        assert (policy_gradient[mask] > 0).all() and (value_gradient[mask] > 0).all()
        assert mask[-1].any()  # so the line above was about the last step too
        voids += int((~mask).sum())
    assert (voids > 0) == (autoreset == "next_step")


def test_masks_and_discounts_of_the_four_rows_by_hand():
    def flags(*rows):
        return torch.tensor(rows, dtype=torch.bool).unsqueeze(1)

    # first, ordinary, terminated, first, truncated, first, last row of the unroll
    mask, discounts = vtrace.transition_masks(
        done=flags(1, 0, 0, 1, 0, 1, 0),
        terminated=flags(0, 0, 1, 0, 0, 0, 0),
        truncated=flags(0, 0, 0, 0, 1, 0, 0),
        gamma=0.5,
    )
    assert mask[:, 0].tolist() == [True, True, False, True, False, True]
    assert discounts[:, 0].tolist() == [0.5, 0.0, 0.0, 0.5, 0.0, 0.5]
    assert discounts.dtype == torch.float32

    # the same episodes when an environment resets in the step that ends an episode
    mask, discounts = vtrace.transition_masks(
        done=flags(1, 0, 1, 1, 0),
        terminated=flags(0, 0, 1, 0, 0),
        truncated=flags(0, 0, 0, 1, 0),
        gamma=0.5,
    )
    assert mask[:, 0].tolist() == [True, True, True, True]
    assert discounts[:, 0].tolist() == [0.5, 0.0, 0.0, 0.5]


def test_flags_that_are_not_bool_or_not_of_one_shape_are_refused():
    flags = torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="truncated has dtype torch.uint8"):
        vtrace.transition_masks(flags, flags, flags.byte(), 0.99)
    with pytest.raises(ValueError, match=r"terminated has shape \[4, 2\].*\[5, 2\]"):
        vtrace.transition_masks(flags, flags[1:], flags, 0.99)
    with pytest.raises(ValueError, match=r"done has shape \[1, 2\], expected \[T\+1, B\]"):
        vtrace.transition_masks(flags[:1], flags[:1], flags[:1], 0.99)
    with pytest.raises(ValueError, match=r"done has shape \[5\]"):
        vtrace.transition_masks(flags[:, 0], flags[:, 0], flags[:, 0], 0.99)
