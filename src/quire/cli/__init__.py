"""Floor 10: the command line. The only room that prints, and one of two that may import late."""
