"""Cost of expert parallelism on paper: bytes on the wire and time a layer, for docs/scale.md."""
