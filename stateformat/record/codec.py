"""The publication record as bytes (SPEC.md section 3): framing, digest, one codec per version.

A record may come from an attacker. So a reader takes these steps in order; each bounds the next:

1. Check size, UTF-8 and nesting, by a scan of the brackets outside strings.
2. Parse with the JSON parser of the standard library. Its hooks note a float, a huge integer or a
   repeated member without raising, because a newer version may allow them.
3. Check ``format`` and ``version``: a newer version ends here as ``UnsupportedFormat``.
4. Raise for what step 2 noted, and verify the digest over the exact bytes before it.
5. Check ``required_features``: an unknown one ends here as ``UnsupportedFormat``.
6. Read the members by the codec of the version (``record.v1``).

Users' requests (``requests``) are framed the same way, by :func:`sealed` and :func:`unsealed`.
Members that contradict each other are left to ``validation``, unless the value would be unsafe to
hold.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from .. import paths as layout
from ..errors import REPAIR_ADVICE, CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, UnsupportedFormat
from ..graph import JobGraph
from ..model import Mode, Record, RescaledFrom, State
from . import v1 as codec_v1
from .json_members import INTEGER_MAX, RecordFault

FORMAT: Final = "stateformat"
VERSION: Final = 1
"""The version that :func:`encode_record` writes."""

FEATURES: Final = ("committables", "finished_operators", "in_flight", "layers", "processing_time_timers", "rescaled")
"""Every required feature of version 1 (SPEC.md section 3.3), sorted."""

RECORD_BYTES_MAX: Final = (8 << 20) - 1
"""A storage creates smaller objects in one step, and one read of 8 MiB shows a larger one."""
RECORD_DEPTH_MAX: Final = 32
CONTAINERS_MAX: Final = 1 << 20

_MEMBERS: Final[Mapping[int, Callable[[dict[str, Any]], Record]]] = {1: codec_v1.record_of}
_DIGEST_MEMBER: Final = b',"digest":"'
_TAIL_BYTES: Final = len(_DIGEST_MEMBER) + 32 + len(b'"}\n')

# A JSON string, or the rest of an unterminated one, without backtracking.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_DEEPER: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record in version 1, with ``record.required_features`` as given.

    Raises ``InvalidInput``, the caller's fault, for a record that :func:`decode_record` would
    refuse. ``Operator.pinned`` is a wish of a topology and is not written.
    """
    members = {"format": FORMAT, "version": VERSION, **codec_v1.members_of(record)}
    try:
        data = sealed(members)
        _decoded(data)
    except (RecordFault, UnsupportedFormat, TypeError, ValueError, RecursionError) as error:
        kind = error.kind if isinstance(error, RecordFault | CheckpointError) else ErrorKind.INVALID_ARGUMENT
        raise InvalidInput(
            f"the record of checkpoint {record.checkpoint_id} cannot be written: {error}",
            kind=ErrorKind.INVALID_ARGUMENT if kind is ErrorKind.DAMAGED_RECORD else kind,
        ) from error
    return data


def decode_record(data: bytes, *, path: str = "") -> Record:
    """Return the record of these bytes, every member checked (SPEC.md section 7.1).

    ``path`` is named in messages, and its id must be the record's.

    Raises ``UnsupportedFormat`` for a newer version or an unknown required feature, and
    ``DamagedCheckpoint`` for everything else: kind ``DAMAGED_RECORD``, ``OBJECT_DIGEST_DIFFERS``,
    ``INVALID_PATH``, ``STATUS_CONTRADICTION`` or ``LIMIT_EXCEEDED``. It never raises another error.
    """
    what = f"record {path}" if path else "the record"
    try:
        record = _decoded(data)
        named = layout.record_id(path)
        if named is not None and named != record.checkpoint_id:
            raise RecordFault("checkpoint_id", f"is {record.checkpoint_id}, but the object's name says {named}")
    except RecordFault as fault:
        raise DamagedCheckpoint(
            f"{what} is damaged: {fault}{REPAIR_ADVICE}",
            kind=fault.kind,
            path=path,
            member=fault.where,
            **fault.details,
        ) from fault
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{what} {error}", kind=error.kind, path=path, **error.details) from None
    return record


def required_features(
    graph: JobGraph, states: Sequence[State], handles: pa.Table, rescaled_from: RescaledFrom | None
) -> tuple[str, ...]:
    """Return the features that a checkpoint uses, sorted. ``handles`` needs only layer and mode."""
    used = {
        "finished_operators": any(operator.finished or operator.finishing for operator in graph.operators),
        "layers": (pc.max(handles["layer"]).as_py() or 0) > 0,
        "in_flight": any(state.mode is Mode.IN_FLIGHT for state in states),
        "committables": pc.any(pc.equal(handles["mode"], Mode.COMMITTABLES.value)).as_py() is True,
        "processing_time_timers": any(state.clock == "processing_time" for state in states),
        "rescaled": rescaled_from is not None,
    }
    return tuple(feature for feature in FEATURES if used[feature])


def optional_features(states: Iterable[State]) -> tuple[str, ...]:
    """Return the optional features that a checkpoint uses (SPEC.md section 3.3), sorted."""
    return ("ttl",) if any(state.ttl is not None for state in states) else ()


def _decoded(data: bytes) -> Record:
    """Return the record of these bytes, cached if it is small.

    A run reads the records that it keeps each time it expires one.
    """
    return _remembered(data) if len(data) <= _SMALL_BYTES else _decode(data)


def _decode(data: bytes) -> Record:
    """Return the record; faults hold the rest of a sentence that begins with the record."""
    members, tokens = unsealed(
        data, format_name=FORMAT, versions=_MEMBERS, bytes_max=RECORD_BYTES_MAX, noun="record of a checkpoint"
    )
    _check_features(members)
    record = _MEMBERS[members["version"]](members)
    refuse_null(tokens)
    return record


_SMALL_BYTES: Final = 64 << 10
_remembered: Final = lru_cache(maxsize=32)(_decode)


def sealed(members: Mapping[str, Any]) -> bytes:
    """Return the bytes of one object of SPEC.md section 3.1: the members, then their digest.

    Raises ``TypeError`` and ``ValueError`` for what JSON or UTF-8 cannot represent.
    """
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text[:-1].encode("utf-8")
    return body + _DIGEST_MEMBER + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(
    data: bytes, *, format_name: str, versions: Collection[int], bytes_max: int, noun: str
) -> tuple[dict[str, Any], bytes]:
    """Return the members of what :func:`sealed` made, and the bytes outside its strings.

    Steps 1 to 4 of the module. The caller reads the members, and then calls :func:`refuse_null`.
    Raises ``RecordFault`` and, for a version not in ``versions``, ``UnsupportedFormat``.
    """
    if len(data) > bytes_max:
        raise RecordFault("", f"it has {len(data):,} bytes; at most {bytes_max:,} are allowed", _LIMIT)
    tokens = _STRING.sub(b"", data)
    _check_depth(tokens)
    members, faults = _parse(data)
    if members.get("format") != format_name:
        raise RecordFault("format", f"is {members.get('format')!r:.80}, not {format_name!r}: this is not a {noun}")
    version = members.get("version")
    if type(version) is not int or version < 1:
        raise RecordFault("version", f"is {version!r:.80}, not an integer from 1")
    if version not in versions:
        raise UnsupportedFormat(
            f"is of format version {version}; this reader knows {', '.join(map(str, versions))}. Upgrade stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            version=version,
        )
    if faults:
        raise RecordFault("", faults[0])
    _check_tokens(data, tokens, members)
    _check_digest(data)
    return members, tokens


def refuse_null(tokens: bytes) -> None:
    """Refuse a null in a member that the codec did not read."""
    if b"null" in tokens:
        raise RecordFault("", "a member that this reader does not know is null; leave absent members out")


_LIMIT: Final = ErrorKind.LIMIT_EXCEEDED


def _check_depth(tokens: bytes) -> None:
    """Refuse nesting beyond the limit, without parsing."""
    levels = np.frombuffer(tokens.translate(_DEEPER, _NOT_BRACKETS), np.int8)
    level, step = 0, 1 << 16
    for start in range(0, len(levels), step):
        here = level + np.cumsum(levels[start : start + step], dtype=np.int64)
        if here.max() > RECORD_DEPTH_MAX:
            raise RecordFault("", f"it is nested deeper than {RECORD_DEPTH_MAX} levels", _LIMIT)
        level = int(here[-1])
    if len(levels) > 2 * CONTAINERS_MAX:
        raise RecordFault("", f"it has more than {CONTAINERS_MAX:,} objects and arrays", _LIMIT)


def _parse(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the members of the JSON object, and the first thing that version 1 forbids in it."""
    faults: list[str] = []

    def note(fault: str) -> None:
        # Only the first is kept: a hostile record could have millions.
        if not faults:
            faults.append(fault)

    def integer(text: str) -> int:
        # Check the length first: turning a million digits into an int takes seconds.
        value = int(text) if len(text) <= 17 else INTEGER_MAX + 1
        if abs(value) > INTEGER_MAX:
            note(f"the integer {text[:40]} has magnitude 2**53 or more")
        return value

    def fraction(text: str) -> float:
        note(f"{text[:40]} is not an integer, and other numbers are not allowed")
        return 0.0

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = Counter(name for name, _ in items)
            twice = next(name for name in found if names[name] > 1)
            note(f"member {twice!r:.80} appears twice in one object")
        return found

    try:
        members = json.loads(
            data.decode("utf-8"),
            parse_int=integer,
            parse_float=fraction,
            parse_constant=fraction,
            object_pairs_hook=pairs,
        )
    except UnicodeDecodeError as error:
        raise RecordFault("", f"it is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
    except (ValueError, RecursionError) as error:
        raise RecordFault("", f"it is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise RecordFault("", "it is not one JSON object")
    return members, faults


def _check_tokens(data: bytes, tokens: bytes, members: dict[str, Any]) -> None:
    """Refuse white space and lone surrogates, which the parser accepts."""
    if tokens[-1:] != b"\n" or len(tokens[:-1].split(None, 1)) != 1 or tokens[:-1] != tokens[:-1].strip():
        raise RecordFault("", "it has white space between tokens, or does not end in exactly one newline")
    if _SURROGATE.search(data):
        try:
            json.dumps(members, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RecordFault("", "a string holds half a character (a lone surrogate)") from error


def _check_digest(data: bytes) -> None:
    """Verify the last member, the digest of the exact bytes before it (SPEC.md section 3.1)."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if not tail.startswith(_DIGEST_MEMBER) or not tail.endswith(b'"}\n'):
        raise RecordFault("digest", 'is not the last member: the object must end in ,"digest":"<32 digits>"}')
    stored = tail[len(_DIGEST_MEMBER) : -3]
    computed = xxhash.xxh3_128_hexdigest(body).encode()
    if stored != computed:
        raise RecordFault(
            "digest",
            f"is {stored.decode('utf-8', 'replace')}, but the bytes before it have {computed.decode()}",
            ErrorKind.OBJECT_DIGEST_DIFFERS,
        )


def _check_features(members: dict[str, Any]) -> None:
    features = members.get("required_features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise RecordFault("required_features", "is missing or is not an array of strings")
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise UnsupportedFormat(
            f"requires {', '.join(map(repr, unknown))}; this reader knows {', '.join(FEATURES)}. Upgrade stateformat",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            features=unknown,
        )
