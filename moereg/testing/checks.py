"""The checks of the conformance kit: each runs a cell and raises AssertionError if it breaks its contract.

On a machine without a GPU, call `moereg.testing.interpreter.patch_interpreter` first.

pytest must not rewrite its assertions' messages: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

import torch
from packaging.requirements import Requirement

from moereg.dispatch import evaluate
from moereg.errors import described
from moereg.layer.checks import resolve_expert_map
from moereg.layer.factory import make_unchecked_kernel
from moereg.numerics.reference import LayerCall, reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.prepare_finalize import local_prepare_finalize
from moereg.registry import BackendCell
from moereg.runtime.gc_pause import collecting_later
from moereg.selection.loader import list_cells
from moereg.selection.modules import is_of_file
from moereg.selection.request import Request
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing.cases import (
    Case,
    build,
    calls_of,
    claimed_problems,
    fault_tokens,
    first_case,
    invariant_tokens,
    machine,
    rejected_problems,
    runnable_platform,
    select_cell,
    served_schemes,
)
from moereg.testing.diagnosis import diagnose, split_message, worded
from moereg.testing.drawing import DrawnLayer
from moereg.testing.faults import plant_faults
from moereg.testing.guards import (
    GuardedMemory,
    GuardedPrepareFinalize,
    GuardedWorkspaces,
    LateWrites,
    guard_permuted,
    guard_weights,
)
from moereg.testing.inputs import Inputs, make_expert_map, make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights
from moereg.weights.unpermute import same_bits

_COMPILED: Final = (".so", ".pyd")
_LARGE_BYTES: Final = 10_000_000

KERNEL_LIBRARIES: Final = frozenset({
    "aiter", "apex", "cuda", "cupy", "cutlass", "deep_gemm", "flash_attn", "flashinfer", "humming", "jax", "mlx",
    "numba", "quack", "sgl_kernel", "sglang", "sonicmoe", "tensorflow", "tilelang", "torch_npu", "torch_xla",
    "transformer_engine", "transformers", "triton", "triton_kernels", "tvm", "vllm",
})  # fmt: skip
"""Modules that compute or compile: importing them takes seconds or touches a device."""


class GuardedLayer:
    """A cell's kernel with guard bands around all of its tensors, weights and scratch too.

    Attributes:
        weights: Its canonical weights.
        expert_map: [num_experts] int32, or None if all experts are local.
        truths: The expected results of `calls`.
    """

    def __init__(
        self,
        case: Case,
        weights: ExpertWeights,
        form: str = "contiguous",
        ep_rank: int = 0,
        calls: Sequence[Inputs] = (),
    ) -> None:
        """Computes the expected results and then makes the kernel.

        Args:
            case: The case to run.
            weights: Weights of the case's problem, contiguous.
            form: Their memory layout, one of `moereg.testing.guards.FORMS`.
            ep_rank: As in `make_kernel`.
            calls: Inputs of later calls; their expected results are computed before the backend sees anything.

        Raises:
            AssertionError: Permuting wrote to the canonical weights or next to them.
        """
        self.case = case
        self.late = LateWrites()  # Checks calls' results a second time.
        self._memory = GuardedMemory(case.device)
        self._workspaces = GuardedWorkspaces(self._memory)
        self.weights = guard_weights(self._memory, weights, form, case.cell.experts.reads_in_place())
        expert_map = make_expert_map(case.problem, case.device)
        if expert_map is not None:
            expert_map = self._memory.copy("expert_map", expert_map)
        # The case's device may have no index, and cuda and cuda:0 are not equal.
        self.expert_map = resolve_expert_map(case.problem, ep_rank, expert_map, self.weights.w13.device)
        self.truths = [self.reference(inputs) for inputs in calls]
        inner = local_prepare_finalize(case.problem.activation_format)
        self._prepare = GuardedPrepareFinalize(inner, case.device)
        self._kernel = make_unchecked_kernel(
            case.problem,
            self.weights,
            selection=select_cell(case),
            prepare_finalize=self._prepare,
            ep_rank=ep_rank,
            expert_map=expert_map,
        )
        self._memory.check()
        assert not self._kernel.held.is_borrowed
        self._kernel.held.permuted = guard_permuted(self._memory, self._kernel.weights)
        if self._kernel.expert_map is not None and expert_map is None:
            self._kernel.expert_map = self._memory.copy("expert_map", self._kernel.expert_map)
            self._memory.freeze()

    def __call__(self, inputs: Inputs, fill: str = "nan") -> torch.Tensor:
        """Runs a copy of the inputs into an output filled with NaN, and returns it.

        Args:
            inputs: Inputs of one call.
            fill: Contents of the workspaces, one of `moereg.testing.guards.FILLS`.

        Raises:
            AssertionError: The kernel wrote outside its memory or did not return `out`.
        """
        memory = GuardedMemory(self.case.device)
        copied = Inputs(*(memory.copy(each.name, getattr(inputs, each.name)) for each in dataclasses.fields(inputs)))
        memory.freeze()
        out = memory.allocate("out", tuple(inputs.hidden_states.shape), inputs.hidden_states.dtype)
        self._workspaces.fill = fill
        with self._workspaces.in_use():
            returned = self._kernel(*copied.call, out)
        assert returned is out, "a layer must return the out that it was given"
        for guarded in (memory, self._memory, self._prepare.memory):
            guarded.check()
        self.late.expect(out)
        return out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """The expected result of a call."""
        return _reference(self.case, self.weights, inputs, self.expert_map)

    def check_close(self, inputs: Inputs, out: torch.Tensor, truth: torch.Tensor) -> None:
        """Raises AssertionError if the error exceeds the bound, naming usual mistakes that explain it."""
        error = relative_error(out, truth)
        bound = layer_tolerance(self.case.problem, len(out), self.case.computes)
        if error <= bound:
            return
        rows = torch.nonzero(~out.isfinite().all(1)).flatten().tolist()
        found = f"; rows {rows[:8]} of {len(out)} are not finite" if rows else ""
        causes: tuple[str, ...] = ()
        try:
            call = (self.case.problem, self.weights, *inputs.call, self.expert_map)
            causes = diagnose(LayerCall.of(*call, computes=self.case.computes), out, truth)
        except Exception as failed:  # Such as a lack of memory: what was found above still holds.
            found += f"; looking for the cause failed: {described(failed)}"
        raise AssertionError(f"error {error:.2e}, bound {bound:.0e}{found}{worded(causes)}")


@dataclasses.dataclass
class ImportWatch:
    """A module finder that finds nothing, and records imports of top-level packages with the modules on the stack."""

    importers: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Records the importers of a package, and leaves finding it to other finders."""
        if "." not in name:
            frames = traceback.walk_stack(sys._getframe(1))
            waiting = frozenset(str(frame.f_globals.get("__name__", "")) for frame, _ in frames)
            self.importers.setdefault(name, waiting)
        return None

    def imported_by(self, package: str) -> set[str]:
        """Loaded top-level packages that a package imported, directly or not."""
        return {
            name
            for name, waiting in self.importers.items()
            if sys.modules.get(name) is not None and any(f"{module}.".startswith(f"{package}.") for module in waiting)
        }


@contextlib.contextmanager
def watched_imports() -> Iterator[ImportWatch]:
    """Watches first-time imports within the outermost context."""
    known = [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]
    watch = known[0] if known else ImportWatch()
    sys.meta_path[:0] = [] if known else [watch]
    try:
        yield watch
    finally:
        if not known:
            sys.meta_path.remove(watch)


def kernel_libraries(cell: BackendCell) -> frozenset[str]:
    """Modules that choosing must not import: the known ones, and large compiled ones that the cell requires."""
    found = set(KERNEL_LIBRARIES)
    for requirement in cell.requires:
        try:
            files = importlib.metadata.files(Requirement(requirement).name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        if not files:  # Its contents are unknown.
            found.add(Requirement(requirement).name.replace("-", "_").lower())
        if sum(file.size or 0 for file in files if file.suffix in _COMPILED) > _LARGE_BYTES:
            found |= {str(file.parts[0]) for file in files if re.fullmatch(r"[A-Za-z]\w*", file.parts[0])}
    return frozenset(found) - {"torch", "numpy", cell.experts.__module__.partition(".")[0]}


def check_deciding(cell: BackendCell, watch: ImportWatch) -> None:
    """The predicate answers every problem on every claimed platform with well-formed reasons, and imports nothing.

    A file that is named may import what it likes: nobody imports it who did not ask for it.
    `watch` has watched imports since before the backend was imported, if this process imported it.
    """
    named = [rule.instance for rule in cell.rules if rule.instance is not None]
    problems = [*claimed_problems(cell), *(problem for _, problem in rejected_problems(cell))]
    for platform, problem in itertools.product(dict.fromkeys([machine(), *named]), problems):
        decision = evaluate(cell, problem, platform, Request(require=(cell.name,)))
        for reason in decision.reasons:
            where = f"for {problem} on {platform}"
            assert reason.code != "predicate_error", f"{reason.text} {where}"
            assert reason.text[:1].islower(), f"a reason must be a lowercase clause, got {reason.text!r} {where}"
    package = cell.experts.__module__.partition(".")[0]
    own = f"{package}.backends" if package == __name__.partition(".")[0] else package
    imported = [] if is_of_file(cell) else sorted(watch.imported_by(own) & kernel_libraries(cell))
    assert not imported, (
        f"choosing a backend imports {', '.join(imported)}; import it in permute_weights and apply alone, for every "
        "process that chooses imports a plugin (a file that is named may import it anywhere)"
    )


def check_case(case: Case, layer: DrawnLayer, num_calls: int = 1) -> None:
    """Runs a drawn layer under guard bands, each time at other addresses, and compares it with the reference."""
    problem, device = case.problem, case.device
    inputs = make_inputs(problem, layer.num_tokens, layer.routing, device, layer.seed)
    if layer.wide_ids:
        inputs = dataclasses.replace(inputs, topk_ids=inputs.topk_ids.long())
    guarded = GuardedLayer(case, make_weights(problem, device, layer.seed), layer.form, layer.ep_rank, [inputs])
    (truth,) = guarded.truths
    if layer.fill == "stale":
        guarded(make_inputs(problem, layer.num_tokens, "uniform", device, layer.seed + 1))
    outs = [guarded(inputs, layer.fill) for _ in range(num_calls)]
    guarded.late.check()
    for out in outs:
        guarded.check_close(inputs, out, truth)
    if case.cell.facts.deterministic:
        assert all(torch.equal(out, outs[0]) for out in outs), "equal inputs gave other bits"


def check_numbers(case: Case, is_first: bool = False) -> None:
    """A case's results agree with the reference for the calls of `calls_of`, under guard bands."""
    named = {
        f"T={num_tokens} {routing}": make_inputs(case.problem, num_tokens, routing, case.device, seed=num_tokens)
        for num_tokens, routing in calls_of(case, is_first)
    }
    weights = make_weights(case.problem, case.device)
    # The second rank where there is one: on the first, a kernel that ignores the map of contiguous experts is right.
    ep_rank = int(case.problem.placement == "contiguous" and case.problem.is_expert_parallel)
    if (beyond := _beyond_float16(case, weights, ep_rank)) is not None:
        named["intermediate beyond 65,504"] = beyond
    layer = GuardedLayer(case, weights, ep_rank=ep_rank, calls=list(named.values()))
    ambiguous: AssertionError | None = None
    for (call, inputs), truth in zip(named.items(), layer.truths, strict=True):
        out = layer(inputs)
        if inputs is beyond and not case.cell.experts.wide_intermediate and not out[0].isfinite().all():
            out = torch.cat([truth[:1].to(out.dtype), out[1:]])
        try:
            layer.check_close(inputs, out, truth)
        except AssertionError as error:
            failed, causes = AssertionError(f"{call}: {error}"), split_message(str(error))[1]
            if len(causes) == 1 or not (causes or ambiguous):
                raise failed from error
            ambiguous = ambiguous or failed  # Several mistakes explain a few rows; a later call may tell them apart.
    if ambiguous is not None:
        raise ambiguous
    layer.late.check()


def _beyond_float16(case: Case, weights: ExpertWeights, ep_rank: int) -> Inputs | None:
    """Two tokens, of which the first has an intermediate beyond float16's range and the layer's output within it.

    None in other dtypes, where activations are quantized, or where a clamp keeps the intermediate small.
    """
    problem = case.problem
    given = make_expert_map(problem, case.device)
    expert_map = resolve_expert_map(problem, ep_rank, given, weights.w13.device)
    if problem.dtype != "float16" or case.computes.activation is not None or problem.apply_router_weight_on_input:
        return None
    inputs = make_inputs(problem, 2, "uniform", case.device)
    for _ in range(10):
        inputs.hidden_states[0] *= 2
        call = LayerCall.of(problem, weights, *inputs.call, expert_map, torch.float32, case.computes)
        experts = range(problem.num_local_experts)
        found = [rows.abs().amax().item() for each in experts if (rows := call.intermediate(each)).numel()]
        if found and max(found) > 2 * torch.finfo(torch.float16).max:
            inputs.topk_weights[0] /= max(found)
            return inputs
    return None


def check_rejections(cell: BackendCell) -> None:
    """Problems just outside the claim are rejected, each with its reason."""
    platform = runnable_platform(cell)
    assert platform is not None
    for code, problem in rejected_problems(cell):
        decision = evaluate(cell, problem, platform, Request(require=(cell.name,)))
        assert code in {reason.code for reason in decision.reasons}, (
            f"{problem} must be rejected with code {code!r}, got {decision.reasons}"
        )


def check_faults_are_caught(cell: BackendCell, scheme: QuantScheme) -> None:
    """Weights spoiled the way a wrong kernel would read them give an error well above the bound."""
    case = _with_few_experts(first_case(cell, scheme, has_bias=True))
    weights = make_weights(case.problem, case.device)
    num_tokens = fault_tokens(case)
    inputs = make_inputs(case.problem, num_tokens, "uniform", case.device)
    truth = _reference(case, weights, inputs, make_expert_map(case.problem, case.device))
    # Bounds are wide for quantized activations, since a kernel may round before the quantizer.
    bound = layer_tolerance(case.problem, num_tokens, case.computes)
    least = (10 if case.computes.activation is None else 1.5) * bound
    for fault, faulty in plant_faults(weights):
        out = build(case, faulty)(*inputs.call)
        error = relative_error(out, truth)
        if not error > least:
            _check_right(case, weights, inputs)
            raise AssertionError(
                f"{scheme.name} with {fault}, planted by this check: error {error:.2e} against the layer without"
                f", must be above {least:.1e}"
            )


def check_activations_are_rounded(cell: BackendCell, scheme: QuantScheme) -> None:
    """A scheme with quantized activations does quantize them; bounds alone would also accept 16-bit ones."""
    case = _with_few_experts(first_case(cell, scheme))
    weights = make_weights(case.problem, case.device)
    inputs = make_inputs(case.problem, 17, "uniform", case.device)
    kept = dataclasses.replace(scheme, name=f"{scheme.name} with 16-bit activations", activation=None)
    expert_map = make_expert_map(case.problem, case.device)
    truths = [_reference(case, weights, inputs, expert_map, computes) for computes in (scheme, kept)]
    out = build(case, weights)(*inputs.call)
    rounded, unrounded = (relative_error(out, truth) for truth in truths)
    if not rounded < unrounded:
        if not unrounded < relative_error(*truths):  # Near neither.
            _check_right(case, weights, inputs)
        raise AssertionError(f"{scheme.name}: activations were kept at 16 bits")


def _check_right(case: Case, weights: ExpertWeights, inputs: Inputs) -> None:
    """Wrong numbers fail as what they are: they say nothing of a planted fault or of rounding."""
    layer = GuardedLayer(case, weights, calls=[inputs])
    layer.check_close(inputs, layer(inputs), layer.truths[0])


def check_permute(cell: BackendCell) -> None:
    """Permuting does not change the canonical weights and gives a declared layout, the same as others if shared."""
    case = first_case(cell)
    weights = make_weights(case.problem, case.device)
    given = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    kernel = build(case, weights)
    for name, tensor in weights.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8)), f"{name} was written to"
    layout, layouts = kernel.weights.layout, cell.experts.layouts
    assert layout in layouts, f"layouts says {layouts}, permute_weights gave {layout!r}"
    if cell.experts.shared_layouts:
        for scheme in served_schemes(cell):
            _check_shared(first_case(cell, scheme, has_bias=True))


def _check_shared(case: Case) -> None:
    """Every other class that shares the layout permutes the same weights to the same bytes."""
    weights = make_weights(case.problem, case.device)
    permuted = build(case, weights).weights
    layout = permuted.layout
    for other in list_cells() if layout in case.cell.experts.shared_layouts else ():
        is_another = other.experts is not case.cell.experts and layout in other.experts.shared_layouts
        if not is_another or not evaluate(other, case.problem, case.platform, Request(require=(other.name,))).accepted:
            continue
        theirs = build(Case(other, case.platform, case.problem), weights).weights
        if theirs.layout != layout:
            continue
        mine, found = ({*each.per_expert, *each.shared} for each in (permuted, theirs))
        shares = f"shared_layouts has {layout!r} like {other.name} ({other.class_name})"
        assert mine == found, f"{shares}, which has tensors {sorted(found)} there, not {sorted(mine)}"
        for name in mine:
            assert same_bits(permuted[name], theirs[name]), f"{shares}, whose {name} has other bytes, dtype or shape"


def check_reload(cell: BackendCell) -> None:
    """Reloaded weights change the result, and reloading the first ones restores it."""
    case = first_case(cell)
    kernel = build(case)
    call = make_inputs(case.problem, 2 if case.is_imitated else 17, "uniform", case.device).call
    before = kernel(*call)
    kernel.reload(make_weights(case.problem, case.device, seed=7), write_shared=True)
    assert relative_error(kernel(*call), before.float()) > 0.1, "reload left the old weights"
    kernel.reload(make_weights(case.problem, case.device), write_shared=True)
    assert torch.equal(kernel(*call), before), "equal weights gave another result after a reload"


def check_workspaces_grow(cell: BackendCell) -> None:
    """Workspaces for more tokens are not smaller."""
    case = first_case(cell)
    experts = cell.experts(case.problem, case.platform)
    methods = [experts.workspace_shapes, *([experts.backward_workspace_shapes] if cell.facts.gradients else [])]
    sizes = [
        [torch.Size(shape).numel() for shapes in methods for shape in shapes(case.problem, num_tokens)]
        for num_tokens in range(1, 700, 7)
    ]
    for fewer, more in itertools.pairwise(sizes):
        assert all(small <= large for small, large in zip(fewer, more, strict=True)), (
            f"workspaces of {more} elements for more tokens than ones of {fewer}"
        )


def check_equal_bits(cell: BackendCell) -> None:
    """Equal inputs give equal bits, on a GPU while another stream is busy."""
    case = first_case(cell)
    kernel = build(case)
    call = make_inputs(case.problem, 63, "skewed", case.device).call
    first = kernel(*call)
    is_gpu = case.device.type == "cuda"
    busy: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if is_gpu:
        busy = torch.cuda.stream(torch.cuda.Stream())
    filler = torch.randn(2048, 2048, device=case.device) if is_gpu else torch.empty(0, 0)
    for _ in range(100 if is_gpu else 3):
        with busy:
            filler @ filler
        assert torch.equal(kernel(*call), first), "equal inputs gave other bits"


def check_batch_invariance(case: Case) -> None:
    """A token's row has equal bits in calls of any size: in another order, beside NaN, and beside one busy expert."""
    counts = invariant_tokens(case)
    most = counts[-1]
    inputs, crowd = (make_inputs(case.problem, most, routing, case.device) for routing in ("uniform", "one_expert"))
    ruined = dataclasses.replace(inputs, hidden_states=torch.full_like(inputs.hidden_states, float("nan")))
    layer = GuardedLayer(case, make_weights(case.problem, case.device), calls=[inputs])
    whole = layer(inputs)
    layer.check_close(inputs, whole, layer.truths[0])
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(case.device)
    for count in counts:
        calls: list[tuple[str, Inputs | None]] = [(f"T={count}", None)]
        if count > 1 and not case.is_imitated:
            calls += [(f"T={count} beside NaN", ruined), (f"T={count} beside tokens of one expert", crowd)]
        for name, neighbors in calls:
            for rows in order.split(count)[: 4 if count == 1 else 1]:
                # Every third row is the token's own beside neighbors.
                own = torch.arange(len(rows), device=case.device) % (1 if neighbors is None else 3) == 0
                mixed = [
                    mine[rows] if neighbors is None else torch.where(own[:, None], mine[rows], others[rows])
                    for mine, others in zip(inputs.call, (neighbors or inputs).call, strict=True)
                ]
                out = layer(Inputs(*mixed))
                equal = (out == whole[rows]).all(1) | ~own
                assert equal.all(), (
                    f"{name}: {int((~equal).sum())} of {int(own.sum())} rows have other bits than among {most} tokens"
                )
    layer.late.check()


def check_compiles(cell: BackendCell) -> None:
    """A layer compiles into one graph and gives the eager result."""
    case = first_case(cell)
    kernel = build(case)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def layer(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return kernel(hidden_states * 2, topk_weights, topk_ids) + 1

    for num_tokens in (17, 5):
        inputs = make_inputs(case.problem, num_tokens, "uniform", case.device)
        eager = kernel(inputs.hidden_states * 2, inputs.topk_weights, inputs.topk_ids) + 1
        assert torch.equal(layer(*inputs.call), eager), (
            f"T={num_tokens}: compiled code gave another result than eager code"
        )


def check_graph_replay(cell: BackendCell) -> None:
    """A replayed CUDA graph reads the current contents of its inputs; needs a CUDA device."""
    case = first_case(cell)
    kernel = build(case)
    inputs = make_inputs(case.problem, 63, "uniform", case.device)
    kernel(*inputs.call)
    torch.cuda.synchronize()
    others = [make_inputs(case.problem, 63, "skewed", case.device, seed) for seed in (3, 4)]
    check_capture(lambda: (kernel(*inputs.call),), inputs, others, "another result")


def check_capture(
    step: Callable[[], Sequence[torch.Tensor]], inputs: Inputs, others: Sequence[Inputs], wrong: str
) -> None:
    """A captured step, replayed, reads the current contents of its inputs: those of others in turn."""
    graph = torch.cuda.CUDAGraph()
    with collecting_later(), torch.cuda.graph(graph):
        captured = step()
    for other in others:
        with torch.no_grad():
            for tensor, source in zip(inputs.call, other.call, strict=True):
                tensor.copy_(source)
            for tensor in captured:
                tensor.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, captured, step())), f"a replayed graph gave {wrong} than eager code"


def check_no_synchronization(cell: BackendCell) -> None:
    """A call does not synchronize with the device; needs a CUDA device."""
    case = first_case(cell)
    kernel = build(case)
    call = make_inputs(case.problem, 63, "uniform", case.device).call
    kernel(*call)
    torch.cuda.synchronize()
    with no_waiting():
        kernel(*call)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within this context a call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _with_few_experts(case: Case) -> Case:
    """The same case with two experts if kernels are interpreted, whose time grows with the experts."""
    if not case.is_imitated:
        return case
    return dataclasses.replace(case, problem=dataclasses.replace(case.problem, num_experts=2, num_local_experts=2))


def _reference(
    case: Case,
    weights: ExpertWeights,
    inputs: Inputs,
    expert_map: torch.Tensor | None,
    computes: QuantScheme | None = None,
) -> torch.Tensor:
    with torch.no_grad():
        return reference_experts(
            case.problem, weights, *inputs.call, expert_map=expert_map, computes=computes or case.computes
        )
