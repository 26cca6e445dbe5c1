// Global and shared memory, with what compute-sanitizer would look for and what it counts.
#pragma once
#include <algorithm>
#include <cstring>

#include "machine.h"

enum Access { READ, WRITE, ADD };  // of global memory; ADD is TMA's reduction

class Machine {
 public:
  Job& job;
  const std::vector<Warp>& warps;
  const Instruction* now = nullptr;
  u32 program = 0, epoch = 1;  // the epoch counts barriers
  u32 clock = 1;               // counts instructions that order others
  std::vector<u8> shared;

  Machine(Job& job, const std::vector<Warp>& warps) : job(job), warps(warps) {
    if (2 * warps.size() >= AGENTS) throw Fault("too many warps");
  }

  void clear() {
    const size_t bytes = job.shared_bytes + 16, checked = job.check ? bytes : 0;
    shared.assign(bytes, 0xff);
    for (auto* marks : {&written_, &read_, &stamp_}) marks->assign(checked, 0);
    copying_.assign(checked, 0);
    reading_.assign(checked / 16 + 1, 0);
    epoch = clock = 1;
    if (!job.partitioned) return;
    for (auto* marks : {&storing_, &asynchronous_}) marks->assign(bytes / 16 + 1, 0);
    is_mbarrier_.assign(bytes / 8 + 1, false);
    readers_.clear();
    mbarriers.clear();
    views.assign(warps.size(), {});
    for (size_t n = 0; n < views.size(); n++) views[n].seen.at[n] = 1;
  }

  // ---- order of warps that meet at barriers of their own ----

  std::vector<View> views;  // of each warp
  std::vector<Mbarrier> mbarriers;
  s32 number_of(const Mbarrier& b) const { return s32(&b - mbarriers.data()); }

  u32 tag(const Warp& w) const { return tag_of(job.partitioned ? views[w.id].seen.at[w.id] : epoch, w.id); }

  // A later access is another than those that were handed over.
  void pass_on(const Warp& w) {
    if (++views[w.id].seen.at[w.id] >= 1u << 24) throw Fault("too many barriers");
  }
  void fence_proxy(Warp& w) {
    if (job.partitioned) {
      views[w.id].fenced.join(views[w.id].seen);
      return pass_on(w);
    }
    w.proxy_fences.push_back({++clock, epoch});
    clock++;
  }
  u32 agent_of_stores(const Warp& w) const { return u32(warps.size()) + w.id; }
  u32 agent_of_mbarrier(size_t number) const {
    const size_t agent = 2 * warps.size() + number;
    if (agent >= AGENTS) throw Fault("more mbarriers than are supported");
    return u32(agent);
  }

  // Where there is no place left, the last report is overwritten.
  void report(Finding finding, const Warp& w, int lane, u64 address, int other = -1) {
    job.found[finding]++;
    if (job.num_reports < job.max_reports) job.num_reports++;
    job.reports[job.num_reports - 1] = {finding, s32(now - job.code), s32(w.id), lane,
                                        s32(program), other, address};
  }
  [[noreturn]] void stop(Finding finding, const Warp& w, int lane, u64 address) {
    report(finding, w, lane, address);
    throw Fault(finding_names[finding]);
  }
  Counts& counts() { return job.counts[now - job.code]; }

  s32 recording = -1;  // the number of the program among those that are recorded
  void record(const Warp& w, u32 mask, s32 mbarrier = -1, u32 phase = 0, u32 bytes = 0) {
    if (recording < 0) return;
    if (job.num_events < job.max_events)
      job.events[job.num_events] = {recording, s32(w.id), s32(now - job.code), std::popcount(mask),
                                    mbarrier, s32(phase), s32(bytes)};
    job.num_events++;
  }
  u32& executed_by(const Warp& w) {
    return job.executed_by[(recording * warps.size() + w.id) * job.num_instructions + (now - job.code)];
  }

  // ---- global memory ----

  // With ``data`` for what is about to be written there.
  u8* global(u64 address, u32 bytes, const Warp& w, int lane, const u8* data = nullptr) {
    if (address & (std::bit_ceil(bytes) - 1)) stop(MISALIGNED, w, lane, address);
    const Region* r = region(address, bytes);
    if (!r) stop(OUT_OF_BOUNDS, w, lane, address);
    u64 at = address - r->base;
    if (r->owned && std::memchr(r->owned + at, 0, bytes))
      report(BETWEEN_ELEMENTS, w, lane, address);
    if (r->writer && job.partitioned) check_seen(*r, at, bytes, w, lane, data ? WRITE : READ, tag(w), data);
    else if (r->writer) check_order(*r, at, bytes, w, lane, data);
    return reinterpret_cast<u8*>(address);
  }

  // Elements that TMA moves; an access of the tag's agent. Two sums of ``floats`` need an order.
  u8* global_elements(u64 address, u32 bytes, const Warp& w, int lane, Access access, u32 tag, bool floats) {
    const Region* r = region(address, bytes);
    if (!r) stop(OUT_OF_BOUNDS, w, lane, address);
    const u64 at = address - r->base;
    if (r->owned && std::memchr(r->owned + at, 0, bytes)) report(BETWEEN_ELEMENTS, w, lane, address);
    if (r->writer) check_seen(*r, at, bytes, w, lane, access, tag, nullptr, floats);
    return reinterpret_cast<u8*>(address);
  }

  // Sectors of 32 bytes that an access moves, and the fewest that hold as many distinct bytes.
  void count_global(const u64* addresses, u32 mask, u32 bytes) {
    u64 sectors[2 * LANES], starts[LANES];
    int n = 0, distinct = 0;
    for (int l = 0; l < LANES; l++)
      if (mask >> l & 1) {
        starts[distinct++] = addresses[l];
        sectors[n++] = addresses[l] / 32;
        sectors[n++] = (addresses[l] + bytes - 1) / 32;
      }
    counts().sectors += unique(sectors, n);
    counts().min_sectors += (unique(starts, distinct) * bytes + 31) / 32;
  }

  // ---- shared memory ----

  u8* shared_at(u64 at, u32 bytes, const Warp& w, int lane) {
    if (at & (std::bit_ceil(bytes) - 1)) stop(MISALIGNED, w, lane, at);
    if (at + bytes > u64(job.shared_bytes)) stop(SHARED_OUT_OF_BOUNDS, w, lane, at);
    return shared.data() + at;
  }

  void check_read(u32 at, u32 bytes, const Warp& w, int lane) {
    if (!job.check) return;
    if (job.partitioned) check_read_as<true>(at, bytes, w, lane);
    else check_read_as<false>(at, bytes, w, lane);
  }

  void check_write(u32 at, const u8* data, u32 bytes, const Warp& w, int lane, bool copy = false) {
    if (!job.check) return;
    if (job.partitioned) check_write_as<true>(at, data, bytes, w, lane, copy);
    else check_write_as<false>(at, data, bytes, w, lane, copy);
  }

  void finish_copies(Warp& w, size_t keep) {
    while (w.copies.size() > keep) {
      for (const Copy& c : w.copies.front()) {
        std::memcpy(shared.data() + c.at, c.data, c.bytes);
        if (!job.check) continue;
        for (u32 b = c.at; b < c.at + c.bytes; b++) {
          copying_[b] = 0;
          written_[b] = tag(w);
          stamp_[b] = clock;
        }
      }
      w.copies.erase(w.copies.begin());
    }
  }

  // A piece of 16 bytes that wgmma goes on reading until the wait for its group.
  void start_wgmma_read(u32 at, Warp& w) {
    if (!job.check) return;
    if (job.partitioned) {
      check_asynchronous_read(at, w, 0, NO_PROXY_FENCE);
      reading_[at / 16]++;
      w.open_reads.push_back(at);
      return;
    }
    check_read(at, 16, w, 0);
    for (u32 b = at; b < at + 16; b++)
      if (written_[b] && !visible_to_wgmma(b, w)) {
        report(NO_PROXY_FENCE, w, 0, b, warp_of(written_[b]));
        break;
      }
    reading_[at / 16]++;
    w.open_reads.push_back(at);
  }

  void finish_wgmma(Warp& w, size_t keep) {
    while (w.reads.size() > keep) {
      for (u32 at : w.reads.front()) {
        reading_[at / 16]--;
        if (job.partitioned) readers_.add(asynchronous_[at / 16], tag(w), views[w.id]);
        else
          for (u32 b = at; b < at + 16; b++) mark_read(b, tag(w));
      }
      w.reads.erase(w.reads.begin());
      w.completed++;
    }
  }

  // A piece that a TMA store goes on reading until the wait for its group.
  void start_store_read(u32 at, Warp& w, int lane) {
    if (!job.check) return;
    check_asynchronous_read(at, w, lane, TMA_PROXY_FENCE);
    storing_[at / 16]++;
    w.open_stores.push_back({lane, at});
  }

  void commit_stores(Warp& w, u32 lanes) {
    constexpr size_t kept = 64;  // more than a wait can leave under way
    w.stores.push_back({++w.stored, lanes, std::move(w.open_stores)});
    w.open_stores.clear();
    if (w.stores.size() <= kept || !w.stores.front().reads.empty()) return;
    w.forgotten = w.stores.front().number;
    w.stores.erase(w.stores.begin());
  }

  // Of these lanes all groups but the last ``keep`` have read their data and, if ``written``, arrived.
  void finish_stores(Warp& w, u32 lanes, size_t keep, bool written) {
    size_t kept[LANES] = {};
    u32& seen = views[w.id].seen.at[agent_of_stores(w)];
    if (written) seen = std::max(seen, w.forgotten);
    for (size_t n = w.stores.size(); n--;) {
      StoreGroup& group = w.stores[n];
      u32 ended = 0;
      for (int l = 0; l < LANES; l++)
        if (lanes & group.lanes & 1u << l && kept[l]++ >= keep) ended |= 1u << l;
      std::erase_if(group.reads, [&](const auto& read) {
        if (!(ended >> read.first & 1)) return false;
        storing_[read.second / 16]--;
        readers_.add(asynchronous_[read.second / 16], tag(w), views[w.id]);
        return true;
      });
      if (written && ended) seen = std::max(seen, group.number);
      if (written) group.lanes &= ~ended;
    }
    std::erase_if(w.stores, [](const StoreGroup& group) { return !group.lanes; });
  }

  // At the end of a warp, of its stores.
  void check_stores(const Warp& w) {
    if (!job.check) return;
    bool left = !w.open_stores.empty();
    for (const StoreGroup& group : w.stores) left |= !group.reads.empty();
    if (left) report(LEFT_IN_FLIGHT, w, 0, 0);
  }

  // At the end of a program, of loads into its shared memory.
  void check_loads() {
    for (const Mbarrier& b : mbarriers) {
      auto saw = [&](const View& view) { return view.seen.at[b.agent] >= b.loaded; };
      if (!job.check || !b.loaded || std::any_of(views.begin(), views.end(), saw)) continue;
      now = job.code + b.load;
      report(LEFT_IN_FLIGHT, warps[b.loader], 0, b.at);
    }
  }

  // A piece that a TMA load writes, an access of the tag's agent.
  void check_load(u32 at, const Warp& w, int lane, u32 tag) {
    if (!job.check) return;
    check_mbarriers(at, 16, w, lane);
    if (reading_[at / 16]) return report(WGMMA_READS, w, lane, at);
    if (storing_[at / 16]) return report(STORE_READS, w, lane, at);
    const View& view = views[w.id];
    if (u32 other = readers_.missing(asynchronous_[at / 16], view.seen))
      return report(WRITE_AFTER_READ, w, lane, at, warp_of(other));
    readers_.drop(asynchronous_[at / 16]);
    for (u32 b = at; b < at + 16; b++) {
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      const u32 before = written_[b];
      if (before && !view.has(before)) return report(unseen(before, WRITE_AFTER_WRITE), w, lane, b, warp_of(before));
      if (before && !fenced(before, view)) return report(TMA_PROXY_FENCE, w, lane, b, warp_of(before));
      if (u32 other = readers_.missing(read_[b], view.seen))
        return report(WRITE_AFTER_READ, w, lane, b, warp_of(other));
      if (u32 other = readers_.missing(read_[b], view.fenced))
        return report(TMA_PROXY_FENCE, w, lane, b, warp_of(other));
      readers_.drop(read_[b]);
      written_[b] = tag;
    }
  }

  // Memory becomes an mbarrier, or ordinary and unwritten again.
  void set_mbarrier(u32 at, bool is, const Warp& w, int lane) {
    const u64 nothing = 0;
    if (is) check_write(at, reinterpret_cast<const u8*>(&nothing), 8, w, lane);
    is_mbarrier_[at / 8] = is;
    if (job.check && !is) std::fill_n(&written_[at], 8, 0);
  }

  // Wavefronts that shared memory takes for an access, and the fewest: bank conflicts are the rest.
  void count_shared(const u64* addresses, u32 mask, u32 bytes) {
    const int phase = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;  // lanes that are served together
    for (int start = 0; start < LANES; start += phase) {
      u64 words[2 * LANES];
      int n = 0;
      for (int l = start; l < start + phase; l++)
        if (mask >> l & 1)
          for (u32 b = 0; b < bytes; b += 4) words[n++] = (addresses[l] + b) / 4;
      if (!n) continue;
      n = unique(words, n);
      int banks[32] = {};
      for (int i = 0; i < n; i++) banks[words[i] % 32]++;
      counts().wavefronts += *std::max_element(banks, banks + 32);
      counts().min_wavefronts++;
    }
  }

 private:
  // By byte of shared memory: epoch and warp of the last write and read, the warp whose copy is under
  // way, and when it was written; by 16 bytes, how many wgmma read.
  std::vector<u32> written_, read_, stamp_;
  std::vector<u8> copying_;
  std::vector<u16> reading_;
  // Where warps meet at barriers of their own: by 16 bytes, how many TMA stores read and who has read
  // asynchronously; by 8 bytes, whether an mbarrier lies there. Of asynchronous_ and read_ the sets.
  std::vector<u32> storing_, asynchronous_;
  std::vector<bool> is_mbarrier_;
  ReaderSets readers_;
  const Region* last_ = nullptr;

  int warp_of(u32 tag) const {
    const int agent = agent_of(tag), count = int(warps.size());
    return agent < count ? agent : agent < 2 * count ? agent - count : -1;
  }
  static bool is_others(u32 tag, u32 mine) { return tag >> 8 == mine >> 8 && tag != mine; }
  void mark_read(u32 b, u32 me) { read_[b] = is_others(read_[b], me) ? (me | SEVERAL) : me; }

  template <bool PARTITIONED> bool conflicts(u32 before, u32 me, const Warp& w) const {
    if constexpr (PARTITIONED) return before && !views[w.id].has(before);
    else return is_others(before, me);
  }

  template <bool PARTITIONED> [[gnu::always_inline]] void check_read_as(u32 at, u32 bytes, const Warp& w, int lane) {
    if constexpr (PARTITIONED) check_mbarriers(at, bytes, w, lane);
    const u32 me = tag(w);
    for (u32 b = at; b < at + bytes; b++) {
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      if (!written_[b]) return report(UNINITIALISED, w, lane, b);
      if (conflicts<PARTITIONED>(written_[b], me, w))
        return report(unseen(written_[b], READ_AFTER_WRITE), w, lane, b, warp_of(written_[b]));
      if constexpr (PARTITIONED) readers_.add(read_[b], me, views[w.id]);
      else mark_read(b, me);
    }
  }

  // Two warps that write the same are no race: layouts repeat what they have too little of.
  template <bool PARTITIONED>
  [[gnu::always_inline]] void check_write_as(u32 at, const u8* data, u32 bytes, const Warp& w, int lane, bool copy) {
    if constexpr (PARTITIONED) check_mbarriers(at, bytes, w, lane);
    const u32 me = tag(w);
    const bool same = !copy && !std::memcmp(shared.data() + at, data, bytes);
    for (u32 piece = at / 16; piece <= (at + bytes - 1) / 16; piece++) {
      if (reading_[piece]) report(WGMMA_READS, w, lane, at);
      if constexpr (PARTITIONED) {
        if (storing_[piece]) report(STORE_READS, w, lane, at);
        if (u32 other = readers_.missing(asynchronous_[piece], views[w.id].seen))
          return report(WRITE_AFTER_READ, w, lane, at, warp_of(other));
        readers_.drop(asynchronous_[piece]);
      }
    }
    for (u32 b = at; b < at + bytes; b++) {
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      if (!same && conflicts<PARTITIONED>(written_[b], me, w))
        return report(unseen(written_[b], WRITE_AFTER_WRITE), w, lane, b, warp_of(written_[b]));
      if constexpr (PARTITIONED) {
        if (u32 other = readers_.missing(read_[b], views[w.id].seen))
          return report(WRITE_AFTER_READ, w, lane, b, warp_of(other));
        readers_.drop(read_[b]);
      } else if (is_others(read_[b], me)) {
        return report(WRITE_AFTER_READ, w, lane, b, warp_of(read_[b]));
      }
      written_[b] = me;
      stamp_[b] = clock;
      if (copy) copying_[b] = w.id + 1;
    }
  }

  // What a warp touches of what it has not seen, by whose it is.
  Finding unseen(u32 before, Finding otherwise) const {
    const int agent = agent_of(before), count = int(warps.size());
    return !job.partitioned || agent < count ? otherwise : agent < 2 * count ? STORE_IN_FLIGHT : LOAD_IN_FLIGHT;
  }
  // Whether the asynchronous proxy sees what is seen: what it wrote itself it always does.
  bool fenced(u32 before, const View& view) const {
    return agent_of(before) >= int(warps.size()) || view.fenced.at[agent_of(before)] >= clock_of(before);
  }
  void check_asynchronous_read(u32 at, const Warp& w, int lane, Finding no_fence) {
    check_mbarriers(at, 16, w, lane);
    const View& view = views[w.id];
    for (u32 b = at; b < at + 16; b++) {
      const u32 before = written_[b];
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      if (!before) return report(UNINITIALISED, w, lane, b);
      if (!view.has(before)) return report(unseen(before, READ_AFTER_WRITE), w, lane, b, warp_of(before));
      if (!fenced(before, view)) return report(no_fence, w, lane, b, warp_of(before));
    }
  }
  void check_mbarriers(u32 at, u32 bytes, const Warp& w, int lane) {
    for (u32 word = at / 8; word <= (at + bytes - 1) / 8; word++)
      if (is_mbarrier_[word]) return report(MBARRIER_TOUCHED, w, lane, at);
  }

  template <class T> static int unique(T* values, int n) {
    std::sort(values, values + n);
    return std::unique(values, values + n) - values;
  }

  const Region* region(u64 address, u32 bytes) {
    if (!last_ || address - last_->base >= last_->size) {
      const Region* end = job.regions + job.num_regions;
      last_ = std::upper_bound(job.regions, end, address,
                               [](u64 a, const Region& r) { return a < r.base; });
      if (last_ == job.regions) return last_ = nullptr;
      last_--;
    }
    u64 at = address - last_->base;
    return at < last_->size && bytes <= last_->size - at ? last_ : nullptr;
  }

  // Programs must not meet at all, the warps of one not between two barriers.
  void check_order(const Region& r, u64 at, u32 bytes, const Warp& w, int lane, const u8* data) {
    const u64 me = u64(program + 1) << 32 | tag(w), several = ~0ull;
    const bool same = data && !std::memcmp(reinterpret_cast<u8*>(r.base + at), data, bytes);
    for (u64 b = at; b < at + bytes; b++) {
      u64 &writer = r.writer[b], &reader = r.reader[b];
      if (writer && writer >> 32 != me >> 32)
        return report(data ? TWO_WRITERS : READER_AND_WRITER, w, lane, r.base + b, program_of(writer));
      if (data && reader && reader >> 32 != me >> 32)
        return report(READER_AND_WRITER, w, lane, r.base + b, program_of(reader));
      if (!same && is_others(u32(writer), u32(me)))
        return report(data ? WRITE_AFTER_WRITE : READ_AFTER_WRITE, w, lane, r.base + b,
                      warp_of(u32(writer)));
      if (data && !same && is_others(u32(reader), u32(me)))
        return report(WRITE_AFTER_READ, w, lane, r.base + b, warp_of(u32(reader)));
      if (data) writer = me;
      else if (reader && reader >> 32 != me >> 32) reader = several;
      else reader = is_others(u32(reader), u32(me)) ? me | SEVERAL : me;
    }
  }
  // The same where warps meet at barriers of their own. The top bit of a writer tells a reduction.
  void check_seen(const Region& r, u64 at, u32 bytes, const Warp& w, int lane, Access access, u32 tag,
                  const u8* data, bool floats = false) {
    constexpr u64 adds = 1ull << 63, several = ~0ull;
    const u64 me = u64(program + 1) << 32 | tag;
    const View& view = views[w.id];
    const bool asynchronous = agent_of(tag) >= int(warps.size());
    const bool same = data && !std::memcmp(reinterpret_cast<u8*>(r.base + at), data, bytes);
    for (u64 b = at; b < at + bytes; b++) {
      u64 &writer = r.writer[b], &reader = r.reader[b], address = r.base + b;
      const u64 before = writer & ~adds;
      const bool both_add = access == ADD && writer & adds;
      if (before && before >> 32 != me >> 32) {
        const Finding apart = access == READ ? READER_AND_WRITER : both_add ? REDUCTION_ORDER : TWO_WRITERS;
        if (!both_add || floats) return report(apart, w, lane, address, program_of(before));
      } else if (before && !same && !view.has(u32(before))) {
        if (!both_add || floats)
          return report(both_add ? REDUCTION_ORDER
                                 : unseen(u32(before), access == READ ? READ_AFTER_WRITE : WRITE_AFTER_WRITE),
                        w, lane, address, warp_of(u32(before)));
      } else if (before && asynchronous && !fenced(u32(before), view)) {
        return report(TMA_PROXY_FENCE, w, lane, address, warp_of(u32(before)));
      }
      const bool others = reader && reader >> 32 != me >> 32;
      u32 readers = others ? 0 : u32(reader);
      if (access == READ) {
        readers_.add(readers, tag, view);
        reader = others ? several : me >> 32 << 32 | readers;
        continue;
      }
      if (others) return report(READER_AND_WRITER, w, lane, address, program_of(reader));
      if (u32 other = readers_.missing(readers, view.seen); other && !same)
        return report(WRITE_AFTER_READ, w, lane, address, warp_of(other));
      readers_.drop(readers);
      reader = 0;
      writer = access == ADD ? me | adds : me;
    }
  }
  static int program_of(u64 tag) { return int(tag >> 32) - 1; }

  // Ordinary stores and copies are seen by the asynchronous proxy after a proxy fence on the way from
  // the write to the wgmma: of the writer before the barrier, or of the reader behind it.
  bool visible_to_wgmma(u32 b, const Warp& w) const {
    const u32 writer = warp_of(written_[b]), since = written_[b] >> 8;
    const auto& own = w.proxy_fences;
    if (writer != w.id && !own.empty() && own.back().epoch > since) return true;
    const auto& fences = warps.at(writer).proxy_fences;
    auto after = std::find_if(fences.begin(), fences.end(),
                              [&](const ProxyFence& f) { return f.stamp > stamp_[b]; });
    return after != fences.end() && (writer == w.id || after->epoch < epoch);
  }
};
