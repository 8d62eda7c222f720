"""OpenAI batch files, answered through the same endpoints without a socket."""
