"""Layers of a decoder, built from kernels."""
