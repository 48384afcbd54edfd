"""Schedules in files, as torch's pipeline runtime writes and loads them: CSV, a row for each rank, a cell an action.

A cell is the stage, then F, B, I or W, then the microbatch, such as `3F0`; it is empty where a rank waits. Two actions
that torch overlaps, `(0F4;7B1)OVERLAP_F_B`, are read as one after the other. Messages and torch's actions on parameters
are skipped: where messages stand follows from the order (schedule.py). A file is read once, and it is for one number of
ranks, of stages and of microbatches.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand
from dtlayout.schedules.actions import COMPUTE, Action, Result, input_of, result_of
from dtlayout.schedules.placement import Looped, Placement, VShaped
from dtlayout.schedules.record import PipelineSchedule

FILE_PREFIX = "csv:"
"""Prefix of `layout.schedule` for a schedule that is read from a file."""
_BESIDE = re.compile(r"\d+(SEND_F|SEND_B|RECV_F|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\(([^)]*)\)OVERLAP_F_B")
_WHOLE = ("FB", "FIW")
"""Kinds of the actions of one microbatch on one stage, in their order."""


@lru_cache(maxsize=16)
def read_schedule(path: str) -> PipelineSchedule:
    """The schedule in a file; InvalidConfig with rank and action if the file has none, or if its step never ends."""
    try:
        rows = [
            _read_row(rank, row)
            for rank, row in enumerate(csv.reader(expand(path).read_text(encoding="utf-8").splitlines()))
        ]
        placement = _find_placement(rows)
        num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
        _check_whole(rows, placement, num_microbatches)
        _check_end(rows, placement)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"schedule={FILE_PREFIX}{path}: no text, but bytes that are no UTF-8") from error
    except (OSError, InvalidConfig) as error:
        raise InvalidConfig(f"schedule={FILE_PREFIX}{path}: {error}") from error
    return PipelineSchedule(
        name=f"{FILE_PREFIX}{path}",
        order=lambda placement, rank, m: rows[rank],
        place=type(placement),
        least_virtual_stages=placement.virtual_stages,
        most_virtual_stages=placement.virtual_stages,
        num_ranks=placement.num_ranks,
        num_microbatches=num_microbatches,
    )


def write_schedule(orders: Sequence[Sequence[Action]], path: Path) -> None:
    """Write each rank's forwards and backwards in the format that torch's `_load_csv` reads too."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in order if action.kind in COMPUTE] for order in orders)


def _read_row(rank: int, row: Sequence[str]) -> list[Action]:
    actions = []
    for cell in row:
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in map(str.strip, overlapped[1].split(";") if overlapped else [cell]):
            if text and not _BESIDE.fullmatch(text):
                try:
                    actions.append(Action.parse(text))
                except ValueError as error:
                    raise InvalidConfig(f"rank {rank}: {error}") from None
    if not actions:
        raise InvalidConfig(f"rank {rank} has no actions")
    return actions


def _find_placement(rows: Sequence[Sequence[Action]]) -> Placement:
    if not rows:
        raise InvalidConfig("it is empty")
    num_stages = 1 + max(action.stage for row in rows for action in row)
    virtual_stages, rest = divmod(num_stages, len(rows))
    if rest or not virtual_stages:
        raise InvalidConfig(f"{num_stages} stages do not lie on {len(rows)} ranks in equal numbers")
    wrong = []
    for place in (Looped, VShaped):
        placement = place(len(rows), virtual_stages)
        found = [(rank, a) for rank, row in enumerate(rows) for a in row if placement.rank_of(a.stage) != rank]
        if not found:
            return placement
        wrong.append(found[0])
    rank, action = wrong[0]
    raise InvalidConfig(
        f"rank {rank} has {action}, but stages lie neither looped nor in a V with stage {action.stage} there"
    )


def _check_whole(rows: Sequence[Sequence[Action]], placement: Placement, num_microbatches: int) -> None:
    for rank, row in enumerate(rows):
        done = defaultdict[tuple[int, int], str](str)
        for action in row:
            done[action.stage, action.microbatch] += action.kind.value
        for stage in placement.stages_of(rank):
            for microbatch in range(num_microbatches):
                if (found := done[stage, microbatch]) not in _WHOLE:
                    raise InvalidConfig(
                        f"rank {rank} does {found or 'nothing'} with microbatch {microbatch} on stage {stage}; "
                        f"write F and then B, or F, I and W"
                    )


def _check_end(rows: Sequence[Sequence[Action]], placement: Placement) -> None:
    """Raise InvalidConfig if all ranks that are not done wait for each other."""
    made, places, moves = set[Result](), [0] * len(rows), True
    while moves:
        moves = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                needed = input_of(row[places[rank]], placement.num_stages)
                if needed is not None and needed not in made:
                    break
                if (result := result_of(row[places[rank]])) is not None:
                    made.add(result)
                places[rank], moves = places[rank] + 1, True
    waiting = [
        f"rank {rank} at {row[place]}"
        for rank, (row, place) in enumerate(zip(rows, places, strict=True))
        if place < len(row)
    ]
    if waiting:
        raise InvalidConfig(f"it never ends: {', '.join(waiting)} wait for each other")
