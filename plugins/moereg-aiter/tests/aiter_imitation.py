"""A package `aiter` on disk whose `fused_moe` computes in torch what AITER's documents, out of the order it reads."""

from __future__ import annotations

import enum
from pathlib import Path

import torch

PACKAGE = {
    "aiter/__init__.py": "from aiter_imitation import ActivationType, QuantType\n",
    "aiter/fused_moe.py": (
        "import aiter_imitation\n"
        "from tests.peers.contract import stand_in\n"
        "fused_moe = stand_in('aiter.fused_moe.fused_moe', aiter_imitation.fused_moe)\n"
    ),
    "aiter/jit/__init__.py": "",
}


class ActivationType(enum.Enum):
    No = -1
    Silu = 0
    Gelu = 1


class QuantType(enum.Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_128x128 = 5


flat_rows: set[tuple[int, int, int, int]] = set()
"""Sizes (hidden, intermediate, local experts, choices) for which a kernel is tuned that sorts no routes."""


def install(folder: Path, version: str = "0.1.20", files: dict[str, str] | None = None) -> None:
    """Writes the package with its metadata."""
    for name, text in (PACKAGE if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    info = folder / f"amd_aiter-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n")


def restored(weight: torch.Tensor) -> torch.Tensor:
    """The plain order of shuffled weights, by the place of each element: tiles of 16 x 32, then lanes of 16 bytes."""
    experts, rows, columns = weight.shape
    lane = 16 // weight.element_size()
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = row // 16 * (columns // 32) + column // 32
    place = tile * 512 + column % 32 // lane * 16 * lane + row % 16 * lane + column % lane
    flat = weight.contiguous().view(torch.int8 if weight.element_size() == 1 else torch.int16).view(experts, -1)
    return flat[:, place.flatten()].view(weight.shape).view(weight.dtype)


def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu,
    quant_type=QuantType.No, doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None,
    dtype=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """As AITER's, for what the backend passes; with its assertions, and tensors that it reads by their shape."""
    assert activation is ActivationType.Silu
    assert not doweight_stage1
    assert w1.is_shuffled
    assert w2.is_shuffled
    assert topk_ids.dtype == torch.int32
    assert topk_weight.dtype == torch.float32
    sizes = (w1.shape[2], w2.shape[2], w1.shape[0], topk_ids.shape[1] - (expert_mask is not None))
    if quant_type is QuantType.per_128x128 and sizes in flat_rows:
        local = topk_ids
        assert ((local >= 0) & (local < w1.shape[0])).all(), "an id indexes weights that are not there"
    else:
        local = _sorted(topk_ids, w1.shape[0], expert_mask)
    first = _weights(w1, w1_scale, quant_type)
    second = _weights(w2, w2_scale, quant_type)
    float8 = w1.dtype if quant_type is not QuantType.No else None
    rows = _rounded(hidden_states.float(), a1_scale, quant_type, float8)
    out = torch.zeros(hidden_states.shape[0], w2.shape[1])
    for expert in range(w1.shape[0]):
        token, slot = torch.nonzero(local == expert, as_tuple=True)
        gate, up = (rows[token] @ first[expert].T).chunk(2, dim=1)
        middle = (torch.nn.functional.silu(gate) * up).to(dtype).float()
        middle = _rounded(middle, a2_scale, quant_type, float8) @ second[expert].T
        out.index_add_(0, token, middle * topk_weight[token, slot, None])
    return out.to(dtype)


def _sorted(topk_ids: torch.Tensor, num_experts: int, expert_mask: torch.Tensor | None) -> torch.Tensor:
    """The local expert of each route, or -1, as AITER's sort leaves them."""
    if expert_mask is None:
        expert_mask = torch.ones(num_experts, dtype=torch.int32)
    else:
        assert expert_mask.dtype == torch.int32
        assert (topk_ids[:, -1] == expert_mask.numel() - 1).all(), "the last slot is to be masked"
    local = torch.where(expert_mask > 0, expert_mask.cumsum(0) - 1, -1)[topk_ids.long()]
    # A table of tokens and experts holds one slot: of two routes of a token to an expert, the last one stays.
    slot = torch.full((len(topk_ids), expert_mask.numel()), -1)
    for k in range(topk_ids.shape[1]):
        slot[torch.arange(len(topk_ids)), topk_ids[:, k].long()] = k
    return torch.where(slot.gather(1, topk_ids.long()) == torch.arange(topk_ids.shape[1]), local, -1)


def _weights(weight: torch.Tensor, scale: torch.Tensor | None, quant_type: QuantType) -> torch.Tensor:
    plain = restored(weight).float()
    if scale is None:
        assert quant_type is QuantType.No
        return plain
    experts, rows, columns = weight.shape
    shapes = {
        QuantType.per_Tensor: (experts,),
        QuantType.per_Token: (experts, rows, 1),
        QuantType.per_128x128: (experts, rows // 128, columns // 128),
    }
    assert scale.shape == shapes[quant_type]
    if quant_type is QuantType.per_Tensor:
        return plain * scale[:, None, None]
    if quant_type is QuantType.per_128x128:
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return plain * scale


def _rounded(
    rows: torch.Tensor, scale: torch.Tensor | None, quant_type: QuantType, float8: torch.dtype | None
) -> torch.Tensor:
    """Rows through the float of the weights, with one scale, one a row or one for 128 columns."""
    if float8 is None:
        return rows
    largest = torch.finfo(float8).max
    if quant_type is QuantType.per_Tensor:
        assert scale is not None
        assert scale.shape == (1,)
        groups = rows[:, None]
    else:
        assert scale is None
        groups = rows.view(len(rows), -1, 128) if quant_type is QuantType.per_128x128 else rows[:, None]
        scale = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
    codes = (groups / scale).clamp(-largest, largest).to(float8)
    return (codes.float() * scale).view(rows.shape)
