// Two host builds of leaner_kernels/csrc for the tests: the numerical core run by one thread, fast enough for thousands
// of matrices; and the whole CUDA source on the emulated device of emulator/cuda_runtime.h.
#include "../../leaner_kernels/csrc/condition.cu"

namespace {

using namespace leaner;

struct OneThread {
  static constexpr int kLanes = 1, kRanks = 1;

  int rank() const { return 0; }
  int thread() const { return 0; }
  int threads() const { return 1; }
  int lane() const { return 0; }
  int warp() const { return 0; }
  int warps() const { return 1; }
  void sync() const {}
  template <class T>
  T sum(T x, int) const {
    return x;
  }
  template <int kStep, int kCount, class T>
  static int sum_over(T (&)[4]) {
    return 0;
  }
  template <class T>
  T sum_lanes(T x) const {
    return x;
  }
  double maximum(double x, int) const { return x; }
};

// Sums of kChunk products, summed: as gram() and gram_two_float() round.
void gram_element(const float* x, const float* y, const Vectors& a, float, double& out) {
  out = 0.0;
  for (int first = 0; first < a.depth; first += kChunk) {
    double chunk = 0.0;
    for (int k = first; k < min(first + kChunk, a.depth); ++k) {
      chunk += double(x[k * a.stride_element]) * double(y[k * a.stride_element]);
    }
    out += chunk;
  }
}
void gram_element(const float* x, const float* y, const Vectors& a, float scale, TwoFloat& out) {
  out = TwoFloat(0.0f);
  for (int first = 0; first < a.depth; first += kChunk) {
    DotProduct chunk;
    for (int k = first; k < min(first + kChunk, a.depth); ++k) {
      chunk.add_product(x[k * a.stride_element] * scale, y[k * a.stride_element] * scale);
    }
    out = out + chunk.value();
  }
}

// As find_scales().
float scale_of(const Vectors& a) {
  float largest = 0.0f;
  for (int i = 0; i < a.size; ++i) {
    for (int k = 0; k < a.depth; ++k) {
      const float x = std::fabs(a.data[i * a.stride + k * a.stride_element]);
      if (!(x <= FLT_MAX)) return NAN;
      largest = max(largest, x);
    }
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0f, min(-exponent, 126));
}

template <class T>
void solve_serially(const Matrices& matrices, int batch, const Results& results) {
  const int size = min(matrices.rows, matrices.cols);
  std::vector<T> packed(row_start(size)), held(row_start(size)), work(Reduction<OneThread, T>::size(size));
  std::vector<T> image(max(matrices.rows, matrices.cols));
  for (int b = 0; b < batch; ++b) {
    const Vectors a(matrices, b);
    const float scale = Arithmetic<T>::kRefine ? scale_of(a) : 1.0f;
    for (int i = 0; i < a.size; ++i) {
      for (int j = 0; j <= i; ++j) {
        gram_element(a.data + i * a.stride, a.data + j * a.stride, a, scale,
                     packed[row_start(i) + j]);
      }
    }
    OneThread team;
    const Storage<T> storage{packed.data(), held.data(), size, work.data(), image.data()};
    double* spectrum = results.spectrum ? results.spectrum + int64_t(b) * size : nullptr;
    const Condition found = solve(team, a, scale, storage, spectrum, size);
    results.kappa[b] = found.kappa;
    results.sigma_max[b] = found.sigma_max;
    results.sigma_min[b] = found.sigma_min;
    results.resolved[b] = found.resolved;
  }
}

}  // namespace

// As leaner_condition, in host memory, by one thread.
extern "C" void serial_condition(const float* data, long long stride_batch, long long stride_row,
                                 const int* lengths, int batch, int rows, int cols, bool two_float,
                                 double* kappa, double* sigma_max, double* sigma_min, bool* resolved,
                                 double* spectrum) {
  const Matrices a{data, stride_batch, stride_row, lengths, rows, cols};
  const Results results{kappa, sigma_max, sigma_min, resolved, spectrum};
  if (two_float) {
    solve_serially<TwoFloat>(a, batch, results);
  } else {
    solve_serially<double>(a, batch, results);
  }
}

// The device that leaner_condition finds from now on.
extern "C" void emulate(int shared_bytes, int double_ratio, int order) {
  emulated.shared_bytes = shared_bytes;
  emulated.double_ratio = double_ratio;
  emulated.order = order;
}
