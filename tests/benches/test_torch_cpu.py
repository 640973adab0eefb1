"""The CPU bench: rows are chosen, kept from earlier runs with the same facts, and say what the CPU may use."""

from __future__ import annotations

from typing import Any

import pytest

from benches import stored


def test_the_instruction_set_is_what_libraries_may_use(monkeypatch: pytest.MonkeyPatch, cpu_features: Any) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cpu_features(onednn=True, bf16=True, fp16=False, int8=True, amx=False)
    assert stored.instruction_set() == "AVX512 with bf16, int8"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cpu_features(onednn=True, bf16=False, fp16=False, int8=False, amx=False)
    assert stored.instruction_set() == "AVX512, oneDNN limited to AVX2"
