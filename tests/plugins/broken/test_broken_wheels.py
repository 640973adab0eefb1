"""Wheels that are broken in every known way stand side by side; each is told, and none harms another.

Three interpreters ask everything, since starting one costs more than a question. A failure lists all that went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.broken.family import LAYER, NOT_HERE, Answer, ask, ask_commands, ask_kit, install
from tests.plugins.broken.wheels import (
    AT_IMPORT,
    AT_RUN,
    BACKENDS,
    CLAIMS,
    CRASHES,
    GOOD_ONE,
    KIT_ONLY,
    LIARS,
    ODD,
    PREDICATES,
    PROVIDERS,
    Broken,
)
from tests.plugins.installing import Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return install(tmp_path_factory.mktemp("side_by_side"))


def faults_of_info(found: Mapping[str, Any]) -> Iterator[str]:
    plugins = {plugin["distribution"]: plugin for plugin in found["plugins"]}
    for broken in (*AT_IMPORT, *PROVIDERS):
        plugin = plugins.pop(f"{broken.distribution} 1.0")
        if plugin["status"] != "failed" or broken.says not in plugin["error"] or "\n" in plugin["error"]:
            yield f"info {broken.name}: {plugin}"
    for distribution, plugin in plugins.items():
        if plugin["status"] != "loaded" or plugin["error"] is not None:
            yield f"info {distribution}: {plugin}"
    names = {backend["name"] for backend in found["backends"]}
    if unexpected := names & {broken.name for broken in AT_IMPORT} or {"torch", "triton", "good"} - names:
        yield f"info: {unexpected}"


def faults_of_explain(found: Mapping[str, Any]) -> Iterator[str]:
    if found["selected"] != "torch":
        yield f"explain: {found['selected']}"
    decisions = {decision["backend"]: decision for decision in found["decisions"] if decision["origin"] != "builtin"}
    for broken in (GOOD_ONE, *ODD, *AT_RUN, *LIARS, *KIT_ONLY, *CRASHES):
        decision = decisions.pop(broken.name)
        if not decision["accepted"] or decision["origin"] != broken.distribution:
            yield f"explain {broken.name}: {decision}"
    for broken in PREDICATES:
        reasons = decisions.pop(broken.name)["reasons"]
        if not reasons or broken.says not in reasons[0]["text"] or "\n" in reasons[0]["text"]:
            yield f"explain {broken.name}: {reasons}"
    if decisions:
        yield f"explain: {sorted(decisions)}"


def faults_of_bench(rows: list[dict[str, Any]]) -> Iterator[str]:
    by_name = {row["backend"]: row for row in rows if row["backend"] != "torch"}
    right = by_name["good"]["relative_error"]
    for row in rows:
        if row["backend"] == "torch" and not row["passed"]:
            yield f"bench: {row}"
    for broken in (GOOD_ONE, *ODD):
        row = by_name.pop(broken.name)
        if not row["passed"] or row["relative_error"] != right or not row["time_us"]:
            yield f"bench {broken.name}: {row}"
    for broken in (*AT_RUN, *LIARS):
        row = by_name.pop(broken.name)
        if row["passed"] or row["time_us"] or broken.says not in (row["failure"] or row["damage"] or ""):
            yield f"bench {broken.name}: {row}"
    if by_name:
        yield f"bench: {sorted(by_name)}"


def faults_of_run(answers: Mapping[str, Answer]) -> Iterator[str]:
    for broken in AT_IMPORT:
        if not broken.point:
            code, out, err = answers[broken.name]
            if (code, out, err.count("\n")) != (2, "", 1) or broken.says not in err or broken.distribution not in err:
                yield f"run {broken.name}: {code} {out} {err}"
    for broken in PREDICATES:
        code, out, _ = answers[broken.name]
        decisions = json.loads(out)["selection"]["decisions"]
        reasons = [decision["reasons"][0]["text"] for decision in decisions if decision["backend"] == broken.name]
        if code != 3 or len(reasons) != 1 or broken.says not in reasons[0]:
            yield f"run {broken.name}: {code} {reasons}"
    for broken in AT_RUN:
        code, out, _ = answers[broken.name]
        found = json.loads(out)
        text = found["failure"] or found["damage"] or ""
        if code != 1 or found["passed"] is not False or broken.says not in text or "\n" in text:
            yield f"run {broken.name}: {code} {text}"
    for broken in (GOOD_ONE, *ODD, *LIARS):
        code, out, _ = answers[broken.name]
        if (code, json.loads(out)["passed"]) != ((1, False) if broken in LIARS else (0, True)):
            yield f"run {broken.name}: {code} {out}"


def test_commands_tell_each_and_serve_the_others(site: Site) -> None:
    answers = ask_commands(site)
    codes = {name: answers[name].code for name in ("info", "explain", "run", "bench")}
    assert codes == {"info": 0, "explain": 0, "run": 0, "bench": 1}, answers["run"]
    found = {name: answers[name].json for name in codes}
    assert (found["run"]["backend"], found["run"]["passed"]) == ("torch", True)
    assert "hello from a wheel" in answers["info"].err
    warned = answers["info"].err.splitlines()
    for broken in (*AT_IMPORT, *PROVIDERS):
        kind = broken.group.removeprefix("moereg.").removesuffix("s")
        start = f"moereg: warning: {kind} {broken.point or broken.name!r} of {broken.distribution} 1.0 "
        (line,) = (line for line in warned if line.startswith(start))
        assert broken.says in line
    assert not [name for name, answer in answers.items() if "Traceback" in answer.out + answer.err]
    faults = [
        *faults_of_info(found["info"]),
        *faults_of_explain(found["explain"]),
        *faults_of_bench(found["bench"]["rows"]),
        *faults_of_run(answers),
    ]
    assert not faults, "\n".join(faults)


def test_the_kit_tells_each(site: Site) -> None:
    answers = ask_kit(site)
    faults = []
    for broken in (GOOD_ONE, *ODD):
        if answers[broken.name].code or not answers[broken.name].json["passed"]:
            faults.append((broken.name, answers[broken.name]))
    for broken in (*AT_RUN, *LIARS, *KIT_ONLY, *CRASHES):
        failures = answers[broken.name].failures
        if answers[broken.name].code != 1 or not failures or "\n" in failures[0]:
            faults.append((broken.name, answers[broken.name]))
    for broken in PREDICATES:
        # One that gives a reason for every layer is rejected, and nothing of it can run.
        expected = 3 if broken.name == "predicate_escapes" else 1
        if answers[broken.name].code != expected:
            faults.append((broken.name, answers[broken.name]))
    for broken in CRASHES:
        if broken.says not in answers[broken.name].failures[0]:
            faults.append((broken.name, answers[broken.name]))
    assert not faults, "\n".join(map(str, faults))
    code, out, err = answers[AT_IMPORT[0].name]
    assert (code, out) == (2, "")
    assert AT_IMPORT[0].says in err


def test_two_wheels_claim_this_machine(tmp_path: Path) -> None:
    site = install(tmp_path, (GOOD_ONE, *CLAIMS))
    lines = [["info", "--json"], ["run", *LAYER], ["run", *LAYER, "--platform", "cpu", "--json"]]
    lines += [["explain", *LAYER, "--platform", "cuda:sm90", "--json"]]
    info, run, on_cpu, what_if = ask(site, lines)
    assert (run[0], run[1], run[2].count("\n")) == (2, "", 1)
    for broken in CLAIMS:
        assert broken.name in run[2]
        assert broken.name in info[1] + info[2]
    assert on_cpu[0] == 0, on_cpu
    assert json.loads(on_cpu[1])["backend"] == "torch"
    assert json.loads(what_if[1])["selected"] == "triton"


def test_a_wheel_that_ends_the_process_can_be_left_out(tmp_path: Path) -> None:
    # Importing it ends the interpreter without a word, which nothing in this process can prevent.
    site = install(tmp_path, (GOOD_ONE, Broken("ends_all", "import os\nos._exit(9)")))
    assert site.moereg("info").returncode == 9
    left_out = site.python("-m", "moereg", "info", "--json", MOEREG_PLUGINS="good")
    assert left_out.returncode == 0, left_out.stderr
    statuses = {plugin["name"]: plugin["status"] for plugin in json.loads(left_out.stdout)["plugins"]}
    assert statuses == {"good": "loaded", "ends_all": "skipped"}


def test_every_kind_is_asked() -> None:
    assert all(broken.group == BACKENDS for broken in (*AT_IMPORT, *ODD, *PREDICATES, *AT_RUN, *LIARS))
    assert {broken.name for broken in (*KIT_ONLY, *CRASHES)} == NOT_HERE
