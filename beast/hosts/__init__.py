"""What runs on a host of environments. Nothing in here imports torch."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by grpc's import; callers could fill its log with what they send
