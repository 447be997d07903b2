package fixtures;

import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.common.typeutils.base.StringSerializer;
import org.apache.flink.runtime.state.KeyedStateBackend;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.InternalTimer;
import org.apache.flink.streaming.api.operators.InternalTimerService;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.api.operators.Triggerable;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;

/** Keys and namespaces of variable length both: strings. */
final class Namespaced extends AbstractStreamOperator<Long>
    implements OneInputStreamOperator<Long, Long>, Triggerable<String, String> {
  private static final long serialVersionUID = 1;
  private transient InternalTimerService<String> timers;

  @Override
  public void open() throws Exception {
    super.open();
    timers = getInternalTimerService("own-timers", StringSerializer.INSTANCE, this);
  }

  @Override
  public void processElement(StreamRecord<Long> record) throws Exception {
    long number = record.getValue();
    KeyedStateBackend<Object> backend = getKeyedStateBackend();
    for (String namespace : new String[] {"", Jobs.text(number % 5), "n".repeat(300)}) {
      ValueState<Long> value =
          backend.getPartitionedState(
              namespace,
              StringSerializer.INSTANCE,
              new ValueStateDescriptor<>("value", Types.LONG));
      value.update(number);
      MapState<String, Long> map =
          backend.getPartitionedState(
              namespace,
              StringSerializer.INSTANCE,
              new MapStateDescriptor<>("map", Types.STRING, Types.LONG));
      map.put(Jobs.text(number % 6), -number);
      ListState<String> list =
          backend.getPartitionedState(
              namespace,
              StringSerializer.INSTANCE,
              new ListStateDescriptor<>("list", Types.STRING));
      list.add("e" + number);
    }
    timers.registerEventTimeTimer("zone " + number % 3, number);
  }

  @Override
  public void onEventTime(InternalTimer<String, String> timer) {}

  @Override
  public void onProcessingTime(InternalTimer<String, String> timer) {}
}
