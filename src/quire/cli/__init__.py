"""Layer 10: the command line. The only package that prints; lazy imports are allowed here."""
