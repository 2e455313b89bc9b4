"""The mutants: one-line breaks of the product, and the tests that must fail for each; the table in docs/testing.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec

from tests.command import ROOT

FILE = ROOT / "tests" / "mutants.yaml"
PAGE = ROOT / "docs" / "testing.md"
TABLE = re.compile(r"(<!-- mutants -->\n).*(<!-- end of mutants -->)", re.DOTALL)


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One break. File and tests are relative to the repository."""

    id: str
    breaks: str
    """What goes wrong for a user, in one sentence."""
    file: str
    old: str
    """Part of one line; it occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """FILE::FUNCTION, or FILE::FUNCTION[CASE], of each test that must fail."""

    def applied(self, root: Path = ROOT) -> str:
        """Return the file's text with the break. Raises ValueError: the old text doesn't occur exactly once."""
        text = (root / self.file).read_text()
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: the old text occurs {times} times in {self.file}, not once: {self.old!r}")
        return text.replace(self.old, self.new)


def mutants() -> tuple[Mutant, ...]:
    """Return all mutants, in the file's order."""
    return msgspec.yaml.decode(FILE.read_bytes(), type=tuple[Mutant, ...])


def functions(file: Path) -> set[str]:
    """Return the names of the test functions in a file."""
    return {one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)}


def renewed(text: str) -> str:
    """Return the page with its table of mutants."""
    rows = "\n".join(f"| {one.id} | {one.breaks} | `{one.file}` | {tests_of(one)} |" for one in mutants())
    head = "| id | what breaks | file | test |\n|---|---|---|---|"
    return TABLE.sub(lambda match: f"{match[1]}{head}\n{rows}\n{match[2]}", text)


def tests_of(mutant: Mutant) -> str:
    """Return the tests as a cell of the table."""
    return ", ".join(f"`{test}`".replace("|", "\\|") for test in mutant.tests)
