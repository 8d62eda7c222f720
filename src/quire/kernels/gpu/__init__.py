"""Kernels for GPUs, in Triton: each beside the plain reference it answers to."""
