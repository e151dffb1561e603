"""Frames/s of Atari on a GPU over numbers of environments, by games and by lanes of a warp: the emulator alone.

    python benchmarks/atari_gpu.py                              # about three minutes
    python benchmarks/atari_gpu.py --games pong --envs 4096     # of these

Actions are random and made on the device. `observe` is its share of the time. In the second table all consoles begin
alike, without no-ops: it shows how much slower steps become as their plays part.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from beast.gpu.atari import AtariTensorEnv  # noqa: E402

GAMES = ("pong", "qbert", "ms_pacman", "riverraid")
ENVS = (256, 1024, 4096, 16384, 32768)
LANES = (8, 32)
FRAMES = 4  # of a step


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_for(env: AtariTensorEnv, seconds: float, most: int = 10**9) -> float:
    """Step with random actions; returns frames/s."""
    wait(env.device)
    began, steps = time.perf_counter(), 0
    while steps < most and time.perf_counter() - began < seconds:
        for _ in range(min(5, most)):
            env.step(torch.randint(env.single_action_space.n, (env.num_envs,), device=env.device))
        wait(env.device)
        steps += min(5, most)
    return FRAMES * steps * env.num_envs / (time.perf_counter() - began)


def share_of_observe(env: AtariTensorEnv, steps: int = 20) -> float:
    """The part of the time of a step's kernels."""
    spent = dict.fromkeys(("emulate", "emulate_again", "observe"), 0.0)
    for _ in range(steps):
        for kernel in spent:
            wait(env.device)
            began = time.perf_counter()
            env._kernels.run(kernel)
            wait(env.device)
            spent[kernel] += time.perf_counter() - began
    return spent["observe"] / sum(spent.values())


def facts(env: AtariTensorEnv) -> str:
    """What NVRTC tells of `emulate`."""
    if not env.compiler_log:
        return "in loops on the CPU"
    entry = r"entry function 'emulate'.*?(\d+) bytes stack frame, (\d+) bytes spill.*?Used (\d+) registers"
    found = re.search(entry, env.compiler_log, re.S)
    return "{} bytes of stack, {} spilled, {} registers".format(*found.groups()) if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=GAMES)
    parser.add_argument("--envs", type=int, nargs="+", default=ENVS)
    parser.add_argument("--lanes", type=int, nargs="+", default=LANES, help="consoles of a warp")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement, after a third of it")
    parser.add_argument("--device", default="cuda", help="cpu: only to try this program")
    flags = parser.parse_args()
    for game in flags.games:
        began = time.perf_counter()
        env = AtariTensorEnv(game, 1, device=flags.device)
        print(f"- {game}: ready in {time.perf_counter() - began:.1f} s, {facts(env)}")
    print("\n| game | environments | lanes | frames/s | observe | MB |\n|---|---|---|---|---|---|")
    for game in flags.games:
        for count in flags.envs:
            for lanes in flags.lanes:
                env = AtariTensorEnv(game, count, device=flags.device, lanes=lanes)
                env.reset(seed=1)
                step_for(env, flags.seconds / 3)
                speed, share = step_for(env, flags.seconds), share_of_observe(env)
                size = env.bytes_per_env * count / 1e6
                print(f"| {game} | {count} | {lanes} | {speed:,.0f} | {share:.0%} | {size:.0f} |", flush=True)
                env.check()
    print("\n| game | environments | frames/s in steps 1 to 5 | 6 to 25 | 26 to 100 |\n|---|---|---|---|---|")
    for game in flags.games:
        count = min(max(flags.envs), 4096)
        env = AtariTensorEnv(game, count, device=flags.device, noop_max=1, use_fire_reset=False)
        env.reset(seed=[0] * count)
        env.step(torch.zeros(count, dtype=torch.int64, device=env.device))  # a first launch takes longer
        env.reset(seed=[0] * count)
        speeds = [step_for(env, 20 * flags.seconds, steps) for steps in (5, 20, 75)]
        print(f"| {game} | {count} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |", flush=True)


if __name__ == "__main__":
    main()
