"""Env servers that dial in to libbeast.EnvListener: processes of polybeast_env.py, and callers that lie."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ends
import grpc
import numpy as np
import psutil
import pytest
from attacks import attacks
from env_hosts import ROOT, Dialing, ServerProcess, make_certificate
from gymnasium.spaces import Box, Discrete
from pools import (
    LIMIT,
    NO_MEMORY,
    UNROLL_LENGTH,
    ZEROS,
    Learner,
    agent_that_remembers,
    check_contract,
    hello,
    row_of,
)
from programs import Program
from waiting import PATIENCE, wait_until

import libbeast
from beast.envs import rows
from beast.hosts import wire


class Caller:
    """An env server's end of one dialed stream."""

    def __init__(self, address: str, said: bytes = b"", *, token: str = "", name: str = "", method: str = wire.DIAL):
        """Says this hello, by default `hello()`; `name` is the stream's."""
        headers = [(wire.TOKEN_HEADER, f"Bearer {token}")] if token else []
        headers += [(wire.STREAM_HEADER, name)] if name else []
        self._dialed = address, said or hello(), headers, method
        self._player: threading.Thread | None = None
        self._dial()

    def _dial(self) -> None:
        address, said, headers, method = self._dialed
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        dial = self._channel.stream_stream(method, response_deserializer=wire.Array.FromString)
        self.call = dial(iter(self._out.get, None), timeout=PATIENCE, metadata=headers)
        self.send(said)

    def send(self, message: bytes) -> None:
        self._out.put(message)

    def accepted(self, *until: str) -> Caller:
        """Waits until the learner takes the stream; dials again while it gets ready, or answers one of `until`."""
        while wire.HELLO_HEADER not in dict(self.call.initial_metadata()):
            ended = self.end()
            assert ended[0] in ("UNAVAILABLE", "CANCELLED", *until), ended  # cancelled: the first listener just ended
            self.close()
            time.sleep(0.02)
            self._dial()
        return self

    def play(self, first: float = 0, count: float = np.inf, until: tuple[str, ...] = ()) -> Caller:
        """So many rows with the numbers from `first` on, in a thread, as the learner acts; then closes this side."""

        def answer():
            with contextlib.suppress(grpc.RpcError, StopIteration, AssertionError):
                self.accepted(*until).send(row_of(first, 0))
                for number in itertools.takewhile(lambda i: i < count, itertools.count(1)):
                    next(self.call)
                    self.send(row_of(first + number, 0, done=False))
                self._out.put(None)

        self._player = threading.Thread(target=answer, daemon=True)
        self._player.start()
        return self

    def end(self) -> tuple[str, str]:
        """The stream's status and its message, once the learner has ended it."""
        if self._player and self._player is not threading.current_thread():
            self._player.join()
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while True:
                next(self.call)
        return self.call.code().name, self.call.details()

    def close(self) -> None:
        self._out.put(None)
        self.call.cancel()
        self._channel.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


@contextlib.contextmanager
def listening(address: str, said: bytes | None = hello(), **options):
    """A listener that has had its first hello, or one that waits for it where `said` is None."""
    listener = libbeast.EnvListener(address, **{"env_timeout": LIMIT, **options})
    try:
        if said is not None:
            with Caller(listener.address, said, token=options.get("token", "")) as first:
                listener.first_hello()
                assert first.end()[0] == "UNAVAILABLE"
        yield listener
    finally:
        listener.close()


def learning(listener, **options) -> Learner:
    return Learner([], listener=listener, **options)


def one_env_server(directory, env: str, address: str, *flags: str) -> ServerProcess:
    """`polybeast_env.py` with one stream of one environment; it has this directory to itself."""
    directory.mkdir()
    return ServerProcess(directory, env, "--group_width", "1", "--max_streams", "1", *flags, learners=(address,))


class Lives:
    """Every rollout of a learner with one stream at each place, whose rows have to go on from the one before."""

    def __init__(self, learner: Learner):
        self.learner, self.last, self.numbers, self.count = learner, {}, {}, 0

    def take(self, count: int) -> None:
        for (env_outputs, _), _ in self.learner.rollouts(count):
            self.check(env_outputs)

    def take_all(self) -> None:
        while self.learner.queue.size():
            self.take(1)

    def check(self, env_outputs) -> None:
        observation, done, group, life = (np.asarray(env_outputs[i]) for i in (0, 2, 7, 8))
        assert (group == group[0, 0]).all() and (life == life[0, 0]).all()
        assert (np.diff(observation[:, 0]) == 1).all(), "of two streams"
        key = int(group[0, 0]), int(life[0, 0])
        if key in self.last:
            assert observation[0, 0] == self.last[key], "a rollout of this life was lost"
        else:
            assert done[0].all() and observation[0, 0] % 1000 == 0
        self.last[key] = observation[-1, 0]
        self.count += 1


# --------------------------------------------------------------------------------------------- what the learner gets


@pytest.mark.parametrize("width, num_streams", [(1, 1), (3, 2)])
def test_rollouts_of_streams_that_dialed_in_keep_the_contract(tmp_path, unix, width, num_streams):
    flags = ["--group_width", str(width), "--max_streams", str(num_streams)]
    env = "toy_envs:Counting-v0"
    with listening(unix, None, max_streams=num_streams) as listener:
        with ServerProcess(tmp_path, env, *flags, learners=(unix,)):
            spec = listener.first_hello()
            assert spec["env"] == env and spec["num_envs"] == width and spec["action"] == ("int64", ())
            options = {"agent": agent_that_remembers, "width": width, "state": NO_MEMORY, "min_streams": num_streams}
            with learning(listener, expected=spec, **options) as learner:
                check_contract(learner, width, num_streams)
                counters = learner.pool.counters()
    assert counters["streams_connected"] == counters["streams_come"] == num_streams and counters["restarts"] == 0


def test_a_caller_with_token_and_certificate_gets_in(tmp_path):
    cert, key = (path.read_bytes() for path in make_certificate(tmp_path, "IP:127.0.0.1"))
    token = tmp_path / "token"
    token.write_text("sesame\n")
    token.chmod(0o600)
    with listening("127.0.0.1:0", None, token="sesame", certificate=cert, key=key) as listener:
        flags = ["--token_file", str(token), "--tls_ca", str(tmp_path / "cert.pem")]
        with (
            Dialing(listener.address, token="sesame") as plain,
            Dialing(listener.address, token="SESAME", root_certificates=cert) as guess,
            one_env_server(tmp_path / "1", "toy_envs:Counting-v0", listener.address, *flags),
        ):
            assert listener.first_hello()["num_envs"] == 1
            with learning(listener) as learner:
                for _ in learner.rollouts(5):
                    pass
            wait_until(lambda: guess.dialer.failure)
            assert "UNAUTHENTICATED): the token is not the one of the learner's --token_file" in guess.dialer.failure
            wait_until(lambda: "UNAVAILABLE" in plain.text())


# ------------------------------------------------------------------------------------------------------- refusals

DIFFERENT = hello([("x", "float32", ()), ("y", "uint8", (2,))])


@pytest.mark.parametrize(
    "said, code, message",
    [
        (hello(num_envs=3), "FAILED_PRECONDITION", "has 3 environments instead of 1"),
        (hello(env="others"), "FAILED_PRECONDITION", 'has environment "others" instead of "lies"'),
        (hello(action_space="[7]"), "FAILED_PRECONDITION", "has the action space [7] instead of "),
        (DIFFERENT, "FAILED_PRECONDITION", "has 9 fields instead of 8"),
        (hello(protocol=99), "INVALID_ARGUMENT", f"speaks protocol 99, the learner protocol {wire.PROTOCOL}"),
        (b"\x0a", "INVALID_ARGUMENT", "not one of rpcenv.proto"),
        (row_of(0, 0), "INVALID_ARGUMENT", "first message is not its hello"),
        (wire.FromServer(error="no display").SerializeToString(), "INVALID_ARGUMENT", "no display"),
    ],
    ids=lambda value: value if isinstance(value, str) else "bytes",
)
def test_an_env_server_that_does_not_fit_is_told_both_values_and_the_others_go_on(unix, said, code, message):
    with listening(unix) as listener, learning(listener) as learner, Caller(unix) as honest:
        honest.accepted().play()
        lives = Lives(learner)
        lives.take(3)
        with Caller(unix, said) as other:
            refusal = other.end()
            assert refusal[0] == code and message in refusal[1], refusal
        lives.take(20)
        told = listener.refusals()[0] + learner.log
        assert any(message in line for line in told), told
        assert honest.call.is_active() and learner.pool.counters()["streams_connected"] == 1


def test_a_stream_that_is_refused_does_not_say_how_many_frames_a_step_the_others_have(unix):
    with listening(unix, None) as listener:
        with Caller(unix):
            expected = listener.first_hello()
        del expected["frames_per_step"]  # unknown to who expects it
        with learning(listener, expected=expected) as learner:
            with Caller(unix, hello(num_envs=3, frames_per_step=4)) as other:
                with pytest.raises(AssertionError, match="has 3 environments instead of 1"):
                    other.accepted()
            with Caller(unix, hello(frames_per_step=2)) as right:
                right.accepted().play()
                Lives(learner).take(3)
            with Caller(unix, hello(frames_per_step=4)) as late:
                assert "has 4 frames a step instead of 2" in late.end()[1]


def test_a_wrong_token_or_method_is_refused_before_a_message_and_the_honest_go_on(unix):
    with listening(unix, token="sesame") as listener, learning(listener) as learner:
        with Caller(unix, token="sesame") as honest:
            honest.play()
            lives = Lives(learner)
            lives.take(3)
            for token in ("", "sesam", "sesame!", "SESAME"):
                with Caller(unix, b"x" * 10_000_000, token=token) as other:
                    assert other.end() == ("UNAUTHENTICATED", "the token is not the one of the learner's --token_file")
            with Caller(unix, token="sesame", method=wire.STREAM) as lost:
                assert lost.end() == (
                    "UNIMPLEMENTED",
                    f"this is a learner that env servers dial: it serves no {wire.STREAM}",
                )
            refusals, num_more = listener.refusals()
            assert len(refusals) == 5 and num_more == 0 and all("refused unix:" in line for line in refusals)
            for _ in range(30):
                with Caller(unix) as other:
                    other.end()
            refusals, num_more = listener.refusals()
            assert len(refusals) == 20 and num_more == 10
            assert listener.refusals() == ([], 0)
            lives.take(20)
            assert honest.call.is_active()


def test_who_guesses_tokens_has_to_wait_and_streams_go_on(unix):
    with listening(unix, token="sesame") as listener, learning(listener) as learner:
        with Caller(unix, token="sesame") as honest:
            honest.play()
            lives = Lives(learner)
            lives.take(3)
            answers = []
            for number in range(25):
                with Caller(unix, token=f"guess {number}") as guess:
                    answers.append(guess.end()[0])
            assert answers[:20] == ["UNAUTHENTICATED"] * 20 and answers[-1] == "RESOURCE_EXHAUSTED", answers
            with Caller(unix, token="sesame", name="right") as right:  # nothing tells the right one from others
                assert right.end()[1] == "too many wrong tokens came from there: dial again in a second"
            lives.take(3)
            time.sleep(1.1)
            with Caller(unix, token="sesame") as right:
                right.accepted()


def test_a_full_learner_says_so_and_a_freed_place_is_given_away(unix):
    with listening(unix, max_streams=2) as listener, learning(listener) as learner:
        callers = [Caller(unix).accepted().play(1000 * index) for index in range(2)]
        lives = Lives(learner)
        with Caller(unix) as third:
            code, message = third.end()
        assert code == "RESOURCE_EXHAUSTED" and "all 2 places of the learner are taken" in message
        lives.take(10)
        callers[0].close()
        wait_until(lambda: learner.pool.counters()["streams_connected"] == 1 or lives.take_all())
        with Caller(unix).play(7000):
            while all(last < 7000 for last in lives.last.values()):
                lives.take(1)
        callers[1].close()
    assert {group for group, _ in lives.last} == {0, 1} and {life for _, life in lives.last} == {0, 1}


def test_fewer_streams_than_min_streams_wait_until_one_more_is_there(unix):
    with listening(unix, max_streams=3) as listener, learning(listener, min_streams=2) as learner:
        lives = Lives(learner)
        with Caller(unix).play() as first:
            wait_until(lambda: learner.pool.counters()["streams_connected"] == 1)
            time.sleep(0.2)
            assert learner.queue.size() == 0 and learner.pool.count() == 0
            with Caller(unix).play(5000):
                lives.take(20)
                assert set(lives.last) == {(0, 0), (1, 0)}
            wait_until(lambda: learner.pool.counters()["streams_connected"] == 1 or lives.take_all())
            time.sleep(0.2)
            lives.take_all()
            count = learner.pool.count()
            time.sleep(0.2)
            assert learner.pool.count() == count and learner.queue.size() == 0
            assert first.call.is_active()
            with Caller(unix).play(8000):
                lives.take(20)


def test_streams_that_leave_while_they_wait_for_others_are_counted_no_more(unix):
    with listening(unix, max_streams=3) as listener, learning(listener, min_streams=3) as learner:

        def streams() -> int:
            return learner.pool.counters()["streams_connected"]

        waiting = [Caller(unix).play(1000 * index) for index in range(2)]
        wait_until(lambda: streams() == 2)
        time.sleep(0.2)  # by now the pool has read their first rows
        for caller in waiting:
            caller.close()
        wait_until(lambda: streams() == 0)
        with Caller(unix).play(5000):
            wait_until(lambda: streams() == 1)
            time.sleep(0.2)
            assert learner.pool.count() == 0
        assert len(learner.log) == 2 and all("has left" in line for line in learner.log), learner.log


def test_streams_that_waited_for_others_end_the_run_where_inference_cannot_take_them(unix):
    said = hello(num_envs=2)
    with listening(unix, said, max_streams=2) as listener:
        batcher = libbeast.DynamicBatcher(maximum_batch_size=1)
        pool = libbeast.ActorPool(5, libbeast.BatchingQueue(), batcher, [], (), listener=listener, min_streams=2)
        with ThreadPoolExecutor() as executor, Caller(unix, said) as one, Caller(unix, said) as other:
            ended = executor.submit(pool.run)
            for caller in (one, other):
                caller.accepted()
            for caller in (one, other):  # a row may end the run before another stream is accepted
                caller.send(row_of(0, 0, num_envs=2))
            with pytest.raises(ValueError, match="2 rows exceed the maximum batch size of 1"):
                ended.result(LIMIT)


def test_min_streams_above_the_listeners_places_is_refused(unix):
    with listening(unix, None, max_streams=2) as listener:
        with pytest.raises(ValueError, match="min_streams is 3, and the listener takes 2 streams at most"):
            learning(listener, min_streams=3)


def test_a_negative_max_env_restarts_is_refused_with_a_listener_too(unix):
    with listening(unix, None) as listener:
        with pytest.raises(ValueError, match="max_env_restarts is -1, must be 0 or more"):
            learning(listener, max_env_restarts=-1)


@pytest.mark.on_demand  # waits that long
def test_a_connection_takes_calls_for_half_a_minute_only_and_its_stream_goes_on(unix):
    states = []
    with listening(unix, token="sesame") as listener, learning(listener) as learner:
        lives, began = Lives(learner), time.monotonic()
        with Caller(unix, token="sesame").play() as honest, grpc.insecure_channel(unix) as refused:
            refused.subscribe(states.append)
            while time.monotonic() < began + 36:  # half a minute and its jitter
                with pytest.raises(grpc.RpcError):
                    next(refused.stream_stream(wire.DIAL)(iter([]), timeout=PATIENCE))
                lives.take_all()
                time.sleep(0.2)
            lives.take(20)
            assert honest.call.is_active() and set(lives.last) == {(0, 0)}
    ready = states.index(grpc.ChannelConnectivity.READY)
    assert grpc.ChannelConnectivity.IDLE in states[ready:], "a caller that is refused keeps its connection"


# -------------------------------------------------------------------------------------------------- coming and going


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_completed_rollout_is_lost_with_a_server_and_its_place_is_free(tmp_path, unix, number):
    """While one waits for room in the full queue, too."""
    env = "toy_envs:Counting-v0"
    with listening(unix, None, max_streams=1) as listener:
        with one_env_server(tmp_path / "1", env, unix) as server:
            listener.first_hello()
            with learning(listener, agent=agent_that_remembers, state=NO_MEMORY) as learner:
                received, seeds = [], {}

                def take(count: int) -> None:
                    for (env_outputs, _), _ in learner.rollouts(count):
                        number, life = np.asarray(env_outputs[0]["obs"])[..., 0], np.asarray(env_outputs[8])
                        assert (number == number[0, 0]).all() and (life == life[0, 0]).all()
                        assert (np.asarray(env_outputs[7]) == 0).all()
                        received.append(int(life[0, 0]))
                        assert seeds.setdefault(received[-1], number[0, 0]) == number[0, 0]

                take(10)
                wait_until(lambda: learner.pool.count() == 12 * UNROLL_LENGTH)  # one is queued, one waits
                server.process.send_signal(number)
                server.exit_code()
                time.sleep(0.2)
                take(2)
                wait_until(lambda: learner.pool.counters()["streams_connected"] == 0)
                assert received == [0] * 12 and learner.pool.count() // UNROLL_LENGTH == 12
                with one_env_server(tmp_path / "2", env, unix):
                    take(3)
                assert received[12:] == [1] * 3 and seeds[0] != seeds[1]
                assert not learner.errors
            if number == signal.SIGTERM:
                assert server.process.returncode == 0


@pytest.mark.parametrize("after", range(3 * UNROLL_LENGTH))
def test_whatever_row_a_stream_ends_after_its_completed_rollouts_arrive(unix, after):
    with listening(unix) as listener, learning(listener) as learner:
        with Caller(unix).play(0, count=after + 1) as caller:  # the first row is none of its steps
            completed = after // UNROLL_LENGTH
            lives = Lives(learner)
            lives.take(completed)
            assert caller.end()[0] == "CANCELLED"
            wait_until(lambda: learner.pool.counters()["streams_connected"] == 0)
            assert learner.queue.size() == 0 and learner.pool.count() == after
            is_rest = int(after % UNROLL_LENGTH > 0)
            assert learner.pool.counters()["dropped_rollouts"] in {is_rest, 1}


STATES = ["the agent thinks", "the queue is full", "it waits for others", "it waits for a row"]


@pytest.mark.parametrize("state", STATES)
def test_a_stream_that_comes_back_takes_the_place_of_its_half_open_predecessor(unix, state):
    """Whatever that waits for. Its connection is open all the time, as that of a host that lost its power."""
    may_answer, asked = threading.Event(), threading.Event()

    def agent(env_outputs, agent_state):
        asked.set()
        assert state != "the agent thinks" or may_answer.wait(LIMIT)
        return (np.zeros(tuple(env_outputs[1].shape), np.int64),), agent_state

    options = {"min_streams": 2} if state == "it waits for others" else {}
    with listening(unix, max_streams=2) as listener, learning(listener, agent=agent, **options) as learner:
        lives = Lives(learner)
        callers = [Caller(unix, name="a/0")]
        if state == "it waits for a row":
            callers[0].accepted()
        else:
            callers[0].play()
        if state == "the agent thinks":
            assert asked.wait(LIMIT)
        elif state == "the queue is full":
            wait_until(lambda: learner.pool.count() == 2 * UNROLL_LENGTH, learner.pool.count)
        elif state == "it waits for others":
            wait_until(lambda: learner.pool.counters()["streams_connected"] == 1)
            time.sleep(0.1)
        for life in range(1, 6):
            callers.append(Caller(unix, name="a/0").play(1000 * life))
            time.sleep(0.2)
        assert callers[0].end()[0] == "CANCELLED"
        may_answer.set()
        with Caller(unix, name="b/0").play(50_000, until=("RESOURCE_EXHAUSTED",)):
            while not any(last > 50_000 for last in lives.last.values()):
                lives.take(1)
            lives.take(50)
        assert not learner.errors and not learner.agent_errors, learner.errors + learner.agent_errors
        assert learner.pool.counters()["streams_connected"] <= 2
        for caller in callers:
            caller.close()


def test_with_one_place_a_stream_that_comes_back_is_told_to_dial_again(unix):
    with listening(unix, max_streams=1) as listener, learning(listener) as learner:
        with Caller(unix, name="a/0").accepted(), Caller(unix, name="b/0") as other:
            assert other.end()[0] == "RESOURCE_EXHAUSTED"
            answers = []
            while not answers or answers[-1] != "taken":
                with Caller(unix, name="a/0") as back:
                    headers = dict(back.call.initial_metadata())
                    answers.append("taken" if wire.HELLO_HEADER in headers else back.end()[0])
                    if answers[-1] == "taken":
                        back.play(3000)
                        Lives(learner).take(3)
            assert set(answers) <= {"UNAVAILABLE", "taken"}


def test_a_stream_that_comes_back_often_is_told_to_dial_again_until_its_predecessor_has_ended(unix):
    """That waits for the learner's queue, so nothing tells it that its stream was cancelled."""
    with listening(unix, max_streams=1) as listener, learning(listener) as learner, Caller(unix, name="a/0") as first:
        first.play()
        wait_until(lambda: learner.pool.count() == 2 * UNROLL_LENGTH, learner.pool.count)
        for _ in range(3):
            with Caller(unix, name="a/0") as back:
                assert back.end()[0] == "UNAVAILABLE"


def test_a_caller_without_a_streams_name_or_the_token_cannot_end_it(unix):
    with listening(unix, token="sesame") as listener, learning(listener) as learner:
        with Caller(unix, token="sesame", name="a/0").play() as honest:
            lives = Lives(learner)
            lives.take(3)
            for token, name in (("", "a/0"), ("guess", "a/0"), ("sesame", "a/1"), ("sesame", "")):
                with Caller(unix, token=token, name=name) as other:
                    if token == "sesame":
                        other.accepted()
                    else:
                        assert other.end()[0] == "UNAUTHENTICATED"
            with Caller(unix, b"nonsense", token="sesame", name="a/0") as other:
                assert other.end()[0] == "INVALID_ARGUMENT"
            lives.take(20)
            assert honest.call.is_active()


# ------------------------------------------------------------------------------------------------------ the beginning


def test_an_address_that_is_taken_or_a_certificate_that_is_bad_is_told(unix):
    with listening("127.0.0.1:0", None) as listener:
        with pytest.raises(ValueError, match=f"cannot listen on {listener.address}: Address already in use"):
            libbeast.EnvListener(listener.address)
        with pytest.raises(ValueError, match="the certificate is bad"):
            libbeast.EnvListener("127.0.0.1:0", certificate=b"none", key=b"none")
        for half in ("certificate", "key"):
            with pytest.raises(ValueError, match="certificate and key go together"):
                libbeast.EnvListener("127.0.0.1:0", **{half: b"some"})
        with pytest.raises(ValueError, match="max_streams is 0"):
            libbeast.EnvListener("127.0.0.1:0", max_streams=0)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "[::]"])
def test_a_host_is_listened_to_at_all_its_addresses(host):
    with listening(f"{host}:0", None) as listener:
        port = listener.address.rpartition(":")[2]
        has_ipv6 = host != "localhost" and "lo" in Path("/proc/net/if_inet6").read_text()
        for address in ("127.0.0.1", "[::1]") if has_ipv6 else ("127.0.0.1",):
            with Caller(f"{address}:{port}") as caller:
                listener.first_hello()
                assert caller.end()[0] == "UNAVAILABLE" and "dial again" in caller.end()[1]


def test_a_socket_in_use_is_left_alone_and_an_abandoned_one_is_replaced(tmp_path, unix):
    with listening(unix):
        with pytest.raises(ValueError, match="Address already in use"):
            libbeast.EnvListener(unix)
        with Caller(unix) as caller:
            assert caller.end()[0] == "UNAVAILABLE"
    path = tmp_path / "learner"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    with listening(unix):
        pass
    path.unlink(missing_ok=True)
    path.write_text("of a user")
    with pytest.raises(ValueError, match="Address already in use"):
        libbeast.EnvListener(unix)
    assert path.read_text() == "of a user"
    for address in ("unix:", f"unix:/{'x' * 200}"):
        with pytest.raises(ValueError, match="a socket's path has 1 to 107 bytes"):
            libbeast.EnvListener(address)


def test_a_listener_refuses_a_useless_first_hello_and_takes_the_next_one(unix):
    def check(spec) -> str:
        return "" if spec["env"] == "lies" else f"{spec['env']} is of no use"

    with listening(unix, None) as listener:
        with Caller(unix, hello(env="others")) as other, Caller(unix, b"nonsense") as liar:
            assert listener.first_hello(check, timeout=2.0) is None
            assert other.end() == ("FAILED_PRECONDITION", "others is of no use")
            assert liar.end()[0] == "INVALID_ARGUMENT"
        refusals, num_more = listener.refusals()
        assert sorted(line.split(": ")[1] for line in refusals) == ["its hello cannot be used", "others is of no use"]
        assert all(line.startswith("refused unix:") for line in refusals) and num_more == 0
        with Caller(unix) as first, Caller(unix, hello(env="others")) as waiting:
            wait_until(lambda: listener.first_hello(check, timeout=1.0))
            assert first.end()[0] == "UNAVAILABLE"
            assert waiting.end()[0] in ("UNAVAILABLE", "FAILED_PRECONDITION")


def test_at_most_64_hellos_wait_to_be_looked_at(unix):
    with listening(unix, None), contextlib.ExitStack() as stack:
        callers = []
        for _ in range(70):
            callers.append(stack.enter_context(Caller(unix)))
            time.sleep(0.02)  # or they are too many that have not yet said it
        wait_until(lambda: sum(caller.call.done() for caller in callers) == 6, seconds=20)
        ended = [caller.end() for caller in callers if caller.call.done()]
        assert ended == [("RESOURCE_EXHAUSTED", "too many say hello at a time")] * 6


def test_an_error_of_the_check_or_the_end_leaves_no_caller_waiting(unix):
    with listening(unix, None) as listener, Caller(unix) as first, Caller(unix) as second:
        with pytest.raises(ZeroDivisionError):
            listener.first_hello(lambda spec: 1 / 0)
        listener.close()
        assert {first.end()[0], second.end()[0]} <= {"CANCELLED", "UNAVAILABLE"}


@pytest.mark.parametrize("with_pool", [False, True])
def test_a_closed_listener_frees_its_address(unix, with_pool):
    for address in ("127.0.0.1:0", unix):
        with listening(address) as former:
            if with_pool:
                with learning(former) as learner, Caller(former.address).play():
                    Lives(learner).take(1)
        assert not Path(unix.removeprefix("unix:")).exists()
        with listening(former.address) as listener, learning(listener) as learner, Caller(listener.address).play():
            lives = Lives(learner)
            lives.take(1)
            former.close()  # which leaves the other one alone
            lives.take(1)


def test_a_closed_listener_takes_no_pool(unix):
    with listening(unix) as listener:
        listener.close()
        with learning(listener) as learner:
            error = learner.wait()
    assert isinstance(error, ValueError) and "the listener is closed: make another one" in str(error)


def test_a_second_pool_of_a_listener_is_refused_and_the_first_goes_on(unix):
    with listening(unix) as listener, learning(listener) as first, Caller(unix).play():
        lives = Lives(first)
        lives.take(1)
        with learning(listener) as second:
            error = second.wait()
        assert isinstance(error, ValueError) and "another pool takes streams of this listener: stop it" in str(error)
        lives.take(5)
        with pytest.raises(RuntimeError, match="a pool takes streams of this listener"):
            listener.close()
    with listening(unix) as listener:
        for _ in range(2):  # one after the other
            with learning(listener) as learner, Caller(unix).play():
                Lives(learner).take(1)


FEW_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <string.h>

static int num_left = 1 << 30;
void allow_threads(int count) { num_left = count; }

// Refuses threads of libbeast beyond the allowed number; those of gRPC abort the process.
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
  void *callers[3];  // this function, std::thread, and who makes that
  Dl_info caller;
  const int is_known = backtrace(callers, 3) == 3 && dladdr(callers[2], &caller);
  if (is_known && strstr(caller.dli_fname, "libbeast") && --num_left < 0) return EAGAIN;
  return real(thread, attributes, run, argument);
}
"""
WITHOUT_THREADS = """
import ctypes, sys, libbeast
allow_threads = ctypes.CDLL(None).allow_threads
for count in range(100):
    allow_threads(count)
    try:
        libbeast.EnvListener(sys.argv[1]).close()
        break
    except RuntimeError as error:
        assert "Resource temporarily unavailable" in str(error), error
print(count, "threads are enough")
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles a library to preload")
def test_a_listener_without_threads_is_an_error_and_frees_its_address(tmp_path, unix):
    (tmp_path / "few.c").write_text(FEW_THREADS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "few.so", tmp_path / "few.c", "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS, unix],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "few.so")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 3, "two of its own, and one at least for gRPC's events"


def test_a_listener_whose_pool_runs_is_not_closed(unix):
    with listening(unix) as listener, learning(listener) as learner, Caller(unix).play():
        lives = Lives(learner)
        lives.take(3)
        with pytest.raises(RuntimeError, match="a pool takes streams of this listener: stop it first"):
            listener.close()
        lives.take(3)


def test_a_unix_socket_is_its_owners_alone(unix):
    with listening(unix, None):
        assert stat.S_IMODE(os.stat(unix.removeprefix("unix:")).st_mode) == 0o700


def test_a_pool_does_not_run_before_the_first_hello(unix):
    with listening(unix, None) as listener, learning(listener) as learner:
        error = learner.wait()
    assert isinstance(error, ValueError) and "no first_hello(): call that before the pool's run()" in str(error)


def test_a_compressed_hello_is_refused_before_it_grows(unix):
    with listening(unix, None) as listener:
        with grpc.insecure_channel(unix, compression=grpc.Compression.Gzip) as channel:
            call = channel.stream_stream(wire.DIAL)(iter([hello() + ZEROS]), timeout=PATIENCE)
            with pytest.raises(grpc.RpcError):
                next(call)
        assert "not one of rpcenv.proto" in call.details() and "not one of rpcenv.proto" in listener.refusals()[0][0]


def test_callers_that_say_nothing_do_not_keep_the_listener_from_ending(unix):
    with listening(unix, None) as listener:
        channel = grpc.insecure_channel(unix)
        never: queue.SimpleQueue = queue.SimpleQueue()
        silent = [channel.stream_stream(wire.DIAL)(iter(never.get, None)) for _ in range(60)]
        with Caller(unix) as first:
            listener.first_hello()
            first.end()
        with learning(listener) as learner, Caller(unix) as honest:
            honest.play()
            Lives(learner).take(3)
        for _ in silent:
            never.put(None)
        channel.close()


# ------------------------------------------------------------------------------------------------------------ the end


@ends.in_every_way_of_ending
def test_the_interpreter_exits_cleanly_with_a_listening_pool_in_any_state(unix, quick, how, code):
    process = ends.start(ends.ENDS, "listens", unix, how)
    with Dialing(unix, max_streams=2):
        ends.check_end(process, how, code)


@pytest.mark.parametrize("how", ["a pool that runs", "a thread in first_hello", "nothing"])
def test_the_interpreter_exits_with_a_listener_that_nobody_calls(unix, how):
    process = ends.start(ends.ENDS, "listens", unix, how)
    assert process.wait(timeout=LIMIT) == 0, process.stderr.read()
    errors = process.stderr.read()
    assert "Fatal" not in errors and "terminate called" not in errors, errors


def test_ctrl_c_ends_a_listener_that_nobody_calls(unix):
    process = ends.start(ends.ENDS, "listens", unix, "forgotten")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT and errors.strip().endswith("KeyboardInterrupt"), errors


@pytest.mark.parametrize("how", ["exit", "dropped", "stop", "close"])
def test_a_forked_child_ends_and_its_parents_dialed_streams_go_on(unix, quick, how):
    process = ends.start(ends.FORKS, "listens", unix, how)
    with Dialing(unix):
        ends.check_fork(process)


IN_A_CHILD = """
import os, socket, sys, libbeast
child = os.fork()
if child == 0:
    listener = libbeast.EnvListener(sys.argv[1])
    listener.close()
    try:
        socket.socket(socket.AF_UNIX).connect(sys.argv[1].removeprefix("unix:"))
    except FileNotFoundError:
        os._exit(7)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_listener_that_a_forked_child_made_is_closed_there(unix):
    command = [sys.executable, "-c", IN_A_CHILD, unix]
    done = subprocess.run(command, timeout=LIMIT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 7, "the address is free"


# ------------------------------------------------------------------------------------------- many connections

FEW_DESCRIPTORS = ["bash", "-c", 'ulimit -n 256; exec "$@"', "limited"]


@contextlib.contextmanager
def mute_connections(address: str, count: int, source: str = "127.0.0.1"):
    """So many connections from there that never say anything, as far as the listener takes them."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), 1, (source, 0)))
        yield


@contextlib.contextmanager
def learner_with_few_descriptors():
    """The address and the process of a listening learner with 256 descriptors."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = ends.start(ends.ENDS, "listens", address, "unanswered", FEW_DESCRIPTORS)
    try:
        yield address, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("begins", ["before", "after"])
def test_more_mute_connections_than_there_are_descriptors_shut_nobody_out(begins):
    """Whether they come before the learner has had its first stream or after."""
    with contextlib.ExitStack() as stack:
        address, process = stack.enter_context(learner_with_few_descriptors())
        if begins == "after":
            stack.enter_context(Caller(address).accepted())
        with mute_connections(address, 400):
            time.sleep(1)
            assert len(os.listdir(f"/proc/{process.pid}/fd")) <= 256 - 256 // 8, "none are left for a checkpoint"
            with Caller(address) as honest:
                is_taken = threading.Event()
                threading.Thread(target=lambda: honest.accepted() and is_taken.set(), daemon=True).start()
                assert is_taken.wait(60), "an honest env server is shut out"  # 5 seconds, and a pause or two


def test_a_quarter_of_all_descriptors_is_for_connections_without_a_hello_which_yield_to_new_ones():
    with contextlib.ExitStack() as stack:
        address, process = stack.enter_context(learner_with_few_descriptors())
        first = stack.enter_context(Caller(address).accepted())  # it has said its hello, so it stays
        host, port = address.rsplit(":", 1)

        def connect(source: str) -> socket.socket:
            connection = stack.enter_context(socket.create_connection((host, int(port)), 1, (source, 0)))
            # Whoever begins HTTP/2 may be idle for 20 seconds, but mute for 5 only.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0" + bytes(4))  # no settings
            return connection

        def is_closed(connection: socket.socket) -> bool:
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.01)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(1000):  # of HTTP/2
                        pass
                return True
            return False

        def num_connections() -> int:
            return sum(bool(each.raddr) for each in psutil.Process(process.pid).net_connections("tcp"))

        few = [connect("127.0.0.3") for _ in range(5)]
        many = [connect("127.0.0.2") for _ in range(100)]
        yielded = 5 + 100 - 256 // 4
        wait_until(lambda: is_closed(many[yielded - 1]) and num_connections() == 1 + 64)
        assert [is_closed(each) for each in few] == [False] * 5, "they are not those of whom there are most"
        assert [is_closed(each) for each in (many[0], many[yielded], many[-1])] == [True, False, False]
        assert first.call.is_active()


def test_two_sources_that_renew_mute_connections_shut_nobody_out():
    with contextlib.ExitStack() as stack:
        address, _ = stack.enter_context(learner_with_few_descriptors())
        attacks.renewed_connections(address, stack, seconds=2)
        began = time.monotonic()
        stack.enter_context(Caller(address).accepted())
        assert time.monotonic() - began < 10, "half a minute and longer where they keep what they have"


# ---------------------------------------------------------------------------------------------------------- polybeast


def rows_of(directory: Path) -> list[str]:
    """The metrics that the learner there has written."""
    metrics = directory / "run" / "metrics.csv"
    return metrics.read_text().splitlines()[1:] if metrics.exists() else []


@contextlib.contextmanager
def training(script: str, directory: Path, address: str, flags: str):
    """A learner's process that listens there and has written metrics of a first server's, that server, and what the
    learner has printed so far."""
    words = [str(ROOT / script), "--root", str(directory), "--name", "run", "--no_tensorboard"]
    words += ["--listen", address, "--log_steps", "300", *flags.split()]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    learner = Program(words, cwd=Path.cwd(), env=environment, output=directory / "printed")
    try:
        with one_env_server(directory / "1", "CartPole-v1", address) as first:
            wait_until(lambda: rows_of(directory))
            yield learner, first, learner.text
    finally:
        learner.kill()


def test_polybeast_trains_with_servers_that_dial_in_and_leave_and_others_do_not_fill_its_log(tmp_path, unix):
    flags = "--total_steps 1000000000 --unroll_length 8 --hidden_size 64 --core_size 32 --batch_width 1"
    with training("polybeast.py", tmp_path, unix, flags) as (learner, first, output):
        for _ in range(60):
            with Caller(unix) as other:
                assert other.end()[0] == "FAILED_PRECONDITION"
        with one_env_server(tmp_path / "2", "CartPole-v1", unix):
            wait_until(lambda: "2 streams of env servers now" in output())
            first.process.terminate()
            assert first.exit_code() == 0
            count = len(rows_of(tmp_path))
            wait_until(lambda: len(rows_of(tmp_path)) >= count + 3 or learner.poll() is not None, output)
            learner.terminate()
            assert learner.wait(PATIENCE) == 0, output()
    assert f"waiting for env servers on {unix}: polybeast_env.py --learner {unix}" in output()
    assert "Traceback" not in output(), output()
    assert 1 <= output().count('has environment "lies" instead of "CartPole-v1"') <= 20, output()


def test_r2d2_trains_with_servers_that_dial_in_one_of_which_is_killed(tmp_path, unix):
    flags = "--max_streams 2 --total_steps 1000000000 --unroll_length 4 --stride 4 --burn_in 4 --trained 8"
    flags += " --batch_width 4 --min_fill 200 --hidden_size 64 --core_size 16 --head_size 16 --replay_gb 0.01"
    with training("r2d2.py", tmp_path, unix, flags) as (learner, first, output):
        with one_env_server(tmp_path / "2", "CartPole-v1", unix):
            wait_until(lambda: "2 streams of env servers now" in output())
            first.process.kill()
            count = len(rows_of(tmp_path))
            wait_until(lambda: len(rows_of(tmp_path)) >= count + 2 or learner.poll() is not None, output)
            learner.terminate()
            assert learner.wait(PATIENCE) == 0, output()
    assert f"waiting for env servers on {unix}: polybeast_env.py --learner {unix}" in output()
    assert "2 groups of 1 environments, replay of" in output() and "(--replay_ratio 4)" in output(), output()
    assert "Traceback" not in output(), output()


def test_a_taken_address_is_one_line_of_polybeast(tmp_path, unix, run_main):
    polybeast = pytest.importorskip("polybeast")
    with listening("127.0.0.1:0", None) as listener:
        code, output = run_main(polybeast, "--root", str(tmp_path), "--listen", listener.address)
    assert code == 1 and f"--listen {listener.address}: cannot listen on" in output and "Traceback" not in output


def test_polybeast_refuses_callers_of_no_use_and_takes_the_environments_of_the_next(tmp_path, unix, capsys):
    polybeast, servers = pytest.importorskip("polybeast"), pytest.importorskip("beast.run.servers")
    flags = polybeast.Flags(env="CartPole-v1", listen=unix, total_steps=1)
    found: queue.SimpleQueue = queue.SimpleQueue()
    with listening(unix, None, token="sesame") as listener:
        threading.Thread(
            target=lambda: found.put(servers.first_hello(flags, polybeast.validate, listener)), daemon=True
        ).start()
        bad_spaces = hello(env="CartPole-v1", observation_space="{}")
        for said, message in [
            (hello(), "--env CartPole-v1: this env server has lies; start it with --env CartPole-v1"),
            (bad_spaces, "no space is described by '{}'"),
        ]:
            with Caller(unix, said, token="sesame") as other:
                code, details = other.end()
                assert code == "FAILED_PRECONDITION" and message in details, details
        for _ in range(40):
            with Caller(unix) as stranger:
                assert stranger.end()[0] in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")  # after 20 of one host
        token = tmp_path / "token"
        token.write_text("sesame")
        token.chmod(0o600)
        with one_env_server(tmp_path / "1", "CartPole-v1", unix, "--token_file", str(token)):
            said = found.get(timeout=PATIENCE)
    flags, spaces = servers.use_hello(flags, polybeast.validate, "the env server", said)
    assert flags.env == said["env"] == "CartPole-v1" and flags.group_width == 1 and spaces.action.n == 2
    lines = capsys.readouterr().err.splitlines()
    assert all("refused" in line for line in lines) and len(lines) <= 20, lines
    assert "this env server has lies" in lines[0] and "no space is described" in lines[1]


def test_a_first_hello_whose_rows_are_not_those_of_the_table_of_fields_is_refused_and_the_next_is_taken(
    monkeypatch, unix, capsys
):
    polybeast, servers = pytest.importorskip("polybeast"), pytest.importorskip("beast.run.servers")
    monkeypatch.setitem(rows.ROW_FIELDS, "lives", rows.RowField("int32", "env"))
    spaces = {
        "observation_space": wire.space_to_json(Box(-1, 1, (2,), np.float32)),
        "action_space": wire.space_to_json(Discrete(2)),
        "action": wire.Field(dtype="int64"),
    }

    def saying(dtype: str | None, *shape: int) -> bytes:
        message = wire.FromServer.FromString(hello([("obs/obs", "float32", (2,))], **spaces))
        *_, lives = message.hello.fields
        assert lives.name == "lives"
        if dtype is None:
            message.hello.fields.remove(lives)
        else:
            lives.CopyFrom(wire.Field(name="lives", dtype=dtype, shape=shape))
        return message.SerializeToString()

    found: queue.SimpleQueue = queue.SimpleQueue()
    with listening(unix, None) as listener:
        arguments = polybeast.Flags(listen=unix), polybeast.validate, listener
        threading.Thread(target=lambda: found.put(servers.first_hello(*arguments)), daemon=True).start()
        for said in (saying(None), saying("float32"), saying("int32", 1)):
            with Caller(unix, said) as other:
                code, details = other.end()
                assert code == "FAILED_PRECONDITION", details
                assert "'lives': ('int32', ())" in details and "or one of another version" in details, details
        with Caller(unix, saying("int32")) as right:
            assert found.get(timeout=PATIENCE)["fields"]["lives"] == ("int32", ())
            assert right.end()[0] == "UNAVAILABLE"
    assert "its rows have" in capsys.readouterr().err
