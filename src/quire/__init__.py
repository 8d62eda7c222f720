"""quire: an LLM inference and serving engine."""
