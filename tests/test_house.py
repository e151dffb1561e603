"""The order of the house: who imports whom, who does without torch and libbeast, and how long files are."""

import ast
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AGENTS = {"monobeast", "r2d2", "polybeast"}
PROGRAMS = {*AGENTS, "polybeast_env", "multibeast"}
FILES = [*sorted(ROOT.glob("beast/**/*.py")), *(ROOT / f"{name}.py" for name in sorted(PROGRAMS))]
GROUND_FLOOR = {"errors", "files", "device", "clock", "machine"}
# Whom each floor may import, beside its own modules. An agent is no floor: it may import every one of them.
BELOW = {
    "population": {"run", "feeds", "learn", "envs", *GROUND_FLOOR},
    "run": {"feeds", "learn", "hosts", "envs", *GROUND_FLOOR},
    "feeds": {"learn", "hosts", "envs", *GROUND_FLOOR},
    "gpu": {"envs", *GROUND_FLOOR},
    "learn": {"envs", *GROUND_FLOOR},
    "hosts": {"envs", *GROUND_FLOOR},
    "envs": GROUND_FLOOR,
    **dict.fromkeys(GROUND_FLOOR, {"errors", "machine"}),
}
IN_ACTORS = [
    *("beast.feeds.actor", "beast.feeds.memory", "beast.feeds.processes"),
    *("beast.run.flags", "beast.run.command_line"),
]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file): file for file in FILES}


@functools.cache
def imports_of(file: Path) -> frozenset[str]:
    """The modules that a file imports, within functions, too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}: relative imports are not looked through here"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}  # `from beast.run import tuning`
            found |= {part if part in MODULES else node.module for part in parts}
    return frozenset(found)


def floor_of(module: str) -> str:
    return module.split(".")[1]


def imports_between(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Of each file its module, and each module of `beast` that it imports."""
    for file in files:
        yield from ((name_of(file), each) for each in imports_of(file) if each.startswith("beast."))


def test_every_module_is_on_a_floor_and_imports_only_its_own_and_those_below():
    inner = [file for name, file in MODULES.items() if name.startswith("beast.")]
    assert len(inner) > 40 and {floor_of(name_of(file)) for file in inner} == BELOW.keys()
    up = [
        f"{module} imports {other}"
        for module, other in imports_between(inner)
        if floor_of(other) not in {floor_of(module), *BELOW[floor_of(module)]}
    ]
    assert not up
    # The door: beast.load imports what it needs when it is called.
    assert {other for _, other in imports_between([MODULES["beast"]])} == {"beast.run.policy"}


def test_only_polybeast_and_what_is_beside_the_product_import_an_agent():
    beside = {"tests", "benchmarks", "examples", "docs", "build"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    others = [*ROOT.glob("*.py"), *(file for name in folders - beside for file in ROOT.glob(f"{name}/**/*.py"))]
    assert set(FILES) < set(others)
    found = {(name_of(file), agent) for file in others for agent in imports_of(file) & AGENTS}
    assert found == {("polybeast", "monobeast")}


def reachable(module: str) -> dict[str, str]:
    """All modules that an import of `module` may lead to, each with one that imports it."""
    found, waiting = {module: module}, [module]
    while waiting:
        current = waiting.pop()
        if current not in MODULES or current == "beast":  # the door
            continue
        packages = [current.rsplit(".", depth)[0] for depth in range(1, current.count(".") + 1)]
        for each in (*imports_of(MODULES[current]), *packages):
            if each not in found:
                found[each] = current
                waiting.append(each)
    return found


@pytest.mark.parametrize("floor", ["envs", "hosts", "actors"])
def test_environments_hosts_and_actors_import_no_torch(floor):
    modules = IN_ACTORS if floor == "actors" else [name for name in MODULES if name.startswith(f"beast.{floor}")]
    assert len(modules) >= 5
    for module in [*modules, *(["polybeast_env"] if floor == "hosts" else [])]:
        found = reachable(module)
        torchs = {name: by for name, by in found.items() if name.partition(".")[0] == "torch"}
        assert not torchs, f"{module} leads to torch: {torchs}"
    assert "torch" in reachable("monobeast"), "what is above is able to find it"


def test_only_what_reaches_env_servers_imports_libbeast():
    found = {name for name, file in MODULES.items() if "libbeast" in imports_of(file)}
    assert found == {"beast.feeds.remote", "beast.run.servers"}


def num_lines(*files: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_no_file_of_beast_is_longer_than_500_lines():
    assert {name: num_lines(file) for name, file in MODULES.items() if num_lines(file) > 500 and "beast." in name} == {}


def test_beast_as_a_whole_does_not_grow():
    """Whoever raises this number adds something that users can do."""
    assert num_lines(*(file for name, file in MODULES.items() if name.partition(".")[0] == "beast")) <= 15_380


@pytest.mark.parametrize("agent, limit", [("monobeast", 580), ("r2d2", 640), ("polybeast", 110), ("multibeast", 500)])
def test_an_agent_has_few_lines(agent, limit):
    assert num_lines(MODULES[agent]) <= limit


def test_every_mutant_changes_a_text_that_its_file_has(monkeypatch):
    monkeypatch.setattr(sys, "path", ["taken off by the module", *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the module does
    mutants = importlib.import_module("mutants")
    assert mutants.stale_texts(mutants.MUTANTS) == []
