"""What pytest-benchmark stores of a machine and a run: nothing that names the machine, and statistics, not samples."""

from __future__ import annotations

from typing import Any

KEPT = ("group", "name", "param", "extra_info", "stats")
OF_ALL = ("device", "platform", "versions", "commit", "date", "clocks", "ceilings", "routing")


def pytest_benchmark_update_json(config: object, benchmarks: object, output_json: dict[str, Any]) -> None:
    """Keeps what compares backends, and once what the benches say of the device they ran on."""
    output_json["machine_info"].pop("node", None)
    output_json.pop("commit_info", None)
    output_json["benchmarks"] = [{key: bench[key] for key in KEPT} for bench in output_json["benchmarks"]]
    output_json["schema"] = 1
    for bench in output_json["benchmarks"]:
        bench["stats"].pop("data", None)
        for key in OF_ALL:
            if key in bench["extra_info"]:
                output_json[key] = bench["extra_info"].pop(key)
