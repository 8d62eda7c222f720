"""Floor 9: the engine over HTTP, in its simplest form. The full surface is a later chapter."""
