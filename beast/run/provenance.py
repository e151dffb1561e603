"""What a result depends on besides its flags: code, versions and hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Commit, uncommitted changes, versions and hardware; no environment variables."""
    import torch  # only here: the programs that ask for a processor's name need no torch

    code = Path(__file__).resolve().parents[2]
    versions = {"python": platform.python_version()}
    for package in ("beast", "torch", "numpy", "gymnasium", "ale-py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "commit": git(code, "rev-parse", "HEAD"),
        "diff": git(code, "diff", "--no-ext-diff", "--no-textconv", "HEAD"),
        "versions": versions,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def git(directory: Path, *command: str) -> str | None:
    """The output of a git command, or None where there is no git, no checkout or no commit."""
    command = ("git", "--no-optional-locks", *command)  # a training run must not block the user's own git commands
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, cwd=directory, stderr=subprocess.DEVNULL, timeout=30)
        return output.decode(errors="replace").strip()
    return None


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
