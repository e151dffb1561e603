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
from typing import Any, NamedTuple

import numpy as np

from beast.errors import MissingFile, MissingPackage, raised
from beast.machine import FAMILY

SCREEN = (72, 128, 3)  # what agents see of 160 x 120 pixels
STEP_SECONDS = 10.0  # a game that answers later hangs
START_SECONDS = 60.0  # until a game runs, and has found those that it plays with
STARTS = 3  # tries to start a game, which STARTER makes
STARTER = Path(__file__).with_name("doom_start.sh")
PROGRAM = "BEAST_DOOM_GAME"  # environment variable for STARTER: VizDoom's program
SCENARIOS = "BEAST_DOOM_SCENARIOS"
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
    os.environ[PROGRAM] = str(Path(vizdoom.__file__).with_name("vizdoom"))
    return vizdoom


def scenario_file(name: str, folder: str = "") -> Path:
    """The path of a scenario's file: in `folder`, in $BEAST_DOOM_SCENARIOS, or in the package. Raises MissingFile."""
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
        self._vizdoom, self._wad = vizdoom(), str(scenario_file(wad, folder))
        self._config = str(scenario_file(config, folder)) if config else ""
        self._buttons, self._variables = list(buttons), list(variables)
        self._skill, self._rewards, self._arguments = skill, rewards, arguments
        self._hud, self._crosshair = hud, crosshair
        self._pid, self._due = 0, 0.0
        self._start: concurrent.futures.Future | None = None
        self._last = Seen(np.zeros((120, 160, 3), np.uint8), dict.fromkeys(self._variables, 0.0))

    def start(self) -> None:
        self._game, self._start = self._new_game(), concurrent.futures.Future()
        # A thread that nobody waits for at the end of this process: VizDoom never tells it that no game comes.
        threading.Thread(target=self._init, args=(self._game, self._start), name="doom-start", daemon=True).start()

    def _new_game(self) -> Any:
        game = self._vizdoom.DoomGame()
        if self._config:
            game.load_config(self._config)
        game.set_vizdoom_path(str(STARTER))
        game.set_doom_scenario_path(self._wad)
        game.set_doom_config_path(os.devnull)  # else it takes settings from a file here
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(self._vizdoom.Mode.PLAYER)
        game.set_screen_resolution(self._vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(self._vizdoom.ScreenFormat.RGB24)
        game.set_render_hud(self._hud)
        game.set_render_crosshair(self._crosshair)
        game.set_episode_timeout(0)  # a game that has ended has no last frame: whoever steps it has a clock
        game.set_available_buttons([getattr(self._vizdoom.Button, name) for name in self._buttons])
        game.set_available_game_variables([getattr(self._vizdoom.GameVariable, name) for name in self._variables])
        if self._skill is not None:
            game.set_doom_skill(self._skill)
        if self._rewards:
            game.set_living_reward(self._rewards[0])
            game.set_death_penalty(self._rewards[1])
        if self._arguments:
            game.add_game_args(self._arguments)
        return game

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

    def _init(self, game: Any, start: concurrent.futures.Future) -> None:
        """Start this game, and answer the `start`."""
        try:
            with _lock:  # or each thread would start a watchdog
                _watchdog()
            # It makes this folder for the user's files. Of two games that find none at once, one ends with an error.
            os.makedirs("_vizdoom", exist_ok=True)
            self._due = time.monotonic() + START_SECONDS
            game.init()
            pid = process_of(game.get_instance_id())
            with _lock:
                if start is self._start:
                    self._id, self._pid = game.get_instance_id(), pid
                else:  # nobody waits for it any more
                    kill(pid, game.get_instance_id())
            start.set_result(None)
        except Exception as error:
            start.set_exception(GameCrashed(raised(error)))

    def _wait_for_start(self) -> None:
        """Raises GameCrashed where the game does not start in as many tries, each of which is given START_SECONDS."""
        if self._start is None:
            raise GameCrashed("it was not started")
        _waiting.add(self)
        deadline = time.monotonic() + STARTS * START_SECONDS + 5
        while not self._start.done():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._start.exception(timeout=0.2)
            instance = self._game.get_instance_id()
            if time.monotonic() > deadline or (instance and os.path.exists(f"/dev/shm/ViZDoomGaveUp{instance}")):
                _waiting.discard(self)
                raise GameCrashed(f"it has ended {STARTS} times at its start, or hangs")
        _waiting.discard(self)
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
        """Kill the process if it should have answered by now: the call that waits for it raises then, and a start is
        tried again."""
        if time.monotonic() <= self._due:
            return
        if self._pid:
            kill(self._pid, self._id)
        elif instance := self._game.get_instance_id():
            self._due = time.monotonic() + START_SECONDS
            with contextlib.suppress(GameCrashed):
                kill(process_of(instance), instance)


_waiting: set[Game] = set()  # for their processes to answer
_lock = threading.Lock()


def process_of(instance: str) -> int:
    """The process of a game, not that of its starter, by VizDoom's name for it. Raises GameCrashed if it has ended."""
    program = os.environ[PROGRAM].encode() + b"\0"
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = Path(path).read_bytes()
            if words.startswith(program) and instance.encode() in words:
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
def _watchdog() -> int:
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
    # The end of this process closes it, not that of its interpreter: a start that nobody waits for would crash then.
    return os.dup(shell.stdin.fileno())
