"""The page of the fault benchmark keeps what it had of faults that were not provoked again."""

from benchmarks.faults.__main__ import FULL, KINDS, report
from benchmarks.faults.events import Event
from benchmarks.faults.page import HEAD, Page

OLD = """# Faults

2025-01-02, `make bench NAME=faults`: torch 2.0

| fault | provoked | wanted | survived | which means |
|---|--:|--:|--:|---|
| SIGKILL of a random rank, 4 ranks as pp2·tp2 | 87 | 50 | 87 | no checkpoint is damaged |

## Kills

Of 87 kills some.

## Signals

| phase | SIGTERM |
"""


def test_a_page_without_a_column_of_dates_gives_its_rows_its_own(tmp_path):
    (tmp_path / "page.md").write_text(OLD)
    page = Page.read(tmp_path / "page.md")
    assert list(page.rows.values()) == [
        "| SIGKILL of a random rank, 4 ranks as pp2·tp2 | 87 | 50 | 87 | no checkpoint is damaged | 2025-01-02 |"
    ]
    assert page.sections == {
        "## Kills": ["## Kills", "", "Of 87 kills some."],
        "## Signals": ["## Signals", "", "| phase | SIGTERM |"],
    }
    assert Page.read(tmp_path / "none") == Page.read(None) == Page()


def test_new_rows_stand_beside_those_that_nothing_new_is_known_of_and_a_second_page_keeps_both(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(OLD)
    events = [Event(kind="memory limits", what=f"case {i}", problem="killed" if i else "") for i in range(2)]
    path.write_text("\n".join(report(FULL, events, Page.read(path))))
    once = path.read_text()
    limits = KINDS["memory limits"]
    assert f"\n{HEAD}\n" in once and "| no checkpoint is damaged | 2025-01-02 |\n" in once
    assert f"\n| {limits.title} | 2 | 5 | 1 | {limits.promise} | 2" in once
    assert "\n## Kills\n\nOf 87 kills some.\n\n## Signals\n" in once
    assert once.endswith("- memory limits, case 1: killed")
    path.write_text("\n".join(report(FULL, [], Page.read(path))))
    again = path.read_text()
    assert again.splitlines()[4:9] == once.splitlines()[4:9] and "Of 87 kills some." in again
