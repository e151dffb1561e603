"""Atari games by the thousand on a GPU, each on a console of its own: csrc/atari/batch.h says how.

They play what `beast.envs.emulator.AtariVectorEnv` plays, to the bit, with the exception of `INEXACT_STARTS`. On a CPU
the same kernels run in the calling thread, console by console, for tests.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from beast.envs.ale import read_rom
from beast.envs.emulator import ERRORS, AtariVectorEnv, checked_seeds, known_games, libatari
from beast.errors import InputError, OutOfMemory
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


class AtariTensorEnv(VectorEnv):
    """One game on `num_envs` consoles of a GPU, as an environment of tensors (docs/device.md).

    Observations are uint8 [num_envs, stack_num, img_height, img_width], actions int64, rewards float32. Infos have
    `lives`, `frame_number` and `episode_frame_number`, int32 [num_envs]; under SAME_STEP `final_obs` and `_final_obs`.
    All tensors are valid until the next call. No call but `reset` and `check` makes the host wait for the GPU.

    The game's image is gray, of an NTSC console. Episodes begin with one of the states that a CPU has made before: all
    that a reset can lead to, but that the 1,024th reset of a console begins as its second one did.
    """

    def __init__(
        self, game: str, num_envs: int, *, device: str | torch.device = "cuda", lanes: int = 0, exact: bool = True,
        **arguments: Any,
    ):  # fmt: skip
        """`arguments` are those of `AtariVectorEnv`. `lanes` is the consoles of a warp (0: by their number). `exact`
        draws sticky actions from ALE's generator of 2.5 KB a console, else from one of 8 bytes.

        Raises InputError for an invalid argument, MissingPackage without libatari or NVRTC, OSError where the ROM
        cannot be read, OutOfMemory where the device has not so much."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise InputError(f"Atari on a GPU: torch {torch.__version__} finds none: give --atari_backend beast")
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or not 1 <= num_envs <= 2**17:
            raise InputError(f"num_envs is {num_envs!r}: it must lie between 1 and {2**17}")
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
        self.autoreset_mode, self._actions = host.autoreset_mode, host.get_action_set()
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        self.lanes = lanes or _lanes(num_envs, self.device)
        self.is_exact = exact and host.settings["sticky"] > 0  # else nothing is drawn
        try:
            self._host = libatari.Batch(read_rom(game), game, num_envs, self.lanes, host.settings, self.is_exact)
        except ValueError as error:
            raise InputError(f"{game} on a GPU: {error}: give --atari_backend beast") from error
        self._arrays = self._placed()
        of_kernels = Kernels if self.device.type == "cuda" else HostKernels
        self._kernels: Any = of_kernels(self._host, self._batch, self, options(game, self.is_exact))
        shape = (num_envs, *self.single_observation_space.shape)
        self._observations = self._arrays["stacks"].view(shape)
        self._final = self._arrays["final_stacks"].view(shape) if "final_stacks" in self._arrays else None
        self._ends = self._array("terminated", torch.bool), self._array("truncated", torch.bool)
        self._was_reset = False

    def _placed(self) -> dict[str, Tensor]:
        """The arrays of a batch as bytes on the device."""
        described = self._host.arrays()
        needed = sum(size for _, size, _ in described)
        if self.device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(self.device)[0]):
            raise OutOfMemory(
                f"{self.num_envs} consoles of {self.game} need {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free "
                f"on {self.device}: lower --group_width or --num_actors"
            )
        arrays = {}
        for name, size, contents in described:
            memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=self.device)
            begin = -memory.data_ptr() % ALIGNMENT
            arrays[name] = memory[begin : begin + size]
            if contents is not None:
                arrays[name].copy_(torch.from_numpy(contents))
        batch = self._host.place([array.data_ptr() for array in arrays.values()])
        self._batch = (ctypes.c_char * len(batch)).from_buffer_copy(batch)
        return arrays

    def _array(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._arrays[name].view(dtype)

    def get_action_set(self) -> list:
        """What the action of each index does."""
        return list(self._actions)

    @property
    def bytes_per_env(self) -> int:
        """Memory of one environment on the device, observations included."""
        return sum(array.numel() for array in self._arrays.values()) // self.num_envs

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
        self._arrays["begins"].copy_(mask.to(torch.uint8) * (1 if seed is None else 2))
        self._was_reset = True
        self._kernels.run("begin")
        self._kernels.run("observe")
        self.check()
        return self._observations, self._info()

    def _seed(self, seeds: np.ndarray, consoles: Tensor) -> None:
        lengths, generators = map(torch.from_numpy, self._host.seeded(seeds.astype(np.uint32)))
        self._arrays["start_lengths"].view(-1, self.num_envs)[:, consoles] = lengths.T.to(self.device)
        self._arrays["generators"].view(self.num_envs, -1)[consoles] = generators.to(self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Step all consoles by one action each, int64 [num_envs], indices into `get_action_set()`. One that there is
        not does nothing, and `check` raises. Raises InputError for actions of another shape, and before a reset."""
        if not self._was_reset:
            raise InputError("there are no observations to act on: call reset() first")
        if actions.shape != (self.num_envs,):
            raise InputError(f"actions have the shape {list(actions.shape)}: give one for each of {self.num_envs}")
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
        """Raise RuntimeError, which names the console, where one stands still or was given an action that there is not.
        Waits for the GPU, so Beast calls it once in a second, or so."""
        errors = self._array("errors", torch.int32)
        if errors.any():
            console = int(errors.nonzero()[0])
            error = int(errors[console])
            what = f"has {ERRORS[error]}" if error in ERRORS else "was given an action that it has not"
            raise RuntimeError(f"environment {console} of {self.game} on {self.device} cannot go on: it {what}")

    def ram(self) -> Tensor:
        """The consoles' memory, uint8 [num_envs, 128]."""
        begin = self._host.ram_offset
        return self._arrays["vcs"].view(self.num_envs, -1)[:, begin : begin + 128]

    def close_extras(self, **kwargs) -> None:
        self._kernels = None


class Kernels:
    """The kernels of csrc/atari/batch.cu on a GPU."""

    def __init__(self, host: Any, batch: ctypes.Array, env: AtariTensorEnv, options: Sequence[str]):
        self._env, self._batch = env, batch
        source, architecture = kernels.SOURCES / "batch.cu", kernels.architecture_of(env.device)
        code, self.told = kernels.compiled(source, options, architecture)
        self._module = kernels.Module(code, env.device)
        expected, layout = torch.from_numpy(host.layout().astype(np.int64)), torch.zeros(16, dtype=torch.int32)
        layout = layout.to(env.device)
        self._module.launch("describe", 1, 1, ctypes.c_uint64(layout.data_ptr()))
        if not torch.equal(expected, layout[: len(expected)].cpu().long()):
            raise RuntimeError(
                f"NVRTC lays out the emulator's memory otherwise than this machine's compiler ({layout.tolist()}, not "
                f"{expected.tolist()}): build libatari anew"
            )

    def run(self, name: str) -> None:
        count, warps = self._env.num_envs, math.ceil(self._env.num_envs / self._env.lanes)
        no, yes = ctypes.c_bool(False), ctypes.c_bool(True)
        if name == "begin":
            self._module.launch("begin", warps, WARP, self._batch)
        elif name == "emulate":
            self._module.launch("emulate", warps, WARP, self._batch, no)
        elif name == "emulate_again":
            self._module.launch("emulate", math.ceil(count / WARP), WARP, self._batch, yes)
        else:
            self._module.launch("observe", count, OBSERVE_THREADS, self._batch)


class HostKernels:
    """The same on the CPU, in loops."""

    def __init__(self, host: Any, *_: Any, reversed: bool = False):
        self._host, self._reversed = host, reversed

    def run(self, name: str) -> None:
        self._host.run(name, self._reversed)


def options(game: str, is_exact: bool) -> list[str]:
    """With which batch.cu is compiled for a game."""
    generator = "Mt19937" if is_exact else "SplitMix64"
    return [f"-DWIRING={known_games()[game]['wiring']}", f"-DGENERATOR={generator}", "--fmad=false"]


def _lanes(num_envs: int, device: torch.device) -> int:
    """Lanes of a warp that have a console: fewer diverge less, as long as each multiprocessor has some warps."""
    if device.type != "cuda":
        return WARP
    warps = WARPS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return next((lanes for lanes in (4, 8, 16) if num_envs / lanes <= warps), WARP)
