"""`--mode test`: games with a saved net, and videos of them."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
from lock_step import new_learner, small_flags

import monobeast
from beast.run import checkpoint


def test_test_mode_plays_whole_games_with_given_seeds_and_writes_them_down(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", core="lstm", total_steps=1000, tensorboard=False)
    monobeast.train(flags)
    flags = dataclasses.replace(flags, mode="test", episodes=7)
    results = [
        monobeast.test(dataclasses.replace(flags, **changes)) for changes in ({}, {}, {"seed": 9}, {"greedy": True})
    ]
    assert results[0]["returns"] == results[1]["returns"] != results[2]["returns"]
    assert all(len(result["returns"]) == 7 for result in results)
    assert results[0]["lengths_in_steps"] == results[0]["returns"], "CartPole pays one for each step"
    written = json.loads((tmp_path / "run" / "test.json").read_text())
    assert written["returns"] == results[-1]["returns"] and written["greedy"] is True
    assert written["mean"] == pytest.approx(np.mean(written["returns"]))
    assert written["standard_error"] == pytest.approx(np.std(written["returns"], ddof=1) / math.sqrt(7))


def test_playing_without_a_name_says_which_runs_there_are(tmp_path, run_main):
    code, output = run_main(monobeast, "--mode", "test", "--root", str(tmp_path))
    assert code == 1 and f"give its --name, or --checkpoint; {tmp_path} has none yet" in output, output
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").touch()
    os.utime(tmp_path / "older" / "checkpoint.pt", (0, 0))
    code, output = run_main(monobeast, "--mode", "test", "--root", str(tmp_path))
    assert code == 1 and f"{tmp_path} has newer, older" in output, output


def test_a_video_of_a_game_is_written(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    flags = small_flags(
        root=str(tmp_path), name="run", env="BreakoutNoFrameskip-v4", group_width=1, batch_width=1, total_steps=10
    )
    monobeast.train(dataclasses.replace(flags, tensorboard=False))
    monobeast.test(dataclasses.replace(flags, mode="test", episodes=1, video=str(tmp_path / "game.mp4")))
    import imageio

    frames = imageio.mimread(tmp_path / "game.mp4", memtest=False)
    assert len(frames) > 20 and frames[0].shape[2] == 3
    assert any((frame != frames[0]).any() for frame in frames)


def test_a_video_shows_the_environment_of_the_flags_and_frames_are_counted_by_its_skip(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    flags = small_flags(
        root=str(tmp_path), name="run", env="ALE/Breakout-v5", group_width=1, batch_width=1, total_steps=10,
        full_action_space="on", frame_skip=20, frame_stack=1, tensorboard=False,
    )  # fmt: skip
    monobeast.train(flags)
    names, *lines = (line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines())
    last = dict(zip(names, lines[-1]))
    assert float(last["frames"]) == 20 * float(last["step"])
    video = str(tmp_path / "game.mp4")
    result = monobeast.test(dataclasses.replace(flags, mode="test", episodes=1, video=video))
    import imageio

    reader = imageio.get_reader(video)
    assert reader.get_meta_data()["fps"] == 3 and reader.count_frames() == result["lengths_in_steps"][0]


def test_test_mode_tells_for_how_many_steps_the_net_was_trained(tmp_path):
    flags, path = small_flags(mode="test", name="run", episodes=1), tmp_path / "checkpoint.pt"
    learner = new_learner(flags)
    learner.steps, learner.updates = 1234, 5
    checkpoint.save(path, {"config": dataclasses.asdict(flags), **learner.state_dict()})
    assert monobeast.test(dataclasses.replace(flags, checkpoint=str(path)))["steps"] == 1234
