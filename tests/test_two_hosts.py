"""Env servers and learners on two hosts: two network namespaces with a cable between them, over TLS with a token."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from env_hosts import ROOT, ServerProcess, make_certificate
from namespaces import ENVS_ADDRESS, Hosts
from waiting import PATIENCE, wait_until

from beast.hosts import wire

pytest.importorskip("libbeast", reason="libbeast is not built: pip install .", exc_type=ImportError)

CUT_SECONDS = 10


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """Flags of a server, and of a learner, that trust each other."""
    directory = tmp_path_factory.mktemp("secrets")
    cert, key = make_certificate(directory, f"IP:{ENVS_ADDRESS}")
    token = directory / "token"
    token.write_text("sesame")
    token.chmod(0o600)
    server = ["--token_file", str(token), "--tls_cert", str(cert), "--tls_key", str(key)]
    return server, ["--token_file", str(token), "--tls_ca", str(cert)]


def env_server(hosts: Hosts, secrets, directory, env: str, *flags: str, script=None) -> ServerProcess:
    directory.mkdir(exist_ok=True)
    if script:
        script = ["-c", script, "--env", env, "--address", f"{ENVS_ADDRESS}:0"]
    return ServerProcess(
        directory, env, *secrets[0], *flags, address=f"{ENVS_ADDRESS}:0", prefix=hosts.envs, script=script
    )


def on_learner_host(hosts: Hosts, code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.run(
        [*hosts.learner, sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


# ------------------------------------------------------------------------------------------------ refusals

HANDSHAKE = """
import json, sys, libbeast
address, certificate, options = sys.argv[1:]
root_certificates = open(certificate, "rb").read() if certificate else b""
print(libbeast.handshake(address, root_certificates=root_certificates, **json.loads(options))["env"])
"""


def handshake(hosts: Hosts, address: str, certificate: str, **options) -> subprocess.CompletedProcess:
    return on_learner_host(hosts, HANDSHAKE, address, certificate, json.dumps({"timeout": 60.0, **options}))


def test_who_does_not_belong_here_is_refused_and_both_sides_say_why(hosts, secrets, tmp_path):
    cert = secrets[1][-1]
    with env_server(hosts, secrets, tmp_path, "CartPole-v1") as server:
        fits = handshake(hosts, server.address, cert, token="sesame")
        assert fits.stdout.strip() == "CartPole-v1", fits.stderr

        for token, reason in (("", "the learner sent no token"), ("open", "the learner sent a wrong token")):
            refused = handshake(hosts, server.address, cert, token=token)
            assert "ConnectionRefusedError" in refused.stderr
            for text in (refused.stderr, server.errors()):
                assert f"{reason}: give both the same --token_file" in text

        other = handshake(hosts, server.address, cert, token="sesame", env="Pong-v0")
        for text in (other.stderr, server.errors()):
            assert "the learner expects environment 'Pong-v0', the env server has 'CartPole-v1'" in text

        plain = handshake(hosts, server.address, "", token="sesame", insecure=True, timeout=3.0)
        assert plain.returncode != 0 and f"environment server {server.address}: " in plain.stderr
        assert "UNAVAILABLE" in plain.stderr
        assert "a server with --tls_cert needs root_certificates here" in plain.stderr

        careless = handshake(hosts, server.address, "", token="sesame")
        assert careless.returncode != 0 and "insecure" in careless.stderr  # it would send its token in plain text

        stranger = make_certificate(tmp_path, f"IP:{ENVS_ADDRESS}")[0]
        unknown = handshake(hosts, server.address, str(stranger), token="sesame", timeout=3.0)
        assert unknown.returncode != 0 and "certificate verify failed" in unknown.stderr.lower().replace("_", " ")


OTHER_VERSION = "import polybeast_env; polybeast_env.env_server.wire.PROTOCOL = 99; polybeast_env.main()"


def test_another_version_of_the_protocol_is_refused_and_both_sides_say_both(hosts, secrets, tmp_path):
    with env_server(hosts, secrets, tmp_path, "CartPole-v1", script=OTHER_VERSION) as server:
        refused = handshake(hosts, server.address, secrets[1][-1], token="sesame")
        for text in (refused.stderr, server.errors()):
            assert f"the learner speaks version {wire.PROTOCOL} of the protocol, the env server version 99" in text


WRONG_SHAPE = """
import sys, grpc, numpy as np
from beast.hosts import wire
from env_hosts import Stream, array_message
address, certificate = sys.argv[1:]
channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(open(certificate, "rb").read()))
with Stream(address, channel=channel, token="sesame") as stream:
    stream.row()
    stream.send(array_message(np.zeros((3, 1), np.int64)))
    print(*stream.end())
"""


def test_actions_of_a_wrong_shape_are_refused_and_both_sides_say_both(hosts, secrets, tmp_path):
    with env_server(hosts, secrets, tmp_path, "CartPole-v1", "--group_width", "4") as server:
        refused = on_learner_host(hosts, WRONG_SHAPE, server.address, secrets[1][-1])
        assert "INVALID_ARGUMENT" in refused.stdout, refused.stderr
        for text in (refused.stdout, server.errors()):
            assert "the learner sent actions int64 [3, 1], the env server takes int64 [4]" in text


# ------------------------------------------------------------------------------------------------ a cut cable

# A learner that keeps account: each line it prints is [rollouts that came, steps, restarts, gaps]. A gap is a rollout
# whose row 0 is not the last row of the one before from the same environments.
ACCOUNTANT = """
import json, sys, threading, numpy as np, libbeast
address, certificate = sys.argv[1:]
learner_queue = libbeast.BatchingQueue(minimum_batch_size=2, maximum_batch_size=2, maximum_queue_size=2)
batcher = libbeast.DynamicBatcher()
pool = libbeast.ActorPool(20, learner_queue, batcher, [address, address], (), token="sesame",
                          root_certificates=open(certificate, "rb").read())

def infer():
    for batch in batcher:
        (_, reward, *_), state = batch.get_inputs()
        batch.set_outputs(((np.zeros(tuple(reward.shape), np.int64),), state))

def learn():
    last, rollouts, gaps = {}, 0, 0
    for ((observation, reward, *_), _), _ in learner_queue:
        observation = np.asarray(observation["obs"])  # [21, 2, 3]: seed, episode, step of the episode
        seed = int(observation[0, 0, 0])
        gaps += seed in last and not np.array_equal(last[seed], observation[0])
        last[seed], rollouts = observation[-1], rollouts + 1
        print(json.dumps([rollouts, pool.count(), pool.counters()["restarts"], gaps]), flush=True)

for work in (infer, learn):
    threading.Thread(target=work, daemon=True).start()
pool.run()
"""


@pytest.mark.long
def test_a_link_that_is_cut_for_ten_seconds_costs_no_rollout_and_training_goes_on(hosts, secrets, tmp_path):
    run = tmp_path / "runs" / "far"

    def rows_of_metrics() -> list[dict]:
        if not (run / "metrics.csv").exists():
            return []
        with open(run / "metrics.csv") as file:
            return list(csv.DictReader(file))

    with (
        env_server(hosts, secrets, tmp_path / "a", "toy_envs:Counting-v0", "--group_width", "2") as counting,
        env_server(hosts, secrets, tmp_path / "b", "CartPole-v1", "--group_width", "4") as cart_pole,
        process(hosts, tmp_path / "accounts", "-c", ACCOUNTANT, counting.address, secrets[1][-1]) as accountant,
        process(
            hosts,
            tmp_path / "training",
            *[str(ROOT / "polybeast.py"), "--addresses", cart_pole.address, *secrets[1]],
            *["--root", str(tmp_path / "runs"), "--name", "far", "--no_tensorboard"],
            *["--batch_width", "4", "--log_steps", "1000"],
        ) as training,
    ):

        def account() -> list[int]:
            lines = (tmp_path / "accounts").read_text().splitlines()
            assert accountant.poll() is None, "\n".join(lines)
            return json.loads(lines[-1]) if lines and lines[-1].endswith("]") else [0, 0, 0, 0]

        def nothing_comes() -> bool:
            before = account()
            time.sleep(1)
            return account() == before

        def alive() -> bool:
            assert training.poll() is None, (tmp_path / "training").read_text()
            return True

        wait_until(lambda: account()[0] > 10, "rollouts")
        wait_until(lambda: alive() and len(rows_of_metrics()) >= 2, "training")
        with hosts.cut():
            began = time.monotonic()
            wait_until(nothing_comes, "what was on its way comes")
            rollouts_when_cut, rows_when_cut = account()[0], len(rows_of_metrics())
            time.sleep(max(CUT_SECONDS - (time.monotonic() - began), 1))
            assert account()[0] == rollouts_when_cut, "the link is not cut"
        wait_until(lambda: account()[0] > rollouts_when_cut + 10, "rollouts after the cut")
        wait_until(lambda: alive() and len(rows_of_metrics()) > rows_when_cut + 2, "training after the cut")

        rollouts, steps, restarts, gaps = account()
        assert (restarts, gaps) == (0, 0)
        assert (
            steps - rollouts * 20 * 2 <= 2 * 20 * 2 * 3
        )  # of two streams, at most: under way, waiting, and in a batch
        training.send_signal(signal.SIGTERM)
        assert training.wait(PATIENCE) == 0, (tmp_path / "training").read_text()


@contextlib.contextmanager
def process(hosts: Hosts, output, *arguments: str):
    """A Python process on the learner's host, its output in a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(output, "w") as file:
        started = subprocess.Popen(
            [*hosts.learner, sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()
