"""Making and calling a layer."""
