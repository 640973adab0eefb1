"""Each backend's own layers."""
