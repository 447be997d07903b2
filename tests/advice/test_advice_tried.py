"""Refusals of ``ckpt`` that name options: the refused call, and what its reader calls then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.sentences import HOLE, sentences
from tests.advice.world import Case, tried

ONE = "export {five} --operator counter --state counts"
CASES = [
    Case(
        "contradict each other",
        ONE + " --to {new}.csv --checkpoints 1.. --all-checkpoints",
        ONE + " --to {new}.csv --checkpoints 1..",
    ),
    Case(
        "writes all operators into an empty folder",
        "export {flink} --as flink-savepoint --operator by-long --to {new}",
        "export {flink} --as flink-savepoint --to {new}",
    ),
    Case(
        "--subtask is of one checkpoint",
        ONE + " --subtask 0 --all-checkpoints --as parquet --to {new}",
        ONE + " --all-checkpoints --to {new}.parquet",
    ),
    Case(
        "--partition-by writes Parquet",
        ONE + " --partition-by n --as csv --to {new}",
        ONE + " --partition-by n --to {new}",
    ),
    Case(
        "and this goes into a folder; name one",
        ONE + " --partition-by n --to -",
        ONE + " --partition-by n --to {new}",
    ),
    Case(
        "--state is the name of one of its states",
        "export {five} --state counts --as delta --to {new}",
        ONE + " --to {new}.csv",
    ),
    Case("is the folder of all states", "export {five} --to {new}", "export {five} --as csv --to {new}"),
    Case("is the folder of all states", "export {five} --to {new}", ONE + " --to {new}.csv"),
    Case(
        "nothing in a folder is replaced",
        "export {five} --as csv --force --to {new}",
        "export {five} --as csv --to {new}",
    ),
    Case("Parquet cannot be written to standard output", ONE + " --as parquet --to -", ONE + " --as jsonl --to -"),
    Case("so no name tells the format", ONE + " --to -", ONE + " --as csv --to -"),
    Case(
        "does not say its format",
        "sql {five} 'from states' --to {new}.xyz",
        "sql {five} 'from states' --as csv --to {new}.xyz",
    ),
    Case("is not a regular file", ONE + " --as csv --to /dev/null --force", ONE + " --as csv --to -"),
    Case("exists; give another name, or --force", ONE + " --as csv --to {file}", ONE + " --as csv --to {file} --force"),
    Case(
        "--all-checkpoints reads the whole history",
        "sql {five}@1 'from states' --all-checkpoints",
        "sql {five} 'from states' --all-checkpoints",
    ),
    Case(
        "--rows is about what is shown",
        "sql {five} 'from states' --rows 3 --as csv --to {new}.csv",
        "sql {five} 'from states limit 3' --to {new}.csv",
    ),
    Case("--rows N shows more", "sql {five} 'from counter.counts'", "sql {five} 'from counter.counts' --rows 300"),
    Case("--rows N shows more", "sql {five} 'from counter.counts'", "sql {five} 'from counter.counts' --to {new}.csv"),
    Case(
        "ckpt sql reads, and nothing else", "sql {five} 'drop table counter.counts'", "sql {five} 'from counter.counts'"
    ),
    Case(
        "both take standard output",
        "report {five} --to - --format json",
        "report {five} --to -",
    ),
    Case(
        "--all and --newest-whole answer two questions",
        "validate {five} --all --newest-whole",
        "validate {five} --all",
    ),
    Case(
        "--flow names a program",
        "explain-restore {five} --flow {flow}:flow --max-parallelism 64",
        "explain-restore {five} --max-parallelism 64",
    ),
    Case(
        "--unaligned is an option of a run",
        "explain-restore {five} --unaligned",
        "explain-restore {five} --unaligned --flow {flow}:flow",
    ),
    Case(
        "--topology says how parallel each operator is",
        "explain-restore {five} --topology {topology} --parallelism 3",
        "explain-restore {five} --topology {topology}",
    ),
    Case(
        "Give a JSON object with operators and edges",
        "explain-restore {five} --topology {flow}",
        "explain-restore {five} --topology {topology}",
    ),
    Case(
        "when its states were asked for",
        "explain-restore {five} --flow {flow}:raises",
        "explain-restore {five} --flow {flow}:flow --verbose",
    ),
    Case(
        "share one number of partitions",
        "rescale {spark} --operator-parallelism operator-0=2 --to {new}",
        "rescale {spark} --parallelism 2 --to {new}",
    ),
    Case(
        "--running asks a job of this library",
        "rescale {spark} --running --parallelism 2",
        "rescale {spark} --parallelism 2 --to {new}",
    ),
    Case(
        "goes to a new folder: give --parallelism N",
        "rescale {spark} --parallelism 2",
        "rescale {spark} --parallelism 2 --to {new}",
    ),
    Case(
        "--provider and --engine are for the checkpoints of Structured Streaming",
        "rescale {five} --parallelism 3 --provider rocksdb",
        "rescale {five} --parallelism 3",
    ),
    Case(
        "give --parallelism, or --operator-parallelism",
        "rescale {five}",
        "rescale {five} --operator-parallelism counter=3",
    ),
    Case(
        "--provider and --engine are for the checkpoints of Structured Streaming",
        "rescale {five} --parallelism 3 --engine spark",
        "rescale {five} --parallelism 3",
    ),
    Case(
        "Give the folder that has both, or",
        "inspect {chk} --rows 2",
        "inspect {chk} --rows 2 --allow-outside",
        "is missing from",
    ),
    Case("give --parallelism, or --operator-parallelism", "rescale {five}", "rescale {five} --parallelism 3"),
    Case(
        "the job keeps running, so there is nothing to prove",
        "rescale {five} --parallelism 3 --running --prove",
        "diff {five} {five}@1",
    ),
    Case(
        "its rows carry checksums",
        "rescale {checksums} --parallelism 2 --provider rocksdb --to {new}",
        "rescale {checksums} --parallelism 2 --to {new}",
    ),
    Case(
        "give the name of a pin",
        "unpin {pinned}",
        "unpin {pinned}@kept",
    ),
    Case("choose another name, or `ckpt unpin", "pin {pinned}@2 kept", "unpin {pinned}@kept"),
    Case("name a shell", "completion", "completion bash"),
    Case(f"--keep {HOLE} saves", "du {five} --keep 1 --price 0.02", "gc {five} --keep 1 --delete"),
    Case("Run it again with --delete", "gc {five} --keep 1", "gc {five} --keep 1 --delete"),
    Case(
        "is a savepoint and stays as it is",
        "rescale {pinned}@kept --parallelism 3",
        "rescale {pinned}@kept --parallelism 3 --to {new}",
    ),
    Case("lists the savepoints of a store", "inspect {pinned}@other", "history {pinned}"),
    Case(
        "leave it out to publish there",
        "rescale {five} --parallelism 3 --to {five}",
        "rescale {five} --parallelism 3",
    ),
    Case(f"`ckpt history {HOLE}` lists them", "rollback {five}", "history {five}"),
    Case(
        "--transform names two functions",
        "rewrite {five} --transform counter/counts={functions}:same --transform counter/counts={functions}:moved",
        "rewrite {five} --transform counter/counts={functions}:same",
    ),
    Case(
        "whose rewritten copy goes to a new folder",
        "rewrite {spark} --where 'n = 5'",
        "rewrite {spark} --where 'n = 5' --to {new}",
    ),
    Case(
        "a query has its own names, and one number of partitions",
        "rewrite {spark} --where 'n = 5' --operator-parallelism operator-0=2 --max-parallelism 64 --rename a=b "
        "--rename-column a=b --to {new}",
        "rewrite {spark} --where 'n = 5' --parallelism 2 --to {new}",
    ),
    Case(
        "a proof follows keys, which --rekey changes",
        "rewrite {spark} --transform operator-0/default={functions}:same --rekey --prove --to {new}",
        "rewrite {spark} --transform operator-0/default={functions}:same --rekey --to {new} ; diff {spark} {made}",
    ),
    Case(
        "say where --where and --transform apply",
        "rewrite {five} --operator counter --state counts",
        "rewrite {five} --operator counter --state counts --where 'n = 1' ; "
        "rewrite {five} --state counts --transform {functions}:same",
    ),
    Case(
        "delete first, and then rewrite the copy",
        "rewrite {five} --transform counter/counts={functions}:same --where 'n = 1'",
        "rewrite {five} --where 'n = 1' ; rewrite {five} --transform counter/counts={functions}:same",
    ),
    Case("--rekey is for a --transform", "rewrite {five} --rekey", "rewrite {five}"),
    Case(
        "--rekey is for a --transform",
        "rewrite {five} --rekey",
        "rewrite {five} --transform counter/counts={functions}:moved --rekey",
    ),
    Case(
        "hash them again with rekey=True",
        "rewrite {five} --transform counter/counts={functions}:moved",
        "rewrite {five} --transform counter/counts={functions}:moved --rekey",
    ),
    Case(
        "Hash the rows again with rekey=True",
        "rewrite {five} --transform counter/counts={functions}:numbered",
        "rewrite {five} --transform counter/counts={functions}:numbered --rekey",
    ),
    Case(
        "say so with renames",
        "rewrite {five} --transform counter/counts={functions}:called",
        "rewrite {five} --transform counter/counts={functions}:called --rename-column counter/counts.word=text --rekey",
    ),
    Case(
        "rewrite without the proof",
        "rewrite {five} --prove --transform counter/counts={functions}:same",
        "rewrite {five} --transform counter/counts={functions}:same",
    ),
    Case(
        "key groups are kept, and operator",
        "import {flink} --key-hash keep --max-parallelism 64 --to {new}",
        "import {flink} --key-hash rehash --max-parallelism 64 --to {new}",
    ),
    Case(
        "is none of Flink's in the template",
        "export {renamed} --as flink-savepoint --to {new}",
        "rewrite {renamed} --rename mine=by-long",
    ),
    Case(
        "import the savepoint again (`ckpt import",
        "export {retitled} --as flink-savepoint --to {new}",
        "import {flink} --key-hash keep --to {new}",
    ),
    Case(
        "Only what came from Flink so can go back",
        "export {hashed} --as flink-savepoint --to {new}",
        "import {flink} --key-hash keep --to {new}",
    ),
    *[
        Case(says, call, then)
        for says, call, then in [
            ("Nothing was published. `ckpt validate` lists all", "rescale {gone} --parallelism 3", "validate {gone}"),
            ("Nothing was published. `ckpt validate` lists all", "rescale {gone} --parallelism 3", "history {gone}"),
            ("take another checkpoint (`ckpt history` lists them)", "validate {twice} --level full", "history {twice}"),
            ("`ckpt rewrite` writes them anew", "validate {totals}", "rewrite {totals} --to {new} ; validate {made}"),
            ("restore from another one", "explain-restore {twice} --parallelism 3", "validate {twice}"),
            ("take a checkpoint from before that", "validate {union}", "history {union}"),
            ("that the graph of checkpoint", "explain-restore {nobody} --parallelism 3", "validate {nobody}"),
            ("the manifest names state", "explain-restore {unknown} --parallelism 3", "validate {unknown}"),
            ("manifest row", "explain-restore {shared} --parallelism 3", "validate {shared}"),
            (
                "nothing: retention removes it",
                "validate {stray} --all",
                "gc {stray} --keep 1 --delete ; validate {stray} --all",
            ),
            ("Retention removes", "history {stray}", "gc {stray} --keep 1 --delete ; history {stray}"),
            ("nothing is wrong with checkpoint", "repair {five}@2 --yes", "rollback {five}@2"),
            ("lists those that can", "repair {gap}@3 --yes", "repair {gap}"),
            ("is found nowhere", "repair {lost} --restore-from {other} --yes", "repair {lost}"),
            ("so what it has lost is unknown", "repair {cut} --restore-from {five} --yes", "repair {cut}"),
            (
                "Go back to a whole one",
                "repair {unlisted} --restore-from {five} --yes",
                "repair {unlisted} ; repair {unlisted}@4 --yes",
            ),
            ("nothing was deleted. `ckpt validate", "unpin {spoiled}@kept", "validate {spoiled}@kept"),
            (
                "--rows 20` shows rows",
                "get {flights} --operator planes --state splits --key x",
                "inspect {flights} --operator planes --state splits --rows 20",
            ),
            ("give the folder above, or", "validate {chk}", "validate {above}"),
            ("give the folder above, or", "validate {chk}", "validate {chk} --allow-outside"),
            ("Give the folder that has both, or", "inspect {chk} --rows 2", "inspect {above} --rows 2"),
            (
                "imports the rest",
                "validate {log}",
                "import {log} --drop brief --to {new}",
            ),
            (
                "`ckpt import` leaves it out with --drop",
                "validate {avro}",
                "import {avro} --drop operator-0 --to {new}",
            ),
            (
                "and puts back what matches its digest",
                "repair {kept}",
                "repair {kept} --restore-from {kept}@kept --yes ; validate {kept} --level full",
            ),
            ("` shows what is there now", "watch {chk}", "history {chk}"),
            (
                "and the program goes on from the new store",
                "explain-restore {spark} --flow {flow}:flow",
                "import {spark} --to {new} --job-id counts",
            ),
            (
                "begins an empty store with it",
                "explain-restore {saved} --flow {flow}:flow",
                "run {flow}:flow {new} --from {saved}",
            ),
            (
                "begins an empty store with it",
                "explain-restore {saved} --flow {flow}:flow",
                "run {flow}:flow {saved} --claim",
            ),
            (
                "a start in this store goes on from its newest",
                "explain-restore {ran}@1 --flow {flow}:flow",
                "run {flow}:flow {new} --from {ran}@1",
            ),
            (
                "a start in this store goes on from its newest",
                "explain-restore {ran}@1 --flow {flow}:flow",
                "rollback {ran}@1",
            ),
        ]
    ],
    Case(
        "goes on where the query stopped in its input",
        "import {stateless} --to {new}",
        "import {stateless} --to {new} --source in=files",
    ),
    Case(
        "columns hash otherwise than the key as a whole",
        "import {keyed} --key-hash keep --map by-tuple/last.key.f0=word --to {new}",
        "import {keyed} --key-hash keep --to {new}",
    ),
    Case(
        "columns hash otherwise than the key as a whole",
        "import {keyed} --key-hash keep --map by-tuple/last.key.f0=word --to {new}",
        "import {keyed} --key-hash rehash --map by-tuple/last.key.f0=word --to {new}",
    ),
    Case(
        "the Java hash code of",
        "rewrite {keyed_kept} --transform by-short/last={functions}:dated --rekey",
        "import {keyed} --key-hash rehash --to {new} ; "
        "rewrite {made} --transform by-short/last={functions}:dated --rekey",
    ),
    Case(
        "import the savepoint again without it",
        "export {retitled} --as flink-savepoint --to {new}",
        "import {flink} --key-hash keep --drop by-long/sum --to {new} ; export {made} --as flink-savepoint --to {new}",
    ),
    Case("is not the newest of", "rescale {five}@2 --parallelism 3", "rescale {five} --parallelism 3"),
    Case(
        "is not the newest of",
        "rescale {five}@2 --parallelism 3",
        "rollback {five}@2 ; rescale {five} --parallelism 3",
    ),
    Case("is not the newest of", "rescale {five}@2 --parallelism 3", "rescale {five}@2 --parallelism 3 --to {new}"),
    Case(
        "or give the records up with drop=",
        "explain-restore {flights} --topology {cut_off}",
        "explain-restore {flights} --topology {cut_off} --drop alerts/overtaken",
    ),
    Case("Run it with resume=True to go on", "run {flow}:long {stopped}", "run {flow}:long {stopped} --resume"),
    Case(
        "a start goes on from there only with --resume",
        "explain-restore {stopped} --flow {flow}:long",
        "run {flow}:long {stopped} --resume ; explain-restore {stopped} --flow {flow}:long",
    ),
    Case(
        "are kept until you say how many",
        "run {flow}:long {stopped} --resume",
        "gc {stopped_too} --keep 10 --delete ; run {flow}:long {stopped_too} --resume",
    ),
    Case(
        "are kept until you say how many",
        "run {flow}:long {stopped} --resume",
        "run {flow}:long {stopped_too} --resume --keep all",
    ),
    Case("has checkpoints already, so start_from=", "run {flow}:flow {ran} --from {saved}", "run {flow}:flow {ran}"),
    Case(
        "with --from it would be refused",
        "explain-restore {crashed}@1 --flow {sinks}:flow",
        "run {sinks}:moved {new} --from {crashed}@1 --drop out/committables",
    ),
    Case(
        "Two jobs must not share a place",
        "run {sinks}:flow {new} --from {crashed}@1",
        "run {sinks}:moved {new} --from {crashed}@1 --drop out/committables",
    ),
    Case(
        "and is there neither under that name nor",
        "run {sinks}:flow {emptied}",
        "run {sinks}:flow {emptied} --drop out/committables",
        traces=True,
    ),
    Case(
        "and is there neither under that name nor",
        "run {sinks}:flow {emptied}",
        "rollback {emptied}@1 ; run {sinks}:flow {emptied}",
        traces=True,
    ),
    Case(
        "and cannot be written as text",
        "export {no_text} --operator airlines --state names --to {new}.csv",
        "validate {no_text} --level full",
        shows="airlines",
    ),
    Case(
        "and cannot be written as text",
        "export {no_text} --operator airlines --state names --to {new}.csv",
        "export {no_text} --operator airlines --state names --to {new}.parquet",
    ),
    Case(
        "and cannot be in a table",
        "export {no_text} --operator airlines --state names --as iceberg --to {new}",
        "export {no_text} --operator airlines --state names --to {new}.parquet",
    ),
    Case(
        "files were exchanged or damaged, or keys of this type are hashed otherwise",
        "rewrite {misplaced} --transform count/sums={functions}:same",
        "validate {misplaced} --level full",
        shows="whose key hashes to 1 of 8",
    ),
    Case("is whole and certain to take the place of", "repair {hopeless} --yes", "repair {hopeless}"),
    Case("But it stands alone, so it may be left over", "repair {alone}", "repair {alone}@4 --yes ; repair {alone}"),
    Case("can be opened; `ckpt validate", "history {bare}", "validate {bare}"),
    Case("check it with --level full, which compares every key", "validate {old}", "validate {old} --level full"),
    Case(
        "Give one of the operators another uid first",
        "explain-restore {two_names} --parallelism 2 --drop a/b/c",
        "rewrite {two_names} --rename a/b=other ; explain-restore {two_names} --parallelism 2 --drop other/c",
    ),
    Case(
        "which that sink cannot have written for that attempt",
        "run {sinks}:flow {forged}",
        "rollback {forged}@1 ; run {sinks}:flow {forged}",
        "keep what earlier runs prepared, since it is unknown",
    ),
    Case(
        "bytes that are no rows",
        "run {flow}:long {unreadable} --resume",
        "rollback {unreadable}@2 ; run {flow}:long {unreadable}",
        traces=True,
    ),
    Case(
        "has the greatest id that there is",
        "repair {greatest} --yes",
        "copy {greatest}@5 {new} ; validate {made} --level full",
    ),
    Case(
        "`ckpt validate` lists what else is wrong",
        "export {garbled} --as csv --to {new}",
        "validate {garbled}",
        "cannot be read",
    ),
    Case(
        "the query needs more than the",
        "sql {five} 'select list(range) from range(200000000)'",
        "sql {five} 'select count(*) from range(200000000)'",
    ),
    Case(
        "the query needs more than the",
        "sql {five} 'select list(range) from range(200000000)'",
        ONE + " --to {new}.csv",
    ),
    Case(
        "cannot hold its own savepoint",
        "savepoint {five} --to {five}",
        "savepoint {five} --to {new} --timeout 0",
        "No run has answered",
    ),
    Case("shows how to use it", "inspect {five} --nothing", "inspect --help"),
    Case("--by bytes tells their size", "top {five}", "top {five} --by bytes"),
    Case(
        "segments are taken from a whole store",
        "repair {five} --restore-from {five}@1",
        "repair {lost} --restore-from {five}",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.says[:40]} {case.then.split()[0]}")
def test_what_a_refusal_advises_is_done_and_the_complaint_is_gone(case: Case, tmp_path: Path) -> None:
    tried(case, tmp_path)


@pytest.mark.parametrize("says", dict.fromkeys(case.says for case in CASES))
def test_each_option_that_a_refusal_names_is_in_the_call_or_in_what_comes_then(says: str) -> None:
    words = {word for case in CASES if case.says == says for word in (*case.call.split(), *case.then.split())}
    for sentence in (one for one in sentences() if says in one.text):
        unheard = {*sentence.options} - words
        assert not unheard, f"{sentence}: no call has {unheard}"
