"""Facts that pytest-benchmark stores of a machine and run: nothing that names the machine; statistics, not samples."""

from __future__ import annotations

from typing import Any

KEPT = ("group", "name", "param", "extra_info", "stats")
OF_ALL = ("device", "platform", "commit", "date", "clocks")


def pytest_benchmark_update_json(config: object, benchmarks: object, output_json: dict[str, Any]) -> None:
    """Keeps what compares backends, and once what all benches record of the machine."""
    machine = output_json["machine_info"]
    output_json["machine_info"] = {
        "cpu": machine.get("cpu", {}).get("brand_raw", ""),
        "python_version": machine["python_version"],
    }
    output_json.pop("commit_info", None)
    output_json["schema"] = 1
    output_json["versions"] = {}
    output_json["benchmarks"] = [{key: bench[key] for key in KEPT} for bench in output_json["benchmarks"]]
    facts = [bench["extra_info"] for bench in output_json["benchmarks"]]
    for fact, bench in zip(facts, output_json["benchmarks"], strict=True):
        bench["stats"].pop("data", None)
        # Each bench records the versions of its backend's requirements.
        output_json["versions"] |= fact.pop("versions", {})
    for key in OF_ALL:
        values = [fact[key] for fact in facts if key in fact]
        if len(values) == len(facts) and all(value == values[0] for value in values):
            output_json[key] = values[0]
            for fact in facts:
                del fact[key]
