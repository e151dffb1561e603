"""What runs on a host of environments. Nothing in here imports torch."""
