"""Floor 9: the engine over HTTP, in the shapes that OpenAI's clients know."""
