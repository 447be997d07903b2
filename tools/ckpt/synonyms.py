"""Words that people type for a command or an option of ``ckpt``, and what is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_WORDS: Final[Mapping[str, str]] = {
    "history STORE": "checkpoints list log ls",
    "inspect STORE": "cat describe head info metadata show states view",
    "get STORE --key KEY": "find key lookup",
    "top STORE": "hot hottest keys largest skew",
    "diff STORE@1 STORE": "compare",
    "du STORE": "size sizes usage",
    "validate STORE": "check doctor fsck verify",
    "explain-restore STORE": "dry-run explain plan restore",
    "export STORE --as parquet --to FOLDER": "convert dump extract",
    'sql STORE "show tables"': "query select tables",
    "report STORE --to FILE": "browse html open page",
    "import QUERY --to STORE": "load migrate",
    "rescale STORE --parallelism N": "repartition resize scale",
    "rewrite STORE --transform UID/STATE=FILE.py:FUNCTION": "edit map patch set transform update",
    "rewrite STORE --rename OLD=NEW": "rename",
    "run FILE.py:FUNCTION STORE --drop UID/STATE": "drop",
    "copy STORE TARGET": "backup clone cp move mv",
    "pin STORE NAME": "keep tag",
    "rollback STORE@ID": "reset revert undo",
    "repair STORE": "fix heal recover",
    "gc STORE": "clean cleanup delete prune purge rm vacuum",
    "run FILE.py:FUNCTION STORE": "continue restart resume start",
    "watch STORE": "follow monitor progress status tail",
    "stop STORE": "cancel kill quit",
}
MEANT: Final[Mapping[str, str]] = {word: form for form, words in _WORDS.items() for word in words.split()}
"""By what people type: the command, as it is typed."""
OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--dest", "--destination", "--out", "--output", "--target"), "--to"),
    **dict.fromkeys(("--partitions", "--shuffle-partitions"), "--parallelism"),
    **dict.fromkeys(("--count", "--head", "--n"), "--rows"),
    **dict.fromkeys(("--name", "--uid"), "--operator"),
    "--json": "--format",
    "--max": "--limit",
    "--top": "--limit",
}
"""By what people type: the option, where the command has it."""
