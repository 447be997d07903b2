"""No advice is left out.

A test does what each sentence says, or it stands in a list with the reason why only its words are
checked.
"""

from __future__ import annotations

from tests.advice.sentences import HOLE, sentences
from tests.advice.test_advice_followed import MET
from tests.advice.test_advice_in_python import PAIRS
from tests.advice.test_advice_on_pages import PAGES
from tests.advice.test_advice_tried import CASES

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
        "no checkpoint {} in {}; `ckpt history {}` lists what is there",
        "; free some room there",
        "is whole now; it was not a moment ago",
        "is not the newest checkpoint of",
        "is not the newest of",
        "ckpt pin {} NAME",
        "ckpt copy {} {}",
        "with --from it would be refused",
        "a start goes on from there only with --resume",
        "has checkpoints already, so start_from=",
    ),
    "It needs S3, PostgreSQL or Spark.": (
        "is in another region",
        "there are no usable credentials",
        "of a SQL sink cannot be read. Write user and password",
        "exists; give another name, or replace it (--force)",
        "name the operator and the state to be read",
        "is not below until=",
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
        "keeps no savepoints below a store",
        "rows are too many to read here",
        "the query needs more than the",
        "the query took more than",
        "layers; at most",
        "can be opened; `ckpt validate",
        "check it with --level full, which compares every key",
        "Give one of the operators another uid first",
    ),
    "The tests of its room refuse the one and take the other.": (
        "goes on where the query stopped in its input",
        "Keep the row that counts, or give on_duplicate='last' with order_by",
        "Give the positions of sources with positions=",
        "the place in the list, and order_by=",
        "needs order_by, the column that says which row is the last",
        "which keeps every row. Leave on_duplicate out",
        "as INT96 in nanoseconds",
        "Cast it first; pyarrow.compute.floor_temporal",
        "the Java hash code of",
        "import the savepoint again without it",
        "so no record's key would find them",
        "columns hash otherwise than the key as a whole",
        "state is moved from the default store to RocksDB, not back",
        "has no keys to hash again",
        "begin with carried=Checkpoint.carried(plan)",
        "declare the ttl again",
        "say what became of",
        "or give the records up with drop=",
    ),
}


def test_every_advice_is_tried_or_says_why_not() -> None:
    tried = [one.says for one in (*CASES, *PAGES, *PAIRS)] + [one for some in MET.values() for one in some]
    known = [piece.replace("{}", HOLE) for piece in (*tried, *(one for some in WORDS_ONLY.values() for one in some))]
    texts = {one.text: one for one in sentences() if len(one.text.split()) > 2}
    left = [str(one) for text, one in texts.items() if not any(piece in text for piece in known)]
    assert not left, "no test does what these say:\n" + "\n".join(left)
    stale = [piece for piece in known if not any(piece in text for text in texts)]
    assert not stale, f"no sentence has these words any more: {stale}"
    wide = [piece for piece in known if piece not in texts and sum(piece in text for text in texts) > 2]
    assert not wide, f"these are pieces of several sentences: {wide}"
