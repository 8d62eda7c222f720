"""Floor 4, metal: from logits to tokens, all rows of a step at once. Ignorant of queues, blocks or models."""
