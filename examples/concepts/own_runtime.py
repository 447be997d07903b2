"""A runtime of one's own on the library: a word count in a plain loop, with checkpoints, resumed at
another parallelism.
"""

import pyarrow as pa

import stateformat as sf
from stateformat.states import union_state, value_state

WORDS = ["to", "be", "or", "not", "to", "be"]
TOTAL = value_state("counts", "total", keys={"word": pa.string()}, values={"n": pa.int64()})
TOTAL_ROWS = pa.schema({"word": pa.string(), "n": pa.int64()})
READ = union_state("words", "read", columns={"position": pa.int64()})


def graph(parallelism: int) -> sf.JobGraph:
    words = sf.Operator("words", parallelism=1)
    counts = sf.Operator("counts", parallelism=parallelism, max_parallelism=128)
    return sf.JobGraph((words, counts), (sf.Edge("e", "words", "counts", sf.Partitioner.HASH, key_columns=("word",)),))


def run(store: sf.CheckpointStore, parallelism: int, until: int) -> dict[str, int]:
    """Count up to a position, take a checkpoint, and return what the subtasks hold."""
    permit = store.start("words")
    position, counts = 0, [dict[str, int]() for _ in range(parallelism)]
    if permit is not None:  # go on from the newest checkpoint, whatever its parallelism was
        checkpoint = permit.checkpoint()
        plan = checkpoint.plan_restore(graph(parallelism))
        position = checkpoint.restore(plan, "words", 0)["read"].table()["position"][0].as_py()
        for subtask in range(parallelism):
            rows = checkpoint.restore(plan, "counts", subtask)["total"].table().to_pylist()
            counts[subtask] = {row["word"]: row["n"] for row in rows}

    pending = store.begin(job_id="words", graph=graph(parallelism), states=[TOTAL, READ], parent=permit)
    owners = pending.context.owners("counts", "total", pa.table({"word": WORDS}))
    for word, owner in list(zip(WORDS, owners, strict=True))[position:until]:
        counts[owner][word] = counts[owner].get(word, 0) + 1
    with pending.context.subtask("words", 0) as writer:
        writer.write("read", pa.table({"position": [until]}))
    pending.add(writer)
    for subtask, own in enumerate(counts):
        with pending.context.subtask("counts", subtask) as writer:
            writer.write("total", pa.table([list(own), list(own.values())], TOTAL_ROWS))
        pending.add(writer)
    pending.publish()
    return {word: n for own in counts for word, n in own.items()}


store = sf.open("memory://words")
print(sorted(run(store, parallelism=2, until=3).items()))
print(sorted(run(store, parallelism=3, until=6).items()))

# It prints:
# [('be', 1), ('or', 1), ('to', 1)]
# [('be', 2), ('not', 1), ('or', 1), ('to', 2)]
