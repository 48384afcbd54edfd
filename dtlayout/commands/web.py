"""dtlayout web: the planner as a page of this machine, which answers while one types."""

import argparse
import os
import sys
import threading
import webbrowser

from dtlayout.base.errors import InvalidConfig
from dtlayout.commands.arguments import show
from dtlayout.commands.ask import ask
from dtlayout.web.server import PageServer, read_static

EXAMPLE = "dtlayout web --no-browser --port 8700"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the port, and whether a browser is started."""
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the page; any free one by default")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and start no browser")


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if not 0 <= options.port < 1 << 16:
        raise InvalidConfig(f"--port={options.port} must lie from 0 to 65535")
    read_static()  # an installation without the page fails here
    with PageServer(ask, options.port) as server:
        port = server.server_address[1]
        lines = [
            server.address,
            f"This machine alone is answered; over ssh, forward the port: ssh -L {port}:127.0.0.1:{port} HOST",
            "Ctrl-C ends it.",
        ]
        show(options, {"ok": True, "address": server.address}, lambda _: lines)
        sys.stdout.flush()
        if not options.no_browser and _has_screen():
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        server.serve_forever()
    raise AssertionError("only an interrupt ends the server")


def _has_screen() -> bool:
    """Whether a browser with windows can be started; one inside the terminal would hide the address."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
