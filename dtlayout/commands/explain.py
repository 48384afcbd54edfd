"""dtlayout explain: a layout's memory and time by component, what binds it, and what would make it fit or faster."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isinf
from typing import TypeVar

from dtlayout.base.formatting import align, choose_unit, fold, format_bytes, plural, three_digits
from dtlayout.commands.arguments import CommandAnswer, add_config, show_answer
from dtlayout.commands.beside import BESIDE
from dtlayout.commands.case import add_machines, find_other, read_case
from dtlayout.commands.changes import CHANGES
from dtlayout.commands.engine_options import describe_assumptions, to_assumptions
from dtlayout.commands.lengths import LENGTHS
from dtlayout.commands.measured import MEASURED
from dtlayout.commands.side_question import Asked
from dtlayout.commands.their_file import TheirFile
from dtlayout.costmodel.attention import weigh_scores
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.messages import AxisMessages
from dtlayout.costmodel.scenario import NO_TIME, Scenario
from dtlayout.models.counting import FROZEN_FLOPS, count_active_frozen_parameters
from dtlayout.models.families import describe
from dtlayout.models.mixer import describe_state
from dtlayout.planner.coarse_state import MEANING
from dtlayout.planner.explain import Change, Explanation, explain
from dtlayout.records.intervals import find_intervals
from dtlayout.spec.optimizers import STATE_FORMAT

EXAMPLE = "dtlayout explain configs/debug.toml --gpu cpu --gpus 8"

_QUESTIONS = (MEASURED, LENGTHS, BESIDE, CHANGES)
"""Questions that may be asked beside the layout; their answers follow it in this order."""
_BAR_WIDTH = 60
LINKS = "fast links join the GPUs of a node, or of a rack; the network joins nodes"
"""Sentence on the two kinds of links that messages take."""
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the config, the GPUs and the engine."""
    add_config(parser)
    add_machines(parser)
    for question in _QUESTIONS:
        question.add(parser)


def run(options: argparse.Namespace) -> int:
    """Print the explanation of a legal layout, or refuse it."""
    return show_answer(options, answer(options))


def answer(options: argparse.Namespace) -> CommandAnswer:
    """The explanation of a legal layout, with answers to what is asked beside it."""
    found = find_other(options.config, options)
    case = read_case(options.config, options.overrides, options)
    scenario, explanation = case.scenario, explain(*case)
    if found is not None:  # another kernel is offered where the file's options can say it
        file = TheirFile(found, options.config, options.overrides, options)
        can_take = [
            each for each in explanation.changes
            if each.estimate.kernels == case.kernels
            or file.says_otherwise(case, each.estimate.layout, each.estimate.kernels)
        ]  # fmt: skip
        explanation = replace(explanation, changes=tuple(can_take))
    asked = Asked(options, case, explanation, found)
    document = to_document(scenario, explanation)
    for question in _QUESTIONS:
        document |= question.answer(asked)

    def describe(_: object) -> Iterator[str]:
        yield from describe_layout(scenario, explanation)
        for question in _QUESTIONS:
            yield from question.describe(document)

    return CommandAnswer(document, describe)


def describe_layout(scenario: Scenario, explanation: Explanation) -> list[str]:
    """Lines on a layout: does it fit, how fast it is, memory and time by component, and what would help."""
    now = explanation.estimate
    gpu, engine = scenario.cluster.gpu, scenario.engine
    peak, capacity = format_bytes(now.peak_bytes), format_bytes(now.capacity_bytes)
    state = "calibrated" if engine.is_calibrated else "uncalibrated"
    where = f"pipeline rank {now.busiest_rank}"
    mfu = f"{now.mfu:.1%}" if gpu.has_mfu else "n/a"
    if gpu.has_mfu and count_active_frozen_parameters(scenario.model):
        mfu += f" ({FROZEN_FLOPS})"
    if_fits = "" if now.fits else ", if it did fit"
    speed = scenario.batch.tokens_per_s_per_gpu(now.step_time_s, now.layout.world_size)
    of_step, of_peak = find_intervals(scenario)
    step = f"{now.step_time_s:.3f} s, MFU {mfu}, {three_digits(speed)} tokens/s/GPU{if_fits}"
    step = step if now.knows_time else f"n/a, MFU {mfu}: {NO_TIME}"
    least_s, most_s = of_step.around(now.step_time_s)
    least_bytes, most_bytes = of_peak.around(now.peak_bytes)
    is_open = now.fits_host and least_bytes <= now.capacity_bytes < most_bytes
    verdict = f"{'yes' if now.fits else 'no'}{', if the prediction holds' * is_open}"
    facts = [
        ("layout", f"{now.layout} on {now.layout.world_size} x {gpu.name}"),
        ("engine", f"{engine.name}, {state}"),
        ("fits", f"{verdict}: {peak} of {capacity} on {where}"),
        ("step", step),
        *_describe_offload(explanation),
        *_describe_scores(scenario, now),
        *_describe_states(scenario),
        ("bound by", describe_limit(explanation)),
        *[("ranges", f"step {least_s:.3f} to {most_s:.3f} s, for {of_step.basis}")] * now.knows_time,
        (
            "" if now.knows_time else "ranges",
            f"peak {format_bytes(least_bytes)} to {format_bytes(most_bytes)}, for {of_peak.basis}",
        ),
        *_describe_reserved(explanation),
    ]
    memory, time, changes = _format_memory(now), _format_time(now), _format_changes(explanation)
    changes += [line for hint in _hint_at_disk(scenario, explanation) for line in fold(hint)]
    assumed = describe_assumptions(engine.name, to_assumptions(scenario))
    time += _format_messages(explanation)
    tables = [*memory, "", *time, "", *changes, *_format_fine_tuning(explanation)]
    return [*(line for fact in align(facts, ("<12", "<")) for line in fold(fact, column=14)), *assumed, "", *tables]


def describe_limit(explanation: Explanation) -> str:
    """The component that binds a layout, in memory or in time, and its share."""
    now, limit = explanation.estimate, explanation.limit
    if limit.kind == "memory":
        return f"memory: {limit.component}, {limit.share:.1%} of the peak on pipeline rank {now.busiest_rank}"
    if limit.kind == "host memory":
        return f"memory of the host: what layout.offload={now.layout.offload} asks is {limit.share:.0%} of what it has"
    if limit.component == "host":
        return f"host: the GPUs wait for it, {limit.share:.1%} of the step"
    return f"{limit.component}: {limit.share:.1%} of the step"


def _describe_scores(scenario: Scenario, estimate: Estimate) -> list[tuple[str, str]]:
    """A row on attention whose scores lie in memory; none where a kernel computes them in pieces."""
    kept, most = weigh_scores(scenario, estimate.layout, estimate.kernels)
    if not kept:
        return []
    held = f"{format_bytes(kept)} kept by a block of each microbatch, {format_bytes(most)} at its fullest"
    return [("attention", f"the model's own, with scores in memory: {held}")]


def _describe_reserved(explanation: Explanation) -> list[tuple[str, str]]:
    """A row on what PyTorch's allocator reserves; none where that is not predicted."""
    if explanation.peak_reserved_bytes is None:
        return []
    size = format_bytes(explanation.peak_reserved_bytes)
    return [("reserved", f"at most {size} by PyTorch's allocator, with fragments that it cannot use")]


def _describe_states(scenario: Scenario) -> list[tuple[str, str]]:
    """A row on states along the sequence, of the kind of block that has most; none where there is none."""
    kinds = [describe(kind).mixers for kind, _ in scenario.model.kinds(range(scenario.model.num_layers))]
    most = max((each for mixers in kinds for each in mixers), key=lambda each: sum(each.kept), default=None)
    if most is None:
        return []
    return [(most.module, f"a state along the sequence: {describe_state(most)}; a kernel of its own keeps less")]


def _hint_at_disk(scenario: Scenario, explanation: Explanation) -> list[str]:
    """A line on the disk where no change fits and nobody has said how fast it is."""
    has_disk, gpu = "disk" in scenario.engine.features.offloads, scenario.cluster.gpu
    if explanation.estimate.fits or explanation.changes or not has_disk or gpu.disk_bytes_per_s:
        return []
    return [f"layout.offload=disk is not tried: no disk_bandwidth is known of {gpu.name}; give one in a cluster file"]


def _describe_offload(explanation: Explanation) -> list[tuple[str, str]]:
    """A row on the bytes that lie on the host, and on the time of copies; none without offload."""
    now = explanation.estimate
    if not now.host_bytes:
        return []
    capacity = "" if isinf(now.host_capacity_bytes) else f" of {format_bytes(now.host_capacity_bytes)}"
    copies = f"copies take {explanation.copied_s:.3f} s of a step, of which {explanation.waited_s:.3f} s are waited for"
    if not now.knows_time:
        shares = (f"{seconds / now.step_time_s:.1%}" for seconds in (explanation.copied_s, explanation.waited_s))
        copies = "copies take {} of a step, and {} of it are waited for".format(*shares)
    rows = [("on the host", f"{format_bytes(max(now.host_bytes))}{capacity} a GPU; {copies}")]
    if now.disk_bytes:
        busy = f"{explanation.on_disk_s:.3f} s" if now.knows_time else f"{explanation.on_disk_s / now.step_time_s:.1%}"
        rows.append(("on its disk", f"{format_bytes(max(now.disk_bytes))} a GPU, read and written {busy} of a step"))
    return rows


def _format_memory(estimate: Estimate) -> list[str]:
    names = list(estimate.memory[0].as_dict())
    unit, size = choose_unit(estimate.peak_bytes)
    header = ["memory, " + unit, *names, "total"]
    rows = [
        [f"rank {rank}", *(f"{value / size:.2f}" for value in (*memory.as_dict().values(), memory.total))]
        for rank, memory in enumerate(estimate.memory)
    ]
    fullest = estimate.busiest_rank
    return [*align([header, *rows]), "", f"rank {fullest}  {_draw_bar(estimate)}"]


def _draw_bar(estimate: Estimate) -> str:
    """A bar of the fullest rank's components, by their first letters; `|` stands at the capacity."""
    memory = estimate.memory[estimate.busiest_rank]
    scale = _BAR_WIDTH / max(memory.total, estimate.capacity_bytes)
    bar, end_bytes = "", 0.0
    for name, size in memory.as_dict().items():
        end_bytes += size
        bar += name[0] * (round(end_bytes * scale) - len(bar))
    end = round(estimate.capacity_bytes * scale)
    bar = bar.ljust(end, ".")
    share = memory.total / estimate.capacity_bytes
    return f"{bar[:end]}|{bar[end:]} {share:.0%} of {format_bytes(estimate.capacity_bytes)}"


def _format_time(estimate: Estimate) -> list[str]:
    parts = {**estimate.time.as_dict(), "total": estimate.step_time_s}
    rows = [
        [name, *[f"{seconds:.4f}"] * estimate.knows_time, f"{seconds / estimate.step_time_s:.1%}"]
        for name, seconds in parts.items()
    ]
    return align([["step", *["seconds"] * estimate.knows_time, "share"], *rows])


def _format_messages(explanation: Explanation) -> list[str]:
    """A table of what the rank of the step sends along each axis, and a sentence on its links; none for one rank."""
    rank, now = explanation.step_rank, explanation.estimate
    if not (messages := explanation.messages[rank]):
        return []
    seconds = ["seconds to send", "waited for"] * now.knows_time
    head = [f"sent by rank {rank}", "GB by fast links", "GB by network", *seconds, "hidden"]
    rows = [
        [each.axis, *(f"{sent / 1e9:.3f}" for sent in each[1:3]),
         *[f"{each.sending_s:.4f}", f"{each.waited_s:.4f}"] * now.knows_time, f"{each.hidden_share:.0%}"]
        for each in messages
    ]  # fmt: skip
    return ["", *align([head, *rows]), *fold(LINKS)]


def _format_changes(explanation: Explanation) -> list[str]:
    now, growth = explanation.estimate, explanation.growth
    if explanation.changes:
        rows = align([["change", "step, s", "", "peak"], *(_row(c, now) for c in explanation.changes)])
        notes = {" ".join(c.overrides): MEANING for c in explanation.changes if c.knob == STATE_FORMAT}
        return [*rows, *(line for item in notes.items() for line in fold(" ".join(item)))]
    if now.fits:
        return ["no single change is predicted to be faster"]
    if explanation.limit.kind == "host memory":
        return ["no single change fits; layout.offload=none takes nothing of the host"]
    component = explanation.limit.component
    size = format_bytes(now.memory[now.busiest_rank].as_dict()[component], 1)
    lines = [f"no single change fits; the largest component is {component}, {size}"]
    if growth is None:
        lines.append("no number of GPUs that was tried fits either; take a smaller micro-batch, sequence or model")
        return [piece for line in lines for piece in fold(line)]
    text = f"{plural(growth.estimate.layout.world_size, 'GPU')} would do, as {growth.estimate.layout}:"
    return [*lines, text, *align([["change", "step, s", "", "peak"], _row(growth, now)])]


def _format_fine_tuning(explanation: Explanation) -> list[str]:
    """Lines on fine-tuning with which the layout fits, last of all: it trains other weights; none without one."""
    if (change := explanation.fine_tuning) is None:
        return []
    title = "to fine-tune, a frozen model with an adapter fits:"
    return ["", title, *align([["change", "step, s", "", "peak"], _row(change, explanation.estimate)])]


def _row(change: Change, now: Estimate) -> list[str]:
    after = change.estimate
    gain = 1 - after.step_time_s / now.step_time_s
    speed = f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    step = f"{after.step_time_s:.3f}" if after.knows_time else "n/a"
    return [" ".join(change.overrides), step, speed, format_bytes(after.peak_bytes)]


def to_document(scenario: Scenario, explanation: Explanation) -> dict[str, object]:
    """The document that `--json` prints."""
    now, gpu, growth = explanation.estimate, scenario.cluster.gpu, explanation.growth
    intervals = find_intervals(scenario)

    def said(value: T) -> T | None:
        """The value, which is computed from seconds; None if no seconds are known."""
        return value if now.knows_time else None

    def list_numbers(estimate: Estimate) -> dict[str, object]:
        return {
            "gpus": estimate.layout.world_size, "layout": asdict(estimate.layout), "kernels": asdict(estimate.kernels),
            "fits": estimate.fits, "step_time_s": said(estimate.step_time_s),
            "mfu": estimate.mfu if gpu.has_mfu else None,
            "tokens_per_s_per_gpu": said(
                scenario.batch.tokens_per_s_per_gpu(estimate.step_time_s, estimate.layout.world_size)
            ),
            "peak_memory_bytes": estimate.peak_bytes,
        }  # fmt: skip

    def describe(change: Change) -> dict[str, object]:
        after, what = change.estimate, {"knob": change.knob, "overrides": list(change.overrides)}
        saved = {"saved_s": said(now.step_time_s - after.step_time_s), "saved_bytes": now.peak_bytes - after.peak_bytes}
        return {**what, **list_numbers(after), **saved}

    def show_messages(messages: AxisMessages) -> dict[str, object]:
        seconds = {"sending_s": said(messages.sending_s), "waited_s": said(messages.waited_s)}
        return {**messages._asdict(), **seconds, "hidden_share": messages.hidden_share}

    return {
        "ok": True, "gpu": gpu.name, "engine": scenario.engine.name, "calibrated": scenario.engine.is_calibrated,
        **list_numbers(now),
        "step_time_range_s": said(intervals.step_time.around(now.step_time_s)),
        "peak_memory_range_bytes": intervals.peak_memory.around(now.peak_bytes),
        "intervals": intervals.to_dict(), "assumptions": to_assumptions(scenario),
        "memory_bytes": [{**memory.as_dict(), "total": memory.total} for memory in now.memory],
        "peak_reserved_bytes": explanation.peak_reserved_bytes, "host_memory_bytes": list(now.host_bytes),
        "disk_bytes": list(now.disk_bytes), "on_disk_s": said(explanation.on_disk_s),
        "copied_s": said(explanation.copied_s), "waited_s": said(explanation.waited_s),
        "capacity_bytes": now.capacity_bytes, "time_s": said(now.time.as_dict()), "step_rank": explanation.step_rank,
        "messages": [[show_messages(each) for each in of_rank] for of_rank in explanation.messages],
        "limit": asdict(explanation.limit),
        "changes": [describe(change) for change in explanation.changes],
        "growth": None if growth is None else describe(growth),
        "fine_tuning": None if explanation.fine_tuning is None else describe(explanation.fine_tuning),
    }  # fmt: skip
