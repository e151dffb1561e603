"""A plan past the machines that are here: what ten thousand to a million environments ask of learners and links.

    python benchmarks/plan.py              # two minutes on one core; writes results/plan.{md,png}

Groups of environments go round as in PolyBeast: env host, uplink, network, the learner's link, its transport,
inference and back. Every `unroll_length` rows a rollout joins the learner's queue, and updates take columns from it.
Each of these is a queue in a simulation of events. Nothing was run at such a size: the constants are of small machines.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import math
import multiprocessing
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def constant(value, what: str, source: str):
    return field(default=value, metadata={"what": what, "source": source})


COSTS = "slow-link.md, CPU of both ends"
PONG_COSTS = f"{COSTS} for Pong: the CPU that it adds, and that of the bytes which it saves"
GPU = "gpu.md"


@dataclass(frozen=True)
class Constants:
    """What things take. A row is what one stream sends for a step of its K environments."""

    env_step_us: float = constant(140.0, "a step of an Atari game, of a core", "atari-speed.md: median of eight games")
    env_row_us: float = constant(620.0, "a row on the env host, of a core", COSTS)
    env_byte_ns: float = constant(0.75, "and each of its bytes", COSTS)
    learner_row_us: float = constant(310.0, "a row on the learner's host, of a core", COSTS)
    learner_byte_ns: float = constant(1.0, "and each of its bytes, joined to batches", COSTS)
    deflate_us: float = constant(34.0, "`--deflate` of a stack, of a core of the env host", PONG_COSTS)
    inflate_us: float = constant(30.0, "and back, joined to batches, of a core of the learner's host", PONG_COSTS)
    inference_us: float = constant(1000.0, "a forward pass on a GPU", "assumed")
    inference_step_us: float = constant(4.0, "and each observation of it", f"assumed; {GPU}: at most 12 with all else")
    update_us: float = constant(4000.0, "an update on a GPU", f"{GPU}: 251 updates/s with B=4")
    update_step_us: float = constant(2.1, "and each step of it", f"{GPU}: B=32 busy for 65 % at 80,634 steps/s")
    parameters: float = constant(1.69e6, "parameters, averaged over ranks in float32", "the net for Atari")
    round_us: float = constant(430.0, "a round of two ranks on CPUs, one an update", "measured, see below")
    round_hop_us: float = constant(100.0, "and each further rank", "assumed")
    sum_hop_us: float = constant(20.0, "a hop between two GPUs, of a sum that goes up a tree and down", "assumed")
    sums: int = constant(6, "sums over all ranks in an update", "monobeast.py")
    other_bytes: float = constant(19.0, "of a row beside the observation, for each environment", "the wire's format")


CONSTANTS = Constants()


@dataclass(frozen=True)
class Plan:
    """A way to run so many environments."""

    environments: int
    width: int = 64  # environments of a stream (K)
    streams_per_core: int = 12  # of an env host
    ranks: int = 1
    batch_width: int = 64  # columns of an update, of each rank (B)
    unroll_length: int = 20  # T
    queue_width: int = 0  # columns that wait for the learner, of each rank; 0: the larger of width and batch_width
    observation_bytes: int = 28_224
    deflate: bool = False  # `observation_bytes` are those behind it
    nic_gbps: float = 25.0  # of each rank's host
    transport_cores: int = 12  # of each rank's host
    round_trip_ms: float = 0.5
    uplink_mbps: float = math.inf  # of each core of an env host
    stream_mbps: float = math.inf  # that TCP lets one stream carry
    jitter: float = 0.2  # a step takes up to so much more or less

    def row_bytes(self, constants: Constants) -> float:
        return self.width * (self.observation_bytes + constants.other_bytes)


def between_ranks(plan: Plan, constants: Constants) -> float:
    """Seconds of an update in which its ranks exchange messages."""
    if plan.ranks == 1:
        return 0.0
    hops = constants.round_us + (plan.ranks - 2) * constants.round_hop_us
    hops += 2 * math.ceil(math.log2(plan.ranks)) * constants.sums * constants.sum_hop_us
    gradients = 2 * 8 * 4 * constants.parameters / (1e9 * plan.nic_gbps)  # float32, once there and once back
    return hops / 1e6 + gradients


class Station:
    """`servers` that work in parallel; who comes first is served first."""

    def __init__(self, servers: int = 1):
        self._free = [0.0] * servers
        self.busy = 0.0  # seconds of service that has ended

    def admit(self, now: float, service: float) -> float:
        """When a customer of now leaves. Customers come in the order of time."""
        leaves = max(now, self._free[0]) + service
        heapq.heapreplace(self._free, leaves)
        return leaves

    def share(self, seconds: float) -> float:
        return self.busy / seconds / len(self._free)


class Clock:
    """Events in the order of their time."""

    def __init__(self):
        self.now = 0.0
        self._events: list[tuple] = []
        self._numbers = itertools.count()  # events of one time happen in the order in which they were planned

    def after(self, delay: float, happen: Callable, *arguments) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), happen, arguments))

    def serve(self, station: Station, service: float, then: Callable, *arguments) -> None:
        """`then` happens when the station has served this customer."""

        def leave() -> None:
            station.busy += service
            then(*arguments)

        self.after(station.admit(self.now, service) - self.now, leave)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
        self.now = until


class Group:
    """The environments of one stream."""

    def __init__(self, core: Station, uplink: Station, rank: Rank):
        self.core, self.uplink, self.rank = core, uplink, rank
        self.began = 0.0  # when its actions left inference
        self.rows = 0  # of its rollout
        self.versions = 0  # sum of the numbers of updates that chose its actions


@dataclass
class Rank:
    nic: Station
    transport: Station
    ready: collections.deque[Group] = field(default_factory=collections.deque)  # for inference
    inferring: bool = False
    inference: Station = field(default_factory=Station)
    queue: collections.deque[float] = field(default_factory=collections.deque)  # mean version of each column
    waiting: collections.deque[Group] = field(default_factory=collections.deque)  # for room in the queue


@dataclass
class Found:
    """What a simulation found; times in seconds."""

    steps_per_second: float = 0.0
    updates_per_second: float = 0.0
    streams: int = 0  # that were simulated
    mean_latency: float = 0.0  # between two actions of an environment
    p50_latency: float = 0.0
    p99_latency: float = 0.0
    mean_lag: float = math.nan  # updates
    highest_lag: float = math.nan
    shares: dict[str, float] = field(default_factory=dict)  # of the time that each part works


class Simulation:
    """A few of the ranks of a plan, alike all others, with their environments."""

    def __init__(self, plan: Plan, constants: Constants = CONSTANTS, simulated_ranks: int = 2, seed: int = 1):
        self.plan, self.constants, self.clock, self.random = plan, constants, Clock(), random.Random(seed)
        self.ranks = [Rank(Station(), Station(plan.transport_cores)) for _ in range(min(plan.ranks, simulated_ranks))]
        num_streams = max(1, round(plan.environments / plan.width / plan.ranks))
        self.cores, self.uplinks, self.groups = [], [], []
        for rank in self.ranks:
            for number in range(num_streams):
                if number % plan.streams_per_core == 0:
                    self.cores.append(Station())
                    self.uplinks.append(Station())
                self.groups.append(Group(self.cores[-1], self.uplinks[-1], rank))
        self.learner, self.learning, self.version = Station(), False, 0
        self.latencies: list[float] = []
        self.lags: list[float] = []
        bytes_ = plan.row_bytes(constants)
        self.core_seconds = (constants.env_row_us + 1e-3 * constants.env_byte_ns * bytes_) / 1e6
        self.transport_seconds = (constants.learner_row_us + 1e-3 * constants.learner_byte_ns * bytes_) / 1e6
        if plan.deflate:
            self.core_seconds += plan.width * constants.deflate_us / 1e6
            self.transport_seconds += plan.width * constants.inflate_us / 1e6
        self.row_bits = 8 * bytes_
        self.nic_seconds = 8 * bytes_ / (1e9 * plan.nic_gbps)
        steps = plan.batch_width * plan.unroll_length
        self.update_seconds = (constants.update_us + constants.update_step_us * steps) / 1e6
        self.update_seconds += between_ranks(plan, constants)
        self.queue_width = plan.queue_width or max(plan.width, plan.batch_width)

    def act(self, group: Group) -> None:
        """Its actions arrive at the env host."""
        jitter = 1 + self.plan.jitter * (2 * self.random.random() - 1)
        step = self.plan.width * self.constants.env_step_us / 1e6 * jitter + self.core_seconds
        self.clock.serve(group.core, step, self.send, group)

    def send(self, group: Group) -> None:
        self.clock.serve(group.uplink, self.row_bits / (1e6 * self.plan.uplink_mbps), self.travel, group)

    def travel(self, group: Group) -> None:
        own = self.row_bits / (1e6 * self.plan.stream_mbps)
        self.clock.after(self.plan.round_trip_ms / 2e3 + own, self.arrive, group)

    def arrive(self, group: Group) -> None:
        self.clock.serve(group.rank.nic, self.nic_seconds, self.receive, group)

    def receive(self, group: Group) -> None:
        self.clock.serve(group.rank.transport, self.transport_seconds, self.decode, group)

    def decode(self, group: Group) -> None:
        """The row is in its rollout, which the learner gets when it is full."""
        group.rows += 1
        if group.rows > self.plan.unroll_length:
            group.rank.waiting.append(group)
            self.enqueue(group.rank)
        else:
            self.ask(group)

    def enqueue(self, rank: Rank) -> None:
        while rank.waiting and (not rank.queue or len(rank.queue) + self.plan.width <= self.queue_width):
            group = rank.waiting.popleft()
            rank.queue.extend([group.versions / self.plan.unroll_length] * self.plan.width)
            group.rows, group.versions = 1, 0
            self.ask(group)
        self.learn()

    def learn(self) -> None:
        if self.learning or any(len(rank.queue) < self.plan.batch_width for rank in self.ranks):
            return
        self.learning = True
        for rank in self.ranks:
            self.lags += [self.version - rank.queue.popleft() for _ in range(self.plan.batch_width)]
        self.clock.serve(self.learner, self.update_seconds, self.publish)
        for rank in self.ranks:
            self.enqueue(rank)

    def publish(self) -> None:
        self.version += 1
        self.learning = False
        self.learn()

    def ask(self, group: Group) -> None:
        group.rank.ready.append(group)
        self.infer(group.rank)

    def infer(self, rank: Rank) -> None:
        """One pass for all that are ready."""
        if rank.inferring or not rank.ready:
            return
        rank.inferring = True
        groups = list(rank.ready)
        rank.ready.clear()
        steps = len(groups) * self.plan.width
        service = (self.constants.inference_us + self.constants.inference_step_us * steps) / 1e6
        self.clock.serve(rank.inference, service, self.answer, rank, groups, self.version)

    def answer(self, rank: Rank, groups: list[Group], version: int) -> None:
        for group in groups:
            group.versions += version
            self.latencies.append(self.clock.now - group.began)
            group.began = self.clock.now
            self.clock.after(self.plan.round_trip_ms / 2e3, self.act, group)
        rank.inferring = False
        self.infer(rank)

    def run(self, warmup: float, seconds: float) -> Found:
        for group in self.groups:  # they do not begin all at once
            self.clock.after(self.random.random() * self.plan.width * self.constants.env_step_us / 1e6, self.act, group)
        self.clock.run(warmup)
        parts = {"env hosts": self.cores, "uplinks": self.uplinks, "NIC": [each.nic for each in self.ranks]}
        parts |= {"transport": [each.transport for each in self.ranks], "learner": [self.learner]}
        parts |= {"inference": [each.inference for each in self.ranks]}
        for station in itertools.chain(*parts.values()):
            station.busy = 0.0
        self.latencies.clear()
        self.lags.clear()
        before = self.version
        self.clock.run(warmup + seconds)
        shares = {name: statistics.mean(each.share(seconds) for each in stations) for name, stations in parts.items()}
        # A pass takes all that are ready, so one is under way most of the time. What counts is how many it could take.
        steps = len(self.latencies) * self.plan.width / seconds / len(self.ranks)
        shares["inference"] = steps * self.constants.inference_step_us / 1e6
        found = Found(streams=len(self.groups), shares=shares, updates_per_second=(self.version - before) / seconds)
        found.steps_per_second = steps * self.plan.ranks
        if self.latencies:
            ordered = sorted(self.latencies)
            found.mean_latency = statistics.mean(ordered)
            found.p50_latency, found.p99_latency = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99))
        if self.lags:
            found.mean_lag, found.highest_lag = statistics.mean(self.lags), max(self.lags)
        return found


def simulate(plan: Plan, constants: Constants = CONSTANTS, warmup: float = 0.0, seconds: float = 15.0) -> Found:
    """What a plan does behind its start: by default three rollouts, at 100,000 steps/s of a rank at most."""
    simulation = Simulation(plan, constants)
    speed = min(100_000, plan.batch_width * plan.unroll_length / max(simulation.update_seconds, 1e-9))
    start = 3 * plan.unroll_length * (0.15 + plan.environments / plan.ranks / speed)
    return simulation.run(warmup or start, seconds)


# ------------------------------------------------------------------------------------------------ the report

SIZES = 10_000, 100_000, 1_000_000
PACKED = 100  # bytes of a stack behind --deflate (far-rows.md)
PARTS = "NIC", "transport", "inference", "learner"
ONE_RANK = {  # curves of the picture
    "defaults: K=16, B=4": Plan(0, width=16, streams_per_core=6, batch_width=4),
    "K=64, B=64": Plan(0),
    "K=64, B=512, --deflate": Plan(0, batch_width=512, observation_bytes=PACKED, deflate=True),
}


def of_sizes(ranks: tuple[int, ...], widths: tuple[int, ...], **options) -> list[Plan]:
    """A plan for each size, with so many ranks and columns of an update of a rank."""
    return [Plan(size, ranks=rank, batch_width=width, **options) for size, rank, width in zip(SIZES, ranks, widths)]


REMEDIES = {
    "one rank": of_sizes((1, 1), (64, 64)),
    "ranks for the NIC": of_sizes((2, 12, 110), (64, 64, 64)),
    "and B for a lag of 20": of_sizes((2, 12, 110), (128, 256, 256)),
    "or --deflate": of_sizes((1, 5, 48), (256, 512, 512), observation_bytes=PACKED, deflate=True),
}
FAR = {  # of ten thousand environments
    "stacks": Plan(10_000, ranks=2, batch_width=256),
    "stacks, 1 Gb/s for 16 cores": Plan(10_000, ranks=2, batch_width=256, uplink_mbps=1000 / 16),
    "--deflate, 1 Gb/s": Plan(10_000, batch_width=512, observation_bytes=PACKED, deflate=True, uplink_mbps=1000 / 16),
    "--deflate, 100 Mb/s": Plan(10_000, batch_width=512, observation_bytes=PACKED, deflate=True, uplink_mbps=100 / 16),
}


def check_against_lag(constants: Constants) -> list[str]:
    """The policy lag that PolyBeast showed, beside that of a simulation with as fast a learner."""
    import json

    path = ROOT / "benchmarks/results/throughput-BreakoutNoFrameskip-v4.json"
    lines = ["| environments | measured: lag, highest | simulated: lag, highest |", "|---|---|---|"]
    for number, found in json.loads(path.read_text())["found"].items():
        measured = {name: statistics.median(values) for name, values in found["polybeast"].items()}
        learner = replace(constants, update_us=0.0, update_step_us=1e6 / measured["+ learning"])
        learner = replace(learner, env_step_us=430.0)  # of ale-py, with which it was measured
        plan = Plan(int(number), int(number) // 4, streams_per_core=2, batch_width=4)
        simulated = simulate(plan, replace(learner, inference_us=0.0, inference_step_us=150.0), 60.0, 60.0)
        shown = [f"{measured[f'stats/policy_lag_{name}']:.1f}" for name in ("mean", "max")]
        shown += [f"{simulated.mean_lag:.1f}", f"{simulated.highest_lag:.1f}"]
        lines.append(f"| {number} | {shown[0]}, {shown[1]} | {shown[2]}, {shown[3]} |")
    return lines


def time_rounds(rank: int, address: str, rounds: int, found: list[float] | None = None) -> None:
    """Take part in rounds of two gloo ranks. Put the seconds of each into `found`."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    row = torch.zeros(200, dtype=torch.float64)  # about what a rank tells
    rows = [torch.zeros_like(row) for _ in range(2)]
    for _ in range(rounds):
        began = time.perf_counter()
        distributed.all_gather(rows, row)
        if found is not None:
            found.append(time.perf_counter() - began)
    distributed.destroy_process_group()


def round_of_two() -> float:
    """Median µs of a round of two ranks of this machine."""
    with tempfile.TemporaryDirectory() as path:
        address, rounds, found = f"file://{path}/meet", 5_000, []
        other = multiprocessing.get_context("spawn").Process(target=time_rounds, args=(1, address, rounds))
        other.start()
        time_rounds(0, address, rounds, found)
        other.join()
    return 1e6 * statistics.median(found)


HEAD = "| steps/s | to the learners, Gb/s | between two actions, ms: mean, p99 | updates/s | lag | NIC | transport "
HEAD += "| inference | learner |"


def cells(plan: Plan, found: Found) -> str:
    gigabits = 8 * found.steps_per_second * plan.row_bytes(CONSTANTS) / plan.width / 1e9
    shares = " | ".join(f"{min(found.shares[part], 1):.0%}" for part in PARTS)
    lag = "-" if math.isnan(found.mean_lag) else f"{found.mean_lag:,.0f}"
    latency = f"{1e3 * found.mean_latency:,.0f}, {1e3 * found.p99_latency:,.0f}"
    speeds = f"{found.steps_per_second:,.0f} | {gigabits:,.1f} | {latency} | {found.updates_per_second:,.0f}"
    return f"{speeds} | {lag} | {shares} |"


def first_full(found: Found) -> str:
    share, part = max((found.shares[part], part) for part in PARTS)
    return part if share > 0.95 else "env hosts"


def draw(curves: dict[str, list[tuple[int, Found]]]):
    """A matplotlib Figure: steps/s, lag and latency of one rank over its environments, and what is busy in the second
    of the curves."""
    sys.path.insert(0, str(ROOT))
    from plot import COLORS, new_figure

    figure, _ = new_figure(9.6, 6.4)
    figure.clear()
    panels = figure.subplots(2, 2)
    shown: tuple[tuple[str, Callable[[Found], float]], ...] = (
        ("steps/s of one rank", lambda found: found.steps_per_second),
        ("policy lag, updates", lambda found: found.mean_lag),
        ("ms between two actions of an environment", lambda found: 1e3 * found.mean_latency),
    )
    for axes, (title, value) in zip((panels[0, 0], panels[1, 0], panels[1, 1]), shown):
        for color, (name, points) in zip(COLORS, curves.items()):
            axes.plot(*zip(*((number, value(found)) for number, found in points)), color=color, label=name)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.3 if "lag" in title else None)
        axes.set_title(title, loc="left", fontsize=9)
    panels[0, 0].legend(frameon=False, fontsize=8)
    panels[1, 0].axhline(20, color="#999999", linewidth=0.8, linestyle=":")
    second = list(curves)[1]
    for color, part in zip(COLORS, (*PARTS, "env hosts")):
        points = [(number, min(found.shares[part], 1)) for number, found in curves[second]]
        panels[0, 1].plot(*zip(*points), color=color, label=part)
    panels[0, 1].set_title(f"share of the time that a part works, {second}", loc="left", fontsize=9)
    panels[0, 1].legend(frameon=False, fontsize=8)
    for axes in panels.flat:
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.tick_params(labelsize=8)
    figure.supxlabel("environments of one rank: one GPU, 25 Gb/s (simulated)", fontsize=9, color="#777777")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results"), help="directory for plan.{md,png}")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import git

    lines = ["# A plan for a million environments", ""]
    lines += [f"`{shlex.join(['python', 'benchmarks/plan.py', *sys.argv[1:]])}`, a simulation of queues that ran on"]
    lines += [f"{cpu_model()}, {usable_cores()} cores, commit {git(ROOT, 'rev-parse', 'HEAD')[:10]}.", ""]
    lines += ["## Constants", "", "| | value | from |", "|---|---|---|"]
    for each in fields(Constants):
        value = getattr(CONSTANTS, each.name)
        lines.append(f"| {each.metadata['what']}, `{each.name}` | {value:,g} | {each.metadata['source']} |")
    lines += ["", f"A round of two ranks took {round_of_two():.0f} µs here (median of 5,000)."]
    lines += ["", "## The simulation beside what was measured", ""]
    lines += [
        "PolyBeast on two cores, B=4, Breakout. The learner's speed is given, the lag follows from the queues.",
        "",
    ]
    lines += check_against_lag(CONSTANTS)

    curves: dict[str, list[tuple[int, Found]]] = {}
    lines += ["", "## One rank", "", "One GPU, 25 Gb/s, 12 cores for transport. The shares are of the time that a part"]
    lines += ["works; of inference, of what it could answer. Env hosts are as many as the environments need.", ""]
    lines += [f"| | environments | full first {HEAD}", "|---" * 12 + "|"]
    for name, base in ONE_RANK.items():
        curves[name] = []
        for number in (256, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000):
            plan = replace(base, environments=number)
            curves[name].append((number, found := simulate(plan)))
            lines.append(f"| {name} | {number:,} | {first_full(found)} | {cells(plan, found)}")
            print(lines[-1], flush=True)

    lines += [
        "",
        "## Three sizes",
        "",
        f"| | environments | streams | ranks | B | full first {HEAD}",
        "|---" * 15 + "|",
    ]
    for what, plans in REMEDIES.items():
        for plan in plans:
            found = simulate(plan)
            number = f"{plan.environments / plan.width:,.0f}"
            how = f"| {what} | {plan.environments:,} | {number} | {plan.ranks} | {plan.batch_width} "
            lines.append(f"{how}| {first_full(found)} | {cells(plan, found)}")
            print(lines[-1], flush=True)

    lines += [
        "",
        "## Ten thousand environments, far away",
        "",
        "| | round trip, ms | streams a core | K | env hosts busy ",
    ]
    lines[-1] += HEAD
    lines.append("|---" * 14 + "|")
    for what, base in FAR.items():
        for milliseconds in (0.5, 50, 100):
            for streams, width in ((6, 16), (12, 64)):
                plan = replace(base, round_trip_ms=milliseconds, streams_per_core=streams, width=width)
                found = simulate(plan)
                how = f"| {what} | {milliseconds:g} | {streams} | {width} | {found.shares['env hosts']:.0%} "
                lines.append(f"{how}| {cells(plan, found)}")
                print(lines[-1], flush=True)
    Path(options.out, "plan.md").write_text("\n".join(lines) + "\n")
    draw(curves).savefig(Path(options.out, "plan.png"), dpi=110)


if __name__ == "__main__":
    main()
