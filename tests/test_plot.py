from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import plot
from beast.errors import InputError, MissingPackage


def make_run(path: Path, returns, steps=None, **config) -> str:
    path.mkdir(parents=True)
    steps = steps or [1000 * (i + 1) for i in range(len(returns))]
    (path / "config.json").write_text(json.dumps({"env": "Pong", "name": path.name, "root": "runs", **config}))
    rows = [f"{step},{4 * step},{step / 1e6},{value}" for step, value in zip(steps, returns)]
    (path / "metrics.csv").write_text("\n".join(["step,frames,hours,charts/episodic_return", *rows]) + "\n")
    return str(path)


def read(paths, x="step", smooth=1):
    return [plot.read_curve(str(path), x, "charts/episodic_return", smooth) for path in paths]


def test_runs_that_differ_in_seed_and_name_alone_are_one_curve(tmp_path):
    paths = [
        make_run(tmp_path / "a", [1, 2], seed=1, core="none"),
        make_run(tmp_path / "b", [3, 4], seed=2, core="none"),
        make_run(tmp_path / "c", [5, 6], seed=1, core="lstm"),
    ]
    groups = plot.group_seeds(read(paths))
    assert [[curve.name for curve in group] for group in groups] == [["a", "b"], ["c"]]
    assert plot.label_groups(groups) == ["core none (2 seeds)", "core lstm"]


def test_an_edited_agent_is_no_second_seed_of_the_one_before_the_edit(tmp_path):
    paths = [make_run(tmp_path / f"{name}{seed}", [1, 2], seed=seed) for name in ("mine", "base") for seed in (1, 2)]
    assert [len(group) for group in plot.group_seeds(read(paths))] == [1] * 4, "nothing tells which belong together"
    for path in paths:
        diff = "+ my loss" if "mine" in path else ""
        Path(path, "meta.json").write_text(json.dumps({"starts": [{"commit": "abc", "diff": diff, "untracked": {}}]}))
    groups = plot.group_seeds(read(paths))
    assert [[curve.name for curve in group] for group in groups] == [["mine1", "mine2"], ["base1", "base2"]]
    Path(paths[1], "meta.json").write_text("{}")
    assert len(plot.group_seeds(read(paths[:2]))) == 1, "different seeds may be of different commits"


def test_metrics_files_of_run_directories_are_those_runs(tmp_path):
    runs = [make_run(tmp_path / name, [1, 2], seed=1, core=name) for name in ("none", "lstm")]
    groups = plot.group_seeds(read([f"{run}/metrics.csv" for run in runs]))
    assert plot.label_groups(groups) == ["core none", "core lstm"]
    for run in runs:
        Path(run, "config.json").unlink()
    assert len(plot.group_seeds(read([f"{run}/metrics.csv" for run in runs]))) == 2, "nothing says that they are alike"


def test_the_figure_draws_what_it_names(tmp_path, monkeypatch, run_main):
    curves, drawn, draw = seeds_of(tmp_path, [*range(19), 1e6]), [], plot.draw
    figure = draw([curves], plot.Flags(paths=("a",), average="iqm"))
    assert figure.axes[0].get_legend().get_texts()[0].get_text().endswith(": 9.5")
    assert plot.average_and_band(curves, "iqm", points=2)[3][0] < 20, "the band is that of the interquartile mean"
    monkeypatch.setattr(plot, "draw", lambda groups, flags: drawn.append(groups) or draw(groups, flags))
    run_main(plot, make_run(tmp_path / "b", [1, 2, 3]), "--smooth", "2", "--out", str(tmp_path / "x.png"))
    assert drawn[0][0][0].y.tolist() == [1, 1.5, 2.5]


def test_an_evaluation_is_drawn_at_the_step_of_its_weights(tmp_path):
    rows = [
        "step,frames,hours,eval/step,eval/episodic_return",
        "1000,4000,0.5,,",
        "2000,8000,1.0,500,7",
        "3000,12000,2.0,2500,9",
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
    for x, expected in (("step", [1000, 2500]), ("frames", [4000, 10000]), ("hours", [0.5, 1.5])):
        curve = plot.read_curve(str(tmp_path / "a.csv"), x, "eval/episodic_return")
        assert curve.x.tolist() == expected and curve.y.tolist() == [7, 9], x


def seeds_of(tmp_path, values) -> list:
    return read([make_run(tmp_path / f"a{i}", [value, value], seed=i) for i, value in enumerate(values)])


def test_the_interquartile_mean_is_that_of_the_middle_half(tmp_path):
    np.testing.assert_allclose(plot.interquartile_mean(np.array([100.0, 2, 4, -50])), (2 + 4) / 2)
    # Of five seeds the middle half holds the third, and three quarters of the second and of the fourth.
    np.testing.assert_allclose(plot.interquartile_mean(np.array([[1.0], [2], [3], [5], [9]])), [(1.5 + 3 + 3.75) / 2.5])
    np.testing.assert_allclose(plot.interquartile_mean(np.array([1.0, 2])), 1.5)
    curves = seeds_of(tmp_path, [100, 2, 4, -50])
    assert plot.average_and_band(curves, average="iqm", points=2)[1].tolist() == [3, 3]
    assert plot.average_and_band(curves, average="mean", points=2)[1].tolist() == [14, 14]


def test_the_bootstrap_interval_is_that_of_the_mean_over_resampled_seeds(tmp_path):
    values = np.random.default_rng(1).normal(10, 3, size=30)
    _, mean, lower, upper = plot.average_and_band(seeds_of(tmp_path, values), points=2)
    error = values.std() / np.sqrt(30)  # with so many seeds the interval is nearly the normal one
    np.testing.assert_allclose([lower[0], upper[0]], mean[0] + np.array([-1.96, 1.96]) * error, atol=0.3 * error)


def test_labels_are_the_users_and_the_figure_says_how_it_averages(tmp_path):
    curves = read(
        [make_run(tmp_path / f"{core}{seed}", [1, 2], seed=seed, core=core) for core in ("a", "b") for seed in (1, 2)]
    )
    groups = plot.group_seeds(curves)
    flags = plot.Flags(paths=("a",), labels=("no memory", "LSTM"), average="iqm", smooth=5)
    figure = plot.draw(groups, flags)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["no memory (2 seeds): 2", "LSTM (2 seeds): 2"]
    told = "line: interquartile mean over seeds; band: 95 % bootstrap interval; a point is the mean of 5 rows"
    assert figure.get_supxlabel().startswith(told)
    single = plot.draw([curves[:1]], plot.Flags(paths=("a",)))
    assert single.get_supxlabel() == "not smoothed"
    with pytest.raises(ValueError, match="--labels has 1 labels for 2 curves .a1, b1.: give one for each"):
        plot.draw(groups, plot.Flags(paths=("a",), labels=("one",)))


def test_a_curve_is_the_mean_with_the_lowest_and_highest_of_its_seeds_where_all_of_them_reach(tmp_path):
    paths = [
        make_run(tmp_path / "a", [0, 10, 20], steps=[0, 10, 20], seed=1),
        make_run(tmp_path / "b", [4, 4, 4], steps=[5, 10, 15], seed=2),
    ]
    x, mean, lowest, highest = plot.average_and_band(read(paths), band="range", points=3)
    np.testing.assert_allclose(x, [5, 10, 15])
    np.testing.assert_allclose(mean, [(5 + 4) / 2, (10 + 4) / 2, (15 + 4) / 2])
    np.testing.assert_allclose(lowest, [4, 4, 4])
    np.testing.assert_allclose(highest, [5, 10, 15])


def test_runs_without_a_common_part_are_not_averaged(tmp_path):
    paths = [make_run(tmp_path / str(s), [0, 1], steps=[10**s, 2 * 10**s], seed=s) for s in (1, 3)]
    with pytest.raises(ValueError, match="no part of the x axis in common"):
        plot.average_and_band(read(paths))


def test_frames_and_hours_are_read_from_their_own_columns(tmp_path):
    path = make_run(tmp_path / "a", [1, 2])
    assert read([path], "frames")[0].x.tolist() == [4000, 8000]
    assert read([path], "hours")[0].x.tolist() == [0.001, 0.002]


def test_rows_without_a_value_are_left_out(tmp_path):
    path = make_run(tmp_path / "a", ["", 1, "nan", 3])
    assert read([path])[0].x.tolist() == [2000, 4000]
    assert read([path])[0].y.tolist() == [1, 3]


def test_smoothing_averages_a_row_with_those_before_it():
    np.testing.assert_allclose(plot.running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2), [1, 2, 4, 6])
    np.testing.assert_allclose(plot.running_mean(np.array([1.0, 3.0, 5.0]), 1), [1, 3, 5])


def test_committed_csv_files_are_grouped_by_name_and_their_comments_are_skipped(tmp_path):
    paths = []
    for name in ("pong-seed1", "pong-seed2", "tests1", "cartpole"):
        paths.append(tmp_path / f"{name}.csv")
        paths[-1].write_text("# command: python monobeast.py\nstep,charts/episodic_return\n10,1\n20,2\n")
    groups = plot.group_seeds(read(paths))
    assert plot.label_groups(groups) == ["pong (2 seeds)", "tests1", "cartpole"]


def test_an_error_names_the_path_and_what_it_has(tmp_path):
    with pytest.raises(ValueError, match="nowhere: neither a run directory"):
        read([tmp_path / "nowhere"])
    path = make_run(tmp_path / "a", [1])
    with pytest.raises(ValueError, match="no column losses/x; it has step, frames, hours"):
        plot.read_curve(path, "step", "losses/x")
    with pytest.raises(ValueError, match="no values of charts/episodic_return yet"):
        read([make_run(tmp_path / "b", ["", ""])])
    with pytest.raises(ValueError, match=r"metrics\.csv: .*'high' in line 2"):
        read([make_run(tmp_path / "c", ["high"])])


def test_the_command_writes_an_image_with_one_line_a_group(tmp_path, run_main):
    paths = [make_run(tmp_path / f"a{seed}", [1, 2, 3], seed=seed) for seed in (1, 2)]
    out = tmp_path / "images" / "curve.png"
    told = run_main(plot, *paths, "--x", "frames", "--smooth", "2", "--out", str(out))
    assert told == (0, f"written to {out}\n")
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000

    figure = plot.draw(plot.group_seeds(read(paths, "frames")), plot.Flags(paths=tuple(paths), x="frames"))
    (axes,) = figure.axes
    assert axes.get_legend().get_texts()[0].get_text() == "a1 (2 seeds): 3"
    assert axes.get_title(loc="left") == "Pong" and axes.get_xlabel() == "frames"


@pytest.mark.parametrize("arguments, complaint", [([], "nothing to draw"), (["x", "--smooth", "0"], "--smooth 0")])
def test_impossible_arguments_end_with_one_line_that_says_what_to_change(monkeypatch, arguments, complaint):
    monkeypatch.setattr(sys, "argv", ["plot.py", *arguments])
    with pytest.raises(SystemExit, match=f"^error: .*{complaint}"):
        plot.main()


def test_missing_matplotlib_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match="pip install matplotlib"):
        plot.draw(plot.group_seeds(read([make_run(tmp_path / "a", [1])])), plot.Flags(paths=("a",)))


def test_a_payoff_matrix_is_sorted_by_rating_and_names_past_policies(tmp_path, run_main):
    payoff = {
        "policies": [0, 1, 5], "parents": [None, None, 0], "steps": [None, None, 12_000], "ratings": [10.0, -50, 40],
        "points": [[0, 7.5, 4], [2.5, 0, 0], [6, 0, 0]], "games": [[0, 10, 10], [10, 0, 0], [10, 0, 0]],
    }  # fmt: skip
    run = make_run(tmp_path / "duel", [1, 2])
    with pytest.raises(InputError, match="it has no payoff.json"):
        plot.draw_payoff(run)
    (tmp_path / "duel" / "payoff.json").write_text(json.dumps(payoff))
    axes = plot.draw_payoff(run).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["5 = 0 at 12,000 (+40)", "0 (+10)", "1 (-50)"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["5", "0", "1"]
    cells = {text.get_position(): text.get_text() for text in axes.texts}  # (column, row)
    assert cells == {(1, 0): "60", (0, 1): "40", (2, 1): "75", (1, 2): "25"}
    shares = axes.images[0].get_array()
    assert shares[0, 1] == 0.6 and shares[1, 2] == 0.75
    output = tmp_path / "duel.png"
    run_main(plot, run, "--payoff", "--out", str(output))
    assert output.stat().st_size > 1000


def test_a_lineage_shows_whose_weights_each_policy_has_and_what_the_best_one_was_trained_with(tmp_path, run_main):
    run = make_run(tmp_path / "six", [1, 2])
    with pytest.raises(InputError, match="it has no pbt.csv"):
        plot.draw_lineage(run)
    rows = [
        "event,steps,policy,rank,objective,games,what,donor,learning_rate",
        *("1,100,0,0,5,20,best,0,0.1", "1,100,1,2,1,20,replaced,0,0.12", "1,100,2,1,3,20,mutated,2,0.3"),
        *("2,200,0,1,5,20,kept,0,0.1", "2,200,1,0,9,20,best,1,0.12", "2,200,2,2,1,20,replaced,1,0.144"),
        *("3,300,0,2,5,20,kept,0,0.1", "3,300,1,1,9,20,kept,1,0.12", "3,300,2,0,9.5,20,best,2,0.144"),
    ]
    path = tmp_path / "six" / "pbt.csv"
    path.write_text(rows[0] + "\n")
    with pytest.raises(InputError, match="no event of --pbt has come yet"):
        plot.draw_lineage(run)
    path.write_text("\n".join(rows) + "\n")
    lanes, rate = plot.draw_lineage(run).axes
    pieces = {(tuple(line.get_xdata()), line.get_ydata()[0]): line.get_color() for line in lanes.lines}
    first, second, third = plot.COLORS[:3]
    assert pieces == {
        ((0, 300), 0): first, ((0, 100), 1): second, ((100, 300), 1): first,
        ((0, 200), 2): third, ((200, 300), 2): first,
    }  # fmt: skip
    (line,) = rate.lines
    assert list(line.get_xdata()) == [100, 200, 300]
    assert list(line.get_ydata()) == [0.12, 0.144, 0.144], "policy 2 has what 1 had, and policy 1 what 0 had"
    output = tmp_path / "six.png"
    run_main(plot, run, "--lineage", "--out", str(output))
    assert output.stat().st_size > 1000


def test_each_task_has_a_panel_over_its_own_steps_with_the_runs_of_it_alone(tmp_path, run_main, monkeypatch):
    joint = tmp_path / "joint"
    make_run(joint, [1, 2], env="A,m:Own/B-v0", seed=1)
    names = ["step", "frames", "hours", "charts/episodic_return"]
    tasks, columns = ("A", "m:Own/B-v0"), ("steps", "episodic_return")
    names += [f"task/{task}/{column}" for task in tasks for column in columns] + ["task/C/steps"]
    rows = [[1000, 4000, 0.001, 1, 600, 10, 400, -1, 0], [2000, 8000, 0.002, 2, 1100, 20, 900, -2, 0]]
    (joint / "metrics.csv").write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]) + "\n")
    alone = make_run(tmp_path / "alone", [5, 6], env="A", seed=1)
    copy = tmp_path / "own-b-seed1.csv"
    copy.write_text(
        "# which ran: python monobeast.py --env m:Own/B-v0 --seed 1\n" + Path(alone, "metrics.csv").read_text()
    )
    drawn, draw_curves = {}, plot.draw_curves

    def note(axes, groups, flags):
        draw_curves(axes, groups, flags)
        drawn[axes] = [(group[0].x.tolist(), group[0].y.tolist()) for group in groups]

    monkeypatch.setattr(plot, "draw_curves", note)
    figure = plot.draw_tasks(plot.Flags((str(joint), alone, str(copy)), tasks=True))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["A", "B"], "C has ended no game yet"
    assert drawn[figure.axes[0]] == [([600, 1100], [10, 20]), ([1000, 2000], [5, 6])]
    assert drawn[figure.axes[1]] == [([400, 900], [-1, -2]), ([1000, 2000], [5, 6])]
    run_main(plot, str(joint), alone, "--tasks", "--out", str(tmp_path / "tasks.png"))
    assert (tmp_path / "tasks.png").stat().st_size > 1000
