"""Layer 4, no torch: simulated runners, and programs that run the scheduler against them."""
