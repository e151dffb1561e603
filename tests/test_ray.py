"""examples/ray: ranks and env servers on a Ray cluster, a search on one, and the job for Kubernetes.

Tests of a cluster run on demand, and need Ray: `pip install -r requirements-ray.txt`. All others do without it.
"""

import contextlib
import csv
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parent.parent
RAY = ROOT / "examples" / "ray"


@pytest.fixture
def launch(monkeypatch):
    """examples/ray/launch.py as a module, without a cluster."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "ray", mock.MagicMock())
    spec = importlib.util.spec_from_file_location("launch", RAY / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ray.exceptions.RayError = TimeoutError
    return module


LEARNER = ["polybeast.py", "--root", "/runs", "--name", "run"]


def test_options_are_followed_by_the_commands_of_ranks_and_env_servers(launch):
    options = launch.parse(["--ranks", "2", "--gpus", "0.5", "--", *LEARNER])
    assert (options.ranks, options.gpus, options.learner, options.server) == (2, 0.5, LEARNER, [])
    options = launch.parse(["--servers", "3:9", "--", *LEARNER, "--", "polybeast_env.py", "--env", "X"])
    assert options.servers == (3, 9) and options.server == ["polybeast_env.py", "--env", "X"]
    assert launch.parse(["--servers", "4", "--", *LEARNER]).servers == (4, 4)


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ranks", "2"], "give the learner's command after --"),
        (["--", *LEARNER, "--"], "after another -- that of env servers"),
        (["--", "polybeast.py", "--root", "runs", "--name", "run"], "--root with a whole path that all nodes see"),
        (["--", "polybeast.py", "--root", "/runs"], "the learner needs --name"),
        (["--servers", "many", "--", *LEARNER], "--servers many: give a number, or two as in 32:256"),
        (["--servers", "9:3", "--", *LEARNER, "--", "polybeast_env.py"], "--servers 9:3"),
        (["--ranks", "4", "--servers", "3", "--", *LEARNER, "--", "x.py"], "for 4 ranks: each needs one at least"),
    ],
)
def test_what_cannot_be_launched_is_refused(launch, capsys, words, told):
    with pytest.raises(SystemExit):
        launch.parse(words)
    assert told in capsys.readouterr().err


def test_env_servers_become_more_while_the_learner_waits_and_fewer_while_they_wait(launch):
    def rows(*waits):
        return [{"stats/learner_wait": str(learner), "stats/actor_wait": str(actors)} for learner, actors in waits]

    starving, full, well = (0.2, 0.0), (0.0, 0.9), (0.01, 0.2)
    for waits, number in (
        ([], 20),
        ([starving] * 4, 20),  # the first two rows after a change tell nothing
        ([starving] * 5, 22),
        ([full] * 5, 18),
        ([well] * 9, 20),
        ([starving] * 8 + [well], 20),
        ([full] * 8 + [well], 20),
    ):
        assert launch.wanted(20, rows(*waits), 1, 1, 99) == number, waits
    assert launch.wanted(20, rows(*[starving] * 5), 4, 4, 99) == 24, "equally many for each rank"
    assert launch.wanted(20, rows(*[starving] * 5), 1, 1, 21) == 21
    assert launch.wanted(20, rows(*[full] * 5), 1, 19, 99) == 19


def test_each_rank_has_as_many_env_servers_and_one_that_ends_is_replaced(launch, monkeypatch):
    options = launch.parse(["--ranks", "2", "--servers", "4:8", "--", *LEARNER, "--", "env.py"])
    ended = []
    launch.ray.remote.return_value.options.return_value.remote.side_effect = lambda: mock.MagicMock()
    launch.ray.wait = lambda codes, timeout: ([code for code in codes if code in ended], [])
    launch.ray.get.return_value = 1
    servers, ranks = launch.Servers(options), mock.MagicMock(addresses=["a:1", "b:2"], files={"--token_file": "x"})

    def served() -> list[str]:
        return sorted(address for _, address in servers._running.values())

    servers.watch(ranks)
    assert served() == ["a:1", "a:1", "b:2", "b:2"]
    actor, address = next(iter(servers._running.values()))
    (call,) = actor.run.remote.call_args_list
    assert call.args == (["env.py", "--learner", address], {}, {"--token_file": "x"})
    ended.append(next(iter(servers._running)))
    servers.watch(ranks)
    assert served() == ["a:1", "a:1", "b:2", "b:2"] and ended[0] not in servers._running
    for number in (6, 4):
        monkeypatch.setattr(launch, "wanted", lambda *arguments: number)
        servers.watch(ranks)
        assert served() == ["a:1"] * (number // 2) + ["b:2"] * (number // 2)
    servers.stop()
    assert not served() and launch.ray.kill.call_count == 1 + 2 + 4


def test_ranks_whose_node_is_lost_while_they_start_have_failed(launch, monkeypatch, tmp_path):
    options = launch.parse(["--", "monobeast.py", "--root", str(tmp_path), "--name", "run"])
    launch.ray.wait.return_value = [None], []
    launch.ray.get.side_effect = TimeoutError("the actor died")
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    assert launch.train(options) == 1
    assert launch.ray.get.call_count == launch.FAILED_STARTS


class Group:
    """Ranks whose starts end with these codes, each after a new checkpoint or none."""

    def __init__(self, starts: list[tuple[int, bool]], checkpoint: Path):
        self.starts, self.checkpoint, self.num_started = starts, checkpoint, 0

    def start(self) -> None:
        self.num_started += 1

    def are_running(self) -> bool:
        if self.starts[self.num_started - 1][1]:
            self.checkpoint.touch()
            os.utime(self.checkpoint, (self.num_started,) * 2)
        return False

    def stop(self) -> int:
        return self.starts[self.num_started - 1][0]


@pytest.mark.parametrize(
    "starts, code",
    [
        ([(0, False)], 0),
        ([(1, True), (9, True), (0, True)], 0),
        ([(2, False)] * 6, 2),
        ([(1, False)] * 5 + [(1, True)] + [(3, False)] * 6, 3),
    ],
    ids=["ends", "progress", "no progress", "progress once"],
)
def test_ranks_start_again_until_they_end_well_or_fail_again_and_again(launch, monkeypatch, tmp_path, starts, code):
    options = launch.parse(["--", "monobeast.py", "--root", str(tmp_path), "--name", "run"])
    (tmp_path / "run").mkdir()
    group, pauses = Group(starts, tmp_path / "run" / "checkpoint.pt"), []
    monkeypatch.setattr(launch, "Ranks", lambda options: group)
    monkeypatch.setattr(launch.time, "sleep", pauses.append)
    assert launch.train(options) == code
    assert group.num_started == len(starts) and all(1 <= pause <= 60 for pause in pauses)


def processes(script: str) -> list[int]:
    """The processes that run a script of Python."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if path.read_text().split("\0")[1:2] == [script] else []
    return found


SCRIPT = """
import pathlib, signal, sys, time
flag, path = sys.argv[1:3]
print(flag, pathlib.Path(path).read_text(), oct(pathlib.Path(path).stat().st_mode)[-3:], flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(7)))
time.sleep(600)
"""
RUN = """
import sys, unittest.mock
sys.modules["ray"] = unittest.mock.MagicMock()
sys.path.insert(0, sys.argv[1])
import launch
launch.Process().run([sys.argv[2]], {}, {"--token_file": "sesame"})
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv (Linux: util-linux)")
def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(SCRIPT)
    with open(output, "w") as file:
        words = [sys.executable, "-c", RUN, str(RAY), str(script)]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
    wait_until(lambda: "sesame" in output.read_text(), output.read_text)
    assert output.read_text() == "--token_file sesame 600\n"
    process.kill()
    process.wait()
    wait_until(lambda: "told to end" in output.read_text() and not processes(str(script)), output.read_text)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def closed(schema):
    """The schema, with no fields but those that it names. Kubernetes drops others, and ignores these keys."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items() if not key.startswith("x-")}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def rayjob_schema(yaml) -> dict:
    path = os.environ.get("RAYJOB_CRD")
    schema = yaml.safe_load(Path(path or ROOT / "tests" / "rayjob_schema.yaml").read_text())
    if path:
        (version,) = (version for version in schema["spec"]["versions"] if version["name"] == "v1")
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {}
    return closed(schema)


@pytest.fixture
def job():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -r requirements-test.txt")
    return yaml.safe_load((RAY / "rayjob.yaml").read_text())


def test_the_job_for_kubernetes_fits_the_schema_of_its_kind(job):
    jsonschema = pytest.importorskip("jsonschema", reason="it is not installed: pip install -r requirements-test.txt")
    validator = jsonschema.Draft202012Validator(rayjob_schema(pytest.importorskip("yaml")))
    assert not [f"{error.json_path}: {error.message}" for error in validator.iter_errors(job)]
    cluster = job["spec"]["rayClusterSpec"]
    group = cluster["workerGroupSpecs"][0]
    for holder, name, value in (
        (job["spec"], "entryPoint", "python"),
        (cluster, "enableInTreeAutoscaling", "yes"),
        (group, "maxReplicas", "2"),
        (group["rayStartParams"], "num-cpus", 4),
        (group["template"]["spec"]["containers"][0]["resources"]["limits"], "memory", "16 GB"),
    ):
        with mock.patch.dict(holder, {name: value}):
            assert not validator.is_valid(job), name
    del group["template"]
    assert not validator.is_valid(job)


def test_the_pods_for_kubernetes_fit_its_own_schema(job):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install -r requirements-test.txt")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        kubernetes.validate(template, "1.37", strict=True)
        (container,) = pod["containers"]
        for holder, name, value in (
            (pod, "terminationGraceSeconds", 60),
            (container, "image", 2.60),
            (container["resources"], "limits", ["cpu"]),
            (container, "env", [{"value": "no name"}]),
        ):
            with mock.patch.dict(holder, {name: value}), pytest.raises(kubernetes.ValidationError):
                kubernetes.validate(template, "1.37", strict=True)


def test_the_job_for_kubernetes_has_room_for_what_it_launches(job, launch):
    python, script, *words = shlex.split(job["spec"]["entrypoint"])
    options = launch.parse(words)
    programs = [script, options.learner[0], options.server[0]]
    assert python == "python" and all((ROOT / name.removeprefix("/beast/")).exists() for name in programs)
    cluster = job["spec"]["rayClusterSpec"]
    head, ranks, servers = cluster["headGroupSpec"], *cluster["workerGroupSpecs"]
    assert ranks["replicas"] == ranks["minReplicas"] == options.ranks
    assert int(ranks["rayStartParams"]["num-cpus"]) == options.cpus
    per_node = int(servers["rayStartParams"]["num-cpus"])
    assert [servers[name] * per_node for name in ("replicas", "maxReplicas")] == list(options.servers)
    assert options.servers[1] / options.ranks <= 32, "a rank takes 64 streams, two of each"
    (container,) = head["template"]["spec"]["containers"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "60"} in container["env"] and launch.END_SECONDS < 60
    for group in (head, ranks):  # the launcher reads metrics, rank 0 writes them
        (container,) = group["template"]["spec"]["containers"]
        root = options.learner[options.learner.index("--root") + 1]
        assert root in [mount["mountPath"] for mount in container["volumeMounts"]]
    requirement = (ROOT / "requirements-ray.txt").read_text()
    assert f"=={cluster['rayVersion']}\n" in requirement and container["image"].endswith(cluster["rayVersion"])


# --- on a cluster ----------------------------------------------------------------------------------------------------


def alone(function: str, place: Path) -> str:
    """What a function of this file prints, run in namespaces of its own: Ray's ports are open to anyone who reaches
    them, and no process outlives the test."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
    namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")
    command = f"ip link set lo up && exec {shlex.join([sys.executable, __file__, function, str(place)])}"
    with open(place / "output", "w") as output:
        done = subprocess.run([*namespaces, "sh", "-c", command], stdout=output, stderr=output, timeout=3 * PATIENCE)
    text = (place / "output").read_text()
    assert done.returncode == 0, text
    return text


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator:
    """A head without room and nodes with 2 CPUs each."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_JOB_STOP_WAIT_TIME_S": "60", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    try:
        found.nodes = [found.add_node(num_cpus=2) for _ in range(num_nodes)]
        yield found
    finally:
        found.shutdown()


def submit_kill_remove_and_stop(place: Path) -> None:
    """The life of a job: two ranks with an env server each."""
    from ray.job_submission import JobSubmissionClient

    with cluster(2) as nodes:
        jobs = JobSubmissionClient(f"http://{nodes.head_node.webui_url}")
        learner = [str(ROOT / "polybeast.py"), "--root", str(place), "--name", "run", "--device", "cpu"]
        learner += ["--no_tensorboard", "--log_steps", "500", "--batch_width", "4", "--checkpoint_minutes", "0.05"]
        server = [str(ROOT / "polybeast_env.py"), "--env", "CartPole-v1", "--group_width", "4"]
        words = [sys.executable, str(RAY / "launch.py"), "--ranks", "2", "--cpus", "0.5", "--server_cpus", "0.5"]
        entrypoint = shlex.join([*words, "--servers", "2", "--", *learner, "--", *server])
        job = jobs.submit_job(entrypoint=entrypoint)
        metrics, log = place / "run" / "metrics.csv", place / "run" / "out.log"

        def last_step() -> int:
            with contextlib.suppress(OSError, IndexError), open(metrics) as file:
                return int(list(csv.DictReader(file))[-1]["step"])
            return 0

        def trains(after: int) -> bool:
            assert not jobs.get_job_status(job).is_terminal(), jobs.get_job_logs(job)
            return (place / "run" / "checkpoint.pt").exists() and last_step() > after

        def resumes() -> None:
            starts = log.read_text().count("resumed at step")
            yield
            wait_until(lambda: log.read_text().count("resumed at step") > starts, lambda: jobs.get_job_logs(job))
            begin = last_step()
            wait_until(lambda: trains(begin), lambda: jobs.get_job_logs(job))

        resumed = contextlib.contextmanager(resumes)
        wait_until(lambda: trains(0), lambda: jobs.get_job_logs(job))
        assert len(processes(learner[0])) == len(processes(server[0])) == 2
        os.kill(processes(server[0])[0], signal.SIGKILL)
        wait_until(lambda: "an env server has ended with -9" in jobs.get_job_logs(job))
        wait_until(lambda: len(processes(server[0])) == 2, lambda: jobs.get_job_logs(job))
        with resumed():
            os.kill(processes(learner[0])[-1], signal.SIGKILL)
        with resumed():
            nodes.remove_node(nodes.nodes[1], allow_graceful=False)
            time.sleep(5)
            nodes.add_node(num_cpus=2)
        before = last_step()
        jobs.stop_job(job)
        wait_until(lambda: jobs.get_job_status(job).is_terminal(), lambda: jobs.get_job_logs(job))
        print(jobs.get_job_logs(job))
        assert jobs.get_job_status(job) == "STOPPED" and not processes(learner[0])
        wait_until(lambda: not processes(server[0]))
        import torch

        saved = torch.load(place / "run" / "checkpoint.pt", weights_only=True)["counts"]["steps"]
        assert saved >= before and f"stopped at step {saved:,}" in log.read_text()


@pytest.mark.on_demand
def test_a_job_goes_on_when_a_rank_or_a_node_is_lost_and_ends_with_a_checkpoint(tmp_path):
    told = alone("submit_kill_remove_and_stop", tmp_path)
    assert "launch: ended with 0" in told
    stops = [line.partition("stopped at step ")[2].split(":")[0] for line in told.splitlines() if "stopped at" in line]
    assert stops[-1] == stops[-2], "both ranks end after the same update"


def search(place: Path) -> None:
    with cluster(1) as nodes:
        words = [sys.executable, str(RAY / "tune.py"), "--settings", "2", "--seeds", "2", "--cpus", "0.5"]
        learner = [str(ROOT / "monobeast.py"), "--env", "CartPole-v1", "--num_actors", "1", "--group_width", "8"]
        learner += ["--device", "cpu", "--log_steps", "500", "--total_steps", "5000"]
        words += ["--grace_steps", "1000", "--root", str(place), "--", *learner]
        subprocess.run(words, env={**os.environ, "RAY_ADDRESS": nodes.address}, check=True)
        wait_until(lambda: not processes(learner[0]))


@pytest.mark.on_demand
def test_a_search_trains_all_seeds_of_each_setting_and_prints_the_best_first(tmp_path):
    pytest.importorskip("pandas", reason="Ray's search is not installed: pip install -r requirements-ray.txt")
    lines = [line for line in alone("search", tmp_path).splitlines() if line.startswith("setting")]
    assert len(lines) == 2 and "after 100% of the steps" in lines[0] and "'learning_rate': " in lines[0]
    runs = sorted(path.parent.name for path in tmp_path.glob("*/metrics.csv"))
    assert runs == ["setting0-seed1", "setting0-seed2", "setting1-seed1", "setting1-seed2"]
    best = lines[0].partition(":")[0]
    assert all((tmp_path / f"{best}-seed{seed}" / "checkpoint.pt").exists() for seed in (1, 2))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
