"""Reads a layer of a Hugging Face checkpoint directory: its problem, its canonical weights, its router.

Opens only config.json, the index, and the shards that hold the layer's experts and router. Shared experts are not read.

Terms of this package:

- A *projection* is one matrix of an expert, [N,K]: gate, up or down, or gate and up in one.
- A *storage format* lists the *stored* tensors of a projection, as they are in the files.
- A stored tensor is converted into the *canonical* rows of a *field* of `ExpertWeights`, such as `w13_scale`.
- *Codes* are the small integers or floats of quantized weights. A *word* is an int32 that several are packed into.
- A *part* is a stored tensor, or one row of it, with its expert and field.
- The *manifest* of a layer lists the parts of each of its experts. It is complete before any data is read.

`_files` opens files, `_models` and `_quantization` read the configs, `_manifest` lists what to read, and `_load` has
the public functions.
"""

from moereg.checkpoints._load import CheckpointLayer, load_experts, moe_layers, read_problem, read_problems

__all__ = ["CheckpointLayer", "load_experts", "moe_layers", "read_problem", "read_problems"]
