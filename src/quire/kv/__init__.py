"""Layer 2, no torch: the KV cache's blocks, block tables and prefix cache.

Import `manager` and `radix_tree` only; `quire check` imports `tree_checks`.
"""
