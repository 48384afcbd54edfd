"""dtlayout report: findings of measured rows on each choice, as text, Markdown and one page with plots."""

import argparse
from dataclasses import asdict
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import write
from dtlayout.commands.arguments import show
from dtlayout.report.page import Report
from dtlayout.report.rows import ROWS, read_rows

EXAMPLE = "dtlayout report sweeps/debug-4cpu --page report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rows to read, and the files to write."""
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS", help=ROWS)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with plots and all layouts")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write findings and best layouts as Markdown")


def run(options: argparse.Namespace) -> int:
    """Print the report, and write it where asked."""
    rows = read_rows(options.rows)
    if not rows.runs:
        raise InvalidConfig(f"no row is left to report on; {rows.describe_left_out()}")
    report = Report(rows.runs, rows.describe_left_out())
    findings = [
        {**vars(finding), "question": finding.question.name, "says": finding.describe(),
         "speed_supported": finding.speaks_of_speed, "fit_supported": finding.speaks_of_fit}
        for finding in report.findings
    ]  # fmt: skip
    common = [{**asdict(each), "says": each.describe()} for each in report.common]
    counts = {"rows": len(rows.runs), "left_out": rows.left_out}
    balance = [{**asdict(each), "says": each.describe()} for each in report.imbalances]
    document = {"ok": True, **counts, "findings": findings, "fastest": common, "balance": balance}
    show(options, document, lambda _: [report.to_markdown().rstrip()])
    if options.markdown:
        write(options.markdown, report.to_markdown(), "report")
    if options.page:
        report.write_page(options.page)
    return 0
