"""Episodes that are begun ahead, in a thread of the actor."""

import threading
import time

import gymnasium
import pytest
import toy_envs
from gymnasium.vector import SyncVectorEnv
from lock_step import metrics_of, small_flags
from waiting import PATIENCE

import monobeast
from beast import envs
from beast.envs import resets
from beast.envs.resets import ResetAhead
from beast.errors import InputError


class Slow(toy_envs.Counting):
    """Takes a fifth of a second to begin, in which Python is free. Notes the threads and seeds of its resets."""

    made: list = []
    seconds = 0.2

    def __init__(self):
        super().__init__(lasts=5)
        self.seeds, self.closed, self.error = [], False, None
        Slow.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.thread = threading.current_thread()
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        return super().reset(seed=seed)

    def close(self):
        self.closed = True


@pytest.fixture
def pair():
    Slow.made = []
    env = ResetAhead(Slow)
    yield env, *Slow.made
    env.close()
    assert [each.closed for each in Slow.made] == [True, True]


def play(env) -> list:
    """The steps of an episode, which is begun already."""
    observations = []
    ended = False
    while not ended:
        observation, _, terminated, truncated, _ = env.step(0)
        observations.append(observation.tolist())
        ended = terminated or truncated
    return observations


def test_the_next_episode_is_made_while_one_is_played(pair):
    env, first, other = pair
    env.reset(seed=3)
    assert first.thread is threading.current_thread() and env.unwrapped is first
    play(env)
    time.sleep(0.4)
    began = time.monotonic()
    observation, _ = env.reset()
    assert time.monotonic() - began < 0.1 and env.unwrapped is other
    assert other.thread is not threading.current_thread() and observation[2] == 0
    assert play(env)[-1] == [*observation[:2], 5]
    env.reset()
    assert env.unwrapped is first and env.name == 3 and env.episode == 1, "the first one's second episode"


def test_seeds_decide_all_episodes(pair):
    env, first, other = pair

    def episodes(seed):
        begun = [env.reset(seed=seed)[0].tolist()]
        return begun + [env.reset()[0].tolist() for _ in range(3)]

    found = episodes(3)
    assert found == episodes(3) and episodes(4) != found
    seeds = {begun[0] for begun in found}
    assert len(seeds) == 2 and 3 in seeds and all(0 <= seed < 2**30 for seed in seeds)
    assert len(seeds | {begun[0] for begun in episodes(4)}) == 4, "the other's seed follows from that of the first"


def test_a_reset_that_raises_does_so_where_it_was_asked_for(pair):
    env, first, other = pair
    other.error = ValueError("no level")
    env.reset(seed=1)
    play(env)
    with pytest.raises(ValueError, match="no level"):
        env.reset()
    other.error = None
    env.reset(seed=2)
    env.reset()
    assert env.unwrapped is other


def test_ids_that_gymnasium_makes_one_by_one_are_made_twice_and_others_refused():
    env = envs.make("toy_envs:Counting-v0", 3, reset_ahead=True, env_kwargs={"lasts": 2})
    assert isinstance(env, SyncVectorEnv) and all(isinstance(each, ResetAhead) for each in env.envs)
    first, _ = env.reset(seed=5)
    assert first[:, 0].tolist() == [5, 6, 7] and env.metadata["env_id"] == "toy_envs:Counting-v0"
    env.close()
    for name in ("PongNoFrameskip-v4", "Doom/Basic-v0", "pettingzoo:toy_games"):
        with pytest.raises(InputError, match="leave --reset_ahead out|--reset_ahead is for one agent"):
            envs.make(name, 2, reset_ahead=True)
    gymnasium.register("OwnVector-v0", Slow, vector_entry_point=lambda num_envs: SyncVectorEnv([Slow] * num_envs))
    with pytest.raises(InputError, match="OwnVector-v0 is a vector env.*leave --reset_ahead out"):
        envs.make("OwnVector-v0", 2, reset_ahead=True)


def test_actors_tell_how_long_they_reset(tmp_path):
    own = {"env": "test_resets:SlowReset-v0", "root": str(tmp_path), "name": "run", "group_width": 4}
    monobeast.train(small_flags(**own, total_steps=200, log_steps=100, deterministic=False))
    last = metrics_of(tmp_path / "run")[-1]
    assert float(last["time/actor_reset"]) > 0.5 * (1 - float(last["time/actor_start"]))


class SlowReset(Slow):
    """As where a level is made for each episode."""

    seconds = 0.05


gymnasium.register("SlowReset-v0", SlowReset)


def test_a_reset_that_waits_behind_those_of_others_is_made_at_once(pair):
    env, one, other = pair
    env.reset(seed=1)
    env._begun.result()
    may_go_on = threading.Event()
    resets._thread().submit(may_go_on.wait, PATIENCE)  # another environment's
    try:
        env.reset()  # which is made already
        env.reset()
        assert one.thread is threading.current_thread() and not may_go_on.is_set()
    finally:
        may_go_on.set()
