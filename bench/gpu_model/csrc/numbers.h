// Number formats of a GPU on the CPU: conversions, flushed subnormals, the NaN that instructions return.
#pragma once
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

inline float as_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 as_bits(float x) { return std::bit_cast<u32>(x); }

inline float canonical(float x) { return x != x ? as_float(0x7fffffff) : x; }
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float bfloat16_to_float(u16 x) { return as_float(u32(x) << 16); }
// Round to nearest, ties to even.
inline u16 float_to_bfloat16(float x) {
  u32 bits = as_bits(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float half_to_float(u16 x) {
  u32 magnitude = u32(x & 0x7fff) << 13, sign = u32(x & 0x8000) << 16;
  float scaled = as_float(magnitude) * 0x1p112f;  // exact, subnormals included
  u32 bits = (x & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : as_bits(scaled);
  return as_float(bits | sign);
}
inline u16 float_to_half(float x) {
  u32 bits = as_bits(x), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65,520 and more round to infinity
  // Beside 1/2 the last bit of a float is that of a subnormal half.
  if (bits < 0x38800000) return sign | (as_bits(as_float(bits) + 0.5f) - 0x3f000000);
  return sign | (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
}
// What tensor cores read of a float32 operand.
inline float truncated_to_tf32(u32 bits) { return as_float(bits & 0xffffe000); }

// As PTX has them: a NaN loses against a number, and -0 is less than +0.
inline float maximum(float a, float b) {
  if (a != a || b != b) return a != a && b != b ? as_float(0x7fffffff) : a != a ? b : a;
  if (a == 0 && b == 0) return as_float(as_bits(a) & as_bits(b));
  return a > b ? a : b;
}
