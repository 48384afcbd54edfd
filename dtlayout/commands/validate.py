"""dtlayout validate: score the predictions against measured runs, and fit the constants to them."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import check_writable
from dtlayout.base.terminal import is_terminal
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.commands.validate_text import LEFT_OUT, describe
from dtlayout.records.run import Run
from dtlayout.report.rows import REPEATS, ROWS, ReportRows, read_rows
from dtlayout.spec.cluster import load_cluster
from dtlayout.validation import predict
from dtlayout.validation.cross_validation import HOLD_OUT, leave_out, model_of, to_errors
from dtlayout.validation.fragment import format_fragment, list_fitted
from dtlayout.validation.scores import Prediction, by_group, by_table, score, score_group

EXAMPLE = "dtlayout validate runs.csv --leave-one-out --plots plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tables, and what to do with them beside scoring."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="RUNS", help=ROWS)
    parser.add_argument("--engine", metavar="E", help="predict every row as this engine, whatever the table says")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE",
        help="predict our own runs on its GPU type with this cluster file; else with what was measured when they ran",
    )  # fmt: skip
    parser.add_argument("--leave-one-out", action="store_true", help="score each model with constants of the others")
    parser.add_argument("--leave-gpu-out", action="store_true", help="score each GPU type with constants of the others")
    parser.add_argument("--leave-site-out", action="store_true", help="score each site with constants of the others")
    parser.add_argument(
        "--leave-nodes-out", action="store_true", help="score runs on many nodes with constants of those on fewer"
    )
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="write the intervals of these rows, left out in all ways"
    )
    parser.add_argument("--fit", action="store_true", help="fit the engine's constants to these runs, as TOML")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --fit writes instead of stdout")
    parser.add_argument("--ablate", action="store_true", help="what is lost without each constant; takes minutes")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures of predicted against measured")
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="rows to show of the worst; 5 by default")


def run(options: argparse.Namespace) -> int:
    """Score, and print what was asked for."""
    if options.worst < 0:
        raise InvalidConfig(f"--worst={options.worst} must not be negative")
    if options.out and not options.fit:
        raise InvalidConfig("--out names the file that --fit writes; add --fit")
    for path in filter(None, (options.out, options.errors)):
        check_writable(path)
    rows = read_rows(options.tables, options.engine)
    runs = rows.runs
    runs = predict.on_cluster(runs, load_cluster(options.cluster)) if options.cluster else runs
    groups = predict.group_for_fit(runs)
    if options.fit and len(engines := sorted({engine for engine, _ in groups})) > 1:
        raise InvalidConfig(
            f"--fit takes runs of one engine, these are of {', '.join(engines)}; pass fewer tables or --engine"
        )
    document = _score(rows, predict.predict(runs), options.worst)
    document |= _leave_out(options, runs)
    document |= _fit(options, list(groups.values()))
    if options.plots:
        from dtlayout.validation.plots import write_plots  # only now: it imports matplotlib

        document["_pictures"] = write_plots(document["_predictions"], options.plots)
    return show(options, document, describe, allow_nan=False)


def tell(line: str) -> None:
    """Print what is being fitted, if somebody watches a terminal."""
    if is_terminal(sys.stderr):
        print(f"{line} …", file=sys.stderr)


def _score(rows: ReportRows, predictions: Sequence[Prediction], num_worst: int) -> dict[str, Any]:
    """The scores of all rows, and what became of the rows that have none."""
    changes = _find_changes(predictions)
    return {
        "tables": {table: asdict(score(found)) for table, found in by_table(predictions).items()},
        "pooled": asdict(score(predictions)),
        "groups": _to_groups(predictions),
        "rows": _count(rows),
        "unpredicted": dict(Counter(reason for row in rows.unpredicted for reason in row.reasons).most_common()),
        "unpredicted_rows": [row._asdict() for row in rows.unpredicted],
        "changed": {change: len(changed) for change, changed in changes.items()},
        "_changed_rows": changes,
        "_predictions": predictions,
        "_num_worst": num_worst,
    }


def _to_groups(predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    return {
        grouping: {group: asdict(score_group(found)) for group, found in groups.items()}
        for grouping, groups in by_group(predictions).items()
    }


def _count(rows: ReportRows) -> dict[str, int]:
    """Rows that were read, by what became of them: `left_out` are those that do not say how a layout ended."""
    predicted, unpredicted, repeats = len(rows.runs), len(rows.unpredicted), rows.left_out[REPEATS]
    others = rows.left_out.total() - unpredicted - repeats
    read = predicted + rows.left_out.total()
    return {"read": read, "predicted": predicted, "unpredicted": unpredicted, "repeats": repeats, "left_out": others}


def _find_changes(predictions: Sequence[Prediction]) -> dict[str, list[JsonDocument]]:
    """Change that makes a row one that can be predicted → the rows with that change."""
    changes: dict[str, list[JsonDocument]] = {}
    for run in (prediction.run for prediction in predictions):
        for change in predict.describe_changes(run):
            changes.setdefault(change, []).append({"table": run.table, "row": run.row})
    return changes


def _leave_out(options: argparse.Namespace, runs: Sequence[Run]) -> dict[str, Any]:
    """The scores of rows that were left out of the fits as asked; `--errors` writes the errors of all of them."""
    asked = {
        "left_out": options.leave_one_out, "left_out_gpu": options.leave_gpu_out,
        "left_out_site": options.leave_site_out, "left_out_nodes": options.leave_nodes_out,
    }  # fmt: skip
    if not options.errors and not any(asked.values()):
        return {}
    wanted = HOLD_OUT.keys() if options.errors else {"engine"} | {of for key, of in LEFT_OUT.items() if asked[key]}
    found = leave_out(runs, wanted, tell)
    if options.errors:
        options.errors.write_text(to_errors(found), encoding="utf-8")
    document: dict[str, Any] = {}
    for key, errors in ((key, found.ways[of]) for key, of in LEFT_OUT.items() if asked[key]):
        document[key] = {name: asdict(score(rows)) for name, rows in errors.predictions.items()}
        document[f"{key}_groups"] = _to_groups(errors.all_predictions)
        document[f"{key}_kept"] = {group: asdict(score(rows)) for group, rows in errors.kept.items()}
        document[f"_{key}_kept_model"] = {group: model_of(rows[0].run) for group, rows in errors.kept.items()}
    return document


def _fit(options: argparse.Namespace, groups: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The constants that were fitted to each group of runs, and what each of them is worth, as asked."""
    wanted = [group for group in groups if options.fit or (options.ablate and _has_fit(group))]
    fits = [predict.fit_group(group, tell) for group in wanted]
    ablations = [_ablate(each) if options.ablate else [] for each in fits]
    fragments = [format_fragment(each) for each in fits]
    if options.out:
        options.out.write_text("\n".join(fragments), encoding="utf-8")
    document: dict[str, Any] = {"_fits": list(zip(fits, fragments, ablations, strict=True)), "_out": options.out}
    if options.fit:
        document["fitted"] = {gpu: values for each in fits for gpu, values in list_fitted(each).items()}
    if options.ablate:
        document["ablations"] = [ablation for of_engine in ablations for ablation in of_engine]
    return document


def _has_fit(runs: Sequence[Run]) -> bool:
    return any(engine.fitted or engine.shared for engine in predict.find_engines(runs))


def _ablate(fitted: predict.Fitted) -> list[dict[str, Any]]:
    """Scores without each constant of an engine that was fitted."""
    runs, name = [prediction.run for prediction in fitted.predictions], fitted.engines[0].name
    return [
        {"engine": name, "gpu": a.gpu, "constant": a.constant, "neutral": a.neutral} | asdict(a.scores)
        for a in predict.ablate(runs, fitted.engines, tell)
    ]
