"""Parameters of a description: name, shape, role, and where a folder has them. No torch."""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from dtlayout.spec.roles import Role


class Piece(NamedTuple):
    """Rows of a tensor on disk that are one parameter, where a matrix there holds several, or lies the other way."""

    name: str
    """The tensor's name, inside a block from there on."""
    first: int
    """The first row among those of the whole matrix, which has a row for each output."""
    rows: int
    """Rows of the whole matrix."""
    is_transposed: bool = False
    """True if the tensor has a row for each input, as in GPT-2."""

    def find_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, given that of the parameter.

        >>> Piece("fc.weight", 0, 8, is_transposed=True).find_shape((4, 16))
        (16, 8)
        """
        whole = (self.rows, *shape[1:])
        return whole[::-1] if self.is_transposed else whole

    def cut(self, tensor: Any, rows: slice) -> Any:
        """Some of the parameter's rows, out of the tensor, of torch or of a file."""
        rows = slice(self.first + rows.start, self.first + rows.stop)
        return tensor[:, rows].t() if self.is_transposed else tensor[rows]

    def find_place(self, offset: tuple[int, ...]) -> tuple[int, ...]:
        """Index in the tensor of an element of the parameter."""
        place = (self.first + offset[0], *offset[1:])
        return place[::-1] if self.is_transposed else place


@dataclass(frozen=True)
class Weight:
    """A parameter: its name, shape and role, and whether it is trained."""

    name: str
    """The parameter's name in HF's state dict: inside a block from there on, else whole."""
    shape: tuple[int, ...]
    """A vector's size, or a matrix's rows (outputs) and columns (inputs)."""
    initial: Literal["normal", "residual", "fan-in", "ones", "zeros"]
    """Initial values; "residual" are normal ones of a matrix that writes into the residual stream, "fan-in" normal ones
    whose deviation follows from the number of inputs."""
    role: Role
    """The weight's part in the model, by which optimizers share the weights and decide what decays."""
    split: Literal[0, 1] | None = None
    """The dimension that tp splits; None where each rank has all of it."""
    is_of_experts: bool = False
    """True for a stack, with a matrix or a vector for each expert, which ep splits and tp does not."""
    trains: bool = True
    """True if training changes it; a frozen weight has no gradient, no optimizer state and no reduction."""
    is_counter: bool = False
    """True if no gradient moves it, but what a step counts: each rank has all of it, in fp32 or finer."""
    piece: Piece | None = None
    """Rows of a tensor on disk that it is; None where a tensor holds it alone, and as it is."""

    @property
    def numel(self) -> int:
        """Parameters, over all tp ranks."""
        return prod(self.shape)

    @property
    def can_be_quantized(self) -> bool:
        """True for a frozen matrix of a linear layer that tp can split: `precision.base` may store it in few bits."""
        return not self.trains and self.role == "matrix" and self.split is not None

    @property
    def is_summed(self) -> bool:
        """True for a trained matrix of a linear layer that tp can split: the matmul that makes its gradient may add it
        to the sum over microbatches."""
        return self.trains and self.role == "matrix" and self.split is not None and not self.is_of_experts

    def is_scaled(self, alignment: int) -> bool:
        """True for a matrix of a `Linear` that multiplies in `precision.matmuls`; `alignment` is as for that."""
        is_linear = self.role == "matrix" and self.split is not None
        return is_linear and all(size % alignment == 0 for size in self.shape)

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """The weight's shape on each of `tp` ranks, an expert's on each of `ep`."""
        if self.is_of_experts:
            return (self.shape[0] // ep, *self.shape[1:])
        return tuple(size // tp if dim == self.split else size for dim, size in enumerate(self.shape))
