"""The feed of env servers: libbeast's batcher, queue and streams."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

import libbeast
from beast.device import Fence
from beast.envs.rows import nest_observations, written_by
from beast.envs.spaces import action_shape_dtype
from beast.feeds.actors import PROGRESS_SECONDS
from beast.feeds.feed import Consumer, Feed, Rows
from beast.hosts.throttle import RefusalLog, Throttled
from beast.learn.nests import map_tensors


class RemoteFeed(Feed):
    """Rows from streams of env servers, answered in batches, and their rollouts in the order in which they arrive."""

    def __init__(
        self, consumer: Consumer, action_space: Space, addresses: list[str], servers, listener, *,
        unroll_length: int, group_width: int, batch_width: int, queue_width: int, inference_width: int,
        log: Callable[[str], None], min_streams: int, progress: Callable[[], bytes] = bytes, **stream_options,
    ):  # fmt: skip
        """`addresses` has one entry for each stream, or there is a libbeast.EnvListener where streams dial in.
        `stream_options` are those of libbeast.ActorPool. `servers` are LocalServers, whose CPU time is told, or None.
        Groups wait while `queue_width` columns wait for the learner. Inference answers at most `inference_width` rows
        at once; 0 chooses. `log` gets a line when a stream is lost. Environments are sent what `progress` returns."""
        super().__init__(consumer, servers and servers.processes)
        self._env_outputs = ["obs", *written_by("env"), *written_by("feed")]
        self._agent_outputs = [*written_by("agent"), "number"]
        self._log, self._is_lost, self._listener, self._min_streams = log, threading.Event(), listener, min_streams
        # A caller that is let in and lost again and again fills no log.
        self._log_lost = Throttled(log) if listener else log
        self.workers = {"streams": self._stream_seconds}
        self.num_streams = listener.max_streams if listener else len(addresses)
        self._num_measured = 1 if listener else self.num_streams  # most at a time so far
        num_rows = group_width * self.num_streams
        self.queue = libbeast.BatchingQueue(
            batch_dim=1, minimum_batch_size=batch_width, maximum_batch_size=batch_width, maximum_queue_size=queue_width
        )
        # A group's rows fit a CPU's cache, and need no gathering.
        inference_width = inference_width or (group_width if self.device.type == "cpu" else num_rows)
        self.batcher = libbeast.DynamicBatcher(batch_dim=1, maximum_batch_size=inference_width)
        shape, dtype = action_shape_dtype(action_space)
        # What a group carries from row to row: the core's state and its last action, which the net sees, too.
        state = consumer.core_state, torch.from_numpy(np.zeros((1, 1, *shape), dtype))
        self.pool = libbeast.ActorPool(
            unroll_length, self.queue, self.batcher, addresses, state, row_fields=list(written_by("env")),
            listener=listener, min_streams=min_streams,
            # No method of this feed: the pool would keep it, and no garbage collector sees through the pool.
            log=partial(_tell_lost, self._log_lost, self._is_lost), **stream_options,
        )  # fmt: skip
        self._progress, self._told, self._told_at = progress, b"", -math.inf
        self._exchange()
        # As many as streams, queue and learner hold, twice, as a stream may be slower than the others.
        self._seen = SeenObservations(2 * (num_rows + queue_width + batch_width) * unroll_length, self.device)
        self._to_device = partial(Tensor.to, device=self.device, non_blocking=True)
        self._group_width = group_width
        self.description = f"{'up to ' if listener else ''}{self.num_streams} groups of {group_width} environments"
        self._waiting: list[int] = []  # columns in the queue, at each update since the last row of metrics

    def close(self) -> None:
        for queue in (self.queue, self.batcher):
            with contextlib.suppress(RuntimeError):  # another thread was the first to close it
                queue.close()
        self.pool.stop()
        self.closed.set()

    def watch(self) -> None:
        """Until the feed closes: log how many environments are reset at the start, and when lost streams are back.
        Where streams dial in, log how many there are."""
        if self._listener:
            return self._watch_callers()
        total, is_started, logged_at = self._group_width * self.num_streams, False, time.monotonic()
        while not self.closed.wait(0.1):
            self._exchange()
            # A server connects when it has reset a group.
            reset = self._group_width * self.pool.counters()["streams_connected"]
            now = time.monotonic()
            if reset == total:
                is_started = True
                if self._is_lost.is_set():
                    self._is_lost.clear()
                    self._log(f"connected again: all {self.num_streams} streams")
            elif now - logged_at > PROGRESS_SECONDS and (not is_started or self._is_lost.is_set()):
                logged_at = now
                self._log(f"{'connected' if is_started else 'resetting'} environments: {reset} of {total}")

    def _watch_callers(self) -> None:
        num_come, logged_at = 0, time.monotonic()
        log_refusals = RefusalLog(self._listener, self._log)
        while not self.closed.wait(0.1):
            log_refusals()
            self._exchange()
            counters, now = self.pool.counters(), time.monotonic()
            connected, come = counters["streams_connected"], counters["streams_come"]
            is_waiting = connected < self._min_streams and now - logged_at > PROGRESS_SECONDS
            if is_waiting:
                self._log(
                    f"waiting for env servers on {self._listener.address}: {connected} streams now, {come} have come, "
                    f"{self._min_streams} are needed (--min_envs)"
                )
            elif come > num_come and now - logged_at > 1.0:
                self._log(f"{connected} streams of env servers now, {come} have come")
                num_come, self._num_measured = come, max(self._num_measured, connected)
            else:
                continue
            logged_at = now

    def _exchange(self) -> None:
        """Take in the numbers of games, and send how far training is: every second at most."""
        for told in self.pool.take_metrics():
            self.env_metrics.add(told)
        now, progress = time.monotonic(), self._progress()
        if progress != self._told and now - self._told_at > 1.0:
            self._told, self._told_at = progress, now
            self.pool.tell(progress)

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        self._exchange()
        waiting, self._waiting = self._waiting, []
        return {
            "stats/actor_wait": shares["time/streams_enqueue"],
            "stats/queue_waiting_columns": sum(waiting) / max(len(waiting), 1),
            "stats/env_restarts": self.pool.counters()["restarts"],
            "stats/streams": self.pool.counters()["streams_connected"],
            **super().measure(seconds, shares),
        }

    def _stream_seconds(self) -> dict[str, float]:
        counters: dict = {**self.pool.counters()}
        waits = ("environment", "inference", "enqueue")  # of a stream, in turn
        return {stage: counters[f"seconds_{stage}"] / self._num_measured for stage in waits}

    def acting(self) -> Iterator[Rows]:
        for batch in self.batcher:
            self.laps.lap("wait")
            env_outputs, (core_state, action) = batch.get_inputs()
            inputs = dict(zip(self._env_outputs, env_outputs)) | {"action": action}
            inputs |= split_observations(inputs["obs"])
            inputs, core_state = map_tensors(self._to_device, (inputs, core_state))
            self.laps.lap("gather")
            yield Rows(inputs, core_state, partial(self._answer, batch, inputs["obs"]))

    def _answer(self, batch, obs: dict, action, policy_logits, baseline, version, core_state) -> None:
        self.laps.lap("forward")
        versions = torch.as_tensor(version, dtype=torch.int32).expand(baseline.shape).contiguous()
        outputs = (action, policy_logits, baseline, versions, self._seen.keep(obs)), (core_state, action)
        batch.set_outputs(map_tensors(lambda x: x.cpu(), outputs))  # waits for all of it
        self.laps.lap("answer")

    def rollouts(self, limit: float | None = None) -> Iterator[tuple[dict, tuple]]:
        laps = self.consumer.laps
        with contextlib.suppress(libbeast.ClosedBatchingQueue):
            while True:
                item = self.queue.get(limit)
                laps.lap("wait")
                if item is None:  # nothing came in time
                    return
                (env_outputs, agent_outputs), (core_state, _) = item
                names = self._env_outputs + self._agent_outputs
                rollout = dict(zip(names, (*env_outputs, *agent_outputs)))  # [T+1, B, …]
                rollout |= split_observations(rollout["obs"])
                obs, numbers = rollout.pop("obs"), rollout.pop("number")
                lag = self.consumer.newest_update() - int(rollout["policy_version"][1:].min())
                if not self._accept(map_tensors(Tensor.numpy, rollout), lag):
                    continue
                batch, core_state = map_tensors(self._to_device, (rollout, core_state))
                batch["obs"] = self._seen.find(obs, numbers)
                laps.lap("gather")
                yield batch, core_state
                self._waiting.append(self.queue.size())


def _tell_lost(log: Callable[[str], None], is_lost: threading.Event, message: str) -> None:
    log(message)
    is_lost.set()


def split_observations(parts: dict) -> dict:
    """{"image": x, "final_obs/image": y} -> {"obs": {"image": x}, "final_obs": {"image": y}}."""
    return nest_observations({name if name.startswith("final_obs/") else f"obs/{name}": x for name, x in parts.items()})


class SeenObservations:
    """The latest observations that inference has seen, kept on its GPU, so that the learner need not upload them again.

    `keep` numbers the observations, the numbers travel through the rollouts with the actions, and `find` looks them up.
    On a CPU there is nothing to save: nothing is kept, and all numbers are 0.
    """

    def __init__(self, num_observations: int, device: torch.device, is_keeping: bool | None = None):
        """Finds the last `num_observations`, less at most one batch of inference's; takes memory of the device for
        twice as many. `is_keeping` is for tests: to keep them on a CPU."""
        self._half, self._to_device = num_observations, partial(Tensor.to, device=device, non_blocking=True)
        self._is_keeping = device.type != "cpu" if is_keeping is None else is_keeping
        self._kept: dict[str, torch.Tensor] = {}
        self._next = 0  # number n lies at n modulo twice `num_observations`
        self._lock = threading.Lock()
        self._found = Fence(device)

    def keep(self, observations: dict) -> torch.Tensor:
        """Take in what inference has on its device, [1, K, …] by name; the numbers [1, K], on the CPU. They may go to
        the learner as soon as the host has waited for inference's stream."""
        count = next(iter(observations.values())).shape[1]
        if not self._is_keeping:
            return torch.zeros(1, count, dtype=torch.int64)
        size = 2 * self._half
        if not self._kept:
            self._kept = {name: x.new_empty((size, *x.shape[2:])) for name, x in observations.items()}
        with self._lock:
            first = self._next if self._next % size + count <= size else self._next + size - self._next % size
            if self._next // self._half != (first + count) // self._half:
                self._found.wait()  # the other half is written over next; the learner's stream may be behind
            for name, x in observations.items():
                self._kept[name][first % size : first % size + count] = x[0]
            self._next = first + count
        return torch.arange(first, first + count).unsqueeze(0)

    def find(self, observations: dict, numbers: torch.Tensor) -> dict:
        """A batch's observations [T+1, B, …] on the device, by its own copies of them and `numbers` [T+1, B], both on
        the CPU. Row t+1 of `numbers` is that of observation t.

        The last row always goes up again, as its number is not known before the next rollout, and so does everything
        if not all are still kept.
        """
        if self._is_keeping:
            # Outside of the lock: for pageable memory the host may have to wait, and inference shall not.
            places = self._to_device(numbers[1:] % (2 * self._half))
            last = map_tensors(lambda x: self._to_device(x[-1:]), observations)
            with self._lock:
                if int(numbers[1:].min()) >= self._next - self._half:
                    found = {name: torch.cat([self._kept[name][places], last[name]]) for name in observations}
                    self._found.set()
                    return found
        return map_tensors(self._to_device, observations)
