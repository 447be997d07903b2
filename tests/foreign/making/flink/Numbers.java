package fixtures;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.apache.flink.api.connector.source.Boundedness;
import org.apache.flink.api.connector.source.ReaderOutput;
import org.apache.flink.api.connector.source.Source;
import org.apache.flink.api.connector.source.SourceReader;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.connector.source.SourceSplit;
import org.apache.flink.api.connector.source.SplitEnumerator;
import org.apache.flink.api.connector.source.SplitEnumeratorContext;
import org.apache.flink.core.io.InputStatus;
import org.apache.flink.core.io.SimpleVersionedSerializer;

/**
 * Emits 0, 1, 2 … below {@code Control.limit}, dealt over its readers; it waits at the limit, except
 * that the readers below {@code ending} end when they have emitted {@code end}.
 */
final class Numbers implements Source<Long, Numbers.Split, String> {
  private static final long serialVersionUID = 1;
  private final long end;
  private final int ending;

  /** @param ending how many of its readers end at {@code end}. */
  Numbers(long end, int ending) {
    this.end = end;
    this.ending = ending;
  }

  /** The numbers that one reader emits. */
  static final class Split implements SourceSplit, java.io.Serializable {
    private static final long serialVersionUID = 1;
    final int reader;
    final int readers;
    final long next;

    Split(int reader, int readers, long next) {
      this.reader = reader;
      this.readers = readers;
      this.next = next;
    }

    @Override
    public String splitId() {
      return "numbers-" + reader;
    }
  }

  @Override
  public Boundedness getBoundedness() {
    return Boundedness.CONTINUOUS_UNBOUNDED;
  }

  @Override
  public SourceReader<Long, Split> createReader(SourceReaderContext context) {
    return new Reader(end, context.getIndexOfSubtask() < ending);
  }

  @Override
  public SplitEnumerator<Split, String> createEnumerator(SplitEnumeratorContext<Split> context) {
    return new Enumerator(context, "");
  }

  @Override
  public SplitEnumerator<Split, String> restoreEnumerator(
      SplitEnumeratorContext<Split> context, String given) {
    return new Enumerator(context, given);
  }

  @Override
  public SimpleVersionedSerializer<Split> getSplitSerializer() {
    return new SimpleVersionedSerializer<Split>() {
      @Override
      public int getVersion() {
        return 7;
      }

      @Override
      public byte[] serialize(Split split) {
        String text = split.reader + "/" + split.readers + ":" + split.next;
        return text.getBytes(StandardCharsets.UTF_8);
      }

      @Override
      public Split deserialize(int version, byte[] bytes) {
        String[] found = new String(bytes, StandardCharsets.UTF_8).split("[/:]");
        return new Split(
            Integer.parseInt(found[0]), Integer.parseInt(found[1]), Long.parseLong(found[2]));
      }
    };
  }

  @Override
  public SimpleVersionedSerializer<String> getEnumeratorCheckpointSerializer() {
    return new SimpleVersionedSerializer<String>() {
      @Override
      public int getVersion() {
        return 3;
      }

      @Override
      public byte[] serialize(String given) {
        return given.getBytes(StandardCharsets.UTF_8);
      }

      @Override
      public String deserialize(int version, byte[] bytes) {
        return new String(bytes, StandardCharsets.UTF_8);
      }
    };
  }

  private static final class Enumerator implements SplitEnumerator<Split, String> {
    private final SplitEnumeratorContext<Split> context;
    private String given;

    Enumerator(SplitEnumeratorContext<Split> context, String given) {
      this.context = context;
      this.given = given;
    }

    @Override
    public void start() {}

    @Override
    public void handleSplitRequest(int subtask, String host) {}

    @Override
    public void addSplitsBack(List<Split> splits, int subtask) {}

    @Override
    public void addReader(int subtask) {
      if (!given.contains("[" + subtask + "]")) {
        given += "[" + subtask + "]";
        Split split = new Split(subtask, context.currentParallelism(), subtask);
        context.assignSplit(split, subtask);
      }
    }

    @Override
    public String snapshotState(long checkpoint) {
      return given;
    }

    @Override
    public void close() {}
  }

  private static final class Reader implements SourceReader<Long, Split> {
    private final long end;
    private final boolean ending;
    private final List<Split> splits = new ArrayList<>();
    private CompletableFuture<Void> assigned = new CompletableFuture<>();

    Reader(long end, boolean ending) {
      this.end = end;
      this.ending = ending;
    }

    @Override
    public void start() {}

    @Override
    public InputStatus pollNext(ReaderOutput<Long> output) {
      if (splits.isEmpty()) {
        return InputStatus.NOTHING_AVAILABLE;
      }
      Split split = splits.get(0);
      if (split.next >= end && ending) {
        return InputStatus.END_OF_INPUT;
      }
      if (split.next >= Math.min(end, Control.limit)) {
        return InputStatus.NOTHING_AVAILABLE;
      }
      output.collect(split.next, split.next * 1000);
      splits.set(0, new Split(split.reader, split.readers, split.next + split.readers));
      Control.EMITTED.incrementAndGet();
      return InputStatus.MORE_AVAILABLE;
    }

    @Override
    public List<Split> snapshotState(long checkpoint) {
      return new ArrayList<>(splits);
    }

    @Override
    public CompletableFuture<Void> isAvailable() {
      if (splits.isEmpty()) {
        return assigned;
      }
      CompletableFuture<Void> raised = Control.raised();
      long next = splits.get(0).next;
      boolean more = next < Math.min(end, Control.limit) || (next >= end && ending);
      return more ? CompletableFuture.completedFuture(null) : raised;
    }

    @Override
    public void addSplits(List<Split> given) {
      splits.addAll(given);
      assigned.complete(null);
    }

    @Override
    public void notifyNoMoreSplits() {}

    @Override
    public void notifyCheckpointComplete(long checkpoint) {
      Control.COMPLETED.incrementAndGet();
    }

    @Override
    public void close() {}
  }

}
