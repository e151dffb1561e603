"""What `pip install .` and `make` install."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def test_an_installation_has_the_agents_and_all_of_beast_but_no_module_with_a_common_name(tmp_path):
    pytest.importorskip("pybind11", reason="setup.py needs pybind11: make libbeast")
    command = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "installed")]
    subprocess.run([sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True)
    installed = {path.relative_to(tmp_path / "installed") for path in (tmp_path / "installed").rglob("*.py")}
    modules = {path.relative_to(ROOT) for path in (ROOT / "beast").rglob("*.py")}
    assert installed == modules | {Path(f"{name}.py") for name in ("monobeast", "r2d2", "polybeast", "polybeast_env")}
    assert (tmp_path / "installed" / "beast" / "py.typed").exists()


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
