"""Layer 4: one decoder for all model families; families are values of `ModelSpec`."""
