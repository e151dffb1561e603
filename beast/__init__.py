"""What the agents of Beast share and a researcher seldom edits: environments, feeds, learning arithmetic, runs."""

__version__ = "0.1.0"
