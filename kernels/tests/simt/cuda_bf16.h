// bfloat16 for the emulator: the few conversions that the kernels use.
#pragma once
#include "simt.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t wide = uint32_t(value.bits) << 16;
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}
