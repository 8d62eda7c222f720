"""Floor 4, metal: one decoder body; families are values of `ModelSpec`."""
