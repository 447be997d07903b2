"""Completion: what a command line may go on with, and that real shells insert it as it is meant."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stateformat.graph import JobGraph
from stateformat.store import open as open_store
from stateformat.tools.ckpt.completion import INSTALLED, SHELLS, script
from stateformat.tools.ckpt.completion.answering import items
from stateformat.tools.ckpt.completion.lines import inserted, typed
from stateformat.tools.ckpt.main import COMMANDS, ckpt
from tests import stores
from tests.ckpt.ckpt_runs import CKPT, failure, page, run

BREAKS = " \t\n\"'@><=;|&(:"
ODD = 'it\'s $(touch x) `y` "z" \\ ~ü *'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stores, a pin, plain folders and files, as a user has them."""
    folder = tmp_path_factory.mktemp("completion")
    store = stores.flights_store(str(folder / "flights"))
    store.pin(1, "before-rescale")
    stores.counts_store(str(folder / "food store"), checkpoints=12)
    stores.counts_store(str(folder / "odd" / ODD))
    (folder / "foreign" / "offsets").mkdir(parents=True)
    (folder / "fold").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "file.json").write_text("{}")
    for line_end in ("\n", "\x1b[31m"):
        (folder / f"f{line_end}x").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _there(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("HOME", str(world))


def values(*words: str) -> list[str]:
    """What the last word may be."""
    return [item.value for item in items(ckpt, COMMANDS, words[:-1], words[-1])]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["in"], ["inspect"]),
        (["re"], [name for name in COMMANDS if name.startswith("re")]),
        (["inspect", "f"], ["flights", "food store", "foreign", "fold/"]),
        (["inspect", "fo"], ["food store", "foreign", "fold/"]),
        (["inspect", "~/fli"], ["~/flights"]),
        (["inspect", "file://./fli"], ["file://./flights"]),
        (["inspect", "spark:fore"], ["spark:foreign"]),
        (["inspect", "nothing"], []),
        (["inspect", "s3://bucket/"], []),
        (["inspect", "."], [".hidden/"]),
        (["rollback", "fli"], ["flights@"]),
        (["history", "flights@"], []),
        (["inspect", "flights@"], ["flights@2", "flights@1", "flights@before-rescale"]),
        (["inspect", "flights@b"], ["flights@before-rescale"]),
        (["inspect", "food store@"], [f"food store@{number}" for number in range(12, 0, -1)]),
        (["inspect", "fold@"], []),
        (["unpin", "flights", ""], ["before-rescale"]),
        (["inspect", "flights", "--oper"], ["--operator"]),
        (["inspect", "flights", "--operator", "f"], ["flights"]),
        (["inspect", "flights@before-rescale", "--operator", "de"], ["delays"]),
        (["inspect", "flights", "--operator=de"], ["--operator=delays"]),
        (["inspect", "--operator", "delays", "flights", "--state", "s"], ["sums"]),
        (["inspect", "flights", "--operator", "Delays per plane", "--state", "l"], ["last"]),
        (["inspect", "flights", "--operator", "sink", "--state", "s"], []),
        (["inspect", "fold", "--operator", ""], []),
        (["inspect", "flights", "--format", ""], ["text", "json"]),
        (["inspect", "flights", "--format=j"], ["--format=json"]),
        (["rescale", "flights", "--operator-parallelism", "del"], ["delays="]),
        (["explain-restore", "flights", "--drop", "delays/s"], ["delays/sums"]),
        (["explain-restore", "flights", "--drop", "delays/sums."], [f"delays/sums.{c}" for c in ("tailnum", "n", "minutes")]),
        (["explain-restore", "flights", "--topology", "fi"], ["file.json"]),
        (["export", "flights", "--to", "fi"], ["file.json"]),
        (["export", "flights", "--checkpoints", "1..2"], ["1..2"]),
        (["export", "flights", "--operator", "delays", "--state", "sums", "--partition-by", "n,"], ["n,tailnum", "n,minutes"]),
        (["copy", "flights", "fo"], ["food store", "foreign", "fold/"]),
        (["diff", "flights@1", "fli"], ["flights"]),
        (["diff", "flights@1", "@"], ["@2", "@1", "@before-rescale"]),
        (["run", "fi"], ["file.json"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["no-such-command", "f"], []),
    ],
    ids=lambda item: " ".join(item)[:50],
)  # fmt: skip
def test_what_may_come_next(words: list[str], wanted: list[str]) -> None:
    assert values(*words) == wanted


def test_stores_ids_and_operators_say_what_they_are() -> None:
    told = {item.value: item.help for item in items(ckpt, COMMANDS, ["inspect"], "f")}
    assert told["flights"] == told["foreign"] == "store"
    made = json.loads((Path("flights") / f"checkpoints/{1:020}.json").read_text())["created_at_us"]
    (first,) = [item for item in items(ckpt, COMMANDS, ["inspect"], "flights@1") if item.value == "flights@1"]
    assert first.help == f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(made // 10**6))} UTC"
    (operator,) = items(ckpt, COMMANDS, ["inspect", "flights", "--operator"], "delays")
    assert operator.help == "Delays per plane"


# ---- lines of bash -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words", "last", "quote", "kept"),
    [
        ("ckpt ", (), "", "", 0),
        ("ckpt inspect a\\ b", ("inspect",), "a b", "", 0),
        ("ckpt inspect a\\@b@4", ("inspect",), "a@b@4", "", 4),
        ("ckpt inspect 'a b", ("inspect",), "a b", "'", 0),
        ('ckpt inspect "a\\"b', ("inspect",), 'a"b', '"', 0),
        ("ckpt get '' x", ("get", ""), "x", "", 0),
        ("ckpt get --format=j", ("get",), "--format=j", "", 9),
        ("ckpt get --operator='a b", ("get",), "--operator=a b", "'", 11),
        ("ckpt get ab'cd", ("get",), "abcd", "'", -1),
        ("ckpt get 'ab' c", ("get", "ab"), "c", "", 0),
    ],
)
def test_a_line_is_taken_apart_as_bash_does_it(
    line: str, words: tuple[str, ...], last: str, quote: str, kept: int
) -> None:
    assert typed(line, BREAKS) == (words, last, quote, kept)


@pytest.mark.parametrize("begin", ["", "'", '"'])
def test_bash_reads_what_is_inserted_as_the_very_name(begin: str, tmp_path: Path) -> None:
    names = [ODD, "a b", "~x", "$HOME", "a;b|c&d", "[!x]*?", "{a,b}", "#x", "-x", "!!", "ä\u00a0ö", "a'b", "\\", "a\\b"]
    line = typed(f"ckpt inspect {begin}", BREAKS)
    quoted = [f"{begin}{inserted(name, line)}{begin}" for name in names if not (begin == '"' and "!" in name)]
    # A non-interactive bash has no history expansion; there the backslash before ! would stay.
    program = "set -f; printf '%s\\0' " + " ".join(quoted)
    said = subprocess.run(["bash", "-c", program], capture_output=True, check=True, cwd=tmp_path).stdout
    assert said.decode().split("\0")[:-1] == [name for name in names if not (begin == '"' and "!" in name)]
    assert [*tmp_path.iterdir()] == []


# ---- shells --------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{CKPT.parent}:{os.environ['PATH']}",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "200",
    }


def bash_replies(line: str) -> list[str]:
    """COMPREPLY after the function that the script defines, and whether a space follows."""
    program = (
        'compopt() { echo "$@"; }; eval "$(ckpt completion bash)"; '
        'COMP_LINE=$1; COMP_POINT=$(printf %s "$1" | wc -c); COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
        '_ckpt_completion ckpt; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", line], capture_output=True, text=True, check=True, env=environment()
    )
    assert found.stderr == ""
    return found.stdout.splitlines()


def test_bash_gets_what_it_inserts() -> None:
    assert bash_replies("ckpt rol") == ["rollback"]
    assert bash_replies("ckpt inspect food\\ s") == ["-o nospace", "food\\ store"]
    assert bash_replies("ckpt inspect flights@") == ["-o nospace", "2", "1", "before-rescale"][1:]
    assert bash_replies("ckpt inspect flights --format=j") == ["json"]
    assert bash_replies("ckpt inspect file://./fli") == ["-o nospace", "//./flights"]
    assert bash_replies("ckpt inspect 'odd/it") == ["-o nospace", "odd/" + ODD.replace("'", "'\\''")]
    assert bash_replies("ckpt inspect nothing-like-it") == [""]


class Terminal:
    """A shell at a terminal: what is typed, and what it shows."""

    def __init__(self, *command: str) -> None:
        self._process, self._file = pty.fork()
        if self._process == 0:
            os.execvpe(command[0], command, environment())
        self._shown = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        os.kill(self._process, 9)
        os.waitpid(self._process, 0)

    def type(self, text: str, until: str) -> str:
        """Type, and read on until this is shown."""
        os.write(self._file, text.encode())
        end = time.monotonic() + 60
        while until.encode() not in self._shown:
            ready, _, _ = select.select([self._file], [], [], max(0, end - time.monotonic()))
            assert ready, f"{until!r} is not shown, but {self._shown.decode(errors='replace')!r}"
            self._shown += os.read(self._file, 65536)
        found, _, self._shown = self._shown.partition(until.encode())
        return found.decode(errors="replace")


def installed(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here; `apt-get install {shell}` brings it")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_line_completed_at_a_terminal_is_the_command_that_was_meant(shell: str, world: Path) -> None:
    installed(shell)
    start = ["bash", "--norc", "--noprofile", "-i"] if shell == "bash" else ["zsh", "-f", "-i"]
    with Terminal(*start) as terminal:
        # What is echoed has the quotes, and what is said has not.
        terminal.type(f"{INSTALLED[shell][0]}; echo begin''here\r" if shell == "bash" else "autoload -Uz compinit; "
                      f"compinit -D -u; {INSTALLED[shell][0]}; echo begin''here\r", "beginhere")  # fmt: skip
        terminal.type("ckpt insp\todd/it\t --ro\t 1 --verbose\r", "ckpt inspect: ")
        shown = terminal.type("echo end''here\r", "endhere")
        assert "read_range" in shown, "the table of --verbose"
        assert "Traceback" not in shown
    assert not (world / "x").exists(), "nothing in a name is run"


def test_fish_lists_values_with_their_help() -> None:
    installed("fish")

    def complete(line: str) -> list[str]:
        program = f"{INSTALLED['fish'][0]}; complete -C $argv[1]"
        found = subprocess.run(
            ["fish", "--no-config", "-c", program, line], capture_output=True, text=True, check=True, env=environment()
        )
        assert found.stderr == ""
        return [text.partition("\t")[0] for text in found.stdout.splitlines()]

    assert complete("ckpt rol") == ["rollback"]
    assert complete("ckpt inspect flights@") == ["flights@2", "flights@1", "flights@before-rescale"]
    assert complete("ckpt inspect food\\ st") == ["food store"]
    assert complete("ckpt inspect flights --operator de") == ["delays"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_says_how_to_install_it_and_so_does_help(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, file = INSTALLED[shell]
    assert page("completion", shell, COLUMNS="200") == script(shell)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert page("completion", COLUMNS="200") == script(shell)
    assert f"put this line into {file}:  {line}" in script(shell)
    told = " ".join(page("completion", "--help").split())
    assert f"{shell} {line} in {file}" in told
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "name a shell: `ckpt completion bash | zsh | fish`" in run("completion").err


# ---- what must never happen ----------------------------------------------------------------------


def said(**given: str) -> tuple[int, bytes, bytes]:
    """How the program ends as a shell calls it."""
    found = subprocess.run([CKPT], capture_output=True, check=False, env={**os.environ, **given}, timeout=60)
    return found.returncode, found.stdout, found.stderr


def test_no_error_reaches_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stores.counts_store("store")
    record = tmp_path / f"store/checkpoints/{1:020}.json"
    record.write_text("{")
    silent = (0, b"", b"")
    for words in (("inspect", "store", "--operator", ""), ("inspect", "no\0".strip("\0"), "--state", "")):
        assert said(_CKPT_COMPLETE="fish", CKPT_WORDS="\x1f".join(words)) == silent
    assert said(_CKPT_COMPLETE="fish") == silent
    assert said(_CKPT_COMPLETE="bash", COMP_LINE="ckpt x", COMP_POINT="many") == silent
    assert said(_CKPT_COMPLETE="tcsh") == silent
    assert said(_CKPT_COMPLETE="fish", CKPT_WORDS="inspect\x1fstore@")[1] == b"store@1\t\n"


def test_what_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store/checkpoints").mkdir(parents=True)
    os.mkfifo(tmp_path / f"store/checkpoints/{1:020}.json")
    assert said(_CKPT_COMPLETE="fish", CKPT_WORDS="inspect\x1fstore@") == (0, b"", b"")


def test_names_that_would_steer_a_terminal_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = stores.counts_job()
    names = {"lines": "a\x1b[31m\nb\tc", "counter": "plain"}
    graph = JobGraph(
        tuple(stores.operator(one.uid, one.parallelism, name=names[one.uid]) for one in job.graph.operators),
        job.graph.edges,
    )
    replace(job, graph=graph).publish(open_store("store"), None)
    found = items(ckpt, COMMANDS, ["inspect", "store", "--operator"], "")
    assert [(item.value, (item.help or "").isprintable()) for item in found] == [("lines", True), ("counter", True)]
    assert not any("\n" in item.value or "\x1b" in item.value for item in items(ckpt, COMMANDS, ["inspect"], ""))


def test_no_command_is_imported_for_its_name() -> None:
    program = (
        "import os, sys; os.environ.update(_CKPT_COMPLETE='fish', CKPT_WORDS='in')\n"
        "from stateformat.tools.ckpt.main import main\nmain([])\n"
        "print(sorted({'pyarrow', 'numpy', 'rich', 'pyspark'} & {*sys.modules}))"
    )
    found = subprocess.run([CKPT.parent / "python", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_completion_is_for_shells_that_are_known() -> None:
    assert failure("completion", "tcsh", "--format", "json", status=2)["kind"] == "usage"
