"""CPU kernels: numba for norms and paged attention, AMX for matrix products where the CPU has it."""
