"""What errors about files tell their reader to do, as functions that do it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest
import torch

import moereg
from moereg.checkpoints import load_experts
from moereg.numerics.reference import relative_error
from moereg.routing import RouterSpec
from tests.checkpoints import published
from tests.checkpoints.published import Layer, check, write


@dataclasses.dataclass
class Case:
    """A layer that is read, the same one broken, and what the error says."""

    good: Layer
    broken: Layer
    path: Path
    message: str


def _restored_config(case: Case) -> None:
    load(case, dataclasses.replace(case.broken, config=case.good.config, files=case.good.files))


def _restored_tensors(case: Case) -> None:
    load(case, dataclasses.replace(case.broken, tensors=case.good.tensors))


def _without_the_tensor(case: Case) -> None:
    name = case.message.split(" of ")[0]
    tensors = {other: tensor for other, tensor in case.broken.tensors.items() if other != name}
    assert len(tensors) == len(case.broken.tensors) - 1
    load(case, dataclasses.replace(case.broken, tensors=tensors))


def _unquantized(case: Case) -> None:
    """The release in 16 bits, by the names that the broken one has for its experts and router."""
    good, config = case.good, {**case.broken.config}
    config.pop("quantization_config", None)
    block = next(name for name in good.tensors if ".experts." in name).partition(".experts.")[0]
    router = {name: tensor for name, tensor in good.tensors.items() if f"{block}.gate." in name}
    tensors: published.Tensors = {**router, f"{block}.gate.weight": good.router.bfloat16()}
    for expert in range(published.NUM_EXPERTS):
        for name, matrix in zip(published.GATE_UP_DOWN, (*good.w13[expert].chunk(2), good.w2[expert]), strict=True):
            tensors[f"{block}.experts.{expert}.{name}.weight"] = matrix.bfloat16().contiguous()
    found = load_experts(write(case.path, Layer(config, tensors, good.w13, good.w2, good.router)), 0)
    assert found.problem.quant.name == "unquantized"


def _by_hand(case: Case) -> None:
    """As docs/checkpoints.md shows: dequantized by the reader's own rule."""
    good = case.good
    router = RouterSpec(kind="softmax_topk", num_experts=published.NUM_EXPERTS, top_k=2, renormalize=True)
    num_experts, hidden_size, intermediate_size = good.w2.shape
    weights = moereg.ExpertWeights(w13=good.w13.float(), w2=good.w2.float())
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    problem = moereg.MoEProblem(**sizes, top_k=2, dtype="float32")
    hidden_states = torch.randn(5, hidden_size) / 100
    topk_weights, topk_ids = router.route(hidden_states @ good.router.float().T)
    expected = torch.zeros(5, hidden_size, dtype=torch.float64)
    for token, (some, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for weight, expert in zip(some, ids, strict=True):
            gate, up = (good.w13[expert] @ hidden_states[token].double()).chunk(2)
            expected[token] += weight * (good.w2[expert] @ (torch.nn.functional.silu(gate) * up))
    out = moereg.make_kernel(problem, weights)(hidden_states, topk_weights, topk_ids)
    assert relative_error(out, expected) < 1e-5


def _by_rank(case: Case) -> None:
    write(case.path, case.broken)
    for rank in range(published.NUM_EXPERTS):
        load_experts(case.path, 0, num_local_experts=1, ep_rank=rank)


def _listed_layer(case: Case) -> None:
    load_experts(write(case.path, case.broken), int(case.message.rpartition(" ")[2]))


def _one_dtype(case: Case) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in case.broken.tensors.items()}
    load_experts(write(case.path, dataclasses.replace(case.broken, tensors=tensors)), 0)


def _without_the_entry(case: Case) -> None:
    config = {name: value for name, value in case.broken.config.items() if case.good.config.get(name) == value}
    load(case, dataclasses.replace(case.broken, config=config))


def _by_its_own_code(case: Case) -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        moereg.MoEProblem(num_experts=2, hidden_size=8, intermediate_size=8, top_k=1, activation="mish")


def load(case: Case, layer: Layer) -> None:
    check(load_experts(write(case.path, layer), 0), case.good)


# By the words of an error.
CURES: Final[Mapping[str, Callable[[Case], None]]] = {
    "take config.json and tensors from one export of the model": lambda case: load(case, case.good),
    "take the file from the model's publisher": _restored_config,
    **dict.fromkeys(
        (
            "take hf_quant_config.json from the model's publisher",
            "take config.json from the model's publisher",
            "take it from the model's publisher",
            "correct sym or checkpoint_format in the config",
            "lower top_k",
            "; correct it",
        ),
        _restored_config,
    ),
    **dict.fromkeys(
        (
            "give the directory of a checkpoint that is on this machine",
            "download that file",
            "download the one that belongs to it",
            "use the release that the GGUF was made of",
            "convert it with transformers: from_pretrained, then save_pretrained",
        ),
        lambda case: load(case, case.good),
    ),
    "build the RouterSpec by hand": _by_hand,
    "take it out of the config if the model ignores it": _without_the_entry,
    "run these experts by the model's own code": _by_its_own_code,
    "export the checkpoint with": _restored_tensors,
    "use a release in a format that is read": lambda case: load(case, case.good),
    "or the unquantized one": _unquantized,
    "give moereg.make_kernel your own": _by_hand,
    "take the tensor out of the file": _without_the_tensor,
    "read a rank's experts that are stored alike": _by_rank,
    "its layers with experts are": _listed_layer,
    "those are": _listed_layer,
    "save the checkpoint in one dtype": _one_dtype,
}
