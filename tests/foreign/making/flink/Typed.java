package fixtures;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.LocalTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.base.IntSerializer;
import org.apache.flink.api.common.typeutils.base.ListSerializer;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.api.common.typeutils.base.StringSerializer;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.typeutils.EitherTypeInfo;
import org.apache.flink.api.java.typeutils.GenericTypeInfo;
import org.apache.flink.api.java.typeutils.ListTypeInfo;
import org.apache.flink.api.java.typeutils.MapTypeInfo;
import org.apache.flink.api.java.typeutils.runtime.NullableSerializer;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.types.Either;
import org.apache.flink.types.LongValue;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.types.StringValue;
import org.apache.flink.util.Collector;

/** A value state of every type. */
final class Typed extends KeyedProcessFunction<Integer, Long, Long> {
  private static final long serialVersionUID = 1;

  @Override
  public void processElement(Long number, Context context, Collector<Long> out) throws Exception {
    int n = number.intValue();
    simple(n);
    arrays(n);
    times(n);
    composed(n);
    pojos(n);
    odd(n);
  }

  private void put(String name, TypeInformation<?> type, Object value) throws Exception {
    update(new ValueStateDescriptor<>(name, type), value);
  }

  private void put(String name, TypeSerializer<?> serializer, Object value) throws Exception {
    update(new ValueStateDescriptor<>(name, serializer), value);
  }

  @SuppressWarnings("unchecked")
  private void update(ValueStateDescriptor<?> descriptor, Object value) throws Exception {
    ValueState<Object> state =
        getRuntimeContext().getState((ValueStateDescriptor<Object>) descriptor);
    if (value != null) {
      state.update(value);
    }
  }

  private void simple(int n) throws Exception {
    put("long", Types.LONG, n == 0 ? Long.MIN_VALUE : n == 1 ? Long.MAX_VALUE : n - 5L);
    put("int", Types.INT, n == 0 ? Integer.MIN_VALUE : n - 5);
    put("short", Types.SHORT, (short) (n == 0 ? Short.MIN_VALUE : n - 5));
    put("byte", Types.BYTE, (byte) (n == 0 ? Byte.MIN_VALUE : n - 5));
    put("boolean", Types.BOOLEAN, n % 2 == 0);
    put("float", Types.FLOAT, n == 0 ? Float.NaN : n == 1 ? Float.NEGATIVE_INFINITY : n / 3f);
    put("double", Types.DOUBLE, n == 0 ? Double.POSITIVE_INFINITY : n == 1 ? -0.0 : n / 3.0);
    put("char", Types.CHAR, n == 0 ? '\u20ac' : (char) ('a' + n));
    put("string", Types.STRING, Jobs.text(n));
    put("enum", Types.ENUM(Pojos.Colour.class), Pojos.Colour.values()[n % 3]);
    put("bigint", Types.BIG_INT, big(n));
    put("bigdec", Types.BIG_DEC, n == 0 ? BigDecimal.ZERO : new BigDecimal(big(n), n % 7 - 2));
    put("string-value", TypeInformation.of(StringValue.class), new StringValue(Jobs.text(n)));
    put("long-value", TypeInformation.of(LongValue.class), new LongValue(n - 3L));
  }

  private static BigInteger big(int n) {
    BigInteger[] special = {
      BigInteger.ZERO, BigInteger.ONE, BigInteger.TEN, BigInteger.valueOf(-1)
    };
    BigInteger large = BigInteger.valueOf(n * 1_000_003L).pow(Math.max(n - 2, 0));
    return n < 4 ? special[n] : n % 2 == 0 ? large : large.negate();
  }

  private void arrays(int n) throws Exception {
    int size = n % 4;
    long[] longs = new long[size];
    int[] ints = new int[size];
    short[] shorts = new short[size];
    byte[] bytes = new byte[size];
    boolean[] booleans = new boolean[size];
    float[] floats = new float[size];
    double[] doubles = new double[size];
    char[] chars = new char[size];
    String[] strings = new String[size];
    Integer[] boxed = new Integer[size];
    for (int i = 0; i < size; i++) {
      longs[i] = -i * 1_000_000_007L;
      ints[i] = n - i;
      shorts[i] = (short) (n * i);
      bytes[i] = (byte) (200 + i);
      booleans[i] = i % 2 == 0;
      floats[i] = i / 2f;
      doubles[i] = n / 8.0;
      chars[i] = (char) ('x' + i);
      strings[i] = i == 1 ? null : Jobs.text(i);
      boxed[i] = i == 2 ? null : i;
    }
    put("longs", PrimitiveArrayTypeInfo.LONG_PRIMITIVE_ARRAY_TYPE_INFO, longs);
    put("ints", PrimitiveArrayTypeInfo.INT_PRIMITIVE_ARRAY_TYPE_INFO, ints);
    put("shorts", PrimitiveArrayTypeInfo.SHORT_PRIMITIVE_ARRAY_TYPE_INFO, shorts);
    put("bytes", PrimitiveArrayTypeInfo.BYTE_PRIMITIVE_ARRAY_TYPE_INFO, bytes);
    put("booleans", PrimitiveArrayTypeInfo.BOOLEAN_PRIMITIVE_ARRAY_TYPE_INFO, booleans);
    put("floats", PrimitiveArrayTypeInfo.FLOAT_PRIMITIVE_ARRAY_TYPE_INFO, floats);
    put("doubles", PrimitiveArrayTypeInfo.DOUBLE_PRIMITIVE_ARRAY_TYPE_INFO, doubles);
    put("chars", PrimitiveArrayTypeInfo.CHAR_PRIMITIVE_ARRAY_TYPE_INFO, chars);
    put("strings", Types.OBJECT_ARRAY(Types.STRING), strings);
    put("string-array", TypeInformation.of(String[].class), strings);
    put("boxed", Types.OBJECT_ARRAY(Types.INT), boxed);
  }

  private void times(int n) throws Exception {
    long ms = 1_700_000_000_123L + n * 86_399_999L - (n == 0 ? 2_000_000_000_000L : 0);
    put("date", TypeInformation.of(java.util.Date.class), new java.util.Date(ms));
    put("sql-date", Types.SQL_DATE, new java.sql.Date(ms));
    put("sql-time", Types.SQL_TIME, new java.sql.Time(ms % 86_400_000L));
    java.sql.Timestamp timestamp = new java.sql.Timestamp(ms);
    timestamp.setNanos(n * 1_001_001);
    put("sql-timestamp", Types.SQL_TIMESTAMP, timestamp);
    LocalDate date = LocalDate.ofEpochDay(n == 0 ? -800_000 : 19_000 + n);
    LocalTime time = LocalTime.ofNanoOfDay(n * 8_000_000_000_123L % 86_400_000_000_000L);
    put("local-date", Types.LOCAL_DATE, date);
    put("local-time", Types.LOCAL_TIME, time);
    put("local-date-time", Types.LOCAL_DATE_TIME, LocalDateTime.of(date, time));
    put("instant", Types.INSTANT, Instant.ofEpochSecond(ms / 1000, n * 1001));
  }

  private void composed(int n) throws Exception {
    put(
        "tuple",
        Types.TUPLE(Types.LONG, Types.STRING, Types.DOUBLE),
        Tuple3.of((long) n, Jobs.text(n), n / 4.0));
    put(
        "nested-tuple",
        Types.TUPLE(Types.TUPLE(Types.INT, Types.STRING), Types.LIST(Types.INT)),
        Tuple2.of(Tuple2.of(n, "t" + n), numbers(n % 3)));
    Row row = n == 3 ? Row.withPositions(RowKind.DELETE, 4) : new Row(4);
    row.setField(0, n % 3 == 0 ? null : n);
    row.setField(1, n % 4 == 0 ? null : Jobs.text(n));
    row.setField(2, n % 2 == 0 ? null : Row.of(n / 2.0, n % 5 == 0 ? null : "in"));
    row.setField(3, (long) n);
    TypeInformation<Row> inner = Types.ROW(Types.DOUBLE, Types.STRING);
    put("row", Types.ROW(Types.INT, Types.STRING, inner, Types.LONG), row);
    put(
        "named-row",
        Types.ROW_NAMED(new String[] {"a", "b"}, Types.INT, Types.STRING),
        Row.of(n, n == 2 ? null : "b" + n));
    put(
        "either",
        new EitherTypeInfo<>(Types.LONG, Types.STRING),
        n % 2 == 0 ? Either.Left((long) n) : Either.Right("right " + n));
    put("list", new ListTypeInfo<>(Types.STRING), texts(n % 4));
    put("list-of-lists", new ListTypeInfo<>(new ListTypeInfo<>(Types.INT)), nested(n % 3));
    Map<String, Double> map = new HashMap<>();
    for (int i = 0; i < n % 4; i++) {
      map.put("m" + i, i == 1 ? null : i / 2.0);
    }
    put("map", Types.MAP(Types.STRING, Types.DOUBLE), map);
    put(
        "map-of-lists",
        new MapTypeInfo<>(Types.INT, new ListTypeInfo<>(Types.STRING)),
        Map.of(n, texts(2), -n - 1, texts(n % 3)));
  }

  private static List<Integer> numbers(int count) {
    List<Integer> found = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      found.add(i * 7);
    }
    return found;
  }

  private static List<String> texts(int count) {
    List<String> found = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      found.add(Jobs.text(i));
    }
    return found;
  }

  private static List<List<Integer>> nested(int count) {
    List<List<Integer>> found = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      found.add(numbers(i));
    }
    return found;
  }

  private void pojos(int n) throws Exception {
    Pojos.Inner inner = new Pojos.Inner(n, n % 3 == 0 ? null : "t" + n, n % 2 == 0 ? null : n);
    put("pojo", TypeInformation.of(Pojos.Inner.class), inner);
    Pojos.Outer outer = new Pojos.Outer();
    outer.id = n * 1_000_000_007L;
    outer.inner = n % 4 == 0 ? null : inner;
    outer.tags = n % 5 == 0 ? null : new ArrayList<>(texts(n % 3));
    outer.counts = n % 3 == 0 ? null : new HashMap<>(Map.of("a", (long) n, "b", 2L));
    outer.colour = n % 6 == 0 ? null : Pojos.Colour.values()[n % 3];
    outer.points = n == 1 ? null : new double[] {n, n / 2.0};
    outer.price = n == 2 ? null : new BigDecimal(big(n), 2);
    outer.flag = n % 2 == 0;
    outer.setHidden(n == 5 ? null : "h" + n);
    put("nested-pojo", TypeInformation.of(Pojos.Outer.class), outer);
    Pojos.Base base = base(n);
    put("base-pojo", TypeInformation.of(Pojos.Base.class), base);
    Pojos.Holder holder = new Pojos.Holder();
    holder.base = n % 4 == 3 ? null : base;
    holder.opaque = n % 2 == 0 ? null : BitSet.valueOf(new long[] {n});
    holder.tail = (short) n;
    put("holder", TypeInformation.of(Pojos.Holder.class), holder);
  }

  private static Pojos.Base base(int n) {
    Pojos.Base found;
    if (n % 3 == 0) {
      found = new Pojos.Base();
    } else if (n % 3 == 1) {
      Pojos.Derived derived = new Pojos.Derived();
      derived.b = "d" + n;
      found = derived;
    } else {
      Pojos.Registered registered = new Pojos.Registered();
      registered.c = n / 2.0;
      found = registered;
    }
    found.a = n;
    return found;
  }

  private void odd(int n) throws Exception {
    put("kryo", new GenericTypeInfo<>(BitSet.class), BitSet.valueOf(new long[] {n, n * 7L}));
    put(
        "nullable-long",
        new ListSerializer<>(NullableSerializer.wrap(LongSerializer.INSTANCE, false)),
        Arrays.asList((long) n, null, -1L));
    put(
        "padded-int",
        new ListSerializer<>(NullableSerializer.wrap(IntSerializer.INSTANCE, true)),
        Arrays.asList(null, n));
    put(
        "nullable-text",
        new ListSerializer<>(NullableSerializer.wrap(StringSerializer.INSTANCE, false)),
        Arrays.asList("x" + n, null));
  }
}
