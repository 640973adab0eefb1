"""Every process collects the same tests: workers of a run compare their lists and refuse to start when they differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected(hash_seed: int) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_names_of_tests_do_not_go_by_the_hash_seed() -> None:
    """A set that stands in a test's name is written in the order of that process's hashes: two processes, two names."""
    first, second = collected(1), collected(2)
    assert len(first) > 1000
    assert first == second
