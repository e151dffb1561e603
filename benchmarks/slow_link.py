"""What PolyBeast's streams carry over a slow link: steps/s by streams, group width, round-trip time and loss.

    python benchmarks/slow_link.py              # as root on Linux; about 45 minutes; writes results/slow-link.{json,md}

Env host and learner are two network namespaces. Between them lie two TUN devices and a process that brings packets from
one to the other: it holds each back, drops some and lets no more than the link's rate through. `tc netem` does the same
where the kernel has it. The learner is transport.py's pool without a net, the env servers are polybeast_env.py's with
null_env.py; nothing else takes time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import math
import os
import random
import select
import shlex
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVS_ADDRESS, LEARNER_ADDRESS = "10.213.78.1", "10.213.78.2"
FORWARD = "--forward"
SET_INTERFACE, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
BUFFER_SECONDS = 0.1  # that a packet may wait for its turn; behind that the link drops it, as routers do
STACK, FRAME, SMALL = (4, 84, 84), (1, 84, 84), (400,)


# ------------------------------------------------------------------------------------------------ the link


@dataclass
class Direction:
    """Packets on their way in one direction: first they wait for their turn, then they travel."""

    delay: float  # seconds
    loss: float  # share of the packets
    rate: float = float("inf")  # bytes/s
    random: random.Random = field(default_factory=random.Random)
    free_at: float = 0.0
    flying: collections.deque = field(default_factory=collections.deque)  # (when it arrives, packet)

    def take(self, packet: bytes, now: float) -> None:
        begins = max(now, self.free_at)
        if begins - now > BUFFER_SECONDS or self.random.random() < self.loss:
            return
        self.free_at = begins + len(packet) / self.rate
        self.flying.append((self.free_at + self.delay, packet))

    def arrived(self, now: float) -> list[bytes]:
        packets = []
        while self.flying and self.flying[0][0] <= now:
            packets.append(self.flying.popleft()[1])
        return packets


def forward(devices: list[int], directions: list[Direction]) -> None:
    """Bring packets of each TUN device to the other one, for ever."""
    for device in devices:
        os.set_blocking(device, False)
    while True:
        next_arrival = min((each.flying[0][0] for each in directions if each.flying), default=float("inf"))
        wait = max(0.0, min(next_arrival - time.monotonic(), 1.0))
        for device in select.select(devices, [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(100):
                    directions[devices.index(device)].take(os.read(device, 65536), time.monotonic())
        for direction, target in zip(directions, reversed(devices)):
            for packet in direction.arrived(time.monotonic()):
                with contextlib.suppress(BlockingIOError):  # a full device drops it
                    os.write(target, packet)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def slow_link(round_trip: float, loss: float, rate: float, control: str):
    """Two namespaces with such a link between them: a prefix of commands for the env host, and one for the learner's.
    `control` is TCP's congestion control on both. Needs root, `ip` and /dev/net/tun."""
    names = [f"beast-{host}-{os.getpid()}" for host in ("far", "near")]
    with contextlib.ExitStack() as to_close:
        devices = []
        for name, own, other in zip(names, (ENVS_ADDRESS, LEARNER_ADDRESS), (LEARNER_ADDRESS, ENVS_ADDRESS)):
            ip("netns", "add", name)
            to_close.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True)
            interface = f"tun{os.getpid() % 100_000}{name[6]}"
            devices.append(device := os.open("/dev/net/tun", os.O_RDWR))
            to_close.callback(os.close, device)
            fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", interface.encode(), IFF_TUN | IFF_NO_PI))
            ip("link", "set", interface, "netns", name)
            ip("-n", name, "address", "add", own, "peer", other, "dev", interface)
            ip("-n", name, "link", "set", interface, "txqueuelen", "10000", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "replace", other, "dev", interface, "src", own, "congctl", control)
        numbers = map(str, (*devices, round_trip / 2, loss, rate))
        process = subprocess.Popen([sys.executable, __file__, FORWARD, *numbers], pass_fds=devices)
        to_close.callback(process.wait)
        to_close.callback(process.kill)
        yield [["ip", "netns", "exec", name] for name in names]


# ------------------------------------------------------------------------------------------------ what it carries


@dataclass(frozen=True)
class Setting:
    streams: int
    width: int
    round_trip_ms: float
    loss: float = 0.0
    control: str = "cubic"
    shape: tuple[int, ...] = SMALL
    step_ms: float = 0.0  # of one environment, on the env host's one core
    megabits: float = 1000.0
    env: str = "null_env:Null-v0"  # another one has neither `shape` nor `step_ms`
    deflate: bool = False

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) + 19  # reward, done and so on

    def rule(self) -> float:
        """Steps/s that delay, link and the env host's core allow."""
        limits = [self.streams * self.width / (self.round_trip_ms / 1e3 + self.width * self.step_ms / 1e3)]
        limits.append(self.megabits * 1e6 / 8 / self.row_bytes)
        return min(*limits, 1e3 / self.step_ms if self.step_ms else float("inf"))


def measure(setting: Setting, seconds: float) -> dict:
    """What transport.py's `step_pool` finds on the learner's host; without a round trip, over loopback."""
    link: contextlib.AbstractContextManager = contextlib.nullcontext(([], []))
    if setting.round_trip_ms:
        link = slow_link(setting.round_trip_ms / 1e3, setting.loss, setting.megabits * 1e6 / 8, setting.control)
    host = ENVS_ADDRESS if setting.round_trip_ms else "127.0.0.1"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    with link as (on_env_host, on_learner_host):
        words = ["--env", setting.env, "--address", f"{host}:0", "--insecure", *["--deflate"] * setting.deflate]
        if setting.env == Setting.env:
            words += ["--env_kwargs", json.dumps({"shape": setting.shape, "step_ms": setting.step_ms})]
        words += ["--group_width", str(setting.width), "--max_streams", str(setting.streams)]
        command = [*on_env_host, sys.executable, str(ROOT / "polybeast_env.py"), *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as server:
            try:
                address = server.stdout.readline().split()[-1]
                task = {"root": str(ROOT), "addresses": [address] * setting.streams, "T": 5, "seconds": seconds}
                task |= {"options": {"insecure": True}, "servers": [server.pid]}
                done = subprocess.run(
                    [*on_learner_host, sys.executable, str(ROOT / "benchmarks/transport.py"), "--step-pool"],
                    input=json.dumps(task), capture_output=True, text=True, env=environment,
                )  # fmt: skip
            finally:
                server.kill()
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------ the report

ROUND_TRIPS = (20, 50, 100)  # ms
GROUPS = ((1, 16), (4, 16), (16, 4), (16, 16), (4, 64))  # streams, width
ONE_CORE = ((2, 16), (4, 16), (8, 16), (16, 16), (24, 16), (2, 64), (4, 64))
PONG = "PongNoFrameskip-v4"
MEASURED = ("per_second", "cpu_us", "servers_cpu_us")
COSTS, PONG_COSTS = "No delay: CPU of both ends", "No delay: CPU of both ends for Pong"
LOSSES = ((0.0, "cubic"), (0.01, "cubic"), (0.01, "bbr"))
PARTS = {
    "Small rows": [
        Setting(streams, width, ms, loss)
        for ms in ROUND_TRIPS
        for streams, width in GROUPS
        for loss in (0.0, 0.01)
    ],
    "Images": [
        Setting(8, 16, ms, *lossy, shape=shape) for ms in ROUND_TRIPS for shape in (STACK, FRAME) for lossy in LOSSES
    ],
    "The same environments in few streams and in many": [
        Setting(streams, width, 50, *lossy, shape=STACK)
        for streams, width in ((2, 64), (32, 4))
        for lossy in LOSSES
    ],
    "A core of fast environments": [
        Setting(streams, width, ms, 0.01, step_ms=0.42) for ms in ROUND_TRIPS for streams, width in ONE_CORE
    ],
    "A core of slow environments": [
        Setting(streams, 16, ms, 0.01, control, STACK, step_ms=4.0)
        for ms in ROUND_TRIPS
        for streams in (2, 4, 8)
        for control in ("cubic", "bbr")
    ],
    "Pong": [
        Setting(8, 16, ms, 0.01, control, STACK, env=PONG, deflate=deflate)
        for ms in ROUND_TRIPS
        for control in ("cubic", "bbr")
        for deflate in (False, True)
    ],
    COSTS: [Setting(64, width, 0, shape=shape) for shape in (SMALL, FRAME, STACK) for width in (1, 16, 64)],
    PONG_COSTS: [Setting(8, 16, 0, shape=STACK, env=PONG, deflate=deflate) for deflate in (False, True)],
}  # fmt: skip
ABOUT = {
    "Small rows": "Environments that take no time and observe 400 bytes.",
    "Images": "Environments that take no time and observe stacks of four images of 84x84, or single ones.",
    "The same environments in few streams and in many": "Stacks, 128 environments.",
    "A core of fast environments": "A step takes 0.42 ms of the env host's only core, as Atari by ale-py. "
    "Rows of 400 bytes.",
    "A core of slow environments": "A step takes 4 ms of the env host's only core. Rows are stacks.",
    "Pong": "PongNoFrameskip-v4, its stacks as they are and behind zlib (`--deflate`, z). The rule knows nothing "
    "of the emulator's time and of zlib.",
    COSTS: "64 streams over loopback, without TLS; all that the processes do, but no net and no environment.",
    PONG_COSTS: "8 streams over loopback, without TLS; all that the processes do and the emulator, but no net.",
}


def report(parts: dict[str, dict]) -> str:
    """The Markdown file."""
    lines = [
        "# PolyBeast's streams over a slow link",
        "",
        "*Rule* is the least of streams x width / (round trip + the group's step), link / bytes of a row, and what the "
        "env host's core does. *Bytes* are an observation's. The round trip is the link's (ping), half of it in each "
        "direction. The link carries 1 Gb/s. Lost packets are lost in both directions, at random. Medians of the "
        "repetitions (lowest to highest).",
    ]
    for part, found in parts.items():
        origin = f"`{found['command']}`, {found['seconds']:g} s each. {found['hardware']}, beside other jobs, commit "
        lines += ["", f"## {part}", "", f"{ABOUT[part]} {origin}{found['commit'][:10]}.{found.get('remark', '')}", ""]
        lines += report_costs(found["rows"]) if part in (COSTS, PONG_COSTS) else report_speeds(found["rows"])
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    among = f" ({min(values):,.0f} to {max(values):,.0f})" if len(values) > 1 else ""
    return f"{statistics.median(values):,.0f}{among}"


def report_speeds(rows: list[dict]) -> list[str]:
    lines = ["| round trip | loss | TCP | bytes | streams | width | rule, steps/s | steps/s | share |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        setting, found = Setting(**row["setting"]), row["per_second"]
        z = " z" if setting.deflate else ""
        size = f"{math.prod(setting.shape):,}{z}"
        where = f"| {setting.round_trip_ms:g} ms | {setting.loss:.0%} | {setting.control} | {size} "
        what = f"| {setting.streams} | {setting.width} | {setting.rule():,.0f} | {spread(found)} "
        lines.append(f"{where}{what}| {statistics.median(found) / setting.rule():.0%} |")
    return lines


def report_costs(rows: list[dict]) -> list[str]:
    lines = ["| bytes | streams | width | learner, µs/step | env server, µs/step | of a row of K, both, µs |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        setting = Setting(**row["setting"])
        both = [setting.width * (a + b) for a, b in zip(row["cpu_us"], row["servers_cpu_us"])]
        sides = f"{spread(row['cpu_us'])} | {spread(row['servers_cpu_us'])}"
        z = " z" if setting.deflate else ""
        size = f"{math.prod(setting.shape):,}{z}"
        lines.append(f"| {size} | {setting.streams} | {setting.width} | {sides} | {spread(both)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured seconds of each setting")
    parser.add_argument("--repeats", type=int, default=2, help="repetitions of all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="others stay in the report")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results"), help="directory for slow-link.{json,md}")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import git

    path = Path(options.out, "slow-link.json")
    parts = json.loads(path.read_text()) if path.exists() else {}
    for part in options.parts:
        parts[part] = {
            "command": shlex.join(["python", "benchmarks/slow_link.py", *sys.argv[1:]]),
            "commit": git(ROOT, "rev-parse", "HEAD"),
            "hardware": f"{cpu_model()}, {usable_cores()} cores",
            "seconds": options.seconds,
            "rows": [{"setting": asdict(each), **{name: [] for name in MEASURED}} for each in PARTS[part]],
        }
    for repeat in range(options.repeats):
        for part in options.parts:
            for row, setting in zip(parts[part]["rows"], PARTS[part]):
                found = measure(setting, options.seconds)
                for name in MEASURED:
                    row[name].append(found[name])
                print(f"{repeat + 1} of {options.repeats}: {setting}: {row}", flush=True)
        path.write_text(json.dumps(parts, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(parts))
    print(report(parts))


if __name__ == "__main__":
    if sys.argv[1:2] == [FORWARD]:
        *devices, delay, loss, rate = sys.argv[2:]
        directions = [Direction(float(delay), float(loss), float(rate), random.Random(seed)) for seed in (1, 2)]
        forward([int(device) for device in devices], directions)
    else:
        main()
