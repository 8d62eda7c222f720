"""Layer 1: locates and fetches models. Opens no model file; no torch."""
