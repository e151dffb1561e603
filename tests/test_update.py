"""One update of the weights, and the two loops around it: what `infer` answers and what `learn` publishes."""

from __future__ import annotations

import copy
import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lock_step import stand_in

import monobeast
from beast.errors import InputError
from beast.learn.distributions import distribution
from beast.learn.learner import Counted, Learner
from beast.learn.nests import map_tensors
from beast.learn.normalization import ReturnMoments, ValueHead
from beast.learn.published import PublishedWeights

OBSERVATIONS, ACTIONS = {"obs": spaces.Box(-1.0, 1.0, (3,), np.float32)}, spaces.Discrete(2)


def new_flags(**changes) -> monobeast.Flags:
    defaults = {"hidden_size": 32, "core_size": 5, "learning_rate": 0.1, "total_steps": 1000, "reward_clip": 1.0}
    defaults["normalize_observations"] = False  # or every update changes what the net sees
    return monobeast.Flags(**{**defaults, **changes})


def new_net(flags: monobeast.Flags) -> monobeast.Net:
    torch.manual_seed(1)
    return monobeast.Net(OBSERVATIONS, ACTIONS, flags)


def rows(seed: int, T: int = 6, B: int = 4) -> dict:
    """Random rows [T, B, …] of episodes that do not end."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "obs": {"obs": torch.randn(T, B, 3, generator=generator)},
        "reward": torch.randn(T, B, generator=generator),
        "action": torch.randint(2, (T, B), generator=generator),
        "policy_logits": torch.randn(T, B, 2, generator=generator),
        "policy_version": torch.zeros(T, B, dtype=torch.int32),
        **{name: torch.zeros(T, B, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
    }


@pytest.mark.parametrize("grad_clip, is_clipped", [(0.0, False), (0.01, True), (1e6, False)])
def test_each_update_is_a_step_along_the_clipped_gradient_of_its_own_batch(grad_clip, is_clipped):
    flags = new_flags(grad_clip=grad_clip)
    net = new_net(flags)
    learner = Learner(net, torch.optim.SGD(net.parameters(), lr=flags.learning_rate), max_bad_updates=1)
    learner.steps = 250  # of 1000: three quarters of the learning rate are left
    for seed in range(3):
        loss, *_ = monobeast.compute_loss(flags, net, rows(seed), ())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        assert norm > 0.02
        before = [parameter.detach().clone() for parameter in net.parameters()]
        outcome = monobeast.update(flags, learner, rows(seed), ())
        scale = 0.75 * flags.learning_rate * (grad_clip / norm if is_clipped else 1.0)
        for parameter, old, gradient in zip(net.parameters(), before, gradients):
            torch.testing.assert_close(old - parameter, scale * gradient, rtol=1e-3, atol=1e-3 * scale * norm)
        assert outcome.grad_norm.item() == pytest.approx(norm, rel=1e-5), "before the clip"
        assert outcome.metrics["losses/total_loss"].item() == pytest.approx(loss.item()) and not outcome.is_bad


@pytest.mark.parametrize(
    "lr_decay, steps, left",
    [("linear", 0, 1.0), ("linear", 100, 0.9), ("linear", 1000, 0.0), ("linear", 1100, 0.0), ("none", 900, 1.0)],
)
def test_the_learning_rate_decays_to_0_at_the_total_steps_or_stays(lr_decay, steps, left):
    flags = new_flags(lr_decay=lr_decay)
    net = new_net(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    learner.steps = steps
    monobeast.update(flags, learner, rows(0), ())
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(left * flags.learning_rate)


def test_the_groups_of_parameters_in_the_recipes_decay_alike_through_a_resumption():
    flags = new_flags()
    page = Path(monobeast.__file__).parent / "docs" / "recipes.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)

    def new_learner(flags) -> Learner:
        names = {"net": new_net(flags), "flags": flags, "torch": torch}
        exec(code, names)
        return Learner(names["net"], names["optimizer"], max_bad_updates=1)

    def rates(learner) -> list[float]:
        monobeast.update(flags, learner, rows(0), ())
        return [group["lr"] for group in learner.optimizer.param_groups]

    learner = new_learner(flags)
    for steps, left in ((0, 1.0), (500, 0.5)):
        learner.steps = steps
        assert rates(learner) == pytest.approx([left * flags.learning_rate, 0.1 * left * flags.learning_rate])
    resumed = new_learner(dataclasses.replace(flags, learning_rate=0.02))
    resumed.load_state_dict(learner.state_dict())
    assert [group["lr"] for group in resumed.optimizer.param_groups] == pytest.approx([0.02, 0.002])
    assert rates(resumed) == pytest.approx([0.01, 0.001]), "a resumed run may have another rate"


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("fault", ["reward", "loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_changes_neither_weights_nor_moments(monkeypatch, optimizer, fault):
    flags = new_flags(optimizer=optimizer)
    net = new_net(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    monobeast.update(flags, learner, rows(0), ())

    def state():
        return copy.deepcopy([*net.parameters()]), copy.deepcopy(learner.optimizer.state_dict()["state"])

    def faulty(flags, net, batch, core_state, original=monobeast.compute_loss):
        loss, returns, metrics = original(flags, net, batch, core_state)
        if fault == "loss":  # and its gradient is what it was
            return loss + torch.inf, returns, {**metrics, "losses/total_loss": loss.detach() + torch.inf}
        bias = net.baseline.bias  # the loss is what it was, its gradient is infinite
        return loss + (bias - bias.detach()).sqrt().sum(), returns, metrics

    before, batch = state(), rows(1)
    with monkeypatch.context() as patched:
        if fault == "reward":
            batch["reward"][2, 3] = torch.nan
        else:
            patched.setattr(monobeast, "compute_loss", faulty)
        outcome = monobeast.update(flags, learner, batch, ())
    assert outcome.is_bad
    assert outcome.metrics["losses/total_loss"].isfinite() == (fault == "gradient")
    assert outcome.grad_norm.isfinite() == (fault == "loss")
    torch.testing.assert_close(state(), before, rtol=0, atol=0)

    assert not monobeast.update(flags, learner, rows(2), ()).is_bad
    assert any(not torch.equal(old, parameter) for old, parameter in zip(before[0], net.parameters()))
    assert all(parameter.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_epochs_are_as_many_steps_on_one_batch_with_targets_of_their_own_and_count_as_one_update(core):
    flags = new_flags(epochs=3, core=core, normalize_returns="on")
    core_state = tuple(torch.randn_like(part) for part in new_net(flags).initial_state(4))
    once, net = new_net(flags), new_net(flags)
    stepped = Learner(once, monobeast.make_optimizer(flags, once), max_bad_updates=1)
    single = dataclasses.replace(flags, epochs=1)
    outcomes = [monobeast.update(single, stepped, rows(0), core_state) for _ in range(3)]
    assert len({step.metrics["losses/return_mean"].item() for step in outcomes}) == 3, "targets follow values"

    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    training = stand_in(flags=flags, learner=learner, record=lambda numbers: None, finished=lambda: True)
    weights = types.SimpleNamespace(publish=lambda net, version: None)
    feed = types.SimpleNamespace(rollouts=lambda: iter([(rows(0), core_state)]))
    monobeast.learn(training, feed, weights)
    torch.testing.assert_close(net.state_dict(), once.state_dict(), rtol=0, atol=0)
    assert (learner.updates, learner.steps) == (1, 5 * 4)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_minibatches_are_steps_on_columns_of_the_batch_dealt_anew_in_each_epoch(core):
    flags = new_flags(epochs=2, minibatches=3, core=core, normalize_returns="on")
    core_state = tuple(torch.randn_like(part) for part in new_net(flags).initial_state(4))
    expected, net = new_net(flags), new_net(flags)
    learners = [Learner(each, monobeast.make_optimizer(flags, each), max_bad_updates=1) for each in (expected, net)]
    torch.manual_seed(5)
    deals = [torch.randperm(4) for _ in range(flags.epochs)]
    assert not torch.equal(*deals)
    single = dataclasses.replace(flags, epochs=1, minibatches=1)
    for dealt in (part for deal in deals for part in (deal[:2], deal[2:3], deal[3:])):
        part, state = map_tensors(lambda x, dealt=dealt: x[:, dealt], (rows(0), core_state))
        expected_outcome = monobeast.update(single, learners[0], part, state)
    torch.manual_seed(5)
    last = monobeast.update(flags, learners[1], rows(0), core_state)
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert last == expected_outcome, "the numbers of the last minibatch"


def test_a_run_asks_for_no_more_minibatches_than_a_batch_has_columns():
    with pytest.raises(InputError, match="--minibatches 5: it must lie between 1 and 4; .* raise --batch_width"):
        monobeast.validate(monobeast.Flags(batch_width=4, minibatches=5))


def test_after_a_bad_epoch_the_other_epochs_of_its_update_change_nothing(monkeypatch):
    flags, calls = new_flags(epochs=4), []
    expected, net = new_net(flags), new_net(flags)
    stepped = Learner(expected, monobeast.make_optimizer(flags, expected), max_bad_updates=1)
    monobeast.update(dataclasses.replace(flags, epochs=1), stepped, rows(0), ())

    def bad_second_time(flags, net, batch, core_state, original=monobeast.compute_loss):
        loss, returns, metrics = original(flags, net, batch, core_state)
        calls.append(loss)
        loss = loss * (torch.nan if len(calls) == 2 else 1)
        return loss, returns, {**metrics, "losses/total_loss": loss.detach()}

    monkeypatch.setattr(monobeast, "compute_loss", bad_second_time)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    outcome = monobeast.update(flags, learner, rows(0), ())
    assert len(calls) == 4 and outcome.is_bad and outcome.metrics["losses/total_loss"].isnan()
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_infer_answers_rows_with_what_the_newest_weights_say_and_the_core_state_after_them():
    flags = new_flags(core="gru")
    net = new_net(flags)
    answers = []
    waiting = [
        types.SimpleNamespace(
            inputs=rows(seed, T=1), core_state=(torch.randn(1, 4, 5),), answer=lambda *answer: answers.append(answer)
        )
        for seed in range(2)
    ]
    feed = types.SimpleNamespace(acting=lambda: iter(waiting))
    monobeast.infer(feed, PublishedWeights(net, 7), torch.Generator().manual_seed(3))
    noise = torch.Generator().manual_seed(3)
    for asked, (action, policy_logits, baseline, version, core_state) in zip(waiting, answers, strict=True):
        with torch.no_grad():
            expected = net(asked.inputs, asked.core_state)
        torch.testing.assert_close((policy_logits, baseline, core_state), expected)
        assert torch.equal(action, distribution(ACTIONS, expected[0]).sample(noise))
        assert version == 7 and not policy_logits.requires_grad


def test_learn_updates_on_each_rollout_and_publishes_the_weights_after_it_until_the_run_is_finished():
    flags = new_flags(core="gru")
    batches = [(rows(seed), (torch.randn(1, 4, 5),)) for seed in range(3)]
    straight = new_net(flags)
    learner = Learner(straight, monobeast.make_optimizer(flags, straight), max_bad_updates=1)
    expected = []
    for batch, core_state in batches[:2]:
        learner.count(learner.measure(batch), monobeast.update(flags, learner, batch, core_state))
        expected.append((learner.updates, copy.deepcopy(straight.state_dict())))

    net = new_net(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    recorded, published = [], []
    training = stand_in(flags=flags, learner=learner, record=recorded.append, finished=lambda: len(recorded) == 2)
    weights = types.SimpleNamespace(
        publish=lambda net, version: published.append((version, copy.deepcopy(net.state_dict())))
    )
    monobeast.learn(training, types.SimpleNamespace(rollouts=lambda: iter(batches)), weights)
    torch.testing.assert_close(published, expected, rtol=0, atol=0)
    assert [version for version, _ in published] == [1, 2] and learner.steps == 2 * 5 * 4
    assert all(isinstance(counted, Counted) and not counted.is_bad for counted in recorded)
    assert all(isinstance(counted.metrics["losses/total_loss"], float) for counted in recorded)


def test_the_value_head_follows_the_returns_and_no_value_changes_with_its_statistics():
    torch.manual_seed(1)
    head, features = ValueHead(5), torch.randn(3, 4, 5)
    values = head(features)
    returns = -700 + 160 * torch.randn(5000, 1) + 120 * torch.randn(5000, 80)  # deviation 200, within updates and among
    for update, batch in enumerate(returns):
        head.observe(ReturnMoments(batch.mean(), batch.std(correction=0)), torch.tensor(update % 10 == 0))
        assert update != 0 or (head.deviation == 1 and head.mean == 0), "a bad update leaves them alone"
        head.observe(ReturnMoments(torch.tensor(torch.nan), torch.tensor(torch.inf)), torch.tensor(True))
    assert head.mean.item() == pytest.approx(-700, rel=0.03)
    assert head.deviation.item() == pytest.approx(200, rel=0.12)
    torch.testing.assert_close(head(features), values, rtol=0, atol=0.02)
    for statistic, value in ((head.mean, 1e4), (head.variance, 100.0), (head.deviation, 10.0)):
        statistic.fill_(value)
    for _ in range(3000):  # returns that hardly differ, far from 0
        head.observe(ReturnMoments(torch.tensor(1e4), torch.tensor(10.0)), torch.tensor(False))
        assert head.deviation.item() == pytest.approx(10, rel=0.2)
    head = ValueHead(5)
    for _ in range(10_000):  # a task without any reward
        head.observe(ReturnMoments(torch.tensor(0.0), torch.tensor(0.0)), torch.tensor(False))
    assert head.deviation.item() == pytest.approx(head.LEAST_DEVIATION)


@pytest.mark.parametrize("unit", [1e-2, 1e3])
def test_with_normalized_returns_an_update_is_the_same_in_every_unit_of_the_rewards(unit):
    """Once the statistics are those of the returns, and values too: then only the last reward, an input, tells."""

    def changes(scale: float) -> list[torch.Tensor]:
        flags = new_flags(normalize_returns="on", reward_clip=0.0, optimizer="rmsprop")
        net = new_net(flags)
        net.baseline.mean.fill_(2.0 * scale)
        net.baseline.deviation.fill_(3.0 * scale)
        net.baseline.variance.fill_((3.0 * scale) ** 2)
        learner = Learner(net, torch.optim.SGD(net.parameters(), lr=0.1), max_bad_updates=1)
        batch = rows(0)
        batch["reward"][...] = 5.0 * scale * batch["done"].logical_not()
        batch["done"][...] = True  # no input of the net tells the reward
        before = [parameter.detach().clone() for parameter in net.parameters()]
        monobeast.update(flags, learner, batch, ())
        return [parameter.detach() - old for parameter, old in zip(net.parameters(), before)]

    torch.testing.assert_close(changes(unit), changes(1.0), rtol=1e-3, atol=1e-6)


def test_a_value_head_takes_the_weights_of_one_without_statistics_and_says_the_same():
    torch.manual_seed(1)
    plain, head, features = torch.nn.Linear(5, 1), torch.nn.ModuleList([ValueHead(5)]), torch.randn(3, 4, 5)
    head.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    assert torch.equal(head[0](features), plain(features))


def test_an_update_shows_its_returns_to_the_value_head_unless_it_is_bad():
    flags = new_flags(normalize_returns="on")
    net = new_net(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    outcome = monobeast.update(flags, learner, rows(0), ())
    seen = net.baseline.mean.item()
    assert seen == pytest.approx(net.baseline.RATE * outcome.metrics["losses/return_mean"].item()) != 0
    batch = rows(1)
    batch["reward"][2, 3] = torch.nan
    assert monobeast.update(flags, learner, batch, ()).is_bad
    assert net.baseline.mean.item() == seen


def test_a_batch_of_void_transitions_only_says_nothing_of_the_returns():
    flags = new_flags(normalize_returns="on")
    net = new_net(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    monobeast.update(flags, learner, rows(0), ())
    before = [x.clone() for x in (net.baseline.mean, net.baseline.variance, net.baseline.deviation)]
    batch = rows(1, T=2)
    batch["terminated"][0], batch["done"][1] = True, True  # lives of one step
    monobeast.update(flags, learner, batch, ())
    assert before == [net.baseline.mean, net.baseline.variance, net.baseline.deviation]


def test_a_void_transition_is_no_step():
    batch, net = rows(0), new_net(new_flags())
    batch["terminated"][2, 1] = batch["done"][3, 1] = True  # NEXT_STEP: row 2 is final
    batch["truncated"][2, 2] = batch["done"][2, 2] = batch["truncated"][5, 0] = True  # no void transition
    learner = Learner(net, torch.optim.SGD(net.parameters()), 1)
    assert learner.measure(batch).steps == 5 * 4 - 1


def test_rows_of_other_policies_are_neither_steps_nor_lag_nor_observed():
    flags = new_flags(normalize_observations=True, epochs=2, minibatches=2)
    net, batch = net_of_images_and_vectors(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), 1)
    learner.updates = 5
    counts = torch.zeros(6, 4, dtype=torch.bool)
    counts[:3, 0] = counts[:, 1] = counts[4:, 2] = True
    batch["terminated"][2, 1] = batch["done"][3, 1] = True  # row 2 is final
    batch["policy_version"] = torch.where(counts, 3, -(10**6)).int()
    batch["policy_version"][1, 0] = 1
    measured = learner.measure({**batch, "counts": counts})
    assert measured.steps == 2 + 4 + 2  # transitions to rows that count, but for that from a final row
    assert measured.lag_max == 4 and measured.lag_mean == (4 + 2 * 8) / 9
    monobeast.update(flags, learner, {**batch, "counts": counts}, ())
    images, vectors = (encoder.center for encoder in net.encoders)
    assert images.count == 2 and vectors.count == 3 + 6 + 2
    torch.testing.assert_close(vectors.mean, batch["obs"]["vector"][counts].mean(0))
    torch.testing.assert_close(vectors.variance, batch["obs"]["vector"][counts].var(0, correction=0))
    seen = batch["obs"]["image"][-1, [1, 2]] / 255
    torch.testing.assert_close(images.mean, seen.mean(0))
    torch.testing.assert_close(images.variance, seen.var(0, correction=0))
    before = copy.deepcopy(net.state_dict())
    nothing = {**batch, "counts": torch.zeros_like(counts)}
    assert learner.measure(nothing).steps == 0 and learner.measure(nothing).lag_mean == 0
    net.observe(nothing["obs"], nothing["counts"])
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_the_first_observations_may_be_none_that_count():
    net, batch = net_of_images_and_vectors(new_flags(normalize_observations=True))
    net.observe(batch["obs"], torch.zeros(6, 4, dtype=torch.bool))
    assert all(x.isfinite().all() for x in net.state_dict().values())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_optimizer_has_the_numbers_of_the_flags(optimizer):
    flags = new_flags(optimizer=optimizer, optimizer_epsilon=3e-4, rmsprop_alpha=0.7)
    found = monobeast.make_optimizer(flags, new_net(flags)).defaults
    assert found["eps"] == 3e-4 and found.get("alpha", 0.7) == 0.7


def net_of_images_and_vectors(flags: monobeast.Flags) -> tuple[monobeast.Net, dict]:
    """A net in training mode with all statistics that there are, and a batch for it."""
    torch.manual_seed(1)
    parts = {"image": spaces.Box(0, 255, (2, 12, 12), np.uint8), "vector": OBSERVATIONS["obs"]}
    net, batch = monobeast.Net(parts, ACTIONS, flags), rows(0)
    image = torch.randint(256, (6, 4, 2, 12, 12), dtype=torch.uint8)
    return net, {**batch, "obs": {"image": image, "vector": batch["obs"]["obs"]}}


@pytest.mark.parametrize("changes", [{}, {"core": "lstm"}, {"value_net": "separate"}])
def test_forward_changes_nothing_and_observe_changes_the_statistics_of_observations_alone(changes):
    flags = new_flags(normalize_observations=True, normalize_returns="on", **changes)
    net, batch = net_of_images_and_vectors(flags)
    core_state = tuple(torch.randn_like(part) for part in net.initial_state(4))

    def changed(act) -> set[str]:
        before = copy.deepcopy(net.state_dict())
        act()
        return {name for name, x in net.state_dict().items() if not torch.equal(x, before[name])}

    assert net.training and torch.is_grad_enabled()
    net.observe(batch["obs"])
    assert not changed(lambda: net(batch, core_state)[1].sum().backward())
    assert not changed(lambda: monobeast.compute_loss(flags, net, batch, core_state)[0].backward())
    batch = {**batch, "obs": map_tensors(lambda x: x // 2, batch["obs"])}
    encoders = [f"encoders.{index}" for index in range(2)]
    encoders += [f"value_{encoder}" for encoder in encoders if "value_net" in changes]
    statistics = ("count", "mean", "variance", "scale", "offset")
    expected = {f"{encoder}.center.{name}" for encoder in encoders for name in statistics}
    assert changed(lambda: net.observe(batch["obs"])) == expected
    assert expected < {name for name, _ in net.named_buffers()}


def test_an_update_shows_the_whole_batch_to_its_net_once_after_its_first_pass(monkeypatch):
    flags = new_flags(normalize_observations=True, epochs=3, minibatches=2)
    net, batch = net_of_images_and_vectors(flags)
    learner = Learner(net, monobeast.make_optimizer(flags, net), max_bad_updates=1)
    observed = []

    def observe(observations, counts, original=net.observe):
        observed.append((observations, learner.optimizer.state[net.policy.weight]["step"].item()))
        original(observations, counts)

    monkeypatch.setattr(net, "observe", observe)
    monobeast.update(flags, learner, batch, ())
    ((observations, steps),) = observed
    assert steps == 2 and observations.keys() == batch["obs"].keys()
    assert all(torch.equal(observations[name], x) for name, x in batch["obs"].items())
    assert [encoder.center.count.item() for encoder in net.encoders] == [4, 6 * 4], "of images the last row"
