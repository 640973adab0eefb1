"""What the experts classes of the backend `triton` share."""
