// Executes decoded PTX on the CPU, a warp at a time: 32 lanes an instruction. ../decode.py decodes; this
// file and its headers read no PTX text. Warps run one after the other from barrier to barrier: what
// they do between two barriers must not depend on each other, which the checks of memory.h hold.
#include <cstdio>

#include "arithmetic.h"
#include "tensor_cores.h"
#include "transfer.h"

namespace {

// ---- instructions whose lanes depend on each other ----

// Operands: result, source, and in each lane the number of another one or its distance.
template <bool BUTTERFLY> void shuffle(Machine& m, Warp& w, const Instruction&, u32 mask) {
  const u32 *from = w.lanes<u32>(1), *amount = w.lanes<u32>(2);
  u32 found[LANES];
  for (int l = 0; l < LANES; l++) {
    const u32 source = (BUTTERFLY ? l ^ amount[l] : amount[l]) & 31;
    if ((mask >> l & 1) && !(mask >> source & 1)) m.report(INACTIVE_LANE, w, l, 0, source);
    found[l] = from[source];
  }
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1) w.lanes<u32>(0)[l] = found[l];
}

void reduce_maximum(Machine&, Warp& w, const Instruction&, u32 mask) {
  const float* from = w.lanes<float>(1);
  float found = from[std::countr_zero(mask)];
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1) found = maximum(found, from[l]);
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1) w.lanes<float>(0)[l] = found;
}

void nothing(Machine&, Warp&, const Instruction&, u32) {}

// ---- the table ----

enum Control { BRANCH, RETURN, BARRIER, CONTROLS };  // the first operations, without handlers

const Operations& operations() {
  static const Operations table = [] {
    Operations all;
    for (const char* name : {"bra", "ret", "bar"}) all.push_back({name, nullptr});
    add_arithmetic(all);
    add_transfers(all);
    add_tensor_cores(all);
    all.push_back({"shfl.bfly.32", shuffle<true>, {32, 32, 32}});
    all.push_back({"shfl.idx.32", shuffle<false>, {32, 32, 32}});
    all.push_back({"redux.max.f32", reduce_maximum, {32, 32}});
    all.push_back({"nop", nothing});
    return all;
  }();
  return table;
}

bool is_move(const Operation& o) { return o.name == "mov.32"; }

bool is_wgmmas(const Operation& o) { return o.name.starts_with("wgmma"); }

// ---- programs ----

class Executor {
 public:
  explicit Executor(Job& job) : warps_(job.warps), machine_(job, warps_), job_(job) {
    for (const Operation& o : operations()) {
      run_.push_back(o.run);
      kind_.push_back(is_move(o) ? MOVE : is_wgmmas(o) ? WGMMA : ORDINARY);
    }
    for (u32 n = 0; n < warps_.size(); n++) {
      warps_[n].id = n;
      warps_[n].registers = job.registers + n * job.register_bytes;
    }
  }

  void run() {
    const s64 programs = job_.grid[0] * job_.grid[1] * job_.grid[2];
    for (s64 n = 0; n < programs; n++) run_program(n);
  }

 private:
  enum Kind : u8 { ORDINARY, MOVE, WGMMA };
  std::vector<Warp> warps_;
  Machine machine_;
  Job& job_;
  std::vector<Handler> run_;
  std::vector<Kind> kind_;

  void run_program(s64 number) {
    machine_.program = u32(number);
    machine_.clear();
    const u32 place[] = {u32(number % job_.grid[0]), u32(number / job_.grid[0] % job_.grid[1]),
                         u32(number / job_.grid[0] / job_.grid[1])};
    for (Warp& w : warps_) start(w, place);
    for (;;) {
      bool all_done = true;
      for (Warp& w : warps_) {
        if (w.done) continue;
        all_done = false;
        w.waiting = false;
        advance(w);
      }
      if (all_done) return;
      if (++machine_.epoch >= 1u << 24) throw Fault("too many barriers");
      machine_.clock++;
      const Warp* first = nullptr;
      for (const Warp& w : warps_) {
        if (!w.waiting) continue;
        if (!first) first = &w;
        machine_.now = job_.code + w.pc - 1;
        if (w.pc != first->pc) machine_.report(OTHER_BARRIER, w, 0, 0, first->pc - 1);
      }
    }
  }

  void start(Warp& w, const u32* place) {
    const size_t slots = job_.tracks_wgmma ? job_.register_bytes / SLOT : 0;
    w = Warp{.registers = w.registers, .id = w.id};
    for (auto* marks : {&w.result_of, &w.operand_of, &w.written}) marks->resize(slots);
    for (u32 l = 0; l < LANES; l++) {
      const u32 values[] = {l, w.id * LANES + l, u32(warps_.size()) * LANES, place[0], place[1], place[2],
                            u32(job_.grid[0]), u32(job_.grid[1]), u32(job_.grid[2])};
      for (int n = 0; n < 9; n++) reinterpret_cast<u32*>(w.registers + job_.special[n])[l] = values[n];
    }
  }

  // Take up the lanes that were left behind; false where none is alive.
  static bool resume(Warp& w) {
    do {
      if (w.divergences.empty()) return false;
      const Divergence d = w.divergences.back();
      w.divergences.pop_back();
      w.pc = d.pc, w.reconverge = d.reconverge, w.active = d.mask & w.alive;
    } while (!w.active);
    return true;
  }

  void finish(Warp& w) {
    machine_.finish_copies(w, 0);
    machine_.finish_wgmma(w, 0);
    w.done = true;
  }

  // Run a warp to its next barrier or its end.
  void advance(Warp& w) {
    for (s64 left = job_.limit;; left--) {
      while (w.pc == w.reconverge)
        if (!resume(w)) return finish(w);
      if (!left) throw Fault("an endless loop?");
      const Instruction& i = job_.code[w.pc];
      machine_.now = &i;
      w.slots = job_.operands + i.first;
      u32 mask = w.active;
      if (i.guard >= 0) {
        const u32 guard = *reinterpret_cast<const u32*>(w.registers + i.guard);
        mask &= i.negated ? ~guard : guard;
      }
      if (job_.count) {
        machine_.counts().executed++;
        machine_.counts().skipped += std::popcount(w.active & ~mask);
      }
      w.pc++;
      if (i.operation >= CONTROLS) {
        if (job_.tracks_wgmma && mask && kind_[i.operation] != WGMMA)
          check_in_flight(machine_, w, i, kind_[i.operation] == MOVE);
        run_[i.operation](machine_, w, i, mask);
      } else if (i.operation == BRANCH) {
        branch(w, i, mask);
      } else if (i.operation == RETURN) {
        w.alive &= ~w.active;
        if (!resume(w)) return finish(w);
      } else {
        if (w.active != w.alive) machine_.report(DIVERGED, w, 0, w.active);
        w.waiting = true;
        return;
      }
    }
  }

  static void branch(Warp& w, const Instruction& i, u32 mask) {
    if (mask == w.active) w.pc = i.target;
    if (!mask || mask == w.active) return;
    if (i.reconverge >= 0) w.divergences.push_back({i.reconverge, w.reconverge, w.active});
    const s32 reconverge = i.reconverge >= 0 ? i.reconverge : w.reconverge;
    w.divergences.push_back({i.target, reconverge, mask});
    w.reconverge = reconverge;
    w.active &= ~mask;
  }
};

}  // namespace

extern "C" {

int run_job(Job* job) {
  Executor executor(*job);
  try {
    executor.run();
  } catch (const Fault& fault) {
    std::snprintf(job->error, sizeof job->error, "%s", fault.what());
    return 1;
  }
  return 0;
}

const char* operation_name(int n) {
  return size_t(n) < operations().size() ? operations()[n].name.c_str() : nullptr;
}
// Bits of operand k of operation n; 0 behind the last.
int operand_width(int n, int k) {
  const auto& widths = operations()[n].widths;
  return size_t(k) < widths.size() ? widths[k] : 0;
}
}
