"""Liveness: which tensors of a tape are held while it is walked forwards or backwards.

A tape is a block's steps with bytes in place of elements (`Sizes.tape`). Rules of the walk backwards:

- A step makes the gradients of what it read; then those of what it made go, and what it alone had saved.
- A tensor that several steps read has one gradient, to which later ones are added.
- A residual passes its gradient on to both of its inputs, which share it until a norm's is added to it.
- An adapter's sum passes its gradient on to both matmuls, which share it; it goes when the base's backward is over.
- A sum over tp without sequence parallelism passes its gradient on; with it, it gathers one.
- Gradients of weights come before the step's own tensors go, but a norm's come after.
- A matmul without trained weights saves no input.
- A matmul whose weights' gradients are put off holds what it read and the gradient of what it made.

Left out: what a kernel allocates and frees inside one call.
"""

from collections.abc import Callable, Iterable, Sequence

from dtlayout.costmodel.fsdp2.phase import MemoryKind
from dtlayout.costmodel.fsdp2.tape import SizedEntry
from dtlayout.models.tape import HIDDEN

_A = MemoryKind.ACTIVATIONS
Steps = list[tuple[MemoryKind, float]]
"""Bytes that come (positive) and go (negative), one after the other."""


def hold_until(tape: Sequence[SizedEntry], last: SizedEntry) -> float:
    """Bytes held in forward when `last` is done: all that is saved until then, and all results of matmuls."""
    held = dict[str, float]()
    for entry in tape[: tape.index(last) + 1]:
        held |= entry.saves
        if entry is not last and (entry.kept_as == "matmuls" or entry.kind in ("add", "rescale")):
            held |= entry.makes
        if entry.kind == "add":
            held = {name: size for name, size in held.items() if name not in entry.reads}
    return sum(held.values())


def hold_at_end(entries: Iterable[SizedEntry]) -> float:
    """Most bytes held by a forward's last entries: what they save, and each result until it is read.

    A matmul's input that was rescaled goes with it, and so do both terms of an adapter's sum.
    """
    held, fullest = dict[str, float](), 0.0
    for entry in entries:
        held |= entry.saves | entry.makes
        fullest = max(fullest, sum(held.values()) + entry.forward_work)
        if entry.kind in ("add", "matmul"):
            kept = (*entry.saves, *entry.saves_again)
            held = {name: size for name, size in held.items() if name not in entry.reads or name in kept}
    return fullest


def walk_backward(
    tape: Sequence[SizedEntry],
    come: Callable[[Iterable[str]], Steps],
    *,
    has_gradient: Iterable[str] = (HIDDEN,),
    puts_off: bool = False,
) -> Steps:
    """Changes of held bytes from the gradient of what the tape makes to that of what it reads.

    `come` gives the arrival of some weights' gradients, by their names. `has_gradient` names tensors that have one
    already. With `puts_off` what the gradients of matmuls' weights are made of stays.
    """
    steps, known, delayed = Steps(), set(has_gradient), set[str]()
    base_of, held_later = dict[str, str](), set[str]()  # results that an adapter's sum joined, which share a gradient
    shared = 0.0  # the residual stream's gradient, where a matmul whose weights wait holds it too
    for entry in reversed(tape):
        if entry.kind == "residual":
            continue
        if entry.kind == "add":
            base, *added = entry.reads
            base_of |= dict.fromkeys(added, base)
            continue
        waits = puts_off and _has_delayed(entry)
        if waits:
            delayed.update(entry.saves, entry.saves_again)
            shared += 0.0 if entry.used else sum(entry.makes.values())
            held_later.update(base_of[name] for name in entry.makes if name in base_of)
        stays = waits or any(name in base_of or name in held_later for name in entry.makes)
        used = 0.0 if stays else entry.used
        goes = sum([size for name, size in entry.saves.items() if name not in delayed]) if delayed else entry.saved
        new, arriving = sum(entry.reads.values()), come(entry.weights)
        if entry.kind == "norm" or not entry.weights:
            steps += [(_A, entry.work), (_A, new - entry.work - used - goes), *arriving]
            goes = 0.0
        else:
            beside = entry.weight_work if arriving else 0.0
            steps += [(_A, entry.work), (_A, new - entry.work + beside), *arriving, (_A, -used - beside)]
        for name, size in entry.reads.items():
            if name == HIDDEN and name in known:
                steps.append((_A, shared - size))
                shared = 0.0
            elif name in known:
                steps += [(_A, size), (_A, -2 * size)] if entry.adds_apart else [(_A, -size)]
            known.add(name)
        if goes:
            steps.append((_A, -goes))
    return [*steps, (_A, shared)]


def walk_delayed(tape: Sequence[SizedEntry], come: Callable[[Iterable[str]], Steps]) -> Steps:
    """Changes of held bytes while the gradients of matmuls' weights come that were put off, the first matmul's first.

    Gradients of norms and of adapters' vectors, of which nothing was put off, come before.
    """
    steps = come([name for entry in tape if entry.kind in ("norm", "rescale") for name in entry.weights])
    saved = {name: size for entry in tape for name, size in entry.saves.items()}
    for entry in tape:
        if _has_delayed(entry):
            read = sum([saved.pop(name, 0.0) for name in (*entry.saves, *entry.saves_again)])
            beside = entry.weight_work
            steps += [(_A, beside), *come(entry.weights), (_A, -beside - read - sum(entry.makes.values()))]
    return steps


def _has_delayed(entry: SizedEntry) -> bool:
    """True for a matmul with trained weights, whose gradients a split backward puts off."""
    return entry.kind == "matmul" and bool(entry.weights)
