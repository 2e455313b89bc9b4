"""Tables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False) -> str:
    """Return a section with one table; nothing if it has no rows. `title` is HTML, everything else text."""
    if not rows:
        return ""
    inner = table(head, rows)
    if folded:
        return f"<section><details><summary><h2>{title}</h2></summary>{inner}</details></section>"
    return f"<section><h2>{title}</h2>{inner}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that page.js makes sortable."""
    top = "".join(f"<th scope=col>{escape(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}" for text in row) for row in rows)
    return f"<div class=scroll><table class=sortable><thead><tr>{top}<tbody>{body}</table></div>"
