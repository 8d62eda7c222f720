"""Models: one decoder body; families are values of `ModelSpec`."""
