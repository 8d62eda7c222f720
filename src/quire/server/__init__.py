"""Layer 9: HTTP server with OpenAI, Anthropic and TGI APIs."""
