"""``ckpt`` as a process: what it imports, interrupts, closed and full streams, and names that would
steer a terminal."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.history import retention
from stateformat.states import value_state
from stateformat.tools.ckpt import main as program_module
from stateformat.tools.ckpt.exit_status import failure_of, interrupted
from stateformat.tools.ckpt.files import new_file
from stateformat.tools.ckpt.interrupts import Interrupts
from stateformat.tools.ckpt.json_text import pieces, unprintable_escaped
from stateformat.tools.ckpt.output import complain
from tests.ckpt.ckpt_runs import CKPT, run, words

HEAVY = {"pyarrow", "numpy", "pandas", "pyspark", "s3fs", "fsspec", "botocore", "rich"}
NASTY = "\x1b[31mred\x07\r\x9b2J\u202etxt.exe"
"""A name that colors, rings, goes back to the line's start, clears the screen (C1), and turns the
reading direction."""


# ---- imports


def modules_of(*arguments: object) -> set[str]:
    """The top-level modules that a run of ``ckpt`` has imported by its end."""
    code = (
        "import sys\nfrom stateformat.tools.ckpt.main import main\nstatus = main()\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert modules_of(*arguments).isdisjoint(HEAVY)


def test_inspecting_a_directory_imports_arrow_and_nothing_that_it_does_not_need(counts: Path) -> None:
    assert modules_of("inspect", counts) & HEAVY == {"pyarrow", "numpy"}
    assert modules_of("get", counts, "--key", '"w7"') & HEAVY == {"pyarrow", "numpy"}


# ---- interrupts


def test_an_interrupt_while_modules_are_imported_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import sys; print('importing', flush=True); sys.stdin.read()")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from stateformat.tools.ckpt.__main__ import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "history", "somewhere"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"ckpt: interrupted; nothing was changed\n")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_command_says_so_and_leaves_nothing(counts: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    # Nobody writes to the pipe, so the command stays where it reads its topology.
    command = [CKPT, "explain-restore", counts, "--topology", pipe]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        pipe.open("wb"),
    ):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="asks Linux in which system call a thread is")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_comes_just_before_a_read_ends_the_read_all_the_same() -> None:
    read_end, write_end = os.pipe()
    reader = Path(f"/proc/self/task/{threading.get_native_id()}/syscall")

    def take() -> None:
        # Another thread takes the signal: to the reader that is as if it came before the read.
        while reader.read_text().split()[:2] != ["0", hex(read_end)]:
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    taken_elsewhere = threading.Thread(target=take)
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        taken_elsewhere.start()
        with pytest.raises(KeyboardInterrupt):
            os.read(read_end, 1)
    assert interrupts.seen
    assert signal.getsignal(signal.SIGINT) is before
    taken_elsewhere.join()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.usefixtures("interruptible")
def test_an_import_that_turns_an_interrupt_into_another_error_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_imported(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)
        except KeyboardInterrupt as error:
            raise ImportError("numpy could not be imported") from error

    monkeypatch.setattr(program_module.ckpt, "main", half_imported)
    found = run("history", "store")
    assert (found.status, found.err) == (130, f"ckpt: {interrupted().message}\n")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_deletion_says_that_something_may_be_gone(counts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_find", lambda *_: signal.raise_signal(signal.SIGINT))
    text = words("gc", counts, "--keep", "1", "--delete", status=130)
    assert "what was deleted stays deleted" in text
    assert "nothing was changed" not in text


# ---- streams


def test_a_command_whose_reader_leaves_is_quiet(flights: Path) -> None:
    arguments = ["export", str(flights), "--operator", "delays", "--state", "last", "--to", "-", "--as", "jsonl"]
    with subprocess.Popen([CKPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(timeout=60) == 141


def shell(command: str, store: Path) -> subprocess.CompletedProcess[str]:
    """A command line in which ``"$0"`` is ckpt and ``"$1"`` the store."""
    return subprocess.run(["sh", "-c", command, CKPT, store], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "status"),
    [('"$0" history "$1" >&-', 0), ('"$0" nonsense "$1" 2>&-', 2), ('"$0" inspect "$1" >&- 2>&-', 0)],
)
def test_a_closed_stream_is_nobody_who_reads(counts: Path, command: str, status: int) -> None:
    done = shell(command, counts)
    assert done.returncode == status
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("history", "history --format json"),
        "export --operator counter --state counts --to - --as csv",
    ],
)
def test_a_full_disk_behind_standard_output_is_named(counts: Path, command: str) -> None:
    done = shell(f'"$0" {command} "$1" >/dev/full', counts)
    assert done.returncode == 3
    assert "ckpt: standard output: No space left on device (OSError); free some room there" in done.stderr


# ---- strangers' text


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose operator, state and property have names that a terminal would obey."""
    folder = tmp_path_factory.mktemp("nasty")
    graph = sf.JobGraph((sf.Operator(NASTY, parallelism=1, max_parallelism=8),), ())
    state = value_state(NASTY, NASTY, keys={"k": pa.string()}, values={"n": pa.int64()})
    pending = sf.open(str(folder)).begin(
        job_id="nasty", graph=graph, states=[state], parent=None, properties={"a\x1b[2J": "b\nc"}
    )
    writer = pending.context.subtask(NASTY, 0)
    writer.write(NASTY, pa.table({"k": ["a"], "n": [1]}))
    pending.add(writer)
    pending.publish()
    return folder


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        *("inspect", "inspect --operator zz", "inspect --state zz", "validate", "history", "rewrite --rename zz=yy"),
        *("explain-restore", "explain-restore --parallelism 9", "export --operator zz --state zz --to x.csv"),
    ],
)
def test_no_name_steers_the_terminal(nasty: Path, command: str, form: str) -> None:
    name, *options = command.split()
    found = run(name, nasty, *options, "--format", form)
    both = (found.out + found.err).replace("\n", "")
    assert both.isprintable(), [char for char in both if not char.isprintable()]
    if form == "json" and command == "inspect":
        assert found.document["properties"] == {"a\x1b[2J": "b\nc"}
    elif command == "inspect":
        assert "a\\x1b[2J = b\\nc" in found.out
    elif form == "json":
        assert json.loads(found.out)


def test_escaping_json_text_leaves_its_value() -> None:
    value: Any = {NASTY: [NASTY, "\U000e0001", "plain ünïcode", 1.5, None], "n": {"\u2028": "\ufeff"}}
    text = unprintable_escaped("".join(pieces(value)))
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


def test_stack_traces_keep_their_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"Traceback\n  {NASTY}\nend")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


def test_an_error_of_a_disk_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    place = str(tmp_path / "a.csv")
    with pytest.raises(OSError, match="No space left") as raised, new_file(place, None, force=False):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failure_of(raised.value).message == (
        f"{place}: No space left on device (OSError); free some room there, or name another disk: with --to, or TMPDIR "
        "for temporary files"
    )
    unnamed = failure_of(OSError(errno.ENOSPC, "No space left on device")).message
    assert unnamed.startswith(f"a temporary file in {tempfile.gettempdir()}: No space left on device")
    closed = failure_of(OSError(errno.EROFS, "Read-only file system", place)).message
    assert closed == f"{place}: Read-only file system (OSError); see that you may write there, or name another place"
    assert list(tmp_path.iterdir()) == []
