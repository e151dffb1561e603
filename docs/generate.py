"""Writes the pages that follow from the code and from benchmarks/results/, and the tables of README.md.

    python docs/generate.py     # or `make docs`, which builds the site, too

- docs/flags.md from the dataclasses of the flags, their docstrings and sections;
- docs/results.md from every file in benchmarks/results/;
- in README.md the table behind `<!-- results -->`.

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
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

import gymnasium  # noqa: E402

import monobeast  # noqa: E402
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
# CSVs that are not of one learning run: the samples of a soak, a search, a list of games.
NO_RUNS = ("soak-*.csv", "*-search.csv", "atari-exact.csv", "atari-policy.csv")
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
    hours: list[float]
    returns: list[float]
    """Mean returns of the last 100 games; rows before the first game has ended are left out."""

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
        env = (re.search(r"--env (\S+)", self.header["which ran"]) or ["", ""])[1]
        spec = gymnasium.registry.get(env)
        return AIMS.get(env, spec.reward_threshold if spec else None)

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
        columns = ([float(row[name]) for row in rows] for name in ("step", "hours", RETURN))
        runs.append(Run(path, header, *columns))
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


def learning_section(runs: list[Run]) -> list[str]:
    lines = [
        "## Learning",
        "",
        "`python benchmarks/learning.py TASK --seed SEED` trains a task with today's code and presets. The first lines "
        "of a CSV have its flags and its commit; the remark says where the command was another. *Return* is the mean "
        "of the last 100 training games, whole and unclipped: at the end of the "
        "run, and at its best. *Aim* is the return that counts as learned: gymnasium's reward threshold of the "
        "environment, or a choice of ours where it has none. Over seeds the tables show the mean (lowest to highest). "
        "Minutes hold for the machine, and for a run beside other jobs they are more.",
        "",
    ]
    groups = by_task(runs)
    for machine in dict.fromkeys(machine for machine, _ in groups):
        own = {task: runs for (of, task), runs in groups.items() if of == machine}
        lines += [f"### Learning on {machine}", ""]
        lines += table(("task", *SEEDS_HEAD), ((f"`{task}`", *over_seeds(runs)) for task, runs in own.items()))
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
        lines += ["", *table(head, rows), ""]
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
        "Steps are agent steps. *Simulation* is the whole data path with random actions, and rollouts thrown away: the "
        "limit. Then the net chooses the actions (*+ inference*), then it learns, too (*+ learning*). B is the batch "
        "width. The tables show the median of the repetitions (lowest to highest). The report of each has the CPU time "
        "of every stage, the waits and the memory.",
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


def atari_section(runs: list[Run]) -> list[str]:
    """Six Atari games beside the returns that others publish."""
    values = list(csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if line[0] != "#"))
    published = {(row["agent"], row["game"]): f"{row['mean']} ± {row['deviation']}" for row in values}
    agents = list(dict.fromkeys(agent for agent, _ in published))
    lines = [
        "## Six Atari games beside published returns",
        "",
        "`python benchmarks/learning.py atari-GAME` trains MonoBeast for 10 M steps (40 M frames) with one set of "
        "flags for all games. Its returns are of the last 100 training games, whole and unclipped, as mean (lowest to "
        "highest) of the seeds. CleanRL's PPO has the same environments and as many steps; the other runs are on "
        f"EnvPool's -v5 and were longer. {link(PUBLISHED, 'The published values')} name their sources.",
        "",
    ]
    rows = []
    for game in dict.fromkeys(row["game"] for row in values):
        own = sorted((run for run in runs if run.task == f"atari-{game.lower()}"), key=lambda run: run.header["seed"])
        cells = ["", "", "not run yet"]
        if own:
            seeds, *returns = over_seeds(own)
            cells = [seeds, spread(run.steps[-1] for run in own), returns[0]]
        rows.append((game, *cells, *(published.get((agent, game), "") for agent in agents)))
    return [*lines, *table(("game", "seeds", "steps", "MonoBeast", *agents), rows), ""]


def peers_section() -> list[str]:
    lines = [
        "## Beside other projects",
        "",
        "Each ran in the best setting of a small sweep, on the same cores with the same shape of model, in turn. "
        "MonoBeast computes in bf16 where the processor has it, the others in fp32. The table shows medians (lowest to "
        "highest); the ratio is of the runs of one turn.",
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
        scripts = r"(?:(?:benchmarks|attacks)/\w+\.py|monobeast\.py|polybeast\.py|make -C csrc)"
        commands = re.findall(rf"`((?:python )?[^`]*{scripts}[^`]*)`", text)
        commits = re.findall(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b", re.sub(r"\d{4}-\d\d-\d\d", "", text))
        hardware = re.search(r"(?:\d+-core )?(?:AMD|Intel|Apple)[^;.]*", " ".join(lines))
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


def results_page() -> str:
    runs, throughput, reports = read_runs(), read_throughput(), read_reports()
    index: dict[tuple[str, str], str] = {}  # (benchmark, machine) -> title of a section
    for machine, task in by_task(runs):
        index[f"`{task}`", machine] = f"Learning on {machine}"
    for result in throughput.values():
        machine = machine_of(result["hardware"])
        index[f"throughput on {result['flags']['env']}", machine] = f"Throughput on {machine}"
    for path in sorted(RESULTS.glob("peers*.json")):
        result = read_json(path)
        what = "other projects" + (", LSTM" if result["lstm"] else "")
        index[what, machine_of(result["hardware"])] = "Beside other projects"
    for report in reports:
        index[report.title, machine_of(report.hardware)] = report.title
    machines = sorted({machine for _, machine in index})
    rows = [
        (
            what,
            *(
                f"[results](#{anchor(index[what, machine])})" if (what, machine) in index else ""
                for machine in machines
            ),
        )
        for what in dict.fromkeys(what for what, _ in index)
    ]
    lines = [
        WRITTEN,
        "",
        "# Results",
        "",
        "Every figure here is read from a file in `benchmarks/results/`, which names its command, its commit and "
        "its hardware. Load and hour differed from file to file, so compare shares rather than speeds. The "
        f"{link(ROOT / 'benchmarks/LEDGER.md', 'ledger')} has what was tried for speed, with predictions and failures.",
        "",
        "## Index",
        "",
        *table(("benchmark", *machines), rows),
        "",
        *learning_section(runs),
        *atari_section(runs),
        *throughput_section(throughput),
        *peers_section(),
        *reports_section(reports),
    ]
    return "\n".join(lines).rstrip() + "\n"


# ---- README.md


def readme_results() -> list[str]:
    groups = by_task(read_runs())
    rows = []
    for task, name in README_TASKS.items():
        for (machine, of), runs in groups.items():
            if of == task:
                rows.append((name, machine, *over_seeds(runs)))
    return table(("task", "machine", *SEEDS_HEAD), rows)


def readme(text: str) -> str:
    """README.md with its table as the files of results have it now."""
    marker = "<!-- results -->\n\n"
    if text.count(marker) != 1:
        raise ValueError(f"README.md has {text.count(marker)} lines {marker.strip()!r}, and needs one")
    before, after = text.split(marker)
    rest = re.sub(r"\A(\|.*\n)+\n", "", after)
    return f"{before}{marker}{chr(10).join(readme_results())}\n\n{rest}"


def pages() -> dict[Path, str]:
    """File -> what belongs there now."""
    path = ROOT / "README.md"
    return {
        ROOT / "docs" / "flags.md": flags_page(),
        ROOT / "docs" / "results.md": results_page(),
        path: readme(path.read_text()),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
