"""Paged attention on NVIDIA GPUs: decode, prefill, and the Hopper kernel."""
