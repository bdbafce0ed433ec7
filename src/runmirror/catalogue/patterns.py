"""Patterns of metric keys with named parts: ``rewards/{reward_func_name}/mean``, ``{evaluator...}/env/all/{metric}``.

``{name}`` is one segment, without a slash; ``{name...}`` any number of segments.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.)?\}")


class Pattern:
    """A compiled pattern. Raises ValueError for one that can't be read.

    Args:
        text: the pattern.
        anywhere: only look for its parts, in a text that is no key.
    """

    def __init__(self, text: str, *, anywhere: bool = False) -> None:
        self.text = text
        self.names = [found[1] for found in _PART.finditer(text)]
        if anywhere:
            return
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"{text}: two parts have one name")
        if set(_PART.sub("", text)) & set("{}"):
            raise ValueError(f"{text}: a part is {{name}} or {{name...}}")
        self.is_literal = not self.names
        expression, end = "", 0
        for found in _PART.finditer(text):
            expression += re.escape(text[end : found.start()])
            expression += f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"
            end = found.end()
        self._expression = re.compile(expression + re.escape(text[end:]), re.DOTALL)

    def match(self, key: str) -> dict[str, str] | None:
        """part -> what stands there, or None."""
        found = self._expression.fullmatch(key)
        return None if found is None else found.groupdict()


def fill(text: str, parts: dict[str, str]) -> str:
    """``text`` with the parts in their places."""
    return _PART.sub(lambda found: parts.get(found[1], found[0]), text)
