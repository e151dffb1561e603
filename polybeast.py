"""PolyBeast: the agent of monobeast.py, its environments on any number of hosts, over gRPC.

    python polybeast.py --env PongNoFrameskip-v4 --name pong-poly       # starts its own env servers; again: resumes
    python polybeast.py --addresses hostA:4431 hostB:4431 --token_file token --tls_ca cert.pem     # polybeast_env.py's
    python polybeast.py --listen 0.0.0.0:4441 --token_file token --tls_cert cert.pem --tls_key key.pem   # they dial in
    python polybeast.py --mode test --name pong-poly                    # play whole games with the checkpoint

Env servers (polybeast_env.py) stream rows of observations to the actor pool, in C++, which brings them to a dynamic
batcher and whole rollouts to a batching queue. beast/feeds/remote.py makes a feed of these, and the agent's
own `infer` and `learn` run on it: edit model, loss and update in monobeast.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

try:
    import libbeast
except ModuleNotFoundError:
    sys.exit("PolyBeast needs its C++ part, libbeast: run `make libbeast`, or `pip install .`")

from beast import envs
from beast.device import choose_device
from beast.envs.spaces import EnvSpaces, action_shape_dtype, observation_field, spaces_by_name
from beast.errors import InputError, MissingFile, Unreachable, exit_with_message
from beast.feeds.remote import LocalServers, RefusalLog, RemoteFeed
from beast.hosts import wire
from beast.hosts.security import allow_many_connections, read_certificates, read_token
from beast.hosts.security import security as exposed_security
from beast.hosts.wire import MAKING_SECONDS
from beast.learn.published import PublishedWeights
from beast.run import command_line
from beast.run.console import tell
from beast.run.flags import FREE_ON_RESUME, check_limits, check_widths, describe_updates, env_arguments, run_name
from beast.run.hardware import keep_freed_memory
from beast.run.training import Result, Training
from monobeast import AgentFlags, infer, learn, make_learner, probe_env, test, validate_agent, value_head
from monobeast import Net as Net  # for beast.load
from polybeast_env import create_env, parse_flags

QUIET_SECONDS = 2.0  # before a line says which env server the learner waits for
CONNECT_SECONDS = 10.0  # a learner waits this long for a server at least, however short --env_timeout is
STREAMS_PER_SERVER = 2  # double buffering: one group steps while the other's actions are chosen


@dataclass
class Flags(AgentFlags):
    """IMPALA with V-trace, its environments anywhere. A *step* is one decision of the agent; in Atari it lasts 4
    frames."""

    # Where the environments are.
    num_servers: int = 2
    """Env servers to start here, where no --addresses are given; each serves two groups of environments."""
    addresses: tuple[str, ...] = ()
    """Env servers that run already, `host:port` or `unix:/path`. Environment and group width are theirs then; the
    learner counts frames by --frame_skip and plays --mode test by its own flags, so give it the servers'."""
    listen: str = ""
    """Where env servers dial in, `host:port` or `unix:/path`, from anywhere and at any time (polybeast_env.py
    --learner), instead of --addresses. Environment and group width are those of the first that calls and can be used;
    give --env to wait for that one."""
    max_streams: int = 0
    """With --listen: streams at a time, each a group of environments; 0 takes up to 64."""
    tls_cert: str = ""
    """With --listen: certificate chain of this host (PEM), so that nobody reads along."""
    tls_key: str = ""
    """With --listen: private key of the certificate (PEM)."""
    token_file: str = ""
    """File with the secret that the env servers ask for, or with --listen must know."""
    tls_ca: str = ""
    """Certificate (PEM) that the env servers' certificates are signed with, or their own; a token needs it."""
    insecure: bool = False
    """Send a token to other hosts without TLS, or --listen to them without token and TLS: in a trusted network."""
    min_envs: float = 0.5
    """Share of the environments that must work, else the run ends. While it is met, a stream that has used up its
    restarts or was refused is tried again after 30 seconds to 10 minutes. With --listen the learner waits instead of
    ending: the share is of --max_streams, and where that is 0, one stream is enough."""
    server_niceness: int = 5
    """Unix niceness added to env servers started here (0 to 19), so that they yield to the learner. Linux with
    autogroups ignores it between them and the learner."""

    # Who does how much.
    queue_width: int = 0
    """Groups wait while so many columns (or more) wait for the learner; 0 takes one group or batch, whichever is
    wider. Fewer mean less policy lag."""
    inference_width: int = 0
    """Rows that inference answers at once, at most; 0 takes one group on a CPU (rows that fit the cache, and no
    gathering) and all groups on a GPU."""
    server_arguments: str = ""
    """Arguments of your own flags of polybeast_env.py, for the env servers started here and for --mode test, as in
    `--server_arguments="--level 3"`."""


# Flags of this variant, beside those of every run, that may differ when a run is resumed.
PLACEMENT_FLAGS = {
    *("num_servers", "addresses", "token_file", "tls_ca", "insecure", "server_niceness", "group_width"),
    *("inference_width", "queue_width", "min_envs", "listen", "max_streams", "tls_cert", "tls_key"),
}
MAX_STREAMS = 64  # that dial in, by default


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end; a checkpoint is left in any case.

    SIGTERM and SIGHUP end it as steps do; Ctrl-C raises KeyboardInterrupt when all is saved. A failure while it trains
    is logged and raises SystemExit(1).
    """
    keep_freed_memory()
    with contextlib.ExitStack() as to_close:
        connection = connect(flags, to_close)
        flags, spaces = connection.flags, connection.spaces
        torch.manual_seed(flags.seed)
        learner = make_learner(flags, spaces)
        resume_free = FREE_ON_RESUME | PLACEMENT_FLAGS
        with Training("poly", flags, learner, resume_free, connection.frames_per_step) as training:
            weights = PublishedWeights(learner.net, learner.updates, flags.compile)
            if flags.compile:
                learner.net.forward = torch.compile(learner.net.forward)
            feed, others = make_feed(training, connection)
            updates = describe_updates(flags, value_head(learner.net))
            introduction = (
                f"{'up to ' if connection.listener else ''}{connection.num_streams} groups of {flags.group_width} "
                f"environments, {updates}"
            )
            return training.train(
                feed, lambda: infer(training, feed, weights), lambda: learn(training, feed, weights), introduction,
                others,
            )  # fmt: skip


class Connection(NamedTuple):
    """Env servers that run, and what they have."""

    flags: Flags  # with the servers' environment and group width
    spaces: EnvSpaces
    hello: dict
    frames_per_step: int
    addresses: list[str]
    servers: LocalServers | None  # that were started here
    listener: Any
    security: dict

    @property
    def num_streams(self) -> int:
        return STREAMS_PER_SERVER * len(self.addresses) or self.flags.max_streams or MAX_STREAMS


def connect(flags: Flags, to_close: contextlib.ExitStack) -> Connection:
    """Start env servers, or find those that run or dial in, and ask them what they have. Raises InputError or
    Unreachable."""
    runs_servers = not (flags.addresses or flags.listen)
    validate(flags, widths_known=runs_servers)
    choose_device(flags.device, flags.amp)  # report a missing device before servers start
    security = read_security(flags)
    addresses, servers, listener = list(flags.addresses), None, None
    if runs_servers:
        # An environment that cannot be used is reported here.
        spaces = probe_env(create_env, parse_flags(server_command_line(flags)))
        frames_per_step, flags = spaces.frames_per_step, replace(flags, env=spaces.env_id)
        servers = LocalServers(
            os.path.join(os.path.dirname(os.path.abspath(__file__)), "polybeast_env.py"),
            [
                # A step that hangs has taken --env_timeout already, and the learner waits for its server.
                *("--stuck_timeout", "5", "--gil_timeout", str(max(flags.env_timeout, MAKING_SECONDS))),
                *(*server_command_line(flags), "--niceness", str(flags.server_niceness)),
            ],
            flags.num_servers,
            flags.max_env_restarts,
        )
        to_close.callback(servers.close)
        addresses = servers.addresses
    if flags.listen:
        listener = listen(flags)
        to_close.callback(listener.close)
        tell(f"waiting for env servers on {listener.address}: polybeast_env.py --learner {listener.address}")
        flags, spaces, hello = first_hello(flags, listener)
    else:
        flags, spaces, hello = query_servers(flags, addresses, security)
    if not runs_servers:
        frames_per_step = envs.frames_per_step(flags.env, flags.frame_skip)
    return Connection(flags, spaces, hello, frames_per_step, addresses, servers, listener, security)


def make_feed(training: Training, connection: Connection) -> tuple[RemoteFeed, list[Callable[[], None]]]:
    """The feed of these env servers, and the loops that have to run beside the agent's."""
    flags, servers, listener = connection.flags, connection.servers, connection.listener
    streams = [address for address in connection.addresses for _ in range(STREAMS_PER_SERVER)]
    min_streams = math.ceil(flags.min_envs * connection.num_streams - 1e-9)  # 0.28 * 50 is 14.000000000000002
    if listener:
        min_streams = max(min_streams, 1) if flags.max_streams else 1
    feed = RemoteFeed(
        training.learner, flags, connection.spaces.action, streams, servers, listener, seed=training.env_seed(0, 0),
        expected=connection.hello, env_timeout=flags.env_timeout,
        connect_timeout=max(flags.env_timeout, CONNECT_SECONDS) + MAKING_SECONDS,
        max_env_restarts=flags.max_env_restarts, min_streams=min_streams, log=training.run.log, **connection.security,
    )  # fmt: skip
    others = [feed.pool.run, feed.watch]
    if servers:
        others.append(lambda: servers.watch(feed.closed.is_set, training.run.log))
    return feed, others


def make_env(flags: Flags, num_envs: int, **overrides):
    """The environments of an env server with these flags, in this process."""
    return create_env(parse_flags(server_command_line(flags)), num_envs, **overrides)


def server_command_line(flags: Flags) -> list[str]:
    """The arguments of polybeast_env.py for these flags."""
    return [*env_arguments(flags), "--group_width", str(flags.group_width), *shlex.split(flags.server_arguments)]


def read_security(flags: Flags) -> dict:
    """Token and certificate for libbeast. Raises InputError naming the flag."""
    for name in ("token_file", "tls_ca"):
        path = getattr(flags, name)
        if path and not os.path.isfile(path):
            raise MissingFile(f"--{name} {path}: there is no such file")
    token = read_token(flags.token_file) if flags.token_file else ""
    certificates = read_certificates(flags.tls_ca, "--tls_ca") if flags.tls_ca else b""
    return {"token": token, "root_certificates": certificates, "insecure": flags.insecure}


def listen(flags: Flags):
    """A listener for env servers that dial in. Raises InputError where the address cannot be used."""
    token, tls = exposed_security(flags.listen, flags.token_file, flags.tls_cert, flags.tls_key, flags.insecure)
    key, certificate = tls or (b"", b"")
    allow_many_connections()
    try:
        return libbeast.EnvListener(
            flags.listen, token=token, certificate=certificate, key=key, env_timeout=flags.env_timeout,
            max_streams=flags.max_streams or MAX_STREAMS,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"--listen {flags.listen}: {error}") from error


def query_servers(flags: Flags, addresses: list[str], security: dict) -> tuple[Flags, EnvSpaces, dict]:
    """What all servers say they have: flags with their environment and group width, spaces, and the hello itself.

    Raises InputError if they do not have the same, Unreachable if one cannot be reached.
    """
    timeout = max(flags.env_timeout, CONNECT_SECONDS)

    def ask(address: str) -> dict:
        waiting = f"waiting for the env server at {address}, for {timeout:g} s at most (--env_timeout)"
        timer = threading.Timer(QUIET_SECONDS, tell, [waiting])
        timer.start()
        try:
            return dict(libbeast.handshake(address, timeout=timeout, **security))
        except ConnectionError as error:
            raise Unreachable(str(error)) from error
        except ValueError as error:
            raise InputError(str(error)) from error
        finally:
            timer.cancel()

    answers: dict[str, Future] = {address: Future() for address in addresses}

    def answer(address: str, future: Future) -> None:
        try:
            future.set_result(ask(address))
        except BaseException as error:
            future.set_exception(error)

    for item in answers.items():  # at once; Ctrl-C waits for none of them
        threading.Thread(target=answer, args=item, daemon=True).start()
    hellos = {address: future.result() for address, future in answers.items()}
    first = hellos[addresses[0]]
    for address, hello in hellos.items():
        for name in ("env", "num_envs", "observation_space", "action_space", "fields", "observation", "action"):
            if hello[name] != first[name]:
                raise InputError(
                    wire.readable(
                        f"{address} has {name} {hello[name]}, {addresses[0]} has {first[name]}: "
                        "start all env servers with the same flags"
                    )
                )
    return use_hello(flags, f"the env server at {addresses[0]}", first)


def first_hello(flags: Flags, listener) -> tuple[Flags, EnvSpaces, dict]:
    """What `query_servers` returns, by the hello of the first env server that dials in and can be used. Those before it
    are refused and logged."""

    def refusal(hello: dict) -> str:
        try:
            use_hello(flags, "this env server", hello)
        except InputError as error:
            return str(error)
        return ""

    log_refusals, hello = RefusalLog(listener, tell), None
    while not hello:
        hello = listener.first_hello(refusal, timeout=1.0)
        log_refusals()
    return use_hello(flags, "this env server", hello)


def use_hello(flags: Flags, server: str, hello: dict) -> tuple[Flags, EnvSpaces, dict]:
    """What `query_servers` returns, by the hello of one of them, which messages call `server`. Raises InputError if it
    cannot be used."""
    # By identity: the default's own id means that environment where a user gives it.
    is_given = (flags.addresses or flags.listen) and flags.env is not Flags.env
    if is_given and flags.env.split(":")[-1] != hello["env"].split(":")[-1]:
        raise InputError(
            f"--env {flags.env}: {server} has {hello['env']}; start it with --env {flags.env}, or leave --env out of "
            "the learner's command"
        )
    flags = validate(replace(flags, env=hello["env"], group_width=hello["num_envs"]))
    observation_space, action_space = (wire.space_from_json(hello[f"{of}_space"]) for of in ("observation", "action"))
    has_final = any(name.startswith("final_obs/") for name in hello["fields"])
    spaces = EnvSpaces(spaces_by_name(observation_space), action_space, has_final)
    described = {f"obs/{name}": observation_field(space)[::-1] for name, space in spaces.observations.items()}
    served = {name: field for name, field in hello["fields"].items() if name.startswith("obs/")}
    if described != served or hello["action"] != action_shape_dtype(action_space)[::-1]:
        raise InputError(
            wire.readable(f"{server} has spaces of {described}, its rows have {served}: it is no env server of Beast")
        )
    return flags, spaces, hello


def validate(flags: Flags, widths_known: bool = True) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy.

    What depends on the group width is left alone while only the servers know that."""
    flags = validate_agent(flags)
    limits = {  # name: lowest, highest
        **{name: (0, 10**9) for name in ("queue_width", "inference_width")},
        "num_servers": (1, 1024),
        "min_envs": (0.0, 1.0),
        "max_streams": (0, 4096),
        "server_niceness": (0, 19),
        "env_timeout": (1e-6, 900_000.0),  # libbeast takes a million seconds, of which some are for the start
    }
    check_limits(flags, limits)
    if flags.listen and flags.addresses:
        raise InputError("--listen and --addresses exclude each other: env servers dial in, or are dialed")
    if flags.listen and flags.tls_ca:
        raise InputError(
            "--tls_ca checks the certificates of --addresses: with --listen give it to the env servers, and here "
            "--tls_cert and --tls_key"
        )
    if not flags.listen and (flags.max_streams or flags.tls_cert or flags.tls_key):
        raise InputError("--max_streams, --tls_cert and --tls_key are for --listen: give that too, or leave them out")
    if not (flags.listen or flags.addresses) and (flags.token_file or flags.tls_ca or flags.insecure):
        raise InputError(
            "--token_file, --tls_ca and --insecure are for env servers started elsewhere: give --addresses or --listen "
            "too, or leave them out"
        )
    if not widths_known:
        return flags
    check_widths(flags.group_width, flags.batch_width)
    queue_width = flags.queue_width or max(flags.group_width, flags.batch_width)
    if queue_width < flags.batch_width:
        raise InputError(f"--queue_width {queue_width} must be at least --batch_width {flags.batch_width}, or 0")
    if 0 < flags.inference_width < flags.group_width:
        raise InputError(
            f"--inference_width {flags.inference_width} must be at least --group_width {flags.group_width}, or 0: a "
            "group's rows are answered together"
        )
    return replace(flags, queue_width=queue_width, name=run_name("poly", flags))


def main() -> None:
    flags = command_line.parse(Flags, __doc__)
    with exit_with_message():
        train(flags) if flags.mode == "train" else test(validate(flags), make_env)


if __name__ == "__main__":
    main()
