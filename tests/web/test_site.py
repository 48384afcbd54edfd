"""make site: the planner needs nothing but Python and what is packed, and answers inside a browser as it does here."""

import functools
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import needs_browser
from devtools import driven_browser
from given_files import HF, SCRIPT

from dtlayout.commands.ask import ask
from dtlayout.web.server import read_static

ROOT = Path(__file__).parents[2]
PYODIDE = ROOT / "scripts" / "site" / "node_modules" / "pyodide"
SMALL = {"model": "llama-7b", "gpu": "a100-80g-sxm", "gpus": "16", "seq_len": "2048", "global_batch": "128"}
PIPELINE = "pp2·dp8 mb1 zero1"
QUESTIONS = [
    {"ask": "choices"}, SMALL, SMALL | {"fix": ["pp=2"], "tokens": "1T", "price": "2"}, SMALL | {"gpus": "abc"},
    SMALL | {"ask": "scale", "scale": "8,16", "tokens": "1T"}, SMALL | {"ask": "origins"},
    *(SMALL | {"ask": "emit", "engine": name} for name in ("dtlayout", "megatron", "torchtitan", "automodel")),
    *(SMALL | {"ask": name, "layout": PIPELINE, "other": "tp=2"} for name in ("explain", "timeline", "compare")),
    SMALL | {"model": "", "file": {"name": "config.json", "text": json.dumps(HF)}},
    {"gpu": "a100-80g-sxm", "file": {"name": "train.sh", "text": SCRIPT}},
    {"ask": "patch", "gpu": "a100-80g-sxm", "file": {"name": "train.sh", "text": SCRIPT}},
]  # fmt: skip


def build(pyodide: Path, folder: Path) -> None:
    command = [sys.executable, "scripts/site/build.py", str(pyodide), str(folder)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, with Python for the browser where npm has put it, and empty files in its place elsewhere."""
    pyodide, folder = PYODIDE, tmp_path_factory.mktemp("site")
    if not pyodide.is_dir():
        pyodide = tmp_path_factory.mktemp("pyodide")
        for name in ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"):
            (pyodide / name).write_text("")
    build(pyodide, folder)
    return folder


def check_alike(one, other) -> None:
    """Fail unless two documents are the same, but for the last digits of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"version"}:
            check_alike(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            check_alike(*pair)
    elif isinstance(one, float) and isinstance(other, float | int):
        assert one == pytest.approx(other, rel=1e-9)
    else:
        assert one == other


def test_the_page_is_that_of_the_server_but_for_who_is_asked(site):
    for name, file in read_static().items():
        is_same = (site / (name or "index.html")).read_bytes() == file.content
        assert is_same == (name not in ("ask.js", "index.html", ""))
    page = (site / "index.html").read_text()
    assert page.count("default-src 'none'; script-src 'self' 'wasm-unsafe-eval'") == 1
    assert all("export function ask(question" in text.replace("async ", "") for text in (
        (site / "ask.js").read_text(), read_static()["ask.js"].content.decode()))  # fmt: skip


def test_the_planner_needs_nothing_but_python_and_what_is_packed(site, tmp_path):
    with zipfile.ZipFile(site / "planner.zip") as archive:
        archive.extractall(tmp_path)
    code = (
        "import json, sys; sys.path.append(sys.argv[1])\n"
        "from dtlayout.commands.ask import ask\n"
        "print(json.dumps([ask(each) for each in json.loads(sys.argv[2])]))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path), json.dumps(QUESTIONS)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
    for question, document in zip(QUESTIONS, found, strict=True):
        check_alike(document, ask(question))


class _Files(SimpleHTTPRequestHandler):
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(site))) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}/"
        served.shutdown()


@needs_browser
@pytest.mark.skipif(not PYODIDE.is_dir(), reason="make site has not fetched Pyodide")
def test_inside_a_browser_the_planner_answers_as_it_does_here(address, tmp_path):
    with driven_browser(tmp_path) as browser:
        browser.open(address)
        browser.wait("document.querySelector('.card') && document.querySelector('#opened h3')", 240)
        names = browser.run("[...document.querySelectorAll('.card')].map(each => each.dataset.layout)")
        first = ask(
            {"model": "llama3.1-8b", "gpu": "h100-80g-sxm", "gpus": "64", "seq_len": "8192", "global_batch": "512"}
        )
        assert names == [each["name"] for each in first["layouts"]]
        for question in QUESTIONS:
            document = browser.run(f"import('./ask.js').then(found => found.ask({json.dumps(question)}))")
            check_alike(document, ask(question))
        assert browser.list_complaints() == []
        assert browser.list_hosts() == {address.split("/")[2]}
