"""No advice is left out.

A test does what each sentence says, or it stands in a list with the reason why only its words are
checked.
"""

from __future__ import annotations

import ast

import pytest

from tests.advice.sentences import HOLE, sentences
from tests.advice.test_advice_followed import MET
from tests.advice.test_advice_in_python import PAIRS
from tests.advice.test_advice_on_pages import PAGES
from tests.advice.test_advice_tried import CASES
from tests.test_tree import ROOT

ELSEWHERE: dict[str, str] = {
    "is in another region": "tests/storage/test_storage_s3.py::"
    "test_credentials_and_the_region_that_are_asked_for_are_what_was_missing",
    "there are no usable credentials": "tests/storage/test_storage_s3.py::"
    "test_credentials_and_the_region_that_are_asked_for_are_what_was_missing",
    "exists; give another name, or replace it (--force)": "tests/ckpt/test_ckpt_s3.py::"
    "test_a_report_comes_from_s3_and_goes_there",
    "is not below until=": "tests/spark/test_spark_tables.py::test_a_table_refuses_what_cannot_be_read_exactly",
}
"""What a test of another room does, for it has the server, the cluster or the crash."""
WORDS_ONLY: dict[str, tuple[str, ...]] = {
    "It needs a running job, a race or a kill at one moment; tests of requests and restarts have these.": (
        "The stop stands: run `ckpt copy",
        "While the checkpoint is kept, `ckpt copy",
        "Leave the number out of the program",
        "Run it with resume=True to go on",
        "are kept until you say how many",
        "give the source idle_after=",
        "makes the savepoint.",
        "cannot hold its own savepoint",
        "without --running its newest checkpoint is rescaled",
        "may still go on at the new parallelism if it had begun to",
        "may still make a savepoint, as",
        "Only a run can drain",
        "If it was resumed a moment ago",
        "may still stop if it had begun to",
        "`ckpt repair {}` says what to do",
        "shows whether its checkpoint was published before",
        "shows whether a checkpoint was published. If not, run it again",
        "; free some room there",
        "is whole now; it was not a moment ago",
        "is not the newest checkpoint of",
        "ckpt pin {} NAME",
        "ckpt copy {} {}",
        "with --from it would be refused",
        "a start goes on from there only with --resume",
        "has checkpoints already, so start_from=",
    ),
    "It says how to see more, or what was done; nothing is wrong.": ("this is a bug in ckpt",),
    "It needs bytes that only a broken writer or an attacker makes, or more rows than a test has.": (
        "bytes that are no rows",
        "{} is missing from {}; `ckpt validate {}` lists",
        "and is there neither under that name nor",
        "which that sink cannot have written for that attempt",
        "Two jobs must not share a place",
        "and cannot be in a table",
        "and cannot be written as text",
        "files were exchanged or damaged, or keys of this type are hashed otherwise",
        "rows, but {} are stored; nothing was published",
        "`ckpt validate` lists what else is wrong",
        "`ckpt rewrite` makes objects of such segments",
        "is whole and certain to take the place of",
        "has the greatest id that there is",
        "But it stands alone, so it may be left over",
        "rows are too many to read here",
        "the query needs more than the",
        "the query took more than",
        "layers; at most",
        "can be opened; `ckpt validate",
        "check it with --level full, which compares every key",
        "Give one of the operators another uid first",
    ),
}


def test_every_advice_is_tried_or_says_why_not() -> None:
    tried = [one.says for one in (*CASES, *PAGES, *PAIRS)] + [one for some in MET.values() for one in some]
    known = [
        piece.replace("{}", HOLE)
        for piece in (*tried, *ELSEWHERE, *(one for some in WORDS_ONLY.values() for one in some))
    ]
    texts = {one.text: one for one in sentences() if len(one.text.split()) > 2}
    left = [str(one) for text, one in texts.items() if not any(piece in text for piece in known)]
    assert not left, "no test does what these say:\n" + "\n".join(left)
    stale = [piece for piece in known if not any(piece in text for text in texts)]
    assert not stale, f"no sentence has these words any more: {stale}"
    wide = [piece for piece in known if piece not in texts and sum(piece in text for text in texts) > 2]
    assert not wide, f"these are pieces of several sentences: {wide}"


@pytest.mark.parametrize("place", dict.fromkeys(ELSEWHERE.values()))
def test_the_test_that_does_what_a_sentence_says_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    found = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in found
