"""`moereg compare`: right numbers get times, wrong ones reasons, and the page asks no host for anything."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moereg.cli._compare import verdict_of
from moereg.cli._whole_model_page import Bar, draw_bars
from tests.cli.command import ROOT, Call, CallJson
from tests.support.tiny_models import tiny_config, tiny_model

SIZES = "--tokens 12,4 --seconds 0.01 --device cpu"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, which tests only read."""
    path = tmp_path_factory.mktemp("model") / "tiny-mixtral"
    tiny_model("mixtral").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny-qwen3"
    tiny_config("qwen3_moe").save_pretrained(path)
    return path


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Names of experts implementations that are wrong, in routes, a little, or for few tokens, or that raise."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    right = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def swapped(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = right(module, hidden, (ids + 1) % module.num_experts, weights)
        return out

    def slightly(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 1.05 * right(module, hidden, ids, weights)  # type: ignore[no-any-return]

    def small(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (1.3 if len(hidden) < 3 else 1.0) * right(module, hidden, ids, weights)  # type: ignore[no-any-return]

    def lost(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    for function in (swapped, slightly, small, lost):
        monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, function.__name__, function)
    return "swapped,slightly,small,lost"


def test_a_saved_model_gets_times_and_a_verdict(saved: Path, call_json: CallJson, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, found = call_json(f"compare {saved} {SIZES} --batch 1,2 --html {page}")
    assert code == 0
    (fields,) = re.findall(r"- `compare`: `([^`]+)`", " ".join((ROOT / "docs" / "commands.md").read_text().split()))
    assert {*found} | {"prepare_free"} == {*re.sub(r" \([^)]*\)", "", fields).split(", ")}
    names = {name for name, check in found["checks"].items() if check["passed"]}
    assert names >= {"eager", "grouped_mm", "batched_mm", "moereg", "moereg_prepared"}
    assert found["reference"] == "fp32"
    assert found["control"]["norm"] > 2 * found["bound"]
    rows = {(row["phase"], row["batch"], row["implementation"]): row for row in found["rows"]}
    assert {key[:2] for key in rows} == {("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2)}
    for (phase, batch, _), row in rows.items():
        tokens = batch * (12 if phase == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
    assert all(len(tokens) == 4 for tokens in found["generated"].values() if tokens is not None)
    assert found["held_bytes"]["moereg"] == found["held_bytes"]["eager"] == found["weights_bytes"]
    assert "verified" in found["layers_chosen"][0]
    assert found["layers_chosen"][0].startswith(
        "2 layers, model.layers.0.mlp.experts to model.layers.1.mlp.experts: E4"
    )
    best = found["verdict"]["cases"][0]
    fastest = min((row["ms"], name) for (phase, batch, name), row in rows.items() if (phase, batch) == ("prefill", 1)
                  if not name.startswith("moereg"))  # fmt: skip
    assert best["best_other"] == fastest[1]
    assert best["over_best_other"] == pytest.approx(
        fastest[0] / rows["prefill", 1, found["verdict"]["implementation"]]["ms"]
    )
    check_page(page.read_text(encoding="utf-8"), found)


def check_page(text: str, found: dict[str, Any]) -> None:
    """It is one file that loads nothing, in two color schemes, with every case and name."""
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            tags.append(tag)
            assert not {"src", "href", "xlink:href", "data"} & {name for name, _ in attrs}

    Reader().feed(text)
    assert {"svg", "table", "style"} <= {*tags}
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {*tags}
    assert "http" not in text
    assert not re.search(r"url\(|@import", text)
    assert text.count("prefers-color-scheme: dark") == 2  # Of the page, and of the picture alone.
    for line in found["verdict"]["lines"]:
        assert line.replace("'", "&#x27;").replace('"', "&quot;") in text
    assert "decode, batch 2" in text
    assert "moereg prepared" in text


def test_what_is_wrong_or_raises_gets_no_time(saved: Path, call: Call, planted: str) -> None:
    code, out, _ = call(f"compare {saved} {SIZES} --implementations eager,moereg,{planted}")
    assert code == 0, "moereg is right"
    text = " ".join(out.split())
    assert re.search(r"swapped is WRONG: logits [\d.]+ \(bound [\d.]+\), experts [\d.]+ \(bound [\d.]+\)", text)
    assert "slightly is WRONG" in text
    assert "lost did not run: no such kernel" in text
    code, out, _ = call(f"compare {saved} {SIZES} --implementations eager,moereg,{planted} --json")
    rows = json.loads(out)["rows"]
    timed = {(row["phase"], row["implementation"]) for row in rows if "ms" in row}
    right = {(phase, name) for phase in ("prefill", "decode") for name in ("eager", "moereg")}
    assert timed == {*right, ("prefill", "small")}
    (outcome,) = [row["outcome"] for row in rows if "ms" not in row]
    assert outcome.startswith("wrong experts at T=1: 0.3, bound 0.01")


def test_without_room_for_a_copy_the_prepared_model_comes_last(
    saved: Path, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moereg.cli import _whole_model

    def lacking(model: Any, *, free: bool, progress: bool) -> Any:
        if not free:
            raise torch.OutOfMemoryError("no room for a copy")
        return prepare(model, free=free, progress=progress)

    prepare = _whole_model.prepare
    monkeypatch.setattr(_whole_model, "prepare", lacking)
    code, found = call_json(f"compare {saved} {SIZES} --implementations eager,moereg,moereg_prepared")
    assert code == 0
    assert found["rows"][-1]["implementation"] == "moereg_prepared"
    assert {row["implementation"] for row in found["rows"] if "ms" in row} == {"eager", "moereg", "moereg_prepared"}
    assert any("with free=True: no room for a copy" in notice for notice in found["notices"])


def test_a_wrong_moereg_is_the_exit_code(saved: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from moereg.integrations._experts.serving import ServedExperts

    run = ServedExperts.run
    monkeypatch.setattr(ServedExperts, "run", lambda self, *inputs: 1.1 * run(self, *inputs))
    code, out, _ = call(f"compare {saved} {SIZES} --implementations eager,moereg")
    assert code == 1
    assert "moereg is WRONG" in out
    assert out.splitlines()[-1] == "moereg has no time here, for the reasons given"


def test_a_config_alone_needs_random_weights(config_alone: Path, call: Call, call_json: CallJson) -> None:
    code, out, error = call(f"compare {config_alone} {SIZES}")
    assert (code, out) == (2, "")
    assert "must have safetensors, got none; add --random-weights" in error
    some = "--implementations eager,moereg,moereg_prepared"
    code, found = call_json(f"compare {config_alone} {SIZES} --random-weights --layers 1 --dtype bfloat16 {some}")
    assert code == 0
    assert (found["layers"], found["dtype"], found["random_weights"]) == (1, "bfloat16", True)
    code, _, error = call(f"compare {config_alone} {SIZES} --layers 1")
    assert code == 2
    assert "--layers takes a part of a model, which needs --random-weights" in error


def test_models_that_cannot_be_compared_are_one_clear_line(call: Call, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    LlamaConfig(vocab_size=64, **tiny).save_pretrained(tmp_path / "dense")
    code, out, error = call(f"compare {tmp_path / 'dense'} --random-weights")
    assert (code, out) == (2, "")
    assert "must be a Mixture-of-Experts model, got LlamaForCausalLM, without routed experts" in error
    code, out, error = call("compare nobody/no-such-model")
    assert (code, out) == (2, "")
    assert "the Hub's local cache has no such model" in error
    assert len(error.splitlines()) == 1
    for options, expected in {
        "--tokens 512": "--tokens must be those of a prompt and new ones, such as 512,32",
        "--dtype int8": "int8",
        "--device tpu": "tpu",
    }.items():
        code, _, error = call(f"compare {tmp_path / 'dense'} --random-weights {options}")
        assert code == 2
        assert expected in error


def test_a_model_that_moereg_refuses_says_why(call: Call, tmp_path: Path) -> None:
    tiny_config("jetmoe").save_pretrained(tmp_path)
    code, out, _ = call(f"compare {tmp_path} {SIZES} --random-weights")
    assert code == 3
    assert "moereg prepared did not run: moereg does not serve JetMoeMoE" in " ".join(out.split())


def test_help_is_short_and_has_examples(call: Call) -> None:
    code, out, _ = call("compare --help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert len(re.findall(r"^ *moereg compare ", out, re.MULTILINE)) == 2


def test_bad_input_is_refused_before_anything_is_loaded(
    config_alone: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "manual_seed", None)  # Random weights begin with it.
    for options, expected in {
        "--implementations moereg_prepare": "moereg_prepared",
        f"--html {config_alone}/none/page.html": "--html must name a file in a folder that can be written to",
    }.items():
        code, _, error = call(f"compare {config_alone} {SIZES} --random-weights {options}")
        assert code == 2
        assert expected in error


def row(name: str, ms: float, spread: float = 0.01, phase: str = "decode") -> dict[str, Any]:
    place = {"phase": phase, "mode": "eager", "batch": 1, "tokens": 8}
    ends = {"p10_ms": ms * (1 - spread), "p90_ms": ms * (1 + spread)}
    return {"implementation": name, "ms": ms, "tokens_per_s": 1e3 / ms, **place, **ends}


def test_the_verdict_counts_neither_noise_nor_spread() -> None:
    found = verdict_of([row("eager", 13.1), row("grouped_mm", 11.2), row("moereg", 11.1), row("moereg_prepared", 10.0)])
    assert found["implementation"] == "moereg_prepared"
    assert found["lines"] == [
        "decode, batch 1: moereg prepared 1.31x eager, 1.12x grouped_mm, the best other",
        "use: moereg.integrations.transformers.prepare(model)",
    ]
    # Prepared gains nothing over registered, which costs nothing.
    found = verdict_of([row("eager", 13.1), row("moereg", 10.2), row("moereg_prepared", 10.0)])
    assert found["implementation"] == "moereg"
    found = verdict_of([row("eager", 10.2), row("moereg", 10.0)])
    assert "1.02x eager (a tie)" in found["lines"][0]
    assert "nothing is gained" in found["lines"][-1]
    found = verdict_of([row("eager", 12.0, 0.3), row("moereg", 10.0, 0.3)])
    assert "1.20x eager (within the noise)" in found["lines"][0]
    found = verdict_of([row("eager", 12.0, 0.4), row("moereg", 10.0, 0.1)])
    assert "vary up to 2.3 times" in found["lines"][1]
    found = verdict_of([row("eager", 9.0), row("grouped_mm", 8.0), row("moereg", 10.0)])
    assert "stay with model.set_experts_implementation('grouped_mm')" in found["lines"][-1]
    assert verdict_of([row("eager", 9.0)])["implementation"] is None
    # What is slow in one phase is not the one to stay with, and what is wrong in one is not to be used in another.
    times = {"eager": (5.0, 30.0), "grouped_mm": (20.0, 11.0), "moereg": (20.0, 12.0)}
    rows = [
        row(name, one[place], 0.01, phase)
        for place, phase in enumerate(("prefill", "decode"))
        for name, one in times.items()
    ]
    found = verdict_of(rows)
    assert "stay with model.set_experts_implementation('eager')" in found["lines"][-1]
    wrong = {**row("moereg", 1.0, phase="prefill"), "outcome": "wrong experts at T=512: 1, bound 0.1"}
    del wrong["ms"]
    assert verdict_of([*rows[:2], wrong, *rows[3:]])["implementation"] is None


def test_a_picture_escapes_what_a_config_says() -> None:
    bars = {"decode, batch 1": {"eager": Bar(1.0, 0.9, 1.1, "<b>")}}
    text = draw_bars({"<script>": bars}, {"eager": "eager"}, 'a "title"')
    assert "<script>" not in text
    assert "<b>" not in text
    import xml.etree.ElementTree as ElementTree

    picture = ElementTree.fromstring(text)
    heights = [
        float(one.get("height", "0")) for one in picture.iter("{http://www.w3.org/2000/svg}rect") if one.get("x")
    ]
    assert heights[0] == pytest.approx(150 / 1.1, abs=0.1)
