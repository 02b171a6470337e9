// Rotary position embedding, half-split order; a block of 128 threads per row. See rope.rs.

// cosines and sines are [rows, pairs]; sign is 1, or -1 for the inverse rotation (the gradient).
extern "C" __global__ void __launch_bounds__(128)
rope(const float* __restrict__ x, int x_stride, const float* __restrict__ cosines, const float* __restrict__ sines,
     float* __restrict__ y, int cols, int head_dim, int pairs, float sign) {
    const float* row = x + (size_t)blockIdx.x * x_stride;
    float* out = y + (size_t)blockIdx.x * cols;
    const float* c = cosines + (size_t)blockIdx.x * pairs;
    const float* s = sines + (size_t)blockIdx.x * pairs;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const int d = i % head_dim;
        if (d < pairs) {
            out[i] = row[i] * c[d] - row[i + pairs] * sign * s[d];
        } else if (d < 2 * pairs) {
            out[i] = row[i] * c[d - pairs] + row[i - pairs] * sign * s[d - pairs];
        } else {
            out[i] = row[i];
        }
    }
}
