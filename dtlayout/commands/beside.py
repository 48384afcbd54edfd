"""Frozen models beside a prediction: --beside, what a reference or a reward model takes of memory and time."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dtlayout.base.formatting import align, fold, format_bytes
from dtlayout.commands.arguments import MODELS, JsonDocument
from dtlayout.commands.side_question import Asked, SideQuestion
from dtlayout.models.files import find_model
from dtlayout.planner.beside import weigh_beside


def _add(parser: argparse.ArgumentParser) -> None:
    """Add the frozen models."""
    text = f"a frozen model beside the trained one, such as a reference or a reward model: {MODELS}; may be repeated"
    parser.add_argument("--beside", action="append", default=[], metavar="M", help=text)


def _answer(asked: Asked) -> dict[str, Any]:
    """The keys of a document on frozen models; {} without any."""
    if not (names := asked.options.beside):
        return {}
    models = [find_model(name) for name in names]
    found = weigh_beside(asked.case.scenario, asked.explanation.estimate, models)
    return {"beside": {**asdict(found), "fits": found.fits}}


def _describe(document: JsonDocument) -> Iterator[str]:
    """Lines on frozen models."""
    if not (found := document.get("beside")):
        return
    rows = [["frozen beside it", "weights of a rank", "forwards, s"]]
    rows += [
        [each["name"], format_bytes(each["weight_bytes"]), f"at least {each['forward_s']:.3f}"]
        for each in found["models"]
    ]
    yield from ("", *align(rows))
    peak, capacity = format_bytes(found["peak_bytes"]), format_bytes(found["capacity_bytes"])
    fits = "fits" if found["fits"] else "does not fit"
    with_them = f"with them: {peak} of {capacity}, {fits}; a step of at least {found['step_time_s']:.3f} s"
    yield from fold(with_them)


BESIDE = SideQuestion(_add, _answer, _describe)
