// Sums and maxima over a warp or a block of threads, in a fixed order, and loads of 16 bytes.
#pragma once
#include <cuda_bf16.h>

constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(ALL, value, other);
    return value;
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(ALL, value, other);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, other));
    return value;
}

// Combine over a block of WARPS warps; all threads get the result. `space` holds WARPS values and may be used again at once.
template <int WARPS, class T>
__device__ __forceinline__ T block_sum(T value, T* space) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = value;
    __syncthreads();
    T total = space[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) total += space[warp];
    __syncthreads();
    return total;
}

template <int WARPS>
__device__ __forceinline__ float block_max(float value, float* space) {
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = value;
    __syncthreads();
    float largest = space[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) largest = fmaxf(largest, space[warp]);
    __syncthreads();
    return largest;
}

// Whether rows at `base` with this stride and length (in elements) can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool in_vectors(const T* base, long long stride, int cols) {
    constexpr int N = 16 / sizeof(T);
    return reinterpret_cast<unsigned long long>(base) % 16 == 0 && stride % N == 0 && cols % N == 0;
}
