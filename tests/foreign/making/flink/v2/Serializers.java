package fixtures;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.LinkedList;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.serialization.SerializerConfigImpl;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.TypeSerializerSnapshotSerializationUtil;
import org.apache.flink.api.common.typeutils.base.BigDecSerializer;
import org.apache.flink.api.common.typeutils.base.LongSerializer;
import org.apache.flink.api.common.typeutils.base.SetSerializer;
import org.apache.flink.api.common.typeutils.base.StringSerializer;
import org.apache.flink.api.common.typeutils.base.array.BooleanPrimitiveArraySerializer;
import org.apache.flink.api.java.typeutils.runtime.EitherSerializer;
import org.apache.flink.core.memory.DataOutputSerializer;
import org.apache.flink.table.data.DecimalData;
import org.apache.flink.table.data.GenericArrayData;
import org.apache.flink.table.data.GenericMapData;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.runtime.typeutils.DecimalDataSerializer;
import org.apache.flink.table.runtime.typeutils.LinkedListSerializer;
import org.apache.flink.table.runtime.typeutils.RowDataSerializer;
import org.apache.flink.table.runtime.typeutils.StringDataSerializer;
import org.apache.flink.table.runtime.typeutils.TimestampDataSerializer;
import org.apache.flink.table.types.logical.*;
import org.apache.flink.types.Either;
import org.apache.flink.types.RowKind;

/** Snapshots and values of serializers that the jobs do not have, a line a serializer. */
public final class Serializers {
  private static final List<String> LINES = new ArrayList<>();

  private Serializers() {}

  @SuppressWarnings("unchecked")
  private static void show(String name, TypeSerializer<?> serializer, Object... values)
      throws Exception {
    List<String> shown = new ArrayList<>();
    for (Object value : values) {
      String bytes = Json.hex(Json.bytes(serializer, value));
      shown.add("{\"bytes\": " + bytes + ", \"said\": " + Json.of(serializer, value) + "}");
    }
    // Behind the values: subclasses that were met stand in the snapshot then.
    DataOutputSerializer out = new DataOutputSerializer(64);
    TypeSerializerSnapshotSerializationUtil.writeSerializerSnapshot(
        out, ((TypeSerializer<Object>) serializer).snapshotConfiguration());
    String snapshot = Json.hex(out.getCopyOfBuffer());
    LINES.add(
        "{\"name\": " + Json.text(name) + ", \"snapshot\": " + snapshot + ", \"values\": " + shown + "}");
  }

  public static void main(String[] args) throws Exception {
    pojos();
    collections();
    sql();
    Files.write(Paths.get(args[0]), LINES, StandardCharsets.UTF_8);
  }

  private static void pojos() throws Exception {
    SerializerConfigImpl config = new SerializerConfigImpl();
    config.registerPojoType(Pojos.Registered.class);
    Pojos.Base base = new Pojos.Base();
    base.a = 1;
    Pojos.Derived derived = new Pojos.Derived();
    derived.a = 2;
    derived.b = "d\u00e9";
    Pojos.Registered registered = new Pojos.Registered();
    registered.a = 3;
    registered.c = 2.5;
    TypeSerializer<?> serializer = TypeInformation.of(Pojos.Base.class).createSerializer(config);
    show("subclasses", serializer, base, derived, registered, null, derived);
  }

  private static void collections() throws Exception {
    show(
        "set",
        new SetSerializer<>(StringSerializer.INSTANCE),
        new LinkedHashSet<>(Arrays.asList("a", "b")),
        new LinkedHashSet<>());
    show("either", new EitherSerializer<>(LongSerializer.INSTANCE, StringSerializer.INSTANCE), Either.Left(5L), Either.Right("x"));
    show("linked list", new LinkedListSerializer<>(LongSerializer.INSTANCE), new LinkedList<>(Arrays.asList(1L, 2L)));
    show(
        "linked list with nulls",
        new LinkedListSerializer<>(LongSerializer.INSTANCE, true),
        new LinkedList<>(Arrays.asList(1L, null, 3L)));
    show("boolean[]", BooleanPrimitiveArraySerializer.INSTANCE, new boolean[] {true, false});
    show(
        "big decimals",
        BigDecSerializer.INSTANCE,
        new BigDecimal("1E+5"),
        new BigDecimal("0.0000001"),
        null,
        BigDecimal.TEN,
        new BigDecimal("-123456789012345678901234567890123456789012345.67"),
        new BigDecimal(BigInteger.ONE.negate(), -400));
  }

  private static DecimalData decimal(String text, int precision, int scale) {
    return DecimalData.fromBigDecimal(new BigDecimal(text), precision, scale);
  }

  private static void sql() throws Exception {
    LogicalType text = new VarCharType(99);
    LogicalType[] types = {
      text, new DecimalType(10, 2), new DecimalType(30, 3), new TimestampType(0), new TimestampType(3),
      new TimestampType(9), new LocalZonedTimestampType(6), new BooleanType(), new TinyIntType(),
      new DateType(), new TimeType(), new FloatType(), new ArrayType(text), new MapType(text, new IntType()),
      new MultisetType(new IntType()),
      RowType.of(new LogicalType[] {new IntType(), text}, new String[] {"x", "y"}), new VarBinaryType(9),
      new ArrayType(new ArrayType(new DecimalType(30, 3))), new CharType(3), new DoubleType(), new SmallIntType()
    };
    Map<Object, Object> map = new LinkedHashMap<>();
    map.put(StringData.fromString("k1"), 1);
    map.put(StringData.fromString("a longer key"), null);
    Map<Object, Object> bag = new LinkedHashMap<>();
    bag.put(7, 2);
    GenericRowData row =
        GenericRowData.ofKind(
            RowKind.UPDATE_AFTER,
            StringData.fromString("short"), decimal("-12.34", 10, 2),
            decimal("123456789012345678901234567.891", 30, 3), TimestampData.fromEpochMillis(1000),
            TimestampData.fromEpochMillis(-1500), TimestampData.fromEpochMillis(1234567890123L, 456789),
            TimestampData.fromEpochMillis(5, 999000), true, (byte) -3, 19000, 3600000, 1.5f,
            new GenericArrayData(new Object[] {StringData.fromString("a"), null, StringData.fromString("something long")}),
            new GenericMapData(map), new GenericMapData(bag),
            GenericRowData.of(5, StringData.fromString("nested and long")), new byte[] {1, 2},
            new GenericArrayData(new Object[] {new GenericArrayData(new Object[] {decimal("1.500", 30, 3), null})}),
            StringData.fromString("abc"), -0.25, (short) -7);
    RowDataSerializer rows = new RowDataSerializer(types);
    show("SQL row", rows, rows.toBinaryRow(row).copy(), rows.toBinaryRow(new GenericRowData(types.length)).copy());
    show("SQL text", StringDataSerializer.INSTANCE, StringData.fromString("\u65e5\u672c"), StringData.fromString(""));
    show("SQL decimal(10,2)", new DecimalDataSerializer(10, 2), decimal("-1.50", 10, 2));
    show("SQL decimal(30,3)", new DecimalDataSerializer(30, 3), decimal("-1.500", 30, 3));
    show("SQL timestamp(3)", new TimestampDataSerializer(3), TimestampData.fromEpochMillis(-1));
    show("SQL timestamp(9)", new TimestampDataSerializer(9), TimestampData.fromEpochMillis(-1, 1));
  }
}
