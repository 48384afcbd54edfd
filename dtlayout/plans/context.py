"""Context parallelism: each rank of cp has some tokens of every sequence, and attention is where they meet.

`CONTEXT_STYLES` defines the styles of a plan. They change three places: the positions of a rank's tokens
(`model.rotary`, `model.positions` of a traced model), the documents that they belong to (`model.prepare_mask`), and how
they attend to all tokens (each block's `attend`, a function of queries, keys, values and a mask; traced blocks have
another one, `attend_otherwise`, for what kernels don't compute). All other parts of a block work on each token by
itself, and need no change. The methods:

- ring (arXiv:2310.01889 with the zig-zag order of spec/context_parallel.py): keys and values go from rank to rank.
  While a rank attends to those of rank s, it sends them on and receives those of rank s - 1. Parts are joined by the
  log-sum-exp of their scores. In backward they go round once more. Gradients follow one step behind, and each rank
  adds its term, until they are where their keys are.
- gather (arXiv:2407.21783, sec. 3.3.2): all keys and values come at once, and again in backward, since nobody keeps
  them. Each rank's terms of their gradients are summed over the ranks. The same parts are attended to, fewer and
  longer. Where documents are kept apart, ring and gather cut the parts at their borders: no kernel needs a mask or
  computes scores that a mask hides.
- all-to-all (arXiv:2309.14509): before attention each rank exchanges heads for tokens, so that it has its share of the
  heads for all tokens; afterwards it exchanges them back. In between, any kernel sees whole sequences.

Messages of each method for a block, with B·s·K elements a head (w: gradients in fp32 or finer):

| method | forward | backward |
|---|---|---|
| ring | cp - 1 messages of 2·G heads | cp - 1 of 2·G heads, and cp - 1 of 2·G in w |
| gather | all-gather of 2·G | all-gather of 2·G, reduce-scatter of 2·G in w |
| all-to-all | H + 2·G heads, and H | H, and H + 2·G |

A ring's message is an all-to-all in which each rank has data for its neighbour alone. NCCL carries it out as one send
and one receive.

Legend: B batch, H query heads, G key-value heads, S sequence, s = S / cp tokens of a rank, c of a chunk, K head width,
N keys of a part, cp ranks.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.attention import Attend
from dtlayout.ops.composite import composite
from dtlayout.ops.documents import Documents, share_positions
from dtlayout.ops.partial import join
from dtlayout.ops.positions import OwnPositions
from dtlayout.ops.rope import RotaryEmbedding
from dtlayout.plans.attention_tiles import AttentionTile, Queries
from dtlayout.plans.collectives import Group, Moved, begin_exchange, begin_gather, begin_scatter, wait
from dtlayout.plans.patterns import check_context_styles
from dtlayout.plans.plan import match_names
from dtlayout.spec.context_parallel import CONTEXT_METHODS, own_parts
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel

ATTENTION_OPERATOR = "dtlayout.context_attention.default"
"""Name of the operator of ring and gather, whose result selective recomputation keeps."""
ContextChange = Callable[[nn.Module, str, str, Group], None]
"""(module, attribute to change, attention kernel, ranks of cp) → None; the change that a style makes."""


def apply_context(module: nn.Module, styles: Mapping[str, str], attention: str, cp_mesh: DeviceMesh) -> None:
    """Change every place below `module` that a pattern of `styles` matches; `attention` is the kernel that attends.

    The last part of a pattern is a module or, like `attend`, a function that a module has: of queries, keys and values
    [B, heads, S, width], with a mask or without one. `all-to-all` calls it with this rank's heads of whole sequences.
    `ring` and `gather` call the kernel in its place, causal and without a bias. Where a stage lacks a place nothing is
    changed. InvalidConfig if a style is unknown, or does not fit the place that it finds. Positions of a module of
    one's own are not changed, and would count from 0 on each rank: it takes those of `own_positions`.
    """
    check_context_styles(styles, CONTEXT_STYLES)
    group = Group.of(cp_mesh)
    for pattern, style in styles.items():
        owner_pattern, _, attribute = pattern.rpartition(".")
        for owner in match_names(owner_pattern, [name for name, _ in module.named_modules()]):
            CONTEXT_STYLES[style](module.get_submodule(owner), attribute, attention, group)


def hold_own_positions(order: str) -> ContextChange:
    """A change that gives a `RotaryEmbedding` tables with only the rows of this rank's tokens, in their order.

    `OwnPositions` are given the positions themselves. With zig-zag order it also finds the rank's positions where
    documents decide them.
    """

    def change(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
        rotary = getattr(owner, attribute)
        if not isinstance(rotary, RotaryEmbedding | OwnPositions):
            raise InvalidConfig(f"plan.context: {attribute!r} of {type(owner).__name__} is no RotaryEmbedding")
        rotary.hold(own_parts(order, rotary.max_seq_len, group.size, group.rank))
        if order == "zig-zag":
            rotary.find_positions = lambda documents: share_positions(documents.starts, group.size)[group.rank]

    return change


def share_documents(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
    """Replace the mask by positions, [1 + B, S], for `attend_in_parts`.

    Row 0 has the positions of each rank, in the order of ranks. The other rows have, for each position of a sequence,
    the start of its document. The tensor stays on the CPU, where `attend_in_parts` reads which chunks see each other.
    """

    def prepare(documents: Documents, like: Tensor) -> Tensor:
        shares_1S = share_positions(documents.starts, group.size).reshape(1, -1)
        return torch.cat((shares_1S.to(documents.starts.dtype), documents.starts))

    setattr(owner, attribute, prepare)


def attend_together(method: str) -> ContextChange:
    """A change that makes `attend` of a module, or of modules inside it, see the keys of all ranks by this method.

    It maps q, k, v [B, H or G, s, K] of this rank's tokens and a mask to the result [B, H, s, K].
    """

    def change(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
        make = pkgutil.resolve_name(CONTEXT_METHODS[method].attend)
        if not (owners := _list_owners(owner, attribute)):
            raise InvalidConfig(
                f"plan.context: {type(owner).__name__} has no function {attribute!r}; name the one that attends"
            )
        for module in owners:
            setattr(module, attribute, make(getattr(module, attribute), attention, method, group))

    return change


def refuse_to_attend(owner: nn.Module, attribute: str, attention: str, group: Group) -> None:
    """Have a function of modules inside `owner` raise InvalidConfig: it would see this rank's keys alone."""

    name = type(owner).__name__

    def refuse(*_: Any) -> Tensor:
        raise InvalidConfig(
            f"{name} attends with a mask, a softcap or values of another width, which no kernel joins part after part; "
            f"use layout.cp_method=all-to-all"
        )

    for module in _list_owners(owner, attribute):
        setattr(module, attribute, refuse)


def _list_owners(block: nn.Module, attribute: str) -> list[nn.Module]:
    """The modules of a block that have a function of this name, as a value of their own or as a method."""
    return [
        module
        for module in block.modules()
        if attribute in vars(module) or any(attribute in vars(each) for each in type(module).__mro__)
    ]


CONTEXT_STYLES: dict[str, ContextChange] = {
    "zig-zag": hold_own_positions("zig-zag"),
    "contiguous": hold_own_positions("contiguous"),
    "documents": share_documents,
    "refused": refuse_to_attend,
    **{name: attend_together(name) for name in CONTEXT_METHODS},
}


# All-to-all: heads for tokens


@cache
def attend_by_heads(attend: Callable[..., Tensor], attention: str, method: str, group: Group) -> Callable[..., Tensor]:
    """`attend` on whole sequences, for each rank's share of the heads; a mask is that of whole sequences.

    Values may have another width than queries and keys. A mask and further arguments are handed on as they come.
    """
    cp = group.size

    def attend_to_whole(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, *further: Any, **named: Any) -> Tensor:
        widths = q_BHsK.shape[-1], k_BGsK.shape[-1], v_BGsK.shape[-1]
        shares = [_widen(x, max(widths)).unflatten(1, (cp, -1)) for x in (q_BHsK, k_BGsK, v_BGsK)]
        whole = Moved.apply(torch.cat(shares, 2), group, _give_heads, _give_tokens)
        parts = whole.split([share.shape[2] for share in shares], 1)
        q, k, v = (x[..., :width] for x, width in zip(parts, widths, strict=True))
        out = attend(q, k, v, *further, **named)
        return Moved.apply(out, group, _give_tokens, _give_heads).flatten(1, 2)

    return attend_to_whole


def _widen(x: Tensor, width: int) -> Tensor:
    """Heads with zeros up to a width, so that one message has queries, keys and values."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _give_heads(x_BcHsK: Tensor, group: Group) -> Tensor:
    """[B, cp, H / cp, s, K], own tokens' heads by rank → [B, H / cp, S, K], this rank's heads for all tokens."""
    return _exchange(x_BcHsK.transpose(0, 1), group).movedim(0, 2).flatten(2, 3)


def _give_tokens(x_BHSK: Tensor, group: Group) -> Tensor:
    """[B, H / cp, S, K], this rank's heads for all tokens → [B, cp, H / cp, s, K], own tokens' heads by rank."""
    return _exchange(x_BHSK.unflatten(2, (group.size, -1)).movedim(2, 0), group).transpose(0, 1)


def _exchange(by_rank: Tensor, group: Group) -> Tensor:
    """[cp, …] by receiving rank → [cp, …] by sending rank."""
    equal = [1] * group.size
    return wait(begin_exchange(by_rank, group, equal, equal))


# Ring and gather: tile after tile of the keys


@cache
def attend_in_parts(attend: Attend, attention: str, method: str, group: Group) -> Callable[..., Tensor]:
    """Attention of own queries to all keys, tile by tile, joined by the log-sum-exp of the kernel `attention`.

    The mask is the result of `share_documents`. InvalidConfig if the kernel gives no log-sum-exp.
    """
    if not find_kernel(AttentionKernel, attention).partial:
        raise InvalidConfig(f"kernels.attention={attention} gives no log-sum-exp, by which {method} joins its parts")

    def attend_to_all(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, mask: Tensor | None = None) -> Tensor:
        out, _ = _attend(q_BHsK, k_BGsK, v_BGsK, mask, attention, method, group.name, group.size, group.rank)
        return out

    return attend_to_all


class _KeyExchange(Protocol):
    """Brings other ranks' keys and values to a rank, and takes their gradients back."""

    def __init__(self, own: Queries): ...

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """All tiles, own keys first; each list has the tiles of keys that came together."""

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """Gradients of own k and v over all ranks, [2, B, G, s, K]; `differentiate` returns those of a tile."""


class _Ring:
    """Keys and values [2, B, G, s, K] of one rank after the other."""

    def __init__(self, own: Queries):
        self.own = own

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """Tiles of each rank's keys in turn; the next keys are under way while the caller attends to these."""
        own, group, kv = self.own, self.own.group, torch.stack((k, v))
        for step in range(group.size):
            coming = _begin_pass(kv, group) if step + 1 < group.size else None
            yield own.tiles_of(own.chunks_of[(group.rank - step) % group.size], *kv) if step else own.own_tiles(k, v)
            if coming is not None:
                kv = wait(coming).view_as(kv)

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """Gradients of own k and v; they follow their keys one step behind, and each rank adds its terms."""
        steps = self.forward(k, v)
        own_terms, coming = _add_up(next(steps), differentiate, k), None
        for tiles in steps:
            terms = _add_up(tiles, differentiate, k)
            terms = terms if coming is None else terms.add_(wait(coming).view_as(terms))
            coming = _begin_pass(terms, self.own.group)
        return own_terms if coming is None else own_terms.add_(wait(coming).view_as(own_terms))


class _Gather:
    """Keys and values of all other ranks at once, [2, B, G, S - s, K] in the order of positions."""

    def __init__(self, own: Queries):
        self.own = own
        others = [rank for rank in range(own.group.size) if rank != own.group.rank]
        by_chunk = {chunk: (rank, i) for rank in others for i, chunk in enumerate(own.chunks_of[rank])}
        self.chunks = sorted(by_chunk)
        self.places = [by_chunk[chunk] for chunk in self.chunks]
        """For each chunk: its rank, and its index among that rank's chunks."""

    def forward(self, k: Tensor, v: Tensor) -> Iterator[list[AttentionTile]]:
        """Tiles of own keys, then of all others, which come while the caller attends to own keys."""
        coming = begin_gather(torch.stack((k, v))[None], self.own.group)
        yield self.own.own_tiles(k, v)
        kv = torch.cat(self._in_order(wait(coming)), -2)
        del coming
        yield self.own.tiles_of(self.chunks, *kv)

    def backward(self, k: Tensor, v: Tensor, differentiate: Callable[[AttentionTile], Tensor]) -> Tensor:
        """Gradients of own k and v: each rank's terms of all keys, summed over the ranks."""
        steps, group = self.forward(k, v), self.own.group
        own_terms = _add_up(next(steps), differentiate, k)
        by_rank = own_terms.new_zeros(group.size, *own_terms.shape)
        by_rank[group.rank] = own_terms
        in_order, length = self._in_order(by_rank), self.own.length
        for tile in next(steps):
            terms = differentiate(tile)
            for i in range(tile.keys.start // length, tile.keys.stop // length):
                first, end = max(i * length, tile.keys.start), (i + 1) * length
                here = slice(first - tile.keys.start, end - tile.keys.start)
                in_order[i][:, tile.samples, :, first - i * length :] += terms[..., here, :]
        return wait(begin_scatter(by_rank, group))[0]

    def _in_order(self, by_rank: Tensor) -> list[Tensor]:
        """Others' chunks [..., c, K] in the order of positions, as views of all ranks' tokens [cp, …, s, K]."""
        by_chunk = by_rank.split(self.own.length, -2)
        return [by_chunk[i][rank] for rank, i in self.places]


def _add_up(tiles: list[AttentionTile], differentiate: Callable[[AttentionTile], Tensor], like: Tensor) -> Tensor:
    """Sum of the terms for keys and values that came together, [2, B, G, s, K]; 0 for keys that no query saw."""
    total: Tensor | None = None
    for tile in tiles:
        terms = differentiate(tile)
        if total is None:
            if terms.shape[1:] == like.shape:
                total = terms
                continue
            total = terms.new_zeros((2, *like.shape))
        total[:, tile.samples, :, tile.keys] += terms
    exact = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros((2, *like.shape), dtype=exact) if total is None else total


_EXCHANGES: dict[str, type[_KeyExchange]] = {"ring": _Ring, "gather": _Gather}


def _begin_pass(x: Tensor, group: Group) -> Tensor:
    """The tensor of the rank before, flat, still to be waited for; `x` goes to the next rank."""
    to_ranks, from_ranks = [0] * group.size, [0] * group.size
    to_ranks[(group.rank + 1) % group.size] = from_ranks[group.rank - 1] = x.numel()
    return begin_exchange(x.reshape(-1), group, to_ranks, from_ranks)


@composite("dtlayout::context_attention")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    attention: str,
    method: str,
    group: str,
    cp: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    own = Queries(q, documents, attention, Group(group, cp, rank))
    tiles = chain.from_iterable(_EXCHANGES[method](own).forward(k, v))
    if own.is_whole:
        out, sums = own.attend(next(tiles))
    else:
        out, sums = q.new_zeros(q.shape, dtype=own.exact), q.new_full(q.shape[:3], -torch.inf, dtype=own.exact)
    for tile in tiles:
        here = tile.samples, slice(None), tile.queries
        join(out[here], sums[here], *own.attend(tile))
    return torch.empty_like(q).copy_(out), sums


@composite("dtlayout::context_attention_backward")
def _differentiate(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    sums: Tensor,
    attention: str,
    method: str,
    group: str,
    cp: int,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    own = Queries(q, documents, attention, Group(group, cp, rank))
    dq = torch.zeros_like(q, dtype=own.exact)

    def differentiate(tile: AttentionTile) -> Tensor:
        return own.differentiate(tile, upstream, out, sums, dq)

    dk, dv = _EXCHANGES[method](own).backward(k, v, differentiate)
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
