"""dtlayout recommend: the best layouts with their reasons, and every question that can be asked of them."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from recommending import DEBUG, HF, LLAMA, ask, refuse, with_model
from tiny import ROOT

from dtlayout.cli import main
from dtlayout.commands.recommend_text import describe_usual
from dtlayout.planner.ranking import LayoutKind
from dtlayout.planner.simplicity import Complexity
from dtlayout.records.intervals import find_alike
from dtlayout.spec.layout import Layout


def test_the_best_come_first_with_cost_and_reason(capsys):
    document = ask(capsys, *LLAMA, "--top", "4")
    layouts = document["layouts"]
    times = [layout["step_time_s"] for layout in layouts]
    assert len(layouts) == 4 and all(later >= 0.995 * times[0] for later in times)
    for layout in layouts:
        assert sum(layout["time"].values()) == pytest.approx(layout["step_time_s"])
        assert sum(layout["memory"][layout["busiest_rank"]].values()) == pytest.approx(layout["peak_bytes"])
        assert layout["peak_bytes"] <= document["scenario"]["allowed_bytes"]
        interval = document["scenario"]["intervals"]["step_time"]
        assert layout["step_time_range_s"] == [layout["step_time_s"] * interval[bound] for bound in ("low", "high")]
        assert layout["peak_range_bytes"][0] < layout["peak_range_bytes"][1]
    assert all(layout["why"] for layout in layouts[:-1]) and layouts[-1]["why"] is None
    assert document["scenario"]["calibrated"] is False
    assert document["alike"]["places"] == 4 and document["alike"]["pairs"] > document["alike"]["right"] > 0
    assert sum(document["searched"]["counts"].values()) == document["searched"]["layouts"]


def test_people_get_a_table_with_bands_bars_shares_and_reasons(capsys):
    assert main(["recommend", *LLAMA, "--top", "2"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "uncalibrated",
        "uncalibrated: no run of it on a100-80g-sxm is known; nothing like it was measured\nassumed of ",
        " times as predicted, for 90% of ",
        "laces 1 to 2 cannot be told apart: layouts predicted within ",
        "█",
        "of the step, %",
        "bubble",
        "1  ",
        "Against other choices",
        "not legal",
    ):
        assert expected in text
    assert len(text.split(" layouts: ")) == 2


def test_leading_layouts_are_told_apart_where_their_steps_differ_by_enough():
    near, far = find_alike([1.0, 1.004, 1.3], "dtlayout"), find_alike([1.0, 1.3], "dtlayout")
    assert (near.places, near.least, near.most) == (2, 0.0, 0.005)
    assert near.right < 0.7 * near.pairs
    assert str(near).startswith("Places 1 to 2 cannot be told apart: layouts predicted within 0.5% of each other came ")
    assert (far.places, far.most) == (1, None) and far.right > 0.9 * far.pairs
    assert str(far).startswith(f"1 is apart from 2: layouts predicted {far.least:.1%} apart or more came in that order")
    assert find_alike([1.0], "dtlayout") is None


def test_under_cp_the_other_ways_to_share_a_sequence_are_said(capsys):
    model = ("--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "8", "--fix", "cp=8", "--top", "1")
    document = ask(capsys, *model, "--seq-len", "131072", "--global-batch", "32")
    assert document["layouts"][0]["layout"]["cp_method"] == "all-to-all"
    against = {each["change"]: each["problems"][0] for each in document["against"]}
    for method in ("ring", "gather"):
        assert "% slower: " in against[f"cp_method={method}"] and "waiting for cp" in against[f"cp_method={method}"]


def test_a_kernel_that_some_way_to_share_a_sequence_allows_is_judged_with_that(capsys):
    model = ("--model", "llama3.1-405b", "--gpu", "h100-80g-sxm", "--gpus", "1024", "--top", "1", "--fix", "cp=2")
    document = ask(capsys, *model, "--seq-len", "4096", "--global-batch", "1024")
    assert document["layouts"][0]["layout"]["cp_method"] == "ring", "which cuDNN's attention is not for"
    (cudnn,) = (each for each in document["against"] if each["change"] == "attention=sdpa-cudnn")
    assert (cudnn["outcome"], cudnn["layout"]["cp_method"]) == ("slower", "all-to-all")


def test_what_differs_in_one_choice_may_be_near_a_first_place_that_stands_apart(capsys):
    model = ("--model", "llama3.1-405b", "--gpu", "h100-80g-sxm", "--gpus", "16384", "--engine", "megatron")
    document = ask(capsys, *model, "--seq-len", "8192", "--global-batch", "2048", "--top", "2")
    alike, (near, *_) = document["alike"], document["remarks"]
    step_s = document["layouts"][0]["step_time_s"]
    assert alike["places"] == 1 and document["layouts"][1]["step_time_s"] > (1 + alike["least"]) * step_s
    steps = {
        each["change"]: each["step_time_s"]
        for each in document["against"]
        if each["outcome"] in ("slower", "as fast", "faster")
    }
    named = {name.partition("=")[0] for name, each_s in steps.items() if each_s < (1 + alike["least"]) * step_s}
    assert named and near.endswith(f"a step is less than {alike['least']:.1%} longer.")
    assert all(f"{name}=" in near for name in named)


def test_other_choices_are_judged_each_with_a_reason(capsys):
    document = ask(capsys, *LLAMA)
    against = {entry["change"]: entry for entry in document["against"]}
    assert against["compile=none"]["outcome"] == "slower"
    assert all(entry["problems"] for entry in against.values())
    assert {"not legal", "does not fit", "slower", "as fast"} >= {entry["outcome"] for entry in against.values()}
    for entry in against.values():  # none contradicts the list above
        name, _, value = entry["change"].partition("=")
        having = [e for e in document["layouts"] if str((e["layout"] | e["kernels"])[name]).lower() == value]
        assert all(entry["step_time_s"] <= 1.006 * e["step_time_s"] for e in having), entry["change"]


def test_a_choice_that_is_as_fast_is_not_called_faster_or_slower_too(capsys):
    nearly = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "64", "--seq-len", "8192"]
    verdicts = [v for v in ask(capsys, *nearly, "--global-batch", "128")["against"] if v["outcome"] == "as fast"]
    said = {verdict["problems"][0].partition(":")[0] for verdict in verdicts}
    assert "as fast within 0.5%" in said and said <= {"as fast within 0.5%", "as fast"}


def test_choices_that_end_in_one_layout_are_one_row(capsys):
    megatron = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "8192"]
    assert main(["recommend", *megatron, "--global-batch", "64", "--engine", "megatron", "--fix", "dp=8"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if re.match(r"  [a-z_]+=", line)]
    names, said = [row[1] for row in rows], [row[-1] for row in rows]
    assert "attention=sdpa-flash or flash-attn" in names and len(set(said)) == len(said) > 2


def test_waiting_is_for_the_axes_that_are_there(capsys):
    long = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "131072"]
    document = ask(capsys, *long, "--global-batch", "8", "--fix", "pp=1", "--top", "1", "--why-not", "tp8")
    against = {entry["change"]: entry["problems"][0] for entry in document["against"]}
    assert document["layouts"][0]["layout"]["cp"] == 8
    assert "in waiting for tp and cp" in against["tp=2"] and against["recompute=none"].startswith("each rank needs ")
    assert document["why_not"]["problems"][0].startswith("each rank needs ")


def test_no_sequence_parallelism_means_no_overlap_of_it(capsys):
    tight = ["--model", "llama3.1-70b", "--gpu", "h100-80g-sxm", "--gpus", "16", "--seq-len", "8192"]
    document = ask(capsys, *tight, "--global-batch", "512", "--fix", "tp=2")
    (other,) = [v for v in document["against"] if v["change"] == "sequence_parallel=false"]
    assert document["layouts"][0]["layout"]["tp_overlap"] and not other["layout"]["tp_overlap"]


def test_what_is_fixed_is_no_other_choice(capsys):
    names = {entry["change"].partition("=")[0] for entry in ask(capsys, *LLAMA, "--fix", "tp2+sp mb=1")["against"]}
    assert "pp" in names and not {"tp", "micro_batch", "sequence_parallel"} & names


def test_where_all_is_fixed_there_are_no_other_choices(capsys, tmp_path):
    page, fixed = tmp_path / "best.html", "dp16 mb1 zero3 sdpa-flash loss linear compile none"
    assert main(["recommend", *LLAMA, "--fix", fixed, "--page", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("Against") for line in lines) and "1 layout." in lines
    assert all(any(pair) for pair in pairwise(lines)), "no two empty lines"
    assert page.exists()


def test_the_best_places_are_different_ideas(capsys):
    ideas = [LayoutKind.of(Layout(**e["layout"])) for e in ask(capsys, *LLAMA)["layouts"]]
    assert len(ideas) == len(set(ideas)) == 5


def test_no_place_only_costs_beside_a_better_one(capsys):
    """pp2 with selective recomputation is as slow as dp with more of it, which does without pp and is smaller."""
    model = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "64", "--seq-len", "8192"]
    layouts = ask(capsys, *model, "--global-batch", "512")["layouts"]
    for place, entry in enumerate(layouts):
        own = {axis for axis in ("tp", "pp", "cp", "virtual_stages") if entry["layout"][axis] > 1}
        for better in layouts[:place]:
            others = {axis for axis in ("tp", "pp", "cp", "virtual_stages") if better["layout"][axis] > 1}
            spares = entry["peak_bytes"] <= 0.95 * better["peak_bytes"]
            does_without = bool(others - own) or better["layout"]["recompute"] != "none" == entry["layout"]["recompute"]
            is_faster = entry["step_time_s"] < better["step_time_s"]  # the simplest may stand before a faster one
            assert spares or does_without or is_faster, (entry["name"], better["name"])


def test_a_printed_layout_can_be_pasted(capsys):
    asked = ask(capsys, *LLAMA)["layouts"][1]["name"]
    document = ask(capsys, *LLAMA, "--fix", asked, "--why-not", asked)
    assert document["layouts"][0]["name"] == asked
    assert document["why_not"]["outcome"] == "as fast"


def test_what_another_engine_could_and_ours_cannot_is_said_with_its_worth(capsys):
    model = ["--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "256", "--seq-len", "131072"]
    without = ["--engine", "nanotron", "--global-batch", "16"]
    (remark,) = ask(capsys, *model, *without)["remarks"][:1]
    assert remark.startswith("This is without cp, which nanotron does not have yet: ") and " times as fast, " in remark
    for engine in ("dtlayout", "megatron"):
        best = ask(capsys, *model, "--global-batch", "16", "--engine", engine)["layouts"][0]
        assert best["layout"]["cp"] > 1, engine
    short = [*model[:-1], "8192", "--global-batch", "512"]
    (remark,) = ask(capsys, *short, "--engine", "megatron")["remarks"][:1]
    assert "with fp8-tensorwise would be 1." in remark and remark.endswith("--precision matmuls=fp8-tensorwise.")
    few = [*model[:4], "--gpus", "8", "--seq-len", "131072", "--global-batch", "8"]
    assert "This is without cp, which fsdp1 does not have: " in refuse(capsys, *few, "--engine", "fsdp1")


def test_a_global_batch_that_divides_better_is_named_where_it_costs(capsys):
    odd = ask(capsys, *LLAMA[:-1], "127")["remarks"]
    assert any(line.startswith("A global batch of 128 divides better among 16 GPUs than 127: ") for line in odd)
    assert not any("global batch" in line for line in ask(capsys, *LLAMA)["remarks"])


def test_communication_that_is_hidden_only_just_is_told(capsys):
    model = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--gpus", "128", "--seq-len", "2048"]
    (remark,) = ask(capsys, *model, "--global-batch", "256", "--fix", "zero=3,pp=1")["remarks"]
    assert "is hidden only just: on a network 20% slower than predicted the step would be " in remark
    assert ask(capsys, *model, "--global-batch", "1024", "--fix", "zero=1")["remarks"] == []


def test_what_more_free_memory_costs_is_said_where_the_best_leaves_nearly_none(capsys):
    full = ["--model", "llama-13b", "--gpu", "a100-80g-sxm", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64"]
    document = ask(capsys, *full, "--max-memory", "1.0")
    (remark,) = [line for line in document["remarks"] if line.startswith("1 leaves ")]
    best, allowed = document["layouts"][0], document["scenario"]["allowed_bytes"]
    assert best["peak_bytes"] > 0.95 * allowed
    assert remark.startswith(f"1 leaves {(allowed - best['peak_bytes']) / 2**30:.1f} of {allowed / 2**30:.1f} GiB free")
    roomy = ask(capsys, *full, "--max-memory", "0.9")
    cost = min(each["step_time_s"] for each in roomy["layouts"]) / best["step_time_s"] - 1
    said = re.search(r"with --max-memory 0\.9 a step takes at most ([0-9.]+)% longer, as dp8 mb4 ", remark)
    assert 0 < 100 * cost < float(said[1]) + 0.05
    assert not any("leaves" in line for line in roomy["remarks"])
    alone = ask(capsys, *full, "--max-memory", "1.0", "--fix", "dp8 mb4 zero3")["remarks"]
    assert [line for line in alone if line.endswith("exact: look at what --max-memory 0.9 finds.")]


def test_a_margin_is_kept_unless_it_leaves_nothing_and_is_said(capsys):
    full = ["--model", "llama-13b", "--gpu", "a100-80g-sxm", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64"]
    document = ask(capsys, *full)
    share, capacity = document["margin"]["max_memory"], document["layouts"][0]["capacity_bytes"]
    assert share < 1 and not document["margin"]["is_asked"]
    assert document["scenario"]["allowed_bytes"] == pytest.approx(share * capacity)
    fixed = ask(capsys, *full, "--max-memory", "1.0")["layouts"][0]
    assert share * capacity < fixed["peak_bytes"] <= capacity
    assert ask(capsys, *full, "--why-not", fixed["name"])["why_not"]["outcome"] == "too full"
    assert main(["recommend", *full, "--fix", fixed["name"]]) == 0
    said = capsys.readouterr().out
    assert f"fits only without the margin, as with --max-memory 1.0: nothing fits in {share:.0%}" in said
    assert "look at what --max-memory 0.9 finds" not in said, "which finds nothing"


def test_the_simplest_of_layouts_that_cannot_be_told_apart_comes_first(capsys):
    """Their predicted times stay as they are."""
    document = ask(capsys, "--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "24", "--seq-len", "8192",
                   "--global-batch", "512")  # fmt: skip
    near = document["layouts"][: document["simplest"]["places"]]
    complexities = [Complexity.of(Layout(**each["layout"])) for each in near]
    assert len(near) > 1 and complexities[0] == min(complexities)
    times = [each["step_time_s"] for each in near]
    assert document["simplest"]["slower_than_fastest"] == pytest.approx(times[0] / min(times) - 1)
    assert max(times) < 1.02 * min(times)


def test_the_vendors_layout_stands_beside_the_best(capsys):
    asked = ["--model", "llama3.1-70b", "--gpu", "h100-80g-sxm", "--gpus", "64", "--seq-len", "8192"]
    document = ask(capsys, *asked, "--global-batch", "128", "--engine", "megatron", "--top", "1")
    usual, best_s = document["usual"], document["layouts"][0]["step_time_s"]
    assert usual["layout"]["name"].startswith("pp4·dp2·cp2·tp4+sp+overlap mb1 interleaved-1f1b v5")
    assert usual["slower_than_best"] == pytest.approx(usual["layout"]["step_time_s"] / best_s - 1)
    said = describe_usual(usual)
    assert said.startswith("NVIDIA's recipe for Llama 3 70B in megatron, pp4·") and "treat that with care" not in said
    doubted = describe_usual(usual | {"doubt": "24.0% faster: 1.00 s less in the bubble", "has_room": False})
    assert "1 beats it by far, 24.0% faster: 1.00 s less in the bubble: treat that with care" in doubted
    assert "it needs " in doubted and "--max-memory 1.0 allows that" in doubted


def test_fixed_and_avoided_choices_hold(capsys):
    document = ask(capsys, *LLAMA, "--fix", "tp=2", "--fix", "norm=eager", "--avoid", "recompute=none")
    for found in document["layouts"]:
        assert (found["layout"]["tp"], found["kernels"]["norm"]) == (2, "eager")
        assert found["layout"]["recompute"] != "none"


def test_less_memory_may_be_allowed(capsys):
    document = ask(capsys, *LLAMA, "--max-memory", "0.3")
    capacity = document["layouts"][0]["capacity_bytes"]
    assert document["scenario"]["allowed_bytes"] == pytest.approx(0.3 * capacity)
    assert all(found["peak_bytes"] <= 0.3 * capacity for found in document["layouts"])


def test_one_value_is_fixed_of_each_choice(capsys):
    assert "tp=4 and tp=2: say one of them" in refuse(capsys, *LLAMA, "--fix", "tp=2", "--fix", "tp=4,pp=2")
    assert ask(capsys, *LLAMA, "--fix", "tp=2", "--fix", "tp=2·pp=2")["layouts"][0]["layout"]["tp"] == 2


def test_why_not_nothing_is_refused(capsys):
    assert "'' is no choice; write a layout as it is printed" in refuse(capsys, *LLAMA, "--why-not", "")


@pytest.mark.parametrize(
    ("choices", "outcome", "problem"),
    [
        ("tp=3", "not legal", "tp=3 does not divide the 16 GPUs of the cluster; use degrees that do"),
        ("tp=3·pp=2", "not legal", "tp=3 * pp=2 = 6 does not divide the 16 GPUs of the cluster"),
        ("dp4·pp2", "not legal", "needs 8 GPUs, and the cluster has 16"),
        ("micro_batch=3", "not legal", "is not a multiple of dp * micro_batch"),
        ("micro_batch=8,recompute=none", "does not fit", "each rank needs"),
        ("tp=4,pp=4,micro_batch=2", "slower", "% slower: "),
    ],
)
def test_why_not_says_what_stands_against_a_layout(capsys, choices, outcome, problem):
    why_not = ask(capsys, *LLAMA, "--why-not", choices)["why_not"]
    assert why_not["outcome"] == outcome
    assert any(problem in line for line in why_not["problems"])
    if outcome == "does not fit":
        assert "GiB too much: activations" in why_not["problems"][0]
    if outcome == "slower":
        assert "more in" in why_not["problems"][0]


def test_why_not_also_says_what_these_choices_reach_at_best(capsys):
    assert main(["recommend", *LLAMA, "--why-not", "tp=4,pp=4,micro_batch=2"]) == 0
    assert "The best with these choices" in capsys.readouterr().out
    assert main(["recommend", *LLAMA, "--why-not", "micro_batch=3"]) == 0
    out = capsys.readouterr().out
    assert "No layout with these choices is legal and fits." in out and "? It is not legal:" in out
    assert main(["recommend", *LLAMA, "--why-not", "micro_batch=8,recompute=none"]) == 0
    assert "? It does not fit:" in capsys.readouterr().out
    assert main(["recommend", *LLAMA, "--why-not", "dp16 mb8 zero3", "--max-memory", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "and fits.\n  One that recomputes otherwise does, dp16 mb8 zero3 recompute=" in said


@pytest.mark.parametrize("baseline", ["thumb", "playbook"])
def test_a_baseline_costs_what_it_costs(capsys, baseline):
    document = ask(capsys, *LLAMA, "--baseline", baseline)
    found = document["baseline"]
    assert found["steps"] and found["slower_than_best"] >= -0.005
    best = document["layouts"][0]["step_time_s"]
    assert found["layout"]["step_time_s"] / best - 1 == pytest.approx(found["slower_than_best"])


@pytest.mark.parametrize(
    ("model", "gpus", "thumb"),
    [
        ("llama3.1-8b", 64, {"tp": 1, "pp": 1, "zero": 1}),
        ("llama3.1-405b", 2048, {"tp": 8}),
    ],
)
def test_the_rule_of_thumb_takes_data_then_tensor_then_pipeline_parallelism(capsys, model, gpus, thumb):
    arguments = ["--model", model, "--gpu", "h100-80g-sxm", "--gpus", str(gpus), "--seq-len", "4096"]
    document = ask(capsys, *arguments, "--global-batch", "2048", "--top", "1", "--baseline", "thumb")
    assert document["baseline"]["layout"]["layout"].items() >= thumb.items()


def test_a_model_comes_from_a_huggingface_config_or_toml(capsys, tmp_path):
    hf = tmp_path / "config.json"
    hf.write_text(json.dumps(HF))
    own = tmp_path / "own.toml"
    own.write_text('[model]\nname = "llama-7b"\nnum_layers = 16\n')
    found = ask(capsys, *with_model(LLAMA, hf))["scenario"]["model"]
    preset = ask(capsys, *with_model(LLAMA, "llama3.1-8b"))["scenario"]["model"]
    assert {**found, "name": "llama3.1-8b"} == preset
    assert ask(capsys, *with_model(LLAMA, tmp_path))["scenario"]["model"] == found
    assert ask(capsys, *with_model(LLAMA, own))["scenario"]["model"]["num_layers"] == 16


def test_a_cluster_comes_from_a_file(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "h100-80g-sxm"\ngpus = 32\ngpus_per_node = 4\n')
    arguments = [*LLAMA[:2], *LLAMA[6:], "--cluster", str(path)]
    scenario = ask(capsys, *arguments)["scenario"]
    assert (scenario["gpu"], scenario["num_gpus"], scenario["gpus_per_node"]) == ("h100-80g-sxm", 32, 4)
    assert ask(capsys, *arguments, "--gpus", "16")["scenario"]["num_gpus"] == 16
    assert "not both" in refuse(capsys, *arguments, "--gpu", "cpu")


def test_a_rack_is_described_with_what_its_links_join(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "gb200"\ngpus = 8\n')
    assert main(["recommend", *LLAMA[:2], *LLAMA[6:], "--cluster", str(path), "--top", "1"]) == 0
    assert "on 8 x gb200 in nodes of 4, 8 joined by fast links; 128 sequences" in capsys.readouterr().out
    path.write_text(f'{path.read_text()}[gpus_linked]\nvalue = 4\nunit = "GPU"\nsource = "no switch"\n')
    assert main(["recommend", *LLAMA[:2], *LLAMA[6:], "--cluster", str(path), "--top", "1"]) == 0
    assert "on 8 x gb200 in nodes of 4; 128 sequences" in capsys.readouterr().out


def test_an_engine_with_measured_runs_is_not_called_uncalibrated(capsys):
    assert main(["recommend", *LLAMA, "--engine", "aa-scaling", "--top", "1"]) == 0
    assert "uncalibrated" not in capsys.readouterr().out


def test_what_an_engine_does_not_have_is_no_other_choice(capsys):
    changes = {entry["change"] for entry in ask(capsys, *LLAMA, "--engine", "megatron")["against"]}
    assert "recompute=full" in changes and "recompute=keep-attention" not in changes


def test_kernels_and_tp_are_those_that_cp_can_have_beside_it(capsys):
    in_parts = ask(capsys, *LLAMA, "--fix", "cp=2", "--fix", "cp_method=gather")["layouts"]
    by_heads = ask(capsys, *LLAMA, "--fix", "cp=2", "--fix", "cp_method=all-to-all")["layouts"]
    assert {found["kernels"]["attention"] for found in in_parts} <= {"sdpa-flash", "sdpa-math"}
    assert by_heads and all(found["layout"]["tp"] * 2 <= 32 for found in by_heads)


@pytest.mark.parametrize("engine", ["dtlayout", "megatron"])
def test_cp_can_be_asked_for(capsys, engine):
    document = ask(capsys, *LLAMA, "--engine", engine, "--fix", "cp=2")
    assert document["layouts"] and {found["layout"]["cp"] for found in document["layouts"]} == {2}


def test_recommending_imports_nothing_heavy():
    code = (
        "import sys; from dtlayout.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recommend", *LLAMA, "--baseline", "thumb", "--why-not", "tp=2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_nothing_is_written_where_nothing_was_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask(capsys, *DEBUG)
    assert list(Path().iterdir()) == []


QWEN = ["--model", "qwen3-8b", "--gpu", "h100-80g-sxm", "--gpus", "16", "--seq-len", "4096", "--global-batch", "128"]


def test_choices_of_micro_batch_and_zero_leave_the_degrees_open(capsys):
    choices = "tp=2,pp=2,mb=2,zero=3"
    document = ask(capsys, *QWEN, "--top", "1", "--why-not", choices)
    layout = document["why_not"]["layout"]
    assert (layout["tp"], layout["pp"], layout["dp_shard"], layout["micro_batch"], layout["zero"]) == (2, 2, 4, 2, 3)
    fixed = ask(capsys, *QWEN, "--top", "1", "--fix", choices)["layouts"][0]
    single = [word for choice in choices.split(",") for word in ("--fix", choice)]
    assert fixed == ask(capsys, *QWEN, "--top", "1", *single)["layouts"][0]
    assert fixed["layout"] == document["why_not"]["best_with_these_choices"]["layout"]


def test_what_is_ruled_out_can_be_asked_about(capsys):
    document = ask(capsys, *QWEN, "--top", "1", "--avoid", "tp=4", "--why-not", "tp=4")
    assert document["why_not"]["best_with_these_choices"]["layout"]["tp"] == 4


def test_remarks_do_not_depend_on_how_many_layouts_are_shown(capsys):
    asked = [*QWEN, "--engine", "megatron"]
    answers = [ask(capsys, *asked, "--top", top) for top in ("1", "3", "5", "8")]
    assert [len(each["layouts"]) for each in answers[:3]] == [1, 3, 5]
    assert answers[0]["remarks"]
    assert all(each["remarks"] == answers[0]["remarks"] for each in answers[1:])


def test_a_format_of_gradients_is_priced_and_written_for_megatron(capsys, tmp_path):
    fixed = ["--engine", "megatron", "--top", "1", "--fix", "tp=2,pp=2,mb=1,recompute=none,schedule=1f1b"]
    peaks, files = {}, {}
    for reduce in ("", "float32", "bfloat16"):
        file = tmp_path / f"{reduce}.sh"
        asked = ["--precision", f"reduce={reduce}"] if reduce else []
        document = ask(capsys, *QWEN, *fixed, *asked, "--emit", str(file))
        peaks[reduce], files[reduce] = document["layouts"][0]["peak_bytes"], file.read_text()
        assert document["scenario"]["precision"]["reduce"] == (reduce or "float32")
    assert peaks["bfloat16"] < peaks["float32"] == peaks[""]
    assert ["--grad-reduce-in-bf16" in files[reduce] for reduce in peaks] == [False, False, True]


def test_a_run_of_megatron_is_told_and_the_answer_says_what_is_assumed(capsys, tmp_path):
    asked = [*QWEN, "--engine", "megatron", "--top", "1", "--fix", "tp=2,pp=2,mb=1,recompute=none,schedule=1f1b,zero=1"]
    usual = ask(capsys, *asked)
    told = ask(capsys, *asked, "--engine-set", "overlap_dp=false", "--emit", str(tmp_path / "told.sh"))
    assert told["layouts"][0]["step_time_s"] > usual["layouts"][0]["step_time_s"]
    assert "--overlap-grad-reduce" not in (tmp_path / "told.sh").read_text()
    assumed = told["scenario"]["assumptions"]
    assert assumed["values"]["overlap_dp"] == "false" and "overlap_dp" in assumed["choices"]
    assert main(["recommend", *asked]) == 0
    text = capsys.readouterr().out
    assert "assumed of megatron: precision.reduce float32, overlap_dp true, overlap_pp true, cuda_graphs none" in text


def test_a_gpu_may_be_named_as_people_name_it(capsys):
    asked = [
        "recommend",
        "--model",
        "llama-7b",
        "--gpus",
        "8",
        "--seq-len",
        "2048",
        "--global-batch",
        "64",
        "--top",
        "1",
    ]
    assert main([*asked, "--gpu", "H100"]) == 0
    said = capsys.readouterr()
    assert "on 8 x h100-80g-sxm" in said.out
    assert said.err.startswith("note: H100 is taken as h100-80g-sxm; h100-96g-500w, ")


def test_a_cpu_that_nobody_calibrated_is_told_apart(capsys):
    assert main(["recommend", *DEBUG, "--top", "1"]) == 0
    assert (
        "no step time: dtlayout calibrate has not measured this CPU; use the seconds below only to"
        in capsys.readouterr().out
    )
    assert ask(capsys, *DEBUG, "--top", "1")["scenario"]["knows_time"] is False
    assert ask(capsys, *QWEN, "--top", "1")["scenario"]["knows_time"] is True


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_lines_are_folded_at_the_terminals_width_and_the_answer_comes_first(monkeypatch, capsys, columns):
    asked = ["recommend", "--model", "llama3.1-8b", "--gpu", "h100-80g-sxm", "--gpus", "64", "--seq-len", "8192"]
    asked += ["--global-batch", "512", "--baseline", "thumb", "--why-not", "pp=4", "--tokens", "15T"]
    texts = {}
    for width in (columns, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(asked) == 0
        texts[width] = capsys.readouterr().out
    lines = texts[columns].splitlines()
    assert max(map(len, lines)) <= columns
    first = next(i for i, line in enumerate(lines) if line.startswith("   layout"))
    assert first <= 3 and next(i for i, line in enumerate(lines) if line.startswith("engine dtlayout")) > 30
    if columns == 80:  # a name stands above its numbers
        assert lines[first + 2].startswith("1  ") and "█" in lines[first + 3] and "tokens/s/GPU" in lines[first + 1]
    for word in ("faster than 2", "Why not", "rule of thumb", "GPU-hours"):
        assert word in " ".join(texts[columns].split()) and word in texts[1000]


def test_a_terminal_of_unknown_width_has_80_columns(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.get_terminal_size", lambda unknown=(80, 24): os.terminal_size(unknown))
    asked = ["--model", "llama-7b", "--gpu", "a100", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64"]
    assert main(["recommend", *asked]) == 0
    assert 70 < max(map(len, capsys.readouterr().out.splitlines())) <= 80
