"""Environments that have processes, ports, directories or modules of their own: how they are made and how they end."""

import contextlib
import errno
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import toy_envs
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from lock_step import small_flags
from waiting import wait_until

import monobeast
from beast import envs
from beast.envs import handover, numbers, reserve_numbers
from beast.envs.groups import EnvGroup
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.envs.spaces import EnvSpaces
from beast.errors import InputError, exit_with_message
from beast.feeds import actor, actors
from beast.feeds.actor import Actor
from beast.feeds.actors import ActorProcesses, LocalActors, name_of_maker
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import Child, end_all
from beast.hosts import env_server, served_group, wire
from beast.machine import family_of, kill_family
from beast.run.directory import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

SCRIPT = """
import os, socket, subprocess, sys, time
from dataclasses import dataclass
import gymnasium, numpy as np
from beast.envs import reserve_numbers
from beast.feeds.actor import run_if_actor

@dataclass
class Flags:
    num_actors: int = 1
    env_timeout: float = 60.0
    max_env_restarts: int = 1
    actor_niceness: int = 0
    pin_actors: bool = False

class Toy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    alive = 0

    def __init__(self, number=0):
        {make}

    def reset(self, *, seed=None, options=None):
        {reset}
        return np.full(1, os.getpid() % 1000, np.float32), {{}}

    def step(self, action):
        return np.full(1, os.getpid() % 1000, np.float32), 1.0, False, False, {{}}

    def close(self):
        {close}

def make_vector(flags, num_envs):
    return {vector}

def create_env(flags, num_envs):
    return make_vector(flags, num_envs)

run_if_actor(Flags, create_env)
raise RuntimeError("this file is read no further")
"""
SYNC = "gymnasium.vector.SyncVectorEnv([lambda n=n: Toy(n) for n in range(num_envs)])"
DETACHED = "self.game = subprocess.Popen(['sleep', '98765'], start_new_session=True)"


class Flags:
    """Of the script above."""

    def __init__(self, num_actors=1, env_timeout=60.0, **_):
        self.num_actors, self.env_timeout, self.max_env_restarts = num_actors, env_timeout, 1
        self.actor_niceness, self.pin_actors = 0, False


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts an actor with two groups of two environments; ends it."""
    monkeypatch.setattr(actors.dataclasses, "asdict", lambda flags: vars(flags))
    started = []

    def start(make="pass", reset="pass", close="pass", vector=SYNC, log=print, timeout=60.0):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(make=make, reset=reset, close=close, vector=vector))
        fields = rollout_fields(EnvSpaces({"obs": spaces.Box(-1e6, 1e6, (1,), np.float32)}, spaces.Discrete(2)))
        memory = RolloutMemory(fields, num_slots=2, unroll_length=3, group_width=2)
        memory.arrays["action"][...] = 0
        flags = Flags(env_timeout=timeout)
        started.append(ActorProcesses(str(script), flags, memory, 2, lambda group, life: group, log))
        return started[-1]

    yield start
    for pool in started:
        pool.close()
        kill_family(None, pool.processes[0].mark)  # what a broken one has left


def ready(pool, *groups):
    wanted = set(groups)
    deadline = time.monotonic() + 120
    while wanted:
        found, lost = pool.wait(0.1)
        wanted -= set(found)
        assert not lost and time.monotonic() < deadline


def games() -> list[int]:
    mine = []
    for process in psutil.process_iter():
        try:
            mine += [process.pid] if process.cmdline() == ["sleep", "98765"] else []
        except psutil.Error:
            pass
    return mine


# -------------------------------------------------------------------------------------- one process an environment


@pytest.mark.parametrize("context", ["spawn", "forkserver", "fork"])
def test_each_environment_may_have_a_process_and_a_port_of_its_own(start, context):
    """Two of them can be in one process as little as they can listen at one port. A process that multiprocessing
    starts reads the agent's file as far as an actor does."""
    vector = (
        f"gymnasium.vector.AsyncVectorEnv([lambda n=n: Toy(n) for n in reserve_numbers(num_envs)], context='{context}')"
    )
    make = "assert not Toy.alive and not sys.argv[1:]; Toy.alive = 1; "
    make += "self.port = socket.create_server(('127.0.0.1', 21000 + number))"
    pool = start(make=make, close="Toy.alive = 0; self.port.close()", vector=vector)
    ready(pool, 0, 1)
    for group in (0, 1):
        pool.go(group, group, 0)
    ready(pool, 0, 1)
    pids = {int(x) for group in (0, 1) for x in pool.memory.row(group, 0)["obs"]["obs"].flatten()}
    assert len(pids) == 4 and pool.processes[0].popen.pid % 1000 not in pids
    pool.close()


class Game(toy_envs.Counting):
    def __init__(self, port):
        super().__init__()
        self.port = port


def test_the_create_env_of_the_page_that_reserves_numbers_gives_each_environment_its_own():
    page = (Path(monobeast.__file__).parent / "docs" / "environments.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "reserve_numbers" in block)
    names = {"YourGame": Game, "partial": partial, "envs": envs, "gymnasium": gymnasium}
    exec(code, names)
    env = names["create_env"](None, 2)
    ports = env.get_attr("port")
    env.close()
    assert len(set(ports)) == 2 and min(ports) >= 15000


def test_numbers_differ_from_those_of_all_that_are_alive_and_come_back(monkeypatch, tmp_path):
    monkeypatch.setattr(numbers.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(numbers, "_file", -1)
    monkeypatch.setattr(numbers, "_taken", set())
    first = reserve_numbers(2)
    env = SyncVectorEnv([toy_envs.Counting] * 2)
    group = EnvGroup(env)
    assert list(first) == [0, 1] and list(reserve_numbers(1)) == [2], "another call, other numbers"
    code = f"""
        from beast.envs import numbers
        numbers.tempfile.gettempdir = lambda: {str(tmp_path)!r}
        print(*numbers.reserve_numbers(3), flush=True)
        input()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "3 4 5\n", "of another process"
        assert list(reserve_numbers(4)) == [8, 9, 10, 11]
    finally:
        other.kill()
        other.communicate()
    assert list(reserve_numbers(3)) == [3, 4, 5], "a process that was killed needs them no more"
    del env, group
    assert list(reserve_numbers(2)) == [0, 1], "nor does an environment that is gone"
    numbers._new.ranges = []  # of no other test's environment


# ----------------------------------------------------------------------------------------------------- their ends


def test_environments_have_time_to_close_and_the_wait_is_told(start, tmp_path):
    lines = []
    pool = start(
        close=f"time.sleep(0.6); open('{tmp_path}/closed' + str(id(self)), 'w').write('whole')", log=lines.append
    )
    ready(pool, 0, 1)
    pool.close()
    assert [path.read_text() for path in tmp_path.glob("closed*")] == ["whole"] * 4
    assert lines == ["waiting up to 10 s for the environments of actor 0 to close; Ctrl-C ends them now"]


def test_ctrl_c_does_not_wait_for_environments_to_close():
    children = [Child(f"actor {index}", 0) for index in range(2)]
    for child in children:
        child.start(["sleep", "1000"])

    def interrupt(line):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        end_all(children, interrupt, patience=100)
    assert time.monotonic() - began < 50 and not any(child.popen for child in children)


@pytest.mark.parametrize("how", ["end", "kill", "hang"])
def test_games_in_sessions_of_their_own_end_with_their_actor(start, how):
    before = set(games())
    pool = start(make=DETACHED, reset="time.sleep(1000)" if how == "hang" else "pass", timeout=1.0)
    ready(pool, 0, 1)
    wait_until(lambda: len(set(games()) - before) == 4)  # what has just been started has no command line for a moment
    if how == "end":
        pool.close()  # Toy.close ends none
    elif how == "kill":
        pool.processes[0].popen.kill()
        wait_until(lambda: pool.wait(0.1)[1])
    else:
        pool.go(0, 0, 0)
        wait_until(lambda: pool.wait(0.1)[1])
    assert not set(games()) - before


def test_games_in_sessions_of_their_own_end_with_a_learner_that_was_killed():
    before = set(games())
    code = """
        import subprocess, sys, time
        from beast.feeds.processes import Child
        child = Child("child", 0)
        child.start([sys.executable, "-c", sys.argv[1]], stdout=None)
        time.sleep(1000)
    """
    child = f"""
import subprocess, time
from beast.feeds.processes import end_with_parent
end_with_parent()
class Game: pass
self = Game()
{DETACHED}
subprocess.run(["sh", "-c", "setsid sleep 98765 >/dev/null 2>&1 </dev/null &"])  # its parent ends at once
print("ready", flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    wait_until(lambda: len(set(games()) - before) == 2)
    parent.kill()
    parent.wait()
    wait_until(lambda: not set(games()) - before)
    parent.stdout.close()


@pytest.mark.parametrize("error, status", [("", 0), ("raise InputError('no')", 1)])
def test_a_program_ends_with_all_that_the_environments_which_it_tried_have_left(error, status):
    before = set(games())
    code = f"""
        import multiprocessing, subprocess, threading, time
        from beast import machine
        from beast.errors import InputError, exit_with_message
        machine.CLOSING_SECONDS = 0.2
        with exit_with_message():
            subprocess.run(["sh", "-c", "setsid sleep 98765 >/dev/null 2>&1 </dev/null &"])
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
            threading.Thread(target=time.sleep, args=(1000,)).start()
            {error}
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == status and "threads of an environment still run" in ended.stderr
    assert not set(games()) - before


def test_an_env_server_waits_for_environments_that_close_and_not_for_a_step_that_hangs():
    lines, closed = [], []

    class Slow(toy_envs.Counting):
        def close(self):
            time.sleep(1.3)
            closed.append(self)

    def make_group():
        return served_group.VectorEnvGroup(SyncVectorEnv([Slow]))

    server = env_server.EnvServer(make_group, "127.0.0.1:0", max_streams=1, log=lines.append)
    stream = server._serve(iter(()), wire.LearnerHello(seed=1), "a learner", threading.Timer(1000, print))
    server._places.acquire()
    began = time.monotonic()
    server.stop()  # the stream's step hangs
    assert time.monotonic() - began < 5 and not closed
    next(stream)
    leaving = threading.Thread(target=lambda: (list(stream), server._places.release()))
    leaving.start()
    wait_until(lambda: server._closing)
    server.stop()
    assert len(closed) == 1 and any(line.startswith("waiting up to 9 s for environments to close") for line in lines)
    leaving.join()


def test_a_family_is_found_by_descent_and_by_its_mark():
    env = {**os.environ, "BEAST_FAMILY": "/mine-1"}
    direct = subprocess.Popen(["sh", "-c", "sleep 98765 & wait"], env={"PATH": os.environ["PATH"]})
    marked = subprocess.Popen(["sleep", "98765"], env=env, start_new_session=True)
    wait_until(lambda: family_of(None, "/mine-1") and family_of(direct.pid))
    assert family_of(None, "/mine-1") == [marked.pid] and family_of(None, "/mine-2") == []
    assert len(family_of(direct.pid)) == 1 and os.getpid() not in family_of(os.getppid())
    kill_family(direct.pid)
    kill_family(None, "/mine-1")
    assert marked.wait(60) == -signal.SIGKILL and direct.wait(60) is not None


def test_a_process_that_has_inherited_a_mark_does_not_end_others_that_have_it():
    env = {**os.environ, "BEAST_FAMILY": "/mine-3"}
    sibling = subprocess.Popen(["sleep", "98765"], env=env)
    script = "from beast.machine import begin_family, kill_family; {}; kill_family()"
    subprocess.run([sys.executable, "-c", script.format("pass")], env=env, check=True)
    assert sibling.poll() is None
    subprocess.run([sys.executable, "-c", script.format("begin_family('/mine-3')")], check=True)
    assert sibling.wait(60) == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------ signs of life


def test_each_environment_that_is_made_or_reset_is_a_sign_of_life(start, monkeypatch):
    """A second each, without the CPU; a group takes longer than the timeout."""
    monkeypatch.setattr(actors, "IMPORT_SECONDS", 0.0)
    pool = start(make="time.sleep(1.0)", reset="time.sleep(1.0)", timeout=1.9)
    monkeypatch.setattr(actors, "MIN_CPU_SHARE", 1000)
    pool.processes[0].alive_at += 5  # for imports
    ready(pool, 0, 1)
    pool.go(0, 0, 0)
    ready(pool, 0)


def test_a_sign_of_life_of_a_thread_or_a_forked_process_cuts_no_message(monkeypatch):
    """A socket may take a message in pieces. 400 KB of it do not fit into one."""
    ours, theirs = socket.socketpair()
    process, messages = actors.ActorProcess(0, 2, 0), []
    message = actor.READY.pack(1, 0.5, 0.5, 0.25, 400_000) + b"x" * 400_000
    send, stopping = actor._sender(theirs), threading.Event()
    monkeypatch.setattr(SyncVectorEnv, "__init__", SyncVectorEnv.__init__)  # is put back
    actor._tell_of_each_environment(send, pause=0.0)
    vector = SyncVectorEnv([toy_envs.Counting])

    def reset():
        while not stopping.is_set():
            vector.envs[0].reset()

    def read():
        while data := ours.recv(2**16):
            messages.extend(process.messages(data))

    threads = [threading.Thread(target=work, daemon=True) for work in (reset, read)]
    for thread in threads:
        thread.start()
    if not (child := os.fork()):
        signal.alarm(20)  # in case that it waits for a lock which a thread of its parent holds
        with contextlib.suppress(BaseException):
            for _ in range(1000):
                vector.envs[0].reset()
        os._exit(0)
    for _ in range(50):
        send(message)
    _, status = os.waitpid(child, 0)
    stopping.set()
    threads[0].join()
    theirs.close()
    threads[1].join()
    alive = [each for each in messages if each[0] == actor.ALIVE]
    rest = [each for each in messages if each[0] != actor.ALIVE]
    assert rest == [(1, 0.5, 0.5, 0.25, message[actor.READY.size :])] * 50 and not process.received
    assert alive and set(alive) == {(actor.ALIVE, 0.0, 0.0, 0.0, b"")} and status == 0


# ------------------------------------------------------------------------------------- directories and generators


class GoesElsewhere(toy_envs.Counting):
    directory = "/"

    def __init__(self):
        super().__init__()
        os.chdir(self.directory)


def elsewhere(flags, num_envs, **overrides):
    return SyncVectorEnv([GoesElsewhere] * num_envs)


def test_the_files_of_a_run_stay_where_the_command_was_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    env_spaces = probe_env(elsewhere, small_flags())
    assert os.getcwd() == str(tmp_path)
    run = Run("runs", "one", {"variant": "mono"})
    assert run.path == tmp_path / "runs" / "one"
    memory = RolloutMemory(rollout_fields(env_spaces), 2, 2, 2)
    local = LocalActors(elsewhere, small_flags(), memory, 2, lambda group, life: group)
    assert os.getcwd() == "/"
    run.record_start()
    local.close()
    assert os.getcwd() == str(tmp_path) and (tmp_path / "runs/one/config.json").exists()
    run.close()


def test_actors_seed_the_generators_of_python_and_numpy():
    memory = RolloutMemory(rollout_fields(probe_env(elsewhere, small_flags())), 2, 2, 2)
    drawn = []
    for seed in (5, 5, 6):
        Actor(lambda *_: SyncVectorEnv([toy_envs.Counting] * 2), small_flags(), memory, {0: seed, 1: 7}).close()
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1] and not {*drawn[0]} & {*drawn[2]}


# ------------------------------------------------------------------------------------------ from a script elsewhere


def run_script(tmp_path, text, module="", *paths):
    """What a script outside of the checkout prints, with a module beside it."""
    (tmp_path / "beside.py").write_text(module)
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[:1], os.getcwd()])}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def test_what_actors_cannot_import_is_refused_and_what_they_can_is_named(monkeypatch):
    script = monobeast.__file__
    assert name_of_maker(script, monobeast.create_env) == ""
    assert name_of_maker(script, elsewhere) == f"{__name__}:elsewhere"
    for given in (lambda flags, num_envs: None, partial(elsewhere)):
        with pytest.raises(InputError, match="create_env: .* is not that of .*monobeast.py.*Put it into a module"):
            name_of_maker(script, given)
    elsewhere.__module__, name = "__main__", elsewhere.__module__
    with pytest.raises(InputError, match="create_env: elsewhere is not that of"):
        name_of_maker(script, elsewhere)
    elsewhere.__module__ = name


def test_an_id_that_a_script_has_registered_is_handed_over_or_refused(monkeypatch):
    monkeypatch.setitem(os.environ, handover.SPEC, "")
    monkeypatch.chdir(".")  # where an environment goes elsewhere
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    gymnasium.register("Here-v0", GoesElsewhere, max_episode_steps=7)
    handover.hand_over("Here-v0", monobeast.__file__)
    monkeypatch.setattr(handover, "_handed", os.environ[handover.SPEC])  # as in a process that is started now
    spec = handover.handed_over("Here-v0")
    assert spec.entry_point == f"{__name__}:GoesElsewhere" and spec.max_episode_steps == 7
    assert handover.handed_over("Other-v0") is None
    gymnasium.register("Here-v0", toy_envs.Telling)
    made = envs.make("Here-v0", 1)
    assert isinstance(made.envs[0].unwrapped, GoesElsewhere), "and not what is registered here under a known id"
    made.close()
    gymnasium.register("Lambda-v0", lambda: None)
    gymnasium.register("Main-v0", "__main__:Env")
    gymnasium.register("Odd-v0", GoesElsewhere, kwargs={"what": object()})
    for name in ("Lambda-v0", "Main-v0", "Odd-v0"):
        with pytest.raises(InputError, match=f"--env {name}.*Put class and registration into a module"):
            handover.hand_over(name, monobeast.__file__)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", monobeast.__file__, raising=False)
    handover.hand_over("Main-v0", monobeast.__file__)  # the agent's file registers it in actors, too


def test_a_script_elsewhere_trains_with_its_module_its_id_and_its_create_env(tmp_path):
    """Each alone would do for a message; here they work together. Games of the toy have five steps and pay 7 each."""
    module = """
import gymnasium, numpy as np
class Five(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.count += 1
        return np.zeros(2, np.float32), 7.0, self.count == 5, False, {}
def create_env(flags, num_envs, **overrides):
    return gymnasium.vector.SyncVectorEnv([Five] * num_envs)
"""
    text = """
        import gymnasium, monobeast, beside
        gymnasium.register("Five-v0", beside.Five)
        small = dict(root="runs", group_width=2, batch_width=2, unroll_length=4, total_steps=200, tensorboard=False)
        print(monobeast.train(monobeast.Flags(env="Five-v0", name="id", **small)).mean_return)
        monobeast.create_env = beside.create_env
        print(monobeast.train(monobeast.Flags(name="function", **small)).mean_return)
        monobeast.create_env = lambda flags, num_envs: beside.create_env(flags, num_envs)
        try:
            monobeast.train(monobeast.Flags(name="refused", **small))
        except monobeast.InputError as error:
            print("refused:", error)
    """
    printed = run_script(tmp_path, text, module)
    assert printed.count("\n35.0\n") + printed.startswith("35.0\n") == 2, printed
    assert "refused: create_env: <lambda> is not that of" in printed


def test_a_create_env_that_env_servers_would_not_have_is_refused(monkeypatch, tmp_path):
    pytest.importorskip("libbeast")
    import polybeast

    monkeypatch.setattr(polybeast.polybeast_env, "create_env", elsewhere)
    flags = polybeast.Flags(env="CartPole-v1", root=str(tmp_path), group_width=2, batch_width=2)
    with pytest.raises(InputError, match="create_env given is not that of .*polybeast_env.py, which env servers run"):
        polybeast.train(flags)


# ------------------------------------------------------------------------------------------------- open files


def test_too_few_open_files_are_told_in_a_line(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 24))
    with pytest.raises(SystemExit, match="error: 24 open files .*ulimit -n 1024"), exit_with_message():
        raise OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(FileNotFoundError), exit_with_message():
        raise FileNotFoundError(errno.ENOENT, "none")


def test_threads_reserve_numbers_of_their_own():
    found = []
    threads = [threading.Thread(target=lambda: found.extend(reserve_numbers(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 12
