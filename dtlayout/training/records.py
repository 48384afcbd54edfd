"""Records: the lines that a run prints, and the files about it in its folder."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_DONE, EXIT_NON_FINITE, EXIT_STOPPED
from dtlayout.base.files import write_whole
from dtlayout.base.formatting import format_bytes, join_alike, plural
from dtlayout.base.terminal import open_console
from dtlayout.config.checking import describe_start
from dtlayout.config.config import Config
from dtlayout.data.bad_batch import BadBatch
from dtlayout.data.chat import describe_ends, describe_marks
from dtlayout.data.extent import describe_held_out, describe_training
from dtlayout.data.samples import Samples
from dtlayout.data.tokenizer import find_other_tokenizer, load_tokenizer
from dtlayout.measure.ledger import Highest
from dtlayout.models.counting import count_parameters, describe_parameters
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_adapter_notes
from dtlayout.models.traced import FAMILY
from dtlayout.models.weights import describe_longer_context, describe_new_rows, find_other_positions
from dtlayout.pipelining.partition import count_blocks
from dtlayout.pipelining.timeline import Timeline
from dtlayout.planner.prediction import describe, own_scenario, predict, to_predicted
from dtlayout.plans.plan import find_fake_quantized, find_scaled, find_scaled_experts
from dtlayout.records.run import Performance, Run
from dtlayout.spec.cluster import gpu_named
from dtlayout.spec.device import Device
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout
from dtlayout.tracing.initial import describe_rules
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
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.result import StepResult
from dtlayout.training.routing import Routing
from dtlayout.training.trackers import Start, Trackers
from dtlayout.training.trainer import Trainer, starts_from_folder

STEPS_RECORDED = 8
"""Largest number of recorded steps in timeline.json; the last ones stay."""
OUTCOMES = {EXIT_DONE: "done", EXIT_STOPPED: "stopped", EXIT_NON_FINITE: "non_finite"}


class Records(Observer):
    """Prints lines and writes files about a run, on one rank alone; as an observer, it notes each step."""

    def __init__(
        self, config: Config, layout: Layout, chosen: ResolvedKernels, device: Device, begun_s: float | None = None
    ):
        """Predict the run; `chosen` are the config's kernels, each auto replaced by a name.

        `begun_s` is the time of `time.monotonic` when the start began, by default now.
        """
        self._begun_s = time.monotonic() if begun_s is None else begun_s
        self._first_step_s: float | None = None
        self.config, self.layout, self.chosen, self.device = config, layout, chosen, device
        self.folder, self.epochs = Path(config.train.run_folder), config.train.epochs
        self.is_writer = dist.get_rank() == 0
        self.display = Display(open_console(quiet=not self.is_writer), config.train.steps, config.metrics.log_every)
        self._metrics = MetricsFile(self.folder / "metrics.jsonl")
        self._trackers = Trackers(self.display.say)
        self._speed = Speed(config.model, config.batch, layout.world_size, device.peak_flops_per_s)
        self._step_times_s: list[float] = []
        """Seconds of each step of this start whose batch is whole."""
        self._num_noted = 0
        """Steps of this start, those of a ramp too."""
        self._goes_on = False
        self.skipped: list[int] = []
        """Steps of this start that updated nothing, because loss or norm was not finite."""
        self.executed: dict[str, list[str]] = {}
        """Operation → its kernels that the first step ran."""
        self.peaks: list[int] | None = None
        """Largest peak of each pipeline rank so far, bytes; None before the first was measured."""
        self.reserved_bytes: int | None = None
        """Most bytes that the allocator of any rank had reserved so far; None where that was not measured."""
        self.num_slow = 2
        """First steps of this start that are not timed in the summary."""
        self._timelines: dict[int, Timeline] = {}
        estimate = predict(replace(config, kernels=OpenKernels.of(chosen.kernels)), layout, device.gpu)
        scenario = own_scenario(config, layout.world_size, device.gpu or gpu_named(device.name))
        self._prediction_line = describe(estimate, scenario)
        self._run = Run(
            table=self.folder.resolve().parent.name, row=self.folder.name, scenario=scenario, layout=layout,
            kernels=chosen.kernels, outcome="running", predicted=to_predicted(estimate, scenario),
        )  # fmt: skip

    def set_length(self, config: Config) -> None:
        """Take the config whose number of steps is known."""
        self.config = config
        self.display.set_length(config.train.steps)

    def say_what_starts(
        self,
        first_step: int,
        trainer: Trainer,
        held_out: dict[str, Samples],
        *,
        is_new: bool,
        first: Path | None = None,
    ) -> None:
        """Print model, layout, kernels, prediction and how much of the data is read, before the first step.

        `first` is the checkpoint of another run from which the weights are.
        """
        model, blocks = self.config.model, join_alike(count_blocks(trainer.assembly.slices))
        self.display.say(
            f"{model.name}: {describe_parameters(model)} in {self.config.precision.compute} on "
            f"{self.layout.world_size} x {self.device.name} as {self.layout}\n"
            f"{plural(trainer.assembly.schedule.num_microbatches, 'microbatch')}, blocks by stage: {blocks}, "
            f"{self.config.batch.num_tokens:,} tokens a step, steps {first_step} to {self.config.train.steps}"
        )
        for line in [*self.config.describe_ramp(), *self.chosen.describe()]:
            self.display.say(line)
        if starts_from_folder(self.config, is_new=is_new):
            self.display.say(
                f"weights of {first or self.config.train.init_from}{', without its optimizer' * bool(first)}"
            )
            source, tokenizer = self.config.train.init_from, self.config.data.tokenizer
            for line in describe_new_rows(source, model, self.config.train.new_rows):
                self.display.say(line)
            lines = find_other_positions(source, model) + find_other_tokenizer(tokenizer, source)
            lines += describe_longer_context(source, self.config.batch.seq_len)
            for line in lines + find_adapter_notes(find_place(source)):
                self.display.say(f"note: {line}")
        if is_new:
            for line in describe_start(self.config):
                self.display.say(f"note: {line}")
        if is_new and not self.config.train.init_from and model.family == FAMILY:
            self.display.say(describe_rules(model.trace))
        if (fake_quant := self.config.precision.fake_quant) != "none":
            rounded = _name_last(find_fake_quantized(self.config.model))
            self.display.say(
                f"{rounded} of blocks multiply by weights rounded to {fake_quant}, as --quantize writes them"
            )
        if self.config.precision.matmul_format:
            for line in self._describe_matmuls():
                self.display.say(line)
        if self.layout.offload not in ("none", "disk") and self.device.type == "cpu":
            self.display.say(f"note: layout.offload={self.layout.offload} saves nothing on a CPU, which has one memory")
        self.display.say(self._prediction_line)
        if self.is_writer:
            lines = describe_training(trainer.batches.samples, self.config.train.steps)
            for name, each in held_out.items():
                lines += describe_held_out(name, each, self.config.count_held_out_batches(name))
            if (data := self.config.data).has_conversations:
                known = load_tokenizer(data.tokenizer, data.end_of_document)
                notes = describe_marks(data, known) + describe_ends(data, known)
                lines += [f"note: {line}" for line in notes]
            for line in lines:
                self.display.say(line)

    def _describe_matmuls(self) -> list[str]:
        """Lines on the linear layers that multiply below the compute format, and on the kernels that cast for them."""
        scaled = _name_last(find_scaled(self.config.model))
        lines = [f"{scaled} of blocks multiply in {self.config.precision.matmuls}"]
        if self.config.model.experts is not None:
            is_scaled = find_scaled_experts(self.config.model, self.chosen.kernels)
            name = self.config.precision.matmuls if is_scaled else self.config.precision.compute
            lines.append(f"routed experts multiply in {name} (kernels.experts={self.chosen.kernels.experts})")
        if not self.chosen.kernels.compiles_blocks:
            lines.append("note: fp8 is slower where blocks are not compiled: casts are kernels of their own then")
        return lines

    def open(self, resolved: Config, done: int) -> None:
        """Open files and trackers, without anything after the `done` steps; `resolved` reproduces the run."""
        self._goes_on = done > 0
        if self.is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "config.toml", resolved.to_toml())
            noted = self._metrics.keep_until(done)
            start = Start(folder=self.folder, config=asdict(resolved), done=done, noted=noted)
            self._trackers.open(self.config.metrics.to, start)

    def close(self, *, is_fine: bool) -> None:
        """Tell trackers that the run is over."""
        self._trackers.close(is_fine=is_fine)

    def after_step(self, step: ObservedStep) -> None:
        """Write a step that is finite to metrics.jsonl and to trackers, and show it."""
        if self._first_step_s is None:
            self._first_step_s = time.monotonic() - self._begun_s
            self.display.say(f"step {step.number} was done {self._first_step_s:.1f} s after the start")
        if not step.result.is_finite:
            return
        if step.reserved_bytes is not None:
            self.reserved_bytes = max(step.reserved_bytes, self.reserved_bytes or 0)
        self._num_noted += 1
        if step.batch == self.config.batch:
            self._step_times_s.append(step.time_s)
        metrics = StepMetrics(
            step=step.number,
            loss=step.result.loss,
            grad_norm=step.result.grad_norm,
            lr=step.lr,
            tokens=step.tokens,
            step_time_s=step.time_s,
            peak_memory_bytes=step.peak_bytes,
            peak_reserved_bytes=step.reserved_bytes,
            data_wait_s=step.data_wait_s,
            validation_loss=step.validation_loss,
            validation_losses=step.validation_losses,
            spike=step.is_spike,
            loss_scale=step.result.loss_scale,
            layout=str(self.layout),
            resumed=self._goes_on and self._num_noted == 1,
            **_describe_routing(step.result.routing, self.layout.ep),  # type: ignore[arg-type]
            **replace(self._speed, batch=step.batch).describe(step.time_s),  # type: ignore[arg-type]
        )
        if self.is_writer:
            if problem := self._metrics.append(metrics):
                self.display.say(problem)
            self._trackers.write(metrics)
        self.display.show(metrics)

    def note_start(self, losses: Mapping[str, float]) -> None:
        """Note the validation losses before the first step, by the names of their sets, as those of step 0."""
        first, named = next(iter(losses.values())), {name: loss for name, loss in losses.items() if name}
        if self.is_writer:
            if problem := self._metrics.append_start(first, named, str(self.layout)):
                self.display.say(problem)
            self._trackers.write_start(first, named)
        self.display.show_validation(0, first, named)

    def note_samples(self, samples: Samples, step: int, result: StepResult, kind: Literal["nonfinite", "spike"]) -> str:
        """Write down which samples a step had; a part of a sentence about it, on the rank that writes."""
        if not self.is_writer:
            return ""
        try:
            bad_batch = BadBatch.of(samples, step, result.loss, result.grad_norm)
            return f"dtlayout data show {bad_batch.write(self.folder, kind)} has its samples"
        except OSError as error:
            return f"its samples were not noted: {error.strerror}"

    def write_curves(self, num_steps: int, by_pp_rank: list[list[Highest]]) -> None:
        """Write memory.json: the curve of each pipeline rank over the first `num_steps` steps."""
        if self.is_writer:
            MemoryCurves(num_steps=num_steps, by_pp_rank=by_pp_rank, run=self._run).write(self.folder)

    def write_timeline(self, step: int, timeline: Timeline) -> None:
        """Write timeline.json with this step and some before it."""
        self._timelines[step] = timeline
        for oldest in sorted(self._timelines)[:-STEPS_RECORDED]:
            del self._timelines[oldest]
        RecordedTimelines(steps=self._timelines, run=self._run).write(self.folder)

    def report(self, exit_code: int, done: int, spikes: list[int]) -> None:
        """Write summary.json and print the table at the end of a run that has done so many steps."""
        if not self.is_writer:
            return
        self.display.show_last()
        lines = self._metrics.read_all()
        losses = [line["loss"] for line in lines if line["step"] > 0]
        imbalances = [each for line in lines if (each := line.get("expert_imbalance")) is not None]
        num_smaller = self._num_noted - len(self._step_times_s)
        step_time_s, spread_s = time_steps(self._step_times_s, max(0, self.num_slow - num_smaller))
        speed = self._speed.describe(step_time_s) if step_time_s else {}
        measured = Performance(
            step_time_s=step_time_s,
            step_time_spread_s=spread_s,
            tokens_per_s=speed.get("tokens_per_s"),
            mfu=speed.get("mfu"),
            peak_memory_bytes=None if self.peaks is None else tuple(self.peaks),
            peak_reserved_bytes=self.reserved_bytes,
            expert_imbalance=fmean(imbalances[-10:]) if imbalances else None,
        )
        used = self.chosen.kernels.used(self.config.request_kernels(self.device, self.layout))
        operations = {kernel.operation for kernel in used}
        summary = Summary(
            outcome=OUTCOMES[exit_code],
            exit_code=exit_code,
            steps=done,
            epochs=self.epochs,
            first_step_s=self._first_step_s,
            peak_reserved_bytes=self.reserved_bytes,
            skipped=self.skipped,
            spikes=spikes,
            final_loss=fmean(losses[-10:]) if losses else None,
            validation=Validation.of(lines),
            validation_sets=Validation.of_sets(lines),
            parameters=count_parameters(self.config.model),
            device=self.device.name,
            torch=torch.__version__,
            attention_kernels=self.executed["attention"],
            kernels={each: ran for each, ran in self.executed.items() if each in operations},
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
            *describe_validation(summary.validation, summary.validation_sets),
            ("step time", compare(measured.step_time_s, predicted.step_time_s, "{:.3f} s".format)),
            ("tokens/s", compare(measured.tokens_per_s, None, "{:,.0f}".format)),
            ("tokens/s/GPU", compare(speed, predicted_speed, "{:,.0f}".format)),
            ("MFU", compare(measured.mfu, predicted.mfu, "{:.1%}".format)),
            *describe_peaks(measured.peak_memory_bytes, predicted.peak_memory_bytes),
            *_describe_reserved(measured, predicted),
            *_describe_balance(measured, predicted),
            ("attention kernels", ", ".join(summary.attention_kernels)),
            ("run folder", str(self.folder)),
        ]
        if measured.mfu is not None and measured.mfu > 1:
            rows.append(("warning", "an MFU above 1 means that the peak or the clock is wrong: see [cluster] gpu"))
        return rows

    def _find_speed(self, of: Performance) -> float | None:
        """Tokens a second of one GPU; None if no step was timed."""
        if not of.step_time_s:
            return None
        return self.config.batch.tokens_per_s_per_gpu(of.step_time_s, self.layout.world_size)


def _describe_reserved(measured: Performance, predicted: Performance) -> list[tuple[str, str]]:
    """A row on bytes that PyTorch's allocator had reserved; none where that was not measured."""
    if measured.peak_reserved_bytes is None:
        return []
    return [("reserved", compare(measured.peak_reserved_bytes, predicted.peak_reserved_bytes, format_bytes))]


def _describe_balance(measured: Performance, predicted: Performance) -> list[tuple[str, str]]:
    """A row on how full the fullest of ep's ranks was, and is predicted to be; none without experts."""
    if measured.expert_imbalance is None:
        return []
    words = compare(measured.expert_imbalance, predicted.expert_imbalance, "{:.2f}".format)
    return [("experts.imbalance", words)]


def _describe_routing(routing: Routing | None, ep: int) -> dict[str, float]:
    """Fields of StepMetrics about routers; none without experts."""
    if routing is None:
        return {}
    fullest, block = routing.fullest
    return {
        "fullest_expert": fullest,
        "fullest_expert_block": block,
        "expert_imbalance": routing.imbalance(ep),
        "router_entropy": routing.entropy,
        "router_square": routing.mean_square,
    }


def _name_last(patterns: Iterable[str]) -> str:
    """The last parts of some modules' names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in patterns))
