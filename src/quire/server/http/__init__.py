"""HTTP below the APIs: protocol limits, authentication, admission control, errors, streams, logs, metrics."""
