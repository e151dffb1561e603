"""Atari games by the thousand on a GPU, each on a console of its own: csrc/atari/batch.h says how.

They play what `beast.envs.emulator.AtariVectorEnv` plays, to the bit, but for the starts of some episodes, which
docs/gpu.md names. On a CPU the same kernels run in the calling thread, console by console, for tests.
"""

import ctypes
import functools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from beast.envs.ale import read_rom
from beast.envs.emulator import ERRORS, AtariVectorEnv, checked_seeds, known_games, libatari
from beast.errors import InputError, OutOfMemory, first_line
from beast.gpu import kernels

# Games of which some RAM survives a reset. Their episodes begin with a state of the table, from which the CPU's differ.
INEXACT_STARTS = frozenset(
    "crossbow elevator_action hangman haunted_house ice_hockey kung_fu_master pooyan sir_lancelot space_war surround "
    "time_pilot yars_revenge".split()
)
WARP = 32  # lanes
WARPS_PER_MULTIPROCESSOR = 4
OBSERVE_THREADS = 256  # of a block
ALIGNMENT = 256  # bytes, of a ROM: the emulator looks at its addresses
MOST_ENVS = 2**17


class AtariTensorEnv(VectorEnv):
    """One game on `num_envs` consoles of a GPU, as an environment of tensors (docs/device.md).

    Observations are uint8 [num_envs, stack_num, img_height, img_width], actions int64, rewards float32. Infos have
    `lives`, `frame_number` and `episode_frame_number`, int32 [num_envs]; under SAME_STEP `final_obs` and `_final_obs`.
    All tensors are valid until the next call. `reset` and `check` make the host wait for the GPU, `step` does not.

    Images are gray, of NTSC consoles. An episode begins with a state from a table, which a CPU has made of all that a
    reset can lead to. What a console's resets draw repeats after 1,023 of them.
    """

    def __init__(
        self, game: str, num_envs: int, *, device: str | torch.device = "cuda", lanes: int = 0, exact: bool = True,
        **arguments: Any,
    ):  # fmt: skip
        """`arguments` are those of `AtariVectorEnv`. `lanes` is the consoles of a warp (0: by their number). `exact`
        draws sticky actions from ALE's generator of 2.5 KB a console, else from one of 8 bytes.

        Raises InputError for an invalid argument, MissingPackage without libatari or NVRTC, OSError where the ROM
        cannot be read, OutOfMemory if the device lacks memory."""
        self.device = _checked_device(device)
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or not 1 <= num_envs <= MOST_ENVS:
            raise InputError(f"num_envs is {num_envs!r}: it must lie between 1 and {MOST_ENVS}")
        if lanes not in (0, 4, 8, 16, 32):
            raise InputError(f"lanes is {lanes!r}: it is 0, 4, 8, 16 or 32")
        host = AtariVectorEnv(game, 1, **{"num_threads": 1, **arguments})  # checks the arguments
        if host.render_mode:
            raise InputError("render_mode: the GPU renders no images in color: give --atari_backend beast")
        self.game, self.num_envs = game, num_envs
        self.single_observation_space, self.single_action_space = (
            host.single_observation_space,
            host.single_action_space,
        )
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.autoreset_mode, self._actions = host.autoreset_mode, host.get_action_set()
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        self.lanes = lanes or _lanes(num_envs, self.device)
        self.is_exact = exact and host.settings["sticky"] > 0  # else nothing is drawn
        if game in INEXACT_STARTS:
            warnings.warn(f"{game}: its later episodes begin otherwise than on a CPU, see docs/gpu.md", stacklevel=2)
        try:
            self._shared = _shared_by_all(game, host.settings, self.is_exact, self.device)
            self._host = libatari.Batch(self._shared.host, num_envs, self.lanes)
            self._arrays = self._allocate()
        except ValueError as error:
            raise InputError(f"{game} on a GPU: {error}: give --atari_backend beast") from error
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(self._too_large(first_line(error))) from error
        batch = self._host.place([array.data_ptr() for array in self._arrays.values()])
        if self._shared.module:
            self._kernels: Any = Kernels(self._shared.module, batch, num_envs, self.lanes)
        else:
            self._kernels = HostKernels(self._host)
        shape = (num_envs, *self.single_observation_space.shape)
        self._observations = self._arrays["stacks"].view(shape)
        self._final = self._arrays["final_stacks"].view(shape) if "final_stacks" in self._arrays else None
        self._ends = self._array("terminated", torch.bool), self._array("truncated", torch.bool)
        self._was_reset = False

    @functools.cached_property
    def observation_space(self) -> Space:
        """Made when it is asked for: it has 56 KB for every environment."""
        return batch_space(self.single_observation_space, self.num_envs)

    def _allocate(self) -> dict[str, Tensor]:
        """The arrays of the batch as bytes on the device, those of the game among them."""
        constants = self._shared.constants
        sizes = {name: size for name, size, _ in self._host.arrays()}
        needed = sum(size for name, size in sizes.items() if name not in constants)
        if self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + cached
            if needed > free:
                raise OutOfMemory(self._too_large(f"they need {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free"))
        return {
            name: constants[name] if name in constants else _zeros(size, self.device) for name, size in sizes.items()
        }

    def _too_large(self, why: str) -> str:
        return f"{self.num_envs} consoles of {self.game} on {self.device}: {why}: lower --group_width or --num_actors"

    def _array(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._arrays[name].view(dtype)

    def get_action_set(self) -> list:
        """What the action of each index does."""
        return list(self._actions)

    @property
    def bytes_per_env(self) -> int:
        """Memory of one environment on the device, observations included."""
        own = (array.numel() for name, array in self._arrays.items() if name not in self._shared.constants)
        return sum(own) // self.num_envs

    @property
    def compiler_log(self) -> str:
        """What NVRTC has told of the kernels; nothing on a CPU."""
        return self._shared.compiler_log

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Begin new episodes, in all consoles or where `options["reset_mask"]` (bool [num_envs]) says so. Seeds are as
        those of `AtariVectorEnv`: a number is the first console's, or a list has one for each that is reset. Without a
        seed their generators go on.

        Raises InputError for an invalid seed or mask, and RuntimeError where a console stands still.
        """
        mask = torch.as_tensor((options or {}).get("reset_mask", np.ones(self.num_envs, bool))).cpu()
        if mask.dtype != torch.bool or mask.shape != (self.num_envs,) or not (self._was_reset or mask.all()):
            raise InputError(
                f"reset_mask is {mask!r}: give a bool for each of {self.num_envs} environments, all at first"
            )
        if seed is None and not self._was_reset:
            seed = np.random.SeedSequence().generate_state(self.num_envs).astype(np.int64).tolist()
        chosen = mask.nonzero().flatten()
        if seed is not None:
            self._seed(checked_seeds(seed, len(chosen)), chosen.to(self.device))
        self._arrays["begins"].copy_(mask.to(torch.uint8) * (1 if seed is None else 2))  # Begins in batch.h
        self._was_reset = True
        self._kernels.run("begin")
        self._kernels.run("observe")
        self.check()
        return self._observations, self._info()

    def _seed(self, seeds: np.ndarray, consoles: Tensor) -> None:
        lengths, generators = map(torch.from_numpy, self._shared.host.seeded(seeds.astype(np.uint32)))
        self._arrays["start_lengths"].view(-1, self.num_envs)[:, consoles] = lengths.T.to(self.device)
        self._arrays["generators"].view(self.num_envs, -1)[consoles] = generators.to(self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Step all consoles by one action each, a tensor of integers [num_envs] on the device: indices into
        `get_action_set()`. Others do nothing, and `check` raises. Raises InputError for actions of another kind, and
        before a reset."""
        if not self._was_reset:
            raise InputError("there are no observations to act on: call reset() first")
        if not isinstance(actions, Tensor) or actions.is_floating_point() or actions.shape != (self.num_envs,):
            given = f"{actions.dtype} {list(actions.shape)}" if isinstance(actions, Tensor) else type(actions).__name__
            raise InputError(f"actions are {given}: give a tensor of {self.num_envs} whole numbers")
        self._array("actions", torch.int64).copy_(actions)
        for kernel in ("emulate", "emulate_again", "observe"):
            self._kernels.run(kernel)
        if self.device.type == "cpu":
            self.check()
        return self._observations, self._array("rewards", torch.float32), *self._ends, self._info()

    def _info(self) -> dict[str, Tensor]:
        names = {"lives": "lives", "frame_number": "frame_numbers", "episode_frame_number": "episode_frame_numbers"}
        info = {name: self._array(ours, torch.int32) for name, ours in names.items()}
        if self._final is not None:
            info |= {"final_obs": self._final, "_final_obs": self._ends[0] | self._ends[1]}
        return info

    def check(self) -> None:
        """Raise RuntimeError, which names the console, where one stands still or has got an action that there is not
        since its reset. Waits for the GPU, so Beast calls it about once a second."""
        errors = self._array("errors", torch.int32)
        if errors.any():
            console = int(errors.nonzero()[0])
            error = int(errors[console])
            limit = f"was given an action that is none of 0 to {len(self._actions) - 1}"
            what = f"has {ERRORS[error]}" if error in ERRORS else limit
            raise RuntimeError(f"environment {console} of {self.game} on {self.device} cannot go on: it {what}")

    def ram(self) -> Tensor:
        """The consoles' memory, uint8 [num_envs, 128]."""
        begin = self._shared.host.ram_offset
        return self._arrays["vcs"].view(self.num_envs, -1)[:, begin : begin + 128]

    def close_extras(self, **kwargs) -> None:
        self._was_reset = False  # no step works
        self._kernels = None


class GameOnDevice:
    """What all environments of a game and its settings share in a process: 78 MB of starts with 30 no-ops, kernels."""

    def __init__(self, game: str, settings: dict[str, Any], is_exact: bool, device: torch.device):
        """Raises ValueError for what a batch cannot play."""
        self.host = libatari.BatchGame(read_rom(game), game, settings, is_exact)
        self.module: kernels.Module | None = None
        self.compiler_log, self.constants = "", {}
        for name, size, contents in libatari.Batch(self.host, 1, WARP).arrays():
            if contents is not None:
                self.constants[name] = _zeros(size, device)
                self.constants[name].copy_(torch.from_numpy(np.array(contents)))
        if device.type == "cuda":
            self._load(options(game, is_exact), device)
            torch.cuda.synchronize(device)  # other streams may use the constants

    def _load(self, compiler_options: Sequence[str], device: torch.device) -> None:
        source, architecture = kernels.SOURCES / "batch.cu", kernels.architecture_of(device)
        code, self.compiler_log = kernels.compiled(source, compiler_options, architecture)
        self.module = kernels.Module(code, device)
        expected, layout = self.host.layout().tolist(), torch.zeros(16, dtype=torch.int32, device=device)
        self.module.launch("describe", 1, 1, ctypes.c_uint64(layout.data_ptr()))
        if layout[: len(expected)].tolist() != expected:
            raise RuntimeError(
                f"NVRTC lays out the emulator's memory otherwise than this machine's compiler ({layout.tolist()}, not "
                f"{expected}): build libatari anew"
            )


_known: weakref.WeakValueDictionary[Any, GameOnDevice] = weakref.WeakValueDictionary()


def _shared_by_all(game: str, settings: dict[str, Any], is_exact: bool, device: torch.device) -> GameOnDevice:
    key = game, repr(settings), is_exact, device
    if (found := _known.get(key)) is None:
        found = _known[key] = GameOnDevice(game, settings, is_exact, device)
    return found


class Kernels:
    """The kernels of csrc/atari/batch.cu for one batch, on a GPU."""

    def __init__(self, module: kernels.Module, batch: bytes, count: int, lanes: int):
        self._module, self._batch = module, (ctypes.c_char * len(batch)).from_buffer_copy(batch)
        no, yes = ctypes.c_bool(False), ctypes.c_bool(True)
        self._launches: dict[str, tuple[Any, ...]] = {  # kernel, blocks, threads, arguments
            "begin": ("begin", math.ceil(count / lanes), WARP, self._batch),
            "emulate": ("emulate", math.ceil(count / lanes), WARP, self._batch, no),
            "emulate_again": ("emulate", math.ceil(count / WARP), WARP, self._batch, yes),
            "observe": ("observe", count, OBSERVE_THREADS, self._batch),
        }

    def run(self, name: str) -> None:
        self._module.launch(*self._launches[name])


class HostKernels:
    """The same on the CPU, in loops."""

    def __init__(self, host: Any, reversed: bool = False):
        self._host, self._reversed = host, reversed

    def run(self, name: str) -> None:
        self._host.run(name, self._reversed)


def options(game: str, is_exact: bool) -> list[str]:
    """With which batch.cu is compiled for a game."""
    generator = "Mt19937" if is_exact else "SplitMix64"
    return [f"-DWIRING={known_games()[game]['wiring']}", f"-DGENERATOR={generator}", "--fmad=false"]


def _checked_device(given: str | torch.device) -> torch.device:
    """With its number. Raises InputError for a device that there is not."""
    try:
        device = torch.device(given)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        found = f"torch {torch.__version__} finds {count} GPUs"
        raise InputError(f"Atari on the device {given}: it is cuda or cpu, and {found}: or give --atari_backend beast")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _zeros(size: int, device: torch.device) -> Tensor:
    """So many bytes, aligned."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + size]


def _lanes(num_envs: int, device: torch.device) -> int:
    """Lanes of a warp that have a console: fewer diverge less, as long as each multiprocessor has some warps."""
    if device.type != "cuda":
        return WARP
    warps = WARPS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return next((lanes for lanes in (4, 8, 16) if num_envs / lanes <= warps), WARP)
