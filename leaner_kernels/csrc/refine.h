// The smallest eigenvalue once more, from the matrix itself: TwoFloat (2^-48) loses it in the Gram matrix earlier
// than float64 (2^-53) does. Its eigenvector x still serves: the quotient |A' x|^2 / |x|^2 needs no Gram matrix, and
// its error is that of x squared. Where neighbours are too close for x it is corrected (Davidson): by the residual,
// found from A and divided by the tridiagonal matrix, in the best of all combinations of the two vectors.
// No quotient lies under the smallest eigenvalue.
//
// Sources: Parlett, The Symmetric Eigenvalue Problem, 4.6 (Rayleigh quotients), 11.3 (Rayleigh and Ritz); Dhillon and
// Parlett 2004 (the vector of a tridiagonal matrix from a factorisation twisted where it is largest); Davidson 1975.
#pragma once

#include "eigen.h"

// A loop over the threads of a team runs a time or two: unrolling it would only take registers.

namespace leaner {

// Pivots of the factorisation of T - shift from above (step 1) or from below (step -1).
LEANER_BOTH void pivots(const double* diagonal, const double* beside_squared, int n, double shift,
                        int step, double* pivot) {
  double last = 0.0;
  for (int count = 0, i = step > 0 ? 0 : n - 1; count < n; ++count, i += step) {
    const double taken = count == 0 ? 0.0 : beside_squared[step > 0 ? i : i + 1] / last;
    double next = diagonal[i] - shift - taken;
    // Far under the rounding unit, and far above what the least coupling takes from the next.
    if (fabs(next) < 1e-20) next = 1e-20;
    pivot[i] = last = next;
  }
}

// An eigenvector of the tridiagonal matrix for `eigenvalue`; `diagonal` and `beside_squared` as extreme_eigenvalues has
// left them, `beside` as reduce_rows wrote it, `unit` the scale between. above, below: n numbers each, overwritten.
template <class Team, class T>
LEANER_BOTH void eigenvector(Team& team, const double* diagonal, const double* beside_squared,
                             const double* beside, double unit, int n, double eigenvalue,
                             double* above, double* below, T* x) {
  // Two serial recurrences, side by side on two threads of different warps where there are two.
  const int other = team.threads() > Team::kLanes ? Team::kLanes : 0;
  if (team.thread() == 0) pivots(diagonal, beside_squared, n, eigenvalue, 1, above);
  if (team.thread() == other) pivots(diagonal, beside_squared, n, eigenvalue, -1, below);
  team.sync();
  if (team.thread() == 0 || team.thread() == other) {
    int twist = 0;
    double least = INFINITY;
    for (int i = 0; i < n; ++i) {
      const double gamma = fabs(above[i] + below[i] - (diagonal[i] - eigenvalue));
      if (gamma < least) {
        least = gamma;
        twist = i;
      }
    }
    if (team.thread() == 0) {
      double value = 1.0;
      x[twist] = T(value);
      for (int i = twist; i > 0; --i) {
        value *= -(beside[i] * unit) / above[i - 1];
        x[i - 1] = T(value);
      }
    }
    if (team.thread() == other) {
      double value = 1.0;
      for (int i = twist + 1; i < n; ++i) {
        value *= -(beside[i] * unit) / below[i];
        x[i] = T(value);
      }
    }
  }
  team.sync();
}

// (T - shift) x = right, solved by one thread, given the pivots from above; the shift lies under every eigenvalue.
// `right` is overwritten.
template <class T>
LEANER_BOTH void solve_tridiagonal(const double* beside, double unit, int n, const double* pivot,
                                   double* right, T* x) {
  for (int i = 1; i < n; ++i) right[i] -= beside[i] * unit / pivot[i - 1] * right[i - 1];
  double value = 0.0;
  for (int i = n - 1; i >= 0; --i) {
    value = (right[i] - (i + 1 < n ? beside[i + 1] * unit * value : 0.0)) / pivot[i];
    x[i] = T(value);
  }
}

// x = H x for the reflection of row k that reduce_rows has left as u.
template <class Team, class T>
LEANER_BOTH void reflect(Team& team, const T* u, int k, T* x) {
  // No reflection was needed where the last element is zero.
  if (double(u[k - 1]) == 0.0) return;
  T square(0.0), product(0.0);
#pragma unroll 1
  for (int j = team.thread(); j < k; j += team.threads()) {
    square = square + u[j] * u[j];
    product = product + u[j] * x[j];
  }
  const double squared = double(team.sum(square, 0));
  const T factor(2.0 * double(team.sum(product, 1)) / squared);
#pragma unroll 1
  for (int j = team.thread(); j < k; j += team.threads()) x[j] = x[j] - factor * u[j];
  team.sync();
}

template <class Team, class T>
LEANER_BOTH double dot(Team& team, const T* x, const T* y, int n, int turn) {
  double sum = 0.0;
#pragma unroll 1
  for (int i = team.thread(); i < n; i += team.threads()) sum += double(x[i]) * double(y[i]);
  return team.sum(sum, turn);
}

// put(o, sum of term(o, k) over k < inner) for every o < outer. Lanes go along k where the elements of a term with
// neighbouring k are neighbours in memory, and along o otherwise.
template <class T, class Team, class Term, class Put>
LEANER_BOTH void sum_each(Team& team, int outer, int inner, bool along_k, Term term, Put put) {
  const int first = along_k ? team.warp() : team.thread(), step = along_k ? team.warps() : team.threads();
  const int first_k = along_k ? team.lane() : 0, step_k = along_k ? Team::kLanes : 1;
#pragma unroll 1
  for (int o = first; o < outer; o += step) {
    T sum(0.0);
#pragma unroll 2
    for (int k = first_k; k < inner; k += step_k) sum = sum + term(o, k);
    if (along_k) sum = team.sum_lanes(sum);
    if (!along_k || team.lane() == 0) put(o, sum);
  }
}

// The smaller eigenvalue of ((first, between), (between, second)).
LEANER_BOTH double smaller_of_pair(double first, double between, double second) {
  const double half = 0.5 * (second - first), root = sqrt(half * half + between * between);
  if (half < 0.0) return first + half - root;
  return root > 0.0 ? first - between * (between / (half + root)) : first;
}

}  // namespace leaner
