"""Layer 2, no torch: parses output into reasoning, text and tool calls; grammars that force a tool call."""
