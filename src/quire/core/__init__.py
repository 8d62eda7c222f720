"""Floor 0: the words every other room speaks. No torch, no queue, no tensor."""
