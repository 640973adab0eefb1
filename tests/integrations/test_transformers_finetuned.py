"""Fine-tuning by transformers' `Trainer` and TRL's `SFTTrainer`: moereg trains, and its losses are eager's."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import huggingface_hub.constants
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moereg.integrations._experts import training
from moereg.integrations._experts.serving import served
from tests.support.live_models import kernel_steps
from tests.support.tiny_models import SIZES, tiny_model

pytestmark = [
    pytest.mark.finetune,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="make test-finetune installs trl and peft"),
]

# Of unequal lengths, so that batches are padded.
TEXTS: Final = ("7 2 9 7 2 9 7", "3 3 8 5", "11 4 6 10 2", "5 9 5 9 5 9 5 9", "8 6 4 2", "2 3 4 5 6 7")
NUM_STEPS: Final = 30
TRAINED: Final[dict[str, tuple[dict[str, Any] | None, float, str]]] = {
    "all": (None, 3e-3, "hidden_states topk_weights w13 w2"),
    "attention": ({"target_modules": ["q_proj", "v_proj"]}, 3e-2, "hidden_states topk_weights"),
    "experts": (
        {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]},
        3e-2,
        "w13_a w13_b w2_a w2_b",  # Below the first layer nothing trains.
    ),
}
"""Arguments of PEFT's `LoraConfig`, the learning rate, and the last gradients of each layer's backward pass."""


def tokenizer() -> Any:
    """A word is a token; a number's id is the number."""
    words = ["<pad>", "<eos>", *map(str, range(2, SIZES["vocab_size"]))]
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def of_transformers(model: Any, adapter: Any, options: dict[str, Any]) -> Any:
    import peft

    if adapter is not None:
        transformers.set_seed(42)
        model = peft.get_peft_model(model, adapter)
    tokens = tokenizer()
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**options),
        transformers.DataCollatorForLanguageModeling(tokens, mlm=False),
        [tokens(text) for text in TEXTS],
    )


def of_trl(model: Any, adapter: Any, options: dict[str, Any]) -> Any:
    import datasets
    import trl

    return trl.SFTTrainer(
        model,
        trl.SFTConfig(**options),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == NUM_STEPS
    return found


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # TRL reports each trainer that is made.


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


@pytest.mark.parametrize(
    ("made", "checkpointing"),
    [(of_transformers, [False, True]), (of_trl, [True])],  # TRL checkpoints unless told otherwise.
    ids=["Trainer", "SFTTrainer"],
)
@pytest.mark.parametrize("trained", TRAINED)
def test_losses_are_those_of_eager(
    trained: str,
    made: Callable[..., Any],
    checkpointing: list[bool],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import peft

    targets, learning_rate, gradients = TRAINED[trained]
    options |= {"max_steps": NUM_STEPS, "learning_rate": learning_rate, "bf16": False}

    def trainer_with(implementation: str, **others: Any) -> Any:
        model = tiny_model("qwen3_moe")
        model.set_experts_implementation(implementation)
        adapter = None if targets is None else peft.LoraConfig(r=4, **targets)
        return made(model, adapter, options | others)

    wanted = losses_of(trainer_with("eager", gradient_checkpointing=False))
    assert sum(wanted[-3:]) < 0.99 * sum(wanted[:3])  # An epoch is three steps.
    steps = kernel_steps(monkeypatch)
    for is_checkpointed in checkpointing:
        steps.clear()
        trainer = trainer_with("moereg", gradient_checkpointing=is_checkpointed)
        with caplog.at_level(logging.WARNING, "moereg"):
            assert losses_of(trainer) == pytest.approx(wanted, rel=1e-4)
        layers = [module for module in trainer.model.modules() if isinstance(module, Qwen3MoeExperts)]
        assert len(layers) == SIZES["num_hidden_layers"]
        for layer in layers:
            found = served(layer)
            assert found is not None
            (how,) = found.trainers.values()
            assert isinstance(how, training.Trainer)
        # Checkpointing runs each forward pass once more.
        assert steps.count("forward") == NUM_STEPS * len(layers) * (1 + is_checkpointed)
        backward = [step for step in steps if step.startswith("backward ")]
        assert len(backward) == NUM_STEPS * len(layers)
        assert all(step.endswith(f" {gradients}") for step in backward)
        assert "infer" not in steps
    assert not [record for record in caplog.records if record.name == "moereg"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sft_trainer_autocasts_to_bfloat16_unless_told_otherwise(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = kernel_steps(monkeypatch)
    losses = []
    for implementation in ("eager", "moereg"):
        model = tiny_model("qwen3_moe", dtype)
        model.set_experts_implementation(implementation)
        trainer = of_trl(model, None, options | {"max_steps": 1})
        with caplog.at_level(logging.WARNING, "moereg"):
            trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        assert trainer.accelerator.mixed_precision == "bf16"
        assert next(trainer.model.parameters()).dtype == dtype
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)
    assert steps.count(f"backward {TRAINED['all'][2]}") == 2
    assert not [record for record in caplog.records if record.name == "moereg"]
