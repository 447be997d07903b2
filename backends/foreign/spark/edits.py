"""Edits of what a query records about itself, for a copy.

Only what must change in the copy is changed, byte for byte. Each edit replaces a number or a text
in place and then compares the JSON before and after; if they differ in anything else, the file is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.storage import ObjectInfo, local_path

from ..framing import damaged, json_value
from .logs import read_small
from .source import SparkSource

PARTITIONS_CONF: Final = "spark.sql.shuffle.partitions"
PROVIDER_CONF: Final = "spark.sql.streaming.stateStore.providerClass"
_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_SCHEMA_PATH: Final = re.compile(r".*?(/state/\d+/_stateSchema/.*)", re.DOTALL)


def edit_offsets(data: bytes, conf: Mapping[str, str], path: str) -> bytes:
    """Return an offset log file with these values in its ``conf``.

    Raises ``UnsupportedFormat`` if a name is not in the ``conf``: Spark would take the value of the
    session, and the copy would be read wrongly.
    """
    lines = _text(data, path).split("\n")
    if len(lines) < 2:
        raise _no_log(path)
    before = _object(lines[1], path)
    old = before.get("conf")
    for name in conf:
        if not isinstance(old, dict) or name not in old:
            raise UnsupportedFormat(
                f"{path}: its conf does not name {name}, so the query is of a Spark before 3.0; let it run one batch "
                "with a newer Spark, then try again",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                path=path,
            )
    for name, value in conf.items():
        pattern = f"({re.escape(json.dumps(name))}\\s*:\\s*){_TEXT}"
        lines[1] = _replaced(pattern, json.dumps(value), lines[1])
    _check(_object(lines[1], path), {**before, "conf": {**before["conf"], **conf}}, path)
    return "\n".join(lines).encode()


def edit_operator(data: bytes, partitions: tuple[int, int], move: Callable[[str], str], path: str) -> bytes:
    """Return an operator's metadata, v1 or v2, with another number of partitions.

    Args:
        data: the file's bytes.
        partitions: the number before, and after.
        move: takes the path of a schema file (v2 holds absolute ones) and returns the copy's.
        path: for errors.
    """
    text = _text(data, path)
    head, _, body = text.partition("\n")
    if head not in ("v1", "v2"):
        raise UnsupportedFormat(f"{path}: it is of version {head[:20]!r}; v1 and v2 are known", path=path)
    before = _object(body, path)
    old, new = partitions
    body = re.sub(rf'("numPartitions"\s*:\s*){old}\b', rf"\g<1>{new}", body)
    wanted = _changed(before, old, new, move)
    for place in _schema_paths(before):
        # As the file spells it; JSON may escape slashes.
        for ascii_only in (True, False):
            spelled = json.dumps(place, ensure_ascii=ascii_only)
            for found in {spelled, spelled.replace("/", "\\/")}:
                body = body.replace(found, json.dumps(move(place), ensure_ascii=ascii_only))
    _check(_object(body, path), wanted, path)
    return f"{head}\n{body}".encode()


def edit_commit(data: bytes, ids: Mapping[str, Sequence[Sequence[str]]], path: str) -> bytes:
    """Return a commit of checkpoint format 2 with other ids of its stores, by operator."""
    head, _, body = _text(data, path).partition("\n")
    before = _object(body, path)
    pattern = re.compile(r'("stateUniqueIds"\s*:\s*)(\{[^{}]*\})')
    edited, count = pattern.subn(lambda found: found[1] + json.dumps(ids, separators=(",", ":")), body)
    if count != 1:
        raise _no_log(path)
    _check(_object(edited, path), {**before, "stateUniqueIds": {k: [list(i) for i in v] for k, v in ids.items()}}, path)
    return f"{head}\n{edited}".encode()


def _replaced(pattern: str, by: str, text: str) -> str:
    """Replace what follows the first group of a pattern."""
    return re.sub(pattern, lambda found: f"{found[1]}{by}", text)


def moved_schema(source_and_target: str) -> Callable[[str], str]:
    """Return a function that gives the path of a schema file below another checkpoint location."""

    def move(path: str) -> str:
        found = _SCHEMA_PATH.fullmatch(path)
        return source_and_target + found[1] if found else path

    return move


def location_like(path: str, url: str) -> str:
    """Return how Spark names the location ``url``, given how it names a file ``path`` of another
    one.

    ``file:/…`` for a directory, and for a bucket the scheme that the query used (``s3a``).
    """
    here = local_path(url)
    if here is not None:
        # Hadoop's paths are not percent-encoded.
        return f"file:{here}"
    scheme, _, rest = url.partition("://")
    used = path.partition(":")[0]
    return f"{used if used.startswith('s3') else 's3a' if scheme == 's3' else scheme}://{rest.rstrip('/')}"


def _changed(found: Mapping[str, Any], old: int, new: int, move: Callable[[str], str]) -> dict[str, Any]:
    changed = json.loads(json.dumps(found))
    for store in changed.get("stateStoreInfo") or ():
        if store.get("numPartitions") == old:
            store["numPartitions"] = new
        paths = store.get("stateSchemaFilePaths")
        if isinstance(paths, list):
            store["stateSchemaFilePaths"] = [move(one) for one in paths]
    return dict(changed)


def _schema_paths(found: Mapping[str, Any]) -> list[str]:
    stores = found.get("stateStoreInfo")
    lists = [store.get("stateSchemaFilePaths") for store in stores if isinstance(store, dict)] if stores else []
    return [one for some in lists if isinstance(some, list) for one in some if isinstance(one, str)]


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _no_log(path) from error


def _object(text: str, path: str) -> dict[str, Any]:
    try:
        found = json_value(text)
    except ValueError as error:
        raise _no_log(path) from error
    if not isinstance(found, dict):
        raise _no_log(path)
    return found


def _check(found: object, wanted: object, path: str) -> None:
    if found != wanted:
        raise DamagedCheckpoint(
            f"{path}: it cannot be edited without changing more than its partitions and provider; it names one of "
            "them twice or in another place. Compare it with the files beside it",
            kind=ErrorKind.DAMAGED_MANIFEST,
            path=path,
        )


def _no_log(path: str) -> DamagedCheckpoint:
    return damaged(path, "it is not a log file as Spark writes it", kind=ErrorKind.DAMAGED_MANIFEST)


def moved_operators(
    source: SparkSource, listed: Sequence[ObjectInfo], partitions: tuple[int, int], url: str
) -> Iterator[tuple[str, bytes]]:
    """Yield the operators' metadata of a copy at ``url``, with another number of partitions."""
    for item in listed:
        if re.fullmatch(r"state/(\d+)/_metadata/(metadata|v2/\d+)", item.path):
            data = read_small(source.folder, item.path)
            named = re.search(rb'"([^"]*/state/\d+/_stateSchema/[^"]*)"', data)
            move = moved_schema(location_like(named[1].decode().replace("\\/", "/") if named else "", url))
            yield item.path, edit_operator(data, partitions, move, item.path)
