"""Launches: replay without the launcher's checks, kernels that overlap, and compilation ahead of time."""
