"""Writes the pages that follow from the code and from benchmarks/results/, and tables of other pages.

    python docs/generate.py     # or `make docs`, which builds the site, too

- docs/flags.md from the dataclasses of the flags, their docstrings and sections;
- docs/results.md from every file in benchmarks/results/;
- in README.md and docs/lag.md the tables behind `<!-- results -->`.

A result names its command, commit and hardware itself: a CSV in its first lines (`# command: …`), a JSON by its keys, a
Markdown file in its text. A file that does not is refused, but for the CSVs of `NO_RUNS`. `# remark: …` in a CSV goes
into the table.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import re
import statistics
import sys
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

import gymnasium  # noqa: E402

import monobeast  # noqa: E402
import multibeast  # noqa: E402
import polybeast_env  # noqa: E402
import r2d2  # noqa: E402
from beast.run.command_line import read_source  # noqa: E402
from beast.run.flags import EnvFlags  # noqa: E402

WRITTEN = "<!-- Written by docs/generate.py: `make docs` writes it again. -->"
RETURN = "charts/episodic_return"

# Returns that count as learned, where gymnasium's registry has no reward threshold for the environment.
AIMS = {
    "PongNoFrameskip-v4": 18.0,
    "MinAtar/Breakout-v0": 15.0,
    "Pendulum-v1": -400.0,
    "examples.minigrid_one_hot:OneHot/MiniGrid-MemoryS7-v0": 0.9,
    "examples.vizdoom_gray:Gray/VizdoomBasic-v1": 80.0,
}
# The rows of README.md: task of benchmarks/learning.py, and what the table calls it.
README_TASKS = {
    "pong-two-actors": "Pong, `monobeast.py`",
    "pong-poly": "Pong, `polybeast.py`",
    "r2d2-pong": "Pong, `r2d2.py`, greediest quarter of environments",
    "minatar-fast": "MinAtar Breakout, 512 environments",
    "recipe-minigrid": "MiniGrid with memory, `--preset memory`",
    "recipe-halfcheetah": "HalfCheetah, `--preset continuous`",
}
ATARI_GAMES = ("Pong", "Breakout", "BeamRider", "SpaceInvaders", "Qbert", "Seaquest")
# The rows of the first table of docs/results.md. Tasks that only compare settings stand in its later tables.
FIRST_TASKS = {
    **{f"atari-{game.lower()}": game for game in ATARI_GAMES},
    "pong-two-actors": "Pong, `make train`",
    "pong-poly": "Pong, `polybeast.py`",
    "r2d2-pong": "Pong, `r2d2.py`",
    "minatar-fast": "MinAtar Breakout, 512 environments",
    "recipe-minatar": "MinAtar Breakout, `--preset pixels`",
    "r2d2-minatar-breakout": "MinAtar Breakout, `r2d2.py`",
    "minatar-fast-spaceinvaders": "MinAtar Space Invaders, 512 environments",
    "r2d2-minatar-spaceinvaders": "MinAtar Space Invaders, `r2d2.py`",
    "recipe-minigrid": "MiniGrid with memory, `--preset memory`",
    "recipe-cartpole": "CartPole, `--preset discrete`",
    "recipe-lunarlander": "LunarLander, `--preset discrete`",
    "recipe-halfcheetah": "HalfCheetah, `--preset continuous`",
    "recipe-hopper": "Hopper, `--preset continuous`",
    "recipe-vizdoom": "VizDoom Basic, `--preset pixels`",
    "recipe-crafter": "Crafter, `--preset pixels`",
}
# The runs of Pong that differ in the emulator: environments, emulator, task.
EMULATOR_TASKS = (
    (64, "Beast's", "atari-pong"),
    (64, "ale-py's", "pong-two-actors"),
    (32, "Beast's", "pong-beast"),
    (32, "ale-py's", "pong"),
)
# The runs of benchmarks/learning.py that differ in one thing, and what the table calls them.
COMPARED_TASKS = {
    "atari-pong": "Pong, at once",
    "pong-64": "Pong, just in time",
    "pong-64-two-ranks": "Pong, two ranks",
    "minatar-64-at-once": "MinAtar Breakout, at once",
    "minatar-64": "MinAtar Breakout, just in time",
    "minatar-64-two-ranks": "MinAtar Breakout, two ranks",
}
CPU_PARTS = ("learner", "inference", "envs")
# CSVs that are not of one learning run, or that another page has: samples of a soak, a search, a GPU, lists of games.
NO_RUNS = (
    "soak-*.csv",
    "*-search.csv",
    "gpu-*.csv",
    "atari-exact.csv",
    "atari-policy.csv",
    "lag.csv",
)
PUBLISHED = ROOT / "benchmarks" / "peers" / "atari-published.csv"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    head = list(head)
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def spread(values: Iterable[float], form: str = ",.0f", middle=statistics.median) -> str:
    """`middle (lowest to highest)`, or the value alone where there is one."""
    values = list(values)
    if len(values) == 1:
        return format(values[0], form)
    return f"{middle(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# ---- flags


def describe_type(kind: Any) -> str:
    """`float or auto` for float | Literal["auto"]."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"{describe_type(get_args(kind)[0])} …"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(describe_type, get_args(kind)))
    return kind.__name__


def describe_default(default: Any) -> str:
    if default in ("", (), [], None):
        return ""
    return f"`{default:,}`" if isinstance(default, int) and default >= 10**4 else f"`{default}`"


def in_cell(text: str) -> str:
    """Text for a cell of a table: `|` and, outside of code, `<` would be markup."""
    parts = " ".join(text.split()).replace("|", r"\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def flag_tables(flags_class: type, without: type | None = None) -> list[str]:
    """A table for each section, with the flags that `without` does not have, or has with other words or defaults."""
    known, hints = read_source(flags_class), get_type_hints(flags_class)
    inherited = read_source(without) if without else {}
    defaults = {each.name: each.default for each in fields(without)} if without else {}
    sections: dict[str, list] = {}
    for each in fields(flags_class):
        flag = known[each.name]
        if each.name in inherited and (inherited[each.name].help, defaults[each.name]) == (flag.help, each.default):
            continue
        default = each.default_factory() if each.default is MISSING else each.default
        name = f"`--{each.name}`" + (f", `--no_{each.name}`" if default is True else "")
        row = name, describe_type(hints[each.name]), describe_default(default), in_cell(flag.help)
        sections.setdefault(flag.section, []).append(row)
    lines = []
    for title, rows in sections.items():
        lines += [f"### {title}", "", *table(("flag", "type", "default", ""), rows), ""]
    return lines


def polybeast_tables() -> list[str]:
    """The flags that only polybeast.py has, whose file is read without libbeast where that is not built."""
    stands_in = not importlib.util.find_spec("libbeast")
    if stands_in:
        sys.modules["libbeast"] = types.ModuleType("libbeast")
    try:
        import polybeast

        return flag_tables(polybeast.Flags, without=monobeast.AgentFlags)
    finally:
        for name in ("libbeast", "polybeast", "beast.run.servers", "beast.feeds.remote") if stands_in else ():
            sys.modules.pop(name, None)


def env_server_table() -> list[str]:
    """The flags of polybeast_env.py, but for those of the environment."""
    with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda parser, arguments: parser):
        parser: Any = polybeast_env.parse_flags([])
    environment = {field.name for field in fields(EnvFlags)}
    rows = []
    for action in parser._actions:
        if action.dest in environment | {"help"}:
            continue
        kind = "bool" if action.nargs == 0 else (action.type or str).__name__
        default = describe_default(action.default)
        rows.append((f"`{action.option_strings[-1]}`", kind, default, in_cell(action.help or "")))
    return [*table(("flag", "type", "default", ""), rows), ""]


def flags_page() -> str:
    lines = [
        WRITTEN,
        "",
        "# Flags",
        "",
        "`--help` of each program lists the same. An empty default is an empty text or list. A *step* is one decision "
        "of the agent, a *frame* one of the emulator. `--preset NAME` takes other defaults ([recipes](recipes.md), "
        "[R2D2](r2d2.md)).",
        "",
        "## Of monobeast.py and polybeast.py",
        "",
        *flag_tables(monobeast.AgentFlags),
        "## Of monobeast.py only",
        "",
        *flag_tables(monobeast.Flags, without=monobeast.AgentFlags),
        "## Of polybeast.py only",
        "",
        *polybeast_tables(),
        "## Of r2d2.py",
        "",
        "It also has the flags of the sections [The environment](#the-environment) to "
        "[Evaluation and test](#evaluation-and-test), and `--net`, `--width`, `--hidden_size`, `--core_size` and "
        "`--discount`.",
        "",
        *flag_tables(r2d2.Flags, without=monobeast.AgentFlags),
        "## Of multibeast.py",
        "",
        "It has the flags of its `--agent`, and these:",
        "",
        *flag_tables(multibeast.PopulationFlags),
        "## Of polybeast_env.py",
        "",
        "The flags of [the environment](#the-environment), and these:",
        "",
        *env_server_table(),
    ]
    return "\n".join(lines).rstrip() + "\n"


# ---- results


@dataclass
class Run:
    """One learning run of benchmarks/results/: a CSV with a header."""

    path: Path
    header: dict[str, str]
    steps: list[float]
    frames: list[float]
    """Of the emulator; the same as `steps` for environments that are not Atari."""
    hours: list[float]
    returns: list[float]
    """Mean returns of the last 100 games; rows before the first game has ended are left out."""
    rows: list[dict[str, str]]
    """All columns of these rows."""

    @property
    def task(self) -> str:
        return re.sub(r"-seed\d+$", "", self.path.stem)

    @property
    def machine(self) -> str:
        return machine_of(self.header["hardware"])

    @property
    def aim(self) -> float | None:
        """The return that counts as learned, of the file itself, of `AIMS` or of gymnasium; none is None."""
        if "aim" in self.header:
            return float(self.header["aim"])
        spec = gymnasium.registry.get(self.env)
        return AIMS.get(self.env, spec.reward_threshold if spec else None)

    @property
    def env(self) -> str:
        return (re.search(r"--env (\S+)", self.header["which ran"]) or ["", ""])[1]

    @property
    def protocol(self) -> str:
        """The environment's id, and what a comparison has to know beside it."""
        notes = [f"`{self.env}`"]
        if "NoFrameskip-v4" in self.env:
            notes.append("no sticky actions")
        if "r2d2.py" in self.header["which ran"]:
            notes.append("greediest quarter of the environments")
        return ", ".join(notes)

    def return_after(self, steps: float) -> float | None:
        """The return in the first row after so many steps; None where the run ended before."""
        return next((value for step, value in zip(self.steps, self.returns) if step >= steps), None)

    def mean(self, column: str) -> float:
        return statistics.mean(float(row[column]) for row in self.rows)

    @property
    def reached(self) -> int | None:
        """The first row whose return is the aim or more."""
        if self.aim is None:
            return None
        return next((row for row, value in enumerate(self.returns) if value >= self.aim), None)


def short(commit: str) -> str:
    """The first digits of a commit, and what follows it."""
    commit, _, changes = commit.partition(" ")
    return f"{commit[:7]} {changes}".strip()


def machine_of(hardware: str) -> str:
    """`AMD EPYC, 2 cores` for all ways in which the files say that."""
    processor = re.search(r"AMD \w+|Intel\(R\) \w+\(R\)|Intel \w+|Apple \w+", hardware)
    cores = re.search(r"(\d+)[- ]cores?", hardware)
    gpus = sorted(set(re.findall(r"NVIDIA [\w-]+(?: [A-Z]*\d+\w*)*", hardware)))
    if not cores:
        raise ValueError(f"no number of cores is named in {hardware!r}")
    name = processor[0].replace("(R)", "") if processor else hardware.split(",")[0]
    return ", ".join([name, f"{cores[1]} core{'s' if cores[1] != '1' else ''}", *gpus])


def read_header(path: Path) -> dict[str, str]:
    """The `# name: value` lines that a CSV begins with."""
    header = {}
    for line in path.read_text().splitlines():
        if not (found := re.match(r"# ([\w ]+): (.*)", line)):
            break
        header[found[1]] = found[2]
    return header


def read_runs() -> list[Run]:
    runs = []
    for path in sorted(RESULTS.glob("*.csv")):
        if any(map(path.match, NO_RUNS)):
            continue
        header = read_header(path)
        if missing := {"seed", "command", "which ran", "commit", "hardware"} - header.keys():
            raise ValueError(f"{path} names no {' and no '.join(sorted(missing))} in its first lines")
        lines = [line for line in path.read_text().splitlines() if line[:1] != "#"]
        rows = [row for row in csv.DictReader(lines) if row.get(RETURN) and math.isfinite(float(row[RETURN]))]
        if not rows:
            raise ValueError(f"{path.name} has no finite {RETURN}")
        steps, hours, returns = ([float(row[name]) for row in rows] for name in ("step", "hours", RETURN))
        frames = [float(row.get("frames", row["step"])) for row in rows]
        runs.append(Run(path, header, steps, frames, hours, returns, rows))
    return runs


def link(path: Path, text: str = "") -> str:
    """A link from a page of docs/."""
    return f"[{text or path.name}](../{path.relative_to(ROOT).as_posix()})"


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def by_task(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """(machine, task) -> its runs in the order of their seeds."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.machine, run.task, int(run.header["seed"]))):
        groups.setdefault((run.machine, run.task), []).append(run)
    return groups


def over_seeds(runs: list[Run]) -> tuple[str, ...]:
    """Cells: seeds, return at the end, aim, steps and minutes until the aim."""
    done = [run for run in runs if run.reached is not None]
    aim = runs[0].aim
    cells = [
        ", ".join(run.header["seed"] for run in runs),
        spread((run.returns[-1] for run in runs), ".2f", statistics.mean),
        "" if aim is None else f"{aim:g}",
        spread((run.steps[run.reached] for run in done), ",.0f", statistics.mean) if done else "",
        spread((60 * run.hours[run.reached] for run in done), ".1f", statistics.mean) if done else "",
    ]
    if aim is not None and len(done) < len(runs):
        for cell in (3, 4) if done else ():
            cells[cell] += f", {len(done)} of {len(runs)} seeds"
        cells[3] = cells[3] or "not reached"
    return tuple(cells)


SEEDS_HEAD = ("seeds", "return at the end", "aim", "steps until the aim", "minutes until the aim")


def millions(count: float) -> str:
    return f"{count / 1e6:.3g} M"


def length(counts: list[float]) -> str:
    """`3 M`, or `1.2 M to 3 M` if some runs were much shorter."""
    ends = (min(counts), max(counts)) if min(counts) < 0.95 * max(counts) else (statistics.median(counts),)
    return " to ".join(map(millions, ends))


def read_published() -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if line[0] != "#"))


def comparable(run: Run, published: list[dict[str, str]]) -> str:
    """Published returns in the same environment after as many steps."""
    found = [
        f"{row['agent']} {row['mean']} ± {row['deviation']}"
        for row in published
        if row["environment"] == run.env
        and row["steps"].isdigit()
        and abs(run.steps[-1] / int(row["steps"]) - 1) < 0.01
    ]
    return ", ".join(found)


def first_section(runs: list[Run]) -> list[str]:
    """Which games, how good, how sure."""
    tasks, published, rows = by_task(runs), read_published(), []
    for task, name in FIRST_TASKS.items():
        for own in (runs for (_, of), runs in tasks.items() if of == task):
            steps, frames = ([getattr(run, column)[-1] for run in own] for column in ("steps", "frames"))
            rows.append(
                (
                    name,
                    spread((run.returns[-1] for run in own), ".2f", statistics.mean),
                    len(own),
                    length(steps),
                    length(frames) if frames != steps else "",
                    own[0].protocol,
                    comparable(own[0], published),
                )
            )
    head = ("task", "return", "seeds", "steps", "frames", "protocol", "published, same protocol and steps")
    return [
        "A return is the mean of the last 100 training games, whole and unclipped, at the end of a run. A seed is one "
        "run with its own random numbers. Over seeds the table shows the mean (lowest to highest). One seed says "
        "little about how another would end.",
        "",
        *table(head, rows),
        "",
        "A step is one decision of the agent, a frame one of the emulator. Atari has 4 frames a step; the other rows "
        "count steps only. R2D2's environments explore more or less, and its return is that of the quarter that "
        f"explores least. Published values are means and deviations over seeds; {link(PUBLISHED, 'their file')} names "
        "the sources.",
        "",
    ]


def emulators_section(runs: list[Run]) -> list[str]:
    """Pong on our emulator and on ale-py's."""
    rows = []
    for environments, emulator, task in EMULATOR_TASKS:
        for run in sorted((run for run in runs if run.task == task), key=lambda run: run.header["seed"]):
            later = (run.return_after(steps) for steps in (1e6, 1.5e6, 2e6))
            rows.append(
                (
                    environments,
                    emulator,
                    run.header["seed"],
                    "" if run.reached is None else millions(run.steps[run.reached]),
                    *("" if value is None else f"{value:.1f}" for value in later),
                    f"{run.returns[-1]:.1f} after {millions(run.steps[-1])}",
                    link(run.path, "csv"),
                )
            )
    head = (
        "environments",
        "emulator",
        "seed",
        "steps until 18",
        "after 1 M",
        "after 1.5 M",
        "after 2 M",
        "at the end",
        "",
    )
    ours, theirs = (RESULTS / f"pong-deterministic{name}-seed1.csv" for name in ("", "-ale"))
    curves = RESULTS / "pong-backends.png"
    return [
        "## Pong on both emulators",
        "",
        "Threads race, so two runs with one seed differ, and only the range over seeds can be compared. The runs on "
        f"ale-py are of older commits, and shorter. {link(curves, 'The curves with 32 environments')}.",
        "",
        *table(head, rows),
        "",
        "With `--deterministic` nothing races. Then all losses and returns of one seed were equal on both emulators "
        f"for 780,000 steps, until the run on ale-py was ended ({link(ours, 'ours')}, {link(theirs, 'ale-py')}).",
        "",
    ]


def compared_section(runs: list[Run]) -> list[str]:
    """What slots that are handed out just in time give, and what two ranks cost."""
    rows = []
    for task, name in COMPARED_TASKS.items():
        for run in sorted((run for run in runs if run.task == task), key=lambda run: run.header["seed"]):
            is_whole = not name.startswith("Pong")  # which is ended by hand at its aim
            end = len(run.steps) - 1 if is_whole or run.reached is None else run.reached
            run = replace(run, rows=run.rows[: end + 1])
            speed, num_ranks = run.steps[end] / run.hours[end] / 3600, 2 if task.endswith("-two-ranks") else 1
            has_cpu = "cores/learner" in run.rows[0]
            until = ("", "") if run.reached is None else over_seeds([run])[3:]
            if run.reached is None and not is_whole:
                until = f"over {run.steps[-1]:,.0f}", f"over {60 * run.hours[-1]:.1f}"
            rows.append(
                (
                    name,
                    run.header["seed"],
                    f"{speed:,.0f}",
                    f"{run.mean('stats/policy_lag_mean'):.1f}",
                    *(
                        f"{1000 * num_ranks * run.mean(f'cores/{part}') / speed:.2f}" if has_cpu else ""
                        for part in CPU_PARTS
                    ),
                    *until,
                    *((f"{statistics.mean(run.returns):.2f}", f"{run.returns[-1]:.2f}") if is_whole else ("", "")),
                    link(run.path, "csv"),
                )
            )
    if {run.task for run in runs} & COMPARED_TASKS.keys() <= {"atari-pong"}:  # there is nothing to compare it with
        return []
    cpu = (f"{part}, ms of CPU a step" for part in CPU_PARTS)
    until = "steps until the aim", "minutes until it"
    head = "run", "seed", "steps/s", "policy lag", *cpu, *until, "mean return of the run", "at the end", ""
    return [
        "## Slots just in time, and two ranks",
        "",
        "64 environments and updates of equally many columns. *At once* hands out each slot that is free, so that "
        "rollouts wait for the learner. Two ranks share environments and columns. Their CPU time is twice rank 0's. "
        "Pong's figures are those until its mean return is 18, or until the run was stopped without it. Its runs at "
        "once are older, from another machine and beside other jobs: compare their steps alone.",
        "",
        *table(head, rows),
        "",
    ]


def tasks_by_machine(runs: Iterable[Run]) -> dict[str, dict[str, list[Run]]]:
    machines: dict[str, dict[str, list[Run]]] = {}
    for (machine, task), own in by_task(runs).items():
        machines.setdefault(machine, {})[task] = own
    return machines


def learning_section(runs: list[Run]) -> list[str]:
    lines = [
        "## Learning",
        "",
        "`python benchmarks/learning.py TASK --seed SEED` trains a task with today's code and presets. *Aim* is the "
        "return that counts as learned: gymnasium's reward threshold of the environment, or a choice of ours if it has "
        "none. Minutes depend on the machine and on what else ran there. "
        f"[All runs](#{anchor(RUNS_TITLE)}) has each seed with its file.",
        "",
    ]
    for machine, own in tasks_by_machine(runs).items():
        lines += [f"### Learning on {machine}", ""]
        lines += [*table(("task", *SEEDS_HEAD), ((f"`{task}`", *over_seeds(runs)) for task, runs in own.items())), ""]
    return lines


RUNS_TITLE = "All runs and their files"


def runs_section(runs: list[Run]) -> list[str]:
    lines = [
        f"## {RUNS_TITLE}",
        "",
        "The first lines of a CSV have its flags and its commit. The remark has the command if it was another than "
        "`python benchmarks/learning.py TASK --seed SEED`.",
        "",
    ]
    for machine, own in tasks_by_machine(runs).items():
        rows = []
        for task, runs in own.items():
            for run in runs:
                curve = run.path.with_suffix(".png")
                files = link(run.path, "csv") + (f", {link(curve, 'curve')}" if curve.exists() else "")
                remarks = [run.header[name] for name in ("remark",) if name in run.header]
                command = f"python benchmarks/learning.py {task} --seed {run.header['seed']}"
                if run.header["command"] != command:
                    remarks.append(f"`{run.header['command']}`")
                reached = run.reached
                rows.append(
                    (
                        f"`{task}`",
                        run.header["seed"],
                        f"{run.returns[-1]:.2f}",
                        f"{max(run.returns):.2f}",
                        f"{run.steps[-1]:,.0f}",
                        f"{60 * run.hours[-1]:.1f}",
                        "" if reached is None else f"{run.steps[reached]:,.0f}",
                        "" if reached is None else f"{60 * run.hours[reached]:.1f}",
                        short(run.header["commit"]),
                        files,
                        in_cell("; ".join(remarks)),
                    )
                )
        head = "task", "seed", "return at the end", "best", "steps", "minutes", "steps until the aim"
        head += "minutes until the aim", "commit", "files", "remark"
        lines += [f"### Runs on {machine}", "", *table(head, rows), ""]
    return lines


def read_json(path: Path) -> dict:
    """A result that says where it is from."""
    result = json.loads(path.read_text())
    if missing := {"command", "commit", "hardware"} - result.keys():
        raise ValueError(f"{path} names no {' and no '.join(sorted(missing))}")
    return result


def read_throughput() -> dict[Path, dict]:
    return {path: read_json(path) for path in sorted(RESULTS.glob("throughput-*.json"))}


VARIANTS = {"monobeast": "`monobeast.py`", "polybeast": "`polybeast.py`", "r2d2": "`r2d2.py`"}
SPEED_HEAD = ("simulation, steps/s", "+ inference", "+ learning", "share of simulation", "policy lag: mean, highest")


def speed_cells(measured: dict[str, list[float]]) -> tuple[str, ...]:
    middle = {name: statistics.median(values) for name, values in measured.items()}
    return (
        *(spread(measured[stage]) for stage in ("simulation", "+ inference", "+ learning")),
        f"{middle['+ learning'] / middle['simulation']:.0%}",
        f"{middle['stats/policy_lag_mean']:.1f}, {middle['stats/policy_lag_max']:.0f}",
    )


def throughput_section(results: dict[Path, dict]) -> list[str]:
    lines = [
        "## Throughput",
        "",
        "Steps are agent steps. *Simulation* runs the whole data path with random actions and drops the rollouts: that "
        "is the limit. *+ inference* adds the net's choice of actions, *+ learning* adds training. B is the batch "
        "width. The tables show the median of the repetitions (lowest to highest). Each report has the CPU time of "
        "every stage, the waits and the memory.",
        "",
    ]
    machines = dict.fromkeys(machine_of(result["hardware"]) for result in results.values())
    for machine in sorted(machines):
        rows = []
        for path, result in results.items():
            if machine_of(result["hardware"]) != machine:
                continue
            for num_envs, found in result["found"].items():
                for variant in (variant for variant in VARIANTS if variant in found):
                    rows.append(
                        (
                            result["flags"]["env"],
                            result["flags"]["batch_width"],
                            num_envs,
                            VARIANTS[variant],
                            *speed_cells(found[variant]),
                            short(result["commit"]),
                            link(path.with_suffix(".md"), "report"),
                        )
                    )
        head = ("environment", "B", "environments", "", *SPEED_HEAD, "commit", "")
        lines += [f"### Throughput on {machine}", "", *table(head, rows), ""]
    return lines


ATARI_TITLE = "Six Atari games beside published returns"


def atari_section(runs: list[Run]) -> list[str]:
    published = read_published()
    columns = {}  # agent -> its column's head
    for row in published:
        if row["steps"].isdigit():
            columns[row["agent"]] = f"{row['agent']}: -v4, {millions(4 * int(row['steps']))} frames"
        else:
            columns[row["agent"]] = f"{row['agent']}: EnvPool's -v5, more frames"
    returns = {(row["agent"], row["game"]): f"{row['mean']} ± {row['deviation']}" for row in published}
    lines = [
        f"## {ATARI_TITLE}",
        "",
        "`python benchmarks/learning.py atari-GAME` trains MonoBeast for 10 M steps, with the same flags in all games. "
        "Only the column of CleanRL PPO is comparable: it has the same environments and as many frames. The columns to "
        "the right of it are from another protocol and from longer runs, and show what is possible there. "
        f"{link(PUBLISHED, 'The published values')} name their sources.",
        "",
    ]
    rows, frames = [], []
    for game in ATARI_GAMES:
        own = sorted((run for run in runs if run.task == f"atari-{game.lower()}"), key=lambda run: run.header["seed"])
        frames += [run.frames[-1] for run in own]
        cells = (
            (spread((run.returns[-1] for run in own), ".2f", statistics.mean), len(own)) if own else ("not run yet", "")
        )
        rows.append((game, *cells, *(returns.get((agent, game), "") for agent in columns)))
    ours = "MonoBeast: -v4" + (f", {millions(statistics.median(frames))} frames" if frames else "")
    return [*lines, *table(("game", ours, "seeds", *columns.values()), rows), ""]


def peers_section() -> list[str]:
    lines = [
        "## Beside other projects",
        "",
        "Each project ran with the best settings of a small sweep, on the same cores and with the same shape of model. "
        "They took turns. MonoBeast computes in bf16 if the processor has it, the others in fp32. The table shows "
        "medians (lowest to highest); each ratio compares two runs of one turn.",
        "",
    ]
    rows = []
    for path in sorted(RESULTS.glob("peers*.json")):
        result = read_json(path)
        ours, lstm = result["runs"]["MonoBeast"], ", LSTM" if result["lstm"] else ""
        emulator = {"beast": "Beast's emulator", "ale": "ale-py's emulator"}[result["atari_backend"]]
        for name, values in result["runs"].items():
            ratios = [a / b for a, b in zip(ours, values)]
            rows.append(
                (
                    name + (f", {emulator}" if name.startswith("MonoBeast") else "") + lstm,
                    spread(values),
                    "" if name == "MonoBeast" else spread(ratios, ".2f"),
                    machine_of(result["hardware"]),
                    short(result["commit"]),
                    f"{link(path.with_suffix('.md'), 'report')}: `{result['command']}`",
                )
            )
    return [*lines, *table(("", "steps/s", "MonoBeast against it", "machine", "commit", ""), rows), ""]


@dataclass
class Report:
    """A Markdown file of benchmarks/results/ that no other section reads."""

    path: Path
    title: str
    command: str
    commits: list[str]
    hardware: str
    first_table: list[str]


def read_reports() -> list[Report]:
    reports = []
    for path in sorted(RESULTS.glob("*.md")):
        if path.stem.startswith("peers") or (path.stem.startswith("throughput") and path.with_suffix(".json").exists()):
            continue
        text = path.read_text()
        lines = text.splitlines()
        scripts = r"(?:(?:benchmarks|attacks)/\w+\.py|(?:mono|poly|multi)beast\.py|make -C csrc)"
        commands = re.findall(rf"`((?:python )?[^`]*{scripts}[^`]*)`", text)
        commits = re.findall(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b", re.sub(r"\d{4}-\d\d-\d\d", "", text))
        hardware = re.search(r"(?:\d+-core )?(?:AMD|Intel|Apple|NVIDIA)[^;.]*", " ".join(lines))
        for what, found in (("command", commands), ("commit", commits), ("hardware", hardware)):
            if not found:
                raise ValueError(f"{path.name} names no {what}")
        begin = next((number for number, line in enumerate(lines) if line.startswith("|")), len(lines))
        end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("|")), len(lines))
        title = lines[0].lstrip("# ")
        reports.append(
            Report(path, title, commands[0].strip(), list(dict.fromkeys(commits)), hardware[0], lines[begin:end])
        )
    return reports


MAX_TABLE = 12  # lines; a longer table is behind the link


def reports_section(reports: list[Report]) -> list[str]:
    lines = ["## Other measurements", ""]
    for report in reports:
        commits = ", ".join(commit[:7] for commit in report.commits)
        lines += [
            f"### {report.title}",
            "",
            f"`{report.command}`; {machine_of(report.hardware)}; commit {commits}. {link(report.path, 'Report')}.",
            "",
        ]
        if len(report.first_table) <= MAX_TABLE:
            lines += [*report.first_table, ""]
    search = RESULTS / "pong-search.csv"
    return [*lines, "### The search for Pong's defaults", "", f"{link(search)} says in its first lines what ran.", ""]


def contents(lines: list[str]) -> list[str]:
    """A list of the page's sections; those of a section stand behind it."""
    entries: list[str] = []
    for line in lines:
        if found := re.match(r"(##|###) (.*)", line):
            entry = f"[{found[2]}](#{anchor(found[2])})"
            if found[1] == "##":
                entries.append(f"- {entry}")
            else:
                entries[-1] += (" · " if " · " in entries[-1] or ": [" in entries[-1] else ": ") + entry
    return entries


def results_page() -> str:
    runs = read_runs()
    sections = [
        *atari_section(runs),
        *emulators_section(runs),
        *compared_section(runs),
        *learning_section(runs),
        *throughput_section(read_throughput()),
        *peers_section(),
        *reports_section(read_reports()),
        *runs_section(runs),
    ]
    lines = [
        WRITTEN,
        "",
        "# Results",
        "",
        *first_section(runs),
        "Every figure here comes from a file in `benchmarks/results/` that names its command, commit and hardware. "
        "Load and hour differed from file to file, so compare shares rather than speeds. The "
        f"{link(ROOT / 'benchmarks/LEDGER.md', 'ledger')} has what was tried for speed, with predictions and failures.",
        "",
        *sections,
        "## Sections of this page",
        "",
        *contents(sections),
    ]
    return "\n".join(lines).rstrip() + "\n"


# ---- tables of other pages


def readme_results() -> list[str]:
    groups = by_task(read_runs())
    rows = []
    for task, name in README_TASKS.items():
        for (machine, of), runs in groups.items():
            if of == task:
                rows.append((name, machine, *over_seeds(runs)))
    return table(("task", "machine", *SEEDS_HEAD), rows)


def lag_table() -> list[str]:
    """Returns over policy lag, of the runs of benchmarks/lag.py: means over seeds, with the lowest and the highest."""
    lines = (line for line in (RESULTS / "lag.csv").read_text().splitlines() if line[0] != "#")
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in csv.DictReader(lines):
        by_correction = found.setdefault((row["game"], int(row["lag"])), {})
        by_correction.setdefault(row["correction"], []).append(float(row["return"]))
    corrections = list(dict.fromkeys(name for by_correction in found.values() for name in by_correction))
    rows = (
        (game, lag, *(spread(by_correction[name], ".1f", statistics.mean) for name in corrections))
        for (game, lag), by_correction in sorted(found.items())
    )
    return table(("game", "updates of lag", *corrections), rows)


def with_table(path: Path, rows: list[str]) -> str:
    """The page with these rows as the table behind its marker."""
    text, marker = path.read_text(), "<!-- results -->\n\n"
    if text.count(marker) != 1:
        raise ValueError(f"{path.name} has {text.count(marker)} lines {marker.strip()!r}, and needs one")
    before, after = text.split(marker)
    rest = re.sub(r"\A(\|.*\n)+\n", "", after)
    return f"{before}{marker}{chr(10).join(rows)}\n\n{rest}"


def pages() -> dict[Path, str]:
    """File -> what belongs there now."""
    readme, lag = ROOT / "README.md", ROOT / "docs" / "lag.md"
    return {
        ROOT / "docs" / "flags.md": flags_page(),
        ROOT / "docs" / "results.md": results_page(),
        readme: with_table(readme, readme_results()),
        lag: with_table(lag, lag_table()),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
