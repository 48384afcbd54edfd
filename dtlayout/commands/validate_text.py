"""The scores and fits of `validate` in words and tables, for people."""

import argparse
from collections.abc import Iterator, Sequence
from statistics import quantiles

from dtlayout import toml
from dtlayout.costmodel.engine import Engine
from dtlayout.planner.scores import LOWEST_MFU, Prediction, Scores, by_table, score
from dtlayout.planner.tables import KERNELS
from dtlayout.planner.validate import Ablation, Fitted, group_runs
from dtlayout.text import align, choose_unit, wrap

Fits = Sequence[tuple[Fitted, Sequence[Ablation]]]
"""What was fitted to each engine's runs, with what each of its constants is worth where that was asked."""
_NAME_WIDTH = 46


def describe(
    options: argparse.Namespace, predictions: Sequence[Prediction], left_out: dict[str, list[Prediction]], fits: Fits
) -> Iterator[str]:
    """The lines of a validation: engines, scores, the worst rows, and what was fitted."""
    for (name, gpu), group in group_runs(p.run for p in predictions).items():
        engine = group[0].scenario.engine
        source = f"constants from {engine.source}"
        if not engine.is_calibrated:
            source = "uncalibrated; general constants, no run stands behind them"
        yield f"{name} on {gpu}, {len(group)} rows: {source}"
        if engine.is_calibrated:
            yield from wrap("  fitted constants: ", engine.fitted)
            yield from wrap("  of these at a bound: ", engine.at_bounds or ["none"])
    yield ""
    tables = {table: score(rows) for table, rows in by_table(predictions).items()}
    yield from _tabulate("table", {**tables, "all": score(predictions)})
    with_mfu = f"rows that ran at an MFU of {LOWEST_MFU:.0%} or more"
    scored = with_mfu if any(p.run.mfu for p in predictions) else "steps a second of rows that ran"
    yield f"MAPE and median over {scored}; tau and top-1 of all: their means"
    if left_out:
        yield ""
        yield from _tabulate("left out of the fit", {model: score(rows) for model, rows in left_out.items()})
    yield from _describe_worst(predictions, options.worst)
    for fitted, ablations in fits:
        if options.fit and options.out:
            yield f"\nwritten: {options.out}"
        elif options.fit:
            yield ""
            yield format_fragment(fitted).rstrip()
        if options.ablate:
            yield from _describe_ablations(fitted, ablations)


def _tabulate(first: str, scores: dict[str, Scores]) -> list[str]:
    head = [first, "rows", "fit", "MAPE", "median", "tau", "top-1", "memory", "false OOM"]
    rows = [
        [
            _shorten(name), str(s.rows), _plain(s.fit), percent(s.mape), percent(s.median_ape), _plain(s.tau),
            _plain(s.top1), percent(s.memory), percent(s.false_oom),
        ]
        for name, s in scores.items()
    ]  # fmt: skip
    return align([head, *rows])


def _shorten(name: str, width: int = _NAME_WIDTH) -> str:
    """Both ends of a long name: tables of one study begin alike, sweeps of one model end alike."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A fraction in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{1 if value < 10 else 0}f} %"


def _describe_worst(predictions: Sequence[Prediction], number: int) -> Iterator[str]:
    """The rows with the largest errors of MFU and of memory, and the surest of the wrong outcomes."""
    speeds = [p for p in predictions if p.is_scored]
    peaks = [p for p in predictions if p.run.has_peak]
    judged = [p for p in predictions if p.run.outcome in ("ok", "oom")]
    misjudged = [p for p in judged if p.estimate.fits != (p.run.outcome == "ok")]
    for title, rows, error in (
        (f"speed, of {len(speeds)}", speeds, lambda p: abs(p.speed_error)),
        (f"peak memory, of {len(peaks)}", peaks, lambda p: abs(p.memory_error)),
        (
            f"outcome, of {len(misjudged)} misjudged",
            misjudged,
            lambda p: abs(p.estimate.peak_bytes / p.estimate.capacity_bytes - 1),
        ),
    ):
        if rows and number:
            yield ""
            yield f"worst by {title}"
            for prediction in sorted(rows, key=error, reverse=True)[:number]:
                yield from _describe_row(prediction)


def _describe_row(prediction: Prediction) -> Iterator[str]:
    run, estimate = prediction.run, prediction.estimate
    kernel = next((word for word, kernels in KERNELS.items() if kernels == run.kernels), run.kernels.attention)
    yield f"  {_shorten(run.table, 44)} row {run.row}: {run.layout} {kernel}, {run.outcome}"
    speed = f"MFU {100 * estimate.mfu:.1f} %" if run.scenario.cluster.gpu.has_mfu else ""
    if run.mfu:
        speed += f", measured {100 * run.mfu:.1f} % ({prediction.speed_error:+.1%})"
    speed += f"{'; ' if speed else ''}step {estimate.step_time_s:.4g} s"
    speed += f", measured {run.step_time_s:.4g} s" if run.step_time_s else ""
    yield f"    {speed}"
    times = [f"{name} {seconds:.4g}" for name, seconds in estimate.time.as_dict().items() if seconds]
    yield from wrap("      s:  ", times)
    shown = 0 if run.peak_bytes else estimate.busiest_rank
    memory = estimate.memory[shown]
    unit, size = choose_unit(memory.total)
    peak = f"peak of pipeline rank {shown} {memory.total / size:.1f} {unit}"
    if run.peak_bytes:
        peak += f", measured {run.peak_bytes / size:.1f} {unit} ({prediction.memory_error:+.1%})"
    peak += f"; highest of any rank {estimate.peak_bytes / size:.1f} of {estimate.capacity_bytes / size:.1f} {unit}"
    yield f"    {peak}"
    parts = [f"{name} {nbytes / size:.1f}" for name, nbytes in memory.as_dict().items() if nbytes]
    yield from wrap(f"      {unit}: ", parts)


def format_fragment(fitted: Fitted) -> str:
    """Fitted constants as the engine's file has them, with what is left of the errors as comments."""
    engine, scores = fitted.engine, score(fitted.predictions)
    ran = [p.run for p in fitted.predictions if p.run.ran]
    models = ", ".join(dict.fromkeys(run.scenario.model.name for run in ran))
    forms = {
        "fit": _plain, "mape": percent, "median_ape": percent, "tau": _plain, "top1": _plain, "memory": percent,
        "false_oom": percent,
    }  # fmt: skip
    cells = [[name, form(getattr(fitted.before, name)), form(getattr(scores, name))] for name, form in forms.items()]
    summary = [f"{engine.name}: scores of the {scores.rows} rows before and after this fit"]
    summary += align(cells, ("<16", ">6", ">8"))
    errors = [100 * p.speed_error for p in fitted.predictions if p.is_scored]
    if len(errors) > 1:
        tenths = quantiles(errors, n=10, method="inclusive")
        spread = ", ".join(f"{name} {tenths[i]:+.1f} %" for name, i in (("p10", 0), ("median", 4), ("p90", 8)))
        summary.append(f"error of speed after: {spread}")
    summary.append(f"at a bound: {', '.join(engine.at_bounds) or 'none'}")
    values = {"source": f"{len(ran)} runs of {models}", **list_constants(engine)}
    return "".join(f"# {line}\n" for line in summary) + toml.dumps({"fitted": {engine.gpu: values}})


def list_constants(engine: Engine) -> dict[str, float]:
    """The fitted constants of an engine, with as many digits as a fit knows."""
    return {name: float(f"{getattr(engine.constants, name):.4g}") for name in engine.fitted}


def _describe_ablations(fitted: Fitted, ablations: Sequence[Ablation]) -> Iterator[str]:
    """Each constant's worth: scores without it, less those with all."""
    whole = score(fitted.predictions)
    yield ""
    yield f"{fitted.engine.name} on {fitted.engine.gpu} without one constant, the others of its kind fitted again"
    rows = [
        ["constant", "value", "neutral", "fit", "MAPE", "tau", "memory"],
        ["(all of them)", "", "", _plain(whole.fit), percent(whole.mape), _plain(whole.tau), percent(whole.memory)],
    ]
    rows += [
        [
            a.constant, f"{getattr(fitted.engine.constants, a.constant):.4g}", f"{a.neutral:.4g}",
            _change(a.scores.fit, whole.fit, "{:+.3f}"), _change(a.scores.mape, whole.mape, "{:+.1%}"),
            _change(a.scores.tau, whole.tau, "{:+.3f}"), _change(a.scores.memory, whole.memory, "{:+.1%}"),
        ]
        for a in ablations
    ]  # fmt: skip
    yield from align(rows)


def _change(without: float | None, whole: float | None, form: str) -> str:
    return "–" if without is None or whole is None else form.format(without - whole)
