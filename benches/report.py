"""Writes the tables of the docs from the stored results and the registered cells, so that no number there is typed.

python -m benches.report            # rewrites the pages that have tables, and draws their pictures
python -m benches.report --check    # names what is out of date, and exits with 1
python -m benches.report --groups   # prints how moereg's kernels stand against others', and writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

from benches import cpu_page, pictures, results_page, serving_page, training_page, which_backend
from benches.board import page as board
from benches.board import peers
from benches.board import rows as board_rows
from benches.h200 import counters
from benches.scale import page as scale
from benches.scale.picture import draw_scale
from benches.whole_model import page as whole_models
from moereg.selection.ways_out import PLUGINS

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURE = DOCS / "h200.svg"
SCALE_PICTURE = DOCS / "scale.svg"
BOARD_PICTURE = DOCS / "board_h200.svg"
WHOLE_MODELS_PICTURE = DOCS / "whole_models.svg"
CURVE_PICTURE = DOCS / "training_curve.svg"

TABLES: Final[Mapping[str, Callable[[], str]]] = {
    **results_page.TABLES,
    **cpu_page.TABLES,
    **peers.TABLES,
    **board.TABLES,
    **which_backend.TABLES,
    **scale.TABLES,
    **whole_models.TABLES,
    **serving_page.TABLES,
    **training_page.TABLES,
    **counters.TABLES,
}

_TABLE: Final = re.compile(r"<!-- table (\w+) -->.*?<!-- end -->", re.DOTALL)


def pages() -> list[pathlib.Path]:
    """READMEs, the docs and the pages beside the stored results, as far as they have tables."""
    found = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "benches" / "results").glob("*.md"))]
    found += sorted((ROOT / "plugins").glob("*/README.md"))
    return [path for path in found if _TABLE.search(path.read_text(encoding="utf-8"))]


def render(page: str) -> str:
    """The page with each `<!-- table NAME -->` ... `<!-- end -->` filled from the stored results that there are."""

    def fill(match: re.Match[str]) -> str:
        try:
            table = TABLES[match[1]]()
        except FileNotFoundError:
            table = "Not measured yet."
        return f"<!-- table {match[1]} -->\n\n{table}\n\n<!-- end -->"

    return _TABLE.sub(fill, page)


def main() -> int:
    """Rewrites or checks the pages; rewriting also draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--groups", nargs="*", type=pathlib.Path, metavar="FILE", help="of these boards; of the stored ones without"
    )
    arguments = parser.parse_args()
    if arguments.groups is not None:
        try:
            print(peers.report(arguments.groups))
        except (ValueError, OSError) as error:
            print(f"benches.report: {error}", file=sys.stderr)
            return 2
        return 0
    old = []
    for path in pages():
        page = path.read_text(encoding="utf-8")
        rendered = render(page)
        if rendered != page:
            old.append(path.relative_to(ROOT))
            if not arguments.check:
                path.write_text(rendered, encoding="utf-8")
    if PLUGINS.read_text(encoding="utf-8") != which_backend.plugins_file():
        old.append(PLUGINS.relative_to(ROOT))
        if not arguments.check:
            PLUGINS.write_text(which_backend.plugins_file(), encoding="utf-8")
    if arguments.check:
        for name in old:
            print(f"{name} is out of date; run python -m benches.report")
        return int(bool(old))
    draw_scale(SCALE_PICTURE)
    with contextlib.suppress(FileNotFoundError):
        pictures.draw_peers(PICTURE, peers.groups_of(peers.board_comparisons()))
    with contextlib.suppress(FileNotFoundError):
        pictures.draw_board(board_rows.rows_of("h200"), BOARD_PICTURE)
    with contextlib.suppress(FileNotFoundError):
        whole_models.draw_whole_models(WHOLE_MODELS_PICTURE, whole_models.records())
    with contextlib.suppress(FileNotFoundError):
        training_page.draw_training_curve(CURVE_PICTURE, training_page.load_curve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
