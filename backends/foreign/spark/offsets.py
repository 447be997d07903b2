"""Where a copy's sources go on: offsets set, sources taken out or put in, settings changed.

The two newest offset logs change. A restart reads the newest, and asks old kinds of sources for
what lies between the two once more; both get the same offset, so that there is nothing. Sources'
own logs follow: what lies behind a file source's offset is no longer seen.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.storage import ObjectInfo, Storage

from ..framing import json_value
from .edits import edit_offsets
from .logs import LOG_OFFSET, OffsetLog, read_lines, read_offsets, read_small
from .source import SparkSource

_SOURCE: Final = re.compile(r"sources/([^/]+)/(.+)")
_NAMED: Final = re.compile(r"\.?(\d{1,18})(\.compact)?(?:\.crc)?")
_NAME: Final = re.compile(r"[A-Za-z0-9_]{1,200}")
_CREATED: Final = re.compile(r"v1\n(\d{12,14})\n?")
_DELTA: Final = {"reservoirId", "reservoirVersion", "index"}
BEGINNING: Final = "-"
"""As an offset: the source begins anew, as in a query's first batch."""

_FORMS: Final = {
    "files": 'of a file source, {"logOffset":N}',
    "number": "a number, as of the source rate",
    "rate": 'of the source rate-micro-batch, {"offset":N,"timestamp":MS}',
    "kafka": 'of Kafka, {"TOPIC":{"PARTITION":N}}',
    "kinesis": 'of Kinesis, {"metadata":{…},"SHARD":{…}}',
    "delta": 'of Delta, {"sourceVersion":1,"reservoirId":"…","reservoirVersion":N,"index":N,…}',
    "object": "a JSON object of the source's own",
    "array": "a JSON array of the source's own",
    "text": "a JSON text of the source's own",
}


@dataclass(frozen=True)
class SourceEdits:
    """What is to be changed in a copy."""

    sources: Sequence[tuple[str, str]] = ()
    """(source, ``drop`` or ``add``), one after another."""
    offsets: Mapping[str, str] = field(default_factory=dict)
    """Offsets as JSON, or :data:`BEGINNING`, by the source's number or name in the copy."""
    conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether a source changes, so that the next batch gets other input."""
        return bool(self.sources or self.offsets)


class Moved(NamedTuple):
    """One source of the copy, or one that was dropped."""

    before: str | None
    """Its number or name in the original; None if it was put in."""
    after: str | None
    old: str | None
    """Its offset as JSON."""
    new: str | None
    note: str


class SourceFiles(NamedTuple):
    """How the files of a copy differ."""

    edits: Mapping[str, bytes]
    names: Mapping[str, str | None]
    """Files that are called otherwise there, or None if they are not copied."""
    moved: Sequence[Moved]


def apply_edits(source: SparkSource, listed: Sequence[ObjectInfo], wanted: SourceEdits) -> SourceFiles:
    """Return the files that change. Raises ``InvalidInput`` for what does not fit the sources."""
    check_conf(source.offsets, wanted.conf)
    order = _order(source.offsets, wanted.sources)
    offsets = source.offsets.offsets
    for name in wanted.offsets:
        if name not in order:
            raise _no_source(name, source.offsets, order)
    edits: dict[str, bytes] = {}
    names: dict[str, str | None] = {}
    moved = []
    for after, before in order.items():
        old = None if before is None else offsets[before]
        files = [] if before is None else _files_of(listed, before)
        new, note = old, ""
        if after in wanted.offsets:
            new = _checked(after, before, old, wanted.offsets[after], source.offsets)
            if new is None:
                names |= dict.fromkeys(item.path for item in files)
                note = "it begins as in a query's first batch, where its options say"
            elif (found := LOG_OFFSET.search(new)) is not None:
                note = _cut_log(source.folder, after, files, int(found[1]), edits, names)
            else:
                note = _note(source.folder, files, after, old, new)
        if before is not None and after != before:
            for item in files:
                there = names.get(item.path, item.path)
                if there is not None:
                    names[item.path] = f"sources/{after}/{item.path.split('/', 2)[2]}"
            for path in [path for path in edits if path.startswith(f"sources/{before}/")]:
                edits[f"sources/{after}/{path.split('/', 2)[2]}"] = edits.pop(path)
        if after in wanted.offsets or after != before:
            moved.append(Moved(before, after, old, new, note))
    for before in offsets:
        if before not in order.values():
            names |= dict.fromkeys(item.path for item in _files_of(listed, before))
            moved.append(Moved(before, None, offsets[before], None, "it is taken out"))
    edits |= _edited_logs(source, listed, order, wanted)
    return SourceFiles(edits, names, moved)


def _order(log: OffsetLog, changes: Sequence[tuple[str, str]]) -> dict[str, str | None]:
    """Return the copy's sources: the number or name that each has in the original."""
    order: list[tuple[str, str | None]] = [(name, name) for name in log.offsets]
    for name, what in changes:
        there = [one for one, _ in order]
        if what == "drop":
            if name not in there:
                raise _no_source(name, log, there)
            if len(order) == 1:
                raise InvalidInput(f"--source {name}=drop: it is the only source of the query, which needs one")
            del order[there.index(name)]
        elif log.version != 1:
            if name in there or not _NAME.fullmatch(name):
                raise InvalidInput(
                    f"--source {name}=add: sources of this query have names ({', '.join(there)}), of letters, digits "
                    "and underscores. Give one that is not there"
                )
            order.append((name, None))
        else:
            if not name.isascii() or not name.isdigit() or int(name[:6]) > len(order):
                raise InvalidInput(
                    f"--source {name}=add: the query has {len(order)} sources here, so a new one has a number of 0 to "
                    f"{len(order)}, in the order in which the query reads them"
                )
            order.insert(int(name), (name, None))
        if log.version == 1:
            order = [(str(number), before) for number, (_, before) in enumerate(order)]
    return dict(order)


def _no_source(name: str, log: OffsetLog, there: Sequence[str] | Mapping[str, Any]) -> InvalidInput:
    what = "names" if log.version != 1 else "numbers"
    return InvalidInput(f"the query has no source {name!r:.60}; the {what} of its sources are {', '.join(there)}")


def _files_of(listed: Sequence[ObjectInfo], name: str) -> list[ObjectInfo]:
    return [item for item in listed if (found := _SOURCE.fullmatch(item.path)) and found[1] == name]


# ---- forms of offsets


def form_of(text: str) -> str:
    """Return the form of an offset, a key of ``_FORMS``. Raises ``ValueError`` if it is no JSON."""
    found = json_value(text)
    if isinstance(found, bool) or found is None or isinstance(found, float):
        raise ValueError(f"{text[:40]} is no offset")
    if isinstance(found, int):
        return "number"
    if not isinstance(found, dict):
        return "array" if isinstance(found, list) else "text"
    if set(found) == {"logOffset"}:
        return "files"
    if set(found) == {"offset", "timestamp"} and all(_is_whole(one) for one in found.values()):
        return "rate"
    if set(found) >= _DELTA:
        return "delta"
    if "metadata" in found and any(_is_shard(one) for one in found.values()):
        return "kinesis"
    if found and all(isinstance(one, dict) and _is_partitions(one) for one in found.values()):
        return "kafka"
    return "object"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_shard(value: Any) -> bool:
    return isinstance(value, dict) and "iteratorType" in value


def _is_partitions(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(name.isascii() and name.isdigit() and _is_whole(one) for name, one in value.items())


def _checked(name: str, before: str | None, old: str | None, given: str, log: OffsetLog) -> str | None:
    """Return an offset as a line of the log, None for the beginning."""
    if given.strip() == BEGINNING:
        return None
    text = given.strip().replace("\r", " ").replace("\n", " ")
    try:
        new = form_of(text)
        _unique(text)
    except ValueError as error:
        raise InvalidInput(f"--offsets {name}={given[:60]}: it is no offset in JSON ({error})") from error
    if new == "files":
        # As Spark writes it, whose pattern knows no blanks.
        text = json.dumps(json.loads(text), separators=(",", ":"))
    was = None if old is None else form_of(old)
    if was is not None and new != was:
        raise InvalidInput(
            f"--offsets {name}={given[:60]}: source {name} has the offset {str(old)[:200]} in {log.path}, "
            f"{_FORMS[was]}; the one given is {_FORMS[new]}. Give one of the same form, or {BEGINNING} to begin anew"
        )
    if new == "files" and (before is None or not LOG_OFFSET.fullmatch(text)):
        raise InvalidInput(
            f"--offsets {name}={given[:60]}: a file source counts the files of its own log, sources/{name}, from 0 on; "
            f"a source that has none begins at {BEGINNING}"
        )
    found = json_value(text)
    numbers: list[int] = []
    if new == "number":
        numbers = [found]
    elif new == "rate":
        numbers = list(found.values())
    elif new == "kafka":
        numbers = [one for each in found.values() for one in each.values()]
    if any(one < 0 for one in numbers):
        raise InvalidInput(
            f"--offsets {name}={given[:60]}: offsets in a checkpoint are counted from 0 on; -1 and -2 (latest, "
            f"earliest) are known to the option startingOffsets alone, which {BEGINNING} makes the source follow"
        )
    if new == "delta" and was is not None and old is not None:
        table = json_value(old)
        if found["reservoirId"] != table["reservoirId"]:
            raise InvalidInput(
                f"--offsets {name}={given[:60]}: it is of the table {found['reservoirId']}, and the source reads "
                f"{table['reservoirId']}. Another table begins at {BEGINNING}"
            )
    return text


def _unique(text: str) -> None:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in found}) < len(found):
            raise ValueError("it has a name twice")
        return dict(found)

    json.loads(text, object_pairs_hook=pairs)


def _note(folder: Storage, files: Sequence[ObjectInfo], name: str, old: str | None, new: str) -> str:
    """Return what Spark does with a new offset that one may not expect."""
    form, found = form_of(new), json_value(new)
    began = next((item for item in files if item.path.endswith("/0") and item.size_bytes < 100), None)
    if form == "number" and began is not None:
        created = _CREATED.fullmatch(read_small(folder, began.path).decode(errors="replace"))
        ran = (int(time.time() * 1000) - int(created[1])) // 1000 if created else None
        if ran is not None and found > ran:
            raise InvalidInput(
                f"--offsets {name}={new[:60]}: the source rate counts the seconds since the query's first start, "
                f"{ran:,} ago by {began.path}; Spark fails on an offset that is still to come"
            )
    if form == "kafka" and old is not None:
        before = json_value(old)
        gone = [f"{topic}-{one}" for topic in before for one in before[topic] if one not in found.get(topic, {})]
        if gone:
            return (
                f"{', '.join(gone[:5])}{' …' if len(gone) > 5 else ''} had an offset before and has none now: if it is "
                "still there, Spark takes it for new and reads all of it"
            )
    return ""


# ---- the log of a file source


def _cut_log(
    folder: Storage,
    name: str,
    files: Sequence[ObjectInfo],
    last: int,
    edits: dict[str, bytes],
    names: dict[str, str | None],
) -> str:
    """Leave in a file source's log what comes before an offset; returns what that means.

    Every so often a ``N.compact`` holds all before it, and the others may be gone by then. Where
    the offset lies before one whose files are gone, its entries become a new ``.compact``, which
    Spark takes at any number if it is alone.
    """
    numbers: dict[str, tuple[int, bool]] = {}
    for item in files:
        found = _NAMED.fullmatch(item.path.rpartition("/")[2])
        if found is not None:
            numbers[item.path] = int(found[1]), bool(found[2])
    logs = {path: one for path, one in numbers.items() if not path.endswith(".crc")}
    newest = max((number for number, _ in logs.values()), default=-1)
    if last > newest:
        raise InvalidInput(
            f'--offsets {name}={{"logOffset":{last}}}: the log of source {name} ends with {newest}, so there are no '
            f"files for it. Give 0 to {newest}, or {BEGINNING} to begin anew"
        )
    later = [path for path, (number, _) in numbers.items() if number > last]
    again = _entries(folder, [path for path in logs if path in later], lambda batch: batch > last)
    base = max((number for number, whole in logs.values() if whole and number <= last), default=-1)
    there = {number for number, whole in logs.values() if not whole and base < number <= last}
    if len(there) < last - base:
        whole = min(
            (one for one in logs.items() if one[1][1] and one[1][0] > last), key=lambda one: one[1], default=None
        )
        if whole is None:
            missing = next(one for one in range(base + 1, last + 1) if one not in there)
            raise DamagedCheckpoint(
                f"sources/{name}/{missing} is missing, so what was read up to offset {last} is not known. Give a later "
                f"offset, or {BEGINNING} to begin anew",
                kind=ErrorKind.OBJECT_MISSING,
                path=f"sources/{name}/{missing}",
            )
        kept = _entries(folder, [whole[0]], lambda batch: batch <= last)
        folder_of = whole[0].rpartition("/")[0]
        edits[f"{folder_of}/{last}.compact"] = "\n".join(["v1", *kept.values()]).encode()
        later = list(numbers)
    names |= dict.fromkeys(later)
    if not again:
        return "no file is read again"
    paths = [str(json_value(line).get("path")) for line in list(again.values())[:1]]
    return f"{len(again):,} {'file is' if len(again) == 1 else 'files are'} read again, {paths[0]} first"


def _entries(folder: Storage, paths: Sequence[str], chosen: Any) -> dict[tuple[int, str], str]:
    """Return lines of a file source's log by batch and path."""
    found: dict[tuple[int, str], str] = {}
    for path in sorted(paths):
        for line in read_lines(folder, path, (1,))[1]:
            try:
                entry = json_value(line)
                batch, name = entry["batchId"], entry["path"]
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedCheckpoint(
                    f"{path}: its line {line[:60]!r} is no entry of a file source ({error})",
                    kind=ErrorKind.DAMAGED_MANIFEST,
                    path=path,
                ) from error
            if chosen(batch):
                found[batch, name] = line
    return dict(sorted(found.items()))


# ---- the offset logs


def _edited_logs(
    source: SparkSource, listed: Sequence[ObjectInfo], order: Mapping[str, str | None], wanted: SourceEdits
) -> Iterator[tuple[str, bytes]]:
    there = {item.path for item in listed}
    # Spark goes on by the newest log: the next batch's, where that is copied.
    for batch in range(source.batch - 1, source.batch + (1 if wanted.moves else 2)):
        path = f"offsets/{batch}"
        if path not in there:
            continue
        data = read_small(source.folder, path)
        if wanted.moves:
            data = _edited_lines(data, read_offsets(source.folder, batch), source.offsets, order, wanted)
        yield path, edit_offsets(data, wanted.conf, path) if wanted.conf else data


def _edited_lines(
    data: bytes, log: OffsetLog, newest: OffsetLog, order: Mapping[str, str | None], wanted: SourceEdits
) -> bytes:
    lines = []
    for after, before in order.items():
        given = wanted.offsets.get(after)
        if given is not None:
            text = _checked(after, before, None if before is None else newest.offsets[before], given, newest)
        else:
            text = None if before is None else log.offsets.get(before)
        lines.append(f"{'' if log.version == 1 else f'{after}:'}{BEGINNING if text is None else text}")
    return "\n".join([*data.decode().split("\n")[:2], *lines]).encode()


# ---- settings

_SAFE: Final = {
    "spark.sql.streaming.multipleWatermarkPolicy": ("min", "max"),
    "spark.sql.streaming.stateStore.rocksdb.formatVersion": ("3", "4", "5"),
}
_STATE: Final = "the rows in its state are encoded by it; they would be read wrongly"
_UNSAFE: Final = {
    "spark.sql.shuffle.partitions": "the keys are dealt by it; `ckpt rescale QUERY --parallelism N --to COPY` deals "
    "them anew",
    "spark.sql.streaming.stateStore.providerClass": "the files are that store's; `ckpt rescale QUERY --provider "
    "rocksdb --parallelism N --to COPY` writes those of RocksDB",
    "spark.sql.streaming.stateStore.compression.codec": "the files are compressed with it, and do not say so",
    "spark.sql.streaming.statefulOperator.useStrictDistribution": "the keys are dealt by it",
    "spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan": "it may remove a stateful operator, whose state "
    "another would get",
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "it makes sources known by name instead of by number",
}


def check_conf(log: OffsetLog, wanted: Mapping[str, str]) -> None:
    """Raise ``InvalidInput`` for settings that a copy may not change."""
    for name, value in wanted.items():
        if name not in log.conf:
            meant = [known for known in log.conf if known.endswith(f".{name}")]
            hint = (
                f"did you mean {meant[0]}?"
                if meant
                else "Spark takes it from the session: set it where the query starts."
            )
            raise InvalidInput(
                f"--conf {name}: {log.path} does not fix it; {hint} Fixed are {', '.join(sorted(log.conf))}"
            )
        if name not in _SAFE:
            raise InvalidInput(
                f"--conf {name}={value:.60}: the query has {log.conf[name]!r} from its first batch on, and "
                f"{_UNSAFE.get(name, _STATE)}. What can be set is {', '.join(_SAFE)}"
            )
        if value not in _SAFE[name]:
            raise InvalidInput(f"--conf {name}={value:.60}: it is one of {', '.join(_SAFE[name])}")
