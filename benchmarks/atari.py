"""Frames of Atari a second: Beast's emulator beside ale-py, and EnvPool where it is installed, in one interleaved run.

    python benchmarks/atari.py          # about 10 minutes on two cores; writes benchmarks/results/atari-speed.{json,md}
    python benchmarks/atari.py --every  # every game that is played exactly, about 40 minutes; writes atari-games.md

- Raw: one console, random actions. Ours without an image and with a gray one in every frame; ale-py draws every frame.
- Environments: frame skip 4, the maximum of two frames, 84x84, four images, random actions, `<Game>NoFrameskip-v4`.
- Growth: Pong with more and more environments, what it takes to make, seed and reset them, and resident memory.

A frame is an emulated one, four to a step. Rates are per second of wall time and per second of CPU time: other
processes slow the first, hardly the second. A ratio is the median of the ratios of single repetitions: kinds
that were measured within seconds of each other had the machine in much the same state.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from beast.envs.emulator import EXACT_GAMES  # noqa: E402
from beast.machine import cpu_model  # noqa: E402

FRAME_SKIP = 4
PROTOCOL = {"noop_max": 30, "use_fire_reset": True, "repeat_action_probability": 0.0, "reward_clipping": False}
GROW = "--grow"
PICTURES = {  # of `--every`
    "84x84 gray": {},
    "84x84 color": {"grayscale": False},
    "64x64 gray": {"img_height": 64, "img_width": 64},
}


@dataclass
class Options:
    """What to measure."""

    games: tuple[str, ...] = (
        "pong", "breakout", "qbert", "seaquest", "space_invaders", "beam_rider", "freeway", "ms_pacman",
    )  # fmt: skip
    """Names of ROMs."""
    num_envs: int = 16
    """Environments that are stepped together."""
    threads: tuple[int, ...] = ()
    """Numbers of threads; empty: 1 and every core."""
    growth: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    """Numbers of environments of the table of growth."""
    seconds: float = 0.5
    """Measured seconds of each combination in each repetition."""
    repeats: int = 7
    """Repetitions, one kind after the other in each; the tables show medians."""
    every: bool = False
    """Measure every game that is played exactly, in three pictures and with one thread, beside ale-py alone."""
    out: str = os.path.join(ROOT, "benchmarks", "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    if options.every:
        return measure_every_game(options)
    threads = options.threads or tuple(sorted({1, os.cpu_count() or 1}))
    envpool = find_envpool()
    runs: dict[str, list[dict]] = {}
    for game in options.games:
        kinds = {**raw_kinds(game), **env_kinds(game, options.num_envs, threads, envpool)}
        for kind in kinds.values():
            kind()  # the first steps end the start screens and fill the caches
        for _ in range(options.repeats):
            for name, kind in kinds.items():
                runs.setdefault(f"{game} {name}", []).append(rate(kind, options.seconds))
        print(f"{game} is done", flush=True)
    growth = [grow(options.games[0], number, max(threads), options.seconds) for number in options.growth]
    result = {
        "command": command(),
        "commit": commit(),
        "hardware": machine(),
        "envpool": envpool.__version__ if envpool else "",
        "num_envs": options.num_envs,
        "threads": threads,
        "runs": runs,
        "growth": growth,
    }
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "atari-speed.json"), "w") as file:
        json.dump(result, file, indent=1)
    text = "\n".join(report(result, options)) + "\n"
    with open(os.path.join(options.out, "atari-speed.md"), "w") as file:
        file.write(text)
    print(text)


def measure_every_game(options: Options) -> None:
    rows: dict[str, list[float]] = {}
    measured = commit()
    for game in sorted(EXACT_GAMES):
        rows[game] = []
        for picture in PICTURES.values():
            kinds = env_kinds(game, options.num_envs, (1,), picture=picture).values()
            for kind in kinds:
                kind()
            rates = ([rate(kind, options.seconds)["per_cpu_second"] for kind in kinds] for _ in range(options.repeats))
            rows[game].append(statistics.median(ours / ale for ours, ale in rates))
        print(game, *(f"{ratio:.2f}" for ratio in rows[game]), flush=True)
    columns = list(zip(*rows.values()))
    lines = [
        f"# Atari: times as many frames a CPU second as ale-py, in each of {len(rows)} games",
        "",
        f"{machine()}, commit {measured[:10]}, `{command()}`. {options.num_envs} environments, one thread. Each number "
        f"is the median ratio of {options.repeats} repetitions of {options.seconds:g} s, both in turn.",
        "",
        f"| game | {' | '.join(PICTURES)} |",
        "| --- |" + " --- |" * len(PICTURES),
        *(
            f"| {name} | {' | '.join(f'{summary(column):.2f}' for column in columns)} |"
            for name, summary in (("*median*", statistics.median), ("*least*", min), ("*most*", max))
        ),
        *(f"| {game} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |" for game, ratios in rows.items()),
    ]
    with open(os.path.join(options.out, "atari-games.md"), "w") as file:
        file.write("\n".join(lines) + "\n")


def command() -> str:
    return " ".join(["python benchmarks/atari.py", *sys.argv[1:]])


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def machine() -> str:
    return f"{cpu_model()}, {os.cpu_count()} cores"


def find_envpool():
    try:
        import envpool
    except ImportError:
        return None
    return envpool


def raw_kinds(game: str) -> dict[str, Callable[[], int]]:
    """Name -> a function that emulates some frames of one console and returns their number."""
    import ale_py
    import libatari

    from beast.envs.emulator import read_rom

    frames, actions = 200, np.random.default_rng(0).integers(0, 6, 997).astype(np.uint8).tobytes()
    ours = libatari.Console(read_rom(game), game, 1)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    names = ale.getLegalActionSet()

    def step_ale() -> int:
        for action in actions[:frames]:
            ale.act(names[action])
            if ale.game_over():
                ale.reset_game()
        return frames

    def step_ours(gray: bool) -> int:
        ours.run(frames, gray, actions)
        return frames

    return {
        "raw ours no image": lambda: step_ours(False),
        "raw ours gray": lambda: step_ours(True),
        "raw ale-py": step_ale,
    }


def env_kinds(
    game: str, num_envs: int, threads: tuple[int, ...], envpool=None, picture: dict | None = None
) -> dict[str, Callable[[], int]]:
    """Name -> a function that steps all environments a few times and returns the number of emulated frames."""
    from ale_py.vector_env import AtariVectorEnv as AleVectorEnv

    from beast.envs.emulator import AtariVectorEnv

    made: dict[str, Callable[[], int]] = {}

    def add(name: str, step: Callable, num_actions: int) -> None:
        actions = np.random.default_rng(0).integers(0, num_actions, (8, num_envs))

        def run() -> int:
            for row in actions:
                step(row)
            return actions.size * FRAME_SKIP

        made[name] = run

    for number in threads:
        for name, kind in (("ours", AtariVectorEnv), ("ale-py", AleVectorEnv)):
            env = kind(game, num_envs, num_threads=number, **PROTOCOL, **(picture or {}))
            observations, _ = env.reset(seed=1)
            if name == "ours":
                env.observe_into(np.zeros_like(observations))
            add(f"env {name} threads={number}", env.step, env.single_action_space.n)
        if envpool:
            env = envpool.make_gymnasium(
                game.title().replace("_", "") + "-v5", num_envs=num_envs, num_threads=number, use_fire_reset=True
            )
            env.reset()
            add(f"env EnvPool threads={number}", env.step, env.action_space.n)
    return made


def rate(run: Callable[[], int], seconds: float) -> dict:
    """Frames per second of wall time and of CPU time."""
    frames, cpu, begin = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() < begin + seconds:
        frames += run()
    wall = time.perf_counter() - begin
    return {"per_second": frames / wall, "per_cpu_second": frames / (time.process_time() - cpu)}


def grow(game: str, num_envs: int, threads: int, seconds: float) -> dict:
    """In a process of its own: its memory is that of the environments."""
    command = [sys.executable, os.path.abspath(__file__), GROW, game, str(num_envs), str(threads), str(seconds)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def grown(game: str, num_envs: int, threads: int, seconds: float) -> dict:
    from beast.envs.emulator import AtariVectorEnv

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    AtariVectorEnv(game, 1, num_threads=1, **PROTOCOL).reset(seed=1)  # what is loaded only once
    observations = np.ones((num_envs, 4, 84, 84), np.uint8)
    before, cpu, wall = resident(), time.process_time(), time.perf_counter()
    env = AtariVectorEnv(game, num_envs, num_threads=threads, **PROTOCOL)
    env.observe_into(observations)
    env.reset(seed=1)
    started = {"cpu_seconds_to_start": time.process_time() - cpu, "seconds_to_start": time.perf_counter() - wall}
    actions = np.random.default_rng(0).integers(0, env.single_action_space.n, num_envs)

    def step() -> int:
        env.step(actions)
        return num_envs * FRAME_SKIP

    measured = rate(step, seconds)
    memory = {"bytes_per_env": env.bytes_per_env, "resident_bytes": (resident() - before) / num_envs}
    return {"num_envs": num_envs, "threads": threads, **started, **measured, **memory}


def report(result: dict, options: Options) -> list[str]:
    def rates(name: str, key: str) -> list[float]:
        return [run[key] for run in result["runs"][name]]

    def cell(name: str) -> str:
        wall, cpu = (statistics.median(rates(name, key)) for key in ("per_second", "per_cpu_second"))
        return f"{wall / 1e3:.1f} ({cpu / 1e3:.1f})"

    def ratio(name: str, other: str) -> str:
        wall, cpu = (
            statistics.median(ours / theirs for ours, theirs in zip(rates(name, key), rates(other, key)))
            for key in ("per_second", "per_cpu_second")
        )
        return f"{wall:.2f} ({cpu:.2f})"

    def table(head: list[str], rows: list[list[str]]) -> list[str]:
        return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]

    kinds = ["ours", "ale-py", *(["EnvPool"] if result["envpool"] else [])]
    threads = [f"{number} thread{'s' * (number > 1)}" for number in result["threads"]]

    def names(game: str, number: int) -> list[str]:
        return [f"{game} env {kind} threads={number}" for kind in kinds]

    def raw(game: str) -> list[str]:
        return [f"{game} raw {kind}" for kind in ("ours no image", "ours gray", "ale-py")]

    return [
        "# Atari: times as many frames a second as others (in brackets: per CPU second)",
        "",
        f"{result['hardware']}, commit {result['commit'][:10]}, `{result['command']}`. {options.num_envs} "
        f"environments. Medians of {options.repeats} repetitions of {options.seconds:g} s, all kinds in turn; a ratio "
        "is the median of those of single repetitions. EnvPool "
        f"{result['envpool'] or 'is not installed and not measured'}.",
        "",
        *table(
            ["game", *(f"ours / {kind}, {number}" for number in threads for kind in kinds[1:])],
            [
                [game, *(ratio(names(game, n)[0], other) for n in result["threads"] for other in names(game, n)[1:])]
                for game in options.games
            ],
        ),
        "",
        "## Thousands of frames a second",
        "",
        *table(
            ["game", *(f"{kind}, {number}" for number in threads for kind in kinds)],
            [[game, *(cell(name) for n in result["threads"] for name in names(game, n))] for game in options.games],
        ),
        "",
        "## One console, thousands of frames a second",
        "",
        *table(
            ["game", "ours, no image", "ours, gray", "ale-py", "ours, gray / ale-py"],
            [[game, *map(cell, raw(game)), ratio(*raw(game)[1:])] for game in options.games],
        ),
        "",
        f"## Growth: {options.games[0]}, {max(result['threads'])} threads",
        "",
        *table(
            [
                "environments",
                "frames/s, thousands",
                "CPU seconds to make, seed and reset",
                "an environment's memory beside its observations, KB",
                "the same, resident, KB",
            ],
            [
                [
                    f"{row['num_envs']:,}",
                    f"{row['per_second'] / 1e3:.1f} ({row['per_cpu_second'] / 1e3:.1f})",
                    f"{row['cpu_seconds_to_start']:.2f}",
                    f"{row['bytes_per_env'] / 1024:.1f}",
                    f"{row['resident_bytes'] / 1024:.1f}",
                ]
                for row in result["growth"]
            ],
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == [GROW]:
        print(json.dumps(grown(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))))
    else:
        import tyro

        main(tyro.cli(Options, description=__doc__))
