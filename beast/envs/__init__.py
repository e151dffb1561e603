"""Environments made by their id, stepped in groups, written in place into rollouts. Nothing in here imports torch."""

from beast.envs.by_id import frames_per_step, is_atari, make

__all__ = ["frames_per_step", "is_atari", "make"]
