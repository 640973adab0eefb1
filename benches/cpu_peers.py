"""Other people's MoE kernels for CPUs, in this process and on the same weights: peers for the bench, no backends.

`make .cpu-peers/.stamp` installs them at the versions of `cpu_peers.txt`, without what they depend on and outside of
the environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from moereg.dispatch import explain_backends
from moereg.kernels.plain import cpu
from moereg.layer.factory import make_kernel
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

__all__ = ["FOLDER", "PEERS", "MissingPeer", "Run"]

FOLDER: Final = Path(__file__).resolve().parents[1] / ".cpu-peers"

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states, routing weights and int32 ids to the output."""


class MissingPeer(Exception):
    """A peer cannot run a layer here; the text says why."""


def vllm(problem: MoEProblem, weights: ExpertWeights, num_threads: int) -> Run:
    """The backend of `benches.vllm_cpu`."""
    importlib.import_module("benches.vllm_cpu")
    selection = explain_backends(problem, require="vllm_cpu")
    if selection.winner is None:
        raise MissingPeer(selection.refusal)
    return make_kernel(problem, weights, selection)


def ktransformers(problem: MoEProblem, weights: ExpertWeights, num_threads: int) -> Run:
    """KTransformers' kernels for bf16, by its C++ module for this processor; a copy of the weights."""
    if not (FOLDER / "kt_kernel").is_dir():
        raise MissingPeer("not installed")
    detect: Any = _load("_cpu_detect", FOLDER / "kt_kernel/_cpu_detect.py").detect_cpu_features
    variant = detect()
    path = next(FOLDER.glob(f"kt_kernel/_kt_kernel_ext_{variant}.cpython-*.so"), None)
    if path is None:
        raise MissingPeer(f"has no kernels for {variant}")
    module = _load("kt_kernel_ext", path)
    pool = module.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [num_threads]
    engine = module.CPUInfer(pool)
    on_gpu = torch.zeros(problem.num_experts, dtype=torch.bool)
    config = module.moe.MOEConfig(
        problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size, on_gpu.data_ptr()
    )
    config.layer_idx, config.pool, config.max_len = 0, engine.backend_, 4096
    inner = problem.intermediate_size
    config.gate_projs = [[expert[:inner].data_ptr() for expert in weights.w13]]
    config.up_projs = [[expert[inner:].data_ptr() for expert in weights.w13]]
    config.down_projs = [[expert.data_ptr() for expert in weights.w2]]
    config.gate_scales = config.up_scales = config.down_scales = [[0] * problem.num_experts]
    # The first is in variants with AVX-512 and bf16, whether or not there is AMX.
    kind = getattr(module.moe, "AMXBF16_MOE", None) or module.moe.AVX2BF16_MOE
    layer = kind(config)
    places = torch.arange(problem.num_experts)
    engine.submit(layer.load_weights_task(places.data_ptr()))
    engine.sync()

    def run(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden_states)
        size, ids = torch.tensor([len(hidden_states)], dtype=torch.int32), topk_ids.long()
        call = (size, ids, topk_weights, hidden_states, out)
        addresses = [each.data_ptr() for each in call]
        engine.submit(layer.forward_task(addresses[0], problem.top_k, *addresses[1:], False))
        engine.sync()
        return out

    run.keeps = on_gpu, places, engine  # type: ignore[attr-defined]
    return run


def _load(name: str, path: Path) -> Any:
    """A module by its file, once, without its package, which imports packages that are not here."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def openvino(problem: MoEProblem, weights: ExpertWeights, num_threads: int) -> Run:
    """A model in the form that OpenVINO turns into products of the chosen experts alone (GatherMatmul)."""
    if not (FOLDER / "openvino").is_dir():
        raise MissingPeer("not installed")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    ov, op = importlib.import_module("openvino"), importlib.import_module("openvino.opset12")
    experts, hidden, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    shared: list[Any] = []

    def constant(weight: torch.Tensor) -> Any:
        shared.append(weight.contiguous())
        tensor = ov.Tensor(shared[-1].view(torch.int16).numpy(), list(weight.shape), ov.Type.bf16)
        return op.convert(ov.op.Constant(tensor, shared_memory=True), ov.Type.f32)

    def integers(*values: int) -> Any:
        return op.constant(list(values), ov.Type.i64)

    def extents(node: Any, *axes: int) -> Any:
        return op.gather(op.shape_of(node), integers(*axes), op.constant(0, ov.Type.i64))

    states = op.parameter([-1, -1, hidden], ov.Type.f32)
    ids = op.parameter([-1, problem.top_k], ov.Type.i64)
    scales = op.parameter([-1, problem.top_k], ov.Type.f32)
    rows = op.reshape(states, integers(-1, hidden), False)
    tiled = op.reshape(op.tile(rows, integers(experts, 1)), integers(experts, -1, hidden), False)
    gate, up, down = (constant(each) for each in (weights.w13[:, :inner], weights.w13[:, inner:], weights.w2))
    swiglu = op.multiply(op.swish(op.matmul(tiled, gate, False, True)), op.matmul(tiled, up, False, True))
    batch = [integers(experts), extents(states, 0), integers(-1)]
    outputs = op.reshape(op.matmul(swiglu, down, False, True), op.concat([*batch, extents(states, 2)], 0), False)
    zeros = op.broadcast(op.constant(0.0, ov.Type.f32), op.concat([extents(ids, 0), integers(experts)], 0))
    routed = op.scatter_elements_update(zeros, ids, scales, integers(1))
    router = op.reshape(op.transpose(routed, integers(1, 0)), op.concat(batch, 0), False)
    total = op.reduce_sum(op.multiply(outputs, op.unsqueeze(router, integers(3))), integers(0), False)
    settings = {"INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "bf16"}
    if not cpu.features().bf16:
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = ov.Core().compile_model(ov.Model([total], [states, ids, scales]), "CPU", settings)
    kinds = [str(node.get_rt_info()["layerType"].value) for node in compiled.get_runtime_model().get_ordered_ops()]
    if kinds.count("GatherMatmul") != 3:
        raise MissingPeer("does not gather experts: every expert would be computed for every token")
    request = compiled.create_infer_request()

    def run(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        call = (hidden_states.float()[None].numpy(), topk_ids.long().numpy(), topk_weights.numpy())
        request.infer(call, share_inputs=True, share_outputs=True)
        return torch.from_numpy(request.get_output_tensor().data).view(hidden_states.shape).to(hidden_states.dtype)

    run.keeps = shared, compiled  # type: ignore[attr-defined]
    return run


PEERS: Final[Mapping[str, Callable[[MoEProblem, ExpertWeights, int], Run]]] = {
    "vllm": vllm,
    "ktransformers": ktransformers,
    "openvino": openvino,
}
"""By name: takes a bf16 layer with silu and without biases, its weights and the number of threads."""
