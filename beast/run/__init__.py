"""A run: flags, directory, threads and their end, metrics, checkpoints, and what the machine has."""
