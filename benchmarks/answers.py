"""Answers: what commands say to questions drawn at random, kept and compared after a change that should change none.

    PYTHONPATH=. python -m benchmarks.answers keep FILE [--seed 1] [--only explain,recommend]
    PYTHONPATH=. python -m benchmarks.answers compare FILE

A *question* is a command line, drawn from a seed alone. An *answer* is its exit code and all that it printed. Questions
are asked in one process, so that thousands take minutes; trainings are processes of their own. `compare` asks the kept
questions again and prints each that is answered otherwise, with the first place where the two answers part; its exit
code is 1 if there is one. A file of answers belongs to the machine and to the package versions that it was made with.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from dtlayout import cli
from dtlayout.base.files import write_whole
from dtlayout.costmodel.engine import known_engines
from dtlayout.models.presets import PRESETS
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.training.metrics import MetricsFile

ROOT = Path(__file__).parents[1]
GPUS = ("a100-80g-sxm", "h100-80g-sxm", "h200-141g-sxm")
LARGE, SMALL = "configs/llama-13b-64xa100.toml", "configs/debug.toml"
"""Configs whose keys a question changes; the small one where modules are built."""
MOST_REFUSED = 0.5
"""Share of the questions of a kind that may be refused; further ones are drawn anew."""


class Answer(NamedTuple):
    """The exit code and the output of a command."""

    exit_code: int
    out: str
    problems: str
    """Text of stderr if the command failed; empty otherwise, since progress holds times."""


def draw_layout(random: Random) -> list[str]:
    """Overrides of a config: degrees, schedule, sharding, recomputation; many are refused, which is an answer too."""
    schedule = random.choice(list(SCHEDULES.values()))
    pp = random.choice([1, 1, 2, 4, 8])
    keys: dict[str, Any] = {
        "layout.pp": pp,
        "layout.tp": random.choice([1, 1, 2, 4, 8]),
        "layout.cp": random.choice([1, 1, 1, 2]),
        "layout.dp_replicate": random.choice([1, 1, 2]),
        "layout.dp_shard": random.choice([1, 2, 8]),
        "layout.zero": random.choice([1, 2, 3]),
        "layout.sequence_parallel": random.choice(["true", "false"]),
        "layout.micro_batch": random.choice([1, 2, 4]),
        "layout.recompute": random.choice(["none", "selective", "full", "every-2", "keep-attention", "keep-matmuls"]),
        "layout.offload": random.choice(["none"] * 6 + ["activations", "optimizer", "both"]),
        "layout.virtual_stages": max(schedule.least_virtual_stages, 1) if pp > 1 else 1,
        "layout.schedule": schedule.name if pp > 1 else "1f1b",
        "kernels.attention": random.choice(["auto", "sdpa-flash", "sdpa-cudnn", "sdpa-math"]),
        "kernels.compile": random.choice(["none", "blocks", "auto"]),
        "batch.global_batch": random.choice([64, 128, 96]),
        "batch.seq_len": random.choice([2048, 4096, 8192]),
        "model.name": random.choice(list(PRESETS)),
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def draw_explain(random: Random) -> list[str]:
    """Memory and time of a layout under any engine."""
    engine = random.choice(known_engines())
    return ["explain", LARGE, "--json", f"--gpu={random.choice(GPUS)}", f"--engine={engine}", *draw_layout(random)]


def draw_check(random: Random) -> list[str]:
    """A check of a layout, whose refusals are lines for people."""
    return ["check", LARGE, f"--world={random.choice([8, 16, 64])}", *draw_layout(random)]


def draw_timeline(random: Random) -> list[str]:
    """When each pipeline rank does what."""
    return ["timeline", LARGE, "--json", f"--gpu={random.choice(GPUS)}", *draw_layout(random)]


def draw_recommend(random: Random) -> list[str]:
    """A search, for people or for programs."""
    model, gpu = random.choice(list(PRESETS)), random.choice(GPUS)
    gpus, engine = random.choice([8, 64, 256]), random.choice(known_engines())
    line = ["recommend", f"--model={model}", f"--gpu={gpu}", f"--gpus={gpus}", f"--engine={engine}"]
    line += [f"--seq-len={random.choice([2048, 4096])}", f"--global-batch={random.choice([256, 512])}"]
    return [*line, *random.choice([["--json"], [], ["--fix=tp=2"], ["--avoid=recompute=full"]])]


def draw_dryrun(random: Random) -> list[str]:
    """A rank of a layout, stepped without a GPU."""
    layout = [key for key in draw_layout(random) if "model.name" not in key and "kernels" not in key]
    return ["dryrun", SMALL, "--json", "--gpu=h100-80g-sxm", *layout]


def draw_training(random: Random) -> list[str]:
    """A run of four steps on two CPU ranks; its answer is the losses and norms."""
    axis = random.choice(["pp", "tp", "dp_shard", "cp"])
    degrees = [f"--layout.{name}={2 if name == axis else 1}" for name in ("pp", "tp", "cp", "dp_shard")]
    options: dict[str, list[Any]] = {
        "zero": [1, 2, 3],
        "recompute": ["none", "selective", "full"],
        "micro_batch": [1, 2, 4],
    }
    return ["train", *degrees, *(f"--layout.{name}={random.choice(values)}" for name, values in options.items())]


KINDS: dict[str, tuple[int, Callable[[Random], list[str]]]] = {
    "explain": (2500, draw_explain),
    "check": (100, draw_check),
    "timeline": (60, draw_timeline),
    "recommend": (40, draw_recommend),
    "dryrun": (30, draw_dryrun),
    "train": (10, draw_training),
}
"""Kind of question → how many are asked, and what draws one."""


def ask(line: Sequence[str]) -> Answer:
    """Run a command line; its exit code and output."""
    if line[0] == "train":
        return train(line[1:])
    out, problems = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(problems):
        try:
            exit_code = cli.main(list(line))
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else 1
    return Answer(exit_code, out.getvalue(), problems.getvalue() if exit_code else "")


def train(keys: Sequence[str]) -> Answer:
    """The losses and gradient norms of a short run, to the last digit."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
        config = [SMALL, "--train.steps=4", "--optimizer.warmup_steps=1", f"--train.run_folder={run}"]
        config += ["--checkpoint.save=false", *keys]
        done = subprocess.run([*command, *config], cwd=ROOT, capture_output=True, text=True, timeout=300)
        file = MetricsFile(run / "metrics.jsonl")
        steps = [[line["loss"], line["grad_norm"]] for line in file.read()] if file.path.exists() else []
    return Answer(done.returncode, json.dumps(steps), "" if steps else done.stderr[-2000:])


def answer_all(seed: int, only: Sequence[str]) -> Iterator[tuple[list[str], Answer]]:
    """Questions of a seed with their answers; each kind has a generator of its own, so that kinds can be left out."""
    for kind in only:
        number, draw_one = KINDS[kind]
        random, refused = Random(f"{seed} {kind}"), 0
        while number:
            answer = ask(line := draw_one(random))
            if answer.exit_code and refused >= MOST_REFUSED * KINDS[kind][0]:
                continue
            refused += answer.exit_code != 0
            number -= 1
            yield line, answer


def find_difference(before: Answer, now: Answer) -> str:
    """The first place where two answers part; empty if they are the same."""
    for name, old, new in zip(Answer._fields, before, now, strict=True):
        if old != new:
            olds, news = str(old).splitlines(), str(new).splitlines()
            at = next((i for i, pair in enumerate(zip(olds, news, strict=False)) if len(set(pair)) > 1), None)
            at = min(len(olds), len(news)) if at is None else at
            return f"{name}: {_clip(olds, at)} became {_clip(news, at)}"
    return ""


def _clip(lines: Sequence[str], at: int) -> str:
    return repr(lines[at][:160]) if at < len(lines) else "nothing"


def keep(file: Path, seed: int, only: Sequence[str]) -> int:
    """Ask, and write the answers, one a line."""
    lines = [json.dumps([line, *answer]) for line, answer in answer_all(seed, only)]
    write_whole(file, "".join(line + "\n" for line in lines))
    print(f"kept {len(lines)} answers in {file}")
    return 0


def compare(file: Path, only: Sequence[str]) -> int:
    """Ask the kept questions again, and print what is answered otherwise."""
    asked, differing = Counter[str](), Counter[str]()
    for text in file.read_text(encoding="utf-8").splitlines():
        line, *before = json.loads(text)
        if line[0] in only:
            asked[line[0]] += 1
            if difference := find_difference(Answer(*before), ask(line)):
                differing[line[0]] += 1
                print(f"dtlayout {' '.join(line)}\n  {difference}", flush=True)
    print(", ".join(f"{kind}: {differing[kind]} of {number} differ" for kind, number in asked.items()))
    return 1 if differing else 0


def main() -> int:
    """Keep or compare; the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.answers")
    parser.add_argument("verb", choices=["keep", "compare"])
    parser.add_argument("file", type=Path, help="of answers, one a line")
    parser.add_argument("--seed", type=int, default=1, help="of the questions that are kept")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of questions, with commas")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(KINDS):
        parser.error(f"--only: no kind {', '.join(sorted(unknown))}; use some of {', '.join(KINDS)}")
    return keep(options.file, options.seed, only) if options.verb == "keep" else compare(options.file, only)


if __name__ == "__main__":
    sys.exit(main())
