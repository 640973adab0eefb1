"""moereg as an experts implementation of live transformers models: one small model of each kind of layout."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError, RequestError, UnsupportedProblemError
from moereg.integrations._experts import serving
from moereg.integrations.transformers import prepare, refresh, register
from moereg.layer import MoEKernel
from tests.support.live_models import PROMPT, close, eager, logits_of
from tests.support.tiny_models import needs, tiny_model

FAMILIES = ("mixtral", "gpt_oss", "aria", "llama4", "dbrx")
"""One of each: plain, interleaved with biases, transposed, and two that are patched. Slow tests have all."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prepared_model_generates_the_tokens_of_eager(family: str) -> None:
    needs(family)
    model = tiny_model(family)
    expected = eager(model)
    arguments = {"max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(PROMPT, **arguments)
    prepared = prepare(model, progress=False)
    assert all(layer.backend == "torch" for layer in prepared.layers)
    assert close(logits_of(model), expected)
    assert torch.equal(model.generate(PROMPT, **arguments), tokens)


def test_what_was_prepared_is_a_line_for_each_shape(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "moereg"):
        prepared = prepare(tiny_model("mixtral"), progress=False)
    line, memory = str(prepared).splitlines()
    names = r"2 layers, model\.layers\.0\.mlp\.experts to model\.layers\.1\.mlp\.experts"
    copy_or_not = r"(weights read in place|[\d.]+ \w+ in its own layout)"
    assert re.fullmatch(rf"{names}: E4 .* -> torch \(Torch\w+\), by \w+, verified on .+; {copy_or_not}", line)
    assert {line, memory} <= {*caplog.messages}
    copied = sum(layer.kernel_bytes or 0 for layer in prepared.layers)
    assert copied == prepared.bytes_after - prepared.bytes_before
    assert ("in place" in line) == (copied == 0)


def test_from_pretrained_takes_the_name(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("mixtral")
    expected = eager(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moereg")
    assert close(logits_of(loaded), expected)
    assert serving.served(loaded.model.layers[1].mlp.experts).kernels
    prepare(loaded, free=True, progress=False)
    loaded.save_pretrained(tmp_path / "freed")
    assert torch.equal(eager(AutoModelForCausalLM.from_pretrained(tmp_path / "freed")), expected)


def test_a_name_of_transformers_is_not_taken() -> None:
    with pytest.raises(ArgumentError, match="name must not be taken in transformers, got 'grouped_mm'"):
        register("grouped_mm")
    with pytest.raises(ArgumentError, match="got 'eager'"):
        register("eager")


def test_routing_weights_in_16_bits_and_other_dtypes_of_hidden_states_are_taken() -> None:
    experts = tiny_model("mixtral").model.layers[0].mlp.experts
    experts.config._experts_implementation = "moereg"
    hidden, ids = torch.randn(3, 32, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [3, 1]])
    weights = torch.rand(3, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        found = experts(hidden, ids, weights)
        experts.config._experts_implementation = "eager"
        expected = experts(hidden.float(), ids, weights.float())
    assert found.dtype == torch.bfloat16
    assert close(found.float(), expected, 2**-7)


def test_no_tokens_and_rows_that_are_not_contiguous() -> None:
    experts = tiny_model("mixtral").model.layers[0].mlp.experts
    experts.config._experts_implementation = "moereg"
    wide = torch.randn(3, 64)
    ids, weights = torch.tensor([[0, 1], [2, 3], [3, 1]]), torch.rand(2, 3).t()
    with torch.no_grad():
        assert experts(wide[:0, ::2], ids[:0], weights[:0]).shape == (0, 32)
        found = experts(wide[:, ::2], ids, weights)
        experts.config._experts_implementation = "eager"
        assert close(found, experts(wide[:, ::2].contiguous(), ids, weights))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_ids_of_other_ranks_add_nothing(family: str) -> None:
    layer = tiny_model(family).model.layers[0].mlp.experts
    everything = torch.randn(5, 32)
    ids = torch.tensor([[0, 1], [2, 3], [3, 1], [1, 2], [2, 0]])
    weights = torch.rand(5, 2)
    layer.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = layer(everything, ids, weights)
        total = torch.zeros_like(expected)
        for rank in range(2):
            half = copy.deepcopy(layer)
            half.config._experts_implementation = "moereg"
            for name, parameter in list(half.named_parameters()):
                setattr(half, name, torch.nn.Parameter(parameter[2 * rank : 2 * rank + 2].clone()))
            half.num_experts, half._is_expert_parallel = 2, True
            local = ids - 2 * rank
            is_here = (local >= 0) & (local < 2)
            # As transformers marks them: the id after the last local one, twice in a token where both are elsewhere.
            total += half(everything, torch.where(is_here, local, 2), torch.where(is_here, weights, 0))
    assert close(total, expected)


def test_one_expert_of_a_rank_takes_tokens_of_three_routes() -> None:
    layer = tiny_model("mixtral").model.layers[0].mlp.experts
    layer.config._experts_implementation = "moereg"
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(parameter[:1].clone()))
    layer.num_experts, layer._is_expert_parallel = 1, True
    hidden, weights = torch.randn(3, 32), torch.tensor([[0.5, 0.0, 0.0]] * 3)
    ids = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 0]])
    with torch.no_grad():
        found = layer(hidden, ids, weights)
        layer.config._experts_implementation = "eager"
        # One route each: eager of transformers 5.17 knows no ids of other ranks.
        here = torch.where(ids == 0, weights, 0).sum(dim=1, keepdim=True)
        assert close(found, layer(hidden, torch.zeros(3, 1, dtype=torch.int64), here))
    assert not found[1].any()


def test_writes_into_parameters_and_other_parameters_are_followed() -> None:
    # Frozen: what requires a gradient is read again at each step anyway.
    model = tiny_model("mixtral").requires_grad_(False)
    prepare(model, progress=False)
    before = logits_of(model)
    other = tiny_model("mixtral", seed=1)
    with torch.no_grad():  # `load_state_dict` would tell by itself.
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)
    kernels = [kernel for layer in model.model.layers for kernel in serving.served(layer.mlp.experts).kernels.values()]
    reloaded: list[MoEKernel] = []
    with pytest.MonkeyPatch.context() as patched:  # A kernel that shares the parameters would be right without.
        reload = MoEKernel.reload

        def noting(kernel: MoEKernel, *args: Any, **keywords: Any) -> None:
            reloaded.append(kernel)
            reload(kernel, *args, **keywords)

        patched.setattr(MoEKernel, "reload", noting)
        assert close(logits_of(model), eager(other))
    assert reloaded == kernels
    assert not close(logits_of(model), before, 1e-3)
    after = [kernel for layer in model.model.layers for kernel in serving.served(layer.mlp.experts).kernels.values()]
    assert [id(kernel) for kernel in after] == [id(kernel) for kernel in kernels]  # Captured graphs see it.
    refresh(model)
    with pytest.MonkeyPatch.context() as patched:  # Once: frozen layers are not read again.
        patched.setattr(type(after[0]), "reload", None)
        logits_of(model)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 2, requires_grad=False)
    found = logits_of(model)
    assert close(found, eager(model))
    model.set_experts_implementation("moereg")
    experts.down_proj.data = experts.down_proj.data * 0.5
    assert not close(logits_of(model), found, 1e-3)


def test_to_another_dtype_is_followed(model: Any) -> None:
    prepare(model, progress=False)
    logits_of(model)
    model.to(torch.bfloat16)
    found = logits_of(model).float()
    assert serving.served(model.model.layers[0].mlp.experts).live.dtype == "bfloat16"
    assert close(found, eager(model).float(), 0.02)


def test_copies_and_pickles_make_kernels_of_their_own(model: Any) -> None:
    prepare(model, progress=False)
    expected = logits_of(model)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(logits_of(copied), expected)
    assert torch.equal(logits_of(read), expected)
    assert not torch.equal(logits_of(model), expected)


def test_a_model_that_is_gone_leaves_no_kernel() -> None:
    model = tiny_model("mixtral")
    prepare(model, progress=False)
    kernel = weakref.ref(next(iter(serving.served(model.model.layers[0].mlp.experts).kernels.values())))
    del model
    gc.collect()
    assert kernel() is None


def test_a_patch_leaves_models_alone_that_are_not_prepared() -> None:
    prepare(tiny_model("dbrx"), progress=False)
    other = tiny_model("dbrx", seed=3)
    logits_of(other)
    assert all(serving.served(module) is None for module in other.modules())


def test_hooks_of_accelerate_run_and_patched_blocks_run_under_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama4")
    expected = logits_of(model)
    block = model.model.layers[0].feed_forward
    calls = []

    # As accelerate does it: the method that is there is kept beside, and called by the one that takes its place.
    block._hf_hook = object()
    block._old_forward = block.forward
    block.forward = lambda *values: calls.append(1) or block._old_forward(*values)
    prepare(model, progress=False)
    assert close(logits_of(model), expected)
    assert calls == [1]
    served = []
    monkeypatch.setattr(serving.ServedExperts, "run", lambda self, *values: served.append(self.module) or values[0])
    logits_of(model)
    assert any(module is block.experts for module in served)


def test_a_request_is_passed_on_and_refusals_are_moeregs_own(model: Any) -> None:
    assert prepare(model, progress=False, require="torch").layers[0].backend == "torch"
    with pytest.raises(UnsupportedProblemError):
        prepare(model, progress=False, deny="*")
    with pytest.raises(RequestError):
        prepare(model, progress=False, require="torch", deny="torch")


def test_progress_calls_back_for_each_layer() -> None:
    seen: list[tuple[int, int]] = []
    prepare(tiny_model("mixtral"), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_what_was_prepared_prints_in_a_line_for_equal_layers() -> None:
    text = str(prepare(tiny_model("mixtral"), progress=False)).splitlines()
    assert text[0].startswith(
        "2 layers, model.layers.0.mlp.experts to model.layers.1.mlp.experts: "
        "E4 H32 I48 k2 float32 unquantized silu -> torch ("
    )
    assert text[0].endswith("; weights read in place")
    assert text[1].startswith("weights: ")
    assert len(text) == 2
