// One SM, replaying what its warps execute: when each instruction can issue, and what
// it waits for. Values do not exist here; what ptxas wrote into each instruction (how long the next
// one waits, which scoreboards it sets and needs) gives what depends on what.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

namespace {

constexpr int kSchedulers = 4;
constexpr int kScoreboards = 6;
constexpr int kBarriers = 16;
// Cycles, small beside the latencies of Model in units.py: until operands were read, in the unit of
// shared memory and elsewhere; how far wgmma fetches ahead; and its start.
constexpr double kReadShared = 10, kRead = 12, kFetchAhead = 64, kWgmmaStart = 4;
constexpr double kPiece = 1024, kWavefront = 128;  // bytes
constexpr double kNever = std::numeric_limits<double>::infinity();

// What an instruction occupies. The first of them belong to each scheduler, the others to all four.
enum Pipe { kIssue, kMultiply, kArithmetic, kSpecial, kTensor, kUniform, kShared, kMemory, kPipes };

enum Kind {
    kOrdinary,
    kBarrier,      // argument: its number, and the warps that meet there
    kCopyCommit,   // of cp.async
    kCopyWait,     // argument: how many groups may stay under way
    kWgmma,        // argument: whether it ends a group
    kWgmmaWait,    // argument: how many groups may stay under way
    kCopy,
    kStore,
    kFence,        // of the warp's own stores
    kPhaseWait,    // of an mbarrier
    kArrive,       // at an mbarrier
    kBulkLoad,     // by TMA
    kBulkStore,
};

// What a warp waits for, as the reports name it.
enum Reason {
    kFixed, kWaitShared, kWaitMemory, kWaitSpecial, kWaitTensor, kWaitBarrier, kWaitPhase, kWaitOther,
    kBusy, kNotSelected, kReasons
};

}  // namespace

extern "C" {

// ../library.py reads these declarations.
struct Step {
    int32_t pipe, kind, argument, warps, stall, writes, reads, waits;
    double interval, latency, wavefronts, bytes, dram;
};

struct Replay {
    const Step* steps;
    // Numbers of steps in the order that warps execute them: those of warp w of program p from
    // begins[n] to ends[n], n = p % kinds * warps + w. From events[n] on, what it does with mbarriers
    // and TMA: the phase, or -1, and bytes. Of each kind and phase, how many arrivals and copies end it.
    const int32_t* trace;
    const int64_t *begins, *ends, *events;
    const int32_t *event_phases, *missing;
    const double* event_bytes;
    int64_t phases;  // of a program
    int64_t kinds, warps, residents, programs;
    // Bytes a cycle of this SM, and cycles.
    double cache_bytes, dram_bytes, cache_latency, dram_latency, saved;
    double from_memory;  // part of what TMA copies
    double barrier, start, tail, bulk, queue, tensor_queue;
    double* finished;   // of each program
    double* waited_at;  // of each step
    double busy[kPipes];
    double waited[kReasons];
    double issued, cycles;
};

const char* kind_names[] = {"",      "BAR",    "LDGDEPBAR", "DEPBAR", "HGMMA", "WARPGROUP.DEPBAR",
                            "LDGSTS", "store", "MEMBAR", "SYNCS.PHASECHK", "SYNCS.ARRIVE", "UTMALDG", "UTMASTG", nullptr};
const char* pipe_names[] = {"issue",   "multiply-add",  "other arithmetic", "special functions", "tensor cores",
                            "uniform", "shared memory", "global memory",    nullptr};
const char* reason_names[] = {"fixed latency", "shared memory", "global memory", "special functions",
                              "tensor cores",  "barrier",       "mbarrier",      "other latency",
                              "busy unit",     "another warp's turn", nullptr};

}  // extern "C"

namespace {

struct Warp {
    int slot, scheduler;
    int64_t program = -1;  // none: it has ended
    int64_t at = 0, stop = 0, event = 0;
    double last = 0, ready = 0;
    Reason reason = kFixed;
    int held = 0;  // by barriers and phases that have not ended
    double scoreboard[kScoreboards] = {};
    Reason set_by[kScoreboards] = {};
    double copied = 0;             // when the last cp.async has arrived
    double stored = 0;             // when the last store is acknowledged
    double product = 0;            // when the last product of wgmma has ended
    std::vector<double> copies;    // when each committed group has arrived
    std::vector<double> products;  // when each group of wgmma has ended
};

struct Phase {  // of an mbarrier
    int missing;
    double end = 0;  // when the last arrival or copy came
    std::vector<Warp*> waiting{};
};

class SM {
   public:
    explicit SM(Replay& job) : job_(job), warps_(job.residents * job.warps) {
        for (auto& slots : meetings_) slots.resize(job.residents);
        for (size_t n = 0; n < warps_.size(); ++n) of_[n % kSchedulers].push_back(&warps_[n]);
        left_.resize(job.residents);
        phases_.resize(job.residents);
        for (int slot = 0; slot < job.residents; ++slot) start(slot, 0.0);
    }

    // Whether all programs came to an end.
    bool run() {
        double now = 0;
        while (running_) {
            double next = kNever;
            for (int k = 0; k < kSchedulers; ++k) {
                if (Warp* warp = choose(k, now, next)) {
                    issue(*warp, now);
                    next = now + 1;
                }
            }
            now = std::max(next, now + 1);
            if (next == kNever) break;  // warps that wait at barriers for each other
        }
        // What was stored last is still on its way.
        job_.cycles = std::max(end_, std::max(dram_, cache_));
        return !running_;
    }

   private:
    const Step& step(const Warp& warp) const { return job_.steps[job_.trace[warp.at]]; }

    void start(int slot, double when) {
        if (started_ >= job_.programs) return;
        const int64_t program = started_++, kind = program % job_.kinds;
        left_[slot] = int(job_.warps);
        ++running_;
        phases_[slot].clear();
        for (int64_t n = 0; n < job_.phases; ++n) phases_[slot].push_back({job_.missing[kind * job_.phases + n]});
        for (int64_t w = 0; w < job_.warps; ++w) {
            const int64_t n = kind * job_.warps + w, of_all = slot * job_.warps + w;
            warps_[of_all] = Warp{slot, int(of_all % kSchedulers), program, job_.begins[n], job_.ends[n],
                                  job_.events[n], when - 1, when};
            await_phase(warps_[of_all]);
        }
    }

    // When the unit of a step takes it.
    double available(int k, const Step& s) const {
        switch (s.pipe) {
            case kIssue: return 0;
            case kShared:
            case kMemory: return shared_ - job_.queue;
            case kTensor:
                return s.kind == kWgmma ? free_[k][kTensor] - job_.tensor_queue : free_[k][kTensor];
            default: return free_[k][s.pipe];
        }
    }

    // Of the warps that can issue, the one whose last instruction is the oldest: they take turns.
    Warp* choose(int k, double now, double& next) {
        Warp* found = nullptr;
        for (Warp* warp : of_[k]) {
            if (warp->program < 0 || warp->held) continue;
            const double can = std::max(warp->ready, available(k, step(*warp)));
            if (can > now) {
                next = std::min(next, can);
            } else if (!found || warp->last < found->last) {
                found = warp;
            }
        }
        return found;
    }

    void issue(Warp& warp, double now) {
        const int number = job_.trace[warp.at];
        const Step& s = job_.steps[number];
        account(warp, s, number, now);
        ++job_.issued;
        double done = now + s.latency;
        double read = now + kRead;
        auto& free = free_[warp.scheduler];
        Reason kind = kWaitOther;
        switch (s.pipe) {
            case kIssue: break;
            case kShared:
                serve(now, s.wavefronts);
                done = shared_ + s.latency;
                read = std::max(now + kReadShared, shared_);
                kind = kWaitShared;
                break;
            case kMemory: {
                kind = kWaitMemory;
                serve(now, s.wavefronts);
                const double arrives = transfer(now, s);
                if (s.kind == kCopy) warp.copied = std::max(warp.copied, arrives);
                // L2 acknowledges a store; memory, and loads on their way, are not waited for.
                if (s.kind == kStore) warp.stored = now + job_.cache_latency;
                done = s.kind == kStore ? now + s.latency : arrives;
                break;
            }
            case kTensor:
                kind = kWaitTensor;
                job_.busy[kTensor] += s.interval;
                if (s.kind == kWgmma) {
                    serve(now - kFetchAhead, s.wavefronts);
                    free[kTensor] = std::max(std::max(free[kTensor], now + kWgmmaStart) + s.interval, shared_);
                    warp.product = free[kTensor] + job_.tail;
                    if (s.argument) warp.products.push_back(warp.product);
                    done = read = free[kTensor];
                } else {
                    free[kTensor] = now + s.interval;
                }
                break;
            default:
                free[s.pipe] = now + s.interval;
                job_.busy[s.pipe] += s.interval;
                if (s.pipe == kSpecial) kind = kWaitSpecial;
        }
        if (s.kind == kCopyCommit) warp.copies.push_back(warp.copied);
        if (s.kind >= kPhaseWait) follow(warp, s, now);
        set(warp, s.writes, done, kind);
        set(warp, s.reads, read, kind);
        warp.last = now;
        if (++warp.at == warp.stop) {
            end(warp, now);
        } else {
            prepare(warp, s, now);
            if (s.kind == kBarrier) meet(warp, s, now);
        }
    }

    // What a warp does next with an mbarrier or TMA.
    void follow(Warp& warp, const Step& s, double now) {
        const int phase = job_.event_phases[warp.event];
        const double bytes = job_.event_bytes[warp.event++];
        if (s.kind == kPhaseWait) return;
        double when = now;
        if (bytes > 0) {
            const double begin = now + job_.bulk;
            const double arrives = transfer(begin, {.bytes = bytes, .dram = bytes * job_.from_memory});
            // Shared memory gives or takes the bytes as L2 takes or gives them.
            const double moved = s.kind == kBulkLoad ? arrives : std::max(begin, cache_);
            for (double left = bytes; left > 0; left -= kPiece)
                bulk_.push_back({std::max(begin, moved - left / job_.cache_bytes), std::min(left, kPiece) / kWavefront});
            if (s.kind == kBulkLoad) when = arrives;
            else warp.copied = std::max(warp.copied, moved);
        }
        if (phase >= 0) contribute(phases_[warp.slot][phase], when);
    }

    void contribute(Phase& phase, double when) {
        phase.end = std::max(phase.end, when);
        if (--phase.missing) return;
        for (Warp* other : phase.waiting) {
            --other->held;
            wait_for(*other, phase.end + job_.barrier, kWaitPhase);
        }
    }

    // Hold a warp whose next step waits for a phase until that ends.
    void await_phase(Warp& warp) {
        if (step(warp).kind != kPhaseWait || job_.event_phases[warp.event] < 0) return;
        Phase& phase = phases_[warp.slot][job_.event_phases[warp.event]];
        if (!phase.missing) return wait_for(warp, phase.end + job_.barrier, kWaitPhase);
        ++warp.held;
        phase.waiting.push_back(&warp);
    }

    static void wait_for(Warp& warp, double when, Reason reason) {
        if (when > warp.ready) warp.ready = when, warp.reason = reason;
    }

    // What TMA has moved by then goes first.
    void serve(double from, double wavefronts) {
        while (!bulk_.empty() && bulk_.front().when <= from) {
            shared_ = std::max(shared_, bulk_.front().when) + bulk_.front().wavefronts;
            job_.busy[kShared] += bulk_.front().wavefronts;
            bulk_.pop_front();
        }
        shared_ = std::max(shared_, from) + wavefronts;
        job_.busy[kShared] += wavefronts;
    }

    static void set(Warp& warp, int scoreboard, double when, Reason kind) {
        if (scoreboard >= kScoreboards || warp.scoreboard[scoreboard] > when) return;
        warp.scoreboard[scoreboard] = when;
        warp.set_by[scoreboard] = kind;
    }

    // When bytes arrive. This SM has its part of the bandwidth; what it did not use of
    // it for a while it may use later, since others are then computing.
    double transfer(double now, const Step& s) {
        cache_ = std::max(cache_, now) + s.bytes / job_.cache_bytes;
        dram_ = std::max(dram_, now - job_.saved) + s.dram / job_.dram_bytes;
        job_.busy[kMemory] += std::max(s.dram / job_.dram_bytes, s.bytes / job_.cache_bytes);
        const double part = s.bytes > 0 ? s.dram / s.bytes : 0;
        const double latency = job_.cache_latency + part * (job_.dram_latency - job_.cache_latency);
        return std::max(std::max(now, cache_), dram_) + latency;
    }

    // When the warp's next instruction can issue, as far as the warp itself decides it.
    void prepare(Warp& warp, const Step& before, double now) {
        warp.ready = now + std::max(1, before.stall);
        warp.reason = kFixed;
        const Step& s = step(warp);
        for (int b = 0; b < kScoreboards; ++b)
            if (s.waits >> b & 1) wait_for(warp, warp.scoreboard[b], warp.set_by[b]);
        const auto groups = [&](const std::vector<double>& ends, Reason reason) {
            const int64_t waited = int64_t(ends.size()) - s.argument - 1;
            if (waited >= 0) wait_for(warp, ends[waited], reason);
        };
        await_phase(warp);
        if (s.kind == kCopyWait) groups(warp.copies, kWaitMemory);
        // fence.proxy.async becomes a MEMBAR too, which waits until the warp's stores are acknowledged.
        if (s.kind == kFence) wait_for(warp, warp.stored, kWaitMemory);
        if (s.kind == kWgmmaWait) groups(warp.products, kWaitTensor);
    }

    void meet(Warp& warp, const Step& s, double now) {
        std::vector<Warp*>& meeting = meetings_[s.argument][warp.slot];
        meeting.push_back(&warp);
        ++warp.held;
        if (int64_t(meeting.size()) < (s.warps ? s.warps : job_.warps)) return;
        for (Warp* other : meeting) {
            --other->held;
            wait_for(*other, now + job_.barrier, kWaitBarrier);
        }
        meeting.clear();
    }

    void end(Warp& warp, double now) {
        const int64_t program = warp.program;
        warp.program = -1;
        end_ = std::max(end_, now);
        if (--left_[warp.slot]) return;
        job_.finished[program] = now;
        --running_;
        start(warp.slot, now + job_.start);
    }

    void account(Warp& warp, const Step& s, int number, double now) {
        const double begin = warp.last + 1;
        const double ready = std::min(std::max(warp.ready, begin), now);
        const double unit = std::min(std::max(available(warp.scheduler, s), ready), now);
        job_.waited[warp.reason] += ready - begin;
        job_.waited[kBusy] += unit - ready;
        job_.waited[kNotSelected] += now - unit;
        job_.waited_at[number] += unit - begin;
    }

    Replay& job_;
    std::vector<Warp> warps_;
    std::vector<Warp*> of_[kSchedulers];
    double free_[kSchedulers][kPipes] = {};
    double shared_ = 0, cache_ = 0, dram_ = 0, end_ = 0;
    std::vector<std::vector<Warp*>> meetings_[kBarriers];  // by number and slot
    struct Piece {  // of what TMA moves to or from shared memory
        double when, wavefronts;
    };
    std::deque<Piece> bulk_;
    std::vector<std::vector<Phase>> phases_;  // of the program in each slot
    std::vector<int> left_;
    int64_t started_ = 0, running_ = 0;
};

}  // namespace

extern "C" int replay(Replay* job) {
    return SM(*job).run() ? 0 : 1;
}
