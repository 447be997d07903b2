package fixtures;

import java.util.Queue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicLong;

/** What the jobs of one process share with the program that runs them. */
final class Control {
  /** Sources emit numbers below this one, then wait. */
  static volatile long limit;

  /** How many numbers all sources have emitted since {@link #reset}. */
  static final AtomicLong EMITTED = new AtomicLong();

  /** Checkpoints that a source has been told are complete. */
  static final AtomicLong COMPLETED = new AtomicLong();

  /** Lines that restored operators said. */
  static final Queue<String> LINES = new ConcurrentLinkedQueue<>();

  private static volatile CompletableFuture<Void> raised = new CompletableFuture<>();

  private Control() {}

  static void reset() {
    limit = 0;
    EMITTED.set(0);
    COMPLETED.set(0);
    LINES.clear();
  }

  static synchronized void raise(long to) {
    limit = to;
    CompletableFuture<Void> before = raised;
    raised = new CompletableFuture<>();
    before.complete(null);
  }

  static CompletableFuture<Void> raised() {
    return raised;
  }
}
