// The timed runs of bench/ops.h on a GPU.
#pragma once

#include <vector>

#include "bench/layers.h"
#include "bench/ops.h"

namespace replayssm::bench {

// `options` as run_ops has checked and completed them. Throws Error without a GPU, or if the library is built without
// CUDA.
void run_cuda_ops(const OpsOptions& options, const Layer& layer, const std::vector<Prompt>& prompts,
                  const ShowResult& show);

}  // namespace replayssm::bench
