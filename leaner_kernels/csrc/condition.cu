// Condition numbers of a batch of float32 matrices on the GPU, without a word to the host: Gram matrices on the
// smaller side (gram.cuh), then one thread block per matrix for its extreme eigenvalues (solve.h). In float64, or
// in TwoFloat on GPUs whose float64 runs at a fraction of the rate.
//
// A plain C interface of pointers, sizes and a stream, opened with ctypes: no torch, no Python, any version of both.
#include <cuda_runtime.h>

#include <algorithm>

#include "gram.cuh"

extern __shared__ double leaner_shared[];

namespace leaner {
namespace {

constexpr int kMaxSize = 512;
constexpr int kMaxWarps = 16;
constexpr int kScratch = 2 * kMaxWarps + 2;  // in doubles: sums of either turn, and the pivot

__device__ __forceinline__ double shuffled(double x, int step) {
  return __shfl_xor_sync(0xffffffffu, x, step);
}
__device__ __forceinline__ TwoFloat shuffled(TwoFloat x, int step) {
  return {__shfl_xor_sync(0xffffffffu, x.hi, step), __shfl_xor_sync(0xffffffffu, x.lo, step)};
}

// A thread block as the team of eigen.h.
struct Block {
  double* scratch;

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int lanes() const { return 32; }
  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int warps() const { return blockDim.x / 32; }
  __device__ void sync() const { __syncthreads(); }

  template <class T, class Combine>
  __device__ __forceinline__ static T join_lanes(T x, Combine combine) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = combine(x, shuffled(x, step));
    return x;
  }
  template <class T>
  __device__ __forceinline__ static T sum_lanes(T x) {
    return join_lanes(x, [](T a, T b) { return a + b; });
  }
  // Zero must change nothing: the slots of warps that there are not hold it.
  template <class T, class Combine>
  __device__ __forceinline__ T join(T x, int turn, Combine combine) const {
    x = join_lanes(x, combine);
    T* slots = reinterpret_cast<T*>(scratch) + turn * kMaxWarps;
    if (lane() == 0) slots[warp()] = x;
    __syncthreads();
    return joined<kMaxWarps>(slots, combine);
  }
  template <int kCount, class T, class Combine>
  __device__ __forceinline__ static T joined(const T* slots, Combine combine) {
    if constexpr (kCount == 1) {
      return slots[0];
    } else {
      return combine(joined<kCount / 2>(slots, combine),
                     joined<kCount / 2>(slots + kCount / 2, combine));
    }
  }
  template <class T>
  __device__ __forceinline__ T sum(T x, int turn) const {
    return join(x, turn, [](T a, T b) { return a + b; });
  }
  // Of numbers not all negative.
  __device__ __forceinline__ double maximum(double x, int turn) const {
    return join(x, turn, [](double a, double b) { return fmax(a, b); });
  }
};

// Device memory that a call works in.
struct Workspace {
  double *packed, *tridiagonal, *image;
  float* scales;

  Workspace(void* memory, int64_t batch, int rows, int cols) {
    const int size = std::min(rows, cols);
    packed = static_cast<double*>(memory);
    tridiagonal = packed + batch * triangle(size);
    image = tridiagonal + batch * 2 * size;
    scales = reinterpret_cast<float*>(image + batch * std::max(rows, cols));
  }
  static int64_t bytes(int64_t batch, int rows, int cols) {
    const int size = std::min(rows, cols);
    const int64_t others = 2 * int64_t(size) + std::max(rows, cols) + 1;
    return batch * (triangle(size) + others) * int64_t(sizeof(double));
  }
};

struct Results {
  double *kappa, *sigma_max, *sigma_min;
  bool* resolved;
  double* spectrum;  // null, or min(rows, cols) singular values of each matrix, descending
};

// Grid: batch. Shared memory: kScratch, vectors(size), the first `resident` rows of the packed triangle. Further rows
// stay in global memory (the L2 cache), and are the first to be eliminated.
template <class T>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    solve_batch(Matrices matrices, int size, int resident, T* packed, double* tridiagonal, T* image,
                const float* scales, Results results) {
  const int b = blockIdx.x;
  Block team{leaner_shared};
  if (team.thread() < kScratch) leaner_shared[team.thread()] = 0.0;
  team.sync();
  T* shared = reinterpret_cast<T*>(leaner_shared);
  const Storage<T> storage{packed + b * int64_t(triangle(size)),
                           shared + kScratch + vectors(size),
                           resident,
                           shared + kScratch,
                           shared + 2 * kMaxWarps,
                           tridiagonal + b * int64_t(2) * size,
                           tridiagonal + (b * int64_t(2) + 1) * size,
                           image + b * int64_t(max(matrices.rows, matrices.cols))};
  double* spectrum = results.spectrum ? results.spectrum + b * int64_t(size) : nullptr;
  const float scale = Arithmetic<T>::kRefine ? scales[b] : 1.0f;
  const Condition found = solve(team, Vectors(matrices, b), scale, storage, spectrum, size);
  if (team.thread() != 0) return;
  results.kappa[b] = found.kappa;
  results.sigma_max[b] = found.sigma_max;
  results.sigma_min[b] = found.sigma_min;
  results.resolved[b] = found.resolved;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int64_t shared,
                   cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <class T>
cudaError_t solve_all(const Matrices& a, int batch, const Workspace& workspace, const Results& results,
                      int available, cudaStream_t stream) {
  const int size = std::min(a.rows, a.cols);
  const int64_t fixed = kScratch + vectors(size), left = available / int64_t(sizeof(T)) - fixed;
  int resident = size;
  while (triangle(resident) > left) --resident;
  const int64_t shared = (fixed + triangle(resident)) * sizeof(T);
  const auto kernel = solve_batch<T>;
  // The same for every call: threads that call at once do not take it from each other.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, available);
  if (error != cudaSuccess) return error;
  const int warps = std::min(kMaxWarps, kSlices * ((size + 63) / 64));
  return launch(kernel, dim3(batch), 32 * warps, shared, stream, a, size, resident,
                reinterpret_cast<T*>(workspace.packed), workspace.tridiagonal,
                reinterpret_cast<T*>(workspace.image), workspace.scales, results);
}

}  // namespace
}  // namespace leaner

#define LEANER_EXPORT extern "C" __attribute__((visibility("default")))

// Largest min(rows, cols) that leaner_condition takes.
LEANER_EXPORT int leaner_condition_limit() { return leaner::kMaxSize; }

// cudaSuccess where the current device can run this library's code, all of which is loaded by then.
LEANER_EXPORT int leaner_condition_ready() {
  using namespace leaner;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, gram);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, find_scales);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, gram_two_float);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, solve_batch<double>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, solve_batch<TwoFloat>);
  return error;
}

// Bytes of device memory, aligned to 8, that leaner_condition works in.
LEANER_EXPORT long long leaner_condition_workspace(int batch, int rows, int cols) {
  return leaner::Workspace::bytes(batch, rows, cols);
}

// Condition numbers of `batch` float32 matrices (rows x cols, elements of a row contiguous, strides in elements),
// or of the first lengths[b] rows of each where lengths is not null. kappa, sigma_max, sigma_min, resolved (one
// byte): batch elements each; spectrum: null or batch x min(rows, cols). All on the current device. Launches on
// the stream, waits for nothing, and returns a cudaError_t.
LEANER_EXPORT int leaner_condition(const float* data, long long stride_batch, long long stride_row,
                                   const int* lengths, int batch, int rows, int cols, void* workspace,
                                   double* kappa, double* sigma_max, double* sigma_min,
                                   bool* resolved, double* spectrum, void* stream) {
  using namespace leaner;
  const int size = std::min(rows, cols);
  if (batch < 1 || size < 1 || size > kMaxSize) return cudaErrorInvalidValue;
  int device = 0, available = 0, ratio = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device);
  if (error != cudaSuccess) return error;

  const Matrices a{data, stride_batch, stride_row, lengths, rows, cols};
  const Workspace in(workspace, batch, rows, cols);
  const Results results{kappa, sigma_max, sigma_min, resolved, spectrum};
  const auto on = static_cast<cudaStream_t>(stream);
  const dim3 tiles(batch, triangle((size + kTile - 1) / kTile));
  if (ratio <= 4) {
    error = launch(gram, tiles, kThreads, 0, on, a, in.packed, triangle(size));
    if (error != cudaSuccess) return error;
    return solve_all<double>(a, batch, in, results, available, on);
  }
  error = launch(find_scales, dim3(batch), kThreads, 0, on, a, in.scales);
  if (error != cudaSuccess) return error;
  auto* packed = reinterpret_cast<TwoFloat*>(in.packed);
  error = launch(gram_two_float, tiles, kThreads, 0, on, a, in.scales, packed, triangle(size));
  if (error != cudaSuccess) return error;
  return solve_all<TwoFloat>(a, batch, in, results, available, on);
}

LEANER_EXPORT const char* leaner_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
