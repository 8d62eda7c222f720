"""Layer 1: recorded traces of requests, samples of them, and arrival times from a seed."""
