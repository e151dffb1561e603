"""What both variants of Beast share and a researcher seldom edits: V-trace, distributions, environments, runs."""

__version__ = "0.1.0"
