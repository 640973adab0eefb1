"""Reads a checkpoint directory: config.json, and safetensors files, opened when needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from moereg.errors import CheckpointError, shown
from moereg.routing import BY_HAND, language_config
from moereg.runtime.files import open_regular
from moereg.runtime.memory import format_bytes

ONE_EXPORT: Final = f"take config.json and tensors from one export of the model, or, if they are, {BY_HAND}"
"""A cure where config.json and tensors contradict each other."""
# Names of the Hub are looked up in its local cache; nothing is downloaded.
_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_MODEL_OPT: Final = "hf_quant_config.json"
# The quantization config that a published model leaves out, by model type.
_UNSAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "inkling2_text": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]},
}
# Bytes, ten times the largest published: a list of quantized modules, and an index of 200,000 tensors.
_LARGEST_CONFIG: Final = 16 * 2**20
_LARGEST_INDEX: Final = 256 * 2**20
# safetensors' own limit.
_LARGEST_HEADER: Final = 100_000_000
# Loading a pickle runs its code, so pickles are named in the error and never opened.
_PICKLES: Final = (".bin", ".pt", ".pth")
_ROW_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Dtypes of tensors with all experts, of which rows are read."""


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """A tensor's entry in a file's header; the dtype in safetensors' spelling, such as `BF16`."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class CheckpointFiles(contextlib.ExitStack):
    """A checkpoint's directory, or that of a model in the Hub's local cache, by its name.

    Opens each shard once, when a tensor in it is first needed; closes them on exit. A file that is missing, corrupt or
    of another kind is a CheckpointError of every method.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            given = Path(path).expanduser()
        except RuntimeError as error:
            raise CheckpointError(
                f"a checkpoint directory must exist, got {shown(str(path))}: {error}; give the directory of a "
                "checkpoint that is on this machine"
            ) from error
        snapshot = _snapshot_of(given)
        self.path = given if snapshot is None else snapshot
        self._download = None if snapshot is None else f"`hf download {given}`"
        self._shards: dict[str, Any] = {}
        self._rows: dict[str, _ShardRows] = {}

    @functools.cached_property
    def _full_config(self) -> Mapping[str, Any]:
        config_path = self.find("config.json")
        if config_path is None:
            self._refuse_others()
            raise CheckpointError(
                f"a checkpoint directory must hold config.json, got {str(self.path)!r} without one; nothing is "
                "downloaded, so give the directory of a checkpoint that is on this machine"
            )
        return _read_json_object(config_path, _LARGEST_CONFIG)

    @property
    def config(self) -> Mapping[str, Any]:
        """The part of config.json that describes the language model; multimodal models nest it."""
        return language_config(self._full_config)

    @functools.cached_property
    def quantization(self) -> tuple[Mapping[str, Any], str] | None:
        """The checkpoint's quantization config and the file that holds it; None if no file does."""
        found: tuple[Mapping[str, Any], str] | None = None
        unsaid = _UNSAID.get(str(self.config.get("model_type")))
        if unsaid and "transformers_version" not in self._full_config:  # What transformers wrote says all.
            found = unsaid, "config.json"
        for config in (self._full_config, self.config):
            for key in ("quantization_config", "compression_config"):
                quantization = config.get(key)
                if quantization is None or quantization == {}:
                    continue
                if not isinstance(quantization, dict):
                    raise CheckpointError(
                        f"{self.path / 'config.json'}: {key} must be a JSON object, got {shown(quantization)}; take "
                        "config.json from the model's publisher"
                    )
                # DeepSeek-V4 has it beside, its successors inside.
                beside = {"expert_dtype": self.config["expert_dtype"]} if "expert_dtype" in self.config else {}
                found = {**beside, **quantization}, "config.json"
                if quantization.get("quant_algo") != "MIXED_PRECISION" or quantization.get("quantized_layers"):
                    return found
        # ModelOpt writes a separate file, and some of its exports leave config.json as it was, or without the map.
        model_opt_path = self.find(_MODEL_OPT)
        if model_opt_path is None:
            return found
        quantization = _read_json_object(model_opt_path, _LARGEST_CONFIG).get("quantization")
        if not isinstance(quantization, dict):
            raise CheckpointError(
                f"{model_opt_path} must hold an object named quantization, got {shown(quantization)}; take it from the "
                "model's publisher"
            )
        return {"quant_method": "modelopt", **quantization}, _MODEL_OPT

    @functools.cached_property
    def file_of(self) -> Mapping[str, str]:
        """The file that holds each tensor, by tensor name."""
        index_path = self.find(INDEX)
        if index_path is not None:
            weight_map = _read_json_object(index_path, _LARGEST_INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(
                    f"{index_path} must hold a weight_map, which is missing; take it from the model's publisher"
                )
            if others := [file for file in weight_map.values() if not isinstance(file, str)]:
                raise CheckpointError(
                    f"{index_path} must map to files, got {shown(others[0])}; take it from the model's publisher"
                )
            return weight_map
        if self.find(SINGLE) is not None:
            return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        self._refuse_others()
        raise CheckpointError(
            f"a checkpoint must hold {INDEX} or {SINGLE}, got neither in {str(self.path)!r}; "
            f"{self._download or 'download the one that belongs to it'}"
        )

    def _refuse_others(self) -> None:
        """Names files of other kinds, where there are no safetensors."""
        try:
            names = sorted(os.listdir(self.path)) if self.path.is_dir() else [self.path.name]
        except OSError as error:
            raise CheckpointError(f"{self.path} must be readable, got: {error.strerror}; correct its rights") from error
        if others := [name for name in names if name.endswith((*_PICKLES, ".gguf"))]:
            is_pickle = others[0].endswith(_PICKLES)
            cure = "convert it with transformers: from_pretrained, then save_pretrained"
            raise CheckpointError(
                f"only safetensors checkpoints are read, got {others[0]} and no safetensors in {str(self.path)!r}; "
                f"{cure if is_pickle else 'use the release that the GGUF was made of'}"
            )

    def header(self, name: str) -> TensorHeader:
        """Shape and dtype of a tensor, without its data."""
        file = self._file_of(name)
        with _named_errors(self.path / file):
            view = self._shard(file).get_slice(name)
            return TensorHeader(view.get_dtype(), tuple(view.get_shape()), file)

    def read(self, name: str, row: int | None = None, num_rows: int | None = None) -> torch.Tensor:
        """Reads a tensor, one of its rows, or consecutive parts of `num_rows` rows, to the CPU.

        A single row lacks that dimension.
        """
        file = self._file_of(name)
        # Otherwise rows would be made on the caller's default device.
        with _named_errors(self.path / file), torch.device("cpu"):
            shard = self._shard(file)
            if row is not None:
                view = shard.get_slice(name)
                return self._rows[file].read(name, row, view.get_dtype(), view.get_shape(), num_rows)
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor

    def find(self, name: str) -> Path | None:
        """A file of the directory, or None; a link must not lead further than the Hub's cache has them."""
        path = self.path / name
        if not os.path.isfile(path):
            return None
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in _link_roots(Path(os.path.realpath(self.path)))):
            raise CheckpointError(
                f"files of a checkpoint must be in its directory, got {path}, a link to {target}; copy the file there, "
                "or give the directory of the Hub's cache that has it (only a snapshot's files may be links)"
            )
        return path

    def _file_of(self, name: str) -> str:
        if name not in self.file_of:
            source = INDEX if os.path.isfile(self.path / INDEX) else SINGLE
            raise CheckpointError(f"tensor {name!r} is missing from {self.path / source}; {ONE_EXPORT}")
        return self.file_of[name]

    def _shard(self, file: str) -> Any:
        if file in self._shards:
            return self._shards[file]
        # An untrusted index must not reach files outside the checkpoint.
        if Path(file).name != file:
            raise CheckpointError(
                f"{INDEX} must name files of its own directory, got {shown(file)}; take it from the model's publisher"
            )
        shard_path = self.find(file)
        if shard_path is None:
            raise CheckpointError(
                f"{INDEX} names {self.path / file}, which is missing; {self._download or 'download that file'}"
            )
        with _named_errors(shard_path):
            # Not mapped: reading a mapping past the end of a file that another process truncated kills this process.
            shard = self.enter_context(safe_open(shard_path, framework="pt", backend="pread"))
            rows = open(shard_path, "rb", opener=open_regular)  # noqa: SIM115
            self._rows[file] = _ShardRows(self.enter_context(rows))
        self._shards[file] = shard
        return self._shards[file]


class _ShardRows:
    """Reads rows of tensors in a file that safetensors has opened and validated.

    safetensors reads the whole tensor for each row unless it maps the file, but reading a mapping of a truncated file
    kills the process.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def read(self, name: str, row: int, dtype: str, shape: Sequence[int], num_rows: int | None) -> torch.Tensor:
        """Reads only one row along dim 0, or one part of several rows."""
        shape_read = (*(() if num_rows is None else (num_rows,)), *shape[1:])
        num_bytes = math.prod(shape_read) * _ROW_DTYPES[dtype].itemsize
        try:
            header, data_start = self._header
            entry = header[name]
            start = operator.index(entry["data_offsets"][0])
            if (entry["dtype"], entry["shape"]) != (dtype, list(shape)) or not 0 <= start < 2**62:
                raise ValueError(name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # safetensors validated the header, so the file was written since; half a header can raise anything.
            raise SafetensorError(f"its header changed while {name} was read") from error
        stored = torch.frombuffer(self._read(data_start + start + row * num_bytes, num_bytes), dtype=torch.uint8)
        return stored.view(_ROW_DTYPES[dtype]).view(shape_read)

    @functools.cached_property
    def _header(self) -> tuple[Mapping[str, Any], int]:
        """The header, and the offset of the data. The file has the header's length in 8 bytes, the header, the data."""
        num_bytes = int.from_bytes(self._read(0, 8), "little")
        if num_bytes > _LARGEST_HEADER:
            raise ValueError(num_bytes)
        return json.loads(self._read(8, num_bytes)), 8 + num_bytes

    def _read(self, start: int, num_bytes: int) -> bytearray:
        found = bytearray(num_bytes)
        self._file.seek(start)
        if left := num_bytes - self._file.readinto(found):
            raise SafetensorError(f"it ended {left} bytes before the end of what was to be read")
        return found


@contextlib.contextmanager
def _named_errors(shard_path: Path) -> Iterator[None]:
    """Adds the file's name to safetensors' errors, which lack it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        size = f"{shard_path.stat().st_size} bytes" if os.path.isfile(shard_path) else "missing"
        raise CheckpointError(
            f"{shard_path} ({size}) must be the whole safetensors file of this checkpoint, got: {error}; download that "
            "file again"
        ) from error


@contextlib.contextmanager
def config_errors(files: CheckpointFiles) -> Iterator[None]:
    """Names config.json in errors about its values."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{files.path / 'config.json'}: {error}") from error


def _read_json_object(path: Path, largest: int) -> Mapping[str, Any]:
    try:
        with open(path, "rb", opener=open_regular) as file:
            content = file.read(largest + 1)
        value = json.loads(content.decode("utf-8")) if len(content) <= largest else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} must be readable JSON, got: {error}; take it from the model's publisher"
        ) from error
    if len(content) > largest:
        raise CheckpointError(
            f"{path} must be at most {format_bytes(largest)}, got more; take it from the model's publisher"
        )
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(value).__name__}; take it from the model's publisher"
        )
    return value


def _snapshot_of(name: Path) -> Path | None:
    """The directory in the Hub's local cache that holds a model's main branch; None where it cannot be a name.

    A path that exists is no name. huggingface_hub says where the cache is (HF_HUB_CACHE, HF_HOME).
    """
    if os.path.lexists(name) or not _HUB_NAME.fullmatch(str(name)):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        missing, cure = "huggingface_hub, which looks for models, is missing", "`pip install huggingface_hub` and "
    else:
        missing, cure = "the Hub's local cache has no such model", ""
        try:
            config = try_to_load_from_cache(str(name), "config.json")
        except (ValueError, OSError):  # Not a name by the Hub's rules, or a cache that cannot be read.
            config = None
        if isinstance(config, str):
            return Path(config).parent
    raise CheckpointError(
        f"there is no directory {shown(str(name))}, and {missing}; nothing is downloaded, so give the directory of a "
        f"checkpoint, or run {cure}`hf download {name}`"
    )


def _link_roots(folder: Path) -> tuple[Path, ...]:
    """Directories that the files of a checkpoint, a folder without links, may be links into: its own, the Hub's blobs.

    In the Hub's cache, `models--ORGANIZATION--NAME/snapshots/COMMIT` links into `blobs` of that model, which may link
    into those that all models share.
    Source: file_download.py and utils/_shared_blobs.py of huggingface_hub 2.4.0.
    """
    model = folder.parent.parent
    if folder.parent.name == "snapshots" and model.name.startswith("models--"):
        return folder, *(Path(os.path.realpath(each / "blobs")) for each in (model, model.parent))
    return (folder,)
