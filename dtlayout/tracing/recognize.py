"""Recognition: from the calls that a block made to the operations of its description.

Values flow from call to call. Each is followed back to the operations that it comes from, through views and passes over
its elements, until a matmul, a norm, attention or the residual stream. From what a matmul reads, and who reads its
result, follows how tp splits it: what opens a branch is split by outputs, what closes it by inputs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.choice import TokenChoice
from dtlayout.models.description import Operation
from dtlayout.models.mixer import Mixer
from dtlayout.models.operations import (
    ATTENDED,
    Activation,
    Branch,
    Elementwise,
    Linear,
    Norm,
    Residual,
    Rotary,
    SelfAttention,
)
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.tape import HIDDEN
from dtlayout.tracing.gradients import find_differentiated
from dtlayout.tracing.kept import count_kept, count_moved, name_kept
from dtlayout.tracing.norms import find_rms_eps
from dtlayout.tracing.pieces import Range, find_pieces, find_range
from dtlayout.tracing.record import ATTENTION_FUNCTION, EXPERTS, BlockRecord, Call

_VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "getitem",
    "split", "chunk", "unflatten", "flatten", "t", "unbind", "narrow", "select", "to", "type_as", "float", "type",
    "detach", "dropout", "clone", "tensor_split", "split_with_sizes", "repeat_interleave", "swapaxes", "movedim",
    "view_as", "get", "reshape_as", "stack", "cat", "repeat",
}  # fmt: skip
"""Functions whose results hold elements of their inputs. Copies among them cost a pass that is left out."""
_NORMS = {"rsqrt", "layer_norm", "rms_norm"}
_MEAN_SQUARE = {"pow", "mean"}
"""Functions of an RMSNorm without rsqrt."""
_SUMS = {"add", "iadd", "radd"}
_MIXING = {"conv1d", "cumsum", "pad", "roll", "flip"}
"""Functions by which tokens read others; a module with a state calls one at least."""
_CONSTANTS = {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like"}
"""Functions that read the shape of a tensor, and none of its elements."""
_WRITES = {"setitem", "copy"}
"""Functions that write elements into a part of a tensor."""
_MATMULS = {"matmul", "bmm", "baddbmm", "mm", "einsum", "rmatmul"}


class Value(NamedTuple):
    """Origin of a tensor."""

    sources: tuple[str, ...]
    """Names of the results that it is computed from."""
    passes: int = 0
    """Passes over its elements since these."""
    rotated: tuple[int, int] = (0, 0)
    """Heads and width of what was multiplied by a table of positions; zeros where nothing was."""
    is_scores: bool = False
    """True if it is a matmul of queries and keys, and has a row for each token."""
    of_scores: tuple["Value", ...] = ()
    """Queries and keys of such scores."""
    mixer: str = ""
    """Module whose state along the sequence made it; empty where no module did."""


class _Branches(NamedTuple):
    """The operations of a block, why tp cannot split it, and why sequence parallelism cannot."""

    operations: tuple[Operation, ...]
    problems: tuple[str, ...]
    sequence_problems: tuple[str, ...]


def recognize(record: BlockRecord, block: nn.Module) -> _Branches:
    """The operations of a block, with a reason for each thing that tp cannot split; InvalidConfig where a parameter is
    used in a way that nobody knows.

    A matrix that holds gate and up, or queries, keys and values, becomes an operation for each of them. A module with a
    state along the sequence is found by parameters that neither a matmul nor a norm reads.
    """
    mixers = list[str]()
    while True:
        reader = _Reader(record, block, mixers=mixers)
        try:
            operations = reader.read()
            break
        except _UnknownUse as error:
            attending = [call.module for call in record.calls if call.function == ATTENTION_FUNCTION]
            owner = find_mixer(error.parameter, attending)
            inside = {call.function for call in record.calls if f"{call.module}.".startswith(f"{owner}.")}
            if not owner or owner in mixers or not inside & _MIXING:
                raise
            mixers.append(owner)
    if reader.joined:
        reader = _Reader(record, block, reader.joined, mixers)
        operations = reader.read()
    return _Branches(operations, tuple(dict.fromkeys(reader.problems)), tuple(reader.sequence_problems))


class _UnknownUse(InvalidConfig):
    """A parameter is used in a way that nobody knows."""

    def __init__(self, parameter: str, problem: str):
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter


def find_mixer(parameter: str, attending: Collection[str]) -> str:
    """The outermost module of a block that has a parameter and in which no module attends; empty if there is none.

    >>> find_mixer("mamba.conv1d.weight", ["self_attn"]), find_mixer("self_attn.conv.weight", ["self_attn"])
    ('mamba', 'self_attn.conv')
    """
    parts = parameter.split(".")[:-1]
    owners = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((each for each in owners if not any(f"{name}.".startswith(f"{each}.") for name in attending)), "")


class _Reader:
    def __init__(
        self,
        record: BlockRecord,
        block: nn.Module,
        cut: Mapping[str, Sequence[Range]] = MappingProxyType({}),
        mixers: Sequence[str] = (),
    ):
        self.record, self.block, self.cut, self.mixers = record, block, cut, mixers
        self.joined = dict[str, Sequence[Range]]()
        """Matmul → its pieces, of those that an operation for each piece would let tp split."""
        self.parameters = dict(record.parameters)
        self.differentiated = find_differentiated(record)
        self.values: dict[int, Value] = {record.enters: Value((HIDDEN,))}
        self.operations: list[Operation] = []
        self.linears: dict[str, Linear] = {}
        self.results: dict[str, int] = {}
        """Matmul → the tensor that it made."""
        self.constants = set[int]()
        """Tensors whose elements come from no other tensor."""
        self.reads_stream = ""
        """The norm that was the first to read the residual stream as it is now."""
        self.consumers: dict[str, set[str]] = {}
        """Result → words for those that read it: attention, activation, stream, linear."""
        self.problems: list[str] = []
        self.sequence_problems: list[str] = []
        self.used: set[str] = set()
        self.hidden_size = record.shapes[record.enters][-1]
        by_module: dict[str, set[str]] = {}
        for call in record.calls:
            by_module.setdefault(call.module, set()).add(call.function)
        self.norms = {
            name
            for name, functions in by_module.items()
            if (functions & _NORMS or functions >= _MEAN_SQUARE)
            and not list(block.get_submodule(name).children())
            and name
        }

    def read(self) -> tuple[Operation, ...]:
        calls, place = self.record.calls, 0
        while place < len(calls):
            call = calls[place]
            end = place + 1
            if call.module in self.norms:
                while end < len(calls) and (calls[end].module, calls[end].visit) == (call.module, call.visit):
                    end += 1
                self._read_norm(calls[place:end])
            else:
                self._read_call(call)
            place = end
        left = self.values.get(self.record.leaves)
        if left is None or not {HIDDEN, *self._list_stream_norms()}.intersection(left.sources):
            raise InvalidConfig("its blocks do not add to the hidden states that they read")
        self._add_rest()
        return tuple(self._place(each) for each in self.operations)

    # Calls

    def _read_call(self, call: Call) -> None:
        if call.function in _CONSTANTS:
            self.constants.update(call.makes)
            return
        if call.function in _WRITES and len(call.reads) > 1:
            self._write(call)
            return
        if call.function == "linear":
            self._read_linear(call, call.reads[0], call.reads[1], call.reads[2:])
        elif call.function == "addmm":
            self._read_linear(call, call.reads[1], call.reads[2], call.reads[:1], is_transposed=True)
        elif call.function in _NORMS & {"layer_norm", "rms_norm"}:
            self._read_norm([call])
        elif call.function == EXPERTS:
            self._read_experts(call)
        elif call.function == ATTENTION_FUNCTION:
            queries, keys, values = (self.values.get(each, Value(())) for each in call.reads[:3])
            self._attend(call, queries, keys, values, call.reads[:3])
        else:
            self._read_other(call)

    def _read_other(self, call: Call) -> None:
        if call.function in _VIEWS and len(call.reads) == 1 and call.reads[0] in self.parameters:
            self.parameters |= dict.fromkeys(call.makes, self.parameters[call.reads[0]])
            return
        parameters = [self.parameters[each] for each in call.reads if each in self.parameters]
        known = [self.values[each] for each in call.reads if each in self.values]
        if call.function in _MATMULS and len(call.reads) == 2 and call.reads[1] in self.parameters:
            self._read_linear(call, call.reads[0], call.reads[1], ())
            if not isinstance(self.block.get_submodule(parameters[0].rpartition(".")[0]), nn.Linear):
                self.problems.append(f"{parameters[0]} is multiplied without a module of its own")
            return
        if owner := self._find_owner(call.module):
            if len(known) == 1 and call.function in _VIEWS:
                self.values |= dict.fromkeys(call.makes, known[0])
            elif made := self._join_values(call, owner):
                self.values |= dict.fromkeys(call.makes, made)
            return
        if matrices := [each for each in parameters if self.block.get_parameter(each).dim() > 1]:
            raise _UnknownUse(matrices[0], f"is read by {call.function}, which no plan knows")
        if not known:
            return
        if call.function in _MATMULS and len(known) == 2:
            self._multiply(call, *known)
            return
        if call.function in _SUMS and len(known) == 2 and (streams := self._find_streams(known)):
            self._add(call, known[known.index(streams[0]) - 1], streams[0])
            return
        sources = tuple(dict.fromkeys(name for each in known for name in each.sources))
        passes = max(each.passes for each in known) + (call.function not in _VIEWS)
        rotated = max(each.rotated for each in known)
        tables = [each for each in call.reads if each not in self.values and each not in self.parameters]
        if call.function in ("mul", "rmul", "view_as_complex") and tables and not rotated[0]:
            rotated = self._count_heads(call.makes[0])
        scores = next((each for each in known if each.is_scores), None)
        mixer = next((each.mixer for each in known if each.mixer), "")
        made = Value(sources, passes, rotated, scores is not None, scores.of_scores if scores else (), mixer)
        for each in call.makes:
            self.values[each] = self._find_piece(each, sources) or made

    # States

    def _find_owner(self, module: str) -> str:
        """The module with a state that another one lies in; empty if in none."""
        return next((each for each in self.mixers if f"{module}.".startswith(f"{each}.")), "")

    def _join_values(self, call: Call, mixer: str) -> Value | None:
        """A value that a state makes of all that a call reads; None where nothing of it comes from hidden states."""
        known = [self.values[each] for each in call.reads if each in self.values]
        if not known:
            return None
        sources = tuple(dict.fromkeys(name for each in known for name in each.sources))
        return Value(sources, max(each.passes for each in known) + 1, mixer=mixer)

    def _mix(self, value: Value, width: int) -> str:
        """The tensor of a tape that a state has made; the state becomes an operation, with all parameters of its module
        that no matmul and no norm reads."""
        number = sum(isinstance(each, Mixer) and each.module == value.mixer for each in self.operations)
        made = f"{value.mixer}.mixed" + f"{number}" * bool(number)
        rest = () if number else self._list_unread(value.mixer)
        widths = {each.module: each.width for each in self.operations if isinstance(each, Norm)}
        widths |= {each.makes: each.width for each in self.operations if isinstance(each, Mixer)}
        widths |= {name: each.outputs for name, each in self.linears.items()}
        reads = tuple((name, widths.get(name, self.hidden_size)) for name in value.sources)
        self.operations.append(Mixer(value.mixer, made, reads, width, rest))
        self.used.update(name for name, _ in rest)
        for name in value.sources:
            self.consumers.setdefault(name, set()).add("state")
        return made

    def _list_unread(self, module: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of a module's parameters that neither a linear layer nor a norm has."""
        own = {f"{module}.{name}": each for name, each in self.block.get_submodule(module).named_parameters()}
        multiplying = {call.module for call in self.record.calls if call.function == "linear"}
        return tuple(
            (name, tuple(each.shape))
            for name, each in own.items()
            if name.rpartition(".")[0] not in self.norms and name.rpartition(".")[0] not in multiplying
        )

    def _write(self, call: Call) -> None:
        """A part of a tensor is written: what lies in the same memory comes from what is written, too."""
        written, owner = call.reads[0], self._find_owner(call.module)
        memory = self.record.places[written].memory
        same = [each for each in (*self.values, *self.constants) if self.record.places[each].memory == memory]
        known = [self.values[each] for each in (*same, *call.reads[1:]) if each in self.values]
        if not known:
            return
        sources = tuple(dict.fromkeys(name for each in known for name in each.sources))
        passes, rotated = max(each.passes for each in known), max(each.rotated for each in known)
        mixer = owner or next((each.mixer for each in known if each.mixer), "")
        made = Value(sources, passes + bool(owner), rotated, mixer=mixer)
        self.values |= dict.fromkeys((*same, written, *call.makes), made)
        self.constants.difference_update(same)

    def _find_piece(self, tensor: int, sources: Sequence[str]) -> Value | None:
        """A view of one piece of a matmul that is cut; None for other tensors."""
        for module, pieces in self.cut.items():
            names = [f"{module}.{number}" for number in range(len(pieces))]
            shown = find_range(self.record, tensor, self.results[names[0]]) if {*sources} == {*names} else None
            for name, piece in zip(names, pieces, strict=True):
                if shown and piece.holds(shown):
                    return Value((name,))
        return None

    def _count_width(self, tensor: int | None) -> int:
        """Elements of a token of a tensor; those of the stream where there is none."""
        return self.hidden_size if tensor is None else self.record.count(tensor) // self.record.num_tokens

    def _count_heads(self, tensor: int) -> tuple[int, int]:
        """Heads and width of a tensor with a width for each head of each token."""
        shape = self.record.shapes[tensor]
        return math.prod(shape) // self.record.num_tokens // shape[-1], shape[-1]

    def _read_norm(self, calls: Sequence[Call]) -> None:
        parameters = [self.parameters[each] for call in calls for each in call.reads if each in self.parameters]
        entered = next(each for call in calls for each in call.reads if each in self.values)
        value, (heads, size) = self.values[entered], self._count_heads(entered)
        width = heads * size
        module = calls[0].module if not parameters else parameters[0].rpartition(".")[0]
        if any(self.block.get_parameter(each).dim() != 1 for each in parameters):
            raise InvalidConfig(f"{parameters[0]} is a norm's, and no vector")
        if not parameters and calls[0].module not in self.norms:  # a function, which no module names
            module = f"{module}.norm_{len(self.operations)}".lstrip(".")
        vectors = {*self.parameters}
        for call in calls:
            vectors.update(call.makes if call.function in _VIEWS and vectors.issuperset(call.reads) else ())
        adds_one = any(call.function in _SUMS and len(call.reads) == 1 and call.reads[0] in vectors for call in calls)
        own = tuple(name for name in ("weight", "bias") if f"{module}.{name}" in parameters)
        is_of_heads = value.rotated[0] > 0  # after the rotary embedding, which is a step of its own
        reads = value.sources[0] if is_of_heads else self._name_read(value, width, module, is_norm=True)
        number = sum(isinstance(each, Norm) and each.module.partition("#")[0] == module for each in self.operations)
        if number:  # called again, on something else, with the same weights
            module, own = f"{module}#{number + 1}", ()
        keeps = name_kept(calls, self.record, entered)
        norm = Norm(
            module, width, heads if heads > 1 else 0, reads,
            trains=calls[-1].makes[0] in self.differentiated,
            parameters=own,  # type: ignore[arg-type]
            initial="zeros" if adds_one else "ones",
            keeps=keeps,  # type: ignore[arg-type]
            moves=count_moved(calls, self.record, entered),
        )  # fmt: skip
        if norm.reads == HIDDEN:
            norm = replace(norm, beside=self.reads_stream)
            self.reads_stream = self.reads_stream or module
        if norm.reads == ATTENDED or norm.reads.endswith(".active"):
            norm = self._spread(norm)
        self.operations.append(norm)
        self.used.update(parameters)
        self.values[calls[-1].makes[0]] = Value((module,), rotated=value.rotated)

    def _read_linear(
        self, call: Call, entered: int, weight: int, bias: Sequence[int], *, is_transposed: bool = False
    ) -> None:
        if entered in self.constants:  # such as the zeros before a first token, which cost a token nothing
            return
        if entered not in self.values:
            raise InvalidConfig(f"{call.module} multiplies what does not come from hidden states")
        name = self.parameters.get(weight)
        if name is None:
            raise InvalidConfig(f"{call.module} multiplies by what is no parameter of its block")
        if not name.endswith(".weight"):
            raise _UnknownUse(name, "is multiplied by, and is no linear layer's")
        module, inputs = name.removesuffix(".weight"), self.record.shapes[entered][-1]
        outputs = self.record.shapes[call.makes[0]][-1]
        owner = self.block.get_submodule(module)
        has_own = isinstance(owner, nn.Linear) and owner.bias is not None  # which its code may add by itself
        has_bias = has_own or any(each in self.parameters for each in bias)
        reads = self._name_read(self.values[entered], inputs, module, entered)
        trains = weight in self.differentiated
        linear = Linear(module, reads, inputs, outputs, "replicated", bias=has_bias, trains=trains)
        joined = replace(linear, part_of=module, rows=outputs, is_transposed=is_transposed)
        is_odd = is_transposed or (isinstance(owner, nn.Linear) and type(owner) is not nn.Linear)
        made = [joined if is_odd else linear]
        if module in self.cut:
            made = [
                replace(joined, module=f"{module}.{number}", outputs=piece.width, first=piece.first)
                for number, piece in enumerate(self.cut[module])
            ]
        for each in made:
            self.linears[each.module], self.results[each.module] = each, call.makes[0]
        self.operations += made
        self.consumers.setdefault(reads, set()).add("linear")
        self.used.update(f"{module}.{key}" for key in ("weight", "bias")[: 1 + has_bias])
        self.values[call.makes[0]] = Value(tuple(each.module for each in made))

    def _name_read(
        self, value: Value, width: int, reader: str, entered: int | None = None, *, is_norm: bool = False
    ) -> str:
        """The tensor of a tape that an operation reads; the passes that make it, as `entered`, become operations."""
        if value.mixer:
            return self._mix(value, width)
        opened = [name for name in value.sources if name in self.linears]
        if not value.passes and value.sources == (HIDDEN,) and not is_norm:
            branch = Branch(reader.rpartition(".")[0], self.hidden_size)
            self.operations += [branch] * (branch not in self.operations)
            return branch.name
        if not value.passes and len(value.sources) == 1:
            return value.sources[0]
        if opened and len(opened) == len(value.sources):
            return self._activate(opened, width, entered)
        made = f"{reader}.read"
        self.operations.append(Elementwise(value.sources[0], made, width, saves=len(value.sources) > 1))
        for name in value.sources:
            self.consumers.setdefault(name, set()).add("pass")
        return made

    def _activate(self, opened: Sequence[str], width: int, entered: int | None) -> str:
        module = opened[0].rpartition(".")[0]
        total = sum(self.linears[name].outputs for name in opened)
        usual = [[f"{module}.gate_proj", f"{module}.up_proj"], [f"{module}.up_proj"]]
        is_gated = total == 2 * width
        if total not in (width, 2 * width):
            self.problems.append(f"{', '.join(opened)} make {total} elements of which {width} go on")
        if is_gated and len(opened) == 1 and not self._join(opened[0]):
            self.problems.append(f"{opened[0]} holds gate and up in one matrix")
        names = () if [*opened] in usual and len(opened) == 1 + is_gated else tuple(opened)
        own, keeps_opened, moves = 0, True, (0, 0)
        if entered is not None:
            own, keeps_opened, moves = count_kept(
                self.record.calls, self.record, {self.results[name] for name in opened}, entered
            )
        self.operations.append(Activation(module, width, is_gated, names, own, keeps_opened, moves))
        for name in opened:
            self.consumers.setdefault(name, set()).add("activation")
        return f"{module}.active"

    def _read_experts(self, call: Call) -> None:
        """Stacks of matrices, of which the router before them chooses some for each token."""
        shapes = {
            name: tuple(each.shape)
            for name, each in self.block.get_submodule(call.module).named_parameters(recurse=False)
        }
        stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3}
        number, width = next(iter(stacks.values()))[0], self.hidden_size
        closing = next((shape for name, shape in stacks.items() if "down" in name), None)
        if closing is None or any(shape[0] != number for shape in shapes.values()):
            raise InvalidConfig(f"{call.module} has stacks of experts that nobody knows: {', '.join(shapes)}")
        inner = math.prod(closing) // number // width
        opening = sum(math.prod(shape) for name, shape in stacks.items() if "down" not in name) // number // width
        per_token = self._count_chosen(call)
        others = [*call.reads[1:], call.reads[0]]  # code may multiply tokens by their scores before
        scores = [name for each in others for name in self.values.get(each, Value(())).sources]
        router = next((name for name in scores if name in self.linears), "")
        if not (per_token and router and opening in (inner, 2 * inner)):
            raise InvalidConfig(f"{call.module} has no router whose top-k says how many experts compute a token")
        reads = self._name_read(self.values[call.reads[0]], width, call.module)
        has_bias = len(shapes) > len(stacks)
        self.operations.append(
            RoutedExperts(call.module, reads, router, number, per_token, width, inner, opening == 2 * inner, has_bias)
        )
        self.used.update(f"{call.module}.{name}" for name in shapes)
        self.values[call.makes[0]] = Value((call.module,))

    def _count_chosen(self, call: Call) -> int:
        """Experts that compute a token: as many as it is given numbers of, or the last top-k before it has.

        Other top-k may choose groups of experts, or tokens for attention.
        """
        numbers = [each for each in call.reads[1:] if each in self.record.whole_numbers]
        if numbers:
            return self._count_width(numbers[0])
        before = self.record.calls[: self.record.calls.index(call)]
        return next((each.numbers[0] for each in reversed(before) if each.function == "topk" and each.numbers), 0)

    def _multiply(self, call: Call, first: Value, second: Value) -> None:
        """A matmul of two values: of queries and keys, or of scores and values."""
        if first.is_scores and not second.is_scores:
            queries, keys = first.of_scores
            self._attend(call, queries, keys, second, ())
            return
        self._choose(call)
        for each in call.makes:
            self.values[each] = Value(
                tuple(dict.fromkeys(first.sources + second.sources)), 1, max(first.rotated, second.rotated), True,
                (first, second),
            )  # fmt: skip

    def _choose(self, call: Call) -> None:
        """A product for each pair of tokens that has no gradient chooses tokens."""
        made, seq_len = call.makes[0], self.record.shapes[self.record.enters][-2]
        if made not in self.differentiated and self.record.shapes[made][-1] == seq_len:
            num_heads, width = self._count_heads(made)[0], self.record.shapes[call.reads[0]][-1]
            self.operations.append(TokenChoice(call.module, num_heads, width, self.record.is_exact(made)))

    def _attend(self, call: Call, queries: Value, keys: Value, values: Value, tensors: Sequence[int]) -> None:
        asked = self.record.attention.get(call.makes[0], {})
        queries, keys, values = (
            Value((self._mix(each, self._count_width(tensor)),), rotated=each.rotated) if each.mixer else each
            for each, tensor in zip_longest((queries, keys, values), tensors)
        )
        if any(not each.sources for each in (queries, keys, values)):
            raise InvalidConfig(f"attention of {call.module} reads what does not come from hidden states")
        made, num_heads, head_width = self._measure(call, queries, tensors)
        kv_width = self._width_of(keys)
        num_kv_heads = max(1, kv_width // head_width) if kv_width % head_width == 0 else num_heads
        roots = self._find_roots(queries, keys, values)
        copied = 0
        if tensors and roots[1] in (roots[0], roots[2]):  # a matrix with more than keys
            seen = num_kv_heads = self._count_heads(tensors[1])[0]
            if roots[0] == roots[2] and roots[0] in self.linears:
                num_kv_heads = self._count_kv_heads(self.linears[roots[0]].outputs // head_width, num_heads, seen)
            copied = (seen - num_kv_heads) * (head_width + made)
        is_latent = roots[1] == roots[2] and roots[0] != roots[1] and len(keys.sources) > 1
        if is_latent:
            num_kv_heads = num_heads
        self._mark(queries, keys, values, roots, is_grouped=num_kv_heads > 1)
        heads, rotated = queries.rotated
        if rotated:
            shared = keys.rotated[1] if is_latent and keys.rotated[0] == 1 else 0
            self.operations.append(Rotary(heads * rotated, shared, num_heads if shared else 0))
        window, sinks = asked.get("window") or 0, "self_attn.sinks"
        has_sinks = bool(asked.get("sinks")) and dict(self.block.named_parameters()).keys() >= {sinks}
        self.used.update([sinks] * has_sinks)
        plain = not values.passes and len(values.sources) == 1 and roots[2] in self.linears
        num_kv_heads = min(num_kv_heads, num_heads)
        widths = (num_heads * head_width, num_kv_heads * head_width, num_kv_heads * made)
        shown = [
            width for each, root, width in zip((queries, keys, values), roots, widths, strict=True)
            if not each.passes and self._name_matrix(root) == self._name_matrix(roots[2])
        ]  # fmt: skip
        total = max(self.linears[roots[2]].outputs, self.linears[roots[2]].rows) if plain else 0
        held = max(0, total - sum(shown))
        held += num_heads * made * bool(asked.get("copies")) + copied
        self.operations.append(
            SelfAttention(
                num_heads, num_kv_heads, head_width, made, window,
                values=roots[2] if plain else "", sinks=has_sinks, held=held, windowed_share=float(window > 0),
            )
        )  # fmt: skip
        for each in call.makes:
            self.values[each] = Value((ATTENDED,))

    def _name_matrix(self, root: str) -> str:
        """The module whose matrix a matmul has, or has a piece of."""
        return (root in self.linears and self.linears[root].part_of) or root

    def _count_kv_heads(self, total: int, num_heads: int, seen: int) -> int:
        """Heads of keys, of a matrix that makes `total` heads; attention may see a copy for each query head."""
        own = (total - num_heads) // 2
        return own if total == num_heads + 2 * own and own and seen % own == 0 else seen

    def _measure(self, call: Call, queries: Value, tensors: Sequence[int]) -> tuple[int, int, int]:
        """Width of a head's values, number of heads, width of a head's queries."""
        value_width = self.record.shapes[call.makes[0]][-1]
        if tensors:
            heads, width = self._count_heads(tensors[0])
            return value_width, heads, width
        heads = math.prod(self.record.shapes[call.makes[0]]) // self.record.num_tokens // value_width
        return value_width, heads, value_width

    def _root(self, value: Value) -> str:
        """The matmul that a value comes from, through the norms of heads."""
        norms = {each.module: each for each in self.operations if isinstance(each, Norm)}
        name = value.sources[0]
        while name in norms and norms[name].reads != HIDDEN:
            name = norms[name].reads
        return name

    def _find_roots(self, queries: Value, keys: Value, values: Value) -> list[str]:
        """The matmuls of queries, keys and values; of keys with several, the one that makes values too."""
        query, value = (self._root(each) for each in (queries, values))
        return [query, value if value in keys.sources and len(keys.sources) > 1 else self._root(keys), value]

    def _width_of(self, value: Value) -> int:
        root = self._root(value)
        mixed = {each.makes: each.width for each in self.operations if isinstance(each, Mixer)}
        if root in mixed:
            return mixed[root]
        return self.linears[root].outputs if root in self.linears else self.hidden_size

    def _mark(self, queries: Value, keys: Value, values: Value, roots: Sequence[str], *, is_grouped: bool) -> None:
        for value in (queries, keys, values):
            for name in value.sources:
                self.consumers.setdefault(name, set()).add("attention")
        for root in roots:
            self.consumers.setdefault(root, set()).add("attention")
        norms = [
            each for each in self.operations
            if isinstance(each, Norm) and each.reads in roots and "linear" not in self.consumers.get(each.module, ())
        ]  # fmt: skip
        for norm in norms:  # of heads: they come after all projections, in whatever order the module calls them
            self.operations.remove(norm)
            self.operations.append(norm if norm.is_of_heads else self._spread(norm))
        if len(set(roots)) == 3:
            for root, local, fuses in zip(roots, (True, True, False), (False, True, True), strict=True):
                if root in self.linears:
                    self._replace(self.linears[root], replace(self.linears[root], is_local=local, fuses=fuses))
        for root in dict.fromkeys(roots):
            if is_grouped and roots.count(root) > 1 and root in self.linears:
                self._join(root)

    def _join(self, module: str) -> bool:
        """Note that a matrix holds what several matrices usually do; False if its result is not cut into pieces."""
        if pieces := find_pieces(self.record, self.results[module]):
            self.joined[module] = pieces
        return bool(pieces)

    def _spread(self, norm: Norm) -> Norm:
        """The norm of what tp splits, whose squares ranks add up."""
        modules = dict(self.block.named_modules())  # a norm may be a function's
        if norm.module not in modules or find_rms_eps(modules[norm.module]) is None:
            self.problems.append(f"{norm.module} normalises all heads together, and is no RMSNorm")
            return norm
        return replace(norm, over_ranks=True, keeps=("cast", "compute"))  # as our RMSNorm does, which takes its place

    def _replace(self, before: Linear, after: Linear) -> None:
        self.linears[after.module] = after
        self.operations[self.operations.index(before)] = after

    def _list_stream_norms(self) -> list[str]:
        return [each.module for each in self.operations if isinstance(each, Norm) and each.reads == HIDDEN]

    def _find_streams(self, known: Sequence[Value]) -> list[Value]:
        """The residual stream among two values that are added, alone in a list; none where it is not one of them.

        Where blocks normalise after each sum, what a norm made of the stream is the stream.
        """
        is_hidden = [each.sources == (HIDDEN,) for each in known]
        norms = self._list_stream_norms()
        is_norm = [len(each.sources) == 1 and each.sources[0] in norms for each in known]
        found = is_hidden if any(is_hidden) else is_norm
        return [each for each, is_stream in zip(known, found, strict=True) if is_stream] if sum(found) == 1 else []

    def _add(self, call: Call, branch: Value, stream: Value) -> None:
        """A branch, or the sum of several, is added to the stream."""
        if branch.mixer:
            branch = Value((self._mix(branch, self.record.shapes[call.makes[0]][-1]),))
        names = list(branch.sources)
        if HIDDEN in names:
            names.remove(HIDDEN)
            self.problems.append("a branch is computed from the residual stream by passes alone")
        width = self.record.shapes[call.makes[0]][-1]
        sums = len(names) - 1  # branches that were added to each other
        if branch.passes > sums:
            scaled = [f"{name}.scaled" for name in names]
            self.operations += [Elementwise(name, made, width) for name, made in zip(names, scaled, strict=True)]
        else:
            scaled = names
        if stream.passes:
            self.operations.append(Elementwise(HIDDEN, HIDDEN, width))
        for name in names:
            self.consumers.setdefault(name, set()).add("stream")
        self.operations.append(Residual(width, tuple(scaled)))
        self.values[call.makes[0]], self.reads_stream = Value((HIDDEN,)), ""

    # What is left

    def _add_rest(self) -> None:
        """Vectors that passes read, such as scales of a branch, become an operation at the end of the block."""
        rest = [(name, tuple(each.shape)) for name, each in self.block.named_parameters() if name not in self.used]
        unread = [name for name, shape in rest if len(shape) > 1]
        if unread:
            raise _UnknownUse(unread[0], "is a matrix that its block does not multiply by as a linear layer does")
        if rest:
            self.problems += [f"{name} belongs to no norm and no linear layer" for name, _ in rest]
            self.operations.append(Elementwise(HIDDEN, HIDDEN, 0, parameters=tuple(rest)))

    def _place(self, operation: Operation) -> Operation:
        """The operation with the style that its place in its branch asks for."""
        if isinstance(operation, Norm) and operation.reads in self.linears:
            return replace(operation, closes_branch=_is_closing(self.linears[operation.reads]))
        if not isinstance(operation, Linear):
            return operation
        readers = self.consumers.get(operation.module, set())
        norms = [each for each in self.operations if isinstance(each, Norm) and each.reads == operation.module]
        readers = readers | {word for each in norms for word in self.consumers.get(each.module, set())}
        spread = {each.module for each in self.operations if isinstance(each, Norm) and each.over_ranks}
        if (_is_closing(operation) or operation.reads in spread) and "stream" in readers:
            return replace(operation, style="rowwise")
        if readers & {"attention", "activation"} and "linear" not in readers:
            if "." not in operation.module:
                self.sequence_problems.append(f"{operation.module} lies in its block, and in no module that gathers")
            return replace(operation, style="colwise")
        return operation


def _is_closing(linear: Linear) -> bool:
    """True if a matmul reads what only a branch has: attention's result, an activation's, or a pass over them."""
    return linear.reads == ATTENDED or linear.reads.endswith((".active", ".read"))
