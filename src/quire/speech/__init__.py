"""Floor 2, neutral: what a model says, as events: text, thoughts, calls. Knows no tokens and no requests."""
