// The condition number of one matrix from its Gram matrix, by a team of threads: the steps of eigen.h and
// refine.h in order, and what they mean.
#pragma once

#include "refine.h"

// A loop over the threads of a team runs a time or two: unrolling it would only take registers.

namespace leaner {

// A batch of float32 matrices, or of their first lengths[b] rows each; the elements of a row are contiguous.
struct Matrices {
  const float* data;
  int64_t stride_batch, stride_row;
  const int* lengths;  // null: all rows
  int rows, cols;

  LEANER_BOTH int rows_of(int b) const {
    if (!lengths) return rows;
    return lengths[b] < 0 ? 0 : lengths[b] < rows ? lengths[b] : rows;
  }
};

// One of them as its Gram matrix sees it: `size` vectors of `depth` elements, whichever is fewer first.
struct Vectors {
  const float* data;
  int64_t stride, stride_element;  // of a vector, and within it; one of the two is 1
  int size, depth;

  LEANER_BOTH Vectors(const Matrices& a, int b) {
    const int rows = a.rows_of(b);
    const bool by_rows = rows <= a.cols;
    data = a.data + b * a.stride_batch;
    stride = by_rows ? a.stride_row : 1;
    stride_element = by_rows ? 1 : a.stride_row;
    size = by_rows ? rows : a.cols;
    depth = by_rows ? a.cols : rows;
  }
  LEANER_BOTH float element(int i, int k) const { return data[i * stride + k * stride_element]; }
};

// Where kappa^2 times the rounding unit reaches this, the smallest eigenvalue may be rounding alone: two equal
// rows of 197 x 1024 already leave one of 15 units.
constexpr double kTell = 0.02;

struct Condition {
  double kappa, sigma_max, sigma_min;
  bool resolved;
};

// largest, smallest: eigenvalues of the Gram matrix; unit: of the arithmetic they were found in.
LEANER_BOTH Condition condition_of(double largest, double smallest, double unit) {
  smallest = sqrt(smallest > largest ? largest : smallest);  // nan stays, and is not resolved
  largest = sqrt(largest);
  const bool resolved = smallest > largest * sqrt(unit / kTell);
  return {resolved ? largest / smallest : INFINITY, largest, smallest, resolved};
}

// Where solve() works. `whole` holds the Gram matrix; `near`, faster memory, takes of its first `resident` rows a
// team's own.
template <class T>
struct Storage {
  T *whole, *near;
  int resident;
  T* work;                    // Reduction::size(size) numbers
  T* image;                   // depth numbers, where Arithmetic<T>::kRefine

  template <class Team>
  LEANER_BOTH SplitRows<Reduction<Team, T>> rows(const Team& team, int size) const {
    return {whole, {near, team.rank()}, size < resident ? size : resident};
  }
};

// Arrays of size numbers: the matrix, of which extreme_eigenvalues scales the diagonal; and two for anybody.
struct Tridiagonal {
  double *diagonal, *beside, *beside_squared, *above, *below;
};

constexpr int kCorrections = 5;             // of the vector, at most,
constexpr double kCorrected = 1.0 / 10000;  // or until one changes its quotient by less than this part

// The smallest eigenvalue of the scaled Gram matrix, given those of the tridiagonal matrix. Works in x, 2 size numbers,
// and in.image.
template <class Team, class T>
LEANER_BOTH double refined(Team& team, const Vectors& a, float scale, const Storage<T>& in,
                           const Tridiagonal& t, T* x, const Extremes& found) {
  const int n = a.size;
  const bool by_element = a.stride == 1;  // neighbours in memory belong to different vectors
  const auto reflections = in.rows(team, n);
  T* correction = x + n;
  const double eigenvalue = found.smallest * found.unit;
  eigenvector(team, t.diagonal, t.beside_squared, t.beside, found.unit, n, eigenvalue, t.above,
              t.below, x);
  for (int k = 2; k < n; ++k) reflect(team, reflections.row(k), k, x);
  if (team.thread() == 0) {
    pivots(t.diagonal, t.beside_squared, n, eigenvalue - Arithmetic<T>::kUnit, 1, t.above);
  }
  for (int step = 0;; ++step) {
    double squared = 0.0;
    sum_each<T>(
        team, a.depth, n, by_element,
        [&](int k, int i) { return x[i] * T(a.element(i, k) * scale); },
        [&](int k, T z) {
          in.image[k] = z;
          squared += double(z) * double(z);
        });
    squared = team.sum(squared, 0);
    const double length = dot(team, x, x, n, 1), quotient = squared / length;
    if (step == kCorrections) return quotient;

    // The residual A A' x - quotient x, divided by the tridiagonal matrix in its own basis.
    sum_each<T>(
        team, n, a.depth, !by_element,
        [&](int i, int k) { return in.image[k] * T(a.element(i, k) * scale); },
        [&](int i, T sum) { correction[i] = sum - T(quotient) * x[i]; });
    team.sync();
    for (int k = n - 1; k > 1; --k) reflect(team, reflections.row(k), k, correction);
#pragma unroll 1
    for (int i = team.thread(); i < n; i += team.threads()) t.below[i] = double(correction[i]);
    team.sync();
    if (team.thread() == 0) {
      solve_tridiagonal(t.beside, found.unit, n, t.above, t.below, correction);
    }
    team.sync();
    for (int k = 2; k < n; ++k) reflect(team, reflections.row(k), k, correction);

    // The best combination with x; made orthogonal twice, for the first time may leave nothing but rounding.
    for (int pass = 0; pass < 2; ++pass) {
      const T along(dot(team, x, correction, n, pass) / length);
#pragma unroll 1
      for (int i = team.thread(); i < n; i += team.threads()) {
        correction[i] = correction[i] - along * x[i];
      }
      team.sync();
    }
    double between = 0.0, second = 0.0;
    sum_each<T>(
        team, a.depth, n, by_element,
        [&](int k, int i) { return correction[i] * T(a.element(i, k) * scale); },
        [&](int k, T z) {
          between += double(z) * double(in.image[k]);
          second += double(z) * double(z);
        });
    between = team.sum(between, 1);
    second = team.sum(second, 0);
    const double size = dot(team, correction, correction, n, 1);
    // No correction, or none that a float can hold.
    if (!(size > 0.0 && size < 1e30) || between == 0.0) return quotient;
    between /= sqrt(length * size);
    const double lower = smaller_of_pair(quotient, between, second / size);
    if (!(quotient - lower > kCorrected * quotient)) return lower < quotient ? lower : quotient;
    const T share((lower - quotient) / between * sqrt(length / size));
#pragma unroll 1
    for (int i = team.thread(); i < n; i += team.threads()) x[i] = x[i] + share * correction[i];
    team.sync();
  }
}

// spectrum: null, or `places` singular values, descending, zero past the size of the matrix. The matrix is
// scaled by `scale`, a power of two; its Gram matrix already is.
template <class Team, class T>
LEANER_BOTH Condition solve(Team& team, const Vectors& a, float scale, const Storage<T>& in,
                            double* spectrum, int places) {
  const int n = a.size;
  using Memory = Reduction<Team, T>;
#pragma unroll 1
  for (int i = team.thread(); i < Memory::size(n); i += team.threads()) in.work[i] = T(0.0);
  double trace = 0.0;
#pragma unroll 1
  for (int i = team.thread(); i < n; i += team.threads()) trace += double(in.whole[row_start(i) + i]);
  trace = team.sum(trace, 0);
  // A number that is not finite is on the diagonal of its Gram matrix too.
  if (n == 0 || !(trace <= 1.7e308)) {
#pragma unroll 1
    for (int i = team.thread(); spectrum && i < places; i += team.threads()) spectrum[i] = NAN;
    return {NAN, NAN, NAN, false};
  }
  const auto all = in.rows(team, n);
  for (int i = team.rank() * Memory::kTileRows; i < all.held; i += Memory::kRanks * Memory::kTileRows) {
    const int end = i + Memory::kTileRows < all.held ? i + Memory::kTileRows : all.held;
    T *from = in.whole + row_start(i), *to = all.near.row(i);
#pragma unroll 2
    for (int e = 2 * team.thread(); e < row_start(end) - row_start(i); e += 2 * team.threads()) {
      pair(to + e) = pair(from + e);
    }
  }
  const Memory memory(in.work, n);
#pragma unroll 1
  for (int j = team.thread(); j < n; j += team.threads()) {
    memory.vector(n - 1)[j] = in.whole[row_start(n - 1) + j];
    if (j == n - 1) memory.diagonal[j] = double(memory.vector(j)[j]);
  }
  if constexpr (Memory::kRanks > 1) team.meet();  // nobody writes to one that has not got that far
  reduce_rows(team, all, n - 1, all.held > 1 ? all.held : 1, memory);
  reduce_rows(team, all.near, all.held - 1, 1, memory);
  team.sync();
  if (team.rank() > 0) return {};

  // The vectors are done with: their place takes what is made of the tridiagonal matrix.
  auto* beside = reinterpret_cast<double*>(memory.memory);
  const Tridiagonal t{memory.diagonal, memory.beside, beside, beside + memory.pitch, beside + 2 * memory.pitch};
#pragma unroll 1
  for (int i = team.thread(); i < n; i += team.threads()) beside[i] = i > 0 ? t.beside[i] : 0.0;
  team.sync();
  const int half = team.threads() > 1 ? team.threads() / 2 : 1;
  const int sections = half < Arithmetic<T>::kSections ? half : Arithmetic<T>::kSections;
  const Extremes found = extreme_eigenvalues(team, t.diagonal, beside, n, sections);
  const double squared = double(scale) * scale;
  if (spectrum) {
    all_eigenvalues(team, t.diagonal, beside, n, found.largest * found.unit, t.above);
    team.sync();
#pragma unroll 1
    for (int i = team.thread(); i < places; i += team.threads()) {
      spectrum[i] = i < n ? sqrt(t.above[n - 1 - i] / (found.unit * squared)) : 0.0;
    }
    team.sync();
  }
  double smallest = found.smallest;
  if constexpr (Arithmetic<T>::kRefine) {
    if (found.largest > 0.0) {
      const double quotient = refined(team, a, scale, in, t, memory.columns, found);
      // More than rounding above the first finding, it belongs to another vector, or is no number.
      const double rounding = 0.5 / kTell * Arithmetic<T>::kUnit * found.largest;
      if (quotient <= smallest + rounding) smallest = quotient;
    }
  }
  return condition_of(found.largest / squared, smallest / squared, Arithmetic<T>::kUnit);
}

}  // namespace leaner
