"""Floor 2, neutral: text to token ids and back. Knows nothing of tensors, queues or requests."""
