"""The notebook of examples runs from its first cell to its last, without Jupyter, and is kept without outputs."""

import ast
import json
import struct
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from tiny import ROOT

from dtlayout.api.answers import Answer

NOTEBOOK = json.loads((ROOT / "examples" / "predict_in_a_notebook.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
MOST_LINES = 12
"""Lines of a cell."""


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last line if that is an expression, as a notebook shows it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_cells_are_short_and_have_no_outputs():
    for cell in CELLS:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        assert len(cell["source"]) <= MOST_LINES


@pytest.fixture(scope="module")
def shown() -> list[Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    return [run_cell("".join(cell["source"]), names) for cell in CELLS]


def test_every_cell_runs_and_what_it_shows_is_a_page_or_a_figure(shown):
    pages = [value._repr_html_() for value in shown if isinstance(value, Answer)]
    assert [page.split("<h3>")[1].split("</h3>")[0] for page in pages] == [
        "own as dp8·tp2+sp mb1 zero1 on 16 x h100-80g-sxm",
        "own on 16 x h100-80g-sxm",
        "own on 16 x h100-80g-sxm, 5 layouts",
        "debug as pp2·tp2+sp mb1 1f1b zero1 on 4 x cpu, dry",
    ]
    assert all(page.startswith('<div class="dtlayout"><style>.dtlayout {') for page in pages)
    assert sum(isinstance(value, Figure) for value in shown) == 2


def test_a_figure_is_a_picture_in_any_notebook_and_once_where_pyplot_shows_figures_too(shown):
    figure = next(value for value in shown if isinstance(value, Figure))
    size = struct.unpack(">4sII", figure._repr_png_()[12:24])
    assert size[0] == b"IHDR" and size[1] > size[2] > 100
    at_end_of_cell = [pyplot.figure(number) for number in pyplot.get_fignums()]  # as `%matplotlib inline` finds them
    assert figure not in at_end_of_cell


def test_changes_of_an_explained_layout_are_values(shown):
    (changes,) = (value for value in shown if isinstance(value, list))
    assert changes and all(overrides and seconds > 0 for overrides, seconds in changes)
