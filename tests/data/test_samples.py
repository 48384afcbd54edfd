"""Samples: targets are shifted by one, an epoch sees all, the order depends on nothing but (seed, step, index).

Data-parallel ranks share each global batch, and documents start after each end and in each sample.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtlayout.data.targets
from dtlayout.base.errors import DataError
from dtlayout.base.formatting import plural
from dtlayout.config.sections import DataConfig, Source
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import (
    ROUND,
    SampledSource,
    Samples,
    Seen,
    deal,
    find_starts,
    number_samples,
    open_samples,
    own_indices,
    shuffle,
)
from dtlayout.data.tokens import TokenFile
from dtlayout.spec.batch import IGNORED, Batch, RampStage, count_steps_until

END = 2
degrees = st.integers(1, 8)


def make_samples(folder, seq_len, global_batch, seed=0, **options):
    return Samples(
        (SampledSource(TokenFile.open(folder), seq_len, **options),),
        Batch(seq_len=seq_len, global_batch=global_batch),
        seed,
    )


def sample_ids(step, indices, global_batch, num_samples, seed):
    return shuffle(number_samples(Seen().count_samples(step, global_batch), indices, global_batch), num_samples, seed)


def test_prepared_tokens_open(tmp_path, offline):
    (tmp_path / "a.txt").write_text("hello")
    data = DataConfig(source=str(tmp_path / "a.txt"), tokenizer="bytes", folder=str(tmp_path / "tokens"))
    tokens = TokenFile.open(prepare_tokens(data))
    assert tokens.tokens.tolist() == [*b"hello", 256]
    assert (tokens.num_tokens, tokens.vocab_size, tokens.end_of_document) == (6, 257, 256)
    with pytest.raises(ValueError, match="read-only"):
        tokens.tokens[0] = 1


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_sample_needs_one_token_more_than_its_length(write_tokens, num_tokens, num_samples):
    tokens = TokenFile.open(write_tokens(range(num_tokens)))
    if num_samples:
        assert SampledSource(tokens, 4).num_samples == num_samples
    else:
        with pytest.raises(DataError, match=f"holds {plural(num_tokens, 'token')}, one sample of seq_len=4 needs 5"):
            SampledSource(tokens, 4)


def test_targets_are_the_tokens_shifted_by_one(write_tokens):
    tokens_BS, targets_BS, _ = make_samples(write_tokens(range(41)), 4, 10).batch(0, range(10))
    assert tokens_BS.dtype == targets_BS.dtype == torch.int64
    assert torch.equal(targets_BS, tokens_BS + 1)
    assert sorted(tokens_BS[:, 0].tolist()) == list(range(0, 40, 4))
    assert tokens_BS[:, 0].tolist() != list(range(0, 40, 4))


def test_any_way_to_ask_gives_the_same_batch(write_tokens):
    samples = make_samples(write_tokens(range(100)), 4, 6, seed=1)
    whole = samples.batch(7, range(6))[0]
    parts = [samples.batch(7, indices)[0] for indices in ([0], [1, 2, 3], [], [4, 5])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(samples.batch(7, [5, 0])[0], whole[[5, 0]])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1 << 40))
def test_every_epoch_sees_every_sample_once(global_batch, num_samples, seed):
    num_steps = -(-3 * num_samples // global_batch)
    steps = [sample_ids(step, range(global_batch), global_batch, num_samples, seed) for step in range(num_steps)]
    order = np.concatenate(steps)[: 3 * num_samples].reshape(3, num_samples)
    assert (np.sort(order, axis=1) == np.arange(num_samples)).all()


def test_epochs_and_seeds_have_their_own_order():
    orders = {tuple(sample_ids(step, range(50), 50, 50, seed)) for step in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_late_steps_of_a_large_run_do_not_overflow():
    ids = sample_ids(10**9, [0, 16383], 16384, 10**10, 5)
    assert ((ids >= 0) & (ids < 10**10)).all()


def test_a_larger_model_vocabulary_is_fine_and_a_smaller_one_is_not(write_tokens):
    tokens = TokenFile.open(write_tokens([1, 2, 3], vocab_size=257))
    tokens.check_vocab(257)
    tokens.check_vocab(320)
    with pytest.raises(DataError, match="has 257 ids, the model's vocab_size=256; use a model with vocab_size >= 257"):
        tokens.check_vocab(256)


@pytest.mark.parametrize("options", [{}, {"samples": "padded"}, {"samples": "best-fit"}])
def test_an_id_that_no_tokenizer_gave_is_an_error_with_its_place(write_tokens, options):
    ids = [*range(9), 257, 300, *range(9)]
    folder = write_tokens(ids, documents=[8, 6, 6])
    source = SampledSource(TokenFile.open(folder), 4, **options)
    source.read(np.array([0]))
    with pytest.raises(
        DataError, match=r"tokens\.bin' holds id (257|300) at position (9|10), the tokenizer has 257: the"
    ):
        for number in range(source.num_samples):
            source.read(np.array([number]))
    (folder / "tokens.bin").write_bytes(np.minimum(ids, 256).astype("<u2").tobytes())
    SampledSource(TokenFile.open(folder), 4, **options).read(np.arange(source.num_samples))


def test_truncated_tokens_are_an_error(write_tokens):
    folder = write_tokens(range(10))
    (folder / "tokens.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"has 3 bytes where tokens\.json promises 10 numbers of 2 = 20 bytes"):
        TokenFile.open(folder)
    (folder / "tokens.bin").unlink()
    with pytest.raises(DataError, match="has 0 bytes"):
        TokenFile.open(folder)


def test_an_unprepared_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"tokens\.json is missing; prepare it first"):
        TokenFile.open(tmp_path)


def test_a_description_that_is_not_json_is_an_error(write_tokens):
    folder = write_tokens([1])
    (folder / "tokens.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        TokenFile.open(folder)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"sha256": None}])
def test_a_description_of_something_else_is_an_error(write_tokens, change):
    folder = write_tokens([1])
    info = {**json.loads((folder / "tokens.json").read_text()), **change}
    (folder / "tokens.json").write_text(json.dumps({key: value for key, value in info.items() if value is not None}))
    with pytest.raises(DataError, match="does not describe tokens: it needs dtype, end_of_document"):
        TokenFile.open(folder)


def test_too_few_tokens_for_one_sample_says_how_many_are_needed(write_tokens):
    tokens = TokenFile.open(write_tokens(range(8)))
    with pytest.raises(DataError, match=r"holds 8 tokens, one sample of seq_len=8 needs 9;.*seq_len of at most 7"):
        SampledSource(tokens, 8)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6), degrees)
def test_batches_of_any_sizes_one_after_the_other_are_all_samples_in_order(parts, num_ranks):
    """Each part is a size of the global batch, a multiple of the ranks', and how many steps have it."""
    seen, numbers = Seen(), []
    for per_rank, num_steps in parts:
        batch = Batch(global_batch=per_rank * num_ranks, seq_len=4)
        for step in range(seen.step, seen.step + num_steps):
            for rank in range(num_ranks):
                indices = own_indices(batch.global_batch, rank, num_ranks)
                before = seen.count_samples(step, batch.global_batch)
                numbers += number_samples(before, indices, batch.global_batch).tolist()
        seen = seen.after(seen.step + num_steps, batch)
    assert numbers == list(range(len(numbers)))
    last = next((size * num_ranks for size, steps in reversed(parts) if steps), 0)
    assert seen == Seen(sum(steps for _, steps in parts), len(numbers), 4 * len(numbers), last)


def test_a_step_before_the_count_begins_is_an_error():
    with pytest.raises(DataError, match="step=4 is before step 5, from which on samples are counted"):
        Seen(5, 40, 160).count_samples(4, 8)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=4), st.integers(1, 6), st.integers(0, 20),
    st.integers(1, 20), degrees, degrees,
)  # fmt: skip
def test_ranks_of_a_ramp_read_all_samples_in_order_also_after_a_resume_on_others(
    stages, per_rank, saved, more, num_ranks, others
):
    """Sizes are multiples of both numbers of ranks; a stage is as many samples more and a size."""
    unit, ends = num_ranks * others, itertools.accumulate(length for length, _ in stages)
    ramp = tuple(RampStage(until=end, global_batch=n * unit) for end, (_, n) in zip(ends, stages, strict=True))
    batch, seen, numbers, sizes = Batch(global_batch=per_rank * unit, seq_len=4), Seen(), [], []
    for ranks, steps in ((num_ranks, range(saved)), (others, range(saved, saved + more))):
        samples = Samples((), batch, 0, (1.0,), seen, ramp=ramp)
        for step in steps:
            sizes.append(samples.size_of(step))
            assert sizes[-1] == next((s.global_batch for s in ramp if len(numbers) < s.until), batch.global_batch)
            for rank in range(ranks):
                numbers += samples.number(step, own_indices(sizes[-1], rank, ranks)).tolist()
        seen = seen.after(steps.stop, batch, ramp)
    assert numbers == list(range(sum(sizes)))
    assert seen == Seen(saved + more, len(numbers), 4 * len(numbers), sizes[-1])
    assert seen.after(seen.step, Batch(global_batch=7, seq_len=4)) == seen
    assert count_steps_until(len(numbers), 0, batch.global_batch, ramp) == saved + more
    assert count_steps_until(len(numbers) - 0.5, 0, batch.global_batch, ramp) == saved + more


def test_a_negative_step_is_an_error():
    with pytest.raises(DataError, match="step=-1 is negative"):
        sample_ids(-1, [0], 4, 10, 0)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_the_global_batch_is_an_error(index):
    with pytest.raises(DataError, match=f"index {index} is outside the global batch; use 0 to 3"):
        sample_ids(0, [0, index], 4, 10, 0)


@given(degrees, degrees, degrees)
def test_the_ranks_one_after_the_other_read_the_global_batch(num_microbatches, micro_batch, num_dp_ranks):
    global_batch = num_microbatches * micro_batch * num_dp_ranks
    shares = [own_indices(global_batch, rank, num_dp_ranks) for rank in range(num_dp_ranks)]
    assert all(len(share) == num_microbatches * micro_batch for share in shares)
    assert list(itertools.chain(*shares)) == list(range(global_batch))


@given(st.lists(st.lists(st.integers(0, END), min_size=6, max_size=6), min_size=1, max_size=3))
def test_a_document_starts_after_each_end_and_in_each_sample(rows):
    found = find_starts(torch.tensor(rows) == END)
    assert found.dtype == torch.int32
    for row, starts in zip(rows, found.tolist(), strict=True):
        for position, start in enumerate(starts):
            ends_before = [i for i in range(position) if row[i] == END]
            assert start == (ends_before[-1] + 1 if ends_before else 0)


def test_samples_without_an_end_are_one_document():
    assert not find_starts(torch.zeros(2, 5, dtype=torch.bool)).any()


def test_where_documents_end_is_known_whatever_their_last_token_is(write_tokens):
    folder = write_tokens([7, 7, 9, 7, 9, 9, 7, 7, 9], documents=[2, 1, 3, 3])
    samples = make_samples(folder, 4, 2)
    _, _, is_last = samples.batch(0, range(2))
    by_first = {
        int(tokens[0]): last.tolist() for tokens, last in zip(samples.batch(0, range(2))[0], is_last, strict=True)
    }
    assert by_first == {7: [False, True, True, False], 9: [False, True, False, False]}


def test_padded_samples_are_documents_cut_or_filled_up(write_tokens):
    folder = write_tokens(range(10, 21), documents=[3, 7, 1])
    samples = make_samples(folder, 4, 3, samples="padded")
    assert (samples.num_samples, samples.sources[0].division.num_cut) == (3, 1)
    tokens, targets, is_last = samples.batch(0, range(3))
    order = tokens[:, 0].argsort()
    assert tokens[order].tolist() == [[10, 11, 12, 256], [13, 14, 15, 16], [20, 256, 256, 256]]
    no = IGNORED
    assert targets[order].tolist() == [[11, 12, no, no], [14, 15, 16, 17], [no, no, no, no]]
    assert is_last[order].tolist() == [[False, False, True, False], [False] * 4, [True, False, False, False]]


def test_only_what_the_loss_mask_keeps_is_a_target(write_tokens):
    folder = write_tokens(range(9), loss_mask=[0, 0, 1, 1, 0, 0, 1, 0, 1])
    _, targets, _ = make_samples(folder, 8, 1).batch(0, [0])
    assert targets.tolist() == [[IGNORED, 2, 3, IGNORED, IGNORED, 6, IGNORED, 8]]


@pytest.mark.parametrize(("kind", "num_samples"), [("packed", 3), ("padded", 4), ("best-fit", 3)])
@pytest.mark.parametrize("loss_mask", [(), (1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0), (0,) * 11])
def test_targets_and_samples_without_any_are_those_that_are_counted(
    write_tokens, monkeypatch, kind, num_samples, loss_mask
):
    monkeypatch.setattr(dtlayout.data.targets, "_SAMPLES_AT_ONCE", 2)
    folder = write_tokens(range(11), documents=[3, 6, 1, 1], loss_mask=loss_mask)
    samples = (
        make_samples(folder, 4, num_samples, samples=kind)
        if kind == "best-fit"
        else make_samples(folder, 3, num_samples, samples=kind)
    )
    assert samples.num_samples == num_samples
    _, targets, _ = samples.batch(0, range(num_samples))
    is_target = targets != IGNORED
    assert samples.sources[0].targets[:2] == (is_target.sum(), (~is_target.any(dim=1)).sum())


@given(st.lists(st.floats(0.1, 50), min_size=2, max_size=5), st.integers(0, 1 << 40))
def test_several_sources_have_their_shares_of_each_round_and_none_is_dealt_twice(weights, seed):
    source = SampledSource(TokenFile(np.zeros(9, np.uint16), np.array([0, 9]), None, 1, 0, ""), 4)
    samples = Samples((source,) * len(weights), Batch(seq_len=4, global_batch=1), seed, tuple(weights))
    quotas = samples._quotas
    assert sum(quotas) == ROUND
    assert all(
        abs(quota / ROUND - weight / sum(weights)) <= 1 / ROUND for quota, weight in zip(quotas, weights, strict=True)
    )
    source, number = deal(np.arange(3 * ROUND), quotas, seed)
    for i, quota in enumerate(quotas):
        for each in range(3):
            dealt = number[each * ROUND : (each + 1) * ROUND][source[each * ROUND : (each + 1) * ROUND] == i]
            assert np.array_equal(np.sort(dealt), np.arange(each * quota, (each + 1) * quota))


def test_a_mixture_is_the_same_samples_in_any_parts_and_its_sources_start_again_by_themselves(tmp_path, write_tokens):
    few, many = write_tokens([1] * 1201, name="few"), write_tokens([2] * 40_001, name="many")
    mixture = (Source(source="few.txt", weight=1), Source(source="many.txt", weight=3.0))
    data = DataConfig(mixture=mixture)
    samples = open_samples(data, [few, many], 257, Batch(seq_len=4, global_batch=2000), seed=5)
    firsts = [samples.batch(step, range(2000)).tokens[:, 0] for step in range(5)]
    assert torch.cat(firsts).eq(1).sum() == 2500
    parts = [samples.batch(2, indices).tokens[:, 0] for indices in (range(500), range(500, 2000))]
    assert torch.equal(torch.cat(parts), firsts[2])
    smaller = open_samples(data, [few, many], 257, Batch(seq_len=4, global_batch=1000), seed=5)
    again = [smaller.batch(step, range(1000)).tokens[:, 0] for step in (4, 5)]
    assert torch.equal(torch.cat(again), firsts[2])
    heavier = replace(data, mixture=(mixture[0], replace(mixture[1], weight=4.0)))
    other = open_samples(heavier, [few, many], 257, Batch(seq_len=4, global_batch=2000), seed=5)
    assert other.fingerprint != samples.fingerprint == smaller.fingerprint


@pytest.mark.parametrize(("kind", "shares"), [("packed", (0.25, 0.75)), ("padded", (1 / 31, 30 / 31))])
def test_sources_weighed_by_size_have_shares_like_their_samples_and_the_same_epochs(write_tokens, kind, shares):
    few, many = write_tokens([1] * 401, name="few"), write_tokens([2] * 1201, documents=[40] * 29 + [41], name="many")
    mixture = (Source(source="few.txt", weight="size"), Source(source="many.txt", weight="size"))
    data = DataConfig(mixture=mixture, samples=kind)
    samples = open_samples(data, [few, many], 257, Batch(seq_len=4, global_batch=100), seed=5)
    assert samples.shares == pytest.approx(shares, abs=1 / ROUND)
    epochs = [share / source.num_samples for share, source in zip(samples.shares, samples.sources, strict=True)]
    assert epochs[0] == pytest.approx(epochs[1], rel=0.01)


def test_a_weight_too_small_to_count_is_an_error(write_tokens):
    source = SampledSource(TokenFile.open(write_tokens(range(9))), 4, "tiny.txt")
    with pytest.raises(DataError, match=r"the weight of tiny\.txt is less than 1 / 10000 of all"):
        Samples((source, source), Batch(seq_len=4, global_batch=1), 0, (1e-6, 1.0))


def test_importing_the_data_package_imports_nothing_heavy():
    modules = "samples, dtlayout.data.prepare"
    heavy = "{'torch', 'datasets', 'tokenizers', 'pyarrow'}"
    script = f"import sys, dtlayout.data.{modules}; print(sorted({heavy} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
