"""The contract with vLLM's source: each kind of violation is found, and the installed vLLM has none."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import vllm_moereg
from packaging.version import Version
from vllm_moereg.contract import CONTRACT, FIRST, PAST_LAST, TENSORS, violations

MODULAR = "model_executor/layers/fused_moe/modular_kernel.py"
ROUTED = "model_executor/layers/fused_moe/routed_experts.py"
BASE = "model_executor/layers/fused_moe/fused_moe_method_base.py"
CONFIG = "model_executor/layers/fused_moe/config.py"
GPTQ = "model_executor/layers/quantization/auto_gptq.py"
MOVERS = "model_executor/layers/fused_moe/all2all_utils.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Source files with what the contract asks for, and nothing else."""
    classes: dict[tuple[str, str], list[str]] = {}
    functions: dict[str, list[str]] = {}
    for need in CONTRACT:
        owner, _, name = need.name.rpartition(".")
        if owner:
            classes.setdefault((need.file, owner), []).append(
                f"    def {name}({', '.join(('self', *need.takes))}): ..."
            )
        elif need.abstract:
            held = classes.setdefault((need.file, need.name), [])
            missing = [taken for taken in need.takes if f"    def {taken}(" not in "\n".join(held)]
            held += [f"    @abstractmethod\n    def {taken}(self): ..." for taken in missing]
        elif need.name[0].isupper():
            classes.setdefault((need.file, need.name), []).extend(f"    {taken}: int" for taken in need.takes)
        else:
            functions.setdefault(need.file, []).append(f"def {need.name}({', '.join(need.takes)}): ...")
    for name, (file, tensors) in TENSORS.items():
        classes.setdefault((file, name), []).append(f"    names = {tensors!r}")
    texts: dict[str, list[str]] = dict(functions)
    for (file, name), lines in classes.items():
        texts.setdefault(file, []).append("\n".join([f"class {name}:", *lines, "    pass"]))
    for file, parts in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("\n\n".join(parts) + "\n")
    return tmp_path


ABSTRACT = "class FusedMoEExperts:\n"
NEW = f"{ABSTRACT}    @abc.abstractmethod\n    def new(self): ...\n"
VIOLATIONS = [
    # A class, a function, a parameter, a field and a tensor that are gone.
    (GPTQ, "class AutoGPTQMoEMethod", "class GPTQ", f"{GPTQ} has no class AutoGPTQMoEMethod"),
    (BASE, "def supports_eplb", "def eplb", f"{BASE} has no FusedMoEMethodBase.supports_eplb"),
    (MOVERS, "def maybe_make", "def make", f"{MOVERS} has no maybe_make_prepare_finalize"),
    (MOVERS, "routing_tables, ", "", "maybe_make_prepare_finalize takes no routing_tables"),
    (CONFIG, "    in_dtype: int\n", "", "FusedMoEConfig has no in_dtype"),
    (GPTQ, "'w2_qweight'", "'w2_q'", "AutoGPTQMoEMethod registers no w2_qweight"),
    # One parameter more, of a function that is called, and of one that is overridden; and an abstract method.
    (MOVERS, "routing_tables, ", "routing_tables, eep, ", None),
    (ROUTED, "(self, prefix, ", "(self, prefix, rank, ", "RoutedExperts._get_quant_method also takes rank"),
    (MODULAR, ABSTRACT, NEW, "FusedMoEExperts has further abstract methods: new"),
]


@pytest.mark.parametrize(("file", "old", "new", "clause"), VIOLATIONS)
def test_each_kind_of_violation_is_found(package: Path, file: str, old: str, new: str, clause: str | None) -> None:
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new))
    assert violations(package) == ([clause] if clause else [])


def test_a_file_that_is_gone_is_one_clause_for_each_need_of_it(package: Path) -> None:
    (package / MOVERS).unlink()
    assert violations(package) == [f"{MOVERS} has no maybe_make_prepare_finalize"]


@pytest.mark.vllm
def test_every_release_in_the_range_has_what_moereg_needs() -> None:
    if "VLLM_SOURCES" not in os.environ:
        pytest.skip("needs VLLM_SOURCES, a folder of unpacked releases as VERSION/vllm")
    found = {folder.name: violations(folder / "vllm") for folder in Path(os.environ["VLLM_SOURCES"]).iterdir()}
    assert not any(found.values()), found
    first, past_last = (Version(version).minor for version in (FIRST, PAST_LAST))
    assert {Version(version).minor for version in found} == {*range(first, past_last)}


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM; make test-vllm installs it")
def test_the_installed_vllm_is_served() -> None:
    assert vllm_moereg.host_refusal() is None
