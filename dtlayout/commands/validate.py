"""dtlayout validate: score the predictions against measured runs, and fit the constants to them."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

from dtlayout.calibrate.file import update
from dtlayout.cluster import Cluster, load_cluster
from dtlayout.commands.dryrun_tables import choose_unit
from dtlayout.commands.text import describe_records
from dtlayout.costmodel.engine import BOUNDS, OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidConfig
from dtlayout.files import check_writable
from dtlayout.planner.runs import Run
from dtlayout.planner.scores import LOWEST_MFU, Prediction, Scores, by_table, score
from dtlayout.planner.tables import KERNELS
from dtlayout.planner.validate import (
    Ablation,
    ablate,
    fit_engine,
    group_runs,
    leave_one_out,
    predict,
    with_engine,
)
from dtlayout.report.record import make_record
from dtlayout.report.rows import ROWS, read_rows

EXAMPLE = "dtlayout validate runs.csv --leave-one-out --plots plots"

_NAME_WIDTH = 46
_HEADINGS = ("fit", "MAPE", "median", "tau", "top-1", "memory", "false OOM")


@dataclass(frozen=True)
class _Fitted:
    """An engine with constants fitted to the runs at hand."""

    engine: Engine
    at_bounds: tuple[str, ...]
    runs: Sequence[Run]
    shipped: Scores
    predictions: Sequence[Prediction]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tables, and what to do with them beside scoring."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="RUNS", help=ROWS)
    parser.add_argument("--engine", metavar="E", help="predict every row as this engine, whatever the table says")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE",
        help="predict our own runs on its GPU type with this cluster file; else with what was measured when they ran",
    )  # fmt: skip
    parser.add_argument("--leave-one-out", action="store_true", help="score each model with constants of the others")
    parser.add_argument("--fit", action="store_true", help="fit the engine's constants to these runs, as TOML")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --fit writes instead of stdout")
    parser.add_argument(
        "--into", type=Path, metavar="CLUSTER.toml",
        help="fit to sweeps, put the constants into the cluster file that they ran with, and keep how right it was",
    )  # fmt: skip
    parser.add_argument("--ablate", action="store_true", help="what is lost without each constant; takes minutes")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures of predicted against measured")
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="rows to show of the worst; 5 by default")


def run(options: argparse.Namespace) -> int:
    """Score, and print what was asked for."""
    if options.worst < 0:
        raise InvalidConfig(f"--worst={options.worst} must not be negative")
    if options.out and not options.fit:
        raise InvalidConfig("--out names the file that --fit writes; add --fit")
    for path in filter(None, (options.out, options.into)):
        check_writable(path)
    if options.into:
        return _refresh(options)
    runs = read_rows(options.tables, options.engine).runs
    if options.cluster:
        cluster = load_cluster(options.cluster)
        engine = find_engine_on(OWN_ENGINE, cluster.gpu)
        own = {run.scenario for run in group_runs(runs).get((OWN_ENGINE, cluster.gpu.name), [])}
        here = {scenario: _on(scenario, cluster, engine) for scenario in own}
        runs = [replace(run, scenario=here.get(run.scenario, run.scenario)) for run in runs]
    if options.fit and len({engine for engine, _ in group_runs(runs)}) > 1:
        engines = ", ".join(sorted({engine for engine, _ in group_runs(runs)}))
        raise InvalidConfig(f"--fit takes runs of one engine, these are of {engines}; pass fewer tables or --engine")
    predictions = predict(runs)
    left_out = leave_one_out(runs, _tell) if options.leave_one_out else {}
    fits = [
        _fit(group)
        for group in group_runs(runs).values()
        if options.fit or (options.ablate and group[0].scenario.engine.is_calibrated)
    ]
    ablations = [ablate(fitted.runs, fitted.engine, _tell) if options.ablate else [] for fitted in fits]
    if options.out:
        options.out.write_text("\n".join(_format_fragment(fitted) for fitted in fits), encoding="utf-8")
    pictures: list[Path] = []
    if options.plots:
        from dtlayout.planner.plots import write_plots  # only now: it imports matplotlib

        pictures = write_plots(predictions, options.plots)
    if options.json:
        print(json.dumps(_as_document(options, predictions, left_out, fits, ablations), indent=2, allow_nan=False))
        return 0
    print("\n".join(_describe(options, predictions, left_out, fits, ablations)))
    for picture in pictures:
        print(f"\nwritten: {picture}", end="")
    if options.plots:
        print("" if pictures else "\nno picture: no row has a measured number")
    return 0


def _refresh(options: argparse.Namespace) -> int:
    """Refit a cluster file to sweeps that ran with it; their predictions, which were made before, go on record."""
    from dtlayout.calibrate.fit import told_by  # only now: it imports scipy

    folders: list[Path] = options.tables
    if options.engine or options.leave_one_out or options.ablate or options.plots or options.out:
        raise InvalidConfig("--into takes sweeps and nothing else; score them without it first")
    if tables := [str(path) for path in folders if not path.is_dir()]:
        raise InvalidConfig(f"--into takes folders of sweeps, whose predictions are known; {', '.join(tables)} is none")
    cluster = load_cluster(options.into)
    if not cluster.gpu.reached:
        raise InvalidConfig(f"{options.into} has no measured constants to fit; dtlayout calibrate writes such a file")
    runs = read_rows(folders).runs
    if strangers := {run.table for run in runs if run.scenario.cluster.gpu.name != cluster.gpu.name}:
        raise InvalidConfig(f"{', '.join(sorted(strangers))} ran on another GPU type than that of {options.into}")
    records = [record for folder in folders if (record := make_record(folder))]
    told = told_by([run.layout for run in runs], cluster.gpu.device_type)
    engine = replace(find_engine_on(OWN_ENGINE, cluster.gpu), fitted=told)
    scenarios = {run.scenario: _on(run.scenario, cluster, engine) for run in runs}
    fitted = _fit([replace(run, scenario=scenarios[run.scenario]) for run in runs])
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    update(options.into, fitted.engine, records, f"dtlayout validate, {today}, {len(runs)} runs")
    before, after = fitted.shipped.median_ape, score(fitted.predictions).median_ape
    if options.json:
        document = {"ok": True, "file": str(options.into), "records": list(map(asdict, records)),
                    "median_error_before": before, "median_error_after": after}  # fmt: skip
        print(json.dumps(document, indent=2))
        return 0
    print("\n".join(describe_records(records) or ["no record: these sweeps were not predicted with a calibrated file"]))
    print(f"median error of speed {_percent(before)} before the fit, {_percent(after)} after, on the runs that it saw")
    print(f"written: {options.into}")
    return 0


def _on(scenario: Scenario, cluster: Cluster, engine: Engine) -> Scenario:
    """The same on a cluster of these machines, as they are known now."""
    here = replace(cluster, num_gpus=scenario.cluster.num_gpus, records=())
    return replace(scenario, cluster=here, engine=engine)


def _fit(group: Sequence[Run]) -> _Fitted:
    shipped = group[0].scenario.engine
    _tell(f"fitting {shipped.name} on {shipped.gpu}")
    engine, at_bounds = fit_engine(group, shipped)
    return _Fitted(engine, at_bounds, group, score(predict(group)), predict(with_engine(group, engine)))


def _tell(line: str) -> None:
    """Say what takes so long, to who waits for it."""
    if sys.stderr.isatty():
        print(f"{line} …", file=sys.stderr)


# For programs.


def _as_document(
    options: argparse.Namespace,
    predictions: Sequence[Prediction],
    left_out: dict[str, list[Prediction]],
    fits: Sequence[_Fitted],
    ablations: Sequence[Sequence[Ablation]],
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tables": {table: score(rows).as_dict() for table, rows in by_table(predictions).items()},
        "pooled": score(predictions).as_dict(),
    }
    if options.leave_one_out:
        document["left_out"] = {model: score(rows).as_dict() for model, rows in left_out.items()}
    if options.fit:
        document["fitted"] = {
            f.engine.gpu: {
                "engine": f.engine.name,
                "constants": _constants_of(f.engine),
                "at_bounds": list(f.at_bounds),
                "scores": score(f.predictions).as_dict(),
            }
            for f in fits
        }
    if options.ablate:
        document["ablations"] = [
            {"engine": f.engine.name, "gpu": f.engine.gpu, "constant": a.constant, "neutral": a.neutral}
            | a.scores.as_dict()
            for f, group in zip(fits, ablations, strict=True)
            for a in group
        ]
    return document


def _constants_of(engine: Engine) -> dict[str, float]:
    """The fitted ones, as many digits as a fit knows."""
    return {name: float(f"{getattr(engine.constants, name):.4g}") for name in engine.fitted}


# For people.


def _describe(
    options: argparse.Namespace,
    predictions: Sequence[Prediction],
    left_out: dict[str, list[Prediction]],
    fits: Sequence[_Fitted],
    ablations: Sequence[Sequence[Ablation]],
) -> Iterable[str]:
    yield from (line for (engine, gpu), group in group_runs(p.run for p in predictions).items()
                for line in _describe_engine(engine, gpu, group))  # fmt: skip
    yield ""
    tables = {table: score(rows) for table, rows in by_table(predictions).items()}
    yield from _tabulate("table", {**tables, "all": score(predictions)})
    yield f"MAPE and median over {_scored(predictions)}; tau and top-1 of all: their means"
    if left_out:
        yield ""
        scores = {model: score(rows) for model, rows in left_out.items()}
        yield from _tabulate("left out of the fit", scores)
    yield from _describe_worst(predictions, options.worst)
    for fitted, group in zip(fits, ablations, strict=True):
        if options.fit and options.out:
            yield f"\nwritten: {options.out}"
        elif options.fit:
            yield ""
            yield _format_fragment(fitted).rstrip()
        if options.ablate:
            yield from _describe_ablations(fitted, group)


def _describe_engine(engine: str, gpu: str, group: Sequence[Run]) -> Iterable[str]:
    of = group[0].scenario.engine
    yield f"{engine} on {gpu}, {len(group)} rows: {'' if of.is_calibrated else 'uncalibrated; '}{_source(of)}"
    if of.is_calibrated:
        at_bounds = [name for name, value in _constants_of(of).items() if _is_at_bound(name, value)]
        yield from _wrap("  fitted constants: ", of.fitted)
        yield from _wrap("  of these at a bound: ", at_bounds or ["none"])


def _scored(predictions: Sequence[Prediction]) -> str:
    """Of which rows the speed counts."""
    with_mfu = f"rows that ran at an MFU of {LOWEST_MFU:.0%} or more"
    return with_mfu if any(p.run.mfu for p in predictions) else "steps a second of rows that ran"


def _is_at_bound(name: str, value: float) -> bool:
    low, high = BOUNDS[name]
    return min(value - low, high - value) < 1e-3 * (high - low)


def _source(engine: Engine) -> str:
    return f"constants from {engine.source}" if engine.is_calibrated else "general constants, no run stands behind them"


def _wrap(start: str, words: Sequence[str], width: int = 118) -> Iterable[str]:
    line = start
    for i, word in enumerate(words):
        word += "," * (i < len(words) - 1)
        if len(line) + len(word) > width:
            yield line.rstrip()
            line = " " * (len(start) - len(start.lstrip()) + 4)
        line += f"{word} "
    yield line.rstrip()


def _tabulate(first: str, scores: dict[str, Scores]) -> Iterable[str]:
    width = max(len(first), *(len(_shorten(name)) for name in scores))
    yield f"{first:<{width}}{'rows':>6}" + "".join(f"{heading:>{len(heading) + 4}}" for heading in _HEADINGS)
    for name, s in scores.items():
        cells = (
            _plain(s.fit), _percent(s.mape), _percent(s.median_ape), _plain(s.tau), _plain(s.top1), _percent(s.memory),
            _percent(s.false_oom),
        )  # fmt: skip
        aligned = "".join(f"{cell:>{len(heading) + 4}}" for cell, heading in zip(cells, _HEADINGS, strict=True))
        yield f"{_shorten(name):<{width}}{s.rows:>6}{aligned}"


def _shorten(name: str, width: int = _NAME_WIDTH) -> str:
    """Its ends, since tables of one study begin alike and sweeps of one model end alike."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.{1 if value < 10 else 0}f} %"


def _describe_worst(predictions: Sequence[Prediction], number: int) -> Iterable[str]:
    """The rows with the largest errors of MFU and of memory, and the surest of the wrong outcomes."""
    speeds = [p for p in predictions if p.is_scored]
    peaks = [p for p in predictions if p.run.has_peak]
    misjudged = [
        p for p in predictions if p.run.outcome in ("ok", "oom") and p.estimate.fits != (p.run.outcome == "ok")
    ]
    for title, rows, error in (
        (f"speed, of {len(speeds)}", speeds, lambda p: abs(p.speed_error)),
        (f"peak memory, of {len(peaks)}", peaks, lambda p: abs(p.memory_error)),
        (f"outcome, of {len(misjudged)} misjudged", misjudged, lambda p: abs(_distance(p))),
    ):
        if rows and number:
            yield ""
            yield f"worst by {title}"
            for prediction in sorted(rows, key=error, reverse=True)[:number]:
                yield from _describe_row(prediction)


def _distance(prediction: Prediction) -> float:
    """Predicted peak over capacity, less 1."""
    return prediction.estimate.peak_bytes / prediction.estimate.capacity_bytes - 1


def _describe_row(prediction: Prediction) -> Iterable[str]:
    run, estimate = prediction.run, prediction.estimate
    kernel = next((word for word, kernels in KERNELS.items() if kernels == run.kernels), run.kernels.attention)
    yield f"  {_shorten(run.table, 44)} row {run.row}: {run.layout} {kernel}, {run.outcome}"
    speed = "" if run.scenario.cluster.gpu.name == "cpu" else f"MFU {100 * estimate.mfu:.1f} %"
    if run.mfu:
        speed += f", measured {100 * run.mfu:.1f} % ({prediction.speed_error:+.1%})"
    speed += f"{'; ' if speed else ''}step {estimate.step_time_s:.4g} s"
    speed += f", measured {run.step_time_s:.4g} s" if run.step_time_s else ""
    yield f"    {speed}"
    yield from _wrap(
        "      s:  ", [f"{name} {seconds:.4g}" for name, seconds in estimate.time.as_dict().items() if seconds]
    )
    shown = 0 if run.peak_bytes else estimate.busiest_rank
    memory = estimate.memory[shown]
    unit, size = choose_unit(memory.total)
    peak = f"peak of pipeline rank {shown} {memory.total / size:.1f} {unit}"
    if run.peak_bytes:
        peak += f", measured {run.peak_bytes / size:.1f} {unit} ({prediction.memory_error:+.1%})"
    peak += f"; highest of any rank {estimate.peak_bytes / size:.1f} of {estimate.capacity_bytes / size:.1f} {unit}"
    yield f"    {peak}"
    parts = [f"{name} {nbytes / size:.1f}" for name, nbytes in memory.as_dict().items() if nbytes]
    yield from _wrap(f"      {unit}: ", parts)


def _format_fragment(fitted: _Fitted) -> str:
    """The constants as the engine's file has them, with what is left of the errors as comments."""
    engine, scores = fitted.engine, score(fitted.predictions)
    ran = [run for run in fitted.runs if run.ran]
    models = ", ".join(dict.fromkeys(run.scenario.model.name for run in ran))
    summary = [
        f"# {engine.name}: scores of the {len(fitted.runs)} rows before and after this fit",
        *(
            f"# {name:<16}{form(getattr(fitted.shipped, name)):>8}{form(getattr(scores, name)):>10}"
            for name, form in (
                ("fit", _plain), ("mape", _percent), ("median_ape", _percent), ("tau", _plain), ("top1", _plain),
                ("memory", _percent), ("false_oom", _percent),
            )
        ),
    ]  # fmt: skip
    errors = [100 * p.speed_error for p in fitted.predictions if p.is_scored]
    if len(errors) > 1:
        tenths = quantiles(errors, n=10, method="inclusive")
        spread = ", ".join(f"{name} {tenths[i]:+.1f} %" for name, i in (("p10", 0), ("median", 4), ("p90", 8)))
        summary.append(f"# error of speed after: {spread}")
    summary.append(f"# at a bound: {', '.join(fitted.at_bounds) or 'none'}")
    source = json.dumps(f"{len(ran)} runs of {models}", ensure_ascii=False)
    values = [f"{name} = {_format_number(value)}" for name, value in _constants_of(engine).items()]
    return "\n".join([*summary, f"[fitted.{engine.gpu}]", f"source = {source}", *values]) + "\n"


def _format_number(value: float) -> str:
    """A TOML float, short."""
    text = f"{value:.4g}"
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def _describe_ablations(fitted: _Fitted, ablations: Sequence[Ablation]) -> Iterable[str]:
    """Each constant's worth: scores without it, less those with all."""
    whole = score(fitted.predictions)
    yield ""
    yield f"{fitted.engine.name} on {fitted.engine.gpu} without one constant, the others of its kind fitted again"
    yield f"{'constant':<28}{'value':>11}{'neutral':>11}{'fit':>10}{'MAPE':>10}{'tau':>10}{'memory':>10}"
    scores = (_plain(whole.fit), _percent(whole.mape), _plain(whole.tau), _percent(whole.memory))
    yield f"{'(all of them)':<50}" + "".join(f"{text:>10}" for text in scores)
    for a in ablations:
        changes = (
            _change(a.scores.fit, whole.fit, "{:+.3f}"), _change(a.scores.mape, whole.mape, "{:+.1%}"),
            _change(a.scores.tau, whole.tau, "{:+.3f}"), _change(a.scores.memory, whole.memory, "{:+.1%}"),
        )  # fmt: skip
        value = getattr(fitted.engine.constants, a.constant)
        yield f"{a.constant:<28}{value:>11.4g}{a.neutral:>11.4g}" + "".join(f"{text:>10}" for text in changes)


def _change(without: float | None, whole: float | None, form: str) -> str:
    return "–" if without is None or whole is None else form.format(without - whole)
