"""What the Triton kernels hold, for those who choose an implementation without importing triton."""

LARGEST_HEAD = 128
"""Channels of a head at most; a head has a multiple of 16."""
