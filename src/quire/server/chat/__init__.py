"""Chat shared by all APIs: prompts from messages and tools, and parsed output."""
