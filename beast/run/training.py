"""One start of a run: its threads, signals and their end, checkpoints, metrics."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from beast.clock import Laps, Profile
from beast.device import (
    choose_device,
    keep_freed_memory,
    num_learner_threads,
    pin_memory,
    stream,
    use_threads,
    wait_for,
)
from beast.envs import family_of, progress, tasks_of
from beast.envs.handover import hand_over
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.envs.spaces import EnvSpaces, categories_by_part
from beast.envs.tasks import with_tasks
from beast.errors import InputError, full_text
from beast.feeds.actors import ActorProcesses, Actors, LocalActors, name_of_maker
from beast.feeds.device import TensorEnvs, TensorMemory
from beast.feeds.feed import Consumer, Feed
from beast.feeds.memory import Fields, RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn import ranks
from beast.learn.learner import Counted, Learner
from beast.learn.normalization import describe_encoders
from beast.run import checkpoint
from beast.run.console import Console
from beast.run.directory import Run
from beast.run.evaluation import Evaluations
from beast.run.metrics import Metrics
from beast.run.policy import agent_of


class Result(NamedTuple):
    """What a run has come to when a start of it ends."""

    steps: int
    updates: int
    mean_return: float  # of the last 100 games; NaN if none has ended
    best: float  # the highest such mean at a checkpoint, or mean of an evaluation; NaN if there was none
    directory: Path
    stopped_by: str  # the signal that ended it ("SIGTERM"), or empty


class Training:
    """A context in which an agent trains: it holds the run's directory, resumes the run, and closes what it was given.

    `cleanup` is an ExitStack of what has to be closed. `resume_free` and errors are those of `Run`.
    """

    def __init__(self, variant: str, flags, learner: Learner, resume_free: set[str], frames_per_step: int):
        self.flags, self.learner = flags, learner
        learner.keep_tasks(tasks_of(flags.env, flags.tasks))
        self.total_steps = flags.total_steps * len(learner.nets)
        self.device = next(learner.net.parameters()).device
        self.cleanup = contextlib.ExitStack()
        self._config = {"variant": variant, **asdict(flags), "ranks": ranks.size()}
        self.told: dict[str, float] = {}  # numbers for the environments
        self.page = progress.Page()  # that they read
        self.spaces: dict[str, Any] = {}  # of the environments, as checkpoints have them
        self.generator = torch.Generator(self.device)  # of action noise
        try:
            with ranks.telling():
                root = flags.root
                if ranks.number():  # its files are nobody's
                    root = self.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="beast-rank"))
                self.run = Run(root, flags.name, self._config, resume_free)
                self.cleanup.callback(self.run.close)
                self._load_weights()
                self.run.record_start()  # last: a checkpoint that does not fit leaves the flags as they are
        except BaseException:
            self.cleanup.close()
            raise
        self.frames_per_step = frames_per_step
        self._tell_progress()
        self._began, self._seconds_before = time.monotonic(), learner.seconds
        self._signal = 0  # that asked for an end
        self._has_told_bad_inputs = False
        self._save_beside: Callable[[], None] | None = None
        self._evaluations: Evaluations | None = None
        self._evaluated: dict[str, float] = {}  # metrics for the next row
        self.latest: dict[str, float] = {}  # the last row of metrics
        self._gathered: list[Counted] = []  # updates since then
        self._waits: list[float] = []  # of the ranks, until then
        self.profile = Profile()
        self.profile.workers["learner"] = lambda: learner.laps.seconds
        self.profile.cores |= {"process": time.process_time, "learner": lambda: learner.laps.cpu_seconds}

    def _load_weights(self) -> None:
        """Take over the run's checkpoint, or where there is none the weights of --init_from. Ranks take those of the
        first, which alone needs the files."""
        learner = self.learner
        is_new = not self.run.resumed and ranks.number() == 0
        for net in learner.nets if is_new and self.flags.init_from else []:
            self.run.log(checkpoint.load_fitting_weights(net, self.flags.init_from))
        own = checkpoint.load(self.run.checkpoint_path) if self.run.resumed else {"net": learner.net.state_dict()}
        shared = ranks.share({"state": own, "num_starts": self.run.num_starts, "resumed": self.run.resumed})
        state, self.run.num_starts, self.run.resumed = (shared[name] for name in ("state", "num_starts", "resumed"))
        self.generator.manual_seed(self.env_seed(2**16, 0))
        if self.run.resumed:
            checkpoint.load_weights(learner.net, state["net"], self.run.checkpoint_path)
            learner.load_state_dict(state)
            self.told = dict(state.get("told", {}))
            if ranks.number() == 0:
                self.run.log(f"resumed at step {learner.steps:,}")
            if (
                state["action_rng"].shape != self.generator.get_state().shape
            ):  # a GPU's generator has another than a CPU's
                self.run.log(f"action noise begins anew: the run was on another kind of device than {self.device}")
            elif ranks.number() == 0:  # the others would draw the same noise
                self.generator.set_state(state["action_rng"])
        elif ranks.size() > 1:
            learner.net.load_state_dict(state["net"])

    def __enter__(self) -> Training:
        """From here on a SIGINT, SIGTERM or SIGHUP is noted; after a SIGINT the next one does what it did before."""
        handlers_before = self.cleanup.enter_context(contextlib.ExitStack())

        def note(number: int, frame) -> None:  # may run inside any call of the main thread, so it takes no lock
            self._signal = number
            if number == signal.SIGINT:  # clusters send SIGTERM again: to all processes, and to the shell above them
                handlers_before.close()

        if threading.current_thread() is threading.main_thread():  # only this one may set handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                if number == signal.SIGHUP and before == signal.SIG_IGN:  # nohup
                    continue
                handlers_before.callback(signal.signal, number, before)
                signal.signal(number, note)
        return self

    def __exit__(self, kind, exception, trace) -> None:
        if kind is None or kind is KeyboardInterrupt:
            ranks.leave()
        elif isinstance(exception, Exception):
            ranks.tell(exception)
        self.cleanup.close()

    def env_seed(self, group: int, life: int) -> int:
        """Other episodes for every group, every restart of its environments, and every start of the run."""
        group += ranks.number() << 20
        words = np.random.SeedSequence([self.flags.seed, self.run.num_starts, group, life]).generate_state(1)
        return int(words[0] >> 2)

    def seconds(self) -> float:
        """Of training, all starts of the run together."""
        return self._seconds_before + time.monotonic() - self._began

    def rollouts(self, feed: Feed) -> Iterator[tuple[dict, tuple]]:
        """Rollouts of the feed (see `Feed.rollouts`) until the run is finished. Several ranks train at the same time,
        and end after the same update."""
        if ranks.size() > 1:
            yield from ranks.Rounds(feed, self.learner, self.finished).rollouts()
            return
        for rollout in feed.rollouts():
            yield rollout
            if self.finished():
                return

    def ends(self, feed: Feed) -> bool:
        """Whether it is finished, or something else has closed the feed."""
        return feed.closed.is_set() or self.finished()

    def finished(self) -> bool:
        """Whether all steps or minutes are used up."""
        return self.learner.steps >= self.total_steps or 0 < 60 * self.flags.total_minutes <= self.seconds()

    def tell(self, **numbers: float) -> None:
        """Tell the environments numbers, which they find in `beast.envs.training_progress().told`: at once on this
        machine, elsewhere within two seconds. Checkpoints have them. Raises InputError for one that is not finite, and
        for more than fit a message."""
        told = {**self.told, **{name: float(x) for name, x in numbers.items()}}
        size = len(progress.encode(progress.Progress(10**12, 10**12, told)))
        if size > progress.MAX_BYTES or not all(map(math.isfinite, told.values())):
            what = f"{size} bytes of JSON, at most {progress.MAX_BYTES} are sent, of finite numbers"
            raise InputError(f"training.tell: {what}: {str(told)[:200]}")
        self.told = told
        self._tell_progress()

    def _tell_progress(self) -> None:
        now = progress.Progress(self.learner.steps, self.total_steps, self.told)
        self.page.write(progress.encode(now))

    def record(self, counted: Counted | None, more: dict[str, float] | None = None) -> None:
        """Take in the numbers of an update and `more` of the agent; write a row if due. Call it while `updating`."""
        if counted and more:
            counted.metrics.update(more)
        self._gather(counted)
        self._tell_progress()
        if self.learner.bad_inputs and not self._has_told_bad_inputs:
            self._has_told_bad_inputs = True  # once a start
            self.run.log(f"an update was skipped: {self.learner.bad_inputs}")
        if self.learner.steps // self.flags.log_steps != self._row_steps // self.flags.log_steps:
            self._write_metrics()
            self.learner.laps.lap("records")

    def run_threads(
        self, feed: Feed, *, infer: Callable[[], None], learn: Callable[[], None], introduction: str,
        others: Iterable[Callable[[], None]] = (), save_beside: Callable[[], None] | None = None,
    ) -> Result:  # fmt: skip
        """Run `infer`, `learn` and each of `others` in threads of their own, until all steps or minutes are used up, a
        signal asks for an end or one of them ends. All of them have to end when the feed is closed.

        A checkpoint is left in any case; `save_beside` is called with each, while no update is under way. SIGTERM and
        SIGHUP end a run as its last step does. The first failure is logged, with its traceback unless it is the user's
        to mend, and raises SystemExit(1). A SIGINT raises KeyboardInterrupt when all is saved and told.
        """
        flags, learner, run = self.flags, self.learner, self.run
        self._feed, self._save_beside = feed, save_beside
        if flags.eval_minutes:
            seed = np.random.SeedSequence([flags.seed, 0]).generate_state(1)  # starts count from 1: no other's seeds
            self._evaluations = Evaluations(run.path, flags, int(seed[0] >> 2), run.log)
            self.cleanup.callback(self._evaluations.close)
        resume_step = learner.steps if run.resumed else None
        self._metrics = Metrics(run.path, resume_step, flags.tensorboard, flags.track, flags.track_project)
        self.cleanup.callback(self._metrics.close)
        parameters = sum(parameter.numel() for parameter in learner.net.parameters())
        precision = " in bf16" if getattr(learner.nets[0], "amp", False) else ""
        emulators = {"beast": "Beast's emulator", "ale": "ale-py's emulator", "cuda": "the GPU's emulator"}
        emulator = f" on {emulators[flags.atari_backend]}" if flags.atari_backend in emulators else ""
        name = flags.env + (emulator if family_of(flags.env).has_emulators else "")
        net = f"{parameters:,} parameters on {self.device}{precision}"
        observed = dict.fromkeys(each for net in learner.nets for each in describe_encoders(net))
        note = (lambda line: None) if ranks.number() else run.log  # of the run, which one rank tells
        note(", ".join([f"{flags.name}: {name}", *observed, net, feed.description, introduction]))
        limits = self.total_steps, flags.total_minutes
        console = Console(*limits, self.frames_per_step, learner.steps, learner.seconds / 60)
        self.cleanup.callback(console.close)
        show = (lambda *_, **__: None) if ranks.number() else console.update
        stop = threading.Event()
        failure: BaseException | None = None

        def fail(error: BaseException) -> None:
            nonlocal failure
            if failure is None:  # later ones may follow from it
                failure = error
                run.log(full_text(error))
                ranks.tell(error)

        def end_all(future: Future) -> None:
            if error := future.exception():
                fail(error)
            stop.set()
            feed.close()

        def compute(loop: Callable, laps: Laps, num_threads: int, urgent: bool) -> None:
            use_threads(num_threads)
            with stream(self.device, urgent):
                laps.begin()
                loop()

        works: list[Callable[[], None]] = [
            partial(compute, infer, feed.laps, 1, True),
            partial(compute, learn, learner.laps, num_learner_threads(flags), False),
            *others,
        ]
        self.profile.workers |= {"inference": lambda: feed.laps.seconds, **feed.workers}
        self.profile.cores |= {"inference": lambda: feed.laps.cpu_seconds, **feed.cores}
        self._row_steps = learner.steps
        self._row_began = self._began = time.monotonic()
        self.profile.begin()
        threads = ThreadPoolExecutor(len(works))
        try:
            for work in works:
                threads.submit(work).add_done_callback(end_all)
            next_save = time.monotonic() + 60 * flags.checkpoint_minutes
            while not (stop.wait(0.25) or self._signal or self.finished()):
                show(learner.steps, self.latest)
                self._evaluate()
                if time.monotonic() >= next_save:
                    self.save()
                    next_save = time.monotonic() + 60 * flags.checkpoint_minutes
        except Exception as error:  # no checkpoint can be written, say
            fail(error)
        finally:
            times = self.profile.table(time.monotonic() - self._began)  # before those that wait for the others' end
            feed.close()
            threads.shutdown()
            for finish in (lambda: self._gather(learner.settle()), self._write_metrics, self.save):
                try:
                    finish()
                except Exception as error:  # the checkpoint is written in any case
                    fail(error)
        show(learner.steps, self.latest, final=True)
        mean_return = float(np.mean(learner.returns)) if learner.returns else math.nan
        mean = f"mean return of the last {len(learner.returns)} episodes {mean_return:.2f}"
        mean = mean if learner.returns else "no episode has ended yet"
        path = "" if ranks.number() else ", " + os.path.join(flags.root, flags.name, run.checkpoint_path.name)
        run.log(f"stopped at step {learner.steps:,}: {mean}, {learner.seconds / 60:.1f} minutes{path}")
        note(times)
        if learner.tasks.names:
            note(learner.tasks.table())
        if failure:
            sys.exit(1)
        if learner.steps >= self.total_steps:
            note("all of --total_steps are done: raise them to train on, or give another --name")
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        best = learner.best_eval if self._evaluations else learner.best
        best = best if math.isfinite(best) else math.nan
        stopped_by = signal.Signals(self._signal).name if self._signal else ""
        return Result(learner.steps, learner.updates, mean_return, best, run.path, stopped_by)

    def save(self) -> None:
        """Write checkpoint.pt, and best.pt where the last 100 games are the best yet and no evaluations choose it."""
        learner, failure = self.learner, None
        if ranks.number():
            return
        with learner.updating:
            mean, policy = learner.best_policy()
            is_best = math.isfinite(mean) and mean > learner.best
            if is_best:
                learner.best = mean
            state = self._state()
            try:
                if self._save_beside:
                    self._save_beside()
            except Exception as error:  # the checkpoint is written all the same
                failure = error
        if is_best and not self._evaluations:
            self._save_best(state, policy)  # before the file that says how good it is
        checkpoint.save(self.run.checkpoint_path, state)
        if failure:
            raise failure

    def _save_best(self, state: dict, policy: int) -> None:
        """Write best.pt, unless returns do not say which policy is better."""
        if self.learner.compares_returns:
            checkpoint.save(self.run.best_path, checkpoint.alone(state, policy))

    def _state(self) -> dict:
        """What a checkpoint holds, with the updates counted that a GPU has queued. Call it while `updating`."""
        self._gather(self.learner.settle())
        self.learner.seconds = self.seconds()
        wait_for(self.device)  # the learner's thread has a stream of its own
        state = copy.deepcopy({"config": self._config, **self.learner.state_dict()})
        state["agent"] = agent_of(self.flags, self.learner.nets[0], self._config["variant"])
        state |= {"action_rng": self.generator.get_state(), "told": dict(self.told), "spaces": self.spaces}
        wait_for(self.device)
        return state

    def _evaluate(self) -> None:
        """Take in the evaluation that has ended, and start the one that is due."""
        evaluations, learner = self._evaluations, self.learner
        if evaluations is None:
            return
        if found := evaluations.result():
            with learner.updating:
                self._evaluated = found
                self._write_metrics()
                if evaluations.film_path.exists():
                    self._metrics.film(learner.steps, evaluations.film_path)
            if math.isfinite(evaluations.mean) and evaluations.mean > learner.best_eval:
                self._save_best(evaluations.state, evaluations.policy)
                learner.best_eval = evaluations.mean
        if evaluations.is_due():
            with learner.updating:
                state = self._state()
            evaluations.start(state)

    def _gather(self, counted: Counted | None) -> None:
        if counted:  # a GPU's come one update late
            self._gathered.append(counted)

    def _write_metrics(self) -> None:
        """A row of metrics over all updates since the last one, but for losses those that were not skipped."""
        if not self._gathered:
            return
        learner, now = self.learner, time.monotonic()
        seconds = now - self._row_began
        shares = self.profile.shares(seconds)
        good = [each.metrics for each in self._gathered if not each.is_bad] or [each.metrics for each in self._gathered]
        names = dict.fromkeys(name for metrics in good for name in metrics)
        row = {name: float(np.mean([metrics[name] for metrics in good if name in metrics])) for name in names}
        highest = [name for name in names if name.endswith("stats/policy_lag_max")]
        row |= {name: max(each.metrics.get(name, 0.0) for each in self._gathered) for name in highest}
        row |= {
            "frames": learner.steps * self.frames_per_step, "hours": self.seconds() / 3600,
            "charts/SPS": (learner.steps - self._row_steps) / seconds,
            "stats/learner_wait": shares.get("time/learner_wait", 0.0),
            **learner.numbers(), **shares, **self._feed.measure(seconds, shares),
        }  # fmt: skip
        if learner.waits:
            waits = [after - before for after, before in zip_longest(learner.waits, self._waits, fillvalue=0.0)]
            row |= {"stats/learner_wait": max(waits) / seconds, "stats/slowest_rank": waits.index(max(waits))}
            self._waits = learner.waits
        for line in self._feed.env_metrics.complaints():
            self.run.log(line)
        row |= self._evaluated
        self._metrics.write(learner.steps, row)
        self.latest, self._evaluated = row, {}
        self._gathered.clear()
        self._row_began, self._row_steps = now, learner.steps


def prepare(flags, create_env: Callable, validate: Callable, several_kinds: bool = False) -> tuple[Any, EnvSpaces]:
    """The flags, checked and completed by what `create_env` makes, and the spaces that it has (see `probe_env`).

    They are checked before any environment is made, and again when its id is known.
    """
    keep_freed_memory()
    flags = ranks.join(flags)
    with ranks.telling():
        validate(flags)
        flags = with_tasks(flags)
        device, _ = choose_device(flags.device, flags.amp)
        if device.index is not None:
            torch.cuda.set_device(device)  # where environments on a GPU are made
        if flags.atari_backend == "cuda" and device.type == "cpu" and "device" not in flags.env_kwargs:
            raise InputError(
                f"--atari_backend cuda needs a GPU, and --device {flags.device} is the CPU: give --device cuda where "
                "torch finds one, or --atari_backend beast"
            )
        spaces = probe_env(create_env, flags, several_kinds)
        ranks.require_equal(spaces.comparable())
        return validate(replace(flags, env=spaces.env_id, atari_backend=spaces.atari_backend)), spaces


def consumer_of(learner: Learner, max_policy_lag: int) -> Consumer:
    """What a feed is told of this learner."""
    return Consumer(
        device=next(learner.net.parameters()).device, core_state=learner.nets[0].initial_state(1),
        newest_update=lambda: learner.updates, record_games=learner.record_games, laps=learner.laps,
        max_policy_lag=max_policy_lag,
    )  # fmt: skip


def open_feed(
    training: Training, create_env: Callable, spaces: EnvSpaces, num_groups: int, script: str, *,
    batch_width: int, max_policy_lag: int = 0, more_fields: Fields | None = None, actor_flags: Any = None,
    arrived: Callable[[dict], None] | None = None,
) -> SharedMemoryFeed:  # fmt: skip
    """Start actors on this machine, and the feed of what they write; the training closes them.

    Each actor process runs `script`, the agent's file, until it comes to `run_if_actor`. Raises InputError where it
    would not have the environments of `create_env`. For several policies: `more_fields` of rows, the `actor_flags` of
    the script where the training has more, and what `SharedMemoryFeed` does with a row that has `arrived`.
    """
    flags, log, script = training.flags, training.run.log, os.path.abspath(script)
    training.spaces = checkpoint.describe_spaces(spaces)
    has_actors = not flags.deterministic and not spaces.on_device
    has_others = has_actors or flags.eval_minutes  # processes with environments
    if has_others:
        hand_over(flags.env, script)
    maker = name_of_maker(script, create_env) if has_others else ""
    if flags.eval_minutes and maker:
        raise InputError(
            f"--eval_minutes {flags.eval_minutes:g}: an evaluation runs {script}, which has not your {maker}; leave it "
            "out, or edit create_env in a copy of that file"
        )
    layout = {**rollout_fields(spaces), **(more_fields or {})}, flags.num_slots, flags.unroll_length, flags.group_width
    memory: RolloutMemory | TensorMemory
    actors: Actors
    seed, page = training.env_seed, training.page
    if not has_actors:
        progress.follow(page)
    if spaces.on_device:
        memory = TensorMemory(*layout, training.device)
        actors = TensorEnvs(create_env, flags, spaces, memory, num_groups, seed)
    else:
        memory = RolloutMemory(*layout, categories_by_part(spaces))
        if training.device.type == "cuda":
            training.cleanup.callback(pin_memory(memory.buffer, training.device, log))
        if has_actors:
            actors = ActorProcesses(script, actor_flags or flags, memory, num_groups, seed, log, maker, page)
        else:
            actors = LocalActors(create_env, flags, memory, num_groups, seed)
    training.cleanup.callback(actors.close)
    consumer = consumer_of(training.learner, max_policy_lag)
    order = {"lock_step": flags.deterministic, "stagger": flags.stagger}
    return SharedMemoryFeed(consumer, memory, actors, batch_width, **order, arrived=arrived)
