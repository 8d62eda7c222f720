"""Floor 3, paper: who computes what in the next step."""
