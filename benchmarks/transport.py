"""What it costs to have environments in other processes and hosts: gRPC streams, queues and the batcher of libbeast.

    python benchmarks/transport.py          # about 10 minutes; writes benchmarks/results/transport.{json,md}

- Streams: libbeast's C++ streams in a program of their own (round_trips.cc, built here) against real env servers
  (one process per core) whose environments do nothing but show an image of 84x84x4 bytes: actions up, a row of K
  observations down. No inference and, on the learner's side, no Python.
- Queues: Python threads that hand one row each to a BatchingQueue, or ask a DynamicBatcher for an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from beast.run.directory import cpu_model  # noqa: E402

IMAGE = (84, 84, 4)
TRANSPORTS = ("unix", "tcp", "tls")
SERVE = "--serve"
ROUND_TRIPS = os.path.join(ROOT, "build", "native", "round_trips")


@dataclass
class Options:
    """What to measure."""

    seconds: float = 3.0
    """Measured seconds of each combination of transport, width and number of streams, and of each number of threads."""
    repeats: int = 3
    """Repetitions; the tables show their median, lowest and highest."""
    widths: tuple[int, ...] = (1, 8, 32)
    """Environments of one stream (K)."""
    streams: tuple[int, ...] = (1, 64)
    """Streams at a time."""
    threads: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Threads that enqueue, or that compute."""
    out: str = os.path.join(ROOT, "benchmarks", "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    subprocess.run(["make", "-s", "-C", os.path.join(ROOT, "csrc"), "round_trips"], check=True)
    runs: dict[str, list[dict]] = {}
    for repeat in range(options.repeats):
        for transport, width, num_streams in itertools.product(TRANSPORTS, options.widths, options.streams):
            measured = measure_streams(transport, width, num_streams, options.seconds)
            runs.setdefault(f"{transport} K={width} streams={num_streams}", []).append(measured)
        for measure, num_threads in itertools.product((enqueue, compute), options.threads):
            rate = in_threads(measure, num_threads, options.seconds)
            runs.setdefault(f"{measure.__name__} threads={num_threads}", []).append({"per_second": rate})
        print(f"repetition {repeat + 1} of {options.repeats} is done", flush=True)
    result = {
        "command": " ".join(["python benchmarks/transport.py", *sys.argv[1:]]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "hardware": f"{cpu_model()}, {os.cpu_count()} cores",
        "observation_bytes": int(np.prod(IMAGE)),
        "runs": runs,
    }
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "transport.json"), "w") as file:
        json.dump(result, file, indent=1)
    text = "\n".join(report(result, options)) + "\n"
    with open(os.path.join(options.out, "transport.md"), "w") as file:
        file.write(text)
    print(text)


# ------------------------------------------------------------------------------------------------ streams


class Still:
    """K environments that show one image for ever, in the form that `EnvServer` serves."""

    observation_fields = {"obs": (IMAGE, "uint8")}
    structure, action = "obs", ((), "int64")
    observation_space = action_space = ""

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.image = np.arange(np.prod(IMAGE), dtype=np.uint32).astype(np.uint8).reshape(IMAGE)

    def reset(self, seed: int, row: dict) -> None:
        for name, array in row.items():
            array[...] = self.image if name == "obs" else 0

    def step(self, actions: np.ndarray, row: dict) -> None:
        row["obs"][...] = self.image  # the one copy that every environment makes

    def close(self) -> None:
        pass


def serve(task: dict) -> None:
    """An env server's process, until its standard input ends."""
    from beast.feeds import env_server

    tls = (task["key"].encode(), task["certificate"].encode()) if task["key"] else None
    server = env_server.EnvServer(lambda: Still(task["width"]), task["address"], max_streams=task["streams"], tls=tls)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    os._exit(0)


@contextlib.contextmanager
def env_servers(transport: str, width: int, num_streams: int, certificate: tuple[str, str]):
    """Addresses of as many servers as there are cores, at most one for each stream."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        processes = []
        for number in range(min(os.cpu_count(), num_streams)):
            task = {
                "address": f"unix:{directory}/{number}" if transport == "unix" else "localhost:0",
                "width": width,
                "streams": num_streams,
                "certificate": certificate[0] if transport == "tls" else "",
                "key": certificate[1] if transport == "tls" else "",
            }
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__), SERVE, json.dumps(task)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.stdin.close)
            processes.append(process)
        yield [process.stdout.readline().strip() for process in processes]


def make_certificate() -> tuple[str, str]:
    """A self-signed certificate for localhost and its key, in PEM."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [os.path.join(directory, name) for name in ("certificate", "key")]
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        command += f" -addext subjectAltName=DNS:localhost -out {paths[0]} -keyout {paths[1]}"
        subprocess.run(command.split(), check=True, capture_output=True)
        return tuple(open(path).read() for path in paths)


def measure_streams(transport: str, width: int, num_streams: int, seconds: float) -> dict:
    """Round trips/s of all streams together, and quantiles in ms of how long one takes."""
    certificate = make_certificate() if transport == "tls" else ("", "")
    with env_servers(transport, width, num_streams, certificate) as addresses, tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate[0])
        file.flush()
        streams = [addresses[stream % len(addresses)] for stream in range(num_streams)]
        command = [ROUND_TRIPS, str(seconds), file.name if transport == "tls" else "", *streams]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    milliseconds = 1e3 * np.array(done.stdout.split(), float)
    return {
        "per_second": len(milliseconds) / seconds,
        "p50_ms": float(np.quantile(milliseconds, 0.5)),
        "p99_ms": float(np.quantile(milliseconds, 0.99)),
    }


# ------------------------------------------------------------------------------------------------ queues


def enqueue(stop: threading.Event, counts: list[int]) -> list:
    """Threads that enqueue single rows, which another one takes away 32 at a time."""
    import libbeast

    queue = libbeast.BatchingQueue(minimum_batch_size=1, maximum_batch_size=32, maximum_queue_size=256)
    item = (np.zeros((1, 1, 8), np.float32), {"reward": np.zeros((1, 1), np.float32)})

    def produce(thread: int) -> None:
        with contextlib.suppress(libbeast.ClosedBatchingQueue):
            while not stop.is_set():
                queue.enqueue(item)
                counts[thread] += 1

    def consume() -> None:
        for _ in queue:
            pass

    return [produce, consume, queue.close]


def compute(stop: threading.Event, counts: list[int]) -> list:
    """Threads that compute() single rows, which another one answers with their own inputs."""
    import libbeast

    batcher = libbeast.DynamicBatcher(minimum_batch_size=1, maximum_batch_size=1024)
    item = (np.zeros((1, 1, 8), np.float32), {"reward": np.zeros((1, 1), np.float32)})

    def call(thread: int) -> None:
        with contextlib.suppress(libbeast.ClosedBatchingQueue):
            while not stop.is_set():
                batcher.compute(item)
                counts[thread] += 1

    def answer() -> None:
        for batch in batcher:
            batch.set_outputs(batch.get_inputs())

    return [call, answer, batcher.close]


def in_threads(measure, num_threads: int, seconds: float) -> float:
    """Operations/s of all threads together."""
    import libbeast

    queue = libbeast.BatchingQueue(batch_dim=0)
    queue.enqueue(np.zeros(1))
    next(queue)  # the first batch of a process imports torch
    stop, counts = threading.Event(), [0] * num_threads
    work, other_end, close = measure(stop, counts)
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
    threads.append(threading.Thread(target=other_end))
    for thread in threads:
        thread.start()
    time.sleep(min(seconds, 0.5))
    before, began = sum(counts), time.monotonic()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.monotonic() - began)
    stop.set()
    close()
    for thread in threads:
        thread.join()
    return rate


# ------------------------------------------------------------------------------------------------ report

COPIES = """
| copy of an observation | where | unix, TCP | TLS |
|---|---|---|---|
| environment to row | env server, numpy | 1 | 1 |
| row to message | env server, `Row.SerializeToString` | 1 | 1 |
| message to gRPC's memory | env server, grpcio | 1 | 1 |
| encryption and decryption | gRPC on both sides | 0 | 2 |
| to the kernel and from it | both sides | 2 | 2 |
| wire to rollout | learner, csrc/wire.cc `read_row` | 1 | 1 |
| rollout to inference batch | learner, csrc/array.cc `concatenate`; none if one stream is the batch | 1 | 1 |
| rollout to learner's batch | learner; none if one rollout is the batch | 0 or 1 | 0 or 1 |
| in the learner's process, kernel not counted | | 2 or 3 | 3 or 4 |
"""


def report(result: dict, options: Options) -> list[str]:
    """The Markdown file."""

    def row(key: str) -> str:
        measured = result["runs"][key]
        rates = [one["per_second"] for one in measured]
        return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"

    def median(key: str, name: str) -> float:
        return statistics.median(one[name] for one in result["runs"][key])

    size = result["observation_bytes"]
    lines = [
        "# Transport",
        "",
        f"{result['hardware']}, commit {result['commit'][:10]}. Medians of {options.repeats} repetitions of "
        f"{options.seconds:g} s each (lowest to highest). Learner's side and env servers share the cores.",
        "",
        f"## Streams: round trips of actions up, K observations of {size:,} bytes down",
        "",
        "| transport | streams | K | round trips/s | steps/s | MB/s of observations | p50 ms | p99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for num_streams, width, transport in itertools.product(options.streams, options.widths, TRANSPORTS):
        key = f"{transport} K={width} streams={num_streams}"
        steps = median(key, "per_second") * width
        lines.append(
            f"| {transport} | {num_streams} | {width} | {row(key)} | {steps:,.0f} | {steps * size / 1e6:,.0f} "
            f"| {median(key, 'p50_ms'):.3f} | {median(key, 'p99_ms'):.3f} |"
        )
    lines += [
        "",
        "## Queues: operations/s of all threads together, called from Python, one small row each",
        "",
        "| threads | `BatchingQueue.enqueue` | `DynamicBatcher.compute` |",
        "|---|---|---|",
        *(f"| {n} | {row(f'enqueue threads={n}')} | {row(f'compute threads={n}')} |" for n in options.threads),
        "",
        f"## Bytes copied per observation (of {size:,} bytes), counted in the code",
        COPIES,
        f"`{result['command']}`",
    ]
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(json.loads(sys.argv[2]))
    else:
        import tyro

        main(tyro.cli(Options, description=__doc__))
