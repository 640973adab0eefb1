"""Products of a layer that is trained: a forward pass that saves, and gradients, on canonical weights, in Triton."""
