"""A program that is told to end: ``stop_soon`` for any thread, ``sigterm`` for the signal."""

from __future__ import annotations

from .sigterm import SigtermWatch as SigtermWatch, stop_soon_on_sigterm as stop_soon_on_sigterm
from .stop_soon import GRACE_SECONDS as GRACE_SECONDS, SoonStop as SoonStop
