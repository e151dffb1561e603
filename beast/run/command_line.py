"""A program's flags from its command line and presets, and its `--help` in the sections of the declaring file."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from beast.errors import InputError, exit_with_message

F = TypeVar("F")

ELSEWHERE = {  # names of flags in other projects: what they are here
    "lr": "learning_rate", "gamma": "discount", "env_id": "env", "exp_name": "name", "logdir": "root",
    **dict.fromkeys(("steps", "timesteps", "total_timesteps", "max_steps"), "total_steps"), "wandb": "track",
    **dict.fromkeys(("num_envs", "n_envs"), "group_width"), "batch_size": "batch_width", "num_steps": "unroll_length",
    **dict.fromkeys(("ent_coef", "entropy_coef"), "entropy_cost"), "vf_coef": "baseline_cost", "clip_range": "ppo_clip",
    "gae_lambda": "vtrace_lambda", "max_grad_norm": "grad_clip", "num_workers": "num_actors",
}  # fmt: skip


class Flag(NamedTuple):
    """What a class's source says of a flag: its docstring, and the comment that heads its section."""

    section: str
    help: str


def read_source(flags_class: type) -> dict[str, Flag]:
    """Name -> flag, of a class and those that it inherits from, in the order of their sections.

    A section begins with a comment above a field, after an empty line or the class; the title is what it says before a
    colon or full stop. A field that a class declares again stays in its section.
    """
    found: dict[str, Flag] = {}
    for base in reversed(flags_class.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # there is no file, as in a notebook
            continue
        lines, section = source.splitlines(), ""
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, [*definition.body[1:], None]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            first = statement.lineno - 2  # the line above, counted from 0
            while lines[first].lstrip().startswith("#"):
                first -= 1
            is_head = not lines[first].strip() or first == definition.lineno - 1
            if is_head and first < statement.lineno - 2:
                section = re.split(r"[:.]", lines[first + 1].strip(" #"))[0]
            name, text = statement.target.id, ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value))
            before = found.get(name, Flag(section, ""))
            found[name] = Flag(before.section, text or before.help)
    return found


def take_preset(arguments: list[str], known: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The flags of `--preset NAME`, and the arguments without it. Raises InputError for a name that is not `known`."""
    flags: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != "--preset":
            rest.append(word)
            continue
        name = name if equals else next(words, "")
        if name not in known:
            raise InputError(f"--preset {name}: an unknown name; there are {', '.join(known)}")
        flags |= known[name]
    return flags, rest


def option(word: str) -> str:
    """The name of the flag that a word of a command line is, as `--name`, `--name=value` and `--no_name`, or empty."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def given() -> set[str]:
    """Names of the flags that this program's command line has."""
    names = {option(word) for word in sys.argv[1:]}
    return names | {name.removeprefix("no_") for name in names}


def whole_number(name: str, text: str) -> str:
    """What a flag of whole numbers was given, with `1e6` as `1000000`. Raises InputError for a fraction."""
    try:
        number = float(text)
    except ValueError:  # tyro refuses it, or knows it, as "auto"
        return text
    if not number.is_integer():
        raise InputError(f"--{name} {text}: it must be a whole number, such as 1000000 or 1e6")
    return text if text.lstrip("+-").isdigit() else str(int(number))


def prepare(arguments: list[str], kinds: Mapping[str, Any]) -> list[str]:
    """The arguments with whole numbers for flags of `kinds` that are. Raises InputError for a fraction there, and for
    names that flags have elsewhere."""
    found, name = [], ""
    for word in arguments:
        head, equals, value = word.partition("=") if option(word) else ("", "", word)
        name = option(word) or name
        if name not in kinds and (ours := ELSEWHERE.get(name)) in kinds:
            raise InputError(f"--{name}: this program has no such flag; give --{ours}")
        kind = kinds.get(name)
        is_whole = kind is int or int in get_args(kind)
        found.append(head + equals + (whole_number(name, value) if value and is_whole else value))
    return found


def parse(flags_class: type[F], description: str | None, known: Mapping[str, dict], about: Mapping[str, str]) -> F:
    """Flags from the command line, or of its `--preset`, one of those that are `known`; `about` is what --help says of
    each. `--help`, and an error in the line, end the program."""
    import tyro

    with exit_with_message():
        preset, arguments = take_preset(sys.argv[1:], known)
        if unknown := preset.keys() - {each.name for each in fields(flags_class)}:  # type: ignore[arg-type]
            raise InputError(f"--preset: this program has no flag --{', --'.join(sorted(unknown))}")
        arguments = prepare(arguments, get_type_hints(flags_class))
    declared, hints = read_source(flags_class), get_type_hints(flags_class, include_extras=True)
    annotated: Any = Annotated  # with types that are made here
    sections: dict[str, list] = {}
    for each in fields(flags_class):  # type: ignore[arg-type]
        flag = declared.get(each.name, Flag("", ""))
        kind = annotated[hints[each.name], tyro.conf.arg(help=" ".join(flag.help.split()))]
        default: Any = field(default=each.default, default_factory=each.default_factory)
        if each.name in preset:
            default = preset[each.name]
        sections.setdefault(flag.section, []).append((each.name, kind, default))
    parts: list[Any] = []
    for title, own in sections.items():
        part = make_dataclass("Section", own)
        kind = annotated[part, tyro.conf.arg(name=title.lower() or "general"), tyro.conf.OmitArgPrefixes]
        parts.append((f"section_{len(parts)}", kind, field(default_factory=part)))
    described = [f"    {name:<10}  {what}" for name, what in about.items()]
    described = [description or "", "--preset NAME takes other defaults, for tasks of a kind:", *described]
    with _reader_may_leave():
        whole = make_dataclass("Sections", parts)
        parsed: Any = tyro.cli(whole, args=arguments, description="\n".join(described), use_underscores=True)
    return flags_class(**{name: value for part in vars(parsed).values() for name, value in vars(part).items()})


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """End the program quietly where nobody reads its output any more, as in `--help | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered is written at exit
        sys.exit(0)


def print_help_if_asked(flags_class: type, description: str | None, *presets_of_it) -> None:
    """End the program with `--help` if that is asked for: before torch is imported, which takes seconds."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse(flags_class, description, *presets_of_it)


def add_arguments(parser: argparse.ArgumentParser, flags_class: type) -> None:
    """The flags of a dataclass, for programs that run without tyro: texts, numbers, choices, switches that are off, and
    numbers or `auto`."""
    declared, hints = read_source(flags_class), get_type_hints(flags_class)
    for each in fields(flags_class):
        kind, text = hints[each.name], declared.get(each.name, Flag("", "")).help
        options: dict[str, Any] = {"default": each.default, "help": " ".join(text.split()).replace("%", "%%")}
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif kind is bool:
            options["action"] = "store_true"
        else:
            number = get_args(kind)[0] if get_args(kind) else kind
            number = _whole(each.name) if number is int else number
            options["type"] = _auto_or(number) if get_args(kind) else number
        parser.add_argument(f"--{each.name}", **options)


def _whole(name: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        return int(whole_number(name, text))

    parse.__name__ = "int"  # argparse's errors quote it
    return parse


def _auto_or(number: Callable) -> Callable[[str], float | str]:
    def parse(text: str) -> float | str:
        return text if text == "auto" else number(text)

    parse.__name__ = f"auto or {number.__name__}"  # argparse's errors quote it
    return parse
