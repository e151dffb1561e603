"""--mode tune and --auto: what stages cost, and the setting that follows from it."""

import contextlib
import json
import re
import types

import pytest
import torch
import toy_envs  # noqa: F401  registers its environments

import monobeast
from beast.envs.probe import probe_env
from beast.errors import InputError
from beast.run import tuning
from beast.run.tuning import WORK_CONSERVATION, Cost


def predict(env: float, inference: float, learner: float, cores: int) -> tuning.Setting:
    """Costs in milliseconds per step, of one thread each."""
    costs = {"env": env, "inference": inference, "learner": learner}
    costs = {stage: Cost(cost / 1e3, cost / 1e3) for stage, cost in costs.items()}
    return tuning.predict(monobeast.Flags(), costs, cores)


@pytest.mark.parametrize(
    "costs, cores, bottleneck, speed, num_actors",
    [
        ((0.4, 0.2, 0.4), 2, "all cores together", 2000, 1),  # 1 ms of work a step
        ((0.5, 0.2, 1.0), 8, "learner", 1000, 1),
        ((0.5, 2.0, 0.1), 8, "inference", 500, 1),
        ((8.0, 0.1, 0.1), 4, "all cores together", 4000 / 8.2, 4),
        ((4.0, 0.1, 0.1), 8, "all cores together", 8000 / 4.2, 8),
    ],
)
def test_the_bottleneck_is_what_bounds_the_speed(costs, cores, bottleneck, speed, num_actors):
    setting = predict(*costs, cores=cores)
    assert setting.bottleneck == bottleneck
    assert setting.steps_per_second == pytest.approx(WORK_CONSERVATION * speed)
    assert setting.flags.num_actors == num_actors


def test_environments_that_wait_themselves_get_more_actors_than_there_are_cores():
    waiting = Cost(wall=10e-3, cpu=1e-3)
    busy = Cost(wall=0.1e-3, cpu=0.1e-3)
    costs = {"env": waiting, "inference": busy, "learner": busy}
    setting = tuning.predict(monobeast.Flags(), costs, cores=2)
    assert setting.flags.num_actors == 17  # keeps up with what two cores can do: 2 / 1.2 ms
    assert setting.bottleneck == "all cores together"


def test_a_gpu_does_inference_and_learning_in_turn():
    work = Cost(wall=0.5e-3, cpu=0.01e-3)
    costs = dict.fromkeys(("env", "inference", "learner"), work)
    setting = tuning.predict(monobeast.Flags(), costs, cores=16, one_gpu=True)
    assert setting.bottleneck == "the GPU" and setting.steps_per_second == pytest.approx(WORK_CONSERVATION * 1000)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.2)
    monkeypatch.setattr(tuning, "WIDTHS", (4, 8))


def small(tmp_path, **others) -> monobeast.Flags:
    flags = {"env": "CartPole-v1", "root": str(tmp_path), "name": "run", "group_width": 4, "tensorboard": False}
    return monobeast.Flags(**{**flags, **others})


def test_tune_prints_costs_a_setting_its_speed_and_the_bottleneck(tmp_path, quick, capsys):
    tuned = monobeast.tune(small(tmp_path, batch_width=8))
    output = capsys.readouterr().out
    assert tuned.group_width in (4, 8)
    assert f"choose {tuning.as_arguments(tuned)}\n" in output and "--no_compile" in output
    assert re.search(r"predicted [1-9][\d,]* steps/s; the bottleneck is: \w+", output)
    assert re.search(r"ceil\(t_inference / t_env\): \d+ > \d+ (holds|does not hold)", output)
    assert re.search(r"policy lag where all groups are equally fast: up to \d+ updates", output)
    assert len(re.findall(r"<-$", output, re.MULTILINE)) == 1
    assert not list(tmp_path.iterdir()), "it trains nothing"


def test_tune_measures_no_width_that_the_highest_policy_lag_rules_out(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(tuning, "TIE_FRACTION", 0.0)  # all settings are as good
    assert monobeast.tune(small(tmp_path, batch_width=1, max_policy_lag=3)).group_width == 4


def test_tune_measures_widths_that_staggering_rules_out_and_leaves_it_on(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(tuning, "TIE_FRACTION", 0.0)
    tuned = monobeast.tune(small(tmp_path, batch_width=4, num_actors=2, stagger=True))
    assert tuned.stagger
    monkeypatch.setattr(tuning, "WIDTHS", (2,))  # two groups may be a batch of four
    monkeypatch.setattr(tuning, "lag_of", lambda flags: flags.group_width)
    with pytest.raises(InputError, match="--stagger with --batch_width 4: .* 2 groups of 2 columns"):
        monobeast.tune(small(tmp_path, batch_width=4, num_actors=2, stagger=True))


@pytest.mark.parametrize("env", ["toy_envs:MultiDiscrete-v0", "toy_envs:Dict-v0", "Pendulum-v1"])
def test_tune_knows_every_kind_of_action_and_observation(tmp_path, quick, capsys, env):
    monobeast.tune(small(tmp_path, env=env, batch_width=8))
    assert "choose --num_actors" in capsys.readouterr().out


def test_tune_takes_no_action_that_a_mask_forbids(tmp_path, quick):
    """The toy raises where one is taken."""
    flags = monobeast.validate(small(tmp_path, env="toy_envs:Masked-v0", batch_width=8))
    spaces = probe_env(monobeast.create_env, flags)
    with contextlib.closing(tuning.Stages(flags, monobeast.create_env, spaces, 0.1)) as stages:
        stages.env()


@pytest.mark.parametrize("gain, is_chosen", [(2.0, True), (1.02, False)])
def test_compile_is_measured_where_it_is_given_and_chosen_where_it_is_clearly_faster(
    tmp_path, quick, capsys, monkeypatch, gain, is_chosen
):
    compiled = []

    class Stages(tuning.Stages):
        def learning(self, *arguments):
            super().learning(*arguments)
            cost = 1e-3 / (gain if self.flags.compile else 1)  # the bottleneck by far
            return Cost(cost, cost)

    monkeypatch.setattr(tuning, "Stages", Stages)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiled.append(forward) or forward)
    tuned = monobeast.tune(small(tmp_path, batch_width=4, compile=True))
    output = capsys.readouterr().out
    assert len(compiled) == 2, "the net for inference and the learner's"
    assert tuned.compile == is_chosen and f"choose {tuning.as_arguments(tuned)}\n" in output
    assert len(re.findall(r"^ .* yes \|", output, re.MULTILINE)) == 1 and "was not measured" not in output


def test_auto_with_deterministic_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--auto with --deterministic"):
        monobeast.train(small(tmp_path, batch_width=4, auto=True, deterministic=True))


def test_auto_trains_with_the_setting_and_a_resumed_run_keeps_it(tmp_path, quick, capsys, monkeypatch):
    flags = small(tmp_path, batch_width=4, auto=True, log_steps=500)
    monobeast.train(monobeast.replace(flags, total_steps=1000))
    choice = re.search(r"choose (.*)", capsys.readouterr().out)[1]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert choice == tuning.as_arguments(types.SimpleNamespace(**config))
    monkeypatch.setattr(tuning, "choose", lambda *_: pytest.fail("measured again"))
    monobeast.train(monobeast.replace(flags, total_steps=2000))
    assert "resumed at step" in capsys.readouterr().err
