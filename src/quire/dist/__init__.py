"""Layer 2: collectives between the ranks of a tensor-parallel group."""
