"""Logs that the driver writes piece by piece, as they only grow. Read ``enumerator_logs``."""

from __future__ import annotations

from .enumerator_logs import EnumeratorLogs as EnumeratorLogs
