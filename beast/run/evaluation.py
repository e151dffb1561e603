"""Whole games with a trained policy, for `--mode test` and while a run trains, and films of them."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from beast.envs import parse_env_kwargs, progress, tasks_of
from beast.envs.agents import at_least
from beast.envs.env_metrics import Numbers
from beast.envs.films import Film
from beast.envs.groups import EnvGroup, finished_episodes
from beast.envs.masks import MASK
from beast.envs.probe import probe_env
from beast.envs.rows import layout
from beast.envs.spaces import ActionsByKind, EnvSpaces
from beast.envs.tasks import Task, mean_score, with_kwargs_first, with_tasks
from beast.errors import InputError, UserError
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import Child
from beast.files import read_json, same_directory, write_json
from beast.learn.distributions import policy_of
from beast.learn.nests import columns, map_tensors
from beast.run import checkpoint
from beast.run.console import tell
from beast.run.directory import as_argument
from beast.run.flags import FREE_ON_RESUME, EnvFlags, parse_eval_env_kwargs

# Flags of playing, at which `create_env` may look, too.
OF_PLAYING = ("seed", "video", "greedy", "atari_backend", "episodes", "eval_env_kwargs", "max_game_steps")
MAX_WIDTH = 10  # games at a time
PROGRESS_SECONDS = 10.0  # between two lines of how many games are over
LEAST_PATIENCE = 600.0  # seconds that an evaluation may take, or as long as there is between two
# An agent's file, in a process that yields to all others and ends with its parent.
BEHIND = """
import os, runpy, sys
os.nice(19)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
from beast.feeds.processes import end_with_parent
end_with_parent()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Game(NamedTuple):
    """A game that was played."""

    episode_return: float
    length: int  # in steps
    numbers: Numbers  # that its environment has told of it
    is_cut: bool = False  # after --max_game_steps


@same_directory()
def play(create_env: Callable, net, flags, video: str = "", has_mask: bool = False, kind: str = "") -> list[Game]:
    """Play `flags.episodes` whole games with a net in eval mode on the CPU. Where agents are of several kinds, those of
    the agents of this `kind` count.

    Each of the environments of `create_env(number)` plays a fixed share of the games, as the first games to end would
    be the short ones. A game that is not over after `flags.max_game_steps` counts as truncated. `video` is a file to
    film the first game into, where their render mode is rgb_array.
    """
    episodes, seed, limit = flags.episodes, flags.seed, flags.max_game_steps
    generator = torch.Generator().manual_seed(seed)
    video = video and os.path.abspath(video)  # before an environment goes elsewhere
    group = EnvGroup(at_least(create_env, min(episodes, 1 if video else MAX_WIDTH)), has_mask, flags.env_metrics)
    width = group.num_envs
    action, quota = group.spaces.action, [0] * width
    counted = action.columns(kind, width).tolist() if isinstance(action, ActionsByKind) else range(width)
    for index, column in enumerate(counted):
        quota[column] = episodes // len(counted) + (index < episodes % len(counted))
    memory = RolloutMemory(group.fields, 1, 1, width)
    film = Film(group.env, video) if video else None
    games: list[list[Game]] = [[] for _ in range(width)]
    told: list[list[Numbers]] = [[] for _ in range(width)]
    is_cut = np.zeros(width, bool)  # waits for the others, as a vector env resets all of its environments
    before, after = memory.row(0, 0), memory.row(0, 1)
    before["action"][...] = 0
    group.reset(seed, before)
    core_state = net.initial_state(width)
    tell(f"playing {episodes} whole games, {width} at a time")
    told_at = time.monotonic()
    while (is_due := np.array([len(played) < share for played, share in zip(games, quota)])).any():
        if time.monotonic() - told_at > PROGRESS_SECONDS:
            told_at = time.monotonic()
            over = sum(min(len(played), share) for played, share in zip(games, quota))
            longest = int(before["episode_step"].max())
            tell(f"{over} of {episodes} games are over; the others have {longest:,} steps, of at most {limit:,}")
        if is_cut[is_due].all():
            seed += width
            group.reset(seed, before)
            is_cut[:] = False
        inputs = map_tensors(lambda x: torch.from_numpy(x[:1]), memory.rollout(0))
        with torch.no_grad():
            policy_logits, _, core_state = net(inputs, core_state)
        policy = policy_of(net, policy_logits)
        after["action"][...] = (policy.mode() if flags.greedy else policy.sample(generator))[0].numpy()
        group.step(after["action"], after)
        for index, numbers in group.ended:
            told[index] += [] if is_cut[index] else [numbers]
        if film:
            film.add(after)
        too_long = (after["episode_step"] >= limit) & ~(after["terminated"] | after["truncated"])
        for index in np.flatnonzero(~is_cut).tolist():
            for game in finished_episodes(columns(memory.rollout(0), index, 1)):
                games[index].append(Game(*game, told[index].pop(0)))
            if too_long[index]:
                is_cut[index] = True
                step, total = after["episode_step"][index], after["episode_return"][index]
                games[index].append(Game(float(total), int(step), {}, is_cut=True))
        if film and games[0]:
            film.close()
            film = None
        memory.repeat_last_row(0, 0)
    group.close()
    return [game for share, played in zip(quota, games) for game in played[:share]]


def play_checkpoint(
    flags, create_env: Callable, net_class: Callable, variants: Collection[str], given: Collection[str] = (), own=(),
    several_kinds: bool = False,
) -> dict:  # fmt: skip
    """`--mode test`: play whole games with the checkpoint that the flags name, and report them.

    The net is that of the checkpoint's own flags. Environments are, too, but for flags that are `given` or differ from
    their defaults. Flags of playing and the agent's `own` hold in any case. Checkpoints of other agents than these
    `variants` are refused, and so are agents of several kinds unless these are taken.
    """
    path = flags.checkpoint or os.path.join(flags.root, flags.name, "checkpoint.pt")
    state = checkpoint.load(path, "--checkpoint" if flags.checkpoint else "", variants)
    state = checkpoint.of_policy(state, getattr(flags, "policy", 0), path, is_team=True)
    own_flags = {name: getattr(flags, name) for name in (*OF_PLAYING, *own)}
    config = {**checkpoint.OLDER, **state["config"], **own_flags, "mode": "test"}
    names = [field.name for field in fields(flags)]
    trained = type(flags)(**{name: config[name] for name in names if name in config})
    trained = replace(trained, env_metrics=flags.env_metrics or trained.env_metrics)
    default = type(flags)()
    chosen = {name for name in names if name in given or getattr(flags, name) != getattr(default, name)}
    changed = {name: getattr(flags, name) for name in chosen - FREE_ON_RESUME - own_flags.keys()}
    if "env" in changed:  # instead of what the run had a file of
        changed.setdefault("tasks", "")
    steps, results = state["counts"]["steps"], {}
    learned = checkpoint.saved_spaces(state) or probe_env(create_env, trained, several_kinds)
    net = net_class(learned.observations, learned.action, trained).eval()
    checkpoint.load_weights(net, state["net"], path)
    page = progress.Page()
    page.write(progress.encode(progress.Progress(steps, trained.total_steps, state.get("told", {}))))
    progress.follow(page)
    for label, kwargs in parse_eval_env_kwargs(flags.eval_env_kwargs).items():
        flags_here = with_tasks(replace(trained, **changed))
        of_all = {**parse_env_kwargs(flags_here.env_kwargs), **kwargs}
        flags_here = replace(flags_here, env_kwargs=json.dumps(of_all, sort_keys=True) if of_all else "")
        to_make = with_kwargs_first(flags_here, kwargs)
        video = "" if label else flags.video
        overrides = {"render_mode": "rgb_array"} if video else {}
        try:
            spaces = probe_env(create_env, to_make, several_kinds, **overrides)
            played_with = {name: x for name in names if (x := getattr(flags_here, name)) != getattr(trained, name)}
            for name in {field.name for field in fields(EnvFlags)} & played_with.keys() - spaces.flags:
                tell(f"warning: {as_argument(name, played_with[name])}: create_env() does not look at it")
            other = {name: x for name, x in played_with.items() if name in spaces.flags - {"group_width"}}
            to_make = replace(to_make, env=spaces.env_id)
            if layout(spaces) != layout(learned):
                what = f"--eval_env_kwargs {label}" if label else " ".join(as_argument(*each) for each in other.items())
                raise InputError(
                    f"{what or spaces.env_id}: its spaces are not those that the agent has learned with. They are "
                    f"{_shown(spaces)}, those of the agent {_shown(learned)}"
                )
            differing = {name: {"played": x, "trained": getattr(trained, name)} for name, x in other.items()}
            of_each: dict[Task, dict] = {}
            tasks = tasks_of(to_make.env, to_make.tasks)
            for task in tasks:
                if to_make.task and to_make.task != task.name:
                    continue
                one = replace(to_make, task=task.name) if len(tasks) > 1 else to_make
                film = "" if of_each else video  # of the first task
                make_envs = partial(create_env, one, **({} if not film else overrides))
                played = play(make_envs, net, one, film, MASK in spaces.observations, state.get("kind", ""))
                which = "/".join(filter(None, [label, one.task and task.name]))
                of_each[task] = report(played, replace(one, env=task.env), path, steps, differing, which)
            results[label] = of_all_tasks(of_each)
        except UserError as error:
            if not label:
                raise
            tell(f"{label}: {error}")  # the others are played all the same
            results[label] = {"error": str(error)}
    result = results.pop("") | ({"others": results} if results else {})
    output = Path(path).with_name("test.json")
    write_json(output, result)
    print(f"written to {output}" + (f" and {flags.video}" if flags.video else ""))
    return result


def of_all_tasks(of_each: dict[Task, dict]) -> dict:
    """What test.json says of several tasks together; `mean` is that of their means, `score` that of their scores."""
    first, *others = of_each.values()
    if not others:
        return first
    for task, found in of_each.items():
        found["score"] = task.reference.score(found["mean"]) if task.reference else None
    scores = [found["score"] for found in of_each.values() if found["score"] is not None]
    errors = [found["standard_error"] for found in of_each.values() if found["standard_error"] is not None]
    result = {
        **first, "env": ",".join(task.env for task in of_each),
        "mean": float(np.mean([found["mean"] for found in of_each.values()])),
        "score": mean_score(of_each, scores) if len(scores) == len(of_each) else None,
        "standard_error": math.hypot(*errors) / len(of_each) if len(errors) == len(of_each) else None,
        "games_cut": sum(found["games_cut"] for found in of_each.values()), "env_metrics": {},
        "env_metrics_of_games": {}, "tasks": {task.name: found for task, found in of_each.items()},
        **{name: [x for found in of_each.values() for x in found[name]] for name in ("returns", "lengths_in_steps")},
    }  # fmt: skip
    score = "" if result["score"] is None else f", score {result['score']:.3f} (0: random play, 1: a human)"
    print(f"{len(of_each)} tasks: mean of their mean returns {result['mean']:.2f}{score}")
    return result


def _shown(spaces: EnvSpaces) -> str:
    parts = [*spaces.observations.items(), ("action", spaces.action)]
    return ", ".join(" ".join(f"{name} {space}".split())[:200] for name, space in parts)  # in one line


def report(played: list[Game], flags, path: str, steps: int, differing: dict[str, dict], label: str = "") -> dict:
    """Print mean ± standard error of the games played with checkpoint `path`, and return all that test.json says."""
    returns, lengths = np.array([game.episode_return for game in played]), [game.length for game in played]
    names = dict.fromkeys(name for game in played for name in game.numbers)
    numbers = {name: [game.numbers.get(name) for game in played] for name in names}
    known = {name: [x for x in each if isinstance(x, (int, float))] for name, each in numbers.items()}
    standard_error = float(returns.std(ddof=1) / math.sqrt(len(returns))) if len(returns) > 1 else math.nan
    num_cut, limit = sum(game.is_cut for game in played), flags.max_game_steps
    result = {
        "env": flags.env, "checkpoint": path, "steps": steps, "greedy": flags.greedy, "seed": flags.seed,
        "mean": float(returns.mean()), "standard_error": standard_error if math.isfinite(standard_error) else None,
        "returns": returns.tolist(), "lengths_in_steps": lengths,
        "max_game_steps": limit, "games_cut": num_cut, "differs_from_training": differing,
        "env_kwargs": flags.env_kwargs, "env_metrics": {name: float(np.mean(x)) for name, x in known.items() if x},
        "env_metrics_of_games": numbers,
    }  # fmt: skip
    spread = f" ± {standard_error:.2f} (standard error)" if len(returns) > 1 else ""
    how = f"{'greedy' if flags.greedy else 'sampled'}, seed {flags.seed}, after {steps:,} steps"
    games = f"{len(returns)} whole games" if len(returns) > 1 else "one whole game"
    what = f"{label}, {flags.env}" if label not in ("", flags.env) else flags.env
    print(f"{what}: mean return {returns.mean():.2f}{spread} over {games}, {how}")
    for name, change in differing.items():
        print(f"played with {as_argument(name, change['played'])}, trained with {change['trained'] or 'none'}")
    if num_cut:
        print(f"cut off after {limit:,} steps, as if truncated (--max_game_steps): {num_cut} of {len(played)} games")
    for name, x in known.items():
        print(f"env/{name}: {np.mean(x):.4g}, the mean of {len(x)} games" if x else f"env/{name}: {numbers[name][0]}")
    return result


class Evaluations:
    """Whole games with the weights of a run that trains, in a process that runs `--mode test` at low priority.

    Its files are in `<run>/eval/`. There is one evaluation at a time; `minutes` are from start to start.
    """

    def __init__(self, directory: Path, flags: Any, seed: int, log: Callable[[str], None]):
        """The same `seed` gives each evaluation the same games to begin with."""
        self.checkpoint_path, self._result_path = directory / "eval/checkpoint.pt", directory / "eval/test.json"
        arguments = {"checkpoint": self.checkpoint_path, "episodes": flags.eval_episodes, "seed": seed}
        passed_on = ("atari_backend", "epsilon", "max_game_steps", "agent")
        arguments |= {name: getattr(flags, name) for name in passed_on if hasattr(flags, name)}
        if arguments.get("atari_backend") == "cuda":  # a few games on a core, which are the same
            arguments["atari_backend"] = "auto"
        # The file of the flags' class is the agent's own, or that of its fork.
        self._command = [sys.executable, "-c", BEHIND, inspect.getfile(type(flags)), "--mode", "test"]
        self._command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        self._command += ["--greedy"] if flags.greedy else []
        self._command += ["--eval_env_kwargs", *flags.eval_env_kwargs] if flags.eval_env_kwargs else []
        self.film_path, self.mean = directory / "eval/film.gif", math.nan  # `mean` return of the newest
        self._command += ["--video", str(self.film_path)] if flags.eval_video else []
        self._seconds, self._log = 60 * flags.eval_minutes, log
        self._process = Child("the evaluation", 0)
        self.state: dict = {}  # that is evaluated
        self.policy = -1  # of several, which have their turns
        self._next = time.monotonic() + self._seconds

    def is_due(self) -> bool:
        return self._process.popen is None and time.monotonic() >= self._next

    def start(self, state: dict) -> None:
        """Evaluate the weights of a checkpoint's `state`."""
        self._next = time.monotonic() + self._seconds
        self.checkpoint_path.parent.mkdir(exist_ok=True)
        self._result_path.unlink(missing_ok=True)
        self.film_path.unlink(missing_ok=True)
        checkpoint.save(self.checkpoint_path, state)
        self.state, command = state, list(self._command)
        if policies := state.get("policies"):
            self.policy = (self.policy + 1) % len(policies)
            command += ["--policy", str(self.policy)]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process.start(command, stdout=subprocess.DEVNULL, env={**os.environ, **one_thread})

    def result(self) -> dict[str, float]:
        """Metrics of the evaluation that has ended since the last call; empty if none has. A failure is logged."""
        popen = self._process.popen
        if popen is None:
            return {}
        if popen.poll() is None:
            self._process.bound_output()
            limit = max(self._seconds, LEAST_PATIENCE)
            if time.monotonic() >= self._process.started_at + limit:
                why = f"took more than {limit / 60:g} minutes: fewer --eval_episodes take less"
                self._log(self._process.end(0, why))
            return {}
        how = self._process.end(0)
        found = read_json(self._result_path, missing=None)
        if popen.returncode or found is None:
            self._log(how)
            return {}
        self.mean = found["mean"] if found.get("score") is None else found["score"]
        of_policy = f"policy{self.policy}/" if self.policy >= 0 else ""
        metrics = {f"{of_policy}eval/step": found["steps"], **_metrics_of(found, f"{of_policy}eval")}
        for label, other in found.get("others", {}).items():
            if "error" in other:
                self._log(f"the evaluation {label}: {other['error']}")
            else:
                metrics |= _metrics_of(other, f"{of_policy}eval/{label}")
        return metrics

    def close(self) -> None:
        """Give up the one that runs."""
        if self._process.popen:
            self._process.end(0)


def _metrics_of(found: dict, prefix: str) -> dict[str, float]:
    """Of what test.json says of some games."""
    numbers = {
        "episodic_return": found["mean"], "episodic_length": float(np.mean(found["lengths_in_steps"])),
        "standard_error": math.nan if found["standard_error"] is None else found["standard_error"],
        "episodes": len(found["returns"]), "games_cut": found.get("games_cut", 0),
        **{f"env/{name}": x for name, x in found.get("env_metrics", {}).items()},
    }  # fmt: skip
    if found.get("score") is not None:
        numbers["score"] = found["score"]
    for task, own in found.get("tasks", {}).items():
        numbers |= _metrics_of(own, f"task/{task}")
    return {f"{prefix}/{name}": x for name, x in numbers.items()}
