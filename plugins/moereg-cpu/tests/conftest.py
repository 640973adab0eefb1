"""Puts the wheel's source on the path where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("moereg_cpu") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
