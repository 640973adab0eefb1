"""What `deepep` calls in DeepSeek's DeepEP, which is built from source and needs GPUs to be imported.

The methods that it calls on the buffer have the published parameters in `deepep_imitation.py` of moereg-deepep's tests.
"""

from __future__ import annotations

from typing import Final

from tests.peers.contract import ForeignCall

_PUBLISHED: Final = "deepseek-ai/DeepEP 04b06f7a299c, deep_ep/buffer.py"


def _call(name: str, parameters: str) -> ForeignCall:
    return ForeignCall(f"deep_ep.{name}", parameters, package="deep_ep", backends=("deepep",), published=_PUBLISHED)


CALLS = (
    _call(
        "Buffer",
        "(group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=12, "
        "allow_nvlink_for_low_latency_mode=True)",
    ),
    _call("Buffer.get_dispatch_config", "(num_ranks)"),
    _call("Buffer.get_combine_config", "(num_ranks)"),
    _call(
        "Buffer.get_low_latency_rdma_size_hint", "(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)"
    ),
)
