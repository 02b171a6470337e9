// RMSNorm and its gradient; a block of 256 threads per row. See rms_norm.rs for the equations.
#include "warp.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;

// y = w * x * s, s = 1 / sqrt(mean(x^2) + eps)
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_forward(const float* __restrict__ x, int x_stride, const float* __restrict__ weight, float* __restrict__ y, int cols, float eps) {
    __shared__ float space[WARPS];
    const float* row = x + (size_t)blockIdx.x * x_stride;
    float* out = y + (size_t)blockIdx.x * cols;
    const bool vectors = in_vectors(x, x_stride, cols) && in_vectors(weight, 0, cols);
    float squares = 0;
    if (vectors) {
        const float4* from = reinterpret_cast<const float4*>(row);
        for (int i = threadIdx.x; i < cols / 4; i += THREADS) {
            const float4 v = from[i];
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (int i = threadIdx.x; i < cols; i += THREADS) squares += row[i] * row[i];
    }
    const float scale = 1.0f / sqrtf(block_sum<WARPS>(squares, space) / cols + eps);
    if (vectors) {
        const float4* from = reinterpret_cast<const float4*>(row);
        const float4* w = reinterpret_cast<const float4*>(weight);
        float4* to = reinterpret_cast<float4*>(out);
        for (int i = threadIdx.x; i < cols / 4; i += THREADS) {
            const float4 v = from[i], g = w[i];
            to[i] = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
        }
    } else {
        for (int i = threadIdx.x; i < cols; i += THREADS) out[i] = row[i] * scale * weight[i];
    }
}

// dx = s (g w) - x s^3 / d <g w, x>; keeps s of each row for the weight's gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_backward(const float* __restrict__ x, int x_stride, const float* __restrict__ weight, const float* __restrict__ grad,
                  int grad_stride, float* __restrict__ dx, float* __restrict__ scales, int cols, float eps) {
    __shared__ float space[WARPS];
    const float* row = x + (size_t)blockIdx.x * x_stride;
    const float* g = grad + (size_t)blockIdx.x * grad_stride;
    float* out = dx + (size_t)blockIdx.x * cols;
    float squares = 0, product = 0;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        squares += row[i] * row[i];
        product += g[i] * weight[i] * row[i];
    }
    const float scale = 1.0f / sqrtf(block_sum<WARPS>(squares, space) / cols + eps);
    const float projection = block_sum<WARPS>(product, space) * scale * scale * scale / cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) out[i] = g[i] * weight[i] * scale - row[i] * projection;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// Sums g x s over rows_per_part rows: one thread per column, one row of `parts` per blockIdx.y.
extern "C" __global__ void rms_norm_weight_parts(const float* __restrict__ x, int x_stride, const float* __restrict__ grad, int grad_stride,
                                                 const float* __restrict__ scales, float* __restrict__ parts, int rows, int cols,
                                                 int rows_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= cols) return;
    const int first = blockIdx.y * rows_per_part;
    const int last = min(first + rows_per_part, rows);
    float total = 0;
    for (int row = first; row < last; ++row) {
        total += grad[(size_t)row * grad_stride + column] * x[(size_t)row * x_stride + column] * scales[row];
    }
    parts[(size_t)blockIdx.y * cols + column] = total;
}

extern "C" __global__ void rms_norm_weight_sum(const float* __restrict__ parts, float* __restrict__ dweight, int count, int cols) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= cols) return;
    float total = 0;
    for (int part = 0; part < count; ++part) total += parts[(size_t)part * cols + column];
    dweight[column] = total;
}
