"""Calling ``ckpt`` and holding each call to what every call promises."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from stateformat.tools.ckpt.main import main

CKPT = Path(sys.executable).with_name("ckpt")
DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEMA: Any = json.loads((DOCS.parent / "stateformat/schemas/ckpt.json").read_text(encoding="utf-8"))
"""Of all that ``ckpt`` prints as JSON."""


@dataclass(frozen=True)
class Run:
    """How one call ended: exit status, standard output, standard error."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


@contextmanager
def _standard(name: str, encoding: str) -> Iterator[io.BytesIO]:
    """The bytes that are written to a standard stream meanwhile."""
    before, data = getattr(sys, name), io.BytesIO()
    setattr(sys, name, io.TextIOWrapper(data, encoding=encoding, write_through=True))
    try:
        yield data
    finally:
        setattr(sys, name, before)


def run(*arguments: object, encoding: str = "utf-8", traces: bool = False, **environment: str) -> Run:
    """Call ``ckpt`` in this process, on 80 columns. No page is wider; a stack trace is shown with
    ``traces`` only."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR", *environment)}
    os.environ.update({"COLUMNS": "80", **environment})
    try:
        with _standard("stdout", encoding) as out, _standard("stderr", encoding) as err:
            status = main([str(argument) for argument in arguments])
            found = Run(status, out.getvalue().decode(), err.getvalue().decode())
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    assert ("Traceback" in found.out + found.err) is traces, found.err
    assert "this is a bug" not in found.err, found.err
    if "--format" not in arguments and "COLUMNS" not in environment and "-" not in arguments:
        wide = [line for line in found.out.splitlines() if len(line) > 80]
        assert not wide, "\n".join(wide)
    return found


def program(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """The installed program, in a process of its own."""
    command = [str(CKPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **how)


def page(*arguments: object, status: int = 0, **environment: str) -> str:
    """The page of a command with the expected status and a silent standard error."""
    found = run(*arguments, **environment)
    assert (found.status, found.err) == (status, ""), found
    return found.out


def words(*arguments: object, status: int = 0, **environment: str) -> str:
    """All that a command prints, without line ends and alignment."""
    found = run(*arguments, **environment)
    assert found.status == status, found
    return " ".join((found.out + found.err).split())


@cache
def _validator(name: str) -> Draft202012Validator:
    place = name if name == "error" else f"ckpt-{name}"
    return Draft202012Validator({"$ref": f"#/$defs/{place}", "$defs": SCHEMA["$defs"]})


def conforms(name: str, document: Any) -> None:
    """A document is as the schema of the command (or of an error) says, which allows no other
    member."""
    fault = best_match(_validator(name).iter_errors(document))
    assert fault is None, f"{name}: {fault.json_path}: {fault.message:.1000}"


def document(*arguments: object, status: int = 0) -> Any:
    """The JSON of a command, which conforms to its schema."""
    found = run(*arguments, "--format", "json")
    assert found.status == status, found
    conforms(str(arguments[0]), found.document)
    return found.document


def failure(*arguments: object, status: int) -> dict[str, Any]:
    """The error of a command: a sentence on standard error, and the same in JSON on standard
    output."""
    found = run(*arguments, "--format", "json")
    assert found.status == status, found
    conforms("error", found.document)
    error: dict[str, Any] = found.document["error"]
    assert error["exit_status"] == status
    assert found.err.startswith(f"ckpt: {error['message']}")
    return error


def state_of(store: object, operator: str, name: str) -> Any:
    """A state as ``inspect`` has it."""
    (found,) = document("inspect", store, "--operator", operator, "--state", name)["states"]
    return found


def topology_without(uid: str, store: Path, file: Path) -> Path:
    """A topology file: a store's operators at parallelism 3, without one that has no inputs."""
    whole = document("inspect", store)
    graph = {
        "operators": [{"uid": op["uid"], "parallelism": 3} for op in whole["operators"] if op["uid"] != uid],
        "edges": [edge for edge in whole["edges"] if edge["from"] != uid],
    }
    file.write_text(json.dumps(graph))
    return file


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder, and the digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
