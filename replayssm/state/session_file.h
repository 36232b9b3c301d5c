// One sequence's state in a file: saved at any step, continued in any pool of the same model, bit for bit.
#pragma once

#include <cstdint>
#include <string>

#include "replayssm/state/pool.h"

namespace replayssm {

// Writes the state of `handle` to `path`, whole or not at all. The sequence does not change. Throws Error if the handle
// is not a live sequence, if its step was aborted or a step is begun, or if the file cannot be written.
//
// The file is a safetensors file, all tensors F32, h the history and n the tokens of the cursor:
//   layers.<i>.checkpoint [H, V, K]           the words, in whichever form the pool keeps them
//   layers.<i>.ring_<name> [heads, h, size]   each array of the layer's ring as recurrent_arrays lists them
//                          [heads, h, h]      a square one (row: the later record; zero unless the column is earlier)
//   layers.<i>.convolution [W - 1, channels]  the last inputs
//   layers.<i>.k, layers.<i>.v [M, n, D]      no v of a layer that keeps latents
// Records, inputs and keys lie in the order of their tokens, so the file does not depend on the pool's sizes. Its
// metadata: format, version, model, layers, precision, base, history and checksum, the XXH3-64 of everything else.
void save_session(StatePool& pool, Handle handle, const std::string& path);

// Puts a saved sequence into `pool` as a new one of up to max_tokens tokens, which must hold those that it has. Model,
// layers and precision must be the pool's. Slots, pages, context, the longest step and the checkpoints' form may
// differ, and so may the window L if the unfolded records fit: the state at each token has the same bits under any
// window, while a pulled-back readout has the saved pool's bits only under its window, and if neither pool staggers
// flushes. Throws Error that says what differs and both values, or what is broken, or what did not fit; then the pool
// is as it was.
Handle load_session(StatePool& pool, const std::string& path, int64_t max_tokens);

// Throws Error unless the state of `handle` can be saved.
void check_saving(const SequencePool& pool, Handle handle);

}  // namespace replayssm
