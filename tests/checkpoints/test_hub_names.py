"""Names of the Hub: what its local cache holds, built here as huggingface_hub builds it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from moereg.checkpoints import load_experts, moe_layers
from moereg.cli import main
from moereg.errors import CheckpointError
from tests.checkpoints.small_checkpoint import CONFIG, shard_of, write_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub", reason="finds names of the Hub")

NAME = "moereg/Tiny-MoE"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the cache's main branch of NAME is; one of its blobs is in the store of all models."""
    cache = tmp_path / "cache"
    model = cache / "models--moereg--Tiny-MoE"
    snapshot = model / "snapshots" / COMMIT
    for folder in (snapshot, model / "refs", model / "blobs", cache / "blobs" / "ab"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    write_checkpoint(snapshot, shard_of=shard_of)
    (snapshot / "generation_config.json").write_text("{}")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(model / "blobs" / f"{number:040x}")
        file.symlink_to(f"../../blobs/{number:040x}")
    blob = Path(os.path.realpath(snapshot / "experts0.safetensors"))
    blob.rename(cache / "blobs" / "ab" / f"{0xAB:064x}")
    blob.symlink_to(f"../../blobs/ab/{0xAB:064x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    (found,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (found.repo_id, {os.path.basename(os.readlink(file)) for file in snapshot.iterdir()}) == (
        NAME,
        {blob.name for blob in (model / "blobs").iterdir()},
    )
    return snapshot


def test_a_name_is_what_the_cache_holds_and_a_path_that_exists_is_a_path(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected = (load_experts(path, 1) for path in (NAME, snapshot))
    assert torch.equal(found.weights.w13, expected.weights.w13)
    assert main(["explain", "--checkpoint", NAME, "--layer", "1", "--platform", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("Tiny-MoE, layer 1")
    # A folder of that name, whose layers are others.
    Path(NAME).mkdir(parents=True)
    write_checkpoint(Path(NAME), {**CONFIG, "mlp_only_layers": [0, 1]})
    assert (moe_layers(NAME), moe_layers(snapshot)) == ((2,), (1, 2))


@pytest.mark.parametrize("name", [NAME, "moereg/Other", "not..a/name"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_name_that_is_not_found_has_the_line_that_downloads_it(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_installed: bool
) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shutil.rmtree(snapshot)
    with pytest.raises(CheckpointError) as error:
        moe_layers(name)
    assert f"there is no directory '{name}'" in str(error.value)
    assert str(error.value).endswith(f"`hf download {name}`")
    assert ("pip install huggingface_hub" in str(error.value)) is not is_installed


def test_a_part_of_a_snapshot_is_read_and_what_it_misses_is_one_error(snapshot: Path) -> None:
    (snapshot / "experts1.safetensors").unlink()
    assert moe_layers(NAME) == (1, 2)
    load_experts(NAME, 1, num_local_experts=2)  # They are in the other file.
    with pytest.raises(CheckpointError, match=rf"experts1.safetensors, which is missing; `hf download {NAME}`$"):
        load_experts(NAME, 1)
    (snapshot / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=rf"got neither in .*; `hf download {NAME}`$"):
        load_experts(NAME, 1)


IN_CACHE = f"cache/models--moereg--Tiny-MoE/snapshots/{COMMIT}"
LINKS = {
    "out of a directory": ("a/b/plain/experts0.safetensors", "elsewhere/file"),
    "a config": ("a/b/plain/config.json", "elsewhere/file"),
    "blobs of no cache": ("a/b/plain/experts0.safetensors", "a/blobs/file"),
    "another model's blobs": (f"{IN_CACHE}/experts0.safetensors", "cache/models--b/blobs/f"),
    "the cache beside the blobs": (f"{IN_CACHE}/experts0.safetensors", "cache/token"),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_lead_nowhere_but_into_the_blobs(snapshot: Path, tmp_path: Path, case: str) -> None:
    plain = tmp_path / "a" / "b" / "plain"
    plain.mkdir(parents=True)
    write_checkpoint(plain, shard_of=shard_of)
    # Within the directory a file may have two names.
    (plain / "router.safetensors").rename(plain / "the same")
    (plain / "router.safetensors").symlink_to("the same")
    source, target = (tmp_path / name for name in LINKS[case])
    load_experts(source.parent, 1)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes() if source.exists() else b"a secret")
    source.unlink(missing_ok=True)
    source.symlink_to(target)
    with pytest.raises(CheckpointError, match=f"must be in its directory, got {source}, a link to {target}; copy"):
        load_experts(source.parent, 1)


def test_blobs_may_be_a_link_to_another_disk(snapshot: Path, tmp_path: Path) -> None:
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "larger")
    blobs.symlink_to(tmp_path / "larger")
    assert moe_layers(NAME) == moe_layers(snapshot)
