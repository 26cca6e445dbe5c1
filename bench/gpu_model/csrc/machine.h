// What a program and its warps are made of. A register holds 32 lanes; its slot is an offset in the
// register file of a warp, a multiple of 64 bytes. A predicate is a bit per lane.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"

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
  X(LANES_DISAGREE, "two lanes write different numbers to one address")

#define NAME(name, text) name,
#define TEXT(name, text) text,
enum Finding : int { EACH_FINDING(NAME) FINDINGS };
extern "C" {
const char* finding_names[] = {EACH_FINDING(TEXT) nullptr};
}
#undef NAME
#undef TEXT
static_assert(FINDINGS == 20);  // the length of Job::found

struct Report {
  s32 finding, instruction, warp, lane, program, other;
  u64 address;
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
  Counts* counts;
  Report* reports;
  s64 max_reports, num_reports, found[20];
  s64 limit;  // instructions of a warp between barriers
  char error[256];
};

struct Copy {  // what one lane's cp.async brings
  u32 at, bytes;
  u8 data[16];
};

struct Divergence {
  s32 pc, reconverge;
  u32 mask;
};

struct ProxyFence {
  u32 stamp, epoch;
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

  template <class T> T* lanes(int operand) const {
    return reinterpret_cast<T*>(registers + slots[operand]);
  }
  u32& predicate(int operand) const { return *lanes<u32>(operand); }
};
