"""MiniGrid with a plane of zeros and ones for each kind of thing, color and state:
`--env examples.minigrid_one_hot:OneHot/MiniGrid-MemoryS7-v0`.

MiniGrid's own observation [7, 7, 3] has codes, in which a ball is a key plus one. All ids of the package are here.
"""

from functools import partial

import gymnasium
import minigrid  # noqa: F401  registers its environments
from minigrid.wrappers import OneHotPartialObsWrapper


def make(env_id: str, **kwargs) -> gymnasium.Env:
    """The task of this id; the arguments are the package's own. Its image is [7, 7, 20]."""
    return OneHotPartialObsWrapper(gymnasium.make(env_id, disable_env_checker=True, **kwargs))


for _id in [name for name in gymnasium.registry if name.startswith("MiniGrid-")]:
    gymnasium.register(f"OneHot/{_id}", partial(make, _id))
