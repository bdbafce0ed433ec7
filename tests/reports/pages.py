"""Pages for tests: hostile texts in every place a report has, and many messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import runmirror
from runmirror.reports.tree import Tree
from tests.reports.groups import groups, trajectory
from tests.reports.hostile import HOSTILE


def put_everywhere(tree: Tree, text: str) -> None:
    """One text in every place of a report."""
    tree.text(text)
    tree.header(text)
    tree.code(text, text)
    tree.details(text, text)
    tree.table({text: text}, text)
    tree.exception(ValueError(text))
    tree.data({"type": text, text: text})
    with tree.scope(text), tree.folded(text), tree.div(class_=text, onclick=text):
        call = {"id": text, "function": {"name": text, "arguments": text}}
        parts: list[Any] = [{"type": kind, kind: text} for kind in ("text", "thinking", "image", "audio", "tool_call")]
        parts += [{"type": "image_url", "image_url": {"url": text}}, {"type": text, text: text}, text, 7, None]
        tree.conversation([{"role": text, "name": text, "content": text}, {"role": "user", "content": parts}, text, 7])
        tree.conversation(
            [{"role": "assistant", "tool_calls": [call, text], "unparsed_tool_calls": [{"raw_text": text}]}]
        )


def hostile_page(folder: Path) -> Path:
    """A report with every hostile text everywhere."""
    with runmirror.start(folder, code=False) as run, run.report(0, title=HOSTILE[0] + HOSTILE[1]) as tree:
        for text in HOSTILE:
            put_everywhere(tree, text if len(text) < 10_000 else text[:30_000])
        tree.text(HOSTILE[-1])
        tree.conversation([{"role": "assistant", "content": HOSTILE[-1]}])
        bad = trajectory(text=HOSTILE[3]) | {"trajectory_metrics": {HOSTILE[1]: 1.0, HOSTILE[2]: HOSTILE[3]}}
        bad["steps"][0]["logs"] = {HOSTILE[1]: HOSTILE[3], "long": HOSTILE[3] * 200}
        bad["steps"][0]["metrics"] = {HOSTILE[4]: HOSTILE[5]}
        run.log_rollouts(0, [{"trajectories": [bad], "tags": [HOSTILE[0]], "title": HOSTILE[1]}])
    return folder / "train_iteration_000000.html"


def long_page(folder: Path, messages: int, each: int = 400) -> Path:
    """A report of so many messages in 8 groups."""
    with runmirror.start(folder, code=False) as run:
        turns = messages // 8 // 4 // 2
        run.log_rollouts(0, groups(8, 4, turns, text="Turn {turn}. " + "word " * (each // 5)), num_groups_to_log=8)
    return folder / "train_iteration_000000.html"
