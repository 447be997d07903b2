"""From a document to lines on a terminal.

``render`` has the pieces: read it first. ``inspect`` (with ``graph`` and ``contents``), ``plan``,
``validation`` and ``export`` are pages; smaller pages stand with their commands. Others use the
names below, and the functions of ``render``.
"""

from __future__ import annotations

from . import render
from .export import draw_file, draw_folder, draw_savepoint
from .inspect import draw_checkpoint
from .plan import draw_plan
from .render import Column, Look
from .validation import draw_all, draw_newest_whole, draw_one

__all__ = [
    "Column",
    "Look",
    "draw_all",
    "draw_checkpoint",
    "draw_file",
    "draw_folder",
    "draw_newest_whole",
    "draw_one",
    "draw_plan",
    "draw_savepoint",
    "render",
]
