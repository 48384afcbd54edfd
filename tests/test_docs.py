"""README and the pages of docs: links lead somewhere, generated pages are up to date, and what README says is so."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import api_page
import pytest
import torch
from tiny import ROOT

import dtlayout

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS, *sorted((ROOT / "benchmarks").glob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read_links(page: Path) -> list[str]:
    """Targets of a page's links but those to other hosts."""
    links: list[str] = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8")))
    return [link for link in links if not re.match(r"\w+:", link)]


def read_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    lost = []
    for link in read_links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in read_anchors(target)):
            lost.append(link)
    assert not lost


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    assert {(index.parent / link).resolve() for link in read_links(index)} >= {*DOCS} - {index}


@pytest.mark.parametrize("suffix", [".py", ".md", ".toml", ".sh", ".sbatch"])
def test_every_page_of_docs_that_a_file_names_is_there(suffix):
    kept = (".venv", "CHANGELOG.md")
    files = [path for path in ROOT.rglob(f"*{suffix}") if not {*path.relative_to(ROOT).parts} & {*kept}]
    named = {name for path in files for name in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text("utf-8"))}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_the_page_of_commands_is_what_their_parsers_say():
    environment = {key: value for key, value in os.environ.items() if key != "DTLAYOUT_PLUGINS"}
    written = subprocess.run(
        [sys.executable, "tests/support/cli_page.py"],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    page = ROOT / "docs" / "reference" / "cli.md"
    assert written == page.read_text(encoding="utf-8"), "make docs-cli writes the page"


def test_the_page_and_the_stub_of_the_api_are_what_the_docstrings_say():
    assert "\n".join(api_page.write_page()) + "\n" == api_page.PAGE.read_text("utf-8"), "make docs-api writes the page"
    assert "\n".join(api_page.write_stub()) + "\n" == api_page.STUB.read_text("utf-8"), "make docs-api writes the stub"


def test_the_page_of_the_api_has_what_classes_inherit_and_the_defaults_of_fields():
    page = api_page.PAGE.read_text("utf-8")
    sections = dict(part.split("\n", 1) for part in re.split(r"^### ", page, flags=re.MULTILINE)[1:])
    layout = sections["Layout"]
    assert all(
        f"\n    {field}: int = 1,\n" in layout and f"- `{field}`: " in layout for field in ("tp", "pp", "micro_batch")
    )
    assert "cp_method: str = 'ring'" in layout and "ClassVar" not in page
    answers = api_page.SECTIONS["Answers"]
    assert all(("`plot()`" in sections[name]) == hasattr(getattr(dtlayout, name), "plot") for name in answers)
    predicted = re.findall(r"^- `(\w+)`: ", sections["PredictedLayout"], re.MULTILINE)
    assert predicted and all(f"`{member}`" in sections["ExplainedLayout"] for member in predicted)


def test_the_page_of_the_api_has_every_public_name_and_example():
    assert sorted(name for names in api_page.SECTIONS.values() for name in names) == sorted(dtlayout.__all__)
    assert {*api_page.EXAMPLES} == {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}


def test_the_five_lines_of_the_api_predict_a_model_of_ones_own(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", api_page.HEAD, re.MULTILINE | re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 5
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["found"].fits and str(names["found"]) in capsys.readouterr().out


def test_every_benchmark_is_in_the_table_of_benchmarks():
    folder = ROOT / "benchmarks"
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__main__.py")}
    table = (folder / "README.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} == modules
    pages = re.search(r"^PAGES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert pages and {*pages[1].split()} <= modules


def test_readme_is_short_and_names_files_that_are_there():
    assert len(README.splitlines()) <= 130
    for line in re.findall(r"^\d+\. .*(?:\n    .*)*", README, re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", line):
            path = ROOT / name if name.startswith("dtlayout/") else folder / name
            assert path.exists(), name
            folder = path if path.is_dir() else path.parent


def test_pictures_are_there_and_small_and_readmes_follows_light_and_dark():
    (name,) = re.findall(r'<img src="([^"]+)" alt="[^"]{20,}"', README)
    (dark,) = re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">', README)
    assert dark != name and README.splitlines().index(next(line for line in README.splitlines() if name in line)) < 30
    shown = [ROOT / name, ROOT / dark, *(ROOT / "docs" / "guide").glob("*.png")]
    assert {path.name for path in shown} == {"web-answer.png", "web-answer-dark.png", "web-opened.png"}
    for path in shown:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 60_000


def test_readme_says_how_wrong_predictions_are_as_the_report_does():
    report = (ROOT / "benchmarks" / "validation.md").read_text(encoding="utf-8")
    wide = [line.split("|")[5:] for line in report.splitlines() if line.count("|") > 14]
    found = [[cell.strip(" %") for cell in cells] for cells in wide]
    known = {(rows, model, gpu, inside) for rows, _, _, _, model, inside, _, gpu, *_ in found}
    table = README.partition("| predicted | rows |")[2].partition("\n\n")[0]
    shown = re.findall(r"\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \| (\d+) of 100 \|$", table, re.MULTILINE)
    assert len(shown) == 4 and {*shown} <= known


def test_the_kernel_of_readme_is_known_to_commands_and_computes_a_norm(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for name, body in re.findall(r"^# (\w+\.py)\n(.*?)(?=^# \w+\.py\n|\Z)", block, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(body)
    environment = os.environ | {"DTLAYOUT_PLUGINS": "my_kernels", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    asked = ["check", "configs/debug.toml", "--world", "8", "--gpu", "cpu", "--kernels.norm"]
    for value, exit_code in (("mine", 0), ("yours", 2)):
        command = [sys.executable, "-m", "dtlayout.cli", *asked[:-1], f"{asked[-1]}={value}"]
        assert subprocess.run(command, cwd=ROOT, env=environment, timeout=120).returncode == exit_code
    parts: dict[str, Any] = {}
    exec((tmp_path / "my_norms.py").read_text(), parts)
    x, weight = torch.rand(2, 8), torch.rand(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(parts["rms_norm"](x, weight, 1e-5), expected)
