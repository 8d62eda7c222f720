"""Floor 1, neutral: what arrives when, and how long it is. Traces, samples of them, and arrivals drawn from a seed."""
