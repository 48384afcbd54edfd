"""A page in a real browser without a window: what a script finds when it reads, presses and types there."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
_LIMIT_S = 120

# A frame has any width, where a window without a screen has at least 500 pixels.
_FRAME = """<!doctype html><body><iframe srcdoc="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="outcome"></pre><script>
addEventListener('load', () => {{
  const page = document.querySelector('iframe').contentDocument;
  document.getElementById('outcome').textContent = JSON.stringify((page => {{ {script} }})(page));
}});
</script></body>"""


def ask_browser(page: Path, script: str, *, width: int = 1400) -> Any:
    """What the body of a function of `page`, the page's document, returns in a frame so many pixels wide."""
    frame = page.with_name(f"frame-{page.name}")
    text = html.escape(page.read_text(encoding="utf-8"))
    frame.write_text(_FRAME.format(page=text, width=width, script=script), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1500,1000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    browser = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        out, _ = browser.communicate(timeout=_LIMIT_S)
    finally:
        with suppress(ProcessLookupError):  # its helpers too
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    outcome = re.search(r'<pre id="outcome">(.+?)</pre>', out.decode("utf-8"), re.S)
    assert outcome, "the script failed, or the page did not load"
    return json.loads(html.unescape(outcome[1]))


_READ = """
const labels = [...page.querySelectorAll('svg text, .axis span')];
const texts = labels.map(label => [label.textContent, label.getBoundingClientRect()]);
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const overlapping = texts.flatMap(([name, a], i) =>
  texts.slice(i + 1).filter(([, b]) => meet(a, b)).map(([other]) => name + ' | ' + other));
const root = page.documentElement, width = root.clientWidth;
return {overlapping, sideways: root.scrollWidth - width, width};
"""


def check_readable(page: Path) -> None:
    """On a desk and on a phone no label meets another, and the page scrolls only down."""
    for width in (1400, 400):
        found = ask_browser(page, _READ, width=width)
        assert found["overlapping"] == [], f"{width} pixels"
        assert found["sideways"] == 0 and found["width"] > width - 20
