"""The flags of every run, and their limits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from beast.errors import InputError


@dataclass
class RunFlags:
    """Flags of a run whatever its agent: the task, the training time, the hardware, the records."""

    # The run.
    mode: Literal["train", "test"] = "train"
    """train, or play whole games with a run's checkpoint (test)."""
    env: str = "PongNoFrameskip-v4"
    """Environment id: `<Game>NoFrameskip-v4` or `ALE/<Game>-v5` (Atari), `MinAtar/<Game>-v0`, any id of gymnasium, or
    `module:id`. --mode test plays the environment of the checkpoint."""
    name: str = ""
    """Name of the run. An existing run of this name is resumed. Empty: `<variant>-<env>-<time>`."""
    root: str = "runs"
    """Directory that holds the runs."""
    seed: int = 1
    """Seed of environments, weights and action sampling. A run with another seed is an independent repetition."""
    init_from: str = ""
    """Checkpoint whose weights a new run begins with, as far as they fit the net; the log says what did not fit."""

    # Limits.
    total_steps: int = 3_000_000
    """Agent steps to train for (an Atari step is 4 frames). The learning rate decays to 0 at this count."""
    total_minutes: float = 0.0
    """Minutes to train for, earlier starts of the run included; 0 means no limit."""
    max_env_restarts: int = 5
    """Restarts of lost environments in a row before the next loss ends the run. After 10 minutes without a loss the
    count begins again."""
    env_timeout: float = 60.0
    """Seconds without an answer after which environments count as lost."""
    max_bad_updates: int = 10
    """Updates with a NaN or Inf in loss or gradients are skipped; after this many in a row the run stops."""

    # Hardware.
    device: str = "auto"
    """Device of learner and inference: cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    amp: Literal["auto", "on", "off"] = "auto"
    """Compute image encoders in bfloat16; auto: where the hardware has it (a GPU, AVX512-BF16 or AMX). It is slow
    elsewhere."""
    channels_last: bool = True
    """Store images with their channels innermost, the fastest order for convolutions."""
    compile: bool = False
    """torch.compile the net for learner and inference, which takes a minute at the start. On CPUs it was no faster,
    and slower with small nets; on GPUs it was not measured. MonoBeast's --mode tune --compile measures it."""
    learner_threads: int = 0
    """CPU threads of the learner; 0 takes half of the cores. Inference has one thread."""

    # Records.
    log_steps: int = 20_000
    """Agent steps between two rows of metrics."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints. The end of the run writes one, too."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.csv."""
    track: bool = False
    """Copy the metrics to Weights & Biases (needs `pip install wandb` and an account)."""
    track_project: str = "beast"
    """Project of Weights & Biases that the run belongs to."""

    # Evaluation and test.
    eval_minutes: float = 0.0
    """Minutes between evaluations while it trains: whole games of a process of low priority with seeds of their own.
    They are the metrics eval/… and choose best.pt. 0 evaluates never."""
    eval_episodes: int = 20
    """Whole games of one evaluation."""

    episodes: int = 10
    """--mode test: number of whole games to play."""
    greedy: bool = False
    """--mode test, and evaluations: take the most probable action instead of sampling."""
    checkpoint: str = ""
    """--mode test: checkpoint file to play; empty takes the run's checkpoint.pt."""
    video: str = ""
    """--mode test: file to film the first game into (.mp4; needs `pip install imageio-ffmpeg`)."""


# Flags that may change when a run is resumed. With another total_steps the learning rate decays to 0 at the new count.
FREE_ON_RESUME = {
    *("mode", "name", "root", "total_steps", "total_minutes", "max_env_restarts", "env_timeout", "max_bad_updates"),
    *("learning_rate", "grad_clip", "max_policy_lag"),  # remedies for bad updates, and for old rollouts
    *("device", "amp", "channels_last", "compile", "learner_threads", "log_steps", "checkpoint_minutes"),
    *("tensorboard", "track", "track_project", "eval_minutes", "eval_episodes"),
    *("episodes", "greedy", "checkpoint", "video"),
}

RUN_LIMITS = {  # flag: lowest and highest value
    **{name: (1, 10**12) for name in ("total_steps", "log_steps")},
    **{name: (1, 10**6) for name in ("max_bad_updates", "episodes", "eval_episodes")},
    **{name: (0, math.inf) for name in ("total_minutes", "eval_minutes", "learner_threads")},
    **{name: (0, math.inf) for name in ("max_env_restarts", "seed")},
    **{name: (1e-6, math.inf) for name in ("env_timeout", "checkpoint_minutes")},
}


def check_limits(flags, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise InputError for the first flag outside its limits (lowest, highest); NaN is outside of any."""
    for name, (lowest, highest) in limits.items():
        value = getattr(flags, name)
        if not lowest <= value <= highest:
            raise InputError(f"--{name} {value}: it must lie between {lowest} and {highest}")


def check_widths(group_width: int, batch_width: int) -> None:
    """Raise InputError unless a batch is a part of one group's rollout, or several whole rollouts."""
    K, B = group_width, batch_width
    if K % B and B % K:
        raise InputError(
            f"--group_width {K} and --batch_width {B}: one must divide the other, as a batch is a part of one group's "
            f"rollout or several whole rollouts; try --batch_width {math.gcd(K, B)} or {K * max(1, round(B / K))}"
        )


def run_name(variant: str, flags: RunFlags) -> str:
    """The run's name as given, or one made of variant, environment and time."""
    return flags.name or f"{variant}-{flags.env.replace('/', '-').replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
