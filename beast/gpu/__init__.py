"""Environments of our own that live on a GPU, and their kernels."""
