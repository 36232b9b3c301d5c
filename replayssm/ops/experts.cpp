// Mixture of experts: a thread routes whole tokens and moves whole rows.
#include "replayssm/ops/experts.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "replayssm/ops/experts.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>
#include <limits>

#include "replayssm/core/error.h"
#include "replayssm/ops/checks.h"
#include "replayssm/ops/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm {
namespace HWY_NAMESPACE {

// One call owns the rows begin .. end-1.
void add_rows_kernel(const AddRows& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* x = args.x + i * args.x_stride;
    float* y = args.y + (args.token == nullptr ? i : args.token[i]) * args.y_stride;
    if (args.weight == nullptr) {
      for_each_vector(args.size,
                      [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Add(load(y), load(x)), y); });
    } else {
      const Floats weight = hn::Set(FloatTag(), args.weight[i]);
      for_each_vector(args.size, [&](const auto& load, const auto& store)
                                     HWY_ATTR { store(hn::MulAdd(weight, load(x), load(y)), y); });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace replayssm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm {
HWY_EXPORT(add_rows_kernel);

namespace {

constexpr double kExcluded = -std::numeric_limits<double>::infinity();

// Rows of one range of a parallel loop.
int64_t rows_at_once(int64_t size) {
  return std::max<int64_t>(1, 8192 / size);
}

void score_experts(const RouteExperts& args, const float* logits, double* scores) {
  const int experts = args.experts;
  if (args.router.scores == RouterScores::kSigmoid) {
    for (int e = 0; e < experts; ++e) scores[e] = 1 / (1 + std::exp(-static_cast<double>(logits[e])));
    return;
  }
  const double largest = *std::max_element(logits, logits + experts);
  double total = 0;
  for (int e = 0; e < experts; ++e) total += scores[e] = std::exp(logits[e] - largest);
  for (int e = 0; e < experts; ++e) scores[e] /= total;
}

// The largest of choice[0 .. count-1], of equals the first.
int first_largest(const double* choice, int count) {
  return static_cast<int>(std::max_element(choice, choice + count) - choice);
}

double sum_of_best_two(const double* choice, int count) {
  double best = kExcluded, second = kExcluded;
  for (int e = 0; e < count; ++e) {
    second = std::max(second, std::min(best, choice[e]));
    best = std::max(best, choice[e]);
  }
  return best + second;
}

// Excludes the experts of all groups but the top_groups best.
void keep_best_groups(const RouteExperts& args, double* choice, double* group_scores) {
  const int groups = args.router.groups, size = args.experts / groups;
  for (int g = 0; g < groups; ++g) group_scores[g] = sum_of_best_two(choice + g * size, size);
  for (int dropped = args.router.top_groups; dropped < groups; ++dropped) {
    // The worst, of equals the last.
    int worst = 0;
    for (int g = 1; g < groups; ++g)
      if (group_scores[g] <= group_scores[worst]) worst = g;
    group_scores[worst] = std::numeric_limits<double>::infinity();
    std::fill_n(choice + worst * size, size, kExcluded);
  }
}

// `scratch` holds 3 E numbers.
void route_token(const RouteExperts& args, int64_t token, double* scratch) {
  const RouterConfig& router = args.router;
  double *scores = scratch, *choice = scores + args.experts, *group_scores = choice + args.experts;
  int32_t* expert = args.expert + token * args.top_k;
  float* weight = args.weight + token * args.top_k;
  score_experts(args, args.logits + token * args.logits_stride, scores);
  bool is_finite = true;
  for (int e = 0; e < args.experts; ++e) {
    choice[e] = router.has_correction ? scores[e] + static_cast<double>(args.correction[e]) : scores[e];
    is_finite = is_finite && std::isfinite(choice[e]) && std::isfinite(args.logits[token * args.logits_stride + e]);
  }
  if (!is_finite) {
    for (int i = 0; i < args.top_k; ++i) expert[i] = i;
    std::fill_n(weight, args.top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  if (router.groups > 1) keep_best_groups(args, choice, group_scores);
  double sum = 0;
  for (int i = 0; i < args.top_k; ++i) {
    expert[i] = first_largest(choice, args.experts);
    choice[expert[i]] = kExcluded;
    sum += scores[expert[i]];
  }
  const double divisor = router.is_normalised ? sum + 1e-20 : 1.0;
  for (int i = 0; i < args.top_k; ++i) weight[i] = static_cast<float>(router.scale * scores[expert[i]] / divisor);
}

template <typename Rows>
void check_rows(const Rows& args, bool has_tokens, const char* op) {
  require(args.rows >= 0 && args.size >= 0, "{}: expected sizes >= 0, got rows {} and size {}", op, args.rows,
          args.size);
  if (args.rows == 0 || args.size == 0) return;
  require(has_tokens && args.x != nullptr && args.y != nullptr, "{}: token, x and y must not be null", op);
  require(args.x_stride >= args.size && args.y_stride >= args.size,
          "{}: expected x_stride and y_stride >= {}, got {} and {}", op, args.size, args.x_stride, args.y_stride);
}

}  // namespace

void check_router(const RouterConfig& router, int experts, int top_k) {
  require(experts >= 1, "experts: expected 1 or more, got {}", experts);
  require(top_k >= 1 && top_k <= experts, "top_k: expected 1 .. {} (the experts), got {}", experts, top_k);
  require(router.groups >= 1 && experts % router.groups == 0, "groups: expected a divisor of {} (the experts), got {}",
          experts, router.groups);
  const int size = experts / router.groups;
  require(router.groups == 1 || size >= 2, "groups: expected groups of at least two of the {} experts, got {} groups",
          experts, router.groups);
  require(router.top_groups >= 1 && router.top_groups <= router.groups, "top_groups: expected 1 .. {}, got {}",
          router.groups, router.top_groups);
  require(router.top_groups * size >= top_k, "top_k: expected at most {} (the experts of {} groups), got {}",
          router.top_groups * size, router.top_groups, top_k);
  require(std::isfinite(router.scale), "scale: expected a finite number, got {}", router.scale);
}

void route_experts(const RouteExperts& args, Device& device, std::span<std::byte> workspace) {
  check_route_experts(args);
  if (args.tokens == 0) return;
  const size_t bytes = route_experts_workspace_bytes(args.experts, device);
  require(workspace.size() >= bytes, "route_experts: expected a workspace of {} bytes, got {}", bytes,
          workspace.size());
  device.threads().parallel_for(args.tokens, 1, [&](int64_t begin, int64_t end, int thread) {
    double* scratch = reinterpret_cast<double*>(workspace.data()) + int64_t{3} * thread * args.experts;
    for (int64_t token = begin; token < end; ++token) route_token(args, token, scratch);
  });
}

size_t route_experts_workspace_bytes(int experts, Device& device) {
  return 3 * sizeof(double) * static_cast<size_t>(experts) * static_cast<size_t>(device.threads().size());
}

void group_choices(const GroupChoices& args) {
  require(args.tokens >= 0 && args.experts >= 0 && args.top_k >= 1,
          "group_choices: expected sizes >= 0 and top_k >= 1, got tokens {}, experts {} and top_k {}", args.tokens,
          args.experts, args.top_k);
  require(args.begin != nullptr, "group_choices: begin must not be null");
  const int64_t choices = args.tokens * args.top_k;
  require(choices == 0 || (args.expert != nullptr && args.expert_weight != nullptr && args.token != nullptr &&
                           args.weight != nullptr),
          "group_choices: expert, expert_weight, token and weight must not be null");
  // begin[e + 1] counts the choices of e, then is the place of its next one, and at last that of the first of e + 1.
  std::fill_n(args.begin, args.experts + 1, 0);
  for (int64_t i = 0; i < choices; ++i) {
    require(args.expert[i] >= 0 && args.expert[i] < args.experts, "group_choices: expected experts of 0 .. {}, got {}",
            args.experts - 1, args.expert[i]);
    ++args.begin[args.expert[i] + 1];
  }
  int64_t sum = 0;
  for (int e = 0; e < args.experts; ++e) {
    const int64_t count = args.begin[e + 1];
    args.begin[e + 1] = sum;
    sum += count;
  }
  for (int64_t i = 0; i < choices; ++i) {
    const int64_t place = args.begin[args.expert[i] + 1]++;
    args.token[place] = static_cast<int32_t>(i / args.top_k);
    args.weight[place] = args.expert_weight[i];
  }
  for (int e = 0; e < args.experts; ++e)
    for (int64_t i = args.begin[e] + 1; i < args.begin[e + 1]; ++i)
      require(args.token[i - 1] != args.token[i], "group_choices: expected different experts, token {} has {} twice",
              args.token[i], e);
}

void gather_rows(const GatherRows& args, Device& device) {
  check_rows(args, args.token != nullptr, "gather_rows");
  if (args.rows == 0 || args.size == 0) return;
  device.threads().parallel_for(args.rows, rows_at_once(args.size), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      std::copy_n(args.x + args.token[i] * args.x_stride, args.size, args.y + i * args.y_stride);
  });
}

void add_rows(const AddRows& args, Device& device) {
  check_rows(args, true, "add_rows");
  if (args.rows == 0 || args.size == 0) return;
  const auto kernel = HWY_DYNAMIC_DISPATCH(add_rows_kernel);
  device.threads().parallel_for(args.rows, rows_at_once(args.size),
                                [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace replayssm
#endif  // HWY_ONCE
