"""Actor processes: how they start, how long they may be silent, and how they end."""

import contextlib
import dataclasses
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from lock_step import small_flags, spaces_of
from waiting import wait_until

import monobeast
from beast.envs.rows import rollout_fields
from beast.envs.spaces import EnvSpaces
from beast.errors import WorkerFailure
from beast.feeds import actors, processes
from beast.feeds.actor import GO, READY
from beast.feeds.actors import ActorProcesses
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import Child, cpu_seconds_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads CPU times from /proc")
SCRIPT = """
import time
from dataclasses import dataclass
import gymnasium, numpy as np
from beast.feeds.actor import run_if_actor

@dataclass
class Flags:
    num_actors: int
    env_timeout: float
    max_env_restarts: int
    actor_niceness: int
    pin_actors: bool

def compute(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass

class Toy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        {make}

    def reset(self, *, seed=None, options=None):
        {reset}
        return np.zeros(1, np.float32), {{}}

    def step(self, action):
        {step}
        return np.zeros(1, np.float32), 1.0, False, False, {{}}

def create_env(flags, num_envs):
    return gymnasium.vector.SyncVectorEnv([Toy] * num_envs)

run_if_actor(Flags, create_env)
"""


@dataclasses.dataclass
class Flags:
    num_actors: int
    env_timeout: float
    max_env_restarts: int
    actor_niceness: int = 0
    pin_actors: bool = False


@pytest.fixture
def start(tmp_path):
    """Starts actors, each with two groups of two environments, whose methods run the given code."""
    started = []

    def start(
        num_actors=1, timeout=60.0, max_restarts=0, log=print, make="pass", reset="pass", step="pass", niceness=0
    ):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(make=make, reset=reset, step=step))
        space = spaces.Box(0, 1, (1,), np.float32)
        fields = rollout_fields(EnvSpaces({"obs": space}, spaces.Discrete(2)))
        memory = RolloutMemory(fields, num_slots=2 * num_actors, unroll_length=3, group_width=2)
        memory.arrays["action"][...] = 0
        started.append(
            ActorProcesses(
                str(script),
                Flags(num_actors, timeout, max_restarts, niceness),
                memory,
                2 * num_actors,
                lambda group, life: 10 * life + group,
                log,
            )
        )
        return started[-1]

    yield start
    for pool in started:
        pool.close()


def wait_for(pool: ActorProcesses, count: int) -> tuple[list[int], list[int]]:
    """Groups that are ready and groups that were lost, once there are `count` of them."""
    all_ready, all_lost, deadline = [], [], time.monotonic() + 60
    while len(all_ready) + len(all_lost) < count:
        assert time.monotonic() < deadline, (all_ready, all_lost)
        ready, lost = pool.wait(0.1)
        all_ready += ready
        all_lost += lost
    return all_ready, all_lost


def test_the_groups_of_an_actor_are_ready_together_and_their_rows_one_by_one(start):
    pool = start(make="time.sleep(0.2)")
    assert wait_for(pool, 1) == ([0, 1], [])
    for group in (1, 0):
        pool.go(group, group, 0)
        assert wait_for(pool, 1) == ([group], [])
        assert pool.memory.row(group, 0)["done"].all()


@linux_only
def test_actors_that_compute_while_they_make_and_reset_environments_are_not_given_up(start, monkeypatch):
    """Each group takes 1.25 seconds of CPU time to make, and to reset; the timeout is 1 second."""
    monkeypatch.setattr(actors, "IMPORT_SECONDS", 1.0)
    monkeypatch.setattr(actors, "MAX_SILENT_TIMEOUTS", 1000)
    pool = start(timeout=1.0, make="compute(0.625)", reset="compute(0.625)")
    wait_for(pool, 2)
    for group in range(2):
        pool.go(group, group, 0)
    ready, lost = wait_for(pool, 2)
    assert (sorted(ready), lost, pool.total_restarts) == ([0, 1], [], 0)


@pytest.mark.parametrize(
    "where, how", [*((where, "time.sleep(1000)") for where in ("make", "reset", "step")), ("reset", "compute(1000)")]
)
def test_an_actor_that_hangs_is_given_up_wherever_it_does(start, monkeypatch, where, how):
    monkeypatch.setattr(actors, "IMPORT_SECONDS", 10.0 if where != "make" else 2.0)
    monkeypatch.setattr(actors, "MAX_SILENT_TIMEOUTS", 3)
    pool = start(timeout=0.5, **{where: how})
    with pytest.raises(WorkerFailure, match=r"actor 0 did not answer for (0.5|1.5) s \(--env_timeout\)"):
        wait_for(pool, 2)
        pool.go(1, 1, 0)
        wait_for(pool, 1)
        pool.go(1, 1, 1)
        wait_for(pool, 1)
    assert [process.popen for process in pool.processes] == [None]


def test_an_actor_that_answers_is_alive_however_long_a_message_waits_for_its_turn(start, monkeypatch):
    """Each row of two environments takes half of the timeout, and four messages wait."""
    monkeypatch.setattr(actors, "IMPORT_SECONDS", 1.0)
    pool = start(timeout=2.0, step="time.sleep(0.5)")
    wait_for(pool, 2)
    for group in range(2):
        pool.go(group, group, 0)
    wait_for(pool, 2)
    for row in (1, 2, 3):
        pool.go(0, 0, row)
    pool.go(1, 1, 1)
    assert wait_for(pool, 4) == ([0, 0, 0, 1], [])


def test_log_lines_tell_how_many_environments_are_made_and_reset(start, monkeypatch):
    monkeypatch.setattr(actors, "PROGRESS_SECONDS", 0.2)
    lines = []
    pool = start(timeout=1.0, log=lines.append, make="compute(0.3)", reset="compute(0.3)")
    wait_for(pool, 2)
    for group in range(2):
        pool.go(group, group, 0)
    wait_for(pool, 2)
    count = len(lines)
    for _ in range(5):
        pool.wait(0.1)
    assert len(lines) == count, "nothing more once all are reset"
    assert "making environments: 0 of 4" in lines and "making environments: 2 of 4" in lines
    assert "resetting environments: 0 of 4" in lines and "resetting environments: 2 of 4" in lines


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_an_actor_that_is_started_again_by_a_nicer_thread_is_as_nice_as_before(start):
    pool = start(max_restarts=1, log=lambda line: None, niceness=3)
    wait_for(pool, 2)
    (process,) = pool.processes
    first = process.popen.pid, os.getpriority(os.PRIO_PROCESS, process.popen.pid)
    process.popen.kill()

    def start_again():
        os.nice(2)
        wait_for(pool, 4)  # two groups are lost, and ready again

    thread = threading.Thread(target=start_again)
    thread.start()
    thread.join()
    second = process.popen.pid, os.getpriority(os.PRIO_PROCESS, process.popen.pid)
    assert second[0] != first[0] and second[1] == first[1], (first, second)


def test_the_failure_of_an_actor_holds_its_traceback(start):
    pool = start(reset='raise RuntimeError("no such level")')
    wait_for(pool, 2)
    pool.go(0, 0, 0)
    with pytest.raises(WorkerFailure, match="(?s)Traceback.*no such level.*restarted 0 times"):
        wait_for(pool, 1)


def test_an_actor_whose_second_group_cannot_be_made_is_not_restarted(start):
    pool = start(max_restarts=5, make="Toy.made = getattr(Toy, 'made', 0) + 1; assert Toy.made < 4, 'too many'")
    with pytest.raises(WorkerFailure, match="(?s)too many.*Its environments never worked, so it is not restarted"):
        wait_for(pool, 1)


def test_every_life_of_a_group_has_a_seed_of_its_own(start):
    pool = start(max_restarts=1, log=lambda line: None, reset="print(seed, flush=True, file=__import__('sys').stderr)")
    seeds = []
    for life in range(2):
        wait_for(pool, 2)
        for group in range(2):
            pool.go(group, group, 0)
        wait_for(pool, 2)
        errors = pool.processes[0].errors
        errors.seek(0)
        seeds.append(sorted(int(seed) for seed in errors.read().split()))
        os.kill(pool.processes[0].popen.pid, signal.SIGKILL)
        if life == 0:
            assert wait_for(pool, 2) == ([], [0, 1])
    assert seeds == [[0, 1, 1, 2], [10, 11, 11, 12]]


@linux_only
def test_an_actor_that_ends_while_a_process_of_its_environment_holds_its_socket_is_missed_at_once(start):
    fork = "import multiprocessing; multiprocessing.get_context('fork').Process(target=time.sleep, args=(9,)).start()"
    logged = []
    pool = start(timeout=60.0, make=fork, max_restarts=1, log=logged.append)
    wait_for(pool, 2)
    os.kill(pool.processes[0].popen.pid, signal.SIGKILL)
    began = time.monotonic()
    assert wait_for(pool, 2) == ([], [0, 1])
    assert time.monotonic() - began < 30 and "was killed by signal 9 (SIGKILL)" in logged[-1]
    assert pool.total_restarts == 1


def test_waking_never_blocks_however_long_nobody_waits(start):
    actors = start()
    waker = threading.Thread(target=lambda: [actors.wake() for _ in range(10_000)], daemon=True)
    waker.start()
    waker.join(timeout=60)
    assert not waker.is_alive()


def test_actors_that_were_started_end_when_a_later_one_cannot_be_started(start, monkeypatch):
    pids = []

    def second_fails(process, *arguments, original=Child.start, **options):
        if pids:
            raise OSError("no more processes")
        original(process, *arguments, **options)
        pids.append(process.popen.pid)

    monkeypatch.setattr(Child, "start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        start(num_actors=2)
    assert not os.path.exists(f"/proc/{pids[0]}") or not sys.platform.startswith("linux")


def test_the_numbers_of_a_message_are_as_large_as_their_limits_say():
    limit = 2**16  # of --num_slots; --unroll_length is less, as a slot has a row more
    assert GO.unpack(GO.pack(limit - 1, limit - 1, limit - 1)) == (65535, 65535, 65535)
    for numbers in ((limit, 0, 0), (0, limit, 0), (0, 0, limit)):
        with pytest.raises(struct.error):
            GO.pack(*numbers)
    with pytest.raises(struct.error):
        READY.pack(limit, 0.0, 0.0, 0)


# -------------------------------------------------------------------------------------------- child processes

PARENT = """
import sys, time
from beast.feeds.processes import Child
child = Child("child", 0)
child.start([sys.executable, "-c", sys.argv[1]])
print(child.popen.pid, flush=True)
time.sleep(1000)
"""
CHILD = "print('ready', flush=True); import time; time.sleep(9)"


@linux_only
def test_ctrl_c_reaches_the_parent_alone():
    """A terminal sends SIGINT to a whole process group."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "ready\n"
        assert os.getpgid(child) == os.getsid(child) == child
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait(30) != 0
        time.sleep(0.2)
        os.kill(child, 0)  # it is there
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@linux_only
def test_what_a_child_started_is_killed_with_its_group_and_cpu_time_is_that_of_the_process():
    code = textwrap.dedent("""
        import subprocess, time
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        while time.process_time() < 0.5:
            pass
        print("done", flush=True)
        time.sleep(1000)
    """)
    child = Child("child", 0)
    child.start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    popen = child.popen
    grandchild = int(popen.stdout.readline())
    assert popen.stdout.readline() == "done\n"
    assert 0.4 <= cpu_seconds_of(popen.pid) < 2
    popen.kill()
    popen.wait()
    popen.stdout.close()
    assert cpu_seconds_of(popen.pid) == 0
    assert "was killed by signal 9 (SIGKILL)" in child.end(0)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{grandchild}") and "Z" not in open(f"/proc/{grandchild}/stat").read().split()[2]:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)
    child.start(["sh", "-c", "kill -40 $$"])
    assert "was killed by signal 40 (no name)" in child.end(60)  # a real-time signal
    child.start([sys.executable, "-c", ""])
    assert "exited with code 0" in child.end(60)  # nobody is left in its group, and that is no error


@linux_only
@pytest.mark.parametrize("hang", ["import time; time.sleep(1000)", "import ctypes; ctypes.PyDLL(None).sleep(1000)"])
def test_a_child_that_hangs_ends_with_a_parent_that_was_killed_and_so_does_what_it_started(hang):
    """The second one keeps the GIL for as long. What that started is left."""
    code = f"""
import subprocess
from beast.feeds.processes import end_with_parent
end_with_parent()
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
{hang}
"""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True)
    child, grandchild = (psutil.Process(int(parent.stdout.readline())) for _ in range(2))
    parent.kill()
    parent.wait()
    gone = [child] if "PyDLL" in hang else [child, grandchild]
    wait_until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in gone))
    parent.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        grandchild.kill()


def test_deaths_are_forgiven_after_ten_minutes_of_work(monkeypatch):
    child = Child("actor 0", 1)
    child.started_at = time.monotonic()
    assert "Restarting it (1 of" in child.count_restart("it ended")
    with pytest.raises(WorkerFailure, match="It was restarted 1 times"):
        child.count_restart("it ended")
    child.started_at -= 601
    assert "Restarting it (1 of" in child.count_restart("it ended")


def test_what_a_child_prints_fills_no_disk_and_its_last_words_are_told(monkeypatch):
    monkeypatch.setattr(processes, "MAX_PRINTED", 100_000)
    child = Child("actor 0", 0)
    child.start([sys.executable, "-c", "import os; os.write(2, 200_000 * b'.')"])
    child.popen.wait(60)
    assert os.fstat(child.errors.fileno()).st_size == 200_000
    child.bound_output()
    assert os.fstat(child.errors.fileno()).st_size == 0
    os.write(child.errors.fileno(), b"the end")  # where the child would write
    assert child.end(1).endswith("what it printed last:\nthe end")


def test_what_the_user_can_mend_ends_an_actor_with_one_line(start):
    pool = start(make="from beast.errors import InputError; raise InputError('this toy is odd')")
    with pytest.raises(WorkerFailure, match="error: this toy is odd") as failure:
        wait_for(pool, 1)
    assert "Traceback" not in str(failure.value)


def test_actors_do_not_import_torch_and_stay_small(tmp_path):
    flags = small_flags(env="PongNoFrameskip-v4", group_width=2, batch_width=2, max_env_restarts=0)
    memory = RolloutMemory(rollout_fields(spaces_of(flags)), 2, 4, 2)
    pool = ActorProcesses(monobeast.__file__, flags, memory, 2, lambda group, life: group, print)
    try:
        ready: list[int] = []
        while len(ready) < 2:
            ready += pool.wait(1.0)[0]
        pool.go(0, 0, 0)
        while not pool.wait(1.0)[0]:
            pass
        (pid,) = (process.popen.pid for process in pool.processes)
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        _, resident, shared = (int(pages) for pages in Path(f"/proc/{pid}/statm").read_text().split()[:3])
        assert (resident - shared) * os.sysconf("SC_PAGE_SIZE") < 200e6
    finally:
        pool.close()


def test_shared_memory_of_an_atari_environment_is_at_most_1300_kilobytes_with_the_defaults():
    flags = monobeast.validate(monobeast.Flags())
    memory = RolloutMemory(rollout_fields(spaces_of(flags)), flags.num_slots, flags.unroll_length, flags.group_width)
    num_envs = flags.num_actors * monobeast.GROUPS_PER_ACTOR * flags.group_width
    assert flags.unroll_length == 20
    assert memory.num_bytes / num_envs <= 1.3e6
