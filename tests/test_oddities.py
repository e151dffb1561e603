"""Environments with an oddity: what nobody needs ends no run, and what cannot be trained on is told before it."""

import dataclasses
import os
import re
import signal
import time
import types
from decimal import Decimal
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from beast import envs
from beast.envs.groups import EnvGroup
from beast.envs.probe import SEED, STEPS, probe_env
from beast.envs.rows import nest_observations, rollout_fields
from beast.envs.spaces import EnvSpaces, categories_by_part, env_actions, random_actions
from beast.errors import InputError
from beast.feeds.actor import Actor
from beast.feeds.memory import RolloutMemory
from beast.run.flags import EnvFlags


def probe(make, **changes) -> EnvSpaces:
    """Of environments, or of the vector env that `make(num_envs)` returns."""
    flags = types.SimpleNamespace(**{**dataclasses.asdict(EnvFlags()), "group_width": 4, **changes})
    if isinstance(make, type):
        return probe_env(lambda flags, num_envs: SyncVectorEnv([make] * num_envs), flags)
    return probe_env(lambda flags, num_envs: make(num_envs), flags)


def refusal(make, **changes) -> str:
    with pytest.raises(InputError) as refused:
        probe(make, **changes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def row_of(group: EnvGroup) -> dict:
    fields = rollout_fields(group.spaces)
    return nest_observations({name: np.zeros((group.num_envs, *x), dtype) for name, (x, dtype) in fields.items()})


def play(group: EnvGroup, num_steps: int) -> list[dict]:
    """Copies of the rows of random actions."""
    row, random, rows = row_of(group), np.random.default_rng(0), []
    group.reset(1, row)
    for _ in range(num_steps):
        group.step(random_actions(group.spaces.action, group.num_envs, random), row)
        rows.append({name: part.copy() for name, part in row.items() if isinstance(part, np.ndarray)})
    return rows


# ------------------------------------------------------------------------------------ what nobody needs


class OddInfos(toy_envs.Counting):
    """Its infos have other shapes and kinds in every environment and step; `kept` is a number in each."""

    number = 0
    odd = (
        {"x": np.zeros(3)}, {"x": np.zeros((2, 2))}, {"x": "text"}, {"x": 1}, {"x": None}, {"x": {"y": np.zeros(2)}},
        {"x": {"y": np.zeros(3)}}, {"x": 0.5}, {}, {"x": {"y": {"z": []}}}, {0: 1}, {"x": [np.zeros(2), 1]},
    )  # fmt: skip

    def _info(self):
        self.number += 1
        return self.odd[(self.name + 5 * self.number) % len(self.odd)] | {"kept": self.number}

    def reset(self, **arguments):
        return super().reset(**arguments)[0], self._info()

    def step(self, action):
        return *super().step(action)[:4], self._info()


class NoInfos(toy_envs.Counting):
    def reset(self, **arguments):
        return super().reset(**arguments)[0], None

    def step(self, action):
        return *super().step(action)[:4], [{}]


class ReadsInfos(VectorWrapper):
    """A wrapper that pays what the infos say."""

    def step(self, actions):
        observations, _, *ends, infos = super().step(actions)
        return observations, infos["kept"].astype(float), *ends, infos


class ReadsInfosItself(SyncVectorEnv):
    def step(self, actions):
        observations, _, *ends, infos = super().step(actions)
        return observations, infos["kept"].astype(float), *ends, infos


class HoldsOne(VectorEnv):
    """No wrapper of gymnasium's kind."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, inner):
        self.inner, self.num_envs = inner, inner.num_envs
        self.single_observation_space, self.single_action_space = (
            inner.single_observation_space,
            inner.single_action_space,
        )

    def reset(self, **arguments):
        return self.inner.reset(**arguments)

    def step(self, actions):
        observations, _, *ends, infos = self.inner.step(actions)
        return observations, infos["kept"].astype(float), *ends, infos


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_infos_of_any_shape_and_kind_end_no_actor(mode):
    plain, odd, none = (
        play(EnvGroup(SyncVectorEnv([env] * 3, autoreset_mode=mode)), 60)
        for env in (toy_envs.Counting, OddInfos, NoInfos)
    )
    for expected, row, other in zip(plain, odd, none):
        for name, array in expected.items():
            np.testing.assert_array_equal(row[name], array, err_msg=name)
            np.testing.assert_array_equal(other[name], array, err_msg=name)


def test_infos_of_any_shape_and_kind_end_no_actor_where_environments_run_in_processes_of_their_own():
    group = EnvGroup(AsyncVectorEnv([OddInfos] * 3))
    assert len(play(group, 30)) == 30
    group.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReadsInfos(SyncVectorEnv([OddInfos] * 3)),
        lambda: wrappers.vector.RecordEpisodeStatistics(ReadsInfos(SyncVectorEnv([OddInfos] * 3))),
        lambda: ReadsInfosItself([OddInfos] * 3),
        lambda: HoldsOne(SyncVectorEnv([OddInfos] * 3)),
    ],
)
def test_what_wrappers_of_a_users_own_read_of_the_infos_stays(make):
    rows = play(EnvGroup(make()), 40)
    steps = [t for t, row in enumerate(rows) if not row["done"][0]]
    assert len(steps) > 20 and all(rows[t]["reward"][0] == t + 2 for t in steps), "the reset's was the first"


def test_a_vector_env_whose_infos_are_a_list_is_played():
    group = EnvGroup(wrappers.vector.DictInfoToList(SyncVectorEnv([toy_envs.Counting] * 2)))
    assert len(play(group, 20)) == 20


class CloseRaises(toy_envs.Counting):
    closed = 0

    def close(self):
        CloseRaises.closed += 1
        raise AttributeError("no window\nand more")


def test_an_exception_when_environments_are_closed_is_told_in_one_line_and_the_others_are_closed(capfd):
    probe(CloseRaises)
    (line,) = capfd.readouterr().err.splitlines()
    expected = r"warning: CloseRaises: close\(\) raised AttributeError: no window \(.*test_oddities.py:\d+, in close\)"
    assert re.fullmatch(expected, line), line
    CloseRaises.closed = 0
    env = SyncVectorEnv([CloseRaises] * 3)
    EnvGroup(env).close()
    assert CloseRaises.closed >= 3 and env.closed, "or Python would try again and show a traceback"


class Panic(BaseException):
    """As Rust's panics and cancelled tasks, no Exception."""


class Panics(toy_envs.Counting):
    at = ""

    def __init__(self):
        self._panic("making it")
        super().__init__()

    def reset(self, **arguments):
        self._panic("reset()")
        return super().reset(**arguments)

    def step(self, action):
        self._panic("step()")
        return super().step(action)

    def close(self):
        self._panic("close()")

    def _panic(self, at):
        if at == self.at:
            raise Panic("index out of bounds")


@pytest.mark.parametrize("at", ["making it", "reset()", "step()"])
def test_what_is_raised_and_is_no_exception_is_told_in_a_line(at):
    assert f"{at} raised Panic: index out of bounds (" in refusal(type("Toy", (Panics,), {"at": at}))


def test_what_is_raised_when_environments_are_closed_and_is_no_exception_ends_nothing(capfd):
    probe(type("Toy", (Panics,), {"at": "close()"}))
    assert "close() raised Panic: index out of bounds (" in capfd.readouterr().err


def test_environments_that_hang_when_they_are_closed_are_left_after_a_while(capfd, monkeypatch):
    monkeypatch.setattr("beast.envs.groups.CLOSING_SECONDS", 0.1)
    left = []

    class Hangs(toy_envs.Counting):
        def close(self):
            left.append(self)
            time.sleep(5 if len(left) == 1 else 0)

    probe(Hangs)
    assert "Hangs: close() raised TimeoutError: it took 0.1 s (" in capfd.readouterr().err
    assert len(left) == 3, "the other one is closed, too"
    time.sleep(0.2)  # nothing interrupts what comes later
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


class SaysWhatVectorEnvsSay(toy_envs.Counting):
    """Its infos have names that mean something in those of vector envs."""

    said = {"life_over": True, "final_obs": np.zeros(1), "final_info": {"metrics": {"wrong": 1}}, "_final_info": False}

    def reset(self, **arguments):
        return super().reset(**arguments)[0], self.said

    def step(self, action):
        return *super().step(action)[:4], {**self.said, "metrics": {"right": 2.0}}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_a_single_environment_calls_like_infos_of_vector_envs_changes_no_row(mode):
    groups = [
        EnvGroup(SyncVectorEnv([env] * 3, autoreset_mode=mode)) for env in (toy_envs.Counting, SaysWhatVectorEnvsSay)
    ]
    for expected, row in zip(*(play(group, 60) for group in groups)):
        for name, array in expected.items():
            np.testing.assert_array_equal(row[name], array, err_msg=name)
    groups[1].ended = []
    while not groups[1].ended:
        groups[1].step(np.zeros(3, int), row_of(groups[1]))
    assert all(numbers == {"right": 2.0} for _, numbers in groups[1].ended)


# ------------------------------------------------------------------- what is told before a run is started


class AtEnd(toy_envs.Counting):
    """Something is wrong with the last observation of its episodes."""

    last = None

    def __init__(self):
        super().__init__(max_length=60)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return self.last if terminated or truncated else observation, reward, terminated, truncated, info


class TooShortAtEnd(AtEnd):
    last = np.zeros(2, np.float32)


class Shows(toy_envs.Counting):
    """Shows `shown`, or what it makes of the plain observation."""

    space, shown = spaces.Box(0, 255, (3,), np.uint8), None

    def __init__(self):
        super().__init__()
        self.observation_space = self.space

    def _observation(self):
        return self.shown


def shows(space, shown):
    return type("Toy", (Shows,), {"space": space, "shown": shown})


class TakesSmallSeeds(toy_envs.Counting):
    def reset(self, *, seed=None, options=None):
        assert seed is None or seed < 100, "there are 100 scenarios"
        return super().reset(seed=seed)


class Gives(toy_envs.Counting):
    """Gives these instead of its reward and ends, if they are not None."""

    instead: tuple = (1.0, False, False)

    def step(self, action):
        observation, *_, info = super().step(action)
        return observation, *self.instead, info


def gives(*instead):
    return type("Toy", (Gives,), {"instead": instead})


class Batch(VectorEnv):
    """A vector env of a user's own that gives these."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Dict(x=spaces.Box(0, 9, (2,), np.int8))
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, **instead):
        given = {"x": np.ones((num_envs, 2)), "reward": np.ones(num_envs)}
        self.given = {**given, **dict.fromkeys(("terminated", "truncated"), np.zeros(num_envs, bool)), **instead}
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        return {"x": self.given["x"]}, {}

    def step(self, actions):
        return {"x": self.given["x"]}, *(self.given[name] for name in ("reward", "terminated", "truncated")), {}


MANY = spaces.MultiDiscrete([10, 10])
PARTS = spaces.Dict(a=spaces.Box(0, 1, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))))


@pytest.mark.parametrize(
    "make, message",
    [
        (AtEnd, r"AtEnd: step\(\) gave observations None, the observation space Box.* says float32 of shape \(3,\)"),
        (TooShortAtEnd, r"step\(\) gave observations float32 of shape \(2,\), the observation space"),
        (TakesSmallSeeds, rf"AssertionError: there are 100 scenarios .*seed was {SEED}; .* seed % 100"),
        (shows(MANY, [3, -1]), r"environment 0 of its group gave -1 in 'obs', .*the space MultiDis.*start="),
        (shows(spaces.Discrete(4), 4), r"gave 4 in 'obs', which is outside of the space Discrete\(4\)"),
        (shows(spaces.Discrete(4, start=2), 1), r"gave 1 in 'obs', which is outside of the space Discrete\(4, start=2"),
        (shows(spaces.MultiBinary(2), np.array([0, 2])), r"gave 2 in 'obs', which is outside of the space MultiBinary"),
        (shows(PARTS, {"a": np.zeros(2), "b": (4, np.ones(2, int))}), r"gave 4 in 'b.0', which is outside of"),
        (shows(PARTS, {"a": np.zeros(2), "b": (1, None)}), r"reset\(\) gave 'b.1' None, the observation space Multi"),
        (shows(PARTS, {"a": [1, "x"], "b": (1, [1, 0])}), r"reset\(\) gave 'a' \[1, 'x'\], the observation space Box"),
        (shows(PARTS, {"a": [1, [2, 3]], "b": (1, [1, 0])}), r"reset\(\) gave 'a' \[1, \[2, 3\]\], the observation"),
        (shows(PARTS, None), r"reset\(\) gave an observation that is not nested as its space Dict.*: it is None"),
        (shows(Shows.space, np.full(3, 7.5)), r"gave observations float64 of shape \(3,\), .* says uint8 of"),
        (shows(Shows.space, np.full(3, 300, np.uint16)), r"gave observations uint16 of shape"),
        (shows(spaces.Discrete(4), 1.5), r"gave observations float64 of shape \(\), .* Discrete\(4\) says int64"),
        (gives(None, False, False), r"step\(\) gave 'reward' None, needed is one float64: return float\(reward\)"),
        (gives("much", False, False), r"step\(\) gave 'reward' 'much', needed is one float64"),
        (gives(np.ones(2), False, False), r"step\(\) gave 'reward' float64 of shape \(2,\), needed is"),
        (gives(1.0, None, False), r"step\(\) gave 'terminated' None, needed is one bool: return bool\(terminated\)"),
        (lambda n: Batch(n, truncated=np.full(n, 0.5)), r"Batch: step\(\) gave 'truncated' float64 of shape \(2,\)"),
        (lambda n: Batch(n, reward=np.ones(1)), r"step\(\) gave 'reward' float64 of shape \(1,\), .*of shape \(2,\)"),
        (lambda n: Batch(n, x=np.full((n, 2), 200.0)), r"reset\(\) gave 'x' float64 of shape \(2, 2\), .* int8"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_told_in_one_line_before_a_run(make, message):
    assert re.search(message, told := refusal(make)), told


@pytest.mark.parametrize(
    "make",
    [
        shows(MANY, [3, 9]),
        shows(spaces.MultiDiscrete([11, 11], start=[-1, -1]), np.array([3, -1])),
        shows(spaces.MultiBinary(2), np.array([True, False])),
        shows(spaces.Box(0, 1, (3,), np.float32), np.zeros(3)),
        shows(spaces.Box(0, 1, (3,), np.float32), [0, 1, True]),
        shows(spaces.Discrete(4), np.int16(3)),
        gives(np.ones(1), np.array([False]), 0),
        gives(1, 0.0, np.False_),
        lambda n: Batch(n, reward=np.ones((n, 1)), truncated=np.zeros(n)),
        lambda n: Batch(n, reward=list(range(n)), terminated=[False] * n),
        lambda n: AsyncVectorEnv([toy_envs.Counting] * n),
    ],
)
def test_what_loses_nothing_by_a_cast_is_taken(make):
    probe(make)


class OldReset(toy_envs.Counting):
    def reset(self, seed=None):
        return super().reset(seed=seed)


class TakesOneSeed(toy_envs.Counting):
    is_seeded = False

    def reset(self, *, seed=None, options=None):
        assert seed is None or not self.is_seeded, "it has been seeded"
        self.is_seeded |= seed is not None
        return super().reset(seed=seed)


class RefusesSeeds(toy_envs.Counting):
    def reset(self, *, seed=None, options=None):
        if seed:
            raise ValueError("there are 100 scenarios")
        return super().reset(seed=seed)


class Ends(toy_envs.Counting):
    def reset(self, **arguments):
        os._exit(3)


def asynchronous(env):
    return lambda num_envs: AsyncVectorEnv([env] * num_envs)


@pytest.mark.parametrize(
    "make, message, hint",
    [
        (OldReset, "unexpected keyword argument 'options'", r"signature is reset\(self, \*, seed=None, options=None\)"),
        (asynchronous(RefusesSeeds), "there are 100 scenarios", rf"Its seed was {SEED}; those of a run"),
        (asynchronous(Ends), "EOFError", "one of its processes has ended"),
    ],
)
def test_a_reset_that_raises_is_told_with_what_to_change(make, message, hint):
    told = refusal(make)
    assert message in told and re.search(hint, told) and ("Its seed was" in told) == ("Its seed was" in hint), told


def test_an_environment_that_takes_one_seed_is_tried():
    probe(TakesOneSeed)


class Truncates(Batch):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    infos: object = {}

    def __init__(self, num_envs):
        super().__init__(num_envs, truncated=np.ones(num_envs, bool))

    def step(self, actions):
        return *super().step(actions)[:4], self.infos


@pytest.mark.parametrize("infos", [{}, [{}, {}], None, {"final_obs": {"x": np.ones((2, 2))}}])
def test_truncated_episodes_without_their_last_observation_are_warned_of(infos, capfd):
    toy = type("Toy", (Truncates,), {"infos": infos})
    probe(lambda num_envs: toy(num_envs))
    assert ('warning: Toy: infos have no "final_obs"' in capfd.readouterr().err) != (
        isinstance(infos, dict) and bool(infos)
    )


def test_a_mask_within_a_part_is_warned_of(capfd):
    part = {"action_mask": np.ones(2, np.int8)}
    space = spaces.Dict(inner=spaces.Dict(action_mask=spaces.MultiBinary(2)))
    probe(shows(space, {"inner": part}))
    assert "inner.action_mask forbids nothing: a mask is the part action_mask of" in capfd.readouterr().err


@pytest.mark.parametrize("reward", [[1.0], [[1.0]], (1,), np.ones((1, 1)), Fraction(1, 2), Decimal("0.5"), np.array(1)])
def test_whatever_holds_one_number_is_a_reward(reward):
    rows = play(EnvGroup(SyncVectorEnv([gives(reward, False, False)] * 2)), 3)
    probe(gives(reward, False, False))
    assert all(row["reward"].tolist() == [float(np.asarray(reward).item())] * 2 for row in rows)


@pytest.mark.parametrize("reward", [[1.0, 2.0], np.ones(2), ()])
def test_a_reward_of_several_numbers_is_told_when_it_comes(reward):
    with pytest.raises(InputError, match="environment 0 of its group gave the reward .*: return one number"):
        play(EnvGroup(SyncVectorEnv([gives(reward, False, False)] * 2)), 3)
    group = EnvGroup(Batch(2, reward=np.ones((2, 2))))
    with pytest.raises(InputError, match=r"Batch: rewards of shape \(2, 2\) of 2 environments"):
        play(group, 3)


def test_an_environment_is_tried_until_an_episode_ends_and_no_longer_than_its_limits(monkeypatch):
    steps = []

    class Endless(toy_envs.Counting):
        def step(self, action):
            steps.append(action)
            return *super().step(action)[:2], False, False, {}

    probe(Endless)
    assert len(steps) == 2 * STEPS and set(steps) == {0, 1}
    monkeypatch.setattr("beast.envs.probe.SECONDS", 0.0)
    steps.clear()
    probe(Endless)
    assert len(steps) == 2
    steps.clear()
    monkeypatch.undo()
    probe(lambda n: SyncVectorEnv([lambda: wrappers.TimeLimit(Endless(), 5)] * n))
    assert len(steps) == 10, "and one more step, which is the reset"


def test_parts_that_the_space_lacks_are_told_once(capfd):
    probe(shows(PARTS, {"a": np.zeros(2), "b": (1, [1, 0], 3), "crop": np.zeros((9, 9)), "c": 0}))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: Toy: the agent will not see b.2, c, crop, which the observation space lacks"), line
    probe(shows(PARTS, {"a": np.zeros(2), "b": (1, [1, 0])}))
    assert not capfd.readouterr().err


def test_no_action_that_a_mask_forbids_is_tried():
    """The toy raises where one is taken."""
    probe(toy_envs.Masked)


def test_random_actions_obey_masks_of_each_part_and_span_their_space():
    random = np.random.default_rng(0)
    space = spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))
    allowed = np.array([[1, 0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0, 0]])
    drawn = np.array([random_actions(space, 2, random, allowed) for _ in range(200)])
    assert {*map(tuple, drawn[:, 0])} == {(a, 0, b) for a in (0, 2) for b in (0, 1)}
    assert {*map(tuple, drawn[:, 1])} == {(1, 1, b) for b in (0, 1)}, "where all are forbidden any will do"
    assert {*random_actions(spaces.Discrete(3), 100, random).tolist()} == {0, 1, 2}
    box = random_actions(spaces.Box(-5, 5, (2, 3)), 50, random)
    assert box.shape == (50, 6) and box.dtype == np.float32 and 0.9 < abs(box).max() <= 1


class PettingZoo:
    """The interface of an environment of several agents."""

    possible_agents = ["a", "b"]
    metadata: dict = {}

    def __init__(self, render_mode=None):
        pass


def test_a_registered_environment_of_several_agents_is_told_so():
    gymnasium.register("PettingZoo-v0", PettingZoo)
    message = "PettingZoo has several agents: give --env pettingzoo:<its module>"
    assert message in refusal(lambda n: envs.make("PettingZoo-v0", n))
    assert message in refusal(lambda n: SyncVectorEnv([lambda: gymnasium.make("PettingZoo-v0")] * n))


class Alone(toy_envs.Counting):
    """Of which a process takes one."""

    message, made = "", 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        if self.made > 1:
            raise RuntimeError(self.message)


@pytest.mark.parametrize(
    "message, is_hinted",
    [("Only one instance per process", True), ("[Errno 98] Address already in use", True), ("no such map", False)],
)
def test_where_a_process_takes_one_only_the_way_to_have_each_in_its_own_is_named(message, is_hinted):
    told = refusal(type("Alone", (Alone,), {"message": message}))
    assert message in told and ("AsyncVectorEnv (docs/environments.md" in told) == is_hinted


# --------------------------------------------------------------------------------------- in an actor


class PadsLater(toy_envs.Counting):
    """Shows -1 in the step `n` of environment 1."""

    def __init__(self, n=3):
        super().__init__(max_length=10**6)
        self.observation_space, self.n = spaces.Dict(cards=spaces.MultiDiscrete([9, 9])), n

    def _observation(self):
        return {"cards": np.array([2, -1 if self.count == self.n and self.name == 2 else 8])}


def test_an_index_outside_of_its_space_ends_the_actor_with_environment_part_value_and_space():
    expected = r"PadsLater: environment 1 of its group gave -1 in 'cards', which is outside of the space MultiDiscrete"
    with pytest.raises(InputError, match=expected):
        play(EnvGroup(SyncVectorEnv([PadsLater] * 3)), 20)
    play(EnvGroup(SyncVectorEnv([lambda: PadsLater(99)] * 3)), 20)


def test_an_index_outside_of_its_space_in_a_last_observation_ends_the_actor_too():
    class Cut(PadsLater):
        def step(self, action):
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, self.count == 3, info

    group = EnvGroup(SyncVectorEnv([Cut] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(InputError, match="environment 1 of its group gave -1 in 'cards'"):
        play(group, 4)
    play(EnvGroup(SyncVectorEnv([lambda: Cut(99)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)), 7)


BOX = spaces.Box(0, 1, (3,), np.float32)


class Later(toy_envs.Counting):
    """Shows something else in its 9th step, when it has been tried."""

    space, shown, later = BOX, np.zeros(3, np.float32), None

    def __init__(self):
        super().__init__(max_length=10**6)
        self.observation_space = self.space

    def _observation(self):
        return self.later if self.count == 9 else self.shown


@pytest.mark.parametrize(
    "space, shown, later, message",
    [
        (BOX, np.zeros(3), None, r"observations None, the observation space Box.* says float32 of shape \(3,\)"),
        (BOX, np.zeros(3), np.zeros(2), r"observations float64 of shape \(2,\), the observation space"),
        (spaces.Discrete(4), 1, 1.5, r"observations float64 of shape \(\), .* Discrete\(4\) says int64 of"),
        (spaces.Box(0, 255, (3,), np.uint8), np.zeros(3, np.uint8), np.full(3, -1), r"int64 of shape .* says uint8"),
        (spaces.Dict(a=BOX, b=MANY), {"a": np.zeros(3), "b": [1, 2]}, {"a": np.zeros(3)}, r"it lacks 'b'"),
        (spaces.Dict(a=BOX), {"a": np.zeros(3)}, {"a": "x"}, r"'a' 'x', the observation space Box"),
    ],
)  # fmt: skip
def test_an_observation_that_does_not_fit_later_is_told_in_one_line(space, shown, later, message):
    make = type("Toy", (Later,), {"space": space, "shown": shown, "later": later})
    with pytest.raises(InputError, match=r"^Toy: environment 0 of its group gave .*" + message) as told:
        play(EnvGroup(SyncVectorEnv([make] * 2)), 20)
    assert "\n" not in str(told.value)


def test_what_an_environment_raises_later_is_not_taken_for_an_observation():
    class Raises(Later):
        def step(self, action):
            if self.count == 5:
                raise RuntimeError("of its own")
            return super().step(action)

    with pytest.raises(RuntimeError, match="of its own"):
        play(EnvGroup(SyncVectorEnv([type("Toy", (Raises,), {"later": np.zeros(3)})] * 2)), 20)


@pytest.mark.parametrize(
    "observation, action, message",
    [
        (BOX, spaces.Discrete(3), r"'policy_logits': \(\(3,\), 'float32'\).*first call gave .*\(\(2,\), 'float32'\)"),
        (BOX, spaces.Box(-1, 1, (1,)), r"'action': \(\(1,\), 'float32'\).*first call gave .*'action': 'Discrete\(2\)'"),
        (
            spaces.Discrete(5),
            spaces.Discrete(2),
            r"'obs/obs': 'Discrete\(5\)'.*first call gave .*\(\(3,\), 'float32'\)",
        ),
    ],
)
def test_other_spaces_in_an_actor_than_at_first_are_refused_with_both(observation, action, message):
    first = EnvSpaces({"obs": BOX}, spaces.Discrete(2))
    memory = RolloutMemory(rollout_fields(first), 1, 2, 2, categories_by_part(first))
    memory = RolloutMemory(**{**memory.description(), "fd": None})  # as in another process

    class Other(toy_envs.Counting):
        def __init__(self):
            super().__init__()
            self.observation_space, self.action_space = observation, action

    with pytest.raises(InputError, match=message):
        Actor(lambda flags, num_envs: SyncVectorEnv([Other] * num_envs), None, memory, {0: 1})
    Actor(lambda flags, num_envs: SyncVectorEnv([toy_envs.Counting] * num_envs), None, memory, {0: 1})


def test_as_many_categories_of_other_sizes_are_other_spaces():
    first, other = (EnvSpaces({"obs": BOX}, spaces.MultiDiscrete(sizes)) for sizes in ([2, 3], [3, 2]))
    assert rollout_fields(first) == rollout_fields(other) and categories_by_part(first) != categories_by_part(other)


# ---------------------------------------------------------------------------------- rewards and actions


class PaysArrays(toy_envs.Counting):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


def test_rewards_of_one_number_in_an_array_are_numbers():
    gymnasium.register("PaysArrays-v0", PaysArrays)
    plain = play(EnvGroup(SyncVectorEnv([toy_envs.Counting] * 3)), 40)
    for env in (
        SyncVectorEnv([PaysArrays] * 3),
        ReadsNothing(SyncVectorEnv([PaysArrays] * 3)),
        envs.make("PaysArrays-v0", 3),
        gymnasium.make_vec("PaysArrays-v0", 3),
        SyncVectorEnv([lambda: gymnasium.make("PaysArrays-v0", disable_env_checker=True)] * 3),
    ):
        for row, expected in zip(play(EnvGroup(env), 40), plain):
            for name in ("reward", "episode_return", "done", "terminated", "truncated"):
                np.testing.assert_array_equal(row[name], expected[name])


class ReadsNothing(VectorWrapper):
    pass


def test_buttons_and_dicts_of_choices_reach_the_environment_in_its_own_form():
    actions = np.array([[0, 1, 1, 2], [1, 0, 1, 0]])
    space = spaces.Dict(keys=spaces.MultiBinary(3), speed=spaces.Discrete(3, start=-1))
    made = env_actions(space, actions)
    assert made["keys"].tolist() == [[0, 1, 1], [1, 0, 1]] and made["keys"].dtype == np.int8
    assert made["speed"].tolist() == [1, -1]
    assert env_actions(spaces.MultiBinary([2, 2]), actions % 2).tolist() == [[[0, 1], [1, 0]], [[1, 0], [1, 0]]]
    with pytest.raises(ValueError, match="not all in MultiBinary"):
        env_actions(spaces.MultiBinary(4), actions)


def test_choices_and_floats_in_one_action_are_refused_as_such():
    class Hybrid(toy_envs.Counting):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Dict(kind=spaces.Discrete(3), power=spaces.Box(-1, 1, (2,), np.float32))

    assert "choices and floats together have no policy" in refusal(Hybrid)
