"""Layer 7: the engine. Combines scheduler and runner."""
