"""Canonical savepoints, written: the way back of ``layouts`` and ``serializers``.

Read ``binaries`` (byte strings of many values), ``text``, ``numbers``, ``values`` (every
serializer), ``entries`` (rows to entries), ``template`` (what only Flink can say, kept by an
import), ``savepoint`` (the whole).
"""

from __future__ import annotations

from .savepoint import Written as Written, write_savepoint as write_savepoint
from .template import (
    Template as Template,
    template_of as template_of,
    template_operator as template_operator,
    template_state as template_state,
)
