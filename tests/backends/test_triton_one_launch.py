"""Both products of packed weights in one launch: the bits of two launches, call after call, and its counters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moereg.backends._triton import packed, ways
from moereg.backends.triton_moe import TritonPackedExperts
from moereg.experts import ExpertInputs
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig, OneLaunch, SinglePair
from moereg.kernels.launch.flags import flag_of, flag_value, new_counters, raise_flag, take_ticket, wait_for_flag
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.reference import reference_experts, relative_error
from moereg.shapes import get_shape
from moereg.testing.cases import default_device
from moereg.testing.interpreter import patch_interpreter
from moereg.tolerances import tolerance
from moereg.tuning.inputs import random_weights

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

TILE = GroupedGemmConfig(block_m=8, block_n=32, block_k=128, group_m=1, num_warps=4, num_stages=2, mask_rows=True)
VECTOR = dataclasses.replace(TILE, block_m=1, slices=4)
# Tokens and the pair that serves them, whose tiles reach past the columns.
PAIRS: dict[str, tuple[int, GemmPair | SinglePair]] = {
    "one_token": (1, SinglePair(VECTOR, VECTOR)),
    "direct": (3, GemmPair(TILE, TILE, sort_routes=False)),
    "sorted": (9, GemmPair(TILE, TILE)),
}


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


@pytest.mark.parametrize(
    ("scheme", "pair", "on_input"),
    [
        ("int4_w4a16_g128", "one_token", False),
        pytest.param("mxfp4_w4a16", "direct", True, marks=pytest.mark.slow),
        pytest.param("mxfp4_w4a16", "one_token", True, marks=pytest.mark.slow),
        pytest.param("int4_w4a16_g32_zp", "sorted", False, marks=pytest.mark.slow),
    ],
)
def test_one_launch_gives_the_bits_of_two(
    scheme: str, pair: str, on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MoEProblem(
        num_experts=4,
        num_local_experts=3,
        top_k=1 if on_input else 3,
        hidden_size=72,
        intermediate_size=24,
        dtype="bfloat16",
        quant=scheme,
        activation="swigluoai",
        has_bias=True,
        apply_router_weight_on_input=on_input,
    )
    num_tokens, configs = PAIRS[pair]
    weights = random_weights(problem, torch.Generator().manual_seed(0), DEVICE)
    generator = torch.Generator().manual_seed(2)
    hidden_states = torch.randn(num_tokens, 72, generator=generator).to(DEVICE, problem.torch_dtype)
    topk_weights = torch.rand(num_tokens, problem.top_k, generator=generator).to(DEVICE)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE)

    def run(chosen: GemmPair | SinglePair, rounds: int) -> list[torch.Tensor]:
        """Outputs of calls of one layer, each with other routes."""
        monkeypatch.setattr("moereg.kernels.gemm.config.select_config", lambda *_, **__: chosen)
        # As the interpreter does, which runs them one after another.
        monkeypatch.setattr("moereg.kernels.launch.device.starts_in_order", lambda _device: True)
        monkeypatch.setattr(packed, "_SHARES_LAUNCHES", True)
        experts = TritonPackedExperts(problem, SM90)
        permuted = experts.permute_weights(weights, problem)
        outs = []
        for number in range(rounds):
            ids = (torch.arange(num_tokens)[:, None] * 7 + torch.arange(problem.top_k) + number) % 4
            out = torch.full_like(hidden_states, torch.nan)
            # Nothing of a call before is left in its memory.
            scratch = [torch.full(s, torch.nan).to(out) for s in experts.workspace_shapes(problem, num_tokens)]
            topk_ids = ids.to(DEVICE, torch.int32)
            inputs = ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map)
            experts.apply(out, inputs, permuted, *scratch)
            expected = reference_experts(problem, weights, hidden_states, topk_weights, topk_ids, expert_map)
            assert relative_error(out, expected) <= tolerance(problem.quant, problem.dtype, out.numel())
            outs.append(out)
        return outs

    alone = run(configs, 2)
    shared = run(dataclasses.replace(configs, one_launch=OneLaunch(prefetch=2, tickets=pair != "direct")), 2)
    assert all(torch.equal(one, two) for one, two in zip(shared, alone, strict=True))


@triton.jit
def _relay_kernel(counters, out, seen, FIRST: tl.constexpr):
    """Tasks up to FIRST write, the others read after all of them."""
    number, launches = take_ticket(counters)
    tl.store(seen + number, launches)
    if number < FIRST:
        tl.store(out + number, number + 1)
        raise_flag(flag_of(counters, 0))
    else:
        flag = flag_of(counters, 0)
        wait_for_flag(flag, (launches + 1) * FIRST, flag_value(flag))
        tl.store(out + number, tl.sum(tl.load(out + tl.arange(0, FIRST)), 0))


@pytest.mark.parametrize("flag_before", [0, 2**31 - 12])
def test_flags_only_grow_and_may_wrap(flag_before: int) -> None:
    counters = new_counters(1, DEVICE)
    launches_before = flag_before // 4
    counters[:2].view(torch.int64)[0] = launches_before * 6
    counters[32] = launches_before * 4
    out, seen = (torch.zeros(6, dtype=torch.int32, device=DEVICE) for _ in range(2))
    for launch in range(launches_before, launches_before + 5):
        _relay_kernel[(6,)](counters, out, seen, FIRST=4)
        assert seen.tolist() == [launch] * 6  # The flag wraps, this does not.
        assert out.tolist() == [1, 2, 3, 4, 10, 10]
        out.zero_()


@pytest.mark.parametrize(
    ("model", "num_tokens", "way", "columns", "shares"),
    [
        ("gpt-oss-120b", 1, ways.Single, 32, False),
        ("gpt-oss-120b", 2, ways.Direct, 64, False),
        ("gpt-oss-120b", 3, ways.Direct, 128, True),
        ("gpt-oss-120b", 4, ways.Direct, 128, True),
        ("gpt-oss-120b", 5, ways.Direct, 128, False),
        ("gpt-oss-120b", 9, ways.Sorted, 128, True),
        ("gpt-oss-120b", 16, ways.Sorted, 128, True),
        ("gpt-oss-120b", 17, ways.Sorted, 128, False),
        ("qwen3-30b-a3b", 4, ways.Direct, 128, False),
        ("qwen3-30b-a3b", 16, ways.Sorted, 128, True),
        ("mixtral-8x7b", 2, ways.Direct, 64, False),
        ("mixtral-8x7b", 4, ways.Direct, 128, False),
        ("mixtral-8x7b", 16, ways.Sorted, 128, True),
    ],
)
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int8_w8a16"])
def test_which_calls_share_a_launch(
    scheme: str, model: str, num_tokens: int, way: type, columns: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that an H200 runs faster: weights of 4 bits, where programs start in the order of their numbers."""
    problem = MoEProblem(**(get_shape(model).problem_keywords() | {"quant": scheme}))
    rows = torch.empty(num_tokens, problem.hidden_size, dtype=torch.bfloat16)
    bits = 8 if scheme == "int8_w8a16" else 4
    for in_order in (True, False):
        monkeypatch.setattr("moereg.kernels.launch.device.starts_in_order", lambda _device, answer=in_order: answer)
        chosen = ways.select(problem, rows, num_tokens * problem.top_k / problem.num_experts, bits)
        assert isinstance(chosen, way)
        if bits == 8:
            columns = 32 if num_tokens == 1 else 128
        assert chosen.configs.gate_up.block_n == columns
        assert (chosen.configs.one_launch is not None) == (shares and in_order and bits == 4)
        assert chosen.configs.gate_up.tall is None or not chosen.configs.one_launch


def test_calls_of_another_number_of_tokens_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(
        num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, dtype="bfloat16", quant="mxfp4_w4a16"
    )
    shared = GemmPair(TILE, TILE, sort_routes=False, one_launch=OneLaunch())
    monkeypatch.setattr("moereg.kernels.gemm.config.select_config", lambda *_, **__: shared)
    monkeypatch.setattr(packed, "_SHARES_LAUNCHES", True)
    experts = packed.Standard(TritonPackedExperts(problem, SM90))

    def tensors(num_tokens: int) -> tuple[torch.Tensor, ...]:
        rows: Any = torch.empty(num_tokens, 64, dtype=torch.bfloat16)
        ids = torch.zeros(num_tokens, 2, dtype=torch.int32)
        call: Any = ways.PlainWork
        call = packed.Call(rows, ExpertInputs(rows, ids.float(), ids), None, rows, rows)  # type: ignore[arg-type]
        return experts.own_tensors(call)

    (three,), (five,), (again,) = tensors(3), tensors(5), tensors(3)
    assert three is again
    assert three is not five
    assert (three.numel(), five.numel()) == (32 * 7, 32 * 11)
    monkeypatch.setattr(packed, "_SHARES_LAUNCHES", False)
    assert tensors(2) == ()


@pytest.mark.parametrize("pair", PAIRS)
def test_no_call_shares_a_launch_so_far(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rules say."""
    num_tokens, configs = PAIRS[pair]
    shared = dataclasses.replace(configs, one_launch=OneLaunch())
    monkeypatch.setattr("moereg.kernels.gemm.config.select_config", lambda *_, **__: shared)
    problem = MoEProblem(
        num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, dtype="bfloat16", quant="mxfp4_w4a16"
    )
    rows = torch.empty(num_tokens, 64, dtype=torch.bfloat16)
    ids = torch.zeros(num_tokens, 2, dtype=torch.int32)
    inputs = ExpertInputs(rows, ids.float(), ids)
    call: Any = packed.Call(rows, inputs, None, rows, rows)  # type: ignore[arg-type]
    way: Any = packed.Standard(TritonPackedExperts(problem, SM90)).select(call)
    assert way.configs == configs
