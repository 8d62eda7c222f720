"""Layer 2, no torch: structured output. Validates grammars, compiles them with llguidance and computes token masks.

Does not depend on models, requests or rows. Imported only by the modules that compile
grammars or fill masks: nothing else needs llguidance.
"""
