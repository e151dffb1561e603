"""Published returns of random play and of human players, by which scores of different tasks can be compared."""

import csv
import functools
from pathlib import Path
from typing import NamedTuple

from beast.envs.atari import ATARI_ID

DMLAB = "dmlab:"  # begins the ids of DeepMind Lab's levels
DMLAB30 = f"{DMLAB}dmlab30"  # as --env: all 30 levels, and with `_test` their test levels


class Reference(NamedTuple):
    """Mean returns, between which a task's returns are measured."""

    random: float
    human: float

    def score(self, mean_return: float) -> float:
        """0 for random play, 1 for a human's."""
        return (mean_return - self.random) / (self.human - self.random)


@functools.cache
def _table() -> dict[tuple[str, str], Reference]:
    lines = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {(row["set"], row["name"]): Reference(float(row["random"]), float(row["human"])) for row in rows}


def reference_of(env_id: str) -> Reference | None:
    """That of an Atari game, or of a level of DMLab-30; of a training level that of its test level."""
    if match := ATARI_ID.fullmatch(env_id):
        return _table().get(("atari", match["deepmind"] or match["machado"]))
    if not env_id.startswith(DMLAB):
        return None
    level = env_id.removeprefix(DMLAB).removeprefix("contributed/dmlab30/").replace("_train", "_test")
    return _table().get(("dmlab30", level))


def _levels(*, training: bool) -> list[str]:
    """The ids of DMLab-30; two of its levels have another one for training."""
    tests = [name for group, name in _table() if group == "dmlab30"]
    return [f"{DMLAB}{name.replace('_test', '_train') if training else name}" for name in tests]


# Ids that stand for several, and the arguments of their environments.
SETS: dict[str, tuple[list[str], dict]] = {
    DMLAB30: (_levels(training=True), {"instruction": True}),
    f"{DMLAB30}_test": (_levels(training=False), {"instruction": True, "held_out": True}),
}
