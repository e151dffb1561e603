"""A trained policy, to be used from Python: what `beast.load` returns."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from torch import nn

from beast.envs.agents import kinds_of
from beast.envs.groups import EnvGroup
from beast.envs.masks import MASK, legal_choices
from beast.envs.spaces import EnvSpaces, action_shape_dtype, env_actions, observation_field, parts_by_name
from beast.errors import InputError
from beast.learn.distributions import policy_of
from beast.run import checkpoint
from beast.run.directory import program_of

LOADED = "beast_agent_"  # begins the names of modules that `import_agent` has made of files


class State(NamedTuple):
    """What a policy remembers of N environments from one action to the next."""

    core: tuple
    """The core's state, tensors [layers, N, …]; empty without a core."""
    action: torch.Tensor
    """The last actions, [1, N, …], as the net sees them."""


class Policy:
    """A net in eval mode on the CPU, its flags, and the spaces of the environments that it was trained on."""

    def __init__(self, net: nn.Module, whole: Space, spaces: EnvSpaces, flags: Any, steps: int, make_env: Callable):
        self.spaces = spaces  # of rows, and so of what the net takes; `whole` is that of observations
        self.net, self.flags, self.steps, self.make_env = net, flags, steps, make_env
        self.observation_space, self.action_space = whole, net.action_space
        """The spaces of one environment; `flags` are those of the training, `steps` the agent steps of it, and
        `make_env(num_envs)` makes the vector environment of the training."""
        self.generator = torch.Generator().manual_seed(flags.seed)

    def inputs(self, observations, state: State | None = None, reward=0.0, done=False, info=None) -> tuple[dict, tuple]:
        """What the net's `forward` takes to choose the actions of these N observations: see `act`."""
        fields = {name: observation_field(space) for name, space in self.spaces.observations.items()}
        parts = parts_by_name(self.observation_space, observations)
        if MASK in fields:
            num_envs = len(next(iter(parts.values())))
            parts[MASK] = legal_choices(self.observation_space, self.action_space, observations, info, num_envs)
        obs = {name: torch.from_numpy(np.array(parts[name], dtype))[None] for name, (_, dtype) in fields.items()}
        num_envs = max((len(x[0]) for x in obs.values() if x.dim() > 1), default=1)
        for name, x in obs.items():
            shape, (expected, _) = tuple(x.shape[1:]), fields[name]
            if shape != (num_envs, *expected):
                raise InputError(
                    f"observations {name!r} of shape {shape}: expected (N{''.join(f', {n}' for n in expected)}), those "
                    "of N environments; observation[None] is that of one"
                )
        if state is None:
            shape, dtype = action_shape_dtype(self.action_space)
            action = torch.from_numpy(np.zeros((1, num_envs, *shape), dtype))
            state, done = State(self.net.initial_state(num_envs), action), True
        rows = {"reward": np.full((1, num_envs), reward, np.float32), "done": np.full((1, num_envs), done, bool)}
        rows["task"] = np.zeros((1, num_envs), np.int32)  # of which only the value depends
        rows = {name: torch.from_numpy(x) for name, x in rows.items()}
        return {"obs": obs, **rows, "action": state.action}, state.core

    def act(self, observations, state: State | None = None, reward=0.0, done=False, greedy: bool = False, info=None):
        """Actions for N environments, in the form that a vector environment takes, and the state to come back with.

        `observations` are as a vector environment gives them, with the `reward` [N] of the last actions. `done` [N]
        says which of them are the first of their episodes; without a state all are. `greedy` takes the most probable
        actions instead of drawing them. `info` came with the observations; it is needed where it has a mask. Raises
        InputError for observations of another shape.
        """
        inputs, core = self.inputs(observations, state, reward, done, info)
        with torch.no_grad():
            policy_logits, _, core = self.net(inputs, core)
        policy = policy_of(self.net, policy_logits)
        action = policy.mode() if greedy else policy.sample(self.generator)
        return env_actions(self.action_space, action[0].numpy()), State(core, action)


def load(path: str, agent: str = "", policy: int = 0) -> Policy:
    """The policy of a checkpoint: see `beast.load`."""
    state = checkpoint.of_policy(checkpoint.load(path, "beast.load"), policy, path)
    trained_by = state.get("agent") or Path(program_of(state["config"].get("variant", ""))).stem
    if state["config"].get("variant") == "poly" and trained_by == "monobeast":
        trained_by = "polybeast"  # older checkpoints name the module of the net, not the agent's
    module = import_agent(agent or trained_by, path)
    if missing := [name for name in ("Flags", "Net", "create_env") if not hasattr(module, name)]:
        lacks = ", ".join(missing)
        raise InputError(f"{path}: {module.__name__} is no agent, as it has no {lacks}; give the agent's file")
    known = {field.name for field in fields(module.Flags)}
    config = {key: value for key, value in {**checkpoint.OLDER, **state["config"]}.items() if key in known}
    here = {"mode": "test", "atari_backend": "auto"}  # what it was trained on may be missing
    flags = module.Flags(**config | {name: value for name, value in here.items() if name in known})
    make_env = partial(getattr(module, "make_env", module.create_env), flags)
    if not (spaces := checkpoint.saved_spaces(state)):
        with closing(make_env(1)) as env:
            spaces = kinds_of(EnvGroup(env, MASK in env.reset(seed=flags.seed)[1]).spaces)[state.get("kind", "")]
    net = module.Net(spaces.observations, spaces.action, flags).eval()
    checkpoint.load_weights(net, state["net"], path)
    return Policy(net.requires_grad_(False), spaces.whole, spaces, flags, state["counts"]["steps"], make_env)


def agent_of(flags: Any, net: nn.Module, variant: str) -> str:
    """The agent's file without its `.py`: the module with both the flags' class and the net's, else the net's."""
    name = type(flags).__module__
    if getattr(sys.modules[name], "Net", None) is not type(net):
        name = type(net).__module__
    if name == "__main__" or name.startswith(LOADED):
        name = Path(getattr(sys.modules[name], "__file__", None) or program_of(variant)).stem
    return name


def import_agent(agent: str, path: str) -> ModuleType:
    """The agent's module: a file, or a name that Python finds as it finds any import, or beside Beast's package.

    A checkpoint has only the name, so it cannot bring code of its own.
    """
    file = Path(agent)
    if not agent.endswith(".py"):
        if not all(part.isidentifier() for part in agent.split(".")):
            raise InputError(f"{path}: its agent {agent!r} is no name of a module; give the agent's file yourself")
        if agent in sys.modules or importlib.util.find_spec(agent.partition(".")[0]):
            return importlib.import_module(agent)
        file = Path(__file__).resolve().parents[2] / f"{agent}.py"
    if not file.is_file():
        raise InputError(f"{path}: there is no {file}, the agent's file; give the path of the one that trained it")
    # Under a name of its own, as two forks may have files of one name.
    name = f"{LOADED}{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
