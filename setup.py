"""Builds the C++ extensions: libatari, the Atari emulator, and libbeast, which PolyBeast needs. Everything else about
the package is in pyproject.toml.

`pip install .` builds and installs them; `python setup.py build_ext --inplace` leaves them beside polybeast.py.
libatari needs a C++ compiler only. libbeast also needs gRPC and protobuf, which are the system's: found through
pkg-config, else through their CMake packages. Without them, or with `--without-libbeast`, only libatari is built.
MonoBeast runs without either.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

HOW_TO_INSTALL = """
PolyBeast's extension libbeast cannot be built: {missing}.{built} Install what it needs and try again:

    Debian, Ubuntu   apt-get install g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler \\
                         protobuf-compiler-grpc python3-dev
    conda            conda install -c conda-forge cxx-compiler pkg-config grpc-cpp libprotobuf zlib
    macOS            xcode-select --install; brew install pkg-config grpc protobuf

MonoBeast needs no compiler and no installation: python monobeast.py
"""

CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.13)
project(flags CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
file(WRITE ${CMAKE_BINARY_DIR}/main.cc "int main() {}")
add_executable(flags ${CMAKE_BINARY_DIR}/main.cc)
target_link_libraries(flags PRIVATE gRPC::grpc++ protobuf::libprotobuf)
"""


def pkg_config_flags() -> tuple[list[str], list[str]] | None:
    """(compiler flags, linker flags) of gRPC and protobuf, or None where pkg-config does not know them."""
    program = os.environ.get("PKG_CONFIG") or shutil.which("pkg-config") or shutil.which("pkgconf")
    if not program:
        return None
    flags = []
    for kind in ("--cflags", "--libs"):
        done = subprocess.run([program, kind, "grpc++", "protobuf"], capture_output=True, text=True)
        if done.returncode:
            return None
        flags.append(shlex.split(done.stdout))
    return flags[0], flags[1]


def cmake_flags() -> tuple[list[str], list[str]] | None:
    """The same from a CMake project that links to both, or None where there is no CMake or it does not find them."""
    if not shutil.which("cmake"):
        return None
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "CMakeLists.txt").write_text(CMAKE_LISTS)
        command = ["cmake", "-G", "Unix Makefiles", "-S", directory, "-B", directory]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        made = Path(directory, "CMakeFiles", "flags.dir")
        settings = dict(re.findall(r"^CXX_(\w+) *= *(.*)$", (made / "flags.make").read_text(), re.MULTILINE))
        link = shlex.split((made / "link.txt").read_text())
    compile_flags = shlex.split(settings.get("DEFINES", "") + " " + settings.get("INCLUDES", ""))
    return compile_flags, link[link.index("flags", link.index("-o")) + 1 :]


class BuildExtensions(build_ext):
    """Compiles libatari; finds gRPC, generates the messages' code from rpcenv.proto, and compiles libbeast."""

    user_options = [*build_ext.user_options, ("without-libbeast", None, "compile libatari only")]
    boolean_options = [*build_ext.boolean_options, "without-libbeast"]

    def initialize_options(self):
        super().initialize_options()
        self.without_libbeast = False

    def run(self):
        compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
        flags = None if self.without_libbeast else pkg_config_flags() or cmake_flags()
        for_all = {
            f"there is no C++ compiler ({compiler})": shutil.which(compiler),
            "Python's headers are missing": Path(sysconfig.get_path("include"), "Python.h").exists(),
        }
        for_libbeast = {
            "neither pkg-config nor CMake finds gRPC's C++ library (grpc++) and protobuf": flags,
            "there is no protoc": shutil.which("protoc"),
        }
        needed = for_all if self.without_libbeast else for_all | for_libbeast
        missing = ", ".join(what for what, found in needed.items() if not found)
        if not all(for_all.values()):
            sys.exit(HOW_TO_INSTALL.format(missing=missing, built=""))
        if not self.inplace:  # NVRTC compiles them where they run
            to = Path(self.build_lib, "beast", "gpu", "csrc")
            shutil.copytree("csrc/atari", to, ignore=shutil.ignore_patterns("*.cc"), dirs_exist_ok=True)
        if missing or self.without_libbeast:
            self.extensions.remove(libbeast)
            super().run()
            if not self.without_libbeast:
                print(HOW_TO_INSTALL.format(missing=missing, built=" libatari is built."), file=sys.stderr)
            return

        generated = Path(self.build_temp, "proto")
        generated.mkdir(parents=True, exist_ok=True)
        subprocess.run(["protoc", "-Icsrc", f"--cpp_out={generated}", "csrc/rpcenv.proto"], check=True)
        libbeast.sources += [str(generated / "rpcenv.pb.cc")]
        libbeast.include_dirs += [str(generated)]
        libbeast.extra_compile_args += flags[0]
        libbeast.extra_link_args += [*flags[1], "-lz"]
        super().run()
        if not self.inplace:
            shutil.copy("libbeast.pyi", self.build_lib)


def is_outdated(compiled: str, source: str) -> bool:
    headers = [*Path("csrc").rglob("*.h"), *Path("csrc").rglob("*.inc")]
    sources = [source, __file__, "csrc/rpcenv.proto", *map(str, headers)]
    return not os.path.exists(compiled) or os.path.getmtime(compiled) < max(map(os.path.getmtime, sources))


version = re.search(r'__version__ = "(.+)"', Path("beast/__init__.py").read_text()).group(1)
libbeast = Pybind11Extension(
    "libbeast",
    sorted(map(str, Path("csrc").glob("*.cc"))),
    include_dirs=["csrc"],
    depends=[*map(str, Path("csrc").glob("*.h")), "csrc/rpcenv.proto"],
    define_macros=[("BEAST_VERSION", f'"{version}"')],
    cxx_std=17,
    extra_compile_args=["-O2", "-Wall", "-Wextra"],
)
libatari = Pybind11Extension(
    "libatari",
    sorted(map(str, Path("csrc/atari").glob("*.cc"))),
    include_dirs=["csrc/atari"],
    depends=sorted(map(str, [*Path("csrc/atari").glob("*.h"), *Path("csrc/atari").glob("*.inc")])),
    cxx_std=17,
    # A fused multiply-add would round a scaled image otherwise than OpenCV does. -O3 comes behind CFLAGS: the emulator
    # refuses gcc's -O1.
    extra_compile_args=["-O3", "-fno-gcse", "-ffp-contract=off", "-Wall", "-Wextra"],  # gcc: for interpreters
)
ParallelCompile(default=0, needs_recompile=is_outdated).install()  # 0: as many compilers as there are cores
setup(ext_modules=[libatari, libbeast], cmdclass={"build_ext": BuildExtensions})
