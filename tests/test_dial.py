"""The env server that dials: real calls to a learner's end in plain Python, here or in a process of its own."""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from functools import partial

import grpc
import numpy as np
import psutil
import pytest
import toy_envs
from env_hosts import ROOT, Dialing, ServerProcess, Stream, array_message, arrays_of, make_certificate, toy_group
from gymnasium.vector import SyncVectorEnv
from pools import Group
from waiting import PATIENCE, wait_until

import polybeast_env
from beast.errors import InputError
from beast.hosts import dialer, env_server, security, served_group, wire


class Learner(grpc.GenericRpcHandler):
    """Listens, and hands out each call of an env server. Refuses all with `refusal`, a status code and a message."""

    def __init__(self, address: str, *, tls: tuple[bytes, bytes] | None = None, refusal=None):
        """`address` may have port 0; the attribute `address` then names the port."""
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._refusal, self._answered = refusal, list[Call]()
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=options)
        self._server.add_generic_rpc_handlers((self,))
        if tls:
            port = self._server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
        else:
            port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def service(self, details):
        assert details.method == wire.DIAL
        return grpc.stream_stream_rpc_method_handler(
            self._answer, wire.FromServer.FromString, wire.Array.SerializeToString
        )

    def _answer(self, messages, context):
        call = Call(messages, context)
        self._answered.append(call)
        self._calls.put(call)
        if self._refusal:
            context.abort(*self._refusal)
        yield from iter(call.outgoing.get, None)
        if call.status:
            context.abort(*call.status)

    def call(self, seconds: float = PATIENCE) -> "Call":
        """The next one that an env server made. Raises queue.Empty."""
        return self._calls.get(timeout=seconds)

    def close(self) -> None:
        self._server.stop(grace=0).wait()
        for call in self._answered:
            call.end()  # its thread, which Python would wait for

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Call:
    """A learner's end of one dialed stream."""

    def __init__(self, messages, context):
        self._messages, self._context = messages, context
        self.headers = dict(context.invocation_metadata())
        self.outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self.last: dict[str, np.ndarray] = {}
        self.status: tuple | None = None

    def accept(self, **hello) -> "Call":
        """Take the stream, with these fields of the learner's hello."""
        self.hello = self.receive().hello
        said = wire.LearnerHello(**{"protocol": wire.PROTOCOL, "seed": 1, **hello})
        self._context.send_initial_metadata([(wire.HELLO_HEADER, said.SerializeToString())])
        return self

    def receive(self):
        """The next message. Raises StopIteration where the env server has closed its side."""
        return next(self._messages)

    def row(self) -> dict[str, np.ndarray]:
        return arrays_of(self.receive(), self.hello, self.last)

    def send(self, message) -> None:
        self.outgoing.put(message)

    def act(self, actions=None) -> dict[str, np.ndarray]:
        """The row that these actions lead to; by default all are 0."""
        self.send(array_message(np.zeros(self.hello.num_envs, np.int64) if actions is None else actions))
        return self.row()

    def is_active(self) -> bool:
        return self._context.is_active()

    def end(self, *status) -> None:
        self.status = status
        self.outgoing.put(None)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Most tests leave a stream open that nobody ends."""
    monkeypatch.setattr(dialer, "END_SECONDS", 0.3)


# --------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("env, deflate", [("Counting", False), ("Dict", True), ("MultiDiscrete", False)])
def test_hello_and_rows_are_those_that_a_learner_gets_who_calls_the_server(tmp_path, unix, env, deflate):
    def make():
        return toy_group(env, 3)

    called = f"unix:{tmp_path / 'envs'}"
    server = env_server.EnvServer(make, called, env_id="toy")
    server.start()
    rng = np.random.default_rng(0)
    with (
        Learner(unix) as learner,
        Dialing(learner.address, make_group=make, deflate=deflate),
        Stream(called, seed=2**63 + 17) as stream,
    ):
        call = learner.call().accept(seed=2**63 + 17, env="toy")
        assert call.hello == stream.hello
        first, there = call.receive(), stream.row()
        here = arrays_of(first, call.hello, call.last)
        assert here["done"].all() and bool(first.deflated) == deflate
        sizes = [3, 4] if env == "MultiDiscrete" else [2]
        for _ in range(100):
            for name, array in there.items():
                np.testing.assert_array_equal(here[name], array, err_msg=name)
            actions = rng.integers(sizes, size=(3, len(sizes))).reshape(3, *sizes[1:] and [2])
            here, there = call.act(actions), stream.act(actions)
    server.stop()


def test_each_stream_says_who_it_is_and_has_a_connection_and_environments_of_its_own(unix):
    with Learner(unix) as learner, Dialing(learner.address, max_streams=3):
        calls = [learner.call().accept(seed=10 * index) for index in range(3)]
        names = [re.fullmatch("([0-9a-f]{32})/([0-9]+)", call.headers["beast-stream"]).groups() for call in calls]
        assert len({name for name, _ in names}) == 1 and {index for _, index in names} == {"0", "1", "2"}
        assert not any("authorization" in call.headers for call in calls)
        for index, call in enumerate(calls):
            np.testing.assert_array_equal(call.row()["obs/obs"][:, 0], [10 * index, 10 * index + 1])
        path = unix.removeprefix("unix:")
        served = [line for line in open("/proc/net/unix") if line.rstrip().endswith(path)]
        assert len(served) == 4  # the listener and its three connections
    assert len({id(call) for call in calls}) == 3


def test_a_learner_may_take_its_time_and_messages_longer_than_actions_end_the_stream(unix, quick):
    with Learner(unix) as learner, Dialing(learner.address) as dialing:
        call = learner.call()
        time.sleep(1)
        assert call.accept(env="toy").row()["done"].all()
        call.send(wire.Array(dtype="int64", shape=[2], data=bytes(1_000_000)))
        assert learner.call().accept().row()["done"].all()
    assert "RESOURCE_EXHAUSTED" in dialing.text()


def test_actions_that_do_not_fit_are_told_to_the_learner_and_a_new_life_begins(unix, quick):
    with Learner(unix) as learner, Dialing(learner.address) as dialing:
        for _ in range(7):  # more often than environments may fail
            call = learner.call().accept()
            call.row()
            call.send(array_message(np.zeros(5, np.int64)))
            assert call.receive().error == "the learner sent actions int64 [5], the env server takes int64 [2]"
            call.end()
        assert not dialing.dialer.failure
    assert dialing.text().count("made 2 environments") == 1


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("code", sorted(dialer.FINAL, key=lambda code: code.name))
def test_a_refusal_that_will_not_change_ends_the_server(unix, code):
    with Learner(unix, refusal=(code, "because \x1b[31m")) as learner, Dialing(learner.address) as dialing:
        wait_until(lambda: dialing.dialer.failure)
        learner.call()
        with pytest.raises(queue.Empty):
            learner.call(0.05)
    assert dialing.dialer.failure == f"the learner at {unix} refuses this env server ({code.name}): because ?[31m"


@pytest.mark.parametrize(
    "hello, message",
    [
        ({"protocol": 99}, "the learner speaks version 99 of the protocol"),
        ({"env": "Pong-v0"}, "the learner expects environment 'Pong-v0', the env server has 'toy'"),
    ],
)
def test_a_learner_that_does_not_fit_ends_the_server(unix, hello, message):
    with Learner(unix) as learner, Dialing(learner.address) as dialing:
        learner.call().accept(**hello)
        wait_until(lambda: dialing.dialer.failure)
    assert message in dialing.dialer.failure and unix in dialing.dialer.failure


@pytest.mark.parametrize("expects", ["another environment", "another path"])
def test_a_learner_that_refuses_is_left_out_while_another_trains(tmp_path, quick, monkeypatch, expects):
    first, second = f"unix:{tmp_path / '1'}", f"unix:{tmp_path / '2'}"
    proxy = (grpc.StatusCode.UNIMPLEMENTED, "404") if expects == "another path" else None
    with (
        Learner(first, refusal=proxy) as refuses,
        Learner(second) as trains,
        Dialing(first, second, max_streams=2) as dialing,
    ):
        refused = refuses.call()  # one of two neighbours began here
        if not proxy:
            refused.accept(env="Pong-v0")
        for call in [trains.call().accept() for _ in range(2)]:
            call.row()
            call.act()
        assert not dialing.dialer.failure
        assert ("UNIMPLEMENTED): 404" if proxy else "expects environment 'Pong-v0'") in dialing.text()
        with pytest.raises(queue.Empty):
            refuses.call(0.1)
        monkeypatch.setattr(dialer, "REFUSED_SECONDS", 0.0)  # both are dialed again, and the other refuses now, too
        trains._refusal = grpc.StatusCode.UNAUTHENTICATED, "no"
        call.end()
        refused = refuses.call()
        if not proxy:
            refused.accept(env="Pong-v0")
        wait_until(lambda: dialing.dialer.failure)


def test_why_there_is_no_learner_is_told_again_after_ten_minutes(tmp_path, quick, monkeypatch):
    nowhere = f"unix:{tmp_path / 'nobody'}"
    with Dialing(nowhere) as dialing:
        wait_until(lambda: dialing.text().count("UNAVAILABLE") == 1)
        monkeypatch.setattr(dialer, "RETOLD_SECONDS", 0.0)
        wait_until(lambda: dialing.text().count("UNAVAILABLE") > 3)


def test_a_full_learner_sends_a_stream_on_to_the_next(tmp_path, quick):
    first, second = f"unix:{tmp_path / '1'}", f"unix:{tmp_path / '2'}"
    full = grpc.StatusCode.RESOURCE_EXHAUSTED, "no place is free"
    with (
        Learner(first, refusal=full) as one,
        Learner(second) as other,
        Dialing(one.address, other.address, max_streams=2) as dialing,
    ):
        for _ in range(2):
            other.call().accept().row()
        one.call()  # one of two neighbours began here
        assert not dialing.dialer.failure


def test_a_learner_that_ends_a_call_without_a_hello_is_dialed_again(unix, quick):
    with Learner(unix) as learner, Dialing(learner.address) as dialing:
        for _ in range(6):
            learner.call().end()
        learner.call().accept().row()
        assert not dialing.dialer.failure
    assert dialing.text().count("it ended the stream") == 1 and "Traceback" not in dialing.text()


def test_an_absent_learner_is_dialed_less_and_less_often_and_told_of_once(tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(dialer, "PAUSE", (0.5, 30.0))
    nowhere = f"unix:{tmp_path / 'nobody'}"
    dialing = Dialing(nowhere)
    stopping = dialing.dialer.stopping
    monkeypatch.setattr(
        stopping, "wait", lambda seconds: waits.append(seconds) or (len(waits) == 20 and stopping.set())
    )
    with dialing:
        wait_until(lambda: len(waits) == 20)
    for expected, seconds in zip([0.5, 1, 2, 4, 8, 16, *[30] * 14], waits):
        assert 0.5 * expected <= seconds <= 1.5 * expected
    assert len({round(seconds / 30, 6) for seconds in waits[6:]}) > 10
    assert dialing.text().count("UNAVAILABLE") == 1


# ----------------------------------------------------------------------------------------- coming and going

LEARNER = """
import sys, test_dial
learner = test_dial.Learner(sys.argv[1])
call = learner.call().accept(seed=int(sys.argv[2]))
row = call.row()
print(call.headers["beast-stream"], row["done"].all(), *row["obs/obs"].ravel().tolist(), flush=True)
while True:
    call.act()
"""


def test_when_a_killed_learner_is_back_the_same_environments_begin_a_new_life(unix, quick):
    made = []

    def make():
        made.append(1)
        return toy_group()

    with Dialing(unix, make_group=make) as dialing:
        streams = []
        for seed in (5, 7):
            command = [sys.executable, "-c", LEARNER, unix, str(seed)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as learner:
                stream, done, *observations = learner.stdout.readline().split()
                learner.kill()
            streams.append(stream)
            assert done == "True"
            assert list(map(float, observations)) == [seed, 0, 0, seed + 1, 0, 0]
            count = len(streams)
            wait_until(lambda: dialing.text().count("has no learner: UNAVAILABLE") == count + 1, dialing.text)
            time.sleep(0.2)  # for more calls that nobody answers
        assert streams[0] == streams[1] and len(made) == 1
        assert len([line for line in dialing.lines if "has no learner" in line]) == 3  # before, between and after
        assert len([line for line in dialing.lines if "is served" in line]) == 2


def test_lives_leave_no_threads_and_no_descriptors_behind(unix, quick):
    me = psutil.Process()
    with Learner(unix) as learner, Dialing(learner.address):
        counts = []
        for life in range(40):
            call = learner.call().accept()
            call.row()
            call.act()
            call.end(grpc.StatusCode.ABORTED, "again")
            if life >= 10:
                counts.append((threading.active_count(), me.num_fds()))
    assert max(counts[20:]) <= max(counts[:10]) or counts[-1] <= counts[0], counts


def test_a_deflated_stream_begins_with_whole_stacks_whatever_the_last_one_had(unix, quick):
    frames = np.random.default_rng(0).integers(256, size=(3, 8, 9), dtype=np.uint8)

    def stack(t: int) -> np.ndarray:  # the first looks like one that has shifted since the third
        return frames[(t + np.arange(3)) % 3]

    def make():
        return Group({"screen": ((3, 8, 9), "uint8")}, "screen", lambda t: {"screen": stack(t)})

    with Learner(unix) as learner, Dialing(learner.address, make_group=make, deflate=True):
        for _ in range(2):
            call = learner.call().accept()
            for t, row in enumerate((call.row(), call.act(), call.act())):
                np.testing.assert_array_equal(row["screen"], stack(t)[None])
            call.end(grpc.StatusCode.ABORTED, "again")


class Crashing(served_group.VectorEnvGroup):
    def step(self, actions, views):
        if actions.any():
            raise RuntimeError("this group breaks here")
        super().step(actions, views)


def crashing_group():
    return Crashing(SyncVectorEnv([toy_envs.Counting] * 2))


def test_an_environment_that_raises_is_told_to_the_learner_and_made_anew_and_the_fifth_time_ends_the_server(
    unix, quick
):
    with Learner(unix) as learner, Dialing(learner.address, make_group=crashing_group) as dialing:
        for life in range(5):
            assert not dialing.dialer.failure
            call = learner.call().accept(seed=life)
            assert call.row()["done"].all()
            call.act()
            call.send(array_message(np.ones(2, np.int64)))
            error = call.receive().error
            assert error.startswith("Traceback") and error.endswith("RuntimeError: this group breaks here")
            with pytest.raises(StopIteration):
                call.receive()
            call.end()
            wait_until(lambda text=error: text in dialing.text())
        wait_until(lambda: dialing.dialer.failure)
        with pytest.raises(queue.Empty):
            learner.call(0.1)
    expected = "environments failed 5 times within 10 minutes: RuntimeError: this group breaks here"
    assert dialing.dialer.failure == expected
    assert dialing.text().count("made 2 environments") == dialing.text().count("closed the environments") == 5


def test_failures_that_lie_far_apart_are_forgiven(unix, quick, monkeypatch):
    monkeypatch.setattr(dialer, "FAILURE_SECONDS", 0.1)
    with Learner(unix) as learner, Dialing(learner.address, make_group=crashing_group) as dialing:
        for _ in range(7):
            call = learner.call().accept()
            call.row()
            call.send(array_message(np.ones(2, np.int64)))
            assert call.receive().error
            call.end()
            time.sleep(0.03)
        assert not dialing.dialer.failure


def test_a_traceback_that_cannot_be_sent_as_it_is_is_escaped_and_cut(unix, quick):
    class Raising(served_group.VectorEnvGroup):
        def step(self, actions, views):
            raise RuntimeError("é" * served_group.MAX_ERROR + "\udcff")

    make_group = partial(Raising, SyncVectorEnv([toy_envs.Counting] * 2))
    with Learner(unix) as learner, Dialing(learner.address, make_group=make_group) as dialing:
        call = learner.call().accept()
        call.row()
        call.send(array_message(np.zeros(2, np.int64)))
        error = call.receive().error
        assert error.endswith("éé\\udcff") and 0 <= served_group.MAX_ERROR - len(error.encode()) < 2
        call.end()
        wait_until(lambda: "its environment failed" in dialing.text())


def test_an_error_of_the_server_itself_ends_it_and_is_told(unix):
    def broken(line):
        raise OSError("nobody reads this log")

    with Dialing(unix, log=broken) as dialing:
        wait_until(lambda: dialing.dialer.failure)
    assert dialing.dialer.failure.endswith("OSError: nobody reads this log") and "Traceback" in dialing.dialer.failure


def test_environments_that_cannot_be_made_end_the_server(unix, quick):
    def broken():
        raise RuntimeError("no display")

    def unfit():
        raise InputError("this space cannot be sent")

    for make_group, message in (
        (broken, "5 times within 10 minutes: RuntimeError: no display"),
        (unfit, "cannot be sent"),
    ):
        with Dialing(unix, make_group=make_group) as dialing:
            wait_until(lambda: dialing.dialer.failure)
        assert message in dialing.dialer.failure


# ------------------------------------------------------------------------------------------------- the end


class Slow(served_group.VectorEnvGroup):
    """Each step waits until the test lets it go on."""

    entered, may_go_on = threading.Event(), threading.Event()

    def step(self, actions, views):
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE)
        super().step(actions, views)


def slow_group():
    Slow.entered.clear()
    Slow.may_go_on.clear()
    return Slow(SyncVectorEnv([toy_envs.Counting] * 2))


def test_a_server_that_stops_ends_its_step_sends_the_row_and_closes_its_side(unix, monkeypatch):
    monkeypatch.setattr(dialer, "END_SECONDS", PATIENCE)
    with Learner(unix) as learner:
        dialing = Dialing(learner.address, make_group=slow_group)
        with dialing:
            call = learner.call().accept()
            call.row()
            call.send(array_message(np.zeros(2, np.int64)))
            assert Slow.entered.wait(PATIENCE)
            stopping = threading.Thread(target=dialing.dialer.stop)
            stopping.start()
            wait_until(dialing.dialer.stopping.is_set)
            Slow.may_go_on.set()
            assert (call.row()["episode_step"] <= 1).all()
            with pytest.raises(StopIteration):
                call.receive()
            call.send(array_message(np.zeros(2, np.int64)))  # on the way when the server stopped
            time.sleep(0.2)
            assert call.is_active(), "it is the learner's to end"
            call.end()
            stopping.join()
    assert dialing.text().endswith("closed the environments of stream 0")
    assert "no learner" not in dialing.text()


@pytest.mark.parametrize("when", ["nobody is there", "it has no answer yet", "the learner acts", "the learner is mute"])
def test_a_server_stops_soon_whatever_it_waits_for(unix, when, monkeypatch):
    monkeypatch.setattr(dialer, "END_SECONDS", 0.5 if when == "the learner is mute" else PATIENCE)
    with Learner(unix if when != "nobody is there" else f"{unix}2") as learner:
        dialing = Dialing(unix)
        with dialing:
            if when == "nobody is there":
                wait_until(lambda: "UNAVAILABLE" in dialing.text())
            else:
                call = learner.call()
            if "the learner" in when:
                call.accept().row()
            began = time.monotonic()
            if when == "the learner acts":
                threading.Timer(0.1, call.end).start()
        assert time.monotonic() - began < 5
        assert "closed the environments of stream 0" in dialing.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_streams_of_the_process_and_its_exit_code_is_0(tmp_path, unix, number):
    flags = ["--group_width", "2", "--max_streams", "2"]
    with (
        Learner(unix) as learner,
        ServerProcess(tmp_path, "toy_envs:StartsProcess-v0", *flags, learners=(unix,)) as server,
    ):
        calls = [learner.call().accept(seed=seed) for seed in (1, 2)]
        assert server.process.stdout.readline() == (f"serving toy_envs:StartsProcess-v0 (2 streams of 2) to {unix}\n")
        for call in calls:
            call.row()
            call.act()
        children = psutil.Process(server.process.pid).children()
        server.process.send_signal(number)
        for call in calls:
            with pytest.raises(StopIteration):
                call.receive()
            call.end()
        assert server.exit_code() == 0, server.errors()
        assert len(children) == 4 and not any(child.is_running() for child in children)
        assert "Traceback" not in server.errors() and "no learner" not in server.errors()


def test_a_hanging_environment_does_not_hold_up_the_end_of_a_server_that_dials(tmp_path, unix):
    flags = ["--group_width", "1", "--max_streams", "1"]
    with Learner(unix) as learner, ServerProcess(tmp_path, "server_toys:Hangs-v0", *flags, learners=(unix,)) as server:
        call = learner.call().accept()
        call.row()
        call.act()
        call.send(array_message(np.zeros(1, np.int64)))
        wait_until(lambda: "hanging" in server.errors())
        server.process.terminate()
        assert server.exit_code() == 0


def test_a_server_that_dials_ends_where_an_environment_keeps_the_gil(tmp_path, unix):
    flags = ["--group_width", "1", "--max_streams", "1", "--gil_timeout", "2"]
    with (
        Learner(unix) as learner,
        ServerProcess(tmp_path, "server_toys:KeepsGil-v0", *flags, learners=(unix,)) as server,
    ):
        call = learner.call().accept()
        call.row()
        call.act()
        call.send(array_message(np.zeros(1, np.int64)))
        assert server.process.wait(60) == -signal.SIGALRM
        call.end()


def test_a_server_ends_where_an_environment_still_steps_long_after_its_learner_left(unix, monkeypatch):
    ended = []
    monkeypatch.setattr(served_group, "end_stuck", lambda peer, log: ended.append(peer))
    with (
        Learner(unix) as learner,
        Dialing(learner.address, make_group=slow_group, stuck_seconds=0.1) as dialing,
    ):
        call = learner.call().accept()
        call.row()
        call.send(array_message(np.zeros(2, np.int64)))
        assert Slow.entered.wait(PATIENCE)
        time.sleep(0.3)
        assert not ended, "its learner is still there"
        call.end(grpc.StatusCode.DEADLINE_EXCEEDED, "no row came")
        wait_until(lambda: ended == [unix])
        Slow.may_go_on.set()
        second = learner.call().accept()
        second.row()
        assert "DEADLINE_EXCEEDED: no row came" in dialing.text()
        time.sleep(0.3)
        second.end()
        learner.call().accept().row()
        time.sleep(0.3)
    assert len(ended) == 1, "only a learner that has left counts"


# ------------------------------------------------------------------------------------- who may read along


def test_with_tls_the_learner_shows_its_certificate_before_it_gets_the_token(tmp_path, certificate, quick):
    cert, key = (path.read_bytes() for path in certificate)
    stranger = make_certificate(tmp_path, "IP:127.0.0.1")[0].read_bytes()
    with Learner("127.0.0.1:0", tls=(key, cert)) as learner:
        with Dialing(learner.address, token="sesame", root_certificates=stranger) as unknown:
            wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in unknown.text())
        assert dialer.UNTRUSTED in unknown.text()
        with Dialing(learner.address, token="sesame") as plain:
            wait_until(lambda: "UNAVAILABLE" in plain.text())
        assert not unknown.dialer.failure and not plain.dialer.failure
        with pytest.raises(queue.Empty):
            learner.call(0)
        with Dialing(learner.address, token="sesame", root_certificates=cert):
            call = learner.call().accept()
            assert call.headers["authorization"] == "Bearer sesame"
            call.row()
            call.act()


def test_a_certificate_that_cannot_be_trusted_is_told_with_the_remedy_whatever_was_told_before(tmp_path, quick):
    cert, key = (path.read_bytes() for path in make_certificate(tmp_path, "IP:10.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Dialing(address, root_certificates=cert) as dialing:
        wait_until(lambda: "UNAVAILABLE" in dialing.text())  # nobody listens yet
        assert dialer.UNTRUSTED not in dialing.text()
        with Learner(address, tls=(key, cert)):
            wait_until(lambda: dialer.UNTRUSTED in dialing.text(), dialing.text)
        assert "--tls_ca" in dialer.UNTRUSTED


@pytest.mark.parametrize("fault", ["expired", "of another host", "of another authority"])
def test_a_certificate_of_no_use_is_told_in_a_line_and_again_later_while_others_are_served(
    tmp_path, quick, monkeypatch, fault
):
    names = "IP:10.0.0.1" if fault == "of another host" else "IP:127.0.0.1"
    cert, key = make_certificate(tmp_path, names, expired=fault == "expired")
    tls = key.read_bytes(), cert.read_bytes()
    trusted = make_certificate(tmp_path, "IP:127.0.0.1")[0].read_bytes()
    if fault != "of another authority":
        trusted += tls[1]
    good = (tmp_path / "key.pem").read_bytes(), (tmp_path / "cert.pem").read_bytes()
    with Learner("127.0.0.1:0", tls=tls) as bad, Learner("127.0.0.1:0", tls=good) as other:
        with Dialing(bad.address, root_certificates=trusted) as dialing:
            wait_until(lambda: dialer.UNTRUSTED in dialing.text(), dialing.text)
            time.sleep(0.3)
            told = [line for line in dialing.lines if bad.address in line]
            assert len(told) == 1 and "\n" not in told[0] and not dialing.dialer.failure
            monkeypatch.setattr(dialer, "RETOLD_SECONDS", 0.0)
            wait_until(lambda: dialing.text().count(dialer.UNTRUSTED) > 1, dialing.text)
        monkeypatch.setattr(dialer, "RETOLD_SECONDS", 600.0)
        with Dialing(bad.address, other.address, root_certificates=trusted):
            assert other.call().accept().row()["done"].all()


def test_other_hosts_are_dialed_with_token_and_tls_or_the_word_insecure(tmp_path, token_file, certificate):
    both = {"token_file": str(token_file), "tls_ca": str(certificate[0])}
    token, certificates = security.dial_security(["10.0.0.1:1", "host:2"], **both)
    assert token == "sesame" and b"CERTIFICATE" in certificates
    assert security.dial_security(["127.0.0.1:1", "unix:/x"], str(token_file)) == ("sesame", None)
    assert security.dial_security(["localhost:1"]) == ("", None)
    assert security.dial_security(["host:2"], str(token_file), insecure=True) == ("sesame", None)
    for missing in both:
        with pytest.raises(InputError, match="the learner at host:2: give --token_file and --tls_ca"):
            security.dial_security(["127.0.0.1:1", "host:2"], **{**both, missing: ""})
    with pytest.raises(InputError, match="unix:/x needs no TLS"):
        security.dial_security(["unix:/x"], **both)
    with pytest.raises(InputError, match="--tls_ca /nowhere cannot be read"):
        security.dial_security(["host:2"], str(token_file), "/nowhere")
    for no_certificate in ("", "café", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        (path := tmp_path / "ca").write_text(no_certificate)
        with pytest.raises(InputError, match=f"--tls_ca {path} holds no certificate: "):
            security.dial_security(["host:2"], str(token_file), str(path))
    (path := tmp_path / "ca").write_text(f"café\n{certificate[0].read_text() * 2}")
    assert security.dial_security(["host:2"], str(token_file), str(path))[1] == path.read_bytes()


def test_a_token_does_not_go_in_plain_text_to_a_proxy(monkeypatch, quick):
    with socket.create_server(("127.0.0.1", 0)) as proxy, Learner("127.0.0.1:0") as learner:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        proxy.settimeout(0.05)
        with Dialing(learner.address, token="sesame"):
            learner.call().accept().row()
            with pytest.raises(TimeoutError):
                proxy.accept()


def test_flags_that_cannot_be_are_refused_before_anything_is_sent(token_file, certificate, run_main):
    def refused(*flags: str) -> str:
        code, output = run_main(polybeast_env, "--env", "CartPole-v1", *flags)
        assert code in (1, 2) and "Traceback" not in output
        return output

    cert, key = map(str, certificate)
    with Learner("127.0.0.1:0") as learner:
        wide = f"0.0.0.0:{learner.address.rpartition(':')[2]}"  # which is this machine, but need not be
        output = refused("--learner", wide, "--token_file", str(token_file))
        assert output.startswith(f"error: other machines are between here and the learner at {wide}")
        assert "neither unix:/path nor host:port" in refused("--learner", learner.address, "nowhere")
        assert "not allowed with argument" in refused("--learner", learner.address, "--address", "127.0.0.1:4431")
        output = refused("--learner", learner.address, "--tls_cert", cert, "--tls_key", key)
        assert "give --tls_ca, not --tls_cert" in output
        assert "--tls_ca checks a learner's certificate" in refused("--tls_ca", cert)
        with pytest.raises(queue.Empty):
            learner.call(0)


@pytest.mark.parametrize("keep", [[], ["--keep"]])
def test_a_process_that_is_refused_ends_with_one_message_and_code_1(tmp_path, unix, token_file, keep):
    refusal = grpc.StatusCode.UNAUTHENTICATED, "the env server sent a wrong token: give both the same --token_file"
    with (
        Learner(unix, refusal=refusal) as learner,
        ServerProcess(tmp_path, "CartPole-v1", "--token_file", str(token_file), *keep, learners=(unix,)) as server,
    ):
        assert learner.call().headers["authorization"] == "Bearer sesame"
        assert server.exit_code() == 1
        assert (
            server.errors().count("refuses this env server (UNAUTHENTICATED): the env server sent a wrong token") == 1
        )
        assert server.errors().strip().splitlines()[-1].startswith(f"error: the learner at {unix} refuses")
        assert server.process.stdout.read() == ""
