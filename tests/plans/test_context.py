"""What context parallelism refuses of a module, and which tokens a rank has; its numbers are tests/distributed's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtlayout.base.errors import InvalidConfig
from dtlayout.mesh.axes import own_positions
from dtlayout.ops.documents import Documents, count_scores, share_positions
from dtlayout.ops.rope import RotaryEmbedding
from dtlayout.plans.attention_tiles import Queries
from dtlayout.plans.collectives import Group
from dtlayout.plans.context import apply_context
from dtlayout.spec.context_parallel import CONTEXT_METHODS, chunk_length, own_parts
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

SHAPE = ModelShape(
    name="m", hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_size=8, vocab_size=8
)  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = lambda q, k, v, mask: q


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(
    ("styles", "attention", "problem"),
    [
        ({"0.attend": "ring"}, "sdpa-cudnn", "kernels.attention=sdpa-cudnn gives no log-sum-exp, by which ring joins"),
        ({"0.attend": "zig-zag"}, "sdpa-flash", "'attend' of Attention is no RotaryEmbedding"),
    ],
)
def test_a_place_that_a_style_does_not_fit_is_refused(styles, attention, problem):
    with pytest.raises(InvalidConfig, match=problem):
        apply_context(nn.Sequential(Attention()), styles, attention, init_device_mesh("cpu", (2,)))


@pytest.mark.usefixtures("two_fake_ranks")
def test_a_function_that_no_method_joins_is_refused_when_it_is_called():
    block = nn.ModuleDict({"inner": Attention()})
    apply_context(nn.Sequential(block), {"0.attend": "refused"}, "sdpa-math", init_device_mesh("cpu", (2,)))
    with pytest.raises(InvalidConfig, match="ModuleDict attends with a mask, a softcap or values of another width"):
        block["inner"].attend(*torch.zeros(3), None)


@given(st.sampled_from(list(CONTEXT_METHODS)), st.integers(1, 6), st.integers(1, 4))
def test_ranks_share_all_positions_and_as_many_each(name, cp, times):
    method = CONTEXT_METHODS[name]
    seq_len = method.granule(cp) * times
    shares = [[i for part in own_parts(method.order, seq_len, cp, rank) for i in part] for rank in range(cp)]
    assert sorted(position for share in shares for position in share) == list(range(seq_len))
    assert {len(share) for share in shares} == {seq_len // cp} and all(share == sorted(share) for share in shares)
    if method.order == "zig-zag":  # and see as many positions, themselves and all before
        assert len({sum(share) for share in shares}) == 1


def test_a_rank_without_cp_has_whole_samples():
    assert own_positions(1, Layout(tp=2), 8) == (range(8),)
    assert own_positions(3, Layout(cp=2, tp=2), 8) == (range(2, 4), range(4, 6))


def test_a_table_of_own_positions_has_the_rows_of_the_whole_one():
    whole, own = (RotaryEmbedding(SHAPE, 8, torch.float64) for _ in range(2))
    own.hold((range(2, 4), range(6, 7)))
    assert torch.equal(own.cos, whole.cos[[2, 3, 6]]) and torch.equal(own.sin, whole.sin[[2, 3, 6]])


def test_tables_of_documents_have_the_rows_of_where_their_tokens_stand():
    whole, own = (RotaryEmbedding(SHAPE, 8, torch.float64) for _ in range(2))
    documents = Documents.from_starts(torch.tensor([[0, 0, 0, 0, 4, 5, 6, 7]]))
    own.find_positions = lambda documents: share_positions(documents.starts, 2)[1]
    rows = share_positions(documents.starts, 2)[1]
    assert all(map(torch.equal, own.tables(documents), (whole.cos[rows], whole.sin[rows])))
    assert own.tables(None) == (own.cos, own.sin)


def draw_starts(seed: int, seq_len: int, mean: float, spread: float) -> torch.Tensor:
    """Documents whose lengths' logarithms are normal, packed into a sequence."""
    lengths = torch.empty(seq_len).log_normal_(mean, spread, generator=torch.Generator().manual_seed(seed)).ceil()
    firsts = torch.cat((torch.zeros(1), lengths.cumsum(0)))
    positions = torch.arange(seq_len, dtype=torch.float32)
    return firsts[torch.searchsorted(firsts, positions, right=True) - 1].to(torch.int32)[None]


def find_imbalance(starts: torch.Tensor, shares: torch.Tensor) -> float:
    """The scores that the mask leaves of a rank's queries: the most of any rank over the mean."""
    scores = count_scores(starts, 1)[shares].sum(1).double()
    return float(scores.max() / scores.mean())


@pytest.mark.parametrize(("seq_len", "cp"), [(8192, 4), (131072, 8), (131072, 16)])
@pytest.mark.parametrize(("mean", "spread"), [(6.9, 1.2), (5.0, 2.5), (7.5, 1.0)], ids=["web", "mixed", "long"])
def test_documents_give_every_rank_as_many_tokens_and_as_many_scores(seq_len, cp, mean, spread):
    parts = [own_parts("zig-zag", seq_len, cp, rank) for rank in range(cp)]
    by_tokens = torch.tensor([[position for part in own for position in part] for own in parts])
    before = []
    for seed in range(4):
        starts = draw_starts(seed, seq_len, mean, spread)
        shares = share_positions(starts, cp)
        assert shares.shape == (cp, seq_len // cp) and shares.flatten().sort().values.equal(torch.arange(seq_len))
        assert find_imbalance(starts, shares) < 1.01
        before.append(find_imbalance(starts, by_tokens))
    assert sum(before) / 4 > 1.1


@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_chunks_of_documents_are_an_even_number_for_each_rank_and_whole_in_its_order(cp, times, data):
    seq_len = 2 * cp * times
    length = chunk_length(seq_len, cp)
    assert seq_len % length == 0 and (seq_len // cp) // length in range(2, 17, 2)
    ends = data.draw(st.lists(st.booleans(), min_size=seq_len, max_size=seq_len))
    positions = torch.arange(seq_len, dtype=torch.int32)
    starts = (positions * torch.tensor([True, *ends[1:]])).cummax(0).values[None]
    for share in share_positions(starts, cp):
        assert share.equal(share.sort().values) and (share.unflatten(0, (-1, length)).diff(dim=1) == 1).all()


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.data())
def test_pieces_of_documents_are_the_scores_that_the_mask_leaves_and_no_others(cp, times, num_samples, data):
    seq_len = 2 * cp * times
    ends = data.draw(st.lists(st.booleans(), min_size=num_samples * seq_len, max_size=num_samples * seq_len))
    begins = torch.tensor(ends).view(num_samples, seq_len)
    begins[:, 0] = True
    starts = (torch.arange(seq_len, dtype=torch.int32) * begins).cummax(1).values
    shares = share_positions(starts, cp)
    documents = torch.cat((shares.view(1, -1).to(starts.dtype), starts))
    own = torch.empty(num_samples, 1, seq_len // cp, 1)
    for rank in range(cp):
        queries = Queries(own, documents, "sdpa-flash", Group("", cp, rank))
        others = [queries.chunks_of[source] for source in range(cp) if source != rank]
        expected = int((shares[rank] + 1 - starts[:, shares[rank]]).sum())
        for parts in (others, [sorted(chunk for chunks in others for chunk in chunks)]):
            whole = own.new_empty(num_samples, 1, len(parts[0]) * queries.length, 1) if parts and parts[0] else own
            tiles = queries.own_tiles(own, own) + [
                tile for each in parts for tile in queries.tiles_of(each, whole, whole)
            ]
            assert sum(count_area(tile) for tile in tiles) == expected


def count_area(tile) -> int:
    """The scores of a tile, of a square without those of later keys."""
    samples, num_queries, num_keys = len(tile.k), tile.queries.stop - tile.queries.start, tile.k.shape[2]
    assert tile.v.shape == tile.k.shape and (num_queries == num_keys or not tile.is_square)
    return samples * (num_queries * (num_queries + 1) // 2 if tile.is_square else num_queries * num_keys)
