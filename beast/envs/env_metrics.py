"""Numbers that environments tell of their games: success, score, distance. They are logged as `env/<name>`."""

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

KEYS = ("is_success", "metrics")  # of the infos that end games, beside those of --env_metrics
MAX_NAMES, MAX_NAME = 64, 64  # names of a run, and characters of one
Numbers = dict[str, float | str]  # of one game; a str says why there is no number


def keys_of(metrics: str) -> tuple[str, ...]:
    """The keys of infos to read where --env_metrics names these beside them."""
    return (*KEYS, *filter(None, map(str.strip, metrics.split(","))))


def read_games(infos: Mapping, is_over: np.ndarray, keys: tuple[str, ...]) -> list[tuple[int, Numbers]]:
    """Column and numbers of each game that a step of a vector env has ended, those where `is_over` [K].

    Where environments are reset in the same step, `final_info` has the infos of the games that it ended.
    """
    columns, final = is_over.nonzero()[0].tolist(), infos.get("final_info")
    if final is None and not any(map(infos.__contains__, keys)):  # most rows
        return [(k, {}) for k in columns]
    return [(k, dict(_numbers(infos, k, keys))) for k in columns]


def of_step(infos: Mapping, key: str, k: int) -> Any:
    """What environment k has told under a key in a step, None for nothing: where the step has reset it, of the game
    that has ended."""
    final = infos.get("final_info")
    if final is None or not infos.get("_final_info", np.ones(k + 1, bool))[k]:
        return _entry(infos, key, k)
    if isinstance(final, Mapping):  # of each key an array
        return _entry(final, key, k)
    return final[k].get(key) if isinstance(final[k], Mapping) else None  # the infos of each environment


def _numbers(infos: Mapping, k: int, keys: tuple[str, ...]) -> Iterator[tuple[str, float | str]]:
    for key in keys:
        try:
            yield from _flat("" if key == "metrics" else key, of_step(infos, key, k))
        except Exception as error:  # of many types: whatever a vector env of a user's own has there
            yield key, f"not one value for each environment ({type(error).__name__})"


def _entry(infos: Mapping, key: str, k: int) -> Any:
    """What environment k has under a key; None for nothing. gymnasium has a bool [K] of who has any under `_key`."""
    values = infos.get(key)
    if values is None or not infos.get(f"_{key}", np.ones(k + 1, bool))[k]:
        return None
    if isinstance(values, Mapping):
        flags = {f"_{name}" for name in values}
        return {name: _entry(values, name, k) for name in values if name not in flags}
    return values[k]


def _flat(name: str, value: Any) -> Iterator[tuple[str, float | str]]:
    if isinstance(value, Mapping):
        for part in value:
            yield from _flat(f"{name}/{part}" if name else str(part), value[part])
    elif value is not None:
        try:
            value = np.asarray(value) if isinstance(value, (list, tuple)) else value
            number = math.nan if isinstance(value, (str, bytes)) else float(getattr(value, "item", lambda: value)())
        except Exception:  # of many types: no number, or several
            number = math.nan
        yield name or "metrics", number if math.isfinite(number) else f"no finite number: {ascii(value)[:60]}"


def encode(games: Iterable[tuple[int, Numbers]]) -> bytes:
    """JSON of these games together, at most 32 KB: name -> [sum, count], or why there is no number; empty for none."""
    sums: dict[str, Any] = {}
    for numbers in [numbers for _, numbers in games if numbers]:
        for name, x in list(numbers.items())[: MAX_NAMES + 1]:
            before = sums.get(name, (0.0, 0))
            total, count = (0.0, 0) if isinstance(before, str) else before
            sums[name] = x if isinstance(x, str) else [total + x, count + 1]
    if not sums:
        return b""
    kept = {_readable(name): x for name, x in list(sums.items())[: MAX_NAMES + 1]}
    return json.dumps(kept, ensure_ascii=False).encode()


def _readable(text: str) -> str:
    return "".join(x if x.isprintable() else "?" for x in text[:MAX_NAME])


class EnvMetrics:
    """Means over the games that have ended since the last row of metrics. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list] = {}  # sum and count of each name
        self._known: dict[str, str] = {}  # every name so far, and what was told of it
        self._complaints: list[str] = []

    def add(self, encoded: bytes) -> None:
        """Take in what `encode` wrote, here or on another host, which is not trusted."""
        try:
            told = {_readable(name): _checked(x) for name, x in json.loads(encoded).items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            told = {"?": "what an env server sent cannot be read"}
        with self._lock:
            for name, x in told.items():
                if name not in self._known and len(self._known) >= MAX_NAMES:
                    name, x = "", f"{name!r} and other names are left out: {MAX_NAMES} are taken"
                if not isinstance(x, str):
                    self._known.setdefault(name, "")
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = [total + x[0], count + x[1]]
                elif not self._known.get(name):
                    self._known[name] = x
                    self._complaints.append(f"warning: env/{name}: {x}")

    def take(self) -> dict[str, float]:
        """`env/<name>` of each name that was told since the last call, and of how many games they are, at most."""
        with self._lock:
            sums, self._sums = self._sums, {}
        most = {"stats/env_games": max(count for _, count in sums.values())} if sums else {}
        return {**{f"env/{name}": total / count for name, (total, count) in sums.items()}, **most}

    def complaints(self) -> list[str]:
        """What is wrong with numbers since the last call, once for each name."""
        with self._lock:
            complaints, self._complaints = self._complaints, []
        return complaints


def _checked(told: Any) -> tuple[float, int] | str:
    if isinstance(told, str):
        return _readable(told)
    total, count = map(float, told)
    if not (math.isfinite(total) and 0 < count < 2**31):
        raise ValueError
    return total, int(count)
