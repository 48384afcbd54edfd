"""Published runs of LoRA, QLoRA and full fine-tuning beside predictions of our own cost model, fitted to none of them.

    make bench NAME=finetune TABLES=FILE > benchmarks/finetune.md

FILE has the columns of a table of fine-tuning runs: sizes of a model, degrees, method, rank, format of the base, and
measured speed and peak. Each program is predicted as the engine that is nearest to it, `PROGRAMS`; what a table leaves
open is assumed there. A quantized base of 4 bits is nf4, whatever library stores it.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.pages.markdown import table
from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine import find_engine_on
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario, engine_kernels
from dtlayout.schedules.schedules import schedule_with
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, Gpu, find_gpu
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.validation.tables import open_table

Row = Mapping[str, str]
EAGER = Kernels(attention="sdpa-flash", norm="eager", rope="eager", swiglu="eager", loss="torch")
COMPILED = Kernels(attention="sdpa-flash", compile="blocks", loss="chunked")
GPUS = {
    "h100": "h100-80g-sxm", "a100-80": "a100-80g-sxm", "a100-40": "a100-40g-sxm", "rtx4090": "rtx4090-24g",
    "gb200": "gb200", "gb300": "gb300",
}  # fmt: skip
"""GPU in a table → type here."""


@dataclass(frozen=True)
class ProgramGuess:
    """The nearest engine to a program, and what its tables leave open."""

    engine: str
    kernels: Kernels | None
    """Kernels that it runs; None for the engine's usual ones."""
    recompute: str = "full"
    """Recomputation of rows that name none."""
    zero: Literal[1, 3] = 3


PROGRAMS = {
    "hf-trainer": ProgramGuess("dtlayout", EAGER),
    "fsdp_qlora": ProgramGuess("dtlayout", EAGER),
    "litgpt": ProgramGuess("dtlayout", EAGER),
    "torchtune": ProgramGuess("dtlayout", COMPILED),
    "nemo-automodel": ProgramGuess("automodel", EAGER),
    "megatron-bridge": ProgramGuess("megatron", None, recompute="none", zero=1),
}
"""Beginning of a program's name → how it is predicted. One rank has zero=3 too, so that a base is not held twice."""
NOT_PREDICTED = {
    "litgpt-resource-a100": "several GPUs hold 22 GB each of a 7B, at 1,304 tokens as at 5,216: a whole model, as "
    "while it is loaded; one of the runs that ran out of memory is of this kind",
    "qwen-profile": "4,096 more tokens take 5.6 GB, 4.5 times their bf16 logits, where a loss in fp32 is predicted to "
    "take 9; the run that is said not to fit has 8,192",
    "fsdpqlora-2x3090": "peaks are of reserved memory, with what the allocator keeps for later",
    "torchtune-readme": "recomputation is not said of any row",
}
"""Table → what its programs hold that is not predicted, as its numbers show it."""
LEFT_OUT = {
    ("torchtune-readme", "0"): "its optimizer runs inside backward, in 8 bits",
    ("torchtune-readme", "1"): "it would reach more than its peak allows",
    ("torchtune-readme", "3"): "it would reach more than its peak allows",
    ("fsdpqlora-2x3090", "0"): "two times are printed",
    ("fsdpqlora-2x3090", "1"): "two times are printed",
}
"""Table and row → why it is not compared."""


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction."""

    row: Row
    estimate: Estimate

    @property
    def group(self) -> tuple[str, str]:
        """Table and method."""
        return self.row["table"], self.row["method"]

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured peak, less 1; None where none was measured."""
        said = self.row["peak_memory_gb"]
        return self.estimate.peak_bytes / 1e9 / float(said) - 1 if said else None

    @property
    def speed_error(self) -> float | None:
        """Predicted over measured tokens a second, less 1; None where none was measured."""
        said, seq_len = self.row["tokens_per_s_gpu"], _count(self.row, "seq_len")
        if not said:
            return None
        batch, gpus = _round_batch(self.row), _count(self.row, "gpus")
        return batch * seq_len / self.estimate.step_time_s / gpus / float(said) - 1


def _count(row: Row, key: str, default: int = 1) -> int:
    return int(float(row[key])) if row[key] else default


def _degrees(row: Row) -> tuple[int, int, int, int]:
    """dp, tp, pp and cp."""
    tp, pp, cp = (_count(row, axis) for axis in ("tp", "pp", "cp"))
    return _count(row, "gpus") // (tp * pp * cp), tp, pp, cp


def _round_batch(row: Row) -> int:
    """Sequences of a step, in whole microbatches of every dp rank."""
    unit = _count(row, "micro_batch") * _degrees(row)[0]
    return max(1, _count(row, "global_batch") // unit) * unit


def predict(row: Row) -> Estimate:
    """The prediction for a row; DtlayoutError where it cannot be."""
    guess = next(each for name, each in PROGRAMS.items() if row["program"].startswith(name))
    gpu = _find_gpu(row["gpu"])
    engine, precision = find_engine_on(guess.engine, gpu).told_formats(_find_formats(row, guess.engine))
    cluster = Cluster(gpu=gpu, num_gpus=_count(row, "gpus"), gpus_per_node=_count(row, "gpus_per_node", 8))
    batch = Batch(global_batch=_round_batch(row), seq_len=_count(row, "seq_len"))
    scenario = Scenario(
        model=_find_model(row), batch=batch, cluster=cluster, engine=engine, precision=precision, optimizer=AdamW()
    )
    layout = _find_layout(row, guess)
    kernels = guess.kernels or engine_kernels(scenario, OpenKernels(), layout)
    return Estimator(scenario).estimate(layout, kernels)


def _find_gpu(name: str) -> Gpu:
    """The GPU type of a table; an RTX 3090 is a 4090 with other numbers (NVIDIA Ampere GA102 white paper, 2021)."""
    if name in GPUS:
        return find_gpu(GPUS[name])
    if name != "rtx3090":
        raise KeyError(name)
    return replace(find_gpu("rtx4090-24g"), name="rtx3090-24g", peak_flops_per_s=71e12, memory_bytes_per_s=936e9)


def _find_model(row: Row) -> ModelShape:
    model = ModelShape(
        name=row["model"], hidden_size=_count(row, "hidden"), num_layers=_count(row, "layers"),
        num_heads=_count(row, "heads"), num_kv_heads=_count(row, "kv_heads"), ffn_size=_count(row, "ffn"),
        vocab_size=_count(row, "vocab"), tied_embeddings=row["tied"] == "True",
    )  # fmt: skip
    if row["method"] == "full":
        return model
    named = [each.removesuffix("_proj") for each in row["targets"].split(",")]
    known = ("q", "k", "v", "o", "gate", "up", "down")
    targets = tuple(f"{each}_proj" for each in named) if {*named} <= {*known} else ()  # else all of them
    return replace(model, adapter=Adapter(rank=_count(row, "rank", 16), targets=targets))


def _find_formats(row: Row, engine: str) -> dict[str, str]:
    """Formats of a row, by keys of `Precision`: state in bf16 where all of a model is trained from bf16 weights."""
    if engine == "megatron":
        return {"matmuls": {"fp8": "fp8-tensorwise"}.get(row["base_format"], row["base_format"])}
    formats = {"base": "nf4"} if row["method"].startswith("qlora") else {}
    return formats | ({"params": "bfloat16", "reduce": "bfloat16"} if row["method"] == "full" else {})


def _find_layout(row: Row, guess: ProgramGuess) -> Layout:
    dp, tp, pp, cp = _degrees(row)
    said = re.search(r"VP (\d+)", row["note"])
    v = int(said[1]) if said and pp > 1 else 1
    return Layout(
        dp_shard=dp, tp=tp, pp=pp, cp=cp, micro_batch=_count(row, "micro_batch"), zero=guess.zero,
        recompute=row["recompute"] or guess.recompute, schedule=schedule_with(v), virtual_stages=v,
        offload="optimizer" if "cpu offload" in row["note"] else "none",
    )  # fmt: skip


def compare(rows: Iterable[Row]) -> tuple[list[Compared], dict[str, int]]:
    """Rows beside their predictions, and why others are not: reason → their number."""
    compared, left_out = list[Compared](), Counter[str]()
    for row in rows:
        reason = LEFT_OUT.get((row["table"], row["row"]))
        try:
            if reason is None:
                compared.append(Compared(row, predict(row)))
                continue
        except (DtlayoutError, KeyError) as error:
            reason = f"{row['table']}: {error}"
        left_out[reason] += 1
    return compared, left_out


def _median(errors: Iterable[float | None]) -> str:
    known = [abs(each) for each in errors if each is not None]
    return f"{median(known):.1%} of {len(known)}" if known else ""


def describe(compared: list[Compared], left_out: Mapping[str, int]) -> Iterator[str]:
    """The page, line by line."""
    yield "# Fine-tuning: published runs beside predictions"
    yield ""
    yield "Written by `make bench NAME=finetune TABLES=FILE`. No constant was fitted to a run that trains an adapter."
    yield "Errors are medians of |predicted / measured - 1|, with the number of rows that were measured."
    yield ""
    lines = []
    for group in dict.fromkeys(each.group for each in compared):
        own = [each for each in compared if each.group == group]
        kinds = ", ".join(dict.fromkeys(each.row["memory_kind"] for each in own if each.row["peak_memory_gb"]))
        peak, speed = _median(each.peak_error for each in own), _median(each.speed_error for each in own)
        lines.append([*group, kinds, peak, speed])
    yield from (*table(["table", "method", "peak is", "peak", "speed"], lines, num_words=3), "")
    for kind in ("allocated", "reserved", "unknown"):
        of_kind = [each.peak_error for each in compared if each.row["memory_kind"] == kind]
        yield f"- Peaks of {kind} memory: {_median(of_kind)}"
    yield f"- Speed: {_median(each.speed_error for each in compared)}"
    ran = [each for each in compared if each.row["status"] == "ok"]
    oom = [each for each in compared if each.row["status"] == "oom"]
    yield f"- Said not to fit, and ran: {sum(not each.estimate.fits for each in ran)} of {len(ran)}"
    yield f"- Ran out of memory, and said not to fit: {sum(not each.estimate.fits for each in oom)} of {len(oom)}"
    yield ""
    heading = ["program", "predicted as", "recomputation where a table names none"]
    guesses = [[name, f"{guess.engine}: {_name_kernels(guess)}", guess.recompute] for name, guess in PROGRAMS.items()]
    yield from (*table(heading, guesses, num_words=3), "")
    yield from (*(f"- {name}: {what}." for name, what in NOT_PREDICTED.items()), "")
    heading = ["table", "row", "model", "method", "GPUs", "tokens", "peak, GB", "measured", "tokens/s/GPU", "measured"]
    yield from (*table(heading, map(_list_cells, compared), num_words=5), "")
    for reason, number in left_out.items():
        yield f"- left out: {number}, {reason}"


def _name_kernels(guess: ProgramGuess) -> str:
    return ", ".join(map(str, vars(guess.kernels).values())) if guess.kernels else "its usual kernels"


def _list_cells(each: Compared) -> list[str]:
    row, tokens = each.row, _count(each.row, "micro_batch") * _count(each.row, "seq_len")
    rate = _round_batch(row) * _count(row, "seq_len") / each.estimate.step_time_s / _count(row, "gpus")
    peak = row["peak_memory_gb"] or ("oom" if row["status"] == "oom" else "")
    return [
        row["table"], row["row"], row["model"], row["method"], f"{row['gpus']} x {row['gpu']}", f"{tokens:,}",
        f"{each.estimate.peak_bytes / 1e9:.1f}", peak, f"{rate:,.0f}", row["tokens_per_s_gpu"],
    ]  # fmt: skip


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a CSV file of fine-tuning runs")
    options = parser.parse_args()
    with open_table(options.table) as reader:
        print("\n".join(describe(*compare(reader))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
