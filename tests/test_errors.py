"""Which errors end a program with one line, and which keep their traceback."""

import re
import runpy

import gymnasium
import pytest

from beast.errors import (
    InputError,
    MissingFile,
    MissingPackage,
    OutOfMemory,
    Unreachable,
    WorkerFailure,
    exit_with_message,
    raised,
)


@pytest.mark.parametrize(
    "error, builtin",
    [
        (InputError, ValueError),
        (MissingPackage, ImportError),
        (MissingFile, FileNotFoundError),
        (OutOfMemory, MemoryError),
        (Unreachable, ConnectionError),
    ],
)
def test_the_users_errors_end_with_their_message_alone_and_the_builtin_ones_keep_their_traceback(error, builtin):
    assert issubclass(error, builtin)
    with pytest.raises(SystemExit) as ended, exit_with_message():
        raise error("--width 3: give 1, 2 or 4")
    assert ended.value.code == "error: --width 3: give 1, 2 or 4"
    with pytest.raises(builtin), exit_with_message():
        raise builtin("a fault in the code")


def test_an_exception_of_the_users_code_is_quoted_with_the_place_that_raised_it(tmp_path):
    (tmp_path / "users_code.py").write_text(
        "import json\n\ndef parse(text):\n    return json.loads(text)\n\ndef fail():\n    raise OSError\n"
    )
    namespace = runpy.run_path(str(tmp_path / "users_code.py"))
    for call, expected in (
        (
            lambda: namespace["parse"]("{"),
            "JSONDecodeError: Expecting property name .* \\(.*users_code.py:4, in parse\\)",
        ),
        (namespace["fail"], "OSError: raise OSError \\(.*users_code.py:7, in fail\\)"),
        (lambda: gymnasium.make("NoSuch-v0"), "NameNotFound: .* \\(.*test_errors.py:\\d+, in <lambda>\\)"),
    ):
        try:
            call()
        except Exception as error:
            assert re.fullmatch(expected, raised(error)), raised(error)


def test_a_worker_that_fails_at_the_start_brings_its_own_traceback_and_no_other():
    with pytest.raises(SystemExit) as ended, exit_with_message():
        raise WorkerFailure("env server ended:\nTraceback of the server")
    assert ended.value.code == "error: env server ended:\nTraceback of the server"


def test_an_error_without_a_message_is_told_by_its_line_and_the_innermost_place_beside_the_users(tmp_path):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "simulator.py").write_text("def load(version):\n    assert version == 3\n")
    (tmp_path / "users_code.py").write_text(
        f"import sys\nsys.path.insert(0, {str(package)!r})\nimport simulator\n\ndef make():\n    simulator.load(4)\n"
    )
    namespace = runpy.run_path(str(tmp_path / "users_code.py"))
    with pytest.raises(AssertionError) as error:
        namespace["make"]()
    expected = r"AssertionError: assert version == 3 \(.*users_code.py:6, in make, from .*simulator.py:2, in load\)"
    assert re.fullmatch(expected, raised(error.value)), raised(error.value)


def test_an_environment_variable_shows_the_whole_traceback_of_a_users_error(monkeypatch, capsys):
    def fail():
        try:
            raise OSError("the innermost one")
        except OSError as error:
            raise InputError("--width 3: give 1") from error

    for value in ("", "1"):
        monkeypatch.setenv("BEAST_TRACEBACK", value)
        with pytest.raises(SystemExit) as ended, exit_with_message():
            fail()
        assert ended.value.code == "error: --width 3: give 1"
        assert ("OSError: the innermost one" in capsys.readouterr().err) == bool(value)
