#!/bin/sh
# Score the predictions against tables of measured runs, also of models that no constant was fitted to, as Markdown.
#
#     benchmarks/validate.sh [FOLDER_OF_TABLES]      or VALIDATE_TABLES=FOLDER; OUT and PYTHON may be set too
#
# The tables are other people's measurements and not part of this project: without a folder there is nothing to do.
set -eu
folder=${1:-${VALIDATE_TABLES:-}}
project=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$project/benchmarks/validation.md}

if [ -z "$folder" ] || ! ls "$folder"/*.csv > /dev/null 2>&1; then
    echo "skipped: no folder with tables of measured runs; pass it, or set VALIDATE_TABLES"
    exit 0
fi
OMP_NUM_THREADS=1
PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
main='import sys; from dtlayout.cli import main; sys.exit(main())'

cd "$folder" # so that no path stands in the report
{
    echo "# Predictions against measured runs"
    echo
    "$python" - << 'END'
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

def find(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "from a checkout"

names = ("dtlayout", "numpy", "scipy")
print(f"{datetime.now(timezone.utc):%Y-%m-%d}, Python {platform.python_version()},",
      ", ".join(f"{name} {find(name)}" for name in names) + ". Predictions need no GPU: " + f"{os.cpu_count()} CPU cores.")
END
    echo
    echo "Written by \`benchmarks/validate.sh\`. *Reference* is what a sketch with fitted physical constants reached on the"
    echo "same rows, scored on rows that it was fitted to. *Left out*: constants fitted to the other models alone."
} > "$work/report.md"

for table in *.csv; do
    echo "$table: fitting once without each model, then without each constant, takes minutes" >&2
    seconds=$(date +%s)
    scores=0
    "$python" -c "$main" validate "$table" --leave-one-out --json > "$work/scores.json" || scores=$?
    "$python" -c "$main" validate "$table" --worst 5 --ablate > "$work/text" # fails with its message if the table is wrong
    seconds=$(($(date +%s) - seconds))
    {
        echo
        echo "## $table"
        echo
        echo "\`dtlayout validate $table --leave-one-out --ablate\`, $seconds s."
        echo
        if [ "$scores" -ne 0 ]; then
            "$python" -c "$main" validate "$table" --leave-one-out 2>&1 | sed 's/^/No left-out scores: /' || true
            echo
            "$python" -c "$main" validate "$table" --json > "$work/scores.json"
        fi
        "$python" - "$table" "$work/scores.json" << 'END'
import json
import sys

REFERENCE = {  # of the study's five main sweeps, and of the Playbook's 1B and 8B
    "aa_scaling_a100.csv": {"fit": 0.986, "mape": 0.033, "median_ape": 0.017, "tau": 0.90, "top1": 0.95},
    "playbook_h100.csv": {
        "mape": 0.101, "median_ape": 0.025, "tau": 0.82, "top1": 0.99, "memory": 0.040, "false_oom": 0.016,
    },
}
KEYS = {
    "fit": "{:.3f}", "mape": "{:.1%}", "median_ape": "{:.1%}", "tau": "{:.3f}", "top1": "{:.3f}", "memory": "{:.1%}",
    "false_oom": "{:.1%}",
}
table, path = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    document = json.load(file)
rows = [("reference", REFERENCE.get(table, {})), ("all rows", document["pooled"])]
rows += [(f"left out: {model}", scores) for model, scores in document.get("left_out", {}).items()]
rows += list(document["tables"].items())

def show(scores, key):
    return "–" if scores.get(key) is None else KEYS[key].format(scores[key]).replace("%", " %")

print("| | rows |", " | ".join(KEYS), "|")
print("|---|---|" + "---|" * len(KEYS))
for name, scores in rows:
    print(f"| {name} | {scores.get('rows', '')} |", " | ".join(show(scores, key) for key in KEYS), "|")
END
        echo
        echo '```text'
        cat "$work/text"
        echo '```'
    } >> "$work/report.md"
done
cp "$work/report.md" "$out"
echo "written: $out"
