// The largest and smallest eigenvalue of a symmetric positive semidefinite matrix, found by a team of
// threads: Householder reduction to tridiagonal form, then Sturm sequences at many shifts at once.
//
// One source for the GPU, where a team is a thread block, and for the host, where it is one thread, so that
// what runs on the GPU is tested without one. Storage is the lower triangle, row after row, each padded to a
// multiple of four elements: element (i, j), j <= i, at row_start(i) + j. Rows are eliminated from the last to
// the first, so what is left is always the beginning of the storage.
//
// Numbers are double, or any type of 8 bytes with + - * and conversions from and to double (two_float.h).
//
// A team has thread() of threads(), lane() of kLanes and warp() of warps(); sync(), a barrier that makes
// writes visible; and sum(x, turn), maximum(x, turn): the same result on every thread and from run to run.
// They hold a barrier and use the scratch of that turn, 0 or 1: two calls in a row take different turns.
// sum_lanes(x) is the sum over a warp, whose threads must all call it; sum_over<kStep, kCount>(x) that of each of four
// numbers over kCount lanes kStep apart, among which it shares the sums: x[0] becomes that of the number returned, or
// what another lane has too where that is -1. One thread alone keeps all four.
//
// kRanks teams, of which this is rank(), may share a matrix: every kRanks-th tile of rows is one's own, the vectors
// are kept by all. publish(to, x) writes to the same place of each, which sees it behind meet(), a barrier of them all.
//
// Sources: Golub and Van Loan, Matrix Computations, 8.3.1 (reduction), 8.4.1 (Sturm sequences);
// Wilkinson, The Algebraic Eigenvalue Problem, 5.36 ff. (the recurrence is backward stable).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "two_float.h"

namespace leaner {

LEANER_BOTH constexpr int triangle(int i) { return i * (i + 1) / 2; }

// Where row i of the padded triangle starts; the four rows from a multiple of four have the same length.
LEANER_BOTH constexpr int padded(int i) { return 4 * (i / 4 + 1); }
LEANER_BOTH constexpr int row_start(int i) { return padded(i) * (i - i / 4 * 2); }

// Where a team finds its rows of a padded triangle: all of them in one piece of memory, from which those of other
// teams are left out,
template <class Grid>
struct Rows {
  typename Grid::Number* first;
  int rank;

  LEANER_BOTH auto* row(int i) const { return first + row_start(i) - Grid::skipped(i, rank); }
};

// or those before row `held`, a multiple of four, in one piece and the others where the whole would be in another.
template <class Grid>
struct SplitRows {
  typename Grid::Number* whole;
  Rows<Grid> near;
  int held;

  LEANER_BOTH auto* row(int i) const { return i < held ? near.row(i) : whole + row_start(i); }
};

// Two numbers that are loaded and stored at once.
template <class T>
struct alignas(16) Pair {
  T at[2];

  LEANER_BOTH Pair operator+(Pair other) const { return {at[0] + other.at[0], at[1] + other.at[1]}; }
};
template <class T>
LEANER_BOTH Pair<T>& pair(T* first) {
  return *reinterpret_cast<Pair<T>*>(first);
}

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

// What reduce_rows works with beside the matrix, and how it cuts the matrix: a warp takes tiles of kDown x kAcross
// lanes, a lane four rows by two pairs of columns.
template <class Team, class T>
struct Reduction {
  using Number = T;
  static constexpr int kRanks = Team::kRanks, kSlices = kRanks == 1 ? 4 : 2;  // strips are dealt to warps in slices
  static constexpr int kTold = kRanks == 1 ? 0 : 2 * (kRanks + 1);
  static constexpr int kAcross = Team::kLanes == 1 ? 1 : 8, kDown = Team::kLanes / kAcross;
  static constexpr int kTileRows = 4 * kDown, kTileColumns = 4 * kAcross;
  static constexpr int kKept = Team::kLanes == 1 ? 4 : 1;  // of four sums over lanes, by each

  T *memory, *w, *columns, *rows, *exchange;
  double *diagonal, *beside;  // element k of each is written for every row k; beside[k] couples k - 1 and k
  int pitch;

  LEANER_BOTH static constexpr int strips(int n) { return (n + kTileColumns - 1) / kTileColumns; }
  // Numbers that the memory must hold.
  LEANER_BOTH static constexpr int size(int n) {
    return kTileColumns * (strips(n) * (5 + kSlices + kTold) + triangle(strips(n)));
  }
  LEANER_BOTH Reduction(T* from, int n) : memory(from), pitch(strips(n) * kTileColumns) {
    w = memory + 2 * pitch;
    diagonal = reinterpret_cast<double*>(w + pitch);
    beside = diagonal + pitch;
    columns = w + 3 * pitch;
    exchange = columns + kSlices * pitch;
    rows = exchange + kTold * pitch;
  }
  // The first n rows of one's own, and what a team does not hold of the rows before row i.
  LEANER_BOTH static constexpr int own(int n, int rank) { return row_start(n) - skipped(n, rank); }
  LEANER_BOTH static constexpr int skipped(int i, int rank) {
    if (kRanks == 1) return 0;
    // Tile t holds kSquare t + kFirst numbers.
    constexpr int kSquare = kTileRows * kTileRows, kFirst = kSquare / 2 + 2 * kTileRows;
    const int tile = i / kTileRows, own = (tile - rank + kRanks - 1) / kRanks;
    return row_start(tile * kTileRows) - own * (kSquare * rank + kFirst) - kSquare * kRanks * triangle(own - 1);
  }
  LEANER_BOTH static bool owned(int i, int rank) { return i / kTileRows % kRanks == rank; }
  // Row k as it is eliminated. Until row k - 1 is, it serves as v: the update v w' + w v' of the matrix, less its
  // last element, is applied together with the next product.
  LEANER_BOTH T* vector(int k) const { return memory + k % 2 * pitch; }
  // What teams tell each other in the step of row k: the sums of each, and row k - 1.
  LEANER_BOTH T* told(int k, int which) const { return exchange + (k % 2 * (kRanks + 1) + which) * pitch; }
  // The sums of a strip of columns along row i, for the rows from the strip's diagonal on.
  LEANER_BOTH T& row_sum(int strip, int i) const {
    return rows[strip * pitch - kTileColumns * triangle(strip) + i];
  }
  // Element j of A x, as far as a team's own rows make it.
  LEANER_BOTH T total(int j, int rank) const {
    T sum = columns[j] + columns[pitch + j], other(0.0);
    if (kSlices == 4) other = columns[2 * pitch + j] + columns[3 * pitch + j];
    if (!owned(j, rank)) return sum;
    const int last = j / kTileColumns;
#pragma unroll 1
    for (int first = 0; first <= last; first += 4) {
#pragma unroll
      for (int strip = first; strip < first + 4; strip += 2) {
        if (strip <= last) sum = sum + row_sum(strip, j);
        if (strip + 1 <= last) other = other + row_sum(strip + 1, j);
      }
    }
    return sum + other;
  }
  // Element j of what teams have told in the step of row k, summed.
  LEANER_BOTH T told_total(int k, int j) const {
    T sum = told(k, 0)[j];
#pragma unroll
    for (int rank = 1; rank < kRanks; ++rank) sum = sum + told(k, rank)[j];
    return sum;
  }
};

// A -= v w' + w v' on the first k rows and, while they are at hand, the sums of A x, in parts that in.total() adds
// up. Returns this thread's share of x' A x.
template <class Team, class Matrix, class T>
LEANER_BOTH T update_and_multiply(Team& team, const Matrix& a, int k, const Reduction<Team, T>& in, T* x, T* v) {
  constexpr int kFar = 2 * in.kAcross;  // from one pair of columns to the other
  const int across = team.lane() % in.kAcross, down = team.lane() / in.kAcross;
  const int items = in.strips(k) * in.kSlices;
  T product(0.0);
#pragma unroll 1
  for (int round = 0; round * team.warps() < items; ++round) {
    // Strips get shorter: every other round goes through the warps in reverse.
    const int turn = round % 2 ? team.warps() - 1 - team.warp() : team.warp();
    const int item = round * team.warps() + turn;
    if (item >= items) continue;
    const int strip = item / in.kSlices, slice = item % in.kSlices;
    const int first_j = strip * in.kTileColumns, j = first_j + 2 * across;
    Pair<T> xj[2], vj[2], wj[2];
    T column[4], part(0.0);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      xj[p] = pair(x + j + p * kFar);
      vj[p] = pair(v + j + p * kFar);
      wj[p] = pair(in.w + j + p * kFar);
      column[2 * p] = column[2 * p + 1] = T(0.0);
    }
    // One tile. edge: part of it lies above the diagonal or below row k - 1.
    const auto update = [&](int i, auto edge) {
      const auto inside = [&](int r, int at) { return !edge.value || (i + r < k && at <= i + r); };
      T* row = a.row(i);
      const int length = padded(i);
      Pair<T> element[4][2], xi[2], vi[2], wi[2];
      T sum[4];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int r = e / 2, p = e % 2, at = j + p * kFar;
        element[r][p] = inside(r, at) ? pair(row + r * length + at) : Pair<T>{T(0.0), T(0.0)};
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        xi[p] = pair(x + i + 2 * p);
        vi[p] = pair(v + i + 2 * p);
        wi[p] = pair(in.w + i + 2 * p);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        sum[r] = T(0.0);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int p = c / 2, q = c % 2, at = j + p * kFar + q;
          T& value = element[r][p].at[q];
          value = value - vi[r / 2].at[r % 2] * wj[p].at[q] - wi[r / 2].at[r % 2] * vj[p].at[q];
          const T counted = inside(r, at) ? value : T(0.0);
          column[c] = column[c] + counted * xi[r / 2].at[r % 2];
          // The diagonal counts once.
          sum[r] = sum[r] + (edge.value && at == i + r ? T(0.0) : counted) * xj[p].at[q];
        }
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (inside(r, j + p * kFar)) pair(row + r * length + j + p * kFar) = element[r][p];
        }
      }
      const int first = Team::template sum_over<1, in.kAcross>(sum);
#pragma unroll
      for (int r = 0; r < in.kKept && first >= 0; ++r) {
        in.row_sum(strip, i + first + r) = sum[r];
        part = part + x[i + first + r] * sum[r];
      }
    };
    // From the diagonal on, the first tile of the slice that is this team's.
    const int tile = first_j / in.kTileRows;
    const int begin = tile + (team.rank() + in.kRanks - tile % in.kRanks) % in.kRanks + slice * in.kRanks;
#pragma unroll 1
    for (int first_i = begin * in.kTileRows; first_i < k; first_i += in.kSlices * in.kRanks * in.kTileRows) {
      if (first_i < first_j + in.kTileColumns || first_i + in.kTileRows > k) {
        update(first_i + 4 * down, std::true_type());
      } else {
        update(first_i + 4 * down, std::false_type());
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) part = part + xj[c / 2].at[c % 2] * column[c];
    product = product + part;
    const int first = Team::template sum_over<in.kAcross, in.kDown>(column);
#pragma unroll
    for (int e = 0; e < in.kKept; ++e) {
      const int c = first + e;
      in.columns[slice * in.pitch + j + c / 2 * kFar + c % 2] = column[e];
    }
  }
  return product;
}

// This thread's share of the sum of the first n squares, of elements that it has written itself.
template <class Team, class T>
LEANER_BOTH T squares(Team& team, const T* x, int n) {
  T sum(0.0);
#pragma unroll 1
  for (int j = team.thread(); j < n; j += team.threads()) sum = sum + x[j] * x[j];
  return sum;
}

// Eliminates rows `from` down to `to`, at least 1, of the matrix `a`: one Householder reflection each, by u = x - beta e
// with x the row and e its last unit vector. The product A x does not wait for beta, the norm of x: A u is that less
// beta times the last column. So a step has two barriers, and one pass over the matrix; teams that share one meet once.
//
// in: row `from` as vector(from), v and w of the step before, or zeros. It is left so for row to - 1: a second call may
// find what is left in another place.
template <class Team, class Matrix, class T>
LEANER_BOTH void reduce_rows(Team& team, const Matrix& a, int from, int to, const Reduction<Team, T>& in) {
  for (int k = from; k >= to; --k) {
    const int last = k - 1;
    T* x = in.vector(k);
    double lift = 1.0;
    if constexpr (Arithmetic<T>::kRefine) {
      // To size 1, or products underflow where the rest of the matrix is rounding.
      const double norm = double(team.sum(squares(team, x, k), 0));
      if (norm > Arithmetic<T>::kNegligible) {
        lift = of_bits((1023 + (1023 - int(bits_of(norm) >> 52)) / 2) * (1ull << 52));
      }
#pragma unroll 1
      for (int j = team.thread(); j < k; j += team.threads()) x[j] = T(lift) * x[j];
    }
    team.sync();
    const T square = squares(team, x, last);
    Pair<T> sums = team.sum(Pair<T>{update_and_multiply(team, a, k, in, x, in.vector(k + 1)), square}, 1);
    const T* next = a.row(last);
    if constexpr (in.kRanks > 1) {
      for (int j = team.thread(); j < k; j += team.threads()) {
        team.publish(in.told(k, team.rank()) + j, in.total(j, team.rank()));
        if (in.owned(last, team.rank())) team.publish(in.told(k, in.kRanks) + j, next[j]);
      }
      if (team.thread() == 0) team.publish(in.told(k, team.rank()) + k, sums.at[0]);
      team.meet();
      next = in.told(k, in.kRanks);
    }
    if (team.thread() >= k) continue;
    const auto total = [&](int j) {
      if constexpr (in.kRanks > 1) return in.told_total(k, j);
      else return in.total(j, 0);
    };
    // Scalars of a reflection are found in double, on every thread alike.
    if constexpr (in.kRanks > 1) sums.at[0] = total(k);
    const double tail = double(sums.at[1]), alpha = double(x[last]);
    double beta = alpha, scale = 0.0;
    if (tail > Arithmetic<T>::kNegligible * lift * lift) {
      beta = std::copysign(std::sqrt(alpha * alpha + tail), -alpha);
      scale = 1.0 / (beta * (beta - alpha));
    }
    const T moved(beta), factor(scale), u_last(alpha - beta), product_last = total(last), corner = next[last];
    const T half = T(0.5 * scale) * (sums.at[0] - moved * (product_last + product_last - moved * corner));
    const T w_last = factor * (product_last - moved * corner - half * u_last);
    if (team.thread() == 0) in.beside[k] = beta / lift;
#pragma unroll 1
    for (int j = team.thread(); j < k; j += team.threads()) {
      const T u = j == last ? u_last : x[j];
      const T w = j == last ? w_last : factor * (total(j) - moved * next[j] - half * u);
      in.w[j] = w;
      if (Arithmetic<T>::kRefine) a.row(k)[j] = u;
      const T value = next[j] - u_last * w - w_last * u;
      in.vector(last)[j] = value;
      if (j == last) in.diagonal[last] = double(value);
    }
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
