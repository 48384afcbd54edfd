"""Findings of dry runs of some ranks, beside a prediction of the cost model and memory of a real run. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from dtlayout.costmodel.estimate import Estimate, TimeEstimate
from dtlayout.costmodel.fsdp2.memory import estimate_curve
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.costmodel.scenario import Scenario, cut
from dtlayout.dryrun.report import RankReport
from dtlayout.dryrun.roofline import roofline_time
from dtlayout.measure.ledger import UPDATE, Highest
from dtlayout.mesh.axes import PP
from dtlayout.planner.prediction import to_predicted
from dtlayout.records.run import Performance, Run
from dtlayout.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Reports of some ranks, with the prediction and the real run that they are compared with."""

    scenario: Scenario
    """The model, batch and cluster of the dry run."""
    layout: Layout
    """How the model and the batch are spread over ranks."""
    reports: list[RankReport]
    """One report for each rank that was run, in the order of the ranks."""
    estimate: Estimate
    """Prediction of the cost model for the layout."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what the dry run left out."""
    num_steps: int = 0
    """How many of a run's first steps were taken; 0 for one later step."""
    measured: Mapping[int, list[Highest]] = field(default_factory=dict)
    """Rank → the curve of its memory in a real run; empty without one."""

    @property
    def title(self) -> str:
        """The model, layout and cluster, in a line."""
        model, gpu = self.scenario.model.name, self.scenario.cluster.gpu.name
        return f"{model} as {self.layout} on {self.layout.world_size} x {gpu}, dry"

    @cached_property
    def time(self) -> TimeEstimate | None:
        """The step priced from the reports; None where they do not tell."""
        return roofline_time(self.scenario, self.layout, self.estimate.kernels, self.reports)

    def predicted(self, report: RankReport) -> MemoryEstimate:
        """The cost model's memory of a rank."""
        return self.estimate.memory[report.coordinate[PP]]

    def fits(self, report: RankReport) -> bool:
        """Whether a rank's peak, with what the engine needs beside tensors, and what lies on its host fit there."""
        on_device = report.peak_bytes + self.scenario.engine.constants.overhead_bytes
        fits_host = report.host_parts.total <= self.estimate.host_capacity_bytes
        return on_device <= self.estimate.capacity_bytes and fits_host

    def components(self, report: RankReport) -> dict[str, tuple[float, float]]:
        """Component → bytes at the peak, dry and predicted; parts that the two sides divide otherwise are joined."""
        dry, predicted = to_components(report), self.predicted(report)
        if self.num_steps and not dry.optimizer:  # at the peak of a first step, which makes the state in the end
            predicted = replace(predicted, optimizer=0.0)
        return {
            "parameters, gathered": (dry.parameters, predicted.parameters),
            "gradients": (dry.gradients, predicted.gradients),
            "optimizer": (dry.optimizer, predicted.optimizer),
            "activations, messages, temporary": (
                dry.activations, predicted.activations + predicted.logits + predicted.buffers + predicted.overhead
            ),
            "peak": (report.peak_bytes, predicted.total),
        }  # fmt: skip

    def to_run(self) -> Run:
        """The record of the dry run: bytes of the pipeline ranks that were run, and no time."""
        reports = {report.coordinate[PP]: report for report in sorted(self.reports, key=lambda each: each.peak_bytes)}
        highest = [reports.get(rank) for rank in range(self.layout.pp)]
        measured = Performance(
            peak_memory_bytes=tuple(report.peak_bytes if report else None for report in highest),
            memory=tuple(to_components(report) if report else None for report in highest),
        )
        return Run(
            table="dry runs", row=self.title, scenario=self.scenario, layout=self.layout, outcome="dry",
            kernels=self.estimate.kernels, predicted=to_predicted(self.estimate, self.scenario), measured=measured,
        )  # fmt: skip

    def predicted_curve(self, report: RankReport) -> list[float]:
        """The cost model's bytes in each part of the report's curve; before the first update without the state."""
        stages, rank = cut(self.scenario, self.layout), report.coordinate[PP]
        start, *actions = estimate_curve(
            self.scenario, self.layout, self.estimate.kernels, stages, rank, report.num_microbatches_run
        )
        known = {str(action): (fullest, left) for action, fullest, left in actions}
        missing = self.predicted(report).optimizer if self.num_steps else 0.0
        curve, held = [], start[2]
        for part in report.curve:
            if part.action == UPDATE:
                missing = 0.0
            highest, held = known.get(part.action, (held, held))  # a message adds nothing to speak of
            curve.append(highest - missing)
            if part.action == UPDATE:
                held = start[2]
        return curve


def to_components(report: RankReport) -> MemoryEstimate:
    """A rank's peak in components of the cost model; logits, messages and temporary bytes count as activations."""
    parts, nothing = report.parts, dict.fromkeys((f.name for f in fields(MemoryEstimate)), 0.0)
    held = {"parameters": parts.parameter + parts.gathered, "gradients": parts.gradient, "optimizer": parts.optimizer}
    return MemoryEstimate(**nothing | held | {"activations": parts.activation + parts.communication + parts.other})
