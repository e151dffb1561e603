"""Texts among observations, which no encoder here reads."""

import gymnasium
from gymnasium import spaces, wrappers

READABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)


def leave_out_texts(env: gymnasium.Env) -> gymnasium.Env:
    """The environment without the texts of its Dict observations: parts of `spaces.Text`, and MiniGrid's `mission`.

    `beast.envs.make` does this to every id. What a text says is lost to the agent: where missions differ, encode them
    in a wrapper of your own. All other environments are returned as they are.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return env
    texts = [key for key, part in space.items() if isinstance(part, spaces.Text)]
    texts += [key for key, part in space.items() if key == "mission" and not isinstance(part, (*READABLE, spaces.Text))]
    return wrappers.FilterObservation(env, [key for key in space if key not in texts]) if texts else env
