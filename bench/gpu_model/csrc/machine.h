// What a program and its warps are made of. A register holds 32 lanes; its slot is an offset in the
// register file of a warp, a multiple of 64 bytes. A predicate is a bit per lane.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "order.h"

constexpr int LANES = 32;
constexpr u32 ALL = 0xffffffff;
constexpr int SLOT = 64;

struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

// ../library.py reads the declarations of this and of Region, Counts, Report and Job.
struct Instruction {
  s32 operation;
  s32 guard, negated;  // slot of the predicate or -1
  s32 first, results, count;  // of its operands' slots; results come first
  s32 target, reconverge;     // of a branch: instructions, the second -1 where sides never meet
  s32 size, vector, width;    // of memory: bytes of an element, elements, bits of their registers
  s32 variant;
  s64 offset;
};

struct Region {  // of global memory; what no tensor owns, if anything, is marked 0
  u64 base, size;
  const u8* owned;
  u64 *writer, *reader;  // program + 1, above the epoch and the warp; or null
};

struct Counts {  // of one instruction; skipped are lanes that its guard kept from it
  u64 executed, skipped, wavefronts, min_wavefronts, sectors, min_sectors;
};

#define EACH_FINDING(X) \
  X(OUT_OF_BOUNDS, "out of bounds") \
  X(MISALIGNED, "misaligned") \
  X(BETWEEN_ELEMENTS, "between the elements of a tensor") \
  X(SHARED_OUT_OF_BOUNDS, "out of bounds of shared memory") \
  X(UNINITIALISED, "shared memory read before it is written") \
  X(READ_AFTER_WRITE, "read after write without a barrier") \
  X(WRITE_AFTER_WRITE, "write after write without a barrier") \
  X(WRITE_AFTER_READ, "write after read without a barrier") \
  X(COPY_IN_FLIGHT, "touched while cp.async copies") \
  X(WGMMA_READS, "written while wgmma reads") \
  X(WGMMA_RESULT, "result of wgmma touched before its wait") \
  X(WGMMA_OPERAND, "register operand of wgmma written before its wait") \
  X(NO_WGMMA_FENCE, "wgmma without wgmma.fence") \
  X(NO_PROXY_FENCE, "read by wgmma without fence.proxy.async") \
  X(DIVERGED, "lanes of a warp apart where all must take part") \
  X(OTHER_BARRIER, "warps at different barriers") \
  X(TWO_WRITERS, "written by two programs") \
  X(READER_AND_WRITER, "read and written by different programs") \
  X(INACTIVE_LANE, "lane asked for a lane that takes no part") \
  X(LANES_DISAGREE, "two lanes write different numbers to one address") \
  X(LOAD_IN_FLIGHT, "touched before the wait for a TMA load") \
  X(TMA_PROXY_FENCE, "used by TMA without fence.proxy.async") \
  X(STORE_READS, "written while a TMA store reads") \
  X(STORE_IN_FLIGHT, "touched before the wait for a TMA store") \
  X(LEFT_IN_FLIGHT, "a TMA copy that nothing waits for") \
  X(REDUCTION_ORDER, "floats added by TMA in no fixed order") \
  X(NO_MBARRIER, "no mbarrier where one is used") \
  X(MBARRIER_INIT, "an mbarrier used without a barrier after its init") \
  X(MBARRIER_TOUCHED, "an mbarrier touched as ordinary memory") \
  X(ARRIVALS, "more arrivals than an mbarrier expects") \
  X(REGISTER_COUNT, "setmaxnreg of registers that cannot be") \
  X(DEADLOCK, "waits for ever")

#define NAME(name, text) name,
#define TEXT(name, text) text,
enum Finding : int { EACH_FINDING(NAME) FINDINGS };
extern "C" {
const char* finding_names[] = {EACH_FINDING(TEXT) nullptr};
}
#undef NAME
#undef TEXT
static_assert(FINDINGS == 32);  // the length of Job::found

struct Report {
  s32 finding, instruction, warp, lane, program, other;
  u64 address;
};

// A tensor as TMA sees it, the innermost axis first; execute.py fills it in. Strides are bytes, size is
// that of an element, swizzle the bytes of a row of the pattern or 0. Outside of the tensor is zero, or
// NaN where so asked.
struct TensorMap {
  u64 base, dims[5], strides[5];
  s32 rank, size, box[5], swizzle, kind, nan;
};
static_assert(sizeof(TensorMap) == 128);
enum Elements { INTEGER, FLOAT32, BFLOAT16, FLOAT16, ELEMENTS };  // as execute.py has them

// An instruction that ptxas keeps in its place, as a warp ran it, and how many lanes. Of an mbarrier its
// number and clock, where a warp waits that of the phase that ended; -1 for none. Of TMA the bytes that are copied.
struct Event {
  s32 program, warp, instruction, lanes, mbarrier, phase, bytes;
};

struct Job {
  const Instruction* code;
  const s32* operands;
  const Region* regions;
  s64 num_regions;
  u8* registers;  // of all warps, constants and parameters filled in
  s64 register_bytes, warps, shared_bytes;
  s32 special[9];  // slots of special registers, as decode.py has them
  s64 grid[3];     // programs along each axis
  s64 check, count, tracks_wgmma;
  s64 partitioned;    // warps meet at barriers of their own
  s64 max_registers;  // of a thread at the start, where setmaxnreg changes it
  const TensorMap* maps;
  s64 num_maps;
  const s32* tables;  // targets of brx.idx
  // Of ``recorded`` programs, evenly: events in order, and how often each warp ran each instruction.
  s64 recorded, num_instructions, max_events, num_events;
  Event* events;
  u32* executed_by;
  Counts* counts;
  Report* reports;
  s64 max_reports, num_reports, found[32];
  s64 limit;  // instructions of a warp between barriers
  char error[1024];
};

struct Copy {  // what one lane's cp.async brings
  u32 at, bytes;
  u8 data[16];
};

// Counts arrivals and bytes, phase after phase; its agent's clock is that of the current phase.
struct Mbarrier {
  u32 at, count = 0, missing = 0;
  s64 bytes = 0;  // expected ones that have not come
  u32 phase = 0, clock = 1;
  u32 agent, init = 0;       // the tag of its init
  View arriving, completed;  // what the arrivals of this phase, and of all before, passed on
  bool live = true;
  u32 loaded = 0, loader = 0;  // the clock of the last TMA load, and its warp
  s32 load = 0;                // and instruction
};

struct Divergence {
  s32 pc, reconverge;
  u32 mask;
};

struct ProxyFence {
  u32 stamp, epoch;
};

// One or more TMA stores that a lane has committed, by what they read of shared memory.
struct StoreGroup {
  u32 number, lanes;  // from 1; those that committed it
  std::vector<std::pair<int, u32>> reads;  // lane, address of 16 bytes
};

struct Warp {
  u8* registers;
  const s32* slots;  // of the operands of the current instruction
  u32 id;
  s32 pc = 0, reconverge = -1;
  u32 active = ALL, alive = ALL;
  bool done = false, waiting = false;
  std::vector<Divergence> divergences;
  std::vector<std::vector<Copy>> copies;  // committed groups, oldest first
  std::vector<Copy> open_copies;
  // Of wgmma: groups are numbered from 1, the open one is committed + 1.
  u32 committed = 0, completed = 0;
  bool fenced = false;                  // since the last group was committed
  std::vector<std::vector<u32>> reads;  // 16-byte pieces that each group in flight reads
  std::vector<u32> open_reads;
  // By slot: the group that writes, that reads, and when an ordinary instruction wrote.
  std::vector<u32> result_of, operand_of, written;
  u32 fence = 0;  // when wgmma.fence was executed
  std::vector<ProxyFence> proxy_fences;
  std::vector<StoreGroup> stores;  // committed ones, oldest first
  std::vector<std::pair<int, u32>> open_stores;
  u32 stored = 0, forgotten = 0;  // groups: that were committed, the last one that is not kept
  int barrier = -1;       // that it waits at, where warps meet at barriers of their own
  s64 max_registers = 0;  // as setmaxnreg left them

  template <class T> T* lanes(int operand) const {
    return reinterpret_cast<T*>(registers + slots[operand]);
  }
  u32& predicate(int operand) const { return *lanes<u32>(operand); }
};
