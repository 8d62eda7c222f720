"""Layer 1: headers, names and numbers of model files, as plain values. No torch."""
