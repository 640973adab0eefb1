"""What `aiter` calls in AMD's AITER, which is not on the package index and needs an AMD GPU to be imported.

Every release that the backend accepts, from 0.1.16 on, takes what it passes, in this meaning; later ones take more.
"""

from __future__ import annotations

from tests.peers.contract import ForeignCall

CALLS = (
    ForeignCall(
        "aiter.fused_moe.fused_moe",
        "(hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu, "
        "quant_type=QuantType.No, doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, "
        "block_size_M=None, num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, "
        "intermediate_pad=0, bias1=None, bias2=None, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, "
        "gate_mode=GateMode.SEPARATED.value, shared_w1=None, shared_w2=None, shared_w1_scale=None, "
        "shared_w2_scale=None, shared_expert_id=-1)",
        package="amd-aiter",
        backends=("aiter",),
        published="ROCm/aiter v0.1.20, aiter/fused_moe.py",
    ),
    ForeignCall(
        "aiter.ActivationType",
        "(No=-1, Silu=0, Gelu=1, Swiglu=2, Situv2=3)",
        package="amd-aiter",
        backends=("aiter",),
        published="ROCm/aiter v0.1.20, csrc/include/aiter_enum.h",
    ),
    ForeignCall(
        "aiter.QuantType",
        "(No=0, per_Tensor=1, per_Token=2, per_1x32=3, per_1x128=4, per_128x128=5, per_256x128=6, per_1024x128=7)",
        package="amd-aiter",
        backends=("aiter",),
        published="ROCm/aiter v0.1.20, csrc/include/aiter_enum.h",
    ),
)
