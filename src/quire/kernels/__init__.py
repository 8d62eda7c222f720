"""Floor 2, metal: the tensor operations a decoder is made of, each behind one contract."""
