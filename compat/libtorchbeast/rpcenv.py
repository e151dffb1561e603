"""Server, where TorchBeast's first release had it."""

from libtorchbeast import Server

__all__ = ["Server"]
