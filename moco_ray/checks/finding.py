"""What a check found, and the table of all of them. Not here: the checks."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from moco_ray.errors import UserError

Status = Literal["ok", "warning", "failed", "skipped"]
NARROWEST, WIDEST = 60, 140  # columns


class Finding(NamedTuple):
    """One row of the table."""

    name: str
    status: Status
    found: str
    cure: str = ""  # of what failed or is warned of

    @property
    def is_whole(self) -> bool:
        """Whether what it looked at may be relied on."""
        return self.status in ("ok", "warning")


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, cure: str) -> Finding:
    return Finding(name, "warning", found, cure)


def failed(name: str, found: str, cure: str) -> Finding:
    return Finding(name, "failed", found, cure)


def skipped(name: str, why: str) -> Finding:
    return Finding(name, "skipped", why)


def mistake(name: str, error: UserError) -> Finding:
    """A user's mistake that was raised: its text names the thing and the rule, and after the last semicolon the cure."""
    found, mark, cure = str(error).rpartition("; ")
    return failed(name, found, cure) if mark else failed(name, cure, "")


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something failed; warnings are allowed."""
    return int(any(finding.status == "failed" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"ok": not exit_code(findings), "checks": [finding._asdict() for finding in findings]}, indent=1)


def as_table(findings: Sequence[Finding], columns: int) -> str:
    """Check, result and what was found, wrapped; a cure stands under its row."""
    columns = min(max(columns, NARROWEST), WIDEST)
    first = max(len(name) for name in ["check", *(finding.name for finding in findings)])
    indent = " " * (first + 2 + len("skipped") + 2)

    def line(name: str, status: str, text: str) -> str:
        return textwrap.fill(text, columns, initial_indent=f"{name:<{first}}  {status:<7}  ", subsequent_indent=indent, break_on_hyphens=False)

    lines = [line("check", "result", "found"), "-" * columns]
    for finding in findings:
        lines.append(line(finding.name, finding.status.upper() if finding.status == "failed" else finding.status, finding.found))
        if finding.cure:
            lines.append(textwrap.fill(finding.cure, columns, initial_indent=f"{indent}cure: ", subsequent_indent=indent + " " * 6, break_on_hyphens=False))
    return "\n".join([*lines, "-" * columns, summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """How many of each, and what failed."""
    count = {status: [f.name for f in findings if f.status == status] for status in ("failed", "warning", "skipped", "ok")}
    words = [
        f"{len(count['failed'])} failed ({', '.join(count['failed'])})" if count["failed"] else "nothing failed",
        counted(len(count["warning"]), "warning"),
        f"{len(count['skipped'])} skipped",
        f"{len(count['ok'])} ok",
    ]
    return ", ".join(words)


def sized(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if count < 1000 else f"{count:,.0f} GiB"


def few(names: Iterable[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, what: str) -> str:
    """"1 worker", "2 workers"."""
    return f"{count:,} {what}{'s' * (count != 1)}"
