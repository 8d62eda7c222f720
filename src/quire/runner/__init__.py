"""Floor 6, metal: follows plans on a device. Never sees a queue."""
