"""Routing functions of published models: from router logits to the weights and ids that a kernel takes.

Pure torch, no host synchronization, T = 0 included. Every function returns fp32 weights and int32 ids, both [T,K],
with the best choice first. Models that round the weights to the dtype of their logits differ by that rounding only.
"""

from moereg.routing.configs import BY_HAND, REFUSED_MODEL_TYPES, language_config, unknown_model_message
from moereg.routing.spec import RouterSpec
from moereg.routing.topk import (
    biased_softmax_topk,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    llama4_topk,
    softmax_topk,
    sparsemixer,
    sqrtsoftplus_topk,
    topk_sigmoid,
    topk_softmax,
)

__all__ = [
    "BY_HAND",
    "REFUSED_MODEL_TYPES",
    "RouterSpec",
    "biased_softmax_topk",
    "grouped_sigmoid_topk",
    "grouped_softmax_topk",
    "language_config",
    "llama4_topk",
    "softmax_topk",
    "sparsemixer",
    "sqrtsoftplus_topk",
    "topk_sigmoid",
    "topk_softmax",
    "unknown_model_message",
]
