"""What runs behind `aiter_moe`."""
