"""Floor 9: what is measured, and how. Nothing here prints; commands show what it returns."""
