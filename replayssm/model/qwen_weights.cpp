// Loads the weights of a Qwen3.5 or Qwen3-Next text model.
#include "replayssm/model/qwen_weights.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "replayssm/core/error.h"

namespace replayssm {
namespace {

constexpr Dtype kFloatDtypes[] = {Dtype::kBF16, Dtype::kF16, Dtype::kF32};

// Rows first .. first+count-1 of a tensor.
struct RowRange {
  const Tensor* tensor;
  int64_t first;
  int64_t count;
};

// A Qwen3-Next projection interleaves its parts per key head; a part of it, all heads in order, is one range a head.
std::vector<RowRange> part_of_heads(const Tensor& tensor, int heads, int64_t head_rows, int64_t first, int64_t count) {
  std::vector<RowRange> ranges;
  for (int head = 0; head < heads; ++head) ranges.push_back({&tensor, head * head_rows + first, count});
  return ranges;
}

void append(std::vector<RowRange>& ranges, const std::vector<RowRange>& more) {
  ranges.insert(ranges.end(), more.begin(), more.end());
}

class Loader {
 public:
  Loader(const Checkpoint& checkpoint, const ModelConfig& config)
      : checkpoint_(checkpoint),
        config_(config),
        prefix_(checkpoint.require_prefix({"model.", "model.language_model."}, "embed_tokens.weight")),
        hash_(XXH3_createState()) {
    require(hash_ != nullptr, "memory: cannot allocate a hash state");
    XXH3_64bits_reset(hash_);
  }
  ~Loader() { XXH3_freeState(hash_); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  QwenWeights load() {
    QwenWeights weights;
    weights.embedding = matrix({all_rows(prefix_ + "embed_tokens.weight", config_.vocabulary, config_.hidden_size)});
    for (size_t i = 0; i < config_.layers.size(); ++i) weights.layers.push_back(layer(static_cast<int>(i)));
    weights.norm = vector(prefix_ + "norm.weight", config_.hidden_size);
    if (!config_.has_tied_embeddings)
      weights.lm_head = matrix({all_rows("lm_head.weight", config_.vocabulary, config_.hidden_size)});
    const double numbers[] = {config_.norm_epsilon, config_.attention.rope_theta,
                              static_cast<double>(config_.attention.rotary_size)};
    add_to_hash(std::as_bytes(std::span(numbers)));
    weights.fingerprint = fmt::format("{:016x}", XXH3_64bits_digest(hash_));
    weights.bytes = bytes_;
    return weights;
  }

 private:
  QwenLayerWeights layer(int index) {
    const std::string name = fmt::format("{}layers.{}.", prefix_, index);
    const int64_t hidden = config_.hidden_size, intermediate = config_.intermediate_size;
    QwenLayerWeights weights;
    weights.input_norm = vector(name + "input_layernorm.weight", hidden);
    if (config_.layers[index] == LayerKind::kDelta)
      weights.mixer = delta(name + "linear_attn.");
    else
      weights.mixer = attention(name + "self_attn.");
    weights.post_norm = vector(name + "post_attention_layernorm.weight", hidden);
    weights.gate_up = matrix({all_rows(name + "mlp.gate_proj.weight", intermediate, hidden),
                              all_rows(name + "mlp.up_proj.weight", intermediate, hidden)});
    weights.down = matrix({all_rows(name + "mlp.down_proj.weight", hidden, intermediate)});
    return weights;
  }

  QwenDeltaWeights delta(const std::string& name) {
    const DeltaConfig& sizes = config_.delta;
    QwenDeltaWeights weights;
    weights.in_proj =
        matrix(config_.architecture == Architecture::kQwen3Next ? interleaved_rows(name) : contiguous_rows(name));
    const int64_t channels = sizes.conv_channels(), width = sizes.conv_width;
    const Buffer<float> conv = floats(tensor(name + "conv1d.weight", {channels, 1, width}));
    weights.conv = Buffer<float>(conv.size());
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t i = 0; i < width; ++i) weights.conv[i * channels + c] = conv[c * width + i];
    weights.a_log = vector(name + "A_log", sizes.shape.heads);
    weights.dt_bias = vector(name + "dt_bias", sizes.shape.heads);
    weights.norm = vector(name + "norm.weight", sizes.shape.value_size);
    weights.out_proj = matrix({all_rows(name + "out_proj.weight", config_.hidden_size, sizes.value_channels())});
    return weights;
  }

  // Qwen3.5: a tensor a part.
  std::vector<RowRange> contiguous_rows(const std::string& name) {
    const DeltaConfig& sizes = config_.delta;
    const int64_t hidden = config_.hidden_size;
    return {all_rows(name + "in_proj_qkv.weight", sizes.conv_channels(), hidden),
            all_rows(name + "in_proj_z.weight", sizes.value_channels(), hidden),
            all_rows(name + "in_proj_b.weight", sizes.shape.heads, hidden),
            all_rows(name + "in_proj_a.weight", sizes.shape.heads, hidden)};
  }

  // Qwen3-Next: per key head [q K | k K | v r*V | z r*V] and [b r | a r], r = H / G.
  std::vector<RowRange> interleaved_rows(const std::string& name) {
    const DeltaShape& shape = config_.delta.shape;
    const int64_t hidden = config_.hidden_size, key = shape.key_size;
    const int64_t ratio = shape.heads / shape.key_heads, value = ratio * shape.value_size;
    const Tensor& qkvz = tensor(name + "in_proj_qkvz.weight", {shape.key_heads * (2 * key + 2 * value), hidden});
    const Tensor& ba = tensor(name + "in_proj_ba.weight", {2 * shape.heads, hidden});
    const auto part = [&](int64_t first, int64_t count) {
      return part_of_heads(qkvz, shape.key_heads, 2 * key + 2 * value, first, count);
    };
    std::vector<RowRange> rows = part(0, key);
    append(rows, part(key, key));
    append(rows, part(2 * key, value));
    append(rows, part(2 * key + value, value));
    append(rows, part_of_heads(ba, shape.key_heads, 2 * ratio, 0, ratio));
    append(rows, part_of_heads(ba, shape.key_heads, 2 * ratio, ratio, ratio));
    return rows;
  }

  QwenAttentionWeights attention(const std::string& name) {
    const AttentionConfig& sizes = config_.attention;
    const int64_t hidden = config_.hidden_size, head = sizes.head_size, kv = sizes.kv_heads * head;
    // Per query head [query | gate].
    const Tensor& q = tensor(name + "q_proj.weight", {2 * sizes.query_heads * head, hidden});
    std::vector<RowRange> rows = part_of_heads(q, sizes.query_heads, 2 * head, 0, head);
    rows.push_back(all_rows(name + "k_proj.weight", kv, hidden));
    rows.push_back(all_rows(name + "v_proj.weight", kv, hidden));
    append(rows, part_of_heads(q, sizes.query_heads, 2 * head, head, head));
    QwenAttentionWeights weights;
    weights.in_proj = matrix(rows);
    weights.q_norm = vector(name + "q_norm.weight", head);
    weights.k_norm = vector(name + "k_norm.weight", head);
    weights.out_proj = matrix({all_rows(name + "o_proj.weight", hidden, sizes.query_heads * head)});
    return weights;
  }

  const Tensor& tensor(const std::string& name, std::initializer_list<int64_t> shape) {
    return checkpoint_.require_tensor(name, kFloatDtypes, std::span(shape.begin(), shape.size()));
  }

  RowRange all_rows(const std::string& name, int64_t outputs, int64_t inputs) {
    return {&tensor(name, {outputs, inputs}), 0, outputs};
  }

  Buffer<float> vector(const std::string& name, int64_t size) { return floats(tensor(name, {size})); }

  Buffer<float> floats(const Tensor& from) {
    Buffer<float> values(static_cast<size_t>(from.elements()));
    read_floats(from, {values.data(), values.size()});
    add_to_hash(std::as_bytes(std::span(values.data(), values.size())));
    bytes_ += values.size() * sizeof(float);
    return values;
  }

  // The rows of all ranges, one below the other.
  Matrix matrix(const std::vector<RowRange>& ranges) {
    Matrix matrix;
    matrix.inputs = ranges[0].tensor->shape[1];
    bool is_bf16 = true;
    for (const RowRange& range : ranges) {
      matrix.outputs += range.count;
      is_bf16 = is_bf16 && range.tensor->dtype == Dtype::kBF16;
    }
    const size_t elements = static_cast<size_t>(matrix.outputs) * static_cast<size_t>(matrix.inputs);
    if (is_bf16)
      matrix.bf16 = Buffer<Bf16>(elements);
    else
      matrix.f32 = Buffer<float>(elements);
    size_t at = 0;
    for (const RowRange& range : ranges) {
      const size_t row_bytes =
          static_cast<size_t>(matrix.inputs) * static_cast<size_t>(dtype_bits(range.tensor->dtype) / 8);
      const auto bytes = range.tensor->bytes.subspan(static_cast<size_t>(range.first) * row_bytes,
                                                     static_cast<size_t>(range.count) * row_bytes);
      const size_t count = static_cast<size_t>(range.count) * static_cast<size_t>(matrix.inputs);
      if (is_bf16)
        std::memcpy(matrix.bf16.data() + at, bytes.data(), bytes.size());
      else
        read_floats({range.tensor->name, range.tensor->dtype, {range.count, matrix.inputs}, bytes},
                    {matrix.f32.data() + at, count});
      at += count;
    }
    add_to_hash(std::as_bytes(std::span(matrix.bf16.data(), matrix.bf16.size())));
    add_to_hash(std::as_bytes(std::span(matrix.f32.data(), matrix.f32.size())));
    bytes_ += matrix.bytes();
    return matrix;
  }

  void add_to_hash(std::span<const std::byte> bytes) { XXH3_64bits_update(hash_, bytes.data(), bytes.size()); }

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  std::string prefix_;
  XXH3_state_t* hash_;
  size_t bytes_ = 0;
};

}  // namespace

QwenWeights load_qwen_weights(const Checkpoint& checkpoint, const ModelConfig& config) {
  return Loader(checkpoint, config).load();
}

}  // namespace replayssm
