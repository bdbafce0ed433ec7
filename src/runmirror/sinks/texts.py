"""Texts of rows, for trackers that show the last one of each name beside the numbers."""

from __future__ import annotations

from runmirror.log.masking import mask_text
from runmirror.log.rows import Row

MAX_TEXT = 2_000
"""Characters of one text."""


def row_texts(row: Row) -> dict[str, str]:
    """The texts of a row by key, masked and cut."""
    return {key: mask_text(text[: 2 * MAX_TEXT])[:MAX_TEXT] for key, text in row.text().items() if key}
