"""Built-in backends: each module decorates its experts classes and does nothing else at import."""
