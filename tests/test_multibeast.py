"""Several policies in one run: who acts where, who is trained on what, and what a run of them keeps."""

import copy
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from lock_step import metrics_of
from programs import Program
from waiting import PATIENCE, wait_until

import beast
import monobeast
import multibeast
from beast.envs.probe import probe_env
from beast.envs.rows import is_final
from beast.errors import InputError
from beast.feeds.actors import name_of_maker
from beast.learn.learners import Learners
from beast.learn.nests import map_tensors
from beast.population.pool import Population
from beast.population.routing import Dealer, Game, Seats, by_policy, put_together, take
from beast.run.policy import import_agent

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)
SMALL = {
    "env": "CartPole-v1", "num_actors": 1, "group_width": 8, "batch_width": 4, "unroll_length": 5, "hidden_size": 32,
    "core_size": 8, "deterministic": True, "device": "cpu", "tensorboard": False,
}  # fmt: skip


def small_flags(tmp_path, **changes):
    return Flags(**{**SMALL, "root": str(tmp_path), "name": "run", "total_steps": 2000, **changes})


def weights_of(run: Path) -> dict:
    return torch.load(run / "checkpoint.pt", weights_only=True)["net"]


# --- one policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("batch_width", [2, 8, 16], ids=["K over B", "K is B", "K below B"])
def test_one_policy_is_monobeast_to_the_bit(tmp_path, core, batch_width):
    changes = {**SMALL, "core": core, "batch_width": batch_width, "total_steps": 2400, "minibatches": 2}
    monobeast.train(monobeast.Flags(**changes, root=str(tmp_path), name="mono"))
    multibeast.train(Flags(**changes, root=str(tmp_path), name="multi"))
    one, other = weights_of(tmp_path / "mono"), weights_of(tmp_path / "multi")
    assert other.keys() == {f"0.{name}" for name in one}
    if batch_width == 16:  # slots are free earlier, so other weights act: the batches are of the same columns
        return
    assert all(torch.equal(x, other[f"0.{name}"]) for name, x in one.items())
    counts = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["counts"] for name in ("mono", "multi")]
    assert counts[0]["updates"] == counts[1]["updates"] >= 25
    assert all(counts[0][name] == counts[1][name] for name in ("steps", "updates", "episodes"))


# --- who plays -------------------------------------------------------------------------------------------------------


def rows_of(seats: int, step: list[int], done: list[int], policy: list[int], group: int = 0) -> dict:
    n = len(step)
    columns = {"policy": policy, "group": [group] * n, "env_number": range(n), "done": done, "episode_step": step}
    rows = {name: torch.tensor(list(x), dtype=torch.int32)[None] for name, x in columns.items()}
    return {**rows, "done": rows["done"].bool()}


def test_a_policy_is_drawn_where_a_game_begins_and_stays_to_its_end():
    asked = []

    def choose(game):
        asked.append(game)
        return [2]

    seats = Seats(choose, kind_of=[0, 0, 0].__getitem__, num_columns=8, group_width=4)
    players = seats.players(rows_of(1, step=[0, 7, 0, 3], done=[1, 0, 1, 1], policy=[0, 1, 0, 1], group=1))
    assert players.tolist() == [2, 1, 2, 1], "a lost life begins an episode, and no game"
    assert asked == [Game(4, 8, (0,)), Game(6, 8, (0,))]


def test_the_seats_of_a_game_are_drawn_together_and_who_comes_later_is_not_drawn_anew():
    draws = iter([[1, 0, 1], [0, 0, 1]])
    seats = Seats(lambda game: next(draws), [0, 0].__getitem__, num_columns=12, group_width=6, kinds=(0, 0, 0))
    # The third agent of the first environment is not there yet: it repeats a final row of no steps.
    players = seats.players(rows_of(3, step=[0, 0, 0, 4, 4, 0], done=[1, 1, 0, 0, 0, 1], policy=[0, 0, 0, 1, 0, 0]))
    assert players.tolist() == [1, 0, 1, 1, 0, 0]
    players = seats.players(rows_of(3, step=[1, 1, 0, 0, 0, 0], done=[0, 0, 1, 1, 1, 1], policy=[1, 0, 1, 1, 0, 0]))
    assert players.tolist() == [1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("chosen", [[], [0, 1], [3], [-1]])
def test_a_choice_of_policies_that_are_not_there_is_refused_with_the_game(chosen):
    seats = Seats(lambda game: chosen, {0: 0, 1: 0, 2: 0}.get, num_columns=4, group_width=4)
    with pytest.raises(
        InputError, match=re.escape(f"choose_policy gave {chosen} for Game(env=1, num_envs=4, kinds=(0,))")
    ):
        seats.players(rows_of(1, step=[1, 0, 1, 1], done=[0, 1, 0, 0], policy=[0, 0, 0, 0]))


def test_neighbouring_environments_have_one_policy_and_all_policies_as_many():
    flags = Flags(num_policies=4)
    random = np.random.default_rng(1)
    population = Population([torch.nn.Linear(1, 1)] * 4, 0, 1, 1, random)
    chosen = [multibeast.choose_policy(flags, Game(env, 12, (0,)), population, random) for env in range(12)]
    assert chosen == [[0]] * 3 + [[1]] * 3 + [[2]] * 3 + [[3]] * 3
    drawn = np.array([multibeast.choose_policy(flags, Game(0, 4, (0, 0, 0)), population, random) for _ in range(400)])
    assert drawn.shape == (400, 3) and np.bincount(drawn.flatten()).min() > 230, "each seat on its own"


def test_columns_are_taken_and_put_together_again_in_their_places():
    players = np.array([1, 0, 0, 1, 2], np.int32)
    nest = {"a": torch.arange(10).view(2, 5), "b": (torch.arange(15.0).view(1, 5, 3),)}
    parts = by_policy(players)
    assert [policy for policy, _ in parts] == [0, 1, 2]
    assert parts[0][1] == slice(1, 3) and parts[1][1].tolist() == [0, 3] and parts[2][1] == slice(4, 5)
    taken = [(columns, take(nest, columns)) for _, columns in parts]
    assert taken[1][1]["a"].tolist() == [[0, 3], [5, 8]]
    again = put_together(taken, 5)
    map_tensors(torch.testing.assert_close, again, nest)


# --- who is trained on what ------------------------------------------------------------------------------------------


def numbered_rollout(number: int, policy: torch.Tensor) -> tuple[dict, tuple]:
    """A rollout whose rewards are numbers that no other row has."""
    T, K = policy.shape[0] - 1, policy.shape[1]
    ids = 1000.0 * number + torch.arange((T + 1) * K).view(T + 1, K)
    rollout = {"policy": policy, "reward": ids, "done": torch.zeros(T + 1, K, dtype=torch.bool), "obs": {"obs": ids}}
    rollout["policy_version"] = torch.full((T + 1, K), number)
    return rollout, (ids[:1, :, None].clone(),)


@pytest.mark.parametrize("batch_width", [1, 3, 4, 10])
def test_each_transition_is_dealt_once_to_the_policy_that_chose_its_action_and_to_no_other(batch_width):
    random = np.random.default_rng(batch_width)
    dealer = Dealer(4, batch_width)
    chosen, dealt = [set() for _ in range(4)], [[] for _ in range(4)]
    for number in range(40):
        T, K = 5, 6
        changes = random.random((T + 1, K)) < (0.0 if number % 3 else 0.3)
        policy = torch.from_numpy(np.where(changes, random.integers(4, size=(T + 1, K)), random.integers(4, size=K)))
        rollout, state = numbered_rollout(number, policy.int())
        for p in range(4):
            chosen[p] |= set(rollout["reward"][1:][policy[1:] == p].tolist())
        for p, batch, core_state in dealer.deal(rollout, state):
            assert batch["reward"].shape == (T + 1, batch_width) and "policy" in batch
            assert torch.equal(core_state[0][0, :, 0], batch["reward"][0]), "the state is that of the column"
            assert torch.equal(batch["obs"]["obs"], batch["reward"])
            counts = batch.get("counts", torch.ones(T + 1, batch_width, dtype=torch.bool))
            assert torch.equal(counts[1:], batch["policy"][1:] == p)
            dealt[p] += batch["reward"][1:][counts[1:]].tolist()
        rollout["reward"].fill_(-1)  # the slot is free again: nobody may look at it
    for p in range(4):
        assert len(set(dealt[p])) == len(dealt[p]) and set(dealt[p]) <= chosen[p]
        assert len(chosen[p]) - len(dealt[p]) <= (batch_width - 1) * 5, "what waits is less than a batch"


def test_batches_of_one_policy_lie_where_the_rollout_does_and_keep_its_columns_order():
    rollout, state = numbered_rollout(0, torch.tensor([0, 0, 0, 0, 1, 1]).int().expand(4, 6))
    found = list(Dealer(2, 2).deal(rollout, state))
    assert [policy for policy, *_ in found] == [0, 0, 1]
    assert [batch["reward"][0].tolist() for _, batch, _ in found] == [[0, 1], [2, 3], [4, 5]]
    assert all("counts" not in batch for _, batch, _ in found)
    pointers = {batch["reward"].untyped_storage().data_ptr() for _, batch, _ in found}
    assert pointers == {rollout["reward"].untyped_storage().data_ptr()}


def test_an_update_may_edit_the_rows_of_a_column_that_two_policies_have_played():
    policy = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 1]]).int()
    rollout, state = numbered_rollout(0, policy)
    before = rollout["reward"].clone()
    for number, batch, _ in Dealer(2, 2).deal(rollout, state):
        assert torch.equal(batch["reward"], before), f"policy {number} has what another one has edited"
        batch["reward"].fill_(-1)


def test_what_older_weights_of_a_policy_have_chosen_is_forgotten():
    dealer = Dealer(2, 2)
    rollout, state = numbered_rollout(7, torch.tensor([0, 1, 1]).int().expand(4, 3))
    assert [policy for policy, *_ in dealer.deal(rollout, state)] == [1]  # a column of policy 0 waits
    for policy in range(2):
        dealer.forget(policy, 9)
    assert list(dealer.deal(rollout, state)) == []
    rollout["policy_version"][2:] = 9  # the new weights have come in the middle
    assert [policy for policy, *_ in dealer.deal(rollout, state)] == [1]
    batches = {policy: batch for policy, batch, _ in dealer.deal(rollout, state)}
    assert batches.keys() == {0, 1}, "of policy 0 a column of each rollout with the new weights"
    for batch in batches.values():
        assert batch["counts"].tolist() == [[False, False]] * 2 + [[True, True]] * 2


class Recorded:
    """Rollouts and batches of a run as the learner saw them."""

    def __init__(self, monkeypatch):
        self.rollouts, self.batches = [], []
        deal = Dealer.deal

        def recording(dealer, rollout, core_state):
            self.rollouts.append(map_tensors(torch.clone, (rollout, core_state)))
            for policy, batch, state in deal(dealer, rollout, core_state):
                self.batches.append((policy, map_tensors(torch.clone, batch)))
                yield policy, batch, state

        monkeypatch.setattr(Dealer, "deal", recording)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_policy_changes_where_a_game_begins_and_its_own_net_chose_its_actions(tmp_path, monkeypatch, core):
    recorded = Recorded(monkeypatch)
    flags = small_flags(
        tmp_path, num_policies=3, core=core, amp="off", normalize_observations=False, learning_rate=1e-12
    )
    multibeast.train(flags, lambda flags, game, population, random: [int(random.integers(3))])
    weights = weights_of(tmp_path / "run")
    nets = []
    for policy in range(3):
        net = beast.load(str(tmp_path / "run" / "checkpoint.pt"), policy=policy).net
        assert all(torch.equal(x, weights[f"{policy}.{name}"]) for name, x in net.state_dict().items())
        nets.append(net)
    changes = 0
    for rollout, state in recorded.rollouts:
        # The row before chose: a policy changes with the action at a game's first row.
        changed = rollout["policy"][1:] != rollout["policy"][:-1]
        assert (changed <= (rollout["episode_step"][:-1] == 0)).all()
        changes += int(changed[1:].sum())
        with torch.no_grad():
            said = torch.stack([net(rollout, state)[0] for net in nets])[:, :-1]  # [3, T, K, 2]
        chooser = rollout["policy"][1:].long()
        own = torch.take_along_dim(said, chooser[None, :, :, None], 0)[0]
        torch.testing.assert_close(own, rollout["policy_logits"][1:], rtol=1e-3, atol=1e-6)
        other = torch.take_along_dim(said, (chooser[None, :, :, None] + 1) % 3, 0)[0]
        assert ((other - rollout["policy_logits"][1:]).abs() > 1e-5).any(-1).float().mean() > 0.9
    assert changes > 30


def test_a_run_trains_each_policy_on_the_steps_that_it_chose_and_counts_its_games(tmp_path, monkeypatch):
    recorded = Recorded(monkeypatch)
    flags = small_flags(tmp_path, num_policies=3, total_steps=1500)
    result = multibeast.train(flags, lambda flags, game, population, random: [int(random.choice(3, p=[0.6, 0.3, 0.1]))])
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    steps = [each["counts"]["steps"] for each in state["policies"]]
    assert result.steps == sum(steps) == state["counts"]["steps"] >= 4500, "--total_steps are those of one policy"
    for policy in range(3):
        counted = 0
        for _, batch in (each for each in recorded.batches if each[0] == policy):
            final = is_final(batch["done"], batch["terminated"], batch["truncated"])
            counted += int((~final[:-1] & (batch["policy"][1:] == policy)).sum())
        assert counted == steps[policy]
    assert any("counts" in batch for _, batch in recorded.batches)
    assert steps[0] > steps[1] > steps[2] > 0
    # Games by their final rows: whoever chose the last action.
    games = [0, 0, 0]
    for rollout, _ in recorded.rollouts:
        over = is_final(rollout["done"], rollout["terminated"], rollout["truncated"])[:-1]
        for policy in range(3):
            games[policy] += int((over & (rollout["policy"][:-1] == policy)).sum())
    assert games == [each["counts"]["episodes"] for each in state["policies"]]
    assert sum(games) == state["counts"]["episodes"] > 30
    updates = [each["counts"]["updates"] for each in state["policies"]]
    assert updates == [sum(policy == p for policy, _ in recorded.batches) for p in range(3)]


def test_games_of_past_policies_are_not_told_and_a_checkpoint_has_all_parts_of_a_population():
    class Part:
        def __init__(self, number):
            self.number = number

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    def new_learners(part):
        nets = [torch.nn.Linear(1, 1) for _ in range(2)]
        each = [multibeast.Learner(net, torch.optim.Adam(net.parameters()), 1) for net in nets]
        return Learners(each, np.random.default_rng(part), {"part": Part(part)})

    learners, shape = new_learners(7), (3, 3)
    rows = {name: np.zeros(shape, bool) for name in ("done", "terminated", "truncated")}
    rows |= {"episode_step": np.array([[5] * 3, [6] * 3, [0] * 3]), "reward": np.zeros(shape)}
    rows |= {"episode_return": np.array([[0] * 3, [10, 11, 12], [0] * 3]), "policy": np.array([[0, 1, 2]] * 3)}
    rows["terminated"][1] = rows["done"][2] = True
    learners.record_games(rows)
    assert list(learners.returns) == [10, 11], "the third one's is a past policy"
    assert [list(learner.returns) for learner in learners.each] == [[10], [11]]
    again = new_learners(8)
    again.load_state_dict(learners.state_dict())
    assert again.more["part"].number == 7 and list(again.returns) == [10, 11]
    assert [list(learner.returns) for learner in again.each] == [[10], [11]]
    assert again.random.integers(10**9) == learners.random.integers(10**9)


def test_an_update_of_one_policy_changes_no_other(tmp_path, monkeypatch):
    begun = []

    initialize = Learners.__init__

    def begin(learners, *arguments):
        initialize(learners, *arguments)
        begun.append(copy.deepcopy(learners.net.state_dict()))

    monkeypatch.setattr(Learners, "__init__", begin)
    multibeast.train(
        small_flags(tmp_path, num_policies=2, total_steps=600), lambda flags, game, population, random: [0]
    )
    weights, (before,) = weights_of(tmp_path / "run"), begun
    assert all(torch.equal(x, before[name]) for name, x in weights.items() if name.startswith("1."))
    assert not all(torch.equal(x, before[name]) for name, x in weights.items() if name.startswith("0."))
    heads = [(name, x) for name, x in before.items() if name.startswith("0.policy")]
    assert not all(torch.equal(x, before[name.replace("0.", "1.", 1)]) for name, x in heads), "weights of their own"


def test_old_batches_of_a_policy_are_dropped_by_its_own_updates(tmp_path, monkeypatch):
    recorded = Recorded(monkeypatch)
    flags = small_flags(tmp_path, num_policies=2, max_policy_lag=1, group_width=8, batch_width=4, total_steps=1000)
    multibeast.train(flags)
    row = metrics_of(tmp_path / "run")[-1]
    assert int(row["stats/dropped_rollouts"]) > 0 and float(row["stats/policy_lag_max"]) <= 1
    trained = sum(int(row[f"policy{p}/stats/updates"]) for p in range(2))
    assert trained + int(row["stats/dropped_rollouts"]) == len(recorded.batches)


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_of_several_policies_resumes_tells_of_each_and_each_can_be_played(tmp_path, capsys):
    flags = small_flags(tmp_path, num_policies=4, log_steps=500, seed=3)
    multibeast.train(flags)
    again = multibeast.train(small_flags(tmp_path, num_policies=4, log_steps=500, total_steps=3000, seed=3))
    assert "resumed at step 8,0" in capsys.readouterr().err
    assert 12_000 <= again.steps < 12_200
    row = metrics_of(tmp_path / "run")[-1]
    of_each = [int(row[f"policy{p}/stats/steps"]) for p in range(4)]
    assert sum(of_each) == again.steps and max(of_each) < 1.2 * min(of_each)
    for name in ("charts/episodic_return", "charts/learning_rate", "losses/value_loss", "stats/policy_lag_max"):
        assert all(np.isfinite(float(row[f"policy{p}/{name}"])) for p in range(4))
    mean = np.mean([float(row[f"policy{p}/losses/entropy"]) for p in range(4)])
    assert float(row["losses/entropy"]) == pytest.approx(mean, rel=0.1)
    assert float(row["charts/learning_rate"]) < 1e-5, "each has a schedule of its own"
    result = multibeast.test(small_flags(tmp_path, policy=2, episodes=3, num_policies=4))
    fork = tmp_path / "other_fork.py"
    fork.write_text(Path(monobeast.__file__).read_text())
    with pytest.raises(InputError, match=r"other_fork.py: the run was trained with --agent monobeast.py; give that"):
        multibeast.test(small_flags(tmp_path, policy=2, episodes=3, num_policies=4, agent=str(fork)))
    assert len(result["returns"]) == 3
    policy = beast.load(str(tmp_path / "run" / "checkpoint.pt"), policy=3)
    assert 0.7 * 3000 < policy.steps < 1.3 * 3000
    action, _ = policy.act(np.zeros((1, 4), np.float32))
    assert action.shape == (1,)
    for number in (4, -1):
        with pytest.raises(InputError, match=f"no policy {number}: its policies are 0 to 3"):
            beast.load(str(tmp_path / "run" / "checkpoint.pt"), policy=number)
    with pytest.raises(InputError, match="--num_policies 3 \\(the run has 4\\)"):
        multibeast.train(small_flags(tmp_path, num_policies=3, total_steps=4000, seed=3))


def test_a_stop_changes_nothing_of_who_plays_what_next(tmp_path):
    def draws(run: str, *stops: int) -> list[int]:
        found = []

        def choose(flags, game, population, random):
            found.append(int(random.integers(3)))
            return [found[-1]]

        for steps in stops:
            multibeast.train(small_flags(tmp_path, name=run, num_policies=3, total_steps=steps, seed=5), choose)
        return found

    once, twice = draws("once", 900), draws("twice", 300, 900)
    state = torch.load(tmp_path / "once" / "checkpoint.pt", weights_only=True)["draws"]
    expected = np.random.default_rng([5, 1]).integers(3, size=len(once)).tolist()
    assert once == expected and twice[: len(once)] == expected[: len(twice)]
    assert json.dumps(state) == json.dumps(_state_after([5, 1], len(once)))


def _state_after(seed, count) -> dict:
    random = np.random.default_rng(seed)
    for _ in range(count):
        random.integers(3)
    return random.bit_generator.state


def test_a_bad_update_of_one_policy_is_counted_for_it_alone(tmp_path, monkeypatch):
    update = AGENT.update

    def spoiled(flags, learner, batch, core_state):
        if (batch["env_number"] < 4).all() and (batch["group"] == 0).all() and learner.updates == 3:
            batch["reward"][:] = torch.nan
        return update(flags, learner, batch, core_state)

    monkeypatch.setattr(AGENT, "update", spoiled)
    multibeast.train(small_flags(tmp_path, num_policies=4, total_steps=400, reward_clip=1.0))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert [each["counts"]["bad_updates"] for each in state["policies"]] == [1, 0, 0, 0]
    assert state["counts"]["bad_updates"] == 1 and all(x.isfinite().all() for x in state["net"].values())


def test_a_policy_whose_updates_are_all_bad_ends_the_run_by_name(tmp_path, monkeypatch, capsys):
    update = AGENT.update

    def spoiled(flags, learner, batch, core_state):
        if (batch["policy"] == 2).all():
            batch["reward"][:] = torch.nan
        return update(flags, learner, batch, core_state)

    monkeypatch.setattr(AGENT, "update", spoiled)
    with pytest.raises(SystemExit):
        multibeast.train(small_flags(tmp_path, num_policies=4, total_steps=4000, max_bad_updates=5, log_steps=100))
    told = capsys.readouterr().err
    assert "FloatingPointError: policy 2: loss or gradients were NaN or Inf in 5 updates in a row" in told
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert [each["counts"]["bad_updates"] for each in state["policies"]] == [0, 0, 5, 0]


def test_actors_of_a_run_are_those_of_the_agents_file_and_policies_act_in_them(tmp_path):
    flags = small_flags(tmp_path, num_policies=2, deterministic=False, num_actors=2, total_steps=2000)
    result = multibeast.train(flags)
    state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
    assert all(each["counts"]["steps"] > 1000 for each in state["policies"])
    assert "2 policies of monobeast.py" in (result.directory / "out.log").read_text()


def test_the_best_policy_is_kept_as_monobeast_would_have_saved_it(tmp_path):
    result = multibeast.train(small_flags(tmp_path, num_policies=3, total_steps=3500, log_steps=100))
    state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
    best = torch.load(result.directory / "best.pt", weights_only=True)
    means = [np.mean(each["returns"]) for each in state["policies"]]
    assert result.best == state["counts"]["best"] == max(means)
    number = int(np.argmax(means))
    own = {name: x for name, x in state["net"].items() if name.startswith(f"{number}.")}
    assert own.keys() == {f"{number}.{name}" for name in best["net"]}
    assert all(torch.equal(x, best["net"][name.partition(".")[2]]) for name, x in own.items())
    assert not {"policies", "population", "draws"} & best.keys()
    path = str(result.directory / "best.pt")
    assert len(monobeast.test(monobeast.Flags(checkpoint=path, episodes=2))["returns"]) == 2
    assert beast.load(path).steps == state["policies"][number]["counts"]["steps"]


def test_a_policy_that_copies_another_has_all_that_its_learner_has_and_its_own_counts_and_games():
    class Averaging(multibeast.Learner):
        """Of a fork: it keeps a mean of its weights."""

        def __init__(self, number: int):
            net = torch.nn.Linear(2, 2)
            super().__init__(net, torch.optim.Adam(net.parameters()), 5)
            self.average, self.steps, self.updates = torch.tensor(float(number)), 100 * number, number
            self.returns.append(number)

        def state_dict(self):
            return {**super().state_dict(), "average": self.average}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.average = state["average"]

    one, other = Averaging(1), Averaging(2)
    for _ in range(2):
        other.net(torch.ones(2)).sum().backward()
        other.optimizer.step()
    multibeast.copy_learner(one, other)
    assert one.average == 2 and one.average is not other.average
    assert (one.steps, one.updates, list(one.returns)) == (100, 2, [1])
    moments = [learner.optimizer.state[learner.net.weight]["exp_avg"] for learner in (one, other)]
    assert torch.equal(*moments) and torch.equal(one.net.weight, other.net.weight)
    before = one.net.weight.detach().clone(), moments[0].clone()
    other.optimizer.step()
    assert torch.equal(one.net.weight, before[0]) and torch.equal(moments[0], before[1]), "copies"


def test_policies_are_evaluated_in_turn_while_they_train(tmp_path):
    words = [multibeast.__file__, "--env", "CartPole-v1", "--root", str(tmp_path), "--name", "run", "--num_actors", "1"]
    words += ["--num_policies", "2", "--log_steps", "500", "--no_tensorboard", "--deterministic", "--device", "cpu"]
    words += ["--total_minutes", "10", "--eval_minutes", "0.01", "--eval_episodes", "3"]
    program = Program(words, cwd=Path(multibeast.__file__).parent, env=dict(os.environ), output=tmp_path / "output")
    run = tmp_path / "run"

    def returns(policy: int) -> dict[int, float]:
        rows = metrics_of(run) if (run / "metrics.csv").exists() else []
        told = [row for row in rows if row.get(f"policy{policy}/eval/step")]
        assert all(float(row[f"policy{policy}/eval/episodes"]) == 3 for row in told)
        return {
            int(float(row[f"policy{policy}/eval/step"])): float(row[f"policy{policy}/eval/episodic_return"])
            for row in told
        }

    try:
        wait_until(lambda: returns(0) and returns(1))
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE) == 0
    finally:
        program.kill()
    found = [returns(policy) for policy in range(2)]
    assert abs(len(found[0]) - len(found[1])) <= 1
    best = torch.load(run / "best.pt", weights_only=True)
    told = [each[best["counts"]["steps"]] for each in found if best["counts"]["steps"] in each]
    highest = max(max(each.values()) for each in found)
    assert not told or max(told) == highest  # or one that ended after the last row


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_fork_whose_loss_ignores_counts_is_refused_with_the_missing_line(tmp_path, monkeypatch):
    text = Path(monobeast.__file__).read_text()
    assert ', batch.get("counts"))\n' in text
    fork = tmp_path / "fork.py"
    fork.write_text(text.replace(', batch.get("counts"))\n', ")\n", 1))
    monkeypatch.syspath_prepend(Path(monobeast.__file__).parent)
    agent = multibeast.agent_module(str(fork))
    own = {"agent": str(fork), "root": str(tmp_path), "name": "run", "total_steps": 100}
    flags = multibeast.flags_of(agent)(**{**SMALL, **own})
    with pytest.raises(InputError, match=r"fork.py: its compute_loss trains on what other policies did.*transition_m"):
        multibeast.train(flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, new",
    [
        ({"reward_clip": 0.1, "ppo_clip": 0.0}, ""),
        ({"env": "pettingzoo:pettingzoo.classic.tictactoe_v3", "ppo_clip": 0.0}, ""),
        ({}, "    policy_logits = torch.nn.functional.dropout(policy_logits, 0.1)\n"),
    ],
    ids=["clipped rewards", "masks", "dropout"],
)
def test_a_loss_that_obeys_counts_is_taken(tmp_path, changes, new):
    agent = fork_of_the_loss(tmp_path, new)
    flags = multibeast.validate(AGENT, Flags(name="run", **changes))
    spaces = probe_env(monobeast.create_env, flags)
    net = monobeast.make_learner(flags, spaces).net
    for seed in range(5):
        for space in spaces.observations.values():
            space.seed(seed)
        multibeast.check_counts(agent, flags, net, spaces)


def test_a_loss_with_a_term_of_all_rows_is_refused(tmp_path):
    new = "    extra = distribution(net.action_space, policy_logits[:-1]).log_prob(batch['action'][1:]).mean()\n"
    agent = fork_of_the_loss(tmp_path, new, ("entropy_cost * entropy\n", "entropy_cost * entropy + extra\n"))
    flags = multibeast.validate(AGENT, Flags(env="CartPole-v1", name="run"))
    spaces = probe_env(monobeast.create_env, flags)
    with pytest.raises(InputError, match="trains on what other policies did"):
        multibeast.check_counts(agent, flags, monobeast.make_learner(flags, spaces).net, spaces)


def fork_of_the_loss(tmp_path, new: str, edit: tuple[str, str] = ("", "")):
    """The agent with a line more in compute_loss, behind the net's pass."""
    text, line = Path(monobeast.__file__).read_text(), "    policy_logits, values, _ = net(batch, core_state)"
    before, found, after = text.partition(line)
    rest, newline, after = after.partition("\n")
    fork = tmp_path / "counting_fork.py"
    fork.write_text((before + found + rest + newline + new + after).replace(*edit))
    return import_agent(str(fork), "a fork")


def test_the_agent_is_the_module_that_others_import_and_its_actors_have_its_environments():
    assert AGENT is monobeast
    assert name_of_maker(monobeast.__file__, monobeast.create_env) == ""


@pytest.mark.parametrize("name", ["r2d2.py", "polybeast.py", "plot.py"])
def test_files_that_are_no_agent_for_it_are_refused_by_name(name):
    pytest.importorskip("libbeast") if name == "polybeast.py" else None
    with pytest.raises(InputError, match=f"--agent {name}: "):
        multibeast.agent_module(name)
    with pytest.raises(InputError, match="nothing.py, the agent's file"):
        multibeast.agent_module("nothing.py")


TASKS = {"env": "CartPole-v0,CartPole-v1", "num_policies": 3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_policies": 0}, "--num_policies 0: give 1 to 64"),
        ({"num_policies": 17}, "--num_policies 17: the run has 16 environments"),
        ({"auto": True}, "--auto: it measures one policy"),
        ({"past_every": 100}, "--past_every 100: CartPole-v1 has one agent"),
        ({"objective": "win"}, "--objective win: CartPole-v1 has one agent"),
        (
            {**TASKS, "group_width": 16},
            "--num_policies 3: .* 2 tasks .* multiple of 6 environments; there are 32",
        ),
        ({**TASKS, "balance": "compute", "num_actors": 2}, "--num_policies 3: .* with --balance samples"),
    ],
)
def test_what_several_policies_cannot_have_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        multibeast.train(small_flags(tmp_path, **changes))
    assert not (tmp_path / "run").exists()
