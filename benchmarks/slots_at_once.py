"""monobeast.py whose slots are handed out as soon as they are free, instead of just in time for the learner.

Rollouts then wait for a learner that is slower than its actors. benchmarks/learning.py compares what both learn.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import monobeast  # noqa: E402
from beast.feeds.slots import Slots  # noqa: E402

Slots._is_early = lambda slots: False

if __name__ == "__main__":
    monobeast.main()
