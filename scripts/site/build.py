"""Build the planner's page as static files in which the planner itself runs: `build.py PYODIDE FOLDER`.

PYODIDE is the folder of the npm package of that name (package.json). The page is that of `dtlayout web`, but for
ask.js, which asks a worker in the place of a server. FOLDER can be put on any host; opened from a disk, browsers start
no worker.
"""

import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import dtlayout
from dtlayout.web.server import read_static

HERE = Path(__file__).parent
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of Python for a browser."""
PACKAGES = ("tomli-w", "tomlkit", "PyYAML", "typing_extensions")
"""Installed packages that the planner imports, beside Python's own library."""
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'; "
    "worker-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
"""Rule of the page for its browser: nothing is loaded from another host."""


def build(pyodide: Path, folder: Path) -> None:
    """Write the site into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in read_static().items():
        if name:
            (folder / name).write_bytes(file.content)
    index = (folder / "index.html").read_text(encoding="utf-8")
    rule = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    (folder / "index.html").write_text(index.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{rule}', 1))
    for name in PYODIDE:
        (folder / name).write_bytes((pyodide / name).read_bytes())
    for name in ("ask.js", "worker.js"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    with zipfile.ZipFile(folder / "planner.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in list_sources():
            archive.write(path, name)


def list_sources() -> Iterator[tuple[str, Path]]:
    """Name in the archive and path of each file of the planner and of the packages that it imports."""
    root = Path(dtlayout.__file__).parent
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix in (".py", ".toml"):
            yield f"dtlayout/{'/'.join(parts)}", path
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or ():
            is_licence = file.name.upper().startswith(("LICENSE", "COPYING"))
            if (file.suffix == ".py" or is_licence) and ".." not in file.parts:
                yield str(file), Path(str(file.locate()))


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
