"""Floor 4, paper: bodies behind the bridge that need no tensors, and what drives the scheduler against them."""
