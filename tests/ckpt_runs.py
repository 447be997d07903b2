"""Running the installed ``ckpt`` as a person does, in a process of its own, and holding it to what it promises always."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateformat.tools.ckpt.main import main

CKPT = Path(sys.executable).with_name("ckpt")
DOCS = Path(__file__).resolve().parent.parent / "docs"
FREE = {"properties", "sample", "details"}
"""Members whose own members are the user's, or depend on what happened."""


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
def _standard(name: str) -> Iterator[io.TextIOWrapper]:
    """A stream in place of a standard one, with bytes below it as files have them."""
    before, stream = getattr(sys, name), io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    setattr(sys, name, stream)
    try:
        yield stream
    finally:
        setattr(sys, name, before)


def run(*arguments: object, **environment: str) -> Run:
    """Call ``ckpt`` in this process. It shows no stack trace, and no page is wider than 80 columns."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR", *environment)}
    os.environ.update({"COLUMNS": "80", **environment})
    try:
        with _standard("stdout") as out, _standard("stderr") as err:
            status = main([str(argument) for argument in arguments])
            found = Run(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return _checked(found, arguments, environment)


def run_program(*arguments: object, **environment: str) -> Run:
    """The same with the installed program, in a process of its own."""
    plain = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "PYTHONIOENCODING")}
    done = subprocess.run(
        [CKPT, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**plain, **environment},
        check=False,
        timeout=120,
    )
    return _checked(Run(done.returncode, done.stdout, done.stderr), arguments, environment)


def _checked(found: Run, arguments: tuple[object, ...], environment: dict[str, str]) -> Run:
    assert "Traceback" not in found.out + found.err, found.err
    assert "this is a bug" not in found.err, found.err
    if "--format" not in arguments and "COLUMNS" not in environment and "-" not in arguments:
        wide = [line for line in found.out.splitlines() if len(line) > 80]
        assert not wide, "\n".join(wide)
    return found


def page(*arguments: object, status: int = 0, **environment: str) -> str:
    """The page that a command prints; it ends with the status that is expected, and says nothing on standard error."""
    found = run(*arguments, **environment)
    assert (found.status, found.err) == (status, ""), found
    return found.out


def document(*arguments: object, status: int = 0) -> Any:
    """The JSON that a command prints; every member of it stands in the command's section of docs/json.md."""
    found = run(*arguments, "--format", "json")
    assert found.status == status, found
    told = json_members(str(arguments[0]))
    untold = sorted(set(members(found.document)) - told)
    assert not untold, f"docs/json.md does not tell {untold} of {arguments[0]}"
    return found.document


def failure(*arguments: object, status: int) -> dict[str, Any]:
    """The error of a command that fails: a sentence on standard error, and the same in JSON on standard output."""
    found = run(*arguments, "--format", "json")
    assert found.status == status, found
    assert set(found.document) == {"error"}
    error: dict[str, Any] = found.document["error"]
    assert set(error) == {"kind", "message", "exit_status", "details"}
    assert error["exit_status"] == status
    assert found.err.startswith(f"ckpt: {error['message']}")
    return error


def topology_without(uid: str, store: Path, file: Path) -> Path:
    """A topology file: the operators of a store's checkpoint at parallelism 3, but for one, from which edges lead and to which none do."""
    whole = document("inspect", store)
    graph = {
        "operators": [{"uid": op["uid"], "parallelism": 3} for op in whole["operators"] if op["uid"] != uid],
        "edges": [edge for edge in whole["edges"] if edge["from"] != uid],
    }
    file.write_text(json.dumps(graph))
    return file


def members(value: Any) -> Iterator[str]:
    """The names of all members of a JSON value, at any depth, save below :data:`FREE`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            if name not in FREE:
                yield from members(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from members(inner)


def json_members(command: str) -> set[str]:
    """Every name that docs/json.md sets in code in the section of a command, in those it refers to, or in the shared ones."""
    parts = re.split(r"(?m)^## ", (DOCS / "json.md").read_text())
    sections = {part.split("\n", 1)[0]: part for part in parts}
    text = sections["Shared objects"] + sections[command]
    text += sections["explain-restore"] if command == "rescale" else ""
    return {name.strip(".…").split(".")[-1].removesuffix("[]") for name in re.findall(r"`([^`\n]+)`", text)}


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder, and the digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
