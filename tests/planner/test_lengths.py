"""Lengths of samples: what padding wastes, how packing fills, and the memory of the longest."""

import json
import random
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_jobs import job_of

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.lengths import read_lengths
from dtlayout.costmodel.estimate import estimate
from dtlayout.planner.lengths import expect_longest, pack, weigh_lengths
from dtlayout.spec.layout import Layout

SCRIPT = str(Path(__file__).parents[1] / "programs" / "megatron" / "arrays.sh")
COUNTS = st.dictionaries(st.integers(1, 50), st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(COUNTS, st.integers(1, 3))
def test_the_expected_longest_is_the_mean_over_all_draws(counts, number):
    samples = list(Counter(counts).elements())
    draws = [max(draw) for draw in product(samples, repeat=number)] if len(samples) ** number < 10_000 else None
    if draws:
        assert expect_longest(counts, number) == pytest.approx(sum(draws) / len(draws))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_packing_cuts_nothing_and_fills_no_worse_than_half(lengths):
    share = pack(lengths, 100)
    sequences = round(sum(lengths) / (share * 100))
    assert sequences >= sum(lengths) / 100  # nothing is lost
    assert share <= 1 and (len(lengths) == 1 or sequences <= 2 * sum(lengths) / 100 + 1)


def test_packing_is_best_fit():
    assert pack([5, 5, 5, 5], 10) == 1.0 and pack([6, 6, 6], 10) == pytest.approx(0.6)
    assert pack([7, 6, 4, 3], 10) == 1.0  # 7 with 3, and 6 with 4


def job(**layout):
    made = job_of("torchtitan", Layout(**layout))
    return made.scenario, made.estimate.layout, made.estimate.kernels


def test_ways_to_fill_sequences_are_those_of_the_samples():
    scenario, layout, kernels = job(dp_shard=8, zero=3, micro_batch=2)
    found = weigh_lengths({1024: 30, 4096: 10}, scenario, layout, kernels)
    fillings = {each.name: each for each in found.fillings}
    assert found.mean == 1792 and found.median == 1024 and found.longest == 4096 and found.cut == 0
    padded, longest, packed = (fillings[name] for name in ("padded", "padded to the longest", "packed"))
    assert padded.real_share == pytest.approx(1792 / 4096) and padded.tokens == 4096
    share_of_short = 0.75**16  # no long one among the 16 that wait for one another
    assert longest.tokens == pytest.approx(1024 * share_of_short + 4096 * (1 - share_of_short))
    assert packed.real_share == pytest.approx(40 * 1792 / (18 * 4096))
    step_s = estimate(scenario, layout, kernels).step_time_s
    assert packed.step_time_s == padded.step_time_s == pytest.approx(step_s)
    assert packed.real_tokens_per_s_per_gpu == pytest.approx(256 * 4096 * packed.real_share / (step_s * 8))
    speeds = [each.real_tokens_per_s_per_gpu for each in found.fillings]
    assert speeds == sorted(speeds, reverse=True) and found.fillings[0].name == "packed"
    alone = weigh_lengths({1024: 30, 4096: 10}, *job(dp_shard=8, zero=1, micro_batch=2))
    (apart,) = [each for each in alone.fillings if each.name == "padded to the longest"]
    assert apart.tokens == pytest.approx(1024 * 0.75**2 + 4096 * (1 - 0.75**2))


def test_samples_that_are_cut_and_the_longest_sample_are_said():
    scenario, layout, kernels = job(dp_shard=8, zero=3, recompute="full")
    found = weigh_lengths({512: 9, 65_536: 1}, scenario, layout, kernels)
    assert found.cut == 1 and found.longest == 65_536
    assert found.longest_peak_bytes > estimate(scenario, layout, kernels).peak_bytes
    assert found.fits == (found.longest_peak_bytes <= estimate(scenario, layout, kernels).capacity_bytes)
    assert {each.name: each for each in found.fillings}["padded"].real_share == pytest.approx(
        (9 * 512 + 4096) / 10 / 4096
    )


def test_many_samples_are_packed_as_fewer_with_the_same_lengths():
    random.seed(3)
    lengths = Counter(min(4096, int(random.lognormvariate(6, 1)) + 1) for _ in range(60_000))
    few = Counter({length: max(1, number // 10) for length, number in lengths.items()})
    many = [weigh_lengths(each, *job(dp_shard=8)).fillings for each in (lengths, few)]
    shares = [next(each.real_share for each in fillings if each.name == "packed") for fillings in many]
    assert shares[0] == pytest.approx(shares[1], abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff10\n20\n10\n",
        "id,length,text\n1,10,a\n2,20,b\n3,10,c\n",
        "length,number\n10,2\n20,1\n",
        "10 2\n\n20  # one\n",
        "[10, 20, 10]",
        '{"10": 2, "20": 1}',
    ],
)
def test_files_of_lengths_are_read(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path) == {10: 2, 20: 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no length"), ("tokens\n", "has no length"), ("10\nten\n", "line 2: 'ten' is no length"),
        ("10\n0\n", "line 2: '0' is no length"), ("1 2 3\n4\n5 6 7\n", "line 1"), ("[1, -2]", "'-2' is no length"),
        ("id,words\n1,2\n", "no column of id, words is called length or tokens"),
        ("512.5\n3\n", "line 1: '512.5'"),
        ("²\n", "line 1: '²'"), ("9" * 5000, "line 1: "),
        ("[1.5]", "'1.5' is no length"), ('{"3": 0}', "'3' is no length"), ("[1", "is no JSON"),
    ],
)  # fmt: skip
def test_files_of_other_things_are_refused(tmp_path, text, why):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=why):
        read_lengths(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_lengths(tmp_path / "none")


def test_explain_takes_lengths(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("1000 30\n9000 2\n")
    assert main(["explain", SCRIPT, "--gpu", "h100-80g-sxm", "--lengths", str(path)]) == 0
    text = capsys.readouterr().out
    assert "lengths: 32 samples, mean 1500, median 1000, longest 9000 tokens; 6.2% are cut" in text
    assert "padded to the longest" in text and "a micro-batch with the longest, uncut:" in text
    assert main(["explain", SCRIPT, "--gpu", "h100-80g-sxm", "--lengths", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"]["cut"] == 2
    assert main(["explain", SCRIPT, "--gpu", "h100-80g-sxm", "--lengths", str(tmp_path)]) == 2
