"""DeepMind Lab's levels: `dmlab:<level>`."""

import contextlib
import hashlib
import importlib
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.envs.reference_scores import DMLAB, reference_of
from beast.errors import InputError, MissingPackage, raised
from beast.files import in_cache

# Turn left and right, look down and up (pixels a frame), strafe, move, fire, jump, crouch.
ACTIONS = {
    "impala": (  # Espeholt et al. 2018
        (0, 0, 0, 1, 0, 0, 0), (0, 0, 0, -1, 0, 0, 0), (0, 0, -1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0),
        (-20, 0, 0, 0, 0, 0, 0), (20, 0, 0, 0, 0, 0, 0), (-20, 0, 0, 1, 0, 0, 0), (20, 0, 0, 1, 0, 0, 0),
        (0, 0, 0, 0, 1, 0, 0),
    ),
    "wide": (  # Hessel et al. 2019, which Sample Factory takes
        (0, 0, 0, 1, 0, 0, 0), (0, 0, 0, -1, 0, 0, 0), (0, 0, -1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0),
        (-10, 0, 0, 0, 0, 0, 0), (10, 0, 0, 0, 0, 0, 0), (-60, 0, 0, 0, 0, 0, 0), (60, 0, 0, 0, 0, 0, 0),
        (0, 10, 0, 0, 0, 0, 0), (0, -10, 0, 0, 0, 0, 0), (-10, 0, 0, 1, 0, 0, 0), (10, 0, 0, 1, 0, 0, 0),
        (-60, 0, 0, 1, 0, 0, 0), (60, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 1, 0, 0),
    ),
}  # fmt: skip
SCREEN, TEXT = "RGB_INTERLEAVED", "INSTR"  # names of observations
FRAMES_PER_STEP = 4
WORDS, VOCABULARY = 16, 1000  # of an instruction; numbers of words, of which 0 is none
HELD_OUT = {"allowHoldOutLevels": "true", "mixerSeed": str(0x600D5EED)}  # as DMLab-30's published evaluations have it


class Dmlab(gymnasium.Env):
    """A level. It observes its screen, uint8 [height, width, 3], or a Dict of that as `screen` and the numbers of the
    words of an `instruction`, [16]. The end of an episode terminates: the level does not say why it came."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(
        self, level: str, frame_skip: int | None = None, width: int = 96, height: int = 72,
        actions: Literal["impala", "wide"] = "impala", instruction: bool | None = None, held_out: bool = False,
        cache: str | None = None, cache_gb: float = 10.0, renderer: str = "software", dataset: str = "",
        config: Mapping[str, Any] | None = None, render_mode: str | None = None,
    ):  # fmt: skip
        """`instruction`: None shows it where the level's name begins with language_. `held_out` is for the parts of
        DMLab-30's levels that are kept for tests. `cache` is a directory for levels that were generated, by default
        ~/.cache/beast/dmlab, in which at most `cache_gb` are kept; with 0 there is none. `dataset` is the path of
        psychlab's images. `config` are more of the level's options. Raises InputError for choices that there are not,
        MissingPackage without DeepMind Lab."""
        if actions not in ACTIONS:
            raise InputError(f"{DMLAB}{level}: actions is {actions!r}: it is {' or '.join(map(repr, ACTIONS))}")
        lab = deepmind_lab(f"{DMLAB}{level}")
        self._frame_skip = frame_skip or FRAMES_PER_STEP
        self.metadata = {**self.metadata, "frames_per_step": self._frame_skip, "render_fps": 60 / self._frame_skip}
        self.render_mode = render_mode
        self._actions = np.array(ACTIONS[actions], np.intc)
        self.action_space = spaces.Discrete(len(self._actions))
        screen = spaces.Box(0, 255, (height, width, 3), np.uint8)
        name = level.rpartition("/")[2]
        self._has_text = name.startswith("language_") if instruction is None else instruction
        self.observation_space: spaces.Space = screen
        if self._has_text:
            words = spaces.MultiDiscrete([VOCABULARY] * WORDS)
            self.observation_space = spaces.Dict({"screen": screen, "instruction": words})
        options = {"width": width, "height": height, **({"datasetPath": dataset} if dataset else {})}
        options |= {**(HELD_OUT if held_out else {}), **(config or {})}
        is_of_dmlab30 = reference_of(f"{DMLAB}{name}") is not None and "/" not in level
        self._lab = lab.Lab(
            f"contributed/dmlab30/{level}" if is_of_dmlab30 else level,
            [SCREEN, *([TEXT] if self._has_text else [])],
            config={key: str(value) for key, value in options.items()},
            renderer=renderer,
            level_cache=LevelCache(cache or str(in_cache("dmlab")), int(cache_gb * 1e9)) if cache_gb else None,
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._lab.reset(seed=int(self.np_random.integers(2**31)))
        return self._observe(), {}

    def step(self, action):
        reward = self._lab.step(self._actions[int(action)], num_steps=self._frame_skip)
        is_over = not self._lab.is_running()
        return self._shown if is_over else self._observe(), float(reward), is_over, False, {}

    def render(self):
        return self._screen

    def close(self) -> None:
        self._lab.close()

    def _observe(self):
        found = self._lab.observations()
        self._screen = self._shown = found[SCREEN]
        if self._has_text:
            self._shown = {"screen": self._screen, "instruction": numbers_of(found[TEXT])}
        return self._shown


def numbers_of(instruction: str | bytes) -> np.ndarray:
    """The numbers of its first words, int64 [WORDS]: a hash of each, and 0 beyond."""
    text = instruction.decode() if isinstance(instruction, bytes) else instruction
    numbers = np.zeros(WORDS, np.int64)
    for index, word in enumerate(text.split()[:WORDS]):
        numbers[index] = 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)
    return numbers


def deepmind_lab(env_id: str):
    """The package. Raises MissingPackage, which names `env_id`, without it."""
    try:
        return importlib.import_module("deepmind_lab")
    except ImportError as error:
        message = f"{env_id} needs DeepMind Lab ({raised(error)}), which PyPI does not have: build it (docs/dmlab.md)"
        raise MissingPackage(message) from error


class LevelCache:
    """Levels that DeepMind Lab has generated, in a directory that all processes share.

    A file is there whole or not at all. When more than `limit` bytes are there, those go that were unused for longest:
    this is looked at once in so many writes that they have a thousandth of the limit, as each look lists all files.
    What cannot be kept, because the disk is full, say, is generated again. Keys are DeepMind Lab's, which follow from
    a map and not from a seed.
    """

    def __init__(self, directory: str, limit: int):
        self._directory, self._limit = Path(directory), limit
        self._written: float = math.inf  # bytes since the last look

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Write the level of this key to the path; False if it is not there. DeepMind Lab calls it."""
        try:
            path = self._path(key)
            shutil.copyfile(path, pk3_path)
            os.utime(path)  # it was used now
            return True
        except OSError:
            return False

    def write(self, key: str, pk3_path: str) -> None:
        """Keep a level. DeepMind Lab calls it."""
        path, temporary = self._path(key), ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file, temporary = tempfile.mkstemp(suffix=".part", dir=self._directory)
            os.close(file)
            shutil.copyfile(pk3_path, temporary)
            os.replace(temporary, path)
            self._written += path.stat().st_size
            if self._written > self._limit / 1000:
                self._written = 0
                self._forget(keep=path)
        except OSError:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _path(self, key: str) -> Path:
        return self._directory / hashlib.sha256(key.encode()).hexdigest()

    def _forget(self, keep: Path) -> None:
        """Remove what was not used for longest, until the rest is within the limit."""
        found = []
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):  # another process has removed it
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                break
            if path != str(keep):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
