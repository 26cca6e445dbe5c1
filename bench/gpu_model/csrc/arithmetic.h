// Instructions whose lanes are independent of each other.
#pragma once
#include <algorithm>

#include "operation.h"

template <class U> void add_integers(Operations& all) {
  using S = std::make_signed_t<U>;
  constexpr u32 bits = 8 * sizeof(U);
  const std::string b = "." + std::to_string(bits);
  const std::string s = ".s" + std::to_string(bits), u = ".u" + std::to_string(bits);
  auto compare = [&](std::string name, auto f) {
    all.each("setp." + name + s, [](S x, S y) { return decltype(f){}(x, y); });
    all.each("setp." + name + u, [](U x, U y) { return decltype(f){}(x, y); });
  };

  all.each("mov" + b, [](U a) { return a; });
  all.each("not" + b, [](U a) { return U(~a); });
  all.each("neg" + b, [](U a) { return U(0 - a); });
  all.each("selp" + b, [](U x, U y, bool p) { return p ? x : y; });
  all.each("add" + b, [](U x, U y) { return U(x + y); });
  all.each("sub" + b, [](U x, U y) { return U(x - y); });
  all.each("mul.lo" + b, [](U x, U y) { return U(u64(x) * y); });
  all.each("mad.lo" + b, [](U x, U y, U c) { return U(u64(x) * y + c); });
  all.each("and" + b, [](U x, U y) { return U(x & y); });
  all.each("or" + b, [](U x, U y) { return U(x | y); });
  all.each("xor" + b, [](U x, U y) { return U(x ^ y); });
  all.each("min" + s, [](S x, S y) { return std::min(x, y); });
  all.each("max" + s, [](S x, S y) { return std::max(x, y); });
  all.each("min.relu" + s, [](S x, S y) { return std::max(std::min(x, y), S(0)); });
  all.each("max.relu" + s, [](S x, S y) { return std::max(std::max(x, y), S(0)); });
  all.each("div" + u, [](U x, U y) { return y ? U(x / y) : U(-1); });
  all.each("rem" + u, [](U x, U y) { return y ? U(x % y) : x; });
  // The least number divided by -1 is itself.
  all.each("div" + s, [](S x, S y) { return y == 0 ? S(-1) : y == -1 ? S(U(0) - U(x)) : S(x / y); });
  all.each("rem" + s, [](S x, S y) { return y == 0 ? x : y == -1 ? S(0) : S(x % y); });
  all.each("shl" + b, [](U a, u32 n) { return n < bits ? U(a << n) : U(0); });
  all.each("shr" + u, [](U a, u32 n) { return n < bits ? U(a >> n) : U(0); });
  all.each("shr" + s, [](S a, u32 n) { return S(a >> std::min(n, bits - 1)); });
  compare("eq", [](auto x, auto y) { return x == y; });
  compare("ne", [](auto x, auto y) { return x != y; });
  compare("lt", [](auto x, auto y) { return x < y; });
  compare("le", [](auto x, auto y) { return x <= y; });
  compare("gt", [](auto x, auto y) { return x > y; });
  compare("ge", [](auto x, auto y) { return x >= y; });
}

template <class N, class W> void add_wide_products(Operations& all, std::string type) {
  all.each("mul.wide." + type, [](N a, N b) { return W(W(a) * W(b)); });
  all.each("mad.wide." + type, [](N a, N b, W c) { return W(W(a) * W(b) + c); });
  all.each("mul.hi." + type, [](N a, N b) { return N(W(a) * W(b) >> 8 * sizeof(N)); });
}

inline u32 byte_permutation(u32 a, u32 b, u32 selector) {
  const u64 bytes = a | u64(b) << 32;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 choice = selector >> 4 * i & 15;
    u8 byte = bytes >> 8 * (choice & 7);
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign alone
    out |= u32(byte) << 8 * i;
  }
  return out;
}

inline u32 bit_field(u32 a, u32 start, u32 length) {
  start &= 255, length &= 255;
  return start < 32 ? u32(a >> start & ((u64(1) << std::min(length, 32u)) - 1)) : 0;
}

inline u32 signed_bit_field(u32 a, u32 start, u32 length) {
  start &= 255, length &= 255;
  if (!length) return 0;
  const u32 sign = a >> std::min(start + length - 1, 31u) & 1;
  u32 out = 0;
  for (u32 i = 0; i < 32; i++)
    out |= (i < length && start + i < 32 ? a >> (start + i) & 1 : sign) << i;
  return out;
}

// mov of {several narrow registers} into a wide one, and back; what is named _ is dropped.
template <class W, class N> void pack(Machine&, Warp& w, const Instruction&, u32 mask) {
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1)
      w.lanes<W>(0)[l] = W(w.lanes<N>(1)[l]) | W(w.lanes<N>(2)[l]) << 8 * sizeof(N);
}
template <class W, class N> void unpack(Machine&, Warp& w, const Instruction&, u32 mask) {
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    const W wide = w.lanes<W>(2)[l];
    for (int k = 0; k < 2; k++)
      if (w.slots[k] >= 0) w.lanes<N>(k)[l] = N(wide >> 8 * sizeof(N) * k);
  }
}

template <class F, class... X> void with_flushing(Operations& all, std::string name, F, float (F::*)(X...) const) {
  all.each(name + ".f32", [](X... x) { return canonical(F{}(x...)); });
  all.each(name + ".ftz.f32", [](X... x) { return canonical(flushed(F{}(flushed(x)...))); });
}

// Of each float of a pair.
template <class F, class... X> void of_pairs(Operations& all, std::string name, F, float (F::*)(X...) const) {
  all.each(name + ".f32x2", [](std::conditional_t<true, u64, X>... pairs) {
    auto one = [&](int shift) {
      return u64(as_bits(canonical(F{}(as_float(u32(pairs >> shift))...)))) << shift;
    };
    return one(0) | one(32);
  });
}

// Of each half of a register. A float holds a product of two halves exactly, and rounding a sum of two to
// it first changes nothing.
template <auto TO_FLOAT, auto FROM_FLOAT> void add_pairs_of_halves(Operations& all, std::string type) {
  auto pairs = [&](std::string name, auto f) {
    all.each(name + "." + type, [](u32 a, u32 b) {
      auto one = [&](int shift) {
        return u32(FROM_FLOAT(decltype(f){}(TO_FLOAT(u16(a >> shift)), TO_FLOAT(u16(b >> shift))))) << shift;
      };
      return one(0) | one(16);
    });
  };
  pairs("add", [](float a, float b) { return a + b; });
  pairs("sub", [](float a, float b) { return a - b; });
  pairs("mul", [](float a, float b) { return a * b; });
}

inline void add_floats(Operations& all) {
  auto floats = [&](auto name, auto f) {  // with subnormals, and with zeros in their place
    with_flushing(all, name, f, &decltype(f)::operator());
  };
  auto pairs_too = [&](auto name, auto f) {
    floats(name, f);
    of_pairs(all, name, f, &decltype(f)::operator());
  };
  pairs_too("add", [](float a, float b) { return a + b; });
  pairs_too("sub", [](float a, float b) { return a - b; });
  pairs_too("mul", [](float a, float b) { return a * b; });
  pairs_too("fma", [](float a, float b, float c) { return std::fma(a, b, c); });
  floats("div", [](float a, float b) { return a / b; });
  floats("max", [](float a, float b) { return maximum(a, b); });
  floats("max3", [](float a, float b, float c) { return maximum(maximum(a, b), c); });
  floats("sqrt", [](float a) { return std::sqrt(a); });
  floats("ex2", [](float a) { return std::exp2(a); });
  add_pairs_of_halves<bfloat16_to_float, float_to_bfloat16>(all, "bf16x2");
  add_pairs_of_halves<half_to_float, float_to_half>(all, "f16x2");
  // Of halves and a float, as sm_120 has them.
  all.each("add.f32.bf16", [](u16 a, float b) { return canonical(bfloat16_to_float(a) + b); });
  all.each("add.f32.f16", [](u16 a, float b) { return canonical(half_to_float(a) + b); });
  all.each("fma.f32.bf16", [](u16 a, u16 b, float c) {
    return canonical(std::fma(bfloat16_to_float(a), bfloat16_to_float(b), c));
  });
  all.each("fma.f32.f16", [](u16 a, u16 b, float c) {
    return canonical(std::fma(half_to_float(a), half_to_float(b), c));
  });
  all.each("neg.f32", [](u32 a) { return a ^ 0x80000000; });
  all.each("abs.f32", [](u32 a) { return a & 0x7fffffff; });

  auto compare = [&](std::string name, auto f) {
    all.each("setp." + name + ".f32", f);
    all.each("setp." + name + "u.f32", [](float a, float b) {
      return a != a || b != b || decltype(f){}(a, b);
    });
  };
  compare("eq", [](float a, float b) { return a == b; });
  compare("ne", [](float a, float b) { return a < b || a > b; });
  compare("lt", [](float a, float b) { return a < b; });
  compare("le", [](float a, float b) { return a <= b; });
  compare("gt", [](float a, float b) { return a > b; });
  compare("ge", [](float a, float b) { return a >= b; });
  all.each("setp.num.f32", [](float a, float b) { return a == a && b == b; });
  all.each("setp.nan.f32", [](float a, float b) { return a != a || b != b; });
}

inline void add_conversions(Operations& all) {
  all.each("cvt.s64.s32", [](s32 a) { return s64(a); });
  all.each("cvt.s64.s32.low", [](u64 a) { return s64(s32(a)); });
  all.each("cvt.u64.u32", [](u32 a) { return u64(a); });
  all.each("cvt.u32.u64", [](u64 a) { return u32(a); });
  all.each("cvt.u64.u16", [](u16 a) { return u64(a); });
  all.each("cvt.u16.u64", [](u64 a) { return u16(a); });
  all.each("cvt.u16.u32", [](u32 a) { return u16(a); });
  all.each("cvt.u32.u16", [](u16 a) { return u32(a); });
  all.each("cvt.f32.s32", [](s32 a) { return float(a); });
  all.each("cvt.f32.u32", [](u32 a) { return float(a); });
  all.each("cvt.f32.bf16", [](u16 a) { return bfloat16_to_float(a); });
  all.each("cvt.f32.f16", [](u16 a) { return half_to_float(a); });
  all.each("cvt.bf16.f32", [](float a) { return float_to_bfloat16(a); });
  all.each("cvt.f16.f32", [](float a) { return float_to_half(a); });
  all.each("cvt.bf16x2.f32", [](float high, float low) {
    return float_to_bfloat16(low) | u32(float_to_bfloat16(high)) << 16;
  });
  all.each("cvt.f16x2.f32", [](float high, float low) {
    return float_to_half(low) | u32(float_to_half(high)) << 16;
  });
}

inline void add_arithmetic(Operations& all) {
  add_integers<u16>(all);
  add_integers<u32>(all);
  add_integers<u64>(all);
  add_wide_products<u16, u32>(all, "u16");
  add_wide_products<s32, s64>(all, "s32");
  add_wide_products<u32, u64>(all, "u32");
  all.each("prmt.32", [](u32 a, u32 b, u32 c) { return byte_permutation(a, b, c); });
  all.each("bfe.u32", [](u32 a, u32 b, u32 c) { return bit_field(a, b, c); });
  all.each("bfe.s32", [](u32 a, u32 b, u32 c) { return signed_bit_field(a, b, c); });
  all.push_back({"pack.32.16", pack<u32, u16>, {32, 16, 16}});
  all.push_back({"pack.64.32", pack<u64, u32>, {64, 32, 32}});
  all.push_back({"unpack.32.16", unpack<u32, u16>, {16, 16, 32}});
  all.push_back({"unpack.64.32", unpack<u64, u32>, {32, 32, 64}});
  all.each("mov.pred", [](bool a) { return a; });
  all.each("not.pred", [](bool a) { return !a; });
  all.each("and.pred", [](bool a, bool b) { return a && b; });
  all.each("or.pred", [](bool a, bool b) { return a || b; });
  all.each("xor.pred", [](bool a, bool b) { return a != b; });
  add_floats(all);
  add_conversions(all);
}
