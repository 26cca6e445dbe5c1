// The largest and smallest eigenvalue of a symmetric positive semidefinite matrix, found by a team of
// threads: Householder reduction to tridiagonal form, then Sturm sequences at many shifts at once.
//
// One source for the GPU, where a team is a thread block, and for the host, where it is one thread or
// a few, so that what runs on the GPU is tested without one. Storage is the packed lower triangle, row
// after row: element (i, j), j <= i, at triangle(i) + j. Rows are eliminated from the last to the first,
// so what is left is always the beginning of the storage.
//
// Numbers are double, or any type with + - * and conversions from and to double (two_float.h).
//
// A team has thread() of threads(), lane() of lanes() and warp() of warps(); sync(), a barrier that makes
// writes visible; and sum(x, turn), maximum(x, turn): the same result on every thread and from run to run.
// They hold a barrier and use the scratch of that turn, 0 or 1: two calls in a row take different turns.
// sum_lanes(x) is the sum over a warp, whose threads must all call it.
//
// Sources: Golub and Van Loan, Matrix Computations, 8.3.1 (reduction), 8.4.1 (Sturm sequences);
// Wilkinson, The Algebraic Eigenvalue Problem, 5.36 ff. (the recurrence is backward stable).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "two_float.h"

namespace leaner {

constexpr int kSlices = 4;  // partial sums kept of every element of a matrix-vector product

LEANER_BOTH constexpr int triangle(int i) { return i * (i + 1) / 2; }

// Numbers of type T that reduce_rows needs beside the triangle of an n x n matrix.
LEANER_BOTH constexpr int vectors(int n) { return n * (2 + kSlices); }

// Where the rows of a packed triangle are: all of them in one piece of memory,
template <class T>
struct Rows {
  T* first;

  LEANER_BOTH T* row(int i) const { return first + triangle(i); }
};

// or the first `held` in one piece and the others where the whole would be in another.
template <class T>
struct SplitRows {
  T *whole, *near;
  int held;

  LEANER_BOTH T* row(int i) const { return (i < held ? near : whole) + triangle(i); }
};

// What the algorithms below need to know of a type of numbers.
template <class T>
struct Arithmetic;
template <>
struct Arithmetic<double> {
  static constexpr double kUnit = 1.0 / (1ull << 52);
  static constexpr double kNegligible = 1e-290;  // sums of squares under this are underflow
  static constexpr int kSections = 64;    // shifts tried at once for each eigenvalue
  static constexpr bool kRefine = false;  // the smallest eigenvalue by its vector (refine.h)
};
// Range of a float: matrices come scaled to about 1, where what is dropped lies under 1e-16 of them.
template <>
struct Arithmetic<TwoFloat> {
  static constexpr double kUnit = 1.0 / (1ull << 48);
  static constexpr double kNegligible = 1e-33;
  static constexpr int kSections = 32;  // in float64, of which these GPUs have little
  static constexpr bool kRefine = true;
};

LEANER_BOTH uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

LEANER_BOTH double of_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A -= v w' + w v' on the first k rows, while summing the columns of the result against u:
// partial[s][j] = sum of a(i, j) u(i) over i = j, ..., k - 1 with i in slice s.
// Returns this thread's share of u' A u, with A symmetric.
template <class Team, class Matrix, class T>
LEANER_BOTH T update_and_sum_columns(Team& team, const Matrix& a, int k, const T* v, const T* w,
                                     const T* u, T* partial, int n) {
  constexpr int kRows = 4;  // loaded together: their loads overlap
  const int width = 2 * team.lanes();
  const int items = (k + width - 1) / width * kSlices;
  T product(0.0);
  for (int item = team.warp(); item < items; item += team.warps()) {
    const int first = item / kSlices * width, slice = item % kSlices;
    const int j[2] = {first + team.lane(), first + team.lane() + team.lanes()};
    T vj[2], wj[2], sum[2];
    for (int c = 0; c < 2; ++c) {
      vj[c] = j[c] < k ? v[j[c]] : T(0.0);
      wj[c] = j[c] < k ? w[j[c]] : T(0.0);
      sum[c] = T(0.0);
    }
    for (int i = first + slice; i < k; i += kRows * kSlices) {
      T x[kRows][2], ui[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = i + r * kSlices;
        if (row >= k) continue;
        ui[r] = u[row];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (j[c] <= row) x[r][c] = a.row(row)[j[c]];
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = i + r * kSlices;
        if (row >= k) continue;
        const T vi = v[row], wi = w[row];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (j[c] > row) continue;
          x[r][c] = x[r][c] - vi * wj[c] - wi * vj[c];
          a.row(row)[j[c]] = x[r][c];
          sum[c] = sum[c] + x[r][c] * ui[r];
        }
      }
    }
    for (int c = 0; c < 2; ++c) {
      if (j[c] >= k) continue;
      partial[slice * n + j[c]] = sum[c];
      // Elements off the diagonal stand for two.
      T twice = sum[c] + sum[c];
      if ((j[c] - first) % kSlices == slice) twice = twice - a.row(j[c])[j[c]] * u[j[c]];
      product = product + u[j[c]] * twice;
    }
  }
  return product;
}

// partial[s][i] += sum of a(i, j) u(j) over j < i in slice s. Lanes read a column of the packed triangle:
// triangle(i) modulo a power of two takes every value once, so no two lanes meet in a bank.
template <class Team, class Matrix, class T>
LEANER_BOTH void sum_rows(Team& team, const Matrix& a, int k, const T* u, T* partial, int n) {
  const int width = 2 * team.lanes();
  const int items = (k + width - 1) / width * kSlices;
  for (int item = team.warp(); item < items; item += team.warps()) {
    const int first = item / kSlices * width, slice = item % kSlices;
    const int i[2] = {first + team.lane(), first + team.lane() + team.lanes()};
    const T* row[2] = {a.row(i[0]), a.row(i[1])};
    T sum[2] = {T(0.0), T(0.0)};
    const int end = first + width < k ? first + width : k;
#pragma unroll 4
    for (int j = slice; j < end; j += kSlices) {
      const T uj = u[j];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (j < i[c] && i[c] < k) sum[c] = sum[c] + row[c][j] * uj;
      }
    }
    for (int c = 0; c < 2; ++c) {
      if (i[c] < k) partial[slice * n + i[c]] = partial[slice * n + i[c]] + sum[c];
    }
  }
}

// Eliminates rows `from` down to `to`, at least 1, of the packed matrix `a`: one Householder reflection each.
//
// work: vectors(n) numbers, all zero at first. Its first 2 n are v and w: the rank-two update of the row before,
// which is applied together with the next one; kept, two calls may find what is left in two places.
// diagonal, beside: element k of each is written for every row k eliminated; beside[k] couples k - 1 and k.
// Once row 1 is eliminated, row 0 is the last element of the diagonal.
template <class Team, class Matrix, class T>
LEANER_BOTH void reduce_rows(Team& team, const Matrix& a, int from, int to, T* work, int n, T* pivot,
                             double* diagonal, double* beside) {
  T *v = work, *w = work + n, *partial = work + 2 * n;
  for (int k = from; k >= to; --k) {
    T* u = a.row(k);
    const T vk = v[k], wk = w[k];
    T square(0.0);
    for (int j = team.thread(); j <= k; j += team.threads()) {
      const T x = u[j] - vk * w[j] - wk * v[j];
      u[j] = x;
      if (j < k - 1) square = square + x * x;
      if (j == k - 1) *pivot = x;
      if (j == k) diagonal[k] = double(x);
    }
    // Scalars of a reflection are found in double, on every thread alike. u is lifted to size 1, so that
    // nothing underflows where the rest of the matrix is rounding.
    const double tail = double(team.sum(square, 0)), alpha = double(*pivot);
    double beta = alpha, scale = 0.0, lift = 1.0;
    if (tail > Arithmetic<T>::kNegligible) {
      beta = std::copysign(std::sqrt(alpha * alpha + tail), -alpha);
      lift = of_bits((2046 - (bits_of(std::fabs(beta)) >> 52)) << 52);
      scale = 1.0 / (beta * lift * ((beta - alpha) * lift));
    }
    for (int j = team.thread(); j < k - 1; j += team.threads()) u[j] = T(lift) * u[j];
    if (team.thread() == 0) {
      beside[k] = beta;
      u[k - 1] = T((alpha - beta) * lift);
    }
    team.sync();
    const T product = update_and_sum_columns(team, a, k, v, w, u, partial, n);
    const double half = 0.5 * scale * double(team.sum(product, 1));
    sum_rows(team, a, k, u, partial, n);
    team.sync();
    for (int j = team.thread(); j < k; j += team.threads()) {
      T p = partial[j];
      for (int s = 1; s < kSlices; ++s) p = p + partial[s * n + j];
      v[j] = u[j];
      w[j] = T(scale) * (p - T(half) * u[j]);
    }
    team.sync();
  }
}

// Squared couplings of neighbours under this are raised to it: a step of count_below then shrinks no pair of minors
// by more, and one that is exactly zero is followed by one that is not.
constexpr double kLeastCoupling = 1e-40;

LEANER_BOTH uint32_t high_word(double x) { return uint32_t(bits_of(x) >> 32); }

// Eigenvalues under x of the tridiagonal matrix with this diagonal and squared off-diagonal elements, both of
// a matrix scaled to norm 1 or so: sign changes of its leading minors, without divisions.
LEANER_BOTH int count_below(const double* diagonal, const double* beside_squared, int n, double x) {
  double before = 1.0, minor = diagonal[0] - x;
  int count = high_word(minor) >> 31;
  for (int i = 1; i < n; ++i) {
    const double next = (diagonal[i] - x) * minor - beside_squared[i] * before;
    count += (high_word(next) ^ high_word(minor)) >> 31;
    before = minor;
    minor = next;
    if (i % 4 == 0) {
      // By the power of two that brings the larger of the pair to [1, 2); a step at most triples it.
      const uint32_t one = high_word(before) << 1, other = high_word(minor) << 1;
      const double rescale = of_bits(uint64_t(2046 - ((one > other ? one : other) >> 21)) << 52);
      before *= rescale;
      minor *= rescale;
    }
  }
  return count;
}

struct Extremes {
  double largest, smallest;
  double unit;  // by which the matrix was scaled
};

// Where an eigenvalue lies, as the bits of two positive doubles: evenly spaced bits are nearly evenly spaced
// logarithms.
struct Interval {
  uint64_t low, high;

  LEANER_BOTH bool wide() const { return high - low > 1024; }
  LEANER_BOTH double middle() const { return of_bits(low + (high - low) / 2); }
  LEANER_BOTH double shift(int t, int sections) const {
    return of_bits(low + (high - low) / (sections + 1) * (t + 1));
  }
  // Keep the section above the first `passed` shifts, which lie under the eigenvalue.
  LEANER_BOTH void narrow(int passed, int sections) {
    const uint64_t step = (high - low) / (sections + 1);
    low += step * passed;
    if (passed < sections) high = low + step;
  }
};

constexpr double kFloor = 1.0 / (1ull << 62);  // eigenvalues under this share of the largest read as zero

// Extreme eigenvalues of a tridiagonal positive semidefinite matrix, to 1e-12 of themselves where they are
// above rounding. `diagonal` and `beside` (element i couples i - 1 and i) are scaled in place.
// `sections` shifts for each eigenvalue, fewer than 4096, are tried in every round.
template <class Team>
LEANER_BOTH Extremes extreme_eigenvalues(Team& team, double* diagonal, double* beside, int n,
                                         int sections) {
  double bound = 0.0, top = 0.0;
  for (int i = team.thread(); i < n; i += team.threads()) {
    const double left = i > 0 ? fabs(beside[i]) : 0.0, right = i + 1 < n ? fabs(beside[i + 1]) : 0.0;
    bound = fmax(bound, fabs(diagonal[i]) + left + right);
    top = fmax(top, diagonal[i]);
  }
  bound = team.maximum(bound, 0);
  top = team.maximum(top, 1);
  if (!(top > 0.0)) return {0.0, 0.0, 1.0};
  team.sync();
  const double unit = of_bits((2046 - (bits_of(bound) >> 52)) << 52);
  for (int i = team.thread(); i < n; i += team.threads()) {
    diagonal[i] *= unit;
    const double e = i > 0 ? beside[i] * unit : 0.0;
    beside[i] = fmax(e * e, kLeastCoupling);
  }
  team.sync();
  const uint64_t high = bits_of(bound * unit * (1.0 + 1e-12));
  Interval smallest{bits_of(kFloor * top * unit), high};
  Interval largest{bits_of(top * unit * (1.0 - 1e-12)), high};
  const bool singular = count_below(diagonal, beside, n, of_bits(smallest.low)) > 0;
  if (singular) smallest.high = smallest.low;
  for (int turn = 0; smallest.wide() || largest.wide(); turn ^= 1) {
    double passed = 0.0;  // shifts under the smallest eigenvalue, plus 4096 times those under the largest
    for (int t = team.thread(); t < 2 * sections; t += team.threads()) {
      const bool low_end = t < sections;
      const Interval interval = low_end ? smallest : largest;
      const int count = count_below(diagonal, beside, n, interval.shift(t % sections, sections));
      if (count < (low_end ? 1 : n)) passed += low_end ? 1.0 : 4096.0;
    }
    const int found = int(team.sum(passed, turn));
    smallest.narrow(found % 4096, sections);
    largest.narrow(found / 4096, sections);
  }
  return {largest.middle() / unit, singular ? 0.0 : smallest.middle() / unit, unit};
}

// All eigenvalues of the matrix as extreme_eigenvalues has left it, ascending and in its scale, `largest` too:
// element i by bisection on the thread that owns it, to 1e-6 of itself; under kFloor of the largest, zero.
template <class Team>
LEANER_BOTH void all_eigenvalues(Team& team, const double* diagonal, const double* beside_squared,
                                 int n, double largest, double* eigenvalues) {
  for (int i = team.thread(); i < n; i += team.threads()) {
    uint64_t low = bits_of(kFloor * largest), high = bits_of(largest * (1.0 + 1e-6));
    const bool zero = !(largest > 0.0) || count_below(diagonal, beside_squared, n, kFloor * largest) > i;
    while (!zero && high - low > (1ull << 31)) {
      const uint64_t middle = low + (high - low) / 2;
      if (count_below(diagonal, beside_squared, n, of_bits(middle)) > i) {
        high = middle;
      } else {
        low = middle;
      }
    }
    eigenvalues[i] = zero ? 0.0 : of_bits(low + (high - low) / 2);
  }
}

}  // namespace leaner
