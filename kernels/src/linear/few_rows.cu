// y = x W' + b for few rows: decoding and verification, where the time goes into reading the weights once.
//
// Every output is one fixed sum: eight chains of fused multiply-adds over interleaved pieces of 16 bytes of weights, added
// in order. It does not depend on the number of rows, so a token verified in a block gets the bits of decoding it alone.
#include "warp.cuh"

constexpr int CHAINS = 8;          // lanes that share an output
constexpr int WARPS = 4;           // per block
constexpr int TILE = 256;          // inputs of x in shared memory at a time

template <class W>
struct Piece;  // 16 bytes of weights

template <>
struct Piece<float> {
    static constexpr int SIZE = 4;
    float values[SIZE];
    __device__ __forceinline__ void read(const float* from) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    }
    static __device__ __forceinline__ float widen(float w) { return w; }
};

template <>
struct Piece<__nv_bfloat16> {
    static constexpr int SIZE = 8;
    float values[SIZE];
    __device__ __forceinline__ void read(const __nv_bfloat16* from) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ float widen(__nv_bfloat16 w) { return __bfloat162float(w); }
};

// Where input k of a tile lies in shared memory: the first halves of the eight pieces side by side, then the second
// halves, so that eight lanes read 128 consecutive bytes.
template <int SIZE>
__device__ __forceinline__ int place(int k) {
    return SIZE == 4 ? k : (k & ~63) | (k >> 2 & 1) << 5 | (k >> 3 & 7) << 2 | (k & 3);
}

template <int ROWS, int OUTPUTS, class W>
__device__ __forceinline__ void linear(const float* __restrict__ x, int x_stride, const W* __restrict__ weight, const float* __restrict__ bias,
                                       float* __restrict__ y, int rows, int inputs, int outputs) {
    constexpr int SIZE = Piece<W>::SIZE, STEP = CHAINS * SIZE;
    __shared__ float4 tile[ROWS][TILE / 4];
    const int chain = threadIdx.x % CHAINS;
    // Groups of eight lanes; a group owns OUTPUTS outputs, a constant number of outputs apart.
    constexpr int GROUPS = WARPS * 32 / CHAINS;
    const int first = blockIdx.x * GROUPS * OUTPUTS + threadIdx.x / CHAINS;
    const int row0 = blockIdx.y * ROWS;
    const bool vectors = in_vectors(weight, inputs, inputs);
    float sums[ROWS][OUTPUTS] = {};
    for (int start = 0; start < inputs; start += TILE) {
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * TILE; i += WARPS * 32) {
            const int row = row0 + i / TILE, k = start + i % TILE;
            const float value = row < rows && k < inputs ? x[(size_t)row * x_stride + k] : 0.0f;
            reinterpret_cast<float*>(tile[i / TILE])[place<SIZE>(i % TILE)] = value;
        }
        __syncthreads();
        const int length = min(TILE, inputs - start);
#pragma unroll 2
        for (int k = 0; k < length; k += STEP) {
            const int at = k + chain * SIZE;
            Piece<W> w[OUTPUTS];
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                const int output = first + o * GROUPS;
                const W* from = weight + (size_t)output * inputs + start + at;
                if (output < outputs && vectors && at + SIZE <= length) {
                    w[o].read(from);
                } else {
#pragma unroll
                    for (int i = 0; i < SIZE; ++i) w[o].values[i] = output < outputs && at + i < length ? Piece<W>::widen(from[i]) : 0.0f;
                }
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
#pragma unroll
                for (int half = 0; half < SIZE / 4; ++half) {
                    const float4 v = tile[row][place<SIZE>(at + 4 * half) / 4];
#pragma unroll
                    for (int o = 0; o < OUTPUTS; ++o) {
                        float sum = sums[row][o];
                        sum = fmaf(v.x, w[o].values[4 * half], sum);
                        sum = fmaf(v.y, w[o].values[4 * half + 1], sum);
                        sum = fmaf(v.z, w[o].values[4 * half + 2], sum);
                        sums[row][o] = fmaf(v.w, w[o].values[4 * half + 3], sum);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            float total = __shfl_sync(ALL, sums[row][o], 0, CHAINS);
#pragma unroll
            for (int other = 1; other < CHAINS; ++other) total = __fadd_rn(total, __shfl_sync(ALL, sums[row][o], other, CHAINS));
            const int output = first + o * GROUPS;
            if (chain == row % CHAINS && row0 + row < rows && output < outputs) {
                y[(size_t)(row0 + row) * outputs + output] = bias ? __fadd_rn(total, bias[output]) : total;
            }
        }
    }
}

// `bias` may be null.
#define LINEAR(name, W, ROWS, OUTPUTS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)                                                                       \
        name(const float* __restrict__ x, int x_stride, const W* __restrict__ weight, const float* __restrict__ bias,              \
             float* __restrict__ y, int rows, int inputs, int outputs) {                                                           \
        linear<ROWS, OUTPUTS, W>(x, x_stride, weight, bias, y, rows, inputs, outputs);                                             \
    }

LINEAR(linear_f32_1, float, 1, 1)
LINEAR(linear_f32_2, float, 2, 1)
LINEAR(linear_f32_4, float, 4, 1)
LINEAR(linear_f32_8, float, 8, 2)
LINEAR(linear_f32_16, float, 16, 2)
LINEAR(linear_bf16_1, __nv_bfloat16, 1, 1)
LINEAR(linear_bf16_2, __nv_bfloat16, 2, 1)
LINEAR(linear_bf16_4, __nv_bfloat16, 4, 1)
LINEAR(linear_bf16_8, __nv_bfloat16, 8, 2)
LINEAR(linear_bf16_16, __nv_bfloat16, 16, 2)
