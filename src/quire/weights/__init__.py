"""Floor 5, metal: from a checkpoint's files to the tensors that a decoder reads."""
