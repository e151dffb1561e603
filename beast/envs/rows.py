"""What a row of a rollout holds, how observations and actions lie in it, and which rows nobody acts from."""

from __future__ import annotations

from beast.envs.spaces import EnvSpaces, action_shape_dtype, observation_field, policy_width

# One number per environment, name -> dtype; docs/rollout.md says what each is.
ENV_FIELDS = {  # written with the observation
    "reward": "float32",
    "done": "bool",
    "terminated": "bool",
    "truncated": "bool",
    "episode_return": "float32",
    "episode_step": "int32",
}
ORIGIN_FIELDS = {"group": "int32", "life": "int32"}  # written by the feed: whose row it is
AGENT_FIELDS = ("action", "policy_logits", "baseline", "policy_version")  # written by inference


def rollout_fields(spaces: EnvSpaces) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of all that one environment has in one row.

    A part of an observation is called `obs/<name>`, of a final observation `final_obs/<name>`.
    """
    kinds = ("obs", "final_obs") if spaces.final_observations else ("obs",)
    return {
        **{f"{kind}/{name}": observation_field(x) for kind in kinds for name, x in spaces.observations.items()},
        **{name: ((), dtype) for name, dtype in (ENV_FIELDS | ORIGIN_FIELDS).items()},
        "action": action_shape_dtype(spaces.action),
        "policy_logits": ((policy_width(spaces.action),), "float32"),
        "baseline": ((), "float32"),
        "policy_version": ((), "int32"),
    }


def is_final(done, terminated, truncated):
    """Whether a row is the last of its episode, which nobody acts from: bool arrays or tensors of one shape.

    The transition from such a row to the next one is void. A row that is also `done` is the first of the next episode
    (SAME_STEP autoreset), and the agent acts from it.
    """
    return (terminated | truncated) & ~done


def nest_observations(arrays: dict) -> dict:
    """{"obs/image": a, "reward": r} -> {"obs": {"image": a}, "reward": r}; `final_obs/image` likewise."""
    nested: dict = {"obs": {}}
    for name, array in arrays.items():
        kind, slash, part = name.partition("/")
        if slash and kind in ("obs", "final_obs"):
            nested.setdefault(kind, {})[part] = array
        else:
            nested[name] = array
    return nested
