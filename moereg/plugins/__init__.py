"""Entry points of installed distributions: what is there, what loaded, and the only importer of backends."""

from __future__ import annotations

from moereg.plugins.status import PluginStatus

__all__ = ["PluginStatus"]
