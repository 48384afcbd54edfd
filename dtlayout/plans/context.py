"""Context parallelism: each rank of cp has some tokens of every sequence, and attention is where they meet.

`CONTEXT_STYLES` says what a plan's style does to a place: where a rank's tokens stand (`model.rotary`), which documents
they belong to (`model.prepare_mask`), and how they attend to all others (each block's `attend`, a function of queries,
keys, values and a mask). Everything else in a block works on each token for itself, and needs no change. The ways:

- ring (arXiv:2310.01889 with the zig-zag order of spec/context_parallel.py): keys and values go from rank to rank.
  While a rank attends to those of rank s, it sends them on and receives those of rank s - 1. Parts are joined by the
  log-sum-exp of their scores. In backward they go round once more, and gradients follow one step behind, each rank
  adding its term, until they are where their keys are.
- gather (arXiv:2407.21783, sec. 3.3.2): all keys and values come at once, and again in backward, since nobody keeps
  them; what a rank knows of their gradients is summed over the ranks. The same parts are attended to, fewer and longer.
  Where documents are kept apart both cut the parts at their borders: no kernel needs a mask or computes what it hides.
- all-to-all (arXiv:2309.14509): before attention each rank gives away all heads but its share for the tokens that it
  lacks of this share, and afterwards the other way round. Between, any kernel sees whole sequences.

What each sends for a block, of B·s·K elements a head (w are those of gradients in fp32 or finer):

| way | forward | backward |
|---|---|---|
| ring | cp - 1 messages of 2·G heads | cp - 1 of 2·G heads, and cp - 1 of 2·G in w |
| gather | all-gather of 2·G | all-gather of 2·G, reduce-scatter of 2·G in w |
| all-to-all | H + 2·G heads, and H | H, and H + 2·G |

A ring's message is an all-to-all in which each rank has something for its neighbour alone, which NCCL carries out as
one send and one receive.

Legend: B batch, H query heads, G key-value heads, S sequence, s = S / cp tokens of a rank, c of a chunk, K head width,
N keys of a part, cp ranks.
"""

import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.attention import Attend
from dtlayout.ops.composite import composite
from dtlayout.ops.documents import Documents, share_positions
from dtlayout.ops.partial import join
from dtlayout.ops.rope import RotaryEmbedding
from dtlayout.plans.attention_tiles import AttentionTile, Queries
from dtlayout.plans.collectives import Group, Moved, begin_gather, begin_scatter, wait
from dtlayout.plans.plan import match_names
from dtlayout.spec.context_parallel import CONTEXT_METHODS, own_parts
from dtlayout.spec.kernel_table import AttentionKernel, find_kernel

_operators = torch.ops._c10d_functional
ATTENTION_OPERATOR = "dtlayout.context_attention.default"
"""The operator of ring and gather, whose result selective recomputation keeps."""
ContextChange = Callable[[nn.Module, str, str, Group], None]
"""What a style does: to a module's attribute, with the kernel that attends, among these ranks."""


def apply_context(module: nn.Module, styles: dict[str, str], attention: str, cp_mesh: DeviceMesh) -> None:
    """Change every place below `module` that a pattern of `styles` means; `attention` is the kernel that attends.

    A pattern's last part is a module or, as `attend` is, a function that a module has. Where a stage lacks a place
    nothing is changed. InvalidConfig if a style does not fit what it finds.
    """
    group = Group.of(cp_mesh)
    for pattern, style in styles.items():
        owner_pattern, _, attribute = pattern.rpartition(".")
        for owner in match_names(owner_pattern, [name for name, _ in module.named_modules()]):
            CONTEXT_STYLES[style](module.get_submodule(owner), attribute, attention, group)


def hold_own_positions(order: str) -> ContextChange:
    """A `RotaryEmbedding` whose tables have the rows of this rank's tokens, in their order."""

    def change(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
        rotary = getattr(owner, attribute)
        if not isinstance(rotary, RotaryEmbedding):
            raise InvalidConfig(f"plan.context: {attribute!r} of {type(owner).__name__} is no RotaryEmbedding")
        rotary.hold(own_parts(order, rotary.max_seq_len, group.size, group.rank))
        if order == "zig-zag":
            rotary.find_positions = lambda documents: share_positions(documents.starts, group.size)[group.rank]

    return change


def share_documents(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
    """Instead of a mask: which positions each rank has, in the order of ranks, and where the document of each of the
    sequence starts, [1 + B, S]. It stays on the CPU, where `attend_in_parts` reads which chunks see each other."""

    def prepare(documents: Documents, like: Tensor) -> Tensor:
        shares_1S = share_positions(documents.starts, group.size).reshape(1, -1)
        return torch.cat((shares_1S.to(documents.starts.dtype), documents.starts))

    setattr(owner, attribute, prepare)


def attend_together(method: str) -> ContextChange:
    """A function q, k, v [B, H or G, s, K] and mask → [B, H, s, K] of a rank's tokens, which attends to all ranks'."""

    def change(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
        make = pkgutil.resolve_name(CONTEXT_METHODS[method].attend)
        setattr(owner, attribute, make(getattr(owner, attribute), attention, method, group))

    return change


CONTEXT_STYLES: dict[str, ContextChange] = {
    "zig-zag": hold_own_positions("zig-zag"),
    "contiguous": hold_own_positions("contiguous"),
    "documents": share_documents,
    **{name: attend_together(name) for name in CONTEXT_METHODS},
}


# All-to-all: heads for tokens


@cache
def attend_by_heads(attend: Attend, attention: str, method: str, group: Group) -> Attend:
    """`attend` by each rank for its share of the heads, to whole sequences; its mask is that of whole sequences."""
    cp = group.size

    def attend_to_whole(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, mask: Tensor | None) -> Tensor:
        shares = [x.unflatten(1, (cp, -1)) for x in (q_BHsK, k_BGsK, v_BGsK)]
        whole = Moved.apply(torch.cat(shares, 2), group, _give_heads, _give_tokens)
        q, k, v = whole.split([share.shape[2] for share in shares], 1)
        out = attend(q, k, v, mask)
        return Moved.apply(out, group, _give_tokens, _give_heads).flatten(1, 2)

    return attend_to_whole


def _give_heads(x_BcHsK: Tensor, group: Group) -> Tensor:
    """Every rank's share of heads for own tokens, [B, cp, H / cp, s, K] → own share for all, [B, H / cp, S, K]."""
    return _exchange(x_BcHsK.transpose(0, 1), group).movedim(0, 2).flatten(2, 3)


def _give_tokens(x_BHSK: Tensor, group: Group) -> Tensor:
    """Own share of heads for all tokens, [B, H / cp, S, K] → every rank's share for own, [B, cp, H / cp, s, K]."""
    return _exchange(x_BHSK.unflatten(2, (group.size, -1)).movedim(2, 0), group).transpose(0, 1)


def _exchange(by_rank: Tensor, group: Group) -> Tensor:
    """What is for each rank, [cp, …] → what comes from each."""
    equal = [1] * group.size
    return wait(_operators.all_to_all_single(by_rank.contiguous(), equal, equal, group.name))


# Ring and gather: piece after piece of the keys


@cache
def attend_in_parts(attend: Attend, attention: str, method: str, group: Group) -> Attend:
    """Own queries attend to all keys, by the part of the kernel `attention` that gives its log-sum-exp.

    The mask is what `share_documents` prepares. InvalidConfig if the kernel has no such part.
    """
    if not find_kernel(AttentionKernel, attention).partial:
        raise InvalidConfig(f"kernels.attention={attention} gives no log-sum-exp, by which {method} joins its parts")

    def attend_to_all(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, mask: Tensor | None) -> Tensor:
        out, _ = _attend(q_BHsK, k_BGsK, v_BGsK, mask, attention, method, group.name, group.size, group.rank)
        return out

    return attend_to_all


class _Pieces(Protocol):
    """How keys and values come to a rank, and their gradients back."""

    def __init__(self, own: Queries): ...

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """All pieces, own keys first: those of keys that came together, together."""

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """The gradients of own k and v over all ranks, [2, B, G, s, K]; `differentiate` gives those of a piece."""


class _Ring:
    """One rank's keys and values after the other's, [2, B, G, s, K]."""

    def __init__(self, own: Queries):
        self.own = own

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """The next keys and values are on their way while whoever iterates attends to pieces."""
        own, group, kv = self.own, self.own.group, torch.stack((k, v))
        for step in range(group.size):
            coming = _begin_pass(kv, group) if step + 1 < group.size else None
            yield own.see(own.chunks_of[(group.rank - step) % group.size], *kv) if step else own.see_own(k, v)
            if coming is not None:
                kv = wait(coming).view_as(kv)

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """Gradients follow their keys one step behind: what comes has the terms of all ranks that saw these before."""
        steps = self.forward(k, v)
        own_terms, coming = _add_up(next(steps), differentiate, k), None
        for pieces in steps:
            terms = _add_up(pieces, differentiate, k)
            terms = terms if coming is None else terms.add_(wait(coming).view_as(terms))
            coming = _begin_pass(terms, self.own.group)
        return own_terms if coming is None else own_terms.add_(wait(coming).view_as(own_terms))


class _Gather:
    """Keys and values of all ranks at once, [2, B, G, S - s, K] in the order of positions."""

    def __init__(self, own: Queries):
        self.own = own
        others = [rank for rank in range(own.group.size) if rank != own.group.rank]
        by_chunk = {chunk: (rank, i) for rank in others for i, chunk in enumerate(own.chunks_of[rank])}
        self.chunks = sorted(by_chunk)
        self.places = [by_chunk[chunk] for chunk in self.chunks]
        """Whose a chunk is, and which of this rank's."""

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """Own keys are attended to while the others come."""
        coming = begin_gather(torch.stack((k, v))[None], self.own.group)
        yield self.own.see_own(k, v)
        kv = torch.cat(self._in_order(wait(coming)), -2)
        del coming
        yield self.own.see(self.chunks, *kv)

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """Each rank's terms of all gradients are summed over the ranks."""
        steps, group = self.forward(k, v), self.own.group
        own_terms = _add_up(next(steps), differentiate, k)
        by_rank = own_terms.new_zeros(group.size, *own_terms.shape)
        by_rank[group.rank] = own_terms
        in_order, length = self._in_order(by_rank), self.own.length
        for piece in next(steps):
            terms = differentiate(piece)
            for i in range(piece.keys.start // length, piece.keys.stop // length):
                first, end = max(i * length, piece.keys.start), (i + 1) * length
                here = slice(first - piece.keys.start, end - piece.keys.start)
                in_order[i][:, piece.samples, :, first - i * length :] += terms[..., here, :]
        return wait(begin_scatter(by_rank, group))[0]

    def _in_order(self, by_rank: Tensor) -> list[Tensor]:
        """Each rank's tokens, [cp, …, s, K], as views of others' chunks in the order of positions, [..., c, K]."""
        by_chunk = by_rank.split(self.own.length, -2)
        return [by_chunk[i][rank] for rank, i in self.places]


def _add_up(pieces: list[AttentionTile], differentiate: Callable[[AttentionTile], Tensor], like: Tensor) -> Tensor:
    """The terms of keys and values that came together, [2, B, G, s, K]; 0 for what was not seen."""
    total: Tensor | None = None
    for piece in pieces:
        terms = differentiate(piece)
        if total is None:
            if terms.shape[1:] == like.shape:
                total = terms
                continue
            total = terms.new_zeros((2, *like.shape))
        total[:, piece.samples, :, piece.keys] += terms
    exact = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros((2, *like.shape), dtype=exact) if total is None else total


_WAYS: dict[str, type[_Pieces]] = {"ring": _Ring, "gather": _Gather}


def _begin_pass(x: Tensor, group: Group) -> Tensor:
    """What the rank before sends, flat, once it was waited for; `x` goes to the rank behind."""
    to_ranks, from_ranks = [0] * group.size, [0] * group.size
    to_ranks[(group.rank + 1) % group.size] = from_ranks[group.rank - 1] = x.numel()
    return _operators.all_to_all_single(x.reshape(-1), from_ranks, to_ranks, group.name)


@composite("dtlayout::context_attention")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, attention: str, method: str, group: str, cp: int,
    rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    own = Queries(q, documents, attention, Group(group, cp, rank))
    pieces = chain.from_iterable(_WAYS[method](own).forward(k, v))
    if own.is_whole:
        out, sums = own.attend(next(pieces))
    else:
        out, sums = q.new_zeros(q.shape, dtype=own.exact), q.new_full(q.shape[:3], -torch.inf, dtype=own.exact)
    for piece in pieces:
        here = piece.samples, slice(None), piece.queries
        join(out[here], sums[here], *own.attend(piece))
    return torch.empty_like(q).copy_(out), sums


@composite("dtlayout::context_attention_backward")
def _differentiate(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, out: Tensor, sums: Tensor,
    attention: str, method: str, group: str, cp: int, rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    own = Queries(q, documents, attention, Group(group, cp, rank))
    dq = torch.zeros_like(q, dtype=own.exact)

    def differentiate(piece: AttentionTile) -> Tensor:
        return own.differentiate(piece, upstream, out, sums, dq)

    dk, dv = _WAYS[method](own).backward(k, v, differentiate)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Any, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@_differentiate.register_fake
def _(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.where = inputs[4:]


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_differentiate(upstream, *ctx.saved_tensors, *ctx.where), *[None] * 6


_attend.register_autograd(_backward, setup_context=_keep)
