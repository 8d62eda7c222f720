"""GEMMs of few rows: skinny GEMM for any GPU, pipelined GEMM for Hopper."""
