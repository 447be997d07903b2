"""What is known of a store, collected once into one JSON document: for the page of ``ckpt report``.

``collecting`` makes the document, ``states`` its part on states: read them in this order.
"""

from __future__ import annotations

from .collecting import LEVELS, ReportLevel, collect_report

__all__ = ["LEVELS", "ReportLevel", "collect_report"]
