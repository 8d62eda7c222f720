"""Layer 3: the layers of a decoder, built from kernels."""
