"""Run ranks and env servers on a Ray cluster.

    python examples/ray/launch.py --ranks 2 --gpus 1 -- monobeast.py --env CartPole-v1 --name cart --root /shared/runs
    python examples/ray/launch.py --ranks 4 --gpus 1 --servers 32:256 \
        -- polybeast.py --name pong --root /shared/runs -- polybeast_env.py --env PongNoFrameskip-v4
    ray job submit --working-dir . -- python examples/ray/launch.py …

After the first `--` comes the learner's command, which each rank runs; after the second that of the env servers, which
dial the ranks. Ray only places these programs and starts them again: observations go from env servers to ranks by gRPC,
gradients between ranks by torch.distributed.

If a rank is lost, all ranks start again and resume from the checkpoint, so `--root` is a directory that all nodes see.
An env server that is lost starts again alone. SIGTERM, Ctrl-C and `ray job stop` end all with a checkpoint.
"""

import argparse
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for `beast`

from beast.run.metrics import read_rows  # noqa: E402

END_SECONDS = 30  # that ranks have to write a checkpoint
FAILED_STARTS = 6  # in a row, without a new checkpoint, end the job
LEARNER_WAITS, ACTORS_WAIT = 0.05, 0.5  # shares of the time, above which env servers are too few or too many


class Process:
    """A program on a node of the cluster. Ray makes an actor of it."""

    def __init__(self):
        self._process = None

    def place(self) -> tuple[str, list[int]]:
        """The node's address and two free ports."""
        with socket.socket() as one, socket.socket() as other:
            for each in (one, other):
                each.bind(("", 0))
            return ray.util.get_node_ip_address(), [each.getsockname()[1] for each in (one, other)]

    def run(self, command: list[str], variables: dict[str, str], files: dict[str, str]) -> int:
        """Run a script with its arguments and return its exit code. `files` has flags of the script that take a file,
        and what is in it."""
        with tempfile.TemporaryDirectory() as directory:
            for flag, content in files.items():
                path = Path(directory, flag.strip("-"))
                path.touch(mode=0o600)
                path.write_text(content)
                command = [*command, flag, str(path)]
            # When Ray kills its worker, this thread is gone and the program gets SIGTERM.
            words = ["setpriv", "--pdeathsig", "TERM", sys.executable, *command]
            self._process = subprocess.Popen(words, env={**os.environ, **variables})
            return self._process.wait()

    def stop(self) -> None:
        """Ask the program to end."""
        if self._process:
            self._process.terminate()


class Ranks:
    """All ranks of a run. Each keeps its place in the cluster, or gets another if its node is lost."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._bundle = {"CPU": options.cpus, "GPU": options.gpus}
        self._group = ray.util.placement_group([self._bundle] * options.ranks, strategy="SPREAD")
        self._actors: list = []
        self._codes: list = []  # references to the exit codes
        self.addresses: list[str] = []  # where they listen for env servers
        self.files: dict[str, str] = {}  # of env servers that may dial them

    def start(self) -> None:
        """Start all, as soon as there is room. Raises RayError if a node is lost meanwhile."""
        options, size = self._options, self._options.ranks
        room = {"num_cpus": options.cpus, "num_gpus": options.gpus, "max_concurrency": 3}
        in_bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        places = [in_bundle(self._group, placement_group_bundle_index=rank) for rank in range(size)]
        self._actors = [ray.remote(Process).options(scheduling_strategy=each, **room).remote() for each in places]
        self._codes = []
        answers = [actor.place.remote() for actor in self._actors]
        while len(ray.wait(answers, num_returns=size, timeout=30)[0]) < size:
            tell(f"waiting for nodes with room for {size} times {self._bundle}")
        nodes, ports = zip(*ray.get(answers))
        if options.server:
            token, certificate, key = make_secrets(nodes)
            self.addresses = [f"{node}:{of_node[1]}" for node, of_node in zip(nodes, ports)]
            self.files = {"--token_file": token, "--tls_ca": certificate}
        for rank, actor in enumerate(self._actors):
            command, files = options.learner, {}
            if options.server:
                command = [*command, "--listen", f"0.0.0.0:{ports[rank][1]}"]
                files = {"--token_file": token, "--tls_cert": certificate, "--tls_key": key}
            variables = {
                # Ray shows a rank its own GPUs alone, so it is number 0 on its node.
                "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": Counter(nodes)[nodes[rank]],
                "MASTER_ADDR": nodes[0], "MASTER_PORT": ports[0][0],
            }  # fmt: skip
            self._codes.append(actor.run.remote(command, {name: str(x) for name, x in variables.items()}, files))
        tell(f"{size} ranks on {', '.join(nodes)}")

    def are_running(self) -> bool:
        """Wait a second. False once all have ended or one has failed."""
        ended, others = ray.wait(self._codes, num_returns=len(self._codes), timeout=1)
        return bool(others) and not any(map(exit_code, ended))

    def stop(self) -> int:
        """End all, with a checkpoint if they can write one, and return the worst exit code; 1 if they never started."""
        for actor in self._actors:
            actor.stop.remote()
        codes = [exit_code(code, END_SECONDS) for code in self._codes]
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._codes = [], []
        return max(map(abs, codes), default=1)  # -9 is that of SIGKILL


class Servers:
    """As many env servers as the learners need, equally many for each rank. One that ends is started again."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._number = options.servers[0]  # that should run
        self._running: dict = {}  # reference to the exit code: actor, address of the rank
        self._num_rows = 0  # of metrics until the last change

    def watch(self, ranks: Ranks) -> None:
        """Start those that are missing, for these ranks, and end those that are too many."""
        if not self._options.server:
            return
        for code in list(self._running):
            if ray.wait([code], timeout=0)[0]:
                tell(f"an env server has ended with {exit_code(code)}")
                self._end(code)
        rows = self._rows()
        number = wanted(self._number, rows[self._num_rows :], self._options.ranks, *self._options.servers)
        if number != self._number:
            tell(f"{number} env servers instead of {self._number}")
            self._number, self._num_rows = number, len(rows)
        while len(self._running) != number:
            served = Counter({address: 0 for address in ranks.addresses})
            served.update(address for _, address in self._running.values())
            if len(self._running) > number:
                most = served.most_common(1)[0][0]
                self._end(next(code for code, (_, address) in self._running.items() if address == most))
                continue
            fewest = min(ranks.addresses, key=served.__getitem__)
            actor = ray.remote(Process).options(num_cpus=self._options.server_cpus).remote()
            code = actor.run.remote([*self._options.server, "--learner", fewest], {}, ranks.files)
            self._running[code] = actor, fewest

    def stop(self) -> None:
        """End all."""
        for code in list(self._running):
            self._end(code)
        self._num_rows = len(self._rows())

    def _end(self, code) -> None:
        ray.kill(self._running.pop(code)[0])

    def _rows(self) -> list[dict[str, str]]:
        path = run_directory(self._options.learner) / "metrics.csv"
        return [row for row in read_rows(path)[1] if row["stats/learner_wait"]] if path.exists() else []


def wanted(number: int, rows: list[dict[str, str]], ranks: int, fewest: int, most: int) -> int:
    """How many env servers there should be instead of `number`, by the rows of metrics since that changed. The aim is
    the fewest that keep the learners busy: more only add policy lag."""
    rows = rows[2:]  # the first two are partly of the time before
    step = ranks * math.ceil(number / ranks / 10)
    if len(rows) >= 3:
        waits = [[float(row[f"stats/{who}_wait"]) for row in rows[-3:]] for who in ("learner", "actor")]
        if min(waits[0]) > LEARNER_WAITS:
            number += step
        elif min(waits[1]) > ACTORS_WAIT:
            number -= step
    return min(max(number, fewest), most)


def exit_code(code, seconds: float = 0) -> int:
    """The exit code, for which this waits so long; 1 for a process that is lost with its node, or does not end."""
    try:
        return ray.get(code, timeout=seconds)
    except ray.exceptions.RayError as error:  # or GetTimeoutError
        tell(str(error).partition("\n")[0])
        return 1


def make_secrets(nodes: tuple[str, ...]) -> tuple[str, str, str]:
    """A token, a certificate for these addresses and its key (PEM)."""
    names = ",".join(f"IP:{node}" for node in sorted(set(nodes)))
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=beast"
    words += f" -addext subjectAltName={names} -keyout key -out certificate"
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(words.split(), cwd=directory, check=True, capture_output=True)
        return secrets.token_hex(32), Path(directory, "certificate").read_text(), Path(directory, "key").read_text()


def train(options: argparse.Namespace) -> int:
    """Run until the ranks have ended by themselves or a signal came. Returns the exit code."""
    ranks, servers, failed = Ranks(options), Servers(options), 0
    checkpoint = run_directory(options.learner) / "checkpoint.pt"
    try:
        while True:
            before = checkpoint.stat().st_mtime if checkpoint.exists() else 0
            try:
                ranks.start()
                while ranks.are_running():
                    servers.watch(ranks)
            except ray.exceptions.RayError as error:
                tell(str(error).partition("\n")[0])
            servers.stop()  # they know only the old ranks, and hold CPUs that the new ones may need
            code = ranks.stop()
            has_progressed = checkpoint.exists() and checkpoint.stat().st_mtime > before
            failed = 0 if has_progressed else failed + 1
            if code == 0 or failed == FAILED_STARTS:
                return code
            tell(f"the ranks have ended with {code} and start again")
            time.sleep(min(4**failed, 60))  # a lock on a network's file system may outlive its host
    except KeyboardInterrupt:
        return ranks.stop()
    finally:
        servers.stop()


def tell(message: str) -> None:
    print(f"launch: {message}", file=sys.stderr, flush=True)


def run_directory(command: list[str]) -> Path:
    """Where the learner with this command has its files. Raises ValueError if the command does not say."""
    root, name = (command[command.index(flag) + 1] for flag in ("--root", "--name"))
    if not os.path.isabs(root):
        raise ValueError(root)
    return Path(root, name)


def parse(words: list[str]) -> argparse.Namespace:
    """The options, and the commands of ranks and env servers as `learner` and `server`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="learners, which make every update together (1)")
    add("--cpus", type=float, default=1, help="CPUs of a rank, its own actors included (1)")
    add("--gpus", type=float, default=0, help="GPUs of a rank (0)")
    add("--servers", default="1", help="env servers: a number, or FEWEST:MOST for as many as the ranks need (1)")
    add("--server_cpus", type=float, default=1, help="CPUs of an env server (1)")
    parts: list[list[str]] = [[]]
    for word in words:
        parts.append([]) if word == "--" else parts[-1].append(word)
    options = parser.parse_args(parts[0])
    if len(parts) not in (2, 3) or not all(parts[1:]):
        parser.error("give the learner's command after --, and after another -- that of env servers, if there are any")
    options.learner, options.server = parts[1], parts[2] if len(parts) == 3 else []
    try:
        fewest, most = map(int, (options.servers.split(":") * 2)[:2])
    except ValueError:
        parser.error(f"--servers {options.servers}: give a number, or two as in 32:256")
    if options.server and not options.ranks <= fewest <= most:
        parser.error(f"--servers {options.servers} for {options.ranks} ranks: each needs one at least")
    options.servers = fewest, most
    try:
        run_directory(options.learner)
    except (ValueError, IndexError):
        parser.error("the learner needs --name, and --root with a whole path that all nodes see: it resumes from there")
    return options


def interrupt(number, frame) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):  # Ray may send more than one
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    options = parse(sys.argv[1:])
    ray.init()
    for each in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own
        signal.signal(each, interrupt)
    code = train(options)
    tell(f"ended with {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
