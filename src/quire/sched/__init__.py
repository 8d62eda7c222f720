"""The scheduler: which requests compute what in the next step. Integers alone: no tensors, no clock."""
