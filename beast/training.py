"""One start of a run, whatever gathers its rollouts: how long it lasts, what is saved, told and written down."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict

import numpy as np
import torch

from beast import checkpoint, envs, runs
from beast.learner import Learner
from beast.machine import wait_for
from beast.profile import Profile
from beast.threads import Crew, Interrupts


class Training:
    """A context in which a variant trains: it has the run's directory, resumes it, and closes all that it was given.

    Raises ValueError as `runs.Run` does. `resume_free` are the flags that may differ from the run's.
    """

    def __init__(self, variant: str, flags, learner: Learner, resume_free: set[str]):
        self.flags, self.learner = flags, learner
        self.device = next(learner.net.parameters()).device
        self.cleanup = contextlib.ExitStack()  # everything that has to be closed, in the reverse of its order
        config = {"variant": variant, **asdict(flags)}
        self.run = runs.Run(flags.root, flags.name, config, resume_free=resume_free)
        self.cleanup.callback(self.run.close)
        self._config = config
        self._interrupts = Interrupts()
        self.generator = torch.Generator(self.device)  # of action noise
        self.generator.manual_seed(self.env_seed(2**16, 0))
        if self.run.resumed:
            state = checkpoint.load(self.run.checkpoint_path)
            learner.load_state_dict(state)
            self.generator.set_state(state["action_rng"])
            self.run.log(f"resumed at step {learner.steps:,}")
        self.frames_per_step = envs.frames_per_step(flags.env)
        self.updating = threading.Lock()  # whoever holds it sees a learner between two updates
        self.latest: dict[str, float] = {}  # the last row of metrics
        self._gathered: list[dict] = []  # statistics of the updates since then
        self.profile = Profile()
        self.profile.workers["learner"] = lambda: learner.laps.seconds
        self.profile.cores |= {"process": time.process_time, "learner": lambda: learner.laps.cpu_seconds}
        self._row_began, self._row_steps = time.monotonic(), learner.steps
        self._began, self._seconds_before = time.monotonic(), learner.seconds

    def __enter__(self) -> Training:
        self.cleanup.enter_context(self._interrupts)
        return self

    def __exit__(self, *exception) -> None:
        self.cleanup.close()

    def env_seed(self, group: int, life: int) -> int:
        """Other episodes for every group, every restart of its environments, and every start of the run."""
        words = np.random.SeedSequence([self.flags.seed, self.run.num_starts, group, life]).generate_state(1)
        return int(words[0] >> 2)

    def seconds(self) -> float:
        """Of training, all starts of the run together."""
        return self._seconds_before + time.monotonic() - self._began

    def finished(self) -> bool:
        """Whether all steps or minutes are used up."""
        out_of_time = self.flags.total_minutes and self.seconds() >= 60 * self.flags.total_minutes
        return self.learner.steps >= self.flags.total_steps or bool(out_of_time)

    def learn(self, rollouts: Iterable[dict], batches: Iterable[tuple[dict, tuple]], publish: Callable) -> None:
        """One update for each batch, `publish(net, version)` after each. `rollouts` are the same rows on the CPU,
        looked through for games that have ended."""
        laps = self.learner.laps
        with self.updating:
            for rollout in rollouts:
                self.learner.record_episodes(envs.finished_episodes(rollout))
            laps.lap("records")
            for batch, core_state in batches:
                self._gather(self.learner.update(batch, core_state))
                publish(self.learner.net, self.learner.updates)
                laps.lap("publish")
            if self._gathered and self.learner.steps // self.flags.log_steps != self._row_steps // self.flags.log_steps:
                self._write_metrics()
                laps.lap("records")

    def conduct(self, works: list[Callable], wake_all: Callable, measure: Callable, introduction: str) -> None:
        """Run each of `works` in a thread until all steps or minutes are used up, a signal asks for an end or one of
        them fails; a checkpoint is left in any case.

        `works` are called with a function that tells whether to stop; `wake_all()` makes their blocking calls return.
        `measure(seconds, shares)` gives the variant's statistics over the seconds since it was last called, of which
        `shares` are the profile's. A failure is logged with its traceback and raises SystemExit(1).
        """
        flags, learner, run = self.flags, self.learner, self.run
        self._measure = measure
        self._metrics = runs.Metrics(run.path, learner.steps if run.resumed else None, flags.tensorboard, flags.track)
        self.cleanup.callback(self._metrics.close)
        parameters = sum(parameter.numel() for parameter in learner.net.parameters())
        precision = " in bf16" if getattr(learner.net, "amp", False) else ""
        run.log(f"{flags.name}: {flags.env}, {parameters:,} parameters on {self.device}{precision}, {introduction}")
        console = runs.Console(
            flags.total_steps, flags.total_minutes, self.frames_per_step, learner.steps, learner.seconds / 60
        )
        self.cleanup.callback(console.close)
        crew = Crew(wake_all)

        def stop() -> bool:
            return crew.stop.is_set() or self.finished()

        self._row_began = self._began = time.monotonic()
        self.profile.begin()
        try:
            for work in works:
                crew.start(lambda work=work: work(stop))
            next_save = time.monotonic() + 60 * flags.checkpoint_minutes
            while not (crew.stop.wait(0.25) or self._interrupts.received or self.finished()):
                console.update(learner.steps, self.latest)
                if time.monotonic() >= next_save:
                    self.save()
                    next_save = time.monotonic() + 60 * flags.checkpoint_minutes
        finally:
            crew.end()
            times = self.profile.table(time.monotonic() - self._began)
            if crew.failure:  # told before anything else can fail
                is_told = getattr(crew.failure, "is_told", False)  # it brings its worker's own traceback
                run.log(str(crew.failure) if is_told else "".join(traceback.format_exception(crew.failure)))
            self._gather(learner.settle())
            if self._gathered:
                self._write_metrics()
            self.save()
        console.update(learner.steps, self.latest, final=True)
        mean = "no episode has ended yet"
        if learner.returns:
            mean = f"mean return of the last {len(learner.returns)} episodes {np.mean(learner.returns):.2f}"
        run.log(f"stopped at step {learner.steps:,}: {mean}, {learner.seconds / 60:.1f} minutes, {run.checkpoint_path}")
        run.log(times)
        if crew.failure:
            sys.exit(1)
        if learner.steps >= flags.total_steps:
            run.log("all of --total_steps are done: raise them to train on, or give another --name")

    def begin_learning(self) -> None:
        """The calling thread is the learner's: it gets its share of the cores, and its time counts."""
        torch.set_num_threads(self.flags.learner_threads or max(1, (os.cpu_count() or 1) // 2))
        self.learner.laps.begin()

    def save(self) -> None:
        """Write checkpoint.pt, and best.pt where the last 100 games are the best yet."""
        learner = self.learner
        with self.updating:
            self._gather(learner.settle())
            learner.seconds = self.seconds()
            mean = float(np.mean(learner.returns)) if learner.returns else -math.inf
            is_best = len(learner.returns) == learner.returns.maxlen and mean > learner.best
            learner.best = mean if is_best else learner.best
            wait_for(self.device)  # the learner's thread has a stream of its own
            state = copy.deepcopy({"config": self._config, **learner.state_dict()})
            state["action_rng"] = self.generator.get_state()
            wait_for(self.device)
        checkpoint.save(self.run.checkpoint_path, state)
        if is_best:
            checkpoint.save(self.run.best_path, state)

    def _gather(self, stats: dict[str, float]) -> None:
        if stats:  # a GPU's come one update late
            self._gathered.append(stats)

    def _write_metrics(self) -> None:
        """A row of metrics over all updates since the last one, but for losses those that were not skipped."""
        learner, now = self.learner, time.monotonic()
        seconds = now - self._row_began
        shares = self.profile.shares(seconds)
        good = [stats for stats in self._gathered if math.isfinite(stats["losses/grad_norm"])] or self._gathered
        row = {name: float(np.mean([stats[name] for stats in good])) for name in good[0]}
        row["stats/policy_lag_max"] = max(stats["stats/policy_lag_max"] for stats in self._gathered)
        row |= {
            "frames": learner.steps * self.frames_per_step,
            "hours": self.seconds() / 3600,
            "charts/SPS": (learner.steps - self._row_steps) / seconds,
            "charts/learning_rate": learner.learning_rate(),
            "stats/bad_updates": learner.bad_updates,
            "stats/updates": learner.updates,
            "stats/episodes": learner.episodes,
            "stats/learner_wait": shares.get("time/learner_wait", 0.0),
            **shares,
            **self._measure(seconds, shares),
        }
        if learner.returns:
            row["charts/episodic_return"] = float(np.mean(learner.returns))
            row["charts/episodic_length"] = float(np.mean(learner.lengths))
        self._metrics.write(learner.steps, row)
        self.latest = row
        self._gathered.clear()
        self._row_began, self._row_steps = now, learner.steps
