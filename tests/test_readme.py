"""README.md and docs/ name nothing that does not run or does not exist."""

import contextlib
import dataclasses
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import monobeast
import plot
import polybeast_env
from beast.run.flags import ServerFlags

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import throughput  # noqa: E402
from programs import Program  # noqa: E402
from waiting import PATIENCE  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = {"results.md"}  # pages that say which commands were run, with the flags of their day
TEXT = "\n".join(page.read_text() for page in PAGES if page.name not in RECORDS)
# Arguments of other programs are not checked.
BEAST_COMMANDS = re.sub(r"(openssl|srun|#SBATCH|pip download).*\n", "", TEXT)
PAGE_COMMANDS = {
    page.name: [
        line.split("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.strip()
    ]
    for page in PAGES
    if page.name not in RECORDS
}
COMMANDS = [command for commands in PAGE_COMMANDS.values() for command in commands]
SCRIPTS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)  # blocks that are pasted into a shell, or a SLURM job
# Commands with a test of their own. Those of a page are run one after the other, and behind `make train` where they
# name its run.
SEARCH = ".venv/bin/python -m examples.search 20"
RUN_ALONE = {
    "make train": "test_make_train_trains_pong_stops_on_ctrl_c_and_resumes_and_the_commands_for_its_run_work",
    "make train-poly": "test_make_train_poly_trains_pong_stops_on_ctrl_c_and_resumes",
    "make libatari": "test_make_libatari_builds_the_emulator",
    "make test": "test_ci_runs_the_tests_that_the_readme_names",
    SEARCH: "test_the_search_of_the_docs_tries_flags_and_prints_the_best",
}
# The tests of the blocks of Python, by page.
PYTHON_TESTS = {
    "checkpoints.md": ("test_checkpoint.py", "test_the_code_of_the_page_on_checkpoints_runs"),
    "demonstrations.md": ("test_demonstrations.py", "test_the_code_of_the_page_on_demonstrations_runs"),
    "device.md": ("test_device.py", "test_the_wrappers_of_the_page_give_what_a_group_takes"),
    "environments.md": ("test_atari_env.py", "test_the_code_of_the_page_on_environments_runs"),
    "gpu.md": ("test_kernels.py", "test_the_code_of_the_page_on_gpus_plays"),
    "polybeast.md": ("test_compat.py", "test_the_documented_adapter_gives_four_values"),
    "recipes.md": ("test_update.py", "test_the_groups_of_parameters_in_the_recipes_decay_alike_through_a_resumption"),
    "runs.md": ("test_runs.py", "test_the_code_of_the_page_on_runs_trains"),
}
# What makes a command shorter; games on images make fewer steps a second.
SHORTER = {
    r"(?=.*(?:Doom|MinAtar|NoFrameskip))(.*--total_steps) \d{4,}": r"\1 800",
    r"--total_steps \d{4,}": "--total_steps 2500",
    "--past_every 10000": "--past_every 500",
    "--episodes 10": "--episodes 1",
}
# In the place of SLURM's programs: this host is the only node, and a task is a child of `srun`.
SCONTROL = "#!/bin/bash\necho localhost\n"
SRUN = """#!/bin/bash
trap 'kill $(jobs -p)' TERM
number=$SLURM_NTASKS
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && number=${1#*=}; shift; done
for task in $(seq 0 $((number - 1))); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait -n && wait
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git has, as a user's fresh clone."""
    path = tmp_path_factory.mktemp("clone")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, files):
        target = path / name.decode()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name.decode()).read_bytes())
    return path


def shorter(command: str) -> str:
    """The command with fewer steps and games."""
    for long, short in SHORTER.items():
        command = re.sub(long, short, command)
    return command


@contextlib.contextmanager
def started(checkout: Path, command: str):
    """A command of the pages, with this interpreter's virtual environment instead of a new one; ended in any case."""
    words = shlex.split(command.replace(".venv/bin/", f"{sys.prefix}/bin/"))
    if "\n" in command:  # a block that is pasted into a shell
        words = ["bash", "-e", "-c", command.replace("python ", f"{sys.executable} ")]
    elif words[0] == "make":  # -o: what is installed here is taken as complete
        words += [f"VENV={sys.prefix}", *(f"-o{sys.prefix}/.{stamp}" for stamp in ("train", "test", "libbeast"))]
    process = subprocess.Popen(
        words, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen, pattern: str) -> str:
    """What the process has printed until the pattern was in it."""
    output, deadline = "", time.monotonic() + PATIENCE
    while not re.search(pattern, output):
        assert time.monotonic() < deadline and process.poll() is None, output
        if select.select([process.stdout], [], [], 0.2)[0]:
            output += os.read(process.stdout.fileno(), 65536).decode()
    return output


def train_stop_and_resume(checkout: Path, command: str, name: str) -> None:
    assert command in COMMANDS
    for expected in (r"steps/s", r"resumed at step [1-9]"):
        with started(checkout, command) as process:
            output = read_until(process, r"[1-9][\d,]* steps +\d+ %")
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: make and the program both get it
            output += process.communicate(timeout=PATIENCE)[0].decode()
        assert re.search(expected, output) and "stopped at step" in output, output
        assert "Traceback" not in output
    assert (checkout / "runs" / name / "checkpoint.pt").exists()


def run(checkout: Path, commands: list[str]) -> None:
    """Run the commands without tests of their own, with fewer steps and games: none may fail."""
    for command in map(shorter, (command for command in commands if command not in RUN_ALONE)):
        python, script, *arguments = [*shlex.split(command), "", ""]
        if python == ".venv/bin/python" and script.endswith(".py"):
            words, output = [str(checkout / script), *filter(None, arguments)], checkout / "output"
            program = Program(words, cwd=checkout, env=dict(os.environ), output=output)
            assert program.wait(PATIENCE) == 0, program.text()
            continue
        with started(checkout, command) as process:
            if "tensorboard" in command:  # serves until it is stopped
                read_until(process, r"http://")
                continue
            output = process.communicate(timeout=PATIENCE)[0].decode()
        assert process.returncode == 0, output


# Pages with commands of their own, and those among them that name the run of `make train`.
TO_RUN = [name for name, commands in PAGE_COMMANDS.items() if set(commands) - RUN_ALONE.keys()]
OF_PONG = [name for name in TO_RUN if re.search(r"(runs/|--name )pong\b", " ".join(PAGE_COMMANDS[name]))]


@pytest.mark.long
def test_make_train_trains_pong_stops_on_ctrl_c_and_resumes_and_the_commands_for_its_run_work(checkout):
    train_stop_and_resume(checkout, "make train", "pong")
    # A plot needs finished games: the metrics of a committed run.
    metrics = ROOT / "benchmarks" / "results" / "cartpole-seed1.csv"
    shutil.copy(metrics, checkout / "runs" / "pong" / "metrics.csv")
    assert len(OF_PONG) >= 3
    for name in OF_PONG:
        run(checkout, PAGE_COMMANDS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TO_RUN if name not in OF_PONG])
def test_the_commands_of_a_page_work_one_after_the_other(checkout, name):
    run(checkout, PAGE_COMMANDS[name])


@pytest.mark.on_demand
def test_make_libatari_builds_the_emulator(checkout):  # minutes of C++, which `make test` has compiled already
    with started(checkout, "make libatari") as process:
        output = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0 and list(checkout.glob("libatari*.so")), output


@pytest.mark.long
def test_make_train_poly_trains_pong_stops_on_ctrl_c_and_resumes(checkout):
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
    shutil.copy(libbeast.__file__, checkout)
    train_stop_and_resume(checkout, "make train-poly", "pong-poly")


@pytest.fixture
def port(checkout) -> str:
    """A free port, for env servers and a learner with libbeast and certificates."""
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast")
    shutil.copy(libbeast.__file__, checkout)
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make a certificate with")
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return str(unused.getsockname()[1])


@pytest.mark.long
def test_two_hosts_by_hand_train_as_the_docs_say(checkout, port):
    # This machine is both hosts, so the files need no copying.
    blocks = [block for block in SCRIPTS if "hostA" in block]
    env_host, learner = (block.replace("hostA", "localhost").replace("4431", port) for block in blocks)
    with started(checkout, env_host) as server:
        read_until(server, rf"{port}")
        with started(checkout, learner) as process:
            read_until(process, r"[1-9][\d,]* steps +\d+ %")
            os.killpg(process.pid, signal.SIGINT)
            output = process.communicate(timeout=PATIENCE)[0].decode()
        assert process.returncode == -signal.SIGINT and "stopped at step" in output, output
        assert server.poll() is None  # it waits for the next learner


@pytest.mark.long
def test_the_slurm_job_trains_and_ends_with_a_checkpoint_when_slurm_says_so(checkout, port, tmp_path):
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (job,) = (block for block in SCRIPTS if "#SBATCH --nodes=2" in block)
    for old, new in (("PongNoFrameskip-v4", "CartPole-v1"), ('"pong"', "slurm"), ("4431", port)):
        assert old in job
        job = job.replace(old, new)
    (tmp_path / "job").write_text(job.replace("python ", f"{sys.executable} "))
    with started(
        checkout, f"env PATH={tmp_path}:{os.environ['PATH']} SLURM_NNODES=1 bash {tmp_path / 'job'}"
    ) as process:
        read_until(process, r"[1-9][\d,]* steps +\d+ %")
        os.kill(process.pid, signal.SIGTERM)  # as --signal=B:TERM@60 does: to the job's shell alone
        output = process.communicate(timeout=PATIENCE)[0].decode()
    assert "stopped at step" in output and "Traceback" not in output, output
    assert (checkout / "runs" / "slurm" / "checkpoint.pt").exists()
    assert not list(checkout.glob(".secrets-*"))


@pytest.mark.long
def test_the_slurm_job_with_ranks_starts_them_again_and_ends_with_a_checkpoint(checkout, tmp_path):
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (job,) = (block for block in SCRIPTS if "#SBATCH --nodes=4" in block)
    for old, new in (
        ("PongNoFrameskip-v4", "CartPole-v1"),
        ('"pong"', "slurm-ranks"),
        ("python ", f"{sys.executable} "),
    ):
        assert old in job
        job = job.replace(old, new)
    (tmp_path / "job").write_text(job.replace("sleep 10", "sleep 1"))
    given = f"SLURM_NNODES=1 SLURM_NTASKS=2 SLURM_JOB_ID={os.getpid()} SLURM_SUBMIT_DIR={checkout}"
    command = f"env PATH={tmp_path}:{os.environ['PATH']} {given} bash {tmp_path / 'job'}"

    def ranks(process) -> list[psutil.Process]:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if child.environ().get("RANK") and "--beast-actor" not in child.cmdline()]

    with started(checkout, command) as process:
        output = read_until(process, r"[1-9][\d,]* steps +\d+ %")
        first = [child for child in ranks(process) if "python" in child.name()]
        assert sorted(child.environ()["RANK"] for child in first) == ["0", "1"]
        next(child for child in first if child.environ()["RANK"] == "1").kill()
        output += read_until(process, r"resumed at step [1-9][\d,]*[^$]*[1-9][\d,]* steps +\d+ %")
        for child in ranks(process):  # as --signal=TERM@60 does: to the tasks, not to the job's shell
            with contextlib.suppress(psutil.Error):
                child.send_signal(signal.SIGTERM) if "python" in child.name() else None
        output += process.communicate(timeout=PATIENCE)[0].decode()
    assert process.returncode == 0, output
    stops = [line.partition("stopped at ")[2][:20] for line in output.splitlines() if "stopped at" in line]
    assert stops[-1] == stops[-2] and (checkout / "runs" / "slurm-ranks" / "checkpoint.pt").exists()


@pytest.mark.on_demand  # the job of several ranks above begins and stops in the same way
def test_the_slurm_job_of_one_node_resumes_where_slurm_stopped_it(checkout, tmp_path):
    (job,) = (block for block in SCRIPTS if "#SBATCH --nodes=1" in block)
    for old, new in (("PongNoFrameskip-v4", "CartPole-v1"), ('"pong"', "slurm-1"), ("python ", f"{sys.executable} ")):
        assert old in job
        job = job.replace(old, new)
    (tmp_path / "job").write_text(job)
    given = f"env SLURM_CPUS_PER_TASK=1 SLURM_SUBMIT_DIR={checkout}"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with started(checkout, f"{given} bash {tmp_path / 'job'}") as process:
            read_until(process, r"[1-9][\d,]* steps +\d+ %")
            os.kill(process.pid, number)
            time.sleep(0.02)
            os.killpg(process.pid, signal.SIGTERM)  # as SLURM does when the time is up: to all, and to the shell again
            output = process.communicate(timeout=PATIENCE)[0].decode()
        assert "stopped at step" in output and "Traceback" not in output, output
    assert (checkout / "runs" / "slurm-1" / "checkpoint.pt").exists()
    assert "resumed at step" in (checkout / "runs" / "slurm-1" / "out.log").read_text()


@pytest.mark.long
def test_the_search_of_the_docs_tries_flags_and_prints_the_best(checkout):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install -r requirements-test.txt")
    assert SEARCH in COMMANDS
    with started(checkout, SEARCH.replace(" 20", " 2")) as process:
        output = process.communicate(timeout=PATIENCE)[0].decode()
    assert process.returncode == 0 and output.count("stopped at step 30,") == 2, output
    assert re.search(r"best mean return \d+\.\d with {'learning_rate': [\d.]+, 'entropy_cost': [\d.]+}", output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_run_by_a_test_or_only_shows_something(page):
    for language, block in re.findall(r"^ *```(\S*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE):
        where = f"{page.name}: a block of {language} that begins with {block.splitlines()[0]!r}"
        assert language in ("sh", "bash", "python", "diff", "bibtex", ""), f"{where}: no test knows this language"
        looks_like_a_command = re.search(r"^ *(\$ |make |python|pip |git |\.venv/)", block, re.MULTILINE)
        assert language or not looks_like_a_command, f"{where}: mark it as sh, so that a test runs it"
        if language == "python":
            assert page.name in PYTHON_TESTS, f"{where}: PYTHON_TESTS names no test that runs it"
            file, test = PYTHON_TESTS[page.name]
            body = (ROOT / "tests" / file).read_text().partition(f"\ndef {test}(")[2].partition("\ndef ")[0]
            assert page.name in body and "```python" in body, f"{where}: {test} does not read the page"
        elif language == "bash":
            assert re.search("hostA|#SBATCH", block), f"{where}: none of the tests of scripts runs it"


def test_every_command_with_a_test_of_its_own_stands_in_a_page_and_has_that_test():
    assert not [command for command in RUN_ALONE if command not in COMMANDS]
    assert not [test for test in RUN_ALONE.values() if test not in globals()]
    assert not [long for long in SHORTER if not any(re.search(long, command) for command in COMMANDS)]


def test_ci_runs_the_tests_that_the_readme_names():
    assert "make test" in COMMANDS and "`make test-all`" in TEXT and "make test-all" in (ROOT / ".ci/run").read_text()
    recipe = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pytest" in recipe and "ruff" in recipe


def test_every_flag_that_the_pages_name_exists():
    programs = (monobeast.Flags, ServerFlags, plot.Flags, throughput.Options)
    known = {field.name for flags in programs for field in dataclasses.fields(flags)}
    known |= set(vars(polybeast_env.parse_flags([])))
    for path in (ROOT / "examples" / "ray").glob("*.py"):
        known |= set(re.findall(r'"--(\w+)"', path.read_text()))
    for diff in (ROOT / "examples" / "forks").glob("*.diff"):
        known |= set(re.findall(r"^\+    (\w+): ", diff.read_text(), re.MULTILINE))
    # Read as text: these need libbeast, and peers.
    for path in ("polybeast.py", "r2d2.py", "multibeast.py", "examples/seeds.py", "benchmarks/peers/compare.py"):
        known |= set(re.findall(r"^    (\w+): ", (ROOT / path).read_text(), re.MULTILINE))
    named = {name.removeprefix("no_") for name in re.findall(r"--([a-z_]+)", BEAST_COMMANDS)}
    named -= {"help", "preset", "logdir", "level", "output", "input"}  # TensorBoard's, an example's and patch's
    named -= {"standalone", "nproc", "nproc_per_node", "nnodes", "max", "rdzv"}  # torchrun's
    named -= {"working", "head"}  # Ray's
    assert len(named) > 20
    assert named <= known, named - known


@pytest.mark.parametrize("page", [*PAGES, ROOT / "AGENTS.md"], ids=lambda page: page.name)
def test_every_link_file_and_target_that_a_page_names_exists(page):
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    rooms = "beast|benchmarks|compat|csrc|docs|examples|notebooks|tests"
    files = [ROOT / name for name in re.findall(rf"`((?:{rooms})/[\w./-]*|[\w/]+\.(?:py|cc|md))`", text)]
    assert links + files and not [path for path in links + files if not path.exists()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][a-z-]+)", text)) <= targets


def test_every_message_in_troubleshooting_is_printed_by_the_code():
    sources = [ROOT / "Makefile", *ROOT.glob("*.py"), *(ROOT / "beast").rglob("*.py"), *(ROOT / "csrc").glob("*.cc")]
    code = "\n".join(path.read_text() for path in sources)
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    assert len(messages) > 10
    for message in messages:
        for part in re.split(r"…|\d+", message):
            assert part.strip() in code, message


def test_the_forks_of_the_readme_apply_and_train(tmp_path):
    source = (ROOT / "monobeast.py").read_text()
    diffs = re.findall(r"^ *```diff\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(diffs) == 4
    for diff in diffs:
        lines = textwrap.dedent(diff).splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[:1] != sign) + "\n" for sign in "+-")
        assert source.count(f"\n{old}") == 1, old  # whole lines: a diff of another depth would end a loop
        source = source.replace(f"\n{old}", f"\n{new}")
    (tmp_path / "fork.py").write_text(source)
    (tmp_path / "my_game.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class MyGame(CartPoleEnv):\n"
        "    def __init__(self, level, render_mode=None):\n"
        "        super().__init__(render_mode=render_mode)\n"
        "    def render(self):\n"
        "        import numpy\n"
        "        return numpy.full((80, 120, 3), 200, numpy.uint8)\n"
    )
    command = f"{sys.executable} fork.py --name fork --num_actors 1 --total_steps 2000 --no_tensorboard"
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and "stopped at step" in done.stderr, done.stderr
    assert "fork: MyGame" in done.stderr and "Pong" not in done.stderr and "not clipped" in done.stderr, done.stderr
    pytest.importorskip("imageio_ffmpeg")
    import imageio.v2 as imageio

    play = f"{sys.executable} fork.py --name fork --mode test --episodes 1 --video game.mp4"
    subprocess.run(play.split(), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    result = json.loads((tmp_path / "runs" / "fork" / "test.json").read_text())
    frames = imageio.mimread(tmp_path / "game.mp4", memtest=False)
    assert result["env"] == "MyGame" and len(frames) == result["lengths_in_steps"][0]
    assert abs(int(frames[0].mean()) - 200) < 5, "MyGame is filmed"
