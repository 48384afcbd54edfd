"""A working directory in which somebody has put modules that are called like those of Python and its packages."""

from pathlib import Path

NAMES = (
    "ctypes", "socket", "json", "signal", "runpy", "multiprocessing", "selectors", "struct", "subprocess", "typing",
    "torch", "numpy", "rich", "jinja2", "datasets", "sitecustomize", "flash_attn", "liger_kernel", "dtlayout",
)  # fmt: skip


def set_trap(folder: Path) -> Path:
    """Put them there; a folder that holds the name of each that was run."""
    folder.mkdir(exist_ok=True)
    caught = folder / "caught"
    caught.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(caught / name)!r}, 'w').close()\nraise SystemExit('{name}')\n")
    return caught


def list_caught(caught: Path) -> list[str]:
    """Which of them were run."""
    return sorted(path.name for path in caught.iterdir())
