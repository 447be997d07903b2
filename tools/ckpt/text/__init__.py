"""From a document to lines on a terminal.

``render`` has the pieces: read it first; ``rows`` shows rows. ``inspect`` (with ``graph`` and
``contents``), ``plan``, ``validation``, ``repair``, ``export``, ``key``, ``top`` and ``diff`` are
pages; smaller pages stand with their commands. Others use the names below, and the functions of
``render``.
"""

from __future__ import annotations

from . import render
from .diff import draw_diff, draw_proof
from .export import draw_file, draw_folder, draw_savepoint
from .inspect import draw_checkpoint
from .key import draw_key, draw_key_history
from .plan import draw_plan
from .render import Column, Look
from .repair import draw_copies, draw_given_up, draw_losses, draw_put_back
from .rows import draw_rows
from .top import draw_top
from .validation import draw_all, draw_newest_whole, draw_one

__all__ = [
    "Column",
    "Look",
    "draw_all",
    "draw_checkpoint",
    "draw_copies",
    "draw_diff",
    "draw_file",
    "draw_folder",
    "draw_given_up",
    "draw_key",
    "draw_key_history",
    "draw_losses",
    "draw_newest_whole",
    "draw_one",
    "draw_plan",
    "draw_proof",
    "draw_put_back",
    "draw_rows",
    "draw_savepoint",
    "draw_top",
    "render",
]
