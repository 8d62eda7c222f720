"""Floor 1, neutral: where models are and how they get here. Opens no model file; no torch."""
