// Global and shared memory, with what compute-sanitizer would look for and what it counts.
#pragma once
#include <algorithm>
#include <cstring>

#include "machine.h"

class Machine {
 public:
  Job& job;
  const std::vector<Warp>& warps;
  const Instruction* now = nullptr;
  u32 program = 0, epoch = 1;  // the epoch counts barriers
  u32 clock = 1;               // counts instructions that order others
  std::vector<u8> shared;

  Machine(Job& job, const std::vector<Warp>& warps) : job(job), warps(warps) {}

  void clear() {
    const size_t bytes = job.shared_bytes + 16, checked = job.check ? bytes : 0;
    shared.assign(bytes, 0xff);
    for (auto* marks : {&written_, &read_, &stamp_}) marks->assign(checked, 0);
    copying_.assign(checked, 0);
    reading_.assign(checked / 16 + 1, 0);
    epoch = clock = 1;
  }

  void report(Finding finding, const Warp& w, int lane, u64 address, int other = -1) {
    job.found[finding]++;
    if (job.num_reports < job.max_reports)
      job.reports[job.num_reports++] = {finding, s32(now - job.code), s32(w.id), lane,
                                        s32(program), other, address};
  }
  [[noreturn]] void stop(Finding finding, const Warp& w, int lane, u64 address) {
    report(finding, w, lane, address);
    throw Fault(finding_names[finding]);
  }
  Counts& counts() { return job.counts[now - job.code]; }

  // ---- global memory ----

  // With ``data`` for what is about to be written there.
  u8* global(u64 address, u32 bytes, const Warp& w, int lane, const u8* data = nullptr) {
    if (address & (std::bit_ceil(bytes) - 1)) stop(MISALIGNED, w, lane, address);
    const Region* r = region(address, bytes);
    if (!r) stop(OUT_OF_BOUNDS, w, lane, address);
    u64 at = address - r->base;
    if (r->owned && std::memchr(r->owned + at, 0, bytes))
      report(BETWEEN_ELEMENTS, w, lane, address);
    if (r->writer) check_order(*r, at, bytes, w, lane, data);
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
    const u32 me = tag(w);
    for (u32 b = at; b < at + bytes; b++) {
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      if (!written_[b]) return report(UNINITIALISED, w, lane, b);
      if (is_others(written_[b], me)) return report(READ_AFTER_WRITE, w, lane, b, warp_of(written_[b]));
      mark_read(b, me);
    }
  }

  // Two warps that write the same are no race: layouts repeat what they have too little of.
  void check_write(u32 at, const u8* data, u32 bytes, const Warp& w, int lane, bool copy = false) {
    if (!job.check) return;
    const u32 me = tag(w);
    const bool same = !copy && !std::memcmp(shared.data() + at, data, bytes);
    for (u32 piece = at / 16; piece <= (at + bytes - 1) / 16; piece++)
      if (reading_[piece]) report(WGMMA_READS, w, lane, at);
    for (u32 b = at; b < at + bytes; b++) {
      if (copying_[b]) return report(COPY_IN_FLIGHT, w, lane, b, copying_[b] - 1);
      if (!same && is_others(written_[b], me))
        return report(WRITE_AFTER_WRITE, w, lane, b, warp_of(written_[b]));
      if (is_others(read_[b], me)) return report(WRITE_AFTER_READ, w, lane, b, warp_of(read_[b]));
      written_[b] = me;
      stamp_[b] = clock;
      if (copy) copying_[b] = w.id + 1;
    }
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
        for (u32 b = at; b < at + 16; b++) mark_read(b, tag(w));
      }
      w.reads.erase(w.reads.begin());
      w.completed++;
    }
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
  const Region* last_ = nullptr;

  static constexpr u32 SEVERAL = 255;

  u32 tag(const Warp& w) const { return epoch << 8 | (w.id + 1); }
  static int warp_of(u32 tag) { return int(tag & 255) - 1; }
  static bool is_others(u32 tag, u32 mine) { return tag >> 8 == mine >> 8 && tag != mine; }
  void mark_read(u32 b, u32 me) { read_[b] = is_others(read_[b], me) ? (me | SEVERAL) : me; }

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
