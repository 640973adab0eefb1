"""A backend that fails while a layer is built or run is named, whatever it raises."""

from __future__ import annotations

import dataclasses
import json
import pickle
import signal
from typing import Any

import pytest
import torch

from moereg import cli
from moereg.cli import _output
from moereg.dispatch import Selection, select_backend
from moereg.errors import BackendError, is_lack_of_memory, stops_the_process
from moereg.layer.backend_calls import make_experts
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.support.fakes import FakeExperts

PROBLEM = MoEProblem(num_experts=4, hidden_size=16, intermediate_size=8, top_k=2)
RUN = "run --experts 4 --hidden 16 --intermediate 8 --top-k 2 --tokens 3 --platform cpu"
STEPS = ("__init__", "device_types", "permute_weights", "workspace_shapes", "apply")


class _Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


class _Allocator(MemoryError):
    """An allocator's own error, which takes more than a text."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"asked {asked}, free {free}")


def _raising(step: str, error: BaseException) -> type[FakeExperts]:
    def method(*arguments: Any, **keywords: Any) -> Any:
        raise error

    kind = type("Failing", (FakeExperts,), {})
    register_moe_backend("failing", 9999, ("unquantized",), ("*",))(kind)
    # After registering, which compares signatures.
    setattr(kind, step, classmethod(method) if step == "device_types" else method)
    return kind


def _returning(step: str, value: object) -> None:
    kind = _raising(step, ValueError())
    setattr(kind, step, lambda *arguments, **keywords: value)


def _weights() -> ExpertWeights:
    return ExpertWeights(w13=torch.ones(4, 16, 16).bfloat16(), w2=torch.ones(4, 16, 8).bfloat16())


def _selection() -> Selection:
    return select_backend(PROBLEM, require="failing")


def _call(kernel: MoEKernel) -> torch.Tensor:
    return kernel(torch.ones(3, 16).bfloat16(), torch.ones(3, 2), torch.tensor([[0, 1]] * 3, dtype=torch.int32))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [RuntimeError("two\nlines \x1b[31m"), SystemExit(3), GeneratorExit(), _Hostile()])
def test_what_a_backend_raises_is_named(isolated_registry: BackendRegistry, step: str, error: BaseException) -> None:
    kind = _raising(step, error)
    with pytest.raises(BackendError) as raised:
        _call(make_kernel(PROBLEM, _weights(), _selection()))
    assert raised.value.__cause__ is error
    assert (raised.value.backend, raised.value.origin) == ("failing", kind.__module__)
    text = str(raised.value)
    assert text.isprintable()
    texts = {
        "RuntimeError": r"RuntimeError: two lines \x1b[31m",
        "SystemExit": "SystemExit: 3",
        "GeneratorExit": "GeneratorExit: no message",
        "_Hostile": "_Hostile: a message that cannot be shown",
    }
    assert text == (
        f"backend 'failing' of {kind.__module__} raised in Failing.{step}: {texts[type(error).__name__]}; do without "
        "it (--deny failing, or deny='failing' in code) and report it to its authors; torch would do instead"
    )
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.backend) == (text, "failing")


def test_arguments_come_by_name_and_a_class_may_leave_out_what_has_a_default(
    isolated_registry: BackendRegistry,
) -> None:
    class Short(FakeExperts):
        def __init__(self, problem: MoEProblem, platform: Any) -> None:
            super().__init__(problem, platform)

        def apply(self, out: Any, inputs: Any, weights: Any, workspace13: Any, workspace2: Any, *_: Any) -> None:
            assert not _
            super().apply(out, inputs, weights, workspace13, workspace2)

    register_moe_backend("short", 1, ("unquantized", "nvfp4_w4a16"), ("*",))(Short)
    quantized = select_backend(dataclasses.replace(PROBLEM, quant="nvfp4"), require="short")
    assert quantized.winner is not None
    assert make_experts(quantized, quantized.winner).computes.name == "nvfp4_w4a16"
    assert _call(make_kernel(PROBLEM, _weights(), select_backend(PROBLEM, require="short"))).shape == (3, 16)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError("no memory"),
        torch.OutOfMemoryError("no memory of the device"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    ],
    ids=["interrupted", "python", "device", "linux", "windows"],
)
def test_what_is_not_the_backends_doing_passes(isolated_registry: BackendRegistry, error: BaseException) -> None:
    _raising("apply", error)
    kernel = make_kernel(PROBLEM, _weights(), _selection())
    with pytest.raises(type(error)) as raised:
        _call(kernel)
    assert raised.value is error


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), _Allocator(3, 4)]
)
def test_lack_of_memory_while_weights_are_permuted(isolated_registry: BackendRegistry, error: Exception) -> None:
    """The same type, so that who handles it still does, with the backend, the cure, and what would do instead."""
    kind = _raising("permute_weights", error)
    with pytest.raises(type(error)) as raised:
        make_kernel(PROBLEM, _weights(), _selection())
    if isinstance(error, _Allocator):
        assert raised.value is error
        return
    text = str(raised.value)
    assert text.startswith(f"{error} (backend 'failing' of {kind.__module__} was permuting 0.0 GiB of weights and ")
    assert "do without it (--deny failing); torch would do instead)" in text
    assert raised.value.__cause__ is error


def test_what_torch_says_of_the_cpus_memory_is_lack_of_memory(
    isolated_registry: BackendRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_lack_of_memory(raised.value)
    assert not is_lack_of_memory(_Hostile())
    _raising("apply", raised.value)
    assert cli.main(RUN.split()) == _output.BAD_INPUT
    assert "moereg: not enough memory: " in capsys.readouterr().err


def test_a_signal_that_ends_the_process_passes(isolated_registry: BackendRegistry) -> None:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(143)

    def apply(self: FakeExperts, *arguments: Any, **keywords: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    kind = _raising("apply", SystemExit())
    kind.apply = apply  # type: ignore[method-assign,assignment]
    kernel = make_kernel(PROBLEM, _weights(), _selection())
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit, match="143"):
            _call(kernel)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stops_the_process(KeyboardInterrupt())
    assert not stops_the_process(SystemExit())


@pytest.mark.parametrize(
    ("step", "value", "text"),
    [
        ("device_types", ("bogus",), "named a device that torch does not know in Failing.device_types: 'bogus';"),
        ("device_types", ("cpu", 3), "returned no tuple of names of devices from Failing.device_types: ('cpu', 3);"),
        ("device_types", "cpu", "returned no tuple of names of devices from Failing.device_types: 'cpu';"),
        ("device_types", (), "returned no tuple of names of devices from Failing.device_types: ();"),
        ("permute_weights", None, "returned no PermutedWeights from Failing.permute_weights: None;"),
        ("permute_weights", {"w13": 1}, "returned no PermutedWeights from Failing.permute_weights: {'w13': 1};"),
        ("permute_weights", PermutedWeights("canonical", {}), "tensors from Failing.permute_weights: PermutedWeights("),
        ("permute_weights", PermutedWeights("canonical", {"w13": [3, 4]}), "Failing.permute_weights: PermutedWeights("),
        ("permute_weights", PermutedWeights("other", {"w13": torch.ones(4)}), "and its class declares canonical;"),
        (
            "permute_weights",
            PermutedWeights("canonical", {"w13": torch.ones(4, device="meta")}),
            "returned tensors of another device from Failing.permute_weights: meta, and the weights are on cpu;",
        ),
        (
            "workspace_shapes",
            ((8,), (10**30,)),
            f"returned no two shapes from Failing.workspace_shapes: ((8,), ({10**30},));",
        ),
        ("workspace_shapes", ((2**40, 2**40), (8,)), "returned no two shapes from Failing.workspace_shapes: (("),
        ("workspace_shapes", ((8,), (0, 2**70)), "returned no two shapes from Failing.workspace_shapes: ((8,), (0, "),
        ("workspace_shapes", (8,), "returned no two shapes from Failing.workspace_shapes: (8,);"),
        ("workspace_shapes", ((8,), (-1,)), "returned no two shapes from Failing.workspace_shapes: ((8,), (-1,));"),
        ("workspace_shapes", ((8,), 3), "returned no two shapes from Failing.workspace_shapes: ((8,), 3);"),
        ("workspace_shapes", ((8,), (1.5,)), "returned no two shapes from Failing.workspace_shapes: ((8,), (1.5,));"),
    ],
)
def test_what_a_backend_returns_is_checked(
    isolated_registry: BackendRegistry, step: str, value: object, text: str
) -> None:
    _returning(step, value)
    with pytest.raises(BackendError) as raised:
        _call(make_kernel(PROBLEM, _weights(), _selection()))
    assert text in str(raised.value)


def test_workspaces_that_fit_nowhere_are_named(
    isolated_registry: BackendRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    _returning("workspace_shapes", ((10**7, 10**7), (8,)))
    with pytest.raises(
        RuntimeError, match=r"backend 'failing' of .* asked for workspaces \(10000000, 10000000\)"
    ) as raised:
        _call(make_kernel(PROBLEM, _weights(), _selection()))
    assert is_lack_of_memory(raised.value)
    assert cli.main([*RUN.split(), "--require", "failing"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moereg: not enough memory: ")
    assert "do without it (--deny failing)" in err


def test_a_reload_that_fails_is_named_too(isolated_registry: BackendRegistry) -> None:
    kind = _raising("permute_weights", RuntimeError("not twice"))
    failing, kind.permute_weights = kind.permute_weights, FakeExperts.permute_weights  # type: ignore[method-assign]
    kernel = make_kernel(PROBLEM, _weights(), _selection())
    kind.permute_weights = failing  # type: ignore[method-assign]
    with pytest.raises(BackendError, match=r"raised in Failing.permute_weights: RuntimeError: not twice"):
        kernel.reload(_weights())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [RuntimeError("a bug\nof two lines"), SystemExit(0)])
def test_run_counts_it_as_wrong(
    isolated_registry: BackendRegistry, capsys: pytest.CaptureFixture[str], step: str, error: BaseException
) -> None:
    kind = _raising(step, error)
    text = f"backend 'failing' of {kind.__module__} raised in Failing.{step}: {type(error).__name__}: "
    for options in ((), ("--json",), ("-v", "--json")):
        assert cli.main([*RUN.split(), *options]) == 1
        captured = capsys.readouterr()
        assert ("Traceback" in captured.err) is ("-v" in options)
        if options:
            found = json.loads(captured.out)
            assert (found["backend"], found["passed"], found["relative_error"]) == ("failing", False, None)
            assert found["failure"].startswith(text)
        else:
            assert text in " ".join(captured.out.split())


def test_a_layer_that_runs_has_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failure"] is None
