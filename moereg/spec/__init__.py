"""Values that say what a layer is: problems, quantization schemes, activations, and what a class can do."""
