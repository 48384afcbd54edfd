"""dtlayout recommend: the best layouts with their reasons, every question that can be asked, every refusal."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from tiny import ROOT

from dtlayout.batch import Batch
from dtlayout.cli import main
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.commands.recommend_answer import find_alike
from dtlayout.commands.verify import verify
from dtlayout.config import check_layout, load_config
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.layout import Layout
from dtlayout.models.presets import PRESETS
from dtlayout.planner.ranking import Idea
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space

LLAMA = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--gpus", "16", "--seq-len", "2048", "--global-batch", "128"]
DEBUG = ["--model", "debug", "--gpu", "cpu", "--gpus", "4", "--seq-len", "64", "--global-batch", "8"]
HF = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def with_model(arguments, model):
    return [*arguments[:1], str(model), *arguments[2:]]


def ask(capsys, *arguments):
    """The JSON document that answers."""
    assert main(["recommend", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def ask_with_progress(capsys, *arguments):
    """The same of a question whose answer takes a while."""
    assert main(["recommend", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuse(capsys, *arguments):
    """The lines that refuse."""
    assert main(["recommend", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


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
        "uncalibrated: no run of it on a100-80g-sxm is known; nothing like it was measured\nstep ",
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
    verdicts = [v for v in ask(capsys, *nearly, "--global-batch", "512")["against"] if v["outcome"] == "as fast"]
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
    assert not any(line.startswith("Against") for line in lines) and lines[-1] == "1 layout."
    assert all(any(pair) for pair in pairwise(lines)), "no two empty lines"
    assert page.exists()


def test_the_best_places_are_different_ideas(capsys):
    ideas = [Idea.of(Layout(**e["layout"])) for e in ask(capsys, *LLAMA)["layouts"]]
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
            assert spares or does_without, (entry["name"], better["name"])


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
    (remark,) = ask(capsys, *model, "--global-batch", "128", "--fix", "zero=3")["remarks"]
    assert "is hidden only just: on a network 20% slower than predicted the step would be " in remark
    assert ask(capsys, *model, "--global-batch", "1024", "--fix", "zero=1")["remarks"] == []


def test_what_more_free_memory_costs_is_said_where_the_best_leaves_nearly_none(capsys):
    full = ["--model", "llama-13b", "--gpu", "a100-80g-sxm", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64"]
    document = ask(capsys, *full)
    (remark,) = [line for line in document["remarks"] if line.startswith("1 leaves ")]
    best, allowed = document["layouts"][0], document["scenario"]["allowed_bytes"]
    assert best["peak_bytes"] > 0.95 * allowed
    assert remark.startswith(f"1 leaves {(allowed - best['peak_bytes']) / 2**30:.1f} of {allowed / 2**30:.1f} GiB free")
    roomy = ask(capsys, *full, "--max-memory", "0.9")
    cost = roomy["layouts"][0]["step_time_s"] / best["step_time_s"] - 1
    said = re.search(r"with --max-memory 0\.9 a step takes at most ([0-9.]+)% longer, as dp8 mb2 ", remark)
    assert 0 < 100 * cost < float(said[1]) + 0.05
    assert not any("leaves" in line for line in roomy["remarks"])
    alone = ask(capsys, *full, "--fix", "dp8 mb4 zero3")["remarks"]
    assert [line for line in alone if line.endswith("exact: look at what --max-memory 0.9 finds.")]


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


def test_scale_gives_one_row_a_cluster(capsys):
    arguments = [*LLAMA[:4], *LLAMA[6:]]  # without --gpus
    rows = ask(capsys, *arguments, "--scale", "1,16,64")["scale"]
    assert [row["num_gpus"] for row in rows] == [1, 16, 64]
    assert rows[0]["layout"] is None and rows[0]["efficiency"] is None
    assert rows[1]["efficiency"] == 1.0 and 0 < rows[2]["efficiency"] <= 1.05
    assert main(["recommend", *arguments, "--scale", "1,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "billion parameters, on 1, 16 x a100-80g-sxm in nodes of 8; " in lines[0]
    assert lines[-2].split(maxsplit=1) == ["1", "no layout is legal and fits"]
    assert lines[-1].split()[0] == "16"


def test_min_gpus_is_the_smallest_cluster_that_works(capsys):
    arguments = [*LLAMA[:4], *LLAMA[6:]]
    document = ask(capsys, *arguments, "--min-gpus")
    smallest = document["scenario"]["num_gpus"]
    assert smallest in (2, 4)
    assert "no layout can train" in refuse(capsys, *arguments, "--gpus", str(smallest // 2))
    assert main(["recommend", *arguments, "--min-gpus", "--top", "1"]) == 0
    assert f"\nFewest GPUs that train it: {smallest}. Parts of a node and" in capsys.readouterr().out


def test_min_gpus_gives_up_where_no_cluster_is_large_enough(capsys):
    arguments = ["--model", "llama-7b", "--gpu", "rtx4090-24g", "--seq-len", "262144", "--global-batch", "1"]
    alone = ["--fix", "tp=1", "--fix", "cp=1"]
    assert "no layout fits on any cluster of up to" in refuse(capsys, *arguments, "--min-gpus", *alone)


@pytest.mark.parametrize("extra", [[], ["--fix", "pp=2"], ["--engine", "aa-scaling", "--fix", "pp=4"]])
def test_an_emitted_config_loads_and_is_legal_on_that_world(capsys, tmp_path, extra):
    path = tmp_path / "best.toml"
    document = ask(capsys, *LLAMA, "--vocab", "50_000", "--emit", str(path), *extra)
    config = load_config(path)
    layout = check_layout(config, 16)
    best = document["layouts"][0]
    assert {
        name: getattr(layout, name) for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")
    } == {name: best["layout"][name] for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")}
    assert (config.model.vocab_size, config.train.device, config.cluster.gpu) == (50_000, "cuda", "a100-80g-sxm")
    text = path.read_text()
    assert text.startswith("# llama-7b on 16 x a100-80g-sxm") and "# Run it: torchrun --nnodes 2 " in text
    assert "uncalibrated" in text or extra[:1] == ["--engine"]
    if document["layouts"][1:]:
        following = document["layouts"][1]["name"]
        (lead,) = [line for line in text.splitlines() if line.startswith(f"# The next best is {following}; this is ")]
        assert " than that" in lead or " as that within 0.5%" in lead


def test_tokens_give_days_gpu_hours_energy_and_money(capsys):
    document = ask(capsys, *LLAMA, "--top", "1", "--tokens", "1e12", "--price", "2")
    cost, best = document["cost"], document["layouts"][0]
    assert cost["steps"] == -(-(10**12) // (2048 * 128))
    assert cost["gpu_hours"] == pytest.approx(cost["steps"] * best["step_time_s"] * 16 / 3600)
    assert cost["energy_mwh"] == pytest.approx(cost["gpu_hours"] * 400 / 1e6)
    assert cost["money"] == pytest.approx(2 * cost["gpu_hours"]) and cost["price_per_gpu_hour"] == 2
    for name in ("days", "gpu_hours", "money"):
        assert cost[f"{name}_range"][0] < cost[name] < cost[f"{name}_range"][1]
    assert best["tokens_per_s_per_gpu"] == pytest.approx(best["tokens_per_s"] / 16)
    assert main(["recommend", *LLAMA, "--top", "1", "--tokens", "1T"]) == 0
    said = capsys.readouterr().out
    assert f"1T tokens take {cost['steps']:,} steps, " in said and "MWh at the GPUs' board power" in said
    assert "for a GPU-hour" not in said and f"  {best['tokens_per_s_per_gpu']:,.0f}  " in said


def test_clusters_are_compared_by_what_they_cost(capsys):
    arguments = [*LLAMA, "--scale", "1,16,32,64", "--tokens", "1e12", "--price", "2"]
    document = ask(capsys, *arguments)
    costs = {entry["num_gpus"]: entry["cost"] for entry in document["scale"]}
    assert costs.pop(1) is None  # it does not fit
    by_hours, by_days = (min(costs, key=lambda n, k=key: costs[n][k]) for key in ("gpu_hours", "days"))
    assert (document["marks"]["cheapest"], document["marks"]["fastest"]) == (by_hours, by_days)
    assert (document["tokens"], document["price_per_gpu_hour"]) == (1e12, 2)
    assert main(["recommend", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["GPUs", "layout"])
    assert lines[head].split()[-4:] == ["days", "GPU-hours", "MWh", "money"]
    rows = {int(line.split()[0]): line for line in lines[head + 1 :]}
    assert "cheapest" in rows[by_hours] and "fastest" in rows[by_days]
    assert rows[1].endswith("no layout is legal and fits")
    assert main(["recommend", *arguments[:-2]]) == 0
    assert "money" not in capsys.readouterr().out
    assert "cost" not in ask(capsys, *arguments[:-4])["scale"][1]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (["--tokens", "0"], "--tokens=0 must be a number above 0"),
        (["--tokens", "inf"], "--tokens=inf must be a number above 0"),
        (["--tokens", "0T"], "--tokens=0 must be a number above 0"),
        (["--price", "2"], "give its --tokens"),
        (["--tokens", "1e9", "--price", "-1"], "--price=-1 must not be negative"),
    ],
)
def test_a_training_of_nothing_and_a_price_of_nothing_are_refused(capsys, extra, problem):
    assert problem in refuse(capsys, *LLAMA, *extra)


def test_what_is_emitted_is_for_the_program_that_the_engine_predicts_for(capsys, tmp_path):
    path, arguments = tmp_path / "job.yaml", [*with_model(LLAMA, "llama3.1-8b"), "--engine", "nanotron", "--top", "1"]
    document = ask(capsys, *arguments, "--fix", "recompute=selective", "--emit", str(path))
    assert document["emitted_for"]["program"] == "nanotron commit 00708b80c8"
    gaps = document["emitted_for"]["gaps"]
    assert any(gap.startswith("layout.recompute=selective is nothing that it has: every block") for gap in gaps)
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert lines[0] == "# llama3.1-8b on 16 x a100-80g-sxm, by dtlayout recommend."
    assert [f"# What they cannot say: {gap}." for gap in gaps] == [c for c in comments if "cannot say" in c]
    assert any("run_train.py --config-file job.yaml" in comment for comment in comments)
    assert f"  tp: {document['layouts'][0]['layout']['tp']}" in lines
    assert main(["recommend", *arguments, "--emit", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"1 is written to {path}, for nanotron commit 00708b80c8\n" in said
    assert "\n  model.rope_scaling is left out" in said


def test_a_script_begins_with_its_shell(capsys, tmp_path):
    path = tmp_path / "job.sh"
    ask(capsys, *LLAMA, "--engine", "megatron", "--emit", str(path))
    assert path.read_text().startswith("#!/usr/bin/env bash\n# llama-7b on 16 x")


def test_an_engine_whose_arguments_nobody_knows_gets_our_own_config_and_the_answer_says_so(capsys, tmp_path):
    path = tmp_path / "best.toml"
    assert main(["recommend", *LLAMA, "--engine", "aa-scaling", "--emit", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"1 is written to {path}, for our own trainer, dtlayout\n  nobody knows the arguments of aa-scaling" in said
    assert check_layout(load_config(path), 16).world_size == 16


def test_an_emitted_config_for_the_cpu_needs_no_gpu_and_no_file(capsys, tmp_path):
    path = tmp_path / "debug.toml"
    assert main(["recommend", *DEBUG, "--precision", "compute=float32", "--emit", str(path), "--top", "1"]) == 0
    assert f"1 is written to {path}" in capsys.readouterr().out
    config = load_config(path)
    assert check_layout(config, 4).world_size == 4
    assert (config.train.device, config.data.source, config.data.tokenizer) == ("cpu", "python-stdlib", "bytes")
    assert config.model == PRESETS["debug"] and config.precision.compute == "float32"


def test_a_vocabulary_too_small_for_bytes_asks_for_a_tokenizer(capsys, tmp_path):
    path = tmp_path / "small.toml"
    ask(capsys, *DEBUG, "--vocab", "64", "--emit", str(path))
    assert load_config(path).data.tokenizer == "data/tokenizer.json"
    assert "Bytes need 257 ids, the model has 64" in path.read_text()


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


def test_an_own_model_is_emitted_with_all_sizes(capsys, tmp_path):
    hf, path = tmp_path / "config.json", tmp_path / "best.toml"
    hf.write_text(json.dumps(HF))
    ask(capsys, *with_model(LLAMA, hf), "--emit", str(path))
    model = load_config(path).model
    assert model.rope_scaling == PRESETS["llama3.1-8b"].rope_scaling and model.num_kv_heads == 8


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (with_model(LLAMA, "llama-7c"), "model 'llama-7c' is no preset, config.json or TOML file; did you mean"),
        (with_model(LLAMA, "none.json"), "model none.json cannot be read: No such file"),
        ([*LLAMA, "--fix", "tpp=2"], "tpp is unknown; did you mean tp?"),
        ([*LLAMA, "--avoid", "recompute=ful"], "layout.recompute='ful' is unknown"),
        ([*LLAMA, "--why-not", "tp"], "'tp' is no choice"),
        ([*LLAMA, "--engine", "own"], "engine 'own' is unknown"),
        ([*LLAMA, "--optimizer", "adam"], "optimizer.name='adam' is unknown; use one of adamw, sgd"),
        ([*LLAMA, "--precision", "params=float8"], "precision.params='float8' is unknown"),
        ([*LLAMA, "--precision", "weights=float32"], "precision 'weights' is unknown"),
        ([*LLAMA, "--top", "0"], "--top=0 must be at least 1"),
        ([*LLAMA, "--max-memory", "1.5"], "--max-memory=1.5 must lie above 0"),
        ([*LLAMA, "--scale", "8,x"], "--scale=8,x is no list of numbers"),
        ([*LLAMA, "--scale", "0"], "--scale=0 must name at least 1 GPU"),
        ([*LLAMA, "--scale", "8", "--min-gpus"], "--scale compares clusters"),
        ([*LLAMA[:4], *LLAMA[6:]], "the number of GPUs is missing; give --gpus N"),
        ([*LLAMA[:2], *LLAMA[4:]], "the cluster is missing; give --gpu NAME --gpus N, or --cluster FILE"),
        ([*LLAMA, "--gpus", "0"], "num_gpus=0 must be a whole number"),
        ([*LLAMA, "--gpu", "a1000"], "GPU type 'a1000' is unknown"),
        (
            [*LLAMA, "--emit", "none/none/best.toml"],
            "none/none/best.toml cannot be written: there is no folder none/none",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(capsys, arguments, problem):
    assert refuse(capsys, *arguments).startswith(problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "it is no table of sizes"),
        (
            json.dumps({**HF, "model_type": "mixtral"}),
            "model_type='mixtral' is not known; use one of llama, qwen2, qwen3",
        ),
        (json.dumps({**HF, "attention_bias": True}), "attention_bias=true is not known"),
        (json.dumps({**HF, "hidden_size": None}), "hidden_size is missing"),
        (json.dumps({**HF, "hidden_size": "4096"}), "model.hidden_size='4096' must be a whole number"),
        (json.dumps({**HF, "head_dim": 63}), "head_dim=63 must be even"),
        (json.dumps({**HF, "use_sliding_window": True}), "use_sliding_window=true is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "linear"}}), "rope_scaling of type 'linear' is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "llama3"}}), "rope_scaling.factor is missing"),
    ],
)
def test_a_config_json_that_is_no_llama_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[model", "is not TOML"),
        ("[batch]", "it has no section [model]"),
        ('[model]\nname = "own"', "model.hidden_size is missing"),
        ('[model]\nname = "debug"\nhiden_size = 3', "model.hiden_size is unknown; did you mean model.hidden_size?"),
        (
            '[model]\nname = "debug"\nrope_scaling = 2',
            "model.rope_scaling is a table: write [model.rope_scaling] with factor",
        ),
        ('[model]\nname = "debug"\nrope_scaling = {factor = 2.0}', "model.rope_scaling.low_freq_factor is missing"),
        ('[model]\nname = "debug"\nnum_layers = 0', "model.num_layers=0 must be at least 1"),
    ],
)
def test_a_model_file_that_makes_no_model_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "own.toml"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


def test_an_emitted_config_can_say_whatever_its_model_and_its_cluster_say(capsys, tmp_path):
    hf = {**HF, "rope_theta": 1e300, "num_hidden_layers": 4}
    folder, path = tmp_path / "llama 😀 \x7f", tmp_path / "emitted.toml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    assert main(["recommend", *with_model(LLAMA, folder), "--emit", str(path)]) == 0
    model = load_config(path).model
    assert (model.name, model.rope_theta) == (folder.name, 1e300)


def test_where_nothing_fits_the_nearest_and_what_helps_are_named(capsys):
    problems = refuse(capsys, *with_model(LLAMA, "llama3.1-405b")).splitlines()
    assert problems[0].startswith("no layout can train llama3.1-405b here: ")
    assert problems[1].startswith("the one that misses by least, ") and "GiB too much" in problems[1]
    assert problems[2] == "--min-gpus finds the smallest cluster that works", "its state alone is too large"
    long = [*with_model(LLAMA, "llama3.1-8b")[:-3], "1048576", "--global-batch", "1", "--gpus", "4"]
    assert "a shorter --seq-len needs less" in refuse(capsys, *long)


def test_where_nothing_is_legal_an_example_says_why(capsys):
    problems = refuse(capsys, *LLAMA, "--fix", "tp=16", "--fix", "pp=2")
    assert problems.splitlines() == [
        "no layout can train llama-7b here: none has these degrees on so many GPUs",
        "for example pp2·tp16+sp mb1 1f1b zero1: tp=16 * pp=2 = 32 does not divide the 16 GPUs of the cluster; use "
        "degrees that do",
        "use fewer --fix and --avoid, or another number of GPUs or global batch",
    ]


def test_of_a_dp_that_cannot_be_nothing_is_said(capsys):
    problems = refuse(capsys, *LLAMA, "--fix", "tp=3")
    assert "tp=3 does not divide num_heads=32" in problems and "global_batch" not in problems


def test_what_an_engine_does_not_have_is_no_other_choice(capsys):
    changes = {entry["change"] for entry in ask(capsys, *LLAMA, "--engine", "megatron")["against"]}
    assert "recompute=full" in changes and "recompute=keep-attention" not in changes


def test_a_number_of_tokens_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["recommend", *LLAMA, "--tokens", "many"])
    assert "'many' is no number of tokens; write 15e12, 15T or 300B" in capsys.readouterr().err


def test_kernels_and_tp_are_those_that_cp_can_have_beside_it(capsys):
    in_parts = ask(capsys, *LLAMA, "--fix", "cp=2", "--fix", "cp_method=gather")["layouts"]
    by_heads = ask(capsys, *LLAMA, "--fix", "cp=2", "--fix", "cp_method=all-to-all")["layouts"]
    assert {found["kernels"]["attention"] for found in in_parts} <= {"sdpa-flash", "sdpa-math"}
    assert by_heads and all(found["layout"]["tp"] * 2 <= 32 for found in by_heads)


@pytest.mark.parametrize("engine", ["dtlayout", "megatron"])
def test_cp_can_be_asked_for(capsys, engine):
    document = ask(capsys, *LLAMA, "--engine", engine, "--fix", "cp=2")
    assert document["layouts"] and {found["layout"]["cp"] for found in document["layouts"]} == {2}


def test_a_refusal_is_a_document_too(capsys):
    assert main(["recommend", *LLAMA, "--fix", "tpp=2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": ["tpp is unknown; did you mean tp?"]}


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


def test_the_best_are_dry_run_and_a_misfit_is_dropped(capsys, monkeypatch):
    """Predictions are right here, so that only a planted oom leaves anything to correct."""
    one = [*DEBUG, "--fix", "zero=1", "--fix", "micro_batch=2", "--top", "3"]
    honest = ask_with_progress(capsys, *one, "--verify", "2")
    assert [v["fits"] for v in honest["verified"]] == [True, True]
    for found in honest["verified"]:
        assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.05)

    def find_oom(subjects, **_):
        for subject in subjects:
            is_best = json.loads(json.dumps(asdict(subject.layout))) == honest["layouts"][0]["layout"]
            yield subject, 2**40 if is_best else 2**20

    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", find_oom)
    corrected = ask_with_progress(capsys, *one, "--verify", "1")
    assert [v["fits"] for v in corrected["verified"]] == [False, True]
    assert corrected["layouts"][0]["layout"] == honest["layouts"][1]["layout"]
    assert "does not fit" in refuse(capsys, *one[:-1], "1", "--verify", "1")
    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", lambda subjects, **_: [(s, 2**20) for s in subjects])
    assert [v["fits"] for v in ask_with_progress(capsys, *one, "--verify", "9")["verified"]] == [True] * 3


def test_dry_runs_show_progress_and_what_differs_in_compiling_alone_is_run_once(capsys, monkeypatch):
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=PRESETS["llama3.2-1b"], batch=Batch(global_batch=64, seq_len=4096),
        engine=find_engine("dtlayout", gpu.name), cluster=Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8),
    )  # fmt: skip
    search = Search(Space(scenario, {"pp": 1}), 1.0)
    best = search.run(top=1).ranked[0]
    compiled, eager = (replace(best, kernels=replace(best.kernels, compile=how)) for how in ("blocks", "none"))
    runs = []

    def run(subjects, **_):
        runs.extend((subject.layout, subject.rank) for subject in subjects)
        return [(subject, 2**30) for subject in subjects]

    monkeypatch.setattr("dtlayout.commands.verify.find_peaks", run)
    result = search.run(top=1)._replace(ranked=(compiled, eager))
    found = verify(search.space.scenario, result, 2)
    assert runs == [(best.layout, 0)] and len(found) == 2
    printed = capsys.readouterr().err
    assert "dry run of 1 layout as 1 rank" in printed and f"rank 0 of {best.layout} done, 1 of 1" in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--verify", "-1"], "--verify=-1"),
        (["--verify", "1", "--engine", "megatron"], "--engine=megatron"),
        (["--verify", "1", "--scale", "4,8"], "--scale"),
    ],
)
def test_what_cannot_be_dry_run_is_refused(capsys, arguments, reason):
    assert reason in refuse(capsys, *DEBUG, *arguments)
