import java.io.File;
import java.io.PrintWriter;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.rocksdb.*;

/**
 * Writes small databases of many kinds: per kind a folder with its table files and, in expected.txt,
 * what RocksDB itself reads from them. Arguments: the folder, and the number of keys.
 */
public class RocksTables {
  static String out;
  static int keys;

  static String hex(byte[] bytes) {
    StringBuilder text = new StringBuilder();
    for (byte one : bytes) text.append(String.format("%02x", one));
    return text.toString();
  }

  static byte[] key(Random random, int kind, int i) {
    if (kind == 0) return String.format("key-%06d", i).getBytes();
    if (kind == 1) {
      byte[] some = new byte[random.nextInt(40)];
      random.nextBytes(some);
      return some;
    }
    // Zeros at the end, and keys that are the beginning of others.
    byte[] some = {(byte) (i % 7), 0, (byte) (i >> 8), (byte) i};
    return Arrays.copyOf(some, i % 3 == 0 ? 4 : 2 + i % 5);
  }

  static byte[] value(Random random, int i) {
    byte[] some = new byte[i % 50 == 0 ? 300 : random.nextInt(30)];
    if (i % 2 == 0) random.nextBytes(some); else Arrays.fill(some, (byte) ('a' + i % 26));
    return some;
  }

  static void ingest(RocksDB db, Options options, String folder, boolean tell) throws RocksDBException {
    String path = folder + "/outside.sst";
    try (SstFileWriter writer = new SstFileWriter(new EnvOptions(), options)) {
      writer.open(path);
      for (int i = 0; i < keys; i += 5) writer.put(key(null, 0, i), ("outside " + i).getBytes());
      writer.finish();
    }
    try (IngestExternalFileOptions how = new IngestExternalFileOptions().setMoveFiles(true).setWriteGlobalSeqno(tell)) {
      db.ingestExternalFile(List.of(path), how);
    }
  }

  /** Four rounds of puts, merges and deletes, each flushed to a table; two of them compacted. */
  static void make(String name, BlockBasedTableConfig table, CompressionType compression, String merge, int kind, String extra)
      throws Exception {
    String folder = out + "/" + name;
    new File(folder).mkdirs();
    try (Options options = new Options()) {
      options.setCreateIfMissing(true).setCompressionType(compression).setMergeOperatorName(merge);
      options.setDisableAutoCompactions(true).setTableFormatConfig(table);
      if (extra.equals("prefix")) options.useFixedLengthPrefixExtractor(2);
      Random random = new Random(42);
      try (RocksDB db = RocksDB.open(options, folder + "/db")) {
        List<byte[]> known = new ArrayList<>();
        for (int i = 0; i < keys; i++) known.add(key(random, kind, i));
        for (int round = 0; round < 4; round++) {
          List<Snapshot> held = new ArrayList<>();
          for (int i = 0; i < keys; i++) {
            byte[] some = known.get(random.nextInt(keys));
            int what = round == 0 ? 0 : random.nextInt(6);
            if (what < 2) db.put(some, value(random, i));
            else if (what < 4) db.merge(some, value(random, i));
            else if (what == 4) db.delete(some);
            else db.merge(some, "x".getBytes());
            // Held versions stay in the tables beside newer ones.
            if (i % 23 == 0) held.add(db.getSnapshot());
            if (extra.equals("ranges") && i % (keys / 3) == keys / 6) {
              byte[] from = known.get(random.nextInt(keys)), to = known.get(random.nextInt(keys));
              if (Arrays.compareUnsigned(from, to) > 0) { byte[] swap = from; from = to; to = swap; }
              if (i > keys / 2) { to = Arrays.copyOf(from, from.length + 1); to[from.length] = 60; }
              db.deleteRange(from, to);
            }
          }
          try (FlushOptions flush = new FlushOptions().setWaitForFlush(true)) { db.flush(flush); }
          for (Snapshot one : held) db.releaseSnapshot(one);
          if (round == 1 && !extra.equals("ranges")) db.compactRange();
          if (round == 2 && extra.startsWith("outside")) ingest(db, options, folder, extra.equals("outside-told"));
        }
        try (PrintWriter lines = new PrintWriter(folder + "/expected.txt"); RocksIterator all = db.newIterator()) {
          for (all.seekToFirst(); all.isValid(); all.next()) lines.println(hex(all.key()) + " " + hex(all.value()));
          all.status();
        }
      }
    }
    try (DirectoryStream<Path> files = Files.newDirectoryStream(Path.of(folder, "db"))) {
      for (Path file : files) {
        if (file.toString().endsWith(".sst"))
          Files.copy(file, Path.of(folder, file.getFileName().toString()), StandardCopyOption.REPLACE_EXISTING);
        Files.delete(file);
      }
    }
    Files.delete(Path.of(folder, "db"));
  }

  static BlockBasedTableConfig table(int version) {
    return new BlockBasedTableConfig().setBlockSize(512).setNoBlockCache(true).setFormatVersion(version);
  }

  static void make(String name, BlockBasedTableConfig table, int kind) throws Exception {
    make(name, table, CompressionType.LZ4_COMPRESSION, kind == 0 ? "stringappend" : "stringappendtest", kind, "");
  }

  public static void main(String[] arguments) throws Exception {
    out = arguments[0];
    keys = Integer.parseInt(arguments[1]);
    RocksDB.loadLibrary();
    for (int version = 2; version <= 6; version++) make("version-" + version, table(version), version % 3);
    make("checksum-crc32c", table(5).setChecksumType(ChecksumType.kCRC32c), 0);
    make("checksum-crc32c-6", table(6).setChecksumType(ChecksumType.kCRC32c), 1);
    make("checksum-xxhash-6", table(6).setChecksumType(ChecksumType.kxxHash), 0);
    make("checksum-xxhash64", table(5).setChecksumType(ChecksumType.kxxHash64), 2);
    make("checksum-none-6", table(6).setChecksumType(ChecksumType.kNoChecksum), 1);
    make("compression-none", table(5), CompressionType.NO_COMPRESSION, "stringappend", 0, "");
    make("compression-snappy", table(5), CompressionType.SNAPPY_COMPRESSION, "stringappend", 1, "");
    make("compression-zlib", table(5), CompressionType.ZLIB_COMPRESSION, "stringappend", 0, "");
    make("compression-zstd", table(5), CompressionType.ZSTD_COMPRESSION, "stringappend", 0, "");
    make("compression-bzip2", table(5), CompressionType.BZLIB2_COMPRESSION, "stringappend", 0, "");
    IndexType levels = IndexType.kTwoLevelIndexSearch;
    make("index-two-levels-3", table(3).setIndexType(levels).setMetadataBlockSize(128), 0);
    make("index-two-levels-6", table(6).setIndexType(levels).setMetadataBlockSize(128).setIndexBlockRestartInterval(7), 1);
    make("index-first-keys", table(5).setIndexType(IndexType.kBinarySearchWithFirstKey).setIndexBlockRestartInterval(4), 0);
    make("index-hash", table(5).setIndexType(IndexType.kHashSearch), CompressionType.LZ4_COMPRESSION, "stringappend", 0, "prefix");
    make("index-intervals", table(5).setIndexBlockRestartInterval(7), 0);
    make("data-hash", table(5).setDataBlockIndexType(DataBlockIndexType.kDataBlockBinaryAndHash), 0);
    make("bloom", table(5).setFilterPolicy(new BloomFilter(10, false)), 1);
    make("no-delta", table(5).setUseDeltaEncoding(false), 2);
    make("restart-every", table(5).setBlockRestartInterval(1), 1);
    make("restart-rarely", table(5).setBlockRestartInterval(300).setBlockSize(8192), 0);
    for (int kind = 0; kind < 3; kind++)
      make("ranges-" + kind, table(5), CompressionType.LZ4_COMPRESSION, "stringappend", kind, "ranges");
    for (String extra : new String[] {"outside-told", "outside-untold"})
      make(extra, table(5), CompressionType.LZ4_COMPRESSION, "stringappend", 0, extra);
    System.exit(0);
  }
}
