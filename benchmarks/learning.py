"""Learning curves: train a task as a user would, and keep its metrics and its curve under benchmarks/results/.

    python benchmarks/learning.py cartpole              # one task, seed 1
    python benchmarks/learning.py memory-lstm --seed 2
    python benchmarks/learning.py pong --run runs/pong  # keep a run that was already trained with the task's flags

A committed CSV begins with the command, commit, hardware and seed that gave it; `python plot.py` draws it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# Tuned and measured with returns and observations as they are.
RAW = "--normalize_returns off --no_normalize_observations"
SMALL = f"--num_actors 1 --group_width 16 --hidden_size 256 --log_steps 10000 {RAW}"
MEMORY = "--env toy_envs:MemoryCue-v0 --num_actors 1 --batch_width 8 --hidden_size 128 --core_size 64"
MEMORY += " --ppo_clip 0 --learning_rate 5e-4 --entropy_cost 0.02 --total_steps 100000 --log_steps 5000"
MEMORY += f" {RAW}"
BREAKOUT = "--env MinAtar/Breakout-v0 --num_actors 1 --ppo_clip 0 --vtrace_lambda 0.95 --entropy_cost 0.05"
BREAKOUT += " --normalize_returns off"
PONG_DETERMINISTIC = "--env PongNoFrameskip-v4 --deterministic --total_steps 1500000"
# Of r2d2.py.
R2D2_MEMORY = "--env toy_envs:MemoryCue-v0 --num_actors 1 --unroll_length 4 --burn_in 4 --trained 12 --stride 4"
R2D2_MEMORY += " --batch_width 32 --replay_ratio 4 --min_fill 2000 --hidden_size 128 --core_size 64 --head_size 64"
R2D2_MEMORY += " --discount 0.9 --learning_rate 1e-3 --optimizer_epsilon 1e-5 --target_period 100"
R2D2_MEMORY += " --total_steps 60000 --log_steps 5000"
R2D2_PONG = "--env PongNoFrameskip-v4 --total_steps 1500000 --log_steps 10000"  # with the defaults
R2D2_MINATAR = "--num_actors 1 --group_width 32 --unroll_length 8 --stride 8 --burn_in 4 --trained 16"
R2D2_MINATAR += " --batch_width 32 --replay_ratio 2 --min_fill 20000 --replay_gb 1 --hidden_size 128 --core_size 128"
R2D2_MINATAR += " --head_size 128 --discount 0.99 --n_steps 3 --learning_rate 5e-4 --optimizer_epsilon 1e-5"
R2D2_MINATAR += " --no_center_images --target_period 200 --total_steps 3000000 --log_steps 50000"
MINATAR = f"{BREAKOUT} --batch_width 8 --hidden_size 256 --learning_rate 1.5e-3"
MINATAR_FAST = f"{BREAKOUT} --group_width 256 --batch_width 128 --hidden_size 128 --learning_rate 1e-2"
MINATAR_FAST += " --total_steps 3000000"
# docs/recipes.md has the same commands.
RECIPES = {
    "recipe-cartpole": "--preset discrete --env CartPole-v1 --total_steps 300000",
    "recipe-lunarlander": "--preset discrete --env LunarLander-v3 --total_steps 1000000",
    "recipe-hopper": "--preset continuous --env Hopper-v5 --total_steps 1000000",
    "recipe-halfcheetah": "--preset continuous --env HalfCheetah-v5 --total_steps 1000000",
    "recipe-minigrid": "--preset memory --env examples.minigrid_one_hot:OneHot/MiniGrid-MemoryS7-v0"
    " --total_steps 1000000",
    "recipe-minatar": "--preset pixels --env MinAtar/Breakout-v0 --total_steps 2000000",
    "recipe-vizdoom": "--preset pixels --env examples.vizdoom_gray:Gray/VizdoomBasic-v1 --total_steps 300000",
    "recipe-crafter": "--preset pixels --env examples.crafter_env:Crafter-v0 --total_steps 500000",
    "recipe-parcel": "--preset pixels --env examples.parcel:Parcel-v0 --total_steps 1000000",
}
# "What it learns" on our own emulator: one set of flags for all six games, 40 M frames each. Called again, a task goes
# on with a run that was not finished. benchmarks/peers/atari-published.csv has what others publish. Two actors: with 64
# environments all six seeds of Pong reached 18, in 0.8 to 2.0 M steps. With 32 three of six did within 1.4 M, one in
# 2.7 M; one had 12.4 after 3 M, and one was ended by hand at 17.4.
ATARI_GAMES = ("Pong", "Breakout", "SpaceInvaders", "BeamRider", "Qbert", "Seaquest")
ATARI = {
    f"atari-{game.lower()}": f"--env {game}NoFrameskip-v4 --atari_backend beast --num_actors 2 --total_steps 10000000"
    for game in ATARI_GAMES
}
# The experiments of CuLE (arXiv 1907.08467), named after its table 3: environments, batches, steps of a rollout, steps
# per update. Its training frames are our steps. docs/gpu.md has the flags as a table. No run of them is kept here.
CULE_GAMES = {"pong": ("Pong", 8_000_000), "mspacman": ("MsPacman", 15_000_000)}  # steps of its figure 8
CULE_ACTORS = {1: 1, 5: 5, 20: 10}  # of so many batches: two groups a batch with 1 and 5, else one
CULE = {
    f"cule-{name}-{envs}-{batches}-{steps}-{steps // batches}": f"--env {game}NoFrameskip-v4 --atari_backend beast"
    f" --num_actors {CULE_ACTORS[batches]} --group_width {envs // CULE_ACTORS[batches] // 2}"
    f" --batch_width {envs // batches} --unroll_length {steps}{' --stagger' if batches > 1 else ''}"
    f" --total_steps {total_steps}"
    for name, (game, total_steps) in CULE_GAMES.items()
    for envs in (120, 1200)
    for batches, steps in ((1, 5), (5, 5), (20, 20))
}
# One as the paper computes its loss, and PPO as in its table 4 and figure 6.
CULE["cule-pong-vtrace"] = CULE["cule-pong-1200-20-20-1"]
CULE["cule-pong-vtrace"] += " --ppo_clip 0 --no_normalize_advantages --reduction sum --grad_clip 40"
CULE |= {
    f"cule-pong-ppo-{envs}": "--env PongNoFrameskip-v4 --atari_backend beast --num_actors 1"
    f" --group_width {envs // 2} --batch_width {envs} --unroll_length 4 --epochs 4 --minibatches 4"
    " --learning_rate 5e-4 --optimizer_epsilon 1.5e-4 --total_steps 50000000"
    for envs in (256, 512, 1024)
}
# The same with the games on a GPU.
CULE |= {name.replace("cule-", "cule-gpu-"): x.replace("backend beast", "backend cuda") for name, x in CULE.items()}
# VizDoom's scenarios, in minutes: steps of four tics.
DOOM = {
    f"doom-{name}": f"--preset pixels --env Doom/{env}-v0 --total_steps {steps}"
    for name, env, steps in (
        ("basic", "Basic", 100_000),
        ("health-gathering", "HealthGathering", 300_000),
        ("defend-center", "DefendCenter", 300_000),
        ("battle", "Battle", 300_000),
    )
}
LEARNER = "127.0.0.1:4441"  # where env servers dial it
# Five games in one net, and each in a net of its own for as many steps and updates: with a fifth of the environments
# and of the batch, and for it the learning rate divided by the root of five. docs/tasks.md shows both.
MINATAR_GAMES = ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders")
OF_TASKS = "--num_actors 1 --hidden_size 256 --ppo_clip 0"
OF_TASKS += " --vtrace_lambda 0.95 --entropy_cost 0.02 --log_steps 100000"
FIVE_ATARI = ",".join(f"{game}NoFrameskip-v4" for game in ("Pong", "Breakout", "SpaceInvaders", "Qbert", "BeamRider"))
FIVE_ATARI = f"--env {FIVE_ATARI} --num_actors 1 --group_width 40 --batch_width 8 --reward_clip 0 --total_steps 500000"
MINIGRID_LEVELS = ",".join(
    f"examples.minigrid_one_hot:OneHot/MiniGrid-{level}-v0" for level in ("Empty-8x8", "DoorKey-5x5", "LavaGapS5")
)
FIVE_GAMES = ",".join(f"MinAtar/{game}-v0" for game in MINATAR_GAMES)
SEVERAL_TASKS = {
    "tasks-minatar": f"--env {FIVE_GAMES} --group_width 320 --batch_width 160 --learning_rate 5e-3 {OF_TASKS}"
    " --total_steps 5000000",
    "tasks-minigrid": f"--env {MINIGRID_LEVELS} --preset memory --group_width 48 --batch_width 48"
    " --total_steps 600000 --log_steps 10000",
    # With raw rewards, whose scales differ by hundreds: values with statistics of each game, and without.
    "tasks-atari-popart": f"{FIVE_ATARI} --normalize_returns on",
    "tasks-atari-plain": f"{FIVE_ATARI} --normalize_returns off",
    **{
        f"tasks-minatar-own-{game.lower()}": f"--env MinAtar/{game}-v0 --group_width 64 --batch_width 32"
        f" --learning_rate 2.2e-3 {OF_TASKS} --total_steps 1000000"
        for game in MINATAR_GAMES
    },
}
# What slots that are handed out just in time give, and what two ranks: all runs of a game have 64 environments and
# equally wide updates. benchmarks/slots_at_once.py is monobeast.py without the first, torchrun starts the second.
# Pong's runs are ended by hand once their mean return is 18. The kept runs of atari-pong, which has the flags of
# pong-64, are from before slots in time: they are its runs at once.
OF_MINATAR = f"{BREAKOUT} --hidden_size 256 --learning_rate 1.5e-3 --total_steps 1000000"
COMPARED = {
    "pong-64": ATARI["atari-pong"],
    "pong-64-two-ranks": ATARI["atari-pong"].replace("num_actors 2", "num_actors 1") + " --batch_width 2",
    "minatar-64": f"{OF_MINATAR} --group_width 32 --batch_width 8",
    "minatar-64-at-once": f"{OF_MINATAR} --group_width 32 --batch_width 8",
    "minatar-64-two-ranks": f"{OF_MINATAR} --group_width 16 --batch_width 4",
}
TASKS = {
    **RECIPES,
    **COMPARED,
    **SEVERAL_TASKS,
    **ATARI,
    **CULE,
    **DOOM,
    "pong": "--env PongNoFrameskip-v4",
    "pong-two-actors": "--env PongNoFrameskip-v4 --num_actors 2",
    "pong-poly": "--env PongNoFrameskip-v4",  # polybeast.py
    "pong-dial": f"--env PongNoFrameskip-v4 --listen {LEARNER} --max_streams 6",  # the same, with fleeting_servers()
    "pong-beast": "--env PongNoFrameskip-v4 --atari_backend beast",
    # Two runs that differ in the emulator only: all losses and returns are equal.
    "pong-deterministic": f"{PONG_DETERMINISTIC} --atari_backend beast",
    "pong-deterministic-ale": f"{PONG_DETERMINISTIC} --atari_backend ale",
    "atari-pong-ale": ATARI["atari-pong"].replace("backend beast", "backend ale"),  # its seeds are ended by hand
    "pong-b32": "--env PongNoFrameskip-v4 --batch_width 32 --learning_rate 7e-4 --total_steps 2000000",
    "cartpole": f"--env CartPole-v1 {SMALL} --batch_width 4 --learning_rate 5e-4 --vtrace_lambda 0.95 --ppo_clip 0.2"
    " --reward_scale 0.05 --total_steps 300000",
    # With no flag tuned; "-raw" with returns and observations as they are.
    "cartpole-defaults": "--env CartPole-v1 --total_steps 300000 --log_steps 10000",
    "cartpole-defaults-raw": f"--env CartPole-v1 --total_steps 300000 --log_steps 10000 {RAW}",
    "acrobot-defaults": "--env Acrobot-v1 --total_steps 300000 --log_steps 10000",
    "acrobot-defaults-raw": f"--env Acrobot-v1 --total_steps 300000 --log_steps 10000 {RAW}",
    "minatar-breakout": f"{MINATAR} --total_steps 3000000 --log_steps 50000",
    "minatar-fast": MINATAR_FAST,
    "minatar-fast-spaceinvaders": MINATAR_FAST.replace("Breakout", "SpaceInvaders"),
    "minatar-bf16": f"{MINATAR} --total_steps 1000000 --amp on",
    "minatar-fp32": f"{MINATAR} --total_steps 1000000 --amp off",
    "memory-lstm": f"{MEMORY} --core lstm",
    "memory-gru": f"{MEMORY} --core gru",
    "memory-none": f"{MEMORY} --core none",
    "r2d2-pong": R2D2_PONG,
    "r2d2-minatar-breakout": f"--env MinAtar/Breakout-v0 {R2D2_MINATAR}",
    "r2d2-minatar-spaceinvaders": f"--env MinAtar/SpaceInvaders-v0 {R2D2_MINATAR}",
    "r2d2-cartpole": "--preset vector --env CartPole-v1 --total_steps 80000 --log_steps 10000",
    "r2d2-memory-lstm": f"{R2D2_MEMORY} --core lstm",
    "r2d2-memory-gru": f"{R2D2_MEMORY} --core gru",
    "r2d2-memory-none": f"{R2D2_MEMORY} --core none",
    "pendulum": f"--env Pendulum-v1 {SMALL} --batch_width 4 --learning_rate 1e-3 --discount 0.9 --vtrace_lambda 0.95"
    " --ppo_clip 0.2 --entropy_cost 0 --reward_scale 0.1 --reward_clip 0 --total_steps 600000",
    "multidiscrete": f"--env toy_envs:MultiDiscrete-v0 {SMALL} --batch_width 8 --ppo_clip 0 --learning_rate 1e-3"
    " --total_steps 200000",
    "dict": f"--env toy_envs:Dict-v0 {SMALL} --batch_width 8 --ppo_clip 0 --learning_rate 1e-3 --total_steps 200000",
}


@dataclass
class Options:
    """Train a task and keep its curve."""

    task: Annotated[str, tyro.conf.Positional]
    """One of the tasks in benchmarks/learning.py."""
    seed: int = 1
    """Seed of the run."""
    root: str = "runs"
    """Directory for the run."""
    run: str = ""
    """A run directory to keep instead of training."""


@contextlib.contextmanager
def fleeting_servers(kills: list[int]) -> Iterator[None]:
    """Three env servers of Pong that dial in. The third is killed every 30 seconds, and counted, and starts anew."""
    command = [sys.executable, str(ROOT / "polybeast_env.py"), "--env", "PongNoFrameskip-v4", "--learner", LEARNER]
    servers = [subprocess.Popen(command) for _ in range(3)]
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(30):
            servers[2].kill()
            kills.append(servers[2].wait())
            servers[2] = subprocess.Popen(command)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def script_of(task: str) -> str:
    """The program that trains a task."""
    if task.endswith(("-poly", "-dial")):
        return "polybeast.py"
    if task.endswith("-at-once"):
        return "benchmarks/slots_at_once.py"
    return "r2d2.py" if task.startswith("r2d2-") else "monobeast.py"


def code_of(start: dict) -> str:
    """The commit of a run's start, and whether other code than it has trained."""
    diffs = [line for line in (start["diff"] or "").splitlines() if line.startswith("diff --git")]
    is_dirty = any("benchmarks/results/" not in line for line in diffs)  # other results are no part of the code
    is_dirty |= any(name.endswith(".py") for name in start.get("untracked") or {})
    return f"{start['commit']}{' with uncommitted changes' if is_dirty else ''}"


def hardware_of(start: dict) -> str:
    cores = start.get("usable_cores") or start["cores"]
    return f"{start['cpu']}, {cores} cores, {' and '.join(start['gpus']) or 'no GPU'}"


def main(options: Options) -> None:
    if options.task not in TASKS:
        sys.exit(f"error: no task is called {options.task!r}; there are {', '.join(TASKS)}")
    name = f"{options.task}-seed{options.seed}"
    path = Path(options.run or os.path.join(options.root, name))
    kills: list[int] = []
    metrics = path / "metrics.csv"
    before = metrics.read_text() if metrics.exists() else ""
    if not options.run:
        program = str(ROOT / script_of(options.task))
        torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
        command = [sys.executable, *(torchrun if options.task.endswith("-two-ranks") else []), program]
        command += TASKS[options.task].split()
        command += ["--root", options.root, "--name", name, "--seed", str(options.seed)]
        tests = str(ROOT / "tests")  # the toy environments live there
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))}
        with fleeting_servers(kills) if options.task.endswith("-dial") else contextlib.nullcontext():
            subprocess.run(command, check=True, env=environment)
    starts = json.loads((path / "meta.json").read_text())["starts"]
    if len(starts) > 1 and not options.run and metrics.read_text() == before:
        starts.pop()  # the run was finished: this start has trained nothing
    start = starts[-1]
    config = json.loads((path / "config.json").read_text())
    ran = " ".join([os.path.basename(start["argv"][0]), *start["argv"][1:]])
    ran = re.sub(r" --root \S+", "", ran)  # where it lay on somebody's disk
    launcher = "torchrun --standalone --nproc_per_node 2" if config.get("ranks", 1) > 1 else "python"
    header = [
        f"# command: python benchmarks/learning.py {options.task} --seed {config['seed']}",
        f"# which ran: {launcher} {ran}",
        f"# commit: {code_of(start)}",
        f"# hardware: {hardware_of(start)}",
        f"# seed: {config['seed']}",
    ]
    origins = dict.fromkeys(f"commit {code_of(each)[:7]} on {hardware_of(each)}" for each in starts)
    remarks = [f"resumed: {', then '.join(origins)}"] if len(origins) > 1 else []
    if kills:
        remarks.append(f"one of three env servers was killed {len(kills)} times, 30 s after each start")
    if remarks:
        header.append(f"# remark: {'; '.join(remarks)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    output = RESULTS / f"{options.task}-seed{config['seed']}.csv"
    output.write_text("\n".join(header) + "\n" + metrics.read_text())
    subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), str(output), "--out", str(output.with_suffix(".png"))], check=True
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
