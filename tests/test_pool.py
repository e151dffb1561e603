"""Past policies, who beat whom, and self-play with them."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import toy_games
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import multibeast
from beast.envs.groups import EnvGroup
from beast.envs.rows import OBJECTIVE
from beast.feeds.memory import RolloutMemory
from beast.population.pool import RESULTS, Population
from beast.population.routing import POLICY, Dealer, Games, Played, Seats

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)


def new_population(num_live=2, every=100, size=4, at_once=2, seed=0):
    nets = [torch.nn.Linear(2, 2) for _ in range(num_live)]
    return Population(nets, every, size, at_once, np.random.default_rng(seed)), nets


def grown(population, steps, policy=0, step=10):
    for now in range(step, steps + 1, step):
        population.grow(policy, now)
    return [(past["number"], past["steps"]) for past in population.state_dict()["kept"]]


def test_past_policies_cover_the_run_evenly_and_a_number_is_used_once():
    population, _ = new_population(size=4)
    assert grown(population, 400) == [(2, 100), (3, 200), (4, 300), (5, 400)]
    population, _ = new_population(size=4)
    assert grown(population, 500) == [(2, 100), (4, 300), (6, 500)], "one too many: every second one stays"
    population, _ = new_population(size=4)
    assert grown(population, 1100) == [(2, 100), (6, 500), (8, 900)]  # from 500 on every 200 steps, from 900 on 400
    kept = grown(new_population(size=16)[0], 20_000)
    gaps = np.diff([steps for _, steps in kept])
    assert 8 <= len(kept) <= 16 and set(gaps.tolist()) == {1600}


def test_nets_of_dropped_policies_are_freed_when_no_game_has_them():
    population, _ = new_population(num_live=1, every=100, size=4, at_once=1)
    for now in range(100, 100_000, 100):
        population.grow(0, now, playing={3})
        assert set(population.past()) <= set(population._all)
    kept = {past["number"] for past in population.state_dict()["kept"]}
    assert population.net(3) and 3 not in kept, "a game goes on"
    assert len(population._all) <= 2 * 4 + 1


def test_past_policies_of_each_live_one_cover_the_run():
    population, _ = new_population(num_live=3, size=9)
    for now in range(10, 10_000, 10):
        for policy in range(3):
            population.grow(policy, now)
    kept = population.state_dict()["kept"]
    steps = [[past["steps"] for past in kept if past["parent"] == policy] for policy in range(3)]
    assert all(2 <= len(each) <= 3 and each[0] < 5000 < each[-1] for each in steps) and len(kept) <= 9
    population, _ = new_population(num_live=8, size=1)
    for now in range(100, 1000, 100):
        for policy in range(8):
            population.grow(policy, now)
    kept = population.state_dict()["kept"]
    assert {past["parent"] for past in kept} == set(range(8)) and 8 <= len(kept) <= 16


def test_a_past_policy_of_a_compiled_net_has_weights_of_its_own():
    population, nets = new_population(num_live=1)
    nets[0].forward = nets[0].forward  # as --compile does: a function that is bound to this net
    population.grow(0, 100)
    x = torch.ones(2)
    before = population.net(1)(x)
    with torch.no_grad():
        nets[0].weight.add_(1)
    assert torch.equal(population.net(1)(x), before) and not torch.equal(nets[0](x), before)


def test_few_past_policies_are_drawn_from_at_a_time_and_all_have_their_turn():
    population, _ = new_population(every=100, size=8, at_once=2)
    assert population.past() == [] and population.live() == [0, 1]
    population.grow(0, 100)
    assert population.past() == [2], "there is no other yet"
    seen, changes = set(), 0
    for now in range(110, 3000, 5):
        before = population.past()
        population.grow(0, now)
        changes += population.past() != before
        kept = [past["number"] for past in population.state_dict()["kept"]]
        assert len(population.past()) == min(2, len(kept)) and set(population.past()) <= set(kept)
        seen |= set(population.past())
    assert len(seen) > 8 and 20 < changes < 120
    population, _ = new_population(every=0)
    population.grow(0, 10**9)
    assert population.past() == []


def test_a_past_policy_stays_as_it_was_and_plays_on_when_it_is_dropped():
    population, nets = new_population(every=100, size=1)
    population.grow(1, 50)
    population.grow(1, 100)
    before = copy.deepcopy(nets[1].state_dict())
    with torch.no_grad():
        nets[1].weight.add_(1)
    assert all(torch.equal(x, before[name]) for name, x in population.net(2).state_dict().items())
    for steps in (200, 300, 400, 500):
        population.grow(1, steps)
    assert [past["number"] for past in population.state_dict()["kept"]] == [2, 4, 6]
    population.grow(1, 700)
    population.grow(1, 900)
    assert [past["number"] for past in population.state_dict()["kept"]] == [2, 6, 8]
    assert population.net(4) and not torch.equal(population.net(4).weight, before["weight"]), "it may still play"
    assert population.kind_of(2) == 0 and torch.equal(population.net(2).weight, before["weight"])
    assert (
        population.kind_of(0) == 0
        and population.kind_of(1) == 0
        and population.kind_of(99) == population.kind_of(-1) == -1
    )


def rollout_of(policy, done, step, returns):
    rows = {"policy": policy, "done": done, "episode_step": step, "episode_return": returns}
    rows = {name: torch.tensor(x) for name, x in rows.items()}
    nothing, never = torch.zeros_like(rows["episode_return"]), torch.zeros_like(rows["done"])
    rows |= {"objective": nothing + torch.nan, "reward": nothing, "terminated": never, "truncated": never}
    return {**rows, "task": never.int(), "group": never.int(), "policy_version": never.int()}


def finished_games(rollout, seats):
    return Games(3, seats).finished(rollout)


def test_a_game_of_several_seats_is_a_result_for_each_pair_of_policies():
    population, _ = new_population(num_live=3)
    # Two environments of two seats. The first ends its game in row 1 (a win of policy 1), the second in row 2 (a tie)
    # and again in row 3; its seats are one policy's then.
    done = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    step = [[0, 0, 5, 5], [1, 1, 6, 6], [0, 0, 7, 7], [1, 1, 0, 0], [2, 2, 0, 0]]
    step[3][2:] = [1, 1]
    done[3][2:] = [0, 0]
    done[2][2:], step[2][2:] = [1, 1], [0, 0]
    returns = [[0, 0, 1, 1], [-2, 3, 4, 4], [0, 0, 0, 0], [9, 9, 5, 1], [9, 9, 0, 0]]
    policy = [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    rollout = rollout_of(policy, np.array(done, bool), step, np.array(returns, np.float32))
    population.record(finished_games(rollout, 2))
    found = {pair: list(x) for pair, x in population.results.items()}
    assert found == {(0, 1): [0.0], (1, 0): [1.0], (2, 0): [0.5], (0, 2): [0.5]}
    alone, _ = new_population(num_live=3)
    alone.record(finished_games(rollout, 1))
    assert not alone.results, "one seat beats nobody"


def test_the_score_of_a_game_is_what_the_environment_calls_success_or_else_its_return():
    done = np.array([[0, 0], [1, 1]], bool)
    rollout = rollout_of([[0, 1]] * 2, done, [[4, 3], [0, 0]], np.array([[10, 20], [0, 0]], np.float32))
    assert finished_games(rollout, 2) == [[Played(0, 10), Played(1, 20)]]
    assert finished_games(rollout, 1) == [[Played(0, 10)], [Played(1, 20)]]
    rollout["objective"][0] = torch.tensor([0.5, 2.0])
    assert finished_games(rollout, 2) == [[Played(0, 0.5), Played(1, 2.0)]]
    rollout["objective"][0, 0] = torch.inf
    assert finished_games(rollout, 2)[0][0].score == np.inf, "which PBT refuses by name"


def test_all_seats_of_a_game_are_scored_by_the_same_and_one_without_a_result_does_not_count():
    done = np.array([[0, 0], [1, 1]], bool)
    rollout, games = (
        rollout_of([[0, 1]] * 2, done, [[4, 3], [0, 0]], np.array([[10, 20], [0, 0]], np.float32)),
        Games(2, 2),
    )
    by_return, by_objective = [[Played(0, 10), Played(1, 20)]], [[Played(0, 1), Played(1, 0)]]
    for objectives, expected in (
        ([0.5, torch.nan], by_return),
        ([1.0, 0.0], by_objective),
        ([torch.nan, torch.nan], []),  # it has crashed
        ([0.5, torch.nan], []),
        ([1.0, 0.0], by_objective),
    ):
        rollout["objective"][0] = torch.tensor(objectives)
        assert games.finished(rollout) == expected
    rollout["objective"][0] = torch.nan
    assert games.finished({**rollout, "task": rollout["task"] + 1}) == by_return, "another task has its own measure"


def test_games_that_a_replaced_policy_began_with_its_former_weights_do_not_count():
    games, returns = Games(2, 1), np.arange(8, dtype=np.float32).reshape(4, 2)
    done, step = np.zeros((4, 2), bool), [[3, 3], [4, 4], [5, 5], [6, 6]]
    rollout = rollout_of([[0, 1]] * 4, done, step, returns)
    rollout["policy_version"] += torch.tensor([[7], [7], [8], [9]], dtype=torch.int32)
    assert games.finished(rollout) == []
    games.forget(0, 9)
    done[1], step = True, [[6, 6], [0, 0], [1, 1], [0, 0]]  # one ends, another is played and ends
    done[3] = True
    other = {**rollout_of([[0, 1]] * 4, done, step, returns), "group": rollout["group"] + 1}
    rollout = rollout_of([[0, 1]] * 4, done, step, returns)
    rollout["policy_version"] += 9
    other["policy_version"] += 8
    assert games.finished(rollout) == [[Played(1, 1)], [Played(0, 4)], [Played(1, 5)]], "it ended with the new weights"
    assert games.finished(other) == [[Played(1, 1)], [Played(1, 5)]]
    assert games.finished(rollout_of([[5, 1]] * 4, done, step, returns))[0] == [Played(5, 0)], "past ones never change"


class Duel(VectorEnv):
    """Two columns are the seats of games of 1, 2 and 3 steps. The seats win in turn, in the last step: 5 more."""

    num_envs = 2
    single_observation_space, single_action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, mode, tells):
        self.metadata = {"autoreset_mode": mode, "agents": 2}
        self.is_same_step, self.tells = mode == AutoresetMode.SAME_STEP, tells

    def reset(self, *, seed=None, options=None):
        self.steps, self.game, self.is_over = 0, 0, False
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        if self.is_over and not self.is_same_step:
            self.steps, self.is_over = 0, False
            return np.zeros((2, 1), np.float32), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}
        self.steps += 1
        self.is_over, won = self.steps == 1 + self.game % 3, np.arange(2) == self.game % 2
        rewards, infos = np.ones(2) + 5 * won * self.is_over, {}
        if self.is_over:
            infos = {"true_objective": self.game + won, "_true_objective": np.ones(2, bool)} if self.tells else {}
            self.game += 1
            if self.is_same_step:
                self.steps, infos = 0, {"final_info": infos, "_final_info": np.ones(2, bool)}
        return np.zeros((2, 1), np.float32), rewards, np.full(2, self.is_over), np.zeros(2, bool), infos


@pytest.mark.parametrize("tells", [False, True], ids=["returns", "objectives"])
def test_games_and_scores_are_the_same_whether_a_step_resets_or_the_next_one(tells):
    def played(mode):
        group = EnvGroup(Duel(mode, tells))
        memory = RolloutMemory({**group.fields, **POLICY, OBJECTIVE: ((), "float32")}, 1, 5, 2)
        for name in ("policy", "group", "env_number"):
            memory.arrays[name][...] = 0
        draws = itertools.count()
        seats = Seats(lambda game: [next(draws), 99], lambda policy: 0, 2, 2, (0, 0))
        games, found = Games(0, 2), []
        group.reset(1, memory.row(0, 0))
        for _ in range(12):
            for t in range(1, 6):
                inputs = {name: torch.from_numpy(x[:, t - 1]) for name, x in memory.arrays.items()}
                memory.row(0, t)["policy"][...] = seats.players(inputs)
                group.step(np.zeros(2, int), memory.row(0, t))
            found += games.finished({name: torch.from_numpy(x[0]) for name, x in memory.arrays.items()})
            memory.repeat_last_row(0, 0)
        return found[:12]

    found = played(AutoresetMode.NEXT_STEP)
    scores = [
        (n + 1 - n % 2, n + n % 2) if tells else (1 + n % 3 + 5 * (1 - n % 2), 1 + n % 3 + 5 * (n % 2))
        for n in range(12)
    ]
    assert found == [[Played(n, scores[n][0]), Played(99, scores[n][1])] for n in range(12)]
    assert played(AutoresetMode.SAME_STEP) == found


def test_a_seat_that_has_not_come_has_neither_won_nor_lost():
    population, _ = new_population(num_live=3)
    done = np.array([[0, 0, 0], [1, 1, 0]], bool)
    rollout = rollout_of([[0, 1, 2]] * 2, done, [[4, 3, 0], [0, 0, 0]], np.array([[1, 0, 0], [0, 0, 0]], np.float32))
    population.record(finished_games(rollout, 3))
    assert {pair: list(x) for pair, x in population.results.items()} == {(0, 1): [1.0], (1, 0): [0.0]}


def test_a_past_policy_begins_with_its_parents_results_and_the_latest_count():
    population, _ = new_population(num_live=2)
    done = np.array([[0, 0], [1, 1]], bool)
    for number in range(RESULTS + 20):
        won = np.array([[1, 0], [0, 0]] if number >= 20 else [[0, 1], [0, 0]], np.float32)
        population.record(finished_games(rollout_of([[0, 1]] * 2, done, [[3, 3], [0, 0]], won), 2))
    assert sum(population.results[0, 1]) == RESULTS == len(population.results[0, 1])
    population.grow(0, 100)
    payoff = population.payoff()
    assert payoff["policies"] == [0, 1, 2] and payoff["parents"] == [None, None, 0]
    assert payoff["points"] == [[0, 100, 0], [0, 0, 0], [0, 100, 0]]
    assert payoff["games"] == [[0, 100, 0], [100, 0, 100], [0, 100, 0]]
    first, second, past = payoff["ratings"]
    assert first == pytest.approx(past) and first > 180 > second
    population.record(finished_games(rollout_of([[2, 1]] * 2, done, [[3, 3], [0, 0]], 1 - won), 2))
    assert sum(population.results[2, 1]) == 99 and sum(population.results[0, 1]) == 100, "and has its own from then on"


def test_a_resumed_population_goes_on_as_if_there_had_been_no_stop():
    straight, nets = new_population(size=4, every=100)
    stopped, _ = new_population(size=4, every=100)
    stopped._nets = nets
    done = np.array([[0, 0], [1, 1]], bool)
    won = np.array([[1, 0], [0, 0]], np.float32)
    for now in range(10, 1500, 10):
        for population in (straight, stopped):
            population.grow(now // 10 % 2, now)
            population.record(finished_games(rollout_of([[0, 1]] * 2, done, [[3, 3], [0, 0]], won), 2))
        with torch.no_grad():
            nets[0].weight.add_(0.1)
        if now in (250, 700, 710):
            again = Population(nets, 100, 4, 2, np.random.default_rng(99))
            again.load_state_dict(copy.deepcopy(stopped.state_dict()))
            stopped = again
        assert straight.past() == stopped.past()
    one, other = straight.state_dict(), stopped.state_dict()
    for a, b in zip(one["kept"], other["kept"]):
        a, b = a.pop("net"), b.pop("net")
        assert all(torch.equal(x, b[name]) for name, x in a.items())
    assert json.dumps(one) == json.dumps(other) and len(one["kept"]) > 2


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch):
    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    monkeypatch.setenv("PYTHONPATH", str(multibeast.Path(toy_games.__file__).parent))  # of actors
    return "pettingzoo:toy_games"


def self_play_flags(tmp_path, env, **changes):
    small = {
        "env": env, "root": str(tmp_path), "name": "run", "num_actors": 1, "group_width": 16, "batch_width": 8,
        "unroll_length": 16, "hidden_size": 64, "tensorboard": False, "device": "cpu", "past_every": 1000,
    }  # fmt: skip
    return Flags(**{**small, **changes})


def test_past_policies_play_and_are_not_trained_and_their_run_resumes(tmp_path, env, monkeypatch):
    deal, seen, dealt = Dealer.deal, [], []

    def recording(dealer, rollout, core_state):
        seen.append((rollout["policy"].clone(), rollout["episode_step"].clone()))
        for policy, batch, state in deal(dealer, rollout, core_state):
            dealt.append(policy)
            yield policy, batch, state

    monkeypatch.setattr(Dealer, "deal", recording)
    flags = self_play_flags(tmp_path, env, deterministic=True, num_policies=2, total_steps=3000, past_share=0.5)
    result = multibeast.train(flags)
    assert set(dealt) == {0, 1}
    policies = torch.cat([policy[1:] for policy, _ in seen[len(seen) // 2 :]])  # where there are past ones
    past = policies >= 2
    games = past.unflatten(1, (-1, 2)).any(-1).float().mean()
    assert 0.4 < games < 0.6, "--past_share of the games"
    assert not past.unflatten(1, (-1, 2)).all(-1).any(), "one seat stays with a policy that learns"
    state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
    assert result.steps == sum(each["counts"]["steps"] for each in state["policies"])
    kept = state["population"]["kept"]
    assert len(kept) >= 4 and {past["parent"] for past in kept} == {0, 1}
    payoff = json.loads((result.directory / "payoff.json").read_text())
    assert payoff["policies"] == [0, 1, *(past["number"] for past in kept)]
    games = np.array(payoff["games"])
    assert (games == games.T).all() and games[0, 1] == 100 and games[0, 2:].sum() > 100
    again = multibeast.train(self_play_flags(tmp_path, env, deterministic=True, num_policies=2, total_steps=4000))
    state = torch.load(again.directory / "checkpoint.pt", weights_only=True)["population"]
    assert state["next_number"] > kept[-1]["number"] + 1
    assert [past for past in state["kept"] if past["number"] == kept[0]["number"]], "the oldest one is still there"
    assert not (result.directory / "best.pt").exists(), "what one rival wins the other loses"
