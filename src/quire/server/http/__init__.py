"""HTTP below the APIs: protocol limits, authentication, errors, event streams, access log. Knows no engine."""
