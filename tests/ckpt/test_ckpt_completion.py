"""Completion: what a command line may go on with, asked through click as a shell asks it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stateformat.tools.ckpt.completion import INSTALLED, script
from stateformat.tools.ckpt.main import COMMANDS
from tests.ckpt.ckpt_runs import CKPT, failure, page, run
from tests.worlds import stores


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stores and a pin, as a user has them."""
    folder = tmp_path_factory.mktemp("completion")
    stores.flights_store(str(folder / "flights")).pin(1, "before-rescale")
    stores.counts_store(str(folder / "damaged"))
    (folder / f"damaged/checkpoints/{1:020}.json").write_text("{")
    return folder


@pytest.fixture(autouse=True)
def _there(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)


def said(line: str, shell: str = "zsh") -> tuple[int, str, str]:
    """How the program ends as zsh calls it: the cursor stands behind the last word."""
    given = {"_CKPT_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run([CKPT], capture_output=True, text=True, check=False, env={**os.environ, **given}, timeout=60)
    return done.returncode, done.stdout, done.stderr


def values(line: str) -> list[str]:
    status, shown, complaint = said(line)
    assert (status, complaint) == (0, "")
    return shown.splitlines()[1::3]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ckpt insp", ["inspect"]),
        ("ckpt re", [name for name in COMMANDS if name.startswith("re")]),
        ("ckpt inspect flights@", ["flights@2", "flights@1", "flights@before-rescale"]),
        ("ckpt inspect flights@b", ["flights@before-rescale"]),
        ("ckpt diff flights@1 @", ["@2", "@1", "@before-rescale"]),
        ("ckpt inspect flights --oper", ["--operator"]),
        ("ckpt inspect flights@1 --operator de", ["delays"]),
        ("ckpt inspect --operator delays flights --state s", ["sums"]),
        ("ckpt inspect flights --operator sink --state s", []),
        ("ckpt explain-restore flights --drop del", ["delays"]),
        ("ckpt inspect flights --format j", ["json"]),
        ("ckpt inspect damaged --operator d", []),
        ("ckpt inspect s3://bucket/store@", []),
        ("ckpt no-such-command f", []),
    ],
)
def test_what_may_come_next(line: str, wanted: list[str]) -> None:
    assert values(line) == wanted


def test_a_store_is_a_folder_and_the_shell_lists_folders() -> None:
    assert said("ckpt inspect fl")[1].splitlines()[0] == "dir"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_says_how_to_install_it_and_the_shell_takes_it(
    shell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line, file = INSTALLED[shell]
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert page("completion", COLUMNS="200") == page("completion", shell, COLUMNS="200") == script(shell)
    assert f"put this line into {file}:  {line}" in script(shell)
    assert f"{shell} {line} in {file}" in " ".join(page("completion", "--help").split())
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here; `apt-get install {shell}` brings it")
    (tmp_path / "script").write_text(script(shell))
    subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_an_unknown_shell_is_told_which_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "name a shell: `ckpt completion bash | zsh | fish`" in run("completion").err
    assert failure("completion", "tcsh", "--format", "json", status=2)["kind"] == "usage"


def test_bash_gets_a_line_for_each_value() -> None:
    assert said("ckpt rol", "bash") == (0, "plain,rollback\n", "")


def test_no_command_is_imported_for_its_name() -> None:
    program = (
        "import os, sys; os.environ.update(_CKPT_COMPLETE='zsh_complete', COMP_WORDS='ckpt in', COMP_CWORD='1')\n"
        "from stateformat.tools.ckpt.main import main\nmain([])\n"
        "print(sorted({'pyarrow', 'numpy', 'pyspark'} & {*sys.modules}))"
    )
    found = subprocess.run([CKPT.parent / "python", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
