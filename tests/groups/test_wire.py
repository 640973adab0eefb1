"""How tokens travel: which schemes as codes, and that codes come back to the numbers that experts round to."""

from __future__ import annotations

import pytest
import torch

from moereg.prepare_finalize.wire import CodedWire, PlainWire, as_bytes, wire_scheme
from moereg.quantize import dequantize_activations, quantize_activations
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES

CODED = ("fp8_channel_token", "fp8_block128", "mxfp8", "int8_w8a8")


def problem_of(**changes: object) -> MoEProblem:
    facts = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "top_k": 2, **changes}
    return MoEProblem(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2])
def test_columns_of_any_strides_become_bytes(rows: int) -> None:
    # One element counts as contiguous whatever its strides are.
    column = torch.arange(6.0).view(2, 3)[:rows, 1:2].as_strided((rows, 1), (3, 2), 1)
    assert as_bytes(column).view(torch.float32).tolist() == [[1.0], [4.0]][:rows]


def test_what_can_travel_as_codes() -> None:
    def coded(**changes: object) -> set[str]:
        return {name for name, scheme in QUANT_SCHEMES.items() if wire_scheme(scheme, problem_of(**changes))}

    assert coded() == {*CODED, "mxfp4_mxfp8", "int4_w4a8_g128_token"}
    assert coded(dtype="float32") == coded(dtype="float16") == set()
    assert coded(top_k=1, apply_router_weight_on_input=True) == set()


@pytest.mark.parametrize("name", CODED)
def test_what_comes_back_is_rounded_to_the_same_numbers(name: str) -> None:
    """So experts that round for themselves give the same bits, whatever is in the rows."""
    scheme, problem = QUANT_SCHEMES[name], problem_of()
    assert scheme.activation is not None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 256, generator=generator) * torch.exp(4 * torch.randn(2000, 1, generator=generator))
    rows[0], rows[1, :128], rows[2, 5], rows[3, 7] = 0.0, 0.0, torch.inf, torch.nan
    rows = rows.bfloat16()
    wire = CodedWire(problem, scheme)
    sent = wire.encode(rows)
    assert tuple(column.shape[1] for column in sent) == wire.widths
    received = wire.decode(sent).hidden_states
    once, twice = quantize_activations(rows, scheme), quantize_activations(received, scheme)
    finite = torch.isfinite(rows.float()).all(1)
    numbers = [dequantize_activations(coded, scheme, 256)[finite] for coded in (once, twice)]
    assert torch.equal(*numbers)
    # A scale that is a power of two may be halved: the same numbers have a code twice as large then.
    if scheme.activation.scale_dtype == "float32":
        assert torch.equal(once.q.view(torch.uint8)[finite], twice.q.view(torch.uint8)[finite])
        assert torch.equal(once.scale[finite], twice.scale[finite])
    # Rows that hold an infinity or NaN read as NaN, as they do without a wire.
    assert received[~finite].isnan().any(1).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_bytes_are_the_same_on_the_other_side(num_tokens: int) -> None:
    wire = PlainWire(problem_of(hidden_size=33))
    rows = torch.randn(num_tokens, 33).bfloat16()
    assert torch.equal(wire.decode(wire.encode(rows)).hidden_states, rows)
