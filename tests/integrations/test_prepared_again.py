"""Models that are prepared twice, written into or moved, or whose `prepare` fails: no weights are lost or old."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError, UnsupportedProblemError
from moereg.integrations._experts import serving
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations.transformers import prepare, register, restore, warm_up
from tests.support.live_models import PROMPT, close, eager, logits_of
from tests.support.tiny_models import tiny_model


def experts_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].mlp.experts


def kernels_of(model: Any) -> list[Any]:
    return [kernel for each in find_experts(model) for kernel in serving.served(each.module).kernels.values()]


class TestAgain:
    def test_another_request_keeps_freed_weights(self, model: Any) -> None:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        expected = eager(model)
        prepare(model, free=True, progress=False)
        kernels = kernels_of(model)
        again = prepare(model, prefer="torch", progress=False)
        assert not any(kernel in kernels for kernel in kernels_of(model))
        assert experts_of(model).down_proj is None  # What was freed stays so.
        assert again.bytes_after <= again.bytes_before
        assert close(logits_of(model), expected)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        restore(model)
        assert torch.equal(eager(model), expected)

    def test_a_write_that_torch_does_not_count_is_an_error_where_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MOEREG_DEBUG", "1")
        model = tiny_model("mixtral")
        prepare(model, progress=False)
        logits_of(model)
        experts_of(model).down_proj.data.mul_(2)
        with pytest.raises(ArgumentError, match=r"torch does not count.*transformers\.refresh\(model\) after such"):
            logits_of(model)
        prepare(model, progress=False)
        assert close(logits_of(model), eager(model))

    @pytest.mark.parametrize("wishes", [{}, {"prefer": "torch"}])
    def test_the_same_request_keeps_kernels(self, wishes: dict[str, str], model: Any) -> None:
        model.set_experts_implementation("moereg")
        logits_of(model)
        prepare(model, progress=False, **wishes)
        kernels = kernels_of(model)
        prepare(model, progress=False, **wishes)
        assert all(one is other for one, other in zip(kernels_of(model), kernels, strict=True))

    def test_rows_keep_their_bits_if_asked_for(self) -> None:
        model = tiny_model("mixtral", torch.bfloat16)
        asked = {"require": "torch", "progress": False}
        layers = prepare(model, batch_invariant=True, **asked).layers
        assert all(layer.problem.batch_invariant for layer in layers)
        experts, (problem, *_) = experts_of(model), [layer.problem for layer in layers]
        x = torch.randn(37, problem.hidden_size).bfloat16()
        weights, ids = torch.rand(37, problem.num_experts).topk(problem.top_k)
        with torch.no_grad():
            together = experts(x, ids, weights)
            for rows in torch.randperm(37).split(5):
                assert torch.equal(experts(x[rows], ids[rows], weights[rows]), together[rows])
        assert not any(layer.problem.batch_invariant for layer in prepare(model, **asked).layers)

    @pytest.mark.parametrize("free", [False, True])
    def test_a_request_that_nothing_fits_changes_nothing(self, free: bool, model: Any) -> None:
        expected = eager(model)
        prepare(model, free=free, progress=False)
        for wishes in ({"require": "triton"}, {"deny": "*"}):
            with pytest.raises(UnsupportedProblemError):
                prepare(model, progress=False, **wishes)
        assert close(logits_of(model), expected)
        fresh = tiny_model("mixtral")
        with pytest.raises(UnsupportedProblemError):
            prepare(fresh, require="triton", progress=False)
        fresh.set_experts_implementation("moereg")
        assert close(logits_of(fresh), expected)

    def test_a_kernel_that_cannot_be_made_leaves_the_one_before(
        self, monkeypatch: pytest.MonkeyPatch, model: Any
    ) -> None:
        expected = eager(model)
        prepare(model, free=True, progress=False)
        right, made = serving.make_kernel, []

        def failing(*values: Any) -> Any:
            made.append(values)
            if len(made) == 2:
                raise MemoryError("no memory is left")
            return right(*values)

        monkeypatch.setattr(serving, "make_kernel", failing)
        with pytest.raises(MemoryError):
            prepare(model, prefer="torch", progress=False)
        assert close(logits_of(model), expected)
        assert torch.equal(eager(model), expected)
        assert experts_of(model).down_proj.requires_grad

    def test_arguments_are_checked_before_anything_is_changed(self, model: Any) -> None:
        with pytest.raises(ArgumentError, match=r"progress must be a bool or a function of \(done, total\), got None"):
            prepare(model, progress=None)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="free must be"):
            prepare(model, free="yes", progress=False)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="name must be a text, got 3"):
            register(3)  # type: ignore[arg-type]
        assert serving.served(experts_of(model)) is None


class TestWritten:
    """What is written into parameters after kernels were made."""

    @pytest.mark.parametrize("family", ["mixtral", "dbrx"])
    def test_load_state_dict_is_seen_in_models_of_inference_mode(self, family: str) -> None:
        other = tiny_model(family, seed=3).state_dict()
        with torch.inference_mode():
            model = tiny_model(family)
            prepare(model, progress=False)
            before, kernels = logits_of(model), kernels_of(model)
            model.load_state_dict(other)
            found = logits_of(model)
            assert all(one is two for one, two in zip(kernels_of(model), kernels, strict=True))
            restore(model)
            assert close(found, eager(model))
            assert not close(found, before, 1e-3)

    def test_what_is_refused_is_refused_at_every_call(self, model: Any) -> None:
        prepare(model, progress=False)
        experts = experts_of(model)
        right = copy.deepcopy(experts.down_proj.data)
        calls = []

        def refuse(weights: Any, **_: Any) -> None:
            calls.append(weights)
            raise ArgumentError("w2_scale must be finite")

        kernel = kernels_of(model)[0]
        kernel.reload, reload = refuse, kernel.reload
        with torch.no_grad():
            experts.down_proj.mul_(2)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="w2_scale must be finite"):
                logits_of(model)
        kernel.reload = reload
        with torch.no_grad():
            experts.down_proj.copy_(right)
        assert close(logits_of(model), eager(model))


class TestFreedAndChanged:
    @pytest.mark.parametrize("family", ["mixtral", "dbrx"])
    def test_another_dtype_brings_them_back_converted(self, family: str) -> None:
        model, expected = tiny_model(family, torch.bfloat16), tiny_model(family, torch.bfloat16).float()
        prepare(model, free=True, progress=False)
        logits_of(model)
        copied = copy.deepcopy(model)
        model.float()
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        assert close(logits_of(model), eager(expected))
        restore(model)
        assert torch.equal(eager(model), eager(expected))
        assert {value.dtype for value in copied.float().state_dict().values()} == {torch.float32}
        assert close(logits_of(copied), eager(expected))
        assert prepare(copied, free=True, progress=False).layers[0].kept is None

    def test_what_converts_nothing_keeps_them_freed(self, model: Any) -> None:
        prepare(model, free=True, progress=False)
        kernels = kernels_of(model)
        model.to("cpu").float().to(torch.float32)
        assert experts_of(model).down_proj is None
        assert all(one is other for one, other in zip(kernels_of(model), kernels, strict=True))
        restore(model)
        torch.save(model, io.BytesIO())
        assert "_apply" not in vars(experts_of(model))

    def test_a_parameter_that_is_set_counts(self, model: Any) -> None:
        plain = copy.deepcopy(model)
        prepare(model, free=True, progress=False)
        for each in (model, plain):
            torch.manual_seed(5)
            experts_of(each).gate_up_proj = torch.nn.Parameter(torch.randn(4, 96, 32))
        found, expected = model.state_dict(), plain.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert close(logits_of(model), eager(plain))
        assert torch.equal(eager(model), eager(plain))

    def test_keys_that_a_state_lacks_are_missed(self, model: Any) -> None:
        prepare(model, free=True, progress=False)
        state = {name: value for name, value in model.state_dict().items() if "experts" not in name}
        assert len(model.load_state_dict(state, strict=False).missing_keys) == 4
        with pytest.raises(RuntimeError, match=r"Missing key.*experts\.gate_up_proj"):
            model.load_state_dict(state)


def test_a_bare_patched_block_is_one_layer() -> None:
    block: Any = next(each for each in tiny_model("llama4").modules() if type(each).__name__ == "Llama4TextMoe")
    assert [(each.name, each.class_name) for each in find_experts(block)] == [("experts", "Llama4TextExperts")]
    hidden = torch.randn(1, 3, block.hidden_dim)
    with torch.no_grad():
        expected = block(hidden)[0]
        prepare(block, progress=False)
        assert serving.served(block.experts) is not None
        assert close(block(hidden)[0], expected)


def test_the_way_out_of_a_patched_class_runs_without_moereg() -> None:
    model = tiny_model("llama4")
    expected = logits_of(model)
    prepare(model, progress=False)
    owner, attribute = serving.owner_of(find_experts(model)[0].module, "down_proj")
    down_proj, converted = getattr(owner, attribute), torch.nn.Parameter(getattr(owner, attribute).detach().double())
    setattr(owner, attribute, converted)
    with pytest.raises(ArgumentError, match=r"moereg\.integrations\.transformers\.restore\(model\) runs it without"):
        logits_of(model)
    setattr(owner, attribute, down_proj)
    assert kernels_of(model)
    restore(model)
    assert not any(serving.served(module) for module in model.modules())
    assert model(PROMPT).logits.requires_grad
    assert torch.equal(logits_of(model.eval()), expected)


@pytest.mark.parametrize("copies", [False, True])
def test_restore_leaves_nothing_of_ours(copies: bool, model: Any) -> None:
    names = set(vars(experts_of(model)))
    prepare(model, free=True, progress=False)
    model = copy.deepcopy(model) if copies else model
    restore(model)
    assert set(vars(experts_of(model))) == names
    model.set_experts_implementation("eager")
    assert b"moereg" not in pickle.dumps(model)
    expected = logits_of(model)
    assert prepare(model, free=True, progress=False).layers[0].kept is None  # With its hooks again.
    assert torch.equal(eager(model), expected)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", "gate_up_proj is float32 and down_proj is bfloat16"),
        ("dbrx", "mlp.w1 is float32 and mlp.w2 is bfloat16"),
    ],
)
def test_matrices_of_two_dtypes_are_named(family: str, names: str) -> None:
    model = tiny_model(family)
    module = find_experts(model)[0].module
    owner, attribute = serving.owner_of(module, "down_proj" if family == "mixtral" else "mlp.w2")
    setattr(owner, attribute, torch.nn.Parameter(getattr(owner, attribute).detach().bfloat16()))
    with pytest.raises(ArgumentError, match=rf"Experts \(.*\.0\..*\): {names}, and a kernel takes one dtype; conv"):
        prepare(model, progress=False)


def test_a_caller_that_stops_between_layers_has_a_model_that_runs(model: Any) -> None:
    expected = eager(model)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    stopping: Callable[[int, int], None] = stop
    with pytest.raises(KeyboardInterrupt):
        prepare(model, free=True, progress=stopping)
    assert torch.equal(logits_of(model), expected)  # The implementation is the one that was set.


def test_a_model_is_warmed_up_layer_by_layer(model: Any) -> None:
    with pytest.raises(ArgumentError, match="warm_up needs a model with kernels of moereg; call prepare"):
        warm_up(model)
    prepare(model, progress=False)
    done = warm_up(model, iter([4, 1]))
    assert [(one.backend, one.token_counts) for one in done] == [("torch", (1, 4))] * len(kernels_of(model))
    assert "compiles nothing on cpu" in done[0].notes[0]
    with pytest.raises(ArgumentError, match="must be at least 0, got -1"):
        warm_up(model, [-1])
