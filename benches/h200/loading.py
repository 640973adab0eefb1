"""Memory while transformers loads a model whose experts are quantized on the way.

    python -m benches.h200.loading [--schemes nf4 nf4_dq int4_w4a16_g128] [--layers 48] [--json FILE]
    python -m benches.h200.loading --model tiny        # on any CPU, without memory

Qwen3-30B-A3B's checkpoint as published, tensor by tensor and a file a layer, holds zeros: the files are holes, which
take no disk. Each scheme loads it in a process of its own. The peak stands beside what the loaded model holds, and
beside its limit: that and three layers of experts in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from benches.whole_model.models import MODELS
from moereg.evidence.provenance import provenance
from moereg.integrations._experts.packed import stored_in
from moereg.platforms import probe_platform

LAYERS_AT_ONCE: Final = 3


def published(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in a checkpoint of Qwen3-MoE."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            yield name, tuple(tensor.shape)
        elif name.endswith("down_proj"):
            block = name.removesuffix("down_proj")
            for expert in range(config.num_experts):
                for part in ("gate_proj", "up_proj"):
                    yield f"{block}{expert}.{part}.weight", (width, hidden)
                yield f"{block}{expert}.down_proj.weight", (hidden, width)


def write_zeros(folder: pathlib.Path, config: Any) -> None:
    """Writes a checkpoint of zeros in bf16, whose tensors are holes in its files."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in published(config):
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, tensors in files.items():
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)


def load(folder: pathlib.Path, scheme: str) -> dict[str, Any]:
    """Loads the model; bytes that it holds, a layer's experts in bf16 among them, and at most while it loads."""
    import transformers

    from moereg.integrations.transformers import quantize_on_load

    on_gpu = torch.cuda.is_available()
    start = time.monotonic()
    keywords = {"device_map": "cuda:0"} if on_gpu else {}  # It needs Accelerate.
    quantizing = quantize_on_load(scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="bfloat16", quantization_config=quantizing, **keywords
    )
    seconds = time.monotonic() - start
    parameters = list(model.parameters())
    experts = sum(2 * each.numel() for each in parameters if len(stored_in(each)) > 1)
    row = {"scheme": scheme, "seconds": seconds, "layer": experts // model.config.num_hidden_layers}
    row["held"] = sum(part.nbytes for each in parameters for part in stored_in(each))
    row["limit"] = row["held"] + LAYERS_AT_ONCE * row["layer"]
    row["peak"] = torch.cuda.max_memory_allocated() if on_gpu else None
    return row


def main() -> int:
    """Writes the checkpoint, loads it by each scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3-30b-a3b", "tiny"), default="qwen3-30b-a3b")
    parser.add_argument("--schemes", nargs="+", default=["nf4", "nf4_dq", "int4_w4a16_g128"])
    parser.add_argument("--layers", type=int, default=0, help="of the model; all without it")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SCHEME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(load(pathlib.Path(options.child[0]), options.child[1])))
        return 0
    import transformers

    keywords = {**MODELS[options.model].config}
    if options.layers:
        keywords["num_hidden_layers"] = options.layers
    config = transformers.AutoConfig.for_model(**keywords)
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_zeros(folder, config)
        for scheme in options.schemes:
            command = [sys.executable, "-m", "benches.h200.loading", "--child", name, scheme]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{scheme}: {done.stderr[-2000:]}", file=sys.stderr)
                failed = True
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            shown = ", ".join(f"{key} {row[key] / 1e9:.2f} GB" for key in ("peak", "held", "limit") if row[key])
            print(f"{scheme}: {shown}, {row['seconds']:.0f} s", flush=True)
            failed |= row["peak"] is not None and row["peak"] > row["limit"]
    if options.json:
        facts = provenance(probe_platform(), ("moereg", "torch", "transformers"))
        record = {"schema": 1, **facts, "model": options.model, "layers": config.num_hidden_layers, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
