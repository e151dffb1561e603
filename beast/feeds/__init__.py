"""Feeds: how rows of observations reach the agent, and rollouts the learner."""

import os

# gRPC's handlers of a fork end some children before they run another program (grpc/grpc issue 43055). Nothing of Beast
# goes on with streams in a child. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
