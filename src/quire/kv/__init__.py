"""Floor 2, paper: who holds which block of the KV cache."""
