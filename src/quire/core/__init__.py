"""Layer 0: the types every other package uses. No torch, no queue, no tensor."""
