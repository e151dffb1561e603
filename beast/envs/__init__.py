"""Environments made by their id, stepped in groups, written in place into rollouts. Nothing in here imports torch."""

import contextlib
import difflib
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
from gymnasium.vector import SyncVectorEnv, VectorEnv

from beast.envs import agents, doom
from beast.envs.atari import ATARI_ID, atari_games, make_atari
from beast.envs.dmlab import Dmlab
from beast.envs.doom_match import DoomMatch
from beast.envs.football import FOOTBALL, Football, FootballMatch, num_players
from beast.envs.handover import handed_over
from beast.envs.images import process_images
from beast.envs.minatar import MINATAR_GAMES, register_minatar
from beast.envs.numbers import reserve_numbers as reserve_numbers
from beast.envs.progress import training_progress as training_progress
from beast.envs.reference_scores import DMLAB
from beast.envs.resets import ResetAhead as ResetAhead
from beast.envs.tasks import TaskColumns as TaskColumns
from beast.envs.tasks import tasks_of
from beast.envs.texts import leave_out_texts
from beast.errors import InputError, MissingPackage, raised


def options(flags) -> dict[str, Any]:
    """The arguments of `make` that the flags of `EnvFlags` stand for: None for what the id implies. Raises InputError
    if `env_kwargs` is no JSON object."""
    switch = {"auto": None, "on": True, "off": False}
    given_or_auto = ("sticky_actions", "noops", "atari_backend")
    return {
        **{name: getattr(flags, name) or None for name in ("frame_stack", "frame_skip", "resize")},
        **{name: switch[getattr(flags, name)] for name in ("grayscale", "episodic_life", "full_action_space")},
        **{name: None if (x := getattr(flags, name)) == "auto" else x for name in given_or_auto},
        "env_kwargs": parse_env_kwargs(flags.env_kwargs),
        **{name: getattr(flags, name) for name in ("reset_ahead", "tasks", "task")},
    }


def parse_env_kwargs(text: str, flag: str = "--env_kwargs") -> dict[str, Any]:
    """The JSON object of this flag; none where the text is empty. Raises InputError, which names the text."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        what = f"no JSON ({value})" if isinstance(value, ValueError) else f"JSON, but no object: {value!r}"
        raise InputError(f"""{flag} {text!r} is {what}; write it as {flag} '{{"map_name": "8x8"}}'""")
    return value


def make(
    env_id: str, num_envs: int, *,
    frame_stack: int | None = None, frame_skip: int | None = None, resize: int | None = None,
    grayscale: bool | None = None, sticky_actions: float | None = None, noops: int | None = None,
    episodic_life: bool | None = None, full_action_space: bool | None = None, atari_backend: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None, reset_ahead: bool = False, tasks: str = "",
    task: str = "", **kwargs,
) -> VectorEnv:  # fmt: skip
    """Make `num_envs` environments that are stepped together.

    Atari games run in the protocol that their id implies: that of Mnih et al. 2015 (`<Game>NoFrameskip-v4`) or of
    Machado et al. 2018 (`ALE/<Game>-v5`); docs/environments.md says what each is. Rewards are raw. MinAtar games
    (`MinAtar/<Game>-v0` with all six actions, `-v1` with those that matter; sticky 10 %, difficulty ramping) run
    without MinAtar's plotting libraries. Every other id goes to gymnasium, `module:Id` included: to the vector env that
    its specification names, or one after the other in this process; `pettingzoo:<module>` to that module, whose agents
    are then the environments. Texts in their Dict observations are left out
    (`beast.envs.texts`), as MiniGrid's missions are.

    None leaves a choice to the id. `frame_stack`, `frame_skip`, `resize` and `grayscale` are for Atari and for all that
    observes images (`beast.envs.images`). `sticky_actions` (a probability), `noops` (fewer than so many),
    `episodic_life` (whether a lost life ends an episode), `full_action_space` and `atari_backend` are for Atari. The
    backend is "beast" (`beast.envs.emulator`), "ale" (ale-py), "cuda" (`beast.gpu.atari`, tensors on a GPU) or "auto"
    (None, too): Beast's where it is built and knows the game. `env_kwargs` and `kwargs` go to the environment; of
    Atari, to the backend's class. With `render_mode="rgb_array"` Atari renders in color.

    Several ids with commas between them, or `tasks` (docs/tasks.md), are tasks: equally many environments of each
    (`TaskColumns`), or all of the one called `task`. Atari games then have all 18 actions. `reset_ahead` makes each
    environment twice (`ResetAhead`), where gymnasium makes them one by one.

    `metadata["env_id"]` and `metadata["frames_per_step"]` of the vector env say what it is. Raises InputError for an
    unknown id (the nearest are listed), `num_envs` below 1, or a choice that the id does not have; MissingPackage if
    the package that the id needs is not installed; MissingFile if the game's ROM cannot be read.
    """
    if num_envs < 1:
        raise InputError(f"num_envs is {num_envs}; at least 1 environment is needed")
    of_images = {"frame_stack": frame_stack, "frame_skip": frame_skip, "resize": resize, "grayscale": grayscale}
    of_atari = {
        "sticky_actions": sticky_actions, "noops": noops, "full_action_space": full_action_space,
        "atari_backend": atari_backend,
    }  # fmt: skip
    listed = tasks_of(env_id, tasks)
    if tasks or len(listed) > 1:
        if full_action_space is None and all(ATARI_ID.fullmatch(each.env) for each in listed):
            of_atari["full_action_space"] = True
        of_all = {**of_images, **of_atari, "episodic_life": episodic_life, "reset_ahead": reset_ahead, **kwargs}
        makers = {
            each.name: partial(make, each.env, env_kwargs={**(env_kwargs or {}), **each.env_kwargs}, **of_all)
            for each in listed
        }
        is_on_gpu = atari_backend == "cuda"  # see beast.envs.atari
        tasks_class = importlib.import_module("beast.gpu.tasks").TensorTasks if is_on_gpu else TaskColumns
        return tasks_class(makers, num_envs, task)
    kwargs = {**(env_kwargs or {}), **kwargs}
    if reset_ahead and (ATARI_ID.fullmatch(env_id) or env_id.startswith(doom.PREFIX)):
        raise InputError(f"{env_id} begins episodes in a way of its own: leave --reset_ahead out")
    if reset_ahead and env_id.startswith(DMLAB):
        raise InputError(f"{env_id}: its resets keep Python's GIL, so a thread hides nothing: leave --reset_ahead out")
    if match := ATARI_ID.fullmatch(env_id):
        if (match["deepmind"] or match["machado"]) not in atari_games():
            raise _unknown_id(env_id)
        chosen = {name: value for name, value in {**of_images, **of_atari}.items() if value is not None}
        env = make_atari(env_id, match, num_envs, episodic_life, chosen, kwargs)
    else:
        for name, value in {**of_atari, "episodic_life": episodic_life}.items():
            if value is not None and value is not False:
                raise InputError(
                    f"{name} is for Atari ids, and {env_id} is none: leave --{name} out, or see whether the "
                    "environment has an argument for it (--env_kwargs)"
                )
        if env_id.startswith((doom.PREFIX, DMLAB)):  # which skip frames themselves
            if (frames := of_images.pop("frame_skip")) is not None:
                kwargs["frame_skip"] = frames
        asked = {name: value for name, value in of_images.items() if value is True or (value or 1) > 1}
        if (columns := _of_several_agents(env_id, kwargs)) is None:
            env = _make_registered(env_id, num_envs, asked, reset_ahead, kwargs)
        elif asked or reset_ahead:
            given = next(iter(asked), "reset_ahead")
            raise InputError(f"{env_id}: --{given} is for one agent an environment; wrap it yourself")
        else:
            env = columns(num_envs)
        known = (env.metadata or {}).get("frames_per_step")
        env.metadata = {**env.metadata, "frames_per_step": known or frame_skip or 1}
        if frame_skip and not known and (fps := env.metadata.get("render_fps")):
            env.metadata["render_fps"] = fps / frame_skip
    env.metadata = {**env.metadata, "env_id": env_id}
    return env


def _of_several_agents(env_id: str, kwargs: dict[str, Any]) -> Callable[[int], VectorEnv] | None:
    """What makes so many columns of agents, where an environment of this id has several of them."""
    if env_id.startswith(agents.PREFIX):
        return partial(agents.by_id, env_id, kwargs=kwargs)
    if env_id.startswith(doom.PREFIX) and doom.scenario_of(env_id).seats > 1:
        return partial(agents.AgentColumns, partial(DoomMatch, env_id, **kwargs))
    if env_id.startswith(FOOTBALL) and sum(num_players(kwargs)) > 1:
        return partial(agents.AgentColumns, partial(FootballMatch, env_id.removeprefix(FOOTBALL), **kwargs))
    return None


def _one_by_one(
    make: Callable[[], gymnasium.Env], num_envs: int, wrappers: Sequence[Callable], reset_ahead: bool
) -> VectorEnv:  # fmt: skip
    def wrapped() -> gymnasium.Env:
        env = make()
        try:
            for wrap in wrappers:
                env = wrap(env)
        except BaseException:
            env.close()
            raise
        return env

    make_one = (lambda: ResetAhead(wrapped)) if reset_ahead else wrapped
    made: list[gymnasium.Env] = []

    def make_and_remember() -> gymnasium.Env:
        made.append(make_one())
        return made[-1]

    try:
        # Without copy=False every observation is copied once more a step.
        return SyncVectorEnv([make_and_remember] * num_envs, copy=False)
    except BaseException:
        for env in made:
            env.close()
        raise


def _make_registered(
    env_id: str, num_envs: int, of_images: dict[str, Any], reset_ahead: bool, kwargs: dict[str, Any]
) -> VectorEnv:  # fmt: skip
    of_these = [partial(process_images, env_id=env_id, **of_images)] if of_images else []
    for prefix, env_class in {DMLAB: Dmlab, FOOTBALL: Football}.items():
        if env_id.startswith(prefix):
            make = partial(env_class, env_id.removeprefix(prefix), **kwargs)
            return _one_by_one(make, num_envs, of_these, reset_ahead)
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                message = f"{env_id}: {error}; what stands before ':' is a module that is installed or on PYTHONPATH"
            else:
                message = f"{env_id}: the module {module} imports what is not installed: {raised(error)}"
            raise MissingPackage(message) from error
        except Exception as error:
            raise InputError(f"{env_id}: the module {module} cannot be imported: {raised(error)}") from error
    if name.startswith("MinAtar/"):
        register_minatar(env_id)
    if name.startswith(doom.PREFIX):
        doom.register_doom(env_id)
    spec = handed_over(name) or gymnasium.registry.get(name)  # a script may have registered another under a known id
    # Once ale-py is imported, Pong-v4 and its like are registered: raw screens that no net here is made for.
    if spec is None or (not module and str(spec.entry_point).startswith("ale_py")):
        raise _unknown_id(env_id)
    if spec.vector_entry_point is not None and not of_images:
        if reset_ahead:
            raise InputError(f"{env_id} is a vector env, which resets itself: leave --reset_ahead out")
        return gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    wrappers: list[Callable] = [leave_out_texts, *of_these]
    if reset_ahead:
        return _one_by_one(partial(gymnasium.make, spec, disable_env_checker=True, **kwargs), num_envs, wrappers, True)
    # Without copy=False every observation is copied once more a step; the checker wraps each env in one more layer.
    return gymnasium.make_vec(
        spec, num_envs, vectorization_mode="sync", vector_kwargs={"copy": False}, disable_env_checker=True,
        wrappers=wrappers, **kwargs,
    )  # fmt: skip


class Family(NamedTuple):
    """What an id tells of its environments before they are made."""

    reward_clip: float = 0.0  # what --reward_clip auto stands for; 0: none
    has_emulators: bool = False  # to choose from by --atari_backend
    stacks_images: bool = False  # an observation is the latest images, [frame_stack, height, width]


ATARI = Family(reward_clip=1.0, has_emulators=True, stacks_images=True)


def family_of(env_id: str) -> Family:
    """That of `<Game>NoFrameskip-v4` and `ALE/<Game>-v5`, and of several such tasks, is Atari."""
    return ATARI if all(map(ATARI_ID.fullmatch, env_id.split(","))) else Family()


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
