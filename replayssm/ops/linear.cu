// Matrix products on a GPU by cuBLASLt.
#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <type_traits>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/cuda_checks.h"
#include "replayssm/ops/linear_few.cuh"

namespace replayssm {
namespace {

// What NVIDIA recommends for Hopper; a heuristic that may use less names slower algorithms.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

void check(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, "linear: cuBLASLt: {}: {}", what, cublasLtGetStatusString(status));
}

template <typename T>
constexpr cudaDataType_t type_of() {
  return std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;
}

// What the choice of an algorithm follows from.
struct ProductKey {
  cudaDataType_t type, out_type;
  int64_t tokens, inputs, outputs, weight_stride, x_stride, y_stride, weight_step, x_step, y_step;
  int count;
  uint32_t weight_alignment, x_alignment, y_alignment;
  bool is_added;

  auto operator<=>(const ProductKey&) const = default;
};

// cuBLASLt's descriptions of one product, column-major: the transpose of [O, I] times [I, N].
struct Product {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  Product() = default;
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() {
    if (y != nullptr) cublasLtMatrixLayoutDestroy(y);
    if (x != nullptr) cublasLtMatrixLayoutDestroy(x);
    if (weight != nullptr) cublasLtMatrixLayoutDestroy(weight);
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

cublasLtMatrixLayout_t make_layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride, int count,
                                   int64_t step) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, stride), "describe a matrix");
  if (count > 1) {
    check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
          "describe a matrix");
    check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)),
          "describe a matrix");
  }
  return layout;
}

// The largest power of two up to 256 that divides all of them.
uint32_t alignment_of(const void* pointer, std::initializer_list<int64_t> bytes) {
  uint64_t all = reinterpret_cast<uintptr_t>(pointer) | 256;
  for (const int64_t value : bytes) all |= static_cast<uint64_t>(value);
  return uint32_t{1} << std::countr_zero(all);
}

}  // namespace

struct MatrixProducts::Parts {
  explicit Parts(CudaDevice& owner) : device(owner), workspace(kWorkspaceBytes, owner) {
    check(cublasLtCreate(&handle), "start");
  }
  ~Parts() {
    products.clear();
    cublasLtDestroy(handle);
  }

  const Product& find(const ProductKey& key);

  CudaDevice& device;
  DeviceBuffer<std::byte> workspace;
  cublasLtHandle_t handle = nullptr;
  std::map<ProductKey, Product> products;
};

MatrixProducts::MatrixProducts(CudaDevice& device) : parts_(std::make_unique<Parts>(device)) {}
MatrixProducts::~MatrixProducts() = default;

const Product& MatrixProducts::Parts::find(const ProductKey& key) {
  if (const auto at = products.find(key); at != products.end()) return at->second;
  Product& product = products[key];
  try {
    check(cublasLtMatmulDescCreate(&product.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a product");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(
        cublasLtMatmulDescSetAttribute(product.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
        "describe a product");
    product.weight = make_layout(key.type, key.inputs, key.outputs, key.weight_stride, key.count, key.weight_step);
    product.x = make_layout(key.type, key.inputs, key.tokens, key.x_stride, key.count, key.x_step);
    product.y = make_layout(key.out_type, key.outputs, key.tokens, key.y_stride, key.count, key.y_step);
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "describe a preference");
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.weight_alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.x_alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.y_alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.y_alignment);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmulAlgoGetHeuristic(handle, product.operation, product.weight, product.x, product.y,
                                              product.y, preference, 1, &result, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    require(status == CUBLAS_STATUS_SUCCESS && count == 1,
            "linear: cuBLASLt has no algorithm for {} products of [{}, {}] with {} tokens ({})", key.count, key.outputs,
            key.inputs, key.tokens, cublasLtGetStatusString(status));
    product.algorithm = result.algo;
  } catch (...) {
    products.erase(key);
    throw;
  }
  return product;
}

template <typename T, typename Out>
bool can_fuse(const BasicLinear<T, Out>& args) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  if (!std::is_same_v<T, Bf16> || args.tokens > kFewTokens || args.heads != 1 || args.parts != 1) return false;
  if (alignment_of(args.weight, {args.inputs * kSize}) < 16) return false;
  const BasicRmsNorm<float, T>* const norm = args.norm;
  if (norm == nullptr) return alignment_of(args.x, {args.x_stride * kSize}) >= 16;
  constexpr auto kNormSize = static_cast<int64_t>(sizeof(float));
  return args.inputs <= kLargestFewNorm && norm->part_count == 0 &&
         alignment_of(norm->x, {norm->x_stride * kNormSize}) >= 16 && alignment_of(norm->weight, {}) >= 16;
}

namespace {

template <typename T, typename Out>
void check_fusion(const BasicLinear<T, Out>& args) {
  if (args.norm == nullptr && !args.activation) return;
  require(can_fuse(args),
          "linear: with a norm or an activation expected at most {} tokens and one head in BF16, arrays aligned to 16 "
          "bytes and a norm of at most {} elements, got {} tokens, {} heads, {} inputs",
          kFewTokens, kLargestFewNorm, args.tokens, args.heads, args.inputs);
  require(!args.activation || !args.is_added, "linear: expected an activation or a sum that is added, got both");
  require(args.activation != Activation::kSwiGlu || args.outputs % 2 == 0,
          "linear: expected an even number of outputs for a gate and what it multiplies, got {}", args.outputs);
  if (args.norm == nullptr) return;
  const BasicRmsNorm<float, T>& norm = *args.norm;
  check_norm_sizes("linear", norm, "heads", norm.heads);
  require(norm.tokens == args.tokens && norm.heads == 1 && norm.size == args.inputs && norm.y == args.x,
          "linear: expected the norm of {} vectors of {} elements to x, got {} of {} heads of {} elements{}",
          args.tokens, args.inputs, norm.tokens, norm.heads, norm.size, norm.y == args.x ? "" : " to another array");
  require(!has_null({norm.x, norm.weight}), "linear: the norm's x and weight must not be null");
}

}  // namespace

template <typename T, typename Out>
void linear(const BasicLinear<T, Out>& args, MatrixProducts& products) {
  require(args.tokens >= 0 && args.inputs >= 0 && args.outputs >= 0 && args.heads >= 1,
          "linear: expected sizes >= 0 and heads >= 1, got {} tokens, {} inputs, {} outputs, {} heads", args.tokens,
          args.inputs, args.outputs, args.heads);
  if (args.tokens == 0 || args.outputs == 0) return;
  require(args.inputs > 0, "linear: on a GPU expected inputs, got none");
  require(!has_null({args.weight, args.x, args.y}), "linear: weight, x and y must not be null");
  const int64_t results = args.activation == Activation::kSwiGlu ? args.outputs / 2 : args.outputs;
  require(args.x_stride >= args.inputs && args.y_stride >= results,
          "linear: expected strides of at least {} for x and {} for y, got {} and {}", args.inputs, results,
          args.x_stride, args.y_stride);
  require(args.parts >= 1 && args.inputs % args.parts == 0 && (args.parts == 1 || (args.heads == 1 && !args.is_added)),
          "linear: expected parts of the inputs alike, of one head, and sums that are not added, got {} parts of {} "
          "inputs, {} heads{}",
          args.parts, args.inputs, args.heads, args.is_added ? ", added" : "");
  check_alignment("linear", sizeof(T), {{"weight", args.weight}, {"x", args.x}});
  check_alignment("linear", sizeof(Out), {{"y", args.y}});
  constexpr auto kSize = static_cast<int64_t>(sizeof(T)), kOutSize = static_cast<int64_t>(sizeof(Out));
  MatrixProducts::Parts& parts = products.parts();
  check_fusion(args);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (can_fuse(args)) return linear_few(args, parts.device);
  }
  // As many products as there are heads or parts, each so far behind the last.
  const bool has_heads = args.heads > 1, has_parts = args.parts > 1;
  const int64_t inputs = args.inputs / args.parts;
  const int64_t weight_step = has_heads ? args.inputs * args.outputs : has_parts ? inputs : 0;
  const int64_t x_step = has_heads ? args.x_step : has_parts ? inputs : 0;
  const int64_t y_step = has_heads || has_parts ? args.y_step : 0;
  const Product& product =
      parts.find({.type = type_of<T>(),
                  .out_type = type_of<Out>(),
                  .tokens = args.tokens,
                  .inputs = inputs,
                  .outputs = args.outputs,
                  .weight_stride = args.inputs,
                  .x_stride = args.x_stride,
                  .y_stride = args.y_stride,
                  .weight_step = weight_step,
                  .x_step = x_step,
                  .y_step = y_step,
                  .count = args.heads * args.parts,
                  .weight_alignment = alignment_of(args.weight, {args.inputs * kSize, weight_step * kSize}),
                  .x_alignment = alignment_of(args.x, {args.x_stride * kSize, x_step * kSize}),
                  .y_alignment = alignment_of(args.y, {args.y_stride * kOutSize, y_step * kOutSize}),
                  .is_added = args.is_added});
  const float one = 1.0f, beta = args.is_added ? 1.0f : 0.0f;
  check(cublasLtMatmul(parts.handle, product.operation, &one, args.weight, product.weight, args.x, product.x, &beta,
                       args.y, product.y, args.y, product.y, &product.algorithm, parts.workspace.data(),
                       parts.workspace.size(), static_cast<cudaStream_t>(parts.device.stream())),
        "run");
}

#define REPLAYSSM_LINEAR(T, Out)                                     \
  template void linear(const BasicLinear<T, Out>&, MatrixProducts&); \
  template bool can_fuse(const BasicLinear<T, Out>&);
REPLAYSSM_LINEAR(float, float)
REPLAYSSM_LINEAR(Bf16, Bf16)
REPLAYSSM_LINEAR(Bf16, float)
#undef REPLAYSSM_LINEAR

}  // namespace replayssm
