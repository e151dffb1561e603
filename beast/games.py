"""Whole games with a trained policy, for `--mode test`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from beast import envs
from beast.distributions import distribution
from beast.rollout import RolloutMemory
from beast.tensors import columns, map_tensors, rollout_fields


def play(
    create_env: Callable[[int], VectorEnv], net, env_id: str, episodes: int, seed: int, greedy: bool, video: str = ""
) -> list[tuple[float, int]]:
    """Return and length in steps of each of `episodes` games, the core's state carried through each.

    `net` is a variant's, in eval mode on the CPU; `create_env(num_envs)` makes its environments. Each environment
    plays its fixed share of the games: taking whichever end first would favour short ones. `video` is a file to film
    the first game into.
    """
    generator = torch.Generator().manual_seed(seed)
    width = min(episodes, 1 if video else 10)
    quota = [episodes // width + (index < episodes % width) for index in range(width)]
    group = envs.EnvGroup(create_env(width))
    fields = rollout_fields(envs.observation_spaces(group.env.single_observation_space), net.action_space)
    memory = RolloutMemory(fields, 1, 1, width)
    film = envs.Film(env_id, group.env, video, seed) if video else None
    games: list[list[tuple[float, int]]] = [[] for _ in range(width)]
    before, after = memory.row(0, 0), memory.row(0, 1)
    before["action"][...] = 0
    group.reset(seed, before)
    core_state = net.initial_state(width)
    while any(len(played) < share for played, share in zip(games, quota)):
        inputs = map_tensors(lambda x: torch.from_numpy(x[:1]), memory.rollout(0))
        with torch.no_grad():
            policy_logits, _, core_state = net(inputs, core_state)
        policy = distribution(net.action_space, policy_logits)
        after["action"][...] = (policy.mode() if greedy else policy.sample(generator))[0].numpy()
        group.step(after["action"], after)
        if film:
            film.add(after)
        for index in range(width):
            games[index] += envs.finished_episodes(columns(memory.rollout(0), index, 1))
        memory.repeat_last_row(0, 0)
    group.close()
    if film:
        film.close()
    return [game for share, column_games in zip(quota, games) for game in column_games[:share]]


def report(played: list[tuple[float, int]], flags, path: str, steps: int) -> dict:
    """Print mean ± standard error of the games of checkpoint `path` and write them to test.json beside it."""
    returns = np.array([episode_return for episode_return, _ in played])
    standard_error = float(returns.std(ddof=1) / math.sqrt(len(returns))) if len(returns) > 1 else math.nan
    result = {
        "env": flags.env,
        "checkpoint": path,
        "steps": steps,
        "greedy": flags.greedy,
        "seed": flags.seed,
        "mean": float(returns.mean()),
        "standard_error": standard_error if math.isfinite(standard_error) else None,
        "returns": returns.tolist(),
        "lengths_in_steps": [length for _, length in played],
    }
    print(
        f"{flags.env}: mean return {returns.mean():.2f} ± {standard_error:.2f} (standard error) over {len(returns)} "
        f"whole games, {'greedy' if flags.greedy else 'sampled'}, seed {flags.seed}, after {steps:,} steps"
    )
    output = os.path.join(os.path.dirname(path), "test.json")
    with open(output, "w") as file:
        json.dump(result, file, indent=2)
    print(f"written to {output}" + (f" and {flags.video}" if flags.video else ""))
    return result
