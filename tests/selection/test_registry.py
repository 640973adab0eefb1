"""Registration: validated before storing, errors that name both parties, and rules that the built-ins must keep."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from typing import Any

import pytest

import moereg
from moereg.author import Experts
from moereg.dispatch import evaluate
from moereg.errors import RegistrationError
from moereg.experts import ExpertInputs
from moereg.platforms import Platform
from moereg.registry import BUILTIN, BackendCell, BackendRegistry, register_moe_backend, registering_origin
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantFormat, QuantScheme
from tests.support.fakes import EVERYTHING, FakeExperts

NVFP4 = ["nvfp4", "nvfp4_w4a16"]
SM90, SM100 = Platform.from_name("cuda:sm90"), Platform.from_name("cuda:sm100")


def register(registry: BackendRegistry, experts: Any = FakeExperts, origin: str = "stranger", **changes: Any) -> Any:
    keywords = {"name": "fake", "priority": 10, "quant_schemes": ("unquantized",), "platforms": ("cuda:sm80+",)}
    with registering_origin(origin):
        return register_moe_backend(**{**keywords, **changes}, registry=registry)(experts)


class Unhashable(list[int]):
    """A callable by which no answer can be kept."""

    def __call__(self, platform: Platform) -> None: ...

    def __repr__(self) -> str:
        return "an unhashable"


def refused(text: str, registry: BackendRegistry | None = None, **changes: Any) -> None:
    """Registers and expects `text`, with nothing stored."""
    registry = registry or BackendRegistry()
    before = registry.cells
    with pytest.raises(RegistrationError, match=re.escape(text)):
        register(registry, **changes)
    assert registry.cells == before


def test_a_misspelled_keyword_is_told_from_a_missing_one() -> None:
    with pytest.raises(
        RegistrationError, match=r"'quant_scheme', did you mean 'quant_schemes'\? \(known: .*, priority"
    ):
        register_moe_backend(name="mine", priority=1, quant_scheme=("unquantized",), platforms=("cpu",))  # type: ignore
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'platforms'"):
        register_moe_backend(name="mine", priority=1, quant_schemes=("unquantized",))  # type: ignore[call-arg]


def test_a_name_is_a_plain_string() -> None:
    """The kit's processes read it where the class of an enum is not."""

    class Name(str, enum.Enum):
        MINE = "mine"

    registry = BackendRegistry()
    register(registry, name=Name.MINE)
    assert [(cell.name, type(cell.name)) for cell in registry.cells] == [("mine", str)]


def test_stacked_decorators_are_rectangles() -> None:
    registry = BackendRegistry()

    @register_moe_backend("stacked", 100, ("unquantized",), ("cuda:sm90", "rocm:gfx942"), registry=registry)
    @register_moe_backend("stacked", 80, NVFP4, ("cuda:sm100+",), opt_in=True, registry=registry)
    @register_moe_backend("stacked", 1, ("mxfp8",), ("*",), tier="emulation", registry=registry)
    class Stacked(FakeExperts):
        pass

    assert isinstance(Stacked, type)
    assert [(each.priority, each.rules_text, each.opt_in, each.tier) for each in registry.cells] == [
        (1, "*", False, "emulation"),
        (80, "cuda:sm100+", True, "kernel"),
        (100, "cuda:sm90, rocm:gfx942", False, "kernel"),
    ]
    assert [[scheme.name for scheme in cell.schemes] for cell in registry.cells[:2]] == [["mxfp8"], NVFP4]
    assert {cell.experts for cell in registry.cells} == {Stacked}
    assert registry.names == ("stacked",)
    assert len(registry.by_name("stacked")) == 3
    assert registry.by_name("other") == ()


@pytest.mark.parametrize("name", ["", "_", "Fake", "fake-1", "fake=1", "fa ke", "fäke", 3])
def test_bad_names(name: Any) -> None:
    refused(
        f"backend {name!r} (FakeExperts of stranger): a name is lower-case letters, digits and underscores", name=name
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": 10**30}, f"priority must be from -1000000 to 1000000, got {10**30}"),
        ({"priority": -(10**6) - 1}, "priority must be from -1000000 to 1000000, got -1000001"),
        ({"name": "auto"}, "'auto' is no name of a backend, since it is no wish in requests; rename it"),
        ({"tier": "slow"}, "tier must be one of ('kernel', 'emulation'), got 'slow'"),
        ({"opt_in": "yes"}, "opt_in must be True or False, got 'yes'"),
        ({"quant_schemes": "nvfp4"}, "quant_schemes must be a tuple of names, got the string 'nvfp4'"),
        ({"quant_schemes": ()}, "quant_schemes must name at least one scheme"),
        ({"quant_schemes": ("nvfp5",)}, "unknown quant scheme 'nvfp5', did you mean 'nvfp4'?"),
        ({"quant_schemes": (QuantScheme("nvfp4", QuantFormat("int8", (1, -1))),)}, "for QuantScheme(name='nvfp4'"),
        ({"platforms": "cpu"}, "platforms must be a tuple of rules, got the string 'cpu'"),
        ({"platforms": ()}, "platforms must name at least one rule"),
        ({"platforms": ("gpux",)}, "unknown platform kind 'gpux'"),
        *(
            (
                {"platforms": platforms},
                "rules cuda:sm80+ and cuda:sm90+ are equally specific and overlap; keep one",
            )
            for platforms in (
                ("cuda:sm80+", "cuda:sm90+"),
                ("cpu", "cuda:sm80+", "cuda:sm90+"),
                ("cuda:sm80+", "cpu", "cuda:sm90+"),
                ("cuda:sm80+", "cuda:sm90+", "cpu"),
            )
        ),
        ({"requires": "triton>=3.6"}, "requires must be a tuple of requirements, got the string 'triton>=3.6'"),
        ({"requires": ("triton>>3",)}, "requires 'triton>>3' is not a version range"),
        ({"probes": (3,)}, "probes must be a tuple of functions that take a Platform, got (3,)"),
        ({"probes": (Unhashable(),)}, "probes must be a tuple of functions that take a Platform, got (an unhashable,)"),
        ({"probes": repr}, "probes must be a tuple of functions that take a Platform, got <built-in function repr>"),
        ({"dtypes": 3}, "dtypes must"),
        ({"dtypes": ("bf16",)}, "unknown name in dtypes"),
        ({"max_experts": "8"}, "max_experts must"),
        ({"bias": 0}, "bias must"),
        (
            {"color": "red"},
            "unknown keyword of register_moe_backend 'color' (known: activation_formats, activation_scal",
        ),
    ],
)
def test_bad_keywords(changes: dict[str, Any], text: str) -> None:
    refused(text, **changes)


def subclass(**members: Any) -> type[FakeExperts]:
    return type("Odd", (FakeExperts,), members)


def with_facts(**changes: Any) -> type[FakeExperts]:
    return subclass(facts=dataclasses.replace(EVERYTHING, **changes))


def training(**members: Any) -> type[FakeExperts]:
    def apply_saving(
        self: Any, out: Any, saved: Any, inputs: Any, weights: Any, workspace13: Any, workspace2: Any
    ) -> None: ...

    def apply_backward(
        self: Any, grads: Any, grad_out: Any, saved: Any, inputs: Any, weights: Any, workspace13: Any, workspace2: Any
    ) -> None: ...

    facts = dataclasses.replace(EVERYTHING, gradients=frozenset({"weights"}))
    methods = {"apply_saving": apply_saving, "apply_backward": apply_backward}
    return subclass(**{"facts": facts, "saved_shapes": lambda self, problem, num_tokens: {}, **methods, **members})


class NoApply(Experts):
    facts = EVERYTHING
    layouts = ("canonical",)

    def permute_weights(self, weights: Any, problem: Any) -> Any:
        raise NotImplementedError

    def workspace_shapes(self, problem: Any, num_tokens: int) -> Any:
        return (0,), (0,)


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (lambda: None, "the decorated class must subclass moereg.author.Experts"),
        (dict, "the decorated class must subclass moereg.author.Experts"),
        (NoApply, "abstract methods are missing: apply"),
        (subclass(apply=lambda self, out, inputs, weights, workspace: None), "(self, out, inputs, weights, workspace)"),
        (subclass(unsupported_reasons=classmethod(lambda cls, problem: [])), "take (problem, platform), got (problem)"),
        (subclass(unsupported_reasons=lambda self, problem, platform: []), "platform), got (self, problem, platform)"),
        (subclass(__init__=lambda self, problem: None), "(self, problem, platform, computes), got (self, problem)"),
        (
            subclass(apply=lambda self, inputs, out, weights, workspace13, workspace2: None),
            "apply must take (self, out, inputs, weights, workspace13, workspace2), got (self, inputs, out, weights,",
        ),
        (
            subclass(workspace_shapes=lambda self, problem, num_tokens, stages: ((0,), (0,))),
            "workspace_shapes must take (self, problem, num_tokens), got (self, problem, num_tokens, stages)",
        ),
        (subclass(permute_weights=staticmethod(lambda weights, problem: None)), "problem), got (weights, problem)"),
        (subclass(facts={}), "facts must be a moereg.author.Facts, got dict"),
        (subclass(output_form="sum"), "output_form must be one of ('reduced', 'per_route', 'per_expert'), got 'sum'"),
        (subclass(layouts=()), "layouts must be a tuple of at least one layout of permuted weights, got ()"),
        (subclass(layouts="canonical"), "must be a tuple of at least one layout of permuted weights, got 'canonical'"),
        (with_facts(requires_multiple=128), "requires_multiple must map problem fields to divisors, got 128"),
        (with_facts(requires_multiple={"hiden_size": 8}), "'hiden_size', did you mean 'hidden_size'?"),
        (with_facts(requires_multiple={"hidden_size": 0}), "must be an integer of at least 1, got 0"),
        (with_facts(requires_multiple={"dtype": 8}), "unknown size in requires_multiple 'dtype'"),
        (with_facts(gradients=frozenset({"weights"})), "are missing: saved_shapes, apply_saving, apply_backward"),
        (training(apply_backward=Experts.apply_backward), "and methods are missing: apply_backward"),
        (training(apply_saving=lambda self, out, saved, inputs, weights: None), "(self, out, saved, inputs, weights)"),
        (training(output_form="per_route"), "that computes gradients must have output_form 'reduced', got 'per_route'"),
        (training(layouts=("blocked",)), "so that a trained parameter is read in place, got layouts ('blocked',)"),
    ],
)
def test_bad_classes(experts: Any, text: str) -> None:
    refused(text, experts=experts)


@pytest.mark.parametrize(
    "experts",
    [
        training(),
        training(facts=dataclasses.replace(EVERYTHING, gradients=frozenset({"topk_weights"})), layouts=("blocked",)),
        subclass(__init__=lambda self, problem, platform: None),
        subclass(__init__=lambda self, problem, platform, computes, stages=3: None),
        subclass(__init__=lambda self, problem, platform, **others: None),
        subclass(__init__=lambda self, problem, platform, *others: None),
        subclass(__init__=lambda self, problem, platform, *others, **named: None),
        subclass(apply=lambda self, out, inputs, weights, workspace13, workspace2, *, stages=3, **others: None),
        subclass(device_types=staticmethod(lambda platform: ("cpu",))),
    ],
)
def test_later_arguments_are_free(experts: Any) -> None:
    registry = BackendRegistry()
    register(registry, experts)
    assert [cell.experts for cell in registry.cells] == [experts]


def test_narrowing() -> None:
    registry = BackendRegistry()
    register(
        registry,
        with_facts(requires_multiple={"hidden_size": 8}, max_experts=64),
        bias=False,
        dtypes={"bfloat16"},
        requires_multiple={"hidden_size": 16, "intermediate_size": 4},
        max_experts=32,
        max_num_tokens=128,
    )
    facts = registry.cells[0].facts
    assert facts.bias is False
    assert facts.dtypes == frozenset({"bfloat16"})
    assert facts.requires_multiple == {"hidden_size": 16, "intermediate_size": 4}
    assert (facts.max_experts, facts.max_num_tokens) == (32, 128)
    assert facts.activations == EVERYTHING.activations
    assert EVERYTHING.bias is True
    problem = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, max_num_tokens=9, has_bias=True)
    decision = evaluate(registry.cells[0], problem, SM90, Request())
    assert [reason.code for reason in decision.reasons] == ["bias"]


@pytest.mark.parametrize(
    ("facts", "narrowed"),
    [
        ({"requires_multiple": {"hidden_size": 8}}, {"requires_multiple": {}}),
        ({"requires_multiple": {"hidden_size": 8}}, {"requires_multiple": {"hidden_size": 4}}),
        ({"requires_multiple": {"hidden_size": 8}}, {"requires_multiple": {"hidden_size": 12}}),
        ({"max_experts": 64}, {"max_experts": None}),
    ],
)
def test_narrowing_never_widens(facts: dict[str, Any], narrowed: dict[str, Any]) -> None:
    refused("a decorator may narrow the class's facts, never widen them", experts=with_facts(**facts), **narrowed)


def test_a_name_belongs_to_one_distribution() -> None:
    registry = BackendRegistry()
    register(registry, origin="moereg-one")
    refused(
        "backend name 'fake' belongs to moereg-one (FakeExperts); Odd of moereg-two needs another name",
        registry,
        experts=subclass(),
        origin="moereg-two",
    )
    # The same distribution may add classes to its name.
    register(registry, subclass(), origin="moereg-one")
    assert len(registry.by_name("fake")) == 2


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("cuda:sm90", "cuda:sm90", "rules cuda:sm90 (priority 10) and cuda:sm90 (priority 20)"),
        ("cuda:sm80+", "cuda:sm89+", "rules cuda:sm80+ (priority 10) and cuda:sm89+ (priority 20)"),
        ("cuda:sm100f", "cuda:sm103f", "rules cuda:sm100f (priority 10) and cuda:sm103f (priority 20)"),
        ("*", "*", "rules * (priority 10) and * (priority 20)"),
    ],
)
def test_equal_specificity_is_refused(first: str, second: str, text: str) -> None:
    registry = BackendRegistry()
    register(registry, quant_schemes=("nvfp4", "mxfp8"), platforms=(first,))
    refused(
        f"FakeExperts of stranger registers 'fake' twice for scheme mxfp8: {text} are equally specific and match the "
        "same platforms; keep one decorator, name architectures exactly, exclude platforms (",
        registry,
        quant_schemes=("unquantized", "mxfp8"),
        platforms=(second,),
        priority=20,
    )
    # Another scheme, another class and a more specific rule are no conflict.
    register(registry, platforms=(second,), quant_schemes=("int8_w8a8",))
    register(registry, subclass(), platforms=(second,), quant_schemes=("mxfp8",))
    register(registry, platforms=("rocm:gfx942",), quant_schemes=("mxfp8",))


def test_one_rule_may_have_several_cells_that_no_problem_fits_at_once() -> None:
    registry = BackendRegistry()
    register(registry, activations=("silu", "gelu"), priority=30)
    refused("equally specific", registry, activations=("gelu", "swigluoai"))
    # A flag refuses nothing that it does not ask for, and a limit has no lower end.
    refused("or narrow a fact so that no problem fits both (activations=...)", registry, bias=False, max_experts=4)
    register(registry, activations=("swigluoai",), held_experts=("all",), priority=20)
    register(registry, activations=("swigluoai",), held_experts=("some",), priority=10)
    refused("equally specific", registry)
    assert [cell.priority for cell in registry.cells] == [30, 20, 10]


def test_plugin_schemes_are_values() -> None:
    registry = BackendRegistry()
    scheme = QuantScheme("int4_w4a8_e5m2", QuantFormat("uint4", (1, 128)), QuantFormat("float8_e5m2", (1, -1)))
    register(registry, quant_schemes=(scheme,))
    (one,) = registry.cells
    assert one.scheme_for(scheme) is scheme
    assert one.scheme_for(QUANT_SCHEMES["int4_w4a16_g128"]) is None
    refused(
        "scheme name 'int4_w4a8_e5m2' of backend 'other' of stranger is QuantScheme(name='int4_w4a8_e5m2'",
        registry,
        name="other",
        quant_schemes=(QuantScheme("int4_w4a8_e5m2", QuantFormat("uint4", (1, 32))),),
    )


def test_equal_formats_of_another_name_come_before_16_bits() -> None:
    registry = BackendRegistry()
    nvfp4 = QUANT_SCHEMES["nvfp4"]
    mine = QuantScheme("mine", nvfp4.weight, nvfp4.activation)
    register(registry, quant_schemes=("nvfp4_w4a16", mine))
    assert registry.cells[0].scheme_for(nvfp4) is mine


# Rules that the built-ins must keep.


def builtins() -> list[BackendCell]:
    return [cell for cell in load_backends().cells if cell.origin == BUILTIN]


def tied_pairs(cells: list[BackendCell], platforms: list[Platform]) -> list[tuple[str, str, str, str]]:
    """Backends that would be accepted with one priority for one problem."""
    found = []
    for platform, scheme in itertools.product(platforms, QUANT_SCHEMES.values()):
        standing = [cell for cell in cells if cell.rule_for(platform) and cell.scheme_for(scheme) and not cell.opt_in]
        for one, other in itertools.combinations(standing, 2):
            meet = one.facts.activation_formats & other.facts.activation_formats
            if one.name != other.name and (one.priority, one.tier) == (other.priority, other.tier) and meet:
                found.append((one.name, other.name, str(platform), scheme.name))
    return found


PLATFORMS = [
    *(Platform.from_name(f"cuda:sm{number}") for number in (75, 80, 86, 89, 90, 100, 103, 110, 120, 121)),
    *(Platform.from_name(name) for name in ("rocm:gfx942", "rocm:gfx950", "cpu", "tpu:v5e", "npu:910b", "xpu:pvc")),
]


def test_builtins_never_tie() -> None:
    assert not tied_pairs(builtins(), PLATFORMS)


def test_a_backend_that_is_written_today_keeps_working() -> None:
    assert moereg.author.API_VERSION == "1"
    # New fields of `ExpertInputs` have defaults.
    required = [field.name for field in dataclasses.fields(ExpertInputs) if field.default is dataclasses.MISSING]
    assert required == ["hidden_states", "topk_weights", "topk_ids"]
