"""Attention by other libraries, where they are installed: one file per library, behind `interface.py`."""
