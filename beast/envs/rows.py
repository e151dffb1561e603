"""What a row of a rollout holds: one table of its fields. docs/rollout.md says what each means."""

from typing import Literal, NamedTuple

from beast.envs.spaces import EnvSpaces, action_shape_dtype, categories_by_part, observation_field, policy_width


class RowField(NamedTuple):
    """A field that each environment has in every row, beside its observations."""

    dtype: str  # of one number; the fields of `shaped_fields` have the shape and type that they have there
    writer: Literal["env", "feed", "agent"]
    is_replayed: bool = False  # the sequence replay keeps it


# Everything else follows from this table: slots, groups, feeds, replay, wire and libbeast. A new field that
# environments write is one line; what `EnvGroup` does not compute comes from their infos.
ROW_FIELDS = {
    "reward": RowField("float32", "env", is_replayed=True),
    "done": RowField("bool", "env", is_replayed=True),
    "terminated": RowField("bool", "env", is_replayed=True),
    "truncated": RowField("bool", "env", is_replayed=True),
    "episode_return": RowField("float32", "env"),
    "episode_step": RowField("int32", "env", is_replayed=True),
    "task": RowField("int32", "env"),  # of the environment, one of `--env A,B,C` from 0 on
    "group": RowField("int32", "feed"),  # which group of environments,
    "life": RowField("int32", "feed"),  # how often it has been restarted,
    "env_number": RowField("int32", "feed"),  # and which environment of it; libbeast has these in this order
    "action": RowField("", "agent", is_replayed=True),
    "policy_logits": RowField("", "agent", is_replayed=True),
    "baseline": RowField("float32", "agent"),
    "policy_version": RowField("int32", "agent", is_replayed=True),
}


# Fields of runs of several policies, which environments write where they have them (`more_fields` of a feed).
OBJECTIVE = "objective"  # from an agent's last row of a game to the game's end what counts as its success, else NaN
REWARD_TERMS = "reward_terms"  # amounts that arrived with the reward, one for each of `EnvSpaces.reward_terms`


def written_by(writer: str) -> dict[str, str]:
    """Name -> dtype of the fields that it writes, in the table's order."""
    return {name: field.dtype for name, field in ROW_FIELDS.items() if field.writer == writer}


def shaped_fields(spaces: EnvSpaces) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the fields whose shape depends on the action space."""
    return {"action": action_shape_dtype(spaces.action), "policy_logits": ((policy_width(spaces.action),), "float32")}


def rollout_fields(spaces: EnvSpaces) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of all that one environment has in one row. A part of an observation is called
    `obs/<name>`, of a final observation `final_obs/<name>`."""
    kinds = ("obs", "final_obs") if spaces.final_observations else ("obs",)
    return {
        **{f"{kind}/{name}": observation_field(x) for kind in kinds for name, x in spaces.observations.items()},
        **{name: ((), field.dtype) for name, field in ROW_FIELDS.items()},
        **shaped_fields(spaces),
    }


def layout(spaces: EnvSpaces) -> tuple[dict, dict]:
    """What a net needs to know of spaces: bounds are not among it."""
    return rollout_fields(EnvSpaces(spaces.observations, spaces.action)), categories_by_part(spaces)


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


def is_final(done, terminated, truncated):
    """Whether a row is the last of its episode, which nobody acts from: bool arrays or tensors of one shape.

    The transition from such a row to the next one is void. A row that is also `done` is the first of the next episode
    (SAME_STEP autoreset), and the agent acts from it.
    """
    return (terminated | truncated) & ~done
