"""Ranks: several learners of one run, which agree on every update.

torchrun starts them, or whoever sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each
has its own environments and inference. Gradients, moments and counts are sums over all ranks, so that all have the same
weights, steps and end. With one rank nothing here does anything.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from beast.errors import InputError, Unreachable, WorkerFailure, first_line, full_text
from beast.learn.nests import map_tensors
from beast.machine import usable_cores

TIMEOUT, COMPILE_TIMEOUT = 60.0, 600.0  # seconds that a rank waits for another in a collective
WAIT = 1.0  # seconds that a rank waits for a batch before it tells the others that it has none
PATIENCE = 5.0  # seconds that the others wait for such a rank; then they go on without it
POLL, HEARD = 0.2, 2.0  # seconds between a rank's looks for a failure, and that rank 0 stays until all have seen it
MOST_GAMES = 64  # of a rank that the others learn of in a round
UPDATES_BETWEEN_CHECKS = 1000  # of the ranks' weights
DRIFT = 1e-6  # of their absolute sum, by which these may differ: processors of other kinds round otherwise
# Flags that say where a rank runs, or that are rank 0's alone.
OWN = {
    *("device", "learner_threads", "num_actors", "num_servers", "pin_actors", "actor_niceness", "server_niceness"),
    *("root", "name", "init_from", "tensorboard", "track", "track_project", "eval_minutes", "eval_episodes"),
    *("eval_env_kwargs", "eval_video", "token_file", "tls_cert", "tls_key", "tls_ca", "listen", "num_slots"),
}
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def number() -> int:
    """Of this one, from 0 on. Rank 0 has the run's directory."""
    return dist.get_rank() if dist.is_initialized() else 0


def join(flags: Any) -> Any:
    """Meet the other ranks that the environment variables name, and return this rank's flags. Raises InputError for
    flags that ranks cannot have or that differ from rank 0's, and for variables that are missing."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return flags
    if missing := [name for name in VARIABLES if name not in os.environ]:
        what = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}"
        raise InputError(f"{what}, and {', '.join(missing)} are not set: use torchrun")
    if hasattr(flags, "num_policies"):
        raise InputError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: several ranks train one policy; start one process")
    if flags.mode != "train":
        raise InputError(f"--mode {flags.mode} with {os.environ['WORLD_SIZE']} ranks: ranks train; start one process")
    reasons = {
        "auto": "it measures this machine, which the others share: measure with one process first",
        "cuda_graphs": "a recording cannot hold the ranks' messages: leave it out",
        "save_replay": "rank 0 would keep the others waiting, whose replays are lost all the same: leave it out",
    }
    for name, reason in reasons.items():
        if getattr(flags, name, False):
            raise InputError(f"--{name} with {os.environ['WORLD_SIZE']} ranks: {reason}")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise InputError(
            "torchrun --max-restarts: restarted ranks would find the addresses of dead ones; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
        )
    local, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpu = flags.device.startswith("cuda") or (flags.device == "auto" and torch.cuda.is_available())
    if has_gpu and flags.device in ("auto", "cuda"):
        flags = replace(flags, device=f"cuda:{local % torch.cuda.device_count()}")
        torch.cuda.set_device(local % torch.cuda.device_count())
    _meet("cpu:gloo,cuda:nccl" if has_gpu else "gloo", COMPILE_TIMEOUT if flags.compile else TIMEOUT)
    with telling():
        require_equal({f"--{name}": repr(x) for name, x in asdict(flags).items() if name not in OWN})
    if not flags.learner_threads and not has_gpu:
        flags = replace(flags, learner_threads=max(usable_cores() // 2 // local_size, 1))
    if number():  # its files are nobody's
        flags = replace(flags, tensorboard=False, track=False, eval_minutes=0.0)
    return flags


def _meet(backend: str, seconds: float) -> None:
    global _failures
    timeout = datetime.timedelta(seconds=seconds)
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        own = dist.PrefixStore("gradients", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=count, timeout=timeout)
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Unreachable(f"not all ranks have met at {where} within {seconds:g} s: {first_line(error)}") from error
    _failures = Failures(dist.PrefixStore("failures", store), rank, count)


class Failures:
    """The first failure of a rank, which all learn by way of the store at which they have met.

    One thread talks to the store, and nobody waits for it for long: beyond a cut link a store never answers.
    """

    def __init__(self, store: Any, rank: int, count: int):
        self._store, self._rank, self._count = store, rank, count
        self._first = ""  # number of the rank and its text
        self._wake, self._is_known = threading.Event(), threading.Event()
        self.own, self._has_left = "", False
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, text: str) -> None:
        """Tell the other ranks of a failure of this one. Only the first of all failures is told."""
        self.own = self.own or f"{self._rank} {text}"
        self._wake.set()
        self._is_known.wait(2 * HEARD)

    def of_others(self) -> str:
        """The failure of another rank, in rank 0 its whole text and elsewhere the last line; empty if none is told."""
        self._is_known.wait(2 * HEARD)
        rank, _, text = self._first.partition(" ")
        if not rank or int(rank) == self._rank:
            return ""
        return f"rank {rank}: {text if self._rank == 0 else text.strip().splitlines()[-1]}"

    def leave(self) -> None:
        """Look for failures no more."""
        self._has_left = True
        self._wake.set()

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its host
            while not self._has_left and not self._store.check(["first"]):
                self._wake.wait(POLL)
                if self.own and not self._has_left:
                    self._store.compare_set("first", "", self.own)
            if not self._has_left:
                self._first = self._store.get("first").decode()
                self._store.add("heard", 1)
            deadline = time.monotonic() + HEARD
            while self._first and self._rank == 0 and self._store.add("heard", 0) < self._count:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL / 10)  # the store may end with this process
        self._is_known.set()


_failures: Failures | None = None  # as torch's group of ranks, which is one for the process


def tell(error: BaseException) -> None:
    """Tell the other ranks that this one fails."""
    if _failures:
        _failures.tell(full_text(error))


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """What is raised in here ends the other ranks, too."""
    try:
        yield
    except Exception as error:
        tell(error)
        raise


def _failure(otherwise: str) -> WorkerFailure:
    """What another rank has told of its failure, or else this."""
    return WorkerFailure((_failures.of_others() if _failures else "") or otherwise)


def _collective(function: Callable, *arguments) -> None:
    """A call of torch.distributed. Raises WorkerFailure where another rank fails."""
    try:
        function(*arguments)
    except RuntimeError as error:
        raise _failure(f"another rank has ended or cannot be reached: {first_line(error)}") from error


def require_equal(own: dict[str, str]) -> None:
    """Raise InputError on all ranks where a rank's flags, or spaces, are not those of rank 0."""
    first = share(own)
    names = [name for name in first.keys() | own if own.get(name) != first.get(name)]
    if names:
        told = ", ".join(f"{name} {own.get(name)} (rank 0 has {first.get(name)})" for name in sorted(names))
        raise InputError(f"{told}: start all ranks with the same flags and environments")
    total(torch.zeros(1))  # rank 0 goes on when all are here


def total(x: Tensor) -> Tensor:
    """The sum over all ranks; with one `x` itself."""
    if size() == 1:
        return x
    summed = x.detach().clone()
    _collective(dist.all_reduce, summed)
    return summed


def totals(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The sum of each over all ranks, in one message; with one rank the tensors themselves."""
    if size() == 1:
        return tensors
    sums = total(torch.cat([x.flatten().float() for x in tensors])).split([x.numel() for x in tensors])
    return tuple(part.view_as(x) for part, x in zip(sums, tensors))


def of_each(x: Tensor) -> Tensor:
    """A row whose sum over all ranks (see `totals`) has each rank's scalar `x`."""
    return torch.stack([x if rank == number() else torch.zeros_like(x) for rank in range(size())])


def moments(weight: Tensor, *tensors: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Of all ranks' samples in two messages: how many there are, at least 1, and the tensors' means and variances.
    `weight`, of the tensors' shape, is 1 for what counts and 0 elsewhere."""
    count, *sums = totals(weight.sum(), *((x * weight).sum() for x in tensors))
    count = count.clamp(min=1)
    means = [x / count for x in sums]
    squares = totals(*(((x - mean).square() * weight).sum() for x, mean in zip(tensors, means)))
    return count, means, [x / count for x in squares]


def all_of(condition: bool) -> bool:
    """Whether it is so on all ranks."""
    return bool(total(torch.tensor(float(condition))) == size())


def sum_gradients(parameters: Iterable[Tensor], metrics: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Give each parameter the sum of the ranks' gradients; one without a gradient sends zeros. Returns the means of the
    metrics, scalars, over the ranks. All of it is one message."""
    metrics = metrics or {}
    if size() == 1:
        return metrics
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    numbers = [metric.detach().float().view(1) for metric in metrics.values()]
    bucket = torch.cat([*(gradient.flatten() for gradient in gradients), *numbers])
    _collective(dist.all_reduce, bucket)
    *parts, means = bucket.split([*(gradient.numel() for gradient in gradients), len(numbers)])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients)])
    return dict(zip(metrics, (means / size()).unbind()))


def share(state: Any) -> Any:
    """Rank 0's state, as a checkpoint may hold it, on all ranks. Others' may be None."""
    if size() == 1:
        return state
    file = io.BytesIO()
    if number() == 0:
        torch.save(state, file)
    length = torch.tensor([file.getbuffer().nbytes])
    _collective(dist.broadcast, length, 0)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if number() == 0:
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    _collective(dist.broadcast, content, 0)
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


class Game(NamedTuple):
    """A game that has ended."""

    episode_return: float
    length: int  # in steps
    task: int


class Round(NamedTuple):
    """What a rank tells the others before an update."""

    leaving: float  # 1: it ends; 2: it has failed
    has: float  # 1: a batch; 0: none now; -1: it never had one
    lacking: float  # seconds since it had none
    updates: float  # that it has made
    steps: float  # that it has counted
    waited: float  # seconds without a batch, since the start
    weights: float  # their absolute sum where they are checked, else 0
    games: list[Game]  # that have ended since the last round


def exchange(own: Round) -> list[Round]:
    """What all ranks tell, in their order."""
    games = own.games[-MOST_GAMES:]
    row = torch.zeros(8 + 3 * MOST_GAMES, dtype=torch.float64)
    row[:8] = torch.tensor([*own[:7], len(games)], dtype=torch.float64)
    row[8 : 8 + 3 * len(games)] = torch.tensor(games, dtype=torch.float64).flatten()
    rows = [torch.zeros_like(row) for _ in range(size())]
    _collective(dist.all_gather, rows, row)
    found = []
    for row in rows:
        *numbers, count = row[:8].tolist()
        games = [Game(x, int(length), int(task)) for x, length, task in row[8:].view(-1, 3)[: int(count)].tolist()]
        found.append(Round._make([*numbers, games]))
    return found


def absolute_sum(tensors: Iterable[Tensor]) -> float:
    return float(sum(x.detach().double().abs().sum() for x in tensors))


def decide(rounds: list[Round]) -> str:
    """What all ranks do now: "end" if one leaves; "hold", that is wait, while one has none for a moment, or never had
    one, or all have none; else "go", where a rank without a batch takes part with nothing."""
    if any(each.leaving for each in rounds):
        return "end"
    lacks_for_a_moment = any(each.has <= 0 and (each.has < 0 or each.lacking < PATIENCE) for each in rounds)
    return "hold" if lacks_for_a_moment or all(each.has <= 0 for each in rounds) else "go"


def void(batch: dict, updates: int) -> dict:
    """A copy of a batch in which no row counts, all rows are final, all floats are 0, and no action is older than
    `updates`."""
    found = map_tensors(without_floats, batch)
    found["counts"] = torch.zeros_like(found["done"])
    found["done"].zero_()
    found["truncated"].zero_()
    found["terminated"].fill_(True)
    found["policy_version"].fill_(updates)
    return found


def without_floats(x: Tensor) -> Tensor:
    """A copy whose floats are 0: 0 times Inf is NaN, and so is 0 times what overflows."""
    return torch.zeros_like(x) if x.is_floating_point() else x.clone()


class Rounds:
    """Brings a rank's rollouts to its learner at the same updates as those of the other ranks."""

    def __init__(self, feed: Any, learner: Any, finished: Callable[[], bool]):
        """`finished()` says whether this rank ends by itself."""
        self._feed, self._learner, self._finished = feed, learner, finished
        self._source: Iterator = iter(())
        self._first: tuple | None = None  # rollout, a copy
        self._lacking_since, self._is_held, self._waited = time.monotonic(), False, 0.0

    def rollouts(self) -> Iterator[tuple[dict, tuple]]:
        """As `Feed.rollouts`, until a rank leaves. Raises WorkerFailure where another rank has failed, and for ranks
        with unequally many updates."""
        item = None
        while True:
            if item is None:
                item = self._next()
            verdict = self._round(item is not None)
            if verdict == "end":
                return
            if verdict == "go":
                if item is None:
                    assert self._first  # nobody goes on with a rank that never had one
                    yield void(self._first[0], self._learner.updates), map_tensors(without_floats, self._first[1])
                else:
                    yield item
                    item, self._lacking_since = None, time.monotonic()
            self._is_held = verdict == "hold"

    def _next(self) -> tuple | None:
        item = next(self._source, None)
        if item is None and not self._feed.closed.is_set():
            is_starving = time.monotonic() - self._lacking_since >= PATIENCE and self._first is not None
            # Where others train meanwhile, they do not wait for this one.
            self._source = self._feed.rollouts(0.0 if is_starving and not self._is_held else WAIT)
            item = next(self._source, None)
        if item is not None:
            self._waited += time.monotonic() - self._lacking_since
        if item is not None and self._first is None:
            self._first = map_tensors(torch.clone, item[0]), tuple(x.clone() for x in item[1])
        return item

    def _round(self, has: bool) -> str:
        has_failed = _failures is not None and bool(_failures.own)
        leaving = 2.0 if has_failed else 1.0 if self._feed.closed.is_set() or self._finished() else 0.0
        lacking = 0.0 if has else time.monotonic() - self._lacking_since
        known = 1.0 if has else -1.0 if self._first is None else 0.0
        learner = self._learner
        weights = 0.0 if learner.updates % UPDATES_BETWEEN_CHECKS else absolute_sum(learner.net.parameters())
        counts = float(learner.updates), float(learner.steps), self._waited + lacking, weights
        rounds = exchange(Round(leaving, known, lacking, *counts, learner.untold_games()))
        self._learner.laps.lap("round")
        self._learner.agreed_steps = int(rounds[0].steps)
        self._learner.waits = [each.waited for each in rounds]
        with self._learner.updating:
            for rank, each in enumerate(rounds):
                if rank != number():
                    self._learner.take_games(each.games)
        if len(updates := {int(each.updates) for each in rounds}) > 1:
            raise WorkerFailure(f"the ranks have made unequally many updates: {sorted(updates)}")
        sums = [each.weights for each in rounds]
        if max(sums) - min(sums) > DRIFT * max(sums):
            what = f"the ranks' weights differ after {learner.updates:,} updates: their absolute sums are {sums}"
            raise WorkerFailure(f"{what}; an update may depend on nothing but what all ranks know (docs/scale.md)")
        failed = [rank for rank, each in enumerate(rounds) if each.leaving == 2]
        if failed and not has_failed:
            raise _failure(f"rank {failed[0]} has failed")
        verdict = decide(rounds)
        if verdict == "end" and _failures and not failed:
            _failures.leave()  # the store may end first
        return verdict


def leave() -> None:
    """Leave the others. Not after a failure: they see that by the end of this process."""
    if _failures:
        _failures.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
