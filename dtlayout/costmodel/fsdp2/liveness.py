"""Liveness: which tensors of a tape are held while it is walked forwards or backwards.

A tape is a block's steps with bytes in place of elements (`Sizes.tape`). Rules of the walk backwards:

- A step makes the gradients of what it read; then those of what it made go, and what it alone had saved.
- A tensor that several steps read has one gradient, to which later ones are added.
- The terms of a sum have its gradient, in the same memory. It goes when the last of them has been used.
- A gradient is added in place, unless somebody else still holds that memory.
- Gradients of weights come before a step's own tensors go; steps that say so let go of these first.
- A step without trained weights saves no input.
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
    """Bytes held in forward when `last` is done: all that is saved until then, and all results of linear layers."""
    held = dict[str, float]()
    for entry in tape[: tape.index(last) + 1]:
        held |= entry.saves
        if entry.in_linear and entry is not last:
            held |= entry.makes
            if entry.shares_gradient:
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
        if entry.in_linear and entry.kind != "rescale":
            kept = (*entry.saves, *entry.saves_again)
            held = {name: size for name, size in held.items() if name not in entry.reads or name in kept}
    return fullest


class BackwardWalk:
    """Walk over a tape from its end, which counts how many tensors hold each gradient's memory."""

    def __init__(self, *, has_gradient: Iterable[str] = (HIDDEN,), puts_off: bool = False):
        """`has_gradient` names tensors that have one before the walk. `puts_off` makes it the first part of a split
        backward, which keeps what the gradients of some weights are made of."""
        self._puts_off = puts_off
        self._holders = {name: [1] for name in has_gradient}
        """Name of a tensor → number of tensors that hold its gradient, in a list that these have in common."""
        self._delayed = set[str]()
        """Saved tensors that stay for the second part."""

    def over(self, tape: Sequence[SizedEntry], come: Callable[[Iterable[str]], Steps]) -> Steps:
        """Changes of held bytes from the gradient of what the tape makes to that of what it reads.

        `come` gives the arrival of some weights' gradients, by their names.
        """
        return [change for entry in reversed(tape) if entry.is_differentiated for change in self._step(entry, come)]

    def _step(self, entry: SizedEntry, come: Callable[[Iterable[str]], Steps]) -> Steps:
        if entry.shares_gradient:
            self._share(entry)
            return []
        used = 0.0
        if self._puts_off and _has_delayed(entry):
            self._delayed.update(entry.saves, entry.saves_again)
        else:
            used = self._let_go(entry)
        goes = sum([size for name, size in entry.saves.items() if name not in self._delayed])
        new, arriving = sum(entry.reads.values()), come(entry.weights)
        if entry.ends_first or not entry.weights:
            steps = [(_A, entry.work), (_A, new - entry.work - used - goes), *arriving]
            goes = 0.0
        else:
            beside, peak = (entry.weight_work, entry.weight_peak) if arriving else (0.0, 0.0)
            steps = [(_A, entry.work), (_A, new - entry.work + peak), (_A, beside - peak)]
            steps += [*arriving, (_A, -used - beside)]
        for name, size in entry.reads.items():
            steps += self._add(name, size, apart=entry.adds_apart)
        return [*steps, (_A, -goes)] if goes else steps

    def _share(self, entry: SizedEntry) -> None:
        """The terms of a sum hold the gradient of its result."""
        (made,) = entry.makes
        holders = self._holders.pop(made, [1])
        holders[0] += len(entry.reads) - 1
        self._holders |= dict.fromkeys(entry.reads, holders)

    def _let_go(self, entry: SizedEntry) -> float:
        """Bytes of the gradients of an entry's results that nobody holds any more."""
        gone = 0.0
        for name, size in entry.makes.items():
            holders = self._holders.pop(name, [1])
            holders[0] -= 1
            gone += 0.0 if holders[0] else size
        return gone

    def _add(self, name: str, size: float, *, apart: bool) -> Steps:
        """A new gradient of a tensor is added to the one that it has."""
        if name not in self._holders:
            self._holders[name] = [1]
            return []
        if (holders := self._holders[name])[0] > 1:  # held by others too, so that the sum is a new tensor
            holders[0] -= 1
            self._holders[name] = [1]
            return []
        return [(_A, size), (_A, -2 * size)] if apart else [(_A, -size)]

    def finish(self, tape: Sequence[SizedEntry], come: Callable[[Iterable[str]], Steps]) -> Steps:
        """Changes of held bytes in the second part: the gradients that were put off, the first matmul's first.

        Gradients of other weights, of which nothing was put off, come before.
        """
        steps = come([name for entry in tape if not entry.puts_off for name in entry.weights])
        saved = {name: size for entry in tape for name, size in entry.saves.items()}
        for entry in filter(_has_delayed, tape):
            read = sum([saved.pop(name, 0.0) for name in (*entry.saves, *entry.saves_again)])
            beside, peak = entry.weight_work, entry.weight_peak
            steps += [(_A, peak), (_A, beside - peak)]
            steps += [*come(entry.weights), (_A, -beside - read - self._let_go(entry))]
        return steps


def _has_delayed(entry: SizedEntry) -> bool:
    """True for an entry with trained weights whose gradients a split backward puts off."""
    return entry.puts_off and bool(entry.weights)
