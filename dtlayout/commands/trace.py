"""dtlayout trace: read off a model's own code what it computes, for any decoder that transformers builds."""

import argparse
import json
from pathlib import Path

from dtlayout.base.files import check_own, check_writable, expand
from dtlayout.base.formatting import plural
from dtlayout.models.choice import TokenChoice
from dtlayout.models.counting import count_active_parameters, count_parameters
from dtlayout.models.description import Description
from dtlayout.models.files import read_config, trace_model
from dtlayout.models.mixer import Mixer, describe_state
from dtlayout.models.operations import Activation, Elementwise, Linear, Norm, Residual, Rotary, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.scores import describe_scores
from dtlayout.models.traced import MARK, Trace, read_trace
from dtlayout.spec.context_parallel import CONTEXT_METHODS

EXAMPLE = "dtlayout trace path/to/config.json --output model.json"


_NOT = {
    "training": "not trained", "tp": "not split by tp", "sequence_parallel": "no sequence parallelism",
    "cp": "not split by cp", "document_mask": "documents are not kept apart",
    "splits_backward": "no schedule that splits the backward",
    **{name: f"not with layout.cp_method={name}" for name in CONTEXT_METHODS},
}  # fmt: skip
"""Key of `Trace.whole` → words for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the file to write."""
    parser.add_argument("model", metavar="FOLDER_OR_CONFIG", help="a Hugging Face folder, or its config.json")
    parser.add_argument(
        "--output", metavar="FILE", help="JSON file for the trace, which other commands take as --model; by default it "
        "is kept in the user's cache",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Trace the model, write the file, and print what was found."""
    output = None
    if options.output is not None:
        output = expand(options.output)
        check_writable(output)
        check_own(output, MARK, "a trace")
    path, config = read_config(options.model)
    shape = trace_model(config, path, output)
    trace = read_trace(shape.trace)
    if options.json:
        print(json.dumps({"ok": True, "file": shape.trace, **json.loads(trace.dumps())}, indent=2))
        return 0
    print("\n".join(_list_lines(trace, Path(shape.trace))))
    return 0


def _list_lines(trace: Trace, path: Path) -> list[str]:
    shape = trace.shape
    parameters, active = count_parameters(shape), count_active_parameters(shape)
    computing = f", {active:,} of them for a token" if active != parameters else ""
    lines = [
        f"{shape.name}: {parameters:,} parameters{computing}, {plural(shape.num_layers, 'block')} of "
        f"{plural(len(trace.kinds), 'kind')}, by transformers {trace.library}"
    ]
    for number, described in enumerate(trace.kinds):
        lines += ["", f"kind {number}: {plural(shape.block_kinds.count(number), 'block')}"]
        lines += [f"  {line}" for line in _list_operations(described)]
    lines += ["", *(f"{_NOT[axis]}: {reason}" for axis, reason in trace.whole.items()), f"wrote {path}"]
    return lines


def _list_operations(described: Description) -> list[str]:
    rows = [_describe(each) for each in described.block]
    width = max(len(row[0]) for row in rows)
    return [f"{name:<{width}}  {what}" for name, what in rows]


def _describe(operation: object) -> tuple[str, str]:
    match operation:
        case Norm(module=module, width=size, reads=reads):
            return module, f"norm of {size} elements of {reads}"
        case Linear(module=module, inputs=inputs, outputs=outputs, style=style, reads=reads):
            return module, f"matmul {inputs} × {outputs} of {reads}, tp {style}"
        case Rotary(width=size):
            return "rotary", f"{size} elements are turned"
        case SelfAttention(num_heads=heads, num_kv_heads=kv_heads, head_width=size, window=window, scores=scores):
            seen = f", {window} tokens" if window else ""
            held = describe_scores(scores)
            return "attention", f"{heads} heads, {kv_heads} of keys and values, {size} wide{seen}" + f"; {held}" * bool(
                held
            )
        case TokenChoice(module=module, num_heads=heads, width=size):
            return (
                module,
                f"{plural(heads, 'score')} of each pair of tokens, {size} wide, for the choice of what attention reads",
            )
        case Mixer(makes=name, width=size) as state:
            return name, f"state along the sequence, of {size} elements" + f"; {describe_state(state)}" * any(
                state.kept
            )
        case Activation(module=module, width=size, gated=gated):
            return module, f"{'gated ' if gated else ''}activation of {size} elements"
        case RoutedExperts(module=module, number=number, per_token=per_token, inner_width=size):
            return module, f"{per_token} of {number} experts, {size} wide"
        case Residual(branches=branches):
            return "residual", f"adds {' and '.join(branches)}"
        case Elementwise(reads=reads, width=size):
            return "pass", f"over {size} elements of {reads}"
    raise AssertionError(f"{operation} is no operation")
