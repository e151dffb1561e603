"""A game of VizDoom in a process of its own: started, stepped, ended when it hangs, restarted, and never left over."""

import concurrent.futures
import contextlib
import functools
import glob
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from beast.envs.doom_arena import arena
from beast.errors import MissingFile, MissingPackage, raised
from beast.files import in_cache, replace_file
from beast.machine import FAMILY

SCREEN = (72, 128, 3)  # what agents see of 160 x 120 pixels
STEP_SECONDS = 10.0  # a game that answers later hangs
STARTS = 3  # tries to start a game
SCENARIOS = "BEAST_DOOM_SCENARIOS"
ARENA = "arena.wad"
STARTERS = concurrent.futures.ThreadPoolExecutor(8, "doom-start")  # the games of a match start together
OWNER = "BEAST_DOOM_OWNER"  # environment variable of a game: whose it is
# A shell that waits until this process has ended, in whatever way. Then it ends its games, and removes their folder
# unless others use it, and files of instances in shared memory that no process names now and two seconds later.
# The pattern is one that this text does not match.
WATCHDOG = """exec 3<&0
(cat
for process in $(grep -lsa "$0" /proc/[0-9]*/environ); do
  process=${process%/environ}
  grep -qsa 'viz_[i]nstance_id' "$process/cmdline" && kill -9 "${process#/proc/}"
done
files=$(ls /dev/shm/ViZDoom*)
sleep 2
for process in /proc/[0-9]*; do
  [ "$process/cwd" -ef . ] && grep -qsa 'viz_[i]nstance_id' "$process/cmdline" && is_used=1
done
[ "$is_used" ] || rmdir _vizdoom
for file in $files; do
  id=$(printf %s "$file" | tail -c 10)
  echo "$id" | grep -qsaFf - /proc/[0-9]*/cmdline || rm -f "$file"
done) <&3 >/dev/null 2>&1 &
"""


class GameCrashed(Exception):
    """The game's process has ended or hangs."""


class Seen(NamedTuple):
    """What a game shows after a step."""

    screen: np.ndarray  # uint8 [120, 160, 3], a copy
    variables: dict[str, float]


def vizdoom() -> Any:
    """The package. Raises MissingPackage without it."""
    try:
        import vizdoom
    except ImportError as error:
        raise MissingPackage(f"Doom/… needs VizDoom ({raised(error)}): pip install vizdoom") from error
    return vizdoom


def scenario_file(name: str, folder: str = "") -> Path:
    """The path of a scenario's file: in `folder`, in $BEAST_DOOM_SCENARIOS, or in the package; our own arena's is
    in the user's cache, and written where it is not there. Raises MissingFile."""
    if name == ARENA:
        path = in_cache(name)
        if not path.exists() or path.read_bytes() != arena():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(arena()))
        return path
    given = [Path(each) for each in (folder, os.environ.get(SCENARIOS, "")) if each]
    for directory in (*given, Path(vizdoom().scenarios_path)):
        if (directory / name).is_file():
            return directory / name
    raise MissingFile(
        f"{name} is not in VizDoom's package{''.join(f', nor in {each}' for each in given)}: `pip download --no-deps "
        f"sample-factory==2.1.1`, unzip it, and name its sf_examples/vizdoom/doom/scenarios by {SCENARIOS} or "
        """--env_kwargs '{"scenarios": "…"}'"""
    )


class Game:
    """One process of DOOM. `start` begins it in the background; other calls wait for that.

    Calls raise GameCrashed when the process has ended, or has not answered within STEP_SECONDS and was killed.
    """

    def __init__(
        self, wad: str, config: str = "", *, buttons: Iterable[str], variables: Iterable[str], folder: str = "",
        skill: int | None = None, arguments: str = "", rewards: tuple[float, float] | None = None, hud: bool = False,
        crosshair: bool = False,
    ):  # fmt: skip
        """`wad` and `config` are names of files; `rewards` are the living reward of a tic and the death penalty."""
        self._vizdoom = vizdoom()
        path = scenario_file(wad, folder)
        game = self._game = self._vizdoom.DoomGame()
        if config:
            game.load_config(str(scenario_file(config, folder)))
        game.set_doom_scenario_path(str(path))
        game.set_doom_config_path(os.devnull)  # else it takes settings from a file here
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(self._vizdoom.Mode.PLAYER)
        game.set_screen_resolution(self._vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(self._vizdoom.ScreenFormat.RGB24)
        game.set_render_hud(hud)
        game.set_render_crosshair(crosshair)
        game.set_episode_timeout(0)  # a game that has ended has no last frame: whoever steps it has a clock
        self._buttons, self._variables = list(buttons), list(variables)
        game.set_available_buttons([getattr(self._vizdoom.Button, name) for name in self._buttons])
        game.set_available_game_variables([getattr(self._vizdoom.GameVariable, name) for name in self._variables])
        if skill is not None:
            game.set_doom_skill(skill)
        if rewards:
            game.set_living_reward(rewards[0])
            game.set_death_penalty(rewards[1])
        self._arguments = arguments
        if arguments:
            game.add_game_args(arguments)
        self._pid, self._due = 0, 0.0
        self._start: concurrent.futures.Future | None = None
        self._last = Seen(np.zeros((120, 160, 3), np.uint8), dict.fromkeys(self._variables, 0.0))

    def start(self) -> None:
        self._start = STARTERS.submit(self._init)

    def begin(self, seed: int, commands: Iterable[str] = ()) -> None:
        """Begin an episode, and send `commands` of DOOM's console."""
        self._wait_for_start()
        with self._answering(STEP_SECONDS):
            self._game.set_seed(seed)
            self._game.new_episode()
            for command in commands:
                self._game.send_game_command(command)

    def act(self, buttons: list[float], tics: int = 1, render: bool = True) -> float:
        """Hold `buttons` for `tics` tics; the scenario's reward of these."""
        with self._answering(STEP_SECONDS):
            self._game.set_action(buttons)
            self._game.advance_action(tics, render)
            return float(self._game.get_last_reward())

    def is_over(self) -> bool:
        """Whether the episode has ended: by death or by the scenario."""
        with self._answering(STEP_SECONDS):
            return bool(self._game.is_episode_finished())

    def seen(self) -> Seen:
        """What the game shows now; the last frame again after the end of an episode, which has none.

        Call it in one thread at a time, whatever the games: VizDoom builds the state's arrays without Python's GIL, and
        two threads that do so crash this process. Other calls of different games may be made in several threads."""
        with self._answering(STEP_SECONDS):
            state = self._game.get_state()
        if state is not None:
            self._last = Seen(state.screen_buffer, dict(zip(self._variables, state.game_variables.tolist())))
        return self._last

    def restart(self) -> None:
        """End the process, if there is one, and start another one in the background."""
        self.close()
        self.start()

    def close(self) -> None:
        if self._start is not None:
            with contextlib.suppress(GameCrashed):
                self._wait_for_start()
        self._start = None
        if self._pid:
            kill(self._pid, self._id)  # a hung game would not end by itself
            with contextlib.suppress(Exception):
                self._game.close()
            remove_files(self._id)
        self._pid = 0

    def _init(self) -> None:
        with _lock:  # or each thread would start a watchdog
            _watchdog()
        # It makes this folder for the user's files. Of two games that find none at once, one ends with an error, and
        # VizDoom crashes this process.
        os.makedirs("_vizdoom", exist_ok=True)
        for left in reversed(range(STARTS)):
            try:
                with self._answering(60.0), _without_stderr() if self._arguments else contextlib.nullcontext():
                    self._game.init()
                break
            except GameCrashed:
                if not left:
                    raise
        self._id = self._game.get_instance_id()
        self._pid = process_of(self._id)

    def _wait_for_start(self) -> None:
        if self._start is None:
            raise GameCrashed("it was not started")
        self._start.result()

    @contextlib.contextmanager
    def _answering(self, seconds: float):
        """Within it the game's process answers, or is killed after so many seconds."""
        self._due = time.monotonic() + seconds
        _waiting.add(self)
        try:
            yield
        except Exception as error:
            if type(error).__module__.startswith("vizdoom"):
                raise GameCrashed(raised(error)) from error
            raise
        finally:
            _waiting.discard(self)

    def end_if_late(self) -> None:
        """Kill the process if it should have answered by now: the call that waits for it raises then."""
        if time.monotonic() > self._due and self._pid:
            kill(self._pid, self._id)


@contextlib.contextmanager
def _without_stderr():
    """Nothing that is printed to stderr within it is seen: games that wait for each other would print a page."""
    global _stderr, _starting
    with _lock:
        if not _starting:
            _stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1
            if not _starting:
                os.dup2(_stderr, 2)
                os.close(_stderr)


_stderr, _starting = -1, 0
_waiting: set[Game] = set()  # for their processes to answer
_lock = threading.Lock()


def process_of(instance: str) -> int:
    """The process of a game by VizDoom's name for it. Raises GameCrashed if it has ended."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if instance.encode() in Path(path).read_bytes():
                return int(path.split("/")[2])
    raise GameCrashed("it has ended at its start")


def kill(pid: int, instance: str) -> None:
    """End a game's process, unless it has ended and another one has its number."""
    with contextlib.suppress(OSError):
        if instance.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def remove_files(instance: str) -> None:
    for path in glob.glob(f"/dev/shm/ViZDoom*{instance}"):
        with contextlib.suppress(OSError):
            os.remove(path)


@functools.cache
def _watchdog() -> IO[bytes]:
    """Starts what cares for this process's games: a thread that ends those that hang, and a shell that outlives it."""

    def watch() -> None:
        while True:
            time.sleep(1)
            for game in list(_waiting):
                game.end_if_late()

    threading.Thread(target=watch, name="doom-deadlines", daemon=True).start()
    owner = f"{OWNER}={secrets.token_hex(8)}"
    os.environ[OWNER] = owner.partition("=")[2]
    # Not of this process's family, which is killed with it.
    environment = {name: value for name, value in os.environ.items() if name not in (FAMILY, OWNER)}
    command = ["sh", "-c", WATCHDOG, owner]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    shell.wait()  # its other half goes on in the background
    assert shell.stdin
    return shell.stdin  # which the end of this process closes
