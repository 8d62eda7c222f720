"""Layer 2, no torch: tokenization, chat templates, detokenization, stop strings."""
