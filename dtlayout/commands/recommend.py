"""dtlayout recommend: the fastest layouts that fit, what each costs and why, and what stands against the others."""

import argparse
import gc
from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import check_own, check_page, check_writable
from dtlayout.base.formatting import GIB
from dtlayout.commands.adapter_options import add_adapter, with_adapter
from dtlayout.commands.arguments import MODELS, CommandAnswer, add_given, name_gpu, show_answer
from dtlayout.commands.engine_options import add_engine, read_engine
from dtlayout.commands.recommend_document import BASELINES, compare_like, make_document, make_scale_document
from dtlayout.commands.recommend_text import describe, describe_counts, describe_scale, list_reasons
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.files import find_model
from dtlayout.models.presets import PRESETS
from dtlayout.planner import verdicts
from dtlayout.planner.choices import check_once, find_idle, read_avoided, read_fixed
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.simplicity import put_simplest_first
from dtlayout.planner.sizing import find_fitting, find_smallest, scale
from dtlayout.planner.space import Space
from dtlayout.planner.suggestions import LOOKED_AT, list_ways_to_fit
from dtlayout.records.intervals import count_near
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu, load_cluster
from dtlayout.spec.optimizers import Optimizer
from dtlayout.spec.precision import Precision

if TYPE_CHECKING:
    from dtlayout.commands.like import Like
    from dtlayout.commands.model_folder import ModelFolder

EXAMPLE = "dtlayout recommend --model llama-13b --gpu a100-80g-sxm --gpus 64 --seq-len 2048 --global-batch 2048"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the scenario, and the questions about it."""
    parser.add_argument("--like", type=Path, metavar="FILE", help="the job of a config, or of another program's file")
    add_given(parser)
    parser.add_argument("--model", metavar="M", help=MODELS)
    parser.add_argument("--vocab", type=int, metavar="V", help="another vocabulary size than the model's")
    add_adapter(parser)
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster's TOML file, instead of --gpu")
    parser.add_argument("--gpu", metavar="NAME", help="a GPU type, such as a100-80g-sxm, h100-80g-sxm or cpu")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all, unless --scale or --min-gpus says")
    parser.add_argument("--world", dest="gpus", type=int, help=argparse.SUPPRESS)  # as other commands call it
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node; the vendor's by default")
    parser.add_argument("--seq-len", type=int, metavar="S", help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, metavar="B", help="sequences of a step")
    add_engine(parser)
    parser.add_argument(
        "--optimizer",
        metavar="NAME[,KEY=VALUE…]",
        help="adamw by default, or such as sgd and muon, with keys of [optimizer], as in adamw,state_format=bfloat16",
    )
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--precision", metavar="KEY=FORMAT", help="such as reduce=bfloat16; may be repeated", **repeated
    )
    parser.add_argument("--top", type=int, default=5, metavar="K", help="layouts to show; 5 by default")
    parser.add_argument("--fix", metavar="NAME=VALUE", help="such as tp=2 or pp8·dp2·tp4; may be repeated", **repeated)
    parser.add_argument(
        "--avoid",
        metavar="NAME=VALUE",
        help="values that no layout may have, such as recompute=full; may be repeated",
        **repeated,
    )
    share = "of the capacity that may be filled, such as 0.9; all but a margin for the error of peaks by default"
    parser.add_argument("--max-memory", type=float, metavar="SHARE", help=share)
    parser.add_argument("--why-not", metavar="CHOICES", help="such as tp=4,pp=4,mb=2: what stands against it")
    parser.add_argument("--baseline", choices=tuple(BASELINES), help="what a well-known procedure would have chosen")
    parser.add_argument("--scale", metavar="N,N,…", help="the best layout on each of these numbers of GPUs")
    parser.add_argument(
        "--tokens", type=_read_tokens, metavar="T", help="of the whole training, such as 15T: days, energy"
    )
    parser.add_argument("--price", type=float, metavar="P", help="money for a GPU-hour, with --tokens")
    parser.add_argument("--min-gpus", action="store_true", help="the smallest cluster that trains the model")
    parser.add_argument("--verify", type=int, default=0, metavar="K", help="dry-run the K best, and drop what ooms")
    text = "write the file of --like with the best layout; to FILE.patch or FILE.diff, the difference"
    parser.add_argument("--patch", type=Path, metavar="FILE", help=text)
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the best layout for --engine's program")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with the answer as charts")


def run(options: argparse.Namespace) -> int:
    """Search, and print the layouts that were found."""
    return show_answer(options, answer(options))


def answer(options: argparse.Namespace) -> CommandAnswer:
    """The layouts that a search finds, or clusters side by side; writes the files that are asked for."""
    was_enabled = gc.isenabled()
    gc.disable()  # many small values and few cycles: collecting would take a tenth of the time
    try:
        return _answer(options)
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # all of them are old now, so that enabling does not begin with looking at each
            gc.enable()


def _answer(options: argparse.Namespace) -> CommandAnswer:
    check(options)
    like = _read_like(options)

    def make_space(num_gpus: int | None = None) -> Space:
        return _make_space(options, like, num_gpus)

    if options.scale:
        rows = scale([make_space(num_gpus) for num_gpus in _read_sizes(options.scale)], options.max_memory)
        document = make_scale_document(rows, options)
        if options.page:
            from dtlayout.commands.recommend_scale_page import write_scale_page  # only now: it imports matplotlib

            write_scale_page(options.page, document)
        return CommandAnswer(document, describe_scale)
    if options.min_gpus:
        per_node = make_space(options.gpus or 1).scenario.cluster.gpus_per_node
        space = find_smallest(make_space, per_node, 1.0 if options.max_memory is None else options.max_memory)
    else:
        space = make_space()
    if idle := find_idle(space):
        raise InvalidConfig(idle)
    document = search_space(space, options, like)
    if options.page:
        from dtlayout.commands.recommend_page import write_page  # only now: it imports matplotlib

        write_page(options.page, document)
    return CommandAnswer(document, describe)


def read_space(options: argparse.Namespace) -> Space:
    """The layouts among which a question searches; refused as the question is."""
    check(options)
    return _make_space(options, _read_like(options))


def _make_space(options: argparse.Namespace, like: "Like | None", num_gpus: int | None = None) -> Space:
    fixed = read_fixed(options.fix)
    avoided = read_avoided(options.avoid, fixed)
    if like is None:
        return Space(_read_scenario(options, num_gpus), fixed, avoided)
    kept, unsaid = like.list_unsaid()
    avoided = {name: [*unsaid.get(name, []), *avoided.get(name, [])] for name in {**unsaid, **avoided}}
    return Space(like.scenario_on(num_gpus), {**kept, **fixed}, avoided)


def search_space(space: Space, options: argparse.Namespace, like: "Like | None" = None) -> dict[str, Any]:
    """The document of a search, whose best layout is written where that is asked; InvalidLayout if it finds none."""
    search, margin = find_fitting(space, options.max_memory, options.top)
    result = search.run_kinds(options.top)
    if not result.ranked:
        raise InvalidLayout(_explain_nothing(search, result))
    looked_at = result.ranked if options.top >= LOOKED_AT else search.run_kinds(LOOKED_AT).ranked
    num_near = count_near([e.step_time_s for e in looked_at[:LOOKED_AT]], space.scenario.engine.name)
    looked_at = put_simplest_first(looked_at, num_near)
    result = result._replace(ranked=looked_at[: options.top])
    verified = []
    if options.verify:
        from dtlayout.commands.verify import verify  # only now: a search does without configs

        verified = verify(space.scenario, result, options.verify)
    ooms = {v.estimate.layout for v in verified if not v.fits}
    result = result._replace(ranked=tuple(e for e in result.ranked if e.layout not in ooms))
    looked_at = tuple(estimate for estimate in looked_at if estimate.layout not in ooms)[:LOOKED_AT]
    document = make_document(search, result, looked_at, options, margin, verified)
    if like is not None:
        document |= compare_like(like, result.ranked[0], options.patch)
    if options.emit:
        from dtlayout.commands.emit import emit  # only now: a search does without configs

        sections = None if like is None else like.sections
        folder = find_folder(options) if like is None else None
        emitted = emit(options.emit, space.scenario, result.ranked[0], list_reasons(document), sections, folder)
        document |= {"emitted": str(options.emit), "emitted_for": emitted._asdict()}
    return document


def _read_like(options: argparse.Namespace) -> "Like | None":
    if options.like is None:
        return None
    from dtlayout.commands.like import read_like  # only now: a search does without configs

    return read_like(options)


def _explain_nothing(search: Search, result: SearchResult) -> list[str]:
    """Reasons why a search has found no layout, and what would help."""
    space = search.space
    counts = describe_counts({"layouts": result.num_layouts, "counts": result.counts}, ",")
    problems = [f"no layout can train {space.scenario.model.name} here: of {counts}"]
    if not result.num_layouts:
        none = "nothing is left to choose from" if space.degrees else "none has these degrees on so many GPUs"
        problems = [f"no layout can train {space.scenario.model.name} here: {none}"]
    if result.num_layouts and (missed := search.find_smallest_oom()):
        text = verdicts.describe_shortage(missed, result.allowed_bytes)
        problems.append(f"the one that misses by least, {missed.layout}: {text}")
        problems += verdicts.describe_doubt(search, missed)
        problems += list_ways_to_fit(search, missed)
        helps = "--min-gpus finds the smallest cluster that works"
        state_bytes = max(rank.parameters + rank.gradients + rank.optimizer for rank in missed.memory)
        problems.append(helps + "; a shorter --seq-len needs less" * (state_bytes < result.allowed_bytes))
    elif space.offload != "none" and result.num_layouts:
        capacity = search.estimator.host_capacity_bytes / GIB
        problems.append(f"offload={space.offload} asks more of the host than {capacity:.0f} GiB a GPU; use another one")
    else:
        layout, kernels = verdicts.parse_layout(space, {})
        example = f"for example {layout}: "
        found = verdicts.find_problems(space, layout, kernels)
        problems += [example * (i == 0) + line for i, line in enumerate(found)]
        fewer = "fewer --fix and --avoid, or " * bool(space.fixed or space.avoided)
        problems.append(f"use {fewer}another number of GPUs or global batch")
    return problems


def check(options: argparse.Namespace) -> None:
    """InvalidConfig with all options that are missing, contradict each other or cannot be."""
    problems = [] if options.top >= 1 else [f"--top={options.top} must be at least 1"]
    needed = {"--model": options.model, "--seq-len": options.seq_len, "--global-batch": options.global_batch}
    missing = [name for name, value in needed.items() if value is None]
    if missing and not options.like:
        problems.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; or give --like FILE")
    if options.patch and not options.like:
        problems.append("--patch writes the file of --like: give one")
    if options.verify < 0:
        problems.append(f"--verify={options.verify} must not be negative")
    if options.verify and options.engine != OWN_ENGINE:
        problems.append(f"--verify runs our own trainer, not that of --engine={options.engine}; leave one of them out")
    if options.verify and options.scale:
        problems.append("--scale compares clusters; ask --verify of one of them")
    if options.max_memory is not None and not 0 < options.max_memory <= 1:
        problems.append(f"--max-memory={options.max_memory} must lie above 0 and be at most 1")
    if options.tokens is not None and not 0 < options.tokens < inf:
        problems.append(f"--tokens={options.tokens:g} must be a number above 0, such as 15e12 or 15T")
    if options.price is not None and options.tokens is None:
        problems.append("--price is money for a GPU-hour of a whole training; give its --tokens")
    if options.price is not None and not 0 <= options.price < inf:
        problems.append(f"--price={options.price:g} must not be negative")
    if options.scale and (options.emit or options.why_not is not None or options.baseline or options.min_gpus):
        problems.append("--scale compares clusters; ask --emit, --why-not, --baseline and --min-gpus of one of them")
    if problems:
        raise InvalidConfig(problems)
    if options.page:
        check_page(options.page)
    if options.emit:
        from dtlayout.commands.emit import MARK  # only now: a search does without configs

        check_writable(options.emit)
        check_own(options.emit, MARK, "what dtlayout recommend wrote")


def _read_scenario(options: argparse.Namespace, num_gpus: int | None) -> Scenario:
    """The scenario that is asked about, on `num_gpus` GPUs if given; InvalidConfig with what is wrong."""
    model = find_model(options.model)
    if options.vocab is not None:
        model = replace(model, vocab_size=options.vocab)
    model = with_adapter(model, options)
    cluster = _read_cluster(options, options.gpus if num_gpus is None else num_gpus)
    engine, precision = read_engine(options, cluster.gpu, _read_formats(options.precision))
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=options.global_batch, seq_len=options.seq_len),
        cluster=cluster,
        engine=engine,
        precision=precision,
        optimizer=_read_optimizer(options.optimizer or "adamw"),
    )
    return fill_rows(scenario, find_folder(options), read_fixed(options.fix))


def fill_rows(scenario: Scenario, folder: "ModelFolder | None", fixed: Mapping[str, Any]) -> Scenario:
    """The scenario of a folder's model with the rows that our own trainer adds, which each tp divides; else itself."""
    if folder is None or scenario.engine.name != OWN_ENGINE:
        return scenario
    return replace(scenario, model=folder.fill_rows(scenario.model, scenario.cluster.num_gpus, fixed))


def find_folder(options: argparse.Namespace) -> "ModelFolder | None":
    """The Hugging Face folder that `--model` names; None for any other model."""
    if not options.model or options.model in PRESETS:
        return None
    from dtlayout.commands.model_folder import find_model_folder  # only now: a search does without configs

    return find_model_folder(options.model, options.vocab)


def _read_cluster(options: argparse.Namespace, num_gpus: int | None) -> Cluster:
    if options.cluster and options.gpu:
        raise InvalidConfig("--cluster names the GPU type itself; give --cluster or --gpu, not both")
    if options.cluster:
        changes = {"num_gpus": num_gpus, "gpus_per_node": options.gpus_per_node}
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(load_cluster(options.cluster), **given)
    if not options.gpu:
        raise InvalidConfig("the cluster is missing; give --gpu NAME --gpus N, or --cluster FILE")
    if num_gpus is None:
        raise InvalidConfig("the number of GPUs is missing; give --gpus N")
    gpu = find_gpu(name_gpu(options.gpu))
    per_node = gpu.gpus_per_node if options.gpus_per_node is None else options.gpus_per_node
    return Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=per_node)


def _read_optimizer(text: str) -> Optimizer:
    """The optimizer of a name and some of its keys; InvalidConfig for what is unknown."""
    from dtlayout.config.loading import override  # only now: most questions need nothing of a config

    name, *pairs = text.split(",")
    tables: dict[str, Any] = {"optimizer": {"name": name}}
    override(tables, [f"--optimizer.{pair}" for pair in pairs])
    return Optimizer.parse(tables["optimizer"], "optimizer")


def _read_formats(texts: list[str]) -> dict[str, str]:
    """Key of `Precision` → format; InvalidConfig for a key that is unknown, or named with two formats."""
    values, names = dict[str, str](), [f.name for f in fields(Precision)]
    for text in texts:
        name, _, value = text.removeprefix("precision.").partition("=")
        if name not in names:
            raise InvalidConfig(f"precision {name!r} is unknown; use one of {', '.join(names)}")
        check_once(values, name, value)
        values[name] = value
    return values


def _read_tokens(text: str) -> float:
    """A number of tokens, as a number or as people say it.

    >>> _read_tokens("15e12") == _read_tokens("15T")
    True
    """
    size = {"T": 1e12, "B": 1e9, "M": 1e6}.get(text[-1:].upper())
    try:
        return float(text[:-1]) * size if size else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 15e12, 15T or 300B") from None


def _read_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidConfig(f"--scale={text} is no list of numbers; write --scale 64,128,256") from None
    if min(sizes) < 1:
        raise InvalidConfig(f"--scale={text} must name at least 1 GPU each")
    return sizes
