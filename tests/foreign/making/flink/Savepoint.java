package fixtures;

import java.io.DataInputStream;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.TypeSerializerSnapshot;
import org.apache.flink.core.fs.FSDataInputStream;
import org.apache.flink.core.memory.DataInputViewStreamWrapper;
import org.apache.flink.runtime.checkpoint.Checkpoints;
import org.apache.flink.runtime.checkpoint.OperatorState;
import org.apache.flink.runtime.checkpoint.OperatorSubtaskState;
import org.apache.flink.runtime.checkpoint.metadata.CheckpointMetadata;
import org.apache.flink.runtime.state.CompletedCheckpointStorageLocation;
import org.apache.flink.runtime.state.KeyGroupsStateHandle;
import org.apache.flink.runtime.state.KeyedBackendSerializationProxy;
import org.apache.flink.runtime.state.KeyedStateHandle;
import org.apache.flink.runtime.state.OperatorBackendSerializationProxy;
import org.apache.flink.runtime.state.OperatorStateHandle;
import org.apache.flink.runtime.state.StreamStateHandle;
import org.apache.flink.runtime.state.filesystem.AbstractFsCheckpointStorageAccess;
import org.apache.flink.runtime.state.metainfo.StateMetaInfoSnapshot;
import org.apache.flink.runtime.state.metainfo.StateMetaInfoSnapshot.BackendStateType;
import org.apache.flink.runtime.state.metainfo.StateMetaInfoSnapshot.CommonOptionsKeys;
import org.apache.flink.runtime.state.metainfo.StateMetaInfoSnapshot.CommonSerializerKeys;
import org.apache.flink.streaming.api.operators.TimerSerializer;

/** What a savepoint says of its operators and states: read by Flink's own classes. */
final class Savepoint {
  private Savepoint() {}

  /** One state as its header describes it. */
  static final class State implements Serializable {
    private static final long serialVersionUID = 1;
    String name;
    String kind;
    TypeSerializer<?> key;
    TypeSerializer<?> namespace;
    TypeSerializer<?> value;
  }

  static CheckpointMetadata load(String path) throws Exception {
    CompletedCheckpointStorageLocation at =
        AbstractFsCheckpointStorageAccess.resolveCheckpointPointer(path);
    try (DataInputStream in = new DataInputStream(at.getMetadataHandle().openInputStream())) {
      ClassLoader loader = Savepoint.class.getClassLoader();
      return Checkpoints.loadCheckpointMetadata(in, loader, at.getExternalPointer());
    }
  }

  /** The states of an operator by name, from the headers of all its subtasks; keyed ones first. */
  static List<State> states(OperatorState operator) throws Exception {
    Map<String, State> found = new LinkedHashMap<>();
    for (OperatorSubtaskState subtask : operator.getStates()) {
      for (KeyedStateHandle handle : subtask.getManagedKeyedState()) {
        keyed(header(handle), found);
      }
      for (KeyedStateHandle handle : subtask.getRawKeyedState()) {
        timers((KeyGroupsStateHandle) handle, found);
      }
      for (OperatorStateHandle handle : subtask.getManagedOperatorState()) {
        ofOperator(handle, found);
      }
    }
    return new ArrayList<>(found.values());
  }

  private static StreamStateHandle header(KeyedStateHandle handle) {
    if (handle instanceof KeyGroupsStateHandle) {
      return ((KeyGroupsStateHandle) handle).getDelegateStateHandle();
    }
    for (String getter : new String[] {"getMetaDataStateHandle", "getMetaStateHandle"}) {
      Object found = Json.call(handle, getter);
      if (found != null) {
        return (StreamStateHandle) found;
      }
    }
    throw new IllegalArgumentException("no header known of " + handle.getClass());
  }

  private static void keyed(StreamStateHandle stream, Map<String, State> found) throws Exception {
    try (FSDataInputStream in = stream.openInputStream()) {
      KeyedBackendSerializationProxy<?> proxy =
          new KeyedBackendSerializationProxy<>(Savepoint.class.getClassLoader());
      proxy.read(new DataInputViewStreamWrapper(in));
      for (StateMetaInfoSnapshot described : proxy.getStateMetaInfoSnapshots()) {
        State state = new State();
        state.name = described.getName();
        state.key = proxy.getKeySerializerSnapshot().restoreSerializer();
        state.value = serializer(described, CommonSerializerKeys.VALUE_SERIALIZER);
        if (described.getBackendStateType() == BackendStateType.PRIORITY_QUEUE) {
          state.kind = "TIMERS";
        } else {
          state.kind = described.getOption(CommonOptionsKeys.KEYED_STATE_TYPE);
          state.namespace = serializer(described, CommonSerializerKeys.NAMESPACE_SERIALIZER);
        }
        found.putIfAbsent(state.name, state);
      }
    }
  }

  /** Timers on the heap, beside RocksDB: every key group has the serializers of all services. */
  private static void timers(KeyGroupsStateHandle handle, Map<String, State> found)
      throws Exception {
    try (FSDataInputStream in = handle.openInputStream()) {
      in.seek(handle.getGroupRangeOffsets().iterator().next().f1);
      DataInputViewStreamWrapper view = new DataInputViewStreamWrapper(in);
      view.readLong();
      int services = view.readInt();
      for (int service = 0; service < services; service++) {
        String name = view.readUTF();
        TypeSerializer<?> key = serializer(view);
        TypeSerializer<?> namespace = serializer(view);
        for (String domain : new String[] {"event", "processing"}) {
          for (int left = view.readInt(); left > 0; left--) {
            key.deserialize(view);
            namespace.deserialize(view);
            view.readLong();
          }
          State state = new State();
          state.name = "_timer_state/" + domain + "_" + name;
          state.kind = "TIMERS";
          state.key = key;
          state.value = new TimerSerializer<>(key, namespace);
          found.putIfAbsent(state.name, state);
        }
      }
    }
  }

  private static TypeSerializer<?> serializer(DataInputViewStreamWrapper view) throws Exception {
    ClassLoader loader = Savepoint.class.getClassLoader();
    return TypeSerializerSnapshot.readVersionedSnapshot(view, loader).restoreSerializer();
  }

  private static void ofOperator(OperatorStateHandle handle, Map<String, State> found)
      throws Exception {
    try (FSDataInputStream in = handle.openInputStream()) {
      OperatorBackendSerializationProxy proxy =
          new OperatorBackendSerializationProxy(Savepoint.class.getClassLoader());
      proxy.read(new DataInputViewStreamWrapper(in));
      for (StateMetaInfoSnapshot described : proxy.getOperatorStateMetaInfoSnapshots()) {
        State state = new State();
        state.name = described.getName();
        state.kind = described.getOption(CommonOptionsKeys.OPERATOR_STATE_DISTRIBUTION_MODE);
        state.value = serializer(described, CommonSerializerKeys.VALUE_SERIALIZER);
        found.putIfAbsent(state.name, state);
      }
      for (StateMetaInfoSnapshot described : proxy.getBroadcastStateMetaInfoSnapshots()) {
        State state = new State();
        state.name = described.getName();
        state.kind = "BROADCAST";
        state.key = serializer(described, CommonSerializerKeys.KEY_SERIALIZER);
        state.value = serializer(described, CommonSerializerKeys.VALUE_SERIALIZER);
        found.putIfAbsent(state.name, state);
      }
    }
  }

  private static TypeSerializer<?> serializer(
      StateMetaInfoSnapshot described, CommonSerializerKeys role) {
    return described.getTypeSerializerSnapshot(role).restoreSerializer();
  }

  /** The facts of the metadata, a line of JSON an operator. */
  static List<String> facts(CheckpointMetadata metadata) throws Exception {
    List<String> lines = new ArrayList<>();
    lines.add("{\"checkpoint_id\": " + metadata.getCheckpointId() + "}");
    for (OperatorState operator : metadata.getOperatorStates()) {
      List<String> finished = new ArrayList<>();
      List<String> subtasks = new ArrayList<>();
      for (Map.Entry<Integer, OperatorSubtaskState> entry :
          operator.getSubtaskStates().entrySet()) {
        if (finished(entry.getValue())) {
          finished.add(entry.getKey().toString());
        } else {
          subtasks.add(entry.getKey().toString());
        }
      }
      byte[] coordinator =
          operator.getCoordinatorState() == null
              ? null
              : operator.getCoordinatorState().getData();
      lines.add(
          "{\"operator\": "
              + Json.text(operator.getOperatorID().toHexString())
              + ", \"uid\": "
              + optional(Json.call(operator, "getOperatorUid"))
              + ", \"name\": "
              + optional(Json.call(operator, "getOperatorName"))
              + ", \"parallelism\": "
              + operator.getParallelism()
              + ", \"max_parallelism\": "
              + operator.getMaxParallelism()
              + ", \"fully_finished\": "
              + finished(operator)
              + ", \"finished\": ["
              + String.join(", ", finished)
              + "], \"subtasks\": ["
              + String.join(", ", subtasks)
              + "], \"coordinator\": "
              + (coordinator == null ? "null" : Json.hex(coordinator))
              + "}");
    }
    return lines;
  }

  /** Flink 1.13 has no such operators. */
  static boolean finished(Object operatorOrSubtask) {
    String getter = operatorOrSubtask instanceof OperatorState ? "isFullyFinished" : "isFinished";
    return Boolean.TRUE.equals(Json.call(operatorOrSubtask, getter));
  }

  private static String optional(Object value) {
    if (value instanceof java.util.Optional && ((java.util.Optional<?>) value).isPresent()) {
      return Json.text(((java.util.Optional<?>) value).get().toString());
    }
    return "null";
  }
}
