"""The profile: seconds by stage that leave nothing out."""

import csv
import re
import time

import pytest

from beast.profile import Laps, Profile


def test_every_second_belongs_to_the_lap_that_ends_it():
    laps = Laps()
    time.sleep(0.05)
    laps.begin()  # what was before does not count
    began = time.monotonic()
    for stage, seconds in (("wait", 0.02), ("forward", 0.04), ("wait", 0.03)):
        time.sleep(seconds)
        laps.lap(stage)
    assert laps.seconds["wait"] >= 0.05 and laps.seconds["forward"] >= 0.04
    assert sum(laps.seconds.values()) == pytest.approx(time.monotonic() - began, abs=0.005)


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
        env="CartPole-v1", root=str(tmp_path), name="run", total_minutes=0.2, log_steps=2000, tensorboard=False
    )
    module.train(flags)
    table = re.findall(r"^  (\w+(?: \d+)?) +(\w+ [\d.]+(?: · \w+ [\d.]+)*)$", capfd.readouterr().err, re.MULTILINE)
    stages = {name: dict(stage.split() for stage in stages.split(" · ")) for name, stages in table}
    learner = {"wait", "gather", "forward", "loss", "backward", "optimizer", "publish", "records"}
    assert set(stages["learner"]) == learner
    assert set(stages["inference"]) == {"wait", "gather", "forward", "answer"}
    if variant == "monobeast":
        assert set(stages["actor 0"]) == set(stages["actor 1"]) == {"start", "wait", "step"}
    else:
        assert set(stages["streams"]) == {"environment", "inference", "enqueue"}
    for name, shares in stages.items():
        assert sum(map(float, shares.values())) == pytest.approx(100, abs=3), (name, shares)
    with open(tmp_path / "run" / "metrics.csv") as file:
        row = list(csv.DictReader(file))[-2]  # the last one may be of a moment
    assert sum(float(row[f"time/learner_{stage}"]) for stage in learner) == pytest.approx(1, abs=0.03)
