"""Where a model does not fit, recommend and explain name the cheapest fine-tuning that does."""

import json
from dataclasses import replace

import pytest
from small import scenario

from dtlayout.cli import main
from dtlayout.costmodel.engine import find_engine
from dtlayout.models.presets import find_preset
from dtlayout.planner.fine_tuning import list_fine_tunings
from dtlayout.spec.adapter import Adapter

ON_ONE = ("--gpu", "rtx4090-24g", "--gpus", "1", "--seq-len", "2048", "--global-batch", "4")
PLAN = """
model = {name = "llama3.1-8b"}
batch = {global_batch = 4, seq_len = 2048}
layout = {micro_batch = 1, zero = 3, recompute = "full"}
"""


def run(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    main([*arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (("llama3.1-8b",), "To fine-tune, --adapter lora trains small matrices beside a frozen model: 1 rank"),
        (("qwen2.5-14b",), "To fine-tune, --adapter lora --precision base=nf4 trains small matrices beside a frozen"),
        (
            ("qwen2.5-14b", "--adapter", "lora"),
            "To fine-tune, --precision base=nf4 stores the frozen weights in",
        ),
        (("llama3.2-1b", "--adapter", "lora"), ""),
    ],
)
def test_recommend_offers_an_adapter_and_then_a_base_of_four_bits(capsys, model, said):
    main(["recommend", "--model", *model, *ON_ONE])
    text = "".join(capsys.readouterr())  # a refusal goes to stderr
    assert said in text if said else "To fine-tune" not in text, text


def test_explain_shows_what_fits_the_same_way_and_what_it_recommends_is_right(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    explain = ("explain", str(path), "--gpu", "rtx4090-24g", "--world", "1")
    text = run(capsys, *explain)
    assert "to fine-tune, a frozen model with an adapter fits:" in text and "--adapter.method=lora" in text
    found = json.loads(run(capsys, *explain, "--json"))["fine_tuning"]
    adapted = json.loads(run(capsys, *explain, *found["overrides"], "--json"))
    assert adapted["peak_memory_bytes"] == found["peak_memory_bytes"] and adapted["fine_tuning"] is None


def test_other_programs_have_no_base_of_few_bits_and_the_last_way_leaves_none():
    dense = replace(scenario(), model=find_preset("debug"))
    assert [way.overrides for way in list_fine_tunings(replace(dense, engine=find_engine("megatron", "")))] == [
        ("--adapter.method=lora",)
    ]
    ours = replace(dense, engine=find_engine("dtlayout", ""), model=replace(dense.model, adapter=Adapter()))
    (last,) = list_fine_tunings(ours)
    assert last.overrides == ("--precision.base=nf4",) and not [*list_fine_tunings(last.scenario)]
