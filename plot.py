"""Draw the learning curves of runs.

    python plot.py runs/pong                                               # curve.png: return over agent steps
    python plot.py runs/a-seed1 runs/a-seed2 runs/b --x hours --out ab.png
    python plot.py benchmarks/results/pong-two-actors-seed*.csv --x frames --average iqm --labels "two actors"
    python plot.py runs/duel --payoff --out duel.png                       # who beats whom, of multibeast.py
    python plot.py runs/six --lineage --out six.png                        # who copied whom, of multibeast.py --pbt
    python plot.py runs/five runs/breakout --tasks --out tasks.png         # a panel for each task, over its own steps

Runs of one code that differ only in seed and name make one curve: the mean or the interquartile mean (IQM) over the
seeds, in a band of 95 % bootstrap confidence or from the lowest to the highest. The legend shows the last value of each
curve, and the figure says what was averaged.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from beast.errors import InputError, MissingPackage, exit_with_message
from beast.files import read_json

COLUMN = {"steps": "step", "frames": "frames", "hours": "hours"}
AXIS_LABEL = {
    "steps": "agent steps",
    "frames": "frames",
    "hours": "hours of training",
    "charts/episodic_return": "mean return of the last 100 episodes",
    "charts/episodic_length": "mean length of the last 100 episodes in steps",
    "charts/SPS": "agent steps per second",
}
PBT_COLUMNS = ("policy", "rank", "objective", "games", "what", "donor")  # of pbt.csv, beside the numbers that vary
SAME_CURVE = ("seed", "name", "root")  # flags in which the runs of one curve may differ
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#5f4b8b",
    "#444444",
)  # also for color-blind readers


@dataclass
class Flags:
    """What to draw, and where to write it."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run directories, or copies of their metrics.csv. Copies whose names differ only in the seed make one curve."""
    x: Literal["steps", "frames", "hours"] = "steps"
    """Unit of the x axis: agent steps, emulator frames, or hours."""
    y: str = "charts/episodic_return"
    """Column of metrics.csv to draw."""
    out: str = "curve.png"
    """Image file to write; its suffix (.png, .svg, .pdf) chooses the format."""
    smooth: int = 1
    """Number of rows to average over, each row with those before it; 1 does not average."""
    average: Literal["mean", "iqm"] = "mean"
    """Over seeds: the mean, or the interquartile mean, that of the middle half of the seeds, which outliers move less.
    """
    band: Literal["bootstrap", "range"] = "bootstrap"
    """Around it: the 95 % confidence interval by bootstrap over the seeds, or from the lowest seed to the highest."""
    labels: tuple[str, ...] = ()
    """A label for each curve, in the order of the first run of each; none takes what the runs differ in."""
    tasks: bool = False
    """Draw a panel for each task of runs with several, over the steps of that task; runs of one environment are in its
    panel. --labels are of the curves of a panel."""
    lineage: bool = False
    """Draw who copied whom in one run with --pbt, and what the best policy at its end was trained with, by steps."""
    payoff: bool = False
    """Draw who beats whom in one run of several policies, sorted by rating, instead of a curve."""
    title: str = ""
    """Title; empty takes the environment's id if all runs share it."""


@dataclass
class Curve:
    """One run: `x` [N] in rising order, `y` [N], its flags (empty for a CSV file), its name without the seed, its seed,
    and what says which code trained it."""

    name: str
    config: dict
    x: np.ndarray
    y: np.ndarray
    seed: int | None = None
    code: str = ""


def read_curve(path: str, x_column: str, y_column: str, smooth: int = 1) -> Curve:
    """The run at `path`, a directory or a metrics.csv. Raises InputError naming the path and what it lacks."""
    if Path(path).name == "metrics.csv" and Path(path).with_name("config.json").exists():
        path = str(Path(path).parent)
    is_run = Path(path).is_dir()
    file = Path(path) / "metrics.csv" if is_run else Path(path)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: neither a run directory with a metrics.csv nor a CSV file ({error})") from None
    reader = csv.DictReader(lines)
    # An evaluation's row is of the step at which it ended, and `eval/step` is that of its weights.
    step_column = "eval/step" if y_column.startswith("eval/") else "step"
    for column in (x_column, y_column, step_column):
        if column not in (reader.fieldnames or []):
            raise InputError(f"{file}: has no column {column}; it has {', '.join(reader.fieldnames or ['none'])}")
    scale, points = [], []
    try:
        for row in reader:
            if row["step"] and row[x_column]:
                scale.append((float(row["step"]), float(row[x_column])))
                if row[step_column] and row[y_column]:
                    points.append((float(row[step_column]), float(row[y_column])))
    except ValueError as error:
        raise InputError(f"{file}: {error} in line {reader.line_num}") from None
    table = np.array(points).reshape(-1, 2)
    if len(table):
        table[:, 0] = np.interp(table[:, 0], *np.transpose(scale))
    table = table[np.isfinite(table).all(1)]
    if not len(table):
        raise InputError(f"{file}: has no values of {y_column} yet; train longer, or draw another column with --y")
    config = read_json(Path(path) / "config.json", missing={}) if is_run else {}
    name = Path(path).resolve().name if is_run else file.stem
    in_name = re.search(r"(?:^|[-_. ])(?:seed|s)[-_]?(\d+)(?=$|[-_. ])", name)
    seed = config.get("seed", int(in_name[1]) if in_name else None)
    start = (read_json(Path(path) / "meta.json", missing={}).get("starts") or [{}])[-1] if is_run else {}
    code = json.dumps([start.get(part) for part in ("commit", "diff", "untracked")])
    name = (name.replace(in_name[0], "") if in_name else name) or name
    return Curve(name, config, table[:, 0], running_mean(table[:, 1], smooth), seed, code)


def running_mean(y: np.ndarray, rows: int) -> np.ndarray:
    """Mean of each value and the `rows - 1` before it, fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    last = np.arange(1, len(y) + 1)
    first = np.maximum(last - rows, 0)
    return (total[last] - total[first]) / (last - first)


def group_seeds(curves: Iterable[Curve]) -> list[list[Curve]]:
    """Groups of curves that differ only in seed and name, in the order of their first curves.

    A seed that is there twice means another experiment, most often an edited agent: then code or names divide a group.
    """
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        flags = {flag: value for flag, value in curve.config.items() if flag not in SAME_CURVE}
        groups.setdefault(json.dumps(flags, sort_keys=True) if flags else curve.name, []).append(curve)
    return [part for group in groups.values() for part in divide_by_seeds(group)]


def divide_by_seeds(group: list[Curve]) -> list[list[Curve]]:
    """Parts of a group in each of which no seed is there twice, divided by code, else by name, else one by one."""
    if len({curve.seed for curve in group}) == len(group):
        return [group]
    for kind in ("code", "name"):
        parts: dict[str, list[Curve]] = {}
        for curve in group:
            parts.setdefault(getattr(curve, kind), []).append(curve)
        if len(parts) > 1:
            return [smaller for part in parts.values() for smaller in divide_by_seeds(part)]
    return [[curve] for curve in group]


def label_groups(groups: list[list[Curve]], chosen: Sequence[str] = ()) -> list[str]:
    """A label for each group: the chosen one, or the flags that differ, if they are few, else its name; and its number
    of seeds. Raises InputError if there are more or fewer chosen ones than groups."""
    if chosen and len(chosen) != len(groups):
        names = ", ".join(group[0].name for group in groups)
        raise InputError(f"--labels has {len(chosen)} labels for {len(groups)} curves ({names}): give one for each")
    configs = [group[0].config for group in groups]
    flags = [flag for flag in dict.fromkeys(flag for config in configs for flag in config) if flag not in SAME_CURVE]
    differing = [flag for flag in flags if len({json.dumps(config.get(flag)) for config in configs}) > 1]
    if chosen:
        labels = list(chosen)
    elif all(configs) and 1 <= len(differing) <= 3:
        labels = [
            ", ".join(f"{config.get(flag)}" if flag == "env" else f"{flag} {config.get(flag)}" for flag in differing)
            for config in configs
        ]
    else:
        labels = [group[0].name for group in groups]
    return [f"{label} ({len(group)} seeds)" if len(group) > 1 else label for label, group in zip(labels, groups)]


def interquartile_mean(ys: np.ndarray) -> np.ndarray:
    """Mean of the middle half of `ys` [seeds, …]; where that ends within a seed, a part of it counts."""
    edges = np.arange(len(ys) + 1).clip(len(ys) / 4, len(ys) * 3 / 4)
    return np.tensordot(np.diff(edges) / (len(ys) / 2), np.sort(ys, axis=0), 1)


def average_and_band(
    group: list[Curve], average: str = "mean", band: str = "bootstrap", points: int = 500, resamples: int = 2000
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, average, lower and upper edge of the band of a group, over the part of the x axis that its curves have in
    common. Raises InputError if there is none."""
    if len(group) == 1:
        return group[0].x, group[0].y, group[0].y, group[0].y
    first, last = max(curve.x[0] for curve in group), min(curve.x[-1] for curve in group)
    if first > last:
        raise InputError(f"{group[0].name}: its runs have no part of the x axis in common; draw them one by one")
    x = np.linspace(first, last, points)
    ys = np.stack([np.interp(x, curve.x, curve.y) for curve in group])  # [seeds, points]

    def over_seeds(ys: np.ndarray) -> np.ndarray:
        return interquartile_mean(ys) if average == "iqm" else ys.mean(0)

    if band == "range":
        return x, over_seeds(ys), ys.min(0), ys.max(0)
    choices = np.random.default_rng(0).integers(len(ys), size=(resamples, len(ys)))
    lower, upper = np.percentile([over_seeds(ys[chosen]) for chosen in choices], [2.5, 97.5], axis=0)
    return x, over_seeds(ys), lower, upper


def describe_averages(groups: list[list[Curve]], flags: Flags) -> str:
    """How the figure averages and smooths, for a line below it."""
    rows = f"a point is the mean of {flags.smooth} rows of metrics.csv" if flags.smooth > 1 else "not smoothed"
    if max(map(len, groups)) == 1:
        return rows
    average = "interquartile mean" if flags.average == "iqm" else "mean"
    band = "from lowest to highest" if flags.band == "range" else "95 % bootstrap interval"
    return f"line: {average} over seeds; band: {band}; {rows}"


def new_figure(width: float, height: float, rows: int = 1, first: float = 1.0):
    """A matplotlib Figure of so many inches, and its axes; of several rows, a list of them with a common x axis, the
    first one `first` times as high as the others. Raises MissingPackage without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackage("plot.py draws with matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    if rows == 1:
        return figure, figure.add_subplot()
    return figure, list(figure.subplots(rows, sharex=True, height_ratios=[first, *[1] * (rows - 1)]))


def draw_payoff(run: str, title: str = ""):
    """A matplotlib Figure of the payoff.json of a run: each policy's share of points against each other one. Raises
    InputError for a run that has none."""
    payoff = read_json(Path(run) / "payoff.json", missing=None)
    if payoff is None:
        raise InputError(f"{run}: it has no payoff.json; give a run of multibeast.py whose agents meet in games")
    order = np.argsort(payoff["ratings"])[::-1]
    points, games = (np.array(payoff[name], float)[np.ix_(order, order)] for name in ("points", "games"))
    shares = np.where(games > 0, points / np.maximum(games, 1), np.nan)
    figure, axes = new_figure(2.6 + 0.42 * len(order), 2.0 + 0.42 * len(order))
    axes.imshow(shares, cmap="RdBu", vmin=0, vmax=1)
    for row, column in zip(*np.nonzero(games)):
        share = shares[row, column]
        color = "white" if abs(share - 0.5) > 0.3 else "#222222"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=color)
    names = []
    for policy in order:
        parent, steps = payoff["parents"][policy], payoff["steps"][policy]
        then = "" if parent is None else f" = {parent} at {steps:,}"
        names.append(f"{payoff['policies'][policy]}{then} ({payoff['ratings'][policy]:+.0f})")
    axes.set_yticks(range(len(order)), names, fontsize=7.5)
    axes.set_xticks(range(len(order)), [str(payoff["policies"][policy]) for policy in order], fontsize=7.5)
    axes.set_xlabel("against", fontsize=9, color="#444444")
    axes.set_ylabel("policy, of which one and when, rating", fontsize=9, color="#444444")
    axes.set_title(title or "points won, in percent of the latest games", loc="left", fontsize=10, color="#222222")
    return figure


def draw_lineage(run: str, title: str = ""):
    """A matplotlib Figure of the pbt.csv of a run: a lane for each policy, in the color of the policy that its weights
    come from, with an arrow for each copy; below it, along the ancestry of the policy that is best at the end, the
    numbers that it was trained with. Raises InputError for a run that has none."""
    path = Path(run) / "pbt.csv"
    if not path.exists():
        raise InputError(f"{run}: it has no pbt.csv; give a run of multibeast.py --pbt")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise InputError(f"{run}: no event of --pbt has come yet")
    events = [[row for row in rows if row["event"] == event] for event in dict.fromkeys(row["event"] for row in rows)]
    policies = [int(row["policy"]) for row in events[0]]
    names = [name for name in rows[0] if name not in ("event", "steps", *PBT_COLUMNS)]
    figure, lanes = new_figure(7.2, 1.6 + 0.3 * len(policies) + 0.9 * len(names), 1 + len(names), 0.3 * len(policies))
    lanes, *below = lanes
    origin, since = {policy: policy for policy in policies}, dict.fromkeys(policies, 0)
    for event in events:
        steps, before = int(event[0]["steps"]), dict(origin)
        for policy, donor in ((int(row["policy"]), int(row["donor"])) for row in event):
            if donor != policy:
                lanes.plot(
                    [since[policy], steps], [policy] * 2, color=COLORS[before[policy] % len(COLORS)], linewidth=3
                )
                lanes.annotate("", (steps, policy), (steps, donor), arrowprops={"arrowstyle": "->", "color": "#888888"})
                origin[policy], since[policy] = before[donor], steps
    last = int(events[-1][0]["steps"])
    for policy in policies:
        lanes.plot([since[policy], last], [policy] * 2, color=COLORS[origin[policy] % len(COLORS)], linewidth=3)
    lanes.set_yticks(policies)
    lanes.set_ylabel("policy", fontsize=9, color="#444444")
    lanes.set_title(title or "whose weights each policy has", loc="left", fontsize=10, color="#222222")
    ranked = [row for row in events[-1] if row["rank"] == "0"]
    best = int(ranked[0]["policy"]) if ranked else policies[0]
    ancestry: list[tuple[int, dict[str, str]]] = []  # newest first
    for event in reversed(events):
        row = next(row for row in event if int(row["policy"]) == best)
        ancestry.append((int(row["steps"]), row))
        best = int(row["donor"])
    for axes, name in zip(below, names):
        axes.step(
            [x for x, _ in ancestry[::-1]],
            [float(row[name]) for _, row in ancestry[::-1]],
            where="post",
            color="#444444",
        )
        axes.set_ylabel(name, fontsize=7.5, color="#444444")
    figure.supxlabel(
        "steps of all policies; below, the ancestry of the best one at the end", fontsize=8, color="#777777"
    )
    return figure


def read_tasks(path: str, smooth: int) -> dict[str, Curve]:
    """The curve of each task of the run at `path`, over its own steps; of a run of one environment that of its id."""
    is_run = Path(path).is_dir()
    lines = (Path(path) / "metrics.csv" if is_run else Path(path)).read_text(encoding="utf-8").splitlines()
    columns = next(line for line in lines if not line.startswith("#")).split(",")
    names = [found[1] for name in columns if (found := re.fullmatch("task/(.*)/episodic_return", name))]
    if names:
        return {name: read_curve(path, f"task/{name}/steps", f"task/{name}/episodic_return", smooth) for name in names}
    curve = read_curve(path, "step", "charts/episodic_return", smooth)
    told = re.search(r"^# which ran: .* --env (\S+)", "\n".join(lines), re.MULTILINE)  # of a committed file
    env = curve.config.get("env") or (told[1] if told else "")
    return {env: curve}


def draw_tasks(flags: Flags):
    """A matplotlib Figure with a panel for each task of the runs."""
    tasks: dict[str, list[Curve]] = {}
    for path in flags.paths:
        try:
            found = read_tasks(path, flags.smooth)
        except OSError as error:
            raise InputError(f"{path}: neither a run directory with a metrics.csv nor a CSV file ({error})") from None
        for name, curve in found.items():
            tasks.setdefault(name, []).append(curve)
    width = min(len(tasks), 3)
    height = -(-len(tasks) // width)
    figure, _ = new_figure(0.4 + 2.9 * width, 0.5 + 2.3 * height)
    figure.clear()
    of_all = []
    for number, (name, curves) in enumerate(tasks.items()):
        axes = figure.add_subplot(height, width, number + 1)
        groups = group_seeds(curves)
        of_all += groups
        draw_curves(axes, groups, flags)
        title = name.rpartition(":")[2].rpartition("/")[2].removesuffix("-v0")  # without module and namespace
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color="#222222")
    figure.supxlabel(f"steps of the task; {describe_averages(of_all, flags)}", color="#777777", fontsize=7.5)
    figure.supylabel(AXIS_LABEL["charts/episodic_return"], color="#444444", fontsize=8)
    return figure


def draw_curves(axes, groups: list[list[Curve]], flags: Flags) -> None:
    """Draw one curve for each group into these axes."""
    from matplotlib.ticker import EngFormatter

    for index, (group, label) in enumerate(zip(groups, label_groups(groups, flags.labels))):
        x, mean, lowest, highest = average_and_band(group, flags.average, flags.band)
        color = COLORS[index % len(COLORS)]
        axes.plot(x, mean, color=color, linewidth=1.8, label=f"{label}: {mean[-1]:.4g}", solid_capstyle="round")
        if len(group) > 1:
            axes.fill_between(x, lowest, highest, color=color, alpha=0.18, linewidth=0)
        axes.plot(x[-1], mean[-1], "o", color=color, markersize=4.5, markeredgecolor="white", clip_on=False, zorder=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(color="#999999", labelcolor="#444444", labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    if flags.x != "hours":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 2M
    axes.legend(frameon=False, fontsize=7 if flags.tasks else 9, labelcolor="#222222", loc="best")


def draw(groups: list[list[Curve]], flags: Flags):
    """A matplotlib Figure with one curve for each group."""
    figure, axes = new_figure(7.2, 4.2)
    draw_curves(axes, groups, flags)
    axes.set_xlabel(AXIS_LABEL[flags.x], color="#444444", fontsize=10)
    figure.supxlabel(describe_averages(groups, flags), color="#777777", fontsize=7.5, x=0.99, ha="right")
    axes.set_ylabel(AXIS_LABEL.get(flags.y, flags.y), color="#444444", fontsize=10)
    envs = {curve.config.get("env", "") for group in groups for curve in group}
    title = flags.title or (envs.pop() if len(envs) == 1 else "")
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#222222", pad=10)
    return figure


def main() -> None:
    """Draw what the command line asks for."""
    flags = tyro.cli(Flags, description=__doc__)
    with exit_with_message():
        if not flags.paths:
            raise InputError("nothing to draw: name one or more run directories, for example runs/pong")
        if flags.smooth < 1:
            raise InputError(f"--smooth {flags.smooth}: it must be at least 1, the number of rows to average over")
        if flags.payoff or flags.lineage:
            if len(flags.paths) > 1 or flags.payoff and flags.lineage:
                raise InputError(f"--payoff and --lineage each draw one run, and there are {len(flags.paths)}")
            figure = (draw_payoff if flags.payoff else draw_lineage)(flags.paths[0], flags.title)
        elif flags.tasks:
            figure = draw_tasks(flags)
        else:
            curves = [read_curve(path, COLUMN[flags.x], flags.y, flags.smooth) for path in flags.paths]
            figure = draw(group_seeds(curves), flags)
        try:
            Path(flags.out).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(flags.out)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise InputError(f"--out {flags.out}: cannot be written ({error}); choose another file") from error
    print(f"written to {flags.out}")


if __name__ == "__main__":
    main()
