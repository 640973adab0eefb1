"""Puts the wheel's source on the path where it is not installed, also for the processes that tests start."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    # Decides at decoration whether kernels are interpreted, so it has to stand before their import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

folders = [str(HERE)]
if importlib.util.find_spec("moereg_deepep") is None:
    folders.append(str(HERE.parent / "src"))
    sys.path.insert(0, folders[-1])
os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
