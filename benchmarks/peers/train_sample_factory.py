"""Sample Factory's own Atari example. Its workers are spawned and run this file again, so that they know ALE's ids."""

import sys

import ale_py  # noqa: F401  registers the ids
from sf_examples.atari.train_atari import main

if __name__ == "__main__":
    sys.exit(main())
