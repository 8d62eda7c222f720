"""GPU kernels in Triton and Gluon. Each is tested against the reference."""
