"""dtlayout recommend --page: what the answer says, in charts that fit a phone, without another file."""

import json
import re
from pathlib import Path

import pytest
from browser import ask_browser, check_readable, needs_browser

from dtlayout.cli import main
from dtlayout.commands.recommend_page import write_page

SCENARIO = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--seq-len", "2048", "--global-batch", "128"]
LLAMA = [*SCENARIO, "--gpus", "16"]
ASKED = ["--why-not", "tp=4,pp=2,micro_batch=2", "--baseline", "playbook"]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recommend") / "page.html"
    assert main(["recommend", *LLAMA, *ASKED, "--page", str(path)]) == 0
    return path


def test_the_page_says_what_the_document_says_and_loads_nothing(page, capsys):
    assert main(["recommend", *LLAMA, *ASKED, "--json"]) == 0
    document, text = json.loads(capsys.readouterr().out), page.read_text()
    assert "<title>llama-7b on 16 x a100-80g-sxm</title>" in text
    for each in document["layouts"]:
        assert each["name"] in text and f"{100 * each['mfu']:.1f}" in text and f"{each['step_time_s']:.3f}" in text
    for each in document["against"]:
        assert each["change"] in text and each["problems"][0] in text
    assert document["why_not"]["problems"][0] in text
    assert document["baseline"]["layout"]["name"] in text and document["baseline"]["steps"][-1] in text
    assert not re.search(r'(?:src|href)="(?!#|data:)|url\(|@import', text)
    rows = re.search(r'<table id="layouts">.*?</table>', text, re.S)
    assert rows is not None and rows[0].count("<tr>") == 1 + len(document["layouts"])


@needs_browser
def test_the_page_can_be_read_on_a_desk_and_on_a_phone(page):
    check_readable(page)


@needs_browser
def test_peaks_are_seen_on_a_desk_without_scrolling(page):
    script = """
    const head = [...page.querySelectorAll('#layouts th')].find(each => each.textContent.startsWith('peak'));
    return [head.getBoundingClientRect().right, head.closest('.wide').getBoundingClientRect().right];"""
    peak, edge = ask_browser(page, script)
    assert 0 < peak <= edge


def test_an_answer_without_mfu_or_with_dry_runs_makes_a_page_too(tmp_path, capsys):
    debug = ["--model", "debug", "--gpu", "cpu", "--gpus", "4", "--seq-len", "64", "--global-batch", "8"]
    assert main(["recommend", *debug, "--top", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    document["verified"] = [{"peak_memory_bytes": 3 << 20, "predicted_peak_memory_bytes": 2 << 20, "fits": True}]
    document["baseline"] = {"name": "thumb", "layout": None}
    write_page(tmp_path / "page.html", document)
    text = (tmp_path / "page.html").read_text()
    assert "MFU" not in text and "3.00 MiB" in text and "It finds no layout" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--page", "none/page.html"], "none/page.html cannot be written: there is no folder none"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_the_search(capsys, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert main(["recommend", *LLAMA, *arguments]) == 2
    assert capsys.readouterr().err == f"{problem}\n"


SCALE = [*SCENARIO, "--scale", "1,8,12,16,64", "--tokens", "2e12"]


def write_scale(path: Path, *more: str) -> Path:
    assert main(["recommend", *SCALE, *more, "--page", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def scale_page(tmp_path_factory) -> Path:
    return write_scale(tmp_path_factory.mktemp("scale") / "page.html", "--price", "2.5")


def test_the_page_of_several_clusters_says_what_each_costs_and_marks_three(scale_page, capsys):
    assert main(["recommend", *SCALE, "--price", "2.5", "--json"]) == 0
    document, text = json.loads(capsys.readouterr().out), scale_page.read_text()
    assert "<title>llama-7b on 1 to 64 x a100-80g-sxm</title>" in text
    assert "Training on 2T tokens at 2.5 for a GPU-hour" in text
    by_size = {row["num_gpus"]: row for row in document["scale"]}
    assert by_size[1]["layout"] is None and "no layout is legal and fits" in text
    for row in by_size.values():
        if row["layout"]:
            assert f"{row['efficiency']:.1%}, {row['layout']['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU" in text
            for cell in (row["layout"]["name"], f"{row['cost']['days']:,.1f}", f"{row['cost']['money']:,.0f}"):
                assert cell in re.sub("<wbr>", "", text)
    assert document["marks"]["cheapest"] and document["marks"]["fastest"]
    drawing = re.search(r"<svg.*?</svg>", text, re.S)
    assert drawing is not None
    for mark, num_gpus in document["marks"].items():
        if num_gpus:
            assert re.search(rf">{num_gpus} GPUs, [a-z, ]*{mark}", drawing[0])
    assert not re.search(r'(?:src|href)="(?!#|data:)|url\((?!#)|@import', text)


def test_without_a_price_the_cost_is_in_gpu_hours_and_without_tokens_there_is_none(tmp_path):
    text = write_scale(tmp_path / "hours.html").read_text()
    assert "GPU-hours against days" in text and "money" not in text.lower()
    path = tmp_path / "speed.html"
    assert main(["recommend", *SCENARIO, "--scale", "8,16", "--page", str(path)]) == 0
    text = path.read_text()
    assert "Efficiency" in text and "Cost against days" not in text and "days" not in text


def test_clusters_of_which_none_is_large_enough_make_a_page_too(tmp_path):
    path = tmp_path / "none.html"
    assert main(["recommend", *SCENARIO, "--scale", "1", "--tokens", "1e12", "--page", str(path)]) == 0
    text = path.read_text()
    assert "No layout is legal and fits on any of these clusters" in text and "<svg" not in text


@needs_browser
def test_the_page_of_several_clusters_can_be_read_on_a_desk_and_on_a_phone(scale_page):
    check_readable(scale_page)
