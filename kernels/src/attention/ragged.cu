// Attention of new rows over key/value caches in panels of 32, and the write into them. See ragged.rs.
//
// A work item is a run of query vectors (row by row, the query heads of one key/value head side by side) of one segment.
// Keys are cut at multiples of SPLIT; each stretch has its own softmax state and states are joined in order. With many
// work items a block walks all stretches of its item; with few, every stretch has a block of its own and a second kernel
// joins them. Both do the same arithmetic.
#include "attend.cuh"

constexpr int SPLIT = 256;

struct Item {
    int slot;      // of the segment in the caches
    int start;     // position of the segment's first row
    int rows;      // of the segment
    int row;       // the segment's first among the rows of the call
    int vector;    // first query vector of the item within the segment
};

// The caches of one slot and one key/value head: keys [position / 32][dim][32], values [dim / 32][capacity][32]. Position p
// lies at p mod capacity, which only matters where capacity is a multiple of 32.
struct Caches {
    const float* k;
    const float* v;
    int capacity, dim;

    template <int DIM>
    __device__ __forceinline__ void keys(float* tile, int at, int count) const {
        const float* panel = k + (size_t)(at % capacity) * dim;  // at is a multiple of 32
        for (int i = threadIdx.x; i < DIM * (KEYS / 4); i += THREADS) {
            const int d = i / (KEYS / 4), j = i % (KEYS / 4) * 4;
            float4 x = make_float4(0, 0, 0, 0);
            if (d < dim && j < count) x = *reinterpret_cast<const float4*>(panel + d * KEYS + j);
            // What lies past the last position is left over from other sequences.
            float* to = tile + j * (DIM + 1) + d;
            to[0] = x.x;
            to[DIM + 1] = j + 1 < count ? x.y : 0.0f;
            to[2 * (DIM + 1)] = j + 2 < count ? x.z : 0.0f;
            to[3 * (DIM + 1)] = j + 3 < count ? x.w : 0.0f;
        }
    }

    template <int DIM>
    __device__ __forceinline__ void values(float* tile, int at, int count) const {
        const int place = at % capacity;
        for (int i = threadIdx.x; i < KEYS * (DIM / 4); i += THREADS) {
            // Eight threads read the 128 bytes of one position in a panel.
            const int part = i / (KEYS * 8), j = i / 8 % KEYS, d = 32 * part + i % 8 * 4;
            float4 x = make_float4(0, 0, 0, 0);
            if (d < dim && j < count) x = *reinterpret_cast<const float4*>(v + ((size_t)part * capacity + place + j) * 32 + i % 8 * 4);
            if (d + 1 >= dim) x.y = 0;
            if (d + 2 >= dim) x.z = 0;
            if (d + 3 >= dim) x.w = 0;
            *reinterpret_cast<float4*>(tile + j * DIM + d) = x;
        }
    }
};

// Where the panels of a slot's key/value head begin.
__device__ __forceinline__ size_t key_panels(int slot, int kv_heads, int kv_head, int capacity, int dim) {
    return ((size_t)slot * kv_heads + kv_head) * ((capacity + 31) / 32) * dim * 32;
}

__device__ __forceinline__ size_t value_panels(int slot, int kv_heads, int kv_head, int capacity, int dim) {
    return ((size_t)slot * kv_heads + kv_head) * ((dim + 31) / 32) * capacity * 32;
}

// With `parts`, [rows * heads, splits, dim], and `stats`, [rows * heads, splits, 2], block z handles stretch z only and
// leaves its state there; without (null) the result goes to y.
template <int DIM, int R>
__device__ __forceinline__ void ragged_attention(const float* __restrict__ q, int q_stride, const float* __restrict__ k_cache,
                                                 const float* __restrict__ v_cache, float* __restrict__ y, const Item* __restrict__ items,
                                                 int capacity, int kv_heads, int group, int dim, float scale, int causal, int window,
                                                 float* __restrict__ parts, float* __restrict__ stats) {
    using State = Attend<DIM, R>;
    __shared__ typename State::Shared shared;
    const Item item = items[blockIdx.x];
    const int kv_head = blockIdx.y, heads = kv_heads * group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vectors = item.rows * group;

    for (int i = threadIdx.x; i < State::QUERIES * DIM; i += THREADS) {
        const int vector = item.vector + i / DIM, d = i % DIM;
        const int row = item.row + vector / group, head = kv_head * group + vector % group;
        shared.q[i / DIM][d] = vector < vectors && d < dim ? q[(size_t)row * q_stride + head * dim + d] * scale : 0.0f;
    }
    // Keys that each of the warp's query vectors sees, and all of the block's together.
    int first[R], last[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int vector = item.vector + warp * R + r;
        last[r] = vector >= vectors ? 0 : causal ? item.start + vector / group + 1 : item.start + item.rows;
        first[r] = max(0, (causal ? last[r] : item.start) - window);
    }
    const int top = min(item.vector + State::QUERIES, vectors) - 1;
    const int end = causal ? item.start + top / group + 1 : item.start + item.rows;
    const int begin = max(0, (causal ? item.start + item.vector / group + 1 : item.start) - window);

    const Caches caches = {k_cache + key_panels(item.slot, kv_heads, kv_head, capacity, dim),
                           v_cache + value_panels(item.slot, kv_heads, kv_head, capacity, dim), capacity, dim};
    State state, stretch;
    state.clear();
    const int from = parts ? blockIdx.z : begin / SPLIT;
    const int to = parts ? blockIdx.z + 1 : (end + SPLIT - 1) / SPLIT;
    for (int split = from; split < to; ++split) {
        stretch.clear();
        // Tiles before the first key in sight are left out; those that stay start where they always do.
        const int start = max(split * SPLIT, begin / KEYS * KEYS);
        stretch.walk(shared, caches, start, min(end, (split + 1) * SPLIT), first, last);
#pragma unroll
        for (int r = 0; r < R; ++r) join(state.largest[r], state.total[r], state.sum[r], stretch.largest[r], stretch.total[r], stretch.sum[r]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int vector = item.vector + warp * R + r;
        if (vector >= vectors) continue;
        const size_t place = (size_t)(item.row + vector / group) * heads + kv_head * group + vector % group;
        const size_t part = place * gridDim.z + blockIdx.z;
#pragma unroll
        for (int i = 0; i < State::PARTS; ++i) {
            const int d = lane + 32 * i;
            if (d >= dim) continue;
            if (parts) {
                parts[part * dim + d] = state.sum[r][i];
            } else {
                y[place * dim + d] = state.total[r] > 0 ? state.sum[r][i] / state.total[r] : 0.0f;
            }
        }
        if (parts && lane == 0) {
            stats[2 * part] = state.largest[r];
            stats[2 * part + 1] = state.total[r];
        }
    }
}

#define RAGGED(name, DIM, R, BLOCKS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                      \
        name(const float* __restrict__ q, int q_stride, const float* __restrict__ k_cache, const float* __restrict__ v_cache,       \
             float* __restrict__ y, const Item* __restrict__ items, int capacity, int kv_heads, int group, int dim, float scale,    \
             int causal, int window, float* __restrict__ parts, float* __restrict__ stats) {                                        \
        ragged_attention<DIM, R>(q, q_stride, k_cache, v_cache, y, items, capacity, kv_heads, group, dim, scale, causal, window,    \
                                 parts, stats);                                                                                     \
    }

RAGGED(ragged_attention_32, 32, 4, 4)
RAGGED(ragged_attention_64, 64, 4, 4)
RAGGED(ragged_attention_128, 128, 4, 2)
RAGGED(ragged_attention_256, 256, 2, 3)

// Joins the stretches of a query vector; a block each.
extern "C" __global__ void __launch_bounds__(THREADS)
ragged_attention_join(const float* __restrict__ parts, const float* __restrict__ stats, float* __restrict__ y, int splits, int dim) {
    const size_t place = blockIdx.x;
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        float largest = -INFINITY, total = 0, sum[1] = {0};
        for (int split = 0; split < splits; ++split) {
            const size_t part = place * splits + split;
            const float next_total = stats[2 * part + 1];
            const float next[1] = {next_total > 0 ? parts[part * dim + d] : 0.0f};
            join(largest, total, sum, stats[2 * part], next_total, next);
        }
        y[place * dim + d] = total > 0 ? sum[0] / total : 0.0f;
    }
}

// Writes rows of keys or values into their cache; a block per row. places: slot and position of each row.
extern "C" __global__ void store_keys(const float* __restrict__ rows, int stride, const int* __restrict__ places, float* __restrict__ cache,
                                      int capacity, int kv_heads, int dim) {
    const int slot = places[2 * blockIdx.x], position = places[2 * blockIdx.x + 1];
    for (int i = threadIdx.x; i < kv_heads * dim; i += blockDim.x) {
        const size_t panel = key_panels(slot, kv_heads, i / dim, capacity, dim) + (size_t)(position / 32) * dim * 32;
        cache[panel + i % dim * 32 + position % 32] = rows[(size_t)blockIdx.x * stride + i];
    }
}

extern "C" __global__ void store_values(const float* __restrict__ rows, int stride, const int* __restrict__ places, float* __restrict__ cache,
                                        int capacity, int kv_heads, int dim) {
    const int slot = places[2 * blockIdx.x], position = places[2 * blockIdx.x + 1];
    for (int i = threadIdx.x; i < kv_heads * dim; i += blockDim.x) {
        const int d = i % dim;
        const size_t panel = value_panels(slot, kv_heads, i / dim, capacity, dim) + (size_t)(d / 32) * capacity * 32;
        cache[panel + (size_t)position * 32 + d % 32] = rows[(size_t)blockIdx.x * stride + i];
    }
}
