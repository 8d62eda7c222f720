"""Layer 3, no torch: the scheduler, which decides what each request computes in the next step. Integers only."""
