"""Matches of two policies: who wins, from which seat, and what is told of it."""

import itertools
import json
import sys
import types

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import beast
import multibeast
from beast.envs.agents import AgentColumns
from beast.errors import InputError
from beast.population.match import play_match, scores_of

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)


class Higher:
    """The higher action wins the round. Both are seen one round later. The first agent leaves a round early, its last
    reward is what it has won and `lead`. With `tells` the last action of each is its objective."""

    possible_agents = ["first", "second"]
    metadata = {"name": "higher_v0", "render_fps": 5}

    def __init__(self, rounds=2, lead=0.0, tells=False, render_mode=None):
        self.tells = tells
        self.rounds, self.lead, self.agents, self.render_mode = rounds, lead, [], render_mode

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        return spaces.Box(-1, 5, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        self.agents, self.round = list(self.possible_agents), 0
        return {x: np.zeros(2, np.float32) for x in self.agents}, {x: {} for x in self.agents}

    def step(self, actions):
        self.round += 1
        acting = list(self.agents)
        a, b = (actions.get(x, 0) for x in self.possible_agents)
        won = float(np.sign(a - b)) if len(acting) == 2 else 0.0
        rewards = {"first": won, "second": -won}
        ends = {"first": self.round >= self.rounds, "second": self.round > self.rounds}
        if ends["first"]:
            rewards["first"] += self.lead
        self.agents = [x for x in acting if not ends[x]]
        return (
            {x: np.array([a, b], np.float32) for x in acting},
            {x: rewards[x] for x in acting},
            {x: ends[x] for x in acting},
            dict.fromkeys(acting, False),
            {x: {"true_objective": float(actions[x])} if self.tells and ends[x] else {} for x in acting},
        )

    def render(self):
        return np.full((40, 40, 3), 20 * self.round, np.uint8)

    def close(self):
        pass


class Rounds(VectorEnv):
    """Games of one step, in which each seat wins what its action is, and twice that is its objective."""

    single_observation_space, single_action_space = spaces.Box(-1, 5, (2,), np.float32), spaces.Discrete(4)

    def __init__(self, num_envs, mode):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode, "agents": 2}

    def reset(self, *, seed=None, options=None):
        self.is_over = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        is_same_step, never = self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP, np.zeros(self.num_envs, bool)
        self.is_over = ~self.is_over | is_same_step
        infos = {"true_objective": 2 * actions} if self.is_over.all() else {}
        infos = {"final_info": infos, "_final_info": ~never} if is_same_step else infos
        return np.zeros((self.num_envs, 2), np.float32), actions.astype(float), self.is_over.copy(), never, infos


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two policies that have learned next to nothing."""

    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    module = types.ModuleType("higher_toy")
    module.parallel_env = Higher
    monkeypatch.setitem(sys.modules, "higher_toy", module)
    flags = Flags(
        env="pettingzoo:higher_toy", root=str(tmp_path), name="run", num_policies=2, deterministic=True, num_actors=1,
        group_width=4, batch_width=2, unroll_length=4, hidden_size=16, total_steps=40, tensorboard=False, device="cpu",
    )  # fmt: skip
    multibeast.train(flags)
    return tmp_path / "run"


def rivals(run, *actions, **changes):
    """Policies of the run that take these actions in every round."""
    found = []
    for policy, action in enumerate(actions):
        rival = beast.load(str(run / "checkpoint.pt"), policy=policy)
        rival.make_env = lambda n, policy=policy, **more: AgentColumns(lambda: Higher(**changes, **more), n)
        with torch.no_grad():
            rival.net.policy.weight.zero_()
            rival.net.policy.bias.copy_(50 * torch.nn.functional.one_hot(torch.tensor(action), 4))
        found.append(rival)
    return tuple(found)


@pytest.mark.parametrize("better, worse", [(0, 1), (1, 0)])
def test_the_better_rival_wins_all_games_from_both_seats(run, better, worse):
    actions = [3, 3]
    actions[worse] = 1
    played = play_match(rivals(run, *actions), 21, seed=0, max_steps=100)
    assert len(played) == 21 and not any(game.is_cut for game in played)
    assert all(game.returns[better] == 2 and game.returns[worse] == -2 for game in played)
    assert abs(sum(game.first_seat for game in played) - 10.5) <= 1, "each begins half of the games"
    assert {game.length for game in played} == {3}, "to the last agent's end"


def test_a_lead_of_the_first_seat_goes_to_each_in_half_of_the_games(run):
    played = play_match(rivals(run, 2, 2, lead=0.5), 40, seed=0, max_steps=100)
    assert all(game.returns[game.first_seat] == 0.5 and game.returns[1 - game.first_seat] == 0 for game in played)
    assert sum(game.first_seat for game in played) == 20


def test_games_that_do_not_end_are_cut_and_the_next_ones_played(run):
    played = play_match(rivals(run, 2, 1, rounds=10**6), 20, seed=0, max_steps=7)
    assert len(played) == 20 and all(game.is_cut and game.length == 7 for game in played)
    assert all(game.returns == (7, -7) for game in played)
    assert sum(game.first_seat for game in played) == 10


def test_a_game_that_was_cut_counts_once_while_others_go_on(run):
    found = rivals(run, 2, 1)
    for rival in found:
        rounds = itertools.cycle([3, 10**6])
        rival.make_env = lambda n, rounds=rounds: AgentColumns(lambda: Higher(rounds=next(rounds)), n)
    played = play_match(found, 40, seed=0, max_steps=7)
    assert len(played) == 40 and {game.length for game in played if game.is_cut} == {7}
    assert 0 < sum(game.is_cut for game in played) < 40


def test_the_objective_decides_where_there_is_one_and_a_cut_game_has_none(run):
    found = rivals(run, 3, 1, rounds=1, lead=-5.0)
    for rival in found:
        rounds = itertools.cycle([1, 10**6])
        rival.make_env = lambda n, rounds=rounds: AgentColumns(lambda: Higher(next(rounds), -5.0, tells=True), n)
    played = play_match(found, 20, seed=0, max_steps=7)
    decided_by, scores = scores_of(played)
    assert decided_by == "true_objective" and scores == [None if game.is_cut else (3, 1) for game in played]
    assert {game.returns for game in played if not game.is_cut} == {(-4, -1), (1, -6)}, "by who had the first seat"
    assert 0 < sum(game.is_cut for game in played) < 20
    assert scores_of([game._replace(objectives=None) for game in played]) == ("return", [x.returns for x in played])


def test_a_match_where_a_step_resets_is_that_of_one_where_the_next_one_does(run):
    def played(mode):
        found = rivals(run, 3, 1)
        for rival in found:
            rival.make_env = lambda n: Rounds(n, mode)
        return play_match(found, 9, seed=0, max_steps=100)

    games = played(AutoresetMode.SAME_STEP)
    assert games == played(AutoresetMode.NEXT_STEP)
    assert all(game.returns == (3, 1) and game.objectives == (6, 2) and game.length == 1 for game in games)


def test_a_match_is_told_filmed_and_written_beside_the_first_rivals_checkpoint(run, tmp_path, capsys):
    film = tmp_path / "film.gif"
    flags = Flags(mode="match", rivals=(f"{run}:1", f"{run}/checkpoint.pt"), episodes=6, video=str(film))
    result = multibeast.match(flags)
    told = json.loads((run / "match.json").read_text())
    assert told["decided_by"] == "return" and told["played"][0]["scores"] == told["played"][0]["returns"]
    assert told == json.loads(json.dumps(result)) and len(told["played"]) == told["games"] == 6
    text = capsys.readouterr().out
    assert (
        f"{run}:1 against {run}/checkpoint.pt: 6 games of" in text
        and "decided by returns" in text
        and "95 % confidence" in text
    )
    wins, losses, ties = (told[name][0] for name in ("wins", "losses", "ties"))
    assert wins + losses + ties == pytest.approx(1) and told["score"][0] == pytest.approx(wins + ties / 2)
    assert film.stat().st_size > 100


def test_rivals_that_cannot_meet_are_refused_by_name(run, tmp_path):
    with pytest.raises(InputError, match="--rivals a: give two"):
        multibeast.match(Flags(mode="match", rivals=("a",)))
    with pytest.raises(InputError, match="no policy 2: its policies are 0 to 1"):
        multibeast.match(Flags(mode="match", rivals=(f"{run}:0", f"{run}:2")))
    first, second = rivals(run, 1, 2)
    second.spaces.observations["obs"] = spaces.Box(0, 1, (7,), np.float32)
    with pytest.raises(InputError, match=r"trained on other spaces, .*\(7,\)"):
        play_match((first, second), 2, 0, 100)
    flags = Flags(
        env="CartPole-v1", root=str(tmp_path), name="alone", deterministic=True, num_actors=1, group_width=4,
        unroll_length=4, hidden_size=16, total_steps=40, tensorboard=False, device="cpu",
    )  # fmt: skip
    multibeast.train(flags)
    with pytest.raises(InputError, match="CartPole-v1: a match needs an environment of two agents"):
        multibeast.match(Flags(mode="match", rivals=(str(tmp_path / "alone"), str(tmp_path / "alone"))))
