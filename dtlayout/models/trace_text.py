"""Lines for people about a trace: parameters, the operations of each kind of block, and what is not split, and why."""

from dtlayout.base.formatting import plural
from dtlayout.models.choice import TokenChoice
from dtlayout.models.counting import count_active_parameters, count_parameters
from dtlayout.models.description import Description
from dtlayout.models.mixer import Mixer, describe_state
from dtlayout.models.operations import Activation, Elementwise, Linear, Norm, Residual, Rotary, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.scores import describe_scores
from dtlayout.models.traced import Trace
from dtlayout.spec.context_parallel import CONTEXT_METHODS

_NOT = {
    "training": "not trained", "tp": "not split by tp", "sequence_parallel": "no sequence parallelism",
    "cp": "not split by cp", "document_mask": "documents are not kept apart",
    "splits_backward": "no schedule that splits the backward",
    **{name: f"not with layout.cp_method={name}" for name in CONTEXT_METHODS},
}  # fmt: skip
"""Key of `Trace.whole` → words for it."""


def describe_sizes(trace: Trace) -> str:
    """A line on the parameters and the blocks of a traced model, and on the library that built it."""
    shape = trace.shape
    parameters, active = count_parameters(shape), count_active_parameters(shape)
    computing = f", {active:,} of them for a token" if active != parameters else ""
    library = f", by transformers {trace.library}" if trace.config else ""
    return (
        f"{shape.name}: {parameters:,} parameters{computing}, {plural(shape.num_layers, 'block')} of "
        f"{plural(len(trace.kinds), 'kind')}{library}"
    )


def list_operations(described: Description) -> list[tuple[str, str]]:
    """Name and words for each operation of a kind of block, in order."""
    return [_describe(each) for each in described.block]


def list_kinds(trace: Trace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Heading and operations of each kind of block, an operation as a pair of its name and words for it."""
    return [
        (f"kind {number}: {plural(trace.shape.block_kinds.count(number), 'block')}", list_operations(kind))
        for number, kind in enumerate(trace.kinds)
    ]


def list_lacks(trace: Trace) -> list[str]:
    """A reason for each axis that our trainer does not split the model over, and for what else it lacks."""
    return [f"{_NOT.get(axis, axis)}: {reason}" for axis, reason in trace.whole.items()]


def describe_trace(trace: Trace, *more: str) -> list[str]:
    """Lines on all of a trace, with an empty one before each part; `more` of them follow the first."""
    lines = [describe_sizes(trace), *more]
    for heading, rows in list_kinds(trace):
        width = max(len(name) for name, _ in rows)
        lines += ["", heading, *(f"  {name:<{width}}  {what}" for name, what in rows)]
    return [*lines, "", *list_lacks(trace)]


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
