"""moereg picks, prepares, runs and compares fused Mixture-of-Experts kernels for PyTorch."""

from moereg._version import __version__
from moereg.activations import Activation
from moereg.checkpoints import load_experts
from moereg.discovery import list_backends
from moereg.dispatch import Selection, explain_backends, select_backend
from moereg.errors import (
    ArgumentError,
    BackendError,
    CheckpointError,
    MoeregError,
    MoeregWarning,
    PluginError,
    RegistrationError,
    RequestError,
    UnknownBackendError,
    UnknownNameError,
    UnsupportedProblemError,
)
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights

__all__ = [
    "Activation",
    "ArgumentError",
    "BackendError",
    "CheckpointError",
    "ExpertWeights",
    "MoEKernel",
    "MoEProblem",
    "MoeregError",
    "MoeregWarning",
    "Platform",
    "PluginError",
    "QuantScheme",
    "RegistrationError",
    "RequestError",
    "Selection",
    "UnknownBackendError",
    "UnknownNameError",
    "UnsupportedProblemError",
    "__version__",
    "explain_backends",
    "list_backends",
    "load_experts",
    "make_kernel",
    "register_moe_backend",
    "select_backend",
]
