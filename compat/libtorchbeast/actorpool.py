"""Queues and ActorPool, where TorchBeast's first release had them."""

from libtorchbeast import ActorPool, AsyncError, BatchingQueue, ClosedBatchingQueue, DynamicBatcher

__all__ = ["ActorPool", "AsyncError", "BatchingQueue", "ClosedBatchingQueue", "DynamicBatcher"]
