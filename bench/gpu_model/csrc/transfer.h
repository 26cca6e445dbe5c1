// Instructions that move memory: ld, st, cp.async, ldmatrix, stmatrix.
#pragma once
#include "operation.h"

// The operands of a load or store are the registers, then the address, of 32 or 64 bits.
template <class A> void addresses_of(const Warp& w, const Instruction& i, u64* addresses) {
  const A* from = w.lanes<A>(i.count - 1);
  for (int l = 0; l < LANES; l++) addresses[l] = A(from[l] + i.offset);
}

// Elements may be narrower than the registers that hold them.
inline void to_registers(Warp& w, const Instruction& i, int lane, const u8* from) {
  for (int k = 0; k < i.vector; k++, from += i.size) {
    if (w.slots[k] < 0) continue;
    u64 value = 0;
    std::memcpy(&value, from, i.size);
    if (i.width == 16) w.lanes<u16>(k)[lane] = u16(value);
    else if (i.width == 32) w.lanes<u32>(k)[lane] = u32(value);
    else w.lanes<u64>(k)[lane] = value;
  }
}
inline void from_registers(const Warp& w, const Instruction& i, int lane, u8* to) {
  for (int k = 0; k < i.vector; k++, to += i.size) {
    u64 value = i.width == 16   ? w.lanes<u16>(k)[lane]
                : i.width == 32 ? w.lanes<u32>(k)[lane]
                                : w.lanes<u64>(k)[lane];
    std::memcpy(to, &value, i.size);
  }
}

// Lanes that hold the same sum may hold it rounded differently: where each adds to its own product what
// another lane has, the compiler rounds the product of one lane and not of the other.
inline bool agree(const u8* a, const u8* b, const Instruction& i) {
  if (!std::memcmp(a, b, i.size * i.vector)) return true;
  if (i.size != 4) return false;
  for (int k = 0; k < i.vector; k++) {
    float x, y;
    std::memcpy(&x, a + 4 * k, 4);
    std::memcpy(&y, b + 4 * k, 4);
    if (!(std::fabs(x - y) <= 0x1p-20f * std::fmax(std::fabs(x), std::fabs(y)))) return false;
  }
  return true;
}

// Which of two lanes that store at one address wins is left to chance: each must find its own there.
inline void check_lanes(Machine& m, const Warp& w, const Instruction& i, u32 mask, u8* const* places) {
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    u8 data[32];
    from_registers(w, i, l, data);
    if (!agree(places[l], data, i))
      m.report(LANES_DISAGREE, w, l, reinterpret_cast<u64>(places[l]));
  }
}

template <bool GLOBAL, bool WRITE> void access(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  u64 addresses[LANES];
  u8* places[LANES];
  const u32 bytes = i.size * i.vector;
  addresses_of<std::conditional_t<GLOBAL, u64, u32>>(w, i, addresses);
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    const u64 at = addresses[l];
    u8 data[32];
    if (WRITE) from_registers(w, i, l, data);
    places[l] = GLOBAL ? m.global(at, bytes, w, l, WRITE ? data : nullptr) : m.shared_at(at, bytes, w, l);
    if (!GLOBAL && WRITE) m.check_write(at, data, bytes, w, l);
    if (!GLOBAL && !WRITE) m.check_read(at, bytes, w, l);
    if (WRITE) std::memcpy(places[l], data, bytes);
    else to_registers(w, i, l, places[l]);
  }
  if (WRITE && m.job.check) check_lanes(m, w, i, mask, places);
  if (!m.job.count || !mask) return;
  if (GLOBAL) m.count_global(addresses, mask, bytes);
  else m.count_shared(addresses, mask, bytes);
}

// Operands: shared address, global address and, if any, how many bytes to read; the rest are zeros.
inline void copy_async(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  const u32* to = w.lanes<u32>(0);
  const u64* from = w.lanes<u64>(1);
  u32 reads = 0;
  u64 at[LANES], addresses[LANES];
  for (int l = 0; l < LANES; l++) {
    at[l] = to[l] + u32(i.offset);
    addresses[l] = from[l] + s64(i.variant);
    if (!(mask >> l & 1)) continue;
    Copy copy{u32(at[l]), u32(i.size), {}};
    const u32 bytes = i.count > 2 ? w.lanes<u32>(2)[l] : copy.bytes;
    if (bytes > copy.bytes) m.stop(OUT_OF_BOUNDS, w, l, bytes);
    m.shared_at(at[l], copy.bytes, w, l);
    if (bytes) {
      reads |= 1u << l;
      std::memcpy(copy.data, m.global(addresses[l], bytes, w, l), bytes);
    }
    m.check_write(at[l], copy.data, copy.bytes, w, l, true);
    w.open_copies.push_back(copy);
  }
  if (!m.job.count) return;
  if (reads) m.count_global(addresses, reads, i.size);
  m.count_shared(at, mask, i.size);
}

inline void commit_copies(Machine&, Warp& w, const Instruction&, u32) {
  w.copies.push_back(std::move(w.open_copies));
  w.open_copies.clear();
}
inline void wait_for_copies(Machine& m, Warp& w, const Instruction& i, u32) {
  m.finish_copies(w, size_t(i.variant));
}

// Eight rows of eight halves a register; lane k * 8 + r has the address of row r of matrix k.
template <bool WRITE> void matrix_rows(Machine& m, Warp& w, const Instruction& i, u32) {
  need_all_lanes(m, w);
  u64 at[LANES];
  addresses_of<u32>(w, i, at);
  u16 registers[4][2 * LANES];
  if (WRITE)
    for (int k = 0; k < i.vector; k++) std::memcpy(registers[k], w.lanes<u16>(k), 4 * LANES);
  for (int k = 0; k < i.vector; k++)
    for (int r = 0; r < 8; r++) {
      const int lane = k * 8 + r;
      u16 row[8];
      u8* place = m.shared_at(at[lane], 16, w, lane);
      if (!WRITE) {
        m.check_read(at[lane], 16, w, lane);
        std::memcpy(row, place, 16);
      }
      for (int c = 0; c < 8; c++) {
        u16& element = registers[k][i.variant ? c * 8 + r : r * 8 + c];
        if (WRITE) row[c] = element;
        else element = row[c];
      }
      if (WRITE) {
        m.check_write(at[lane], reinterpret_cast<u8*>(row), 16, w, lane);
        std::memcpy(place, row, 16);
      }
    }
  if (!WRITE)
    for (int k = 0; k < i.vector; k++) std::memcpy(w.lanes<u16>(k), registers[k], 4 * LANES);
  if (m.job.count) m.count_shared(at, i.vector == 4 ? ALL : (1u << 8 * i.vector) - 1, 16);
}

inline void add_transfers(Operations& all) {
  all.push_back({"ld.global", access<true, false>});
  all.push_back({"st.global", access<true, true>});
  all.push_back({"ld.shared", access<false, false>});
  all.push_back({"st.shared", access<false, true>});
  all.push_back({"cp.async", copy_async});
  all.push_back({"cp.async.commit_group", commit_copies});
  all.push_back({"cp.async.wait_group", wait_for_copies});
  all.push_back({"ldmatrix", matrix_rows<false>});
  all.push_back({"stmatrix", matrix_rows<true>});
}
