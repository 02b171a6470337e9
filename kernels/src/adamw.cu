// AdamW in place and the squared norm for clipping. See adamw.rs.
#include "warp.cuh"

__device__ __forceinline__ void step(float& p, float g, float& m, float& v, float decay, float rate, float root_correction, float beta1,
                                     float beta2, float eps, float scale) {
    g *= scale;
    m = m * beta1 + g * (1.0f - beta1);
    v = v * beta2 + g * g * (1.0f - beta2);
    p = p * decay - rate * m / (sqrtf(v) * root_correction + eps);
}

// A thread updates four neighbours at a time.
extern "C" __global__ void __launch_bounds__(256)
adamw(float* __restrict__ parameter, const float* __restrict__ gradient, float* __restrict__ first, float* __restrict__ second, int count,
      float decay, float rate, float root_correction, float beta1, float beta2, float eps, float scale) {
    const long long from = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (from + 4 <= count && in_vectors(parameter, 0, 0) && in_vectors(gradient, 0, 0)) {
        float4 p = *reinterpret_cast<float4*>(parameter + from);
        float4 m = *reinterpret_cast<float4*>(first + from), v = *reinterpret_cast<float4*>(second + from);
        const float4 g = *reinterpret_cast<const float4*>(gradient + from);
        step(p.x, g.x, m.x, v.x, decay, rate, root_correction, beta1, beta2, eps, scale);
        step(p.y, g.y, m.y, v.y, decay, rate, root_correction, beta1, beta2, eps, scale);
        step(p.z, g.z, m.z, v.z, decay, rate, root_correction, beta1, beta2, eps, scale);
        step(p.w, g.w, m.w, v.w, decay, rate, root_correction, beta1, beta2, eps, scale);
        *reinterpret_cast<float4*>(parameter + from) = p;
        *reinterpret_cast<float4*>(first + from) = m;
        *reinterpret_cast<float4*>(second + from) = v;
        return;
    }
    for (long long i = from; i < from + 4 && i < count; ++i) {
        float p = parameter[i], m = first[i], v = second[i];
        step(p, gradient[i], m, v, decay, rate, root_correction, beta1, beta2, eps, scale);
        parameter[i] = p;
        first[i] = m;
        second[i] = v;
    }
}

// One sum in f64 per block of `chunk` elements, in an order that depends on nothing else.
extern "C" __global__ void __launch_bounds__(256) square_sums(const float* __restrict__ x, double* __restrict__ sums, int count, int chunk) {
    __shared__ double space[8];
    const long long first = (long long)blockIdx.x * chunk;
    double total = 0;
    for (long long i = first + threadIdx.x; i < first + chunk && i < count; i += blockDim.x) total += (double)x[i] * x[i];
    total = block_sum<8>(total, space);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
