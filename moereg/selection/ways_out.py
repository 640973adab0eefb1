"""Ways out for a layer that no kernel at hand serves: a plugin, another machine, or weights in 16 bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from moereg.platforms import PlatformRule
from moereg.selection.decide import decide
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.quant_schemes import QUANT_SCHEMES

PLUGINS: Final = Path(__file__).with_name("plugins.json")
"""The source tree's plugins: plugin, backend, opt-in, its schemes by platform rule. benches.report writes it."""


def ways_out(selection: Selection) -> tuple[str, ...]:
    """Clauses for a selection without a winner, the smallest change first.

    None where a kernel has the scheme on this platform, since its reasons then say what is missing.
    """
    problem, platform, decisions = selection.problem, selection.platform, selection.decisions
    if any(not {"platform", "quant_scheme"} & {reason.code for reason in one.reasons} for one in decisions):
        return ()
    found: list[str] = []
    name = problem.quant.name
    for plugin, backend, opt_in, schemes_of in json.loads(PLUGINS.read_bytes()):
        fits = any(name in schemes and PlatformRule(rule).matches(platform) for rule, schemes in schemes_of.items())
        if fits and not problem.exact_activations and not selection.request.require:
            wish = f"; it is opt-in: require={backend!r}" if opt_in else ""
            found.append(f"pip install ./plugins/{plugin} (in moereg's source tree) adds the backend {backend}{wish}")
    reading = [one.cell for one in decisions if one.cell and all(why.code != "quant_scheme" for why in one.reasons)]
    rules = dict.fromkeys(rule for cell in reading for rule in cell.rules)
    for wide in [rule for rule in rules if rule.text.endswith("+")]:
        # `cuda:sm90` goes without saying beside `cuda:sm89+`.
        rules = {one: None for one in rules if one is wide or not (one.instance and wide.matches(one.instance))}
    if rules:
        texts = " or ".join(rule.text for rule in rules)
        found.append(f"installed kernels compute {name} on {texts}, not on {platform}")
    if problem.quant.weight is not None:
        plain = dataclasses.replace(problem, quant=QUANT_SCHEMES["unquantized"])
        if winner := decide(plain, platform, Request(), load_backends().cells).winner:
            found.append(f"moereg.quantize.dequantize_weights makes 16-bit weights, which {winner.label} runs")
    return tuple(found)
