"""Layer 4: from logits to tokens, all rows of a step at once. Does not depend on queues, blocks or models."""
