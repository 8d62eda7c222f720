"""What a continuation may say, token by token: checked, compiled by llguidance, and kept while it is used.

Knows a vocabulary's bytes and nothing of models, requests or rows. Import it where the parts are put together:
nothing else may need llguidance to be installed.
"""
