"""The text-generation-inference API."""
