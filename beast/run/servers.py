"""A learner's connections to env servers, whatever the agent.

`connect` starts env servers, or finds those that run or dial in. `make_feed` makes the feed of their environments.
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
from dataclasses import replace
from typing import Any, NamedTuple

try:
    import libbeast
except ModuleNotFoundError:
    sys.exit("PolyBeast needs its C++ part, libbeast: run `make libbeast`, or `pip install .`")

from beast.device import choose_device, keep_freed_memory
from beast.envs.handover import hand_over
from beast.envs.masks import MASK
from beast.envs.probe import probe_env
from beast.envs.rows import written_by
from beast.envs.spaces import EnvSpaces, action_shape_dtype, observation_field, spaces_by_name
from beast.errors import InputError, Unreachable
from beast.feeds.local_servers import LocalServers
from beast.feeds.remote import RemoteFeed
from beast.hosts import security, wire
from beast.hosts.throttle import RefusalLog
from beast.learn import ranks
from beast.run import checkpoint
from beast.run.console import tell
from beast.run.flags import env_arguments
from beast.run.training import Training, consumer_of

QUIET_SECONDS = 2.0  # before a line says which env server the learner waits for
CONNECT_SECONDS = 10.0  # a learner waits this long for a server at least, however short --env_timeout is
STREAMS_PER_SERVER = 2  # double buffering: one group steps while the other's actions are chosen
MAX_STREAMS = 64  # that dial in, by default

Validate = Callable[[Any, bool], Any]  # the agent's: flags, and whether the group width is known -> flags


class Connection(NamedTuple):
    """Env servers that run, and what they have."""

    flags: Any  # with the servers' environment and group width
    spaces: EnvSpaces
    hello: dict
    addresses: list[str]  # none where they dial in
    protection: dict  # token and certificate for libbeast
    servers: LocalServers | None = None  # that were started here
    listener: Any = None

    @property
    def num_streams(self) -> int:
        """Groups of environments; with a listener, the most at a time."""
        return STREAMS_PER_SERVER * len(self.addresses) or self.flags.max_streams or MAX_STREAMS


def connect(flags, validate: Validate, program, to_close: contextlib.ExitStack) -> Connection:
    """Start env servers, or find those that run or dial in, and ask them what they have. Raises InputError or
    Unreachable.

    Args:
        flags: of a class with ServerFlags and RunFlags, as they are before they are validated.
        validate: of the agent, raises InputError. What depends on the group width it leaves alone where that is not
            known.
        program: the module that serves environments, polybeast_env or a fork.
        to_close: ends the servers or the listener.
    """
    keep_freed_memory()  # before any thread starts
    flags = ranks.join(flags)
    to_close.enter_context(ranks.telling())
    flags = own_servers(flags)
    runs_servers = not (flags.addresses or flags.listen)
    validate(flags, runs_servers)
    for address in flags.addresses:
        security.is_local(address)  # raises where it is no address
    choose_device(flags.device, flags.amp)  # report a missing device before servers start
    addresses, servers, listener = list(flags.addresses), None, None
    protection = {
        "token": security.read_token(flags.token_file) if flags.token_file else "",
        "root_certificates": security.read_certificates(flags.tls_ca, "--tls_ca") if flags.tls_ca else b"",
        "insecure": flags.insecure,
    }
    if runs_servers:
        # An environment that cannot be used is reported here.
        script = os.path.abspath(program.__file__)
        if getattr(program.create_env, "__module__", program.__name__) != program.__name__:
            raise InputError(
                f"the create_env given is not that of {script}, which env servers run: edit create_env there, or start "
                "a copy of it yourself and give --addresses"
            )
        probed = probe_env(program.create_env, program.parse_flags(command_line(flags)))
        flags = replace(flags, env=probed.env_id)
        arguments = [
            # A step that hangs has taken --env_timeout already, and the learner waits for its server.
            *("--stuck_timeout", "5", "--gil_timeout", str(max(flags.env_timeout, wire.MAKING_SECONDS))),
            *(*command_line(flags), "--niceness", str(flags.server_niceness)),
            *(["--has_mask"] if MASK in probed.observations else []),
        ]
        hand_over(flags.env, script)
        servers = LocalServers(script, arguments, flags.num_servers, flags.max_env_restarts, tell)
        to_close.callback(servers.close)
        addresses = servers.addresses
    if flags.listen:
        listener = listen(flags)
        to_close.callback(listener.close)
        tell(f"waiting for env servers on {listener.address}: polybeast_env.py --learner {listener.address}")
        server, hello = "this env server", first_hello(flags, validate, listener)
    else:
        server, hello = f"the env server at {addresses[0]}", common_hello(flags, addresses, protection)
    flags, spaces = use_hello(flags, validate, server, hello)
    ranks.require_equal(spaces.comparable())
    if runs_servers:
        spaces = spaces._replace(whole=probed.whole)
    return Connection(flags, spaces, hello, addresses, protection, servers, listener)


def own_servers(flags):
    """The flags of this rank, with its share of the env servers and a port of its own to listen at. Raises InputError
    where there are fewer servers than ranks."""
    if ranks.size() == 1:
        return flags
    if flags.addresses:
        if len(flags.addresses) < ranks.size():
            what = f"--addresses has {len(flags.addresses)} env servers for {ranks.size()} ranks"
            raise InputError(f"{what}: each rank needs one of its own")
        flags = replace(flags, addresses=flags.addresses[ranks.number() :: ranks.size()])
    if flags.listen:
        host, _, port = flags.listen.rpartition(":")
        if not port.isdigit():
            raise InputError(
                f"--listen {flags.listen} with {ranks.size()} ranks: give host:port; each adds its local rank"
            )
        flags = replace(flags, listen=f"{host}:{int(port) + int(os.environ['LOCAL_RANK'])}")
    return flags


def make_feed(
    training: Training, connection: Connection, batch_width: int, max_policy_lag: int = 0
) -> tuple[RemoteFeed, list[Callable[[], None]]]:
    """The feed of these env servers, and the loops that have to run beside the agent's."""
    flags, servers, listener = connection.flags, connection.servers, connection.listener
    training.spaces = checkpoint.describe_spaces(connection.spaces)
    streams = [address for address in connection.addresses for _ in range(STREAMS_PER_SERVER)]
    min_streams = math.ceil(flags.min_envs * connection.num_streams - 1e-9)  # 0.28 * 50 is 14.000000000000002
    if listener:
        min_streams = max(min_streams, 1) if flags.max_streams else 1
    feed = RemoteFeed(
        consumer_of(training.learner, max_policy_lag), connection.spaces.action, streams, servers, listener,
        unroll_length=flags.unroll_length, group_width=flags.group_width, batch_width=batch_width,
        queue_width=flags.queue_width, inference_width=flags.inference_width, min_streams=min_streams,
        log=training.run.log, progress=training.page.read, seed=training.env_seed(0, 0), expected=connection.hello,
        env_timeout=flags.env_timeout,
        connect_timeout=max(flags.env_timeout, CONNECT_SECONDS) + wire.MAKING_SECONDS,
        max_env_restarts=flags.max_env_restarts, **connection.protection,
    )  # fmt: skip
    others = [feed.pool.run, feed.watch]
    if servers:
        others.append(lambda: servers.watch(feed.closed.is_set, training.run.log))
    return feed, others


def command_line(flags) -> list[str]:
    """The arguments of polybeast_env.py for these flags."""
    return [*env_arguments(flags), "--group_width", str(flags.group_width), *shlex.split(flags.server_arguments)]


def listen(flags):
    """A listener for env servers that dial in. Raises InputError where the address cannot be used."""
    token, tls = security.security(flags.listen, flags.token_file, flags.tls_cert, flags.tls_key, flags.insecure)
    key, certificate = tls or (b"", b"")
    security.allow_many_connections()
    try:
        return libbeast.EnvListener(
            flags.listen, token=token, certificate=certificate, key=key, env_timeout=flags.env_timeout,
            max_streams=flags.max_streams or MAX_STREAMS,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"--listen {flags.listen}: {error}") from error


def common_hello(flags, addresses: list[str], protection: dict) -> dict:
    """The hello that these env servers share. InputError where they differ, Unreachable for one without an answer."""
    timeout = max(flags.env_timeout, CONNECT_SECONDS)

    def ask(address: str, answer: Future) -> None:
        waiting = f"waiting for the env server at {address}, for {timeout:g} s at most (--env_timeout)"
        timer = threading.Timer(QUIET_SECONDS, tell, [waiting])
        timer.start()
        try:
            answer.set_result(dict(libbeast.handshake(address, timeout=timeout, **protection)))
        except ConnectionError as error:
            answer.set_exception(Unreachable(str(error)))
        except ValueError as error:
            answer.set_exception(InputError(str(error)))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            timer.cancel()

    answers: dict[str, Future] = {address: Future() for address in addresses}
    for item in answers.items():  # at once; Ctrl-C waits for none of them
        threading.Thread(target=ask, args=item, daemon=True).start()
    hellos = {address: answer.result() for address, answer in answers.items()}
    first = hellos[addresses[0]]
    for address, hello in hellos.items():
        for name in first:
            if hello[name] != first[name]:
                both = f"{address} has {name} {hello[name]}, {addresses[0]} has {first[name]}"
                raise InputError(wire.readable(f"{both}: start all env servers with the same flags"))
    return first


def first_hello(flags, validate: Validate, listener) -> dict:
    """The hello of the first env server that dials in and can be used. Those before it are refused and logged."""

    def refusal(hello: dict) -> str:
        try:
            use_hello(flags, validate, "this env server", hello)
        except InputError as error:
            return str(error)
        return ""

    log_refusals = RefusalLog(listener, tell)
    hello: dict = {}
    while not ranks.all_of(bool(hello)):  # nobody waits for another rank's env servers for long
        hello = hello or listener.first_hello(refusal, timeout=1.0) or {}
        log_refusals()
    return hello


def use_hello(flags, validate: Validate, server: str, hello: dict) -> tuple[Any, EnvSpaces]:
    """The flags with the environment and group width of a hello, and its spaces. Raises InputError, which calls the env
    server `server`, if it cannot be used."""
    # By identity: the default's own id means that environment where a user gives it.
    is_given = (flags.addresses or flags.listen) and flags.env is not type(flags).env
    given, served = ([each.rpartition(":")[2] for each in env.split(",")] for env in (flags.env, hello["env"]))
    if is_given and given != served:
        raise InputError(
            f"--env {flags.env}: {server} has {hello['env']}; start it with --env {flags.env}, or leave --env out of "
            "the learner's command"
        )
    flags = validate(replace(flags, env=hello["env"], group_width=hello["num_envs"]), True)
    observation_space, action_space = (wire.space_from_json(hello[f"{of}_space"]) for of in ("observation", "action"))
    has_final = any(name.startswith("final_obs/") for name in hello["fields"])
    frames = hello["frames_per_step"]
    spaces = EnvSpaces(spaces_by_name(observation_space), action_space, has_final, hello["env"], frames)
    if MASK not in spaces.observations:  # else the hello has the parts, and not how environments nest them
        spaces = spaces._replace(whole=observation_space)
    numbers = {name: (dtype, ()) for name, dtype in written_by("env").items()}
    expected = {f"obs/{name}": observation_field(space)[::-1] for name, space in spaces.observations.items()} | numbers
    sent = {n: field for n, field in hello["fields"].items() if n.startswith("obs/") or n in numbers}
    if expected != sent or hello["action"] != action_shape_dtype(action_space)[::-1]:
        text = f"{server} has spaces for which rows have {expected}, its rows have {sent}"
        raise InputError(wire.readable(f"{text}: it is no env server of Beast, or one of another version"))
    return flags, spaces
