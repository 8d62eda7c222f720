"""Sampling kernels: logit processors, top-k and top-p, draws, log-probabilities, end of rows."""
