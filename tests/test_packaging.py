"""The source distribution has all that a reader needs, the wheel all that trains, and both are of one version."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import ROOT, write_tiny

import dtlayout

FOLDERS = ("benchmarks", "configs", "docs", "dtlayout", "examples", "scripts", "tests")
FILES = (
    "CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt", "pyproject.toml", "train.py",
)  # fmt: skip
"""Files of a source distribution beside those of its folders."""


def copy_checkout(target: Path) -> Path:
    """A copy of the files that people write, so that a build leaves nothing in the checkout."""
    target.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    if find_spec("setuptools") is None:
        pytest.skip("there is no setuptools, which builds")
    folder = tmp_path_factory.mktemp("built")
    checkout = copy_checkout(folder / "checkout")
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / done.stdout.split()[-1]) as packed:
        packed.extractall(folder, filter="data")
    return folder / f"dtlayout-{dtlayout.__version__}"


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel that the source distribution alone makes, unpacked."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    done = subprocess.run([*command, "-w", ".."], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = source.parent.glob("*.whl")
    with zipfile.ZipFile(path) as packed:
        packed.extractall(source.parent / "wheel")
    return source.parent / "wheel"


def list_files(folder: Path, *below: str) -> set[str]:
    """Paths of the files in some folders of a folder, without what Python and builds leave there."""
    found = {path.relative_to(folder).as_posix() for each in below for path in (folder / each).rglob("*")}
    return {path for path in found if (folder / path).is_file() and "__pycache__" not in path}


def test_the_source_has_docs_configs_examples_scripts_and_tests(source):
    made = re.compile(r"^benchmarks/.*\.png$|-measured\.json$")
    assert {path for path in list_files(ROOT, *FOLDERS) if not made.search(path)} == list_files(source, *FOLDERS)
    for name in FILES:
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()


def test_every_picture_that_a_page_of_the_source_shows_is_in_it(source):
    shown = re.compile(r'!\[[^]]*\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"')
    pages = [source / "README.md", *(source / "docs").rglob("*.md")]
    found = [(page, place or other) for page in pages for place, other in shown.findall(page.read_text("utf-8"))]
    local = [(page, place) for page, place in found if "://" not in place]
    assert local and not [(page, place) for page, place in local if not (page.parent / place).is_file()]


def test_the_wheel_has_the_package_with_its_tables_and_types_and_nothing_else(wheel):
    assert list_files(wheel, "dtlayout") == list_files(ROOT, "dtlayout")
    assert "dtlayout/py.typed" in list_files(wheel, "dtlayout")
    assert {path.name for path in wheel.iterdir()} == {"dtlayout", f"dtlayout-{dtlayout.__version__}.dist-info"}


def test_the_version_stands_in_one_place(wheel):
    (information,) = wheel.glob("*.dist-info")
    assert f"\nVersion: {dtlayout.__version__}\n" in (information / "METADATA").read_text()
    assert "dtlayout = dtlayout.cli:run" in (information / "entry_points.txt").read_text()
    stated = [path for path in (ROOT / "dtlayout").rglob("*.py") if f'"{dtlayout.__version__}"' in path.read_text()]
    assert stated == [ROOT / "dtlayout" / "base" / "version.py"]
    assert dtlayout.__version__ not in (ROOT / "pyproject.toml").read_text().partition("[project.optional")[0]


def test_the_wheel_trains_without_a_checkout(wheel, tmp_path):
    files = write_tiny(tmp_path)
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**own, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dtlayout", "train", str(files.config), "--ranks", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "done after 2 steps" in done.stdout and (files.run / "summary.json").exists()
    where = [sys.executable, "-c", "import dtlayout; print(dtlayout.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found == f"{wheel / 'dtlayout' / '__init__.py'}\n"
