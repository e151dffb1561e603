"""What policies of a population are trained with, and a run in which they copy each other."""

import copy
import csv

import numpy as np
import pytest
import torch
import toy_envs
import toy_games
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import multibeast
from beast.envs.agents import AgentColumns
from beast.envs.groups import EnvGroup
from beast.errors import InputError
from beast.feeds.memory import RolloutMemory
from beast.learn.learners import Learners
from beast.population.routing import Dealer, Games, Played
from beast.population.tuned import Tuned

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)


def new_tuned(terms=None, **changes):
    flags = Flags(num_policies=3, name="run", pbt=True, reward_clip=1.0, **changes)
    nets = [torch.nn.Linear(2, 2) for _ in range(3)]
    each = [multibeast.Learner(net, torch.optim.Adam(net.parameters(), flags.learning_rate), 1) for net in nets]
    learners = Learners(each, np.random.default_rng(0))
    validate = multibeast.partial(multibeast.validate, AGENT)
    return Tuned([flags] * 3, learners, terms or {}, validate, np.random.default_rng(1)), learners


def test_each_policy_has_flags_rates_and_an_optimizer_of_its_own_numbers():
    tuned, learners = new_tuned(pbt_tune=("learning_rate", "entropy_cost", "adam_beta1"), learning_rate=1e-3)
    tuned.pbt.values = [
        {"learning_rate": 1e-3, "entropy_cost": 0.01, "adam_beta1": 0.9},
        {"learning_rate": 2e-3, "entropy_cost": 0.02, "adam_beta1": 0.8},
        {"learning_rate": 5e-4, "entropy_cost": 0.01, "adam_beta1": 0.95},
    ]
    for _ in range(2):  # from the run's rates, not from those of the last time
        tuned.apply()
        assert [flags.learning_rate for flags in tuned.flags] == [1e-3, 2e-3, 5e-4]
        assert [flags.entropy_cost for flags in tuned.flags] == [0.01, 0.02, 0.01]
        assert [learner.rates for learner in learners.each] == [[1e-3], [2e-3], [5e-4]]
        assert [learner.optimizer.param_groups[0]["betas"][0] for learner in learners.each] == [0.9, 0.8, 0.95]
    assert learners.more["pbt"] is tuned.pbt, "checkpoints have it"


def test_without_it_nothing_varies():
    flags = Flags(num_policies=2, name="run")
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    each = [multibeast.Learner(net, torch.optim.Adam(net.parameters()), 1) for net in nets]
    tuned = Tuned(
        [flags] * len(each), Learners(each, np.random.default_rng(0)), {"a": 1.0}, None, np.random.default_rng(1)
    )
    tuned.apply()
    tuned.record([[Played(0, 1.0)]])
    assert tuned.flags == [flags] * 2 and tuned.event(10**12) == []


def test_a_reward_is_made_of_the_coefficients_of_the_policy_that_acted():
    tuned, _ = new_tuned({"hit": 0.5, "step": -0.1}, pbt_tune=("reward_terms",))
    tuned.pbt.values = [
        {"reward_terms.hit": 0.5, "reward_terms.step": -0.1},
        {"reward_terms.hit": 1.0, "reward_terms.step": -0.1},
        {"reward_terms.hit": 0.25, "reward_terms.step": -0.2},
    ]
    tuned.apply()
    terms = torch.tensor([[[2.0, 1.0]] * 5])
    row = {"reward": torch.full((1, 5), 3.0), "reward_terms": terms, "policy": torch.tensor([[0, 1, 2, 3, 99]]).int()}
    tuned.shape(row)
    expected = [3.0, 3 + 2 * 0.5, 3 - 2 * 0.25 - 0.1, 3.0, 3.0]  # past policies have the environment's own
    torch.testing.assert_close(row["reward"], torch.tensor([expected]))


@pytest.mark.parametrize("objective, expected", [("score", [5.0, 7.0, 7.0]), ("win", [0.0, 0.0, 0.0])])
def test_the_objective_of_a_game_is_its_score_or_whether_it_is_the_highest_of_all(objective, expected):
    tuned, _ = new_tuned(objective=objective)
    tuned.record([[Played(0, 5.0), Played(1, 7.0), Played(2, 7.0)]])
    assert [list(window) for window in tuned.pbt.windows] == [[x] for x in expected]
    tuned.record([[Played(1, 8.0), Played(9, 7.0)], [Played(9, 8.0), Played(2, 7.0)]])
    won = {"score": [7.0, 8.0], "win": [0.0, 1.0]}[objective]
    tuned.record([[Played(1, 4.0)]])  # the others have not come
    won += [4.0] if objective == "score" else []
    assert list(tuned.pbt.windows[1]) == won and len(tuned.pbt.windows) == 3


def test_mutations_stay_within_what_the_agent_takes():
    tuned, _ = new_tuned(
        pbt_tune=("discount", "adam_beta1"), pbt_mutation_rate=1.0, pbt_factor=(5.0, 5.0), discount=0.5
    )
    for _ in range(20):
        for policy in range(3):
            tuned.pbt.record(policy, [float(policy)] * 20)
        assert len(tuned.event(10**12)) <= 2
        assert all(0 <= flags.discount <= 1 for flags in tuned.flags)
        assert all(0 <= values["adam_beta1"] < 1 for values in tuned.pbt.values)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pbt_tune": ("reward_clip",)}, "--pbt_tune reward_clip: give some of adam_beta1, baseline_cost"),
        ({"pbt_factor": (0.5, 2.0)}, r"--pbt_factor \(0.5, 2.0\): give two numbers from 1 up"),
        ({"pbt_fraction": 0.6}, "--pbt_fraction 0.6"),
        ({"pbt_min_games": 200}, "--pbt_min_games 200"),
        ({"num_policies": 1}, "--pbt: one policy has nobody to learn from"),
        ({"cuda_graphs": True}, "--pbt: with --cuda_graphs no number"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, changes, message):
    small = {
        "env": "CartPole-v1",
        "root": str(tmp_path),
        "name": "run",
        "num_policies": 2,
        "num_actors": 1,
        "pbt": True,
    }
    with pytest.raises(InputError, match=message):
        multibeast.train(Flags(**{**small, "device": "cpu", "deterministic": True, **changes}))


def test_environments_write_terms_and_success_where_they_have_them():
    group = EnvGroup(AgentColumns(toy_games.Trap, 2))
    fields = {**group.fields, "reward_terms": ((1,), "float32"), "objective": ((), "float32")}
    row = {name: np.full((2, *shape), 9, dtype) for name, (shape, dtype) in fields.items() if "/" not in name}
    row["obs"] = {"obs": np.zeros((2, 1), np.float32)}
    group.reset(1, row)
    assert row["reward_terms"].tolist() == [[0], [0]] and np.isnan(row["objective"]).all()
    group.step(np.array([0, 1]), row)
    assert row["reward"].tolist() == [1, 2] and row["reward_terms"].tolist() == [[0], [1]]
    assert row["objective"].tolist() == [1, 0]
    group.step(np.array([0, 0]), row)  # void
    assert row["reward_terms"].tolist() == [[0], [0]] and np.isnan(row["objective"]).all()


class Success(toy_envs.Counting):
    """Its infos have a term in each step, and in the last one its success."""

    reward_terms = {"count": 0.0}

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"reward_terms": np.array([self.count], np.float32)}
        info |= {"true_objective": 10.0 * self.episode + self.count} if terminated or truncated else {}
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("vector_env", [SyncVectorEnv, AsyncVectorEnv])
def test_the_last_step_of_a_game_tells_terms_and_success_in_both_conventions(vector_env):
    def told(mode) -> tuple[list, list]:
        group = EnvGroup(vector_env([Success] * 2, autoreset_mode=mode))
        memory = RolloutMemory(
            {**group.fields, "reward_terms": ((1,), "float32"), "objective": ((), "float32")}, 1, 1, 2
        )
        row, terms, objectives = memory.row(0, 1), [[], []], [[], []]
        group.reset(3, row)
        assert np.isnan(row["objective"]).all() and not row["reward_terms"].any()
        for _ in range(60):
            group.step(np.zeros(2, int), row)
            for k in range(2):
                terms[k] += row["reward_terms"][k].tolist() if row["reward"][k] else []
                objectives[k] += [x for x in row["objective"][k : k + 1].tolist() if not np.isnan(x)]
        group.close()
        return [x[:15] for x in terms], [x[:5] for x in objectives]

    same = told(AutoresetMode.SAME_STEP)
    assert same == told(AutoresetMode.NEXT_STEP) and [int(x // 10) for x in same[1][0]] == [0, 1, 2, 3, 4]


class Events:
    """What a run does to replaced policies, and what each update gets."""

    def __init__(self, monkeypatch):
        self.copies, self.updates, self.forgotten = [], [], []
        copy_learner, update, forget = multibeast.copy_learner, AGENT.update, Games.forget

        def copying(learner, donor):
            copy_learner(learner, donor)
            for own, other in zip(learner.net.state_dict().values(), donor.net.state_dict().values()):
                assert torch.equal(own, other)
            own, other = (copy.deepcopy(each.optimizer.state_dict()["state"]) for each in (learner, donor))
            for name, moments in other.items():
                assert all(torch.equal(x, own[name][key]) for key, x in moments.items()) and moments["step"] > 0
            self.copies.append((learner, learner.updates))

        def updating(flags, learner, batch, core_state):
            for replaced, since in self.copies:
                counts = batch.get("counts", torch.ones_like(batch["done"]))[1:]
                if learner is replaced:
                    assert int(batch["policy_version"][1:][counts].min()) >= since, "chosen by the new weights"
            rate = flags.learning_rate * max(1 - learner.steps / flags.total_steps, 0)
            outcome = update(flags, learner, batch, core_state)
            group = learner.optimizer.param_groups[0]
            self.updates.append((learner, flags.learning_rate, flags.entropy_cost, group["betas"][0]))
            assert group["lr"] == pytest.approx(rate)
            return outcome

        def forgetting(games, policy, version):
            self.forgotten.append(version)
            forget(games, policy, version)

        monkeypatch.setattr(Games, "forget", forgetting)
        monkeypatch.setattr(multibeast, "copy_learner", copying)
        monkeypatch.setattr(AGENT, "update", updating)


def pbt_flags(tmp_path, **changes):
    small = {
        "env": "CartPole-v1", "root": str(tmp_path), "name": "run", "num_policies": 4, "num_actors": 1, "pbt": True,
        "group_width": 16, "batch_width": 4, "unroll_length": 8, "hidden_size": 32, "deterministic": True,
        "device": "cpu", "tensorboard": False, "pbt_start": 500, "pbt_period": 300, "pbt_mutation_rate": 0.7,
        "pbt_gap_relative": 0.0, "pbt_window": 20, "pbt_min_games": 5, "total_steps": 3000, "amp": "off",
    }  # fmt: skip
    return Flags(**{**small, **changes})


def test_replaced_policies_train_on_from_the_donors_weights_with_numbers_of_their_own(tmp_path, monkeypatch):
    events = Events(monkeypatch)
    result = multibeast.train(pbt_flags(tmp_path))
    with open(result.directory / "pbt.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 4 * 7 and {row["policy"] for row in rows} == set("0123")
    replaced = [row for row in rows if row["what"] == "replaced"]
    assert len(replaced) == len(events.copies) >= 3
    assert events.forgotten == [updates for _, updates in events.copies], "games of the former weights"
    assert {row["donor"] for row in replaced} and all(row["donor"] != row["policy"] for row in replaced)
    learners = [learner for learner, *_ in events.updates]
    assert len(set(map(id, learners))) == 4
    told = {tuple(float(row[name]) for name in ("learning_rate", "entropy_cost", "adam_beta1")) for row in rows}
    seen = {tuple(numbers) for _, *numbers in events.updates}
    assert len(told) > 8 and len(told - seen) <= 4 >= len(seen - told), "all but the first and the last ones"
    state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
    assert state["pbt"]["num_events"] == int(rows[-1]["event"])
    assert sum(each["counts"]["updates"] for each in state["policies"]) == len(events.updates) + len(events.copies)


def test_a_resumed_run_has_its_numbers_again_and_its_table_goes_on(tmp_path, monkeypatch):
    first = multibeast.train(pbt_flags(tmp_path, total_steps=1500))
    values = torch.load(first.directory / "checkpoint.pt", weights_only=True)["pbt"]["values"]
    num_rows = len((first.directory / "pbt.csv").read_text().splitlines())
    begun, apply = [], Tuned.apply

    def applying(tuned):
        apply(tuned)
        begun.append((copy.deepcopy(tuned.pbt.values), [flags.learning_rate for flags in tuned.flags]))

    monkeypatch.setattr(Tuned, "apply", applying)
    again = multibeast.train(pbt_flags(tmp_path, total_steps=2500))
    assert begun[0] == (values, [each["learning_rate"] for each in values])
    lines = (again.directory / "pbt.csv").read_text().splitlines()
    assert len(lines) > num_rows and lines[1:num_rows] == lines[1:][: num_rows - 1]
    assert [line.split(",")[0] for line in lines[1::4]] == [str(n + 1) for n in range(len(lines) // 4)]


def test_the_learner_reads_the_reward_that_acting_read(tmp_path, monkeypatch):
    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    monkeypatch.setenv("PYTHONPATH", str(multibeast.Path(toy_games.__file__).parent))
    deal, seen = Dealer.deal, []

    def recording(dealer, rollout, core_state):
        seen.append({name: x.clone() for name, x in rollout.items() if name != "obs"})
        yield from deal(dealer, rollout, core_state)

    monkeypatch.setattr(Dealer, "deal", recording)
    flags = pbt_flags(
        tmp_path, env="pettingzoo:trap_game", pbt_tune=("reward_terms",), pbt_start=10**6, total_steps=800,
        pbt_mutation_rate=1.0, pbt_factor=(2.0, 2.0), reward_clip=0.0,
    )  # fmt: skip
    result = multibeast.train(flags)
    values = torch.load(result.directory / "checkpoint.pt", weights_only=True)["pbt"]["values"]
    coefficients = torch.tensor([each["reward_terms.temptation"] for each in values])
    assert coefficients[0] == 2 and set(coefficients[1:].tolist()) <= {1.0, 4.0}
    paid = 0
    for rollout in seen:
        term = rollout["reward_terms"][..., 0]
        is_success = rollout["objective"] == 1
        expected = torch.where(is_success, 1.0, term * coefficients[rollout["policy"].long()])
        torch.testing.assert_close(rollout["reward"], expected)
        paid += int(term.sum())
        over = rollout["objective"].isfinite()
        default = torch.where(is_success, 1.0, 2.0)
        torch.testing.assert_close(rollout["episode_return"][over], default[over])
    assert paid > 300 and len(seen) > 10
