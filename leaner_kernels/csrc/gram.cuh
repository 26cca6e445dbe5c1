// Gram matrices of float32 matrices, packed, for solve.h: in float64 on the float64 tensor cores, where products of
// two floats are exact; or in TwoFloat. Either way at most kChunk products are summed before a sum of sums takes
// them: the smallest eigenvalue is made of what rounding leaves.
#pragma once

#include <cfloat>

#include "solve.h"

#ifndef LEANER_ARCH  // a host build that emulates one defines it
#define LEANER_ARCH __CUDA_ARCH__
#endif

namespace leaner {

constexpr int kTile = 64;           // a block computes kTile x kTile elements,
constexpr int kDepth = 16;          // kDepth products at a time
constexpr int kChunk = 64;
constexpr int kThreads = 256;
constexpr int kPitch = kDepth + 4;  // of a row in shared memory: no two lanes meet in a bank

// Which tile of the lower triangle a block computes.
struct Tile {
  int first_i, first_j;

  __device__ explicit Tile(int index) {
    int row = 0;
    while (index > row) index -= ++row;
    first_i = row * kTile;
    first_j = index * kTile;
  }
};

// A thread's share of kTile x kDepth elements, on its way from global to shared memory. Neighbouring threads take
// neighbouring elements in memory.
struct Fetch {
  static constexpr int kEach = kTile * kDepth / kThreads;
  const float* from;
  int64_t step;               // between the elements of this thread
  int vector, element;        // the first of them, within the tile,
  int vector_step, element_step;  // and how far the next is
  int vectors_left, elements_left;
  float value[kEach];

  __device__ Fetch(const Vectors& a, int first) {
    const bool along = a.stride_element == 1;
    vector = along ? threadIdx.x / kDepth : threadIdx.x % kTile;
    element = along ? threadIdx.x % kDepth : threadIdx.x / kTile;
    vector_step = along ? kThreads / kDepth : 0;
    element_step = along ? 0 : kThreads / kTile;
    step = vector_step * a.stride + element_step * a.stride_element;
    from = a.data + (first + vector) * a.stride + element * a.stride_element;
    vectors_left = a.size - first - vector;
    elements_left = a.depth - element;
  }
  // The next kDepth elements of every vector; zeros past the matrix.
  __device__ void load(const Vectors& a) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool inside = e * vector_step < vectors_left && e * element_step < elements_left;
      value[e] = inside ? __ldg(from + e * step) : 0.0f;
    }
    from += kDepth * a.stride_element;
    elements_left -= kDepth;
  }
};

// The float64 tensor cores. Lane l holds of c (8 x 8): row l / 4, columns 2 (l % 4) and the next; of a (8 x 4): row
// l / 4, column l % 4; of b (4 x 8), likewise transposed. The larger shape has rows l / 4 + 8 too, and columns
// l % 4 + 4 i. Source: PTX ISA, 9.7.15 "mma", fragments of .f64.
#ifdef __CUDACC__
__device__ __forceinline__ void mma_8x8x4(double* c, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
}
#if LEANER_ARCH >= 900
__device__ __forceinline__ void mma_16x8x16(double* c, const double (&a)[2][4],
                                            const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(a[0][2]), "d"(a[1][2]),
        "d"(a[0][3]), "d"(a[1][3]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}
#endif
#endif
// c (16 x 8) += a (16 x kDepth) b (kDepth x 8): a[half][i] and b[i] as above.
__device__ __forceinline__ void multiply_add(double (&c)[4], const double (&a)[2][4],
                                             const double (&b)[4]) {
#if LEANER_ARCH >= 900
  mma_16x8x16(c, a, b);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    mma_8x8x4(c, a[0][i], b[i]);
    mma_8x8x4(c + 2, a[1][i], b[i]);
  }
#endif
}

// Grid: (batch, tiles of the lower triangle). Eight warps, of 32 x 16 elements each.
__global__ void __launch_bounds__(kThreads, 2)
    gram(Matrices matrices, double* packed, int64_t stride_packed) {
  __shared__ double left[2][kTile][kPitch], right[2][kTile][kPitch];
  const int b = blockIdx.x;
  const Vectors a(matrices, b);
  const Tile tile(blockIdx.y);
  if (tile.first_i >= a.size) return;

  // By a shuffle, so that the compiler sees one number for a warp: branches on it need no vote.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int near_i = warp / 4 * 32, near_j = warp % 4 * 16;  // of the warp's elements, in the tile
  const int first_i = tile.first_i + near_i, first_j = tile.first_j + near_j;
  const bool idle = first_i >= a.size || first_i + 31 < first_j;
  double total[2][2][4] = {}, chunk[2][2][4] = {};
  Fetch fetch_i(a, tile.first_i), fetch_j(a, tile.first_j);
  fetch_i.load(a);
  fetch_j.load(a);
  for (int done = 0, turn = 0; done < a.depth; done += kDepth, turn ^= 1) {
#pragma unroll
    for (int e = 0; e < Fetch::kEach; ++e) {
      const int i = fetch_i.vector + e * fetch_i.vector_step;
      const int k = fetch_i.element + e * fetch_i.element_step;
      left[turn][i][k] = double(fetch_i.value[e]);
      right[turn][i][k] = double(fetch_j.value[e]);
    }
    __syncthreads();  // one is enough: the tiles written next were last read before it
    if (done + kDepth < a.depth) {
      fetch_i.load(a);
      fetch_j.load(a);
    }
    if (idle) continue;
    double rows[2][4], columns[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      columns[e / 4][e % 4] = right[turn][near_j + 8 * (e / 4) + lane / 4][lane % 4 + 4 * (e % 4)];
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int i = first_i + 16 * m;
      if (i >= a.size) break;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int row = near_i + 16 * m + 8 * (e / 4) + lane / 4;
        rows[e / 4][e % 4] = left[turn][row][lane % 4 + 4 * (e % 4)];
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (first_j + 8 * p <= i + 15) multiply_add(chunk[m][p], rows, columns[p]);
      }
    }
    if ((done + kDepth) % kChunk == 0 || done + kDepth >= a.depth) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        total[e / 8][e / 4 % 2][e % 4] += chunk[e / 8][e / 4 % 2][e % 4];
        chunk[e / 8][e / 4 % 2][e % 4] = 0.0;
      }
    }
  }
  if (idle) return;
  double* out = packed + b * stride_packed;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int i = first_i + 16 * (e / 8) + 8 * (e / 2 % 2) + lane / 4;
    const int j = first_j + 8 * (e / 4 % 2) + 2 * (lane % 4) + e % 2;
    if (i < a.size && j <= i) out[row_start(i) + j] = total[e / 8][e / 4 % 2][e % 4];
  }
}

// scales[b]: the power of two that brings the largest element of a matrix into [1/2, 1), times which squares stay
// in the range of a float; nan where an element is not finite, 1 for a matrix of zeros. Grid: batch.
__global__ void __launch_bounds__(kThreads) find_scales(Matrices matrices, float* scales) {
  __shared__ float largest[kThreads / 32];
  const Vectors a(matrices, blockIdx.x);
  const bool along = a.stride_element == 1;
  const int inner = along ? a.depth : a.size, outer = along ? a.size : a.depth;
  const int64_t stride = along ? a.stride : a.stride_element;
  float found = 0.0f;
  for (int r = threadIdx.x / 32; r < outer; r += kThreads / 32) {
    for (int c = threadIdx.x % 32; c < inner; c += 32) {
      const float x = fabsf(a.data[r * stride + c]);
      found = fmaxf(found, x <= FLT_MAX ? x : INFINITY);  // nan, too, is not at most FLT_MAX
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, step));
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) found = fmaxf(found, largest[w]);
  int exponent = 0;
  if (found > 0.0f && found <= FLT_MAX) frexpf(found, &exponent);
  // 2^128 is no float: matrices under 2^-126 stay a little smaller than they might be.
  scales[blockIdx.x] = found <= FLT_MAX ? ldexpf(1.0f, min(-exponent, 126)) : NAN;
}

// As gram, in TwoFloat and of the matrix times its scale: each thread sums 4 x 4 elements in its registers.
__global__ void __launch_bounds__(kThreads)
    gram_two_float(Matrices matrices, const float* scales, TwoFloat* packed, int64_t stride_packed) {
  __shared__ float left[2][kDepth][kTile + 4], right[2][kDepth][kTile + 4];
  const int b = blockIdx.x;
  const Vectors a(matrices, b);
  const Tile tile(blockIdx.y);
  if (tile.first_i >= a.size) return;
  const float scale = scales[b];
  const int near_i = threadIdx.x / 16 * 4, near_j = threadIdx.x % 16 * 4;
  const int first_i = tile.first_i + near_i, first_j = tile.first_j + near_j;
  const bool idle = first_i >= a.size || first_i + 3 < first_j;

  TwoFloat total[4][4];
  DotProduct chunk[4][4];
#pragma unroll
  for (int e = 0; e < 16; ++e) total[e / 4][e % 4] = TwoFloat(0.0f, 0.0f);
  Fetch fetch_i(a, tile.first_i), fetch_j(a, tile.first_j);
  fetch_i.load(a);
  fetch_j.load(a);
  for (int done = 0, turn = 0; done < a.depth; done += kDepth, turn ^= 1) {
#pragma unroll
    for (int e = 0; e < Fetch::kEach; ++e) {
      const int i = fetch_i.vector + e * fetch_i.vector_step;
      const int k = fetch_i.element + e * fetch_i.element_step;
      left[turn][k][i] = fetch_i.value[e] * scale;
      right[turn][k][i] = fetch_j.value[e] * scale;
    }
    __syncthreads();  // one is enough: the tiles written next were last read before it
    if (done + kDepth < a.depth) {
      fetch_i.load(a);
      fetch_j.load(a);
    }
    if (idle) continue;
#pragma unroll 1
    for (int d = 0; d < kDepth; ++d) {
      float row[4], column[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        row[e] = left[turn][d][near_i + e];
        column[e] = right[turn][d][near_j + e];
      }
#pragma unroll
      for (int e = 0; e < 16; ++e) chunk[e / 4][e % 4].add_product(row[e / 4], column[e % 4]);
    }
    if ((done + kDepth) % kChunk == 0 || done + kDepth >= a.depth) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        total[e / 4][e % 4] = total[e / 4][e % 4] + chunk[e / 4][e % 4].value();
        chunk[e / 4][e % 4] = DotProduct();
      }
    }
  }
  if (idle) return;
  TwoFloat* out = packed + b * stride_packed;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int i = first_i + e / 4, j = first_j + e % 4;
    if (i < a.size && j <= i) out[row_start(i) + j] = total[e / 4][e % 4];
  }
}

}  // namespace leaner
