"""Layers drawn within every cell's claim give the reference's numbers and do not touch guard bands and inputs."""

from __future__ import annotations

import os
import random

import torch

if not torch.cuda.is_available():
    # Decides at decoration whether kernels are interpreted, so it has to stand before their import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moereg.testing import cases
from moereg.testing.drawing import DrawnLayer, draw_layer, limits_of
from moereg.testing.interpreter import patch_interpreter
from tests.fuzz.area import Area, Case
from tests.support.kit import check_layer, runnable_cells


def draw(rng: random.Random) -> Case:
    """A layer of any cell that runs here."""
    cell = rng.choice(runnable_cells())
    return draw_layer(cell, rng.choice, limits_of(cell)).to_dict()


def check(case: Case) -> str | None:
    """None if the numbers are right, or the cell does not run here."""
    if cases.default_device().type == "cpu":
        patch_interpreter()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Several would wait for each other longer than they compute.
    try:
        check_layer(DrawnLayer.from_dict(case))
    except AssertionError as error:
        return str(error).partition("\n")[2]
    finally:
        torch.set_num_threads(num_threads)
    return None


AREA = Area("numbers", draw, check, share=0.1, smoke=3, limit_s=30.0, memory_mib=2048)
