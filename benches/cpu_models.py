"""Whole models on this CPU: tokens a second of transformers with moereg and alone, and of llama.cpp.

    make build-cpu
    PYTHONPATH=build/moereg-cpu/site:. python -m benches.cpu_models --model olmoe-1b-7b [--scheme int4_w4a16_g128]
        [--threads N ...] [--seconds 4] [--llama PYTHON --gguf FOLDER] [--json FILE]

Models have their published sizes and random weights: one layer's are drawn, and each layer has a copy with its experts
in another order. In bf16, moereg and transformers' implementations run the same weights in one process, in turns, once
their experts and logits are right (`moereg compare`'s check). In a quantized scheme, experts are moereg's kernels alone
and their 16-bit parameters stay on meta; a layer is compared with the reference at each number of tokens.

With --llama, llama.cpp runs instead, in a process of its own: PYTHON has llama-cpp-python, gguf and numpy
(`pip install --no-binary llama-cpp-python llama-cpp-python gguf`). Its matrices are BF16, or with a quantized scheme
Q4_0, attention and embeddings too. FOLDER keeps the models.

A decode step reads at least the weights of one token's experts and all others but the embeddings. What is faster than
memory allows for that gets no time. FILE keeps the rows of earlier runs with the same facts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

from benches import llama_models
from benches.bench_cpu_kernels import read_rate
from benches.stored import SAME, earlier_rows_of, instruction_set
from benches.whole_model.measure import OURS, Decoding
from benches.whole_model.models import CONTEXT, EAGER, MODELS, Case, Model
from moereg.bench.inputs import Call, random_calls, random_weights
from moereg.bench.timing import time_runs
from moereg.cli._whole_model import WholeModel
from moereg.dispatch import select_backend
from moereg.evidence.provenance import provenance
from moereg.integrations._experts import serving
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.layouts import read_experts
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import probe_platform
from moereg.spec.quant_schemes import get_scheme
from moereg.weights.permuted import ExpertWeights

__all__ = ["LLAMA", "main"]

CPU: Final = torch.device("cpu")
PLAIN: Final = "unquantized"
LLAMA: Final = "llama.cpp"
NAMES: Final = (EAGER, "batched_mm", "grouped_mm", OURS)
_CHECKED_TOKENS: Final = 4
_PROMPT: Final = 16


class CpuModel:
    """A model with random weights, its experts' in the scheme.

    Attributes:
        model: In eval mode; on meta where nothing was drawn.
        backend: That runs quantized experts.
        num_read: Weights that a step reads for one token: of experts, and of the rest.
        expert_bytes: Of one weight of an expert, scales included.
    """

    def __init__(self, spec: Model, scheme: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        fields, make = dict(spec.config), cast(Any, AutoModelForCausalLM).from_config
        self._config: Any = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            self.model: Any = make(self._config, dtype=torch.bfloat16, experts_implementation=EAGER).eval()
        self._experts = [each.module for each in find_experts(self.model)]
        inside = {parameter for module in self._experts for parameter in module.parameters()}
        rest = {*self.model.parameters()} - inside - {*self.model.get_input_embeddings().parameters()}
        self._numel = sum(each.numel() for each in inside)
        active = self._numel * self._config.num_experts_per_tok // self._config.num_experts
        self.num_read, self.expert_bytes = (active, sum(each.numel() for each in rest)), 2.0
        problem = read_experts(self._experts[0]).problem(self._config.num_experts_per_tok, torch.bfloat16)
        self._problem = dataclasses.replace(problem, quant=get_scheme(scheme))

    def draw(self) -> None:
        """Gives the model its weights."""
        torch.manual_seed(0)
        for module in set(self.model.modules()) - set(self._experts):
            for name, value in module.named_parameters(recurse=False):
                ones = torch.ones_like(value, device=CPU)
                setattr(module, name, _frozen(ones if value.dim() == 1 else ones.normal_(std=0.02)))
        decoder = self.model.get_decoder()
        decoder.rotary_emb = type(decoder.rotary_emb)(self._config)
        quant, drawn = self._problem.quant, random_weights(self._problem, torch.Generator().manual_seed(1), CPU)
        copies = (
            ExpertWeights(**{name: each.roll(number, 0) for name, each in drawn.tensors().items()}, quant=quant)
            for number in range(len(self._experts))
        )
        if quant.weight is None:
            for module, weights in zip(self._experts, copies, strict=True):
                stored = read_experts(module).stored
                assert stored is not None
                for name, value in stored(weights).items():
                    setattr(module, name, _frozen(value))
            return
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        selection = select_backend(self._problem, probe_platform())
        kernels = {id(module): make_kernel(self._problem, next(copies), selection) for module in self._experts}
        # The first layer's experts are in the order of the drawn ones.
        self._drawn, self._first, self.backend = drawn, kernels[id(self._experts[0])], str(selection.backend)
        self.expert_bytes = sum(kernel.weights.num_bytes for kernel in kernels.values()) / self._numel

        def call(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return kernels[id(module)](hidden, weights.float(), ids)

        type(ALL_EXPERTS_FUNCTIONS).register(quant.name, call)
        self.model.set_experts_implementation(quant.name)

    def error(self, num_tokens: int) -> str:
        """Returns what is wrong with the first layer's kernel; empty if nothing is."""
        call = random_calls(self._problem, num_tokens, "uniform", 1, CPU)[0]
        few = Call(*(each[:_CHECKED_TOKENS] for each in call))
        expected = reference_experts(self._problem, self._drawn, *few, computes=self._problem.quant)
        found = relative_error(self._first(*call)[:_CHECKED_TOKENS], expected)
        return "" if found <= layer_tolerance(self._problem, num_tokens) else f"wrong: error {found:.1e}"


def _frozen(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def in_turns(made: CpuModel, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of transformers with moereg and alone, in bf16."""
    record: dict[str, Any] = {"rows": []}
    torch.set_num_threads(max(options.threads))
    whole = WholeModel(made.model, CPU, record, _PROMPT)
    whole.names = list(NAMES)
    whole.check()
    whole.use(OURS)
    served = serving.served(whole.experts[0])
    assert served is not None
    backend = next(iter(served.kernels.values())).selection.backend
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in cases:
            # batched_mm copies the weights of each route: of a prompt, more than the memory.
            names = [name for name in whole.names if name != "batched_mm" or case.phase == "decode"]
            for row in whole.measure(case, options.seconds, names):
                yield {**row, "threads": threads, **({"backend": backend} if row["implementation"] == OURS else {})}
            for name in {*NAMES} - {*names}:
                why = "copies each route's weights" if name in whole.names else f"wrong: {record['checks'][name]}"
                yield {"implementation": name, **dataclasses.asdict(case), "threads": threads, "outcome": why}


def quantized(made: CpuModel, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of moereg with quantized experts."""
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in cases:
            row = {"implementation": OURS, **dataclasses.asdict(case), "threads": threads, "backend": made.backend}
            decodes = case.phase == "decode"
            if outcome := made.error(case.batch if decodes else case.tokens):
                yield {**row, "outcome": outcome}
                continue
            ids = torch.randint(made.model.config.vocab_size, (case.batch, case.tokens))
            step = Decoding(made.model, case, CPU).step if decodes else None
            run = step or functools.partial(made.model, input_ids=ids, logits_to_keep=1)
            timing = time_runs({OURS: [run]}, CPU, 20, options.seconds)[OURS]
            yield {**row, "ms": timing.median_us / 1e3, "samples": len(timing.samples_us)}


def llama(spec: Model, kind: str, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of llama.cpp, by another Python."""
    asked = {"config": dict(spec.config), "cases": [*map(dataclasses.asdict, cases)], "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder:
        question = Path(folder) / "asked.json"
        question.write_text(json.dumps({**asked, "seconds": options.seconds}))
        file = (options.gguf or Path(folder)) / f"{options.model}-{kind}.gguf"
        command = [options.llama, llama_models.__file__, question, kind, file]
        answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    for row in answer["rows"]:
        yield {"implementation": LLAMA, **row, "version": answer["version"], "type": kind}


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows, with the bytes that a decode step reads for one sequence and the rate of memory."""
    spec, rates = MODELS[options.model], {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        rates[threads] = read_rate(threads)
    kind, prompt = "BF16" if options.scheme == PLAIN else "Q4_0", Case("prefill", "eager", 1, options.prompt)
    cases = [*(Case("decode", "eager", batch, CONTEXT) for batch in (1, 4)), prompt]
    made, rest_bytes = CpuModel(spec, options.scheme), 2.0
    if options.llama:
        rows, (weights, num_bytes) = llama(spec, kind, cases, options), llama_models.BLOCK[kind]
        made.expert_bytes = rest_bytes = num_bytes / weights
    else:
        made.draw()
        rows = (in_turns if options.scheme == PLAIN else quantized)(made, cases, options)
    for row in rows:
        row |= {"model": options.model, "scheme": options.scheme, "read_gbps": rates[row["threads"]]}
        if "ms" in row:
            tokens = row["batch"] * (1 if row["phase"] == "decode" else row["tokens"])
            row["tokens_per_s"] = tokens / row["ms"] * 1e3
            if row["phase"] == "decode":
                least = made.num_read[0] * made.expert_bytes + made.num_read[1] * rest_bytes
                row |= {"read_bytes": least, "read_share": least / row["ms"] / 1e6 / row["read_gbps"]}
                if row["read_share"] > SAME:
                    row = {**row, "outcome": "faster than memory", "ms": None, "tokens_per_s": None}
        yield row


_KEY: Final = ("model", "scheme", "threads", "implementation", "phase", "batch", "tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench.

    Returns:
        0; 1 where our own result was wrong; 2 where FILE is of another machine, commit or setting.
    """
    options = _parser().parse_args(arguments)
    facts = {
        "kind": "cpu_models",
        **provenance(probe_platform(), ("torch", "transformers", "moereg-cpu")),
        "instruction_set": instruction_set(),
    }
    try:
        rows = earlier_rows_of(options.json, facts, ("device", "versions", "commit", "instruction_set"))
    except ValueError as error:
        print(f"cpu_models: {error}", file=sys.stderr)
        return 2
    is_right = True
    with torch.inference_mode():
        for row in measure(options):
            print({name: row.get(name) for name in (*_KEY, "ms", "tokens_per_s", "read_share", "outcome")}, flush=True)
            is_right &= row["implementation"] != OURS or "outcome" not in row
            rows = [one for one in rows if any(one[key] != row[key] for key in _KEY)] + [row]
            if options.json:
                options.json.write_text(json.dumps({"schema": 1, **facts, "rows": rows}, indent=1) + "\n")
    return 0 if is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Tokens a second of whole models on this CPU.")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--scheme", default=PLAIN, help="of the experts' weights")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2), help="1 and 2 by default")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one median; at least three samples")
    parser.add_argument("--llama", metavar="PYTHON", help="run llama.cpp instead, by this Python")
    parser.add_argument("--gguf", type=Path, metavar="FOLDER", help="where llama.cpp's models are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
