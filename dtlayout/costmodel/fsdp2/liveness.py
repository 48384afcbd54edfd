"""Liveness: which tensors of a tape are held while it is walked forwards or backwards.

A tape is a block's steps with bytes in place of elements (`Sizes.tape`). Rules of the walk forwards:

- A step holds what it reads and makes, and what is saved, or kept by recomputation, until then.
- A result goes when the last step that reads it is over, or the call that this step belongs to.
- A variable of a module stays until its branch is closed. The block's input stays until the block is over.

Rules of the walk backwards:

- A step makes the gradients of what it read; then those of what it made go, and what it alone had saved.
- A tensor that several steps read has one gradient, to which later ones are added.
- The terms of a sum have its gradient, in the same memory. It goes when the last of them has been used.
- A gradient is added in place, unless somebody else still holds that memory.
- Gradients of weights come before a step's own tensors go; steps that say so let go of these first.
- A step without trained weights saves no input.
- A matmul whose weights' gradients are put off holds what it read and the gradient of what it made.

Left out: what a kernel allocates and frees inside one call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from dtlayout.costmodel.fsdp2.phase import MemoryKind
from dtlayout.costmodel.fsdp2.tape import SizedEntry, SizedTape
from dtlayout.models.tape import HIDDEN, INPUT

_A = MemoryKind.ACTIVATIONS
Steps = list[tuple[MemoryKind, float]]
"""Bytes that come (positive) and go (negative), one after the other."""


def walk_forward(tape: Sequence[SizedEntry], stream: float, stays: Sequence[Mapping[str, float]]) -> Iterator[float]:
    """Bytes that a block's forward holds at its fullest in each entry, the block's input of `stream` bytes included.

    `stays` has what is held from each entry on until the forward is over, and after it: tensors that are saved, or
    results that recomputation keeps.
    """
    last_reads, variables = _find_last_reads(tape), set[str]()
    left, held = dict[str, float](), dict[str, float]()
    for number, (entry, staying) in enumerate(zip(tape, stays, strict=True)):
        saved = {name: size for name, size in entry.saves.items() if not name.endswith(INPUT)}
        if entry.shares_gradient and HIDDEN in entry.makes:  # the modules of the branch have returned
            held = {name: size for name, size in held.items() if name in entry.reads}
        if entry.kind == "attention":  # its sizes are those of a kernel, which holds what it reads, or copies of that
            held = {name: size for name, size in held.items() if name not in entry.saves_made} | saved
            variables.update(saved)
        own = {name: size for name, size in staying.items() if not name.endswith(INPUT)}
        now = left | own | held
        made = sum([size for name, size in entry.makes.items() if name == HIDDEN or name not in now])
        yield stream + sum(now.values()) + made * (not entry.is_alias) + entry.forward_work
        left |= own
        held |= {} if entry.is_alias else entry.makes
        variables.update(entry.makes if entry.is_local else ())
        held = {
            name: size for name, size in held.items()
            if name in variables or name == HIDDEN or last_reads.get(name, -1) > number
        }  # fmt: skip


@lru_cache(maxsize=1024)
def walk_saving(read: SizedTape, saved: SizedTape, stream: float) -> tuple[float, ...]:
    """`walk_forward` over the tape `read` where what the tape `saved` saves stays; many layouts share the answer."""
    return tuple(walk_forward(read, stream, [entry.saves for entry in saved]))


@lru_cache(maxsize=1024)
def walk_keeping(
    read: SizedTape, made: SizedTape, stream: float, kept: tuple[tuple[str, float], ...]
) -> tuple[float, ...]:
    """`walk_forward` where those results of the tape `made` stay that are `kept`, by name with their bytes."""
    sizes = dict(kept)
    stays = [{name: sizes[name] for name in (*entry.results, *entry.makes) if name in sizes} for entry in made]
    return tuple(walk_forward(read, stream, stays))


def _find_last_reads(tape: Sequence[SizedEntry]) -> dict[str, int]:
    """Name → place of the last entry that reads it, or of the end of that entry's call, which holds its inputs."""
    begin, begins, maker, found = 0, list[int](), dict[str, int](), dict[str, int]()
    for number, entry in enumerate(tape):
        begin = begin if entry.continues else number
        begins.append(begin)
        maker |= dict.fromkeys(entry.makes, number)
    ends = {begin: number for number, begin in enumerate(begins)}
    for number, entry in enumerate(tape):
        for name in (*entry.reads, *entry.saves_made):
            is_of_call = maker.get(name, -1) >= begins[number]
            found[name] = max(found.get(name, -1), number if is_of_call else ends[begins[number]])
    return found


class BackwardWalk:
    """Walk over a tape from its end, which counts how many tensors hold each gradient's memory.

    It keeps these counts between calls: `over` takes the parts of a tape from the last to the first, then `finish`
    ends a walk that puts gradients off.
    """

    def __init__(self, *, has_gradient: Iterable[str] = (HIDDEN,), puts_off: bool = False):
        """`has_gradient` names tensors that have one before the walk. With `puts_off` it is the first part of a split
        backward, and keeps what the gradients of some weights are made of."""
        self._puts_off = puts_off
        self._holders = {name: [1] for name in has_gradient}
        """Name of a tensor → number of tensors that hold its gradient, in a list that these have in common."""
        self._delayed = set[str]()
        """Saved tensors that stay for the second part."""

    def over(self, tape: Sequence[SizedEntry], come: Callable[[Iterable[str]], Steps]) -> Steps:
        """Changes of held bytes from the gradient of what the tape makes, which is there, to that of what it reads.

        `come` gives the arrival of some weights' gradients, by their names: nothing in a walk that puts them off.
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

        Gradients of other weights are counted at its beginning, though they are made in the first part.
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
