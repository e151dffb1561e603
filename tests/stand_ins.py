"""Stand-ins for packages that cannot be installed here: `python stand_ins.py DIRECTORY` writes them.

They have the names, arguments, strings, shapes and refusals of deepmind_lab (docs/users/python_api.md there) and of
gfootball (gfootball/env/__init__.py, football_env.py), and no game: what is seen and paid follows from the seed.
"""

import sys
from pathlib import Path

# The files of game_scripts/levels/contributed/dmlab30.
DMLAB30 = """
rooms_collect_good_objects_train rooms_collect_good_objects_test rooms_exploit_deferred_effects_train
rooms_exploit_deferred_effects_test rooms_select_nonmatching_object rooms_watermaze rooms_keys_doors_puzzle
language_select_described_object language_select_located_object language_execute_random_task
language_answer_quantitative_question lasertag_one_opponent_small lasertag_three_opponents_small
lasertag_one_opponent_large lasertag_three_opponents_large natlab_fixed_large_map natlab_varying_map_regrowth
natlab_varying_map_randomized skymaze_irreversible_path_hard skymaze_irreversible_path_varied
psychlab_arbitrary_visuomotor_mapping psychlab_continuous_recognition psychlab_sequential_comparison
psychlab_visual_search explore_object_locations_small explore_object_locations_large explore_obstructed_goals_small
explore_obstructed_goals_large explore_goal_locations_small explore_goal_locations_large explore_object_rewards_few
explore_object_rewards_many
""".split()

DEEPMIND_LAB = '''
"""A stand-in for DeepMind Lab (tests/stand_ins.py)."""
import os, tempfile, zlib
import numpy as np

LOW, HIGH = np.array([-512, -512, -1, -1, 0, 0, 0]), np.array([512, 512, 1, 1, 1, 1, 1])
EPISODE = 40  # frames
MADE = []
GENERATED = []


class Lab:
    def __init__(self, level, observations, config={}, renderer="software", level_cache=None):
        if level not in LEVELS:
            raise RuntimeError(f"Failed to connect RL API: level {level} not found")
        if unknown := set(observations) - {"RGB_INTERLEAVED", "RGB", "INSTR"}:
            raise RuntimeError(f"Unknown observation {unknown}")
        if any(type(x) is not str for x in (*config, *config.values())):
            raise TypeError("config: expected a dict of strings")
        if renderer not in ("software", "hardware"):
            raise RuntimeError("renderer must be software or hardware")
        self.level, self.names, self.config, self.cache = level, list(observations), dict(config), level_cache
        self.size = int(config.get("height", 240)), int(config.get("width", 320)), 3
        self.running = self.closed = False
        MADE.append(self)

    def reset(self, episode=-1, seed=None):
        self._check()
        if seed is not None and not 0 <= seed < 2**31:
            raise ValueError("seed is no int32")
        self.random = np.random.RandomState(seed)
        self.frames, self.running, self.seed = 0, True, seed
        if self.cache is not None and "explore" in self.level:
            self._load(f"{self.level}-{seed % 5}")

    def _load(self, key):
        handle, path = tempfile.mkstemp(suffix=".pk3")
        os.close(handle)
        os.unlink(path)
        if not self.cache.fetch(key, path):
            GENERATED.append(key)
            with open(path, "wb") as file:
                file.write(key.encode() * 100)
            self.cache.write(key, path)
        with open(path, "rb") as file:
            assert file.read() == key.encode() * 100, "the cache gave another level"
        os.unlink(path)

    def is_running(self):
        return self.running

    def num_steps(self):
        return self.frames

    def fps(self):
        return 60

    def step(self, action, num_steps=1):
        self._check()
        if not self.running:
            raise RuntimeError("Environment in an invalid state; please reset.")
        if action.dtype != np.intc or action.shape != (7,) or (action < LOW).any() or (action > HIGH).any():
            raise ValueError(f"action {action!r} does not fit action_spec()")
        self.frames += num_steps
        self.running = self.frames < EPISODE
        return float(action[3]) * num_steps

    def observations(self):
        self._check()
        if not self.running:
            raise RuntimeError("Environment in an invalid state; please reset.")
        found = {}
        for name in self.names:
            if name == "INSTR":
                found[name] = "Pick up the red balloon" if "language" in self.level else ""
            else:
                screen = np.full(self.size, self.seed % 200 + self.frames // 4, np.uint8)
                found[name] = screen if name == "RGB_INTERLEAVED" else screen.transpose(2, 0, 1)
        return found

    def close(self):
        self.running, self.closed = False, True

    def _check(self):
        if self.closed:
            raise RuntimeError("Environment was closed")
'''

GFOOTBALL = '''
"""A stand-in for Google Research Football (tests/stand_ins.py)."""
import sys
import numpy as np

SCENARIOS = {"11_vs_11_stochastic": 11, "academy_empty_goal": 1, "academy_3_vs_1_with_keeper": 3}
DURATION = 12
MADE = []


class Space:
    def __init__(self, **own):
        vars(self).update(own)


class Config(dict):
    def update(self, values):
        super().update(values)


class FootballEnv:
    """What create_environment returns, with all its wrappers; `unwrapped` as in gym."""

    def __init__(self, level, stacked, representation, rewards, render, left, right):
        self._config = Config(level=level)
        self._left, self._right, self._render, self._stacked = left, right, render, stacked
        self._checkpoints = "checkpoints" in rewards.split(",")
        shape = {"extracted": (72, 96, 4), "simple115v2": (115,)}[representation]
        self._shape = (*shape[:-1], shape[-1] * 4) if stacked else shape
        self._dtype = np.uint8 if representation == "extracted" else np.float32
        players = left + right
        several = (players,) if players > 1 else ()
        self.observation_space = Space(
            low=np.zeros((*several, *self._shape), self._dtype),
            high=np.full((*several, *self._shape), 255 if self._dtype == np.uint8 else 1, self._dtype),
            shape=(*several, *self._shape), dtype=np.dtype(self._dtype),
        )
        self.action_space = Space(nvec=np.full(players, 19)) if several else Space(n=19)
        self.closed = False
        MADE.append(self)

    @property
    def unwrapped(self):
        return self

    def observation(self):
        return [{"steps_left": DURATION - self._step, "score": [0, 0]}] * (self._left + self._right)

    def reset(self):
        self._step = 0
        self.seed = self._config.get("game_engine_random_seed")
        self._is_reversed = self._config.get("reverse_team_processing")
        return self._observe()

    def step(self, action):
        actions = np.atleast_1d(action).tolist()
        if len(actions) != self._left + self._right or not all(type(x) is int and 0 <= x < 19 for x in actions):
            raise AssertionError(f"action {action!r}")
        self._step += 1
        goal = 1.0 if actions[0] == 12 else 0.0  # a shot
        if self._right:
            goal -= 1.0 if actions[self._left] == 12 else 0.0
        academy = self._config["level"].startswith("academy") and goal != 0
        done = self._step == DURATION or academy
        rewards = [goal] * self._left + [-goal] * self._right
        rewards = np.array(rewards, np.float32) + (0.1 if self._checkpoints else 0)
        reward = rewards if len(rewards) > 1 else rewards[0]
        return self._observe(), reward, done, {"score_reward": goal}

    def _observe(self):
        players = [np.full(self._shape, (self.seed or 0) % 100 + self._step + n, self._dtype)
                   for n in range(self._left + self._right)]
        return np.stack(players) if len(players) > 1 else players[0]

    def render(self, mode="human"):
        assert self._render, "create_environment(render=True) is needed"
        return np.full((720, 1280, 3), self._step, np.uint8)

    def close(self):
        self.closed = True


def create_environment(
    env_name="", stacked=False, representation="extracted", rewards="scoring", write_goal_dumps=False,
    write_full_episode_dumps=False, render=False, write_video=False, dump_frequency=1, logdir="", extra_players=None,
    number_of_left_players_agent_controls=1, number_of_right_players_agent_controls=0, channel_dimensions=(96, 72),
    other_config_options={},
):
    assert env_name and "scoring" in rewards.split(",")
    if env_name not in SCENARIOS:
        print(f'Loading scenario "{env_name}" failed', file=sys.stderr)
        sys.exit(1)  # as scenario_builder.py does
    return FootballEnv(env_name, stacked, representation, rewards, render, number_of_left_players_agent_controls,
                       number_of_right_players_agent_controls)
'''


def write(directory: Path) -> None:
    levels = [f"contributed/dmlab30/{name}" for name in DMLAB30]
    files = {
        "deepmind_lab/__init__.py": f"{DEEPMIND_LAB}\nLEVELS = {['nav_maze_static_01', *levels]}\n",
        "gfootball/__init__.py": "",
        "gfootball/env/__init__.py": GFOOTBALL,
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
