"""``ckpt`` as a process: what it imports, interrupts, closed and full streams, and names that would
steer a terminal.

``ckpt --verbose``: what is done, and at the end what it took, on standard error and nowhere else. A
secret in a URL is refused or cut: it stands in no message, record, request, answer or log.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
import stateformat.storage as storage_room
from stateformat.backends.connectors import FileSink
from stateformat.backends.connectors.sql.staging import staging_at
from stateformat.backends.local import LocalRuntime
from stateformat.errors import CheckpointError, InvalidInput, StorageError
from stateformat.history import retention
from stateformat.model import StopMode
from stateformat.paths import request_path
from stateformat.requests import JobRequest, RequestKind, RequestOutcome, encode_request
from stateformat.states import value_state
from stateformat.store import open as open_store
from stateformat.tools.ckpt import main as program_module, output as output_module
from stateformat.tools.ckpt.exit_status import failure_of, interrupted
from stateformat.tools.ckpt.files import new_file
from stateformat.tools.ckpt.interrupts import Interrupts
from stateformat.tools.ckpt.json_text import pieces, unprintable_escaped
from stateformat.tools.ckpt.main import main
from stateformat.tools.ckpt.output import complain
from stateformat.tools.ckpt.watch import Watch
from tests.ckpt.ckpt_runs import CKPT, DOCS, Run, failure, program, run, words
from tests.worlds.local import SUSPEND, Bench, Job, settle
from tests.worlds.stores import counts_store

HEAVY = {"pyarrow", "numpy", "pandas", "pyspark", "s3fs", "fsspec", "botocore"}
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


def test_python_runs_the_package_as_ckpt_and_its_help_names_itself_so(counts: Path) -> None:
    def said(*arguments: object) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "stateformat", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert said("validate", counts) == (0, program("validate", counts).stdout, "")
    assert "Usage: python -m stateformat history [OPTIONS] STORE" in said("history", "--help")[1]
    assert said("--version")[1] == program("--version").stdout
    status, _, told = said("histery", counts)
    assert (status, "`python -m stateformat --help` shows how to use it" in told) == (2, True)


def test_inspecting_a_directory_imports_arrow_and_nothing_that_it_does_not_need(counts: Path) -> None:
    assert modules_of("inspect", counts) & HEAVY == {"pyarrow", "numpy"}
    assert modules_of("get", counts, "--key", '"w7"') & HEAVY == {"pyarrow", "numpy"}


# ---- progress


def test_progress_is_one_line_of_a_terminal_that_goes_before_anything_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(output_module, "_REDRAWN_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    output = output_module.Output()
    with output.progress("Copying") as step:
        step(1 << 20, 4 << 20)
        output.note("half")
        step(4 << 20, 4 << 20)
    first, begun, said, done, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert (first, begun, said, last) == ("Copying", "Co… ████             1.0 MiB of 4.0 MiB", "half\n", "")
    assert done == "Co… ████████████████ 4.0 MiB of 4.0 MiB"


@pytest.mark.parametrize(
    ("done", "total", "unit", "shown"),
    [
        (1 << 20, 3 << 20, "bytes", "1.0 MiB of 3.0 MiB, 512.0 KiB/s, 4 s left"),
        (1_000, 0, "rows", "1,000 rows, 500/s"),
        (2, 300, "s", "2 s; gives up after 300 s"),
    ],
)
def test_progress_says_how_much_how_fast_and_how_long(done: int, total: int, unit: str, shown: str) -> None:
    assert output_module.amount_text(done, total, unit, 2.0) == shown


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


ENDING = re.compile(
    r"\nckpt (?P<command>\S+): (?P<wall>[\d.]+) s, (?P<cpu>[\d.]+) s of CPU time, "
    r"at most (?P<memory>[\d.,]+) [MG]iB of memory\n(?P<table>(?:.*\n)*?)"
    r"retries \d+, waits \d+ \([\d.]+ s\), conflicts \d+, unknown \d+, restarts \d+\n\Z"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two checkpoints."""
    counts_store(str(tmp_path / "store"), 2)
    return tmp_path / "store"


def ending(err: str) -> re.Match[str]:
    """The last lines of standard error, which must be those of ``--verbose`` and fit 80 columns."""
    match = ENDING.search(err)
    assert match, err
    assert max(map(len, match[0].splitlines())) <= 80
    assert 0 <= float(match["wall"]) < 120
    assert float(match["cpu"]) > 0
    return match


def rows(found: Run) -> dict[str, list[float]]:
    """The table: calls, objects, bytes, seconds and failures of each operation."""
    title, *lines = ending(found.err)["table"].splitlines()
    assert title.split() == ["operation", "calls", "objects", "bytes", "seconds", "failures"]
    cells = [line.replace(",", "").split() for line in lines]
    return {name: [float(cell) for cell in rest] for name, *rest in cells}


def test_the_program_says_how_much_time_and_memory_it_took(store: Path) -> None:
    match = ending(program("history", store, "--verbose").stderr)
    assert float(match["wall"]) > 0
    assert float(match["cpu"]) < 120
    assert 20 < float(match["memory"].replace(",", "")) < 400


def test_a_command_shows_what_its_storage_did_and_its_page_stays_as_it_was(store: Path) -> None:
    quiet, loud = run("inspect", store), run("inspect", store, "--verbose")
    assert quiet.err == ""
    assert loud.status == quiet.status
    assert re.sub(r"\d+ s ago", "", loud.out) == re.sub(r"\d+ s ago", "", quiet.out)
    library = open_store(str(store))
    assert library.open().manifest.handles.num_rows
    expected = {name: counts for name, counts in library.stats.operations.items() if counts.calls}
    found = rows(loud)
    assert {name: row[:3] for name, row in found.items() if name != "all"} == {
        name: list(counts[:3]) for name, counts in expected.items()
    }
    assert found["all"][0] == sum(counts.calls for counts in expected.values())
    (manifest,) = (store / "manifests").glob(f"{2:020d}-*")
    assert found["all"][2] == sum(path.stat().st_size for path in (store / f"checkpoints/{2:020d}.json", manifest))


def test_json_stays_one_document_and_the_table_is_text_beside_it(store: Path) -> None:
    found = run("history", store, "--format", "json", "-v")
    assert [item["checkpoint_id"] for item in found.document["checkpoints"]] == [2, 1]
    assert ending(found.err)["command"] == "history"
    assert rows(found)["all"][0] > 2
    assert rows(found)["all"][4] == 0


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_command_that_fails_shows_a_trace_and_what_it_took(tmp_path: Path, output_format: str) -> None:
    found = run("history", tmp_path / "nowhere", "--verbose", "--format", output_format, traces=True)
    assert found.status == 3
    sentence, trace, table = (found.err.index(text) for text in ("ckpt: there is no store", "Traceback", "operation  "))
    assert sentence < trace < table
    assert rows(found)["exists"][0] == 1
    assert rows(found)["list"][1] == 0
    assert (found.document["error"]["exit_status"] if output_format == "json" else len(found.out)) in (3, 0)


def test_once_logs_what_is_published_and_twice_every_request(store: Path) -> None:
    once = run("rescale", store, "--parallelism", 1, "-v")
    twice = run("rescale", store, "--parallelism", 2, "-vv")
    line = re.compile(r"(?m)^\d\d:\d\d:\d\d\.\d{3} (\S+) +(.*)$")
    ((level, text),) = line.findall(once.err)
    assert level == "INFO"
    assert re.search(
        r"published checkpoint 3 of file://\S+: 20 rows, \d+ segments, \d+ bytes; publishing took [\d.]+ s", text
    )
    logged = line.findall(twice.err)
    requests = [text.split()[0] for level, text in logged if level == "DEBUG"]
    assert len(logged) == len(requests) + 1
    assert {name: requests.count(name) for name in requests} == {
        name: row[0] for name, row in rows(twice).items() if name != "all"
    }


def test_the_docs_show_the_table_as_it_is(store: Path) -> None:
    (block,) = re.findall(r"```text\n(\$ ckpt .*?)```", (DOCS / "observability.md").read_text(), re.DOTALL)
    shown, real = rows(Run(0, "", block)), rows(run("rescale", store, "--parallelism", 1, "--verbose"))
    assert ending(block)["command"] == "rescale"
    assert {name: row[0] for name, row in shown.items()} == {name: row[0] for name, row in real.items()}


def test_a_copy_counts_what_both_stores_do(store: Path, tmp_path: Path) -> None:
    found = rows(run("copy", store, tmp_path / "copy", "--verbose"))
    (manifest,) = (tmp_path / "copy" / "manifests").iterdir()
    assert found["open_input"][1:3] == [1, manifest.stat().st_size], "what is linked is read for its digest"
    assert found["link_from"][:2] == [1, 1]
    assert found["create"][:2] == [1, 1]


def test_a_command_line_that_is_wrong_took_nothing(store: Path) -> None:
    found = run("inspect", store, "--verbose", "--rows", "many")
    assert found.status == 2
    assert "operation" not in found.err


def test_nothing_is_counted_unless_asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[object] = []
    monkeypatch.setattr(storage_room, "instrumented", lambda storage, _: (counted.append(storage), storage)[1])
    assert run("inspect", store).status == 0
    assert counted == []
    assert run("inspect", store, "-v").status == 0
    assert len(counted) == 1


def test_a_call_from_python_leaves_the_loggers_as_they_were(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("stateformat")
    before = (logger.level, list(logger.handlers))
    for _ in range(2):
        assert main(["history", str(store), "-vv"]) == 0
        found = capsys.readouterr().err
        assert found.count("\noperation ") == 1
        lists = int(found[found.rindex("\nlist ") :].split()[1])
        assert len(re.findall(r" list \S+ of ", found)) == lists > 0, "each request is logged once"
    assert main(["history", str(store)]) == 0
    assert capsys.readouterr().err == ""
    assert (logger.level, list(logger.handlers)) == before


def test_calls_at_the_same_time_leave_the_loggers_as_they_were() -> None:
    logger = logging.getLogger("stateformat")
    before = (logger.level, list(logger.handlers))
    first, second = Watch(), Watch()
    first.end()
    second.end()
    assert (logger.level, list(logger.handlers)) == before


SECRET = "hunter2"
URLS = [
    f"gs://KEY:{SECRET}@bucket/x",
    f"s3://KEY:{SECRET}@bucket/x",
    f"s3://KEY:a/{SECRET}@bucket",
    f"az://x?sig={SECRET}",
]


DOORS: dict[str, Callable[[str], object]] = {
    "open": sf.open,
    "request": lambda url: Bench().store.request_stop(StopMode.DRAIN, url),
    "run": lambda url: Job().saved_once().request_stop(SUSPEND, url),
    "start_from": lambda url: LocalRuntime(sf.open("memory://x"), start_from=url),
    "sink": FileSink,
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_it_and_does_not_repeat_it(door: str, url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        DOORS[door](url)
    assert SECRET not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", [["inspect"], ["history"], ["rollback"], ["gc"]])
def test_no_command_repeats_it(command: list[str], url: str) -> None:
    assert SECRET not in str(failure(*command, url, status=2))


def test_a_request_with_one_is_refused_by_the_run_and_its_url_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    asked = JobRequest(RequestKind.STOP, "a" * 32, 1, URLS[1], mode=SUSPEND)
    bench.storage.create(request_path(1, asked.id), encode_request(asked))
    bench.clock.wait_until(bench.clock.now_us() + 2_000_000)
    settle(run)
    answer = bench.store.request_answer(asked.id)
    assert answer is not None
    assert answer.outcome is RequestOutcome.REFUSED
    assert bench.newest_id == 1, "the job goes on"
    assert SECRET not in answer.message + caplog.text


def test_a_staging_place_is_named_without_it(tmp_path: Path) -> None:
    staging = staging_at(f"http://user:{SECRET}@localhost:1/{tmp_path.name}", {}, durable=False)
    assert SECRET not in str(staging)
    with pytest.raises((StorageError, CheckpointError)) as caught:
        staging.read("x")
    assert SECRET not in str(caught.value)
