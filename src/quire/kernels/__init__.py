"""Layer 2: kernels of the decoder, behind one interface."""
