// One sequence of a GPU's pool in a session file. The functions are defined only where the library is built with
// REPLAYSSM_CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/state/cuda_pool.h"

namespace replayssm {

// As the functions of session_file.h, with the same files: what is saved from a pool on either side continues in one on
// the other. Activations, keys and values are widened in the file, which is exact, so a pool of any element saves; one
// of BF16 or F16 takes only a file in which they are such numbers, as they are from a pool of its own element, and
// refuses others. Both wait for the GPU. On a GPU the state and its readouts have the saved pool's bits as
// session_file.h says; from one side to the other what is saved has, and what is computed from it agrees up to
// rounding. (The products of keys, ring_gram, are computed: a GPU keeps none, and they are made when its pool saves.)
void save_session(CudaStatePool& pool, Handle handle, const std::string& path);
Handle load_session(CudaStatePool& pool, const std::string& path, int64_t max_tokens);

}  // namespace replayssm
