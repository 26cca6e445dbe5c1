// Enough of CUDA to run the kernels of leaner_kernels/csrc on the host, one cluster after another: every thread of its
// blocks is a fiber that runs until a barrier, a shuffle or a tensor-core instruction, which wait for the others.
//
// `emulated.order` says in which order threads run between barriers: results must not depend on it. (Reading what
// another thread writes without a barrier between gives another result in another order.) What a barrier orders is all
// this shows: nothing of timing, of memory that is out of reach, or of the compiler for the GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrSingleToDoublePrecisionPerfRatio, cudaDevAttrClusterLaunch };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

enum { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  int numAttrs = 0;
};

struct Emulated {
  int shared_bytes = 232448, double_ratio = 2;  // of an H200, unless a test says otherwise
  int order = 0;                                // 0 upwards, 1 downwards, 2 shuffled

  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    unsigned waiting_for = 0;  // 0: nothing, 1: its warp, 2: its block, 3: its cluster
  };
  std::vector<Thread> threads;
  ucontext_t scheduler;
  int current = 0, first_block = 0;
  std::function<void()> body;
  double lanes[64 * 32][16];  // what each thread shows its warp

  void wait(unsigned what) {
    Thread& thread = threads[current];
    thread.waiting_for = what;
    swapcontext(&thread.context, &scheduler);
  }
  // Nobody of first, ..., last - 1 still runs towards the barrier.
  bool arrived(int first, int last, unsigned what) const {
    for (int i = first; i < last; ++i) {
      if (!threads[i].done && threads[i].waiting_for != what) return false;
    }
    return true;
  }
  void run(int per_block, int blocks);
};

inline Emulated emulated;
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) SharedMemory {
  double numbers[232448 / 8];
};
inline std::vector<SharedMemory> shared_memory;  // of the blocks of a cluster
inline double* own_shared_memory() { return shared_memory[blockIdx.x - emulated.first_block].numbers; }
#define leaner_shared own_shared_memory()

inline void start_fiber() {
  emulated.body();
  emulated.threads[emulated.current].done = true;
  swapcontext(&emulated.threads[emulated.current].context, &emulated.scheduler);
}

inline void Emulated::run(int per_block, int blocks) {
  constexpr size_t kStack = 128 << 10;
  const int count = per_block * blocks;
  if (int(threads.size()) < count) threads.resize(count);
  std::vector<int> turns(count);
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.done = false;
    thread.waiting_for = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    makecontext(&thread.context, start_fiber, 0);
    turns[i] = order == 1 ? count - 1 - i : i;
  }
  uint32_t random = 12345;
  for (int left = count; left > 0;) {
    if (order == 2) {
      for (int i = count - 1; i > 0; --i) {
        random = random * 1664525u + 1013904223u;
        std::swap(turns[i], turns[(random >> 8) % (i + 1)]);
      }
    }
    bool moved = false;
    for (const int i : turns) {
      Thread& thread = threads[i];
      if (thread.done || thread.waiting_for) continue;
      moved = true;
      current = i;
      threadIdx.x = i % per_block;
      blockIdx.x = first_block + i / per_block;
      swapcontext(&scheduler, &thread.context);
      left -= thread.done;
    }
    const int sizes[] = {32, per_block, count};
    for (unsigned what = 1; what <= 3; ++what) {
      for (int first = 0; first < count; first += sizes[what - 1]) {
        const int last = min(count, first + sizes[what - 1]);
        if (!arrived(first, last, what)) continue;
        for (int i = first; i < last; ++i) threads[i].waiting_for = 0, moved = true;
      }
    }
    if (!moved) {
      std::fprintf(stderr, "emulated block: threads wait for each other at different barriers\n");
      std::abort();
    }
  }
}

inline void __syncthreads() { emulated.wait(2); }
inline void __cluster_barrier_arrive() {}
inline void __cluster_barrier_wait() { emulated.wait(3); }
inline void* __cluster_map_shared_rank(void* own, int rank) {
  const auto from = reinterpret_cast<char*>(own_shared_memory());
  return reinterpret_cast<char*>(shared_memory[rank].numbers) + (static_cast<char*>(own) - from);
}

// Every thread of the warp shows `count` numbers and then sees those of all lanes.
inline void show(const double* values, int count) {
  std::copy(values, values + count, emulated.lanes[emulated.current]);
  emulated.wait(1);
}
inline const double* shown(int lane) { return emulated.lanes[emulated.current / 32 * 32 + lane]; }
// Before the next show(), all lanes must have read.
inline void seen() { emulated.wait(1); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int step) {
  const double value = x;
  show(&value, 1);
  const T result = T(shown(int(threadIdx.x % 32) ^ step)[0]);
  seen();
  return result;
}

template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  const double value = x;
  show(&value, 1);
  const T result = T(shown(lane)[0]);
  seen();
  return result;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

// d (16 x 8, or its first 8 rows) += a b, by the layout of the PTX manual: element (row, k) of `a` lies with lane
// 4 (row % 8) + k % 4, place (row / 8, k / 4); (k, column) of `b` with lane 4 column + k % 4, place k / 4.
inline void tensor_core(double* c, const double* a, const double* b, int halves, int steps) {
  double values[12];
  std::copy(a, a + halves * steps, values);
  std::copy(b, b + steps, values + 8);
  show(values, 12);
  const int lane = threadIdx.x % 32;
  for (int half = 0; half < halves; ++half) {
    for (int e = 0; e < 2; ++e) {
      const int row = lane / 4, column = 2 * (lane % 4) + e;
      for (int k = 0; k < 4 * steps; ++k) {
        const double x = shown(4 * row + k % 4)[half * steps + k / 4];
        c[2 * half + e] += x * shown(4 * column + k % 4)[8 + k / 4];
      }
    }
  }
  seen();
}
namespace leaner {
inline void mma_8x8x4(double* c, double a, double b) { tensor_core(c, &a, &b, 1, 1); }
inline void mma_16x8x16(double* c, const double (&a)[2][4], const double (&b)[4]) {
  tensor_core(c, &a[0][0], b, 2, 4);
}
}  // namespace leaner

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  const int values[] = {emulated.shared_bytes, emulated.double_ratio, LEANER_ARCH >= 900};
  *value = values[attribute];
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= emulated.shared_bytes ? cudaSuccess : cudaErrorInvalidValue;
}
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  if (config->dynamicSmemBytes > size_t(emulated.shared_bytes)) return cudaErrorInvalidValue;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  const int cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
  shared_memory.resize(cluster);
  emulated.body = [&] { kernel(arguments...); };
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (unsigned first = 0; first < gridDim.x; first += cluster) {
      // What a block before has left behind is nothing to rely on.
      for (SharedMemory& block : shared_memory) std::fill(std::begin(block.numbers), std::end(block.numbers), NAN);
      emulated.first_block = first;
      emulated.run(blockDim.x, cluster);
    }
  }
  return cudaSuccess;
}
