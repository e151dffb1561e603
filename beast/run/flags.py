"""The flags of every run, and their limits."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from beast.envs import parse_env_kwargs
from beast.envs.tasks import changed, check_balance, tasks_of, with_tasks
from beast.errors import InputError

F = TypeVar("F", bound=Any)


@dataclass
class EnvFlags:
    """The environment and its protocol, for a learner and for an env server. The defaults mean what the id implies."""

    # The environment.
    env: str = "PongNoFrameskip-v4"
    """Environment id: `<Game>NoFrameskip-v4` or `ALE/<Game>-v5` (Atari), `MinAtar/<Game>-v0`, any id of gymnasium, or
    `module:id`. Several with commas between them are tasks of one agent (docs/tasks.md)."""
    tasks: str = ""
    """File with names of tasks, and the environment of each, its arguments and reference scores, instead of --env
    (docs/tasks.md)."""
    task: str = ""
    """Of several tasks only this one. --mode test without it plays all, one after the other."""
    env_kwargs: str = ""
    """Arguments of the environment as a JSON object, such as `{"map_name": "8x8"}`; of Atari, those of ale-py's
    AtariVectorEnv."""
    env_metrics: str = ""
    """Names of numbers in the infos that end games, such as `score,distance`, to be logged as `env/score` …; the infos'
    `metrics` and `is_success` are so in any case."""
    reset_ahead: bool = False
    """Make each environment twice, and reset one while the other plays: hides resets that take long
    (docs/environments.md). It takes twice the environments' memory."""
    frame_stack: int = 0
    """Images that the agent sees together, the newest last; 0: 4 for Atari, 1 for all others."""
    frame_skip: int = 0
    """Frames for which an action is repeated; each image is the maximum of the last two. 0: 4 for Atari, 1 for all
    others."""
    resize: int = 0
    """Height and width that images are scaled to; 0: 84 for Atari, all others as they are (scaling them needs
    `pip install opencv-python-headless`)."""
    grayscale: Literal["auto", "on", "off"] = "auto"
    """Turn images in color into gray ones; auto: on for Atari, off for all others."""
    sticky_actions: float | Literal["auto"] = "auto"
    """Atari: probability with which a frame repeats the last action; auto: 0 for -v4, 0.25 for -v5."""
    noops: int | Literal["auto"] = "auto"
    """Atari: a game begins with a number of no-ops drawn from 0 to one less than this; auto: 30 for -v4, 0 for -v5."""
    episodic_life: Literal["auto", "on", "off"] = "auto"
    """Atari: end an episode at every lost life, for the learner; auto: on for -v4, off for -v5."""
    full_action_space: Literal["auto", "on", "off"] = "auto"
    """Atari: choose among all 18 actions rather than the game's own; auto: off."""
    atari_backend: Literal["auto", "beast", "ale", "cuda"] = "auto"
    """Atari: run on Beast's own emulator, on ale-py's (docs/environments.md) or on a GPU (docs/gpu.md); auto:
    Beast's where it is built and knows the game."""


@dataclass
class ActorFlags:
    """Actors on this machine."""

    # Actors.
    num_actors: int = 1
    """Actor processes, each with two groups of environments: one steps while the other waits for its actions."""
    num_slots: int = 0
    """Rollouts in shared memory: more keep the learner busy, and add policy lag. 0: as many as there are groups, and
    those of one more batch."""
    stagger: bool = False
    """Begin the rollouts of G groups T/G steps apart, so that updates come evenly and not all together
    (docs/gpu.md). The first rollouts begin together; a later one that would begin sooner after another one waits."""
    balance: Literal["samples", "compute"] = "samples"
    """Of several tasks: equal samples, where each group has environments of all tasks, or equal compute, where each
    task has equally many actors, so that fast tasks give more samples. Then each group of --group_width has one task,
    and only a --batch_width of several groups mixes them in an update."""
    actor_niceness: int = 5
    """Unix niceness added to actors (0 to 19), so that they yield to the learner where cores are short. Linux with
    autogroups (kernel.sched_autogroup_enabled) ignores it between the actors and the learner."""
    pin_actors: bool = False
    """Bind each actor to a core in turn."""
    deterministic: bool = False
    """Run everything in lock-step in one process: slow, but two runs with one seed are equal to the bit on a CPU."""


@dataclass
class RunFlags(EnvFlags):
    """Flags of a run whatever its agent: the task, the training time, the hardware, the records."""

    # The run.
    mode: Literal["train", "test"] = "train"
    """train, or play whole games with a run's checkpoint (test)."""
    name: str = ""
    """Name of the run. An existing run of this name is resumed. Empty: `<variant>-<env>-<time>-seed<seed>`."""
    root: str = "runs"
    """Directory that holds the runs."""
    seed: int = 1
    """Seed of environments, weights and action sampling. A run with another seed is an independent repetition."""
    init_from: str = ""
    """Checkpoint whose weights a new run begins with, as far as they fit the net; the log says what did not fit."""
    channels: Literal["auto", "first", "last", "legacy"] = "auto"
    """Where images have their channels; auto: by their shape (docs/environments.md), and the start line says it.
    Checkpoints from before this flag are played with legacy; give that to resume such a run if its net differs."""

    # Limits.
    total_steps: int = 3_000_000
    """Agent steps to train for (an Atari step is 4 frames). A learning rate that decays is 0 at this count."""
    total_minutes: float = 0.0
    """Minutes to train for, earlier starts of the run included; 0 means no limit."""
    max_env_restarts: int = 5
    """Restarts of lost environments in a row before the next loss ends the run. After 10 minutes without a loss the
    count begins again."""
    env_timeout: float = 60.0
    """Seconds without an answer after which environments count as lost."""
    max_bad_updates: int = 10
    """A NaN or Inf in loss or gradients stops an update before its next step. After this many such updates in a row the
    run stops."""

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
    and slower with small nets; on a GPU it was not measured. MonoBeast's --mode tune --compile measures it."""
    cuda_graphs: bool = False
    """Have a GPU record the net's passes and gradients once and repeat them, which is faster where updates are small.
    Python code in Net and compute_loss runs for the recording only, so no number in it may change later."""
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
    eval_env_kwargs: tuple[str, ...] = ()
    """Evaluations, and --mode test: arguments of the environment that go before --env_kwargs, as a JSON object. With a
    label before it, as in `hard={"level": 9}`, they are played beside the others and are the metrics eval/hard/…."""
    eval_video: bool = False
    """Film the first game of every evaluation for TensorBoard and Weights & Biases (a GIF in eval/ of the run)."""

    episodes: int = 10
    """--mode test: number of whole games to play."""
    max_game_steps: int = 27_000
    """--mode test, and evaluations: steps after which a game that is not over counts as truncated. 27,000 are half an
    hour of Atari."""
    greedy: bool = False
    """--mode test, and evaluations: take the most probable action instead of sampling."""
    checkpoint: str = ""
    """--mode test: checkpoint file to play, in its own environment; empty takes the run's checkpoint.pt."""
    video: str = ""
    """--mode test: file to film the first game into (.mp4; needs `pip install imageio imageio-ffmpeg`)."""


@dataclass
class ServerFlags:
    """Env servers (polybeast_env.py) and the learner's connections to them, for an agent with the flags of a run."""

    # Where the environments are.
    num_servers: int = 2
    """Env servers to start here, where no --addresses are given; each serves two groups of environments."""
    addresses: tuple[str, ...] = ()
    """Env servers that run already, `host:port` or `unix:/path`. Environment and group width are theirs then.
    --mode test plays by the flags that the learner was given, so give it the servers', too."""
    listen: str = ""
    """Where env servers dial in, `host:port` or `unix:/path`, from anywhere and at any time (polybeast_env.py
    --learner), instead of --addresses. Environment and group width are those of the first that calls and can be used;
    give --env to wait for that one."""
    max_streams: int = 0
    """With --listen: streams at a time, each a group of environments; 0 takes up to 64."""
    tls_cert: str = ""
    """With --listen: certificate chain of this host (PEM), so that nobody reads along."""
    tls_key: str = ""
    """With --listen: private key of the certificate (PEM)."""
    token_file: str = ""
    """File with the secret that the env servers ask for, or with --listen must know."""
    tls_ca: str = ""
    """Certificate (PEM) that the env servers' certificates are signed with, or their own; a token needs it."""
    insecure: bool = False
    """Send a token to other hosts without TLS, or --listen to them without token and TLS: in a trusted network."""
    min_envs: float = 0.5
    """Share of the environments that must work, else the run ends. While it is met, a stream that has used up its
    restarts or was refused is tried again after 30 seconds to 10 minutes. With --listen the learner waits instead of
    ending: the share is of --max_streams, and where that is 0, one stream is enough."""
    server_niceness: int = 5
    """Unix niceness added to env servers started here (0 to 19), so that they yield to the learner. Linux with
    autogroups ignores it between them and the learner."""

    # Who does how much.
    queue_width: int = 0
    """Groups wait while so many columns (or more) wait for the learner; 0 takes one group or batch, whichever is
    wider. Fewer mean less policy lag."""
    inference_width: int = 0
    """Rows that inference answers at once, at most; 0 takes one group on a CPU (rows that fit the cache, and no
    gathering) and all groups on a GPU."""
    server_arguments: str = ""
    """Arguments of your own flags of polybeast_env.py, for the env servers started here and for --mode test, as in
    `--server_arguments="--level 3"`."""


# Flags that may change when a run is resumed; an agent adds its own. With another total_steps the learning rate decays
# to 0 at the new count.
FREE_ON_RESUME = {
    *("mode", "name", "root", "total_steps", "total_minutes", "max_env_restarts", "env_timeout", "max_bad_updates"),
    *("device", "amp", "channels_last", "compile", "cuda_graphs", "learner_threads", "log_steps", "checkpoint_minutes"),
    *("tensorboard", "track", "track_project", "eval_minutes", "eval_episodes"),
    *("episodes", "greedy", "checkpoint", "video", "atari_backend", "actor_niceness", "pin_actors"),
    *("env_metrics", "eval_env_kwargs", "eval_video", "max_game_steps"),
}
SERVERS_FREE_ON_RESUME = {flag.name for flag in fields(ServerFlags)} - {"server_arguments"}

RUN_LIMITS = {  # flag: lowest and highest value
    **{name: (1, 10**12) for name in ("total_steps", "log_steps")},
    **{name: (1, 10**6) for name in ("max_bad_updates", "episodes", "eval_episodes")},
    "max_game_steps": (1, 10**9),
    **{name: (0, math.inf) for name in ("total_minutes", "eval_minutes", "learner_threads")},
    "max_env_restarts": (0, math.inf),
    "seed": (0, 10**9),  # emulators take 32 bits, and the seed of an environment is this and its number
    **{name: (1e-6, math.inf) for name in ("env_timeout", "checkpoint_minutes")},
    # That agents have in common:
    **{name: (1, 10**6) for name in ("group_width", "batch_width", "core_size")},
    "hidden_size": (4, 10**6),  # MLPs have a quarter of it
    "unroll_length": (1, 2**16 - 1),
    **{name: (1e-12, 10) for name in ("learning_rate", "optimizer_epsilon")},
    "grad_clip": (0, math.inf),
    "discount": (0, 1),
}
ACTOR_LIMITS = {"num_actors": (1, 1024), "actor_niceness": (0, 19)}
SERVER_LIMITS = {
    **{name: (0, 10**9) for name in ("queue_width", "inference_width")},
    **{"num_servers": (1, 1024), "min_envs": (0.0, 1.0), "max_streams": (0, 4096), "server_niceness": (0, 19)},
    "env_timeout": (1e-6, 900_000.0),  # libbeast takes a million seconds, of which some are for the start
}
ENV_LIMITS = {"frame_stack": (0, 64), "frame_skip": (0, 1000), "resize": (0, 4096)}  # 0: what the id implies
ENV_LIMITS_UNLESS_AUTO = {"sticky_actions": (0, 1), "noops": (0, 10**6)}


def env_arguments(flags: EnvFlags) -> list[str]:
    """The command line that stands for the flags of `EnvFlags` among these."""
    values = {field.name: getattr(flags, field.name) for field in fields(EnvFlags)}
    given = {name: value for name, value in values.items() if value != getattr(EnvFlags, name)}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def check_env_flags(flags: F) -> F:
    """The flags with the content of --tasks, and with `env_kwargs` as JSON writes it. Raises InputError for the first
    flag of `EnvFlags` that cannot be."""
    flags = with_tasks(flags, is_env_known=getattr(flags, "mode", "train") != "test")  # else it is a checkpoint's
    kwargs = parse_env_kwargs(flags.env_kwargs)
    chosen = {name: limits for name, limits in ENV_LIMITS_UNLESS_AUTO.items() if getattr(flags, name) != "auto"}
    check_limits(flags, {**ENV_LIMITS, **chosen})
    return changed(flags, env_kwargs=json.dumps(kwargs, sort_keys=True) if kwargs else "")


def check_server_flags(flags: F, batch_width: int, widths_known: bool = True) -> F:
    """The flags with automatic values filled in, if they have ServerFlags. Raises InputError with value, limit, remedy.

    What depends on the group width is left alone while only the servers know that."""
    check_limits(flags, SERVER_LIMITS)
    if flags.atari_backend == "cuda":
        raise InputError(
            "--atari_backend cuda: env servers step games on cores: give beast, or use an agent without them"
        )
    if flags.listen and flags.addresses:
        raise InputError("--listen and --addresses exclude each other: env servers dial in, or are dialed")
    if flags.listen and flags.tls_ca:
        raise InputError(
            "--tls_ca checks the certificates of --addresses: with --listen give it to the env servers, and here "
            "--tls_cert and --tls_key"
        )
    is_given = flags.max_streams != type(flags).max_streams
    if not flags.listen and (is_given or flags.tls_cert or flags.tls_key):
        raise InputError("--max_streams, --tls_cert and --tls_key are for --listen: give that too, or leave them out")
    if not (flags.listen or flags.addresses) and (flags.token_file or flags.tls_ca or flags.insecure):
        raise InputError(
            "--token_file, --tls_ca and --insecure are for env servers started elsewhere: give --addresses or --listen "
            "too, or leave them out"
        )
    if getattr(flags, "stagger", False):
        raise InputError("--stagger: env servers send rows in an order of their own; leave it out, or the servers")
    if not widths_known:
        return flags
    check_widths(flags.group_width, batch_width)
    queue_width = flags.queue_width or max(flags.group_width, batch_width)
    if queue_width < batch_width:
        raise InputError(f"--queue_width {queue_width} must be at least --batch_width {batch_width}, or 0")
    if 0 < flags.inference_width < flags.group_width:
        raise InputError(
            f"--inference_width {flags.inference_width} must be at least --group_width {flags.group_width}, or 0: a "
            "group's rows are answered together"
        )
    return replace(flags, queue_width=queue_width)


def parse_eval_env_kwargs(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> arguments; those without a label, under "", come first. Raises InputError for a word that is neither."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for word in words:
        label, brace, rest = word.partition("{")
        if not re.fullmatch(r"([\w.-]+=)?", label) or label == "env=":
            raise InputError(
                f"--eval_env_kwargs {word}: write it as LABEL={{…}}; a label has letters, digits, _, . and -"
            )
        found[label[:-1]] = parse_env_kwargs(brace + rest, "--eval_env_kwargs")
    return found


def check_flags(flags: F, limits: Mapping[str, tuple]) -> F:
    """An agent's flags, with `env_kwargs` as JSON writes it. Raises InputError for one outside its limits."""
    flags = check_env_flags(flags)
    check_balance(flags)
    parse_eval_env_kwargs(flags.eval_env_kwargs)
    of_all = {name: each for name, each in {**RUN_LIMITS, **ACTOR_LIMITS}.items() if hasattr(flags, name)}
    check_limits(flags, {**of_all, **limits})
    return flags


def check_limits(flags, limits: Mapping[str, tuple]) -> None:
    """Raise InputError for a flag outside its limits, (lowest, highest) or (lowest, highest, remedy); NaN always is."""
    for name, (lowest, highest, *remedy) in limits.items():
        value = getattr(flags, name)
        if not lowest <= value <= highest:
            raise InputError("; ".join([f"--{name} {value}: it must lie between {lowest} and {highest}", *remedy]))


def check_widths(group_width: int, batch_width: int) -> None:
    """Raise InputError unless a batch is a part of one group's rollout, or several whole rollouts."""
    K, B = group_width, batch_width
    if K % B and B % K:
        raise InputError(
            f"--group_width {K} and --batch_width {B}: one must divide the other, as a batch is a part of one group's "
            f"rollout or several whole rollouts; try --batch_width {math.gcd(K, B)} or {K * max(1, round(B / K))}"
        )


def check_slots(flags, groups: int) -> int:
    """Rollouts in shared memory for so many groups: as given, or chosen if --num_slots is 0. Raises InputError if they
    are too few or too many, if one of the widths does not divide the other, or if a batch is always too old."""
    check_widths(flags.group_width, flags.batch_width)
    columns = groups * flags.group_width
    if flags.stagger and flags.batch_width >= columns:
        raise InputError(
            f"--stagger with --batch_width {flags.batch_width}: a batch needs a rollout of each of the {groups} groups "
            f"of {flags.group_width} columns, so none may come later; give less than {columns}, or "
            f"--num_actors {flags.batch_width // (groups // flags.num_actors * flags.group_width) + 1}"
        )
    slots_per_batch = max(flags.batch_width // flags.group_width, 1)
    last_lag = max(flags.group_width // flags.batch_width, 1) - 1
    if 0 < flags.max_policy_lag < last_lag:
        raise InputError(
            f"--max_policy_lag {flags.max_policy_lag}: a rollout of {flags.group_width} columns gives {last_lag + 1} "
            f"updates, the last of which lags by {last_lag} or more: give at least {last_lag}, or 0 for no limit"
        )
    needed = max(groups, slots_per_batch)
    num_slots = flags.num_slots or needed + slots_per_batch
    if num_slots < needed:
        raise InputError(
            f"--num_slots {num_slots}: {groups} groups and {slots_per_batch} slots a batch need at least {needed}; "
            "use fewer --num_actors, a smaller --batch_width, or 0 to have it chosen"
        )
    if num_slots > 2**16:
        raise InputError(f"--num_slots {num_slots}: at most {2**16}; use a wider --group_width or fewer --num_actors")
    return num_slots


def run_name(variant: str, flags: RunFlags) -> str:
    """The run's name, given or made of variant, environment, time and seed; InputError where --mode test has none."""
    if flags.mode == "test" and not (flags.name or flags.checkpoint):
        names = [path.parent.name for path in sorted(Path(flags.root).glob("*/checkpoint.pt"), key=os.path.getmtime)]
        there = f"{flags.root} has {', '.join(names[:-11:-1])}" if names else f"{flags.root} has none yet"
        raise InputError(f"--mode test plays a run's checkpoint: give its --name, or --checkpoint; {there}")
    num_tasks, now = len(tasks_of(flags.env, flags.tasks)), time.strftime("%Y%m%d-%H%M%S")
    env = flags.env.replace("/", "-").replace(":", "-") if num_tasks == 1 else f"{num_tasks}-tasks"
    return flags.name or f"{variant}-{env}-{now}-seed{flags.seed}"  # those of several seeds begin in one second
