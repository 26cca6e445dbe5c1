// TMA and mbarriers: copies of boxes of a tensor, and the barriers in shared memory that count
// arrivals and bytes. A copy is made at once; what is touched before its wait is reported.
#pragma once
#include "operation.h"

// ---- mbarriers ----

template <class F> void each_lane(u32 mask, F f) {
  for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
}

inline u32 shared_address(const Warp& w, int operand, s64 offset, int lane) {
  return w.lanes<u32>(operand)[lane] + u32(offset);
}

inline Mbarrier* find_mbarrier(Machine& m, u32 at) {
  for (Mbarrier& b : m.mbarriers)
    if (b.at == at && b.live) return &b;
  return nullptr;
}

inline Mbarrier& mbarrier(Machine& m, const Warp& w, u32 at, int lane) {
  Mbarrier* found = find_mbarrier(m, at);
  if (!found) m.stop(NO_MBARRIER, w, lane, at);
  if (m.job.check && !m.views[w.id].has(found->init))
    m.report(MBARRIER_INIT, w, lane, at, agent_of(found->init));
  return *found;
}

// A phase ends when no arrival and no byte is missing. Source: PTX ISA, "mbarrier".
inline void settle(Mbarrier& b) {
  if (b.missing || b.bytes) return;
  b.arriving.seen.at[b.agent] = b.clock;
  b.completed.join(b.arriving);
  b.phase++, b.clock++, b.missing = b.count;
}

// Operands: address and count.
inline void init_mbarrier(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  each_lane(mask, [&](int lane) {
    const u32 at = shared_address(w, 0, i.offset, lane), count = w.lanes<u32>(1)[lane];
    m.shared_at(at, 8, w, lane);
    m.set_mbarrier(at, true, w, lane);
    // At the place of another one its agent goes on.
    auto same = [&](const Mbarrier& b) { return b.at == at; };
    auto found = std::find_if(m.mbarriers.begin(), m.mbarriers.end(), same);
    if (found == m.mbarriers.end()) {
      const u32 agent = m.agent_of_mbarrier(m.mbarriers.size());
      found = m.mbarriers.insert(found, {.at = at, .agent = agent});
    }
    *found = {.at = at, .count = count, .missing = count, .clock = found->clock, .agent = found->agent,
              .init = m.tag(w), .loaded = found->loaded, .loader = found->loader, .load = found->load};
  });
}

inline void invalidate_mbarrier(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  each_lane(mask, [&](int lane) {
    Mbarrier& b = mbarrier(m, w, shared_address(w, 0, i.offset, lane), lane);
    b.live = false;
    m.set_mbarrier(b.at, false, w, lane);
  });
}

// Operands: address and arrivals. variant: bytes are expected; the third operand, or the second
// where nothing arrives.
enum { ARRIVES = 1, EXPECTS = 2 };
inline void arrive(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  s32 recorded = -1;
  u32 phase = 0;
  each_lane(mask, [&](int lane) {
    Mbarrier& b = mbarrier(m, w, shared_address(w, 0, i.offset, lane), lane);
    recorded = m.number_of(b), phase = b.clock;
    if (i.variant & EXPECTS) b.bytes += w.lanes<u32>(i.count - 1)[lane];
    if (i.variant & ARRIVES) {
      const u32 count = w.lanes<u32>(1)[lane];
      if (count > b.missing) m.stop(ARRIVALS, w, lane, b.at);
      b.arriving.join(m.views[w.id]);
      m.pass_on(w);
      b.missing -= count;
    }
    settle(b);
  });
  m.record(w, mask, recorded, phase);
}

// Operands: predicate, address, parity. False where the phase of that parity, which is the current one
// or the one before, has not ended.
inline bool wait_for_phase(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  bool ended = true;
  u32 last = ~0u, phase = 0;
  s32 recorded = -1;
  each_lane(mask, [&](int lane) {
    const u32 at = shared_address(w, 1, i.offset, lane), parity = w.lanes<u32>(2)[lane] & 1;
    if (!ended || (at | parity) == last) return;  // at is a multiple of 8
    last = at | parity;
    Mbarrier& b = mbarrier(m, w, at, lane);
    ended = (b.phase & 1) != parity;
    if (b.phase) recorded = m.number_of(b), phase = b.clock - 1;  // before the first all have ended
    if (ended) m.views[w.id].join(b.completed);
  });
  if (!ended) return false;
  w.predicate(0) |= mask;
  m.record(w, mask, recorded, phase);
  return true;
}

// ---- TMA ----

// Map n lies at address (n + 1) 128, in 32 bits too, as compilers pass addresses of parameters.
inline const TensorMap& tensor_map(const Machine& m, u64 address) {
  const u64 number = address / sizeof(TensorMap) - 1;
  if (address % sizeof(TensorMap) || number >= u64(m.job.num_maps))
    throw Fault("no tensor map where TMA is given one");
  return m.job.maps[number];
}

// Rows of 128, 64 or 32 bytes have their pieces of 16 exchanged, as wgmma expects them.
inline u32 swizzled(u32 at, s32 width) {
  return width ? at ^ (at >> 7 & u32(width / 16 - 1)) << 4 : at;
}

inline void fill_nan(u8* place, const TensorMap& map) {
  const u32 half = map.kind == FLOAT32 ? 0x7fffffff : 0x7fff7fff;
  for (int n = 0; n < 16; n += 4) std::memcpy(place + n, &half, 4);
}

// Call f(shared address, global address, offset of the first byte inside, bytes inside) for each piece
// of 16 bytes of a box; return the bytes of the box.
template <class F> u32 each_piece(const TensorMap& map, const s64* start, u32 to, F f) {
  const u32 row_bytes = map.box[0] * map.size;
  u32 rows = 1;
  for (int axis = 1; axis < map.rank; axis++) rows *= map.box[axis];
  // Of each row the same elements lie inside.
  const s64 first = std::max<s64>(0, -start[0]), end = std::min<s64>(map.box[0], s64(map.dims[0]) - start[0]);
  const s64 low = first * map.size, high = std::max(first, end) * map.size;
  for (u32 row = 0; row < rows; row++) {
    u64 address = map.base + start[0] * map.size;
    bool inside = high > low;
    for (u32 axis = 1, left = row; axis < u32(map.rank); left /= map.box[axis++]) {
      const s64 index = start[axis] + left % map.box[axis];
      inside &= index >= 0 && index < s64(map.dims[axis]);
      address += index * map.strides[axis];
    }
    for (u32 at = 0; at < row_bytes; at += 16) {
      const s64 from = std::clamp<s64>(low, at, at + 16), until = std::clamp<s64>(high, at, at + 16);
      const u32 bytes = inside && until > from ? u32(until - from) : 0;
      f(swizzled(to + row * row_bytes + at, map.swizzle), address + from, u32(from - at), bytes);
    }
  }
  return rows * row_bytes;
}

// One lane's copy: the box that its operands name.
struct Box {
  const TensorMap& map;
  s64 start[5] = {};
  u32 at;
  Box(Machine& m, Warp& w, const Instruction& i, int lane)
      : map(tensor_map(m, w.lanes<u64>(1)[lane])), at(shared_address(w, 0, i.offset, lane)) {
    if (map.rank != i.vector) throw Fault("TMA of another number of axes than its tensor map has");
    for (int axis = 0; axis < map.rank; axis++) start[axis] = w.lanes<s32>(2 + axis)[lane];
    if (at % 128) m.stop(MISALIGNED, w, lane, at);
  }
};

inline void count_bulk(Machine& m, u64 sectors, u32 bytes) {
  if (!m.job.count) return;
  m.counts().sectors += sectors, m.counts().min_sectors += sectors;
  m.counts().wavefronts += bytes / 128, m.counts().min_wavefronts += bytes / 128;
}

// Operands: shared address, tensor map, coordinates from the innermost, address of the mbarrier.
inline void bulk_load(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  if (!mask) m.record(w, mask);
  each_lane(mask, [&](int lane) {
    const Box box(m, w, i, lane);
    Mbarrier& b = mbarrier(m, w, shared_address(w, i.count - 1, i.variant, lane), lane);
    const u32 tag = tag_of(b.clock, b.agent);
    u64 moved = 0;
    const u32 bytes = each_piece(box.map, box.start, box.at, [&](u32 at, u64 from, u32 skipped, u32 size) {
      u8* place = m.shared_at(at, 16, w, lane);
      m.check_load(at, w, lane, tag);
      box.map.nan ? fill_nan(place, box.map) : void(std::memset(place, 0, 16));
      if (size) std::memcpy(place + skipped, m.global_elements(from, size, w, lane, READ, tag, false), size);
      moved += size;
    });
    m.record(w, mask, m.number_of(b), b.clock, u32(moved));
    b.loaded = b.clock, b.loader = w.id, b.load = s32(m.now - m.job.code);
    b.bytes -= bytes;
    settle(b);
    count_bulk(m, (moved + 31) / 32, bytes);
  });
}

template <class T, class F> void combine(u8* to, const u8* from, u32 bytes, F f) {
  for (u32 n = 0; n < bytes; n += sizeof(T)) {
    T x, y;
    std::memcpy(&x, to + n, sizeof x);
    std::memcpy(&y, from + n, sizeof y);
    x = f(x, y);
    std::memcpy(to + n, &x, sizeof x);
  }
}

inline void add_elements(const TensorMap& map, u8* to, const u8* from, u32 bytes) {
  switch (map.kind) {
    case FLOAT32: return combine<float>(to, from, bytes, [](float x, float y) { return canonical(x + y); });
    case BFLOAT16: return combine<u16>(to, from, bytes, [](u16 x, u16 y) {
      return float_to_bfloat16(bfloat16_to_float(x) + bfloat16_to_float(y));
    });
    case FLOAT16: return combine<u16>(to, from, bytes, [](u16 x, u16 y) {
      return float_to_half(half_to_float(x) + half_to_float(y));
    });
    case INTEGER: if (map.size == 4) return combine<u32>(to, from, bytes, [](u32 x, u32 y) { return x + y; });
  }
  throw Fault("TMA adds no elements of this type");
}

// Operands: shared address, tensor map, coordinates from the innermost.
template <Access ACCESS> void bulk_store(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  if (!mask) m.record(w, mask);
  each_lane(mask, [&](int lane) {
    const Box box(m, w, i, lane);
    const u32 tag = tag_of(w.stored + 1, m.agent_of_stores(w));
    u64 moved = 0;
    const u32 bytes = each_piece(box.map, box.start, box.at, [&](u32 at, u64 to, u32 skipped, u32 size) {
      if (!size) return;
      const u8* data = m.shared_at(at, 16, w, lane) + skipped;
      m.start_store_read(at, w, lane);
      u8* place = m.global_elements(to, size, w, lane, ACCESS, tag, box.map.kind != INTEGER);
      if (ACCESS == ADD) add_elements(box.map, place, data, size);
      else std::memcpy(place, data, size);
      moved += size;
    });
    m.record(w, mask, -1, 0, u32(moved));
    count_bulk(m, (moved + 31) / 32, bytes);
  });
}

inline void commit_bulk(Machine& m, Warp& w, const Instruction&, u32 mask) { m.commit_stores(w, mask); }
// size: groups that may stay under way. variant: whether data must have arrived, not only been read.
inline void wait_for_bulk(Machine& m, Warp& w, const Instruction& i, u32 mask) {
  m.finish_stores(w, mask, size_t(i.size), i.variant);
}

// Operands: number of the lane, predicate.
inline void elect(Machine&, Warp& w, const Instruction&, u32 mask) {
  if (!mask) return;
  const u32 leader = u32(std::countr_zero(mask));
  each_lane(mask, [&](int lane) { if (w.slots[0] >= 0) w.lanes<u32>(0)[lane] = leader; });
  if (w.slots[1] >= 0) w.predicate(1) = (w.predicate(1) & ~mask) | 1u << leader;
}

inline void add_bulk_copies(Operations& all) {
  all.push_back({"mbarrier.init", init_mbarrier});
  all.push_back({"mbarrier.inval", invalidate_mbarrier});
  all.push_back({"mbarrier.arrive", arrive});
  all.push_back({"bulk.load", bulk_load});
  all.push_back({"bulk.store", bulk_store<WRITE>});
  all.push_back({"bulk.reduce", bulk_store<ADD>});
  all.push_back({"bulk.commit_group", commit_bulk});
  all.push_back({"bulk.wait_group", wait_for_bulk});
  all.push_back({"elect", elect});
}
