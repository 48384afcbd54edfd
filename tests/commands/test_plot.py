"""dtlayout plot: curves of runs that are done, going on, torn or one step long, in files that need no others."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from browser import ask_browser, check_readable, needs_browser
from tiny import write_tiny

from dtlayout.cli import main
from dtlayout.report.curves import Curves, read_runs, smooth
from dtlayout.training.metrics import StepMetrics

PNG = b"\x89PNG\r\n\x1a\n"


def metrics(step: int, *, mfu: float | None = None, layout: str = "") -> StepMetrics:
    return StepMetrics(
        step=step, loss=2 + 3 / step, grad_norm=0.5, lr=1e-3, tokens=128 * step, step_time_s=0.25, tokens_per_s=512.0,
        tokens_per_s_per_gpu=256.0, model_tflops_per_gpu=0.125, mfu=mfu,
        peak_memory_bytes=3 << 20 if step in (2, 9) else None, validation_loss=1 + 4 / step if step % 5 == 0 else None,
        layout=layout,
    )  # fmt: skip


def write_run(folder: Path, num_steps: int, *, torn: str = "", outcome: str = "done", **others) -> Path:
    """A run folder with so many steps; `torn` ends its metrics."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(asdict(metrics(step, **others))) + "\n" for step in range(1, num_steps + 1))
    (folder / "metrics.jsonl").write_text(lines + torn)
    (folder / "summary.json").write_text(json.dumps({"outcome": outcome}))
    return folder


def plot(*arguments) -> int:
    return main(["plot", *map(str, arguments)])


def answer(capsys, *arguments) -> dict:
    assert plot(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_runs_of_any_length_are_one_page_and_pictures(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "long", 30, mfu=0.4),
        write_run(tmp_path / "going-on", 7, torn='{"step": 8, "lo', outcome="running"),
        write_run(tmp_path / "short", 1),
    ]
    found = answer(capsys, *runs, "--page", "all.html", "--png", "new/pictures")
    assert [row["run"] for row in found["runs"]] == ["long", "going-on", "short"]
    long, going_on, short = found["runs"]
    assert long == {
        "run": "long", "outcome": "done", "steps": "30", "loss": f"{sum(2 + 3 / s for s in range(21, 31)) / 10:.4f}",
        "validation": f"{1 + 4 / 30:.4f}", "best": f"{1 + 4 / 30:.4f}", "tokens/s": "512", "MFU": "40.0%",
        "peak memory": "3.00 MiB",
    }  # fmt: skip
    assert (going_on["outcome"], going_on["steps"], going_on["MFU"]) == ("running", "7", "")
    assert (short["loss"], short["validation"], short["peak memory"]) == ("5.0000", "", "")
    pictures = [f"new/pictures/{name}.png" for name in ("loss", "grad_norm", "lr", "speed", "mfu", "memory")]
    assert found["files"] == ["all.html", *pictures]
    assert all(Path(path).read_bytes().startswith(PNG) for path in pictures)
    page = Path("all.html").read_text()
    assert page.count("<svg") == 12 and page.count("<h2>") == 6  # one picture for a desk, one for a phone
    assert page.count('<svg role="img" aria-label="Learning rate"') == 2
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)  # it needs no other file
    assert any("left out: 1" in note for note in found["notes"])


def test_without_options_there_is_a_page_here_and_with_png_alone_there_is_none(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    assert plot(run, "--png", "pictures") == 0
    assert not Path("plot.html").exists()
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote plot.html"
    assert "<h1>run</h1>" in Path("plot.html").read_text()


def test_validation_before_the_first_step_and_of_named_sets_is_drawn_each_with_its_name(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    start = {"step": 0, "loss": None, "validation_loss": 9.0, "validation_losses": {"code": 9.0, "prose": 8.0}}
    third = asdict(metrics(3)) | {"validation_loss": 4.0, "validation_losses": {"code": 4.0, "prose": 5.0}}
    lines = [json.dumps(asdict(metrics(step))) for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(start), *lines, json.dumps(third)]) + "\n")
    (found,) = read_runs([run])
    assert found.list_validation() == [("code", [0, 3], [9.0, 4.0]), ("prose", [0, 3], [8.0, 5.0])]
    assert [line["step"] for line in found.lines] == [1, 2, 3]
    ((_, _, figure), *_) = Curves([found]).draw()
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == ["run", "run, validation code", "run, validation prose"]
    row = answer(capsys, run)["runs"][0]
    assert (row["validation"], row["best"], row["loss"]) == ("4.0000", "4.0000", f"{2 + (3 + 1.5 + 1) / 3:.4f}")
    third["validation_loss"] = 4.5  # of the run's own source, beside the sets
    (run / "metrics.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(third) + "\n")
    names = [name for name, *_ in read_runs([run])[0].list_validation()]
    assert names == ["", "code", "prose"]


def test_a_quantity_that_nobody_measured_has_no_picture_and_no_column(tmp_path, capsys):
    found = answer(capsys, write_run(tmp_path / "run", 1), "--png", "pictures")
    assert found["files"] == [f"pictures/{name}.png" for name in ("loss", "grad_norm", "lr", "speed")]
    assert found["runs"][0].keys() == {"run", "outcome", "steps", "loss", "tokens/s"}


@needs_browser
def test_the_page_can_be_read_on_a_desk_and_on_a_phone(tmp_path, capsys):
    runs = [write_run(tmp_path / f"a-run-with-a-long-name-{i}", 30 * i, mfu=0.4) for i in (1, 2, 3)]
    answer(capsys, *runs, "--page", "all.html")
    check_readable(tmp_path / "all.html")
    sizes = re.findall(
        r'<div class="(desk|phone)">.*?viewBox="0 0 ([\d.]+) ', (tmp_path / "all.html").read_text(), re.S
    )
    assert {kind: {width for other, width in sizes if other == kind} for kind, _ in sizes} == {
        "desk": {"648"}, "phone": {"302.4"},
    }  # fmt: skip


def test_a_run_without_a_step_is_named_beside_others_and_refused_alone(tmp_path, capsys):
    run, new = write_run(tmp_path / "run", 3), tmp_path / "new"
    new.mkdir()
    write_tiny(new).config.rename(new / "config.toml")
    assert any("new" in note for note in answer(capsys, run, new)["notes"])
    assert plot(new) == 2
    assert capsys.readouterr().err == "new: no step is done yet, so there is nothing to draw\n"


def test_the_layout_is_that_of_the_runs_config(tmp_path, capsys):
    files, run = write_tiny(tmp_path), write_run(tmp_path / "run", 3)
    (run / "config.toml").write_text(files.config.read_text().replace("[layout]", "[layout]\ntp = 2"))
    assert answer(capsys, run)["runs"][0]["layout"] == "tp2+sp mb2 zero1"
    (run / "config.toml").write_text("[of another version]\n")
    assert "layout" not in answer(capsys, run)["runs"][0]


def test_a_run_that_was_resumed_under_another_layout_has_a_row_for_each(tmp_path, capsys):
    files, run = write_tiny(tmp_path), write_run(tmp_path / "run", 30)
    layouts = ["tp2+sp mb2 zero1"] * 12 + ["dp4 mb1 zero3"] * 18
    changed = [
        asdict(metrics(step)) | {"layout": layout, "step_time_s": 0.25 if step <= 12 else 1.0}
        for step, layout in enumerate(layouts, start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (run / "config.toml").write_text(files.config.read_text())  # that of the last start
    found = answer(capsys, run, "--page", "all.html")
    first, last = found["runs"]
    assert (first["layout"], first["steps"], first["outcome"]) == ("tp2+sp mb2 zero1", "1 to 12", "resumed")
    assert (last["layout"], last["steps"], last["outcome"]) == ("dp4 mb1 zero3", "13 to 30", "done")
    assert (first["tokens/s"], last["tokens/s"]) == ("512", "128")
    assert "run was resumed from step 13 as dp4 mb1 zero3, where a dashed line stands." in found["notes"]
    assert "dp4 mb1 zero3" in Path("all.html").read_text()


def test_a_run_that_was_resumed_under_its_own_layout_has_one_row(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3, layout="dp4 mb1 zero3")
    (row,) = answer(capsys, run)["runs"]
    assert (row["layout"], row["steps"]) == ("dp4 mb1 zero3", "3")


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, capsys):
    paths = [write_run(tmp_path / name / "run", 3) for name in ("a", "b")]
    assert [row["run"] for row in answer(capsys, *paths)["runs"]] == list(map(str, paths))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere is no run: it has neither metrics.jsonl nor config.toml"),
        (["run", "--smooth", "0.5"], "--smooth 0.5 must be at least 1"),
        (["run", "--smooth", "nan"], "--smooth=nan must be a finite number"),
        (["run", "--page", "nowhere/plot.html"], "page nowhere/plot.html cannot be written: No such file or directory"),
        (["run", "--png", "run/metrics.jsonl"], "pictures in run/metrics.jsonl cannot be written: File exists"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(tmp_path, capsys, arguments, problem):
    write_run(tmp_path / "run", 3)
    assert plot(*arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{problem}\n")


def test_lines_that_are_no_steps_are_left_out_and_numbers_that_are_none_not_drawn(tmp_path):
    run = write_run(
        tmp_path / "run", 3, torn='\0\0\n[1]\n{"step": 5, "loss": NaN, "tokens_per_s": 8}\n{"loss": 1}\n{"step": 0}\n'
    )
    (curves,) = read_runs([run])
    assert curves.num_torn == 3  # before the first step a run may validate
    assert curves.read("loss") == ([1, 2, 3], [5.0, 3.5, 3.0])
    assert curves.read("tokens_per_s")[0] == [1, 2, 3, 5]


def test_a_mean_is_drawn_over_what_is_noisy_and_none_where_none_is_asked_for(tmp_path):
    runs = read_runs([write_run(tmp_path / "run", 200)])
    for smooth_steps, labels in ((20.0, ["_child0", "run", "run, validation"]), (1.0, ["run", "run, validation"])):
        _, _, figure = next(Curves(runs, smooth_steps).draw())
        lines = figure.axes[0].get_lines()
        assert [line.get_label() for line in lines] == labels
    raw = [2 + 3 / step for step in range(1, 201)]
    assert list(lines[0].get_ydata()) == raw
    assert list(lines[1].get_xdata()) == list(range(5, 201, 5))
    assert Curves(runs).smooth_steps == 200 / 50


def test_a_mean_follows_a_level_and_lags_little_where_it_falls_fast():
    assert smooth([], 9) == [] and smooth([3.0] * 50, 9) == pytest.approx([3.0] * 50)
    falling = [8 * 0.99**step for step in range(400)]
    assert max(mean - value for mean, value in zip(smooth(falling, 1000), falling, strict=True)) < 0.4
    noisy = smooth([1.0, -1.0] * 500, 50)
    assert max(map(abs, noisy[500:])) < 0.03


def test_starts_that_went_on_are_marked_and_changed_layouts_otherwise(tmp_path):
    lines = [asdict(metrics(step, layout="dp2 mb1 zero1" if step < 7 else "tp2 mb1 zero1")) for step in range(1, 13)]
    for step in (4, 7):
        lines[step - 1]["resumed"] = True
    run = write_run(tmp_path / "run", 1)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = Curves(read_runs([run]), 1.0)
    assert curves.runs[0].resumes == [4, 7]
    for _, _, figure in curves.draw():
        marks = [line for line in figure.axes[0].get_lines() if len(set(line.get_xdata())) == 1]
        dashes = {
            line.get_xdata()[0]: tuple(line._unscaled_dash_pattern[1])
            for line in marks
            if line.is_dashed() and line.get_linewidth() == 0.8
        }
        assert dashes == {4: (1, 2), 7: (4, 2)}
    assert any("went on from a checkpoint at step 4, where a dotted line stands" in note for note in curves.notes)
    assert any("resumed from step 7 as tp2 mb1 zero1, where a dashed line stands" in note for note in curves.notes)


def test_learning_rate_and_gradient_norm_are_drawn_as_they_are(tmp_path):
    figures = {name: figure for name, _, figure in Curves(read_runs([write_run(tmp_path / "run", 20)]), 1.0).draw()}
    assert list(figures["lr"].axes[0].get_lines()[0].get_ydata()) == [1e-3] * 20
    assert list(figures["grad_norm"].axes[0].get_lines()[0].get_ydata()) == [0.5] * 20


@needs_browser
def test_pictures_are_whole_on_a_phone(tmp_path, capsys):
    answer(capsys, write_run(tmp_path / "run", 30, mfu=0.4), "--page", "all.html")
    script = """return [...page.querySelectorAll('svg')].filter(each => each.getBoundingClientRect().width > 0).map(
        each => [each.getBoundingClientRect().right, each.closest('.phone') !== null])"""
    found = ask_browser(tmp_path / "all.html", script, width=400)
    assert len(found) == 6 and all(right <= 400 and is_phone for right, is_phone in found)
