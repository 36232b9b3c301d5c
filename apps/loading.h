// Loading a model where somebody may be watching.
#pragma once

#include <string>

#include "apps/terminal.h"
#include "replayssm/model/model.h"

namespace replayssm {

// A line that grows with a model's loading.
class LoadLine {
 public:
  explicit LoadLine(const std::string& directory) : line_("loading " + directory) {}

  LoadProgress progress() {
    return
        [this](size_t bytes, size_t total) { line_.update(static_cast<int64_t>(bytes), static_cast<int64_t>(total)); };
  }

 private:
  Progress line_;
};

// load_model, with a progress line.
inline Model load_shown(const std::string& directory) {
  LoadLine line(directory);
  return load_model(directory, line.progress());
}

#ifdef REPLAYSSM_HAS_CUDA
// load_cuda_model, with a progress line.
inline CudaModel load_shown(const std::string& directory, Dtype element, CudaDevice& device) {
  LoadLine line(directory);
  return load_cuda_model(directory, element, device, line.progress());
}
#endif

}  // namespace replayssm
