"""Values that describe a layer: problems, quantization schemes, activations, and the facts of backends."""
