// Executes decoded PTX on the CPU, a warp at a time: 32 lanes an instruction. ../decode.py decodes; this
// file and its headers read no PTX text. Warps run one after the other from barrier to barrier: what
// they do between two barriers must not depend on each other, which the checks of memory.h hold. Where
// a barrier is one of some warps, or an mbarrier, a warp runs until it must wait (run_partitioned).
#include <cstdio>

#include "arithmetic.h"
#include "bulk.h"
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

enum Control { BRANCH, TABLE, RETURN, BARRIER, PHASE, SET_REGISTERS, CONTROLS };  // the first operations, without handlers

const Operations& operations() {
  static const Operations table = [] {
    Operations all;
    for (const char* name : {"bra", "brx", "ret", "bar", "mbarrier.try_wait", "setmaxnreg"}) all.push_back({name, nullptr});
    add_arithmetic(all);
    add_transfers(all);
    add_bulk_copies(all);
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

// What ptxas keeps in its place, less what records itself.
bool stays(const Operation& o) {
  static const char* names[] = {"bar", "mbarrier.init", "mbarrier.inval", "bulk.commit_group"};
  return o.name.starts_with("wgmma.k") || std::find(std::begin(names), std::end(names), o.name) != std::end(names);
}

// ---- programs ----

class Executor {
 public:
  explicit Executor(Job& job) : warps_(job.warps), machine_(job, warps_), job_(job) {
    for (const Operation& o : operations()) {
      run_.push_back(o.run);
      stays_.push_back(stays(o));
      kind_.push_back(is_move(o) ? MOVE : is_wgmmas(o) ? WGMMA : ORDINARY);
    }
    for (u32 n = 0; n < warps_.size(); n++) {
      warps_[n].id = n;
      warps_[n].registers = job.registers + n * job.register_bytes;
    }
  }

  void run() {
    for (s64 n = 0; n < programs(); n++) run_program(n);
  }

 private:
  enum Kind : u8 { ORDINARY, MOVE, WGMMA };
  std::vector<Warp> warps_;
  Machine machine_;
  Job& job_;
  std::vector<Handler> run_;
  std::vector<Kind> kind_;
  std::vector<bool> stays_;

  s64 programs() const { return job_.grid[0] * job_.grid[1] * job_.grid[2]; }

  void run_program(s64 number) {
    machine_.program = u32(number);
    machine_.clear();
    const s64 stride = job_.recorded ? programs() / job_.recorded : 0;
    const bool recorded = stride && number % stride == 0 && number / stride < job_.recorded;
    machine_.recording = recorded ? s32(number / stride) : -1;
    const u32 place[] = {u32(number % job_.grid[0]), u32(number / job_.grid[0] % job_.grid[1]),
                         u32(number / job_.grid[0] / job_.grid[1])};
    for (Warp& w : warps_) start(w, place);
    if (job_.partitioned) return run_partitioned();
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

  // ---- warps that meet at barriers of their own ----

  struct Barrier {
    s32 expected = 0;  // warps; 0: all that have not ended
    std::vector<u32> arrived;
  };
  Barrier barriers_[16];
  s64 free_registers_ = 0;  // of a lane: what setmaxnreg has given back

  void run_partitioned() {
    for (Barrier& b : barriers_) b = {};
    free_registers_ = 0;
    for (Warp& w : warps_) w.max_registers = job_.max_registers;
    for (;;) {
      bool all_done = true, moved = false;
      for (Warp& w : warps_) {
        if (w.done) continue;
        all_done = false;
        if (w.barrier >= 0) continue;
        w.waiting = false;
        moved |= advance(w);
      }
      if (all_done) return machine_.check_loads();
      if (!moved) deadlock();
    }
  }

  bool complete(const Barrier& b) const {
    const auto running = [](const Warp& w) { return !w.done; };
    const size_t all = std::count_if(warps_.begin(), warps_.end(), running);
    return !b.arrived.empty() && b.arrived.size() >= (b.expected ? size_t(b.expected) : all);
  }

  void release(Barrier& b) {
    View together;
    for (u32 n : b.arrived) together.join(machine_.views[n]);
    for (u32 n : b.arrived) {
      Warp& w = warps_[n];
      w.barrier = -1, w.waiting = false;
      machine_.views[n].join(together);
      machine_.pass_on(w);
    }
    b = {};
  }

  // size: number of the barrier. vector: warps, or 0 for all.
  void meet(Warp& w, const Instruction& i) {
    Barrier& b = barriers_[i.size];
    if (!b.arrived.empty() && b.expected != i.vector) machine_.report(OTHER_BARRIER, w, 0, 0);
    b.expected = i.vector;
    b.arrived.push_back(w.id);
    w.barrier = i.size, w.waiting = true;
    if (complete(b)) release(b);
  }

  // The registers of a lane become ``size``: fewer at once, more where others have given back so many.
  bool set_registers(Warp& w, const Instruction& i) {
    const s64 more = i.size - w.max_registers;
    if (i.variant ? more < 0 : more > 0) machine_.report(REGISTER_COUNT, w, 0, u64(i.size));
    if (more > free_registers_) return false;
    free_registers_ -= more;
    w.max_registers = i.size;
    return true;
  }

  [[noreturn]] void deadlock() {
    std::string text = "no warp can go on:";
    std::string last;
    for (Warp& w : warps_) {
      if (w.done) continue;
      const Instruction& i = job_.code[w.barrier >= 0 ? w.pc - 1 : w.pc];
      machine_.now = &i;
      w.slots = job_.operands + i.first;
      std::string reason;
      char line[200];
      u64 at = 0;
      if (w.barrier >= 0) {
        const Barrier& b = barriers_[w.barrier];
        const s64 expected = b.expected ? b.expected : s64(warps_.size());
        std::snprintf(line, sizeof line, "barrier %d, where %d of %d warps are", w.barrier,
                      int(b.arrived.size()), int(expected));
      } else if (i.operation == PHASE) {
        at = shared_address(w, 1, i.offset, std::countr_zero(w.active));
        const Mbarrier* b = find_mbarrier(machine_, u32(at));
        std::snprintf(line, sizeof line, "the mbarrier at %d, whose phase %d lacks %d arrivals and %lld bytes",
                      int(at), b ? int(b->phase) : -1, b ? int(b->missing) : -1, b ? (long long)b->bytes : -1);
      } else {
        std::snprintf(line, sizeof line, "%d registers a lane", i.size);
      }
      machine_.report(DEADLOCK, w, 0, at);
      if (line != last) text += " warp " + std::to_string(w.id) + " waits for " + line + ";";
      last = line;
    }
    text.pop_back();
    throw Fault(text);
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

  bool finish(Warp& w) {
    machine_.finish_copies(w, 0);
    machine_.finish_wgmma(w, 0);
    w.done = true;
    if (!job_.partitioned) return true;
    machine_.check_stores(w);
    for (Barrier& b : barriers_)
      if (!b.expected && complete(b)) release(b);
    return true;
  }

  // Run a warp to its next barrier or its end; false where it must wait at once.
  bool advance(Warp& w) {
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
        if (machine_.recording >= 0) machine_.executed_by(w)++;
        if (stays_[i.operation]) machine_.record(w, mask);
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
      } else if (i.operation == TABLE) {
        branch_by_table(w, i);
      } else if (i.operation == PHASE || i.operation == SET_REGISTERS) {
        if (i.operation == PHASE ? wait_for_phase(machine_, w, i, mask) : set_registers(w, i)) {
          if (i.operation == SET_REGISTERS) machine_.record(w, mask);
          continue;
        }
        if (job_.count) machine_.counts().executed--;  // it is yet to come
        if (machine_.recording >= 0) machine_.executed_by(w)--;
        w.pc--;
        w.waiting = true;
        return left != job_.limit;
      } else {
        if (w.active != w.alive) machine_.report(DIVERGED, w, 0, w.active);
        w.waiting = true;
        if (!job_.partitioned) return true;
        meet(w, i);
        if (w.waiting) return true;
      }
    }
  }

  // Operand: the number of the target, of vector many.
  void branch_by_table(Warp& w, const Instruction& i) {
    const u32* index = w.lanes<u32>(0);
    const u32 first = index[std::countr_zero(w.active)];
    each_lane(w.active, [&](int lane) {
      if (index[lane] != first) machine_.stop(DIVERGED, w, lane, index[lane]);
    });
    if (first >= u32(i.vector)) throw Fault("brx.idx past the end of its table");
    w.pc = job_.tables[i.target + first];
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
