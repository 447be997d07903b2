package fixtures;

import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.flink.api.common.JobStatus;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.java.functions.KeySelector;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.runtime.checkpoint.OperatorState;
import org.apache.flink.runtime.checkpoint.metadata.CheckpointMetadata;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.transformations.OneInputTransformation;

/**
 * Lines of standard input are orders: {@code make JOB BACKEND FORM DIR}, with FORM canonical, native
 * or checkpoint, and behind it +snappy, +inline, +changelog, +full (not incremental), +heap (timers on
 * the heap); {@code dump DIR BACKEND PARALLELISM OUT}, with parallelism 0 for that of the savepoint.
 */
public final class Main {
  private Main() {}

  public static void main(String[] args) throws Exception {
    for (String order : Files.readAllLines(Paths.get(args[0]))) {
      try {
        carryOut(order);
      } catch (Throwable error) {
        System.err.println("failed: " + order);
        error.printStackTrace();
        System.exit(1);
      }
      System.out.println("done " + order);
    }
    System.exit(0);
  }

  private static void carryOut(String order) throws Exception {
      String[] words = order.trim().split("\\s+");
      if (words[0].equals("make")) {
        make(words[1], words[2], words[3], Paths.get(words[4]));
      } else if (words[0].equals("dump")) {
        dump(words[1], words[2], Integer.parseInt(words[3]), Paths.get(words[4]));
      }
  }

  private static void set(Configuration configuration, String value, String... names) {
    for (String name : names) {
      configuration.setString(name, value);
    }
  }

  private static Configuration settings(String backend, String form, Path directory) {
    Configuration found = new Configuration();
    set(found, backend, "state.backend", "state.backend.type");
    set(found, directory.toUri().toString(), "state.checkpoints.dir", "execution.checkpointing.dir");
    String inline = form.contains("+inline") ? "20kb" : "0b";
    set(
        found,
        inline,
        "state.storage.fs.memory-threshold",
        "execution.checkpointing.data-inline-threshold");
    String incremental = Boolean.toString(!form.contains("+full"));
    set(found, incremental, "state.backend.incremental", "execution.checkpointing.incremental");
    if (form.contains("+heap")) {
      set(found, "HEAP", "state.backend.rocksdb.timer-service.factory");
    }
    set(
        found,
        "RETAIN_ON_CANCELLATION",
        "execution.checkpointing.externalized-checkpoint-retention");
    set(found, "true", "execution.checkpointing.checkpoints-after-tasks-finish.enabled");
    set(found, "none", "restart-strategy", "restart-strategy.type");
    if (form.contains("+changelog")) {
      set(found, "true", "state.backend.changelog.enabled", "state.changelog.enabled");
      set(found, "filesystem", "state.backend.changelog.storage", "state.changelog.storage");
      set(found, directory.resolve("changelog").toUri().toString(), "dstl.dfs.base-path");
    }
    return found;
  }

  private static void make(String job, String backend, String form, Path directory)
      throws Exception {
    Control.reset();
    Files.createDirectories(directory);
    Configuration settings = settings(backend, form, directory);
    boolean checkpoint = form.startsWith("checkpoint");
    if (checkpoint || Jobs.endsBefore(job)) {
      set(settings, "200ms", "execution.checkpointing.interval");
    }
    set(settings, jobId(job + form), "$internal.pipeline.job-id");
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(2, settings);
    env.getConfig().setUseSnapshotCompression(form.contains("+snappy"));
    long end = Jobs.build(job, env);
    JobClient client = env.executeAsync(job);
    try {
      long phases = checkpoint ? 3 : 1;
      for (long phase = 1; phase <= phases; phase++) {
        Control.raise(end * phase / phases);
        await(client, () -> Control.EMITTED.get() >= Jobs.emitted(Control.limit));
        if (checkpoint || Jobs.endsBefore(job)) {
          long before = Control.COMPLETED.get();
          await(client, () -> Control.COMPLETED.get() >= before + 8);
        }
      }
      if (!checkpoint) {
        savepoint(client, directory, form.startsWith("native"));
      }
    } finally {
      CompletableFuture<Void> ended = client.getJobExecutionResult().handle((result, error) -> null);
      client.cancel().get(30, TimeUnit.SECONDS);
      ended.get(30, TimeUnit.SECONDS);
    }
  }

  private static String jobId(String text) {
    return String.format("%032x", text.hashCode() & 0xffffffffL);
  }

  private static void await(JobClient client, BooleanSupplier reached) throws Exception {
    long until = System.currentTimeMillis() + 60_000;
    while (!reached.getAsBoolean()) {
      JobStatus status = client.getJobStatus().get();
      if (status.isTerminalState()) {
        client.getJobExecutionResult().get();
        throw new IllegalStateException("the job is " + status);
      }
      if (System.currentTimeMillis() > until) {
        throw new IllegalStateException("waited for a minute; emitted " + Control.EMITTED);
      }
      Thread.sleep(20);
    }
  }

  /** Takes a savepoint into the directory itself, not into one below it. */
  private static void savepoint(JobClient client, Path directory, boolean isNative)
      throws Exception {
    Path into = directory.resolve("taken");
    String taken = null;
    for (int tries = 0; taken == null; tries++) {
      try {
        taken = trigger(client, into.toString(), isNative).get(60, TimeUnit.SECONDS);
      } catch (ExecutionException error) {
        // Until all tasks run.
        if (tries == 50) {
          throw error;
        }
        Thread.sleep(100);
      }
    }
    Path found = Paths.get(java.net.URI.create(taken));
    try (Stream<Path> files = Files.list(found)) {
      for (Path file : files.collect(Collectors.toList())) {
        Files.move(file, directory.resolve(file.getFileName()));
      }
    }
    Files.delete(found);
    Files.delete(into);
  }

  /** Flink 1.13 and 1.14 know one form only. */
  private static CompletableFuture<String> trigger(JobClient client, String into, boolean isNative)
      throws ReflectiveOperationException {
    for (Method method : JobClient.class.getMethods()) {
      if (method.getName().equals("triggerSavepoint") && method.getParameterCount() == 2) {
        Class<?> forms = method.getParameterTypes()[1];
        Object form = forms.getField(isNative ? "NATIVE" : "CANONICAL").get(null);
        return future(method.invoke(client, into, form));
      }
    }
    return future(JobClient.class.getMethod("triggerSavepoint", String.class).invoke(client, into));
  }

  @SuppressWarnings("unchecked")
  private static CompletableFuture<String> future(Object given) {
    return (CompletableFuture<String>) given;
  }

  /** The folder itself, or the newest checkpoint of a job below it. */
  private static String checkpoint(String path) throws Exception {
    try (Stream<Path> files = Files.walk(Paths.get(path), 3)) {
      return files
          .filter(file -> file.endsWith("_metadata"))
          .max(Comparator.naturalOrder())
          .get()
          .getParent()
          .toString();
    }
  }

  /** Restores operators that say what they were given. */
  private static void dump(String path, String backend, int parallelism, Path out)
      throws Exception {
    Control.reset();
    path = checkpoint(path);
    CheckpointMetadata metadata = Savepoint.load(path);
    Path unused = Files.createTempDirectory("dump");
    Configuration settings = settings(backend, "", unused);
    set(settings, Restorable.of(metadata, path, unused), "execution.savepoint.path", "execution.state-recovery.path");
    set(
        settings,
        "true",
        "execution.savepoint.ignore-unclaimed-state",
        "execution.state-recovery.ignore-unclaimed-state");
    int widest = 1;
    for (OperatorState operator : metadata.getOperatorStates()) {
      widest = Math.max(widest, Math.max(parallelism, operator.getParallelism()));
    }
    StreamExecutionEnvironment env =
        StreamExecutionEnvironment.createLocalEnvironment(widest, settings);
    env.disableOperatorChaining();
    DataStream<Long> nothing =
        env.fromSource(
                new Numbers(0, Integer.MAX_VALUE),
                WatermarkStrategy.noWatermarks(),
                "nothing",
                Types.LONG)
            .setParallelism(1);
    int operators = 0;
    for (OperatorState operator : metadata.getOperatorStates()) {
      List<Savepoint.State> states = Savepoint.states(operator);
      if (!states.isEmpty()) {
        int width = parallelism == 0 ? operator.getParallelism() : parallelism;
        restored(nothing, operator, states, width);
        operators++;
      }
    }
    if (operators > 0) {
      env.execute("dump");
    }
    List<String> lines = new ArrayList<>(Control.LINES);
    lines.sort(null);
    Files.write(out, lines, StandardCharsets.US_ASCII);
    String facts = out.getFileName().toString().replace(".jsonl", "_metadata.jsonl");
    Files.write(out.resolveSibling(facts), Savepoint.facts(metadata), StandardCharsets.US_ASCII);
  }

  @SuppressWarnings({"unchecked", "rawtypes"})
  private static void restored(
      DataStream<Long> nothing,
      OperatorState operator,
      List<Savepoint.State> states,
      int parallelism) {
    String id = operator.getOperatorID().toHexString();
    Object uid = Json.call(operator, "getOperatorUid");
    boolean named = uid instanceof Optional && ((Optional<?>) uid).isPresent();
    String said = named ? ((Optional<?>) uid).get().toString() : id;
    Dump dump = new Dump(said, operator.getMaxParallelism(), states);
    SingleOutputStreamOperator<Long> stream =
        nothing
            .rebalance()
            .transform("dump", Types.LONG, dump)
            .setParallelism(parallelism)
            .setMaxParallelism(operator.getMaxParallelism());
    stream.setUidHash(id);
    for (Savepoint.State state : states) {
      if (state.key != null && !state.kind.equals("BROADCAST")) {
        OneInputTransformation transformation =
            (OneInputTransformation) stream.getTransformation();
        transformation.setStateKeySelector((KeySelector<Long, Object>) number -> number);
        transformation.setStateKeyType(new Restored<>((TypeSerializer<Object>) state.key));
      }
    }
  }
}
