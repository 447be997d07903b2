"""Who wrote a checkpoint: the program, the version of its code, and perhaps host and user.

Stores are shared, so no folder of this machine, no argument of the program, and without being asked
neither host nor user is recorded.

Git is asked about the folder of the program's file, never about a name that a checkpoint says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from stateformat.model import CODE_PROPERTY, HOST_PROPERTY, PROGRAM_PROPERTY, SPARK_PROPERTY, USER_PROPERTY

GIT_SECONDS: Final = 1.0
"""How long git may take; after that the version is not recorded."""
LONGEST: Final = 200
"""Characters of a recorded value."""
_OF_A_HOOK: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that git sets for its hooks: they would name another repository than the program's."""


class Program(NamedTuple):
    """What runs a job."""

    name: str
    """A script or notebook without its folder, or a module; perhaps ``:function`` behind it."""
    file: str | None = None
    """The file of its code, if that is known."""


def program_of(given: str | None) -> Program | None:
    """The program by what a user says, ``flights.py``, ``flights.py:make`` or ``module:make``.

    By default the script or module that this process was started with. None for a process without
    one, such as a notebook.
    """
    if given is None:
        return _started()
    where, _, function = given.rpartition(":")
    if not where or not function.isidentifier():
        where, function = given, ""
    loaded = getattr(sys.modules.get(where), "__file__", None)
    file = loaded or (where if os.path.isfile(where) else None)  # noqa: PTH113 - False also for no name of a file
    name = Path(where).name
    return Program(f"{name}:{function}" if function else name, file)


def _started() -> Program | None:
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return Program(spec.name.removesuffix(".__main__"), file)
    # Of an interactive Python it is "<stdin>", or nothing.
    return None if file is None or file.startswith("<") else Program(Path(file).name, file)


def origin_properties(
    program: str | None, *, host_and_user: bool = False, spark_application: str | None = None
) -> Mapping[str, str]:
    """The properties that say who writes (SPEC.md section 3.2); what is not known is left out."""
    found = program_of(program)
    said = {
        PROGRAM_PROPERTY: found.name if found else None,
        CODE_PROPERTY: code_of(found) if found else None,
        SPARK_PROPERTY: spark_application,
        HOST_PROPERTY: _host() if host_and_user else None,
        USER_PROPERTY: _user() if host_and_user else None,
    }
    return {name: _text(value) for name, value in said.items() if value}


def code_of(program: Program) -> str | None:
    """The version of a program: git's commit, with ``-dirty`` if the work tree differs from it; of
    an installed package its name and version; None if neither is known.

    A process asks once: what it has imported stays.
    """
    return None if program.file is None else _code(os.path.realpath(program.file), program.name)


@cache
def _code(file: str, name: str) -> str | None:
    return _commit(file) or _installed(file, name)


def _commit(file: str) -> str | None:
    """The commit in whose work tree a tracked file lies."""
    folder = Path(file).parent
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    try:
        # A file that git ignores or does not know yet is not described by any commit.
        _git(folder, "ls-files", "--error-unmatch", "--", file)
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def _git(folder: Path, *command: str) -> str:
    # Nothing is locked or written, and no program that the repository names is started.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    done = subprocess.run(  # noqa: S603 - git, on the folder of the user's own program
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *command],  # noqa: S607
        env={**environment, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        capture_output=True,
        check=True,
        timeout=GIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.decode()


def _installed(file: str, name: str) -> str | None:
    """The version of the package that a module belongs to, where both have one name."""
    if not {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return None
    from importlib.metadata import PackageNotFoundError, version

    package = name.partition(":")[0].partition(".")[0]
    try:
        return f"{package} {version(package)}"
    except (PackageNotFoundError, ValueError):
        return None


def _host() -> str | None:
    import socket

    return socket.gethostname() or None


def _user() -> str | None:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None  # A container's user may have no name.


def _text(value: str) -> str:
    """A value that every record can hold: file names may be no text."""
    return value.encode(errors="replace").decode()[:LONGEST]
