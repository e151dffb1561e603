"""Queues and ActorPool, where TorchBeast's first release had them."""

from libbeast import Batch
from libtorchbeast import ActorPool, AsyncError, BatchingQueue, ClosedBatchingQueue, DynamicBatcher

NestError = ValueError  # which a nest of the wrong structure raises here

__all__ = ["ActorPool", "AsyncError", "Batch", "BatchingQueue", "ClosedBatchingQueue", "DynamicBatcher", "NestError"]
