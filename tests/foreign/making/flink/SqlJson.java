package fixtures;

import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.table.data.ArrayData;
import org.apache.flink.table.data.DecimalData;
import org.apache.flink.table.data.MapData;
import org.apache.flink.table.data.RawValueData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.types.RowKind;

/** Values of Flink SQL as JSON. */
final class SqlJson {
  private SqlJson() {}

  static String row(RowData row, LogicalType[] types) throws Exception {
    List<String> found = new ArrayList<>();
    for (int i = 0; i < types.length; i++) {
      Object value = RowData.createFieldGetter(types[i], i).getFieldOrNull(row);
      found.add("\"f" + i + "\": " + of(types[i], value));
    }
    if (row.getRowKind() != RowKind.INSERT) {
      found.add("\"$kind\": " + Json.text(row.getRowKind().shortString()));
    }
    return "{" + String.join(", ", found) + "}";
  }

  private static String of(LogicalType type, Object value) throws Exception {
    if (value instanceof RowData) {
      List<LogicalType> children = type.getChildren();
      return row((RowData) value, children.toArray(new LogicalType[0]));
    }
    if (value instanceof RawValueData) {
      return raw(type, (RawValueData<?>) value);
    }
    if (value instanceof ArrayData) {
      ArrayData array = (ArrayData) value;
      LogicalType item = type.getChildren().get(0);
      ArrayData.ElementGetter getter = ArrayData.createElementGetter(item);
      List<String> found = new ArrayList<>();
      for (int i = 0; i < array.size(); i++) {
        found.add(of(item, getter.getElementOrNull(array, i)));
      }
      return "[" + String.join(", ", found) + "]";
    }
    if (value instanceof MapData) {
      MapData map = (MapData) value;
      LogicalType key = type.getChildren().get(0);
      LogicalType held = type.getChildren().size() > 1 ? type.getChildren().get(1) : null;
      List<String> found = new ArrayList<>();
      for (int i = 0; i < map.size(); i++) {
        Object one = ArrayData.createElementGetter(key).getElementOrNull(map.keyArray(), i);
        Object two =
            held == null
                ? map.valueArray().getInt(i)
                : ArrayData.createElementGetter(held).getElementOrNull(map.valueArray(), i);
        found.add("[" + of(key, one) + ", " + of(held, two) + "]");
      }
      found.sort(null);
      return "[" + String.join(", ", found) + "]";
    }
    return plain(null, value);
  }

  @SuppressWarnings("unchecked")
  private static String raw(LogicalType type, RawValueData<?> value) {
    TypeSerializer<Object> serializer =
        (TypeSerializer<Object>) Json.call(type, "getTypeSerializer");
    byte[] bytes = ((RawValueData<Object>) value).toBytes(serializer);
    return "{\"$opaque\": " + Json.hex(bytes) + "}";
  }

  static String plain(TypeSerializer<?> serializer, Object value) throws Exception {
    if (value instanceof StringData) {
      return Json.text(value.toString());
    }
    if (value instanceof DecimalData) {
      DecimalData decimal = (DecimalData) value;
      return Json.text(decimal.toBigDecimal().unscaledValue() + "E" + -decimal.scale());
    }
    if (value instanceof TimestampData) {
      TimestampData at = (TimestampData) value;
      return "{\"ms\": " + at.getMillisecond() + ", \"nanos\": " + at.getNanoOfMillisecond() + "}";
    }
    if (value != null && value.getClass().getName().startsWith("org.apache.flink.table.data.")) {
      return "{\"$opaque\": " + Json.hex(Json.bytes(serializer, value)) + "}";
    }
    return Json.of(null, value);
  }
}
