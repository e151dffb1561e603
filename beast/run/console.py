"""What a run prints: its progress in one line, and messages above it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from beast.envs.tasks import short_names
from beast.errors import of_this_rank

MOST_TASKS = 8  # of whose returns the line tells; the log ends with a table of all


def tell(message: str) -> None:
    """Print on stderr. Training goes on if the terminal is gone."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
        print(of_this_rank(message), file=sys.stderr, flush=True)


class Console:
    """The progress of training in one line: live on a terminal, else a plain line at most every 10 seconds.

    Earlier starts of the run have done `start_step` of `total_steps` and `start_minutes` of `total_minutes` (0: no
    limit). Speed and time left are those of the last minute of this start, its warm-up left out.
    """

    def __init__(self, total_steps: int, total_minutes: float, frames_per_step: int, start_step=0, start_minutes=0.0):
        self._total_steps, self._total_seconds = total_steps, 60 * total_minutes or math.inf
        self._frames_per_step, self._start_step = frames_per_step, start_step
        self._began = time.monotonic() - 60 * start_minutes
        self._first: tuple[float, int] | None = None  # (time, step) when the first steps have been learned
        self._samples: deque[tuple[float, int]] = deque(maxlen=61)  # the same each second of the last minute
        terminal = Terminal(stderr=True)
        is_live = sys.stderr.isatty() and not terminal.is_dumb_terminal
        self._live = Live(console=terminal, auto_refresh=False) if is_live else None
        self._shown = -math.inf if is_live else time.monotonic()  # so the first plain line has a speed

    def update(self, step: int, values: Mapping[str, float], final: bool = False) -> None:
        """Show the progress at agent step `step` with the latest row of metrics, unless it was shown a moment ago.

        `final` shows it in any case, with the speed of this whole start.
        """
        now = time.monotonic()
        if step > self._start_step and (not self._samples or now - self._samples[-1][0] >= 1):
            self._samples.append((now, step))
            self._first = self._first or (now, step)
        if not final and now - self._shown < (0.25 if self._live else 10):
            return
        self._shown, seconds = now, now - self._began
        since, since_step = (self._first if final else self._samples and self._samples[0]) or (now, step)
        speed = (step - since_step) / (now - since) if now > since else 0.0
        left = min((self._total_steps - step) / speed if speed > 0 else math.inf, self._total_seconds - seconds)
        fields = self._fields(step, values, speed)
        fields["time"] = f"in {duration(seconds)}" if final else f"{duration(left)} left"
        if not self._live:
            tell(" | ".join(fields.values()))
            return
        for least_important in ("waiting", "games", "lag", "frames", "tasks"):
            if len(" │ ".join(fields.values())) > self._live.console.width:
                fields.pop(least_important, None)
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.start()
            self._live.update(Text(" │ ".join(fields.values()), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """End the live display; its last line stays."""
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def _fields(self, step: int, values: Mapping[str, float], speed: float) -> dict[str, str]:
        """The parts of the line. Their widths are constant, except for values of unusual size."""
        width = len(f"{self._total_steps:,}")
        fields = {"steps": f"{step:{width},} steps {100 * step / self._total_steps:3.0f} %"}
        fields["speed"] = f"{speed:6,.0f} steps/s"
        if self._frames_per_step > 1:
            fields["frames"] = f"{speed * self._frames_per_step:7,.0f} frames/s"
        episodic_return = values.get("charts/episodic_return")
        fields["return"] = "mean return " + (f"{'–':>8}" if episodic_return is None else f"{episodic_return:8.2f}")
        if "stats/policy_lag_mean" in values:
            mean, highest = values["stats/policy_lag_mean"], values.get("stats/policy_lag_max", math.nan)
            fields["lag"] = f"lag {mean:4.1f} max {highest:2.0f} updates"
        if "stats/learner_wait" in values:
            learner, actors = values["stats/learner_wait"], values.get("stats/actor_wait", math.nan)
            fields["waiting"] = f"waiting: learner {100 * learner:2.0f} % actors {100 * actors:2.0f} %"
        of_tasks = [name for name in values if name.startswith("task/") and name.endswith("/episodic_return")]
        if of_tasks:
            score = f"score {values['charts/score']:.3f} " if "charts/score" in values else ""
            names = short_names([name.removeprefix("task/").removesuffix("/episodic_return") for name in of_tasks])
            shown = [f"{short} {values[name]:.4g}" for short, name in zip(names, of_tasks[:MOST_TASKS])]
            more = [f"and {len(of_tasks) - MOST_TASKS} more"] if len(of_tasks) > MOST_TASKS else []
            fields["tasks"] = score + " ".join(shown + more)
        told = [f"{name[4:][:20]} {value:.3g}" for name, value in values.items() if name.startswith("env/")][:3]
        if told:
            fields["games"] = " ".join(told)
        return fields


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03; ?:??:?? if unknown."""
    if not math.isfinite(seconds):
        return "?:??:??"
    seconds = max(round(seconds), 0)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
