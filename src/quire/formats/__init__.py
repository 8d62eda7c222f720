"""Floor 1: what is in a model's files (headers, names, numbers), as plain values. No torch."""
