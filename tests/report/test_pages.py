"""Pages in a real browser: tables sort and filter, nothing overlaps, and no page scrolls sideways on a phone."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from browser import ask_browser, check_readable, needs_browser

from dtlayout.report import html
from dtlayout.report.charts import Bar, Ratio, TrackSpan, draw_bars, draw_heat, draw_ratios, draw_tracks

ROWS = [
    ["layout", "MFU, %", "peak, GiB", "tp", "outcome"],
    ["dp8", "54.1", "30.25", "1", "ok"],
    ["dp4·tp2", "50.0", "9.50", "2", "ok"],
    ["dp2·tp4", "9.8", "", "4", "ok"],
    ["pp8", "", "1,024.00", "1", "oom"],
]
HELPERS = """
const table = page.querySelector('table'), heads = [...table.tHead.rows[0].cells];
const press = i => { heads[i].querySelector('button').click(); return column(0); };
const shown = () => [...table.tBodies[0].rows].filter(row => row.offsetParent !== null);
const column = i => shown().map(row => row.cells[i].textContent);
const box = page.querySelector('input'), output = page.querySelector('output');
const type = text => { box.value = text; box.dispatchEvent(new Event('input'));
  return [column(0), output.textContent]; };
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    html.write_page(tmp_path / "page.html", "Layouts", [html.sorted_table(ROWS, "all layouts", "MFU, %")])
    return tmp_path / "page.html"


@needs_browser
def test_a_press_on_a_heading_sorts_by_it_and_a_second_turns_it_round(page):
    script = """
    const orders = () => heads.map(head => head.getAttribute('aria-sort')), first = orders();
    const buttons = heads.map(head => head.querySelector('button'));
    const reachable = buttons.map(button => { button.focus(); return page.activeElement === button; });
    return {first, reachable, peak: press(2), peakOrder: orders(), peakAgain: press(2), again: orders()[2],
            name: press(0), nameOrder: orders()[0]};
    """
    found = ask_browser(page, HELPERS + script)
    assert found["first"] == ["none", "descending", "none", "none", "none"]
    assert found["reachable"] == [True] * 5  # by keyboard
    assert found["peak"] == ["pp8", "dp8", "dp4·tp2", "dp2·tp4"]  # what has no number is last
    assert found["peakOrder"] == ["none", "none", "descending", "none", "none"]
    assert found["peakAgain"] == ["dp4·tp2", "dp8", "pp8", "dp2·tp4"] and found["again"] == "ascending"
    assert found["name"] == ["dp2·tp4", "dp4·tp2", "dp8", "pp8"] and found["nameOrder"] == "ascending"


@needs_browser
def test_a_filter_takes_words_and_conditions_and_says_what_it_did(page):
    asked = ["", "tp=1", "mfu>40", "mfu>9.8 tp>=2", "outcome!=ok", "dp", "mfu>99", "speed>3", "outcome>a"]
    found = dict(zip(asked, ask_browser(page, f"{HELPERS} return {asked}.map(type);"), strict=True))
    assert found[""] == [["dp8", "dp4·tp2", "dp2·tp4", "pp8"], "4 of 4 shown"]
    assert found["tp=1"] == [["dp8", "pp8"], "2 of 4 shown"]
    assert found["mfu>40"][0] == ["dp8", "dp4·tp2"]  # an empty cell is not above anything
    assert found["mfu>9.8 tp>=2"][0] == ["dp4·tp2"]
    assert found["outcome!=ok"][0] == ["pp8"]
    assert found["dp"][0] == ["dp8", "dp4·tp2", "dp2·tp4"]
    assert found["mfu>99"] == [[], "None of 4 matches: ask for less."]
    columns = "layout, mfu, peak, tp, outcome"
    assert found["speed>3"][1] == f"No column is called speed. There are {columns}."
    assert found["outcome>a"][0] == []  # words have no order


@needs_browser
def test_charts_and_wide_tables_fit_a_phone(tmp_path):
    names = ["a layout with a long name recompute=keep-attention", "b"]
    heat = draw_heat([f"tp {2**i}" for i in range(12)], {name: [50.0, None] * 6 for name in names}, "heat")
    parts = [
        draw_bars(
            [Bar(name, [3.0, 1.0], "4.00 GiB", 3.5) for name in names], ["weights", "rest"], "predicted", name="a"
        ),
        draw_ratios(
            [Ratio(names[0], 0.3, 0.9, 1.1, "×0.90; 116 fit only without"), Ratio("b", 1.0, 2.0, 4.0, "×2")], name="b"
        ),
        heat,
        html.sorted_table(
            [[*ROWS[0], *"abcdefghijkl"], *([*row, *["a long cell"] * 12] for row in ROWS[1:])], "t", "tp"
        ),
    ]
    html.write_page(tmp_path / "page.html", "A long title without a place to break: " + "x" * 80, parts)
    check_readable(tmp_path / "page.html")


@needs_browser
@pytest.mark.parametrize("fault", [
    '<svg viewBox="0 0 100 50"><text x="9" y="20">one</text><text x="12" y="22">two</text></svg>',
    '<p style="width:1500px">wide</p>',
])  # fmt: skip
def test_labels_that_meet_and_a_page_that_is_too_wide_are_found(tmp_path, fault):
    html.write_page(tmp_path / "page.html", "faulty", [fault])
    with pytest.raises(AssertionError):
        check_readable(tmp_path / "page.html")


def test_what_people_wrote_is_no_markup(tmp_path):
    parts = [
        html.table([["<b>", "n"], ["<script>alert(1)</script>", "2"]]),
        draw_bars([Bar("<i>", [1.0], "&")], ['"'], name="<img>"),
        html.fold("<s>", html.bullets(["<u>"])),
    ]
    html.write_page(tmp_path / "page.html", "<title>", parts)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"<script>alert|<b><|<title><title>|<s>|<u></li>", text)
    assert "&lt;script&gt;alert(1)&lt;/<wbr>script&gt;" in text


def test_a_table_without_rows_has_its_headings():
    assert "<tbody></tbody>" in html.table([["layout", "MFU, %"]])


@needs_browser
@pytest.mark.parametrize("width", [1400, 400])
def test_a_timeline_has_an_axis_and_grows_where_one_asks_for_it(tmp_path, width):
    spans = [TrackSpan(i, i + 1, 0, False, f"0F{i}") for i in range(10)]
    chart = draw_tracks([("rank 0", spans, "5 %")], {"forward": 0}, 10.0, "{:g} s".format, name="predicted timeline")
    html.write_page(tmp_path / "page.html", "timeline", [chart])
    script = """
    const track = page.querySelector('.spans'), box = page.querySelector('[aria-label="predicted timeline"].wide');
    const press = name => [...page.querySelectorAll('.zoom button')].find(each => each.textContent === name).click();
    const wide = () => Math.round(track.getBoundingClientRect().width), before = wide();
    const ticks = [...page.querySelectorAll('.axis > span')].map(each => each.textContent);
    const left = each => each.getBoundingClientRect().left, tick = page.querySelectorAll('.axis > span')[2];
    const share = () => Math.round(100 * (left(tick) - left(track)) / wide());
    const early = share();
    press('+'); press('+'); press('+');
    const grown = wide(), late = share(), scrolls = box.scrollWidth > box.clientWidth;
    press('whole');
    return [ticks, grown / before, wide() === before, early, late, scrolls,
        page.documentElement.scrollWidth <= page.documentElement.clientWidth];
    """
    ticks, grown, is_whole, early, late, scrolls, page_fits = ask_browser(tmp_path / "page.html", script, width=width)
    assert ticks == ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]
    assert abs(grown - 8) < 0.2 and is_whole and scrolls and page_fits
    script = """
    const track = page.querySelector('.spans').getBoundingClientRect();
    const text = [...page.querySelectorAll('em')].at(-1).getBoundingClientRect();
    const zero = page.querySelector('.axis > span').getBoundingClientRect().left;
    return [text.height < 30, text.left >= track.right || text.bottom <= track.top, zero >= track.left - 1];
    """
    wide = [TrackSpan(i, i + 1, 0, False, f"0F{i}") for i in range(400)]
    chart = draw_tracks([("rank 0", wide, "12.2% waiting")], {"forward": 0}, 400.0, "{:g} s".format, name="long")
    html.write_page(tmp_path / "long.html", "timeline", [chart])
    assert ask_browser(tmp_path / "long.html", script, width=width) == [True] * 3, "beside the track, in one line"
    assert abs(early - late) <= 12  # a label is centred on its place


def test_pictures_have_the_pages_colours_in_light_and_dark():
    assert len(html.COLOURS) == 9 and {*html.COLOURS.values()} > {html.ACCENT, html.MARK}
    figure, axes = plt.subplots()
    for i, colour in enumerate(html.LINES[:6]):
        axes.plot([i, i + 1], color=colour)
    drawing = html.picture(figure, "lines")
    assert {"var(--c0)", "var(--c2)", "var(--c3)"} <= {*re.findall(r"var\(--c\d\)", drawing)}
    assert not [colour for colour in html.COLOURS.values() if colour in drawing]


def test_one_file_says_how_pages_look():
    package = Path(html.__file__).parents[1]
    sources = {
        path: path.read_text("utf-8") for path in package.rglob("*") if path.suffix in (".py", ".css", ".js", ".html")
    }
    styled = {path.name for path, text in sources.items() if re.search(r"<style\b", text)}
    dark = {path.name for path, text in sources.items() if "@media (prefers-color-scheme" in text}
    coloured = {path.name for path, text in sources.items() if re.search(r"(?<![\w&])#[0-9a-f]{6}\b", text)}
    assert (styled, dark, coloured) == ({"html.py"}, {"page.css"}, {"page.css"})


def test_every_chart_has_a_role_and_a_name():
    bars = draw_bars([Bar("a", [1.0], "1")], name="memory <of> ranks")
    ratios = draw_ratios([Ratio("a", 0.9, 1.0, 1.1, "×1")], name="speeds")
    tracks = draw_tracks([("rank 0", [], "")], {}, 1.0, str, name="a step")
    heat = draw_heat(["tp 1"], {"pp 1": [1.0]}, "rows by degrees")
    for chart, role, name in (
        (bars, "figure", "memory &lt;of&gt; ranks"), (ratios, "figure", "speeds"), (tracks, "figure", "a step"),
        (heat, "region", "rows by degrees"),
    ):  # fmt: skip
        assert re.search(rf'role="{role}"[^>]* aria-label="{name}"', chart)
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    assert '<svg role="img" aria-label="loss"' in html.picture(figure, "loss")
