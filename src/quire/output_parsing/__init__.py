"""Output parsers: generated text to reasoning, text and tool-call events; grammars that force a tool call."""
