"""Environments: made by their id, stepped in groups, written in place into the rows of a rollout.

Nothing here imports torch: actor processes run this file and are to stay small.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import os
import re

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

ATARI_ID = re.compile(r"(?:ale_py:)?(?:(?P<deepmind>\w+)NoFrameskip-v4|ALE/(?P<machado>\w+)-v5)")
ATARI_FRAMES_PER_STEP = 4
ATARI_FRAMES_PER_EPISODE = 108_000  # 30 minutes at 60 Hz; ale-py counts from the end of the no-ops and then truncates
MINATAR_GAMES = {
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}


def make(env_id: str, num_envs: int, *, num_threads: int = 1, episodic_life: bool | None = None, **kwargs) -> VectorEnv:
    """Make `num_envs` environments that are stepped together.

    Atari games run on ale-py's vector env, in the protocol that their id implies. Both see the last 4 decisions as
    gray images [4, 84, 84] (uint8), decide every 4 frames (each image the pixelwise maximum of the last two), choose
    among the game's own actions, get raw rewards, and are truncated after 108,000 frames (27,000 steps).

    | id                       | sticky actions | no-ops at the start | FIRE           | a lost life          |
    |--------------------------|----------------|---------------------|----------------|----------------------|
    | `<Game>NoFrameskip-v4`   | none           | up to 30            | begins a life  | terminates, and the  |
    | (Mnih et al. 2015)       |                |                     | where it exists| game goes on         |
    | `ALE/<Game>-v5`          | 25 %           | none                | left to the    | is nothing special   |
    | (Machado et al. 2018)    |                |                     | agent          |                      |

    MinAtar games (`MinAtar/<Game>-v0` with all six actions, `-v1` with those that matter; sticky 10 %, difficulty
    ramping) run without MinAtar's plotting libraries. Every other id goes to gymnasium, `module:Id` included: to the
    vector env that its specification names, or one after the other in this process.

    Args:
        env_id: as above.
        num_envs: at least 1.
        num_threads: threads of an Atari vector env; other environments use none.
        episodic_life: whether a lost life ends an episode (Atari only); None leaves it to the id.
        kwargs: passed to the environment; of Atari, to `ale_py.vector_env.AtariVectorEnv`.

    Raises:
        ValueError: no such id (the nearest are listed), `num_envs` below 1, or `episodic_life` of another id.
        ImportError: the package that the id needs is not installed.
        FileNotFoundError: the game's ROM cannot be read.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; at least 1 environment is needed")
    if match := ATARI_ID.fullmatch(env_id):
        return _make_atari(env_id, match, num_envs, num_threads, episodic_life, kwargs)
    if episodic_life:
        raise ValueError(f"episodic_life is for Atari ids; {env_id} does not tell its lives: leave it out")

    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(f"{env_id}: {error}; what stands before ':' is a module on PYTHONPATH") from error
    if name.startswith("MinAtar/"):
        _register_minatar(env_id)
    spec = gymnasium.registry.get(name)
    # Once ale-py is imported, Pong-v4 and its like are registered: raw screens that no net here is made for.
    if spec is None or (not module and str(spec.entry_point).startswith("ale_py")):
        raise _unknown_id(env_id)
    if spec.vector_entry_point is not None:
        return gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    # Without copy=False every observation is copied once more a step; the checker wraps each env in one more layer.
    return gymnasium.make_vec(
        spec, num_envs, vectorization_mode="sync", vector_kwargs={"copy": False}, disable_env_checker=True, **kwargs
    )


def frames_per_step(env_id: str) -> int:
    """Emulator frames of one agent step: 4 for the Atari ids, 1 for all others."""
    return ATARI_FRAMES_PER_STEP if ATARI_ID.fullmatch(env_id) else 1


# ------------------------------------------------------------------------------------------------ Atari


def _make_atari(env_id: str, match: re.Match, num_envs: int, num_threads: int, episodic_life, kwargs) -> VectorEnv:
    game = _atari_games().get(match["deepmind"] or match["machado"])
    if game is None:
        raise _unknown_id(env_id)
    from ale_py.vector_env import AtariVectorEnv

    if match["deepmind"]:
        protocol = {"repeat_action_probability": 0.0, "noop_max": 30, "use_fire_reset": True}
    else:
        protocol = {"repeat_action_probability": 0.25, "noop_max": 0, "use_fire_reset": False}
    protocol["max_num_frames_per_episode"] = ATARI_FRAMES_PER_EPISODE
    try:
        env = AtariVectorEnv(
            game,
            num_envs,
            num_threads=num_threads,
            frameskip=ATARI_FRAMES_PER_STEP,
            # The library would clip rewards by default. Its own `episodic_life` resets the whole game at every lost
            # life (0.12.1), so that no life but the first is ever played: `LifeEpisodes` does it instead.
            reward_clipping=False,
            episodic_life=False,
            **{**protocol, **kwargs},
        )
    except OSError as error:
        directory = os.environ.get("ALE_ROMS_DIR")
        remedy = (
            f"put {game}.bin into ALE_ROMS_DIR={directory}, or unset ALE_ROMS_DIR to use the ROMs that ale-py brings"
            if directory
            else "ale-py brings its ROMs, so install it again: pip install --force-reinstall ale-py"
        )
        raise FileNotFoundError(f"{env_id}: its ROM cannot be read ({error}); {remedy}") from error
    if episodic_life or (episodic_life is None and match["deepmind"]):
        return LifeEpisodes(env)
    return env


def _atari_games() -> dict[str, str]:
    """Name in ids -> name of the ROM, of all games for one player."""
    try:
        from ale_py.roms import get_all_rom_ids
    except ImportError as error:
        raise ImportError(f"Atari needs ale-py ({error}): pip install ale-py") from error
    games = set(get_all_rom_ids()) - {"combat", "joust", "maze_craze", "warlords"}
    return {rom.title().replace("_", ""): rom for rom in sorted(games)}


class LifeEpisodes(VectorWrapper):
    """Ends an episode at every lost life of an Atari vector env (NEXT_STEP) while the game goes on.

    A lost life terminates; `info["life_over"]` tells it from the game's end. The step after it, whose action is void
    under NEXT_STEP, presses FIRE where the game has it: the next life begins as a game does.
    """

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        names = [action.name for action in env.unwrapped.ale.get_action_set()]
        self._first_action = names.index("FIRE") if "FIRE" in names else 0
        self._lives = np.zeros(env.num_envs, np.int32)
        self._life_over = np.zeros(env.num_envs, bool)

    def reset(self, *, seed=None, options=None):
        observations, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"].copy()
        self._life_over = np.zeros(self.num_envs, bool)
        return observations, info

    def step(self, actions: np.ndarray):
        actions = np.where(self._life_over, self._first_action, actions)
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        # A game whose lives are at 0 may run on for some frames (Qbert); its end is then the end of the last life.
        lost = (info["lives"] < self._lives) & (info["lives"] > 0)
        self._life_over = lost & ~terminated & ~truncated
        self._lives = info["lives"].copy()
        info["life_over"] = self._life_over
        return observations, rewards, terminated | self._life_over, truncated, info


# ---------------------------------------------------------------------------------------------- MinAtar


class MinAtar(gymnasium.Env):
    """A MinAtar game (Young and Tian 2019): bool images [10, 10, channels], sticky actions, no time limit.

    The game's module is loaded by its path: importing `minatar` would load matplotlib, seaborn and pandas (100 MB).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self, game: str, minimal_actions: bool, sticky_action_prob: float = 0.1, ramping: bool = True, render_mode=None
    ):
        self._game = _minatar_module(game).Env(ramping=ramping)
        self._random = self._game.random
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(6))
        self._sticky_action_prob = sticky_action_prob
        self._last_action = 0
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(len(self._actions))
        self.observation_space = spaces.Box(0, 1, tuple(self._game.state_shape()), dtype=bool)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._random = self._game.random = np.random.RandomState(seed)
        self._game.reset()
        return self._game.state(), {}

    def step(self, action):
        if self._random.rand() >= self._sticky_action_prob:
            self._last_action = self._actions[action]
        reward, terminated = self._game.act(self._last_action)
        return self._game.state(), reward, terminated, False, {}

    def render(self) -> np.ndarray:
        """The state as an RGB image [10, 10, 3]: one gray per channel, the last channel that is set wins."""
        state = self._game.state()
        channels = state.shape[-1]
        shades = (state * np.arange(1, channels + 1)).max(-1) * (255 // channels)
        return np.repeat(shades[..., None], 3, axis=-1).astype(np.uint8)


def _minatar_module(game: str):
    package = importlib.util.find_spec("minatar")  # finds it without importing it
    path = os.path.join(package.submodule_search_locations[0], "environments", f"{game}.py")
    spec = importlib.util.spec_from_file_location(f"minatar_{game}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register_minatar(env_id: str) -> None:
    if importlib.util.find_spec("minatar") is None:
        raise ImportError(f"{env_id} needs MinAtar: pip install minatar")
    for name, game in MINATAR_GAMES.items():
        for version, minimal_actions in (("v0", False), ("v1", True)):
            if f"MinAtar/{name}-{version}" not in gymnasium.registry:
                gymnasium.register(
                    f"MinAtar/{name}-{version}",
                    "beast.envs:MinAtar",
                    order_enforce=False,
                    kwargs={"game": game, "minimal_actions": minimal_actions},
                )


def _unknown_id(env_id: str) -> ValueError:
    known = [name for name, spec in gymnasium.registry.items() if not str(spec.entry_point).startswith("ale_py")]
    known += [f"MinAtar/{game}-v0" for game in MINATAR_GAMES]
    try:
        known += [name for game in _atari_games() for name in (f"{game}NoFrameskip-v4", f"ALE/{game}-v5")]
    except ImportError:
        pass  # then there are no Atari games to suggest

    def bare(name: str) -> str:
        return re.sub(r"^.*[:/]|(NoFrameskip|Deterministic)?(-v\d+)?$", "", name).casefold()

    ids = difflib.get_close_matches(env_id, known, n=2, cutoff=0.8)
    for near in difflib.get_close_matches(bare(env_id), {bare(name) for name in known}, n=3, cutoff=0.6):
        ids += [name for name in known if bare(name) == near]
    hint = (
        f"the nearest are {', '.join(list(dict.fromkeys(ids))[:8])}"
        if ids
        else "gymnasium.pprint_registry() lists some"
    )
    return ValueError(f"no environment is called {env_id!r}: {hint}. An id of your own is written module:Id")


# --------------------------------------------------------------------------- spaces as they lie in a rollout


def observation_fields(space: spaces.Space) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of each array of an observation: `obs`, or a Dict's own names (nested ones joined by '.').

    Raises:
        ValueError: a part is none of Box, Discrete, MultiDiscrete and MultiBinary, or two parts get one name.
    """
    return {name: observation_field(leaf) for name, (_, leaf) in _leaves(space).items()}


def observation_spaces(space: spaces.Space) -> dict[str, spaces.Space]:
    """Name -> space of each part of an observation, under the names of `observation_fields`."""
    return {name: leaf for name, (_, leaf) in _leaves(space).items()}


def _leaves(space: spaces.Space) -> dict[str, tuple[tuple[str, ...], spaces.Space]]:
    """Name -> (keys that lead to it, space) of each part of an observation space."""
    if not isinstance(space, spaces.Dict):
        return {"obs": ((), space)}
    leaves = {}
    for key, part in space.items():
        inner = _leaves(part) if isinstance(part, spaces.Dict) else {None: ((), part)}
        for name, (keys, leaf) in inner.items():
            name = str(key) if name is None else f"{key}.{name}"
            if name in leaves:
                raise ValueError(f"two parts of the observation space are called {name!r}: rename one")
            leaves[name] = ((key, *keys), leaf)
    return leaves


def observation_field(space: spaces.Space) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of one part of an observation as it is stored; ValueError if it is not supported."""
    if isinstance(space, spaces.Discrete):
        return (), "int64"
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return tuple(space.shape), str(space.dtype)
    raise ValueError(
        f"observation space {space} is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        "a Dict of these: wrap the environment so that its observations are one of them"
    )


def action_shape_dtype(space: spaces.Space) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of one action in the rollout; ValueError for a space that is not supported."""
    if isinstance(space, spaces.Box):
        return (box_size(space),), np.dtype(np.float32)
    sizes = category_sizes(space)
    return (() if isinstance(space, spaces.Discrete) else (len(sizes),)), np.dtype(np.int64)


def category_sizes(space: spaces.Space) -> list[int]:
    """Number of choices of each categorical part, nested spaces in order."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.flatten().tolist()
    if isinstance(space, spaces.Tuple) and len(space) > 0:
        return [size for part in space for size in category_sizes(part)]
    raise _unsupported_action_space(space)


def box_size(space: spaces.Box) -> int:
    """How many numbers an action has; ValueError unless they are floats."""
    if not np.issubdtype(space.dtype, np.floating):
        raise _unsupported_action_space(space)
    return math.prod(space.shape)


def _unsupported_action_space(space: spaces.Space) -> ValueError:
    return ValueError(
        f"action space {space} is not supported; supported are Discrete, MultiDiscrete, a Tuple of these, and a Box of "
        "floats: wrap the environment so that its actions are one of them"
    )


def env_actions(space: spaces.Space, actions: np.ndarray):
    """Actions [K, *action_shape] as a rollout stores them, in the form that a vector env of this action space takes.

    Adds a space's `start`, nests the parts of a Tuple, and takes [-1, 1] to the bounds of a Box that is bounded on
    both sides (clipped to them; a number without two bounds is only clipped).

    Raises:
        ValueError: a category is not one of the space's (ale-py would hang on it), or the space is not supported.
    """
    if isinstance(space, spaces.Discrete):
        _check_categories(actions, space.n, space)
        return (actions + space.start).astype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        actions = actions.reshape(-1, *space.nvec.shape)
        _check_categories(actions, space.nvec, space)
        return (actions + space.start).astype(space.dtype)
    if isinstance(space, spaces.Tuple):
        parts, first = [], 0
        for part in space:
            width = len(category_sizes(part))
            columns = actions[:, first] if isinstance(part, spaces.Discrete) else actions[:, first : first + width]
            parts.append(env_actions(part, columns))
            first += width
        return tuple(parts)
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        actions = actions.reshape(-1, *space.shape).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):  # inf - inf where a number has no bounds
            scaled = np.where(bounded, low + (actions + 1) / 2 * (high - low), actions)
        return np.clip(scaled, low, high).astype(space.dtype)
    raise _unsupported_action_space(space)


def _check_categories(actions: np.ndarray, sizes, space: spaces.Space) -> None:
    if (actions < 0).any() or (actions >= sizes).any():
        raise ValueError(f"actions {actions.tolist()} are not all in {space} (counted from 0)")


# ----------------------------------------------------------------------------------------------- groups


class EnvGroup:
    """Environments stepped together, each result written into one row of a rollout (DESIGN.md, section 3).

    A row is a dict of arrays: `row["obs"][name]` [K, *shape], `reward` and `episode_return` f32 [K], `episode_step` i32
    [K], `done`, `terminated`, `truncated` bool [K]. Each observation is copied once, from the vector env's array.

    Under NEXT_STEP autoreset the last observation of an episode has a row of its own, and the step after it is the
    reset (`done`). Under SAME_STEP one row is both: the first of an episode, and the end of the one before it.

    `episode_return` and `episode_step` are of whole games: a vector env whose episode may end within a game says so in
    `info["life_over"]` (bool [K], see `LifeEpisodes`).
    """

    def __init__(self, env: VectorEnv):
        """Raises ValueError for a space that is not supported and for an env that does not reset itself."""
        # ale-py 0.12.1 writes its mode into the dict that all vector env classes share: the env's own word comes first.
        mode = getattr(env.unwrapped, "autoreset_mode", None) or (env.metadata or {}).get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"autoreset mode of {env} is {mode}, expected AutoresetMode.NEXT_STEP or SAME_STEP: "
                'set metadata["autoreset_mode"] of the vector env to what it does, and let it reset itself'
            )
        self.env = env
        self.num_envs: int = env.num_envs
        self.autoreset_mode: AutoresetMode = mode
        self.single_action_space: spaces.Space = env.single_action_space
        self.observation_fields = observation_fields(env.single_observation_space)
        self._keys = {name: keys for name, (keys, _) in _leaves(env.single_observation_space).items()}

    def reset(self, seed: int, row: dict) -> None:
        """Begin new episodes with seeds `seed`, `seed + 1`, … (below 2³¹) and write their first row."""
        observations, _ = self.env.reset(seed=int(seed))
        self._write_observations(observations, row["obs"])
        self._was_final = np.zeros(self.num_envs, bool)  # NEXT_STEP: the row before was the last of its episode,
        self._was_game_over = np.zeros(self.num_envs, bool)  # and of its game
        self._return = np.zeros(self.num_envs)
        self._step = np.zeros(self.num_envs, np.int32)
        row["done"][...] = True
        for name in ("reward", "terminated", "truncated", "episode_return", "episode_step"):
            row[name][...] = 0

    def step(self, actions: np.ndarray, row: dict) -> None:
        """Step all with `actions` [K, *action_shape] as a rollout stores them and write the row that came of it."""
        observations, reward, terminated, truncated, info = self.env.step(
            env_actions(self.single_action_space, actions)
        )
        self._write_observations(observations, row["obs"])
        ended = terminated | truncated
        game_over = ended & ~info.get("life_over", np.False_)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            done, new_game = ended, game_over
        else:
            # A life may end in the very step that began it (a frame limit). Both rows are final then: a row that is
            # `done` and ended would read as a SAME_STEP reset, and its void transition would be trained on.
            done, new_game = self._was_final & ~ended, self._was_game_over
            self._was_final, self._was_game_over = ended, game_over
            reward = np.where(new_game, 0.0, reward)  # of a void step
        self._return = np.where(new_game, 0.0, self._return + reward)
        self._step = np.where(new_game, 0, self._step + 1)
        row["reward"][...] = reward
        row["done"][...] = done
        row["terminated"][...] = terminated
        row["truncated"][...] = truncated
        row["episode_return"][...] = self._return
        row["episode_step"][...] = self._step

    def close(self) -> None:
        self.env.close()

    def _write_observations(self, observations, fields: dict[str, np.ndarray]) -> None:
        for name, keys in self._keys.items():
            value = observations
            for key in keys:
                value = value[key]
            fields[name][...] = value


def finished_episodes(rows: dict) -> list[tuple[float, int]]:
    """Return and length in steps of each game that ended in a rollout [T+1, K], in the order of their ends.

    An end is seen by the row after it, the first of the next game, so consecutive rollouts (row 0 repeats row T) tell
    each game once, under both autoreset conventions. A game cut off by `EnvGroup.reset` is not told.
    """
    done, returns, steps = rows["done"], rows["episode_return"], rows["episode_step"]
    ended = rows["terminated"] | rows["truncated"]
    begins = steps[1:] == 0
    next_step = (ended & ~done)[:-1] & begins  # [T, K]: row t is the last of its game
    same_step = (ended & done)[1:] & begins  # row t+1 is both the last of this game and the first of the next
    return [
        (float(returns[t, k] + rows["reward"][t + 1, k]), int(steps[t, k]) + 1)
        if same_step[t, k]
        else (float(returns[t, k]), int(steps[t, k]))
        for t, k in zip(*np.nonzero(next_step | same_step))
    ]


# ------------------------------------------------------------------------------------------------ video


class Film:
    """Films a game into an .mp4: the environment itself if its render mode is rgb_array, else a twin of it.

    The twin has the same id and seed and takes the same actions, so it plays the same game, and Atari in color.
    """

    def __init__(self, env_id: str, env: VectorEnv, path: str, seed: int):
        """`env` is one environment that was, or will be, reset with `seed`. Raises ImportError without imageio."""
        try:
            import imageio.v2 as imageio
            import imageio_ffmpeg  # noqa: F401  imageio tells of its absence only at the first frame
        except ImportError as error:
            raise ImportError(
                f"a video needs imageio and its ffmpeg ({error}): pip install imageio imageio-ffmpeg"
            ) from error
        self._env, self._twin = env, None
        self._is_atari = bool(ATARI_ID.fullmatch(env_id))
        if self._is_atari:
            self._env = self._twin = make(env_id, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)
        elif getattr(env, "render_mode", None) != "rgb_array":
            self._env = self._twin = make(env_id, 1, render_mode="rgb_array")
        if self._twin is not None:
            self._observations, _ = self._twin.reset(seed=seed)
        fps = 60 / ATARI_FRAMES_PER_STEP if self._is_atari else (env.metadata or {}).get("render_fps", 30)
        self._writer = imageio.get_writer(path, fps=fps, macro_block_size=2)
        self._over = False

    def add(self, row: dict) -> None:
        """Film what came of the row's action. After the first game's end nothing more is filmed."""
        if self._twin is not None and not self._over:
            actions = env_actions(self._twin.single_action_space, row["action"])
            self._observations = self._twin.step(actions)[0]
        self._over = self._over or int(row["episode_step"][0]) == 0
        if not self._over:
            frame = self._observations[0, -1] if self._is_atari else self._env.render()[0]
            zoom = -(-320 // min(frame.shape[:2]))  # small images are enlarged to at least 320 pixels
            frame = frame.repeat(zoom, axis=0).repeat(zoom, axis=1)
            self._writer.append_data(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
        if self._twin is not None:
            self._twin.close()
