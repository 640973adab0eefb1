"""The broken wheels: for each kind the few lines in which it differs from a backend that is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from tests.plugins.installing import write_wheel

BACKENDS: Final = "moereg.backends"
PLATFORMS: Final = "moereg.platforms"

# Right, and slower than any built-in backend.
GOOD: Final = '''
import torch
from moereg.author import Experts, Facts, PermutedWeights, local_expert_ids, register_moe_backend

moereg_api = "1"

@register_moe_backend(name="@name@", priority=1, quant_schemes=("unquantized",), platforms=("cpu",))
class LoopExperts(Experts):
    """One expert after the other, in fp32."""

    facts = Facts(
        activations=frozenset({"silu"}),
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        placements=frozenset({"contiguous"}),
    )
    layouts = ("canonical",)

    def permute_weights(self, weights, problem):
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        return (num_tokens,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        local = local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map)
        total = torch.zeros(out.shape)
        for expert in range(self.problem.num_local_experts):
            tokens, routes = (local == expert).nonzero(as_tuple=True)
            gemm1 = inputs.hidden_states[tokens].float() @ weights["w13"][expert].float().T
            rows = self.problem.activation(gemm1) @ weights["w2"][expert].float().T
            total.index_add_(0, tokens, rows * inputs.topk_weights[tokens, routes].unsqueeze(1))
        out.copy_(total)
'''
_IMPORT: Final = "import torch\n"
_API: Final = 'moereg_api = "1"\n'
_PLATFORMS: Final = 'platforms=("cpu",)'
_LAYOUTS: Final = "    layouts = "
_PERMUTED: Final = '        return PermutedWeights("canonical", weights.tensors())'
_SHAPES: Final = "return (num_tokens,), (0,)"
_FIRST: Final = "        local = local_expert_ids("
_TOTAL: Final = "        total = torch.zeros(out.shape)\n"
_LAST: Final = "        out.copy_(total)\n"


@dataclasses.dataclass(frozen=True)
class Broken:
    """One kind.

    Attributes:
        name: Of the backend or platform, its module and its wheel.
        source: Its module.
        says: What moereg has to say about it; empty if nothing is wrong.
        group: Of its entry point.
        files: Further files of the wheel.
        entry: Its entry point's value; the module if empty.
        point: Its entry point's name; `name` if empty.
    """

    name: str
    source: str | bytes
    says: str = ""
    group: str = BACKENDS
    files: tuple[tuple[str, str], ...] = ()
    entry: str = ""
    point: str = ""

    @property
    def distribution(self) -> str:
        return f"broken-{self.name.replace('_', '-')}"

    def write(self, folder: Path) -> Path:
        module = f"broken_{self.name}"
        source = self.source.replace("@name@", self.name) if isinstance(self.source, str) else self.source
        files: dict[str, str | bytes] = {f"{module}/__init__.py": source}
        files |= {f"{module}/{name}": text for name, text in self.files}
        return write_wheel(
            folder, self.distribution, files, {self.group: {self.point or self.name: self.entry or module}}
        )


def _edited(name: str, says: str, *edits: tuple[str, str], **fields: Any) -> Broken:
    source = GOOD
    for old, new in edits:
        assert source.count(old) == 1, (name, old)
        source = source.replace(old, new)
    return Broken(name, source, says, **fields)


def _importing(name: str, lines: str) -> Broken:
    return _edited(name, "", (_IMPORT, f"{_IMPORT}{lines}\n"))


def _predicate(name: str, says: str, body: str) -> Broken:
    method = f"    @classmethod\n    def unsupported_reasons(cls, problem, platform):\n        {body}\n\n"
    return _edited(name, says, (_IMPORT, f"import sys\n{_IMPORT}"), (_LAYOUTS, method + _LAYOUTS))


def _probe(name: str, says: str, body: str) -> Broken:
    function = f"import sys\n{_IMPORT}def probe(platform):\n    {body}\n"
    return _edited(name, says, (_IMPORT, function), (_PLATFORMS, f"{_PLATFORMS}, probes=(probe,)"))


def _method(name: str, says: str, body: str) -> Broken:
    return _edited(name, says, (_LAYOUTS, f"    {body}\n\n{_LAYOUTS}"))


def _first(name: str, says: str, body: str) -> Broken:
    """Runs a line before `apply` does anything."""
    return _edited(
        name, says, (_IMPORT, f"import ctypes, os, sys, time\n{_IMPORT}"), (_FIRST, f"        {body}\n{_FIRST}")
    )


def _last(name: str, says: str, body: str) -> Broken:
    """Runs a line after `apply` has computed."""
    return _edited(name, says, (_LAST, f"{_LAST}        {body}\n"))


GOOD_ONE: Final = Broken("good", GOOD)

# These do not load. `info` shows the error, and naming the backend is bad input with the same error.
AT_IMPORT: Final = (
    Broken("no_library", "import a_library_that_is_not_here", "No module named 'a_library_that_is_not_here'"),
    Broken("raises", "raise RuntimeError('no such\\ndevice')", "RuntimeError: no such device"),
    _edited("raises_late", "KeyError: 'late'", (_LAST, _LAST + "\nraise KeyError('late')\n")),
    Broken("exits", "import sys\nsys.exit(0)", "SystemExit: 0"),
    Broken("base_exception", "class Stop(BaseException): pass\nraise Stop", "Stop: no message"),
    Broken("mute", "class Mute(Exception):\n    def __str__(self): raise self\nraise Mute", "cannot be shown"),
    Broken("memory", "raise MemoryError", "MemoryError"),
    Broken("recursion", "def f(): f()\nf()", "RecursionError"),
    Broken("syntax", "def broken(:\n", "SyntaxError: invalid syntax"),
    Broken("null_bytes", b"moereg_api = '1'\n\0\n", "null bytes"),
    _edited("no_api", "must say moereg_api = '1'", (_API, "")),
    _edited("api_0", "got '0'", (_API, 'moereg_api = "0"\n')),
    _edited("api_2", "got '2'", (_API, 'moereg_api = "2"\n')),
    _edited("api_number", "must say moereg_api = '1'", (_API, "moereg_api = 1\n")),
    _edited("no_experts", "must subclass moereg.author.Experts", ("LoopExperts(Experts)", "LoopExperts")),
    _edited("abstract", "methods are missing: workspace_shapes", ("def workspace_shapes", "def workspace_shape")),
    _edited("takes_torch", "backend name 'torch' belongs to builtin", ("@name@", "torch"), point="torch"),
    _edited("takes_good", "backend name 'good' belongs to broken-good", ("@name@", "good"), point="good"),
    _edited("renamed", "must register a backend of that name and no other, got another", ("@name@", "another")),
    Broken("nothing", _API, "must register a backend of that name and no other, got none"),
    _edited("unknown_name", "'silux', did you mean 'silu'?", ('{"silu"}', '{"silux"}')),
    _edited(
        "mistyped", "bias must be True or False, got 'yes'", (_LAYOUTS, f"    facts = Facts(bias='yes')\n{_LAYOUTS}")
    ),
    _edited("no_such_fact", "unknown fact 'biass'", (_PLATFORMS, f"{_PLATFORMS}, biass=False")),
    _edited("signature", "apply must take", ("out, inputs, weights,", "result, inputs, weights,")),
    _edited("unknown_kind", "unknown platform kind 'gpux'", (_PLATFORMS, 'platforms=("gpux",)')),
    _edited("bad_range", "is not a version range", (_PLATFORMS, f'{_PLATFORMS}, requires=("torch >>> 1",)')),
    _edited("bad_priority", "priority must be an integer, got 'high'", ("priority=1", 'priority="high"')),
    _edited("huge_priority", "priority must be", ("priority=1", "priority=10**30")),
    Broken("no_module", "", "No module named 'broken_module_that_is_not_here'", entry="broken_module_that_is_not_here"),
    Broken("odd_entry", _API, "names no module", entry="broken odd: entry"),
)

# Odd, and right.
ODD: Final = (
    _edited("api_minor", "", (_API, 'moereg_api = "1.3"\n')),
    _importing("prints", "print('hello from a wheel')"),
    _importing("warns", "import warnings; warnings.warn('hello from a wheel')"),
    _importing("slow_import", "import time; time.sleep(1.2)"),
    _first("prints_in_apply", "", "print('hello from apply')"),
    _edited("bad_ledger", "", files=(("moereg_ledger.json", "{not json"),)),
    _edited("odd_ledger", "", files=(("moereg_ledger.json", '[{"backend": 3}]'),)),
    Broken("latin", ("# -*- coding: latin-1 -*-\n# café" + GOOD.replace("@name@", "latin")).encode("latin-1")),
    Broken("zbase", GOOD),
    Broken(
        "child",
        f"from broken_zbase import LoopExperts\nfrom moereg.author import register_moe_backend\n{_API}"
        '@register_moe_backend(name="child", priority=1, quant_schemes=("unquantized",), platforms=("cpu",))\n'
        "class ChildExperts(LoopExperts):\n    pass\n",
    ),
)

# Asked whether they fit, these raise or answer with something else: a rejection.
PREDICATES: Final = (
    _predicate("predicate_raises", "its predicate raised ValueError: no idea", "raise ValueError('no\\nidea')"),
    _predicate("predicate_exits", "its predicate raised SystemExit: 0", "sys.exit(0)"),
    _predicate("predicate_none", "has to return a list of texts, got None", "return None"),
    _predicate("predicate_text", "has to return a list of texts, got 'not a list'", "return 'not a list'"),
    _predicate("predicate_numbers", "has to return a list of texts", "return [3, None]"),
    _predicate("predicate_escapes", "two lines and \\x1b[31mred", "return ['two\\nlines and \\x1b[31mred']"),
    _probe("probe_raises", "its probe probe raised OSError: no bus", "raise OSError('no bus')"),
    _probe("probe_exits", "its probe probe raised SystemExit: 0", "sys.exit(0)"),
    _probe("probe_number", "its probe probe has to return a text or None, got 3", "return 3"),
)

_INIT: Final = "def __init__(self, problem, platform, computes=None): raise ValueError('no pool')"
_DEVICES: Final = "@classmethod\n    def device_types(cls, platform): raise ValueError('which?')"
_SWAPPED: Final = "activation(gemm1.roll(gemm1.shape[1] // 2, 1))"

# These fit, and fail or write where they may not.
# fmt: off
AT_RUN: Final = (
    _method("init_raises", "raised in LoopExperts.__init__: ValueError: no pool", _INIT),
    _method("device_types_raises", "raised in LoopExperts.device_types: ValueError: which?", _DEVICES),
    _edited("permute_raises", "permute_weights: ValueError: odd", (_PERMUTED, "        raise ValueError('odd')")),
    _edited("permute_none", "returned no PermutedWeights", (_PERMUTED, "        return None")),
    _edited("permute_layout", "returned an undeclared layout", (_PERMUTED, _PERMUTED.replace("canonical", "other"))),
    _edited("permute_writes", "permute_weights wrote to the layer's weights (w13)",
        (_PERMUTED, f"        weights.w13.mul_(2)\n{_PERMUTED}")),
    _edited("shapes_raises", "workspace_shapes: ValueError: no shape", (_SHAPES, "raise ValueError('no shape')")),
    _edited("shapes_negative", "returned no two shapes", (_SHAPES, "return (-1,), (0,)")),
    _edited("shapes_huge", "returned no two shapes", (_SHAPES, "return (2**60,), (0,)")),
    _first("apply_raises", "raised in LoopExperts.apply: RuntimeError: kernel failed",
        "raise RuntimeError('kernel\\nfailed')"),
    _first("apply_exits", "raised in LoopExperts.apply: SystemExit: 0", "sys.exit(0)"),
    _last("apply_zeroes_weights", "apply wrote to the layer's weights (w2)", "weights['w2'].zero_()"),
    _last("apply_writes_inputs", "apply wrote to its inputs (hidden_states)", "inputs.hidden_states.add_(1)"),
    _last("apply_writes_ids", "apply wrote to its inputs (topk_ids)", "inputs.topk_ids.zero_()"),
    _last("apply_writes_unseen", "apply wrote to its inputs (hidden_states)", "inputs.hidden_states.data.mul_(2)"),
    _last("apply_sets_dtype", "apply changed torch's state for everybody (default dtype torch.float64)",
        "torch.set_default_dtype(torch.float64)"),
)
# fmt: on

# These run, and their numbers are wrong.
LIARS: Final = (
    _first("apply_nothing", "", "return"),
    _last("apply_nan", "", "out[0, 0] = float('nan')"),
    _edited("apply_swapped", "", ("activation(gemm1)", _SWAPPED)),
    _last("apply_off", "", "out.mul_(1.05)"),
    _edited(
        "apply_remembers",
        "",
        (
            _TOTAL,
            "        if hasattr(self, 'kept') and self.kept.shape == out.shape:\n"
            f"            return out.copy_(self.kept)\n{_TOTAL}",
        ),
        (_LAST, f"{_LAST}        self.kept = out.clone()\n"),
    ),
)

# The kit alone can tell: right on ordinary layers.
KIT_ONLY: Final = (
    _last("writes_behind", "", "torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1)"),
    _edited(
        "loses_last", "", ("range(self.problem.num_local_experts)", "range(min(self.problem.num_local_experts, 8))")
    ),
)

# These take the process that runs them with them.
CRASHES: Final = (
    _first("segfaults", "the process died of SIGSEGV in apply", "ctypes.string_at(0)"),
    _first("dies", "the process was ended with exit code 0", "os._exit(0)"),
    _first("hangs", "", "time.sleep(3600)"),
)


def _platform(name: str, says: str, body: str, lines: str = "") -> Broken:
    source = f"from moereg.author import Platform, PlatformKind\n{_API}{lines}\ndef provide():\n    {body}\n"
    return Broken(name, source, says, group=PLATFORMS, entry=f"broken_{name}:provide")


# fmt: off
PROVIDERS: Final = (
    _platform("provider_raises", "OSError: broken bus", "raise OSError('broken bus')"),
    _platform("provider_exits", "SystemExit: 0", "raise SystemExit(0)"),
    _platform("provider_odd", "must return a Platform or None, got", "return 'cuda:sm90'"),
    _platform("provider_late", "RuntimeError: no driver", "return None", "raise RuntimeError('no driver')"),
    Broken("takes_cuda", f"from moereg.author import PlatformKind\n{_API}kind = PlatformKind('cuda', 'cpu', r'.*')\n",
        "cuda", group=PLATFORMS, entry="broken_takes_cuda:kind"),
    Broken("odd_pattern", f"from moereg.author import PlatformKind\n{_API}kind = PlatformKind('odd', 'cpu', '(')\n",
        "must be a regular expression", group=PLATFORMS, entry="broken_odd_pattern:kind"),
)
# fmt: on
CLAIMS: Final = (
    _platform("claim_one", "", "return Platform('cuda', 'sm90')"),
    _platform("claim_two", "", "return Platform('cuda', 'sm100')"),
)

SIDE_BY_SIDE: Final = (GOOD_ONE, *AT_IMPORT, *ODD, *PREDICATES, *AT_RUN, *LIARS, *KIT_ONLY, *CRASHES, *PROVIDERS)
"""All that one folder holds; two claims are another's."""
