"""Population-based training: who copies whom, and which numbers change, by the rules of Sample Factory's paper."""

import copy
import json
import math

import numpy as np
import pytest

from beast.errors import InputError
from beast.population.pbt import BETA1, PBT, Rules

PAPER = Rules(
    start=5_000_000, period=1_250_000, fraction=0.3, gap_absolute=1e-6, gap_relative=0.1, mutation_rate=0.15,
    factor=(1.2, 1.2), window=100, min_games=20, keep_first=True,
)  # fmt: skip
DEFAULTS = {"learning_rate": 1e-4, "entropy_cost": 0.003, "discount": 0.99}


def new_pbt(num_policies=8, seed=0, defaults=DEFAULTS, is_valid=lambda values: True, **changes):
    rules = PAPER._replace(**changes)
    return PBT(rules, num_policies, defaults, is_valid, np.random.default_rng(seed))


def with_objectives(pbt, *objectives, games=20):
    for policy, objective in enumerate(objectives):
        pbt.record(policy, [objective] * games)
    return pbt


def test_of_eight_policies_the_best_three_stay_and_the_worst_three_copy_one_of_them():
    pbt = with_objectives(new_pbt(), 10, 80, 20, 70, 30, 60, 40, 50)
    changes = pbt.event()
    assert [change.rank for change in changes] == [7, 0, 6, 1, 5, 2, 4, 3]
    assert {change.policy for change in changes if change.what == "best"} == {1, 3, 5}
    replaced = {change.policy: change.donor for change in changes if change.what == "replaced"}
    assert replaced.keys() == {0, 2, 4} and set(replaced.values()) <= {1, 3, 5}
    assert all(change.what in ("kept", "mutated") and change.donor == change.policy for change in changes[6:])
    assert [len(window) for window in pbt.windows] == [0, 20, 0, 20, 0, 20, 20, 20], "a new one begins anew"
    assert pbt.values[0] == changes[replaced[0]].values, "policy 0 takes the donor's numbers as they are"


def decided_naively(objectives, games, values, rules, random):
    """The rules of the paper once more, on plain lists."""
    ranked = [p for p in range(len(objectives)) if games[p] >= rules.min_games]
    ranked.sort(key=lambda p: p)
    ranked.sort(key=lambda p: objectives[p], reverse=True)
    n = -int(-rules.fraction * len(ranked) // 1)
    best, result = ranked[:n], []
    for p in range(len(objectives)):
        donor, new = p, dict(values[p])
        if p in ranked and p not in best and len(ranked) > 1:
            if p in ranked[-n:]:
                c = int(random.choice(best))
                gap = objectives[c] - objectives[p]
                if gap > rules.gap_absolute and gap > rules.gap_relative * max(abs(objectives[c]), abs(objectives[p])):
                    donor = c
            new = dict(values[donor])
            if not (p == 0 and rules.keep_first):
                for name in sorted(new):
                    is_changed, is_up = random.random() < rules.mutation_rate, random.random() < 0.5
                    f = random.uniform(*rules.factor)
                    f = f if is_up else 1 / f
                    if is_changed:
                        new[name] = 1 - f * (1 - new[name]) if name in ("discount", BETA1) else f * new[name]
        result.append((donor, new))
    return result


def test_decisions_are_those_of_a_naive_twin_for_random_populations():
    for seed in range(1000):
        random = np.random.default_rng(seed)
        P = int(random.integers(2, 13))
        rules = {
            "fraction": float(random.choice([0.1, 0.3, 0.5])), "keep_first": bool(random.random() < 0.5),
            "mutation_rate": float(random.choice([0.0, 0.5, 1.0])), "factor": (1.1, 1.5),
            "gap_relative": float(random.choice([0.0, 0.1])),
        }  # fmt: skip
        pbt = new_pbt(P, seed, {**DEFAULTS, BETA1: 0.9}, **rules)
        objectives = random.choice([-3.0, -1.0, 0.0, 1.0, 1.05, 7.0], size=P).tolist()
        games = random.choice([0, 5, 20, 30], size=P, p=[0.1, 0.1, 0.4, 0.4]).tolist()
        for policy in range(P):
            pbt.record(policy, [objectives[policy]] * games[policy])
        twin = np.random.default_rng()
        twin.bit_generator.state = pbt.state_dict()["draws"]
        expected = decided_naively(objectives, games, copy.deepcopy(pbt.values), pbt.rules, twin)
        changes = pbt.event()
        for change, (donor, values) in zip(changes, expected):
            assert change.donor == donor and change.values == pytest.approx(values), (seed, change)
            assert (change.what == "replaced") == (donor != change.policy)
            assert (change.rank is None) == (games[change.policy] < 20) == (change.what == "young")
        assert pbt.values == [change.values for change in changes]


def test_numbers_mutate_as_often_and_as_far_as_the_rules_say():
    pbt = new_pbt(num_policies=4000, seed=1)
    values = pbt.values
    assert values[0] == DEFAULTS, "the first one begins with the defaults"
    rates = np.array([each["learning_rate"] for each in values[1:]]) / DEFAULTS["learning_rate"]
    up, down = (rates > 1.001).mean(), (rates < 0.999).mean()
    sigma = math.sqrt(0.075 * 0.925 / len(rates))
    assert abs(up - 0.075) < 4 * sigma and abs(down - 0.075) < 4 * sigma
    assert set(np.round(rates, 6).tolist()) == {1.0, 1.2, round(1 / 1.2, 6)}
    discounts = {round(each["discount"], 6) for each in values}
    assert discounts == {0.99, 0.988, round(1 - 0.01 / 1.2, 6)}, "a factor changes its distance from 1"
    both = [each for each in values if each["learning_rate"] != 1e-4 and each["entropy_cost"] != 0.003]
    assert abs(len(both) / 4000 - 0.15**2) < 4 * math.sqrt(0.0225 / 4000), "each alone"


def test_donors_are_drawn_evenly_from_the_best():
    pbt, donors = new_pbt(mutation_rate=0.0), []
    for _ in range(600):
        with_objectives(pbt, 10, 80, 20, 70, 30, 60, 40, 50)
        donors += [change.donor for change in pbt.event() if change.what == "replaced"]
    counts = np.bincount(donors, minlength=8)[[1, 3, 5]]
    assert counts.sum() == len(donors) == 1800 and abs(counts - 600).max() < 4 * math.sqrt(1800 / 3 * 2 / 3)


@pytest.mark.parametrize(
    "best, worst, is_replaced",
    [
        (1.0, 0.95, False),
        (1.0, 0.85, True),
        (-1.0, -1.05, False),
        (-0.905, -1.0, False),
        (-1.0, -2.0, True),
        (0.0, -1e-7, False),
        (1e-7, 0, False),
    ],
)
def test_a_policy_is_replaced_by_one_that_is_clearly_better(best, worst, is_replaced):
    changes = with_objectives(new_pbt(2, fraction=0.5), best, worst).event()
    assert (changes[1].what == "replaced") == is_replaced


def test_young_policies_are_neither_ranked_nor_touched_and_one_alone_stays_as_it_is():
    pbt = new_pbt(4, mutation_rate=1.0)
    before = copy.deepcopy(pbt.values)
    pbt.record(0, [1.0] * 19)
    pbt.record(1, [2.0] * 20)
    changes = pbt.event()
    assert [change.what for change in changes] == ["young", "best", "young", "young"] and pbt.values == before
    with_objectives(pbt, 5.0)
    assert pbt.event()[2].what == "young"


def test_the_objective_is_the_mean_of_the_latest_games_since_the_weights_were_replaced():
    pbt = new_pbt(2, fraction=0.5, window=30)
    pbt.record(0, [5.0] * 100)
    pbt.record(1, [9.0] * 50 + [1.0] * 20)
    first, second = pbt.event()
    assert second.objective == pytest.approx((9 * 10 + 20) / 30) and second.games == 30
    assert second.what == "replaced" and len(pbt.windows[1]) == 0 and len(pbt.windows[0]) == 30
    with pytest.raises(InputError, match="policy 1: the objective of a game is .*nan"):
        pbt.record(1, [1.0, math.nan])
    assert len(pbt.windows[1]) == 0


def test_an_event_is_due_for_all_at_once():
    pbt = new_pbt(4, start=1000, period=300)
    assert [pbt.is_due(steps) for steps in (3999, 4000)] == [False, True]
    pbt.event()
    assert [pbt.is_due(steps) for steps in (4000, 5199, 5200)] == [False, False, True]


def test_what_the_agent_does_not_take_is_not_mutated_and_0_stays_0():
    def is_valid(values):
        return values["learning_rate"] <= 1.1e-4

    pbt = new_pbt(50, mutation_rate=1.0, defaults={"learning_rate": 1e-4, "ppo_clip": 0.0}, is_valid=is_valid)
    rates = {round(values["learning_rate"], 9) for values in pbt.values}
    assert rates == {1e-4, round(1e-4 / 1.2, 9)} and all(values["ppo_clip"] == 0 for values in pbt.values)


def test_a_stop_between_events_changes_nothing_of_what_follows():
    def series(*stops):
        pbt, told, random = new_pbt(6, seed=4, mutation_rate=0.5), [], np.random.default_rng(9)
        for number in range(6):
            for policy in range(6):
                pbt.record(policy, random.normal(policy, 1.0, size=25).tolist())
            told.append([change._asdict() for change in pbt.event()])
            if number in stops:
                state = json.loads(json.dumps(pbt.state_dict()))
                pbt = new_pbt(6, seed=77, mutation_rate=0.5)
                pbt.load_state_dict(state)
        assert [(row["event"], row["policy"]) for row in pbt.history] == [(e, p) for e in range(1, 7) for p in range(6)]
        assert [row["entropy_cost"] for row in pbt.history] == [x["values"]["entropy_cost"] for e in told for x in e]
        return told

    assert series() == series(0, 3) == series(0, 1, 2, 3, 4, 5)
