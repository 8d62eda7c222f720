"""Parsers of generated text: tool calls and reasoning as events, and the grammars that force a tool call."""
