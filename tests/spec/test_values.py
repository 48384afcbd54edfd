"""The other values: model shape, batch, kernels, precision, recomputation and the errors themselves."""

import re
from dataclasses import FrozenInstanceError, replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtlayout.base import errors
from dtlayout.base.errors import DtlayoutError, InvalidConfig, InvalidLayout
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.device import Device, check_compute_format, device_of
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention, ModelShape, divisors
from dtlayout.spec.precision import BYTES, Precision
from dtlayout.spec.recompute import Recompute

SHAPE = ModelShape(name="m", hidden_size=96, num_layers=6, num_heads=12, num_kv_heads=4, ffn_size=40, vocab_size=56)


@pytest.mark.parametrize("value", [SHAPE, Batch(global_batch=1, seq_len=1), Kernels(), Layout(), Precision()])
def test_a_value_is_frozen(value):
    with pytest.raises(FrozenInstanceError):
        setattr(value, next(iter(vars(value))), 1)


@given(hidden=st.integers(1, 64), heads=st.integers(1, 12), kv_heads=st.integers(1, 12))
def test_a_shape_has_heads_of_even_width_that_share_keys_evenly(hidden, heads, kv_heads):
    sizes = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads}
    if hidden % heads or hidden // heads % 2 or heads % kv_heads:
        with pytest.raises(InvalidConfig, match=r"^model\.") as caught:
            replace(SHAPE, **sizes)
        if f"multiple of {2 * heads}" in str(caught.value):
            works = [{**sizes, "hidden_size": 2 * heads, "num_kv_heads": heads}]
        else:
            works = [{**sizes, "num_kv_heads": int(n)} for n in re.findall(r"\d+", str(caught.value).partition(";")[2])]
        assert [replace(SHAPE, **w).num_heads for w in works] == [heads] * len(works) != []
    else:
        assert replace(SHAPE, **sizes).head_width * heads == hidden


def test_a_shape_reports_every_size_that_is_not_positive():
    with pytest.raises(InvalidConfig) as caught:
        replace(SHAPE, num_layers=0, vocab_size=-1, num_heads=0)
    assert caught.value.problems == [
        "model.num_layers=0 must be from 1 to 10,000",
        "model.num_heads=0 must be from 1 to a million",
        "model.vocab_size=-1 must be from 1 to a billion",
    ]


def test_a_shape_with_experts_has_some_of_them_in_some_block():
    experts = Experts(number=8, per_token=2, ffn_size=16, dense_layers=2)
    shape = replace(SHAPE, experts=experts)
    assert shape.kinds(range(6)) == [(shape, 4), (SHAPE, 2)]
    assert shape.kinds(range(1, 2)) == [(shape, 0), (SHAPE, 1)]
    assert shape.kinds(range(2, 5)) == [(shape, 3)]
    assert SHAPE.kinds(range(3)) == [(SHAPE, 3)]
    with pytest.raises(InvalidConfig, match=r"^model.experts.per_token=9 is more than number=8$"):
        replace(experts, per_token=9)
    with pytest.raises(InvalidConfig, match=r"experts\.dense_layers=6 leaves none of num_layers=6 blocks with experts"):
        replace(SHAPE, experts=replace(experts, dense_layers=6))


def test_latent_attention_rotates_a_part_of_each_head():
    latent = LatentAttention(query_rank=16, kv_rank=8, rope_width=4, value_width=6)
    assert replace(SHAPE, num_kv_heads=12, latent_attention=latent).latent_attention == latent
    with pytest.raises(InvalidConfig) as caught:
        replace(SHAPE, latent_attention=replace(latent, rope_width=8))
    assert caught.value.problems == [
        "model.latent_attention.rope_width=8 must be below the width of a head, 8",
        "model.num_kv_heads=4 must be num_heads=12 with latent_attention",
    ]


def test_only_tied_embeddings_have_a_second_name():
    assert SHAPE.aliases == {}
    assert replace(SHAPE, tied_embeddings=True).aliases == {"lm_head.weight": "model.embed_tokens.weight"}


@given(st.integers(1, 3000))
def test_divisors_are_all_that_divide(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_batch_reports_every_size_that_is_not_positive():
    with pytest.raises(InvalidConfig) as caught:
        Batch(global_batch=0, seq_len=-4)
    assert caught.value.problems == [
        "batch.global_batch=0 must be from 1 to a billion",
        "batch.seq_len=-4 must be from 1 to a billion",
    ]
    assert Batch(global_batch=3, seq_len=5).num_tokens == 15


@pytest.mark.parametrize(
    ("make", "name"), [(Kernels, "attention"), (Kernels, "norm"), (Precision, "params"), (Precision, "reduce")]
)
def test_an_unknown_choice_is_refused_with_the_known_ones(make, name):
    with pytest.raises(
        InvalidConfig, match=rf"^{make.__name__.lower()}\.{name}='magic' is unknown; use one of"
    ) as caught:
        make(**{name: "magic"})
    known = re.findall(r"'([\w-]+)'", str(caught.value).partition("use one of")[2])
    beside = {"compute": "float16"} if name == "reduce" else {}
    assert [getattr(make(**{name: each, **beside}), name) for each in known] == known
    assert len(known) > 1


@given(*[st.sampled_from(sorted(BYTES))] * 3)
def test_masters_are_never_coarser_than_what_is_computed(params, compute, reduce):
    assume(params != "float16" and (reduce != "float16" or compute == "float16"))
    if BYTES[params] >= BYTES[compute] and (params, compute) != ("bfloat16", "float16"):
        Precision(params=params, compute=compute, reduce=reduce)
        return
    with pytest.raises(InvalidConfig, match=f"params={params} is coarser than precision.compute={compute}") as caught:
        Precision(params=params, compute=compute, reduce=reduce)
    advised = re.search(r"use params=(\w+) or finer", str(caught.value))[1]
    Precision(params=advised, compute=compute, reduce=reduce)


def test_fp16_is_no_format_of_masters_and_sums_only_what_a_scale_lifts():
    with pytest.raises(InvalidConfig, match=r"params=float16 cannot hold updates: .*; use params=float32"):
        Precision(params="float16", compute="float16")
    with pytest.raises(
        InvalidConfig, match=r"reduce=float16 sums gradients that nothing scales in precision\.compute=b"
    ):
        Precision(reduce="float16")
    Precision(compute="float16", reduce="float16")
    with pytest.raises(
        InvalidConfig,
        match=r"params=bfloat16 is coarser than precision\.compute=float16: .* use params=float32 or finer",
    ):
        Precision(params="bfloat16", compute="float16")


V100 = device_of(find_gpu("v100-32g-sxm"))


@pytest.mark.parametrize(
    ("device", "compute"),
    [(V100, "float16"), (V100, "float32"), (device_of(find_gpu("a100-80g-sxm")), "bfloat16"),
     (device_of(find_gpu("mi300x-192g")), "bfloat16"), (Device("cuda"), "bfloat16"), (Device("cpu"), "bfloat16")],
)  # fmt: skip
def test_only_bf16_on_a_gpu_that_is_known_to_lack_it_is_refused(device, compute):
    assert check_compute_format(device, compute) == []
    (refusal,) = check_compute_format(V100, "bfloat16")
    assert refusal.what == (
        "precision.compute=bfloat16 is nothing that v100-32g-sxm, of compute capability 7.0, multiplies in"
    )


@given(st.integers(1, 9), st.integers(1, 40))
def test_recompute_every_nth_covers_one_of_n_evenly_spaced(every, num_layers):
    covered = [layer for layer in range(num_layers) if Recompute.parse(f"every-{every}").covers(layer)]
    assert covered == list(range(every - 1, num_layers, every))


@pytest.mark.parametrize(
    ("text", "share", "kept"),
    [
        ("none", 0, set()),
        ("full", 9, set()),
        ("selective", 9, {"matmuls", "attention"}),
        ("keep-matmuls", 9, {"matmuls"}),
        ("keep-attention", 9, {"attention"}),
    ],
)
def test_recompute_by_name_covers_all_or_nothing(text, share, kept):
    recompute = Recompute.parse(text)
    assert sum(map(recompute.covers, range(9))) == share
    assert recompute.kept == kept
    assert recompute.is_selective == bool(kept)


def test_blocks_of_each_period_are_recomputed_and_counted():
    for text in ("every-3", "2-of-3", "3-of-4", "full", "none"):
        recompute = Recompute.parse(text)
        for start, stop in product(range(9), range(9)):
            layers = range(start, max(start, stop))
            assert recompute.count(layers) == sum(map(recompute.covers, layers)), (text, layers)
    assert [Recompute.parse("2-of-3").covers(layer) for layer in range(6)] == [False, True, True] * 2


@pytest.mark.parametrize(
    "text", ["", "every-0", "every-", "every-2x", "every--1", "Full", "every-01", "1-of-3", "3-of-3", "0-of-2", "2-of-"]
)
def test_recompute_refuses_other_words(text):
    with pytest.raises(InvalidConfig, match=re.escape(f"layout.recompute={text!r} is unknown; use none, full,")):
        Recompute.parse(text)


def test_every_error_for_people_is_a_dtlayout_error_with_an_exit_code_that_says_why():
    raised = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(raised) > 5
    for error in raised:
        assert issubclass(error, DtlayoutError)
        others = {"LostRanks": errors.EXIT_CRASHED}
        assert error.exit_code == others.get(error.__name__, errors.EXIT_REFUSED)
    codes = [errors.EXIT_DONE, errors.EXIT_CRASHED, errors.EXIT_REFUSED, errors.EXIT_STOPPED, errors.EXIT_NON_FINITE]
    assert codes == [0, 1, 2, 3, 4]  # the contract of train.py


@pytest.mark.parametrize("error", [InvalidConfig, InvalidLayout])
def test_problems_are_one_line_each(error):
    assert error("alone").problems == ["alone"]
    assert str(error(["first", "second"])) == "first\nsecond"
    assert error(("first", "second")).problems == ["first", "second"]
