"""CPU kernels: numba for norms and paged attention, AMX for matmuls where the CPU has it."""
