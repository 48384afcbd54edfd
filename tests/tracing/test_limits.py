"""Reasons against parts of sequences and against documents, which a trace finds in a model's code."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from toys import make_config

from dtlayout.models.operations import SelfAttention
from dtlayout.tracing.building import build_model
from dtlayout.tracing.limits import find_sequence_limits

PLAIN = SelfAttention(4, 2, 8, 8)


def find_limits(
    family: str, attention: SelfAttention = PLAIN, *, base: nn.Module | None = None, **asked: object
) -> dict[str, str]:
    model = build_model(make_config(family), torch.float32)
    return find_sequence_limits(model, base or model.model, [*model.model.layers], [attention], [asked])


def test_a_plain_llama_has_no_limit():
    assert find_limits("llama") == {}


@pytest.mark.parametrize(
    ("attention", "asked", "reason"),
    [
        (replace(PLAIN, window=5), {}, "its attention has a window, which no kernel joins part after part"),
        (replace(PLAIN, window=5), {"softcap": 30.0}, "its attention has a window and a softcap, which no kernel"),
        (replace(PLAIN, value_width=4), {}, "its attention has values of another width than its keys, which no kernel"),
    ],
)
def test_what_no_kernel_joins_goes_by_heads_alone(attention, asked, reason):
    found = find_limits("llama", attention, **asked)
    assert found.keys() == {"ring", "gather"} and all(each.startswith(reason) for each in found.values())


def test_sinks_are_no_part_of_any_method_and_go_with_documents():
    assert find_limits("llama", replace(PLAIN, sinks=True)) == {"cp": "its attention has sinks"}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda: find_limits("stablelm"), "its attention is no function that transformers looks up by name"),
        (lambda: find_limits("llama", mask=True), "its blocks make a mask of their own"),
        (lambda: find_limits("llama", base=nn.Linear(1, 1)), "its base model is not given the positions of its tokens"),
    ],
)
def test_some_code_allows_neither_cp_nor_documents(found, reason):
    assert found() == {"cp": reason, "document_mask": reason}
