"""Records: what a run says while it goes on, and what stays of it in its folder."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_DONE, EXIT_NON_FINITE, EXIT_STOPPED
from dtlayout.base.files import write_whole
from dtlayout.base.formatting import join_alike, plural
from dtlayout.base.terminal import open_console
from dtlayout.config.config import Config
from dtlayout.data.samples import Samples
from dtlayout.data.suspects import BadBatch
from dtlayout.data.tokenizer import find_other_tokenizer
from dtlayout.measure.ledger import Highest
from dtlayout.models.counting import count_parameters
from dtlayout.models.weights import find_other_positions
from dtlayout.pipelining.partition import StageSlice, count_blocks
from dtlayout.pipelining.timeline import Timeline
from dtlayout.planner.prediction import describe, own_scenario, predict, to_predicted
from dtlayout.records.run import Performance, Run
from dtlayout.spec.cluster import gpu_named
from dtlayout.spec.device import Device
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout
from dtlayout.training.display import Display, compare, describe_peaks, describe_validation
from dtlayout.training.metrics import (
    MemoryCurves,
    MetricsFile,
    RecordedTimelines,
    Speed,
    StepMetrics,
    Summary,
    Validation,
    time_steps,
)
from dtlayout.training.step import StepResult
from dtlayout.training.trackers import Start, Trackers

STEPS_RECORDED = 8
"""How many of the last ones that were recorded timeline.json shows."""
OUTCOMES = {EXIT_DONE: "done", EXIT_STOPPED: "stopped", EXIT_NON_FINITE: "non_finite"}


class Records:
    """Those of one run, of which one rank writes and talks."""

    def __init__(self, config: Config, layout: Layout, chosen: ResolvedKernels, device: Device):
        """`chosen` are the config's kernels without an auto."""
        self.config, self.layout, self.chosen, self.device = config, layout, chosen, device
        self.folder = Path(config.train.run_folder)
        self.is_writer = dist.get_rank() == 0
        self.display = Display(open_console(quiet=not self.is_writer), config.train.steps, config.metrics.log_every)
        self._metrics = MetricsFile(self.folder / "metrics.jsonl")
        self._trackers = Trackers(self.display.say)
        self._speed = Speed(config.model, config.batch, layout.world_size, device.peak_flops_per_s)
        self._step_times_s: list[float] = []
        self._timelines: dict[int, Timeline] = {}
        estimate = predict(replace(config, kernels=OpenKernels.of(chosen.kernels)), layout, device.gpu)
        scenario = own_scenario(config, layout.world_size, device.gpu or gpu_named(device.name))
        self._prediction_line = describe(estimate, scenario)
        self._run = Run(
            table=self.folder.resolve().parent.name, row=self.folder.name, scenario=scenario, layout=layout,
            kernels=chosen.kernels, outcome="running", predicted=to_predicted(estimate, scenario),
        )  # fmt: skip

    def say_what_starts(
        self, first_step: int, slices: Sequence[StageSlice], num_microbatches: int, *, is_loaded: bool
    ) -> None:
        """The model, the layout, its kernels and what is predicted of them, before the first step."""
        model, blocks = self.config.model, join_alike(count_blocks(slices))
        self.display.say(
            f"{model.name}: {count_parameters(model):,} parameters in {self.config.precision.compute} on "
            f"{self.layout.world_size} x {self.device.name} as {self.layout}\n"
            f"{plural(num_microbatches, 'microbatch')}, blocks by stage: {blocks}, "
            f"{self.config.batch.num_tokens:,} tokens a step, steps {first_step} to {self.config.train.steps}"
        )
        for line in self.chosen.describe():
            self.display.say(line)
        if is_loaded:
            self.display.say(f"weights of {self.config.train.init_from}")
            source, tokenizer = self.config.train.init_from, self.config.data.tokenizer
            for line in find_other_positions(source, model) + find_other_tokenizer(tokenizer, source):
                self.display.say(f"note: {line}")
        if self.layout.offload != "none" and self.device.type == "cpu":
            self.display.say(f"note: layout.offload={self.layout.offload} saves nothing on a CPU, which has one memory")
        self.display.say(self._prediction_line)

    def open(self, resolved: Config, done: int) -> None:
        """Make the folder what it was after the steps that are done; `resolved` reproduces the run."""
        if self.is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "config.toml", resolved.to_toml())
            noted = self._metrics.keep_until(done)
            start = Start(folder=self.folder, config=asdict(resolved), done=done, noted=noted)
            self._trackers.open(self.config.metrics.to, start)

    def close(self, *, is_fine: bool) -> None:
        """Tell trackers that the run is over."""
        self._trackers.close(is_fine=is_fine)

    def note(
        self, done: int, result: StepResult, lr: float, step_time_s: float, *, data_wait_s: float,
        validation_loss: float | None, tokens: int, peak_bytes: int | None, is_spike: bool,
    ) -> None:  # fmt: skip
        """A step that is done, as numbers of metrics.jsonl; `tokens` are those of all steps until then."""
        self._step_times_s.append(step_time_s)
        metrics = StepMetrics(
            step=done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=tokens,
            step_time_s=step_time_s,
            peak_memory_bytes=peak_bytes,
            data_wait_s=data_wait_s,
            validation_loss=validation_loss,
            spike=is_spike,
            layout=str(self.layout),
            **self._speed.describe(step_time_s),  # type: ignore[arg-type]
        )
        if self.is_writer:
            if problem := self._metrics.append(metrics):
                self.display.say(problem)
            self._trackers.write(metrics)
        self.display.show(metrics)

    def note_samples(self, samples: Samples, step: int, result: StepResult, kind: Literal["nonfinite", "spike"]) -> str:
        """Write down which samples a step had; what to say of it, on the rank that writes."""
        if not self.is_writer:
            return ""
        try:
            suspects = BadBatch.of(samples, step, result.loss, result.grad_norm)
            return f"dtlayout data show {suspects.write(self.folder, kind)} has its samples"
        except OSError as error:
            return f"its samples were not noted: {error.strerror}"

    def write_curves(self, num_steps: int, by_pp_rank: list[list[Highest]]) -> None:
        """memory.json, with the curves of pipeline ranks in so many steps."""
        if self.is_writer:
            MemoryCurves(num_steps=num_steps, by_pp_rank=by_pp_rank, run=self._run).write(self.folder)

    def write_timeline(self, step: int, timeline: Timeline) -> None:
        """timeline.json, with this step and some before it."""
        self._timelines[step] = timeline
        for oldest in sorted(self._timelines)[:-STEPS_RECORDED]:
            del self._timelines[oldest]
        RecordedTimelines(steps=self._timelines, run=self._run).write(self.folder)

    def report(
        self, exit_code: int, done: int, peaks: Sequence[int] | None, *, skipped: list[int], spikes: list[int],
        executed: dict[str, list[str]], num_slow: int,
    ) -> None:  # fmt: skip
        """summary.json and the table at the end.

        `peaks` are those of pipeline ranks, bytes, `executed` the kernels that ran; the first `num_slow` steps of this
        process are not timed.
        """
        if not self.is_writer:
            return
        lines = self._metrics.read()
        losses = [line["loss"] for line in lines]
        step_time_s, spread_s = time_steps(self._step_times_s, num_slow)
        speed = self._speed.describe(step_time_s) if step_time_s else {}
        measured = Performance(
            step_time_s=step_time_s,
            step_time_spread_s=spread_s,
            tokens_per_s=speed.get("tokens_per_s"),
            mfu=speed.get("mfu"),
            peak_memory_bytes=None if peaks is None else tuple(peaks),
        )
        summary = Summary(
            outcome=OUTCOMES[exit_code],
            exit_code=exit_code,
            steps=done,
            skipped=skipped,
            spikes=spikes,
            final_loss=fmean(losses[-10:]) if losses else None,
            validation=Validation.of(lines),
            parameters=count_parameters(self.config.model),
            device=self.device.name,
            torch=torch.__version__,
            attention_kernels=executed["attention"],
            kernels=executed,
            chosen=self.chosen.describe(),
            run=replace(self._run, outcome="non_finite" if exit_code == EXIT_NON_FINITE else "ok", measured=measured),
        )
        summary.write(self.folder)
        rows = self._describe(summary, measured, len(losses[-10:]))
        self.display.show_table(f"{summary.outcome} after {plural(done, 'step')}", rows)

    def _describe(self, summary: Summary, measured: Performance, num_losses: int) -> list[tuple[str, str]]:
        predicted = self._run.predicted or Performance()
        speed, predicted_speed = map(self._find_speed, (measured, predicted))
        rows = [
            ("layout", f"{self.layout} on {self.layout.world_size} x {self.device.name}"),
            (
                f"loss, mean of the last {plural(num_losses, 'step')}",
                compare(summary.final_loss, None, "{:.4f}".format),
            ),
            *describe_validation(summary.validation),
            ("step time", compare(measured.step_time_s, predicted.step_time_s, "{:.3f} s".format)),
            ("tokens/s", compare(measured.tokens_per_s, None, "{:,.0f}".format)),
            ("tokens/s/GPU", compare(speed, predicted_speed, "{:,.0f}".format)),
            ("MFU", compare(measured.mfu, predicted.mfu, "{:.1%}".format)),
            *describe_peaks(measured.peak_memory_bytes, predicted.peak_memory_bytes),
            ("attention kernels", ", ".join(summary.attention_kernels)),
            ("run folder", str(self.folder)),
        ]
        if measured.mfu is not None and measured.mfu > 1:
            rows.append(("warning", "an MFU above 1 means that the peak or the clock is wrong: see [cluster] gpu"))
        return rows

    def _find_speed(self, of: Performance) -> float | None:
        """Tokens a second of one GPU."""
        if not of.step_time_s:
            return None
        return self.config.batch.tokens_per_s_per_gpu(of.step_time_s, self.layout.world_size)
