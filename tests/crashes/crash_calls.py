"""Two recorders of the system calls that a program makes below a directory: inside the process, and
from outside.

:class:`SystemCalls` sits between the local storage and the system. It needs nothing else, is fast,
and can make a call fail. :func:`traced` runs a process under ``strace``, so it sees everything that
reaches the kernel. Both return a list of :class:`~tests.crashes.crash_disk.Call`, and a test checks
that they agree.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateformat.backends.storage import local
from tests.crashes.crash_disk import Call

STRACED = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,link,linkat,symlink,symlinkat,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,ftruncate,truncate,fallocate,copy_file_range,sendfile"
)
STORE = "run/a/store"
"""Path of the store below the base directory of a recording."""
REPOSITORY = Path(__file__).resolve().parents[2]


class SystemCalls:
    """Context manager that records in ``calls`` what ``LocalStorage`` calls below ``base``.

    ``before`` is called with every call before it is made, including ``open`` of existing files and
    directories, and may raise.
    """

    def __init__(self, base: Path, before: Callable[[Call], None] = lambda call: None) -> None:
        self.calls: list[Call] = []
        self._base = str(base)
        self._before = before
        self._paths: dict[int, str] = {}
        self._patch = pytest.MonkeyPatch()

    def mark(self, text: str) -> None:
        """Record a mark, by which the program reports something."""
        self.calls.append(Call("mark", text))

    def __enter__(self) -> SystemCalls:
        real = {name: getattr(os, name) for name in ("open", "mkdir", "link", "unlink", "rmdir", "fsync")}
        recorder = self

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            where = self._where(path, dir_fd)
            make = bool(flags & os.O_CREAT)
            descriptor: int = self._do(
                Call("create" if make else "open", where),
                lambda: real["open"](path, flags, mode, dir_fd=dir_fd),
                note=make,
            )
            self._paths[descriptor] = where
            return descriptor

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            self._do(Call("mkdir", self._where(path, dir_fd)), lambda: real["mkdir"](path, mode, dir_fd=dir_fd))

        def link(path: Any, target: Any, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
            call = Call("link", self._where(path, src_dir_fd), target=self._where(target, dst_dir_fd))
            more = {"src_dir_fd": src_dir_fd, "dst_dir_fd": dst_dir_fd, "follow_symlinks": follow_symlinks}
            self._do(call, lambda: real["link"](path, target, **more))

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            self._do(Call("unlink", self._where(path, dir_fd)), lambda: real["unlink"](path, dir_fd=dir_fd))

        def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
            self._do(Call("rmdir", self._where(path, dir_fd)), lambda: real["rmdir"](path, dir_fd=dir_fd))

        def fsync(descriptor: int) -> None:
            call = Call("sync", self._paths[descriptor], covers=len(self.calls))
            self._do(call, lambda: real["fsync"](descriptor))

        class RecordedFile(io.FileIO):
            def write(self, data: Any) -> int:
                call = Call("write", recorder._paths[self.fileno()], bytes(data))
                written: int = recorder._do(call, lambda: super(RecordedFile, self).write(data))
                assert written == len(call.data)
                return written

        for name, fake in {"open": open_, "mkdir": mkdir, "link": link, "unlink": unlink}.items():
            self._patch.setattr(os, name, fake)
        self._patch.setattr(os, "rmdir", rmdir)
        self._patch.setattr(os, "fsync", fsync)
        self._patch.setattr(local, "io", SimpleNamespace(FileIO=RecordedFile, BufferedWriter=io.BufferedWriter))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def _do(self, call: Call, do: Callable[[], Any], *, note: bool = True) -> Any:
        inside = not call.path.startswith(("/", ".."))
        if inside:
            self._before(call)
        result = do()
        if note and inside:
            self.calls.append(call)
        return result

    def _where(self, path: Any, dir_fd: int | None) -> str:
        found = os.fspath(path)
        if dir_fd is not None:
            directory = self._paths[dir_fd]
            return f"{directory}/{found}" if directory else found
        return _below(found, self._base)


def _below(path: str, base: str) -> str:
    """Return the path relative to the base: empty for the base itself, unchanged if elsewhere."""
    if path == base:
        return ""
    return path.removeprefix(base + "/")


def traced(base: Path, *arguments: str) -> list[Call]:
    """Run a Python module in a separate process under ``strace``; return its calls below ``base``.

    The program makes a mark by a write to the file ``marks`` in the base directory. Raises
    ``RuntimeError`` with one line if strace cannot run.
    """
    log = base.with_name(base.name + ".strace")
    command = ["strace", "-f", "-y", "-xx", "-s", "2000000", "-e", f"trace={STRACED}", "-o", str(log)]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise RuntimeError("strace is not installed") from error
    if not log.exists() or "ptrace" in done.stderr.partition("\n")[0]:
        raise RuntimeError(f"strace cannot run here: {done.stderr.partition(chr(10))[0]}")
    assert done.returncode == 0, done.stderr
    return list(_parsed(log.read_text("ascii").splitlines(), str(base)))


_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)")
_ARGUMENT = re.compile(
    r'(?:(?:AT_FDCWD|-?\d+)<((?:\\x[0-9a-f]{2})*)>(?:\(deleted\))?)|"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?|[^,"<>\s][^,"<>]*'
)


def _parsed(lines: list[str], base: str) -> Iterator[Call]:
    begun: dict[str, tuple[str, int]] = {}
    count = 0
    for line in lines:
        process, _, rest = line.partition(" ")
        rest = rest.strip()
        covers = count
        if rest.endswith("<unfinished ...>"):
            begun[process] = (rest.removesuffix("<unfinished ...>"), count)
            continue
        if rest.startswith("<... "):
            head, covers = begun.pop(process)
            rest = head + rest.partition("resumed>")[2]
        match = _LINE.fullmatch(f"{process} {rest}")
        if match is None:
            assert rest.startswith(("+++", "---")), line[:200]
            continue
        if match[4] in ("?",) or int(match[4]) < 0:
            continue
        call = _call(match[2], _arguments(match[3]), int(match[4]), base, covers)
        if call is not None:
            count += 1
            yield call


def _arguments(text: str) -> list[Any]:
    """Return each argument: the bytes of a string, ``(path,)`` of a descriptor, or its text."""
    found: list[Any] = []
    for match in _ARGUMENT.finditer(text):
        if match[2] is not None:
            assert not match[3], "strace has cut a string"
            found.append(bytes.fromhex(match[2].replace("\\x", "")))
        elif match[1] is not None:
            found.append((bytes.fromhex(match[1].replace("\\x", "")).decode(),))
        elif match[0].strip():
            found.append(match[0].strip())
    return found


def _call(name: str, arguments: list[Any], result: int, base: str, covers: int) -> Call | None:
    def path(at: int) -> str:
        """Return the path in an argument, below the directory in the argument before it."""
        named = arguments[at].decode()
        if at and isinstance(arguments[at - 1], tuple) and not named.startswith("/"):
            named = f"{arguments[at - 1][0]}/{named}"
        return os.path.normpath(named)

    if name in ("openat", "open", "creat"):
        where = path(1 if name == "openat" else 0)
        flags = next((item for item in arguments if isinstance(item, str) and item.startswith("O_")), "")
        call = Call("create" if "O_CREAT" in flags else "", where)
        if call.verb and "O_EXCL" not in flags:
            if where == f"{base}/marks":
                # The file of marks exists from the beginning.
                return None
            assert not where.startswith(f"{base}/{STORE}/"), f"{where} may be overwritten"
            call = Call("ensure", where)
    elif name == "write":
        call = Call("write", arguments[0][0], arguments[1][:result])
    elif name == "pwrite64":
        call = Call("write", arguments[0][0], arguments[1][:result], offset=int(arguments[3]))
    elif name == "ftruncate":
        call = Call("truncate", arguments[0][0], offset=int(arguments[1]))
    elif name in ("rename", "renameat", "renameat2"):
        source, target = (0, 1) if name == "rename" else (1, 3)
        call = Call("rename", path(source), target=_below(path(target), base))
    elif name in ("fsync", "fdatasync"):
        call = Call("sync", arguments[0][0], covers=covers)
    elif name in ("mkdir", "rmdir", "unlink"):
        call = Call(name, path(0))
    elif name == "mkdirat":
        call = Call("mkdir", path(1))
    elif name == "unlinkat":
        call = Call("rmdir" if "AT_REMOVEDIR" in arguments else "unlink", path(1))
    elif name in ("link", "linkat"):
        source, target = (0, 1) if name == "link" else (1, 3)
        call = Call("link", path(source), target=_below(path(target), base))
    else:
        named = str(arguments)
        assert base not in named, f"the model does not know {name} {named[:300]}"
        return None
    if not call.verb or not (call.path == base or call.path.startswith(base + "/")):
        return None
    where = _below(call.path, base)
    if where == "marks":
        return Call("mark", call.data.decode().strip())
    return call._replace(path=where)
