"""Backends that break one promise each, for `test_verify.py`. Registers them where it is imported as a file."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import time
from typing import Any

import torch

from moereg.author import ExpertWeights, MoEProblem, PermutedWeights, Platform, register_moe_backend
from tests.support.fakes import LITTLE, FakeExperts


class GoodExperts(FakeExperts):
    """Runs the reference on the CPU; claims little, so that it has few checks."""

    facts = dataclasses.replace(LITTLE, deterministic=True)

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        return (platform.device_type,)


def bad(name: str, **registration: Any) -> Any:
    """Registers a class under that name."""
    known: dict[str, Any] = {"priority": 1, "quant_schemes": ("unquantized",), "platforms": ("cpu",)}
    return register_moe_backend(name=name, **{**known, **registration})


bad("good")(GoodExperts)


@bad("segfault")
class SegfaultExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        if len(out) == 17:
            ctypes.string_at(0)


@bad("exits")
class ExitExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        os._exit(3)


@bad("raises_exit")
class SystemExitExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        sys.exit("no")


@bad("hangs")
class HangExperts(GoodExperts):
    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        time.sleep(1000)
        return super().permute_weights(weights, problem)


@bad("hoards")
class HoardExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        hoard = []
        while True:
            hoard.append(bytearray(b"x" * (8 << 20)))


@bad("prints")
class PrintExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        print("compiling\nkernel")


@bad("floods")
class FloodExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        while True:
            os.write(1, b"x" * (1 << 20))


@bad("writes_behind")
class BehindExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)


@bad("nan")
class NanExperts(GoodExperts):
    def spoil(self, out: torch.Tensor, *others: Any) -> None:
        out[-1:] = float("nan")


@bad("swapped")
class SwappedExperts(GoodExperts):
    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights(
            "canonical", {**weights.tensors(), "w13": weights.w13.roll(weights.intermediate_size, 1)}
        )


@bad("picky")
class PickyExperts(GoodExperts):
    """Right, and with a rule that facts cannot say."""

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        if (problem.hidden_size + problem.intermediate_size) % 256:
            return [f"requires (hidden_size + intermediate_size) % 256 == 0, got {problem.hidden_size}"]
        return []


@bad("elsewhere", platforms=("cuda:sm90",))
class ElsewhereExperts(GoodExperts):
    pass
