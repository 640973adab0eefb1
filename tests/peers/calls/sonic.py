"""What `sonic` of moereg-sonic calls in SonicMoE, which needs a GPU to be imported and is not on the package index."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

_PUBLISHED = "Dao-AILab/sonic-moe 8565e84"

CALLS = (
    ForeignCall(
        "sonicmoe.enums.ActivationType",
        "(SWIGLU='swiglu', GEGLU='geglu', REGLU='reglu', RELU_SQ='relu_sq', RELU='relu', GELU='gelu', SILU='silu')",
        package="sonicmoe",
        backends=("sonic",),
        published=f"{_PUBLISHED}, sonicmoe/enums.py",
    ),
    ForeignCall(
        "sonicmoe.enums.TENSORMAP",
        "",
        package="sonicmoe",
        backends=("sonic",),
        published=f"{_PUBLISHED}, sonicmoe/enums.py",
    ),
    ForeignCall(
        "sonicmoe.functional.forward._up_projection_forward",
        "(x, w1, z, y1, b1, expert_frequency_offset, expert_schedule_order, x_gather_idx, stream_id, activation_type, "
        "is_glu_activation, is_inference_mode_enabled=False)",
        package="sonicmoe",
        backends=("sonic",),
        published=f"{_PUBLISHED}, sonicmoe/functional/forward.py",
    ),
    ForeignCall(
        "sonicmoe.functional.forward._down_projection_forward",
        "(w2, y1, y2, b2, expert_frequency_offset, expert_schedule_order, x_gather_idx, stream_id)",
        package="sonicmoe",
        backends=("sonic",),
        published=f"{_PUBLISHED}, sonicmoe/functional/forward.py",
    ),
)
