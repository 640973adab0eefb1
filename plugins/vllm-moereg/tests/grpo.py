"""TRL's `GRPOTrainer` generates with a vLLM engine whose experts moereg runs: `python grpo.py FOLDER`, `--help`.

Wherever TRL generates, its engine also decodes greedily, and the weights are saved. In a second process, new engines
load what was saved: exit status 1 unless their tokens are the same, and others with the weights before an update, and
with the experts alone from before it. `FOLDER/log.json` has what was compared.

On a CPU the engine is fp32 and eager. With --cuda it is bf16, with CUDA graphs unless --eager says otherwise, and may
sleep while TRL trains; --server needs two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import (
    CACHE_BYTES,
    MODELS,
    NUM_TOKENS,
    PROCESS,
    PROMPTS,
    Watch,
    close,
    greedy,
    route_on_a_cpu,
    write_checkpoint,
)

# Wide enough for vLLM's attention on a GPU.
MODELS["grpo"] = MODELS["qwen3"] | {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
NUM_UPDATES = 3
BATCH = 4
MIXED = "mixed"
"""The folder of the last weights with experts from before the last update."""
ENVIRONMENT = PROCESS | {
    "MOEREG_VLLM": "require",
    # One host needs no other network and no multicast.
    "VLLM_HOST_IP": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}


def arguments() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="an empty one, for checkpoints and the log")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--sleep", type=int, choices=(1, 2), help="the engine sleeps, at this level; TRL's own is 2")
    parser.add_argument("--server", action="store_true", help="TRL's server mode, the engine on a second GPU")
    parser.add_argument("--new", action="store_true", help="the second process: only start new engines")
    return parser.parse_args()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of every engine, for most of which TRL has no options."""
    found: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": BATCH, "max_num_batched_tokens": 4096}
    if not options.cuda:
        # A share of the machine's memory, which is the default, may not be free.
        return found | {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES}
    found |= {"dtype": "bfloat16", "enforce_eager": options.eager, "gpu_memory_utilization": 0.1}
    # Without the compiler, which takes half a minute of each engine; Triton's attention has no sizes that it refuses.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    return found | {"attention_backend": "TRITON_ATTN", "compilation_config": {} if options.eager else graphs}


def leave_linear_layers_unpacked() -> None:
    """Lets linear layers read their parameters, as on a GPU: on a CPU vLLM packs them, so that TRL cannot load them."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", linear)


def tokenizer() -> Any:
    """A word is a token; a number's id is the number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({str(number): number for number in range(512)}))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="509", bos_token="510", eos_token="511")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The larger the numbers, the larger."""
    return [sum(ids) / len(ids) / 512 for ids in completion_ids]


Decode = Callable[[list[int]], list[int]]
"""Greedy tokens after a prompt. One prompt at a time, since bits depend on the batch."""


def decoder(llm: Any) -> Decode:
    return lambda prompt: greedy(llm, [prompt])[0]


class Record:
    """Notes what TRL's engine gives, and which saved weights it has."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.trainer: Any = None
        self._watch = watch
        self._experts: dict[str, Any] = {}

    def step(self, decode: Decode) -> None:
        """Notes what the engine gives where TRL generates, once before each update."""
        number, model = len(self.rows), self.trainer.model
        assert self.trainer.state.global_step == number
        model.save_pretrained(self.folder / str(number))
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if number == NUM_UPDATES:
            model.save_pretrained(self.folder / MIXED, state_dict=weights | self._experts)
        self._experts = {name: tensor for name, tensor in weights.items() if ".experts." in name}
        self.note(f"after {number} updates", number, decode)

    def note(self, what: str, weights: int, decode: Decode) -> None:
        calls = len(self._watch.calls)
        tokens = [decode(prompt) for prompt in PROMPTS]
        self.rows.append({"what": what, "weights": weights, "tokens": tokens, "calls": len(self._watch.calls) - calls})


def engine_class(options: argparse.Namespace, record: Record) -> type:
    """A class for TRL's own engine."""
    from vllm import LLM

    class Engine(LLM):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given | settings(options))

        def generate(self, *args: Any, **named: Any) -> Any:
            record.step(decoder(super()))
            return super().generate(*args, **named)

        def sleep(self, level: int = 1, **named: Any) -> None:
            super().sleep(options.sleep, **named)

    return Engine


def client_class(record: Record) -> type:
    """A class for TRL's client of a server."""
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):
        def generate(self, *args: Any, **named: Any) -> Any:
            ask = super().generate
            wanted = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": None}
            more = {"ignore_eos": True}
            record.step(lambda prompt: ask([prompt], **wanted, generation_kwargs=more)["completion_ids"][0])
            return ask(*args, **named)

    return Client


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10):
            return True
    except OSError:
        return False


@contextmanager
def server(options: argparse.Namespace, path: Path) -> Iterator[str]:
    """vLLM's server on the second GPU, with what TRL's documentation asks for; its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port)]
    command += ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
    for name, value in settings(options).items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with (options.folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not answers(f"{address}/health"):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended; see {log.name}")
                time.sleep(1)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def train(options: argparse.Namespace, path: Path, address: str | None, record: Record) -> None:
    """Runs the trainer, whose engine is its own unless there is an address."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM
    from trl.generation import vllm_generation

    vllm_generation.VLLMClient = client_class(record)
    vllm_generation.LLM = engine_class(options, record)
    arguments = trl.GRPOConfig(
        output_dir=str(options.folder / "trainer"),
        use_vllm=True,
        vllm_mode="server" if address else "colocate",
        vllm_server_base_url=address,
        vllm_group_port=free_port(),
        vllm_enable_sleep_mode=options.sleep is not None,
        max_steps=NUM_UPDATES + 1,  # TRL generates before an update.
        per_device_train_batch_size=BATCH,
        num_generations=BATCH,
        max_completion_length=8,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=not options.cuda,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    record.trainer = trl.GRPOTrainer(
        # On GPUs torch's grouped products are made for bf16.
        AutoModelForCausalLM.from_pretrained(path, dtype="float32", experts_implementation="eager"),
        reward,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in PROMPTS]}),
        processing_class=tokenizer(),
    )
    record.trainer.train()
    for row, logged in zip(record.rows, record.trainer.state.log_history, strict=False):
        row |= {name: logged[name] for name in ("reward", "loss", "grad_norm")}


def change_weights_directly(options: argparse.Namespace, record: Record) -> None:
    """As other trainers do, and TRL's server: all weights at once; then both levels of sleep, where the engine may."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    llm = record.trainer.vllm_generation.llm
    decode = decoder(super(type(llm), llm))
    if options.sleep:
        llm.wake_up()
    earlier = AutoModelForCausalLM.from_pretrained(options.folder / "1", dtype="float32")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(earlier.named_parameters())})
    llm.reset_prefix_cache()
    record.note("reload_weights", 1, decode)
    if options.sleep:
        LLM.sleep(llm, level=1)
        llm.wake_up()
        record.note("sleep level 1", 1, decode)
        LLM.sleep(llm, level=2)
        llm.wake_up()
        last = str(options.folder / str(NUM_UPDATES))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": last})
        llm.reset_prefix_cache()
        record.note("sleep level 2, reload_weights", NUM_UPDATES, decode)
    close(llm)


def new_engines(options: argparse.Namespace) -> None:
    """Writes tokens of new engines with all weights that were saved."""
    from vllm import LLM

    found = {}
    for name in (*map(str, range(NUM_UPDATES + 1)), MIXED):
        llm = LLM(str(options.folder / name), seed=0, skip_tokenizer_init=True, **settings(options))
        found[name] = [decoder(llm)(prompt) for prompt in PROMPTS]
        close(llm)
    (options.folder / "new.json").write_text(json.dumps(found))


def judge(rows: list[dict[str, Any]], new: dict[str, list[list[int]]], is_counted: bool) -> list[str]:
    """Prints a line for each row; returns what is wrong."""
    wrong = []
    for row in rows:
        is_equal = row["tokens"] == new[str(row["weights"])]
        numbers = [f"{name} {row[name]:.4g}" for name in ("reward", "loss", "grad_norm", "calls") if name in row]
        print(f"{row['what']}: {', '.join(numbers)}, a new engine's tokens: {'yes' if is_equal else 'no'}")
        if not is_equal:
            wrong.append(f"{row['what']}: {row['tokens']}, but a new engine gives {new[str(row['weights'])]}")
        if is_counted and not row["calls"]:
            wrong.append(f"{row['what']}: no kernel of moereg's was called")
    last = str(NUM_UPDATES)
    pairs = [*((str(number), str(number + 1)) for number in range(NUM_UPDATES)), (MIXED, last)]
    for one, other in pairs:
        if any(first == second for first, second in zip(new[one], new[other], strict=True)):
            wrong.append(f"a control: weights {one} and {other} give the same tokens")
    return wrong


def main() -> int:
    options = arguments()
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    if options.cuda:
        # One, since transformers' trainer would use all.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    from vllm.model_executor.models import registry

    # vLLM looks at a model's class in a process of its own, which takes 9 s, to leave CUDA alone in this one.
    registry._run_in_subprocess = lambda look: look()
    if not options.cuda:
        leave_linear_layers_unpacked()
        route_on_a_cpu()
    if options.new:
        new_engines(options)
        return 0
    path = write_checkpoint(options.folder, "grpo", "float32", None)
    tokenizer().save_pretrained(path)
    record = Record(options.folder, Watch(keeps_tensors=False))
    if options.server:
        with server(options, path) as address:
            train(options, path, address, record)
        assert "moereg runs model.layers" in (options.folder / "server.log").read_text()
    else:
        train(options, path, None, record)
        change_weights_directly(options, record)
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--new"], check=True)
    new = json.loads((options.folder / "new.json").read_text())
    (options.folder / "log.json").write_text(json.dumps({"rows": record.rows, "new": new}, indent=1))
    # In graphs kernels run without Python.
    wrong = judge(record.rows, new, is_counted=not options.server and (options.eager or not options.cuda))
    print(*wrong, "FAILED" if wrong else "PASSED", sep="\n", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
