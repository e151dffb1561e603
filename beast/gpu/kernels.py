"""Kernels in CUDA: compiled by NVRTC for the card at hand, kept in a cache, launched on torch's current stream.

torch's builds for CUDA on Linux bring what this needs. To compile takes no GPU.
"""

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from beast.errors import InputError, MissingPackage, UserError
from beast.files import replace_file

_INSTALLED = Path(__file__).parent / "csrc"
SOURCES = _INSTALLED if _INSTALLED.exists() else Path(__file__).resolve().parents[2] / "csrc" / "atari"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "beast"
ERROR_SIZE = 8000  # characters of a compiler's log in an error


class BuildError(UserError, RuntimeError):
    """NVRTC does not compile a kernel, or the driver does not take it; the message has what they say."""


def compiled(source: Path, options: Sequence[str], architecture: str) -> tuple[bytes, str]:
    """The machine code for an `architecture` such as "sm_90", and what the compiler tells of it: registers, stack and
    spilled bytes of each kernel.

    Both are kept in the cache, under a name that depends on all headers beside the source, the options and NVRTC's
    version. Raises BuildError, and MissingPackage without NVRTC.
    """
    nvrtc = _package("nvrtc")
    version = _version(nvrtc)
    files = sorted(
        path for path in source.parent.rglob("*") if path.suffix in ("", ".h", ".inc", ".cu") and path.is_file()
    )
    texts = [path.name.encode() + path.read_bytes() for path in files]
    key = hashlib.sha256(b"\0".join([*texts, repr((*options, architecture, version, source.name)).encode()]))
    kept = CACHE / f"{source.stem}-{key.hexdigest()[:32]}.cubin"
    log_of_it = kept.with_suffix(".log")
    if not (kept.exists() and log_of_it.exists()):
        code, log = _compile(nvrtc, source, [*options, f"--gpu-architecture={architecture}"])
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(log_of_it, lambda file: file.write(log.encode()))
            replace_file(kept, lambda file: file.write(code))
        except (OSError, InputError):  # then the next run compiles it again
            return code, log
    return kept.read_bytes(), log_of_it.read_text()


def _compile(nvrtc: Any, source: Path, options: Sequence[str]) -> tuple[bytes, str]:
    shims = source.parent / "nvrtc"  # of a system's headers
    always = [
        "--std=c++17",
        f"-I{shims}",
        f"-I{source.parent}",
        "--ptxas-options=-v",
        "--device-as-default-execution-space",
    ]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    try:
        arguments = [each.encode() for each in (*always, *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"NVRTC does not compile {source} ({status.name}): {text[:ERROR_SIZE]}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), text


class Module:
    """Compiled kernels on a GPU. Any thread may launch them, each on its own current stream of torch."""

    def __init__(self, code: bytes, device: torch.device):
        """Raises BuildError where the driver does not take the code."""
        self._driver, self._device = _package("driver"), device
        torch.zeros(1, device=device)  # torch makes its context
        number = _checked(self._driver.cuDeviceGet(device.index or 0))
        self._context = _checked(self._driver.cuDevicePrimaryCtxRetain(number))
        with self._inside():
            try:
                self._module = _checked(self._driver.cuModuleLoadData(code))
            except RuntimeError as error:
                raise BuildError(
                    f"{torch.cuda.get_device_name(device)}'s driver does not load kernels of NVRTC "
                    f"{_version(_package('nvrtc'))} ({error}): {_remedy()}"
                ) from error
        self._kernels: dict[str, Any] = {}

    def launch(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Queue a kernel. `arguments`, ctypes' objects, are copied by the call. Raises RuntimeError where the driver
        refuses it."""
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._inside():
            if name not in self._kernels:
                self._kernels[name] = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
            shape = blocks, 1, 1, threads, 1, 1
            _checked(
                self._driver.cuLaunchKernel(self._kernels[name], *shape, 0, stream, ctypes.addressof(addresses), 0)
            )

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """In torch's context, which a thread is not in before torch has worked there."""
        with torch.cuda.device(self._device):
            _checked(self._driver.cuCtxSetCurrent(self._context))
            yield


def architecture_of(device: torch.device | None) -> str:
    """Such as "sm_90"; None: of the current GPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _package(name: str) -> Any:
    try:
        from cuda import bindings  # noqa: F401
        from cuda.bindings import driver, nvrtc

        module = {"driver": driver, "nvrtc": nvrtc}[name]
        if name == "nvrtc":
            nvrtc.nvrtcVersion()  # raises where the library is not found
        return module
    except (ImportError, RuntimeError) as error:
        raise MissingPackage(f"kernels need CUDA's bindings and compiler ({error}): {_remedy()}") from error


def _version(nvrtc: Any) -> str:
    return ".".join(map(str, _checked(nvrtc.nvrtcVersion())))


def _remedy() -> str:
    """How to install what fits torch's CUDA: a newer compiler may be too new for the driver."""
    major = (torch.version.cuda or "13").partition(".")[0]
    return f"pip install 'cuda-bindings=={major}.*' nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}"


def _checked(result: tuple) -> Any:
    """What a call of CUDA's returns behind its status. Raises RuntimeError with the error's name."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
