#include "replayssm/core/cuda_device.h"

#include "replayssm/core/cuda_error.cuh"

namespace replayssm {
namespace {

__global__ void fill_words_kernel(uint32_t* words, uint32_t word, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x)
    words[i] = word;
}

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

CudaDevice::CudaDevice(int index) : index_(index) {
  int driver = 0, count = 0;
  cudaDriverGetVersion(&driver);
  require(driver > 0, "cuda: no GPU was found (this machine has no driver for one)");
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();
  require(status != cudaErrorInsufficientDriver,
          "cuda: the GPU's driver is too old for CUDA {}.{}, with which this library was built", CUDART_VERSION / 1000,
          CUDART_VERSION % 1000 / 10);
  require(status == cudaSuccess && count > 0, "cuda: no GPU was found ({})",
          status == cudaSuccess ? "none is visible" : cudaGetErrorString(status));
  require(index >= 0 && index < count, "cuda: expected a GPU of 0 to {}, got {}", count - 1, index);
  check_cuda(cudaSetDevice(index), "cuda: select the GPU");
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cuda: read the GPU's properties");
  require(properties.major >= 8, "cuda: expected a GPU of compute capability 8.0 or later, {} has {}.{}",
          properties.name, properties.major, properties.minor);
  properties_ = {properties.name,
                 properties.major,
                 properties.minor,
                 properties.multiProcessorCount,
                 properties.totalGlobalMem,
                 static_cast<size_t>(properties.l2CacheSize),
                 properties.sharedMemPerMultiprocessor,
                 properties.sharedMemPerBlockOptin};
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cuda: create a stream");
  stream_ = stream;
  void* fault = nullptr;
  check_cuda(cudaHostAlloc(&fault, sizeof(CudaFault), cudaHostAllocMapped), "cuda: allocate host memory");
  fault_ = new (fault) CudaFault();
  fault_->lock = static_cast<int32_t*>(allocate_bytes(sizeof(int32_t)));
  fill_words(fault_->lock, 0, 1);
  counter_ = static_cast<uint32_t*>(allocate_bytes(sizeof(uint32_t)));
  fill_words(counter_, 0, 1);
}

CudaDevice::~CudaDevice() {
  if (fault_ != nullptr) {
    cudaFree(fault_->lock);
    cudaFreeHost(fault_);
  }
  cudaFree(counter_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_of(stream_));
}

void CudaDevice::synchronize() {
  check_cuda(cudaStreamSynchronize(stream_of(stream_)), "cuda: run");
  if (fault_->is_set == 0) return;
  const CudaFault fault = *fault_;
  fault_->is_set = 0;
  fill_words(fault_->lock, 0, 1);
  if (fault.outside != nullptr) fail("{}: row {}: {}", fault.op, fault.row, fault.outside);
  fail("{}: row {}: slot {}, checkpoint in {} or checkpoint out {} lies outside the pool", fault.op, fault.row,
       fault.slot, fault.checkpoint_in, fault.checkpoint_out);
}

size_t CudaDevice::available_bytes() const {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cuda: ask for the free memory");
  return free;
}

void* CudaDevice::allocate_bytes(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail("cuda: {} bytes of GPU memory were asked for, {} of {} are free", bytes, free, total);
  }
  check_cuda(status, "cuda: allocate memory");
  return memory;
}

void CudaDevice::free_bytes(void* memory) noexcept {
  if (memory != nullptr) cudaFree(memory);
}

void CudaDevice::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_of(stream_)), "cuda: upload");
  check_cuda(cudaStreamSynchronize(stream_of(stream_)), "cuda: upload");
}

void CudaDevice::download(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_of(stream_)), "cuda: download");
  check_cuda(cudaStreamSynchronize(stream_of(stream_)), "cuda: download");
}

void CudaDevice::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(stream_)), "cuda: copy");
}

void CudaDevice::fill_words(void* device, uint32_t word, size_t count) {
  if (count == 0) return;
  const int blocks = static_cast<int>(count < 4096 * 256 ? (count + 255) / 256 : 4096);
  fill_words_kernel<<<blocks, 256, 0, stream_of(stream_)>>>(static_cast<uint32_t*>(device), word, count);
  check_cuda(cudaGetLastError(), "cuda: fill");
}

PinnedUploads::Block::~Block() {
  if (end != nullptr) {
    cudaEventSynchronize(static_cast<cudaEvent_t>(end));
    cudaEventDestroy(static_cast<cudaEvent_t>(end));
  }
  if (memory != nullptr) cudaFreeHost(memory);
}

PinnedUploads::PinnedUploads(size_t block_bytes, CudaDevice& device) : device_(device) {
  if (block_bytes == 0) return;
  for (Block& block : blocks_) {
    const cudaError_t status = cudaHostAlloc(&block.memory, block_bytes, cudaHostAllocDefault);
    if (status != cudaSuccess) {
      cudaGetLastError();
      fail("cuda: {} bytes of page-locked host memory, {} times, cannot be had ({})", block_bytes, kBlocks,
           cudaGetErrorString(status));
    }
    cudaEvent_t end = nullptr;
    check_cuda(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "cuda: create an event");
    block.end = end;
  }
}

void* PinnedUploads::next() {
  current_ = (current_ + 1) % kBlocks;
  const Block& block = blocks_[current_];
  check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(block.end)), "cuda: wait for an upload");
  return block.memory;
}

void PinnedUploads::upload(void* to, size_t stride, size_t row_bytes, size_t rows) {
  const Block& block = blocks_[current_];
  const cudaStream_t stream = stream_of(device_.stream());
  check_cuda(cudaMemcpy2DAsync(to, stride, block.memory, row_bytes, row_bytes, rows, cudaMemcpyHostToDevice, stream),
             "cuda: upload");
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(block.end), stream), "cuda: upload");
}

CudaGraph::~CudaGraph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
}

void CudaGraph::begin() {
  check_cuda(cudaStreamBeginCapture(stream_of(device_.stream()), cudaStreamCaptureModeThreadLocal),
             "cuda graph: begin a capture");
}

void CudaGraph::end() {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream_of(device_.stream()), &graph), "cuda graph: end a capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(status, "cuda graph: instantiate");
  graph_ = executable;
}

void CudaGraph::abandon() noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_of(device_.stream()), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}

void CudaGraph::launch() {
  check_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), stream_of(device_.stream())), "cuda graph: launch");
}

CudaTimer::~CudaTimer() {
  for (void* mark : marks_) cudaEventDestroy(static_cast<cudaEvent_t>(mark));
}

void CudaTimer::mark() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreate(&event), "cuda timer: create an event");
  marks_.push_back(event);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_of(device_.stream()), &status), "cuda timer: ask for a capture");
  const unsigned flags = status == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
  check_cuda(cudaEventRecordWithFlags(event, stream_of(device_.stream()), flags), "cuda timer: record an event");
}

std::vector<double> CudaTimer::intervals_us() {
  device_.synchronize();
  std::vector<double> intervals;
  for (size_t i = 1; i < marks_.size(); ++i) {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(marks_[i - 1]),
                                    static_cast<cudaEvent_t>(marks_[i])),
               "cuda timer: read the time");
    intervals.push_back(1e3 * milliseconds);
  }
  return intervals;
}

}  // namespace replayssm
