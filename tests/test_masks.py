"""Action masks: the toys raise where a forbidden choice is taken, so whatever plays them obeys."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path

import gymnasium
import lock_step
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import Masked

import beast
import monobeast
import r2d2
from beast import envs
from beast.envs.groups import EnvGroup
from beast.envs.masks import MASK, legal_choices
from beast.envs.probe import probe_env
from beast.envs.rows import nest_observations
from beast.envs.spaces import category_sizes
from beast.errors import InputError
from beast.learn.distributions import action_layout, distribution, mask_logits
from beast.learn.nests import map_tensors
from beast.learn.qlearning import rescale, rescale_inverse
from beast.learn.replay import Sample
from beast.run.tuning import Stages

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
NESTED = ("Tuple", "Dict")
every_kind = pytest.mark.parametrize("kind", Masked.ACTIONS)


def group_of(make, mode=NEXT_STEP, width=4, **options) -> EnvGroup:
    return EnvGroup(SyncVectorEnv([make] * width, autoreset_mode=mode), **options)


def play(group: EnvGroup, num_steps: int, generator: torch.Generator) -> list[dict]:
    """Rows that a random policy under the masks leads to: `behavior` [K, choices] are its logits."""
    rows = []
    for t in range(num_steps + 1):
        arrays = {name: np.zeros((group.num_envs, *shape), dtype) for name, (shape, dtype) in group.fields.items()}
        row = nest_observations(arrays)
        if t:
            masks = torch.from_numpy(rows[-1]["obs"][MASK])
            logits = mask_logits(
                action_layout(group.spaces.action), torch.randn(masks.shape, generator=generator), masks
            )
            row["policy_logits"][...] = logits
            row["action"][...] = distribution(group.spaces.action, logits).sample(generator)
            group.step(row["action"], row)
        else:
            group.reset(3, row)
        rows.append(row)
    return rows


# --- one form of all masks -------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
@pytest.mark.parametrize("is_in_infos, is_nested", [*itertools.product([False, True], repeat=2)])
def test_rows_hold_one_flat_mask_of_their_own_observation_wherever_and_however_it_is_told(
    kind, mode, is_in_infos, is_nested
):
    is_nested = is_nested and kind in NESTED
    group = group_of(lambda: Masked(kind, is_in_infos, is_nested), mode, has_mask=is_in_infos)
    size = sum(category_sizes(Masked.ACTIONS[kind]))
    assert group.fields[f"obs/{MASK}"] == ((size,), "int8") and group.spaces.observations[MASK].shape == (size,)
    others = {"numbers"} if not is_in_infos else {"obs"}
    assert set(group.spaces.observations) == {MASK, *others}
    generator, seen = torch.Generator().manual_seed(1), []
    for row in play(group, 0, generator):  # the toys stay where this leaves them
        seen.append([row, *([env.unwrapped.allowed, env.unwrapped.count] for env in group.env.envs)])
    row = seen[0][0]
    assert all((row["obs"][MASK][k] == seen[0][1 + k][0]).all() for k in range(4)), "after a reset"
    for _ in range(30):
        masks = torch.from_numpy(row["obs"][MASK])
        policy = distribution(
            group.spaces.action, mask_logits(action_layout(group.spaces.action), torch.zeros(masks.shape), masks)
        )
        row["action"][...] = policy.sample(generator)
        before = [env.unwrapped.allowed for env in group.env.envs]
        group.step(row["action"], row)
        for k, env in enumerate(env.unwrapped for env in group.env.envs):
            assert env.allowed is not before[k]
            assert (row["obs"][MASK][k] == env.allowed * (env.count < 5)).all(), "an episode's last mask forbids all"
    assert row["episode_step"].any()


@pytest.mark.parametrize("is_in_infos", [False, True])
def test_a_truncated_episodes_last_observation_has_its_own_mask_under_same_step(is_in_infos):
    group = group_of(lambda: Masked("Discrete", is_in_infos), SAME_STEP, has_mask=is_in_infos)
    last_masks = []

    def note(self, original=Masked._observation):
        result = original(self)
        if self.count == self.length == 3:
            last_masks.append(self.allowed)
        return result

    for env in group.env.envs:
        env.unwrapped._observation = note.__get__(env.unwrapped)
    rows = play(group, 40, torch.Generator().manual_seed(2))
    found = [row["final_obs"][MASK][k] for row in rows for k in np.flatnonzero(row["truncated"])]
    assert len(found) == len(last_masks) > 10
    assert np.array_equal(found, last_masks) and np.ptp(found)


def test_an_environment_that_tells_no_mask_in_a_step_allows_all_of_it():
    class Forgets(Masked):
        def _observation(self):
            observation, info = super()._observation()
            return observation, info if self.count % 2 == 0 else {}

    for nested in ({}, {"is_nested": True}):  # an array of numbers, an array of tuples
        kind = "Tuple" if nested else "Discrete"
        group = group_of(lambda: Forgets(kind, True, **nested), width=1, has_mask=True)
        with pytest.raises(RuntimeError, match="is forbidden"):
            for row in play(group, 50, torch.Generator().manual_seed(1)):
                assert row["obs"][MASK].all() or row["episode_step"] % 2 == 0
    two = np.array([None, ([1, 0], np.array([0, 1, 1]))], object)  # as gymnasium gathers what it cannot join
    infos = {MASK: two, f"_{MASK}": np.array([False, True])}
    found = legal_choices(spaces.Box(0, 1), spaces.MultiDiscrete([2, 3]), None, infos, 2)
    assert found.astype(int).tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]


def test_a_mask_of_another_size_and_one_for_numbers_are_refused_and_infos_without_choices_are_left_alone():
    def masked(mask, action):
        env = gymnasium.Env()
        env.observation_space, env.action_space = spaces.Dict({MASK: mask}), action
        return env

    with pytest.raises(InputError, match="a mask is for choices; give this part another name"):
        group_of(lambda: masked(spaces.MultiBinary(3), spaces.Box(-1, 1, (3,))))
    shaped = group_of(lambda: masked(spaces.Box(0, 1, (2, 2), np.float32), spaces.Discrete(4)))
    assert shaped.spaces.observations == {MASK: spaces.MultiBinary(4)}
    with pytest.raises(InputError, match=r"action_mask has 4 numbers: give one .* 9 choices of Discrete\(9\)"):
        legal_choices(spaces.Box(0, 1), spaces.Discrete(9), None, {MASK: np.ones((2, 2, 2))}, 2)
    plain = EnvGroup(envs.make("Pendulum-v1", 1), True)
    assert set(plain.spaces.observations) == {"obs"}, "a mask in the infos of numbers means something else"


@pytest.mark.parametrize("is_in_infos", [False, True])
def test_the_probe_finds_masks_in_observations_and_in_infos(is_in_infos):
    def create_env(flags, num_envs):
        return SyncVectorEnv([lambda: Masked("Tuple", is_in_infos, True)] * num_envs)

    found = probe_env(create_env, monobeast.Flags())
    assert found.observations == EnvGroup(create_env(None, 1), is_in_infos).spaces.observations
    assert MASK in found.observations


@pytest.mark.parametrize(
    "is_in_infos, change, message",
    [
        (False, lambda mask, count: np.where(mask, 0.0, -np.inf), r"Changed: action_mask has -inf: give a 1 for each"),
        (True, lambda mask, count: np.flatnonzero(mask + 1), r"Changed: action_mask has 2: give a 1 for each legal"),
        (
            True,
            lambda mask, count: mask if count else None,
            r"Changed: step\(\) gave info\['action_mask'\], which reset",
        ),
    ],
)
def test_a_mask_that_says_something_else_is_told_before_a_run(is_in_infos, change, message):
    class Changed(Masked):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if not is_in_infos:
                self.observation_space[MASK] = spaces.Box(-np.inf, 1, (4,), np.float64)

        def _observation(self):
            observation, info = super()._observation()
            told = info if self.is_in_infos else observation
            told[MASK] = change(told[MASK], self.count)
            if told[MASK] is None:
                del told[MASK]
            self.allowed[...] = True
            return observation, info

    def create_env(flags, num_envs):
        return SyncVectorEnv([lambda: Changed("Discrete", is_in_infos)] * num_envs)

    with pytest.raises(InputError, match=message):
        probe_env(create_env, monobeast.Flags())


# --- acting ----------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_illegal_choice_is_ever_drawn_and_a_part_without_a_legal_one_is_drawn_uniformly(kind, is_compiled):
    space, generator = Masked.ACTIONS[kind], torch.Generator().manual_seed(1)
    sizes = category_sizes(space)
    masks = torch.randint(2, (3, 500, sum(sizes)), generator=generator, dtype=torch.int8)
    masks[:, :, : sizes[0]] *= torch.rand(3, 500, 1, generator=generator) > 0.2
    logits = 5 * torch.randn(masks.shape, generator=generator)
    mask = torch.compile(mask_logits, backend="eager", fullgraph=True) if is_compiled else mask_logits
    policy = distribution(space, mask(action_layout(space), logits, masks, 0))
    for action in (policy.sample(generator), policy.sample(generator), policy.mode()):
        categories = action.reshape(3, 500, len(sizes))
        for part, (legal, choice) in enumerate(zip(masks.split(sizes, -1), categories.split(1, -1))):
            none = ~legal.bool().any(-1)
            assert none.any() and not none.all()
            assert (legal.gather(-1, choice)[..., 0].bool() | none).all(), f"part {part}"
    none = ~masks[..., : sizes[0]].bool().any(-1)
    drawn = policy.sample(generator).reshape(3, 500, len(sizes))[..., 0][none]
    assert drawn.bincount(minlength=sizes[0]).min() > 0.5 * len(drawn) / sizes[0], "uniformly"
    assert policy.log_prob(policy.sample(generator)).isfinite().all() and policy.entropy().isfinite().all()


def masked_net(agent, **changes):
    flags = lock_step.small_flags(agent, **changes)
    torch.manual_seed(1)
    observations = {"obs": spaces.Box(-1, 1, (2,), np.float32), MASK: spaces.MultiBinary(4)}
    net = agent.Net(observations, spaces.Discrete(4), flags)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return flags, net


@pytest.mark.parametrize("agent", [monobeast, r2d2])
def test_the_mask_is_no_input_of_the_net(agent):
    _, net = masked_net(agent)
    plain = agent.Net({"obs": spaces.Box(-1, 1, (2,), np.float32)}, spaces.Discrete(4), net.flags)
    plain.load_state_dict(net.state_dict())
    inputs = {"obs": {"obs": torch.randn(1, 2, 2)}, "done": torch.zeros(1, 2, dtype=torch.bool)}
    inputs |= {"reward": torch.zeros(1, 2), "action": torch.zeros(1, 2, dtype=torch.int64)}
    mask = torch.tensor([[[0, 1, 1, 0], [0, 0, 0, 0]]])
    expected = plain(inputs, plain.initial_state(2))[0][0]
    found = net({**inputs, "obs": {**inputs["obs"], MASK: mask}}, net.initial_state(2))[0][0]
    assert torch.equal(found[0, 1:3], expected[0, 1:3]) and (found[0, [0, 3]] == -math.inf).all()
    no_choice = expected[1] if agent is r2d2 else torch.zeros(4)  # a value of it is needed, where it is the last
    assert torch.equal(found[1], no_choice)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_r2d2_explores_among_legal_actions_only(epsilon, monkeypatch):
    flags, net = masked_net(r2d2, group_width=64)
    monkeypatch.setattr(r2d2, "epsilon_ladder", lambda *arguments: torch.full((1, 64), epsilon))
    mask = torch.randint(2, (1, 64, 4), generator=torch.Generator().manual_seed(1))
    mask[..., 3] |= ~mask.bool().any(-1)
    inputs = {"obs": {"obs": torch.randn(1, 64, 2), MASK: mask}, "done": torch.zeros(1, 64, dtype=torch.bool)}
    inputs |= {"reward": torch.zeros(1, 64), "action": torch.zeros(1, 64, dtype=torch.int64)}
    inputs |= {"group": torch.zeros(1, 64, dtype=torch.int32), "env_number": torch.arange(64)[None]}
    drawn = torch.zeros(64, 4, dtype=torch.int64)

    class Rows:
        core_state = net.initial_state(64)

        def answer(self, action, q, value, version, core_state):
            assert mask.gather(-1, action.unsqueeze(-1)).all() and value.isfinite().all()
            drawn[torch.arange(64), action[0]] += 1

    Rows.inputs = inputs

    class Feed:
        def acting(self):
            return iter([Rows()] * 200)

    class Weights:
        def newest(self):
            return self

        def __enter__(self):
            return net, 0

        def __exit__(self, *error):
            pass

    class Training:
        device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)

    Training.flags = flags
    r2d2.act(Training, Feed(), Weights(), 1)
    if epsilon == 1.0:
        assert (drawn[mask[0].bool()] > 200 / 4 * 0.4).all(), "each legal one is drawn"
    policy = net.acting_policy(net(inputs, Rows.core_state)[0])
    shares = policy.logits.exp()
    torch.testing.assert_close(shares.sum(-1), torch.ones(1, 64))
    assert ((shares == 0) | mask.bool()).all()


@every_kind
@pytest.mark.parametrize("is_in_infos", [False, True])
def test_tuning_and_the_probe_step_by_legal_choices(kind, is_in_infos):
    def create_env(flags, num_envs):
        return SyncVectorEnv([lambda: Masked(kind, is_in_infos)] * num_envs)

    flags = lock_step.small_flags(monobeast)
    with contextlib.closing(Stages(flags, create_env, probe_env(create_env, flags), 0.02)) as stages:
        assert stages.env().wall > 0


# --- learning --------------------------------------------------------------------------------------------------------


def batch_of(rows: list[dict]) -> dict:
    return map_tensors(lambda *parts: torch.from_numpy(np.stack(parts)), *rows)


@every_kind
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_the_loss_is_that_of_policies_over_the_legal_choices_alone(kind, mode):
    """Policy loss and entropy, row by row and part by part, in float64, without a number of an illegal choice."""
    space, sizes = Masked.ACTIONS[kind], category_sizes(Masked.ACTIONS[kind])
    group = group_of(lambda: Masked(kind, True), mode, has_mask=True)
    batch = batch_of(play(group, 25, torch.Generator().manual_seed(4)))
    batch["obs"][MASK][:, 0, : sizes[0]] = 0  # rows that have no legal choice of the first part
    batch["policy_logits"][1:, 0, : sizes[0]] = 0  # as the policy that acted has it
    flags = lock_step.small_flags(monobeast, ppo_clip=0.2, normalize_advantages=False, baseline_cost=0.0)
    flags = dataclasses.replace(flags, normalize_returns="off", entropy_cost=0.05)
    torch.manual_seed(1)
    net = monobeast.Net(group.spaces.observations, space, flags)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    loss, _, metrics = monobeast.compute_loss(flags, net, batch, ())

    free = {**batch, "obs": {**batch["obs"], MASK: torch.ones_like(batch["obs"][MASK])}}
    logits, values, _ = (x.double() if isinstance(x, torch.Tensor) else x for x in net(free, ()))
    T, B = batch["done"][1:].shape
    final = (batch["terminated"] | batch["truncated"]) & ~batch["done"]
    _, _, advantages = advantages_of(flags, net, batch)
    gains, entropies, count = 0.0, 0.0, 0
    for t, b in itertools.product(range(T), range(B)):
        if final[t, b]:
            continue
        count += 1
        log_ratio, first = torch.zeros((), dtype=torch.float64), 0
        action = batch["action"][t + 1, b].reshape(len(sizes))
        for part, size in enumerate(sizes):
            legal = [c for c in range(size) if batch["obs"][MASK][t, b, first + c]]
            if legal:
                assert int(action[part]) in legal
                chosen = legal.index(int(action[part]))
                current = torch.distributions.Categorical(logits=logits[t, b, first:][legal])
                acted = torch.distributions.Categorical(logits=batch["policy_logits"][t + 1, b, first:].double()[legal])
                log_ratio = log_ratio + current.log_prob(torch.tensor(chosen)) - acted.log_prob(torch.tensor(chosen))
                entropies = entropies + current.entropy()
            else:
                entropies = entropies + math.log(size)
            first += size
        ratio = log_ratio.exp()
        gains = gains + torch.minimum(ratio * advantages[t, b], ratio.clamp(1 / 1.2, 1.2) * advantages[t, b])
    expected = (-gains - flags.entropy_cost * entropies) / count
    assert metrics["losses/entropy"].item() == pytest.approx(entropies.item() / count, rel=1e-5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    weights = list(net.policy.parameters()) + list(net.encoders.parameters())
    for found, wanted in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights)):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def advantages_of(flags, net, batch):
    """Of V-trace: its arithmetic has tests of its own, and the importance weights are checked by the caller."""
    from beast.learn import vtrace

    with torch.no_grad():
        logits, values, _ = net(batch, ())
        mask, discounts = vtrace.transition_masks(
            batch["done"], batch["terminated"], batch["truncated"], flags.discount
        )
        log_rhos = distribution(net.action_space, logits[:-1]).log_prob(batch["action"][1:])
        log_rhos = log_rhos - distribution(net.action_space, batch["policy_logits"][1:]).log_prob(batch["action"][1:])
        rewards = monobeast.scale_rewards(flags, batch["reward"][1:])
        if "final_obs" in batch:
            rewards = rewards + flags.discount * monobeast.final_values(net, batch, ())
        vs = vtrace.from_importance_weights(
            log_rhos.masked_fill(~mask, -math.inf), discounts, rewards, values[:-1], values[-1], flags.clip_rho,
            lambda_=flags.vtrace_lambda,
        ).vs  # fmt: skip
        return mask, vs, rewards + discounts * torch.cat([vs[1:], values[-1:]]) - values[:-1]


def test_a_row_without_a_legal_choice_teaches_the_policy_nothing():
    rows = play(group_of(Masked), 12, torch.Generator().manual_seed(4))
    batch = batch_of(rows)
    flags, net = masked_net(monobeast, baseline_cost=0.0)
    batch["obs"] = {"obs": batch["obs"]["numbers"], MASK: torch.zeros_like(batch["obs"][MASK])}
    batch["policy_logits"] = torch.zeros_like(batch["policy_logits"])
    loss, _, _ = monobeast.compute_loss(flags, net, batch, ())
    assert loss.isfinite()
    gradients = torch.autograd.grad(loss, list(net.policy.parameters()), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_targets_of_r2d2_take_the_best_legal_action_of_the_row_that_they_lead_to(mode):
    rows = batch_of(play(group_of(Masked, mode), 12, torch.Generator().manual_seed(4)))
    for kind in ("obs", "final_obs"):
        if kind in rows:
            rows[kind] = {"obs": torch.randn(13, 4, 2), MASK: rows[kind][MASK]}
    flags, net = masked_net(r2d2, core="none", n_steps=1)
    flags = dataclasses.replace(flags, trained=12)
    assert flags.burn_in == 0
    _, target = masked_net(r2d2, core="none")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    sample = Sample(np.arange(4), np.zeros(4, np.int64), torch.ones(4), rows, ())
    batch = r2d2.Batch(sample, target(rows, ())[0])
    loss, priorities, metrics = r2d2.compute_loss(flags, net, target, batch)

    def free(model, kind):
        inputs = {**rows, "obs": {**rows[kind], MASK: torch.ones_like(rows[kind][MASK])}}
        if kind == "final_obs":
            inputs["done"] = torch.zeros_like(rows["done"])
        return model(inputs, ())[0]

    def value(t, b, kind):
        legal = [c for c in range(4) if rows[kind][MASK][t, b, c]] or list(range(4))
        best = max(legal, key=lambda c: free(net, kind)[t, b, c].item())
        was_masked.append(best != free(net, kind)[t, b].argmax().item())
        return rescale_inverse(free(target, kind)[t, b, best]).item()

    was_masked: list[bool] = []
    errors = torch.zeros(12, 4)
    for t, b in itertools.product(range(12), range(4)):
        terminated, truncated, done = (bool(rows[x][t + 1, b]) for x in ("terminated", "truncated", "done"))
        if (rows["terminated"] | rows["truncated"])[t, b] and not rows["done"][t, b]:
            continue
        following = 0.0 if terminated else value(t + 1, b, "final_obs" if truncated and done else "obs")
        aim = rescale(rows["reward"][t + 1, b] + flags.discount * following)
        chosen = free(net, "obs")[t, b, rows["action"][t + 1, b]]
        errors[t, b] = aim - chosen
    assert any(was_masked)
    assert loss.item() == pytest.approx(0.5 * errors.square().sum(0).mean().item(), rel=1e-4)
    assert priorities.isfinite().all() and all(x.isfinite() for x in metrics.values())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    rows["policy_logits"] = torch.cat([torch.zeros(1, 4, 4), net(rows, ())[0][:-1].detach()])
    assert r2d2.initial_priorities(flags, rows).isfinite().all()


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def actors_find_the_toys(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def test_a_run_and_all_that_plays_its_checkpoint_obey_masks_of_infos(tmp_path, run_main):
    arguments = ["--env", "toy_envs:Masked-v0", "--group_width", "4", "--batch_width", "4", "--hidden_size", "64"]
    nested = '{"actions": "Tuple", "is_in_infos": true, "is_nested": true}'
    place = ["--root", str(tmp_path), "--name", "run"]
    code, output = run_main(
        monobeast, *arguments, *place, "--env_kwargs", nested, "--total_steps", "3000", "--no_tensorboard",
        "--max_env_restarts", "0", "--core", "lstm", "--core_size", "16",
    )  # fmt: skip
    assert code == 0 and "stopped at step 3," in output, output
    for greedy in ([], ["--greedy"]):
        code, output = run_main(monobeast, "--mode", "test", *place, "--episodes", "10", *greedy)
        assert code == 0 and "10 whole games" in output, output
    policy = beast.load(str(tmp_path / "run" / "checkpoint.pt"))
    env = policy.make_env(3)
    (observations, info), state, reward, done = env.reset(seed=1), None, 0.0, False
    with pytest.raises(InputError, match=r'masks are in info\["action_mask"\]: give the `info`'):
        policy.act(observations)
    for t in range(60):
        action, state = policy.act(observations, state, reward, done, greedy=t > 30, info=info)
        was_over = done
        observations, reward, terminated, truncated, info = env.step(action)
        done = terminated | truncated
    assert was_over is not done


def test_r2d2_obeys_masks_of_infos_that_env_servers_send(tmp_path, run_main):
    pytest.importorskip("libbeast")
    code, output = run_main(
        r2d2, "--preset", "vector", "--env", "toy_envs:Masked-v0", "--env_kwargs", '{"is_in_infos": true}',
        "--feed", "remote", "--num_servers", "1", "--min_fill", "500", "--total_steps", "2000", "--no_tensorboard",
        "--max_env_restarts", "0", "--root", str(tmp_path), "--name", "run", "--replay_gb", "0.1",
    )  # fmt: skip
    assert code == 0 and "stopped at step 2," in output, output
    code, output = run_main(r2d2, "--mode", "test", "--root", str(tmp_path), "--name", "run", "--epsilon", "0.5")
    assert code == 0 and "whole games" in output, output
