"""What the agents of Beast share and a researcher seldom edits: environments, feeds, learning arithmetic, runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beast.run.policy import Policy

__version__ = "0.1.0"

# gRPC's handlers of a fork end some children before they run another program (grpc/grpc issue 43055). Nothing of Beast
# goes on with streams in a child. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def load(path: str, agent: str = "", policy: int = 0) -> Policy:
    """The policy of a checkpoint, with its `net`, its spaces and its `flags`; no code from the file is run.

    `agent` is the file with the `Net` that was trained (`"my_fork.py"`). Left out, it is the module that the checkpoint
    names, which is imported. Of several policies in one run (multibeast.py) `policy` is the number of the one. Raises
    MissingFile or InputError.
    """
    from beast.run.policy import load  # only here: environments on other hosts need no torch

    return load(path, agent, policy)
