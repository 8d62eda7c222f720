"""Matrix products of few rows: skinny GEMMs, and the pipelined GEMM for Hopper."""
