"""PolyBeast: the agent of monobeast.py, its environments on any number of hosts, over gRPC.

    python polybeast.py --env PongNoFrameskip-v4 --name pong-poly       # starts its own env servers; again: resumes
    python polybeast.py --addresses hostA:4431 hostB:4431 --token_file token --tls_ca cert.pem     # polybeast_env.py's
    python polybeast.py --listen 0.0.0.0:4441 --token_file token --tls_cert cert.pem --tls_key key.pem   # they dial in
    python polybeast.py --mode test --name pong-poly                    # play whole games with the checkpoint

Env servers (polybeast_env.py) stream rows of observations to the actor pool, in C++, which brings them to a dynamic
batcher and whole rollouts to a batching queue. beast/run/servers.py connects to them, beast/feeds/remote.py makes a
feed of them, and the agent's own `infer` and `learn` run on it: edit model, loss and update in monobeast.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial

import torch

import polybeast_env
from beast.errors import exit_with_message
from beast.learn.published import start_weights
from beast.run import command_line, servers
from beast.run.flags import SERVERS_FREE_ON_RESUME, ServerFlags, check_server_flags, run_name
from beast.run.training import Result, Training
from monobeast import (
    AGENT_FREE_ON_RESUME,
    AgentFlags,
    describe_updates,
    infer,
    learn,
    make_learner,
    test,
    validate_agent,
)
from monobeast import Net as Net  # for beast.load
from monobeast_presets import ABOUT, PRESETS
from polybeast_env import create_env


@dataclass
class Flags(ServerFlags, AgentFlags):
    """IMPALA with V-trace, its environments anywhere. A *step* is one decision of the agent; in Atari it lasts 4
    frames."""


# Flags that may differ when a run is resumed.
RESUME_FREE = AGENT_FREE_ON_RESUME | SERVERS_FREE_ON_RESUME | {"group_width"}


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end (see `Training.run_threads`)."""
    with contextlib.ExitStack() as to_close:
        connection = servers.connect(flags, validate, polybeast_env, to_close)
        flags, spaces = connection.flags, connection.spaces
        torch.manual_seed(flags.seed)
        learner = make_learner(flags, spaces)
        with Training("poly", flags, learner, RESUME_FREE, spaces.frames_per_step) as training:
            weights = start_weights(learner, flags)
            feed, others = servers.make_feed(training, connection, flags.batch_width, flags.max_policy_lag)
            return training.run_threads(
                feed,
                infer=partial(infer, feed, weights, training.generator),
                learn=partial(learn, training, feed, weights),
                introduction=describe_updates(flags, learner.net),
                others=others,
            )


def make_env(flags: Flags, num_envs: int, **overrides):
    """The environments of an env server with these flags, in this process."""
    return create_env(polybeast_env.parse_flags(servers.command_line(flags)), num_envs, **overrides)


def validate(flags: Flags, widths_known: bool = True) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy.

    What depends on the group width is left alone while only the servers know that."""
    flags = check_server_flags(validate_agent(flags), flags.batch_width, widths_known)
    return replace(flags, name=run_name("poly", flags)) if widths_known else flags


def main() -> None:
    flags = command_line.parse(Flags, __doc__, PRESETS, ABOUT)
    with exit_with_message():
        train(flags) if flags.mode == "train" else test(validate(flags), make_env, command_line.given())


if __name__ == "__main__":
    main()
