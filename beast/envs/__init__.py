"""Environments made by their id, stepped in groups, written in place into rollouts. Nothing in here imports torch."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re

import gymnasium
from gymnasium.vector import VectorEnv

from beast.envs.games import ATARI_FRAMES_PER_STEP, ATARI_ID, MINATAR_GAMES, atari_games, make_atari, register_minatar
from beast.errors import InputError, MissingPackage


def make(env_id: str, num_envs: int, *, episodic_life: bool | None = None, **kwargs) -> VectorEnv:
    """Make `num_envs` environments that are stepped together.

    Atari games run on ale-py's vector env, in the protocol that their id implies: that of Mnih et al. 2015 (-v4) or of
    Machado et al. 2018 (-v5). Both see the last 4 decisions as gray images [4, 84, 84] (uint8), decide every 4 frames
    (each image the pixelwise maximum of the last two), choose among the game's own actions, get raw rewards, and are
    truncated after 108,000 frames (27,000 steps).

    | id                     | sticky actions | no-ops at the start | FIRE              | a lost life                  |
    |------------------------|----------------|---------------------|-------------------|------------------------------|
    | `<Game>NoFrameskip-v4` | none           | up to 30            | begins a life     | terminates, the game goes on |
    | `ALE/<Game>-v5`        | 25 %           | none                | left to the agent | is nothing special           |

    MinAtar games (`MinAtar/<Game>-v0` with all six actions, `-v1` with those that matter; sticky 10 %, difficulty
    ramping) run without MinAtar's plotting libraries. Every other id goes to gymnasium, `module:Id` included: to the
    vector env that its specification names, or one after the other in this process.

    `episodic_life`, for Atari only, says whether a lost life ends an episode; None leaves that to the id. `kwargs` go
    to the environment; of Atari, to `ale_py.vector_env.AtariVectorEnv`.

    Raises InputError for an unknown id (the nearest are listed), `num_envs` below 1, or `episodic_life` of another id;
    MissingPackage if the package that the id needs is not installed; MissingFile if the game's ROM cannot be read.
    """
    if num_envs < 1:
        raise InputError(f"num_envs is {num_envs}; at least 1 environment is needed")
    if match := ATARI_ID.fullmatch(env_id):
        if (match["deepmind"] or match["machado"]) not in atari_games():
            raise _unknown_id(env_id)
        return make_atari(env_id, match, num_envs, episodic_life, kwargs)
    if episodic_life:
        raise InputError(f"episodic_life is for Atari ids; {env_id} does not tell its lives: leave it out")

    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingPackage(f"{env_id}: {error}; what stands before ':' is a module on PYTHONPATH") from error
    if name.startswith("MinAtar/"):
        register_minatar(env_id)
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


def is_atari(env_id: str) -> bool:
    """Whether the id is `<Game>NoFrameskip-v4` or `ALE/<Game>-v5`."""
    return bool(ATARI_ID.fullmatch(env_id))


def frames_per_step(env_id: str) -> int:
    """Emulator frames of one agent step: 4 for the Atari ids, 1 for all others."""
    return ATARI_FRAMES_PER_STEP if is_atari(env_id) else 1


def _unknown_id(env_id: str) -> InputError:
    known = [name for name, spec in gymnasium.registry.items() if not str(spec.entry_point).startswith("ale_py")]
    known += [f"MinAtar/{game}-v0" for game in MINATAR_GAMES]
    with contextlib.suppress(MissingPackage):  # without ale-py there are no Atari games to suggest
        known += [name for game in atari_games() for name in (f"{game}NoFrameskip-v4", f"ALE/{game}-v5")]

    def bare(name: str) -> str:
        return re.sub(r"^.*[:/]|(NoFrameskip|Deterministic)?(-v\d+)?$", "", name).casefold()

    ids = difflib.get_close_matches(env_id, known, n=2, cutoff=0.8)
    for near in difflib.get_close_matches(bare(env_id), {bare(name) for name in known}, n=3, cutoff=0.6):
        ids += [name for name in known if bare(name) == near]
    nearest = ", ".join(list(dict.fromkeys(ids))[:8])
    hint = f"the nearest are {nearest}" if ids else "gymnasium.pprint_registry() lists some"
    return InputError(f"no environment is called {env_id!r}: {hint}. An id of your own is written module:Id")
