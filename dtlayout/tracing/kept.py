"""Kept tensors: what backward needs of a row of calls, such as those of a norm or of an activation.

Each call of torch keeps some of what it reads, or what it makes. A product keeps a factor where the other one has a
gradient. A view has the memory of what it shows, and a tensor is counted once, however many calls keep it.
"""

from collections.abc import Collection, Iterable, Sequence

from dtlayout.tracing.record import BlockRecord, Call

_OF_INPUT = {"pow", "square", "silu", "gelu", "rms_norm", "layer_norm", "mish", "softplus", "hardtanh", "relu6"}
_OF_RESULT = {"rsqrt", "sqrt", "tanh", "sigmoid", "relu", "exp", "softmax"}
_PRODUCTS = {"mul", "rmul", "imul", "div", "truediv"}
_ALIASES = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "getitem", "split", "chunk",
    "unflatten", "flatten", "t", "unbind", "narrow", "select", "dropout", "tensor_split", "split_with_sizes",
}  # fmt: skip
_CASTS = {"to", "float", "type", "type_as"}


def find_kept(calls: Sequence[Call], differentiated: Collection[int]) -> tuple[list[int], dict[int, int]]:
    """The tensors that backward needs, in the order in which forward keeps them, views as what they show; then the
    tensor that each view shows.

    `differentiated` are the tensors that come from outside and have a gradient, parameters among them.
    """
    moving, shown, kept = set(differentiated), dict[int, int](), dict[int, None]()

    def keep(tensors: Iterable[int]) -> None:
        kept.update((find_shown(each, shown), None) for each in tensors)

    for call in calls:
        read = [each for each in call.reads if each in moving]
        if not read:
            continue
        moving.update(call.makes)
        if call.function in _ALIASES:
            shown |= {each: read[0] for each in call.makes if each != read[0]}
        elif call.function in _OF_INPUT:
            keep(read[:1])
        elif call.function in _OF_RESULT:
            keep(call.makes)
        elif call.function in _PRODUCTS:
            keep(
                each
                for place, each in enumerate(call.reads)
                if moving & {*call.reads[:place], *call.reads[place + 1 :]}
            )
    return list(kept), shown


def find_shown(tensor: int, shown: dict[int, int]) -> int:
    """The tensor whose memory a view shows."""
    while tensor in shown:
        tensor = shown[tensor]
    return tensor


def name_kept(calls: Sequence[Call], record: BlockRecord, entered: int) -> tuple[str, ...]:
    """A word of `Norm.keeps` for each tensor as wide as a norm's input that its calls keep, but for its result."""
    made = {each: call for call in calls for each in call.makes}
    size = record.count(entered)
    words = list[str]()
    kept, shown = find_kept(calls, {entered, *record.parameters})
    for each in kept:
        if record.count(each) != size or each == find_shown(calls[-1].makes[0], shown):
            continue
        is_exact = record.is_exact(each) and not record.is_exact(entered)
        maker = made.get(each)
        if each == entered:
            words.append("input")
        elif is_exact and maker is not None and maker.function in _CASTS and _comes_from(maker, entered, made):
            words.append("cast")
        else:
            words.append("exact" if is_exact else "compute")
    return tuple(words)


def _comes_from(maker: Call, entered: int, made: dict[int, Call]) -> bool:
    """True if a cast is one of the input, perhaps of a view of it."""
    source = maker.reads[0]
    while source in made and made[source].function in _ALIASES:
        source = made[source].reads[0]
    return source == entered


def count_kept(
    calls: Sequence[Call], record: BlockRecord, opened: Collection[int], result: int
) -> tuple[int, bool, tuple[int, int]]:
    """Tensors as large as `result` that its calls keep beside it and the `opened` ones, whether these are kept, and
    bytes that the calls move for each element of it (`count_moved`)."""
    between = find_calls_between(calls, opened, result)
    kept, shown = find_kept(between, opened)
    last, size = find_shown(result, shown), record.count(result)
    own = [each for each in kept if each not in opened and each != last and record.count(each) == size]
    return len(own), any(each in opened for each in kept), count_moved(between, record, result)


def count_moved(calls: Sequence[Call], record: BlockRecord, wide: int) -> tuple[int, int]:
    """Bytes that a row of calls moves through memory for each element of the tensor `wide`, each a pass of its own:
    where the model computes in a format of two bytes, and where it does in fp32, in which casts copy nothing.

    Counted are tensors as large as that one. Views move nothing.
    """
    size, moved = record.count(wide), [0, 0]
    is_all_exact = record.is_exact(record.enters)
    for call in calls:
        tensors = [each for each in (*call.reads, *call.makes) if record.count(each) == size]
        if call.function in _ALIASES or ({*call.makes} <= {*call.reads} and call.function in _CASTS):
            continue
        is_exact = [record.is_exact(each) and not is_all_exact for each in tensors]
        if call.function in _CASTS and len({*is_exact}) < 2:
            continue
        moved[0] += sum(4 if exact else 2 for exact in is_exact)
        moved[1] += 4 * len(tensors) * (call.function not in _CASTS)
    return moved[0], moved[1]


def find_calls_between(calls: Sequence[Call], begins: Collection[int], end: int) -> list[Call]:
    """The calls by which `end` is computed from the tensors of `begins`, in order."""
    wanted, found = {end}, list[Call]()
    for call in reversed(calls):
        if wanted & {*call.makes} and not {*call.makes} & {*begins}:
            found.append(call)
            wanted |= {*call.reads} - {*begins}
    return found[::-1]
