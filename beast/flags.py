"""Flags that every variant has, flags that cannot be, and how a user is told."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Literal


@dataclass
class RunFlags:
    """What is trained for how long, where it is written and what it runs on: nothing of the agent."""

    mode: Literal["train", "test"] = "train"
    """train, or play whole games with a run's checkpoint (test)."""
    env: str = "PongNoFrameskip-v4"
    """Environment id: `<Game>NoFrameskip-v4` or `ALE/<Game>-v5` (Atari), `MinAtar/<Game>-v0`, any of gymnasium's, or
    `module:id`. --mode test plays the one that the checkpoint was trained on."""
    name: str = ""
    """Name of the run; a run of this name that exists is resumed. Empty: `<variant>-<env>-<time>`."""
    root: str = "runs"
    """Directory that holds the runs."""
    seed: int = 1
    """Seeds environments, weights and action sampling; a run with other seeds is an independent repetition."""

    total_steps: int = 3_000_000
    """Agent steps to train for (times 4 for Atari frames); the learning rate decays towards this count."""
    total_minutes: float = 0.0
    """Minutes of training, earlier starts of the run included, after which it stops; 0 means no limit."""
    max_env_restarts: int = 5
    """Times in a row that lost environments are replaced before their loss ends the run; 10 minutes of work begin a
    new row."""
    env_timeout: float = 60.0
    """Seconds after which environments that do not answer count as lost."""
    max_bad_updates: int = 10
    """Updates in a row with a NaN or Inf in loss or gradients that are skipped before the run stops."""

    device: str = "auto"
    """Where learner and inference compute: cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    amp: Literal["auto", "on", "off"] = "auto"
    """bfloat16 in the encoders of images; auto where the hardware has it (a GPU, AVX512-BF16 or AMX), as it is slow
    elsewhere."""
    channels_last: bool = True
    """Keep images with their channels innermost, the order in which convolutions are fastest."""
    compile: bool = False
    """torch.compile the net, for the learner and for inference: a minute at the start. A CPU was no faster, with
    small nets slower; a GPU was not tried. MonoBeast's --mode tune --compile measures it."""
    learner_threads: int = 0
    """CPU threads of the learner; 0 takes half of the cores. Inference has one."""

    log_steps: int = 20_000
    """Agent steps between two rows of metrics."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; there is always one at the end."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.csv."""
    track: bool = False
    """Mirror metrics to Weights & Biases (needs `pip install wandb` and an account)."""

    episodes: int = 10
    """--mode test: whole games to play; mean and standard error are over them."""
    greedy: bool = False
    """--mode test: take the most probable action instead of sampling."""
    checkpoint: str = ""
    """--mode test: checkpoint file to play; empty takes the run's newest."""
    video: str = ""
    """--mode test: file to film the first game into (.mp4; needs `pip install imageio-ffmpeg`)."""


# Flags that may differ when a run is resumed. More total steps stretch the decay of the learning rate from there on.
FREE_ON_RESUME = {
    *("mode", "name", "root", "total_steps", "total_minutes", "max_env_restarts", "env_timeout", "max_bad_updates"),
    *("device", "amp", "channels_last", "compile", "learner_threads", "log_steps", "checkpoint_minutes"),
    *("tensorboard", "track", "episodes", "greedy", "checkpoint", "video"),
}

RUN_LIMITS = {
    **{name: (1, 10**12) for name in ("total_steps", "log_steps")},
    **{name: (1, 10**6) for name in ("max_bad_updates", "episodes")},
    **{name: (0, math.inf) for name in ("total_minutes", "learner_threads", "max_env_restarts", "seed")},
    **{name: (1e-6, math.inf) for name in ("env_timeout", "checkpoint_minutes")},
}


def check_limits(flags, limits: dict[str, tuple[float, float]]) -> None:
    """Raise ValueError for the first flag that is not within its limits (lowest, highest); NaN never is."""
    for name, (lowest, highest) in limits.items():
        value = getattr(flags, name)
        if not lowest <= value <= highest:
            raise ValueError(f"--{name} {value}: it must lie between {lowest} and {highest}")


def check_widths(group_width: int, batch_width: int) -> None:
    """Raise ValueError unless a batch is a part of one rollout or several whole ones."""
    K, B = group_width, batch_width
    if K % B and B % K:
        raise ValueError(
            f"--group_width {K} and --batch_width {B}: one must divide the other, so that a batch is a part of one "
            f"rollout or several whole ones; try --batch_width {math.gcd(K, B)} or {K * max(1, round(B / K))}"
        )


def run_name(variant: str, flags: RunFlags) -> str:
    """The run's name as given, or one made of variant, environment and time."""
    return flags.name or f"{variant}-{flags.env.replace('/', '-').replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def exit_with_message(*own_functions: str):
    """End the program with one line instead of a traceback where the user's input is at fault.

    That is where one of the errors below was raised by a module of `beast` or in one of `own_functions`: their messages
    say what to change. A fault in other code keeps its traceback.
    """
    try:
        yield
    except (ValueError, MemoryError, ImportError, FileNotFoundError, PermissionError, ConnectionError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1]
        ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
        if not raised_in.filename.startswith(ours) and raised_in.name not in own_functions:
            raise
        sys.exit(f"error: {error}")
