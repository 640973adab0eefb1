"""The options of `moereg quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereg.cli._completion import backend_list, scheme_list
from moereg.cli._exits import code_of_verdict
from moereg.cli._options import JsonFlag, ProblemFlags, VerboseFlag
from moereg.cli._output import only_results_on_stdout, print_json

__all__ = ["quantize"]


def quantize(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint; it is only read.")],
    layer: Annotated[
        int | None,
        typer.Option(
            help="Compare on this layer, the first with experts if left out. With --out, quantize it alone; all if "
            "left out."
        ),
    ] = None,
    quant: Annotated[
        list[str] | None,
        typer.Option(
            help="Schemes to compare: int4_w4a16_g128 or a,b or int4_*; all that fit if left out.",
            autocompletion=scheme_list,
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the timed calls; 1,64 if left out.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Real hidden states [T,H] by layer index, in a safetensors file; random ones if left out."),
    ] = None,
    num_local_experts: Annotated[int | None, typer.Option(help="Compare on so many experts alone.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu, on a machine that has a GPU.")] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="Use one of these backends.", autocompletion=backend_list)
    ] = None,
    prefer: Annotated[
        list[str] | None,
        typer.Option(help="Use these backends first where they fit.", autocompletion=backend_list),
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(help="Use none of these backends.", autocompletion=backend_list)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of random hidden states.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw error over size and over time into this file, e.g. quantize.png.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a copy with quantized experts into this new directory.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Compare schemes on a checkpoint's layer, write a copy."""
    from moereg.cli._bench import parse_counts
    from moereg.cli._plot import check_can_plot, write_plot
    from moereg.cli._quantize import DEFAULT_TOKENS, compare_schemes
    from moereg.cli._quantize_result import Question, find_schemes, read_inputs
    from moereg.cli._quantize_show import plot_quantize, show_quantize

    with only_results_on_stdout(verbose):
        question = Question(
            checkpoint,
            layer,
            find_schemes(quant or []),
            DEFAULT_TOKENS if tokens is None else parse_counts(tokens),
            read_inputs(inputs),
            seed,
            out,
            layer is not None,
        )
        if plot is not None:
            check_can_plot(plot)
        flags = ProblemFlags(
            num_local_experts=num_local_experts, platform=platform, require=require, prefer=prefer, deny=deny
        )
        result = compare_schemes(flags, question)
        if plot is not None and result.rows:
            write_plot(plot_quantize, result, plot)
    if json:
        print_json(result.to_dict())
    else:
        show_quantize(result)
    return code_of_verdict(result.passed)
