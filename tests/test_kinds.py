"""Agents of several kinds: their rows, and the policies that play each kind and no other."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_games
from gymnasium import spaces
from lock_step import metrics_of

import beast
import monobeast
import multibeast
from beast.envs.agents import AgentColumns, kinds_of
from beast.envs.groups import EnvGroup
from beast.envs.probe import probe_env
from beast.envs.rows import is_final, nest_observations
from beast.envs.spaces import ActionsByKind, random_actions
from beast.errors import InputError
from beast.learn.nests import map_tensors
from beast.population.kinds import Team, all_kinds, check_core_states, seat_kinds
from beast.population.pbt import PBT, Rules
from beast.population.pool import Population
from beast.population.routing import Dealer, Game, Seats
from beast.run.checkpoint import describe_spaces, saved_spaces

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)
ZOO = ("fox", "hen_0", "hen_0", "owl")


def zoo_group(num_columns: int = 8) -> tuple[EnvGroup, list[dict]]:
    group = EnvGroup(AgentColumns(toy_games.Zoo, num_columns))
    return group, [
        nest_observations(
            {name: np.zeros((num_columns, *shape), dtype) for name, (shape, dtype) in group.fields.items()}
        )
        for _ in range(12)
    ]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_have_a_part_for_each_kind_and_blanks_in_those_of_others():
    group, rows = zoo_group()
    assert group.spaces.observations == {
        "fox.observation": spaces.Discrete(3, start=7), "fox.action_mask": spaces.MultiBinary(3),
        "hen_0": spaces.Box(0, 9, (3, 2), np.float64), "owl": spaces.Box(-1, 1, (2,), np.float32),
    }  # fmt: skip
    assert group.fields["action"] == ((2,), "float64"), "choices and floats"
    assert group.fields["policy_logits"] == ((6,), "float32"), "those of the owl"
    random = np.random.default_rng(0)
    group.reset(3, rows[0])
    for before, row in zip(rows, rows[1:]):
        legal = {"fox": before["obs"]["fox.action_mask"]}
        group.step(random_actions(group.spaces.action, 8, random, legal), row)
    columns = slice(4, 8)  # the second environment
    fox, hen, owl = (
        np.array([row["obs"][name][columns] for row in rows]) for name in ("fox.observation", "hen_0", "owl")
    )
    mask = np.array([row["obs"]["fox.action_mask"][columns] for row in rows])
    time = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert fox[:, 0].tolist() == [7, 8, 9, 7, 7, 7, 7, 8, 9, 7, 7, 7], "its last observation is repeated"
    assert (fox[:, 1:] == 7).all() and not mask[:, 1:].any(), "the first of its choices"
    assert mask[:, 0].tolist() == [[1, 0, t % 2] for t in [0, 1, 2, 3, 3, 3] * 2]
    assert hen[:, 1, 0, 0].tolist() == time and not hen[:, [0, 3]].any()
    late = [0, 0, 2.5, 3.5, 4.5, 5.5]
    assert hen[:6, 2, 0, 0].tolist() == late
    np.testing.assert_allclose(owl[:, 3, 0], np.array(time) / 10, rtol=1e-6)
    assert not owl[:, :3].any()
    done = np.array([row["done"][columns] for row in rows])
    assert done[:, [0, 1, 3]].tolist() == [[t == 0] * 3 for t in time]
    assert [row["episode_return"][4:].tolist() for row in rows[4:6]] == [[3, 8, 6, 16], [3, 10, 9, 20]]


def test_each_agent_is_given_its_own_action_in_the_form_of_its_space():
    group, rows = zoo_group(4)
    group.reset(3, rows[0])
    stored = np.array([[2, 99], [-1, 0.5], [0.25, 7], [1, 3]], np.float64)
    group.step(stored, rows[1])
    (given,) = group.env.envs[0].given
    assert given["fox"] == 3 and given["owl"].tolist() == [1, 3] and given["owl"].dtype == np.int64
    assert given["hen_0"].tolist() == [0, 7.5] and given["hen_0"].dtype == np.float32
    with pytest.raises(ValueError, match=r"actions \[3\] are not all in Discrete"):
        group.step(np.array([[3, 0], [0, 0], [0, 0], [0, 0]], np.float64), rows[2])


def test_random_actions_by_kind_are_legal():
    action, random = (
        ActionsByKind({"a": spaces.Discrete(5), "b": spaces.Discrete(2)}, ("a", "b", "b")),
        np.random.default_rng(0),
    )
    legal = {"a": np.tile([[0, 0, 0, 1, 1]], (6, 1)), "b": None}
    drawn = np.stack([random_actions(action, 6, random, legal) for _ in range(100)])
    assert drawn.dtype == np.int64 and drawn.shape == (100, 6, 1)
    assert set(drawn[:, [0, 3]].flatten()) == {3, 4} and set(drawn[:, [1, 2, 4, 5]].flatten()) == {0, 1}


class MaskInInfos(toy_games.Zoo):
    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed, options)
        return observations, {**infos, "owl": {"action_mask": np.ones(6, np.int8)}}


def test_a_mask_in_the_infos_of_agents_that_differ_is_refused():
    with pytest.raises(InputError, match="owl has info\\['action_mask'\\]: where agents differ, give masks in obs"):
        EnvGroup(AgentColumns(MaskInInfos, 4)).reset(0, zoo_group(4)[1][0])


class Numbered(toy_games.Signal):
    possible_agents = [0, 1]  # type: ignore[list-item]

    def observation_space(self, agent):
        return super().observation_space(["speaker", "listener"][agent])


def test_names_of_kinds_are_texts_without_dots():
    env = AgentColumns(Numbered, 2)
    assert list(env.single_action_space) == ["0", "1"]


# --- what the nets of a kind see -------------------------------------------------------------------------------------


def test_a_kind_sees_its_own_parts_of_rows_and_writes_its_own_actions():
    group, rows = zoo_group(4)
    kinds = all_kinds(group.spaces)
    assert [kind.name for kind in kinds] == ["fox", "hen_0", "owl"]
    assert seat_kinds(group.spaces._replace(agents=4)) == (0, 1, 1, 2)
    assert kinds[0].spaces.observations == {
        "observation": spaces.Discrete(3, start=7),
        "action_mask": spaces.MultiBinary(3),
    }
    assert kinds[1].spaces.observations == {"obs": spaces.Box(0, 9, (3, 2), np.float64)}
    tensors = {"obs": {name: torch.from_numpy(x)[None] for name, x in rows[0]["obs"].items()}}
    tensors |= {
        "action": torch.tensor([[[2.0, 0], [0.5, -1], [0, 0], [1, 3]]]).double(),
        "reward": torch.arange(4.0)[None],
    }
    tensors["policy_logits"] = torch.arange(24.0).view(1, 4, 6)
    fox, hen, owl = (kind.own(tensors) for kind in kinds)
    assert fox["action"].tolist() == [[2, 0, 0, 1]] and fox["action"].dtype == torch.int64
    assert hen["action"][0, 1].tolist() == [0.5, -1] and hen["action"].dtype == torch.float32
    assert owl["action"][0, 3].tolist() == [1, 3] and owl["policy_logits"].shape == (1, 4, 6)
    assert fox["policy_logits"][0, 1].tolist() == [6, 7, 8] and fox["reward"] is tensors["reward"]
    assert fox["obs"].keys() == {"observation", "action_mask"} and hen["obs"].keys() == {"obs"}
    placed = kinds[0].placed_action(torch.tensor([[2, 0]])), kinds[0].placed_logits(torch.ones(1, 2, 3))
    assert placed[0].tolist() == [[[2, 0], [0, 0]]] and placed[0].dtype == torch.float64
    assert placed[1].tolist() == [[[1, 1, 1, 0, 0, 0]] * 2]


def test_agents_with_equal_spaces_are_one_kind_whose_rows_are_as_they_are():
    group = EnvGroup(AgentColumns(toy_games.RockPaperScissors, 2))
    (kind,) = all_kinds(group.spaces)
    rows = {"obs": {}, "action": torch.zeros(1, 2)}
    assert kind.own(rows) is rows and kind.placed_action(rows["action"]) is rows["action"]
    assert kinds_of(group.spaces) == {"": group.spaces} and seat_kinds(group.spaces._replace(agents=2)) == (0, 0)


def test_checkpoints_have_the_spaces_of_all_kinds():
    group, _ = zoo_group(4)
    found = saved_spaces({"spaces": describe_spaces(group.spaces)})
    assert found.observations == group.spaces.observations and found.whole == group.spaces.whole
    assert found.action == group.spaces.action and found.action.agents == ZOO


def test_core_states_of_other_shapes_are_refused():
    group, _ = zoo_group(4)
    nets = [monobeast.Net(kind.spaces.observations, kind.spaces.action, Flags(core="lstm", core_size=8 + size))
            for size, kind in enumerate(all_kinds(group.spaces))]  # fmt: skip
    with pytest.raises(InputError, match="core states of shapes .* for hen_0.*let initial_state"):
        check_core_states(all_kinds(group.spaces), nets)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_team_answers_for_each_agent_by_the_net_of_its_kind(core):
    group, rows = zoo_group(8)
    torch.manual_seed(1)
    flags = Flags(core=core, core_size=8, hidden_size=16, reward_clip=0.0)
    team = Team(lambda *of_kind: monobeast.Net(*of_kind, flags), group.spaces).eval()
    for parameter in team.parameters():  # policies that are sure of their choices
        torch.nn.init.normal_(parameter)
    group.reset(3, rows[0])
    group.step(random_actions(group.spaces.action, 8, np.random.default_rng(0)), rows[1])
    inputs = map_tensors(lambda x: torch.from_numpy(x)[None], rows[1])
    inputs["action"] = torch.zeros(1, 8, 2, dtype=torch.float64)
    state = map_tensors(lambda x: x + torch.arange(8.0)[:, None], team.initial_state(8))
    with torch.no_grad():
        logits, values, after = team(inputs, state)
        chosen = team.acting_policy(logits).mode()
        sampled = team.acting_policy(logits).sample(torch.Generator().manual_seed(1))
        for kind, net, columns in zip(team.kinds, team.nets, ([0, 4], [1, 2, 5, 6], [3, 7])):
            own, own_state = map_tensors(lambda x: x[:, columns], (inputs, state))
            expected, value, own_after = net(kind.own(own), own_state)
            assert torch.allclose(kind.own_logits(logits[:, columns]), expected, atol=1e-5)
            assert torch.allclose(values[:, columns], value, atol=1e-5)
            map_tensors(lambda x, y: torch.testing.assert_close(x[:, columns], y), after, own_after)
            best = monobeast.distribution(kind.spaces.action, expected).mode()
            assert torch.allclose(kind.own({**own, "action": chosen[:, columns]})["action"], best, atol=1e-5)
    assert sampled.shape == chosen.shape == (1, 8, 2) and not torch.equal(sampled, chosen)


# --- populations -----------------------------------------------------------------------------------------------------


def test_policies_of_a_kind_are_drawn_for_its_seats_and_so_are_their_past_selves():
    random = np.random.default_rng(0)
    nets = [torch.nn.Linear(1, 1) for _ in range(4)]
    population = Population(nets, 100, 8, 2, random, num_kinds=2)
    assert population.live(0) == [0, 1] and population.live(1) == [2, 3] and population.kind_of(9) == -1
    for steps in (100, 200, 300):
        for policy in (0, 3):
            population.grow(policy, steps)
    assert [population.kind_of(number) for number in range(10)] == [0, 0, 1, 1, 0, 1, 0, 1, 0, 1]
    for steps in range(325, 400, 25):
        population.grow(0, steps)
        assert len(set(population.past(0))) == len(set(population.past(1))) == 2
    flags, seen = Flags(num_policies=2, past_share=0.5), [set(), set()]
    for _ in range(300):
        chosen = multibeast.choose_policy(flags, Game(0, 4, (0, 1, 1)), population, random)
        assert [population.kind_of(policy) for policy in chosen] == [0, 1, 1]
        seen[0] |= set(chosen[:1])
        seen[1] |= set(chosen[1:])
    assert seen[0] == {0, 1, *population.past(0)} and seen[1] == {2, 3, *population.past(1)}


def test_a_policy_of_another_kind_is_refused():
    seats = Seats(lambda game: [0, 1], [0, 0, 1].__getitem__, num_columns=2, group_width=2, kinds=(0, 1))
    rows = {name: torch.zeros(1, 2, dtype=torch.int32) for name in ("policy", "group", "env_number", "episode_step")}
    with pytest.raises(
        InputError, match=re.escape("choose_policy gave [0, 1] for Game(env=0, num_envs=1, kinds=(0, 1))")
    ):
        seats.players({**rows, "done": torch.ones(1, 2, dtype=torch.bool)})


def test_population_based_training_ranks_each_kind_by_itself():
    rules = Rules(0, 1, 0.5, 0.0, 0.0, 1.0, (2.0, 2.0), 10, 1, True)
    pbt = PBT(rules, 4, {"learning_rate": 1.0}, lambda values: True, np.random.default_rng(0), num_kinds=2)
    assert [values["learning_rate"] == 1 for values in pbt.values] == [True, False, True, False]
    for policy, objective in enumerate([1, 2, 20, 10]):
        pbt.record(policy, [objective])
    changes = pbt.event()
    assert [change.donor for change in changes] == [1, 1, 2, 2] and [change.rank for change in changes] == [1, 0, 0, 1]
    assert pbt.values[0] == pbt.values[1], "the first of a kind keeps what it copies"
    assert pbt.values[3] != pbt.values[2]


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_games.__file__).parent))  # of actors
    flags = {
        "env": "pettingzoo:zoo_game", "num_actors": 1, "group_width": 16, "batch_width": 4, "unroll_length": 5,
        "hidden_size": 32, "deterministic": True, "device": "cpu", "tensorboard": False, "root": str(tmp_path),
        "name": "run", "total_steps": 300, "amp": "off", "normalize_observations": False, "num_policies": 2,
    }  # fmt: skip
    return lambda **changes: Flags(**{**flags, **changes})


@pytest.mark.parametrize("agent", [monobeast])
def test_one_policy_for_agents_that_differ_is_refused_and_multibeast_named(small, agent, tmp_path):
    flags = monobeast.Flags(env="pettingzoo:zoo_game", group_width=16, root=str(tmp_path), device="cpu")
    with pytest.raises(
        InputError, match=r"zoo_game: hen_0 has Box.* and Box.*, fox has Dict.* and Discrete.*multibeast.py"
    ):
        agent.train(flags)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_policies_of_each_kind_act_and_learn_on_its_agents_alone(small, tmp_path, monkeypatch, core):
    batches, rollouts, update, deal = [], [], AGENT.update, Dealer.deal

    def watching(flags, learner, batch, core_state):
        batches.append((learner.net, flags.total_steps, map_tensors(torch.clone, batch)))
        return update(flags, learner, batch, core_state)

    def dealing(dealer, rollout, core_state):
        rollouts.append(map_tensors(torch.clone, (rollout, core_state)))
        return deal(dealer, rollout, core_state)

    monkeypatch.setattr(AGENT, "update", watching)
    monkeypatch.setattr(Dealer, "deal", dealing)
    result = multibeast.train(small(core=core, core_size=8, learning_rate=1e-12, reward_clip=0.0))
    assert "2 policies of monobeast.py for each kind of agents, from number 0 fox, 2 hen_0, 4 owl" in (
        (result.directory / "out.log").read_text()
    )
    policies = [beast.load(str(result.directory / "checkpoint.pt"), policy=number) for number in range(6)]
    assert [policy.action_space for policy in policies[::2]] == [
        toy_games.Zoo().action_space(agent) for agent in ("fox", "hen_0", "owl")
    ]
    shapes = {0: ((6, 4), (6, 4, 3)), 1: ((6, 4, 2), (6, 4, 4)), 2: ((6, 4, 2), (6, 4, 6))}
    for net, total_steps, batch in batches:
        own = [i for i, policy in enumerate(policies) if all(map(torch.equal, policy.net.buffers(), net.buffers()))
               and policy.action_space == net.action_space]  # fmt: skip
        kind = own[0] // 2
        assert (tuple(batch["action"].shape), tuple(batch["policy_logits"].shape)) == shapes[kind]
        assert total_steps == round(300 * 3 * [1, 2, 1][kind] / 4), "a kind of two agents makes twice the steps"
        assert (batch["policy"][batch.get("counts", torch.ones(6, 4, dtype=torch.bool))][4:] // 2 == kind).all()
    played, kinds = set(), all_kinds(saved_spaces({"spaces": describe_spaces(zoo_group(4)[0].spaces)}))
    for rollout, state in rollouts:
        policy = rollout["policy"][1:].numpy()
        # A seat that is not there yet has the core's state of the policy before; nothing is learned from it.
        counts = ~is_final(*(rollout[name][:-1] for name in ("done", "terminated", "truncated")))
        for column in range(16):
            seat = column % 4
            kind = (0, 1, 1, 2)[seat]
            chosen = set(policy[:, column].tolist())
            assert {number // 2 for number in chosen} == {kind}
            played |= chosen
            for number in chosen:
                inputs, core_state = map_tensors(lambda x: x[:, column : column + 1], (rollout, state))
                with torch.no_grad():
                    said = policies[number].net(kinds[kind].own(inputs), core_state)[0][:-1, 0]
                mine = torch.from_numpy(policy[:, column] == number) & counts[:, column]
                of_rows = kinds[kind].own_logits(rollout["policy_logits"][1:, column])
                torch.testing.assert_close(said[mine], of_rows[mine], rtol=1e-3, atol=1e-6)
    assert played == set(range(6))
    assert any((rollout["policy"][1:] != rollout["policy"][:-1])[1:].any() for rollout, _ in rollouts), (
        "for each game anew"
    )


def test_a_run_of_several_kinds_resumes_and_its_policies_are_played_together(small, tmp_path, capsys):
    multibeast.train(small())
    again = multibeast.train(small(total_steps=500))
    assert "resumed at step" in capsys.readouterr().err and again.steps >= 6 * 500
    row = metrics_of(again.directory)[-1]
    steps = [float(row[f"policy{number}/stats/steps"]) for number in range(6)]
    assert sum(steps[2:4]) > 1.5 * sum(steps[4:6]), "two hens, one owl"
    # A fox makes 3 steps of 1, the first hen 5 of 2, the second 3 of 3, the owl 5 of 4.
    for policy, returns in ((1, {3.0}), (3, {10.0, 9.0}), (5, {20.0})):
        result = multibeast.test(small(policy=policy, episodes=6))
        assert len(result["returns"]) == 6 and set(result["returns"]) == returns
    policy = beast.load(str(again.directory / "checkpoint.pt"), policy=1)
    observations = {"observation": np.array([7, 8]), "action_mask": np.array([[1, 0, 0], [0, 0, 1]], np.int8)}
    assert policy.act(observations)[0].tolist() == [1, 3]
    with pytest.raises(InputError, match="share a policy need equal spaces"):
        multibeast.match(small(rivals=(f"{again.directory}:0", f"{again.directory}:1")))


def test_the_team_of_a_policy_is_it_and_the_first_of_the_other_kinds(small, tmp_path):
    result = multibeast.train(small(total_steps=100))
    path = result.directory / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    from beast.run import checkpoint

    team = checkpoint.of_policy(state, 3, path, is_team=True)
    for number, policy in enumerate((0, 3, 4)):
        own = {name.removeprefix(f"{policy}."): x for name, x in state["net"].items() if name.startswith(f"{policy}.")}
        assert own and all(torch.equal(x, team["net"][f"nets.{number}.{name}"]) for name, x in own.items())
    assert team["kind"] == "hen_0" and checkpoint.of_policy(state, 3, path)["kind"] == "hen_0"


def test_the_probe_takes_several_kinds_where_it_may_and_plays_by_their_masks(small):
    spaces_found = probe_env(monobeast.create_env, small(), several_kinds=True)
    assert spaces_found.agents == 4 and spaces_found.action.agents == ZOO
