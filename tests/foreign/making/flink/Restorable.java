package fixtures;

import static java.nio.file.StandardCopyOption.REPLACE_EXISTING;

import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.flink.runtime.checkpoint.Checkpoints;
import org.apache.flink.runtime.checkpoint.OperatorState;
import org.apache.flink.runtime.checkpoint.OperatorSubtaskState;
import org.apache.flink.runtime.checkpoint.metadata.CheckpointMetadata;

/**
 * Partly finished operators cannot be restored alone: their predecessors must be finished too. For
 * these the metadata is written again without the finished subtasks.
 */
final class Restorable {
  private Restorable() {}

  /** The path to restore from: the given one where it will do. */
  static String of(CheckpointMetadata metadata, String path, Path directory) throws Exception {
    boolean partly = false;
    List<OperatorState> operators = new ArrayList<>();
    for (OperatorState operator : metadata.getOperatorStates()) {
      OperatorState plain = empty(operator);
      for (Map.Entry<Integer, OperatorSubtaskState> entry :
          operator.getSubtaskStates().entrySet()) {
        if (Savepoint.finished(entry.getValue())) {
          partly = true;
        } else if (!Savepoint.finished(operator)) {
          plain.putState(entry.getKey(), entry.getValue());
        }
      }
      partly |= Savepoint.finished(operator);
      if (!Savepoint.finished(operator)) {
        operators.add(plain);
      }
    }
    if (!partly) {
      return path;
    }
    Path into = Files.createDirectories(directory.resolve("restorable"));
    // Its handles are relative.
    Path from = Paths.get(path);
    try (Stream<Path> files = Files.list(from)) {
      for (Path file : files.filter(Files::isRegularFile).collect(Collectors.toList())) {
        Files.copy(file, into.resolve(file.getFileName()), REPLACE_EXISTING);
      }
    }
    try (OutputStream out = Files.newOutputStream(into.resolve("_metadata"))) {
      Checkpoints.storeCheckpointMetadata(
          new CheckpointMetadata(
              metadata.getCheckpointId(), operators, metadata.getMasterStates()),
          out);
    }
    return into.toUri().toString();
  }

  private static OperatorState empty(OperatorState operator) throws Exception {
    for (java.lang.reflect.Constructor<?> maker : OperatorState.class.getConstructors()) {
      if (maker.getParameterCount() == 5) {
        return (OperatorState)
            maker.newInstance(
                null,
                null,
                operator.getOperatorID(),
                operator.getParallelism(),
                operator.getMaxParallelism());
      }
    }
    return OperatorState.class
        .getConstructor(operator.getOperatorID().getClass(), int.class, int.class)
        .newInstance(
            operator.getOperatorID(), operator.getParallelism(), operator.getMaxParallelism());
  }
}
