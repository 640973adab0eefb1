"""moereg as an experts implementation of live transformers models: one small model of each kind of layout."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch

from moereg.activations import Activation
from moereg.errors import ArgumentError, RequestError, UnsupportedProblemError
from moereg.integrations._experts import serving
from moereg.integrations.transformers import explain_model, prepare, register, restore
from tests.support.tiny_models import needs, tiny_config, tiny_model

FAMILIES = ("mixtral", "gpt_oss", "aria", "llama4", "dbrx")
"""One of each: plain, interleaved with biases, transposed, and two that are patched. Slow tests have all."""

PROMPT = torch.tensor([[3, 9, 27, 5, 15], [4, 16, 11, 44, 23]])


def logits_of(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits


def eager(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    model.set_experts_implementation("eager")
    return logits_of(model, prompt)


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-6) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


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


def test_kernels_are_made_at_the_first_call_and_once() -> None:
    model = tiny_model("mixtral")
    expected = eager(model)
    model.set_experts_implementation("moereg")
    experts = model.model.layers[0].mlp.experts
    assert serving.served(experts) is None
    assert close(logits_of(model), expected)
    kernels = dict(serving.served(experts).kernels)
    logits_of(model)
    assert serving.served(experts).kernels == kernels
    assert len(kernels) == 1


def test_from_pretrained_takes_the_name(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("mixtral")
    expected = eager(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moereg")
    assert close(logits_of(loaded), expected)
    assert serving.served(loaded.model.layers[1].mlp.experts).kernels


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


def test_one_expert_of_a_rank_takes_tokens_of_two_routes() -> None:
    layer = tiny_model("mixtral").model.layers[0].mlp.experts
    layer.config._experts_implementation = "moereg"
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(parameter[:1].clone()))
    layer.num_experts, layer._is_expert_parallel = 1, True
    hidden, ids, weights = torch.randn(3, 32), torch.tensor([[0, 1], [1, 1], [1, 0]]), torch.tensor([[0.5, 0.0]] * 3)
    with torch.no_grad():
        found = layer(hidden, ids, weights)
        layer.config._experts_implementation = "eager"
        # One route each: eager of transformers 5.17 knows no ids of other ranks.
        here = torch.where(ids == 0, weights, 0).sum(dim=1, keepdim=True)
        assert close(found, layer(hidden, torch.zeros(3, 1, dtype=torch.int64), here))
    assert not found[1].any()


def test_writes_into_parameters_and_other_parameters_are_followed() -> None:
    model = tiny_model("mixtral")
    prepare(model, progress=False)
    before = logits_of(model)
    other = tiny_model("mixtral", seed=1)
    model.load_state_dict(other.state_dict())
    kernels = [kernel for layer in model.model.layers for kernel in serving.served(layer.mlp.experts).kernels.values()]
    assert close(logits_of(model), eager(other))
    assert not close(logits_of(model), before, 1e-3)
    after = [kernel for layer in model.model.layers for kernel in serving.served(layer.mlp.experts).kernels.values()]
    assert [id(kernel) for kernel in after] == [id(kernel) for kernel in kernels]  # Captured graphs see it.
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 2)
    found = logits_of(model)
    assert close(found, eager(model))
    model.set_experts_implementation("moereg")
    experts.down_proj.data = experts.down_proj.data * 0.5
    assert not close(logits_of(model), found, 1e-3)


def test_to_another_dtype_is_followed() -> None:
    model = tiny_model("mixtral")
    prepare(model, progress=False)
    logits_of(model)
    model.to(torch.bfloat16)
    found = logits_of(model).float()
    assert serving.served(model.model.layers[0].mlp.experts).live.dtype == "bfloat16"
    assert close(found, eager(model).float(), 0.02)


def test_state_dict_and_parameters_are_those_of_the_model() -> None:
    model = tiny_model("mixtral")
    names, parameters = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    prepare(model, progress=False)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == parameters


def test_copies_and_pickles_make_kernels_of_their_own() -> None:
    model = tiny_model("mixtral")
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


def test_restore_undoes_a_patch_and_drops_kernels() -> None:
    model = tiny_model("llama4")
    expected = logits_of(model)
    prepare(model, progress=False)
    experts = model.model.layers[0].feed_forward.experts
    assert serving.served(experts) is not None
    restore(model)
    assert serving.served(experts) is None
    assert torch.equal(logits_of(model), expected)


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


def test_a_request_is_passed_on_and_refusals_are_moeregs_own() -> None:
    model = tiny_model("mixtral")
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
    assert text[0] == (
        "model.layers.0.mlp.experts to model.layers.1.mlp.experts (2 layers): "
        "E4 H32 I48 k2 float32 unquantized silu -> torch"
    )
    assert text[1].startswith("weights: ")
    assert len(text) == 2


class TestFreed:
    """Models whose canonical weights were given back."""

    @pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "aria", "dbrx"])
    def test_state_dict_has_the_bits_of_before(self, family: str) -> None:
        needs(family)
        model = tiny_model(family)
        expected, saved = eager(model), {name: value.clone() for name, value in model.state_dict().items()}
        prepared = prepare(model, free=True, progress=False)
        assert not any(layer.kept for layer in prepared.layers)
        experts = sum(value.nbytes for name, value in saved.items() if "experts" in name)
        assert prepared.bytes_after <= prepared.bytes_before + 64 * len(saved)  # One copy of the experts, not two.
        assert prepared.bytes_before >= experts
        assert not any("experts" in name and "weight" not in name for name, _ in model.named_parameters())
        found = model.state_dict()
        assert set(found) == set(saved)
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        assert close(logits_of(model), expected)

    def test_other_weights_are_loaded_as_ever(self) -> None:
        model, other = tiny_model("mixtral"), tiny_model("mixtral", seed=1)
        prepare(model, free=True, progress=False)
        model.load_state_dict(other.state_dict())
        assert close(logits_of(model), eager(other))
        prepare(model, free=True, progress=False)
        assert close(logits_of(model), eager(other))
        assert model.model.layers[0].mlp.experts.down_proj is None

    def test_a_saved_model_is_read_by_transformers(self, tmp_path: Any) -> None:
        from transformers import AutoModelForCausalLM

        model = tiny_model("mixtral")
        expected = eager(model)
        prepare(model, free=True, progress=False)
        model.save_pretrained(tmp_path)
        assert torch.equal(eager(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)

    def test_another_implementation_gets_the_weights_back(self) -> None:
        model = tiny_model("mixtral")
        expected = eager(model)
        prepare(model, free=True, progress=False)
        assert model.model.layers[0].mlp.experts.down_proj is None
        assert torch.equal(eager(model), expected)
        assert model.model.layers[0].mlp.experts.down_proj.requires_grad

    def test_restore_gives_them_back(self) -> None:
        model = tiny_model("llama4")
        expected = logits_of(model)
        prepare(model, free=True, progress=False)
        restore(model)
        assert torch.equal(logits_of(model), expected)

    def test_copies_have_them_and_pickles_say_how(self) -> None:
        model = tiny_model("mixtral")
        prepare(model, free=True, progress=False)
        expected = logits_of(model)
        copied = copy.deepcopy(model)
        with pytest.raises(TypeError, match=r"call moereg.integrations.transformers.restore\(model\) first, or save"):
            torch.save(model, io.BytesIO())
        restore(model)
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj.zero_()
        assert torch.equal(logits_of(copied), expected)
        assert not torch.equal(logits_of(model), expected)

    def test_what_does_not_come_back_is_kept_and_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("mixtral")
        right = serving.ServedExperts.restored

        def wrong(self: serving.ServedExperts) -> Any:
            weights = right(self)
            weights.w2[0, 0, 0] += 1
            return weights

        monkeypatch.setattr(serving.ServedExperts, "restored", wrong)
        prepared = prepare(model, free=True, progress=False)
        assert prepared.layers[0].kept == "down_proj does not come back from the kernel's layout bit for bit"
        assert "(weights kept: down_proj does not" in str(prepared)
        assert model.model.layers[0].mlp.experts.down_proj is not None


class TestCompiled:
    def test_a_prepared_layer_is_one_graph(self) -> None:
        experts = tiny_model("mixtral").model.layers[0].mlp.experts
        prepare(experts_model := torch.nn.Sequential(Holder(experts)), progress=False)
        hidden, ids, weights = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [3, 1]]), torch.rand(3, 2)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            expected = experts(hidden, ids, weights)
            assert torch.equal(compiled(hidden, ids, weights), expected)
            experts.down_proj.mul_(2)  # Seen, although nothing is compiled again.
            assert close(compiled(hidden, ids, weights), 2 * expected)
        assert experts_model[0].experts is experts

    def test_the_first_call_may_be_compiled(self) -> None:
        experts = tiny_model("mixtral").model.layers[0].mlp.experts
        experts.config._experts_implementation = "moereg"
        hidden, ids, weights = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [3, 1]]), torch.rand(3, 2)
        with torch.no_grad():
            found = torch.compile(experts, backend="aot_eager")(hidden, ids, weights)
            assert torch.equal(found, experts(hidden, ids, weights))

    def test_a_first_call_in_one_graph_says_what_to_do(self) -> None:
        experts = tiny_model("mixtral").model.layers[0].mlp.experts
        experts.config._experts_implementation = "moereg"
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with (
            torch.no_grad(),
            pytest.raises(Exception, match="moereg makes kernels outside of compiled code: call moereg"),
        ):
            compiled(torch.randn(1, 32), torch.tensor([[0, 1]]), torch.rand(1, 2))

    def test_a_backward_pass_of_compiled_code_says_why_not(self) -> None:
        experts = tiny_model("mixtral").model.layers[0].mlp.experts
        prepare(torch.nn.Sequential(Holder(experts)), progress=False)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        out = compiled(torch.randn(3, 32, requires_grad=True), torch.tensor([[0, 1]] * 3), torch.rand(3, 2))
        with pytest.raises(RuntimeError, match="moereg computes no gradients"):
            out.sum().backward()


class Holder(torch.nn.Module):
    """A block around experts that says how many a token has."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.top_k = 2
        self.experts = experts


class TestInference:
    def test_eval_with_gradients_enabled_runs_and_its_backward_says_why_not(self) -> None:
        model = tiny_model("mixtral")
        prepare(model, progress=False)
        out = model(PROMPT).logits
        assert out.requires_grad
        assert close(out.detach(), eager(model))
        with pytest.raises(RuntimeError, match=r"moereg computes no gradients: call the model under torch.no_grad"):
            out.sum().backward()

    def test_training_is_refused_at_once(self) -> None:
        model = tiny_model("mixtral")
        model.set_experts_implementation("moereg")
        with pytest.raises(ArgumentError, match=r"MixtralExperts: it is being trained.*call model.eval\(\)"):
            model.train()(PROMPT)
        with torch.no_grad():
            model(PROMPT)


class TestRefused:
    def test_meta(self) -> None:
        with torch.device("meta"):
            model = tiny_model("mixtral")
        with pytest.raises(ArgumentError, match="its weights are on meta, where they have no values; load them first"):
            prepare(model, progress=False)

    def test_several_devices(self) -> None:
        model = tiny_model("mixtral")
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.to("meta"))
        with pytest.raises(ArgumentError, match=r"\(model.layers.1.mlp.experts\): its weights are on meta"):
            prepare(model, progress=False)
        assert serving.served(model.model.layers[0].mlp.experts) is None  # Nothing was changed.

    def test_offloaded(self) -> None:
        model = tiny_model("mixtral")

        class Hook:
            offload = True

        class Hooks:
            hooks = (Hook(),)

        for hook in (Hook(), Hooks()):
            model.model.layers[0].mlp.experts._hf_hook = hook
            with pytest.raises(ArgumentError, match="offloaded and come and go with each call; load the model with a"):
                prepare(model, progress=False)

    def test_sharded(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        experts = tiny_model("mixtral").model.layers[0].mlp.experts
        experts.config._experts_implementation = "moereg"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            mesh = init_device_mesh("cpu", (1,))
            sharded = distribute_tensor(experts.gate_up_proj.detach(), mesh, [Shard(0)])
            experts.gate_up_proj = torch.nn.Parameter(sharded)
            with (
                torch.no_grad(),
                pytest.raises(ArgumentError, match=r"sharded over devices \(a DTensor\); give each rank whole"),
            ):
                experts(torch.randn(1, 32), torch.tensor([[0, 1]]), torch.rand(1, 2))
        finally:
            torch.distributed.destroy_process_group()

    def test_double_precision(self) -> None:
        with pytest.raises(ArgumentError, match="gate_up_proj must be bfloat16, float16, float32, got float64"):
            prepare(tiny_model("mixtral").double(), progress=False)

    def test_a_model_without_experts(self) -> None:
        with pytest.raises(ArgumentError, match="Linear has no routed experts that moereg knows"):
            prepare(torch.nn.Linear(2, 2), progress=False)
        with pytest.raises(ArgumentError, match=r"model must be a torch.nn.Module, got 3"):
            prepare(3)  # type: ignore[arg-type]

    def test_an_activation_that_ours_does_not_express(self) -> None:
        model = tiny_model("mixtral")
        model.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
        with pytest.raises(ArgumentError, match=r"its activation \(ReLU, gated\) is none that moereg computes \(silu"):
            prepare(model, progress=False)
        model.set_experts_implementation("moereg")
        with pytest.raises(ArgumentError, match=r"its activation.*set_experts_implementation\('eager'\) runs it"):
            logits_of(model)

    def test_a_class_without_the_interface_is_named(self) -> None:
        class FooExperts(torch.nn.Module):
            pass

        model = torch.nn.Sequential(FooExperts())
        with pytest.raises(ArgumentError, match=r"FooExperts \(0\): it does not use transformers' experts interface"):
            prepare(model, progress=False)


@pytest.mark.parametrize(
    ("limit", "alpha", "activation"),
    [
        (None, None, Activation("silu")),
        (7.0, None, Activation("silu", limit=7.0)),
        (3.5, 1.702, Activation("swigluoai", alpha=1.702, beta=1.0, limit=3.5)),
    ],
)
def test_a_gate_is_recognized_by_what_it_computes(
    limit: float | None, alpha: float | None, activation: Activation
) -> None:
    from moereg.integrations._experts.activation import recognize

    module = torch.nn.Module()
    module.limit, module.swiglu_alpha = limit, alpha
    assert recognize(module, activation, is_gated=True) == activation
    # A clamp after the gate is another function, where a clamp before it would be taken for it by name.
    if limit is not None and alpha is None:

        def clamped_after(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

        with pytest.raises(ArgumentError, match="is none that moereg computes"):
            recognize(module, clamped_after, is_gated=True)


class TestExplainModel:
    def test_every_layer_for_another_machine(self, tmp_path: Any) -> None:
        tiny_config("mixtral").save_pretrained(tmp_path)
        layers = explain_model(tmp_path, "cuda:sm90")
        assert [layer.name for layer in layers] == [f"model.layers.{index}.mlp.experts" for index in range(2)]
        assert layers[0].problem.num_experts == 4
        assert layers[0].selection.platform.kind == "cuda"

    def test_refusals_are_told_by_layer(self, tmp_path: Any) -> None:
        needs("inkling2")
        tiny_config("inkling2_text").save_pretrained(tmp_path)
        layers = explain_model(tmp_path)
        assert layers
        assert all(layer.problem is None and "its activation" in str(layer.refusal) for layer in layers)

    def test_what_is_no_model(self, tmp_path: Any) -> None:
        with pytest.raises(ArgumentError, match=r"must be a directory with config.json; give the model's own folder"):
            explain_model(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
        with pytest.raises(ArgumentError, match=r"makes no model of .*config.json"):
            explain_model(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ArgumentError, match="has no routed experts"):
            explain_model(tmp_path)
