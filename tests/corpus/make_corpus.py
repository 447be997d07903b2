"""Writes the corpus: small stores, sound ones and one for each way to break the format, with what a
reader must do.

``python tests/corpus/make_corpus.py [FOLDER]`` writes ``sound/``, ``broken/``, ``cases.json`` and
``README.md``, by default beside itself, with the same bytes each time (for one version of pyarrow,
which ``cases.json`` names).
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import pyarrow as pa  # noqa: E402

import stateformat as sf  # noqa: E402
from stateformat.backends.storage.memory import MemoryStorage  # noqa: E402
from tests.corpus.bases import BASES, base, objects_of  # noqa: E402
from tests.corpus.cases import CASES, OPEN, READ, REPORT, Case, Store  # noqa: E402
from tests.forgery import put  # noqa: E402
from tests.golden.make_golden import rows_of  # noqa: E402

Objects = dict[str, bytes]
PLACE = "corpus-case"

INTRODUCTION = """\
# The corpus: stores for those who implement the format

Each folder below `sound/` and `broken/` is a store of [the format](../../stateformat/SPEC.md), with every object as the
program that made it wrote it. An implementation that shares no code with this one can be tried on them.

- **`sound/`**: stores that a reader must accept. `rows.json` beside each has the rows of every checkpoint, as
  `{"<checkpoint id>": {"<operator>/<state>/<subtask>": [row, …]}}`: of states without an owner the subtask is `-`, keyed
  rows are sorted by their text, bytes are `{"hex": …}`, dates and times are text.
- **`broken/`**: stores that break one clause of the specification. The name begins with its section, and `README.md`
  beside each says what is broken.
- **`cases.json`** says the same as this page, for programs: of each broken store the section, what is broken, what a
  reader must do, and every finding of `ckpt validate --level full` (kind, clause, severity).

What a reader must do, at least:

| words | meaning |
|---|---|
| refuse the checkpoint | It is not opened. No row is given. |
| refuse the state | The state named is not given, and no wrong row of it. The rest may be read. |
| report | A validator reports it. Whoever only reads rows need not notice. |

A reader may always refuse more, and a validator may find more. Both must end with an error that names the fault: no
crash, no endless loop, no rows that are wrong. The newest checkpoint of each store is the one that is broken.

Made by `python tests/corpus/make_corpus.py`; `tests/test_corpus.py` holds it against `ckpt validate`, against the library,
and against two readers that share no code with it.
"""


def sound() -> Iterator[tuple[str, Objects, dict[str, Any]]]:
    for name in BASES:
        objects = base(name)
        store = _store(objects)
        rows = {str(record.checkpoint_id): rows_of(store.open(record.checkpoint_id)) for record in store.history()}
        yield name, objects, rows


def broken() -> Iterator[tuple[Case, Objects, list[dict[str, str]]]]:
    bases = {name: base(name) for name in BASES}
    for case in CASES:
        store = _store(bases[case.base])
        storage = MemoryStorage(PLACE)
        newest = max(int(path[-25:-5]) for path in bases[case.base] if path.startswith("checkpoints/"))
        case.change(Store(storage, newest))
        found = sf.validate(store.storage, level="full").findings
        findings = [{"kind": str(one.kind), "clause": one.clause, "severity": one.severity} for one in found]
        yield case, objects_of(storage), [finding for i, finding in enumerate(findings) if finding not in findings[:i]]


def _store(objects: Objects) -> sf.CheckpointStore:
    MemoryStorage.reset(PLACE)
    for path, data in objects.items():
        put(MemoryStorage(PLACE), path, data)
    return sf.open(f"memory://{PLACE}")


def cases_json(found: list[tuple[Case, list[dict[str, str]]]]) -> dict[str, Any]:
    return {
        "pyarrow": pa.__version__,
        "sound": [{"store": f"sound/{name}", "what": what} for name, (what, _) in BASES.items()],
        "broken": [
            {
                "store": f"broken/{case.name}",
                "section": case.section,
                "what": case.what,
                "reader": case.reader,
                **({"state": case.state} if case.state else {}),
                "findings": findings,
            }
            for case, findings in found
        ],
    }


def page(cases: dict[str, Any]) -> str:
    lines = [INTRODUCTION, "## Sound", "", "| store | what it is |", "|---|---|"]
    lines += [f"| [`{_name(case)}`]({case['store']}) | {case['what']} |" for case in cases["sound"]]
    lines += [
        "",
        "## Broken",
        "",
        "| section | store | what is broken | a reader must | findings |",
        "|---|---|---|---|---|",
    ]
    for case in cases["broken"]:
        found = "; ".join(map(_told, case["findings"]))
        store = f"[`{_name(case)}`]({case['store']})"
        lines.append(f"| {case['section']} | {store} | {case['what']} | {_must(case)} | {found} |")
    return "\n".join(lines) + "\n"


def case_page(case: dict[str, Any]) -> str:
    lines = [f"# {_name(case)}", "", f"Breaks section {case['section']}: {case['what']}.", ""]
    lines += [f"A reader must at least: {_must(case)}.", "", "`ckpt validate --level full` finds:", ""]
    lines += [f"- {_told(one)}" for one in case["findings"]]
    return "\n".join(lines) + "\n"


def _must(case: dict[str, Any]) -> str:
    return str(case["reader"]) + (f" `{case['state']}`" if case["reader"] == READ else "")


def _told(finding: dict[str, str]) -> str:
    return f"{finding['severity']} `{finding['kind']}` ({finding['clause']})"


def _name(case: dict[str, Any]) -> str:
    return str(case["store"].partition("/")[2])


def _write(folder: Path, objects: Objects) -> None:
    for path, data in objects.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def main(folder: Path = HERE) -> None:
    for part in ("sound", "broken"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for name, objects, rows in sound():
        _write(folder / "sound" / name, objects)
        (folder / "sound" / name / "rows.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    found = []
    for case, objects, findings in broken():
        assert case.reader in (OPEN, READ, REPORT)
        _write(folder / "broken" / case.name, objects)
        found.append((case, findings))
    cases = cases_json(found)
    for case in cases["broken"]:
        (folder / case["store"] / "README.md").write_text(case_page(case))
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    (folder / "README.md").write_text(page(cases))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # A repair says aloud what it leaves behind.
    main(*map(Path, sys.argv[1:]))
