"""No advice is left out: a test does what each sentence says, here or in another room."""

from __future__ import annotations

import ast
import re

import pytest

from stateformat.backends.foreign.advice import TASKS
from tests.advice.sentences import HOLE, sentences
from tests.advice.test_advice_followed import MET
from tests.advice.test_advice_in_python import PAIRS
from tests.advice.test_advice_of_jobs import SAID, TOLD
from tests.advice.test_advice_on_pages import PAGES
from tests.advice.test_advice_tried import CASES
from tests.test_tree import ROOT

ELSEWHERE: dict[str, str] = {
    "there are no usable credentials": "tests/storage/test_storage_s3.py::"
    "test_credentials_and_the_region_that_are_asked_for_are_what_was_missing",
    "exists; give another name, or replace it (--force)": "tests/ckpt/test_ckpt_s3.py::"
    "test_a_report_comes_from_s3_and_goes_there",
    "Give {}: `ckpt inspect {}`": "tests/ckpt/test_ckpt_below.py::test_every_command_names_what_lies_below_its_folder",
    "In it {} {}{}. {}": "tests/ckpt/test_ckpt_below.py::test_every_command_names_what_lies_below_its_folder",
    "--by takes a column of numbers": "tests/ckpt/test_ckpt_du.py::test_what_no_state_can_be_ranked_by_is_a_sentence",
    "--by COLUMN and --per are sums": "tests/ckpt/test_ckpt_du.py::test_what_no_state_can_be_ranked_by_is_a_sentence",
    "Its rows are not counted here": "tests/ckpt/test_ckpt_report.py::"
    "test_rows_of_a_large_checkpoint_of_another_system_are_left_to_top",
    "it is a place in": "tests/ckpt/test_ckpt_below.py::"
    "test_a_path_into_a_checkpoint_is_refused_with_the_address_of_that",
    "shows the first that is whole": "tests/ckpt/test_ckpt_below.py::"
    "test_the_page_fits_a_terminal_and_ends_with_a_command_that_works",
    "give the target once": "tests/foreign/test_spark_copy.py::"
    "test_the_command_tells_how_the_query_goes_on_and_proves_the_copy",
    **dict.fromkeys(
        (
            "it is the only source of the query",
            "of letters, digits and underscores. Give one that is not there",
            "so a new one has a number of 0 to",
            "it is no offset in JSON",
            "Give one of the same form",
            "a source that has none begins at",
            "(latest, earliest) are known to the option",
            "Another table begins at",
            "Spark fails on an offset that is still to come",
            "so there are no files for it. Give 0 to",
            "the keys are dealt by it; `ckpt rescale",
            "the files are that store's; `ckpt rescale",
            "What can be set is",
            "it is one of {}",
            "--offsets, --source and --conf are for",
            "a source can be dropped or added",
        ),
        "tests/foreign/test_spark_offsets.py::test_what_does_not_fit_is_refused_by_name_and_what_is_advised_fits",
    ),
    **dict.fromkeys(
        ("writes a copy without it", "--to is for a Spark query", "writes one that is whole; --yes"),
        "tests/foreign/test_spark_repair.py::"
        "test_a_snapshot_for_which_older_files_make_up_is_left_out_and_nothing_is_lost",
    ),
    **dict.fromkeys(
        (
            "whose rewritten copy goes to a new folder",
            "a query has its own names, and one number",
            "a proof follows keys, which --rekey changes",
            "say where --where and --transform apply",
            "delete first, and then rewrite the copy",
        ),
        "tests/foreign/test_spark_rewrite_options.py::"
        "test_options_that_a_query_does_not_take_are_refused_and_what_is_advised_is_taken",
    ),
    "does not fix it; {} Fixed are {}": "tests/foreign/test_spark_offsets.py::"
    "test_offsets_of_files_may_have_blanks_and_settings_short_names_are_explained",
    "No content was read: `ckpt validate {} --level full` reads it": "tests/ckpt/test_ckpt_report.py::"
    "test_of_a_checkpoint_of_another_system_is_said_which_files_were_checked_and_that_none_was_read",
    "Older batches were not read: `ckpt validate {} --all --level full`": "tests/foreign/test_spark_repair.py::"
    "test_a_whole_query_says_what_else_can_be_read",
    "Newer batches were not looked at: `ckpt repair {}`": "tests/foreign/test_spark_repair.py::"
    "test_an_older_batch_that_is_asked_for_is_told_alone_and_copied",
    "and a savepoint is a folder": "tests/foreign/test_flink_written.py::"
    "test_a_checkpoint_of_flinks_becomes_a_canonical_savepoint_without_an_import",
    "keys are hashed anew, so what Flink needs": "tests/foreign/test_flink_written.py::"
    "test_an_import_that_leaves_no_way_back_says_so_once_and_another_leaves_one",
    "is not below until=": "tests/spark/test_spark_sources.py::test_a_table_refuses_what_cannot_be_read_exactly",
    "Leave the number out of the program": "tests/local/test_local_rescale.py::"
    "test_the_answer_says_what_the_next_start_of_a_program_with_numbers_of_its_own_sets_back",
    "give the source idle_after=": "tests/conformance/test_conformance_idle.py::"
    "test_an_idle_split_holds_no_time_up_and_one_that_returns_does",
    "the query took more than": "tests/ckpt/test_ckpt_sql.py::"
    "test_a_query_that_takes_too_much_memory_is_stopped_with_a_sentence",
    "layers; at most": "tests/stateformat/test_layers.py::"
    "test_more_layers_than_are_advised_are_told_once_with_what_to_do",
}
"""What a test of another room does, for it has the server, the cluster or the job."""


def test_every_advice_is_done_by_a_test() -> None:
    tried = [one.says for one in (*CASES, *PAGES, *PAIRS, *TOLD)] + [one for some in MET.values() for one in some]
    done = {re.sub(r"\{[a-z_]+\}", HOLE, way.told) for some in TASKS.values() for way in some.values()}
    texts = {one.text: one for one in sentences() if len(one.text.split()) > 2}
    ways = done & texts.keys()  # test_advice_of_tasks.py tries each.
    known = [*(piece.replace("{}", HOLE) for piece in (*tried, *SAID.values(), *ELSEWHERE)), *ways]
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
