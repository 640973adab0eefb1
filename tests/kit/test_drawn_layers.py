"""Layers drawn at random within every cell's claim, under guard bands, against the reference.

Every failure names its layer by one line of JSON; `moereg verify NAME --check 'LINE'` runs it again.
MOEREG_KIT_EXAMPLES says how many layers of each experts class are drawn; MOEREG_KIT_SEED draws others.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import random
from collections.abc import Callable

import hypothesis.configuration
import pytest

from moereg.registry import BackendCell
from moereg.testing import cases
from moereg.testing.drawing import GPU, DrawnLayer, check_drawn, draw_layer, drawn_layers, limits_of, vary_sizes
from moereg.testing.interpreter import patch_interpreter
from tests.cli.command import run_code
from tests.support.kit import check_layer, runnable_cells

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = cases.default_device()
CELLS = runnable_cells()
CELLS_OF_CLASS = collections.Counter(cell.class_name for cell in CELLS)
SEED = int(os.environ.get("MOEREG_KIT_SEED", "0"))
EXAMPLES = int(os.environ.get("MOEREG_KIT_EXAMPLES", "8"))
"""Layers of each experts class, divided among its cells."""
FIRST_EXAMPLES = 2
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
            layer = vary_sizes(first, choose, GPU)
    print(f"{name_of(cell)}: {num_ran} layers, {len(failures)} failures, seed {SEED}")
    assert num_ran == num_layers
    assert not failures, "\n".join(failures[:10])


def native_cell(class_name: str = "TorchDenseExperts") -> BackendCell:
    return next(cell for cell in CELLS if cell.class_name == class_name)


@each_cell
def test_a_drawn_layer_is_one_that_its_cell_claims(cell: BackendCell) -> None:
    rng = random.Random(1)
    for limits in (limits_of(cell), GPU):
        for _ in range(10):
            layer = draw_layer(cell, rng.choice, limits)
            other = vary_sizes(layer, rng.choice, limits)
            for drawn in (layer, other):
                case = drawn.case()
                assert case.cell == cell
                cases.select_cell(case)  # Asserts that the cell accepts the problem.
                assert DrawnLayer.from_json(str(drawn)) == drawn
            sizes = {size: getattr(layer.problem, size) for size in ("hidden_size", "intermediate_size")}
            assert all((getattr(other.problem, size) - value) % 128 == 0 for size, value in sizes.items())
            assert dataclasses.replace(other.problem, **sizes) == layer.problem


def test_half_a_pad_more_than_whole_ones_is_drawn_often() -> None:
    rng = random.Random(1)
    drawn = [draw_layer(native_cell(), rng.choice, limits_of(native_cell())).problem for _ in range(300)]
    for field in ("hidden_size", "intermediate_size"):
        share = sum(getattr(problem, field) % 64 == 32 for problem in drawn) / len(drawn)
        assert share > 0.3
        assert len({getattr(problem, field) % 64 for problem in drawn}) > 8


def told_by(
    check: Callable[[DrawnLayer], object], seed: int = 0, num_layers: int | None = 10, seconds: float | None = None
) -> tuple[list[DrawnLayer], str]:
    """The layers that `check_drawn` tells of, in order, and what it raises."""
    told: list[DrawnLayer] = []
    try:
        check_drawn(native_cell(), check, seed, num_layers, seconds, lambda each: told.append(each[1]))
    except AssertionError as error:
        return told, str(error)
    return told, ""


def test_equal_seeds_draw_equal_layers_and_write_nothing() -> None:
    homes: list[str] = []

    def check(layer: DrawnLayer) -> None:
        homes.append(str(hypothesis.configuration.storage_directory().path))

    first, other = (list(map(str, told_by(check, seed)[0])) for seed in (0, 1))
    assert len(set(first)) == 10
    assert len({*first} & {*other}) == 1, "the simplest layer alone is drawn with each seed"
    assert set(homes) == {os.devnull}
    # Sets have another order in another process.
    lines = "from tests.kit.test_drawn_layers import told_by", "print(*told_by(lambda layer: None)[0], sep='\\n')"
    ran = run_code("\n".join(lines), env={**os.environ, "PYTHONHASHSEED": "77"})
    assert ran.stdout.splitlines() == first, ran.stderr


def test_a_layer_that_fails_is_made_simple_while_it_fails_of_the_same_cause() -> None:
    tall: list[DrawnLayer] = []

    def check(layer: DrawnLayer) -> None:
        is_tall = layer.num_tokens > 30 and layer.problem.hidden_size > 100
        tall.extend([layer] if is_tall else [])
        assert not is_tall, "error 1; likely cause: tall tiles"
        assert not (tall and layer.num_tokens > 1), "error 2; likely cause: something else"

    told, message = told_by(check, num_layers=100)
    found, problem = told[-1], told[-1].problem
    assert "tall tiles" in message
    assert len(tall) > 1
    assert found == tall[-1]
    assert (found.num_tokens, problem.hidden_size, problem.intermediate_size) == (31, 160, 32)
    assert (problem.num_experts, problem.top_k, problem.has_bias, problem.dtype) == (1, 1, False, "float32")
    assert (found.routing, found.fill, found.form, found.seed) == ("uniform", "nan", "contiguous", 0)


def test_layers_are_drawn_until_the_time_is_up() -> None:
    assert len(told_by(lambda layer: None, num_layers=None, seconds=2)[0]) > 20

    def interrupt(layer: DrawnLayer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told_by(interrupt)


@hypothesis.settings(max_examples=5, deadline=None, database=None, derandomize=True)
@hypothesis.given(drawn_layers(native_cell(), layers_per_kernel=3))
def test_layers_that_share_kernels_are_drawn_together(layers: list[DrawnLayer]) -> None:
    first, *others = layers
    assert len(others) == 2
    for other in others:
        assert (other.problem.quant, other.problem.activation) == (first.problem.quant, first.problem.activation)
        assert (other.problem.hidden_size - first.problem.hidden_size) % 128 == 0
