// Attention of a few query vectors over a stretch of keys with a running softmax, for a block of 128 threads.
//
// Keys are walked in tiles of 32. For the scores a lane owns a key and a warp R query vectors; for the weighted sum of the
// values a lane owns every 32nd dimension. Keys that a query vector does not see leave its state untouched bit for bit, so
// a result depends only on the keys it sees and where tiles start, never on the other query vectors of the block.
#pragma once
#include "warp.cuh"

constexpr int THREADS = 128;
constexpr int KEYS = 32;  // per tile

template <int DIM, int R>
struct Attend {
    static constexpr int PARTS = DIM / 32;     // dimensions per lane
    static constexpr int QUERIES = 4 * R;      // per block
    static constexpr int PITCH = DIM + 1;      // of keys in the tile: lanes read a column without bank conflicts

    struct Shared {
        alignas(16) float tile[KEYS * PITCH];  // keys, then values
        alignas(16) float q[QUERIES][DIM];     // scaled, zeros past the head's width
        alignas(16) float p[QUERIES][KEYS];
    };

    // Largest score, sum of exp(score - largest), and the values weighted with the same.
    float largest[R], total[R], sum[R][PARTS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            largest[r] = -INFINITY;
            total[r] = 0;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) sum[r][i] = 0;
        }
    }

    // Scores of this lane's key in the tile against this warp's query vectors.
    static __device__ __forceinline__ void scores(const float (&q)[QUERIES][DIM], const float* tile, float (&out)[R]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < R; ++r) out[r] = 0;
#pragma unroll 4
        for (int d = 0; d < DIM; d += 4) {
            const float* k = tile + lane * PITCH + d;
            const float k0 = k[0], k1 = k[1], k2 = k[2], k3 = k[3];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float4 v = *reinterpret_cast<const float4*>(&q[warp * R + r][d]);
                out[r] = fmaf(v.w, k3, fmaf(v.z, k2, fmaf(v.y, k1, fmaf(v.x, k0, out[r]))));
            }
        }
    }

    // Adds keys start..end, of which query vector r of the warp sees first[r]..last[r]. `start` is a multiple of 32.
    template <class Source>
    __device__ __forceinline__ void walk(Shared& shared, const Source& source, int start, int end, const int (&first)[R], const int (&last)[R]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int at = start; at < end; at += KEYS) {
            const int count = min(KEYS, end - at);
            __syncthreads();
            source.template keys<DIM>(shared.tile, at, count);
            __syncthreads();
            float score[R];
            scores(shared.q, shared.tile, score);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const bool seen = at + lane >= first[r] && at + lane < last[r];
                const float highest = fmaxf(largest[r], warp_max(seen ? score[r] : -INFINITY));
                const float p = seen ? expf(score[r] - highest) : 0.0f;
                const float scale = total[r] > 0 ? expf(largest[r] - highest) : 1.0f;
                largest[r] = highest;
                total[r] = fmaf(total[r], scale, warp_sum(p));
                shared.p[warp * R + r][lane] = p;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) sum[r][i] *= scale;
            }
            __syncthreads();
            source.template values<DIM>(shared.tile, at, count);
            __syncthreads();
            weigh(shared.p, shared.tile, DIM, sum);
        }
    }

    // out[r] += sum over the tile's rows j of p[r][j] * tile[j], for this lane's dimensions.
    static __device__ __forceinline__ void weigh(const float (&p)[QUERIES][KEYS], const float* tile, int pitch, float (&out)[R][PARTS]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 2
        for (int j = 0; j < KEYS; j += 4) {
            float4 weights[R];
#pragma unroll
            for (int r = 0; r < R; ++r) weights[r] = *reinterpret_cast<const float4*>(&p[warp * R + r][j]);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const float* v = tile + j * pitch + lane + 32 * i;
                const float v0 = v[0], v1 = v[pitch], v2 = v[2 * pitch], v3 = v[3 * pitch];
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    out[r][i] = fmaf(weights[r].w, v3, fmaf(weights[r].z, v2, fmaf(weights[r].y, v1, fmaf(weights[r].x, v0, out[r][i]))));
                }
            }
        }
    }
};

// Joins a state with that of later keys.
template <int N>
__device__ __forceinline__ void join(float& largest, float& total, float (&sum)[N], float next_largest, float next_total, const float (&next_sum)[N]) {
    if (next_total == 0) return;
    const float highest = fmaxf(largest, next_largest);
    const float scale = total > 0 ? expf(largest - highest) : 0.0f;
    const float next_scale = expf(next_largest - highest);
    largest = highest;
    total = fmaf(next_total, next_scale, __fmul_rn(total, scale));
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = fmaf(next_sum[i], next_scale, __fmul_rn(sum[i], scale));
}

// Copies `count` rows of `dim` floats into a tile whose rows are `pitch` apart, zeros elsewhere. `row(i)` is the address of
// row i; all rows can be read in vectors or none.
template <int DIM, class Row>
__device__ __forceinline__ void load_rows(float* tile, int pitch, int count, int dim, bool vectors, const Row& row) {
    if (vectors) {
        for (int i = threadIdx.x; i < KEYS * (DIM / 4); i += THREADS) {
            const int j = i / (DIM / 4), d = i % (DIM / 4) * 4;
            float4 v = make_float4(0, 0, 0, 0);
            if (j < count && d < dim) v = *reinterpret_cast<const float4*>(row(j) + d);
            float* to = tile + j * pitch + d;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
    } else {
        for (int i = threadIdx.x; i < KEYS * DIM; i += THREADS) {
            const int j = i / DIM, d = i % DIM;
            tile[j * pitch + d] = j < count && d < dim ? row(j)[d] : 0.0f;
        }
    }
}
