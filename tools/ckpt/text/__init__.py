"""From a document to lines on a terminal.

``render`` has the pieces: read it first. ``inspect`` (with ``graph`` and ``contents``), ``plan``
and ``export`` are pages; smaller pages stand with their commands. Others use the names below, and
the functions of ``render``.
"""

from __future__ import annotations

from . import render
from .export import draw_file, draw_folder, draw_savepoint
from .inspect import draw_checkpoint
from .plan import draw_plan
from .render import Column, Look

__all__ = [
    "Column",
    "Look",
    "draw_checkpoint",
    "draw_file",
    "draw_folder",
    "draw_plan",
    "draw_savepoint",
    "render",
]
