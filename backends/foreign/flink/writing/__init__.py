"""Writes canonical savepoints: the inverse of ``layouts`` and ``serializers``.

Read ``binaries`` (byte strings of many values), ``text``, ``numbers``, ``values`` (every
serializer), ``entries`` (rows to entries), ``template`` (what only Flink knows, kept by an import),
``savepoint`` (the whole savepoint).
"""

from __future__ import annotations

from .savepoint import Written, write_savepoint
from .template import (
    OPERATOR as TEMPLATE_OPERATOR,
    STATE as TEMPLATE_STATE,
    Template,
    template_of,
    template_operator,
    template_state,
)

__all__ = [
    "TEMPLATE_OPERATOR",
    "TEMPLATE_STATE",
    "Template",
    "Written",
    "template_of",
    "template_operator",
    "template_state",
    "write_savepoint",
]
