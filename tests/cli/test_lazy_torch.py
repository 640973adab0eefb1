"""A command loads torch when it needs it, and what it gets then is torch."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from tests.cli.command import printed, run_code


def _run(script: str) -> None:
    printed("-c", textwrap.dedent(script))


def test_what_only_shows_does_not_load_torch() -> None:
    # A build for an accelerator is asked which devices there are.
    shows = ["--help", "models", "schemes --platform h100", "explain --model gpt-oss-120b --platform cuda:sm90"]
    shows += [] if torch.version.cuda or torch.version.hip else ["info", "info --json"]
    _run(
        f"""
        import sys
        from moereg.runtime.lazy_torch import load_torch_at_first_use
        load_torch_at_first_use()
        from moereg.cli import main
        for line in {shows!r}:
            assert main(line.split()) == 0, line
            assert not [name for name in sys.modules if name.startswith("torch.")], line
        """
    )


def test_the_torch_of_a_first_use_is_torch() -> None:
    _run(
        """
        import importlib, sys, threading, types
        from moereg.runtime.lazy_torch import load_torch_at_first_use
        load_torch_at_first_use()
        import torch
        assert "torch.nn" not in sys.modules
        import torch.nn.functional as functional  # Torch imports this one too while it loads.
        modules = [name for name in sys.modules if name.startswith("torch.")]
        assert len(modules) > 100
        assert type(torch) is types.ModuleType and torch is sys.modules["torch"]
        assert functional is sys.modules["torch.nn.functional"] is torch.nn.functional
        assert functional.__spec__.name == "torch.nn.functional" and functional.__spec__.origin == functional.__file__
        assert importlib.import_module("torch.nn").Module is torch.nn.Module
        assert functional.silu(torch.zeros(2)).tolist() == [0.0, 0.0]
        assert not hasattr(torch, "an_unknown_thing")
        load_torch_at_first_use()
        assert sys.modules["torch"] is torch
        """
    )


def test_ctrl_c_ends_an_import_that_swallows_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\ntry: signal.raise_signal(2)\nexcept BaseException: pass\nx = 1")
    done = run_code(
        f"""
        import signal, sys
        sys.path.insert(0, {str(tmp_path)!r})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from moereg.runtime.lazy_torch import load_torch_at_first_use
        load_torch_at_first_use()
        import torch
        torch.x
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
def test_threads_that_use_it_first_at_once_get_torch() -> None:
    _run(
        """
        import threading
        from moereg.runtime.lazy_torch import load_torch_at_first_use
        load_torch_at_first_use()
        import torch
        found = []
        threads = [threading.Thread(target=lambda: found.append(torch.Tensor)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [torch.Tensor] * 4
        """
    )
