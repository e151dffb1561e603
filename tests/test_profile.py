"""The profile: seconds by stage that leave nothing out."""

import dataclasses
import re
import subprocess
import sys
import time

import pytest
from lock_step import metrics_of

from beast.clock import Laps, Profile
from beast.feeds.processes import Child


def test_every_second_belongs_to_the_lap_that_ends_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    laps = Laps()
    now += 5
    laps.begin()  # what was before does not count
    for stage, seconds in (("wait", 2), ("forward", 4), ("wait", 3)):
        now += seconds
        laps.lap(stage)
    assert laps.seconds == {"wait": 5, "forward": 4}


def test_cpu_time_is_that_of_the_thread_between_its_laps():
    laps = Laps()
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    laps.begin()
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    time.sleep(0.2)
    laps.lap("work")
    assert 0.2 <= laps.cpu_seconds < 0.3 and laps.seconds["work"] >= 0.4


def test_cores_are_counted_from_the_beginning_in_the_table_and_from_the_last_call_in_the_metrics():
    profile, seconds = Profile(), [5.0]
    profile.cores["learner"] = lambda: seconds[0]
    profile.begin()
    seconds[0] = 6.0
    assert profile.shares(4.0) == {"cores/learner": 0.25}
    seconds[0] = 9.0
    assert profile.shares(4.0) == {"cores/learner": 0.75}
    assert profile.table(8.0).endswith("cores that were busy: learner 0.50")


def test_the_cpu_time_of_a_child_goes_on_in_its_next_life_and_counts_no_other_process():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); time.sleep(60)"
    actor, seconds = Child("actor", 0), [0.0]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code.partition("print")[0]], check=True)  # an evaluation
        actor.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
        actor.popen.stdout.readline()
        seconds.append(actor.total_cpu_seconds())
        actor.popen.kill()
        actor.end(10)
        assert actor.total_cpu_seconds() == seconds[-1]
    assert all(0.28 <= after - before < 0.55 for before, after in zip(seconds, seconds[1:])), seconds


def test_a_table_counts_from_the_beginning():
    seconds = {"learner": {"wait": 7.0}}
    profile = Profile()
    profile.workers["learner"] = lambda: seconds["learner"]
    profile.begin()
    seconds["learner"] |= {"wait": 8.0, "loss": 3.0}
    assert profile.table(4.0).splitlines()[1].split() == ["learner", "wait", "25.0", "·", "loss", "75.0"]


def test_shares_are_of_the_time_since_the_last_call_and_the_mean_over_a_kind():
    seconds = {"actor 0": {"step": 1.0}, "actor 1": {"step": 3.0}, "learner": {"loss": 2.0}}
    profile = Profile()
    profile.workers |= {name: lambda name=name: seconds[name] for name in seconds}
    assert profile.shares(4.0) == {"time/actor_step": 0.5, "time/learner_loss": 0.5}
    seconds["actor 0"]["step"] += 1.0
    seconds["learner"]["wait"] = 1.0
    assert profile.shares(2.0) == {"time/actor_step": 0.25, "time/learner_loss": 0.0, "time/learner_wait": 0.5}


@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
def test_the_stages_of_every_thread_and_process_of_a_run_sum_to_its_wall_time(tmp_path, variant, capfd):
    if variant == "polybeast":
        pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    module = pytest.importorskip(variant)
    flags = module.Flags(
        env="CartPole-v1", root=str(tmp_path), name="run", total_minutes=0.12, log_steps=1000, tensorboard=False
    )
    if variant == "monobeast":
        flags = dataclasses.replace(flags, num_actors=2)
    module.train(flags)
    table = re.findall(r"^  (\w+(?: \d+)?) +(\w+ [\d.]+(?: · \w+ [\d.]+)*)$", capfd.readouterr().err, re.MULTILINE)
    stages = {name: dict(stage.split() for stage in stages.split(" · ")) for name, stages in table}
    learner = {"wait", "gather", "forward", "loss", "backward", "optimizer", "publish", "records"}
    assert set(stages["learner"]) == learner
    assert set(stages["inference"]) == {"wait", "gather", "forward", "answer"}
    if variant == "monobeast":
        assert set(stages["actor 0"]) == set(stages["actor 1"]) == {"start", "wait", "step", "reset"}
    else:
        assert set(stages["streams"]) == {"environment", "inference", "enqueue"}
    for name, shares in stages.items():
        assert sum(map(float, shares.values())) == pytest.approx(100, abs=3), (name, shares)
    row = metrics_of(tmp_path / "run")[-2]  # the last one may be of a moment
    assert sum(float(row[f"time/learner_{stage}"]) for stage in learner) == pytest.approx(1, abs=0.03)
