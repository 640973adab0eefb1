"""Layers drawn at random within every cell's claim, under guard bands, against the reference.

Every failure names its layer by one line of JSON; `moereg verify NAME --check 'LINE'` runs it again.
MOEREG_KIT_EXAMPLES says how many layers of each experts class are drawn; MOEREG_KIT_SEED draws others.
"""

from __future__ import annotations

import collections
import math
import os
import random

import pytest

from moereg.registry import BackendCell
from moereg.testing import cases
from moereg.testing.drawing import GPU, DrawnLayer, draw_layer, limits_of, redraw
from moereg.testing.interpreter import patch_interpreter
from tests.support.kit import check_layer, runnable_cells

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = cases.default_device()
CELLS = runnable_cells()
CELLS_OF_CLASS = collections.Counter(cell.class_name for cell in CELLS)
SEED = int(os.environ.get("MOEREG_KIT_SEED", "0"))
EXAMPLES = int(os.environ.get("MOEREG_KIT_EXAMPLES", "15"))
"""Layers of each experts class, divided among its cells."""
FIRST_EXAMPLES = 4
"""Those of them that `make test` runs."""
GPU_LAYERS = int(os.environ.get("MOEREG_KIT_EXAMPLES", "2048"))
"""Layers of all cells together."""
GPU_CONFIGURATIONS = 3
"""Layers of each cell: each costs some seconds of compiling."""


def name_of(cell: BackendCell) -> str:
    return f"{cell.name}-{cell.class_name}-{cell.rules[0]}"


each_cell = pytest.mark.parametrize("cell", CELLS, ids=name_of)


@pytest.fixture(autouse=True)
def _patched_interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


@each_cell
@pytest.mark.parametrize("examples", [FIRST_EXAMPLES, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_drawn_layers(cell: BackendCell, examples: int) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("each of these layers would be compiled anew; test_drawn_layers_on_a_gpu draws more of them")
    num_examples = examples / CELLS_OF_CLASS[cell.class_name]
    if cases.is_imitated(cell) and cell.tier == "emulation":
        num_examples /= 2  # The slowest, and most of their kernels are those of packed weights.
    choose = random.Random(f"{SEED} {name_of(cell)} {cell.schemes[0].name}").choice
    for _ in range(math.ceil(num_examples)):
        assert check_layer(draw_layer(cell, choose, limits_of(cell)))


@pytest.mark.gpu
@each_cell
def test_drawn_layers_on_a_gpu(cell: BackendCell) -> None:
    """Few configurations, each of which has to be compiled, and many sizes in each."""
    if DEVICE.type != "cuda":
        pytest.skip("needs a CUDA device")
    choose = random.Random(f"{SEED}/{name_of(cell)}/{cell.schemes[0].name}").choice
    num_layers, num_ran, failures = math.ceil(GPU_LAYERS / len(CELLS)), 0, []
    for configuration in range(GPU_CONFIGURATIONS):
        layer = first = draw_layer(cell, choose, GPU)
        for _ in range(configuration, num_layers, GPU_CONFIGURATIONS):
            try:
                num_ran += check_layer(layer, num_calls=2)  # The second replays launches that a backend recorded.
            except AssertionError as error:
                num_ran += 1
                failures.append(str(error))
            layer = redraw(first, choose, GPU)
    print(f"{name_of(cell)}: {num_ran} layers, {len(failures)} failures, seed {SEED}")
    assert num_ran == num_layers
    assert not failures, "\n".join(failures[:10])


def native_cell(class_name: str = "TorchDenseExperts") -> BackendCell:
    return next(cell for cell in CELLS if cell.class_name == class_name)


@each_cell
def test_a_drawn_layer_is_one_that_its_cell_claims(cell: BackendCell) -> None:
    rng = random.Random(1)
    for limits in (limits_of(cell), GPU):
        for _ in range(30):
            layer = draw_layer(cell, rng.choice, limits)
            other = redraw(layer, rng.choice, limits)
            for drawn in (layer, other):
                case = drawn.case()
                assert case.cell == cell
                cases.select_cell(case)  # Asserts that the cell accepts the problem.
                assert DrawnLayer.from_json(str(drawn)) == drawn
            sizes = ("hidden_size", "intermediate_size")
            assert all((getattr(other.problem, size) - getattr(layer.problem, size)) % 128 == 0 for size in sizes)
            same = ("quant", "dtype", "activation", "has_bias", "top_k", "placement", "apply_router_weight_on_input")
            assert all(getattr(other.problem, field) == getattr(layer.problem, field) for field in same)


def test_half_a_pad_more_than_whole_ones_is_drawn_often() -> None:
    rng = random.Random(1)
    drawn = [draw_layer(native_cell(), rng.choice, limits_of(native_cell())).problem for _ in range(300)]
    for field in ("hidden_size", "intermediate_size"):
        share = sum(getattr(problem, field) % 64 == 32 for problem in drawn) / len(drawn)
        assert share > 0.3
        assert len({getattr(problem, field) % 64 for problem in drawn}) > 8
