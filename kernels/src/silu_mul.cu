// y = silu(gate) * up and its gradient; a block of 256 threads per row. See silu_mul.rs.
#include "warp.cuh"

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

extern "C" __global__ void __launch_bounds__(256)
silu_mul_forward(const float* __restrict__ gate, int gate_stride, const float* __restrict__ up, int up_stride,
                 float* __restrict__ y, int cols) {
    const float* g = gate + (size_t)blockIdx.x * gate_stride;
    const float* u = up + (size_t)blockIdx.x * up_stride;
    float* out = y + (size_t)blockIdx.x * cols;
    if (in_vectors(gate, gate_stride, cols) && in_vectors(up, up_stride, cols)) {
        for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
            const float4 a = reinterpret_cast<const float4*>(g)[i], b = reinterpret_cast<const float4*>(u)[i];
            reinterpret_cast<float4*>(out)[i] =
                make_float4(gated(a.x, b.x), gated(a.y, b.y), gated(a.z, b.z), gated(a.w, b.w));
        }
    } else {
        for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = gated(g[i], u[i]);
    }
}

// With s = 1 / (1 + e^-g): d gate = grad u s (1 + g (1 - s)), d up = grad g s.
extern "C" __global__ void __launch_bounds__(256)
silu_mul_backward(const float* __restrict__ gate, int gate_stride, const float* __restrict__ up, int up_stride,
                  const float* __restrict__ grad, int grad_stride, float* __restrict__ dgate, float* __restrict__ dup, int cols) {
    const size_t row = blockIdx.x;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float g = gate[row * gate_stride + i], u = up[row * up_stride + i], d = grad[row * grad_stride + i];
        const float sigma = 1.0f / (1.0f + expf(-g));
        dgate[row * cols + i] = d * u * sigma * (1.0f + g * (1.0f - sigma));
        dup[row * cols + i] = d * g * sigma;
    }
}
