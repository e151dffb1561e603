"""The benchmarks: they run, and what they say follows from what they measured."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_until

import monobeast
from beast.feeds.slots import Slots
from beast.run import command_line

ROOT = Path(__file__).resolve().parent.parent


def load(path: str):
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "benchmarks" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", ["monobeast", *(pytest.param(each, marks=pytest.mark.on_demand) for each in ("polybeast", "r2d2"))]
)
def test_a_staged_run_simulates_then_infers_then_learns_and_rests_in_between(variant):
    if variant == "polybeast":
        pytest.importorskip("libbeast")
    flags = types.SimpleNamespace(group_width=16, num_actors=2)
    small = "--replay_gb 0.1 --burn_in 4 --trained 16 --batch_width 4".split() if variant == "r2d2" else []
    seconds = 4 if variant == "r2d2" else 1  # it fills its replay before it learns
    with load("throughput.py").StagedRun(variant, ["--env", "CartPole-v1", *small], flags) as staged_run:
        speeds = [staged_run.measure(seconds, [0.2] * 3) for _ in range(2)]
        rests = lambda count: time.sleep(1) or len(staged_run.metrics()) == count  # noqa: E731
        wait_until(lambda: rests(len(staged_run.metrics())), "it rests")
        rows = staged_run.metrics()
    assert all(0 < speed["+ learning"] < speed["simulation"] for speed in speeds)
    # -1: environments are made; 0: the first simulation; 1 and 5: to pause, before and between the measurements.
    numbers = [row["stats/stage"] for row in rows]
    assert numbers == sorted(numbers) and set(numbers) >= {0, 2, 3, 4, 6, 7, 8}
    last = {number: [row for row in rows if row["stats/stage"] == number][-1] for number in (3, 4, 7, 8)}
    assert last[3]["stats/updates"] == 0 < last[4]["stats/updates"] < last[8]["stats/updates"]
    assert last[7]["time/learner_backward"] == 0
    assert min(last[number]["time/learner_backward"] for number in (4, 8)) > 0.01


def test_a_staged_run_is_under_way_when_all_environments_have_filled_a_rollout(monkeypatch):
    staged = load("staged.py")
    patched = [(staged.monobeast, "update"), (staged.Learner, "count"), (staged.PublishedWeights, "publish")]
    patched.append((staged.r2d2, "store"))
    for owner, name in patched:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back
    no_tasks = staged.Learner(torch.nn.Module(), types.SimpleNamespace(param_groups=[]), 1).tasks
    learner = types.SimpleNamespace(steps=0, updates=0, tasks=no_tasks)
    learner.measure = types.MethodType(staged.Learner.measure, learner)
    learning = staged.LeavingOutLearning(staged.Orders(), num_envs=4)
    are_running = []
    for baselines in ([0, 0], [1, 1], [0, 1], [1, 1], [1, 0]):  # of row 0, which is 0 in an environment's first rollout
        batch = {name: torch.zeros(3, 2, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        batch["baseline"] = torch.tensor([baselines, [1, 1], [1, 1]])
        batch["policy_version"] = torch.zeros(3, 2, dtype=torch.int32)
        staged.monobeast.update(None, learner, batch, ())
        are_running.append(learning.all_are_running())
    assert are_running == [False, False, False, False, True] and learner.steps == 5 * 2 * 2


def test_a_staged_run_ends_with_its_orders_and_refuses_what_is_none():
    orders = load("staged.py").Orders()
    orders.follow(["+ inference\n"])
    assert (orders.number, orders.stage, orders.is_over) == (1, "+ inference", True)
    assert orders.have_reached("+ inference") and not orders.have_reached("+ learning")
    orders.follow(["pause\n", "sleep\n", "simulation\n"])
    assert (orders.number, orders.stage) == (2, "pause") and "'sleep' is no stage" in orders.error
    assert not orders.have_reached("simulation")  # and does not wait any more


@pytest.mark.on_demand  # a minute; the stages of one variant are measured above
def test_throughput_measures_every_stage_of_both_variants_and_writes_what_it_found(tmp_path):
    arguments = "--env CartPole-v1 --envs 16 --repeats 1 --seconds 2 --warmup 0.5 --out".split()
    told = run("throughput.py", *arguments, str(tmp_path))
    assert (tmp_path / "throughput-CartPole-v1.md").read_text().strip() in told
    result = json.loads((tmp_path / "throughput-CartPole-v1.json").read_text())
    measured = result["found"]["16"]
    assert set(measured) == {"alone", "monobeast"} | ({"polybeast"} if importlib.util.find_spec("libbeast") else set())
    mono = {name: values[0] for name, values in measured["monobeast"].items()}
    assert mono["simulation"] > mono["+ inference"] > 0 and mono["+ learning"] > 0
    assert 0 < mono["cores/learner"] < 1.1 and 0 < mono["cores/envs"] and mono["Pss_Shmem"] > 0
    (plumbing,) = result["null_env_steps_per_second"]  # no comparison: it ran later, maybe beside another test
    assert plumbing > 0 and f"plumbing carries {plumbing:,.0f} (" in told
    table = told.split("work conservation |")[1].splitlines()[2]
    alone = sum(measured["alone"][stage][0] for stage in ("env", "inference", "learner"))
    assert table.rstrip(" |").endswith(f"{mono['+ learning'] * alone / os.cpu_count():.2f}")


@pytest.mark.on_demand
def test_throughput_measures_r2d2_with_the_updates_that_its_replay_ratio_asks_for(tmp_path):
    arguments = "--agent r2d2 --env CartPole-v1 --envs 16 --repeats 1 --seconds 3 --warmup 0.5 --out".split()
    told = run("throughput.py", *arguments, str(tmp_path), "--arguments=--replay_ratio 4 --replay_gb 0.1")
    result = json.loads((tmp_path / "throughput-r2d2-CartPole-v1.json").read_text())
    measured = result["found"]["16"]
    assert set(measured) == {"alone", "r2d2"} and not result["null_env_steps_per_second"]
    r2d2 = {name: values[0] for name, values in measured["r2d2"].items()}
    assert r2d2["simulation"] > r2d2["+ inference"] > r2d2["+ learning"] > 0
    assert r2d2["stats/replay_ratio"] == pytest.approx(4, rel=0.05)
    alone = {stage: measured["alone"][stage][0] for stage in ("env", "inference", "learner")}
    assert alone["learner"] > alone["inference"] > 0, "16 x 60 rows for each 160 steps, forth and back"
    table = told.split("work conservation |")[1].splitlines()[2]
    assert "R2D2" in table
    assert table.rstrip(" |").endswith(f"{r2d2['+ learning'] * sum(alone.values()) / os.cpu_count():.2f}")


@pytest.mark.on_demand
def test_the_transport_benchmark_measures_every_combination_and_writes_its_files(tmp_path):
    pytest.importorskip("libbeast")
    common = ["--repeats", "1", "--pool_seconds", "0.5", "--unroll_length", "2", "--out", str(tmp_path)]
    sizes = "--seconds 0.2 --widths 1 2 --streams 1 2 --threads 1 3 --pool_streams 1 3".split()
    run("transport.py", *sizes, *common)
    parts = json.loads((tmp_path / "transport.json").read_text())["parts"]
    assert {part: len(found["runs"]) for part, found in parts.items()} == {"streams": 3 * 2 * 2, "pool": 2, "queues": 4}
    measured = [one for found in parts.values() for results in found["runs"].values() for one in results]
    assert all(one["per_second"] > 0 for one in measured)
    for name, num_streams in (("streams", "tcp K=1 streams=2"), ("pool", "streams=3")):
        (one,) = parts[name]["runs"][num_streams]
        lowest, highest = one["lowest_and_highest"]
        assert 0 < 0.8 * lowest < one["per_second"] / int(num_streams[-1]) < 1.2 * highest
    run("transport.py", "--parts", "pool", "--against", str(ROOT), "--pool_streams", "2", *common)
    again = json.loads((tmp_path / "transport.json").read_text())["parts"]
    ((this,), (other,)) = again.pop("comparison")["runs"]["pool"]["streams=2"]
    assert again == parts and min(this["per_second"], other["per_second"]) > 0
    text = (tmp_path / "transport.md").read_text()
    assert "| tls | 2 | 2 |" in text and "| pool, streams=2 |" in text


def test_the_transport_report_takes_ratios_within_a_repetition_and_tells_what_failed():
    transport = load("transport.py")
    new = {"threads": 17, "memory_mb": 1.0, "lowest_and_highest": [2.0, 3.0]}
    old = {"threads": 78, "memory_mb": 2.0, "lowest_and_highest": None}
    this = [new | {"per_second": rate, "cpu_us": 80.0} for rate in (300.0, 100.0, 400.0)]
    other = [old | {"per_second": rate, "cpu_us": 160.0} for rate in (200.0, 100.0)] + [{"error": "no threads left"}]
    *_, line = transport.report_comparison({"runs": {"pool": {"streams=64": [this, other]}}})
    speeds = "300 (100 to 400) | 150 (100 to 200) failed 1 of 3 times: no threads left | 1.25 (1.00 to 1.50)"
    rest = "0.50 (0.50 to 0.50) | 17 / 78 | 1.00 / 2.00 | 1.50 (at most 1.50) / -"
    assert line == f"| pool, streams=64 | {speeds} | {rest} |"
    pool = {"unroll_length": 20, "runs": {"streams=999": [{"error": "no threads left"}]}}
    assert "| 999 | failed 1 of 1 times: no threads left |" in transport.report_pool(pool)[-1]


@pytest.mark.long
def test_the_atari_benchmark_measures_every_kind_and_writes_its_files(tmp_path):
    pytest.importorskip("libatari")
    sizes = "--seconds 0.1 --repeats 3 --num_envs 2 --games pong qbert --threads 1 2 --growth 2 4".split()
    run("atari.py", *sizes, "--out", str(tmp_path))
    result = json.loads((tmp_path / "atari-speed.json").read_text())
    kinds = 3 + (3 if result["envpool"] else 2) * 2
    assert len(result["runs"]) == 2 * kinds and [row["num_envs"] for row in result["growth"]] == [2, 4]
    assert all(one["per_second"] > 0 for measured in result["runs"].values() for one in measured)
    report = (tmp_path / "atari-speed.md").read_text()
    assert f"| qbert |{' x.xx (x.xx) |' * ((kinds - 3) // 2 - 1) * 2}" in re.sub(r"\d+\.\d\d", "x.xx", report)
    ours, theirs = (result["runs"][f"qbert env {kind} threads=1"] for kind in ("ours", "ale-py"))
    ratios = sorted(a["per_second"] / b["per_second"] for a, b in zip(ours, theirs))
    assert f"| qbert | {ratios[1]:.2f} (" in report


def test_the_atari_benchmark_tells_the_median_ratio_of_every_game_in_every_picture(tmp_path, monkeypatch):
    pytest.importorskip("libatari")
    atari = load("atari.py")
    rates = iter([2.0, 1.0, 3.0, 1.0, 9.0, 1.0] * 2 * len(atari.PICTURES))  # ours and ale-py's, three times a picture
    monkeypatch.setattr(atari, "EXACT_GAMES", {"qbert", "pong"})
    monkeypatch.setattr(atari, "rate", lambda kind, seconds: {"per_cpu_second": kind() / kind() * next(rates)})
    atari.main(atari.Options(every=True, num_envs=1, repeats=3, out=str(tmp_path)))
    rows = (tmp_path / "atari-games.md").read_text().splitlines()[-5:]
    assert rows == [f"| {name} | 3.00 | 3.00 | 3.00 |" for name in ("*median*", "*least*", "*most*", "pong", "qbert")]


def test_a_soak_tells_growth_from_noise():
    soak = load("soak.py")
    rng = np.random.default_rng(1)
    minutes = np.arange(0, 30, 0.1)
    steady = [(minute, 500 + rng.normal()) for minute in minutes]
    growing = [(minute, 500 + 0.1 * minute + rng.normal()) for minute in minutes]  # MB: 6 an hour
    line, is_flat = soak.describe("memory", steady, 1.0, 30.0)
    assert is_flat and line.endswith("| flat |")
    line, is_flat = soak.describe("memory", growing, 1.0, 30.0)
    assert not is_flat and line.endswith("| rises |")
    line, is_flat = soak.describe("memory", [(minute, 47.528960) for minute in minutes], 1.0, 30.0)
    assert is_flat and line.endswith("| flat |")
    wild = [(minute, 500 + 200 * rng.normal()) for minute in minutes]
    line, is_flat = soak.describe("memory", wild, 1.0, 30.0)
    assert not is_flat and "not known" in line


def test_a_soak_of_r2d2_begins_when_the_replay_is_full():
    soak = load("soak.py")
    rows = [{"hours": str(hour), "stats/replay_fill": fill} for hour, fill in ((0.1, "0.5"), (0.2, "1"), (0.3, "1.0"))]
    assert soak.minute_of_full_replay(rows) == pytest.approx(12)
    assert soak.minute_of_full_replay(rows[:1]) == float("inf") and soak.minute_of_full_replay([{"hours": "1"}]) == 0


def test_a_soak_sees_the_memory_of_all_processes_of_a_run():
    soak = load("soak.py")
    code = "import subprocess, sys; x = bytearray(b'1' * 50_000_000); "
    child = f"{code} print('ready', flush=True); input()"
    code += f"subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    memory = soak.memory_of_tree(process.pid)
    process.communicate(b"\n")
    assert memory["processes"] == 2
    assert 100e6 < memory["Pss_Anon"] < 200e6


def test_the_speed_of_a_peer_is_that_of_its_last_seconds():
    compare = load("peers/compare.py")
    points = [(0.0, 0.0), (10.0, 5000.0), (20.0, 6000.0), (30.0, 7000.0)]
    assert compare.rate(points, 10.0, 20.0, "") == 100.0
    with pytest.raises(RuntimeError, match="no 40 seconds of training were reported:\nsomething failed"):
        compare.rate(points, 20.0, 20.0, "something failed")


def test_a_peer_whose_learner_has_died_has_no_speed():
    points = [(float(t), 700.0 * min(t, 80)) for t in range(0, 141, 5)]  # it goes on to report
    with pytest.raises(RuntimeError, match="training stood still for 60 seconds"):
        load("peers/compare.py").rate(points, 20.0, 120.0, "")


def test_a_soak_whose_run_has_no_value_in_some_part_says_so():
    line, is_flat = load("soak.py").describe("steps/s", [(t, 5.0) for t in range(0, 11, 2)], 0.0, 11.0)
    assert "not known: 6 values" in line and not is_flat


@pytest.mark.long
def test_every_task_is_flags_that_its_program_takes(monkeypatch):
    learning = load("learning.py")
    for task, words in learning.TASKS.items():
        agent = importlib.import_module("r2d2" if learning.script_of(task) == "r2d2.py" else "monobeast")
        monkeypatch.setattr(sys, "argv", ["x.py", *re.sub("--(listen|max_streams) \\S+", "", words).split()])
        flags = command_line.parse(agent.Flags, None, agent.PRESETS, agent.ABOUT)
        agent.validate(flags)


@pytest.mark.long
def test_every_run_of_the_gpu_benchmark_is_flags_that_its_program_takes(monkeypatch):
    gpu = load("gpu.py")
    runs = [*gpu.RUNS, *gpu.TO_18, *(f"monobeast.py {each}" for each in gpu.STAGED)]
    for run in runs:
        program, *words = run.format(few=2, most=4).split()
        agent = importlib.import_module(program.removesuffix(".py"))
        monkeypatch.setattr(sys, "argv", ["x.py", *words])
        agent.validate(command_line.parse(agent.Flags, None, agent.PRESETS, agent.ABOUT))


def test_the_gpu_benchmark_says_what_failed_what_is_missing_and_what_it_had_no_time_for(tmp_path):
    gpu = load("gpu.py")
    named = [name for _, name, _, _ in gpu.pieces(gpu.Options(), few=2, most=4)]
    assert len({*named}) == len(named) == 3 + len(gpu.STAGED) + len(gpu.RUNS) + len(gpu.TO_18)
    assert named[0] == "tests of games", "what nobody has run comes first"
    table = "| pong | 1024 | 8 | 1,234 | 3% | 5 |\n| pong | 4096 | 8 | 4,234 | 3% | 5 |"
    stages = {"simulation": 1000.0, "+ inference": None, "+ learning": None}
    found = {
        "head": ["a card"], "tests": ["7 passed"], "emulator": [table], "left out": ["all other tests"],
        "stages": [{"command": "--atari_backend cuda --group_width 64", "stages": stages, "error": "x\nno kernel"}],
        "runs": [{"command": "r2d2.py", "error": ""}], "pong": [{"command": "monobeast.py", "error": "out of memory"}],
    }  # fmt: skip
    text = gpu.report(found)
    for line in (
        "7 passed", table, "| `--atari_backend cuda --group_width 64` | 1,000 | failed | failed |",
        "| | no kernel | | |",
        "| `r2d2.py` | failed: no row of metrics in time | | | | |", "`monobeast.py`: failed: out of memory",
        "- all other tests",
    ):  # fmt: skip
        assert line in text
    gpu.draw(found, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    if not torch.cuda.is_available():
        assert "sees no GPU" in gpu.what_is_missing()[0]


def test_the_tasks_of_cule_have_as_many_environments_and_updates_as_their_names_say():
    tasks = {name: words for name, words in load("learning.py").TASKS.items() if name.startswith("cule-")}
    assert len(tasks) == 32
    for name, words in tasks.items():
        flags = dict(re.findall(r"--(\w+) (\d+)", words))
        num_actors, width, batch = (int(flags[each]) for each in ("num_actors", "group_width", "batch_width"))
        numbers = list(map(int, re.findall(r"\d+", name))) or [1200, 20, 20, 1]
        envs, batches, steps, between = numbers if len(numbers) == 4 else (*numbers, 1, 4, 4)
        monobeast.validate(
            monobeast.Flags(
                num_actors=num_actors,
                group_width=width,
                batch_width=batch,
                unroll_length=int(flags["unroll_length"]),
                stagger="--stagger" in words,
            )  # fmt: skip
        )
        assert 2 * num_actors * width == envs and batches * batch == envs
        assert int(flags["unroll_length"]) == steps == batches * between
        assert ("--stagger" in words) == (batches > 1)


def test_the_results_of_a_resumed_task_name_all_its_commits(tmp_path, monkeypatch):
    learning = load("learning.py")
    (tmp_path / "metrics.csv").write_text("step,frames,hours,charts/episodic_return\n10,10,0.1,1\n20,20,0.2,2\n")
    (tmp_path / "config.json").write_text('{"seed": 3}')
    start = {"argv": ["monobeast.py"], "diff": "", "untracked": {}, "cpu": "AMD EPYC", "cores": 2, "gpus": []}
    starts = [start | {"commit": "a" * 40}, start | {"commit": "b" * 40, "untracked": {"my_env.py": ""}}]
    (tmp_path / "meta.json").write_text(json.dumps({"starts": starts}))
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "results")
    learning.main(learning.Options("pong", run=str(tmp_path)))
    header = (tmp_path / "results" / "pong-seed3.csv").read_text()
    assert f"# commit: {'b' * 40} with uncommitted changes\n" in header
    assert "# remark: resumed: commit aaaaaaa on AMD EPYC, 2 cores, no GPU, then commit bbbbbbb on" in header


def test_the_cost_of_the_replay_is_measured_beside_an_update():
    replay = load("replay.py")
    flags = replay.r2d2.Flags(replay_gb=0.05, batch_width=2, group_width=4, device="cpu")
    cells = replay.measure("small", flags, rounds=1).strip("| ").split(" | ")
    numbers = dict(zip(replay.HEAD, cells, strict=True))
    assert numbers["an update's sequences"] == "2 x (4 + 16)" and numbers["rollout"] == "8 x 4"
    storing, drawing, update = (float(numbers[name]) for name in replay.HEAD[3:6])
    assert 0 < storing < update
    assert float(numbers["drawing : update"].rstrip(" %")) == pytest.approx(100 * drawing / update, abs=0.5)
    assert 7.0 < float(numbers["GB a million steps"]) < 7.6


def test_the_first_step_that_differs_between_the_emulators_is_reported():
    pytest.importorskip("libatari")
    from beast import envs

    def make_both(*games):
        made = [envs.make(f"{game}NoFrameskip-v4", 2, atari_backend=b) for game, b in zip(games, ("ale", "beast"))]
        return load("atari_policy.py").BothEmulators(*made)

    both = make_both("Breakout", "Breakout")
    both.reset(seed=1)
    for _ in range(30):
        both.step(np.ones(2, int))
    both.ours.step(np.ones(2, int))
    with pytest.raises(RuntimeError, match=r"step 31: observations differ, first at \[0, "):
        both.step(np.zeros(2, int))
    both.close()
    others = make_both("Breakout", "Pong")
    with pytest.raises(RuntimeError, match="step 0: observations differ"):
        others.reset(seed=1)
    others.close()


def test_a_difference_between_the_emulators_in_any_part_of_a_step_is_reported_by_its_name():
    pytest.importorskip("libatari")
    from beast import envs

    made = [envs.make("ALE/Breakout-v5", 2, atari_backend=backend) for backend in ("ale", "beast")]
    both = load("atari_policy.py").BothEmulators(*made)
    both.reset(seed=1)
    *expected, info = both.step(np.ones(2, int))
    names = ["observations", "rewards", "terminations", "truncations", *info]
    assert set(info) >= {"env_id", "lives", "frame_number", "episode_frame_number"}
    for changed, name in enumerate(names):
        values = [value.copy() for value in (*expected, *info.values())]
        values[changed].flat[-1] ^= 1
        with pytest.raises(RuntimeError, match=f"step 1: {name} differ, first at"):
            both.compare((*expected, info), (*values[:4], dict(zip(info, values[4:]))))
    both.close()


# ------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("servers, load", [(1, 0.5), (1, 0.8), (2, 0.8)])
def test_customers_of_a_station_wait_as_long_as_queueing_theory_says(servers, load):
    plan = load_plan()
    rng, station, now, waited = np.random.default_rng(1), plan.Station(servers), 0.0, []
    for _ in range(100_000):
        now += rng.exponential(1 / (servers * load))
        waited.append(station.admit(now, 1.0) - now - 1.0)
    if servers == 1:  # M/D/1: Pollaczek and Khinchine
        assert np.mean(waited) == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    else:  # M/D/2: between half of M/M/2's wait and all of it
        of_m_m_2 = load**2 / (1 - load**2)
        assert 0.5 * of_m_m_2 < np.mean(waited) < 0.65 * of_m_m_2


def load_plan():
    return load("plan.py")


def simulate(constants: dict, **plan):
    """30 s of a plan whose parts take no time but for these constants; no chance."""
    module = load_plan()
    nothing = {each: 0.0 for each in module.Constants.__dataclass_fields__}
    free = dict(nic_gbps=1e9, round_trip_ms=0.0, jitter=0.0, batch_width=16, width=16, streams_per_core=1)
    return module.simulate(module.Plan(**{**free, **plan}), module.Constants(**{**nothing, **constants}), 30.0, 30.0)


@pytest.mark.parametrize(
    "constants, plan, steps_per_second",
    [
        ({"env_step_us": 1000}, {}, 4 * 16 / 16e-3),  # 4 groups, a core each
        ({"env_step_us": 1000}, {"streams_per_core": 2}, 2 * 16 / 16e-3),
        ({"env_step_us": 1000}, {"round_trip_ms": 48.0}, 4 * 16 / 64e-3),  # nothing else goes on meanwhile
        ({"env_step_us": 1000}, {"round_trip_ms": 12.0, "streams_per_core": 4}, 16 / 16e-3),  # the delay is hidden
        ({"learner_row_us": 40_000}, {"transport_cores": 2, "round_trip_ms": 1.0}, 2 * 16 / 40e-3),
        ({"inference_us": 10_000}, {"round_trip_ms": 5.0}, 4 * 16 / 20e-3),  # a pass for all; back after the next began
        ({"update_step_us": 1000}, {"round_trip_ms": 1.0}, 1000.0),
        ({}, {"nic_gbps": 1e-3, "observation_bytes": 125, "round_trip_ms": 1.0}, 1000.0),
        ({}, {"uplink_mbps": 1.0, "observation_bytes": 125, "streams_per_core": 2, "round_trip_ms": 1.0}, 2000.0),
    ],
)
def test_a_plan_is_as_fast_as_its_slowest_part(constants, plan, steps_per_second):
    found = simulate(constants, environments=64, **plan)
    assert found.steps_per_second == pytest.approx(steps_per_second, rel=0.03)
    assert found.steps_per_second * found.mean_latency == pytest.approx(64, rel=0.03)  # Little's law


def test_the_policy_lag_of_a_plan_is_what_its_rollouts_and_its_queue_hold():
    busy = {"update_step_us": 1000, "env_step_us": 10}
    assert simulate(busy, environments=64).mean_lag == pytest.approx(5, abs=0.3)  # (N + queue) / B, of a rank
    assert simulate(busy, environments=256).mean_lag == pytest.approx(17, abs=0.3)
    assert simulate(busy, environments=64, queue_width=64).mean_lag == pytest.approx(8, abs=0.3)
    assert simulate(busy, environments=128, ranks=2).mean_lag == pytest.approx(5, abs=0.3)
    idle = simulate({"update_us": 1, "env_step_us": 1000}, environments=64)  # trained as soon as they are full
    assert idle.shares["learner"] < 0.01 and idle.shares["env hosts"] == pytest.approx(1, abs=0.01)


def test_packets_of_a_slow_link_are_late_and_few_and_wait_for_their_turn():
    link = load("slow_link.py")
    lossless = link.Direction(delay=0.05, loss=0.0, rate=1000.0)
    for packet in (b"a" * 10, b"b" * 10):
        lossless.take(packet, now=1.0)
    assert lossless.arrived(1.055) == []
    assert lossless.arrived(1.0601) == [b"a" * 10] and lossless.arrived(2.0) == [b"b" * 10]
    for _ in range(100):  # 10 ms each: the buffer holds a tenth of a second
        lossless.take(b"c" * 10, now=3.0)
    assert len(lossless.arrived(9.0)) == 11
    lossy = link.Direction(delay=0.0, loss=0.01, random=link.random.Random(1))
    for number in range(20_000):
        lossy.take(b"", now=float(number))
    assert len(lossy.arrived(1e9)) == pytest.approx(0.99 * 20_000, abs=60)


def test_the_rule_of_a_slow_link_is_its_delay_its_rate_or_the_core():
    setting = load("slow_link.py").Setting
    assert setting(4, 16, 50).rule() == 4 * 16 / 0.05
    assert setting(64, 64, 50, shape=(1231,), megabits=100).rule() == 100e6 / 8 / 1250
    assert setting(2, 16, 50, step_ms=1.0).rule() == 2 * 16 / 0.066
    assert setting(8, 16, 50, step_ms=1.0).rule() == 1000


@pytest.mark.parametrize("weigh", [True, False])
def test_the_forks_of_the_lag_benchmark_are_monobeast_with_late_weights(weigh):
    text = load("lag.py").fork(7, weigh)
    compile(text, "monobeast.py", "exec")
    assert "if len(kept) > 7:" in text and ("log_rhos=torch.zeros_like" in text) == (not weigh)


def test_slots_that_are_handed_out_at_once_are_never_early(monkeypatch):
    monkeypatch.setattr(Slots, "_is_early", lambda slots: True)
    slots = Slots(2)
    assert slots.acquire(0, set()) is None
    load("slots_at_once.py")
    assert slots.acquire(0, set()) == 0


def test_the_picture_of_lag_is_drawn_of_the_runs_that_there_are(tmp_path, monkeypatch):
    lag = load("lag.py")
    monkeypatch.setattr(lag, "RESULTS", tmp_path / "lag.csv")
    lag.draw([])
    row = {"game": "Breakout", "lag": "5", "correction": "neither", "return": "3.5"}
    lag.draw([row, {**row, "return": "4.5"}])
    assert (tmp_path / "lag.png").stat().st_size > 1000
