"""Kills streams at random moments and checks every row that a learner gets: `python tests/attacks/kills.py`.

Env servers in this process count their steps, and two pools of libbeast step them: one calls the servers, the other is
dialed. Between them is a proxy, a process of its own, that cuts each connection after a random time, be it amidst a
hello or a row. Environments raise now and then, too. No rollout may have rows of two lives, miss a row or repeat one,
and every rollout must arrive whose rows the learner had before its stream was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import libbeast  # noqa: E402
from beast.hosts import dialer, env_server  # noqa: E402

T, K = 5, 3
PADDING = 20_000  # bytes of a row of one environment, so that a cut may come in the midst of it
PROXY = "--proxy"


@dataclass
class Options:
    """How many, of how many streams."""

    kills: int = 10_000
    """Connections that are cut, half of them of each kind."""
    streams: int = 64
    """Streams of each pool."""
    seconds: float = 3.0
    """Mean time until a connection is cut; with less, 64 streams that connect at once hardly get to a rollout."""
    seed: int = 1
    """Of the moments."""


@dataclass
class Life:
    """What a group of environments did, and what the learner got of it."""

    actions: int = 0
    has_ended: bool = False
    rollouts: int = 0
    last_row: dict = field(default_factory=dict)


class Checked:
    """K environments that count their steps, in the form that `EnvServer` serves."""

    observation_fields = {"obs": ((3,), "int64"), "padding": ((PADDING,), "uint8")}
    structure = {"obs": "obs", "padding": "padding"}
    num_envs, action, observation_space, action_space = K, ((), "int64"), "", ""

    def __init__(self, lives: dict[int, Life], errors: list[str], chance_to_raise: float):
        self._lives, self._errors, self._chance = lives, errors, chance_to_raise
        self._life: Life | None = None

    def reset(self, seed: int, row: dict) -> None:
        self._end()
        self._seed, self._step = seed, 0
        self._life = self._lives[seed]
        self._write(row)

    def step(self, actions, row: dict) -> None:
        if not (np.asarray(actions) == self._step).all():
            self._errors.append(f"life {self._seed}: actions {actions} came for step {self._step}")
        self._life.actions += 1
        if random.random() < self._chance:
            raise RuntimeError("raises by chance")
        self._step += 1
        self._write(row)

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._life:
            self._life.has_ended = True

    def _write(self, row: dict) -> None:
        for name, array in row.items():
            if name not in ("obs", "padding"):
                array[...] = 0
        row["done"][...] = self._step == 0
        row["obs"][...] = [[self._seed, k, self._step] for k in range(K)]
        row["padding"][...] = self._step % 251


class Learner:
    """A pool, its agent, and the check of all that comes."""

    def __init__(self, lives: dict[int, Life], errors: list[str], addresses: list[str], **options):
        self._lives, self._errors = lives, errors
        self.num_rollouts, self._newest = 0, {}  # group -> (life, seed)
        self._queue = libbeast.BatchingQueue(minimum_batch_size=K, maximum_batch_size=K, maximum_queue_size=4 * K)
        self._batcher = libbeast.DynamicBatcher(maximum_batch_size=256, timeout_ms=2)
        self.pool = libbeast.ActorPool(
            T, self._queue, self._batcher, addresses, (), min_streams=0, log=lambda line: None, **options
        )
        self._threads = [threading.Thread(target=run) for run in (self._run, self._act, self._check)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._queue.close()
        self._batcher.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            self.pool.run()
        except Exception as error:
            self._errors.append(f"run() raised {error}")

    def _act(self) -> None:
        for batch in self._batcher:
            (observation, *_), _ = batch.get_inputs()
            steps = np.asarray(observation["obs"])[..., 2].copy()
            batch.set_outputs(((steps, steps), ()))

    def _check(self) -> None:
        for ((observation, _, done, *_, group, life, _), (action, _)), _ in self._queue:
            self.num_rollouts += 1
            numbers, padding = np.asarray(observation["obs"]), np.asarray(observation["padding"])
            seed, first = int(numbers[0, 0, 0]), int(numbers[0, 0, 2])
            group, life = int(group[0, 0]), int(life[0, 0])
            record = self._lives[seed]
            rows = np.arange(first, first + T + 1)
            checks = {
                "rows of two lives": (numbers[..., 0] == seed).all() and (np.asarray(done).all(1) == (rows == 0)).all(),
                "columns that are exchanged": (numbers[..., 1] == np.arange(K)).all(),
                "a row that is missing": (numbers[..., 2] == rows[:, None]).all(),
                "a row that was written over": (padding == (rows % 251)[:, None, None]).all(),
                "an action of another row": (np.asarray(action) == np.maximum(rows - 1, 0)[:, None]).all(),
                "a rollout that is missing": first == record.rollouts * T,
                "a life that is not new": self._newest.get(group, (-1, 0))[0] < life
                or self._newest[group] == (life, seed),
            }
            self._errors += [f"life {seed}, rollout {record.rollouts}: {name}" for name, ok in checks.items() if not ok]
            record.rollouts += 1
            self._newest[group] = life, seed


def main(options: Options) -> None:
    lives: dict[int, Life] = defaultdict(Life)
    errors: list[str] = []
    dialer.PAUSE = dialer.FULL_PAUSE = (0.02, 0.2)
    dialer.MAX_FAILURES = 10**9
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="beast-") as directory, contextlib.ExitStack() as stack:
        called, dialed = f"unix:{directory}/called", f"unix:{directory}/dialed"

        def proxy(address: str, seed: int) -> subprocess.Popen:
            path = address.removeprefix("unix:")
            arguments = [path + "-proxy", path, str(options.kills // 2), str(options.seconds), str(seed)]
            process = subprocess.Popen([sys.executable, __file__, PROXY, *arguments], stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            assert process.stdout.readline() == "listens\n"
            return process

        def make_group() -> Checked:
            return Checked(lives, errors, 0.001)

        server = env_server.EnvServer(make_group, called, max_streams=options.streams + 16)
        server.start()
        stack.callback(server.stop)
        listener = libbeast.EnvListener(dialed, max_streams=options.streams + 16)
        proxies = [proxy(called, options.seed), proxy(dialed, options.seed + 1)]
        dialing = dialer.Dialer(make_group, [f"{dialed}-proxy"], max_streams=options.streams, log=lambda line: None)
        dialing.start()
        stack.callback(dialing.stop)
        listener.first_hello()
        caller = Learner(lives, errors, [f"{called}-proxy"] * options.streams, seed=1, max_env_restarts=10**6)
        listening = Learner(lives, errors, [], seed=2, listener=listener)
        for process in proxies:
            while process.poll() is None and not errors:
                time.sleep(1)
                print(
                    f"{time.monotonic() - began:5.0f} s: {len(lives)} lives, "
                    f"{caller.num_rollouts} + {listening.num_rollouts} rollouts",
                    flush=True,
                )
        if errors:  # the proxies would go on until all their cuts are made
            for process in proxies:
                process.kill()
        killed = [life for life in list(lives.values()) if life.has_ended]
        time.sleep(2)  # what the queues hold arrives
        lost = sum(life.rollouts < (life.actions - 1) // T for life in killed)
        cut = [int((process.stdout.read().split() or [0])[0]) for process in proxies]
        caller.close(), listening.close()
    seconds, num_rollouts = time.monotonic() - began, caller.num_rollouts + listening.num_rollouts
    print(
        f"{sum(cut)} connections were cut ({cut[0]} that the learner made, {cut[1]} that it took) in {seconds:.0f} s: "
        f"{len(lives)} lives, {num_rollouts} rollouts, {lost} completed rollouts lost, {len(errors)} errors"
    )
    for error in errors[:20]:
        print(error)
    if not (caller.num_rollouts and listening.num_rollouts):
        errors.append("a pool had no rollout at all: nothing was checked")
        print(errors[-1])
    sys.exit(bool(errors or lost))


async def cut_connections(path: str, server_path: str, count: int, mean_seconds: float, seed: int) -> None:
    """Hands on what comes to the socket `path`, and cuts each connection after a time, until `count` are cut."""
    moments, num_cut, done = random.Random(seed), 0, asyncio.Event()

    async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_cut
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(server_path)
        except OSError:
            return writer.transport.abort()
        both = [asyncio.create_task(hand_on(*ends)) for ends in ((reader, server_writer), (server_reader, writer))]
        _, unfinished = await asyncio.wait(both, timeout=moments.expovariate(1 / mean_seconds))
        num_cut += bool(unfinished)
        server_writer.transport.abort()
        writer.transport.abort()
        await asyncio.wait(both)
        if num_cut >= count:
            done.set()

    async with await asyncio.start_unix_server(serve, path):
        print("listens", flush=True)
        await done.wait()
    print(num_cut, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [PROXY]:
        path, server_path, count, seconds, seed = sys.argv[2:]
        asyncio.run(cut_connections(path, server_path, int(count), float(seconds), int(seed)))
    else:
        main(tyro.cli(Options, description=__doc__))
