"""R2D2: what is stored is what acted, the targets are those of the equations, and a run ends and resumes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import gymnasium
import lock_step
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments

import beast
import monobeast
import r2d2
from beast.envs.groups import finished_episodes
from beast.envs.probe import probe_env
from beast.envs.spaces import EnvSpaces
from beast.errors import InputError
from beast.feeds.actors import GROUPS_PER_ACTOR, ActorProcesses
from beast.learn.learner import Outcome
from beast.learn.nests import map_tensors
from beast.learn.qlearning import n_step_targets, rescale, rescale_inverse, sequence_priorities
from beast.learn.replay import RatioLimiter, Sample, SequenceReplay, make_replay
from beast.learn.vtrace import transition_masks
from beast.run import evaluation
from beast.run import training as beast_training
from beast.run.evaluation import Evaluations
from benchmarks.learning import TASKS

CPU = torch.device("cpu")
OBSERVATIONS = {"obs": gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)}


small_flags = partial(lock_step.small_flags, r2d2)


def ladder_of(flags: r2d2.Flags, num_groups: int) -> torch.Tensor:
    return r2d2.epsilon_ladder(num_groups, flags.group_width, flags.eval_columns, flags.epsilon)


def same_step_env(flags, num_envs: int, **overrides):
    """Counting, but the next episode begins in the very row that ends one."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    return gymnasium.vector.SyncVectorEnv([toy_envs.Counting] * num_envs, autoreset_mode=mode)


def new_replay(flags: r2d2.Flags, spaces: EnvSpaces, learner: r2d2.QLearner | None = None) -> SequenceReplay:
    """As a run makes it."""
    learner = learner or r2d2.make_learner(flags, spaces)
    sizes = [x.shape[-1] for x in learner.net.initial_state(1)]
    return make_replay(flags, spaces, sizes, GROUPS_PER_ACTOR * flags.num_actors, learner.random)


class LockStep(lock_step.LockStep):
    """With a replay, which the test fills."""

    def __init__(self, flags: r2d2.Flags, create_env=r2d2.create_env):
        num_groups = GROUPS_PER_ACTOR * flags.num_actors
        super().__init__(
            flags,
            create_env,
            lambda flags: r2d2.make_learner(flags, probe_env(create_env, flags)),
            partial(r2d2.act, num_groups=num_groups),
            batch_width=flags.group_width,
        )
        self.replay = new_replay(flags, self.spaces, self.learner)
        self.limiter = RatioLimiter(flags.replay_ratio, flags.batch_width * flags.trained, flags.min_fill)

    def store(self, num_rollouts: int) -> None:
        for rollout, core_state in itertools.islice(self.feed.rollouts(), num_rollouts):
            r2d2.store(self.flags, self.learner, self.replay, self.limiter, rollout, core_state)

    def close(self) -> None:
        self.feed.close()
        self.thread.join()

    def sequences(self) -> np.ndarray:
        return np.flatnonzero(self.replay.tree.leaves)


@pytest.mark.parametrize("core", ["lstm", "gru", "none"])
@pytest.mark.parametrize("create_env", [r2d2.create_env, same_step_env], ids=["NEXT_STEP", "SAME_STEP"])
def test_a_stored_sequence_unrolled_again_from_its_stored_state_gives_the_q_values_that_acted(core, create_env):
    flags = small_flags(core=core, eval_columns=1)
    test = LockStep(flags, create_env)
    test.store(40)
    test.close()
    ids = test.sequences()
    batch, core_state = test.replay.gather(ids, CPU)
    assert set((batch["obs"]["obs"][..., 0] % 100).flatten().tolist()) == {0, 1, 2}, "the last one evaluates"
    assert len(ids) > 50 and batch["done"].any() and batch["truncated"].any() and batch["terminated"].any()
    with torch.no_grad():
        q, best, _ = test.learner.net.eval()(batch, core_state)
    torch.testing.assert_close(q[:-1], batch["policy_logits"][1:], rtol=1e-5, atol=1e-5)
    if core != "none":
        zeroed = test.learner.net(batch, map_tensors(torch.zeros_like, core_state))[0]
        assert not torch.allclose(zeroed[:-1], batch["policy_logits"][1:], atol=1e-3), "the stored state matters"


@pytest.mark.parametrize("backend", ["ale", "beast"])
def test_a_stored_sequence_of_atari_gives_the_q_values_that_acted(backend):
    if backend == "beast":
        pytest.importorskip("libatari", reason="libatari is not built: make libatari")
    flags = small_flags(
        env="BreakoutNoFrameskip-v4", group_width=2, atari_backend=backend, frame_skip=8, episodic_life="on"
    )
    test = LockStep(flags)
    assert test.replay.stack == 4
    test.store(40)
    test.close()
    ids = test.sequences()
    batch, core_state = test.replay.gather(ids, CPU)
    assert (batch["episode_step"][1:] == 0).any(), "a game begins"
    with torch.no_grad():
        q = test.learner.net.eval()(batch, core_state)[0]
    torch.testing.assert_close(q[:-1], batch["policy_logits"][1:], rtol=1e-4, atol=1e-4)


# Targets.


def test_rescaling_is_odd_increasing_exact_in_float32_and_has_its_inverse():
    x = torch.logspace(-6, 4, 2000)
    for h in (rescale, rescale_inverse):
        assert torch.equal(h(-x), -h(x)) and (h(x).diff() > 0).all() and h(torch.zeros(1)) == 0
    torch.testing.assert_close(rescale_inverse(rescale(x)), x, rtol=1e-6, atol=0)
    exact = x.double().sign() * ((x.double().abs() + 1).sqrt() - 1) + 1e-3 * x.double()
    torch.testing.assert_close(rescale(x).double(), exact, rtol=3e-7, atol=0)
    known = rescale(torch.tensor([3.0, 1.0, 100.0]))
    torch.testing.assert_close(known, torch.tensor([1.003, 0.4152136, 9.1498756]))


def targets_by_hand(rewards, values, done, terminated, truncated, gamma, n):
    """One environment's targets, by walking ahead from each row."""
    T, targets = len(rewards), []
    for t in range(T):
        total, factor, row = 0.0, 1.0, t
        for _ in range(n):
            if (terminated[row] or truncated[row]) and not done[row]:  # NEXT_STEP: nobody acts from the last row
                break
            if row == T:
                break
            total += factor * rewards[row]
            row += 1
            if terminated[row] or done[row]:
                factor = 0.0
                break
            factor *= gamma
        targets.append(total + factor * values[row])
    return targets


def test_n_step_targets_are_those_that_walking_ahead_gives_wherever_episodes_end():
    random, gamma = np.random.default_rng(1), 0.9
    T, ends = 8, ("terminated", "truncated")
    cases = 0
    for n, first, second, one, two, mode in itertools.product(
        range(1, 7), range(1, 9), range(1, 9), ends, ends, ("next", "same")
    ):
        flags = {name: np.zeros(T + 2, bool) for name in ("done", *ends)}
        if mode == "next" and abs(first - second) == 1:
            continue  # a row cannot both follow an end and be one
        for row, name in ((first, one), (second, two)):
            flags[name][row] = True
            flags["done"][row + (mode == "next")] = True
        flags = {name: x[: T + 1] for name, x in flags.items()}
        rewards, values = random.normal(size=T), random.normal(size=T + 1)
        expected = targets_by_hand(rewards, values, *flags.values(), gamma, n)
        tensors = [torch.from_numpy(flags[name])[:, None] for name in flags]
        mask, discounts = transition_masks(*tensors, gamma)
        rewards, values = (torch.from_numpy(x).float()[:, None] for x in (rewards, values))
        found = n_step_targets(rewards, discounts, mask, values, n)[:, 0]
        torch.testing.assert_close(
            found[mask[:, 0]].double(), torch.tensor(expected).double()[mask[:, 0]], rtol=1e-5, atol=1e-5
        )
        cases += 1
    assert cases > 2000


@pytest.mark.parametrize(
    "n, terminated, expected", [(1, 9, [91, 182, 273]), (1, 2, [91, 2, 273]), (2, 9, [164.8, 247.7, 273])]
)
def test_n_step_targets_equal_arithmetic_done_by_hand(n, terminated, expected):
    # The values are of rows 1, 2 and 3: that of row 0 is in no target.
    rewards, values = torch.tensor([[1.0], [2], [3]]), torch.tensor([[-1.0], [100], [200], [300]])
    discounts = torch.full((3, 1), 0.9)
    if terminated < 9:
        discounts[terminated - 1] = 0
    found = n_step_targets(rewards, discounts, torch.ones(3, 1, dtype=torch.bool), values, n)
    torch.testing.assert_close(found[:, 0], torch.tensor(expected).float())


def test_a_priority_mixes_the_largest_error_and_the_mean_of_those_that_count():
    errors, mask = torch.tensor([[1.0, 9.0], [-4.0, 9.0], [100.0, 9.0]]), torch.tensor([[1, 0], [1, 0], [0, 0]]).bool()
    torch.testing.assert_close(sequence_priorities(errors, mask, 0.9), torch.tensor([0.9 * 4 + 0.1 * 2.5, 0.0]))


# The loss.


def random_batch(flags: r2d2.Flags, N: int = 6, seed: int = 1) -> tuple[dict, tuple]:
    generator, rows = torch.Generator().manual_seed(seed), flags.burn_in + flags.trained + 1
    ended = torch.rand(rows, N, generator=generator) < 0.15
    ended &= ~torch.cat([torch.zeros(1, N, dtype=torch.bool), ended[:-1]])
    terminated = ended & (torch.rand(rows, N, generator=generator) < 0.5)
    batch = {
        "obs": {"obs": torch.randn(rows, N, 3, generator=generator)},
        "reward": torch.randn(rows, N, generator=generator),
        "action": torch.randint(2, (rows, N), generator=generator),
        "policy_logits": torch.randn(rows, N, 2, generator=generator),
        "policy_version": torch.zeros(rows, N, dtype=torch.int32),
        "terminated": terminated,
        "truncated": ended & ~terminated,
        "done": torch.cat([torch.zeros(1, N, dtype=torch.bool), ended[:-1]]),
        "group": torch.zeros(rows, N, dtype=torch.int64),
    }
    return batch, tuple(torch.randn(1, N, flags.core_size, generator=generator) for _ in range(2))


def new_learner(flags: r2d2.Flags) -> r2d2.QLearner:
    torch.manual_seed(1)
    learner = r2d2.make_learner(flags, EnvSpaces(OBSERVATIONS, gymnasium.spaces.Discrete(2)))
    for parameter in learner.target.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return learner


def batch_of(flags, learner, rows, core_state, weights=None) -> r2d2.Batch:
    """Sequences of a replay, valued by the target network."""
    N = rows["done"].shape[1]
    weights = torch.ones(N) if weights is None else weights
    sample = Sample(np.arange(N), np.zeros(N, np.int64), weights, rows, core_state)
    return r2d2.Batch(sample, learner.target(rows, core_state)[0][flags.burn_in :])


def loss_of(flags, learner, rows, core_state, weights=None):
    batch = batch_of(flags, learner, rows, core_state, weights)
    return r2d2.compute_loss(flags, learner.net, learner.target, batch)


def test_no_gradient_reaches_the_burn_in_and_all_of_it_the_trained_rows():
    flags = small_flags()
    learner, (batch, core_state) = new_learner(flags), random_batch(small_flags())
    batch |= {name: torch.zeros_like(batch["done"]) for name in ("done", "terminated", "truncated")}
    obs = batch["obs"]["obs"].requires_grad_()
    loss_of(flags, learner, batch, core_state)[0].backward()
    assert (obs.grad[: flags.burn_in] == 0).all()
    assert (obs.grad[flags.burn_in : -1].abs().sum((1, 2)) > 0).all()
    assert (obs.grad[-1] == 0).all(), "the last row's value is a target"


def test_the_burn_in_gives_each_net_the_state_before_the_first_trained_row_and_nothing_else():
    flags = small_flags()
    learner, (batch, core_state) = new_learner(flags), random_batch(flags)
    loss, priorities, metrics = loss_of(flags, learner, batch, core_state)
    B = flags.burn_in
    with torch.no_grad():
        before = map_tensors(lambda x: x[:B], batch)
        state, target_state = learner.net(before, core_state)[2], learner.target(before, core_state)[2]
        after = map_tensors(lambda x: x[B:], batch)
        q, target_q = learner.net(after, state)[0], learner.target(after, target_state)[0]
        mask, discounts = transition_masks(after["done"], after["terminated"], after["truncated"], flags.discount)
        values = rescale_inverse(target_q.gather(-1, q.argmax(-1, keepdim=True))[..., 0])
        targets = rescale(n_step_targets(after["reward"][1:], discounts, mask, values, flags.n_steps))
        chosen = q[:-1].gather(-1, after["action"][1:, :, None])[..., 0]
        errors = (targets - chosen) * mask
    assert (target_q.argmax(-1) != q.argmax(-1)).any(), "double Q-learning matters"
    torch.testing.assert_close(loss.detach(), 0.5 * errors.square().sum(0).mean())
    torch.testing.assert_close(priorities, sequence_priorities(errors, mask, 0.9))
    for name, x in (("td_error", errors.abs()), ("q_mean", chosen), ("target_mean", targets)):
        torch.testing.assert_close(metrics[f"losses/{name}"], x[mask].mean())


def test_the_loss_is_a_mean_over_sequences_and_linear_in_their_weights():
    flags = small_flags()
    learner, (batch, core_state) = new_learner(flags), random_batch(flags)
    loss, priorities, _ = loss_of(flags, learner, batch, core_state)
    twice = map_tensors(lambda x: torch.cat([x, x], dim=1), (batch, core_state))
    torch.testing.assert_close(loss_of(flags, learner, *twice)[0], loss)
    one = torch.zeros(6)
    parts = []
    for index in range(6):
        one.zero_()[index] = 3.0
        parts.append(loss_of(flags, learner, batch, core_state, one)[0])
    torch.testing.assert_close(sum(parts), 3 * loss)
    assert (priorities > 0).all()


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_batch_is_drawn_before_the_update_ahead_of_it_but_valued_by_the_newest_target_network(is_ahead):
    flags = small_flags(deterministic=not is_ahead, target_period=2)
    test = LockStep(flags)
    test.store(30)
    test.close()
    learner, replay, expected = test.learner, test.replay, []
    for number in range(6):
        learner.updates = number
        twin = copy.deepcopy(replay)
        sample, target_q = learner.next_batch(flags, replay, CPU)
        for _ in range(1 + (is_ahead and number == 0)):
            expected.append(twin.sample(flags.batch_width, CPU))
        drawn = expected[number]
        values = learner.target(drawn.rows, drawn.core_state)[0][flags.burn_in :]
        assert (sample.ids == drawn.ids).all() and torch.equal(sample.weights, drawn.weights)
        assert torch.equal(sample.rows["obs"]["obs"], drawn.rows["obs"]["obs"]) and torch.equal(target_q, values)
        replay.update(np.arange(40), replay.generation_of(np.arange(40)), np.linspace(0, 10, 40) ** (number % 3))
        with torch.no_grad():
            for parameter in learner.net.parameters():
                parameter += 0.1
    assert len(expected) == 6 + is_ahead and len({tuple(drawn.ids) for drawn in expected}) == len(expected)


def test_a_failure_while_a_batch_is_prepared_ends_the_run_when_the_next_rollout_comes():
    test = LockStep(small_flags(deterministic=False))
    test.store(30)
    test.learner.updates = 1
    test.learner.next_batch(test.flags, test.replay, CPU)
    test.learner.wait_for_batch()

    def fail(*arguments):
        raise RuntimeError("the target network failed")

    test.learner.target.forward = fail
    test.learner.next_batch(test.flags, test.replay, CPU)
    with pytest.raises(RuntimeError, match="the target network failed"):
        test.store(1)
    test.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_inference_and_the_target_network_yield_to_the_learner():
    flags = small_flags(deterministic=False, actor_niceness=3)
    test = LockStep(flags)
    test.store(1)
    helper = test.learner.helper.submit(threading.get_native_id).result()
    own, *others = (os.getpriority(os.PRIO_PROCESS, thread) for thread in (0, test.thread.native_id, helper))
    assert others == [min(own + 3, 19)] * 2
    test.close()


def test_rows_of_a_batch_that_is_being_prepared_are_not_overwritten(monkeypatch):
    flags = small_flags(deterministic=False, replay_sequences=40)
    test = LockStep(flags)
    test.store(30)
    test.replay.arrays["reward"].fill(7)  # no other row has such a reward
    gather = test.replay.gather

    def gather_slowly(*arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1)
        return gather(*arguments, **options)

    monkeypatch.setattr(test.replay, "gather", gather_slowly)
    test.learner.updates = 1
    test.learner.next_batch(flags, test.replay, CPU)
    test.store(2 * test.replay.num_blocks)
    test.close()
    sample, _ = test.learner.next_batch(flags, test.replay, CPU)
    assert (test.replay.generation_of(sample.ids) != sample.generations).all(), "all of it was overwritten afterwards"
    assert (sample.rows["reward"] == 7).all()


def test_a_bad_batch_changes_no_weights_and_takes_only_what_has_no_finite_error_out_of_the_replay():
    flags = small_flags()
    learner, (batch, core_state) = new_learner(flags), random_batch(flags)
    batch["obs"]["obs"][6, 2] = torch.nan
    before = copy.deepcopy(learner.net.state_dict())
    outcome, priorities = r2d2.update(flags, learner, batch_of(flags, learner, batch, core_state))
    assert outcome.is_bad and priorities[2] == 0, "nothing to train on"
    assert priorities[[0, 1, 3, 4, 5]].isnan().all(), "the replay drops a NaN"
    assert all(torch.equal(before[name], x) for name, x in learner.net.state_dict().items())
    batch["obs"]["obs"][6, 2] = 0.0
    outcome, priorities = r2d2.update(flags, learner, batch_of(flags, learner, batch, core_state))
    assert not outcome.is_bad and (priorities > 0).all()
    assert not torch.equal(before["value.2.weight"], learner.net.state_dict()["value.2.weight"])


def test_the_target_network_is_copied_every_so_many_updates_buffers_included_and_rests_between():
    flags = small_flags(target_period=3, normalize_observations=True)
    learner, (batch, core_state) = new_learner(flags), random_batch(flags)
    sample = batch_of(flags, learner, batch, core_state).sample
    replay = types.SimpleNamespace(sample=lambda count, device: sample)
    for number in range(7):
        online = copy.deepcopy(learner.net.state_dict())
        kept = copy.deepcopy(learner.target.state_dict())
        learner.updates = number
        r2d2.update(flags, learner, learner.next_batch(flags, replay, CPU))
        expected = online if number % 3 == 0 else kept
        assert all(torch.equal(expected[name], x) for name, x in learner.target.state_dict().items()), number
        assert any("center" in name for name in expected)
    resumed = r2d2.make_learner(flags, EnvSpaces(OBSERVATIONS, gymnasium.spaces.Discrete(2)))
    learner.random.random(5)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    kept = learner.target.state_dict()
    assert all(torch.equal(kept[name], x) for name, x in resumed.target.state_dict().items()), "it is saved"
    assert not torch.equal(kept["value.0.weight"], learner.net.state_dict()["value.0.weight"])
    assert resumed.random.random() == learner.random.random()


def test_a_truncated_episode_bootstraps_from_its_own_last_observation_where_the_next_one_lies_in_its_place():
    flags = small_flags(n_steps=3, rescale=False)
    learner, (batch, core_state) = new_learner(flags), random_batch(flags, N=3)
    batch |= {name: torch.zeros_like(batch["done"]) for name in ("done", "terminated", "truncated")}
    B = flags.burn_in
    for row, column in ((B + 3, 0), (B + 6, 0), (B + 5, 2)):
        batch["done"][row, column] = batch["truncated"][row, column] = True
    batch["done"][B + 4, 1] = batch["terminated"][B + 4, 1] = True
    last = {"obs": torch.randn_like(batch["obs"]["obs"])}
    with torch.no_grad():
        _, priorities_cut, _ = loss_of(flags, learner, batch, core_state)
        _, priorities, _ = loss_of(flags, learner, batch | {"final_obs": last}, core_state)
        assert priorities[0] != priorities_cut[0] and priorities[1] == priorities_cut[1]

        def value(row: int, column: int) -> torch.Tensor:
            """By the same rows in the other convention: the last observation has a row of its own."""
            rows = map_tensors(lambda x: x[: row + 1, column : column + 1].clone(), batch)
            rows["obs"]["obs"][row], rows["done"][row] = last["obs"][row, column], False
            state = tuple(x[:, column : column + 1] for x in core_state)
            q_net, q_target = (net(rows, state)[0] for net in (learner.net, learner.target))
            return q_target[-1, 0, q_net[-1, 0].argmax()]

        found = r2d2.final_values(
            learner.net, learner.target, map_tensors(lambda x: x[B:], batch | {"final_obs": last}),
            *(r2d2.burn_in(flags, net, batch, core_state) for net in (learner.net, learner.target)), lambda x: 3 * x,
        )  # fmt: skip
        expected = torch.zeros_like(found)
        for row, column in ((3, 0), (6, 0), (5, 2)):
            expected[row - 1, column] = 3 * value(B + row, column)  # rescaled
    torch.testing.assert_close(found, expected)


def test_an_update_weighs_its_sequences_and_values_last_observations_by_the_target_network():
    flags = small_flags(n_steps=1)
    learner, (batch, core_state) = new_learner(flags), random_batch(flags, N=4)
    batch["done"][flags.burn_in + 3] = batch["truncated"][flags.burn_in + 3] = True
    batch["terminated"][flags.burn_in + 3] = False
    batch["final_obs"] = {"obs": torch.randn_like(batch["obs"]["obs"])}
    weights = torch.tensor([1.0, 0.5, 0.25, 0.125])
    with torch.no_grad():
        expected, priorities, _ = loss_of(flags, learner, batch, core_state, weights)
        drawn = batch_of(flags, learner, batch, core_state, weights)
    outcome, found = r2d2.update(flags, learner, drawn)
    torch.testing.assert_close((outcome.metrics["losses/total_loss"], found), (expected, priorities))


def test_the_loss_adds_the_rescaled_value_of_a_truncated_last_observation_to_its_reward():
    flags = small_flags(n_steps=1)
    learner, (batch, core_state) = new_learner(flags), random_batch(flags, N=1)
    batch |= {name: torch.zeros_like(batch["done"]) for name in ("done", "terminated", "truncated")}
    row = flags.burn_in + 3
    batch["done"][row] = batch["truncated"][row] = True
    for name in ("done", "truncated", "terminated"):
        batch[name][row + 3] = True  # a termination all the same
    last = {"obs": torch.randn_like(batch["obs"]["obs"])}
    with torch.no_grad():
        loss, loss_cut = (loss_of(flags, learner, x, core_state)[0] for x in (batch | {"final_obs": last}, batch))
        # The rows of this episode, the last observation among them.
        rows = {name: x[: row + 1] for name, x in batch.items() if name != "obs"}
        rows["done"] = torch.zeros_like(rows["done"])
        rows["obs"] = {"obs": torch.cat([batch["obs"]["obs"][:row], last["obs"][row : row + 1]])}
        q, target_q = (net(rows, core_state)[0][:, 0] for net in (learner.net, learner.target))
        value = rescale_inverse(target_q[-1, q[-1].argmax()])
        reward, chosen = batch["reward"][row, 0], q[-2, batch["action"][row, 0]]
        error, error_cut = (rescale(x) - chosen for x in (reward + flags.discount * value, reward))
    torch.testing.assert_close(loss - loss_cut, 0.5 * (error.square() - error_cut.square()))


def test_initial_priorities_are_those_of_the_loss_where_both_networks_are_the_one_that_acted():
    flags = small_flags()
    test = LockStep(flags)
    test.store(20)
    test.close()
    ids = test.sequences()
    batch, core_state = test.replay.gather(ids, CPU)
    # The Q of the last row is not known yet when a sequence is complete: the same sequences, one transition shorter.
    shorter = dataclasses.replace(flags, trained=flags.trained - 1)
    net = test.learner.net
    shorter_batch = map_tensors(lambda x: x[:-1], batch)
    target_q = net(shorter_batch, core_state)[0][flags.burn_in :]
    sample = Sample(ids, test.replay.generation_of(ids), torch.ones(len(ids)), shorter_batch, core_state)
    _, expected, _ = r2d2.compute_loss(shorter, net, net, r2d2.Batch(sample, target_q))
    found = torch.from_numpy(test.replay.tree.leaves[ids] ** (1 / 0.9)).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "ends, error", [(["truncated"], 0.0), (["terminated"], 5.0), (["terminated", "truncated"], 5.0)]
)
def test_a_first_priority_leaves_out_the_value_of_a_last_observation_that_lies_beside_its_row(ends, error):
    flags = dataclasses.replace(small_flags(n_steps=3, rescale=False), discount=1.0)
    rows = {name: torch.zeros(13, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    rows |= {"reward": torch.zeros(13, 1), "action": torch.zeros(13, 1, dtype=torch.long)}
    rows["policy_logits"] = torch.full((13, 1, 2), 5.0)  # constant values without rewards: no error anywhere else
    for name in ("done", *ends):
        rows[name][8] = True
    (priority,) = r2d2.initial_priorities(dataclasses.replace(flags, priority_eta=1.0), rows)
    assert priority == error


# Acting.


def test_every_environment_explores_at_its_own_rate_and_every_group_spans_the_ladder():
    flags = small_flags(group_width=4, eval_columns=1, epsilon=0.001, num_actors=2)
    found = ladder_of(flags, 4)
    assert found.shape == (4, 4) and (found[:, 3] == 0.001).all(), "the last column evaluates"
    ladder = found[:, :3].t().flatten()
    torch.testing.assert_close(ladder, torch.tensor([0.4 ** (1 + 7 * i / 11) for i in range(12)]))
    assert (found[:, :3].diff(dim=1) < 0).all(), "the last columns explore the least"
    torch.testing.assert_close(ladder_of(small_flags(group_width=1), 1), torch.tensor([[0.4**4.5]]))


def test_a_share_epsilon_of_the_actions_is_random_and_all_others_are_greedy():
    flags = small_flags(group_width=4, total_steps=10**6, env="toy_envs:Dict-v0", core="none")
    test = LockStep(flags)
    not_greedy, count, drawn = torch.zeros(2, 4), 0, torch.zeros(4)
    for rollout, _ in itertools.islice(test.feed.rollouts(), 400):
        greedy, action = rollout["policy_logits"][1:].argmax(-1), rollout["action"][1:]
        not_greedy[int(rollout["group"][0, 0])] += (greedy != action).float().sum(0)
        drawn += torch.bincount(action[greedy != action], minlength=4)
        count += flags.unroll_length / 2
    test.close()
    assert (drawn > 0).all(), "every action is explored"
    p = ladder_of(flags, 2) * 3 / 4  # one of four random actions is the greedy one
    deviation = (p * (1 - p) / count).sqrt()
    assert ((not_greedy / count - p).abs() < 4 * deviation + 2 / count).all(), (not_greedy / count, p)


def act_by(monkeypatch, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The actions [rows, 4] of environments that all explore at this rate, and the greedy ones of four."""
    monkeypatch.setattr(r2d2, "epsilon_ladder", lambda num_groups, *others: torch.full((num_groups, 4), epsilon))
    test = LockStep(small_flags(env="toy_envs:Dict-v0", core="none"))
    rollouts = [rollout for rollout, _ in itertools.islice(test.feed.rollouts(), 150)]
    actions = torch.cat([rollout["action"][1:].clone() for rollout in rollouts])
    greedy = torch.cat([rollout["policy_logits"][1:].argmax(-1) for rollout in rollouts])
    test.close()
    return actions, greedy


def test_random_actions_are_any_of_all_and_others_in_each_environment(monkeypatch):
    actions, _ = act_by(monkeypatch, 1.0)
    shares = torch.bincount(actions.flatten(), minlength=4) / actions.numel()
    assert ((shares - 1 / 4).abs() < 0.04).all(), shares  # 2,400 actions: 4 deviations
    assert abs((actions[:, 0] == actions[:, 1]).float().mean() - 1 / 4) < 0.08  # 600 rows


def test_each_environment_decides_for_itself_whether_to_explore(monkeypatch):
    actions, greedy = act_by(monkeypatch, 0.5)
    is_other = actions != greedy  # of two actions one is random, and of four random ones three are others
    assert abs((is_other[:, 0] & is_other[:, 1]).float().mean() - (3 / 8) ** 2) < 0.06  # one coin for both: 0.28


def test_whole_games_are_played_by_epsilon_of_the_test_and_greedily_on_request():
    flags = small_flags(epsilon=0.2)
    net = new_learner(flags).net
    q = torch.tensor([[1.0, 3.0]]).expand(20_000, 2)
    policy = net.acting_policy(q)
    share = (policy.sample(torch.Generator().manual_seed(1)) == 0).float().mean()
    assert abs(share - 0.1) < 0.01 and (policy.mode() == 1).all()
    net.flags = dataclasses.replace(flags, epsilon=1.0)
    policy = net.acting_policy(q)
    share = (policy.sample(torch.Generator().manual_seed(1)) == 0).float().mean()
    assert abs(share - 0.5) < 0.02 and (policy.mode() == 1).all(), "--greedy takes no random action, even of all"


# Runs.


def test_a_run_without_a_name_is_called_after_the_environment_that_it_trains(tmp_path, monkeypatch):
    def create_env(flags, num_envs: int, **overrides):
        return gymnasium.make_vec("Acrobot-v1", num_envs)

    monkeypatch.setattr(r2d2, "create_env", create_env)
    flags = dataclasses.replace(small_flags(root=str(tmp_path), total_steps=600, env="CartPole-v1"), name="")
    assert r2d2.train(flags).directory.name.startswith("r2d2-Acrobot-v1-")
    checkpoint = str(next(tmp_path.glob("*/checkpoint.pt")))
    with pytest.raises(InputError, match="checkpoint.pt: r2d2.py trained it"):
        monobeast.test(monobeast.Flags(mode="test", checkpoint=checkpoint))


def run(tmp_path, name="run", **changes) -> r2d2.Result:
    flags = {"root": str(tmp_path), "name": name, "tensorboard": False, "log_steps": 500, **changes}
    return r2d2.train(small_flags(**flags))


def weights_of(tmp_path, name: str) -> dict:
    return torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def assert_equal(one, other, where="state"):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"config", "seconds", "name"}:
            assert_equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_equal(x, y, f"{where}[{index}]")
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, where


@pytest.mark.parametrize("greedy", [True, False])
def test_evaluations_while_it_trains_play_on_the_emulator_and_by_the_epsilon_of_the_run_and_greedily_on_request(
    tmp_path, greedy
):
    flags = small_flags(epsilon=0.05, eval_minutes=1.0, greedy=greedy, atari_backend="ale")
    command = Evaluations(tmp_path, flags, 7, print)._command
    assert command[command.index("--epsilon") + 1] == "0.05" and ("--greedy" in command) == greedy
    assert command[command.index("--atari_backend") + 1] == "ale"


@pytest.mark.parametrize("save_replay", [False, True])
def test_runs_and_their_resumption_are_equal_to_the_bit(tmp_path, save_replay):
    states = []
    for name in ("one", "two"):
        run(tmp_path, name, save_replay=save_replay, total_steps=900, replay_gb=1e-3)
        result = run(tmp_path, name, save_replay=save_replay, total_steps=1800, replay_gb=1e-3)
        states.append(weights_of(tmp_path, name))
        log = (tmp_path / name / "out.log").read_text()
        assert "resumed at step 9" in log and ("sequences are those of" in log) == save_replay
        rows = lock_step.metrics_of(tmp_path / name)
        assert float(rows[-1]["stats/replay_ratio"]) > 0.9 and int(rows[-1]["stats/bad_priorities"]) == 0
    assert_equal(*states)
    assert result.updates > 40
    other = run(tmp_path, "three", total_steps=500, seed=2)
    assert not torch.equal(
        weights_of(tmp_path, "three")["target"]["value.2.weight"], states[0]["target"]["value.2.weight"]
    )
    assert other.steps >= 500


def test_a_saved_replay_that_is_not_filled_is_filled_and_one_that_does_not_fit_stays_until_the_new_one_is(tmp_path):
    path = tmp_path / "run" / "replay.npz"
    small = {"save_replay": True, "replay_gb": 1e-3, "min_fill": 1000}
    assert run(tmp_path, **small | {"min_fill": 480}, total_steps=500).updates == 0, (
        "20 steps are none for 32 transitions"
    )
    found = run(tmp_path, **small, total_steps=2400)
    assert found.updates == pytest.approx((2400 - 1000) / (4 * 8), abs=5), "from 1,000 steps on, not from the first"
    saved = path.read_bytes()
    run(tmp_path, **small | {"replay_gb": 2e-3}, total_steps=2700)
    assert "filled anew" in (tmp_path / "run" / "out.log").read_text() and path.read_bytes() == saved
    run(tmp_path, **small | {"replay_gb": 2e-3}, total_steps=4000)
    assert path.read_bytes() != saved


def test_the_replay_is_saved_with_every_checkpoint_which_is_written_even_if_that_fails(tmp_path, monkeypatch):
    versions, save = [], SequenceReplay.save

    def note(replay, path, version: str) -> None:
        save(replay, path, version)
        versions.append(version)

    monkeypatch.setattr(SequenceReplay, "save", note)
    small = {"save_replay": True, "replay_gb": 1e-3, "checkpoint_minutes": 0.002}
    result = run(tmp_path, **small, total_steps=2500)
    assert len(versions) > 2 and len(set(versions)) > 1

    def fail(replay, path, version: str) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(SequenceReplay, "save", fail)
    with pytest.raises(SystemExit):
        run(tmp_path, **small, total_steps=5000)
    assert weights_of(tmp_path, "run")["counts"]["updates"] > result.updates


def test_statistics_that_come_one_update_late_as_from_a_gpu_are_in_the_metrics(tmp_path, monkeypatch):
    class Arrived:
        def synchronize(self):
            pass

    def count(learner, measured, outcome):
        learner.updates += 1
        counted = learner.settle()
        lags = {"stats/policy_lag_mean": measured.lag_mean, "stats/policy_lag_max": measured.lag_max}
        named = {"steps": measured.steps, "is_bad": outcome.is_bad, **lags, **outcome.metrics}
        named["losses/grad_norm"] = outcome.grad_norm
        values = torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in named.values()])
        learner._on_their_way = list(named), values, Arrived(), measured.batch
        return counted

    monkeypatch.setattr(r2d2.QLearner, "count", count)
    run(tmp_path, total_steps=2000, checkpoint_minutes=0.005)
    rows = lock_step.metrics_of(tmp_path / "run")
    assert len(rows) >= 3 and all(float(row["stats/replay_fill"]) > 0 for row in rows)
    assert all(float(row["losses/grad_norm"]) > 0 for row in rows)


def test_a_run_keeps_its_replay_ratio_and_tells_it(tmp_path):
    result = run(tmp_path, core="none", replay_ratio=1.5, total_steps=4000)
    assert result.updates * 4 * 8 / (result.steps - 200) == pytest.approx(1.5, rel=0.01)
    log = (tmp_path / "run" / "out.log").read_text()
    told = re.search(r"replay ratio (\S+) \(--replay_ratio 1.5\): (\S+) updates x 32 transitions for (\S+) steps", log)
    ratio, updates, steps = (float(number.replace(",", "")) for number in told.groups())
    assert updates == result.updates and ratio == pytest.approx(32 * updates / steps, abs=5e-4) and ratio != 1.5
    assert "learner    wait" in log and "sample" in log


def test_steps_a_second_are_updates_a_second_times_their_transitions_over_the_replay_ratio(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    before = set(threading.enumerate())
    run(tmp_path, core="none", replay_ratio=1.5, total_steps=4000, deterministic=False)
    assert set(threading.enumerate()) <= before, "no thread of the learner is left"
    rows = lock_step.metrics_of(tmp_path / "run")
    begin, end = (
        {name: float(row[name]) for name in ("step", "hours", "stats/updates")} for row in (rows[2], rows[-1])
    )
    difference = {name: end[name] - begin[name] for name in begin}
    steps, updates = (difference[name] / difference["hours"] / 3600 for name in ("step", "stats/updates"))
    assert steps == pytest.approx(updates * 4 * 8 / 1.5, rel=0.02)
    told = re.search(
        r"([\d.,]+) updates/s x 32 transitions / 1.5 = (\S+) steps/s; there were (\S+)",
        (tmp_path / "run" / "out.log").read_text(),
    )
    updates, predicted, measured = (float(number.replace(",", "")) for number in told.groups())
    assert predicted == pytest.approx(measured, rel=0.02) and predicted == pytest.approx(updates * 32 / 1.5, rel=0.02)
    assert 0.5 * steps < measured < 2 * steps, "the clock is that of the run; the first updates are left out above"


@pytest.mark.parametrize("feed", ["shared", "remote"])
def test_environments_that_crash_cost_their_unfinished_sequences_only(tmp_path, monkeypatch, feed):
    """Nothing is trained, so that each stored sequence, unrolled again, gives the Q values that acted."""
    if feed == "remote":
        pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    kept: list = []

    def keep(make, *arguments):
        kept.append(make(*arguments))
        return kept[-1]

    for name in ("make_learner", "make_replay"):
        monkeypatch.setattr(r2d2, name, partial(keep, getattr(r2d2, name)))
    run(
        tmp_path, env="toy_envs:CrashAtStep-v0", env_kwargs='{"n": 150}', deterministic=False, feed=feed,
        num_servers=1, total_steps=2000, replay_ratio=1e-3, replay_gb=1e-3,
    )  # fmt: skip
    log = (tmp_path / "run" / "out.log").read_text()
    assert "this toy breaks here" in log or "lost" in log, log
    learner, replay = kept
    ids = np.flatnonzero(replay.tree.leaves)
    batch, core_state = replay.gather(ids, CPU)
    lives = replay._life
    assert len(ids) > 300 and max(lives) >= 1, (len(ids), lives)
    with torch.no_grad():
        q = learner.net.eval()(batch, core_state)[0]
    torch.testing.assert_close(q[:-1], batch["policy_logits"][1:], rtol=1e-5, atol=1e-5)


def test_an_actor_that_is_killed_takes_no_whole_sequence_with_it_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    actors, stores, kept = [], [], {}
    store = r2d2.store

    def start(*arguments):
        actors.append(ActorProcesses(*arguments))
        return actors[0]

    def store_and_kill(flags, learner, replay, *rest) -> None:
        store(flags, learner, replay, *rest)
        stores.append(replay)
        if len(stores) == 30:
            ids = np.flatnonzero(replay.tree.leaves)
            kept.update(zip(ids, replay.generation_of(ids)))
            os.kill(actors[0].processes[0].popen.pid, signal.SIGKILL)

    monkeypatch.setattr(beast_training, "ActorProcesses", start)
    monkeypatch.setattr(r2d2, "store", store_and_kill)
    room = {"save_replay": True, "replay_gb": 1e-3}  # for all steps and all void transitions
    result = run(tmp_path, deterministic=False, total_steps=1500, replay_ratio=1e-3, **room)
    replay = stores[-1]
    assert result.steps >= 1500 and replay._life == [1, 1]
    assert "was killed by signal 9 (SIGKILL)" in (tmp_path / "run" / "out.log").read_text()
    ids = np.flatnonzero(replay.tree.leaves)
    found = dict(zip(ids, replay.generation_of(ids)))
    assert len(kept) > 100 and kept.items() <= found.items() and len(found) > len(kept) + 100
    seeds = replay.gather(ids, CPU)[0]["obs"]["obs"][..., 0]
    assert (seeds == seeds[0]).all() and len(seeds.unique()) >= 4, "two lives of two groups"


def test_a_trained_run_plays_whole_games_films_them_and_is_loaded_by_the_library(tmp_path, run_main):
    pytest.importorskip("imageio_ffmpeg")
    run(tmp_path, env="CartPole-v1", total_steps=600)
    place = f"--mode test --root {tmp_path} --name run --episodes 2"
    code, output = run_main(r2d2, *place.split(), "--epsilon", "0.5")
    assert code == 0 and "over 2 whole games, sampled" in output, output
    code, output = run_main(r2d2, *place.split(), "--greedy", "--video", str(tmp_path / "film.mp4"))
    assert code == 0 and "greedy" in output and (tmp_path / "film.mp4").stat().st_size > 1000, output
    assert json.loads((tmp_path / "run" / "test.json").read_text())["greedy"]
    policy = beast.load(str(tmp_path / "run" / "checkpoint.pt"))
    actions, _ = policy.act(np.zeros((3, 4), np.float32))
    assert actions.shape == (3,) and type(policy.net).__name__ == "Net" and hasattr(policy.net, "advantage")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stride": 6}, "--stride 6: it must be a multiple of --unroll_length 4"),
        ({"trained": 2}, "--trained 2: it must lie between 3"),
        ({"eval_columns": 4}, "--eval_columns 4: it must lie between 0 and 3; at least one"),
        ({"hidden_size": 3}, "--hidden_size 3: it must lie between 4"),
        ({"total_steps": 200}, "--total_steps 200: updates begin after --min_fill 200 steps"),
        ({"eval_columns": 2, "total_steps": 400}, r"--min_fill 200 steps \(400 with those of --eval_columns\)"),
        ({"min_fill": 0, "total_steps": 96}, "a sequence of each environment, 96 steps: raise it"),
        ({"token_file": "token"}, "--token_file is for env servers: give --addresses or --listen"),
        (
            {"deterministic": False, "stagger": True, "feed": "remote"},
            "--stagger: env servers send rows in an order of",
        ),
    ],
)
def test_flags_that_cannot_be_are_refused_with_the_remedy(changes, message):
    with pytest.raises(InputError, match=message):
        small_flags(**changes)


def test_without_a_core_there_is_no_burn_in_and_other_actions_than_a_few_are_refused(tmp_path):
    assert small_flags(core="none").burn_in == 0
    with pytest.raises(InputError, match="needs a Discrete space"):
        run(tmp_path, env="Pendulum-v1")


# Learning.


def train_task(tmp_path, run_main, task: str, *arguments: str) -> list[float]:
    """Mean returns of the last 100 games, one for each row of metrics."""
    flags = f"{TASKS[task]} --root {tmp_path} --name run --no_tensorboard --deterministic"
    code, output = run_main(r2d2, *flags.split(), *arguments)
    assert code == 0, output
    return [float(row["charts/episodic_return"]) for row in lock_step.metrics_of(tmp_path / "run")]


@pytest.mark.long
def test_the_memory_task_is_learned_with_an_lstm_whose_stored_state_is_what_remembers(tmp_path, run_main):
    returns = train_task(tmp_path, run_main, "r2d2-memory-lstm", "--total_steps", "30000")
    assert max(returns[:1]) < 0.7 and returns[-1] >= 0.95, returns
    # Sequences that begin between the cue and the question, without a burn-in: only the stored state knows the cue.
    policy = beast.load(str(tmp_path / "run" / "checkpoint.pt"))
    flags = dataclasses.replace(policy.flags, burn_in=0, deterministic=True, epsilon=0.0)
    test = LockStep(flags)
    test.learner.net.load_state_dict(policy.net.state_dict())
    test.weights.publish(test.learner.net, 1)
    test.store(8)  # of the weights from before
    first = len(test.sequences())
    test.store(60)
    test.close()
    ids = test.sequences()[first:]
    batch, core_state = test.replay.gather(ids, CPU)
    asked = batch["obs"]["obs"][..., 3] == 1
    cue_is_before = ~batch["done"].cummax(0).values  # no episode has begun since row 0
    row, column = (asked & cue_is_before)[:-1].nonzero().unbind(1)
    row, column = row[batch["action"][row + 1, column] >= 0], column[batch["action"][row + 1, column] >= 0]
    assert len(row) > 20
    errors = {}
    for name, state in (("stored", core_state), ("zeroed", map_tensors(torch.zeros_like, core_state))):
        with torch.no_grad():
            q = rescale_inverse(policy.net(batch, state)[0])
        chosen = q[row, column, batch["action"][row + 1, column]]
        errors[name] = (chosen - batch["reward"][row + 1, column]).abs().mean().item()
    assert errors["stored"] < 0.1 and errors["zeroed"] > 0.5, errors


@pytest.mark.on_demand  # benchmarks/results/ has three seeds of it
def test_the_memory_task_is_not_learned_without_a_core(tmp_path, run_main):
    returns = train_task(tmp_path, run_main, "r2d2-memory-none", "--total_steps", "30000")
    assert abs(returns[-1]) < 0.3, returns


@pytest.mark.on_demand  # the memory task below is learned in a quarter of the time
def test_cartpole_is_learned(tmp_path, run_main):
    returns = train_task(tmp_path, run_main, "r2d2-cartpole", "--total_steps", "30000")
    assert returns[0] < 40, "a random policy balances for 22 steps"
    code, output = run_main(r2d2, *f"--mode test --root {tmp_path} --name run --episodes 10".split())
    assert code == 0
    mean = json.loads((tmp_path / "run" / "test.json").read_text())["mean"]
    assert mean > 300, (mean, returns)  # the log's mean of the last 100 games goes back a long way


def test_priorities_go_to_the_sequences_that_were_drawn_not_to_those_that_lie_there_now(monkeypatch):
    test, drawn = LockStep(small_flags()), []
    test.store(40)
    next_batch = test.learner.next_batch

    def overtaken(*arguments):
        sample, target_q = next_batch(*arguments)
        drawn.append(test.replay.tree.nodes.copy())
        # Other ones have taken their places.
        return r2d2.Batch(sample._replace(generations=sample.generations - 1), target_q)

    test.learner.next_batch = overtaken
    training = lock_step.stand_in(
        flags=test.flags, device=CPU, record=lambda *_: None, finished=lambda: bool(drawn)
    )  # fmt: skip
    r2d2.learn(training, test.learner, test.feed, test.weights, test.replay, test.limiter)
    test.close()
    assert test.replay.late_priorities == test.flags.batch_width
    np.testing.assert_array_equal(test.replay.tree.nodes, drawn[-1])


def test_an_update_publishes_its_weights_and_gives_its_sequences_their_priorities(monkeypatch):
    flags, drawn, records = small_flags(), [], []
    test = LockStep(flags)
    test.store(40)

    def record(counted, more):
        records.append({**counted.metrics, **more})

    def update(flags, learner, batch):
        drawn.append(batch.sample)
        for parameter in learner.net.parameters():
            parameter.data.add_(1)
        return Outcome(torch.tensor(False), torch.ones(()), {}), torch.full((4,), 7.0)

    monkeypatch.setattr(r2d2, "update", update)
    training = lock_step.stand_in(flags=flags, device=CPU, record=record, finished=lambda: bool(drawn))
    r2d2.learn(training, test.learner, test.feed, test.weights, test.replay, test.limiter)
    test.close()
    measured = 4 * 8 / test.limiter.steps
    assert records[0]["stats/replay_ratio"] == measured < 0.9 * flags.replay_ratio
    assert f"replay ratio {measured:.3f} (--replay_ratio 1)" in test.limiter.describe()
    assert records[0]["charts/return_all"] == np.mean(test.learner.all_returns)
    np.testing.assert_allclose(test.replay.tree.leaves[drawn[0].ids], 7**flags.priority_exponent)
    with test.weights.newest() as (net, version):
        assert version == 1 and torch.equal(net.value[0].weight, test.learner.net.value[0].weight)


def test_learning_waits_for_the_first_whole_sequence_whatever_the_replay_ratio():
    test = LockStep(small_flags(min_fill=0, replay_ratio=100.0))
    training = lock_step.stand_in(
        flags=test.flags, device=CPU, record=lambda *_: None, finished=lambda: test.learner.updates > 0
    )
    r2d2.learn(training, test.learner, test.feed, test.weights, test.replay, test.limiter)
    test.close()
    assert test.learner.updates == 1 and test.replay.num_sequences()


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_the_first_row_of_an_episode_sees_nothing_of_the_one_before(core):
    net, T, N = new_learner(small_flags(core=core)).net.eval(), 7, 2
    batch = {"obs": {"obs": torch.randn(T, N, 3)}, "done": torch.zeros(T, N, dtype=torch.bool)}
    batch |= {"reward": torch.zeros(T, N), "action": torch.zeros(T, N, dtype=torch.long)}
    batch["done"][4] = True
    before = net(batch, net.initial_state(N))[0]
    batch["reward"][4], batch["action"][4] = torch.nan, 1
    after = net(batch, tuple(torch.full_like(x, torch.nan) for x in net.initial_state(N)))[0]
    torch.testing.assert_close(after[4:], before[4:])


def test_the_net_sees_the_last_reward_clipped_and_its_advantages_have_no_mean():
    net, T, N = new_learner(small_flags(core="none")).net.eval(), 2, 3
    batch = {"obs": {"obs": torch.randn(T, N, 3)}, "done": torch.zeros(T, N, dtype=torch.bool)}
    batch |= {"reward": torch.full((T, N), 5.0), "action": torch.zeros(T, N, dtype=torch.long)}
    q = net(batch, ())[0]
    torch.testing.assert_close(net({**batch, "reward": torch.ones(T, N)}, ())[0], q)
    net.advantage[2].weight.data *= 3
    torch.testing.assert_close(net(batch, ())[0].mean(-1), q.mean(-1))


@pytest.mark.parametrize("eval_columns, first", [(0, 3), (2, 2)])
def test_returns_of_the_log_are_those_of_the_columns_that_explore_least(tmp_path, monkeypatch, eval_columns, first):
    learners = []
    monkeypatch.setattr(r2d2.Training, "run_threads", lambda self, feed, **rest: learners.append(self.learner))
    run(tmp_path, eval_columns=eval_columns)
    # A game of 10 + its column ends in every environment.
    rows = {"env_number": np.tile(np.arange(4), (2, 1)), "episode_step": np.array([[7] * 4, [0] * 4])}
    rows |= {"episode_return": np.array([[10.0, 11, 12, 13], [0] * 4]), "reward": np.zeros((2, 4))}
    ends = np.array([[True] * 4, [False] * 4])
    rows |= {"terminated": ends, "truncated": ends & False, "done": ~ends}
    learners[0].record_games(rows)
    assert list(learners[0].returns) == [10.0 + column for column in range(first, 4)]


def test_only_games_of_the_return_columns_are_counted_and_the_newest_of_all_are_kept():
    test, returns = LockStep(small_flags(eval_columns=1)), [-9.0] * 100
    test.learner.first_shown = 4  # none
    test.learner.all_returns.extend(returns)
    for rollout, state in itertools.islice(test.feed.rollouts(), 20):
        rows = {name: x.numpy() for name, x in rollout.items() if not isinstance(x, dict)}
        returns = returns + [x for x, _ in finished_episodes(rows)]
        r2d2.store(test.flags, test.learner, test.replay, test.limiter, rollout, state)
    test.close()
    assert test.learner.episodes == 0
    assert list(test.learner.all_returns) == returns[-100:] and returns[-1] != -9


def test_void_transitions_are_no_steps_and_steps_of_evaluating_environments_are_not_trained():
    flags = small_flags(eval_columns=1)
    test, void = LockStep(flags), 0
    for rollout, state in itertools.islice(test.feed.rollouts(), 20):
        before, counted = test.learner.steps, test.limiter.filled + test.limiter.steps
        r2d2.store(flags, test.learner, test.replay, test.limiter, rollout, state)
        final = (rollout["terminated"] | rollout["truncated"]) & ~rollout["done"]
        assert test.learner.steps - before == int((~final[:-1]).sum())
        assert test.limiter.filled + test.limiter.steps - counted == int((~final[:-1, :3]).sum())
        void += int(final[:-1].sum())
        group = int(rollout["group"][0, 0])
        first = (test.replay._next_block[group] - 1) % test.replay.num_blocks * flags.unroll_length
        stored = test.replay.arrays["policy_logits"][group, first : first + flags.unroll_length]
        np.testing.assert_array_equal(stored, rollout["policy_logits"][:-1, :3].numpy())
    test.close()
    assert void


def test_an_update_clips_its_gradient_and_takes_the_learning_rate_of_the_flags(monkeypatch):
    flags = small_flags(grad_clip=0.01, learning_rate=7e-4)
    learner, (batch, state) = new_learner(flags), random_batch(flags)
    learner.load_state_dict(new_learner(dataclasses.replace(flags, learning_rate=1e-3)).state_dict())  # resumed
    drawn = batch_of(flags, learner, batch, state)
    monkeypatch.setattr(r2d2, "step_unless", lambda *_: None)
    outcome, _ = r2d2.update(flags, learner, drawn)
    norm = torch.stack([p.grad.norm() for p in learner.net.parameters() if p.grad is not None]).norm()
    assert outcome.grad_norm > 0.02 and norm.item() == pytest.approx(0.01, rel=1e-3)
    assert learner.optimizer.param_groups[0]["lr"] == 7e-4
    assert learner.optimizer.defaults["eps"] == flags.optimizer_epsilon
    r2d2.update(dataclasses.replace(flags, grad_clip=0), learner, drawn)
    unclipped = torch.stack([p.grad.norm() for p in learner.net.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(unclipped, outcome.grad_norm)


def test_the_replay_gets_its_exponents_and_stores_single_images_only_where_rollouts_are_as_long_as_a_stack():
    flags = small_flags(priority_exponent=0.7, importance_exponent=0.3)
    spaces = probe_env(r2d2.create_env, flags)
    replay = new_replay(flags, spaces)
    assert (replay.priority_exponent, replay.importance_exponent) == (0.7, 0.3)
    for unroll_length, stack in ((4, 4), (2, 0)):
        flags = small_flags(env="PongNoFrameskip-v4", unroll_length=unroll_length)
        spaces = probe_env(r2d2.create_env, flags)
        replay = new_replay(flags, spaces)
        assert replay.stack == stack


def test_mode_test_plays_by_its_own_epsilon(tmp_path, monkeypatch):
    run(tmp_path, total_steps=600)
    played = []
    game = evaluation.Game(1.0, 1, {})
    monkeypatch.setattr(evaluation, "play", lambda make_envs, net, *rest: played.append(net) or [game])
    r2d2.test(small_flags(mode="test", root=str(tmp_path), name="run", epsilon=0.5))
    assert played[0].flags.epsilon == 0.5


def test_a_resumed_run_goes_on_with_the_returns_of_all_environments(tmp_path):
    run(tmp_path, total_steps=1200)
    before = weights_of(tmp_path, "run")["all_returns"]
    run(tmp_path, total_steps=1201)
    assert before and weights_of(tmp_path, "run")["all_returns"][: len(before)] == before[-100:]


def test_the_preset_of_the_papers_has_their_settings():
    flags = r2d2.Flags(**r2d2.PRESETS["paper"])
    assert (flags.discount, flags.n_steps, flags.rescale, flags.priority_eta) == (0.997, 5, True, 0.9)
    assert (flags.batch_width, flags.burn_in, flags.trained, flags.stride) == (64, 40, 80, 40)
    assert (flags.learning_rate, flags.optimizer_epsilon, flags.grad_clip, flags.target_period) == (
        1e-4,
        1e-3,
        80,
        2500,
    )
    assert (flags.priority_exponent, flags.importance_exponent, flags.replay_ratio) == (0.9, 0.6, 0.75)
    assert (flags.core, flags.core_size, flags.head_size, flags.hidden_size) == ("lstm", 512, 512, 512)
    assert (flags.full_action_space, flags.episodic_life, flags.center_images) == ("on", "off", False)


def test_the_replay_has_room_for_all_steps_of_a_short_run():
    flags = small_flags(total_steps=10_000)
    spaces = probe_env(r2d2.create_env, flags)
    assert new_replay(flags, spaces).capacity >= 10_000


@pytest.mark.parametrize(
    "changes, is_bounded", [({}, True), ({"feed": "remote"}, False), ({"save_replay": True}, False)]
)
def test_the_steps_of_a_run_bound_its_replay_unless_some_groups_or_a_later_start_may_bring_more(changes, is_bounded):
    flags = small_flags(replay_gb=1e-2, deterministic=False, **changes)
    spaces = probe_env(r2d2.create_env, flags)
    replay = new_replay(flags, spaces)
    assert replay.num_bytes < 1e-3 * 1e9 if is_bounded else replay.num_bytes > 0.9 * 1e-2 * 1e9
