"""The examples are diffs: they apply to the files as they are, and what comes of it trains."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from lock_step import metrics_of
from programs import Program
from waiting import PATIENCE

pytest.importorskip("libbeast", reason="libbeast is not built: pip install .")
import libbeast

ROOT = Path(__file__).resolve().parent.parent
MINATAR = ROOT / "examples" / "minatar"


def test_the_minatar_diffs_change_create_env_and_net_only_and_train(tmp_path):
    for name in ("monobeast.py", "monobeast_presets.py", "polybeast.py", "polybeast_env.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "beast", tmp_path / "beast", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(libbeast.__file__, tmp_path)
    for name in ("monobeast.py", "polybeast_env.py"):
        with open(MINATAR / f"{name}.diff") as diff:
            subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=tmp_path, stdin=diff, check=True, capture_output=True)
        before, after = (ROOT / name).read_text(), (tmp_path / name).read_text()
        edited = "# FORK HERE: your model." if name == "monobeast.py" else "# FORK HERE: your environment."
        following = "\ndef scale_rewards" if name == "monobeast.py" else "\ndef parse_flags"
        without_import = [text.replace("from beast import envs  # noqa: E402\n", "") for text in (before, after)]
        assert len({text.split(edited)[0] for text in without_import}) == 1
        assert len({text.split(following)[1] for text in (before, after)}) == 1
    words = [str(tmp_path / "polybeast.py"), "--env", "breakout", "--root", str(tmp_path / "runs"), "--name", "run"]
    words += ["--num_servers", "1", "--group_width", "4", "--batch_width", "4", "--total_steps", "1000"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = Program(
        [*words, "--log_steps", "500", "--no_tensorboard"], cwd=tmp_path, env=environment, output=tmp_path / "output"
    )
    assert process.wait(PATIENCE) == 0, process.text()
    rows = metrics_of(tmp_path / "runs" / "run")
    assert int(rows[-1]["step"]) >= 1000 and float(rows[-1]["charts/episodic_length"]) > 1
