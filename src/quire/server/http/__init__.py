"""HTTP: protocol limits, authentication, errors, event streams, access log. Does not depend on the engine."""
