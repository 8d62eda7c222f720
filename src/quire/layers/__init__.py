"""Floor 3, metal: the parts of a decoder layer, built from kernels."""
