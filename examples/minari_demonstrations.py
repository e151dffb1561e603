"""Write a data set of Minari's, which is on this machine, as demonstrations (docs/demonstrations.md).

    python -m examples.minari_demonstrations cartpole/expert-v0 cartpole.npz    # needs pip install "minari[hdf5]"

Texts are left out, as Beast leaves them out of observations. A mask of legal actions is taken from observations or
infos.
"""

import sys

import numpy as np
from gymnasium import spaces

from beast.envs.masks import MASK, legal_choices, spaces_with_mask
from beast.envs.spaces import parts_by_name
from beast.errors import InputError, MissingPackage, exit_with_message, first_line
from beast.files import replace_file
from beast.learn.demonstrations import array_name


def main(name: str, output: str) -> None:
    try:
        import minari
    except ImportError as error:
        raise MissingPackage(f'needs Minari: pip install "minari[hdf5]" ({first_line(error)})') from None
    try:
        data = minari.load_dataset(name)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {first_line(error)}; `minari list local` names those that there are") from None
    space, action_space = data.observation_space, data.action_space
    episodes: list[dict[str, np.ndarray]] = []
    for episode in data.iterate_episodes():
        count, infos = len(episode.rewards), episode.infos or {}
        observed = parts_by_name(space, episode.observations)  # one more than there are actions
        kept = spaces_with_mask(space, action_space, MASK in infos)
        if MASK in kept:
            observed[MASK] = legal_choices(space, action_space, episode.observations, infos, count + 1)
        names = [part for part, of_part in kept.items() if not isinstance(of_part, spaces.Text)]
        arrays = {array_name("observations", part): observed[part] for part in names}
        arrays |= {array_name("actions", x): part for x, part in parts_by_name(action_space, episode.actions).items()}
        arrays |= {"rewards": episode.rewards, "episode_ends": np.arange(1, count + 1) == count}
        episodes.append({part: np.asarray(x)[:count] for part, x in arrays.items()})
    if not episodes:
        raise InputError(f"{name}: has no episodes")
    arrays = {part: np.concatenate([episode[part] for episode in episodes]) for part in episodes[0]}
    replace_file(output, lambda file: np.savez_compressed(file, **arrays))
    print(f"{output}: {len(arrays['rewards']):,} decisions of {len(episodes)} episodes of {name}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.minari_demonstrations DATASET OUTPUT")
    with exit_with_message():
        main(*sys.argv[1:])
