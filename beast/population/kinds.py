"""Kinds of agents: what the nets of each see of the rows that all of them share, and what they write there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from beast.envs.agents import kinds_of, parts_of
from beast.envs.spaces import ActionsByKind, EnvSpaces, action_shape_dtype, policy_width
from beast.errors import InputError
from beast.learn.distributions import policy_of
from beast.population.routing import as_slice, put_together, take


class Kind:
    """The agents with these `spaces`, among the rows of `run`."""

    def __init__(self, name: str, spaces: EnvSpaces, run: EnvSpaces):
        self.name, self.spaces = name, spaces
        self._is_alone, self._parts = not name, parts_of(name, run)
        (self._shape, dtype), (row_shape, row_dtype) = map(action_shape_dtype, (spaces.action, run.action))
        self._row_size = math.prod(row_shape)
        self._dtype, self._row_dtype = getattr(torch, dtype), getattr(torch, row_dtype)
        self._width, self._row_width = map(policy_width, (spaces.action, run.action))

    def own(self, rows: dict) -> dict:
        """Rows [T, N, …] of such agents as their nets take them."""
        if self._is_alone:
            return rows
        action = rows["action"][..., : math.prod(self._shape)]
        own = {
            "obs": {name: rows["obs"][part] for name, part in self._parts.items()},
            "action": action.reshape(*action.shape[:-1], *self._shape).to(self._dtype),
        }
        if "policy_logits" in rows:
            own["policy_logits"] = self.own_logits(rows["policy_logits"])
        return {**rows, **own}

    def own_logits(self, policy_logits: Tensor) -> Tensor:
        """Of a row's [T, N, …] those of this kind's action space."""
        return policy_logits[..., : self._width]

    def placed_action(self, action: Tensor) -> Tensor:
        """Actions [T, N, …] as rows have them."""
        if self._is_alone:
            return action
        flat = action.reshape(*action.shape[: action.dim() - len(self._shape)], -1).to(self._row_dtype)
        return F.pad(flat, (0, self._row_size - flat.shape[-1]))

    def placed_logits(self, policy_logits: Tensor) -> Tensor:
        """The parameters of policies [T, N, width] as rows have them."""
        return (
            F.pad(policy_logits, (0, self._row_width - self._width)) if self._row_width > self._width else policy_logits
        )


def all_kinds(env_spaces: EnvSpaces) -> list[Kind]:
    """The kinds of agents of an environment, in the order of their first agents."""
    return [Kind(name, spaces, env_spaces) for name, spaces in kinds_of(env_spaces).items()]


def seat_kinds(env_spaces: EnvSpaces) -> tuple[int, ...]:
    """The number of each agent's kind."""
    names = list(kinds_of(env_spaces))
    return tuple(names.index(kind) for kind in getattr(env_spaces.action, "agents", [""] * env_spaces.agents))


def check_core_states(kinds: list[Kind], nets: list[nn.Module]) -> None:
    """Raise InputError unless the nets of all kinds have core states of the same shapes, which rows share."""
    shapes = [[tuple(x.shape) for x in net.initial_state(1)] for net in nets]
    for kind, found in zip(kinds, shapes):
        if found != shapes[0]:
            raise InputError(
                f"core states of shapes {found} for {kind.name}, {shapes[0]} for {kinds[0].name}: let initial_state() "
                "be the same whatever agents observe"
            )


class Team(nn.Module):
    """A net for each kind of agents, which play together."""

    def __init__(self, make_net: Callable, env_spaces: EnvSpaces):
        """`make_net(observations, action)` makes the net of a kind."""
        super().__init__()
        assert isinstance(env_spaces.action, ActionsByKind)
        self.action_space, self.kinds = env_spaces.action, all_kinds(env_spaces)
        self.nets = nn.ModuleList(make_net(kind.spaces.observations, kind.spaces.action) for kind in self.kinds)

    def initial_state(self, num_columns: int) -> tuple:
        state: tuple = self.nets[0].initial_state(num_columns)
        return state

    def forward(self, rows: dict, core_state: tuple) -> tuple:
        answers = []
        for kind, net in zip(self.kinds, self.nets):
            columns = self._columns(kind, rows["done"].shape[1])
            inputs, state = take((rows, core_state), columns)
            policy_logits, baseline, state = net(kind.own(inputs), state)
            answers.append((columns, (kind.placed_logits(policy_logits), baseline, state)))
        return put_together(answers, rows["done"].shape[1])

    def acting_policy(self, parameters: Tensor) -> TeamPolicy:
        return TeamPolicy(self, parameters)

    def _columns(self, kind: Kind, num_columns: int) -> slice | Tensor:
        return as_slice(self.action_space.columns(kind.name, num_columns))

    def actions(self, parameters: Tensor, choose: Callable) -> Tensor:
        """What `choose(policy)` takes of the policy of each kind, as rows have it."""
        num_columns, answers = parameters.shape[1], []
        for kind, net in zip(self.kinds, self.nets):
            columns = self._columns(kind, num_columns)
            policy = policy_of(net, kind.own_logits(parameters[:, columns]))
            answers.append((columns, kind.placed_action(choose(policy))))
        return put_together(answers, num_columns)


class TeamPolicy:
    """The policies of all columns, as `distribution` gives one."""

    def __init__(self, team: Team, parameters: Tensor):
        self._team, self._parameters = team, parameters

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return self._team.actions(self._parameters, lambda policy: policy.sample(generator))

    def mode(self) -> Tensor:
        return self._team.actions(self._parameters, lambda policy: policy.mode())
