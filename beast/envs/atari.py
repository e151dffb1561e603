"""Atari games on Beast's emulator or on ale-py's, in the protocol that their id implies."""

import importlib
import os
import re
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from beast.envs.images import JoinChannels
from beast.errors import InputError, MissingFile, MissingPackage

ATARI_ID = re.compile(r"(?:ale_py:)?(?:(?P<deepmind>\w+)NoFrameskip-v4|ALE/(?P<machado>\w+)-v5)")
ATARI_FRAMES_PER_STEP = 4
ATARI_FRAMES_PER_SECOND = 60
ATARI_FRAMES_PER_EPISODE = 108_000  # 30 minutes at 60 Hz; ale-py counts from the end of the no-ops and then truncates
ALE_ARGUMENTS = {  # choices of beast.envs.make -> arguments of AtariVectorEnv
    "frame_stack": ["stack_num"],
    "frame_skip": ["frameskip"],
    "resize": ["img_height", "img_width"],
    "grayscale": ["grayscale"],
    "sticky_actions": ["repeat_action_probability"],
    "noops": ["noop_max"],
    "full_action_space": ["full_action_space"],
}


GPU_ARGUMENTS = ("device", "exact", "lanes")  # of beast.gpu.atari.AtariTensorEnv alone


def make_atari(env_id: str, match: re.Match, num_envs: int, episodic_life: bool | None, chosen, kwargs) -> VectorEnv:
    """See `beast.envs.make`; `match` is that of ATARI_ID, `chosen` has the choices that are made, by our names. Raises
    KeyError for an unknown game, InputError for an invalid argument, MissingFile where the ROM cannot be read,
    MissingPackage without ale-py, or without libatari where it is asked for."""
    game = atari_games()[match["deepmind"] or match["machado"]]
    if match["deepmind"]:
        protocol = {"repeat_action_probability": 0.0, "noop_max": 30, "use_fire_reset": True}
    else:
        protocol = {"repeat_action_probability": 0.25, "noop_max": 0, "use_fire_reset": False}
    settings = {
        "num_threads": 1,
        "max_num_frames_per_episode": ATARI_FRAMES_PER_EPISODE,
        "frameskip": ATARI_FRAMES_PER_STEP,
        "reward_clipping": False,  # the library would clip them by default
        **protocol,
        **{name: value for ours, value in chosen.items() for name in ALE_ARGUMENTS.get(ours, [])},
        **kwargs,
    }
    backend = chosen.get("atari_backend", "auto")
    if backend not in ("auto", "beast", "ale", "cuda"):
        raise InputError(f"atari_backend is {backend!r}: it is 'auto', 'beast', 'ale' or 'cuda'")
    # The library's own `episodic_life` resets the whole game at every lost life (0.12.1), so that no life but the first
    # is ever played: `LifeEpisodes` does it instead.
    episodic_life = settings.pop("episodic_life", episodic_life)
    if not isinstance(episodic_life, (bool, type(None))):
        raise InputError(f"episodic_life is {episodic_life!r}: give true or false")
    if settings.get("render_mode") not in (None, "rgb_array"):
        raise InputError(f"render_mode is {settings['render_mode']!r}: it is None or 'rgb_array'")
    if batch_size := settings.get("batch_size"):
        raise InputError(f"batch_size is {batch_size!r}: the environments of a group step together, so leave it out")
    if name := next((name for name in ("game", "num_envs") if name in settings), None):
        raise InputError(f"{name} is {settings[name]!r}: the id names the game, and the group's width is num_envs")
    if settings.get("life_loss_info"):
        remedy = "leave it out; --episodic_life on ends an episode at it"
        raise InputError(f"life_loss_info would count each life as a game: {remedy}")
    try:
        env = _emulate(backend, game, num_envs, settings)
    except OSError as error:
        directory = os.environ.get("ALE_ROMS_DIR")
        remedy = (
            f"put {game}.bin into ALE_ROMS_DIR={directory}, or unset ALE_ROMS_DIR to use the ROMs that ale-py brings"
            if directory
            else "ale-py brings its ROMs, so install it again: pip install --force-reinstall ale-py"
        )
        raise MissingFile(f"{env_id}: its ROM cannot be read ({error}); {remedy}") from error
    if len(env.single_observation_space.shape) == 4:
        env = JoinChannels(env)
    if episodic_life or (episodic_life is None and match["deepmind"]):
        env = LifeEpisodes(env)
    frames = {"frames_per_step": settings["frameskip"], "render_fps": ATARI_FRAMES_PER_SECOND / settings["frameskip"]}
    env.metadata = {**env.metadata, **frames}
    return env


def _emulate(backend: str, game: str, num_envs: int, settings: dict) -> VectorEnv:
    """The game on Beast's emulator, its GPU's or ale-py's; `metadata["atari_backend"]` says which."""
    from beast.envs import emulator

    if backend == "cuda":
        # Not imported where actors would follow it to torch: they have no such environments.
        on_gpu = importlib.import_module("beast.gpu.atari").AtariTensorEnv(game, num_envs, **settings)
        on_gpu.metadata = {**on_gpu.metadata, "atari_backend": "cuda"}
        return on_gpu
    if backend == "auto":  # a test plays on a core what a GPU trained
        settings = {name: value for name, value in settings.items() if name not in GPU_ARGUMENTS}
    elif name := next((name for name in GPU_ARGUMENTS if name in settings), ""):
        raise InputError(f"{name} is for --atari_backend cuda: leave it out")
    emulator.refuse_unknown(settings)
    unlisted = settings.pop("unlisted", False)
    why_not = "" if backend == "ale" or unlisted else emulator.why_not(game)
    if backend != "ale" and not why_not:
        try:
            env: VectorEnv = emulator.AtariVectorEnv(game, num_envs, unlisted=unlisted, **settings)
            env.metadata = {**env.metadata, "atari_backend": "beast"}
            return env
        except emulator.Unsupported as error:
            why_not = str(error)
    if backend == "beast":
        kind = InputError if emulator.libatari else MissingPackage
        raise kind(f"--atari_backend beast: {why_not}; --atari_backend auto takes ale-py where it is needed")
    from ale_py.vector_env import AtariVectorEnv

    render_mode = settings.pop("render_mode", None)
    env = AtariVectorEnv(game, num_envs, **settings)
    if render_mode == "rgb_array":
        in_color = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
        env = FilmedAtari(env, AtariVectorEnv(game, num_envs, **{**settings, **in_color}))
    env.metadata = {**env.metadata, "atari_backend": "ale"}
    return env


def atari_games() -> dict[str, str]:
    """Name in ids -> name of the ROM, of all games for one player. Raises MissingPackage without ale-py."""
    try:
        from ale_py.roms import get_all_rom_ids
    except ImportError as error:
        raise MissingPackage(f"Atari needs ale-py ({error}): pip install ale-py") from error
    games = set(get_all_rom_ids()) - {"combat", "joust", "maze_craze", "warlords"}
    return {rom.title().replace("_", ""): rom for rom in sorted(games)}


class FilmedAtari(VectorWrapper):
    """An Atari vector env that renders in color: a twin that observes in color gets the same seeds and actions."""

    render_mode = "rgb_array"

    def __init__(self, env: VectorEnv, twin: VectorEnv):
        super().__init__(env)
        self._twin, self._was_seeded = twin, False

    def reset(self, *, seed=None, options=None):
        if seed is None and not self._was_seeded:  # each would draw one of its own
            seed = int(np.random.default_rng().integers(2**30))
        self._was_seeded = True
        self._frames = self._twin.reset(seed=seed, options=options)[0]
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: np.ndarray):
        self._frames = self._twin.step(actions)[0]
        return self.env.step(actions)

    def render(self) -> np.ndarray:
        """The newest frames, [K, 210, 160, 3]."""
        return self._frames[:, -1]

    def close(self, **kwargs) -> None:
        self._twin.close(**kwargs)
        self.env.close(**kwargs)


class LifeEpisodes(VectorWrapper):
    """Ends an episode at every lost life of an Atari vector env (NEXT_STEP); `info["life_over"]` says where one ended.

    The step after it, whose action is void under NEXT_STEP, presses FIRE where the game has it: the next life begins as
    a game does. Raises InputError for another autoreset mode, in which no action is void.
    """

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        for name in ("device", "check"):  # of tensors
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))
        if getattr(env.unwrapped, "autoreset_mode", AutoresetMode.NEXT_STEP) != AutoresetMode.NEXT_STEP:
            raise InputError(
                "a lost life ends an episode under NEXT_STEP only: leave autoreset_mode out, or add --episodic_life off"
            )
        names = [action.name for action in getattr(env.unwrapped, "ale", env.unwrapped).get_action_set()]
        fire = names.index("FIRE") if "FIRE" in names else 0
        is_continuous = isinstance(env.single_action_space, spaces.Box)  # radius, angle, fire
        self._first_action = np.array([0, 0, 1], np.float32) if is_continuous else fire
        self._life_over: Any = None  # arrays or, on a GPU, tensors

    def reset(self, *, seed=None, options=None):
        observations, info = self.env.reset(seed=seed, options=options)
        if self._life_over is None:
            self._life_over = self._was_game_over = info["lives"] < 0
        goes_on = ~self._of_kind(options["reset_mask"]) if options and "reset_mask" in options else False
        self._life_over, self._was_game_over = self._life_over & goes_on, self._was_game_over & goes_on
        self._lives = info["lives"] + 0  # which the environment may write over
        return observations, info

    def _of_kind(self, mask: Any) -> Any:
        """An array where lives are in arrays, else a tensor on their device."""
        if isinstance(self._life_over, np.ndarray):
            return mask
        return mask.to(self._life_over.device) if hasattr(mask, "to") else self._life_over.new_tensor(mask)

    def step(self, actions):
        if self._life_over is None:
            raise InputError("there are no observations to act on: call reset() first")
        if not isinstance(self._life_over, np.ndarray) or self._life_over.any():  # to look would have a GPU waited for
            actions = np.array(actions) if isinstance(self._life_over, np.ndarray) else actions.clone()
            actions[self._life_over] = self._first_action
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        # A game whose lives are at 0 may run on for some frames (Qbert); its end is then the end of the last life. A
        # game that was cut off with more lives than the next one begins with has lost none.
        lost = (info["lives"] < self._lives) & (info["lives"] > 0) & ~self._was_game_over
        self._was_game_over = terminated | truncated
        self._life_over = lost & ~self._was_game_over
        self._lives = info["lives"] + 0
        info["life_over"] = self._life_over
        return observations, rewards, terminated | self._life_over, truncated, info
