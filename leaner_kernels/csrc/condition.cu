// Condition numbers of a batch of float32 matrices on the GPU, without a word to the host: Gram matrices on the
// smaller side (gram.cuh), then one thread block per matrix for its extreme eigenvalues (solve.h). In float64, or
// in TwoFloat on GPUs whose float64 runs at a fraction of the rate.
//
// A plain C interface of pointers, sizes and a stream, opened with ctypes: no torch, no Python, any version of both.
#include <cuda_runtime.h>

#include <algorithm>

#include "gram.cuh"

#ifdef __CUDACC__
alignas(16) extern __shared__ double leaner_shared[];
#endif

namespace leaner {
namespace {

constexpr int kMaxSize = 512;
constexpr int kMaxWarps = 12;  // which leaves a thread the registers for its part of a tile
constexpr int kSlots = 16;
constexpr int kScratch = 4 * kSlots;  // in doubles: pairs of sums of either turn

__device__ __forceinline__ double shuffled(double x, int step) {
  return __shfl_xor_sync(0xffffffffu, x, step);
}
__device__ __forceinline__ TwoFloat shuffled(TwoFloat x, int step) {
  return {__shfl_xor_sync(0xffffffffu, x.hi, step), __shfl_xor_sync(0xffffffffu, x.lo, step)};
}

template <class T>
__device__ __forceinline__ Pair<T> shuffled(Pair<T> x, int step) {
  return {shuffled(x.at[0], step), shuffled(x.at[1], step)};
}

#if LEANER_ARCH >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

// A thread block as the team of eigen.h, or one of a cluster that shares a matrix.
template <int kBlocks>
struct Block {
  static constexpr int kLanes = 32, kRanks = kBlocks;

  double* scratch;

  __device__ int rank() const { return blockIdx.x % kRanks; }
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int lane() const { return threadIdx.x % 32; }
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
  template <int kStep, int kCount, class T>
  __device__ __forceinline__ static int sum_over(T (&x)[4]) {
    int left = 4;
#pragma unroll
    for (int step = kStep * kCount / 2; step >= kStep; step /= 2) {
      // Of two halves, a lane keeps one and gives the other away.
      const bool upper = threadIdx.x & step;
      left /= 2;
#pragma unroll
      for (int i = 0; i < left; ++i) {
        const T mine = upper ? x[i + left] : x[i], other = upper ? x[i] : x[i + left];
        x[i] = mine + shuffled(other, step);
      }
      if (left == 0) x[0] = x[0] + shuffled(x[0], step);
    }
    const int place = threadIdx.x / kStep % kCount;
    return place % (kCount / 4) == 0 ? place / (kCount / 4) : -1;
  }
  // Zero must change nothing: the slots of warps that there are not hold it.
  template <class T, class Combine>
  __device__ __forceinline__ T join(T x, int turn, Combine combine) const {
    x = join_lanes(x, combine);
    T* slots = reinterpret_cast<T*>(scratch + turn * 2 * kSlots);
    if (lane() == 0) slots[warp()] = x;
    __syncthreads();
    return joined<kSlots>(slots, combine);
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
#if LEANER_ARCH >= 900
  template <class T>
  __device__ void publish(T* to, T x) const {
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      *static_cast<T*>(__cluster_map_shared_rank(to, rank)) = x;
    }
  }
  __device__ void meet() const {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }
#endif
};
using Alone = Block<1>;
using Sharing = Block<4>;  // matrices that one block cannot hold, where a GPU has clusters

// Device memory that a call works in.
struct Workspace {
  double *packed, *image;
  float* scales;

  Workspace(void* memory, int64_t batch, int rows, int cols) {
    const int size = std::min(rows, cols);
    packed = static_cast<double*>(memory);
    image = packed + batch * row_start(size);
    scales = reinterpret_cast<float*>(image + batch * std::max(rows, cols));
  }
  static int64_t bytes(int64_t batch, int rows, int cols) {
    const int size = std::min(rows, cols);
    const int64_t others = int64_t(std::max(rows, cols)) + 1;
    return batch * (row_start(size) + others) * int64_t(sizeof(double));
  }
};

struct Results {
  double *kappa, *sigma_max, *sigma_min;
  bool* resolved;
  double* spectrum;  // null, or min(rows, cols) singular values of each matrix, descending
};

// Grid: batch times the blocks that share a matrix. Shared memory: kScratch, a Reduction, a block's own of the first
// `resident` rows of the padded triangle. Further rows stay in global memory (the L2 cache), and are the first to be
// eliminated.
template <class Team, class T>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    solve_batch(Matrices matrices, int size, int resident, T* packed, T* image, const float* scales,
                Results results) {
  if constexpr (Team::kRanks == 1 || kClusters) {
    const int b = blockIdx.x / Team::kRanks;
    Team team;
    team.scratch = leaner_shared;
    for (int i = team.thread(); i < kScratch; i += team.threads()) leaner_shared[i] = 0.0;
    team.sync();
    T* shared = reinterpret_cast<T*>(leaner_shared);
    const Storage<T> storage{packed + b * int64_t(row_start(size)),
                             shared + kScratch + Reduction<Team, T>::size(size),
                             resident,
                             shared + kScratch,
                             image + b * int64_t(max(matrices.rows, matrices.cols))};
    double* spectrum = results.spectrum ? results.spectrum + b * int64_t(size) : nullptr;
    const float scale = Arithmetic<T>::kRefine ? scales[b] : 1.0f;
    const Condition found = solve(team, Vectors(matrices, b), scale, storage, spectrum, size);
    if (team.thread() != 0 || team.rank() != 0) return;
    results.kappa[b] = found.kappa;
    results.sigma_max[b] = found.sigma_max;
    results.sigma_min[b] = found.sigma_min;
    results.resolved[b] = found.resolved;
  }
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int64_t shared, int cluster,
                   cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// Numbers of shared memory that a block needs for the first `resident` rows and what goes with them.
template <class Team, class T>
int64_t shared_numbers(int size, int resident) {
  using Memory = Reduction<Team, T>;
  return kScratch + Memory::size(size) + Memory::own(resident, Team::kRanks - 1);
}

// Rows that fit into so many bytes of shared memory, in whole groups of which each block has its own.
template <class Team, class T>
int rows_that_fit(int size, int available) {
  const int step = Team::kRanks == 1 ? 4 : Team::kRanks * Reduction<Team, T>::kTileRows;
  int rows = (size + step - 1) / step * step;
  while (shared_numbers<Team, T>(size, rows) * int64_t(sizeof(T)) > available) rows -= step;
  return rows;
}

template <class Team, class T>
cudaError_t solve_all(const Matrices& a, int batch, const Workspace& workspace, const Results& results,
                      int available, cudaStream_t stream) {
  const int size = std::min(a.rows, a.cols), resident = rows_that_fit<Team, T>(size, available);
  const auto kernel = solve_batch<Team, T>;
  // The same for every call: threads that call at once do not take it from each other.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, available);
  if (error != cudaSuccess) return error;
  using Memory = Reduction<Team, T>;
  const int warps = std::min(kMaxWarps, Memory::kSlices * Memory::strips(size));
  return launch(kernel, dim3(batch * Team::kRanks), 32 * warps, shared_numbers<Team, T>(size, resident) * sizeof(T),
                Team::kRanks, stream, a, size, resident, reinterpret_cast<T*>(workspace.packed),
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
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, solve_batch<Alone, double>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, solve_batch<Sharing, double>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, solve_batch<Alone, TwoFloat>);
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
  int device = 0, available = 0, ratio = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;

  const Matrices a{data, stride_batch, stride_row, lengths, rows, cols};
  const Workspace in(workspace, batch, rows, cols);
  const Results results{kappa, sigma_max, sigma_min, resolved, spectrum};
  const auto on = static_cast<cudaStream_t>(stream);
  const dim3 tiles(batch, triangle((size + kTile - 1) / kTile));
  if (ratio <= 4) {
    error = launch(gram, tiles, kThreads, 0, 1, on, a, in.packed, row_start(size));
    if (error != cudaSuccess) return error;
    if (clusters && rows_that_fit<Alone, double>(size, available) < size) {
      return solve_all<Sharing, double>(a, batch, in, results, available, on);
    }
    return solve_all<Alone, double>(a, batch, in, results, available, on);
  }
  error = launch(find_scales, dim3(batch), kThreads, 0, 1, on, a, in.scales);
  if (error != cudaSuccess) return error;
  auto* packed = reinterpret_cast<TwoFloat*>(in.packed);
  error = launch(gram_two_float, tiles, kThreads, 0, 1, on, a, in.scales, packed, row_start(size));
  if (error != cudaSuccess) return error;
  return solve_all<Alone, TwoFloat>(a, batch, in, results, available, on);
}

LEANER_EXPORT const char* leaner_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
