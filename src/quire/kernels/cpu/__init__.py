"""CPU kernels: native ones compiled from C++, and torch alone where there is no compiler."""
