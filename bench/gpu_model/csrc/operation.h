// What an instruction does, by name, and the helpers that most of them are made of.
#pragma once
#include <type_traits>
#include <utility>

#include "memory.h"

using Handler = void (*)(Machine&, Warp&, const Instruction&, u32 mask);

struct Operation {
  std::string name;
  Handler run;                // null: the interpreter's loop does it
  std::vector<s32> widths{};  // bits of its operands, the result first, 1 for a predicate; where
                              // empty, the decoder handles them
};

template <class T> struct Lanes {  // of a source
  const T* data;
  Lanes(const Warp& w, int operand) : data(w.lanes<T>(operand)) {}
  T operator[](int lane) const { return data[lane]; }
};
template <> struct Lanes<bool> {
  u32 bits;
  Lanes(const Warp& w, int operand) : bits(w.predicate(operand)) {}
  bool operator[](int lane) const { return bits >> lane & 1; }
};

template <class R, class F, class... From>
void run_lanes(const Warp& w, u32 mask, F f, const From&... from) {
  if constexpr (std::is_same_v<R, bool>) {
    u32 bits = 0;
    for (int l = 0; l < LANES; l++) bits |= u32(bool(f(from[l]...))) << l;
    w.predicate(0) = (w.predicate(0) & ~mask) | (bits & mask);
  } else if (R* out = w.lanes<R>(0); mask == ALL) {
#pragma GCC ivdep
    for (int l = 0; l < LANES; l++) out[l] = f(from[l]...);
  } else {
    for (int l = 0; l < LANES; l++)
      if (mask >> l & 1) out[l] = f(from[l]...);
  }
}

template <class T> constexpr s32 bits_of = std::is_same_v<T, bool> ? 1 : 8 * sizeof(T);

// The operations, by their numbers.
struct Operations : std::vector<Operation> {
  // An operation whose lanes are independent: f in each of them; predicates are bool.
  template <class F> void each(std::string name, F) { each<F>(std::move(name), &F::operator()); }

 private:
  template <class F, class R, class... S> void each(std::string name, R (F::*)(S...) const) {
    Handler run = [](Machine&, Warp& w, const Instruction&, u32 mask) {
      [&]<size_t... N>(std::index_sequence<N...>) {
        run_lanes<R>(w, mask, F{}, Lanes<S>(w, int(N) + 1)...);
      }(std::index_sequence_for<S...>{});
    };
    push_back({std::move(name), run, {bits_of<R>, bits_of<S>...}});
  }
};

inline void need_all_lanes(Machine& m, const Warp& w) {
  if (w.active != ALL) m.stop(DIVERGED, w, 0, w.active);
}
