"""Structured output: validates grammars, compiles them with llguidance and computes token masks.

Knows the vocabulary's bytes, nothing of models, requests or rows. Imported only by the modules that compile
grammars or fill masks: nothing else needs llguidance.
"""
