"""Triton interprets kernels as a device computes them, as in the tests of the backends."""

from __future__ import annotations

from tests.backends.conftest import _interpreter  # noqa: F401
