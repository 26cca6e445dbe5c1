// A number kept as the unevaluated sum of two floats: 48 to 49 bits of significand out of float32
// arithmetic, for GPUs whose float64 runs at a fraction of the rate (sm_86: one in sixty-four).
//
// Sources: Dekker 1971; Knuth, TAOCP 2, 4.2.2 (two_sum); Joldes, Muller and Popescu 2017 (the accurate
// sum and product and their bounds: 3 u^2 and 5 u^2 with u = 2^-24).
// Compile without contraction of a * b + c: every rounding below is meant.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define LEANER_BOTH __host__ __device__ __forceinline__
#else
#define LEANER_BOTH inline
#endif

namespace leaner {

// Additions and products that no compiler may fuse into one rounding.
#ifdef __CUDA_ARCH__
LEANER_BOTH float add(float a, float b) { return __fadd_rn(a, b); }
LEANER_BOTH float multiply(float a, float b) { return __fmul_rn(a, b); }
LEANER_BOTH float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
LEANER_BOTH float add(float a, float b) { return a + b; }
LEANER_BOTH float multiply(float a, float b) { return a * b; }
LEANER_BOTH float fused(float a, float b, float c) { return std::fma(a, b, c); }
#endif

struct alignas(8) TwoFloat {
  float hi, lo;  // |lo| is at most half a unit in the last place of hi

  TwoFloat() = default;
  LEANER_BOTH TwoFloat(float h, float l) : hi(h), lo(l) {}
  LEANER_BOTH explicit TwoFloat(float x) : hi(x), lo(0.0f) {}
  LEANER_BOTH explicit TwoFloat(double x) : hi(float(x)), lo(float(x - double(float(x)))) {}
  LEANER_BOTH explicit operator double() const { return double(hi) + double(lo); }
};

// a + b and its rounding error, for |a| >= |b|.
LEANER_BOTH TwoFloat quick_two_sum(float a, float b) {
  const float s = add(a, b);
  return {s, add(b, -add(s, -a))};
}

// a + b and its rounding error.
LEANER_BOTH TwoFloat two_sum(float a, float b) {
  const float s = add(a, b);
  const float part = add(s, -a);
  return {s, add(add(a, -add(s, -part)), add(b, -part))};
}

LEANER_BOTH TwoFloat operator-(TwoFloat a) { return {-a.hi, -a.lo}; }

LEANER_BOTH TwoFloat operator+(TwoFloat a, TwoFloat b) {
  TwoFloat s = two_sum(a.hi, b.hi);
  const TwoFloat t = two_sum(a.lo, b.lo);
  s = quick_two_sum(s.hi, add(s.lo, t.hi));
  return quick_two_sum(s.hi, add(s.lo, t.lo));
}

LEANER_BOTH TwoFloat operator-(TwoFloat a, TwoFloat b) { return a + -b; }

LEANER_BOTH TwoFloat operator*(TwoFloat a, TwoFloat b) {
  const float p = multiply(a.hi, b.hi);
  const float error = fused(a.hi, b.hi, -p);
  const float cross = fused(a.hi, b.lo, multiply(a.lo, b.hi));
  return quick_two_sum(p, add(error, cross));
}

// A sum of products of floats: each product exact, the errors of the additions summed beside.
// Source: Ogita, Rump and Oishi 2005 (Dot2).
struct DotProduct {
  float sum = 0.0f, error = 0.0f;

  LEANER_BOTH void add_product(float a, float b) {
    const float p = multiply(a, b);
    const TwoFloat s = two_sum(sum, p);
    sum = s.hi;
    error = add(error, add(s.lo, fused(a, b, -p)));
  }
  LEANER_BOTH TwoFloat value() const { return quick_two_sum(sum, error); }
};

}  // namespace leaner
