"""A run's directory: its flags and history, metrics, log and the line on the console."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import math
import numbers
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from beast.checkpoint import replace_file

# The columns that dashboards know come first in metrics.csv; all others follow in the order in which they turn up.
COLUMNS = (
    *("step", "frames", "hours", "charts/episodic_return", "charts/episodic_length", "charts/SPS"),
    *("charts/learning_rate", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl"),
    *("losses/clipfrac", "losses/explained_variance", "stats/policy_lag_mean", "stats/policy_lag_max"),
    *("stats/inference_batch", "stats/learner_wait", "stats/actor_wait"),
)


class Run:
    """The directory `<root>/<name>/`, made or taken up again, and locked against other processes until `close`.

    `config.json` holds every flag of the latest start; `meta.json` the commit, changes, versions and hardware of each
    start, and never the environment's variables, where secrets live. A run with a checkpoint is resumed (`resumed`);
    one without has nothing to go on from and begins anew.

    Raises ValueError if another process is training here, or if a flag differs from the run's that is not in
    `resume_free`; nothing in the directory has been changed then.
    """

    def __init__(
        self, root: str | os.PathLike, name: str, config: Mapping[str, Any], *, resume_free: Collection[str] = ()
    ):
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"--name {name!r}: the name of a run is that of one directory; put others into --root")
        self.path = Path(root) / name
        self.checkpoint_path = self.path / "checkpoint.pt"
        self.best_path = self.path / "best.pt"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
        except OSError as error:
            raise ValueError(
                f"{self.path}: cannot be used as a run's directory ({error}); choose another --root"
            ) from error
        try:
            config = json.loads(json.dumps(dict(config)))  # as it will be read again: tuples are lists
            self.resumed = self.checkpoint_path.exists()
            starts = []
            if self.resumed:
                refuse_contradictions(self.path, config, resume_free)
                starts = read_json(self.path / "meta.json", missing={"starts": []})["starts"]
            starts.append({"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "argv": sys.argv, **describe_machine()})
            self.num_starts = len(starts)  # this one included
            write_json(self.path / "config.json", config)
            write_json(self.path / "meta.json", {"starts": starts})
        except BaseException:
            self.close()
            raise

    def log(self, message: str) -> None:
        """Append `message` to out.log with the time, and print it on stderr."""
        with open(self.path / "out.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
        tell(message)

    def close(self) -> None:
        """Give the directory free for other processes. The kernel does it for a process that is killed."""
        self._lock.close()


def lock_directory(path: Path) -> io.FileIO:
    """Hold the directory's lock until the returned file is closed. Raises ValueError naming the process that has it."""
    file = open(path / "lock", "a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode().strip()
        file.close()
        raise ValueError(
            f"{path}: process {holder} is training in this run's directory; stop it first, or choose another --name"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
    return file


def refuse_contradictions(path: Path, config: Mapping[str, Any], resume_free: Collection[str]) -> None:
    """Raise ValueError naming every flag whose value differs from the one that the run at `path` has.

    A flag that the run does not know was added to the code since, and contradicts nothing.
    """
    old = read_json(path / "config.json", missing=None)
    if old is None:
        raise ValueError(
            f"{path}: there is a checkpoint.pt but no config.json to compare the flags with; "
            "put it back, move the checkpoint away to begin anew, or choose another --name"
        )
    differing = [flag for flag in config if flag in old and flag not in resume_free and config[flag] != old[flag]]
    if differing:
        lines = [f"  --{flag} {config[flag]} (the run has {old[flag]})" for flag in differing]
        remedies = " ".join(f"--{flag} {shlex.quote(str(old[flag]))}" for flag in differing)
        raise ValueError(
            f"{path}: there is a run of this name, and it cannot be resumed with other values for\n"
            + "\n".join(lines)
            + f"\nchoose another --name for a new run, or resume this one with {remedies}"
        )


def read_json(path: Path, missing: Any) -> Any:
    """The content of a JSON file, or `missing` if there is none. Raises ValueError naming a file that is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); repair it, or choose another --name") from error


def write_json(path: Path, value: Any) -> None:
    replace_file(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def describe_machine() -> dict[str, Any]:
    """What a result may depend on besides the flags: code, versions, hardware. No environment variables."""
    code = Path(__file__).resolve().parent.parent
    commit = git(code, "rev-parse", "HEAD")
    versions = {"python": platform.python_version()}
    for package in ("beast", "torch", "numpy", "gymnasium", "ale-py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "commit": commit,
        "diff": git(code, "diff", "--no-ext-diff", "--no-textconv", "HEAD") if commit else None,
        "versions": versions,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def git(directory: Path, *command: str) -> str | None:
    """What a git command prints, or None where there is no git, no checkout or no commit."""
    try:
        # Without optional locks: a training run must not get in the way of the user's own git commands.
        done = subprocess.run(
            ["git", "--no-optional-locks", *command], cwd=directory, capture_output=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as its maker calls it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def tell(message: str) -> None:
    """Print on stderr; a terminal that has gone away is no reason to stop training."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
        print(message, file=sys.stderr, flush=True)


class Metrics:
    """Numbers over agent steps: rows of `<path>/metrics.csv`, and on request TensorBoard and Weights & Biases.

    `resume_step` is the step of the checkpoint that the run goes on from: rows and events after it describe training
    that was lost, and are dropped. None begins a new file. With `track`, raises ValueError if wandb is missing.
    """

    def __init__(self, path: str | os.PathLike, resume_step: int | None, tensorboard: bool = True, track: bool = False):
        self._wandb = start_wandb(Path(path), new=resume_step is None) if track else None
        self._path = Path(path) / "metrics.csv"
        self._columns, rows = list(COLUMNS), []
        if resume_step is not None and self._path.exists():
            self._columns, rows = read_rows(self._path)
            rows = [row for row in rows if int(row["step"]) <= resume_step]
        self._rewrite(rows)
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second and 60 MB, so only when it is used

            self._tensorboard = SummaryWriter(str(path), purge_step=0 if resume_step is None else resume_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at agent step `step`; they are in the file when this returns. A new name is a new column."""
        new = [name for name in values if name not in self._columns]
        if new:
            _, rows = read_rows(self._path)
            self._columns += new
            self._file.close()
            self._rewrite(rows)
        self._file.write(self._line({"step": step, **values}))
        self._file.flush()
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log({"step": step, **values})

    def close(self) -> None:
        """Close the files and end the mirrors."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Replace metrics.csv by the current columns and `rows`, and open it for appending."""
        text = self._line(dict(zip(self._columns, self._columns))) + "".join(self._line(row) for row in rows)
        replace_file(self._path, lambda file: file.write(text.encode()))
        self._file = open(self._path, "a", encoding="utf-8", newline="")

    def _line(self, row: Mapping[str, Any]) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(as_text(row.get(name, "")) for name in self._columns)
        return line.getvalue()


def as_text(value: Any) -> str:
    """A table's cell. Nine digits tell any two float32 apart; integers keep all of theirs."""
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, numbers.Integral) else f"{float(value):.9g}"


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and whole rows of a metrics.csv; a last row that a crash cut short is left out."""
    content = path.read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(content[: content.rfind("\n") + 1]))
    rows = [row for row in reader if None not in row.values() and row.get("step", "").isdigit()]
    return list(reader.fieldnames or COLUMNS), rows


def start_wandb(path: Path, new: bool) -> Any:
    """A run of Weights & Biases with the same name, flags and steps, taken up again where the training is."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "--track needs Weights & Biases, which is not installed: pip install wandb, or leave --track off"
        ) from None
    id_path = path / "wandb_id"
    if new or not id_path.exists():
        id_path.write_text(uuid.uuid4().hex)
    config = read_json(path / "config.json", missing={})
    run = wandb.init(
        project="beast", name=path.name, id=id_path.read_text(), resume="allow", config=config, dir=str(path)
    )
    # An x axis of our own: wandb's may not go back, and a resume does.
    run.define_metric("*", step_metric="step")
    return run


class Console:
    """How training goes, in one line: live on a terminal, else a plain line at most every 10 seconds.

    `start_step` and `start_minutes` are what earlier starts of the run have done of `total_steps` and `total_minutes`
    (0 minutes: no limit). Speed and time left are those of the last minute of this start, and begin to be measured
    when the first steps have been learned, so that neither a resume nor the warm-up distorts them.
    """

    PLAIN_SECONDS = 10.0
    LIVE_SECONDS = 0.25
    WINDOW_SECONDS = 60.0

    def __init__(
        self,
        total_steps: int,
        total_minutes: float,
        frames_per_step: int,
        start_step: int = 0,
        start_minutes: float = 0.0,
    ):
        from rich.console import Console as Terminal
        from rich.live import Live

        self._total_steps, self._total_seconds = total_steps, 60 * total_minutes
        self._frames_per_step, self._start_step = frames_per_step, start_step
        self._step_width = len(f"{total_steps:,}")
        self._began = time.monotonic() - 60 * start_minutes
        self._samples: deque[tuple[float, int]] = deque()  # (time, step), since the first learned step
        self._warm: tuple[float, int] | None = None  # the first of them
        terminal = Terminal(stderr=True)
        is_live = sys.stderr.isatty() and not terminal.is_dumb_terminal
        self._live = Live(console=terminal, auto_refresh=False) if is_live else None
        self._shown = -math.inf if is_live else time.monotonic()  # the first plain line has a speed to tell

    def update(self, step: int, values: Mapping[str, float], final: bool = False) -> None:
        """Show the state at agent step `step`; call it as often as you like. `values` are those given to Metrics.

        `final` shows it in any case, with the speed of this whole start.
        """
        now = time.monotonic()
        if step > self._start_step and (not self._samples or now - self._samples[-1][0] >= 1):
            self._samples.append((now, step))
            self._warm = self._warm or (now, step)
            while now - self._samples[0][0] > self.WINDOW_SECONDS:
                self._samples.popleft()
        if not final and now - self._shown < (self.LIVE_SECONDS if self._live else self.PLAIN_SECONDS):
            return
        self._shown = now
        since = self._warm if final else self._samples[0] if self._samples else None
        speed = (step - since[1]) / (now - since[0]) if since and now > since[0] else 0.0
        fields = self._fields(step, values, speed)
        if final:
            fields["time"] = f"in {duration(now - self._began)}"
        else:
            left = (self._total_steps - step) / speed if speed > 0 else math.inf
            if self._total_seconds:
                left = min(left, self._total_seconds - (now - self._began))
            fields["time"] = f"{duration(left)} left"
        if not self._live:
            tell(" | ".join(fields.values()))
            return
        from rich.text import Text

        for least_important in ("waiting", "lag", "frames"):
            if len(" │ ".join(fields.values())) > self._live.console.width:
                fields.pop(least_important, None)
        self._live.start()
        self._live.update(Text(" │ ".join(fields.values()), no_wrap=True, overflow="ellipsis"), refresh=True)

    def print(self, message: str) -> None:
        """Print a message above the live line."""
        tell(message)  # rich has put itself in front of stderr while the line is live

    def close(self) -> None:
        """Leave the last line as it is and give the terminal back."""
        if self._live:
            self._live.stop()

    def _fields(self, step: int, values: Mapping[str, float], speed: float) -> dict[str, str]:
        """The parts of the line, each of constant width as long as its value is of usual size."""
        fields = {
            "steps": f"{step:{self._step_width},} steps {100 * step / self._total_steps:3.0f} %",
            "speed": f"{speed:6,.0f} steps/s",
        }
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
        return fields


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, like 1:02:03; ?:??:?? if unknown."""
    if not math.isfinite(seconds):
        return "?:??:??"
    seconds = max(round(seconds), 0)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
