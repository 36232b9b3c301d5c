// What this machine's memory gives, measured: the roofs that the benchmarks compare with.
#pragma once

#include <cstddef>

#include "replayssm/core/device.h"

namespace replayssm::bench {

// Bytes per second of all threads reading `count` floats once.
double read_roof(const float* memory, size_t count, Device& device);

// Bytes per second, read and written ones added, of all threads scaling `count` floats in place by 1.
double update_roof(float* memory, size_t count, Device& device);

// FP32 operations per second of all threads in fused multiply-adds on registers, two to each.
double multiply_add_roof(Device& device);

}  // namespace replayssm::bench
