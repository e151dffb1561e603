"""Games between two trained policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from beast.envs.agents import at_least, refuse_kinds
from beast.envs.films import Film
from beast.envs.groups import EnvGroup
from beast.envs.masks import MASK
from beast.envs.rows import OBJECTIVE, layout
from beast.errors import InputError
from beast.feeds.memory import RolloutMemory
from beast.files import same_directory
from beast.learn.distributions import policy_of
from beast.learn.nests import map_tensors
from beast.population.routing import POLICY, Part, begins, parts_of_game
from beast.run.policy import Policy

MAX_WIDTH = 16  # columns at a time


class Played(NamedTuple):
    """A game between two rivals: means over the seats of each."""

    returns: tuple[float, float]
    objectives: tuple[float, float] | None  # None where the environment told none, or not of all
    first_seat: int  # which rival had the first seat
    length: int  # in steps
    is_cut: bool  # by a limit of steps


def scores_of(played: list[Played]) -> tuple[str, list[tuple[float, float] | None]]:
    """What decides a match, and the score of each game by it: the objective, if any game had one. Then a game without
    one has no score: it has crashed, or was cut."""
    if any(game.objectives for game in played):
        return "true_objective", [game.objectives for game in played]
    return "return", [game.returns for game in played]


@same_directory()
def play_match(
    rivals: tuple[Policy, Policy], episodes: int, seed: int, max_steps: int, greedy: bool = False, video: str = ""
) -> list[Played]:
    """Play whole games in the environment of the first rival.

    The seats of a game are the rivals' in turn, and the first seat is each rival's in half of the games. Each of the
    environments plays a fixed share of the games, as the first games to end would be the short ones. A game that is not
    over after `max_steps` ends there. `video` is a file to film the first game into. Raises InputError for an
    environment of one seat, and where a rival was trained on other spaces.
    """
    video = video and os.path.abspath(video)  # before an environment goes elsewhere
    overrides = {"render_mode": "rgb_array"} if video else {}
    make: Callable = partial(rivals[0].make_env, **overrides)
    first = at_least(make, 1)
    seats = (first.metadata or {}).get("agents", 1)
    if seats < 2:
        first.close()
        raise InputError(f"{rivals[0].flags.env}: a match needs an environment of two agents or more; play --mode test")
    refuse_kinds(first.single_observation_space, first.single_action_space, rivals[0].flags.env)
    num_envs = 1 if video else max(min(episodes, MAX_WIDTH // seats), 1)
    has_mask = MASK in rivals[0].spaces.observations
    group = EnvGroup(first if num_envs == 1 else make(num_envs * seats), has_mask)
    if num_envs > 1:
        first.close()
    for rival in rivals:
        if layout(rival.spaces) != layout(group.spaces):
            raise InputError(
                f"{rivals[0].flags.env}: a rival of {rival.flags.env} was trained on other spaces, "
                f"{rival.spaces.observations} and {rival.action_space}"
            )
    film = Film(group.env, video) if video else None
    generator = torch.Generator().manual_seed(seed)
    width = num_envs * seats
    share = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    memory = RolloutMemory({**group.fields, **POLICY, OBJECTIVE: ((), "float32")}, 1, 1, width)
    before, after = memory.row(0, 0), memory.row(0, 1)
    before["action"][...] = 0
    group.reset(seed, before)
    states = [rival.net.initial_state(width) for rival in rivals]
    played: list[list[Played]] = [[] for _ in range(num_envs)]
    lengths = np.zeros(num_envs, int)
    is_over = np.zeros(num_envs, bool)  # cut, and waits for the others
    while (is_due := np.array([len(games) < number for games, number in zip(played, share)])).any():
        if is_over[is_due].all():  # a vector env resets all of its environments
            seed += width
            group.reset(seed, before)
            lengths[:], is_over[:] = 0, False
        inputs = map_tensors(lambda x: torch.from_numpy(x[:1]), memory.rollout(0))
        actions = []
        for index, rival in enumerate(rivals):
            with torch.no_grad():
                policy_logits, _, states[index] = rival.net(inputs, states[index])
            policy = policy_of(rival.net, policy_logits)
            actions.append((policy.mode() if greedy else policy.sample(generator))[0].numpy())
        leads = np.array([(env + len(games)) % 2 for env, games in enumerate(played)])  # who has the first seat
        players = after["policy"][...] = ((leads[:, None] + np.arange(seats)) % 2).flatten()
        after["action"][...] = np.where(players.reshape(-1, *[1] * (actions[0].ndim - 1)) == 0, *actions)
        group.step(after["action"], after)
        if film:
            film.add(after)
        has_ended = begins(after["done"], after["episode_step"], seats)
        ended = after["done"] & (after["terminated"] | after["truncated"])
        is_same_step = has_ended & ended.reshape(num_envs, seats).any(1)
        for env in range(num_envs):
            is_cut = lengths[env] >= max_steps and not has_ended[env]
            if (has_ended[env] or is_cut) and not is_over[env]:
                columns = range(env * seats, (env + 1) * seats)
                if is_cut:
                    parts = [Part(k, players[k], float(before["episode_return"][k]), np.nan) for k in columns]
                else:
                    parts = parts_of_game(memory.rollout(0), 0, columns)
                returns = _of_both((part.policy, part.episode_return) for part in parts)
                objectives = _of_both((part.policy, part.objective) for part in parts)
                is_told = not np.isnan(objectives).any()
                length = int(lengths[env] + is_same_step[env])
                played[env].append(
                    Played(returns, objectives if is_told else None, int(leads[env]), length, bool(is_cut))
                )
                is_over[env] = is_cut
            if has_ended[env]:
                lengths[env], is_over[env] = 0, False
        lengths += ~has_ended
        if film and played[0]:
            film.close()
            film = None
        memory.repeat_last_row(0, 0)
    group.close()
    return [game for games, number in zip(played, share) for game in games[:number]]


def _of_both(parts: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Of (rival, number) the mean of each rival, 0 for one of whom no seat took part."""
    of_each: tuple[list[float], list[float]] = [], []
    for rival, number in parts:
        of_each[rival].append(number)
    first, second = (float(np.mean(numbers or [0.0])) for numbers in of_each)
    return first, second
