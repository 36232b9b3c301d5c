// A GPU as the CUDA paths of the ops use it: one stream of work, memory, graphs, and the faults that kernels report.
// There without CUDA too; the functions are defined only where the library is built with REPLAYSSM_CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace replayssm {

struct CudaProperties {
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
  size_t shared_bytes_per_multiprocessor = 0;
  size_t shared_bytes_per_block = 0;  // at most
};

// What a kernel met that the host could not see when it launched: the first row whose slot, checkpoint or page lies
// outside the pool. Such a row reads and writes no state and its outputs are NaN.
struct CudaFault {
  const char* op = nullptr;  // a literal of the op that was launched
  int32_t row = 0;
  int32_t slot = 0, checkpoint_in = 0, checkpoint_out = 0;
  const char* outside = nullptr;  // a literal of what lies outside instead, if it is no slot and no checkpoint
  int32_t is_set = 0;
  int32_t* lock = nullptr;  // on the device, 0 or 1: taken by the kernel that reports
};

// One GPU and one stream. An op queues its work on the stream and returns; nothing in it waits for the host, so any
// sequence of ops can be captured. One thread owns a device, and of that thread it is the only one: making one selects
// its GPU for the thread.
class CudaDevice {
 public:
  // Throws Error if there is no GPU of that index, its driver is too old, or its compute capability is below 8.0.
  explicit CudaDevice(int index = 0);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const CudaProperties& properties() const { return properties_; }
  void* stream() const { return stream_; }  // a cudaStream_t

  // A word on the device, zero between ops, by which the blocks of an op share out their work.
  uint32_t* counter() const { return counter_; }

  // Waits for the stream. Throws Error for a failed launch and for the first fault since the last call.
  void synchronize();

  // Bytes of the GPU's memory that nobody holds now, other processes included.
  size_t available_bytes() const;

  // Device memory, aligned to 256 bytes, not initialised. Throws Error with what was asked for and what is free.
  void* allocate_bytes(size_t bytes);
  static void free_bytes(void* memory) noexcept;

  // Copies between host and device, and fills, in the stream's order; copies wait until the host's memory is free.
  void upload(void* device, const void* host, size_t bytes);
  void download(void* host, const void* device, size_t bytes);
  void copy(void* to, const void* from, size_t bytes);
  void fill_words(void* device, uint32_t word, size_t count);

  // Where kernels report a fault: memory that the host and the device see.
  CudaFault* fault() const { return fault_; }

 private:
  int index_;
  CudaProperties properties_;
  void* stream_ = nullptr;
  CudaFault* fault_ = nullptr;
  uint32_t* counter_ = nullptr;
};

// The number of GPUs that this process may use; 0 where there is no driver or the library is built without CUDA.
int cuda_device_count();

// `count` elements of a trivially copyable type on a device; not initialised.
template <typename T>
class DeviceBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceBuffer() = default;
  DeviceBuffer(size_t count, CudaDevice& device)
      : data_(count == 0 ? nullptr : static_cast<T*>(device.allocate_bytes(count * sizeof(T)))), count_(count) {}
  DeviceBuffer(std::span<const T> values, CudaDevice& device) : DeviceBuffer(values.size(), device) {
    device.upload(data_, values.data(), values.size_bytes());
  }
  ~DeviceBuffer() { CudaDevice::free_bytes(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  T* data() const { return data_; }
  size_t size() const { return count_; }
  void upload(std::span<const T> values, CudaDevice& device) {
    device.upload(data_, values.data(), values.size_bytes());
  }
  std::vector<T> download(CudaDevice& device) const {
    std::vector<T> values(count_);
    device.download(values.data(), data_, count_ * sizeof(T));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

// Uploads from page-locked memory of the host, which the host does not wait for: one of kBlocks blocks after the other
// is filled and uploaded in turn.
class PinnedUploads {
 public:
  static constexpr int kBlocks = 3;

  // block_bytes: of the largest upload; 0: there will be none. Throws Error if so much memory cannot be locked.
  PinnedUploads(size_t block_bytes, CudaDevice& device);
  PinnedUploads(const PinnedUploads&) = delete;
  PinnedUploads& operator=(const PinnedUploads&) = delete;

  // The block in turn, for the host to fill. Waits only where the GPU has still to do the last kBlocks uploads.
  void* next();
  // Queues the upload of `rows` rows of row_bytes bytes, which lie one after the other in the block that next() gave,
  // to where rows begin `stride` bytes apart from `to` on. Once after each next().
  void upload(void* to, size_t stride, size_t row_bytes, size_t rows);

 private:
  struct Block {
    void* memory = nullptr;
    void* end = nullptr;  // a cudaEvent_t: of the block's last upload
    ~Block();
  };

  CudaDevice& device_;
  std::array<Block, kBlocks> blocks_;
  int current_ = 0;
};

// A captured sequence of ops. What the ops read when it is launched is what the arrays they were given then hold.
class CudaGraph {
 public:
  // Runs `record` with the device's stream in capture: what it queues becomes the graph and is not run.
  template <typename Record>
  CudaGraph(CudaDevice& device, Record&& record) : device_(device) {
    begin();
    try {
      record();
    } catch (...) {
      abandon();
      throw;
    }
    end();
  }
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch();

 private:
  void begin();
  void end();
  void abandon() noexcept;

  CudaDevice& device_;
  void* graph_ = nullptr;
};

// Marks among the work of a device's stream, and the times between them as the GPU sees them. Those made while the
// stream is captured belong to the graph, and tell of its last launch.
class CudaTimer {
 public:
  explicit CudaTimer(CudaDevice& device) : device_(device) {}
  ~CudaTimer();
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  void mark();

  // Microseconds from each mark to the next. Waits for the stream and throws as CudaDevice::synchronize does.
  std::vector<double> intervals_us();

 private:
  CudaDevice& device_;
  std::vector<void*> marks_;  // of cudaEvent_t
};

}  // namespace replayssm
