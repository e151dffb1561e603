"""The env server of PolyBeast: environments on any host, driven by a learner over gRPC.

    python polybeast_env.py --env PongNoFrameskip-v4                                    # for a learner on this machine
    python polybeast_env.py --address 0.0.0.0:4431 --token_file token --tls_cert cert.pem --tls_key key.pem
    python polybeast.py --addresses hostA:4431 hostB:4431 --token_file token …          # on the learner's host
    python polybeast_env.py --learner hostL:4441 --token_file token --tls_ca cert.pem   # the other way round: dials

Each stream between learner and server is a group of environments of its own, stepped together. The server's hello says
the environment's id, the group's width and the spaces. It needs Python and requirements-env.txt.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # before numpy reads them
    os.environ.setdefault(_name, "1")  # the streams are what runs in parallel here

import gymnasium  # noqa: E402

from beast import envs  # noqa: E402
from beast.envs import progress  # noqa: E402
from beast.envs.agents import at_least  # noqa: E402
from beast.envs.masks import MASK  # noqa: E402
from beast.envs.probe import probe_env  # noqa: E402
from beast.errors import exit_with_message  # noqa: E402
from beast.hosts import dialer, env_server, security, served_group, serving, wire  # noqa: E402
from beast.hosts.throttle import log_to_stderr as log  # noqa: E402
from beast.run.command_line import add_arguments  # noqa: E402
from beast.run.flags import EnvFlags, check_env_flags, check_limits  # noqa: E402


# FORK HERE: your environment. Any gymnasium environment will do, for example
#   gymnasium.vector.SyncVectorEnv([lambda: YourEnv(difficulty=3)] * num_envs)
def create_env(flags, num_envs: int, **overrides) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called for every stream, in its own thread.

    `overrides` are arguments of an environment that go before the flags': render_mode, where a game is filmed.
    """
    return envs.make(flags.env, num_envs, **envs.options(flags) | overrides)


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, for `create_env` and `main`; add your environment's own here."""
    parser = argparse.ArgumentParser(
        description="Serve environments to a PolyBeast learner.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, EnvFlags)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group().add_argument
    where(
        "--address",
        default="127.0.0.1:4431",
        help="where to listen: host:port, with port 0 for a free one, or unix:/path. 0.0.0.0:4431 is open to other "
        "hosts and needs a token and TLS",
    )
    where(
        "--learner",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="dial learners that listen (polybeast.py --listen) at host:port or unix:/path, rather than listen here. A "
        "stream goes on to the next address when a learner is full or gone, and dials again until this server is told "
        "to stop",
    )
    # Not those of ServerFlags: there they mean the learner's side, with other defaults.
    add(
        "--group_width",
        type=int,
        default=16,
        help="environments of one stream (K): they are stepped together and share one forward pass. Wider: less CPU "
        "time a step, more policy lag",
    )
    add(
        "--max_streams",
        type=int,
        default=2,
        help="streams at a time, or with --learner, streams to dial. With two, one group steps while the other waits "
        "for its actions; start one server per core rather than more streams",
    )
    add("--token_file", default="", help="file with the secret of both sides, readable by its owner only")
    add("--tls_cert", default="", help="certificate chain of this host (PEM), so that nobody reads along")
    add("--tls_key", default="", help="private key of the certificate (PEM)")
    add("--tls_ca", default="", help="with --learner: certificate (PEM) that the learner's is signed with, or its own")
    add(
        "--insecure",
        action="store_true",
        help="listen to other hosts, or dial them, without token and TLS: in a trusted network",
    )
    add(
        "--deflate",
        action="store_true",
        help="send rows through zlib, and of stacks of frames only what is new: for images over a network "
        "(docs/scale.md). It takes about 20 us of CPU for a stack of Atari",
    )
    add(
        "--niceness",
        type=int,
        default=0,
        help="Unix niceness to add (0 to 19), so that environments yield to a learner on the same machine",
    )
    add(
        "--stuck_timeout",
        type=float,
        default=60.0,
        help="seconds that a step may go on after its learner has left; then it counts as hanging, and the server ends",
    )
    add(
        "--gil_timeout",
        type=float,
        default=wire.MAKING_SECONDS,
        help="seconds that an environment may keep Python's GIL, in which time nothing else runs here; then it counts "
        "as hanging, and SIGALRM ends the server",
    )
    add(
        "--keep",
        action="store_true",
        help="start the server again whenever it ends, as it does when an environment hangs whose learner has left",
    )
    add(
        "--parent_pid",
        type=int,
        default=0,
        help="process id of the parent, with whose end this server ends too; 0: none. polybeast.py sets it",
    )
    add(
        "--has_mask",
        action="store_true",
        help="take masks of legal actions from info['action_mask']. polybeast.py sets it; a server that is started "
        "otherwise finds out",
    )
    return parser.parse_args(arguments)


def main() -> None:
    with exit_with_message():
        flags = check_env_flags(parse_flags())
        limits = {"group_width": (1, 2**15), "max_streams": (1, 256), "niceness": (0, 19), "stuck_timeout": (1, 86400)}
        check_limits(flags, {**limits, "gil_timeout": (1, 10**6)})
        protection = security.of_env_server(flags, log)
        # A parent has made and checked such an environment itself.
        env_id, has_mask = flags.env, flags.has_mask
        if not flags.parent_pid:
            probed = probe_env(create_env, flags)
            env_id, has_mask = probed.env_id, MASK in probed.observations
        if flags.keep:
            words = [word for word in sys.argv if word != "--keep"]
            serving.keep([sys.executable, *words, "--env", env_id], "" if flags.learner else flags.address, log)
        os.nice(flags.niceness)
        progress.page_of_thread()  # before a forkserver starts, which keeps the environment variables of now
        what = f"{env_id} ({flags.max_streams} streams of {flags.group_width})"
        options = dict(env_id=env_id, max_streams=flags.max_streams, log=log, stuck_seconds=flags.stuck_timeout)
        options["deflate"] = flags.deflate

        def make_group() -> served_group.VectorEnvGroup:
            env = create_env(flags, flags.group_width)
            return served_group.VectorEnvGroup(env, has_mask=has_mask, metrics=flags.env_metrics)

        server: env_server.EnvServer | dialer.Dialer
        announcement = ""  # a server that dials serves when a learner takes its first stream
        if flags.learner:
            server = dialer.Dialer(
                make_group,
                flags.learner,
                on_first_stream=lambda address: print(f"serving {what} to {address}", flush=True),
                **options,
                **protection,
            )
        else:
            few = at_least(partial(create_env, flags), 1)
            example = served_group.VectorEnvGroup(few, flags.group_width, has_mask)
            server = env_server.EnvServer(make_group, flags.address, example=example, **options, **protection)
            announcement = f"serving {what} on {server.address}"
    serving.serve(server, announcement, flags.parent_pid, flags.gil_timeout)


if __name__ == "__main__":
    main()
