"""What the driver writes piece by piece, since it only grows. Read ``enumerator_logs``."""

from __future__ import annotations

from .enumerator_logs import EnumeratorLogs as EnumeratorLogs
