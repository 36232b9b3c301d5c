// Loading a model where somebody may be watching.
#pragma once

#include <string>

#include "apps/terminal.h"
#include "replayssm/model/model.h"

namespace replayssm {

// load_model, with a progress line.
inline Model load_shown(const std::string& directory) {
  const Progress progress("loading " + directory);
  return load_model(directory);
}

}  // namespace replayssm
