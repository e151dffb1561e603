"""What `pip install .` and `make` install."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
AGENTS = ("monobeast", "monobeast_presets", "r2d2", "r2d2_presets", "polybeast", "polybeast_env", "multibeast")


def test_an_installation_has_the_agents_and_all_of_beast_but_no_module_with_a_common_name(tmp_path):
    pytest.importorskip("pybind11", reason="setup.py needs pybind11: make libbeast")
    command = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "installed")]
    subprocess.run([sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True)
    installed = {path.relative_to(tmp_path / "installed") for path in (tmp_path / "installed").rglob("*.py")}
    modules = {path.relative_to(ROOT) for path in (ROOT / "beast").rglob("*.py")}
    assert installed == modules | {Path(f"{name}.py") for name in AGENTS}
    assert (tmp_path / "installed" / "beast" / "py.typed").exists()


def test_make_libatari_compiles_the_emulator_alone_where_grpc_is_installed(tmp_path):
    pytest.importorskip("pybind11", reason="setup.py needs pybind11: make libbeast")
    dry_run = subprocess.run(
        ["make", "--dry-run", "--always-make", "libatari"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in dry_run.stdout.splitlines() if "setup.py" in line]
    command = [word for word in line.partition("setup.py ")[2].split() if word != "--inplace"]
    tool = tmp_path / "tool"  # is the compiler, pkg-config and protoc: writes an empty file where -o says
    tool.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    tool.chmod(0o755)
    (tmp_path / "protoc").symlink_to(tool)
    tools = {**dict.fromkeys(("CC", "CXX", "PKG_CONFIG"), str(tool)), "LDSHARED": f"{tool} -shared"}
    build = ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        [sys.executable, "setup.py", *command, *build], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **tools, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(path.name.partition(".")[0] for path in (tmp_path / "lib").iterdir()) == ["beast", "libatari"]
    sources = tmp_path / "lib" / "beast" / "gpu" / "csrc"  # of the kernels, which are compiled where they run
    assert (sources / "batch.cu").exists() and (sources / "nvrtc" / "stdint.h").exists()


@pytest.mark.on_demand  # compiles for more than a minute
def test_the_emulator_is_built_without_grpc(tmp_path):
    pytest.importorskip("pybind11", reason="setup.py needs pybind11: make libbeast")
    programs = {name: shutil.which(name) for name in ("g++", "gcc", "c++", "cc", "as", "ld")}
    if not all(programs.values()):
        pytest.skip("there is no C++ compiler")
    tools = tmp_path / "tools"  # neither protoc nor what finds gRPC
    tools.mkdir()
    for name, path in programs.items():  # a compiler that does not optimize takes a tenth of the time
        (tools / name).write_text(f'#!/bin/sh\nexec {path} "$@"{" -O0" * (name[0] in "gc")}\n')
        (tools / name).chmod(0o755)
    build = ["build_ext", "--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *build], cwd=ROOT, env={**os.environ, "PATH": str(tools)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "there is no protoc" in done.stderr and "libatari is built" in done.stderr
    built = sorted(path.name.partition(".")[0] for path in (tmp_path / "lib").iterdir())
    assert built == ["beast", "libatari"]
    play = "import libatari, sys; print(libatari.__file__, len(libatari.games()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    told = subprocess.run([sys.executable, "-c", play], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert told.stdout.startswith(str(tmp_path / "lib")), told.stderr


def test_make_installs_what_constraints_txt_names_and_nothing_else():
    if not Path(sys.prefix, ".test").exists():
        pytest.skip("these tests do not run in a virtual environment that make has made")
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    pinned = {canonicalize_name(pin.name): pin for pin in lines if not pin.marker or pin.marker.evaluate()}
    # Not all of sys.path: setuptools, once a test has imported it, puts the packages that it vendors there.
    found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    installed = {canonicalize_name(distribution.name): distribution.version for distribution in found}
    foreign = {name for name in installed.keys() - pinned.keys() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert foreign <= {"pip", "setuptools", "beast"}
    assert {name: installed[name] for name, pin in pinned.items() if not pin.specifier.contains(installed[name])} == {}
