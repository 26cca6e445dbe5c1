// What an instruction does, by name, and the helpers that most of them are made of.
#pragma once
#include <tuple>
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

template <class R, class F, class Sources, size_t... N>
void run_lanes(F f, const Warp& w, u32 mask, const Sources& from, std::index_sequence<N...>) {
  if constexpr (std::is_same_v<R, bool>) {
    u32 bits = 0;
    for (int l = 0; l < LANES; l++) bits |= u32(bool(f(std::get<N>(from)[l]...))) << l;
    w.predicate(0) = (w.predicate(0) & ~mask) | (bits & mask);
  } else if (R* out = w.lanes<R>(0); mask == ALL) {
#pragma GCC ivdep
    for (int l = 0; l < LANES; l++) out[l] = f(std::get<N>(from)[l]...);
  } else {
    for (int l = 0; l < LANES; l++)
      if (mask >> l & 1) out[l] = f(std::get<N>(from)[l]...);
  }
}

template <class R, class F, class... S, size_t... N>
void run_sources(F f, const Warp& w, u32 mask, std::tuple<S...>*, std::index_sequence<N...> indices) {
  run_lanes<R>(f, w, mask, std::tuple<Lanes<S>...>(Lanes<S>(w, int(N) + 1)...), indices);
}

template <class T> constexpr s32 bits_of = std::is_same_v<T, bool> ? 1 : 8 * sizeof(T);

// An operation whose lanes are independent: R f(S...), in each lane; predicates are bool.
template <class R, class... S, class F> Operation each(std::string name, F) {
  Handler run = [](Machine&, Warp& w, const Instruction&, u32 mask) {
    run_sources<R>(F{}, w, mask, static_cast<std::tuple<S...>*>(nullptr),
                   std::index_sequence_for<S...>{});
  };
  return {std::move(name), run, {bits_of<R>, bits_of<S>...}};
}

inline void need_all_lanes(Machine& m, const Warp& w) {
  if (w.active != ALL) m.stop(DIVERGED, w, 0, w.active);
}
