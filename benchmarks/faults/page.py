"""The page of an earlier fault run, of which rows and sections stay that nothing new is known of."""

import re
from dataclasses import dataclass, field
from pathlib import Path

HEAD = "| fault | provoked | wanted | survived | which means | on |"


@dataclass(frozen=True)
class Page:
    """The rows and sections of a page of faults."""

    rows: dict[str, str] = field(default_factory=dict)
    """Title of a kind → its line of the table."""
    sections: dict[str, list[str]] = field(default_factory=dict)
    """Heading → the section's lines, with it."""

    @classmethod
    def read(cls, path: Path | None) -> "Page":
        """Read a page from a file; one without rows if there is no file."""
        if path is None or not path.exists():
            return cls()
        page, date, section = cls(), "", list[str]()
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"\d{4}-\d\d-\d\d", line):
                date = date or found[0]
            if line.startswith("## "):
                section = page.sections.setdefault(line, [])
            cells = line.strip("| ").split(" | ")
            if page.sections:
                section.append(line)
            elif len(cells) in (5, 6) and cells[1].isdecimal():
                page.rows[cells[0]] = line if len(cells) == 6 else f"{line} {date} |"
        for lines in page.sections.values():
            while lines and not lines[-1]:
                lines.pop()
        return page
