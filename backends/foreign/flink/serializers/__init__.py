"""Flink's serializers: from their snapshots to descriptions, from bytes of values to Arrow.

Read ``lanes`` (many positions in one buffer), ``serializer`` (what each one provides), then the
kinds: ``plain``, ``text``, ``records``, ``collections``, ``pojo``, ``times``, ``numbers``; last
``snapshots``, which makes serializers from bytes.
"""

from __future__ import annotations

from .collections import Characters, ListOf, MapOf, MaskedList, Octets, element_lanes
from .lanes import Lanes, gathered, ramp
from .logical import Logical
from .numbers import BigDecimal, BigInteger
from .plain import Boolean, Nothing, Number, TimeWindow
from .pojo import CLASS, Pojo
from .records import ROW_KINDS, Either, Enumeration, FlippedLong, Nullable, Row, Sequential, Timer, Ttl, Tuple
from .serializer import Opaque, Serializer, scattered
from .snapshots import UnknownClass, more_than_adapted, read_top, read_versioned
from .sql import DecimalData, Framed, ManyData, RowData, TextData, TimestampData
from .text import Character, Text
from .times import LocalDate, LocalDateTime, LocalTime, Milliseconds, Moment

__all__ = [
    "BigDecimal",
    "BigInteger",
    "Boolean",
    "CLASS",
    "Character",
    "Characters",
    "DecimalData",
    "Either",
    "Enumeration",
    "FlippedLong",
    "Framed",
    "Lanes",
    "ListOf",
    "LocalDate",
    "LocalDateTime",
    "LocalTime",
    "Logical",
    "ManyData",
    "MapOf",
    "MaskedList",
    "Milliseconds",
    "Moment",
    "Nothing",
    "Nullable",
    "Number",
    "Octets",
    "Opaque",
    "Pojo",
    "ROW_KINDS",
    "Row",
    "RowData",
    "Sequential",
    "Serializer",
    "Text",
    "TextData",
    "TimeWindow",
    "Timer",
    "TimestampData",
    "Ttl",
    "Tuple",
    "UnknownClass",
    "element_lanes",
    "gathered",
    "more_than_adapted",
    "ramp",
    "read_top",
    "read_versioned",
    "scattered",
]
