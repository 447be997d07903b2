package fixtures;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.state.AggregatingState;
import org.apache.flink.api.common.state.AggregatingStateDescriptor;
import org.apache.flink.api.common.state.BroadcastState;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.OperatorStateStore;
import org.apache.flink.api.common.state.ReducingState;
import org.apache.flink.api.common.state.ReducingStateDescriptor;
import org.apache.flink.api.common.state.State;
import org.apache.flink.api.common.state.StateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.runtime.state.KeyGroupRangeAssignment;
import org.apache.flink.runtime.state.KeyedStateBackend;
import org.apache.flink.runtime.state.StateInitializationContext;
import org.apache.flink.runtime.state.ttl.TtlValue;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.InternalTimer;
import org.apache.flink.streaming.api.operators.InternalTimerService;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.api.operators.TimerSerializer;
import org.apache.flink.streaming.api.operators.Triggerable;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;

/** Is restored with the state of any operator, and says all of it when it opens. */
final class Dump extends AbstractStreamOperator<Long>
    implements OneInputStreamOperator<Long, Long>, Triggerable<Object, Object> {
  private static final long serialVersionUID = 1;
  private static final String TIMERS = "_timer_state/";
  private final String operator;
  private final int maxParallelism;
  private final ArrayList<Savepoint.State> states;

  Dump(String operator, int maxParallelism, List<Savepoint.State> states) {
    this.operator = operator;
    this.maxParallelism = maxParallelism;
    this.states = new ArrayList<>(states);
  }

  @Override
  public void initializeState(StateInitializationContext context) throws Exception {
    super.initializeState(context);
    for (Savepoint.State state : states) {
      if (state.namespace == null && !state.kind.equals("TIMERS")) {
        ofOperator(state, context.getOperatorStateStore());
      }
    }
  }

  @Override
  public void open() throws Exception {
    super.open();
    for (Savepoint.State state : states) {
      if (state.kind.equals("TIMERS")) {
        timers(state);
      } else if (state.namespace != null) {
        keyed(state);
      }
    }
  }

  @SuppressWarnings("unchecked")
  private void ofOperator(Savepoint.State state, OperatorStateStore store) throws Exception {
    if (state.kind.equals("BROADCAST")) {
      BroadcastState<Object, Object> found =
          store.getBroadcastState(
              new MapStateDescriptor<>(
                  state.name,
                  (TypeSerializer<Object>) state.key,
                  (TypeSerializer<Object>) state.value));
      for (Map.Entry<Object, Object> entry : found.entries()) {
        say(state, "key", Json.of(state.key, entry.getKey()), "value", value(state, entry));
      }
      return;
    }
    ListStateDescriptor<Object> descriptor =
        new ListStateDescriptor<>(state.name, (TypeSerializer<Object>) state.value);
    boolean union = state.kind.equals("UNION");
    ListState<Object> found =
        union ? store.getUnionListState(descriptor) : store.getListState(descriptor);
    int index = 0;
    for (Object item : found.get()) {
      String said = Json.of(state.value, item);
      say(state, "index", Integer.toString(index++), "value", said);
    }
  }

  private static String value(Savepoint.State state, Map.Entry<?, ?> entry) throws Exception {
    return Json.of(state.value, entry.getValue());
  }

  @SuppressWarnings("unchecked")
  private void timers(Savepoint.State state) throws Exception {
    TimerSerializer<Object, Object> serializer = (TimerSerializer<Object, Object>) state.value;
    TypeSerializer<Object> namespaces = serializer.getNamespaceSerializer();
    boolean event = state.name.startsWith(TIMERS + "event_");
    String service = state.name.substring(state.name.indexOf('_', TIMERS.length()) + 1);
    InternalTimerService<Object> timers = getInternalTimerService(service, namespaces, this);
    KeyedStateBackend<Object> backend = getKeyedStateBackend();
    List<String[]> found = new ArrayList<>();
    org.apache.flink.util.function.BiConsumerWithException<Object, Long, Exception> each =
        (namespace, at) -> {
          Object key = backend.getCurrentKey();
          say(
              state,
              "key_group",
              group(key),
              "key",
              Json.of(serializer.getKeySerializer(), key),
              "namespace",
              Json.of(namespaces, namespace),
              "timestamp",
              Long.toString(at));
        };
    if (event) {
      timers.forEachEventTimeTimer(each);
    } else {
      timers.forEachProcessingTimeTimer(each);
    }
  }

  private String group(Object key) {
    return Integer.toString(KeyGroupRangeAssignment.assignToKeyGroup(key, maxParallelism));
  }

  @SuppressWarnings("unchecked")
  private void keyed(Savepoint.State state) throws Exception {
    KeyedStateBackend<Object> backend = getKeyedStateBackend();
    StateDescriptor<State, Object> descriptor = (StateDescriptor<State, Object>) describe(state);
    TypeSerializer<Object> namespaces = (TypeSerializer<Object>) state.namespace;
    backend.getOrCreateKeyedState(namespaces, descriptor);
    Map<String, Tuple2<Object, Object>> entries = new LinkedHashMap<>();
    try (Stream<Tuple2<Object, Object>> stream = backend.getKeysAndNamespaces(state.name)) {
      for (Tuple2<Object, Object> entry : stream.collect(Collectors.toList())) {
        entries.put(
            Json.hex(Json.bytes(state.key, entry.f0))
                + Json.hex(Json.bytes(state.namespace, entry.f1)),
            entry);
      }
    }
    for (Tuple2<Object, Object> entry : entries.values()) {
      backend.setCurrentKey(entry.f0);
      State held = backend.getPartitionedState(entry.f1, namespaces, descriptor);
      entry(state, descriptor, held, entry);
    }
  }

  @SuppressWarnings("unchecked")
  private void entry(
      Savepoint.State state, StateDescriptor<?, ?> descriptor, State held, Tuple2<?, ?> entry)
      throws Exception {
    String group = group(entry.f0);
    String key = Json.of(state.key, entry.f0);
    String namespace = Json.of(state.namespace, entry.f1);
    if (held instanceof MapState) {
      MapStateDescriptor<?, ?> map = (MapStateDescriptor<?, ?>) descriptor;
      for (Map.Entry<Object, Object> item : ((MapState<Object, Object>) held).entries()) {
        String[] head = {"key_group", group, "key", key, "namespace", namespace, "map_key"};
        say(state, head, map.getKeySerializer(), item.getKey(), map.getValueSerializer(), item.getValue());
      }
    } else if (held instanceof ListState) {
      TypeSerializer<?> element = ((ListStateDescriptor<?>) descriptor).getElementSerializer();
      int index = 0;
      for (Object item : ((ListState<Object>) held).get()) {
        String[] head = {"key_group", group, "key", key, "namespace", namespace, "index"};
        say(state, head, null, index++, element, item);
      }
    } else {
      Object value =
          held instanceof ValueState
              ? ((ValueState<Object>) held).value()
              : held instanceof ReducingState
                  ? ((ReducingState<Object>) held).get()
                  : ((AggregatingState<Object, Object>) held).get();
      String[] head = {"key_group", group, "key", key, "namespace", namespace};
      say(state, head, null, null, state.value, value);
    }
  }

  @SuppressWarnings("unchecked")
  private static StateDescriptor<?, ?> describe(Savepoint.State state) {
    TypeSerializer<Object> value = (TypeSerializer<Object>) state.value;
    switch (state.kind) {
      case "VALUE":
        return new ValueStateDescriptor<>(state.name, value);
      case "REDUCING":
        return new ReducingStateDescriptor<>(state.name, (one, other) -> one, value);
      case "AGGREGATING":
        return new AggregatingStateDescriptor<>(state.name, new Held(), value);
      case "LIST":
        TypeSerializer<Object> element =
            (TypeSerializer<Object>) Json.call(value, "getElementSerializer");
        return new ListStateDescriptor<>(state.name, element);
      case "MAP":
        TypeSerializer<Object> key = (TypeSerializer<Object>) Json.call(value, "getKeySerializer");
        TypeSerializer<Object> held =
            (TypeSerializer<Object>) Json.call(value, "getValueSerializer");
        return new MapStateDescriptor<>(state.name, key, held);
      default:
        throw new IllegalArgumentException(state.kind);
    }
  }

  /** Gives out the accumulator itself. */
  static final class Held implements AggregateFunction<Object, Object, Object> {
    private static final long serialVersionUID = 1;

    @Override
    public Object createAccumulator() {
      throw new UnsupportedOperationException();
    }

    @Override
    public Object add(Object value, Object held) {
      throw new UnsupportedOperationException();
    }

    @Override
    public Object getResult(Object held) {
      return held;
    }

    @Override
    public Object merge(Object one, Object other) {
      throw new UnsupportedOperationException();
    }
  }

  private void say(
      Savepoint.State state,
      String[] head,
      TypeSerializer<?> keys,
      Object mapKey,
      TypeSerializer<?> values,
      Object value)
      throws Exception {
    List<String> said = new ArrayList<>(List.of(head));
    if (said.size() % 2 == 1) {
      said.add(Json.of(keys, mapKey));
    }
    Object held = value;
    String shown = Json.of(values, value);
    if (held instanceof TtlValue) {
      said.add("ttl_last_access");
      said.add(Long.toString(((TtlValue<?>) held).getLastAccessTimestamp()));
      shown = shown.substring(shown.indexOf("\"value\": ") + 9, shown.length() - 1);
    }
    said.add("value");
    said.add(shown);
    say(state, said.toArray(new String[0]));
  }

  private void say(Savepoint.State state, String... pairs) {
    StringBuilder line = new StringBuilder("{\"operator\":" + Json.text(operator));
    line.append(",\"state\":").append(Json.text(state.name));
    line.append(",\"kind\":").append(Json.text(state.kind));
    line.append(",\"subtask\":").append(subtask());
    for (int i = 0; i < pairs.length; i += 2) {
      if (!(pairs[i].equals("namespace") && pairs[i + 1].equals("null"))) {
        line.append(",\"").append(pairs[i]).append("\":").append(pairs[i + 1]);
      }
    }
    Control.LINES.add(line.append("}").toString());
  }

  private int subtask() {
    Object context = getRuntimeContext();
    Object task = Json.call(context, "getTaskInfo");
    return (Integer) Json.call(task == null ? context : task, "getIndexOfThisSubtask");
  }

  @Override
  public void processElement(StreamRecord<Long> record) {}

  @Override
  public void onEventTime(InternalTimer<Object, Object> timer) {}

  @Override
  public void onProcessingTime(InternalTimer<Object, Object> timer) {}
}
