"""Small quantized checkpoints, each with the script that wrote it."""
