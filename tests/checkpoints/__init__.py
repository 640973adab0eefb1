"""Small quantised checkpoints, each with the script that wrote it."""
