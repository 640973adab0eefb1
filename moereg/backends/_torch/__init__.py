"""What runs behind the claims of `torch_moe`."""
