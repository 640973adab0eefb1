"""Layers drawn at random within every cell's claim, under guard bands, against the reference.

Every failure names its layer by one line of JSON; `moereg verify NAME --check 'LINE'` runs it again.
MOEREG_KIT_EXAMPLES says how many layers of each experts class are drawn; MOEREG_KIT_SEED draws others.
"""

from __future__ import annotations

import collections
import math
import os
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from moereg.registry import BackendCell
from moereg.testing import cases
from moereg.testing.checks import check_layer
from moereg.testing.drawing import GPU, DrawnLayer, Limits, draw_layer, layers, limits_of, redraw
from moereg.testing.interpreter import patch_interpreter

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = cases.default_device()
CELLS = cases.runnable_cells()
CELLS_OF_CLASS = collections.Counter(cell.class_name for cell in CELLS)
SEED = int(os.environ.get("MOEREG_KIT_SEED", "0"))
EXAMPLES = int(os.environ.get("MOEREG_KIT_EXAMPLES", "15"))
"""Layers of each experts class, divided among its cells."""
FIRST_EXAMPLES = 4
"""Those of them that `make test` runs."""
MOST_SHRINKS = 40
"""Layers that are run after the first that failed, to find a smaller one that does."""
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


def shrinking_little(check: Callable[[DrawnLayer], object], most: int) -> Callable[[DrawnLayer], None]:
    """The same check, which after its first failure looks at so many layers more and then fails for known ones only."""
    failures: dict[DrawnLayer, AssertionError] = {}
    left = most

    def checked(layer: DrawnLayer) -> None:
        nonlocal left
        if layer in failures:
            raise failures[layer]
        left -= bool(failures)
        if left < 0:
            return
        try:
            check(layer)
        except AssertionError as error:
            failures[layer] = error
            raise

    return checked


def check_drawn(
    cell: BackendCell, limits: Limits, num_examples: int, check: Callable[[DrawnLayer], object] = check_layer
) -> None:
    checked = shrinking_little(check, MOST_SHRINKS)

    @seed(zlib.crc32(f"{SEED} {name_of(cell)} {cell.schemes[0].name}".encode()))
    @settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(layers(cell, limits))
    def run(layer: DrawnLayer) -> None:
        checked(layer)

    run()


@each_cell
@pytest.mark.parametrize("examples", [FIRST_EXAMPLES, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_drawn_layers(cell: BackendCell, examples: int) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("each of these layers would be compiled anew; test_drawn_layers_on_a_gpu draws more of them")
    num_examples = examples / CELLS_OF_CLASS[cell.class_name]
    if cases.is_imitated(cell) and cell.tier == "emulation":
        num_examples /= 2  # The slowest, and most of their kernels are those of packed weights.
    check_drawn(cell, limits_of(cell), math.ceil(num_examples))


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
                assert case is not None
                assert case.cell == cell
                cases.select_cell(case)  # Asserts that the cell accepts the problem.
                assert DrawnLayer.from_json(str(drawn)) == drawn
            sizes = ("hidden_size", "intermediate_size")
            assert all((getattr(other.problem, size) - getattr(layer.problem, size)) % 128 == 0 for size in sizes)
            same = ("quant", "dtype", "activation", "has_bias", "top_k", "placement", "apply_router_weight_on_input")
            assert all(getattr(other.problem, field) == getattr(layer.problem, field) for field in same)


def test_what_fails_is_shrunk_and_named_by_a_line_that_runs_it_again() -> None:
    num_run = 0

    def check(layer: DrawnLayer) -> None:
        nonlocal num_run
        num_run += 1
        assert layer.problem.hidden_size < 60 or layer.num_tokens < 9, f"{layer}\nwrong"

    with pytest.raises(AssertionError, match="wrong") as caught:
        check_drawn(native_cell(), GPU, 100, check)
    layer = DrawnLayer.from_json(str(caught.value).partition("\n")[0])
    assert layer.problem.hidden_size >= 60
    assert layer.num_tokens >= 9
    assert (layer.problem.num_experts, layer.routing, layer.fill, layer.form) == (1, "uniform", "nan", "contiguous")
    assert num_run < 60 + MOST_SHRINKS


def test_half_a_pad_more_than_whole_ones_is_drawn_often() -> None:
    rng = random.Random(1)
    drawn = [draw_layer(native_cell(), rng.choice, limits_of(native_cell())).problem for _ in range(300)]
    for field in ("hidden_size", "intermediate_size"):
        share = sum(getattr(problem, field) % 64 == 32 for problem in drawn) / len(drawn)
        assert share > 0.3
        assert len({getattr(problem, field) % 64 for problem in drawn}) > 8
