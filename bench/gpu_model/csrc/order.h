// What happens before what, where warps meet at barriers of their own: vector clocks.
//
// An agent is a warp, an mbarrier (for the TMA loads that complete on it) or the TMA stores of a warp.
// A tag names an access: its agent and that agent's clock then. A warp has ``seen`` an access where
// its clock of the agent is as late, which barriers and waits make it. The clock of a warp goes on where
// it hands over what it did, that of an mbarrier with each phase, that of stores with each group.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "numbers.h"

constexpr int AGENTS = 128;

constexpr u32 SEVERAL = 255;  // in place of an agent: those of a set
constexpr u32 tag_of(u32 clock, u32 agent) { return clock << 8 | (agent + 1); }
constexpr u32 clock_of(u32 tag) { return tag >> 8; }
constexpr int agent_of(u32 tag) { return int(tag & 255) - 1; }

struct Clocks {
  std::array<u32, AGENTS> at{};
  bool has(u32 tag) const { return at[agent_of(tag)] >= clock_of(tag); }
  void join(const Clocks& other) {
    for (int n = 0; n < AGENTS; n++) at[n] = std::max(at[n], other.at[n]);
  }
};

// What is handed over: everything seen, and what of it the asynchronous proxy sees too.
struct View {
  Clocks seen, fenced;
  void join(const View& other) {
    seen.join(other.seen);
    fenced.join(other.fenced);
  }
  bool has(u32 tag) const { return seen.has(tag); }
};

// The readers of a byte since its last write: one tag, or the number of a set of them.
class ReaderSets {
 public:
  void clear() {
    sets_.clear();
    free_.clear();
  }
  // A tag that these clocks are not as late as, or 0.
  u32 missing(u32 readers, const Clocks& clocks) const {
    if ((readers & 255) != SEVERAL) return readers && !clocks.has(readers) ? readers : 0;
    for (u32 tag : sets_[readers >> 8])
      if (!clocks.has(tag)) return tag;
    return 0;
  }
  void add(u32& readers, u32 tag, const View& view) {
    if ((readers & 255) == SEVERAL) {
      auto& set = sets_[readers >> 8];
      std::erase_if(set, [&](u32 other) { return agent_of(other) == agent_of(tag) || view.has(other); });
      set.push_back(tag);
    } else if (!readers || agent_of(readers) == agent_of(tag) || view.has(readers)) {
      readers = tag;
    } else {
      if (free_.empty()) {
        free_.push_back(u32(sets_.size()));
        sets_.emplace_back();
      }
      sets_[free_.back()] = {readers, tag};
      readers = free_.back() << 8 | SEVERAL;
      free_.pop_back();
    }
  }
  void drop(u32& readers) {
    if ((readers & 255) == SEVERAL) free_.push_back(readers >> 8);
    readers = 0;
  }

 private:
  std::vector<std::vector<u32>> sets_;
  std::vector<u32> free_;
};
