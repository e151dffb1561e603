"""Environments of several agents: each agent is a column of a group, and what is not there counts in nothing."""

import sys
import types

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lock_step import metrics_of, small_flags

import monobeast
import r2d2
from beast import envs
from beast.envs.agents import AgentColumns, WidthDoesNotFit
from beast.envs.groups import EnvGroup, finished_episodes
from beast.envs.probe import probe_env
from beast.envs.rows import OBJECTIVE, nest_observations
from beast.errors import InputError, MissingPackage
from beast.learn import vtrace
from beast.population.routing import begins


class Scripted:
    """Who is there in each row of a game, with PettingZoo's parallel interface. A letter in capitals is an agent's last
    row. An agent observes [row, its own action before]; its reward is 10 times its place plus the row."""

    possible_agents = ["a", "b", "c"]
    metadata = {"name": "scripted_v0"}
    render_mode = "rgb_array"

    def __init__(self, *games, flag="terminated"):
        self.games, self.flag, self.game, self.agents = games, flag, -1, []
        self.seeds, self.given, self.is_closed = [], [], False

    @property
    def unwrapped(self):
        return self

    def observation_space(self, agent):
        return spaces.Box(-100, 100, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.game, self.row = (self.game + 1) % len(self.games), 0
        there = self.games[self.game][0]
        self.agents = [x for x in there if x.islower()]
        return {x: np.array([0, 0], np.float32) for x in self.agents}, {x: {} for x in self.agents}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents), "those that are there act"
        self.given.append(actions)
        self.row += 1
        there = self.games[self.game][self.row]
        names = [x.lower() for x in there]
        observations = {x: np.array([self.row, actions.get(x, 0)], np.float32) for x in names}
        rewards = {x: 10.0 * self.possible_agents.index(x) + self.row for x in names}
        ends = {x: x.upper() in there for x in names}
        never = dict.fromkeys(names, False)
        self.agents = [x for x in there if x.islower()]
        infos = {x: {"metrics": {"row": self.row}} if ends[x] else {} for x in names}
        both = (ends, never) if self.flag == "terminated" else (never, ends)
        return observations, rewards, *both, infos

    def render(self):
        return np.full((8, 8, 3), self.row, np.uint8)

    def close(self):
        self.is_closed = True


class Telling(Scripted):
    """What an agent's last step pays is its success."""

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        infos = {x: {"true_objective": rewards[x]} if info else {} for x, info in infos.items()}
        return observations, rewards, terminated, truncated, infos


def rows_of(env, num_rows, seed=7):
    """A rollout of `num_rows` rows [T+1, K], stepped with the action (row + column) % 5."""
    group = EnvGroup(env)
    size = num_rows, env.num_envs
    rows = nest_observations(
        {name: np.full((*size, *shape), 9, dtype) for name, (shape, dtype) in group.fields.items()}
    )
    ended = []

    def row(t):
        return {**{name: x[t] for name, x in rows.items() if name != "obs"}, "obs": {"obs": rows["obs"]["obs"][t]}}

    group.reset(seed, row(0))
    for t in range(1, num_rows):
        group.step((t + np.arange(env.num_envs)) % 5, row(t))
        ended += [(t, *each) for each in group.ended]
    return rows, ended


def column(rows, name, k):
    return rows[name][:, k].astype(float).tolist()


def test_each_agent_is_a_column_and_one_that_has_ended_repeats_its_last_row_until_the_reset():
    rows, ended = rows_of(AgentColumns(lambda: Scripted(["abc", "aBc", "ac", "AC"]), 3), 8)
    # rows:   0     1     2     3(end)  4 (reset)  5   6   7(end)
    assert column(rows, "done", 0) == [1, 0, 0, 0, 1, 0, 0, 0]
    assert column(rows, "done", 1) == [1, 0, 0, 0, 1, 0, 0, 0]
    assert column(rows, "terminated", 0) == [0, 0, 0, 1, 0, 0, 0, 1]
    assert column(rows, "terminated", 1) == [0, 1, 1, 1, 0, 1, 1, 1]
    assert column(rows, "reward", 0) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert column(rows, "reward", 1) == [0, 11, 0, 0, 0, 11, 0, 0]
    assert column(rows, "episode_return", 1) == [0, 11, 11, 11, 0, 11, 11, 11]
    assert column(rows, "episode_step", 1) == [0, 1, 1, 1, 0, 1, 1, 1]
    assert column(rows, "episode_step", 2) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rows["obs"]["obs"][:, 1, 0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    assert rows["obs"]["obs"][:4, 2, 1].tolist() == [0, 3, 4, 0], "each is given its own action"
    assert finished_episodes(rows) == [(6, 3), (11, 1), (66, 3)], "each once"
    assert [(t, k) for t, k, _ in ended] == [(1, 1), (3, 0), (3, 2), (5, 1), (7, 0), (7, 2)]


def test_what_is_not_there_counts_in_no_loss():
    rows, _ = rows_of(AgentColumns(lambda: Scripted(["abc", "aBc", "ac", "AC"]), 3), 8)
    mask, discounts = vtrace.transition_masks(
        *(torch.from_numpy(rows[name]) for name in ("done", "terminated", "truncated")), 0.9
    )
    assert mask[:, 1].tolist() == [True, False, False, False, True, False, False]
    assert mask[:, 0].tolist() == [True, True, True, False, True, True, True]
    assert discounts[0, 1] == 0 and discounts[2, 0] == 0 and discounts[1, 0] > 0


def test_a_truncated_agent_is_valued_by_its_own_last_row():
    rows, _ = rows_of(AgentColumns(lambda: Scripted(["ab", "aB", "a", "A"], flag="truncated"), 3), 5)
    mask, discounts = vtrace.transition_masks(
        *(torch.from_numpy(rows[name]) for name in ("done", "terminated", "truncated")), 0.9
    )
    assert mask[0, 1] and discounts[0, 1] > 0 and not mask[1:3, 1].any()
    assert column(rows, "truncated", 1) == [0, 1, 1, 1, 0]


def test_an_agent_that_comes_late_begins_an_episode_and_one_that_never_comes_plays_none():
    rows, ended = rows_of(AgentColumns(lambda: Scripted(["a", "ab", "AB"], ["a", "A"]), 3), 9)
    # rows:  0: a  1: ab  2: AB  3: reset a  4: A  5: reset a  6: ab  7: AB  8: reset
    assert column(rows, "done", 1) == [0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert column(rows, "terminated", 1) == [1, 0, 1, 1, 1, 1, 0, 1, 1]
    assert column(rows, "episode_step", 1) == [0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert column(rows, "episode_return", 1) == [0, 0, 12, 0, 0, 0, 0, 12, 0]
    assert column(rows, "reward", 1) == [0, 0, 12, 0, 0, 0, 0, 12, 0], "none of the row in which it comes"
    assert column(rows, "terminated", 2) == [1] * 9 and column(rows, "done", 2) == [0] * 9
    assert column(rows, "reward", 2) == [0] * 9
    games = finished_episodes({name: x[:, 1:2] for name, x in rows.items() if name != "obs"})
    assert games == [(12, 1)] * 2, "when the next one begins, whoever is there"
    assert [t for t in range(9) if begins(rows["done"][t], rows["episode_step"][t], 3)] == [0, 3, 5, 8]
    assert finished_episodes({name: x[:, 2:] for name, x in rows.items() if name != "obs"}) == []
    assert [(t, k) for t, k, _ in ended] == [(2, 0), (2, 1), (4, 0), (7, 0), (7, 1)]
    mask, _ = vtrace.transition_masks(
        *(torch.from_numpy(rows[name]) for name in ("done", "terminated", "truncated")), 0.9
    )
    assert mask[:, 1].tolist() == [False, True, False, False, False, False, True, False]
    assert not mask[:, 2].any()


def test_the_success_of_an_agent_that_ends_early_stays_until_the_game_ends():
    group = EnvGroup(AgentColumns(lambda: Telling(["abc", "aBc", "ac", "AC"], ["ab", "AB"]), 3))
    fields = {**group.fields, OBJECTIVE: ((), "float32")}
    row = nest_observations({name: np.full((3, *shape), 9, dtype) for name, (shape, dtype) in fields.items()})
    group.reset(1, row)
    told = [row[OBJECTIVE].copy()]
    for _ in range(6):
        group.step(np.zeros(3, int), row)
        told.append(row[OBJECTIVE].copy())
    none = [np.nan] * 3
    np.testing.assert_array_equal(told, [none, [np.nan, 11, np.nan], [np.nan, 11, np.nan], [3, 11, 23], none,
                                         [1, 11, np.nan], none])  # fmt: skip


def test_a_game_of_one_step_and_agents_of_several_environments():
    made = []

    def make():
        made.append(Scripted(*([["abc", "ABC"]] if not made else [["abc", "abc", "ABC"]])))
        return made[-1]

    env = AgentColumns(make, 6)
    rows, _ = rows_of(env, 7)
    assert column(rows, "done", 0) == [1, 0, 1, 0, 1, 0, 1]
    assert column(rows, "done", 3) == [1, 0, 0, 1, 0, 0, 1]
    assert [each.seeds[0] for each in made] == [7, 10]
    assert made[1].given[0] == {"a": 4, "b": 0, "c": 1}, "columns 3, 4, 5 at row 1"
    assert [frame[0, 0, 0] for frame in env.render()] == [0] * 6
    env.close()
    assert all(each.is_closed for each in made)


class Unequal(Scripted):
    def action_space(self, agent):
        return spaces.Discrete(3 if agent == "c" else 5)


def test_agents_that_share_no_spaces_and_widths_that_do_not_fit_are_refused():
    three_wide = small_flags(group_width=3, batch_width=3)
    with pytest.raises(
        InputError, match=r"scripted_v0: c has Box\(.*\) and Discrete\(3\), a has .*multibeast.*supersuit"
    ):
        probe_env(lambda flags, num_envs, **overrides: AgentColumns(lambda: Unequal(["abc"]), num_envs), three_wide)
    with pytest.raises(WidthDoesNotFit, match="4 columns for its 3 agents"):
        AgentColumns(lambda: Scripted(["abc"]), 4)

    def create_env(flags, num_envs, **overrides):
        return AgentColumns(lambda: Scripted(["abc", "ABC"]), num_envs)

    assert probe_env(create_env, small_flags(group_width=6, batch_width=2)).agents == 3
    with pytest.raises(InputError, match="--group_width 4: scripted_v0 has 3 agents.*multiple of 3, such as 6"):
        probe_env(create_env, small_flags(group_width=4, batch_width=2))
    with pytest.raises(InputError, match="Scripted has several agents: give --env pettingzoo:.*AgentColumns"):
        probe_env(lambda flags, num_envs, **overrides: Scripted(["abc"]), small_flags())


@pytest.fixture
def pettingzoo(monkeypatch):
    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    module = types.ModuleType("zoo_toy")
    monkeypatch.setitem(sys.modules, "zoo_toy", module)
    return module


def test_an_id_names_a_module_of_pettingzoos_kind(pettingzoo):
    pettingzoo.parallel_env = lambda rounds=1: Scripted(["abc"] * rounds + ["ABC"])
    env = envs.make("pettingzoo:zoo_toy", 3, env_kwargs={"rounds": 2})
    rows, _ = rows_of(env, 4)
    assert column(rows, "terminated", 0) == [0, 0, 1, 0]
    assert env.metadata["env_id"] == "pettingzoo:zoo_toy"
    with pytest.raises(InputError, match="--frame_stack is for one agent"):
        envs.make("pettingzoo:zoo_toy", 3, frame_stack=4)
    del pettingzoo.parallel_env
    with pytest.raises(InputError, match="neither parallel_env.. nor env.."):
        envs.make("pettingzoo:zoo_toy", 3)
    with pytest.raises(MissingPackage, match=r"No module named 'nothing_here'.*pip install pettingzoo"):
        envs.make("pettingzoo:nothing_here", 3)


def test_agents_that_move_in_turn_have_no_legal_choice_while_they_wait(pettingzoo):
    pytest.importorskip("pygame", reason="pip install pygame")
    env = envs.make("pettingzoo:pettingzoo.classic.tictactoe_v3", 2)
    group = EnvGroup(env)
    row = nest_observations({name: np.zeros((2, *shape), dtype) for name, (shape, dtype) in group.fields.items()})
    group.reset(1, row)
    assert row["obs"]["action_mask"].sum(1).tolist() == [9, 0]
    moves = iter([0, 3, 1, 4, 2])  # the first player has a line
    for turn, move in enumerate(moves):
        actions = np.zeros(2, np.int64)
        actions[turn % 2] = move
        group.step(actions, row)
    assert row["reward"].tolist() == [1, -1] and row["terminated"].all()


@pytest.mark.parametrize("agent", [monobeast, r2d2])
def test_agents_train_one_shared_policy_and_play_with_it(tmp_path, monkeypatch, agent, pettingzoo):
    own = {"group_width": 4, "batch_width": 2} if agent is monobeast else {"group_width": 4}
    pytest.importorskip("pygame", reason="pip install pygame")
    flags = small_flags(
        agent, env="pettingzoo:pettingzoo.classic.tictactoe_v3", root=str(tmp_path), name="run", total_steps=1500,
        log_steps=300, tensorboard=False, **own,
    )  # fmt: skip
    agent.train(flags)
    rows = metrics_of(tmp_path / "run")
    assert rows and all(np.isfinite(float(row["losses/total_loss"])) for row in rows)
    monkeypatch.setattr(flags, "episodes", 5)
    result = agent.test(flags)
    assert len(result["returns"]) == 5 and set(result["returns"]) <= {-1, 0, 1}


def test_an_agent_that_has_ended_is_given_no_more_rewards():
    env = AgentColumns(lambda: Scripted(["abc", "aBc", "ac", "AC"]), 3)
    env.reset(seed=1)
    assert [env.step(np.zeros(3, np.int64))[1].tolist() for _ in range(2)] == [[1, 11, 21], [2, 0, 22]]


class Wordless(Scripted):
    """An agent that is not in the next row has gone without its last observation or flag."""

    def step(self, actions):
        observations, rewards, *_, infos = super().step(actions)
        never = dict.fromkeys(observations, False)
        return observations, rewards, never, never, infos


def test_an_agent_that_goes_without_a_word_is_truncated():
    rows, ended = rows_of(AgentColumns(lambda: Wordless(["abc", "ac", "AC"]), 3), 4)
    assert column(rows, "truncated", 1) == [0, 1, 1, 0] and column(rows, "truncated", 0) == [0, 0, 1, 0]
    assert column(rows, "done", 1) == column(rows, "done", 0) == [1, 0, 0, 1]
    assert sorted(finished_episodes(rows)) == [(0, 1), (3, 2), (43, 2)] and len(ended) == 3


def test_agents_of_env_servers_train_too(tmp_path, pettingzoo):
    pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    pytest.importorskip("pygame", reason="pip install pygame")
    import polybeast

    flags = {"env": "pettingzoo:pettingzoo.classic.tictactoe_v3", "group_width": 4, "batch_width": 4, "num_servers": 1}
    flags |= {"root": str(tmp_path), "name": "run", "total_steps": 1500, "log_steps": 300, "tensorboard": False}
    polybeast.train(polybeast.Flags(**flags))
    assert metrics_of(tmp_path / "run")
