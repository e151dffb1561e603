"""Checkpoints: saved whole or not at all, and loaded without running any code from the file."""

from __future__ import annotations

import copy
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from gymnasium import spaces

from beast.envs.agents import join, kinds_of
from beast.envs.masks import MASK, spaces_with_mask
from beast.envs.spaces import CATEGORICAL, ActionsByKind, EnvSpaces, leaves, spaces_by_name
from beast.errors import InputError, MissingFile, first_line
from beast.files import replace_file
from beast.hosts import wire
from beast.run.directory import program_of

OLDER = {"channels": "legacy"}  # flags that older checkpoints lack, and what they were trained with
FORMAT = 2  # raise it when weights or fields change their meaning; 2: images are flattened as [H, W, C]
PLAIN_TYPES = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


def save(path: str | os.PathLike, state: dict[str, Any]) -> None:
    """Write `state`: dicts, lists and tuples of numbers, strings, None and tensors, which is all that `load` accepts.

    Raises TypeError for anything else before a byte is written, and InputError if the file cannot be written.
    """
    refuse_unloadable(state, "state")
    replace_file(path, lambda file: torch.save({"beast_checkpoint": FORMAT, **state}, file))


def load(path: str | os.PathLike, taker: str = "", variants: Collection[str] = ()) -> dict[str, Any]:
    """The state that `save` wrote to `path`, with its tensors on the CPU. Raises MissingFile or InputError.

    `taker` is the flag or function that was given the path; without one it is that of the run itself. Where `variants`
    are given, other agents' checkpoints are refused.
    """
    which = f"give {taker + ' ' if taker else ''}a checkpoint.pt or best.pt of a run"
    missing = which if taker else "check --root and --name, or train first"
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch itself checks no checksums
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MissingFile(f"{path}: there is no such checkpoint; {missing}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise InputError(
            f"{path}: truncated, damaged or no checkpoint at all ({first_line(error)}); take best.pt or another "
            f"copy{'' if taker else ', or delete it to begin anew'}"
        ) from error
    except (pickle.UnpicklingError, RuntimeError) as error:  # torch advises to load unsafely: do not quote that
        raise InputError(f"{path}: not a checkpoint of Beast's ({type(error).__name__}); {which}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {which}") from error
    written = state.pop("beast_checkpoint", None) if isinstance(state, dict) else None
    if written is None:
        raise InputError(f"{path}: not a checkpoint of Beast's (it has no field beast_checkpoint); {which}")
    if written != FORMAT:
        raise InputError(
            f"{path}: checkpoint format {written}, and this version of Beast reads format {FORMAT}; "
            "use the version that wrote it (the run's meta.json names the commit)"
        )
    variant = state.get("config", {}).get("variant")
    if variants and variant not in variants and (program := program_of(variant)) != variant:
        raise InputError(f"{path}: {program} trained it, and is what plays it")
    return state


def describe_spaces(env_spaces: EnvSpaces) -> dict[str, Any]:
    """What a checkpoint holds of these spaces, for `saved_spaces`; nothing where JSON would not tell all of them."""
    whole, action = env_spaces.whole, env_spaces.action
    if isinstance(action, ActionsByKind):
        kinds = {name: describe_spaces(spaces) for name, spaces in kinds_of(env_spaces).items()}
        return {"kinds": kinds, "agents": list(action.agents)}
    if whole is None or not {type(part) for part in leaves(whole) + leaves(action)} <= {spaces.Box, *CATEGORICAL}:
        return {}  # a subclass may have more to say
    try:
        texts = [wire.space_to_json(space) for space in (whole, action)]
        is_told = [wire.space_from_json(text) for text in texts] == [whole, action]  # not if keys are no texts, say
    except InputError:
        return {}
    told = {"observation": texts[0], "action": texts[1], "has_mask": MASK in env_spaces.observations}
    return told if is_told else {}


def saved_spaces(state: dict) -> EnvSpaces | None:
    """The spaces of a checkpoint's `state`; None where it has none, as an older one."""
    if not (saved := state.get("spaces")):
        return None
    if "kinds" in saved:
        kinds = {name: saved_spaces({"spaces": each}) for name, each in saved["kinds"].items()}
        known = {name: (each.whole, each.action) for name, each in kinds.items() if each and each.whole}
        whole, action = join(known, tuple(saved["agents"]))
        return EnvSpaces(spaces_by_name(whole), action, whole=whole) if known.keys() == kinds.keys() else None
    whole, action = (wire.space_from_json(saved[name]) for name in ("observation", "action"))
    return EnvSpaces(spaces_with_mask(whole, action, saved["has_mask"]), action, whole=whole)


def of_policy(state: dict, policy: int, path: str | os.PathLike, is_team: bool = False) -> dict:
    """What a run with this one of the policies alone would have saved; `state` itself where there is one policy.

    Where agents are of several kinds, `kind` in it is the policy's. A team has a net for each: the policy's, and those
    of the first policies of the other kinds. Raises InputError if there is no such policy."""
    of_each = state.get("policies", [{}])
    if not 0 <= policy < len(of_each):
        raise InputError(f"{path}: there is no policy {policy}: its policies are 0 to {len(of_each) - 1}")
    if "policies" not in state:
        return state

    def net_of(number: int, prefix: str) -> dict:
        own = f"{number}."
        return {prefix + name.removeprefix(own): x for name, x in state["net"].items() if name.startswith(own)}

    found = {**state, **of_each[policy], "net": net_of(policy, "")}
    if kinds := state.get("spaces", {}).get("kinds"):
        each = len(of_each) // len(kinds)
        found["kind"] = list(kinds)[policy // each]
        if not is_team:
            return {**found, "spaces": kinds[found["kind"]]}
        found["net"] = {}
        for number in range(len(kinds)):
            chosen = policy if number == policy // each else number * each
            found["net"] |= net_of(chosen, f"nets.{number}.")
    return found


def alone(state: dict, policy: int) -> dict:
    """What MonoBeast would have saved of this policy of several; `state` itself where there is one."""
    if "policies" not in state:
        return state
    of_several = {"policies", "population", "pbt", "draws"}
    found = {name: x for name, x in of_policy(state, policy, "").items() if name not in of_several}
    return {**found, "config": {**state["config"], "variant": "mono"}}


def fitting_weights(net: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the weights that have a name and shape of the net's."""
    own = net.state_dict()
    return {name: x for name, x in weights.items() if name in own and x.shape == own[name].shape}


def differences(net: torch.nn.Module, weights: dict[str, torch.Tensor]) -> str:
    """What keeps a net from taking these weights, in one line with a few names of each kind; empty if nothing does."""
    own, fitting = net.state_dict(), fitting_weights(net, weights)
    missing = copy.deepcopy(net).load_state_dict(fitting, strict=False).missing_keys  # modules may fill in their own
    found = {
        "missing in the checkpoint": [name for name in missing if name not in weights],
        "unknown to this net": [name for name in weights if name not in own],
        "of other shapes": [
            f"{name} {list(weights[name].shape)} (this net has {list(x.shape)})"
            for name, x in own.items()
            if name in weights and name not in fitting
        ],
    }
    return "; ".join(
        f"{problem}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for problem, names in found.items()
        if names
    )


def load_weights(net: torch.nn.Module, weights: dict[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Give the net the weights of the checkpoint at `path`. Raises InputError that names what differs."""
    if found := differences(net, weights):
        raise InputError(
            f"{path}: these are the weights of another net; {found}. Undo the change of the net "
            f"(or of its flags), or begin a run of another --name with --init_from {path}, which takes over what fits"
        )
    net.load_state_dict(weights)


def load_fitting_weights(net: torch.nn.Module, path: str | os.PathLike) -> str:
    """Give the net the weights of this checkpoint that fit, and say which did not. Raises InputError if none does."""
    weights = load(path, "--init_from")["net"]
    fitting, found = fitting_weights(net, weights), differences(net, weights)
    if not fitting:
        raise InputError(f"--init_from {path}: none of its weights fits this net; {found}")
    net.load_state_dict(fitting, strict=False)
    taken = f"{len(fitting)} of {len(net.state_dict())} weights are those of {path}"
    return taken + (f"; not taken over: {found}" if found else "")


def refuse_unloadable(value: Any, where: str) -> None:
    """Raise TypeError for a value that `load` would refuse. The message tells where in the state it is."""
    kind = type(value)  # exactly: a numpy.float64 is a float to isinstance, but not to the loader
    if kind in (dict, OrderedDict, list, tuple):
        for key, item in value.items() if kind in (dict, OrderedDict) else enumerate(value):
            refuse_unloadable(key, f"a key of {where}")
            refuse_unloadable(item, f"{where}[{key!r}]")
    elif kind not in PLAIN_TYPES:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a safe load refuses; "
            "convert it to a number, a string, a list or a tensor"
        )
