"""The scheduler journal: every decision in tens of bytes per step, and its exact replay."""
