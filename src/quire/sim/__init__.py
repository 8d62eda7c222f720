"""Floor 4, no torch: runners without tensors, and what drives the scheduler against them."""
