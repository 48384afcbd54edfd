"""The pictures of docs/guide/web.md, taken off the page in a browser: `make docs-web`."""

import io
import tempfile
import threading
from pathlib import Path

from devtools import driven_browser
from PIL import Image

from dtlayout.commands.ask import ask
from dtlayout.web.server import PageServer

ROOT = Path(__file__).parents[2]

_MOST_BYTES = 60_000
_COLOURS = 40


def take_pictures(folder: Path) -> None:
    """Write web-answer.png, the same in dark, and web-opened.png, each of few colours."""
    with PageServer(ask) as server, tempfile.TemporaryDirectory() as profile, driven_browser(Path(profile)) as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, dark in (("web-answer.png", False), ("web-answer-dark.png", True)):
            browser.open(server.address, width=1180, height=720, dark=dark)
            browser.wait("document.querySelector('#opened h3') && !document.querySelector('#found.old')")
            browser.run("document.querySelector('#status').hidden = true")  # how long this machine took
            keep(browser.picture(whole=False), folder / name)
        browser.open(f"{server.address}#fix=pp%3D4&global_batch=64&engine=megatron", width=900, height=1000)
        browser.wait("document.querySelector('#timeline canvas') && !document.querySelector('#found.old')", 200)
        browser.run("document.querySelector('#opened').scrollIntoView()")
        keep(browser.picture(whole=False), folder / "web-opened.png")
        server.shutdown()


def keep(picture: bytes, path: Path) -> None:
    """Write a picture with as few colours as it needs; AssertionError if it is large all the same."""
    drawn = Image.open(io.BytesIO(picture)).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1)
    drawn.save(path, optimize=True)
    assert path.stat().st_size < _MOST_BYTES, path


if __name__ == "__main__":
    take_pictures(ROOT / "docs" / "guide")
