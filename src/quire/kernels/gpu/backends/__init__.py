"""Attention by other libraries, where they are installed: one file each, behind one small contract (`share.py`)."""
