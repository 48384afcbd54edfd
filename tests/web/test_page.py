"""The page of dtlayout web in a real browser: from questions to a file, links, refusals, hostile names."""

import json
import re
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from browser import needs_browser
from devtools import DrivenBrowser, driven_browser
from given_files import HF, SCRIPT

from dtlayout.commands.ask import ask
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config
from dtlayout.web.server import PageServer

pytestmark = needs_browser
SMALL = {"model": "llama-7b", "gpu": "a100-80g-sxm", "gpus": "16", "seq_len": "2048", "global_batch": "128"}
IN_PIPELINE = SMALL | {"fix": "pp=2"}
ANSWERED = "document.querySelector('.card') && !document.querySelector('#found.old')"
OPENED = f"{ANSWERED} && document.querySelector('#opened h3')"


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(ask) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[DrivenBrowser]:
    with driven_browser(tmp_path_factory.mktemp("profile")) as driven:
        yield driven


def open_page(browser: DrivenBrowser, server: PageServer, question: dict | None = None, **window) -> None:
    browser.open(server.address + (f"#{urlencode(question)}" if question else ""), **window)
    browser.wait(OPENED)


def check_quiet(browser: DrivenBrowser, server: PageServer) -> None:
    """Fail if the browser complained, or if the page asked another host."""
    assert browser.list_complaints() == []
    assert browser.list_hosts() == {f"127.0.0.1:{server.server_address[1]}"}


def read_cards(browser: DrivenBrowser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.card')].map(each => each.dataset.layout)")


def test_a_newcomer_comes_from_three_questions_to_a_file_that_trains(browser, server, tmp_path):
    browser.open(server.address)
    browser.wait(OPENED)
    # 1: which layout for my model on my GPUs?
    browser.choose("#model", "qwen2.5-7b")
    browser.choose("#gpu", "a100-80g-sxm")
    browser.type("#gpus", "16")
    browser.type("#seq_len", "4096")
    browser.type("#global_batch", "256")
    asked = {"model": "qwen2.5-7b", "gpu": "a100-80g-sxm", "gpus": 16, "seq_len": 4096, "global_batch": 256}
    browser.wait(f"{OPENED} && document.querySelector('#best h2').textContent.startsWith('qwen2.5-7b')")
    browser.wait("JSON.parse(document.querySelector('#found').dataset.asked)[0].includes('--global-batch 256')")
    answer = ask(asked)
    assert read_cards(browser) == [each["name"] for each in answer["layouts"]]
    first = browser.run("document.querySelector('.card .speed').textContent")
    assert first == f"{answer['layouts'][0]['tokens_per_s']:,.0f} tokens/s"
    # 2: why not tp=4?
    browser.type("#why_not", "tp=4")
    browser.press("#others button", "Ask")
    browser.wait(f"{ANSWERED} && document.querySelector('#why-not-answer')")
    judged = ask(asked | {"why_not": "tp=4"})["why_not"]
    assert judged["name"] in browser.run("document.querySelector('#why-not-answer').textContent")
    # 3: what do I run?
    browser.wait(OPENED)
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.press(".card button", "Get its file")
    browser.wait("document.querySelector('#download')")
    browser.press("#download")
    path = tmp_path / "best.toml"
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, "nothing was downloaded"
        time.sleep(0.05)
    assert path.read_text() == ask(asked | {"ask": "emit"})["text"]
    config = load_config(path)
    assert check_layout(config, 16).world_size == 16 and config.model.name == "qwen2.5-7b"
    check_quiet(browser, server)


def test_wrong_input_gets_the_terminals_refusal_beside_the_field(browser, server):
    open_page(browser, server, SMALL)
    before = read_cards(browser)
    for selector, text, field in (
        ("#gpus", "abc", "gpus"),
        ("#max_memory", "2", "max_memory"),
        ("#fix", "tpp=2", "fix"),
    ):
        browser.type(selector, text)
        browser.wait("document.querySelector('form .problem')")
        problem, invalid, described = browser.run(
            "[document.querySelector('form .problem').textContent, document.querySelector('[aria-invalid]').id, "
            "document.getElementById(document.querySelector('[aria-invalid]').getAttribute('aria-describedby')).textContent]"
        )
        value = [text] if field == "fix" else text
        assert [problem] == ask(SMALL | {field: value})["problems"] and (invalid, described) == (field, problem)
        assert browser.run("document.querySelector('.problem').closest('.field').dataset.field") == field
        assert read_cards(browser) == before and browser.run(
            "document.querySelector('#found').classList.contains('old')"
        )
        browser.type(selector, SMALL.get(field, "")) if field in SMALL else browser.run(
            f"document.querySelector('{selector}').value = ''; "
            f"document.querySelector('{selector}').dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        browser.wait(f"{ANSWERED} && !document.querySelector('.problem, [aria-invalid]')")
    check_quiet(browser, server)


def test_where_nothing_fits_the_reason_and_a_way_out_are_said(browser, server):
    browser.open(f"{server.address}#{urlencode(SMALL | {'gpus': '1'})}")
    browser.wait("document.querySelector('#problems p')")
    said = browser.run("document.querySelector('#problems').textContent")
    assert said.startswith("no layout can train llama-7b here: of ")
    browser.press("#problems button", "ask with offload=")
    browser.wait(OPENED)
    assert "offload" in browser.run("document.querySelector('#fix').value")


def test_a_link_opened_twice_gives_the_same_answer(browser, server, tmp_path):
    open_page(browser, server, SMALL | {"engine": "megatron", "avoid": "tp=1", "price": "3"})
    browser.wait("document.querySelectorAll('.card').length > 1")
    browser.press(".card:nth-child(2) button", "Open")
    browser.wait("document.querySelector('.card:nth-child(2).is-open')")
    browser.wait("location.hash.includes('layout=')")
    browser.run("document.querySelector('#beside').selectedIndex = 0")
    browser.press("#others button", "Compare")
    browser.wait("document.querySelector('#compared-title') && location.hash.includes('other=')")
    link = browser.run("location.href")
    seen = []
    for _ in range(2):
        browser.open(link)
        browser.wait(f"{OPENED} && document.querySelector('#compared-title')")
        seen.append(browser.run("['best', 'opened', 'others'].map(id => document.getElementById(id).textContent)"))
        assert browser.run("document.querySelector('.card.is-open h3 .place').textContent") == "2"
        assert browser.run("location.href") == link
        assert browser.run("document.querySelector('#engine').value") == "megatron"
    assert seen[0] == seen[1]


def test_a_link_keeps_a_file(browser, server, tmp_path):
    open_page(browser, server, SMALL)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF))
    browser.give_file("#file", path)
    browser.wait(f"{OPENED} && location.hash.includes('file=')")
    browser.wait("document.querySelector('#given span').textContent === 'config.json'")
    first = browser.run("document.querySelector('#best').textContent")
    link = browser.run("location.href")
    browser.open(link)
    browser.wait(OPENED)
    assert browser.run("document.querySelector('#best').textContent") == first
    assert browser.run("JSON.parse(document.querySelector('#found').dataset.asked)[0]").startswith(
        "dtlayout recommend --model config.json"
    )
    check_quiet(browser, server)


@pytest.mark.parametrize("packed", ["config.json:AAAA", "config.json:!", "config.json:", ":", "nothing", "../x:AAAA"])
def test_a_broken_file_in_a_link_is_refused(browser, server, packed):
    browser.open(f"{server.address}#{urlencode({'file': packed, 'model': ''})}")
    browser.wait("document.querySelector('.problem, #problems p')")
    assert not browser.run("Boolean(document.querySelector('.card'))") and browser.list_complaints() == []


def test_a_training_file_is_judged(browser, server, tmp_path):
    open_page(browser, server, SMALL)
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    browser.give_file("#file", path)
    browser.wait(f"{OPENED} && document.querySelector('.yours')")
    said = browser.run("document.querySelector('.yours').textContent")
    assert said.startswith("train.sh: dp8·tp2+sp mb1 zero1") and "slower than the best here" in said
    assert browser.run("document.querySelector('#engine').selectedOptions[0].textContent") == "that of the file"
    assert browser.run("document.querySelector('#gpus').placeholder") == "as in the file"
    browser.run("document.querySelector('#clusters').scrollIntoView()")
    browser.wait("document.querySelector('#clusters svg.chart')")
    browser.press(".yours button", "Get the changed file")
    browser.wait("document.querySelector('#download')")
    assert browser.run("document.querySelector('#download').download") == "changed-train.sh"
    check_quiet(browser, server)


ALREADY_SAID = r" on each of \d+|^note: [\d.]+ ?% faster|^note: As fast as|×\d|hidden$|GPU-hour\.$|^lead: .* tokens on "
"""Texts with numbers that are the question's, or that stand beside the numbers which they are made of."""
HOSTILE = "<img src=x onerror=hacked=1>\"'><script>hacked=1</script>"


FIELDS = "model", "gpu", "gpus", "engine", "precision", "recompute", "fix", "why_not", "layout", "other", "tokens"


@pytest.mark.parametrize("field", FIELDS)
def test_hostile_text_of_a_link_is_text(browser, server, field):
    browser.open(f"{server.address}#{urlencode(SMALL | {field: HOSTILE})}")
    browser.wait(f"document.querySelector('.problem, #problems p') || ({OPENED})")
    if field == "other":
        browser.wait("document.querySelector('#compared .problem')")
    assert browser.run("[typeof hacked, document.querySelectorAll('img, main script').length]") == ["undefined", 0]
    assert browser.list_complaints() == []


def test_hostile_names_of_files_and_models_are_text(browser, server, tmp_path):
    open_page(browser, server, SMALL)
    path = tmp_path / "<img src=x onerror=hacked=1>.json"
    path.write_text(json.dumps(HF | {"_name_or_path": f"org/{HOSTILE}", "architectures": [HOSTILE]}))
    browser.give_file("#file", path)
    browser.wait(f"document.querySelector('.problem, #problems p') || ({OPENED} && location.hash.includes('file='))")
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 32 --'{HOSTILE}' 3\n")
    browser.give_file("#file", path)
    browser.wait("document.querySelector('.problem, #problems p')")
    assert browser.run("[typeof hacked, document.querySelectorAll('img, main script').length]") == ["undefined", 0]
    check_quiet(browser, server)


def test_the_old_answer_stays_until_the_new_one_is_there_and_late_ones_are_dropped(browser, server):
    open_page(browser, server, SMALL)
    before = read_cards(browser)
    browser.run("""
        window.sent = [];
        const real = window.fetch;
        window.fetch = async (where, options) => {
            const question = JSON.parse(options.body);
            const found = await real(where, options);
            if (!question.ask) {
                sent.push(question.gpus);
                if (question.gpus === '32') await new Promise(done => { window.release = done; });
            }
            return found;
        };""")
    browser.type("#gpus", "32")
    browser.wait("window.release")
    assert read_cards(browser) == before and browser.run("document.querySelector('#found').classList.contains('old')")
    browser.type("#gpus", "8")
    time.sleep(0.5)
    browser.run("""
        window.shown = [];
        new MutationObserver(() => shown.push(document.querySelector('#best h2').textContent))
            .observe(document.querySelector('#best'), {childList: true});
        release();""")
    browser.wait(f"{ANSWERED} && document.querySelector('#best h2').textContent.includes('on 8 ×')")
    assert browser.run("[sent, [...new Set(shown)].length]") == [["32", "8"], 1]


def test_a_pipeline_is_drawn_and_two_layouts_stand_side_by_side(browser, server):
    open_page(browser, server, IN_PIPELINE)
    browser.wait("document.querySelector('#timeline canvas')")
    best = ask({**SMALL, "fix": ["pp=2"]})["layouts"][0]["name"]
    found = ask({**SMALL, "fix": ["pp=2"], "ask": "timeline", "layout": best})
    name = browser.run("document.querySelector('#timeline canvas').getAttribute('aria-label')")
    assert name == f"Timeline of 2 pipeline ranks: {100 * found['bubble']:.0f} % of the time is waiting"
    painted = browser.run(
        "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
        "(document.querySelector('#timeline canvas'))"
    )
    assert painted > 3
    browser.press("#others .bars button")
    browser.wait("document.querySelector('#compared-title')")
    assert browser.run("document.querySelectorAll('#compared .track').length") == 4
    check_quiet(browser, server)


def test_every_number_says_where_it_comes_from_by_keyboard_too(browser, server):
    open_page(browser, server, SMALL)
    origins = set(browser.run("[...document.querySelectorAll('.number')].map(each => each.dataset.origin)"))
    assert origins >= {"tokens_per_s", "range", "mfu", "step_time_s", "peak", "capacity", "time.compute"}
    known = ask({**SMALL, "ask": "origins"})["parts"]
    assert origins <= known.keys()
    browser.run("document.querySelector('.number[data-origin=step_time_s]').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    browser.wait("document.querySelector('#origin').open")
    said = browser.run("document.querySelector('#origin').textContent")
    assert known["step_time_s"]["formula"] in said and known["step_time_s"]["page"] in said
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)
    browser.wait("!document.querySelector('#origin').open")
    assert browser.run("document.activeElement.dataset.origin") == "step_time_s"


_NOT_ASKED = """
(() => {
  const shown = '.card .speed, .card .note:not(.words), .card .row, #verdict .lead, .bars em, #clusters .lead, ' +
    '#opened td:not(.t), #clusters td:not(.t), #compared td';
  const found = [];
  for (const place of document.querySelectorAll(shown)) {
    if (place.tagName === 'TD' && place.cellIndex === 0) continue;  // a rank, a number of GPUs
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.textContent, parent = walker.currentNode.parentElement;
      if (/\\d/.test(text) && !parent.closest('.number, b')) found.push(`${place.className || place.tagName}: ${text}`);
    }
  }
  return found;
})()
"""


def test_every_number_of_cards_bars_tables_and_costs_can_be_asked(browser, server):
    open_page(browser, server, IN_PIPELINE)
    browser.run("document.querySelector('#clusters').scrollIntoView()")
    browser.wait("document.querySelector('#clusters svg.chart')")
    browser.press("#others .bars button")
    browser.wait("document.querySelector('#compared-title')")
    left = [text for text in browser.run(_NOT_ASKED) if not re.search(ALREADY_SAID, text)]
    assert left == []
    origins = set(browser.run("[...document.querySelectorAll('.number')].map(each => each.dataset.origin)"))
    assert origins >= {"cost", "efficiency", "messages.pp", "messages.dp", "memory.activations", "time.bubble"}
    assert origins <= ask({**SMALL, "ask": "origins"})["parts"].keys()


def check_first_screen(browser: DrivenBrowser, question: dict, height: int) -> None:
    """Fail unless a window that high says the best layout, its speed, whether it fits, and why it is the best."""
    best = ask(question | {"fix": [question["fix"]]})["layouts"][0]
    said = browser.run("document.querySelector('#verdict').innerText")
    assert best["name"] in said and f"{best['tokens_per_s']:,.0f} tokens/s" in said
    assert re.search(r"It fits(?: if the prediction holds)?: [\d.]+ GiB of [\d.]+ GiB", said)
    assert "Why: " in said and best["why"].partition(": ")[2] in said
    assert browser.run("document.querySelector('#verdict').getBoundingClientRect().bottom") < height


def test_messages_are_drawn_by_axis_and_link_as_the_terminal_has_them(browser, server):
    asked = SMALL | {"fix": "pp=2, tp=2"}
    open_page(browser, server, asked)
    best = ask({**SMALL, "fix": ["pp=2", "tp=2"]})["layouts"][0]["name"]
    found = ask({**SMALL, "fix": ["pp=2", "tp=2"], "ask": "explain", "layout": best})
    messages = found["messages"][found["step_rank"]]
    axes = [each["axis"] for each in messages]
    assert axes == ["tp", "pp", "dp"]
    names = browser.run("[...document.querySelectorAll('#messages .bars > div > b')].map(each => each.textContent)")
    assert [name.split()[0] for name in names] == [*axes, *axes]
    drawn = browser.run(
        "[...document.querySelectorAll('#messages .track')].map(each => each.getAttribute('aria-label'))"
    )
    for text, each in zip(drawn, messages, strict=False):
        assert ("fast links" in text) == (each["fast_link_bytes"] > 0)
        assert ("network" in text) == (each["network_bytes"] > 0)
    said = browser.run("[...document.querySelectorAll('#messages em')].map(each => each.textContent)")
    for text, each in zip(said, messages, strict=False):
        size, unit = text.split()
        sent = each["fast_link_bytes"] + each["network_bytes"]
        assert float(size) == pytest.approx(sent / {"TB": 1e12, "GB": 1e9, "MB": 1e6}[unit], rel=5e-3)
    for text, each in zip(said[len(axes) :], messages, strict=True):
        assert text.endswith(f", {100 * each['hidden_share']:.0f} % hidden")
    rows = browser.run(
        "[...document.querySelector('[aria-label=\"Messages in numbers\"] tbody').rows]"
        ".map(row => [row.cells[0].textContent, row.cells[1].textContent])"
    )
    assert rows == [[str(rank), each["axis"]] for rank, of in enumerate(found["messages"]) for each in of]
    check_quiet(browser, server)


def press_key(browser: DrivenBrowser, key: str, code: int, text: str = "") -> None:
    more = {"text": text} if text else {}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)


def tab_to(browser: DrivenBrowser, script: str) -> None:
    """Press Tab until the focused element, `e`, is the wanted one, and is seen to be focused."""
    for _ in range(200):
        press_key(browser, "Tab", 9)
        if browser.run(f"(e => Boolean({script}))(document.activeElement)"):
            outline = browser.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", "nobody sees where the focus is"
            return
    raise AssertionError(f"Tab never comes to {script}")


def test_a_keyboard_is_enough_from_the_question_to_the_file(browser, server):
    open_page(browser, server, SMALL)
    tab_to(browser, "e.id === 'model'")
    tab_to(browser, "e.id === 'gpus'")
    browser.call("Input.insertText", text="8")  # what Tab comes to is selected
    browser.wait(f"{OPENED} && document.querySelector('#best h2').textContent.includes('on 8 ×')")
    tab_to(browser, "e.closest('.card') && e.textContent === 'Get its file'")
    press_key(browser, "Enter", 13, "\r")
    browser.wait("document.querySelector('#emitted pre')")
    assert browser.run("document.activeElement.id") == "emitted-title"
    tab_to(browser, "e.id === 'download'")
    tab_to(browser, "e.id === 'why_not'")
    browser.call("Input.insertText", text="tp=4")
    press_key(browser, "Enter", 13, "\r")
    browser.wait(f"{ANSWERED} && document.querySelector('#why-not-answer')")
    check_quiet(browser, server)


def test_what_is_pressed_keeps_the_focus_near_though_the_answer_is_drawn_again(browser, server):
    open_page(browser, server, SMALL)
    browser.run("document.querySelector('.card:nth-child(2) button').focus()")
    browser.press(".card:nth-child(2) button", "Open")
    browser.wait("document.activeElement.textContent.startsWith('Opened: ')")
    browser.type("#why_not", "tp=4")
    browser.run("document.querySelector('#ask-why-not').focus(); document.querySelector('#ask-why-not').click()")
    browser.wait(f"{ANSWERED} && document.querySelector('#why-not-answer')")
    assert browser.run("document.activeElement.id") == "ask-why-not"


def test_beside_an_answer_that_is_old_its_own_question_is_asked(browser, server):
    open_page(browser, server, SMALL)
    browser.type("#gpus", "abc")
    browser.wait("document.querySelector('form .problem')")
    browser.press(".card button", "Get its file")
    browser.wait("document.querySelector('#emitted pre')")
    assert browser.run("document.querySelector('#emitted pre').textContent") == ask(SMALL | {"ask": "emit"})["text"]


def test_sliders_ask_too_and_clusters_come_when_they_are_in_sight(browser, server):
    open_page(browser, server, SMALL)
    browser.run("(s => { s.value = 8; s.dispatchEvent(new Event('input', {bubbles: true})); })"
                "(document.querySelector('input[data-of=global_batch]'))")  # fmt: skip
    browser.wait(
        f"{OPENED} && JSON.parse(document.querySelector('#found').dataset.asked)[0].includes('--global-batch 256')"
    )
    assert browser.run("document.querySelector('#global_batch').value") == "256"
    browser.run("document.querySelector('#clusters').scrollIntoView()")
    browser.wait("document.querySelectorAll('#clusters svg.chart').length === 2")
    sizes = browser.run("[...document.querySelectorAll('#clusters tbody tr')].map(each => each.cells[0].textContent)")
    assert sizes == ["2", "4", "8", "16", "32", "64", "128"]
    check_quiet(browser, server)


def test_the_command_and_the_link_are_copied(browser, server):
    open_page(browser, server, SMALL)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.press("#copy-command")
    browser.wait("document.querySelector('#copied').textContent")
    (command,) = ask(SMALL | {"tokens": "1T", "price": "2"})["asked"]["commands"]
    assert command in (
        browser.run("navigator.clipboard.readText()"),
        browser.run("document.querySelector('#copied').textContent"),
    )


_UNNAMED = """
[...document.querySelectorAll('input, select, button, canvas, svg.chart, [role=img], [role=region], a')]
  .filter(each => each.offsetParent !== null || each.tagName === 'svg')
  .filter(each => !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length))
  .map(each => each.outerHTML.slice(0, 200))
"""
_PALE = """
(() => {
  const channel = value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const pen = canvas.getContext('2d', {willReadFrequently: true});
  const read = colour => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => .2126 * channel(r / 255) + .7152 * channel(g / 255) + .0722 * channel(b / 255);
  const under = each => {
    for (; each; each = each.parentElement) {
      const found = read(getComputedStyle(each).backgroundColor);
      if (found[3] > 250) return found;
    }
    return [255, 255, 255, 255];
  };
  const pale = [];
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !each.getClientRects().length) continue;
    const style = getComputedStyle(each);
    const [one, other] = [light(read(each instanceof SVGElement ? style.fill : style.color)), light(under(each))];
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    if (ratio < 4.5) pale.push(`${ratio.toFixed(2)} ${each.outerHTML.slice(0, 120)}`);
  }
  return pale;
})()
"""
_IDS = "[...document.querySelectorAll('[id]')].map(each => each.id)"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_the_page_is_readable_at_every_width_in_light_and_dark(browser, server, width, dark):
    open_page(browser, server, IN_PIPELINE, width=width, height=850, dark=dark)
    check_first_screen(browser, IN_PIPELINE, 850)
    browser.run("document.querySelector('#clusters').scrollIntoView()")
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.wait("document.querySelector('#clusters svg.chart')")
    browser.press("#others .bars button")
    browser.wait("document.querySelector('#compared-title')")
    assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.run(_UNNAMED) == []
    assert browser.run(_PALE) == []
    ids = browser.run(_IDS)
    assert len(ids) == len(set(ids))
    check_quiet(browser, server)
