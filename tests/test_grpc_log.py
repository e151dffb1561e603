"""What gRPC itself logs of callers and servers that lie: no caller fills a disk or writes to a terminal."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
from attacks import attacks
from env_hosts import ROOT, ServerProcess
from waiting import PATIENCE

PING_ANSWER = b"\0\0\x08\x06\x01"


def start(program: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, **pipes)


def check(logged: bytes) -> None:
    assert len(logged) < 10_000, "it fills the log"
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f-\x9f]", logged), "it writes to the terminal"


def send_bad_headers(address: str) -> None:
    """A thousand calls."""
    for _ in range(5):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            connection = attacks.raw(address, stack)
            for first in range(1, 400, 16):
                for index, name in enumerate(attacks.BAD_HEADERS):
                    sent = attacks.call_headers(**{name: attacks.ESCAPES})
                    connection.sendall(attacks.frame(1, 5, first + 2 * index, sent))
            connection.sendall(attacks.frame(6, 0, 0, bytes(8)))
            answer = b""
            while PING_ANSWER not in answer and (more := connection.recv(65536)):
                answer += more


def test_bad_headers_of_callers_are_escaped_and_20_lines_of_a_learners_log():
    learner = start(attacks.LISTENS)
    send_bad_headers(learner.stdout.readline().decode().strip())
    _, logged = learner.communicate(timeout=PATIENCE)
    check(logged)
    lines = logged.decode().splitlines()
    assert len(lines) == 20 and all(line.startswith("gRPC: Error parsing metadata") for line in lines)


def test_bad_headers_of_a_server_are_escaped_and_20_lines_of_a_learners_log():
    with attacks.server_of_bad_headers() as address:
        told, logged = start(attacks.DIALS, address).communicate(timeout=PATIENCE)
    check(logged)
    check(told)
    assert logged.count(b"\n") == 20 and told


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
def test_an_env_server_logs_nothing_of_bad_headers_unless_it_is_told_to(tmp_path, monkeypatch, verbosity):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    with ServerProcess(tmp_path, "toy_envs:Counting-v0", address="127.0.0.1:0") as server:
        send_bad_headers(server.address)
        logged = (tmp_path / "errors").read_bytes()
    if verbosity:
        assert b"Error parsing" in logged
    else:
        check(logged)
        assert b"Error parsing" not in logged
