"""Layer 5: loads the tensors of a decoder from a checkpoint's files."""
