"""What it costs to have environments in other processes and hosts: gRPC streams, queues and the batcher of libbeast.

    python benchmarks/transport.py                                # about 15 minutes
    python benchmarks/transport.py --parts pool                   # leaves the other parts of the report as they are
    python benchmarks/transport.py --parts streams pool --against ../old    # beside another checkout, in turn

writes benchmarks/results/transport.{json,md}. Its parts, all of them with real env servers (one process per core) whose
environments do nothing but show an image of 84x84x4 bytes:

- Streams: libbeast's C++ streams in a program of their own (round_trips.cc, built here): actions up, a row of K
  observations down. No inference and, on the learner's side, no Python.
- Pool: all that a learner's process has but a net: an ActorPool, a Python loop that answers its inference with zeros,
  and another one that takes batches of rollouts.
- Queues: Python threads that hand one row each to a BatchingQueue, or ask a DynamicBatcher for an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = str(Path(__file__).resolve().parents[1])
IMAGE = (84, 84, 4)
SERVE, STEP_POOL = "--serve", "--step-pool"
LONGEST_START = 120.0  # seconds until all streams of a pool have handed on a rollout

Transport = Literal["unix", "tcp", "tls"]
Part = Literal["streams", "pool", "queues"]


@dataclass
class Options:
    """What to measure."""

    parts: tuple[Part, ...] = ("streams", "pool", "queues")
    """Parts to measure. The results of the others stay in the report."""
    against: str = ""
    """Another checkout (with its extension built), whose streams and pool are measured in turn with this one's, each
    with its own env servers. Their ratios are a part of the report of their own; the queues are left out."""
    seconds: float = 3.0
    """Measured seconds of each combination of transport, width and number of streams, and of each number of threads."""
    repeats: int = 3
    """Repetitions; the tables show their median, lowest and highest."""
    transports: tuple[Transport, ...] = ("unix", "tcp", "tls")
    """How streams are connected."""
    widths: tuple[int, ...] = (1, 8, 32)
    """Environments of one stream (K)."""
    streams: tuple[int, ...] = (1, 64)
    """Streams at a time."""
    pool_streams: tuple[int, ...] = (1, 16, 64, 256, 1000)
    """Streams of a pool, over unix sockets, with one environment each."""
    pool_seconds: float = 10.0
    """Measured seconds of a pool."""
    unroll_length: int = 20
    """Steps of a pool's rollouts (T)."""
    threads: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Threads that enqueue, or that compute."""
    out: str = os.path.join(ROOT, "benchmarks", "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    sys.path.insert(0, ROOT)
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import git

    others = [os.path.abspath(options.against)] if options.against else []
    measures = list(all_measures(options))
    if "streams" in options.parts:
        for root in [ROOT, *others]:
            subprocess.run(["make", "-s", "-C", os.path.join(root, "csrc"), "round_trips"], check=True)
    found: dict[str, dict] = {}  # part -> setting -> a list of results of each checkout
    for repeat in range(options.repeats):
        for part, setting, measure in measures:
            pair = found.setdefault(part, {}).setdefault(setting, [[] for _ in [ROOT, *others]])
            in_turn = list(zip([ROOT, *others], pair, strict=True))
            for root, results in reversed(in_turn) if repeat % 2 else in_turn:
                results.append(measure(root))
            print(f"{repeat + 1} of {options.repeats}: {part}, {setting}: {[r[-1] for r in pair]}", flush=True)
    origin = {
        "command": shlex.join(["python", "benchmarks/transport.py", *sys.argv[1:]]),
        "commit": git(Path(ROOT), "rev-parse", "HEAD"),
        "hardware": f"{cpu_model()}, {usable_cores()} cores",
        "repeats": options.repeats,
    }
    seconds = {part: options.pool_seconds if part == "pool" else options.seconds for part in found}
    os.makedirs(options.out, exist_ok=True)
    path = Path(options.out, "transport.json")
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    if options.against:
        origin["against"] = git(Path(options.against), "rev-parse", "HEAD")
        parts["comparison"] = origin | {"seconds": seconds, "runs": found}
    else:
        for part, runs in found.items():
            first = {setting: results for setting, (results,) in runs.items()}
            parts[part] = origin | {"seconds": {part: seconds[part]}, "runs": first}
    if "pool" in found:
        parts["comparison" if options.against else "pool"]["unroll_length"] = options.unroll_length
    path.write_text(json.dumps({"observation_bytes": int(np.prod(IMAGE)), "parts": parts}, indent=1) + "\n")
    text = "\n".join(report(parts)) + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)


def all_measures(options: Options) -> Iterator[tuple[Part, str, Callable[[str], dict]]]:
    """What is measured: part, setting, and a function that does it for the root of a checkout."""
    if "streams" in options.parts:
        for num_streams, width, transport in itertools.product(options.streams, options.widths, options.transports):
            setting = f"{transport} K={width} streams={num_streams}"
            yield "streams", setting, partial(measure_streams, transport, width, num_streams, options.seconds)
    if "pool" in options.parts:
        for num_streams in options.pool_streams:
            yield "pool", f"streams={num_streams}", partial(measure_pool, num_streams, options)
    if "queues" in options.parts and not options.against:
        for num_threads, measure in itertools.product(options.threads, (enqueue, compute)):
            yield (
                "queues",
                f"{measure.__name__} threads={num_threads}",
                partial(in_threads, measure, num_threads, options.seconds),
            )


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
            array[...] = self.image if name == "obs" else name == "done"

    def step(self, actions: np.ndarray, row: dict) -> None:
        row["obs"][...] = self.image  # the one copy that every environment makes
        row["done"][...] = False

    def close(self) -> None:
        pass


def serve(task: dict) -> None:
    """An env server's process, until its standard input ends."""
    sys.path.insert(0, task["root"])
    try:
        from beast.hosts import env_server
    except ModuleNotFoundError:  # the other checkout may be of before beast/hosts
        from beast.feeds import env_server  # type: ignore[no-redef, attr-defined]

    allow_descriptors()

    tls = (task["key"].encode(), task["certificate"].encode()) if task["key"] else None
    server = env_server.EnvServer(lambda: Still(task["width"]), task["address"], max_streams=task["streams"], tls=tls)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    os._exit(0)


def allow_descriptors() -> None:
    """Let this process have as many open files and connections as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def env_servers(root: str, transport: Transport, width: int, num_streams: int, certificate: tuple[str, str]):
    """An address for each stream, of as many servers as there are cores, at most one for each stream."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        processes = []
        for number in range(min(os.cpu_count(), num_streams)):
            task = {
                "root": root,
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
        addresses = [process.stdout.readline().strip() for process in processes]
        yield [addresses[stream % len(addresses)] for stream in range(num_streams)]


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


def measure_streams(transport: Transport, width: int, num_streams: int, seconds: float, root: str) -> dict:
    """Round trips/s of all streams together, quantiles in ms of how long one takes, and how many the slowest and the
    fastest stream made."""
    certificate = make_certificate() if transport == "tls" else ("", "")
    with (
        env_servers(root, transport, width, num_streams, certificate) as addresses,
        tempfile.NamedTemporaryFile("w") as file,
    ):
        file.write(certificate[0])
        file.flush()
        program = os.path.join(root, "build", "native", "round_trips")
        command = [program, str(seconds), file.name if transport == "tls" else "", *addresses]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    milliseconds = 1e3 * np.array(done.stdout.split(), float)
    found = re.search(r"lowest (\d+), highest (\d+)", done.stderr)  # checkouts up to 1d40fd5 do not say it
    return {
        # A stream makes one after the other. Their number over `seconds` would count last ones that end later.
        "per_second": num_streams / (milliseconds.mean() / 1e3),
        "p50_ms": float(np.quantile(milliseconds, 0.5)),
        "p99_ms": float(np.quantile(milliseconds, 0.99)),
        "lowest_and_highest": [int(count) / seconds for count in found.groups()] if found else None,
    }


# ------------------------------------------------------------------------------------------------ pool


def measure_pool(num_streams: int, options: Options, root: str) -> dict:
    """What `step_pool` finds in a process of its own, or the error that ends it."""
    with env_servers(root, "unix", 1, num_streams, ("", "")) as addresses:
        task = {"root": root, "addresses": addresses, "T": options.unroll_length, "seconds": options.pool_seconds}
        command = [sys.executable, os.path.abspath(__file__), STEP_POOL]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(task),
                capture_output=True,
                text=True,
                timeout=LONGEST_START + options.pool_seconds + 60,
            )
        except subprocess.TimeoutExpired:
            return {"error": "the process hangs"}
    if done.returncode:
        return {"error": " ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"}
    return json.loads(done.stdout)


def step_pool(task: dict) -> dict:
    """A learner's process without a net, from the first rollout of its slowest stream for so many seconds."""
    sys.path.insert(0, task["root"])
    allow_descriptors()
    import libbeast

    first_batch(libbeast)
    memory_before = status_of_process("VmRSS")
    num_streams = len(task["addresses"])
    batch_width = min(num_streams, 32)
    queue = libbeast.BatchingQueue(
        minimum_batch_size=batch_width, maximum_batch_size=batch_width, maximum_queue_size=2 * batch_width
    )
    batcher = libbeast.DynamicBatcher(maximum_batch_size=1024)
    options = {"connect_timeout": LONGEST_START, **task.get("options", {})}
    pool = libbeast.ActorPool(task["T"], queue, batcher, task["addresses"], (), **options)
    rows = np.zeros(num_streams, np.int64)  # that each stream has shown inference
    num_rollouts = 0
    failures: list[Exception] = []

    def infer() -> None:
        actions = np.zeros((1, 1024), np.int64)
        for batch in batcher:
            env_outputs, _ = batch.get_inputs()
            groups = np.asarray(env_outputs[7])[0]  # after the observation and six fields of the environment
            rows[groups] += 1  # no stream is twice in a batch
            batch.set_outputs(((actions[:, : len(groups)],), ()))

    def learn() -> None:
        nonlocal num_rollouts
        for _ in queue:
            num_rollouts += batch_width

    def run() -> None:
        try:
            pool.run()
        except Exception as error:
            failures.append(error)

    def cpu_seconds() -> float:
        return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])

    threads = [threading.Thread(target=target, daemon=True) for target in (infer, learn, run)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while rows.min() <= task["T"]:
        if failures:
            raise failures[0]
        if time.monotonic() - began > LONGEST_START:
            raise TimeoutError(f"{(rows == 0).sum()} of {num_streams} streams have no row after {LONGEST_START:g} s")
        time.sleep(0.05)
    server_pids = task.get("servers", [])
    rows_before, rollouts_before, cpu_before = rows.copy(), num_rollouts, cpu_seconds()
    servers_before = sum(map(cpu_of_process, server_pids))
    started, steps_before = time.monotonic(), pool.count()
    time.sleep(task["seconds"])
    seconds, steps = time.monotonic() - started, pool.count() - steps_before
    used, paces = cpu_seconds() - cpu_before, (rows - rows_before) / seconds
    result = {
        "per_second": steps / seconds,
        "rollouts_per_second": (num_rollouts - rollouts_before) / seconds,
        "cpu_us": 1e6 * used / steps,
        "servers_cpu_us": 1e6 * (sum(map(cpu_of_process, server_pids)) - servers_before) / steps,
        "memory_mb": (status_of_process("VmRSS") - memory_before) / 1e3 / num_streams,
        "threads": status_of_process("Threads"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "lowest_and_highest": [float(paces.min()), float(paces.max())],
        "start_seconds": started - began,
        "restarts": pool.counters()["restarts"],
    }
    if failures:
        raise failures[0]
    pool.stop()
    batcher.close()
    queue.close()
    for thread in threads:
        thread.join()
    return result


def cpu_of_process(pid: int) -> float:
    """Seconds of CPU that a process has used, in steps of 10 ms."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def status_of_process(name: str) -> int:
    """A number in /proc/self/status; memory is in kB."""
    return int(re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


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


def first_batch(libbeast: Any) -> None:
    """The first batch of a process imports torch."""
    queue = libbeast.BatchingQueue(batch_dim=0)
    queue.enqueue(np.zeros(1))
    next(queue)


def in_threads(measure: Callable, num_threads: int, seconds: float, _root: str) -> dict:
    """Operations/s of all threads together, with the extension of this checkout."""
    import libbeast

    first_batch(libbeast)
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
    return {"per_second": rate}


# ------------------------------------------------------------------------------------------------ report

COPIES = """
| copy of an observation | where | unix, TCP | TLS |
|---|---|---|---|
| environment to row, which lies in the message | env server, numpy | 1 | 1 |
| message to gRPC's memory | env server, grpcio | 1 | 1 |
| encryption and decryption | gRPC on both sides | 0 | 2 |
| to the kernel and from it | both sides | 2 | 2 |
| wire to rollout | learner, csrc/wire.cc `read_row` | 1 | 1 |
| rollout to inference batch | learner, csrc/array.cc `concatenate`; none if one stream is the batch | 1 | 1 |
| rollout to learner's batch | learner; none if one rollout is the batch | 0 or 1 | 0 or 1 |
| in the learner's process, kernel not counted | | 2 or 3 | 3 or 4 |
"""


def report(parts: dict[str, dict]) -> list[str]:
    """The Markdown file."""
    size = int(np.prod(IMAGE))
    lines = [
        "# Transport",
        "",
        "Medians of repetitions (lowest to highest). Learner's side and env servers share the cores.",
        "",
    ]
    for part, report_part in REPORTS.items():
        if part in parts:
            lines += [*report_part(parts[part]), "", origin_of(parts[part]), ""]
    return [*lines, f"## Bytes copied per observation (of {size:,} bytes), counted in the code", COPIES.rstrip()]


def origin_of(part: dict) -> str:
    commits = f"commit {part['commit'][:10]}" + (f" against {part['against'][:10]}" if "against" in part else "")
    seconds = ", ".join(f"{seconds:g} s ({name})" for name, seconds in part["seconds"].items())
    return f"`{part['command']}`, {part['repeats']} repetitions of {seconds}. {part['hardware']}, {commits}."


def spread(values: list[float], form: str = ",.0f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def those_of(results: list[dict], name: str) -> list[float]:
    return [result[name] for result in results if result.get(name) is not None]


def errors_of(results: list[dict]) -> str:
    """What ended some of the repetitions, if any did."""
    errors = those_of(results, "error")
    return f"failed {len(errors)} of {len(results)} times: {errors[0]}" if errors else ""


def median(results: list[dict], name: str, form: str) -> str:
    values = those_of(results, name)
    return f"{statistics.median(values):{form}}" if values else "-"


def unevenness(results: list[dict]) -> str:
    """How many times the pace of the slowest stream the fastest has, in the median and at most."""
    ratios = [highest / lowest if lowest else np.inf for lowest, highest in those_of(results, "lowest_and_highest")]
    return f"{statistics.median(ratios):.2f} (at most {max(ratios):.2f})" if ratios else "-"


def report_streams(part: dict) -> list[str]:
    lines = [
        f"## Streams: round trips of actions up, K observations of {np.prod(IMAGE):,} bytes down",
        "",
        "| transport | streams | K | round trips/s | steps/s | MB/s of observations | p50 ms | p99 ms "
        "| fastest : slowest stream |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, results in part["runs"].items():
        transport, width, num_streams = re.fullmatch(r"(\w+) K=(\d+) streams=(\d+)", setting).groups()
        steps = statistics.median(those_of(results, "per_second")) * int(width)
        lines.append(
            f"| {transport} | {num_streams} | {width} | {spread(those_of(results, 'per_second'))} | {steps:,.0f} "
            f"| {steps * np.prod(IMAGE) / 1e6:,.0f} | {median(results, 'p50_ms', '.3f')} "
            f"| {median(results, 'p99_ms', '.3f')} | {unevenness(results)} |"
        )
    return lines


def report_pool(part: dict) -> list[str]:
    rollout_kb = (part["unroll_length"] + 1) * np.prod(IMAGE) / 1e3
    lines = [
        "## Pool: a learner's process without a net, unix sockets, K = 1",
        "",
        "CPU, memory, threads and descriptors are those of the learner's process, its Python and the copies for "
        "batches included. Memory is what it has more than before the pool was made; a rollout has "
        f"{rollout_kb:,.0f} kB.",
        "",
        "| streams | steps/s | CPU, µs/step | memory, MB/stream | threads | descriptors "
        "| slowest stream, steps/s | fastest | fastest : slowest | start, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, results in part["runs"].items():
        done = [result for result in results if "error" not in result]
        cells = [setting.removeprefix("streams="), errors_of(results)]
        if done:
            paces = np.median(those_of(done, "lowest_and_highest"), axis=0)
            cells[1:] = [
                " ".join([spread(those_of(done, "per_second")), errors_of(results)]).strip(),
                spread(those_of(done, "cpu_us")),
                *(median(done, name, form) for name, form in (("memory_mb", ".2f"), ("threads", ".0f"))),
                median(done, "descriptors", ".0f"),
                *(f"{pace:,.1f}" for pace in paces),
                unevenness(done),
                median(done, "start_seconds", ".1f"),
            ]
        lines.append(f"| {' | '.join(cells + [''] * (10 - len(cells)))} |")
    return lines


def report_queues(part: dict) -> list[str]:
    lines = [
        "## Queues: operations/s of all threads together, called from Python, one small row each",
        "",
        "| threads | `BatchingQueue.enqueue` | `DynamicBatcher.compute` |",
        "|---|---|---|",
    ]
    rates = {setting: spread(those_of(results, "per_second")) for setting, results in part["runs"].items()}
    for count in dict.fromkeys(setting.partition("=")[2] for setting in rates):
        lines.append(f"| {count} | {rates[f'enqueue threads={count}']} | {rates[f'compute threads={count}']} |")
    return lines


def report_comparison(part: dict) -> list[str]:
    lines = [
        "## Beside another checkout, in turn",
        "",
        "Round trips/s of streams, steps/s of pools. Ratios are this one's value to the other one's in the same "
        "repetition, in the median (lowest to highest).",
        "",
        "| | this | the other | ratio | ratio of the CPU, µs/step | threads | memory, MB/stream | fastest : slowest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, runs in part["runs"].items():
        for setting, pair in runs.items():
            cells = [f"{kind}, {setting}"]
            for results in pair:
                rates = those_of(results, "per_second")
                cells.append(" ".join([spread(rates) if rates else "", errors_of(results)]).strip())
            for name in ("per_second", "cpu_us"):
                done = [
                    (this[name], other[name])
                    for this, other in zip(*pair, strict=True)
                    if name in this and name in other
                ]
                cells.append(spread([this / other for this, other in done], ".2f") if done else "-")
            for name, form in (("threads", ".0f"), ("memory_mb", ".2f")):
                cells.append(" / ".join(median(results, name, form) for results in pair))
            cells.append(" / ".join(map(unevenness, pair)))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


REPORTS = {"streams": report_streams, "pool": report_pool, "queues": report_queues, "comparison": report_comparison}


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == [STEP_POOL]:
        print(json.dumps(step_pool(json.load(sys.stdin))))
    else:
        import tyro

        main(tyro.cli(Options, description=__doc__))
