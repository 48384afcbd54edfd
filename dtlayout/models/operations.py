"""Operations of a block: each says its sizes and weights, and writes its part of the block's tape. No torch.

The residual stream is as wide as the model and, under sequence parallelism, split along the sequence. Tensors between a
`colwise` matmul and the `rowwise` one that closes its branch are split over tp; so a norm over heads is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal

from dtlayout.models.scores import SequenceScores
from dtlayout.models.tape import GATHERED, HIDDEN, INPUT, BlockTensor, TapeEntry, TapeOptions
from dtlayout.models.weight import Piece, Weight
from dtlayout.spec.recompute import Kept

ATTENDED = "self_attn.attended"
"""Name of attention's result on a tape."""


class BaseOperation:
    """Facts that all operations say."""

    weights: ClassVar[tuple[Weight, ...]] = ()
    """Parameters that belong to it."""
    kept_as: ClassVar[Kept | None] = None
    """The word of a recomputation that keeps its result; without one it is always computed again."""
    active_share: ClassVar[float] = 1.0
    """Fraction of its weights that computes a token."""

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """Entries of a tape for this operation."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it reads, makes and saves")


def name_trained(weights: Iterable[Weight]) -> tuple[str, ...]:
    """Names of the weights that are trained."""
    return tuple(weight.name for weight in weights if weight.trains)


@dataclass(frozen=True)
class Norm(BaseOperation):
    """An RMSNorm, in fp32 or finer inside, of the residual stream, of each head or of a branch's result.

    A LayerNorm is one too: it moves the same bytes.
    """

    module: str
    """The module's name in the block, or in the model."""
    width: int
    """Elements of a token."""
    num_heads: int = 0
    """Heads that are normalised each for itself, which tp splits; 0 for the residual stream."""
    reads: str = HIDDEN
    """Tensor that it normalises; of latent attention the narrow vector of a token."""
    trains: bool = True
    """Whether its weight is trained."""
    parameters: tuple[Literal["weight", "bias"], ...] = ("weight",)
    """Names of its parameters: a factor and a term of each element that is normalised."""
    initial: Literal["ones", "zeros"] = "ones"
    """Initial values of the weight; zeros where the module adds 1 to it."""
    closes_branch: bool = False
    """True if it normalises a branch's result before that is added to the residual stream."""
    keeps: tuple[Literal["input", "cast", "exact", "compute"], ...] = ()
    """Tensors that a model's own code keeps: the input, a copy of it in the exact format, others in the exact or the
    compute format. Empty where `kernels.norm` computes it."""
    moves: tuple[int, int] = (0, 0)
    """Bytes that a model's own code moves for each element in forward: in a format of two bytes, and in fp32."""
    over_ranks: bool = False
    """True for an RMSNorm over all that tp splits inside a branch: its ranks add up the squares of their parts."""
    beside: str = ""
    """A norm before it that reads the same tensor of the stream, which is kept once."""

    @property
    def name(self) -> str:
        """Name of its result on a tape."""
        return self.module

    def keeps_input(self, *, casts: bool) -> bool:
        """True if a model's own code keeps the tensor that it reads; `casts` if the exact format is another one."""
        return self.keeps[:1] == ("input",) or (self.keeps[:1] == ("cast",) and not casts)

    @property
    def is_of_heads(self) -> bool:
        """Whether it normalises heads."""
        return self.num_heads > 0

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """One factor for each element of what is normalised, and one term where it has a bias."""
        shape, initial = (self.width // max(1, self.num_heads),), {"weight": self.initial, "bias": "zeros"}
        split: Literal[0] | None = 0 if self.over_ranks else None
        return tuple(
            Weight(f"{self.module}.{name}", shape, initial[name], "vector", split, trains=self.trains)
            for name in self.parameters
        )

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """One kernel, which keeps its input and a number for each row; or separate operations, with exact copies."""
        tensor = partial(BlockTensor, spread="branch" if self.is_of_heads or self.over_ranks else "stream")
        read, made = tensor(self.reads, self.width), tensor(self.module, self.width)
        exact = tensor(f"{self.module}.exact", self.width, format="exact")
        # Heads' norms keep what a projection made; others keep a tensor that no entry before them has counted.
        is_made = self.is_of_heads or self.over_ranks or self.closes_branch
        kept = read if is_made else read._replace(name=f"{self.module}{INPUT}")
        if self.beside and not is_made:
            kept = kept._replace(name=f"{self.beside}{INPUT}")
        rows = tensor(f"{self.module}.rows", max(1, self.num_heads), format="exact")
        weights = name_trained(self.weights)
        if self.keeps and not options.compiles:
            return self._record_own(options, read, made, kept, rows)
        if not options.separate_norms:
            return (TapeEntry("norm", (read,), (made,), (kept, rows), weights, ends_first=True, is_local=True),)
        product = exact if options.keeps_exact_product else read
        product = product._replace(name=f"{self.module}.product")
        saved = (product, rows) if self.trains or options.trains_all else (rows,)
        return (
            # In the end four copies for the way through the scale: the mean's gradient, the power, their products.
            TapeEntry(
                "norm",
                (read,),
                (exact,),
                (exact if options.casts_norms else kept,),
                weights,
                scratch=(exact,) * 4,
                ends_first=True,
            ),
            TapeEntry(
                "scale",
                (exact,),
                (made,),
                saved,
                (),
                (exact,) * (2 + options.casts_norms),
                is_local=True,
                continues=True,
            ),
        )

    def _record_own(
        self, options: TapeOptions, read: BlockTensor, made: BlockTensor, kept: BlockTensor, rows: BlockTensor
    ) -> tuple[TapeEntry, ...]:
        """Entries of a model's own code: one kernel, which may work on an exact copy, or separate operations."""
        exact = read._replace(name=f"{self.module}.exact", format="exact")
        named = {"input": kept, "cast": exact if options.casts_norms else kept}
        saved = tuple(
            named.get(word)
            or (exact if word == "exact" else read)._replace(name=f"{self.module}.kept{number}")
            for number, word in enumerate(self.keeps)
        )  # fmt: skip
        weights = name_trained(self.weights)
        if len(saved) == 1:
            scratch = (exact, exact) if self.keeps == ("cast",) and options.casts_norms else None
            return (
                TapeEntry(
                    "norm", (read,), (made,), (*saved, rows), weights, scratch, ends_first=True, is_local=True,
                    moves=self.moves,
                ),
            )  # fmt: skip
        first, *others = saved
        # In the end four copies for the way through the scale: the mean's gradient, the power, their products.
        norm = TapeEntry(
            "norm", (read,), (exact,), (first,), weights, scratch=(exact,) * 4, ends_first=True, moves=self.moves
        )
        copies = (exact,) * (2 + options.casts_norms)
        scale = TapeEntry("scale", (exact,), (made,), (*others, rows), (), copies, is_local=True, continues=True)
        return (norm, scale)


@dataclass(frozen=True)
class Linear(BaseOperation):
    """A matmul with a weight."""

    kept_as = "matmuls"
    module: str
    """The module's name in the block."""
    reads: str
    """Tensor that it multiplies: the module that makes it, or a word of its own."""
    inputs: int
    """Elements of a token that it reads."""
    outputs: int
    """Elements of a token that it makes."""
    style: Literal["colwise", "rowwise", "replicated"]
    """Split over tp. Colwise: of the outputs, which opens a branch. Rowwise: of the inputs, which closes it with a sum
    over the ranks. Replicated: none, so that each rank multiplies what it has of the residual stream."""
    saves_input: bool = True
    """Whether it saves its input for the weight's gradient; not a router's beside a shared expert, which saves it."""
    bias: bool = False
    """Whether it adds one to its outputs."""
    fuses: bool = False
    """Whether some engines compute it together with the matmul before it, which reads the same."""
    is_local: bool = False
    """Whether its result is a variable of a module's forward, as in `TapeEntry`."""
    trains: bool = True
    """Whether its weights are trained."""
    part_of: str = ""
    """The model's own module, where it is not this one: it has other matrices below this one, or a transposed one."""
    first: int = 0
    """The first row of that module's matrix that is this one's."""
    rows: int = 0
    """Rows of that module's matrix; 0 without one."""
    is_transposed: bool = False
    """True if that module's matrix has a row for each input, as in GPT-2; others have one for each output."""

    @property
    def is_split(self) -> bool:
        """True if tp splits it; not so a router, or a matmul into latent attention's narrow vectors."""
        return self.style != "replicated"

    def is_scaled(self, alignment: int) -> bool:
        """True if it multiplies in `precision.matmuls`, where that is below the compute format, by kernels that take
        sizes that `alignment` divides."""
        return self.is_split and self.inputs % alignment == self.outputs % alignment == 0

    @property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The matrix, and a bias that is split like its rows."""
        return self.own_weights

    @cached_property
    def own_weights(self) -> tuple[Weight, ...]:
        """The weights of the matmul itself, without those of an adapter beside it."""
        rows: Literal[0] | None = 0 if self.style == "colwise" else None
        matrix = Weight(
            f"{self.module}.weight", (self.outputs, self.inputs), "residual" if self.style == "rowwise" else "normal",
            "matrix", 1 if self.style == "rowwise" else rows, trains=self.trains,
            piece=self._find_piece("weight", is_transposed=self.is_transposed),
        )  # fmt: skip
        bias = Weight(
            f"{self.module}.bias", (self.outputs,), "zeros", "vector", rows, trains=self.trains,
            piece=self._find_piece("bias"),
        )  # fmt: skip
        return (matrix, bias) if self.bias else (matrix,)

    def _find_piece(self, name: str, *, is_transposed: bool = False) -> Piece | None:
        return Piece(f"{self.part_of}.{name}", self.first, self.rows, is_transposed) if self.part_of else None

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """A matmul of what tp has gathered, of a part of it, or of a branch; this is followed by a sum over tp."""
        read = BlockTensor(self.reads, self.inputs, "branch" if self.style == "rowwise" else "stream")
        made = BlockTensor(self.module, self.outputs, "branch" if self.style == "colwise" else "stream")
        saved, closing = read, tuple[TapeEntry, ...]()
        if self.style == "colwise":
            saved = read._replace(spread="input")
            read = BlockTensor(f"{self.reads}{GATHERED}", self.inputs, "whole") if options.is_split else read
        elif self.style == "rowwise" and options.is_split:
            summed, made = made, BlockTensor(f"{self.module}.term", self.outputs, "whole")
            closing = (TapeEntry("sum", (made,), (summed,), continues=True),)
        casts, saves = self.is_scaled(options.alignment), self.saves_input and (self.trains or options.trains_all)
        if options.is_own_mixture and not self.is_split:
            saves = self.trains or options.trains_all
            # Beside a shared expert that gathered it, a router saves what is this rank's own.
            saved = saved._replace(
                name=f"{saved.name}.own" if options.is_split and not self.saves_input else saved.name
            )
        matmul = TapeEntry(
            "matmul", (read,), (made,), (saved._replace(format="cast" if casts else "compute"),) * saves,
            name_trained(self.own_weights), kept_as=self.kept_as, casts=casts, fuses=self.fuses,
            puts_off=True, in_branch=self.is_split, is_local=self.is_local,
        )  # fmt: skip
        return (matmul, *closing)


@dataclass(frozen=True)
class Rotary(BaseOperation):
    """The rotary embedding of queries and keys, in fp32 or finer inside."""

    width: int
    """Elements of a token's queries that it turns."""
    shared_width: int = 0
    """Elements of its keys that all heads have in common, and that are copied for each; 0 where a key has its own."""
    num_copies: int = 0
    """Heads that they are copied for."""

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """Queries, and keys that heads have in common: gradients of others take the place of what they come from."""
        read, made = (BlockTensor(name, self.width, "branch") for name in ("queries before", "queries"))
        shared = BlockTensor("shared keys", self.shared_width, "stream")
        copies = BlockTensor("copied keys", self.num_copies * self.shared_width, "branch")
        return (TapeEntry("rope", (read, shared), (made, copies), scratch=()),)


@dataclass(frozen=True)
class SelfAttention(BaseOperation):
    """Causal attention; it keeps queries, keys, values and its output."""

    kept_as = "attention"
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_width: int
    """Width of each query and key."""
    value_width: int
    """Width of each value."""
    window: int = 0
    """Tokens that are attended to in every other block; 0 where all are that came before."""
    values: str = ""
    """Tensor that values are, as the module made it; empty where they are parts of one."""
    windowed_share: float = 0.5
    """Share of the blocks that have the window."""
    sinks: bool = False
    """True if each query head has a number that takes part in its softmax beside the scores."""
    trains: bool = True
    """Whether these numbers are trained."""
    held: int = 0
    """Elements of a token that a model's own code keeps beside these: what lies in one matrix with values, or a copy of
    the result in another order."""
    scores: tuple[SequenceScores, ...] = ()
    """Bytes for each pair of tokens, by the length of sequences; empty where a kernel computes attention in pieces."""

    @property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The numbers beside the scores, where it has some."""
        sinks = Weight("self_attn.sinks", (self.num_heads,), "normal", "vector", 0, trains=self.trains)
        return (sinks,) * self.sinks

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """One entry; kernels keep more than it says (`costmodel.fsdp2.sizes`)."""
        queries, keys, values, attended = (
            BlockTensor(name, width, "branch")
            for name, width in (
                ("queries", self.query_width), ("keys", self.num_kv_heads * self.head_width),
                ("values", self.num_kv_heads * self.value_width), (ATTENDED, self.output_width),
            )
        )  # fmt: skip
        read = (queries, keys, values)
        made = (self.values,) * bool(self.values)
        weights = name_trained(self.weights)
        beside = BlockTensor("attention.beside", self.held, "branch")
        saves = (*read, attended, *[beside] * bool(self.held))
        return (TapeEntry("attention", read, (attended,), saves, weights, kept_as=self.kept_as, saves_made=made),)

    @property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.num_kv_heads * (self.head_width + self.value_width)

    @property
    def input_width(self) -> int:
        """Elements of a token's queries, keys and values."""
        return self.query_width + self.kv_width

    @property
    def output_width(self) -> int:
        """Elements of a token's output."""
        return self.num_heads * self.value_width

    def flops_per_token(self, seq_len: int) -> float:
        """Scores and weighted values, forward, the half that the mask hides counted too."""
        return 2.0 * (self.query_width + self.output_width) * seq_len

    def seen_share(self, seq_len: int) -> float:
        """Scores that windows leave of those below the causal mask, s²/2 of a sequence: a window has s·w - w²/2.

        >>> SelfAttention(num_heads=64, num_kv_heads=8, head_width=64, value_width=64, window=128).seen_share(1024)
        0.6171875
        """
        if not 0 < self.window < seq_len:
            return 1.0
        seen = self.window / seq_len
        return 1 - self.windowed_share + self.windowed_share * (2 * seen - seen * seen)


@dataclass(frozen=True)
class Activation(BaseOperation):
    """silu(gate) · up, or without a gate the activation function alone."""

    module: str
    """Module of the matmuls before it; its result is called MODULE.active."""
    width: int
    """Elements of a token."""
    gated: bool
    """Whether it multiplies two tensors."""
    opened: tuple[str, ...] = ()
    """Modules whose results it reads, where they are not MODULE.gate_proj and MODULE.up_proj; one that makes both
    stands alone."""
    own: int = -1
    """Tensors as wide as its result that a model's own code keeps beside those that it reads; -1 where `kernels.swiglu`
    computes it."""
    keeps_opened: bool = True
    """Whether what it reads is kept; an activation such as relu keeps its result alone."""
    moves: tuple[int, int] = (0, 0)
    """Bytes that a model's own code moves for each element in forward: in a format of two bytes, and in fp32."""

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """The activation, or silu and the product each by itself."""
        usual = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        names = self.opened or tuple(f"{self.module}.{name}" for name in usual)
        width = self.width * (1 + self.gated) // len(names)
        opened = tuple(BlockTensor(name, width, "branch") for name in names)
        active = BlockTensor(f"{self.module}.active", self.width, "branch")
        if self.own < 0 or options.compiles:
            return record_activation(opened, active, options)
        if len(opened) == 2 and self.own == 1 and self.keeps_opened:
            first, second = record_activation(opened, active, options._replace(num_gated_kept=3))
            return first._replace(moves=self.moves), second
        own = tuple(active._replace(name=f"{active.name}.own{number}") for number in range(self.own))
        saves = (*opened * self.keeps_opened, *own)
        return (TapeEntry("activation", opened, (active,), saves, moves=self.moves),)


def record_activation(
    opened: tuple[BlockTensor, ...], active: BlockTensor, options: TapeOptions
) -> tuple[TapeEntry, ...]:
    """Entries from results of opening matmuls, gate and up or up alone, to the activation's result."""
    if len(opened) == 1:
        return (TapeEntry("activation", opened, (active,), opened),)
    if options.num_gated_kept == len(opened):  # both gradients take the place of gate and up
        return (TapeEntry("activation", opened, (active,), opened, scratch=()),)
    gate, up = opened
    silu = active._replace(name=f"{active.name}.silu")
    return (
        TapeEntry("activation", (gate,), (silu,), (gate,)),
        TapeEntry("activation", (silu, up), (active,), (silu, up), continues=True),
    )


@dataclass(frozen=True)
class Branch(BaseOperation):
    """Start of a branch that no norm precedes: the residual stream, under a name that the branch's matmuls read."""

    module: str
    """The branch's module in the block; what its matmuls read is called MODULE.stream."""
    width: int
    """Elements of a token."""

    @property
    def name(self) -> str:
        """Name of the stream for the branch."""
        return f"{self.module}.stream"

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """No step of a device: another name for a tensor, whose gradient is added to that of the stream."""
        read, made = (BlockTensor(name, self.width, "stream") for name in (HIDDEN, self.name))
        return (TapeEntry("alias", (read,), (made,), scratch=()),)


@dataclass(frozen=True)
class Elementwise(BaseOperation):
    """A pass over a tensor that multiplies it by a number, or computes each element from itself."""

    reads: str
    """Tensor that it reads."""
    makes: str
    """Name of its result."""
    width: int
    """Elements of a token."""
    saves: bool = False
    """Whether its backward reads its input."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of vectors that it reads."""
    trains: bool = True
    """True if these vectors are trained."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The vectors."""
        return tuple(Weight(name, shape, "ones", "vector", trains=self.trains) for name, shape in self.parameters)

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """One entry; none for a pass without elements, which only says weights."""
        read, made = (BlockTensor(name, self.width, "stream") for name in (self.reads, self.makes))
        entry = TapeEntry("rescale", (read,), (made,), (read,) * self.saves, name_trained(self.weights))
        return (entry,) if self.width else ()


@dataclass(frozen=True)
class Residual(BaseOperation):
    """The sum of the residual stream and of one or more branches: the new stream, under the same name."""

    width: int
    """Elements of a token."""
    branches: tuple[str, ...]
    """Tensors that are added to the stream: results of the modules that close a branch."""

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """The sum; its gradient is that of all of its inputs, and nothing is saved."""
        hidden, *added = (BlockTensor(name, self.width, "stream") for name in (HIDDEN, *self.branches))
        return (TapeEntry("residual", (hidden, *added), (hidden,), shares_gradient=True),)
