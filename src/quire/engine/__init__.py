"""Floor 7: where the two towers meet."""
