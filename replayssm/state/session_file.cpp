// Saves and loads one sequence of a state pool.
#include "replayssm/state/session_file.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "replayssm/core/error.h"
#include "replayssm/core/safetensors.h"

namespace replayssm {
namespace {

using Metadata = std::map<std::string, std::string>;

constexpr const char* kFormat = "replayssm-session";
constexpr const char* kVersion = "2";
constexpr const char* kPrecision = "checkpoint fp32, ring fp32, convolution fp32, kv fp32";

// One tensor of the file and the places of its floats in a pool, in the tensor's order; null: zeros.
struct Part {
  struct Run {
    float* memory;
    int64_t floats;
    CheckpointForm form = CheckpointForm::kWords;  // planes: of one head
  };
  std::string name;
  std::vector<int64_t> shape;
  std::vector<Run> runs;

  int64_t floats() const {
    int64_t sum = 0;
    for (const Run& run : runs) sum += run.floats;
    return sum;
  }
};

// words[i] of a head <- its planes, and the other way (rows.h).
void join_planes(const float* planes, int64_t count, float* words) {
  std::vector<uint16_t> halves(2 * count);
  std::memcpy(halves.data(), planes, halves.size() * sizeof(uint16_t));
  for (int64_t i = 0; i < count; ++i) {
    const auto lo = static_cast<uint32_t>(static_cast<int16_t>(halves[count + i]));
    words[i] = std::bit_cast<float>((uint32_t{halves[i]} << 16) + lo);
  }
}

void split_words(const std::byte* words, int64_t count, float* planes) {
  std::vector<uint16_t> halves(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, words + i * sizeof value, sizeof value);
    const uint32_t word = std::isnan(value) ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
    halves[i] = static_cast<uint16_t>((word + 0x8000u) >> 16);
    halves[count + i] = static_cast<uint16_t>(word);
  }
  std::memcpy(planes, halves.data(), halves.size() * sizeof(uint16_t));
}

void read_run(const Part::Run& run, float* out) {
  if (run.memory == nullptr) return;
  if (run.form == CheckpointForm::kPlanes)
    join_planes(run.memory, run.floats, out);
  else
    std::copy_n(run.memory, run.floats, out);
}

void write_run(const std::byte* in, const Part::Run& run) {
  if (run.memory == nullptr) return;
  if (run.form == CheckpointForm::kPlanes)
    split_words(in, run.floats, run.memory);
  else
    std::memcpy(run.memory, in, run.floats * sizeof(float));
}

// Where one sequence lies in its pool.
struct Place {
  Handle handle;
  Cursor cursor;
  int32_t checkpoint;
  std::span<const int32_t> pages;
};

// The records of a ring array [slots, heads, C, size].
Part ring_part(std::string name, float* array, int64_t heads, int64_t size, int capacity, const Place& place) {
  const Cursor cursor = place.cursor;
  Part part{std::move(name), {heads, cursor.history, size}, {}};
  for (int64_t head = 0; head < heads; ++head) {
    for (int i = 0; i < cursor.history; ++i) {
      const int64_t record = (cursor.base + i) % capacity;
      part.runs.push_back({array + ((place.handle.slot * heads + head) * capacity + record) * size, size});
    }
  }
  return part;
}

// The part of a square array that means something: each record's products with the older ones.
Part square_part(std::string name, float* array, int64_t heads, int64_t capacity, const Place& place) {
  const int64_t base = place.cursor.base, history = place.cursor.history;
  Part part{std::move(name), {heads, history, history}, {}};
  for (int64_t head = 0; head < heads; ++head) {
    float* products = array + (place.handle.slot * heads + head) * capacity * capacity;
    for (int64_t i = 0; i < history; ++i) {
      float* row = products + (base + i) % capacity * capacity;
      for (int64_t j = 0; j < i; ++j) part.runs.push_back({row + (base + j) % capacity, 1});
      part.runs.push_back({nullptr, history - i});
    }
  }
  return part;
}

void add_recurrent_parts(std::vector<Part>& parts, const std::string& prefix, StatePool& pool, int layer,
                         const Place& place) {
  const RecurrentArrays& arrays = *pool.arrays(layer);
  const int capacity = pool.layout().ring_capacity();
  const auto [heads, values, keys] = arrays.checkpoint;
  Part checkpoint{prefix + "checkpoint", {heads, values, keys}, {}};
  for (int64_t head = 0; head < heads; ++head)
    checkpoint.runs.push_back({pool.checkpoint(layer) + (place.checkpoint * heads + head) * values * keys,
                               values * keys, pool.layout().form});
  parts.push_back(std::move(checkpoint));
  for (size_t i = 0; i < arrays.ring.size(); ++i) {
    const RingArray& array = arrays.ring[i];
    if (array.size == 0) continue;
    const std::string name = prefix + std::string(array.name);
    parts.push_back(array.is_square ? square_part(name, pool.ring(layer, i), array.heads, capacity, place)
                                    : ring_part(name, pool.ring(layer, i), array.heads, array.size, capacity, place));
  }
  const Conv1dState conv = pool.conv_state(layer);
  Part inputs{prefix + "convolution", {conv.width - 1, conv.channels}, {}};
  for (int64_t back = conv.width - 1; back >= 1; --back) {
    const int64_t input = (place.cursor.tokens() - back + conv.capacity) % conv.capacity;
    inputs.runs.push_back(
        {conv.window + (place.handle.slot * int64_t{conv.capacity} + input) * conv.channels, conv.channels});
  }
  parts.push_back(std::move(inputs));
}

Part kv_part(std::string name, float* array, const KvCache& cache, const Place& place) {
  const int64_t tokens = place.cursor.tokens(), size = cache.head_size, page_tokens = cache.page_tokens;
  Part part{std::move(name), {cache.kv_heads, tokens, size}, {}};
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    for (int64_t begin = 0; begin < tokens; begin += page_tokens) {
      const int64_t page = place.pages[begin / page_tokens];
      part.runs.push_back(
          {array + (page * cache.kv_heads + head) * page_tokens * size, std::min(page_tokens, tokens - begin) * size});
    }
  }
  return part;
}

std::vector<Part> parts_of(StatePool& pool, Handle handle) {
  const Ledger& ledger = pool.ledger();
  const Place place{handle, ledger.cursor(handle), ledger.checkpoint(handle), ledger.pages(handle)};
  std::vector<Part> parts;
  for (int index = 0; index < static_cast<int>(pool.layout().layers.size()); ++index) {
    const std::string prefix = fmt::format("layers.{}.", index);
    if (pool.arrays(index) != nullptr) {
      add_recurrent_parts(parts, prefix, pool, index, place);
    } else {
      const KvCache cache = pool.kv_cache(index);
      parts.push_back(kv_part(prefix + "k", cache.k, cache, place));
      if (cache.v != nullptr) parts.push_back(kv_part(prefix + "v", cache.v, cache, place));
    }
  }
  return parts;
}

// The hash of all that a file says: the metadata except the checksum, then the tensors by name.
std::string checksum_of(const Metadata& metadata, const std::vector<Tensor>& tensors) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  require(state != nullptr, "session: out of memory");
  XXH3_64bits_reset(state.get());
  const auto add_number = [&](uint64_t number) { XXH3_64bits_update(state.get(), &number, sizeof number); };
  const auto add_bytes = [&](const void* bytes, size_t count) {
    add_number(count);
    XXH3_64bits_update(state.get(), bytes, count);
  };
  for (const auto& [key, value] : metadata) {
    if (key == "checksum") continue;
    add_bytes(key.data(), key.size());
    add_bytes(value.data(), value.size());
  }
  std::map<std::string_view, const Tensor*> by_name;
  for (const Tensor& tensor : tensors) by_name[tensor.name] = &tensor;
  for (const auto& [name, tensor] : by_name) {
    add_bytes(name.data(), name.size());
    add_bytes(tensor->shape.data(), tensor->shape.size() * sizeof(int64_t));
    add_number(static_cast<uint64_t>(tensor->dtype));
    add_bytes(tensor->bytes.data(), tensor->bytes.size());
  }
  return fmt::format("{:016x}", XXH3_64bits_digest(state.get()));
}

const std::string& entry(const SafetensorsFile& file, const std::string& key) {
  const auto at = file.metadata().find(key);
  require(at != file.metadata().end(), "session {}: the metadata has no '{}'", file.path(), key);
  return at->second;
}

void require_same(const SafetensorsFile& file, const std::string& key, std::string_view expected) {
  const std::string& given = entry(file, key);
  require(given == expected, "session {}: its {} is '{}', this pool's is '{}'", file.path(), key, given, expected);
}

int64_t number(const SafetensorsFile& file, const std::string& key, int64_t high) {
  const std::string& text = entry(file, key);
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= high,
          "session {}: {} must be a number of 0 to {}, given '{}'", file.path(), key, high, text);
  return value;
}

// The tensor of each part, all of the shape that the part expects.
std::vector<const Tensor*> match(const SafetensorsFile& file, const std::vector<Part>& parts) {
  std::vector<const Tensor*> tensors;
  for (const Part& part : parts) {
    const Tensor* tensor = file.find(part.name);
    require(tensor != nullptr, "session {}: tensor {} is missing", file.path(), part.name);
    require(tensor->dtype == Dtype::kF32 && tensor->shape == part.shape,
            "session {}: tensor {} must be F32 {}, given {} {}", file.path(), part.name, shape_text(part.shape),
            dtype_name(tensor->dtype), shape_text(tensor->shape));
    tensors.push_back(tensor);
  }
  require(file.tensors().size() == parts.size(), "session {}: expected {} tensors, given {}", file.path(), parts.size(),
          file.tensors().size());
  return tensors;
}

}  // namespace

void check_saving(const SequencePool& pool, Handle handle) {
  const bool is_spoilt = pool.ledger().is_spoilt(handle);
  require(!pool.ledger().is_in_step(), "save: not while a step is begun; commit or abort it first");
  require(!is_spoilt, "save: the state of slot {} was lost when its step was aborted", handle.slot);
}

void save_session(StatePool& pool, Handle handle, const std::string& path) {
  check_saving(pool, handle);
  const Cursor cursor = pool.cursor(handle);
  const std::vector<Part> parts = parts_of(pool, handle);
  std::vector<std::vector<float>> contents;
  std::vector<Tensor> tensors;
  for (const Part& part : parts) {
    std::vector<float>& floats = contents.emplace_back(part.floats());
    float* out = floats.data();
    for (const Part::Run& run : part.runs) {
      read_run(run, out);
      out += run.floats;
    }
    tensors.push_back({part.name, Dtype::kF32, part.shape, std::as_bytes(std::span(floats))});
  }
  Metadata metadata = {{"format", kFormat},
                       {"version", kVersion},
                       {"model", pool.layout().model},
                       {"layers", describe_layers(pool.layout())},
                       {"precision", kPrecision},
                       {"base", std::to_string(cursor.base)},
                       {"history", std::to_string(cursor.history)}};
  metadata["checksum"] = checksum_of(metadata, tensors);
  write_safetensors(path, tensors, metadata);
}

Handle load_session(StatePool& pool, const std::string& path, int64_t max_tokens) {
  const SafetensorsFile file(path);
  require_same(file, "format", kFormat);
  require_same(file, "version", kVersion);
  require_same(file, "model", pool.layout().model);
  require_same(file, "layers", describe_layers(pool.layout()));
  require_same(file, "precision", kPrecision);
  const std::string checksum = checksum_of(file.metadata(), file.tensors());
  require(entry(file, "checksum") == checksum, "session {}: corrupt, its checksum is {}, its contents give {}", path,
          entry(file, "checksum"), checksum);

  Cursor cursor;
  cursor.base = number(file, "base", int64_t{1} << 62);
  cursor.history = static_cast<int32_t>(number(file, "history", std::numeric_limits<int32_t>::max()));
  require(cursor.history <= pool.layout().window, "session {}: it has {} unfolded records, this pool's window holds {}",
          path, cursor.history, pool.layout().window);
  require(cursor.tokens() <= max_tokens, "session {}: it has {} tokens, the sequence may have only {}", path,
          cursor.tokens(), max_tokens);

  const Handle handle = pool.restore(cursor, max_tokens);
  try {
    const std::vector<Part> parts = parts_of(pool, handle);
    const std::vector<const Tensor*> tensors = match(file, parts);
    for (size_t index = 0; index < parts.size(); ++index) {
      const std::byte* in = tensors[index]->bytes.data();
      for (const Part::Run& run : parts[index].runs) {
        write_run(in, run);
        in += run.floats * sizeof(float);
      }
    }
  } catch (...) {
    pool.free(handle);
    throw;
  }
  return handle;
}

}  // namespace replayssm
