"""Layer 9: benchmarks. They return results; cli/ prints them."""
