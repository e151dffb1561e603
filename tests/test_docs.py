"""Pages that are written from the code and the results, the site, the image, the notebook and the citation."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE

import beast

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs"))

import generate  # noqa: E402


@pytest.fixture(scope="module")
def pages():
    return {path.name: (path.read_text(), text) for path, text in generate.pages().items()}


@pytest.mark.parametrize("name", ["flags.md", "results.md", "README.md", "lag.md"])
def test_a_written_page_is_what_the_code_and_the_results_say_now(pages, name):
    is_now, should_be = pages[name]
    different = [line for line in should_be.splitlines() if line not in is_now.splitlines()]
    assert is_now == should_be, f"{name} is out of date: python docs/generate.py writes it again. New: {different[:3]}"


def test_the_page_of_flags_has_every_flag_with_its_help():
    page = generate.flags_page()
    for field in generate.fields(generate.monobeast.Flags):
        rows = [line for line in page.splitlines() if line.startswith(f"| `--{field.name}`")]
        assert rows and all(len(row.split(" | ")[3]) > 20 for row in rows), field.name
    assert page.count("| `--entropy_cost`") == 1
    assert page.count("| `--mode`") == 3, "MonoBeast's has the choice tune, MultiBeast's match"
    assert page.count("| `--core` |") == 2, "R2D2's has another default"
    shared = re.search(r"It also has the flags of .*", page)[0]
    of_both = {"--net", "--width", "--hidden_size", "--core_size", "--discount"}
    assert set(re.findall(r"`(--\w+)`", shared)) == of_both and all(
        page.count(f"| `{name}` |") == 1 for name in of_both
    )
    assert page.count("| `--token_file` | str |") == 3  # polybeast.py's, polybeast_env.py's and r2d2.py's
    assert "| `--reward_clip` | float or `auto` | `auto` |" in page


def results_in(tmp_path, monkeypatch, **files: str) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)


HEADER = """# command: python benchmarks/learning.py lander --seed {seed}
# which ran: python monobeast.py --env {env} --seed {seed}
# commit: 0123456789abcdef0123456789abcdef01234567
# hardware: AMD EPYC, 2 cores, no GPU
# seed: {seed}
step,hours,charts/episodic_return
"""


def test_the_tables_follow_from_the_files_of_runs(tmp_path, monkeypatch):
    cart = HEADER.replace("{env}", "CartPole-v1")
    results_in(
        tmp_path,
        monkeypatch,
        cart_seed1__csv=cart.format(seed=1) + "100,0.1,\n200,0.2,480\n300,0.3,470\n",
        cart_seed2__csv=cart.format(seed=2) + "150,0.1,nan\n250,0.5,475\n350,0.7,490\n",
        cart_seed3__csv=cart.format(seed=3).replace("step,", "# remark: slow disk\nstep,") + "150,0.1,20\n",
        soak_x__csv="minutes,processes\n1,2\n",
    )
    for path in [*tmp_path.glob("cart_*"), *tmp_path.glob("soak_*")]:
        path.rename(tmp_path / path.name.replace("_", "-"))
    ((key, runs),) = generate.by_task(generate.read_runs()).items()
    assert key == ("AMD EPYC, 2 cores", "cart")
    assert [run.reached for run in runs] == [0, 0, None]
    assert generate.over_seeds(runs[:2]) == (
        *("1, 2", "480.00 (470.00 to 490.00)", "475"),  # CartPole's reward threshold
        *("225 (200 to 250)", "21.0 (12.0 to 30.0)"),
    )
    assert generate.over_seeds(runs)[3] == "225 (200 to 250), 2 of 3 seeds"
    assert generate.over_seeds(runs)[4] == "21.0 (12.0 to 30.0), 2 of 3 seeds"
    remarked = [line for line in generate.runs_section(runs) if "slow disk" in line]
    assert len(remarked) == 1 and remarked[0].startswith("| `cart` | 3 | 20.00 |")
    assert generate.over_seeds(runs[2:])[1:4] == ("20.00", "475", "not reached")


def test_runs_that_differ_in_one_thing_are_compared_by_speed_lag_and_cpu_time(tmp_path, monkeypatch):
    columns = "stats/policy_lag_mean,cores/learner,cores/inference,cores/envs"
    text = HEADER.replace("return\n", f"return,{columns}\n").format(seed=2, env="MinAtar/Breakout-v0")
    text += "36000,0.1,10,4,0.8,0.2,0.1\n360000,1.0,16,6,0.6,0.4,0.1\n"
    results_in(tmp_path, monkeypatch, one__csv=text, two__csv=text, other__csv=text)
    for name, task in (("one", "minatar-64"), ("two", "minatar-64-two-ranks")):
        (tmp_path / f"{name}.csv").rename(tmp_path / f"{task}-seed2.csv")
    rows = [line for line in generate.compared_section(generate.read_runs()) if line.startswith("| MinAtar")]
    shown = "| 100 | 5.0 | {} | 360,000 | 60.0 | 13.00 | 16.00 |"
    assert len(rows) == 2
    assert rows[0].startswith("| MinAtar Breakout, just in time | 2 " + shown.format("7.00 | 3.00 | 1.00"))
    assert rows[1].startswith("| MinAtar Breakout, two ranks | 2 " + shown.format("14.00 | 6.00 | 2.00"))


def test_of_runs_of_pong_which_end_at_18_the_table_has_the_steps_and_minutes_until_then(tmp_path, monkeypatch):
    text = HEADER.replace("return\n", "return,stats/policy_lag_mean\n").format(seed=1, env="PongNoFrameskip-v4")
    results_in(tmp_path, monkeypatch, one__csv=text + "36000,0.1,10,4\n360000,1.0,18,6\n720000,3.0,19,9\n")
    (tmp_path / "one.csv").rename(tmp_path / "atari-pong-seed1.csv")
    assert generate.compared_section(generate.read_runs()) == [], "there is nothing to compare it with"
    (tmp_path / "atari-pong-seed1.csv").rename(tmp_path / "pong-64-seed1.csv")
    (row,) = (line for line in generate.compared_section(generate.read_runs()) if line.startswith("| Pong"))
    assert row.startswith("| Pong, just in time | 1 | 100 | 5.0 |  |  |  | 360,000 | 60.0 |  |  | ")


def test_only_a_return_in_the_same_environment_after_as_many_steps_is_comparable(tmp_path, monkeypatch):
    pong = HEADER.format(seed=1, env="PongNoFrameskip-v4")
    results_in(tmp_path, monkeypatch, pong__csv=pong + "10000050,1,20\n", short__csv=pong + "3000000,1,19\n")
    long, short = generate.read_runs()
    row = {"agent": "A", "environment": "PongNoFrameskip-v4", "steps": "10000000", "mean": "20.4", "deviation": "0.2"}
    assert generate.comparable(long, [row]) == "A 20.4 ± 0.2"
    assert generate.comparable(short, [row]) == ""
    for other in ({"environment": "Pong-v5"}, {"steps": "end"}):
        assert generate.comparable(long, [row | other]) == ""


@pytest.mark.parametrize("missing", ["command", "commit", "hardware", "seed"])
def test_a_result_that_does_not_say_where_it_is_from_is_refused(tmp_path, monkeypatch, missing):
    header = HEADER.format(seed=1, env="CartPole-v1")
    without = "".join(line for line in header.splitlines(True) if not line.startswith(f"# {missing}:"))
    results_in(tmp_path, monkeypatch, cart__csv=without + "100,0.1,5\n")
    with pytest.raises(ValueError, match=rf"cart.csv names no {missing}"):
        generate.read_runs()
    if missing == "seed":  # a table of many runs has none
        return
    keys = {name: "x" for name in ("command", "commit", "hardware") if name != missing}
    results_in(tmp_path, monkeypatch, **{"throughput-x__json": json.dumps(keys)})
    with pytest.raises(ValueError, match=rf"throughput-x.json names no {missing}"):
        generate.read_throughput()
    lines = {
        "command": "`python benchmarks/x.py`",
        "commit": "commit 01234ab",
        "hardware": "Intel(R) Xeon(R) Processor, 4 cores",
    }
    results_in(tmp_path, monkeypatch, x__md="# X\n" + "\n".join(lines.values()))
    (report,) = generate.read_reports()
    assert (report.command, report.commits) == ("python benchmarks/x.py", ["01234ab"])
    assert generate.machine_of(report.hardware) == "Intel Xeon, 4 cores"
    results_in(tmp_path, monkeypatch, x__md="# X\n" + "\n".join(line for of, line in lines.items() if of != missing))
    with pytest.raises(ValueError, match=rf"x.md names no {missing}"):
        generate.read_reports()


def test_every_file_of_results_is_linked():
    page = generate.results_page()
    for path in sorted(generate.RESULTS.glob("*.md")):
        assert f"../benchmarks/results/{path.name}" in page
    for run in generate.read_runs():
        assert f"../benchmarks/results/{run.path.name}" in page and run.header["commit"][:7] in page


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.long
def test_the_site_builds_without_a_broken_link_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -r requirements-docs.txt")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    built = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
    assert pages <= built, pages - built
    home = (tmp_path / "site" / "index.html").read_text()
    assert "IMPALA that you can read" in home and (tmp_path / "site/benchmarks/results/pong-both.png").exists()
    diffs = [block for block in re.findall(r"<pre>.*?</pre>", home, re.DOTALL) if 'class="gi"' in block]
    assert len(diffs) == 3 and "```" not in home
    loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\"\s>]+)|<link[^>]* href=\"?([^\"\s>]+)", home)
    outside = [url for urls in loaded for url in urls if re.match(r"(https?:)?//", url)]
    assert loaded and not outside


def test_the_pages_of_the_site_are_those_of_docs():
    named = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) - {"index.md", "CHANGELOG.md"} == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_citation_names_this_version_and_the_readme_says_the_same():
    citation = dict(re.findall(r"^([\w-]+): \"?(.*?)\"?$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert citation["version"] == beast.__version__ and citation["license"] == "Apache-2.0"
    bibtex = re.search(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    for part in (citation["version"], citation["title"]):
        assert f"{{{part}}}" in bibtex


def dockerfile(instruction: str) -> str:
    return re.search(rf"^{instruction} (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]


def test_the_image_does_what_make_train_does():
    make = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = re.findall(r"bin/python (monobeast\.py .*)", make)
    assert " ".join(json.loads(dockerfile("ENTRYPOINT")) + json.loads(dockerfile("CMD"))) == f"python {command}"
    for name in re.findall(r"requirements\S*\.txt|constraints\.txt", dockerfile("COPY")):
        assert (ROOT / name).exists()


@pytest.fixture(scope="module")
def docker():
    """A function that runs docker with these arguments and returns what it prints."""
    if not shutil.which("docker"):
        pytest.skip("there is no docker")
    try:
        info = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("docker info does not answer")
    if info.returncode:
        pytest.skip(f"docker does not work here: {info.stderr.strip().splitlines()[-1:]}")

    def run(*arguments: str) -> str:
        command = ["docker", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.mark.long
def test_the_image_is_built_and_trains(docker):
    tag = "beast-test"
    docker("build", "--tag", tag, ".")
    try:
        flags = [*json.loads(dockerfile("CMD")), *"--total_steps 500 --group_width 4 --num_actors 1".split()]
        told = docker("run", "--init", "--rm", tag, *flags)
        assert "PongNoFrameskip-v4" in told and "stopped at step" in told
        torch = docker("run", "--rm", "--entrypoint", "python", tag, "-c", "import torch; print(torch.version.cuda)")
        assert torch.strip() == "None", "torch in the image is for CPUs"
    finally:
        docker("rmi", tag)


NOTEBOOK = ROOT / "notebooks" / "beast.ipynb"


def test_the_notebook_holds_no_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5 and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.long
def test_the_notebook_trains_plots_and_plays_in_a_checkout(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -r requirements-test.txt")
    nbformat = pytest.importorskip("nbformat")
    for package in ("ipykernel", "imageio_ffmpeg", "minatar", "matplotlib"):
        pytest.importorskip(package)
    files = ("monobeast.py", "monobeast_presets.py", "plot.py", "pyproject.toml")
    for name in files:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "beast", tmp_path / "beast", ignore=shutil.ignore_patterns("__pycache__"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    (settings,) = (cell for cell in notebook.cells if cell.get("id") == "settings")
    for name, value in (("ENV", '"MinAtar/Breakout-v1"'), ("MINUTES", "0.25"), ("EPISODES", "1")):
        settings.source, count = re.subn(rf"^{name} = \S+", f"{name} = {value}", settings.source, flags=re.MULTILINE)
        assert count == 1, name
    (train,) = (cell for cell in notebook.cells if cell.get("id") == "train")
    train.source += "\nassert os.path.exists('runs/notebook/checkpoint.pt')"
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    client = nbclient.NotebookClient(
        notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path / "notebooks")}}
    )
    client.execute()
    shown = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert "image/png" in shown and "text/html" in shown, shown
    told = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "stopped at step" in told and "Cloning" not in told
    assert (tmp_path / "runs" / "notebook" / "game.mp4").stat().st_size > 0
