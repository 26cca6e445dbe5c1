// mma and wgmma: products of matrices that lie in registers and in shared memory.
#pragma once
#include "operation.h"

enum Format { BF16, F16, TF32 };

constexpr int in_register(Format format) { return format == TF32 ? 1 : 2; }
constexpr int depth_of(Format format) { return 8 * in_register(format); }  // of a product

// The numbers of a register: a pair of halves, or one TF32.
template <class Set> void unpack_numbers(Format format, u32 x, Set set) {
  if (format == TF32) return set(0, truncated_to_tf32(x));
  for (int e = 0; e < 2; e++) {
    const u16 half = u16(x >> 16 * e);
    set(e, format == F16 ? half_to_float(half) : bfloat16_to_float(half));
  }
}

// c (16, n) += a (16, depth) b (depth, n), in float32, in the order of the depth.
inline void multiply(float* c, const float* a, const float* b, int n, int depth) {
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < depth; k++) {
      const float x = a[row * depth + k];
#pragma GCC ivdep
      for (int col = 0; col < n; col++) c[row * n + col] = std::fma(x, b[k * n + col], c[row * n + col]);
    }
}

// Lane l of register r holds rows l / 4 + 8 (r odd) of A.
inline void load_a(const Warp& w, int operand, Format format, float* a) {
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < LANES; l++) {
      float* row = a + (l / 4 + r % 2 * 8) * depth_of(format);
      const int k = (l % 4 + r / 2 * 4) * in_register(format);
      unpack_numbers(format, w.lanes<u32>(operand + r)[l], [&](int e, float x) { row[k + e] = x; });
    }
}

inline int accumulator_index(int r, int lane, int n) {
  return (lane / 4 + r / 2 % 2 * 8) * n + r / 4 * 8 + lane % 4 * 2 + r % 2;
}

// Operands: 4 results, 4 registers of A, 2 of B, 4 addends.
template <Format FORMAT> void mma(Machine& m, Warp& w, const Instruction&, u32) {
  need_all_lanes(m, w);
  constexpr int depth = depth_of(FORMAT);
  float a[16 * depth], b[depth * 8], c[16 * 8];
  load_a(w, 4, FORMAT, a);
  for (int r = 0; r < 2; r++)
    for (int l = 0; l < LANES; l++) {
      float* column = b + (l % 4 + r * 4) * in_register(FORMAT) * 8 + l / 4;
      unpack_numbers(FORMAT, w.lanes<u32>(8 + r)[l], [&](int e, float x) { column[8 * e] = x; });
    }
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < LANES; l++)
      c[accumulator_index(r, l, 8)] = w.lanes<float>(10 + r)[l];
  multiply(c, a, b, 8, depth);
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < LANES; l++) w.lanes<float>(r)[l] = c[accumulator_index(r, l, 8)];
}

// Where the pieces of 16 bytes of an operand of wgmma lie. Source: PTX ISA, matrix descriptor.
class Descriptor {
 public:
  Descriptor(u64 bits, bool transposed, u32 element)
      : start_(u32(bits & 0x3fff) << 4),
        leading_(u32(bits >> 16 & 0x3fff) << 4),
        stride_(u32(bits >> 32 & 0x3fff) << 4),
        swizzle_(u32(bits >> 62)),
        transposed_(transposed),
        element_(element) {}

  // Address of element (row, k): rows of A, columns of B. A piece goes on along k, or along rows
  // where the operand is transposed.
  u32 address_of(u32 row, u32 k) const {
    static constexpr u32 width_of[] = {16, 128, 64, 32};
    const u32 width = width_of[swizzle_], across = width / element_;
    u32 found = start_;
    if (!swizzle_ && transposed_)
      found += row % 8 * element_ + row / 8 * stride_ + k % 8 * 16 + k / 8 * leading_;
    else if (!swizzle_) {
      const u32 piece = 16 / element_;
      found += row % 8 * 16 + row / 8 * stride_ + k % piece * element_ + k / piece * leading_;
    } else if (transposed_)
      found += row % across * element_ + row / across * leading_ + k % 8 * width + k / 8 * stride_;
    else found += row % 8 * width + row / 8 * stride_ + k * element_;
    static constexpr u32 rows_of[] = {0, 7, 3, 1};
    return found ^ (found >> 7 & rows_of[swizzle_]) << 4;
  }

 private:
  u32 start_, leading_, stride_, swizzle_;
  bool transposed_;
  u32 element_;
};

// Read rows first .. first + rows - 1 of an operand; set(row, k, value) takes its elements.
template <class Set>
void load_shared(Machine& m, Warp& w, u64 bits, bool transposed, Format format, int first, int rows, Set set) {
  const int each = in_register(format), piece = 4 * each;
  const Descriptor descriptor(bits, transposed, 4 / each);
  const int row_step = transposed ? piece : 1, k_step = transposed ? 1 : piece;
  for (int row = 0; row < rows; row += row_step)
    for (int k = 0; k < depth_of(format); k += k_step) {
      const u32 at = descriptor.address_of(first + row, k);
      u32 words[4];
      std::memcpy(words, m.shared_at(at, 16, w, 0), 16);
      m.start_wgmma_read(at, w);
      for (int n = 0; n < 4; n++)
        unpack_numbers(format, words[n], [&](int e, float x) {
          e += each * n;
          set(transposed ? row + e : row, transposed ? k : k + e, x);
        });
    }
}

// Variant: bit 0, A lies in registers; 1 and 2, A and B are transposed. vector: columns. Operands:
// columns / 2 results, which are addends too, the predicate that keeps them, A (4 or 1), B.
template <Format FORMAT> void wgmma(Machine& m, Warp& w, const Instruction& i, u32) {
  need_all_lanes(m, w);
  constexpr int depth = depth_of(FORMAT);
  const int n = i.vector, results = n / 2;
  const bool in_registers = i.variant & 1;
  static thread_local std::vector<float> a, b, c;
  a.resize(16 * depth), b.resize(depth * n), c.resize(16 * n);
  if (in_registers) load_a(w, results + 1, FORMAT, a.data());
  else
    load_shared(m, w, w.lanes<u64>(results + 1)[0], i.variant & 2, FORMAT, w.id % 4 * 16, 16,
                [&](int row, int k, float x) { a[row * depth + k] = x; });
  load_shared(m, w, w.lanes<u64>(i.count - 1)[0], i.variant & 4, FORMAT, 0, n,
              [&](int col, int k, float x) { b[k * n + col] = x; });
  if (m.job.count && w.id % 4 == 0) {  // four warps read B once; conflicts are not looked for
    const u64 waves = (n + (in_registers ? 0 : 64)) / 4;  // of 128 bytes; a row has 32
    m.counts().wavefronts += waves;
    m.counts().min_wavefronts += waves;
  }
  const bool keeps = w.predicate(results) & 1;
  for (int r = 0; r < results; r++)
    for (int l = 0; l < LANES; l++) c[accumulator_index(r, l, n)] = keeps ? w.lanes<float>(r)[l] : 0;
  multiply(c.data(), a.data(), b.data(), n, depth);
  for (int r = 0; r < results; r++)
    for (int l = 0; l < LANES; l++) w.lanes<float>(r)[l] = c[accumulator_index(r, l, n)];
}

// A group is under way from its first wgmma to the wait that covers it. Results are computed at once,
// so what is read too early would be right here; it is reported instead.
template <Format FORMAT> void checked_wgmma(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  if (m.job.check) {
    const u32 group = w.committed + 1, results = i.vector / 2;
    if (!w.fenced) m.report(NO_WGMMA_FENCE, w, 0, 0);
    auto since_fence = [&](int operand) {
      const u32 slot = w.slots[operand] / SLOT;
      if (w.written[slot] > w.fence) m.report(NO_WGMMA_FENCE, w, 0, slot);
      return slot;
    };
    if (w.predicate(results) & 1)
      for (u32 r = 0; r < results; r++) since_fence(r);
    for (u32 r = 0; r < results; r++) w.result_of[w.slots[r] / SLOT] = group;
    if (i.variant & 1)
      for (u32 r = 0; r < 4; r++) {
        const u32 slot = since_fence(results + 1 + r);
        if (w.result_of[slot] > w.completed) m.report(WGMMA_RESULT, w, 0, slot);
        w.operand_of[slot] = group;
      }
  }
  wgmma<FORMAT>(m, w, i, mask);
}

inline void fence_registers(Machine& m, Warp& w, const Instruction&, u32) {
  w.fenced = true;
  w.fence = m.clock;
}
inline void commit_wgmma(Machine&, Warp& w, const Instruction&, u32) {
  w.reads.push_back(std::move(w.open_reads));
  w.open_reads.clear();
  w.committed++;
  w.fenced = false;
}
inline void wait_for_wgmma(Machine& m, Warp& w, const Instruction& i, u32) {
  m.finish_wgmma(w, size_t(i.variant));
}
inline void fence_proxy(Machine& m, Warp& w, const Instruction&, u32) { m.fence_proxy(w); }

// Before an ordinary instruction of a kernel with wgmma. A plain move is none: it is how the compiler
// of Triton names registers, and ptxas joins what it names.
inline void check_in_flight(Machine& m, Warp& w, const Instruction& i, bool move) {
  const u32 now = ++m.clock;
  if (move) {
    const u32 to = w.slots[0] / SLOT, from = w.slots[1] / SLOT;
    w.result_of[to] = w.result_of[from];
    w.operand_of[to] = 0;
    w.written[to] = w.written[from];
    return;
  }
  for (int k = 0; k < i.count; k++) {
    if (w.slots[k] < 0) continue;
    const u32 slot = w.slots[k] / SLOT;
    if (w.result_of[slot] > w.completed) {
      m.report(WGMMA_RESULT, w, 0, slot);
      w.result_of[slot] = 0;
    }
    if (k >= i.results) continue;
    if (w.operand_of[slot] > w.completed) {
      m.report(WGMMA_OPERAND, w, 0, slot);
      w.operand_of[slot] = 0;
    }
    w.written[slot] = now;
  }
}

inline void add_tensor_cores(Operations& all) {
  all.push_back({"mma.m16n8k16.bf16", mma<BF16>});
  all.push_back({"mma.m16n8k16.f16", mma<F16>});
  all.push_back({"mma.m16n8k8.tf32", mma<TF32>});
  all.push_back({"wgmma.k16.bf16", checked_wgmma<BF16>});
  all.push_back({"wgmma.k16.f16", checked_wgmma<F16>});
  all.push_back({"wgmma.k8.tf32", checked_wgmma<TF32>});
  all.push_back({"wgmma.fence", fence_registers});
  all.push_back({"wgmma.commit_group", commit_wgmma});
  all.push_back({"wgmma.wait_group", wait_for_wgmma});
  all.push_back({"fence.proxy.async", fence_proxy});
}
