"""From a document to lines on a terminal.

``render`` has the pieces: read it first; ``rows`` shows rows. ``inspect`` (with ``graph`` and
``contents``), ``plan``, ``validation``, ``export``, ``key``, ``top`` and ``diff`` are pages;
smaller pages stand with their commands. Others use the names below, and the functions of
``render``. The door is lazy: a command is a cold process, and draws one page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from . import render as render
    from .diff import draw_diff as draw_diff, draw_proof as draw_proof
    from .export import draw_file as draw_file, draw_folder as draw_folder, draw_savepoint as draw_savepoint
    from .inspect import draw_checkpoint as draw_checkpoint
    from .key import KEY_ROWS_SHOWN as KEY_ROWS_SHOWN, draw_key as draw_key, draw_key_history as draw_key_history
    from .plan import draw_plan as draw_plan
    from .render import Column as Column, Look as Look
    from .rows import draw_rows as draw_rows
    from .top import draw_top as draw_top
    from .validation import draw_all as draw_all, draw_newest_whole as draw_newest_whole, draw_one as draw_one
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".diff": "draw_diff draw_proof",
            ".export": "draw_file draw_folder draw_savepoint",
            ".inspect": "draw_checkpoint",
            ".key": "KEY_ROWS_SHOWN draw_key draw_key_history",
            ".plan": "draw_plan",
            ".render": "Column Look",
            ".rows": "draw_rows",
            ".top": "draw_top",
            ".validation": "draw_all draw_newest_whole draw_one",
        },
    )
