"""The OpenAI API: request bodies, endpoints and responses."""
