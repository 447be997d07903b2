package fixtures;

import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;
import org.apache.flink.streaming.api.functions.co.BroadcastProcessFunction;
import org.apache.flink.util.Collector;

/** List, union and broadcast state of an operator. */
final class Shared extends BroadcastProcessFunction<Long, Long, Long>
    implements CheckpointedFunction {
  private static final long serialVersionUID = 1;
  static final MapStateDescriptor<String, Long> RULES =
      new MapStateDescriptor<>("rules", Types.STRING, Types.LONG);
  private transient ListState<Long> split;
  private transient ListState<String> union;
  private transient ListState<Pojos.Inner> pojos;
  private transient ListState<java.util.BitSet> opaque;

  @Override
  public void initializeState(FunctionInitializationContext context) throws Exception {
    split =
        context
            .getOperatorStateStore()
            .getListState(new ListStateDescriptor<>("split", Types.LONG));
    union =
        context
            .getOperatorStateStore()
            .getUnionListState(new ListStateDescriptor<>("union", Types.STRING));
    pojos =
        context
            .getOperatorStateStore()
            .getListState(
                new ListStateDescriptor<>("pojos", TypeInformation.of(Pojos.Inner.class)));
    opaque =
        context
            .getOperatorStateStore()
            .getListState(
                new ListStateDescriptor<>(
                    "opaque",
                    new org.apache.flink.api.java.typeutils.GenericTypeInfo<>(
                        java.util.BitSet.class)));
  }

  @Override
  public void snapshotState(FunctionSnapshotContext context) {}

  @Override
  public void processElement(Long number, ReadOnlyContext context, Collector<Long> out)
      throws Exception {
    split.add(number);
    union.add("u" + Jobs.text(number % 7));
    if (number % 4 == 0) {
      pojos.add(new Pojos.Inner(number.intValue(), number % 8 == 0 ? null : "p", null));
      opaque.add(java.util.BitSet.valueOf(new long[] {number}));
    }
  }

  @Override
  public void processBroadcastElement(Long number, Context context, Collector<Long> out)
      throws Exception {
    context.getBroadcastState(RULES).put("rule " + number % 9, number);
  }
}
