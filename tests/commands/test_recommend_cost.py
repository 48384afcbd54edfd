"""dtlayout recommend of clusters and whole trainings: how many GPUs, and what they cost."""

import pytest
from recommending import LLAMA, ask, refuse

from dtlayout.cli import main


def test_scale_gives_one_row_a_cluster(capsys):
    arguments = [*LLAMA[:4], *LLAMA[6:]]  # without --gpus
    rows = ask(capsys, *arguments, "--scale", "1,16,64")["scale"]
    assert [row["num_gpus"] for row in rows] == [1, 16, 64]
    assert rows[0]["layout"] is None and rows[0]["efficiency"] is None
    assert rows[1]["efficiency"] == 1.0 and 0 < rows[2]["efficiency"] <= 1.05
    assert main(["recommend", *arguments, "--scale", "1,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "billion parameters, on 1, 16 x a100-80g-sxm in nodes of 8; " in lines[0]
    head = next(place for place, line in enumerate(lines) if line.split()[:2] == ["GPUs", "layout"])
    assert lines[head + 1].split(maxsplit=1) == ["1", "no layout is legal and fits"]
    assert lines[head + 2].split()[0] == "16" and not lines[head + 3]


def test_scale_is_one_table_or_several_that_the_terminal_is_wide_enough_for(capsys, monkeypatch):
    arguments = [*LLAMA[:4], *LLAMA[6:], "--scale", "1,16,32", "--tokens", "1T", "--price", "2"]
    tables = {}
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["recommend", *arguments]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        found = [part.splitlines() for part in text.split("\n\n") if part.lstrip().startswith("GPUs")]
        assert [[line.split()[0] for line in part if line.split()[0] in ("16", "32")] for part in found] == (
            [["16", "32"]] * len(found)
        )
        tables[width] = {word for part in found for line in part for word in line.split()}
        assert len(found) == {200: 1, 80: 3, 60: 4}[width]
    assert tables[60] == tables[80] == tables[200]


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
    rows = {int(line.split()[0]): line for line in lines[head + 1 : lines.index("", head)]}
    assert "cheapest" in rows[by_hours] and "fastest" in rows[by_days]
    assert rows[1].endswith("no layout is legal and fits")
    assert main(["recommend", *arguments[:-2]]) == 0
    assert "money" not in capsys.readouterr().out
    assert "cost" not in ask(capsys, *arguments[:-4])["scale"][1]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (["--tokens", "0"], "--tokens=0 must be a number above 0"),
        (["--tokens", "inf"], "--tokens=inf must be a finite number"),
        (["--tokens", "0T"], "--tokens=0 must be a number above 0"),
        (["--price", "2"], "give its --tokens"),
        (["--tokens", "1e9", "--price", "-1"], "--price=-1 must not be negative"),
    ],
)
def test_a_training_of_nothing_and_a_price_of_nothing_are_refused(capsys, extra, problem):
    assert problem in refuse(capsys, *LLAMA, *extra)


def test_a_number_of_tokens_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["recommend", *LLAMA, "--tokens", "many"])
    assert "'many' is no number of tokens; write 15e12, 15T or 300B" in capsys.readouterr().err
