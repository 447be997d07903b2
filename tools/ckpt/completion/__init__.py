"""Completion of command lines in bash, zsh and fish.

``scripts`` is what a shell loads. It calls ``ckpt`` with ``_CKPT_COMPLETE`` set and the command
line in the environment; ``answering`` takes the line apart (``lines``), asks click what is being
typed, and ``candidates`` for what it may be.

It never prints an error, takes at most two seconds, looks at local stores only, and reads: nothing
on the line is run or expanded.
"""

from __future__ import annotations

from .answering import VARIABLE, answer
from .scripts import INSTALLED, SHELLS, script

__all__ = ["INSTALLED", "SHELLS", "VARIABLE", "answer", "script"]
