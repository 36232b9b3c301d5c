// Compares ops/linear with oneDNN: time by batch, and whether a token's bits depend on the batch or the thread count.
//
//   replayssm_bench_linear [threads]        threads: 0 or nothing for one per core
//
// Times are the smallest of many runs, in microseconds; the weights rotate over more memory than the caches of a core
// hold. Exit status 1 if a token's bits of ours depend on the batch or the thread count.
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "replayssm/core/buffer.h"
#include "replayssm/core/error.h"
#include "replayssm/core/simd.h"
#include "replayssm/ops/linear.h"

namespace {

using namespace replayssm;

constexpr int64_t kMaxTokens = 512;
const int64_t kBatches[] = {1, 2, 4, 8, 16, 32, 64, 512};

struct Shape {
  int64_t inputs, outputs;
};
const Shape kShapes[] = {{2560, 9216}, {2560, 4096}, {256, 1024}};

// Several weight matrices, so that one batch-1 product does not find the last one's weights in the caches.
struct Problem {
  explicit Problem(const Shape& s)
      : shape(s), copies(std::max<int64_t>(1, (int64_t{64} << 20) / (s.inputs * s.outputs))) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    x = Buffer<float>(kMaxTokens * s.inputs);
    for (float& value : x) value = normal(random);
    for (int64_t c = 0; c < copies; ++c) {
      weight.emplace_back(s.inputs * s.outputs);
      for (Bf16& value : weight.back()) value = to_bf16(normal(random));
    }
  }

  Shape shape;
  int64_t copies;
  Buffer<float> x;
  std::vector<Buffer<Bf16>> weight;
};

// A way to multiply; run(tokens, copy, y) writes [tokens, outputs].
struct Candidate {
  virtual ~Candidate() = default;
  virtual void run(int64_t tokens, int64_t copy, float* y) = 0;
};

struct Ours : Candidate {
  Ours(const Problem& p, int threads) : problem(p), device(threads) {}
  void run(int64_t tokens, int64_t copy, float* y) override {
    const Shape& shape = problem.shape;
    linear({.tokens = tokens,
            .inputs = shape.inputs,
            .outputs = shape.outputs,
            .weight = problem.weight[copy].data(),
            .x = problem.x.data(),
            .x_stride = shape.inputs,
            .y = y,
            .y_stride = shape.outputs},
           device);
  }
  const Problem& problem;
  Device device;
};

using dnnl::memory;

// oneDNN's matmul on weights that were put into the layout it asks for. With `parts` == 0 in FP32 on widened weights;
// else in BF16 with x split into that many BF16 parts, whose products are added up: 2 parts keep some 17 bits of x.
struct OneDnn : Candidate {
  OneDnn(const Problem& p, int thread_count, int part_count)
      : problem(p), threads(thread_count), parts(part_count), engine(dnnl::engine::kind::cpu, 0), stream(engine) {}

  struct Prepared {
    int64_t tokens = 0;
    dnnl::matmul multiply;
    memory x, y;
    std::vector<memory> weight;
  };

  void run(int64_t tokens, int64_t copy, float* y) override {
    omp_set_num_threads(threads);
    if (prepared.tokens != tokens) prepare(tokens);
    const int64_t elements = tokens * problem.shape.inputs, outputs = tokens * problem.shape.outputs;
    if (parts == 0) {
      prepared.x.set_data_handle(const_cast<float*>(problem.x.data()));
      prepared.y.set_data_handle(y);
    } else {
      split(elements);
      prepared.x.set_data_handle(split_x.data());
      prepared.y.set_data_handle(split_y.data());
    }
    prepared.multiply.execute(
        stream, {{DNNL_ARG_SRC, prepared.x}, {DNNL_ARG_WEIGHTS, prepared.weight[copy]}, {DNNL_ARG_DST, prepared.y}});
    stream.wait();
    if (parts == 0) return;
#pragma omp parallel for
    for (int64_t i = 0; i < outputs; ++i) {
      float sum = split_y[(parts - 1) * outputs + i];
      for (int part = parts - 2; part >= 0; --part) sum += split_y[part * outputs + i];
      y[i] = sum;
    }
  }

  void split(int64_t elements) {
#pragma omp parallel for
    for (int64_t i = 0; i < elements; ++i) {
      float rest = problem.x[i];
      for (int part = 0; part < parts; ++part) {
        split_x[part * elements + i] = to_bf16(rest);
        rest -= to_float(split_x[part * elements + i]);
      }
    }
  }

  void prepare(int64_t tokens) {
    const Shape& shape = problem.shape;
    const auto type = parts == 0 ? memory::data_type::f32 : memory::data_type::bf16;
    const int64_t rows = std::max(1, parts) * tokens;
    const memory::desc x({rows, shape.inputs}, type, memory::format_tag::ab);
    const memory::desc y({rows, shape.outputs}, memory::data_type::f32, memory::format_tag::ab);
    const memory::desc any({shape.inputs, shape.outputs}, type, memory::format_tag::any);
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(x, any, y), engine);
    prepared = {tokens, dnnl::matmul(description), memory(x, engine, nullptr), memory(y, engine, nullptr), {}};
    split_x.resize(parts * tokens * shape.inputs);
    split_y.resize(parts * tokens * shape.outputs);
    for (const Buffer<Bf16>& weight : problem.weight) {
      // w is [O, I]: its transpose, as it lies.
      const memory::desc plain({shape.inputs, shape.outputs}, memory::data_type::bf16, memory::format_tag::ba);
      memory from(plain, engine, const_cast<Bf16*>(weight.data()));
      prepared.weight.emplace_back(description.weights_desc(), engine);
      dnnl::reorder(from, prepared.weight.back()).execute(stream, from, prepared.weight.back());
      stream.wait();
    }
  }

  const Problem& problem;
  int threads, parts;
  dnnl::engine engine;
  dnnl::stream stream;
  Prepared prepared;
  std::vector<Bf16> split_x;
  std::vector<float> split_y;
};

// One thread is timed by the processor time it used, so that a busy machine does not count; more by the clock.
double now_us(int threads) {
  timespec time{};
  clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

double smallest_us(Candidate& candidate, const Problem& problem, int64_t tokens, int threads, std::vector<float>& y) {
  // Threads of the candidate before may still spin.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  double best = 1e30, total = 0;
  int64_t copy = 0;
  for (int run = 0; run < 7 || (total < 0.3e6 && run < 200); ++run) {
    copy = (copy + 1) % problem.copies;
    const double begin = now_us(threads);
    candidate.run(tokens, copy, y.data());
    const double us = now_us(threads) - begin;
    if (run > 0) best = std::min(best, us);
    total += us;
  }
  return best;
}

bool has_same_bits(const std::vector<float>& a, const std::vector<float>& b, int64_t count) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(count) * sizeof(float)) == 0;
}

double relative_error(const Problem& problem, const std::vector<float>& y, int64_t tokens) {
  double error = 0, norm = 0;
  const Shape& shape = problem.shape;
  for (int64_t n = 0; n < tokens; ++n) {
    for (int64_t o = 0; o < shape.outputs; o += 37) {
      double sum = 0;
      for (int64_t i = 0; i < shape.inputs; ++i)
        sum += static_cast<double>(problem.x[n * shape.inputs + i]) * to_float(problem.weight[0][o * shape.inputs + i]);
      error += (y[n * shape.outputs + o] - sum) * (y[n * shape.outputs + o] - sum);
      norm += sum * sum;
    }
  }
  return std::sqrt(error / norm);
}

struct Column {
  const char* name;
  std::unique_ptr<Candidate> some_threads, one_thread;
  bool is_batch_free = true, is_thread_free = true;
  double error = 0;
};

int compare(const Shape& shape, int threads) {
  const Problem problem(shape);
  std::vector<Column> columns;
  columns.push_back({"ours", std::make_unique<Ours>(problem, threads), std::make_unique<Ours>(problem, 1)});
  columns.push_back(
      {"oneDNN f32", std::make_unique<OneDnn>(problem, threads, 0), std::make_unique<OneDnn>(problem, 1, 0)});
  columns.push_back(
      {"oneDNN bf16 x 2", std::make_unique<OneDnn>(problem, threads, 2), std::make_unique<OneDnn>(problem, 1, 2)});
  columns.push_back(
      {"oneDNN bf16 x 3", std::make_unique<OneDnn>(problem, threads, 3), std::make_unique<OneDnn>(problem, 1, 3)});

  std::printf("%ld x %ld, us\n%6s", static_cast<long>(shape.inputs), static_cast<long>(shape.outputs), "batch");
  for (const Column& column : columns) std::printf("%18s", column.name);
  std::printf("%18s\n", "ours GFLOP/s");
  std::vector<float> y(kMaxTokens * shape.outputs), other(y.size());
  for (int64_t tokens : kBatches) {
    std::printf("%6ld", static_cast<long>(tokens));
    double ours = 0;
    for (Column& column : columns) {
      const double us = smallest_us(*column.some_threads, problem, tokens, threads, y);
      if (ours == 0) ours = us;
      std::printf("%18.1f", us);
      column.some_threads->run(tokens, 0, y.data());
      column.one_thread->run(tokens, 0, other.data());
      column.is_thread_free = column.is_thread_free && has_same_bits(y, other, tokens * shape.outputs);
      if (tokens == 1) column.error = relative_error(problem, y, 1);
      column.one_thread->run(1, 0, other.data());
      column.is_batch_free = column.is_batch_free && has_same_bits(y, other, shape.outputs);
    }
    std::printf("%18.0f\n", 2e-3 * static_cast<double>(tokens * shape.inputs * shape.outputs) / ours);
    std::fflush(stdout);
  }
  for (const Column& column : columns)
    std::printf("  %-16s relative error %.1e, a token's bits depend on the batch: %s, on the threads: %s\n",
                column.name, column.error, column.is_batch_free ? "no" : "yes", column.is_thread_free ? "no" : "yes");
  return columns[0].is_batch_free && columns[0].is_thread_free ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int asked = argc > 1 ? std::atoi(argv[1]) : 0;
    const int threads = Device(asked).threads().size();
    std::printf("%d threads, ours with %s\n", threads, simd_target().c_str());
    int status = 0;
    for (const Shape& shape : kShapes) status |= compare(shape, threads);
    return status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replayssm_bench_linear: %s\n", error.what());
    return 2;
  }
}
