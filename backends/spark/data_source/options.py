"""The options of a read by the data source, parsed and checked.

Spark passes options as text, and their names in any case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import known_names
from stateformat.paths import savepoint_url
from stateformat.storage import checkpoint_address, is_id, split_name, without_secrets

STORAGE_PREFIX: Final = "option."
"""``option.KEY`` is passed to the storage as KEY, like ``ckpt --option KEY=VALUE``."""
_STORAGE: Final = ("endpoint_url",)
"""Storage options that need no prefix. Others may clash with ours: S3 has an option ``key``."""
OPTIONS: Final = (
    *("operator", "state", "checkpoint", "columns", "key", "changes_from", "changes_to", "every", "table"),
    *("push_filters", "partitions", "with_expired", "allow_outside", *_STORAGE),
)
"""The options of a read, besides ``option.KEY``."""
ALL: Final = "all"
"""The value of ``checkpoint`` that reads all checkpoints of the history."""
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class ReadOptions:
    """What to read: a state, its changes between two checkpoints, or a table of metadata."""

    url: str
    checkpoint: int | None = None
    """None: the newest."""
    all_checkpoints: bool = False
    operator: str | None = None
    state: str | None = None
    columns: tuple[str, ...] | None = None
    key: str | None = None
    """One key or an array of them, as JSON."""
    changes: tuple[int, int | None] | None = None
    """The first and the last checkpoint; a last of None is the newest."""
    every: bool = False
    """Whether to read the changes of each checkpoint in between, too."""
    table: str | None = None
    push_filters: bool | None = None
    """Whether filters may limit what is read; None: only where Spark handles that correctly."""
    partitions: int | None = None
    with_expired: bool = False
    """Whether to read rows that had expired at their checkpoint, too."""
    allow_outside: bool = False
    storage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The address, without secrets."""
        return without_secrets(self.url)


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read, whose names are in lower case.

    Raises ``InvalidInput`` for an option that is unknown, has the wrong type, or contradicts
    another.
    """
    rest = dict(given)
    url, checkpoint = _address(rest)
    storage: dict[str, Any] = {}
    for name in [*rest]:
        if name.startswith(STORAGE_PREFIX) or name in _STORAGE:
            text = rest.pop(name)
            storage[name.removeprefix(STORAGE_PREFIX)] = _BOOLEANS.get(text.lower(), text)
    for name in rest:
        if name not in OPTIONS:
            raise InvalidInput(
                f"the data source stateformat has no option {name!r}; {known_names(OPTIONS, name)}. An option of the "
                f"storage is written {STORAGE_PREFIX}{name}"
            )
    if rest.get("checkpoint") is not None:
        if checkpoint is not None:
            raise InvalidInput(
                f"the address ends in @{checkpoint} and the option checkpoint is {rest['checkpoint']!r}; give one of "
                "them"
            )
        url, checkpoint = _checkpoint(url, rest)
    options = ReadOptions(
        url,
        checkpoint,
        all_checkpoints=rest.get("checkpoint", "").strip().lower() == ALL,
        operator=rest.get("operator"),
        state=rest.get("state"),
        columns=_columns(rest.get("columns")),
        key=rest.get("key"),
        changes=_changes(rest),
        every=_boolean(rest, "every"),
        table=rest.get("table"),
        push_filters=_boolean(rest, "push_filters") if "push_filters" in rest else None,
        partitions=_partitions(rest.get("partitions")),
        with_expired=_boolean(rest, "with_expired"),
        allow_outside=_boolean(rest, "allow_outside"),
        storage=storage,
    )
    _check_together(options, rest)
    return options


def _address(rest: dict[str, str]) -> tuple[str, int | None]:
    """Take the address out of the options: the URL, and the id if it is ``URL@ID``."""
    if "paths" in rest:
        raise InvalidInput("load() takes one store, and several paths are given; read each, and union them")
    path = rest.pop("path", "")
    if not path.strip():
        raise InvalidInput(
            "load() names no store; give the path or URL of one: load('s3://bucket/store')", kind=ErrorKind.INVALID_URL
        )
    # Hadoop calls S3 s3a.
    url, checkpoint = checkpoint_address(f"s3://{path[6:]}" if path.lower().startswith("s3a://") else path)
    if url.lower().startswith("memory:"):
        raise InvalidInput(
            f"{url} exists only in the process that made it, not in Spark's workers; give a store in a folder or on S3",
            kind=ErrorKind.INVALID_URL,
        )
    return url, checkpoint


def _checkpoint(url: str, rest: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the URL and id for the option ``checkpoint``: an id, all, or a savepoint's name."""
    given = rest["checkpoint"].strip()
    if given.lower() == ALL:
        return url, None
    if split_name(f"store@{given}")[1] is not None:
        return savepoint_url(url, given), None
    return url, _id(rest, "checkpoint", f", the name of a pin, or {ALL}")


def _id(rest: Mapping[str, str], name: str, other: str = "") -> int:
    digits = rest[name].strip()
    if not (digits.isascii() and digits.isdigit() and is_id(digits)):
        raise InvalidInput(
            f"the option {name} is {rest[name]!r}, not a checkpoint id; give one from 1 to 2^53 - 1{other}"
        )
    return int(digits)


def _boolean(rest: Mapping[str, str], name: str) -> bool:
    text = rest.get(name, "false").strip().lower()
    if text not in _BOOLEANS:
        raise InvalidInput(f"the option {name} is {rest[name]!r}; it is true or false")
    return _BOOLEANS[text]


def _partitions(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 7 and int(digits)):
        raise InvalidInput(f"the option partitions is {text!r}; it is a number from 1 to 999999")
    return int(digits)


def _columns(text: str | None) -> tuple[str, ...] | None:
    """Parse names separated by commas, or a JSON array for names that contain commas."""
    if text is None:
        return None
    names: Any = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the option columns is {text!r:.200}, no array of JSON: {error}") from None
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(
            f"the option columns is {text!r:.200}; write names with commas between them, or a JSON array"
        )
    return tuple(names)


def _changes(rest: Mapping[str, str]) -> tuple[int, int | None] | None:
    if "changes_from" not in rest:
        alone = next((name for name in ("changes_to", "every") if name in rest), None)
        if alone is not None:
            raise InvalidInput(f"the option {alone} is given without changes_from, where the changes begin")
        return None
    return _id(rest, "changes_from"), _id(rest, "changes_to") if "changes_to" in rest else None


def _check_together(options: ReadOptions, rest: Mapping[str, str]) -> None:
    """Raise ``InvalidInput`` for options that contradict each other, or name nothing to read."""
    given = {*rest, *(("checkpoint",) if options.checkpoint is not None else ())}
    for one, others in {
        "table": ("operator", "state", "key", "changes_from"),
        "changes_from": ("checkpoint", "key"),
    }.items():
        other = next((name for name in others if name in given), None)
        if one in rest and other is not None:
            raise InvalidInput(f"the options {one} and {other} cannot be combined; leave one out")
    if options.all_checkpoints and options.key is not None:
        raise InvalidInput("a key is looked up in one checkpoint, and the option checkpoint is all; leave one out")
    if options.table is None:
        missing = next((name for name in ("operator", "state") if name not in rest), None)
        if missing is not None:
            raise InvalidInput(
                f"the option {missing} is missing: name the operator and the state to be read, or a table of metadata "
                f"(table). `ckpt inspect {options.shown}` lists the states, and so does option('table', 'states')",
                kind=ErrorKind.UNKNOWN_OPERATOR if missing == "operator" else ErrorKind.UNKNOWN_STATE,
            )
