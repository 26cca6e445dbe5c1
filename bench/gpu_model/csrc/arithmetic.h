// Instructions whose lanes are independent of each other.
#pragma once
#include <algorithm>
#include <climits>

#include "operation.h"

template <class U> void add_integers(std::vector<Operation>& all) {
  using S = std::make_signed_t<U>;
  constexpr u32 bits = 8 * sizeof(U);
  const std::string b = "." + std::to_string(bits);
  const std::string s = ".s" + std::to_string(bits), u = ".u" + std::to_string(bits);
  auto binary = [&](auto name, auto f) { all.push_back(each<U, U, U>(name, f)); };
  auto is_signed = [&](auto name, auto f) { all.push_back(each<S, S, S>(name + s, f)); };
  auto is_unsigned = [&](auto name, auto f) { all.push_back(each<U, U, U>(name + u, f)); };
  auto compare = [&](std::string name, auto f) {
    all.push_back(each<bool, S, S>("setp." + name + s, f));
    all.push_back(each<bool, U, U>("setp." + name + u, f));
  };
  using std::string;

  all.push_back(each<U, U>("mov" + b, [](U a) { return a; }));
  all.push_back(each<U, U>("not" + b, [](U a) { return U(~a); }));
  all.push_back(each<U, U>("neg" + b, [](U a) { return U(0 - a); }));
  all.push_back(each<S, S>("abs" + s, [](S a) { return S(a < 0 ? U(0) - U(a) : U(a)); }));
  all.push_back(each<U, U, U, bool>("selp" + b, [](U a, U b, bool p) { return p ? a : b; }));
  binary("add" + b, [](U a, U b) { return U(a + b); });
  binary("sub" + b, [](U a, U b) { return U(a - b); });
  binary("mul.lo" + b, [](U a, U b) { return U(u64(a) * b); });
  all.push_back(each<U, U, U, U>("mad.lo" + b, [](U a, U b, U c) { return U(u64(a) * b + c); }));
  binary("and" + b, [](U a, U b) { return U(a & b); });
  binary("or" + b, [](U a, U b) { return U(a | b); });
  binary("xor" + b, [](U a, U b) { return U(a ^ b); });
  is_signed(string("min"), [](S a, S b) { return a < b ? a : b; });
  is_signed(string("max"), [](S a, S b) { return a > b ? a : b; });
  is_unsigned(string("min"), [](U a, U b) { return a < b ? a : b; });
  is_unsigned(string("max"), [](U a, U b) { return a > b ? a : b; });
  is_unsigned(string("div"), [](U a, U b) { return b ? U(a / b) : U(-1); });
  is_unsigned(string("rem"), [](U a, U b) { return b ? U(a % b) : a; });
  // The least number divided by -1 is itself.
  is_signed(string("div"), [](S a, S b) { return b == 0 ? S(-1) : b == -1 ? S(U(0) - U(a)) : S(a / b); });
  is_signed(string("rem"), [](S a, S b) { return b == 0 ? a : b == -1 ? S(0) : S(a % b); });
  all.push_back(each<U, U, u32>("shl" + b, [](U a, u32 n) { return n < bits ? U(a << n) : U(0); }));
  all.push_back(each<U, U, u32>("shr" + u, [](U a, u32 n) { return n < bits ? U(a >> n) : U(0); }));
  all.push_back(each<S, S, u32>("shr" + s, [](S a, u32 n) { return S(a >> std::min(n, bits - 1)); }));
  compare("eq", [](auto a, auto b) { return a == b; });
  compare("ne", [](auto a, auto b) { return a != b; });
  compare("lt", [](auto a, auto b) { return a < b; });
  compare("le", [](auto a, auto b) { return a <= b; });
  compare("gt", [](auto a, auto b) { return a > b; });
  compare("ge", [](auto a, auto b) { return a >= b; });
}

template <class N, class W> void add_wide_products(std::vector<Operation>& all, std::string type) {
  all.push_back(each<W, N, N>("mul.wide." + type, [](N a, N b) { return W(W(a) * W(b)); }));
  all.push_back(each<W, N, N, W>("mad.wide." + type, [](N a, N b, W c) { return W(W(a) * W(b) + c); }));
  all.push_back(each<N, N, N>("mul.hi." + type, [](N a, N b) { return N(W(a) * W(b) >> 8 * sizeof(N)); }));
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

template <class U> U bit_field(U a, u32 start, u32 length) {
  constexpr u32 bits = 8 * sizeof(U);
  start &= 255, length &= 255;
  if (start >= bits || !length) return 0;
  const U field = a >> start;
  return length < bits ? field & ((U(1) << length) - 1) : field;
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

inline void any_of_three(Machine&, Warp& w, const Instruction& i, u32 mask) {
  u32* out = w.lanes<u32>(0);
  const u32 *pa = w.lanes<u32>(1), *pb = w.lanes<u32>(2), *pc = w.lanes<u32>(3);
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    const u32 a = pa[l], b = pb[l], c = pc[l];
    u32 found = 0;
    for (int k = 0; k < 8; k++)
      if (i.variant >> k & 1) found |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    out[l] = found;
  }
}

// mov of {several narrow registers} into a wide one, and back; what is named _ is dropped.
template <class W, class N> void pack(Machine&, Warp& w, const Instruction&, u32 mask) {
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    W wide = 0;
    for (size_t k = 0; k < sizeof(W) / sizeof(N); k++)
      wide |= W(w.lanes<N>(1 + k)[l]) << 8 * sizeof(N) * k;
    w.lanes<W>(0)[l] = wide;
  }
}
template <class W, class N> void unpack(Machine&, Warp& w, const Instruction&, u32 mask) {
  constexpr int parts = sizeof(W) / sizeof(N);
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    const W wide = w.lanes<W>(parts)[l];
    for (int k = 0; k < parts; k++)
      if (w.slots[k] >= 0) w.lanes<N>(k)[l] = N(wide >> 8 * sizeof(N) * k);
  }
}

inline u32 in_pair(u16 low, u16 high) { return low | u32(high) << 16; }

// Each bfloat16 of a pair, rounded once from a double that is exact but for rare sums.
template <class F> u32 of_pairs(F f, u32 a, u32 b, u32 c) {
  auto one = [&](int shift) {
    return float_to_bfloat16(float(f(double(bfloat16_to_float(a >> shift)),
                                     double(bfloat16_to_float(b >> shift)),
                                     double(bfloat16_to_float(c >> shift)))));
  };
  return in_pair(one(0), one(16));
}

// Each float of a pair.
template <bool FTZ, class F, class... Pair> u64 of_float_pairs(F f, Pair... pairs) {
  auto number = [](float x) { return FTZ ? flushed(x) : x; };
  auto one = [&](int shift) {
    const float x = f(number(as_float(u32(pairs >> shift)))...);
    return u64(as_bits(canonical(number(x)))) << shift;
  };
  return one(0) | one(32);
}

inline void add_floats(std::vector<Operation>& all) {
  auto both = [&](std::string name, auto f) {  // with subnormals, and with zeros in their place
    auto flush = [](auto... x) { return canonical(flushed(decltype(f){}(flushed(x)...))); };
    auto plain = [](auto... x) { return canonical(decltype(f){}(x...)); };
    if constexpr (std::is_invocable_v<decltype(f), float, float, float>) {
      all.push_back(each<float, float, float, float>(name + ".f32", plain));
      all.push_back(each<float, float, float, float>(name + ".ftz.f32", flush));
    } else if constexpr (std::is_invocable_v<decltype(f), float, float>) {
      all.push_back(each<float, float, float>(name + ".f32", plain));
      all.push_back(each<float, float, float>(name + ".ftz.f32", flush));
    } else {
      all.push_back(each<float, float>(name + ".f32", plain));
      all.push_back(each<float, float>(name + ".ftz.f32", flush));
    }
  };
  both("add", [](float a, float b) { return a + b; });
  both("sub", [](float a, float b) { return a - b; });
  both("mul", [](float a, float b) { return a * b; });
  both("fma", [](float a, float b, float c) { return std::fma(a, b, c); });
  both("div", [](float a, float b) { return a / b; });
  both("max", [](float a, float b) { return maximum(a, b); });
  both("min", [](float a, float b) { return minimum(a, b); });
  both("max.NaN", [](float a, float b) { return a != a || b != b ? NAN : maximum(a, b); });
  both("min.NaN", [](float a, float b) { return a != a || b != b ? NAN : minimum(a, b); });
  both("max3", [](float a, float b, float c) { return maximum(maximum(a, b), c); });
  both("min3", [](float a, float b, float c) { return minimum(minimum(a, b), c); });
  both("rcp", [](float a) { return 1 / a; });
  both("sqrt", [](float a) { return std::sqrt(a); });
  both("rsqrt", [](float a) { return 1 / std::sqrt(a); });
  both("ex2", [](float a) { return power_of_two(a); });
  both("lg2", [](float a) { return float(std::log2(double(a))); });
  all.push_back(each<u32, u32>("neg.f32", [](u32 a) { return a ^ 0x80000000; }));
  all.push_back(each<u32, u32>("abs.f32", [](u32 a) { return a & 0x7fffffff; }));

  auto compare = [&](std::string name, auto f) {
    all.push_back(each<bool, float, float>("setp." + name + ".f32", f));
    all.push_back(each<bool, float, float>("setp." + name + "u.f32", [](float a, float b) {
      return a != a || b != b || decltype(f){}(a, b);
    }));
  };
  compare("eq", [](float a, float b) { return a == b; });
  compare("ne", [](float a, float b) { return a < b || a > b; });
  compare("lt", [](float a, float b) { return a < b; });
  compare("le", [](float a, float b) { return a <= b; });
  compare("gt", [](float a, float b) { return a > b; });
  compare("ge", [](float a, float b) { return a >= b; });
  all.push_back(each<bool, float, float>("setp.num.f32", [](float a, float b) { return a == a && b == b; }));
  all.push_back(each<bool, float, float>("setp.nan.f32", [](float a, float b) { return a != a || b != b; }));

  auto pairs = [&]<class... U>(std::string name, auto f, U...) {
    all.push_back(each<u64, U...>(name + ".f32x2", [](U... x) {
      return of_float_pairs<false>(decltype(f){}, x...);
    }));
    all.push_back(each<u64, U...>(name + ".ftz.f32x2", [](U... x) {
      return of_float_pairs<true>(decltype(f){}, x...);
    }));
  };
  pairs("add", [](float a, float b) { return a + b; }, u64(), u64());
  pairs("sub", [](float a, float b) { return a - b; }, u64(), u64());
  pairs("mul", [](float a, float b) { return a * b; }, u64(), u64());
  pairs("fma", [](float a, float b, float c) { return std::fma(a, b, c); }, u64(), u64(), u64());
  all.push_back(each<u32, u32, u32, u32>("fma.bf16x2", [](u32 a, u32 b, u32 c) {
    return of_pairs([](double x, double y, double z) { return x * y + z; }, a, b, c);
  }));
  all.push_back(each<u32, u32, u32>("mul.bf16x2", [](u32 a, u32 b) {
    return of_pairs([](double x, double y, double) { return x * y; }, a, b, 0);
  }));
}

inline void add_conversions(std::vector<Operation>& all) {
#define CONVERT(name, R, S, expression) \
  all.push_back(each<R, S>("cvt." name, [](S a) { return R(expression); }))
  CONVERT("s64.s32", s64, s32, a);
  CONVERT("s64.s32.low", s64, u64, s32(a));
  CONVERT("u64.u32", u64, u32, a);
  CONVERT("u32.u64", u32, u64, a);
  CONVERT("s32.s64", u32, u64, a);
  CONVERT("u64.u16", u64, u16, a);
  CONVERT("s64.s16", s64, s16, a);
  CONVERT("u16.u64", u16, u64, a);
  CONVERT("s16.s64", u16, u64, a);
  CONVERT("u16.u32", u16, u32, a);
  CONVERT("s16.s32", u16, u32, a);
  CONVERT("u32.u16", u32, u16, a);
  CONVERT("s32.s16", s32, s16, a);
  CONVERT("u32.u8", u32, u32, a & 255);
  CONVERT("s32.s8", s32, u32, s8(a));
  CONVERT("u16.u8", u16, u16, a & 255);
  CONVERT("s16.s8", s16, u16, s8(a));
  CONVERT("f32.s32", float, s32, a);
  CONVERT("f32.u32", float, u32, a);
  CONVERT("rzi.s32.f32", s32, float,
          a != a ? 0 : a >= 0x1p31f ? INT_MAX : a <= -0x1p31f ? INT_MIN : s32(a));
  CONVERT("rzi.u32.f32", u32, float, a != a || a <= 0 ? 0 : a >= 0x1p32f ? UINT_MAX : u32(a));
  CONVERT("f32.bf16", float, u16, bfloat16_to_float(a));
  CONVERT("f32.f16", float, u16, half_to_float(a));
  CONVERT("bf16.f32", u16, float, float_to_bfloat16(a));
  CONVERT("f16.f32", u16, float, float_to_half(a));
#undef CONVERT
  all.push_back(each<u32, float, float>("cvt.bf16x2.f32", [](float high, float low) {
    return in_pair(float_to_bfloat16(low), float_to_bfloat16(high));
  }));
  all.push_back(each<u32, float, float>("cvt.f16x2.f32", [](float high, float low) {
    return in_pair(float_to_half(low), float_to_half(high));
  }));
}

inline void add_arithmetic(std::vector<Operation>& all) {
  add_integers<u16>(all);
  add_integers<u32>(all);
  add_integers<u64>(all);
  add_wide_products<s16, s32>(all, "s16");
  add_wide_products<u16, u32>(all, "u16");
  add_wide_products<s32, s64>(all, "s32");
  add_wide_products<u32, u64>(all, "u32");
  all.push_back(each<u64, u64, u64>("mul.hi.u64", [](u64 a, u64 b) {
    return u64(static_cast<unsigned __int128>(a) * b >> 64);
  }));
  all.push_back(each<u32, u32>("popc.32", [](u32 a) { return u32(std::popcount(a)); }));
  all.push_back(each<u32, u32>("clz.32", [](u32 a) { return u32(std::countl_zero(a)); }));
  all.push_back(each<u32, u32, u32, u32>("prmt.32", [](u32 a, u32 b, u32 c) { return byte_permutation(a, b, c); }));
  all.push_back(each<u32, u32, u32, u32>("bfe.u32", [](u32 a, u32 b, u32 c) { return bit_field(a, b, c); }));
  all.push_back(each<u64, u64, u32, u32>("bfe.u64", [](u64 a, u32 b, u32 c) { return bit_field(a, b, c); }));
  all.push_back(each<u32, u32, u32, u32>("bfe.s32", [](u32 a, u32 b, u32 c) { return signed_bit_field(a, b, c); }));
  all.push_back(each<u32, u32, u32, u32>("shf.l.wrap.32", [](u32 low, u32 high, u32 n) {
    return u32((u64(high) << 32 | low) << (n & 31) >> 32);
  }));
  all.push_back(each<u32, u32, u32, u32>("shf.r.wrap.32", [](u32 low, u32 high, u32 n) {
    return u32((u64(high) << 32 | low) >> (n & 31));
  }));
  all.push_back({"lop3.32", any_of_three, {32, 32, 32, 32}});
  all.push_back({"pack.32.16", pack<u32, u16>, {32, 16, 16}});
  all.push_back({"pack.64.32", pack<u64, u32>, {64, 32, 32}});
  all.push_back({"pack.64.16", pack<u64, u16>, {64, 16, 16, 16, 16}});
  all.push_back({"unpack.32.16", unpack<u32, u16>, {16, 16, 32}});
  all.push_back({"unpack.64.32", unpack<u64, u32>, {32, 32, 64}});
  all.push_back({"unpack.64.16", unpack<u64, u16>, {16, 16, 16, 16, 64}});
  all.push_back(each<bool, bool>("mov.pred", [](bool a) { return a; }));
  all.push_back(each<bool, bool>("not.pred", [](bool a) { return !a; }));
  all.push_back(each<bool, bool, bool>("and.pred", [](bool a, bool b) { return a && b; }));
  all.push_back(each<bool, bool, bool>("or.pred", [](bool a, bool b) { return a || b; }));
  all.push_back(each<bool, bool, bool>("xor.pred", [](bool a, bool b) { return a != b; }));
  add_floats(all);
  add_conversions(all);
}
