"""dtlayout plot: loss, validation, speed and memory of runs over their steps, as one page and as PNG files."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import align, fold, fold_notes
from dtlayout.commands.arguments import JsonDocument, show

EXAMPLE = "dtlayout plot runs/debug runs/zero3 --page plot.html --png plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs, and the files to draw."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run, done or going on")
    parser.add_argument("--page", type=Path, metavar="FILE", help="plot.html by default, unless --png is given alone")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write loss.png, speed.png, … there")
    parser.add_argument(
        "--smooth",
        type=float,
        metavar="STEPS",
        help="how far means reach, 1 for none; a 50th of the longest run by default",
    )


def run(options: argparse.Namespace) -> int:
    """Print a row for each run, and draw them."""
    from dtlayout.report.curves import Curves, read_runs  # only now: it imports matplotlib

    if options.smooth is not None and not options.smooth >= 1:
        raise InvalidConfig(f"--smooth {options.smooth:g} must be at least 1")
    curves = Curves(read_runs(options.runs), options.smooth)
    page = options.page or (None if options.png else Path("plot.html"))
    written = [] if options.png is None else curves.write_pictures(options.png)
    if page is not None:
        curves.write_page(page)
        written.insert(0, page)
    rows, files = curves.list_rows(), [str(path) for path in written]
    document = {"ok": True, "runs": [dict(zip(rows[0], row, strict=True)) for row in rows[1:]], "files": files}
    return show(options, {**document, "notes": curves.notes, "_rows": rows}, _describe)


def _describe(document: JsonDocument) -> Iterator[str]:
    yield from align(document["_rows"])
    yield from fold_notes(document["notes"])
    yield from fold(f"wrote {', '.join(document['files'])}")
