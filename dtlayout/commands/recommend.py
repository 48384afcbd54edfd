"""dtlayout recommend: the fastest layouts that fit, what each costs and why, and what stands against the others."""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.commands.arguments import add_scenario, read_scenario, show
from dtlayout.commands.recommend_answer import BASELINES, Answer
from dtlayout.commands.recommend_documents import to_document, to_scale_document
from dtlayout.commands.recommend_text import describe_counts, describe_dry_runs, give_reasons, list_scale, to_text
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidConfig, InvalidLayout
from dtlayout.files import check_writable
from dtlayout.planner.reasons import describe_shortage, find_problems, parse_layout
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import find_smallest, scale
from dtlayout.planner.space import Space, parse_choice

if TYPE_CHECKING:
    from dtlayout.commands.verify import Verified

EXAMPLE = "dtlayout recommend --model llama-13b --gpu a100-80g-sxm --gpus 64 --seq-len 2048 --global-batch 2048"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The scenario, and what is asked about it."""
    add_scenario(parser)
    parser.add_argument("--top", type=int, default=5, metavar="K", help="layouts to show; 5 by default")
    for name, example in (("--fix", "tp=2"), ("--avoid", "recompute=full")):
        words = f"such as {example}; may be repeated"
        parser.add_argument(name, action="append", default=[], metavar="NAME=VALUE", help=words)
    parser.add_argument("--max-memory", type=float, default=1.0, metavar="SHARE", help="of the capacity, such as 0.9")
    parser.add_argument("--why-not", metavar="CHOICES", help="such as tp=4,pp=4,micro_batch=2: what stands against it")
    parser.add_argument("--baseline", choices=tuple(BASELINES), help="what a well-known procedure would have chosen")
    parser.add_argument("--scale", metavar="N,N,…", help="the best layout on each of these numbers of GPUs")
    parser.add_argument("--min-gpus", action="store_true", help="the smallest cluster that trains the model")
    parser.add_argument("--verify", type=int, default=0, metavar="K", help="dry-run the K best, and drop what ooms")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the best layout as a config for train.py")


def run(options: argparse.Namespace) -> int:
    """Search, and print what was found."""
    was_enabled = gc.isenabled()
    gc.disable()  # many small values and no cycles: collecting would take a tenth of the time
    try:
        return _run(options)
    finally:
        if was_enabled:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    _check(options)
    fixed, avoided = dict(map(parse_choice, options.fix)), dict[str, list[Any]]()
    for name, value in map(parse_choice, options.avoid):
        avoided.setdefault(name, []).append(value)

    def make_space(num_gpus: int | None = None) -> Space:
        return Space(read_scenario(options, num_gpus), fixed, avoided)

    if options.scale:
        sizes = _read_sizes(options.scale)
        spaces = [make_space(num_gpus) for num_gpus in sizes]
        compared = spaces[0].scenario, scale(spaces, options.max_memory)
        return show(options, to_scale_document(*compared), list_scale(*compared))
    if options.min_gpus:
        per_node = read_scenario(options, options.gpus or 1).cluster.gpus_per_node
        space = find_smallest(make_space, per_node, options.max_memory)
    else:
        space = make_space()
    search = Search(space, options.max_memory)
    result = search.run(options.top)
    if not result.ranked:
        raise InvalidLayout(_explain_nothing(space, result))
    verified = _verify(space.scenario, result, options.verify) if options.verify else []
    ooms = {v.estimate.layout for v in verified if not v.fits}
    result = replace(result, ranked=tuple(e for e in result.ranked if e.layout not in ooms))
    if not result.ranked:
        advice = "use a larger --top or a smaller --max-memory"
        problem = f"none of the {len(verified)} best fits when it is dry-run; {advice}"
        raise InvalidLayout([problem, *describe_dry_runs(verified)])
    answer = Answer(search, result, options, verified)
    if options.emit:
        from dtlayout.commands.emit import write_config  # only now: a search does without configs

        write_config(options.emit, space.scenario, result.ranked[0], give_reasons(answer))
    return show(options, to_document(answer), to_text(answer))


def _verify(scenario: Scenario, result: SearchResult, number: int) -> list["Verified"]:
    """The first `number` of the layouts, and further ones until one fits."""
    from dtlayout.commands.verify import verify  # only now: it imports torch

    found: list[Verified] = []
    for verified in verify(scenario, result.ranked, result.allowed_bytes):
        found.append(verified)
        if len(found) >= number and any(v.fits for v in found):
            break
    return found


def _check(options: argparse.Namespace) -> None:
    problems = [] if options.top >= 1 else [f"--top={options.top} must be at least 1"]
    if options.verify < 0:
        problems.append(f"--verify={options.verify} must not be negative")
    if options.verify and options.engine != OWN_ENGINE:
        problems.append(f"--verify runs our own trainer, not that of --engine={options.engine}; leave one of them out")
    if options.verify and options.scale:
        problems.append("--scale compares clusters; ask --verify of one of them")
    if not 0 < options.max_memory <= 1:
        problems.append(f"--max-memory={options.max_memory} must lie above 0 and be at most 1")
    if options.scale and (options.emit or options.why_not or options.baseline or options.min_gpus):
        problems.append("--scale compares clusters; ask --emit, --why-not, --baseline and --min-gpus of one of them")
    if problems:
        raise InvalidConfig(problems)
    if options.emit:
        check_writable(options.emit)


def _read_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidConfig(f"--scale={text} is no list of numbers; write --scale 64,128,256") from None
    if min(sizes) < 1:
        raise InvalidConfig(f"--scale={text} must name at least 1 GPU each")
    return sizes


def _explain_nothing(space: Space, result: SearchResult) -> list[str]:
    """Why there is no layout, and what would help."""
    problems = [f"no layout can train {space.scenario.model.name} here: {describe_counts(result)}"]
    if missed := result.smallest_oom:
        text = describe_shortage(missed, result.allowed_bytes)
        problems.append(f"the one that misses by least, {missed.layout}: {text}")
        problems.append("--min-gpus finds the smallest cluster that works; a shorter --seq-len needs less")
    else:
        layout, kernels = parse_layout(space, {})
        problems += [f"for example {layout}: {line}" for line in find_problems(space, layout, kernels)]
        problems.append("use another number of GPUs or global batch, or fewer --fix and --avoid")
    return problems
