// Attention of draft blocks in training, with gradients. See block.rs.
//
// Rows kernels: a block of threads takes a run of query vectors (row by row, the query heads of one key/value head side by
// side) of one span. Keys kernel: it takes 32 (or 16) neighbouring keys and walks over all query vectors that see them, so
// gradients of keys and values are sums in a fixed order, without atomics.
#include "attend.cuh"

// What the rows of one draft block see: context rows, and their own rows if `own` is not 0.
struct Span {
    int context, context_count;  // key rows
    int row, rows;               // own rows among the block rows
    int own;                     // number of own rows in sight: rows or 0
};

struct Item {
    Span span;
    int vector;  // first query vector of the item
};

// Key i of a span: the context rows, then its own.
struct Source {
    const float* k;
    const float* v;
    int k_stride, v_stride, dim;
    int context, context_count, own;  // own: key row of the first own row

    __device__ __forceinline__ size_t row(int i) const { return i < context_count ? context + i : own + i - context_count; }

    template <int DIM>
    __device__ __forceinline__ void keys(float* tile, int at, int count) const {
        load_rows<DIM>(tile, DIM + 1, count, dim, in_vectors(k, k_stride, dim), [&](int j) { return k + row(at + j) * k_stride; });
    }

    template <int DIM>
    __device__ __forceinline__ void values(float* tile, int at, int count, int pitch = DIM) const {
        load_rows<DIM>(tile, pitch, count, dim, in_vectors(v, v_stride, dim), [&](int j) { return v + row(at + j) * v_stride; });
    }
};

template <int DIM, int R>
__device__ __forceinline__ void load_queries(float (&to)[4 * R][DIM], const float* from, int stride, const Item& item, int kv_head, int group,
                                             int dim, float scale) {
    for (int i = threadIdx.x; i < 4 * R * DIM; i += THREADS) {
        const int vector = item.vector + i / DIM, d = i % DIM;
        const size_t row = item.span.row + vector / group;
        const int head = kv_head * group + vector % group;
        to[i / DIM][d] = vector < item.span.rows * group && d < dim ? from[row * stride + head * dim + d] * scale : 0.0f;
    }
}

template <int DIM, int R>
__device__ __forceinline__ void forward(const float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride, float* y,
                                        const Item* items, int context_rows, int kv_heads, int group, int dim, float scale) {
    using State = Attend<DIM, R>;
    __shared__ typename State::Shared shared;
    const Item item = items[blockIdx.x];
    const int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    load_queries<DIM, R>(shared.q, q, q_stride, item, kv_head, group, dim, scale);
    const Source source = {k + kv_head * dim, v + kv_head * dim, k_stride, v_stride, dim, item.span.context, item.span.context_count, context_rows + item.span.row};
    const int count = item.span.context_count + item.span.own;
    int first[R], last[R];
#pragma unroll
    for (int r = 0; r < R; ++r) first[r] = 0, last[r] = count;
    State state;
    state.clear();
    state.walk(shared, source, 0, count, first, last);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int vector = item.vector + warp * R + r;
        if (vector >= item.span.rows * group) continue;
        const size_t place = (size_t)(item.span.row + vector / group) * kv_heads * group + kv_head * group + vector % group;
#pragma unroll
        for (int i = 0; i < State::PARTS; ++i) {
            const int d = lane + 32 * i;
            if (d < dim) y[place * dim + d] = state.total[r] > 0 ? state.sum[r][i] / state.total[r] : 0.0f;
        }
    }
}

// dq, and for the keys kernel three numbers per query vector: largest score, sum of exponentials, <grad, output>.
template <int DIM, int R>
__device__ __forceinline__ void backward_rows(const float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,
                                              const float* grad, int grad_stride, float* dq, float* stats, const Item* items,
                                              int context_rows, int kv_heads, int group, int dim, float scale) {
    using State = Attend<DIM, R>;
    __shared__ typename State::Shared shared;
    __shared__ float4 grad_space[State::QUERIES * DIM / 4];
    auto& g = *reinterpret_cast<float (*)[State::QUERIES][DIM]>(grad_space);
    const Item item = items[blockIdx.x];
    const int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    load_queries<DIM, R>(shared.q, q, q_stride, item, kv_head, group, dim, scale);
    load_queries<DIM, R>(g, grad, grad_stride, item, kv_head, group, dim, 1.0f);
    const Source source = {k + kv_head * dim, v + kv_head * dim, k_stride, v_stride, dim, item.span.context, item.span.context_count, context_rows + item.span.row};
    const int count = item.span.context_count + item.span.own;
    int first[R], last[R];
#pragma unroll
    for (int r = 0; r < R; ++r) first[r] = 0, last[r] = count;
    State state;
    state.clear();
    state.walk(shared, source, 0, count, first, last);
    __syncthreads();

    float delta[R], inverse[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        inverse[r] = state.total[r] > 0 ? 1.0f / state.total[r] : 0.0f;
        float product = 0;
#pragma unroll
        for (int i = 0; i < State::PARTS; ++i) {
            product = fmaf(state.sum[r][i] * inverse[r], g[warp * R + r][lane + 32 * i], product);
            state.sum[r][i] = 0;  // from here on dq
        }
        delta[r] = warp_sum(product);
    }
    for (int at = 0; at < count; at += KEYS) {
        const int n = min(KEYS, count - at);
        float score[R], product[R];
        __syncthreads();
        source.template keys<DIM>(shared.tile, at, n);
        __syncthreads();
        State::scores(shared.q, shared.tile, score);
        __syncthreads();
        source.template values<DIM>(shared.tile, at, n, DIM + 1);
        __syncthreads();
        State::scores(g, shared.tile, product);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float p = lane < n ? expf(score[r] - state.largest[r]) * inverse[r] : 0.0f;
            shared.p[warp * R + r][lane] = p * (product[r] - delta[r]) * scale;
        }
        __syncthreads();
        source.template keys<DIM>(shared.tile, at, n);
        __syncthreads();
        State::weigh(shared.p, shared.tile, DIM + 1, state.sum);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int vector = item.vector + warp * R + r;
        if (vector >= item.span.rows * group) continue;
        const size_t place = (size_t)(item.span.row + vector / group) * kv_heads * group + kv_head * group + vector % group;
#pragma unroll
        for (int i = 0; i < State::PARTS; ++i) {
            const int d = lane + 32 * i;
            if (d < dim) dq[place * dim + d] = state.sum[r][i];
        }
        if (lane == 0) {
            stats[3 * place] = state.largest[r];
            stats[3 * place + 1] = inverse[r];
            stats[3 * place + 2] = delta[r];
        }
    }
}

// Neighbouring key rows and the spans that may see them.
struct KeyTile {
    int key, count;
    int span, spans;
};

// dk and dv of up to N keys. For the sums a warp owns N / 4 keys and a lane every 32nd dimension.
template <int DIM, int N, int QUERIES>
__device__ __forceinline__ void backward_keys(const float* q, int q_stride, const float* k, int k_stride, const float* v, int v_stride,
                                              const float* grad, int grad_stride, const float* stats, float* dk, float* dv,
                                              const KeyTile* tiles, const Span* spans, int context_rows, int kv_heads, int group, int dim,
                                              float scale) {
    constexpr int PARTS = DIM / 32, PITCH = DIM + 1, OWN = N / 4;
    __shared__ float keys[N * PITCH], values[N * PITCH];
    __shared__ float4 q_space[QUERIES][DIM / 4], g_space[QUERIES][DIM / 4], p_space[QUERIES][N / 4], s_space[QUERIES][N / 4];
    const KeyTile tile = tiles[blockIdx.x];
    const int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < N * DIM; i += THREADS) {
        const int j = i / DIM, d = i % DIM;
        const bool inside = j < tile.count && d < dim;
        const size_t row = tile.key + j;
        keys[j * PITCH + d] = inside ? k[row * k_stride + kv_head * dim + d] : 0.0f;
        values[j * PITCH + d] = inside ? v[row * v_stride + kv_head * dim + d] : 0.0f;
    }
    float sum_k[OWN][PARTS] = {}, sum_v[OWN][PARTS] = {};
    for (int number = tile.span; number < tile.span + tile.spans; ++number) {
        const Span span = spans[number];
        const int own = context_rows + span.row;
        const bool meets = (span.context < tile.key + tile.count && tile.key < span.context + span.context_count) ||
                           (own < tile.key + tile.count && tile.key < own + span.own);
        if (!meets) continue;  // the same for all threads
        const int vectors = span.rows * group;
        for (int from = 0; from < vectors; from += QUERIES) {
            __syncthreads();
            for (int i = threadIdx.x; i < QUERIES * DIM; i += THREADS) {
                const int vector = from + i / DIM, d = i % DIM;
                const bool inside = vector < vectors && d < dim;
                const size_t row = span.row + vector / group;
                const int column = (kv_head * group + vector % group) * dim + d;
                reinterpret_cast<float*>(q_space[i / DIM])[d] = inside ? q[row * q_stride + column] : 0.0f;
                reinterpret_cast<float*>(g_space[i / DIM])[d] = inside ? grad[row * grad_stride + column] : 0.0f;
            }
            __syncthreads();
            for (int pair = threadIdx.x; pair < QUERIES * N; pair += THREADS) {
                const int i = pair / N, j = pair % N, vector = from + i, key = tile.key + j;
                const bool seen = j < tile.count && vector < vectors &&
                                  ((key >= span.context && key < span.context + span.context_count) || (key >= own && key < own + span.own));
                float p = 0, slope = 0;
                if (seen) {
                    float score = 0, product = 0;
#pragma unroll 4
                    for (int d = 0; d < DIM / 4; ++d) {
                        const float4 a = q_space[i][d], b = g_space[i][d];
                        const float* kd = keys + j * PITCH + 4 * d;
                        const float* vd = values + j * PITCH + 4 * d;
                        score = fmaf(a.w, kd[3], fmaf(a.z, kd[2], fmaf(a.y, kd[1], fmaf(a.x, kd[0], score))));
                        product = fmaf(b.w, vd[3], fmaf(b.z, vd[2], fmaf(b.y, vd[1], fmaf(b.x, vd[0], product))));
                    }
                    const size_t place = (size_t)(span.row + vector / group) * kv_heads * group + kv_head * group + vector % group;
                    p = expf(score * scale - stats[3 * place]) * stats[3 * place + 1];
                    slope = p * (product - stats[3 * place + 2]) * scale;
                }
                reinterpret_cast<float*>(p_space[i])[j] = p;
                reinterpret_cast<float*>(s_space[i])[j] = slope;
            }
            __syncthreads();
            for (int i = 0; i < QUERIES; ++i) {
                float qd[PARTS], gd[PARTS];
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    qd[part] = reinterpret_cast<const float*>(q_space[i])[lane + 32 * part];
                    gd[part] = reinterpret_cast<const float*>(g_space[i])[lane + 32 * part];
                }
#pragma unroll
                for (int j = 0; j < OWN; j += 4) {
                    const float4 p = p_space[i][(warp * OWN + j) / 4], s = s_space[i][(warp * OWN + j) / 4];
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        sum_v[j][part] = fmaf(p.x, gd[part], sum_v[j][part]);
                        sum_v[j + 1][part] = fmaf(p.y, gd[part], sum_v[j + 1][part]);
                        sum_v[j + 2][part] = fmaf(p.z, gd[part], sum_v[j + 2][part]);
                        sum_v[j + 3][part] = fmaf(p.w, gd[part], sum_v[j + 3][part]);
                        sum_k[j][part] = fmaf(s.x, qd[part], sum_k[j][part]);
                        sum_k[j + 1][part] = fmaf(s.y, qd[part], sum_k[j + 1][part]);
                        sum_k[j + 2][part] = fmaf(s.z, qd[part], sum_k[j + 2][part]);
                        sum_k[j + 3][part] = fmaf(s.w, qd[part], sum_k[j + 3][part]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        if (warp * OWN + j >= tile.count) continue;
        const size_t at = ((size_t)(tile.key + warp * OWN + j) * kv_heads + kv_head) * dim;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int d = lane + 32 * part;
            if (d >= dim) continue;
            dk[at + d] = sum_k[j][part];
            dv[at + d] = sum_v[j][part];
        }
    }
}

#define BLOCK_ATTENTION(DIM, FORWARD_R, BACKWARD_R, N, QUERIES)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) block_attention_##DIM(                                                       \
        const float* __restrict__ q, int q_stride, const float* __restrict__ k, int k_stride, const float* __restrict__ v,             \
        int v_stride, float* __restrict__ y, const Item* __restrict__ items, int context_rows, int kv_heads, int group, int dim,       \
        float scale) {                                                                                                                 \
        forward<DIM, FORWARD_R>(q, q_stride, k, k_stride, v, v_stride, y, items, context_rows, kv_heads, group, dim, scale);           \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) block_attention_rows_##DIM(                                                  \
        const float* __restrict__ q, int q_stride, const float* __restrict__ k, int k_stride, const float* __restrict__ v,             \
        int v_stride, const float* __restrict__ grad, int grad_stride, float* __restrict__ dq, float* __restrict__ stats,              \
        const Item* __restrict__ items, int context_rows, int kv_heads, int group, int dim, float scale) {                             \
        backward_rows<DIM, BACKWARD_R>(q, q_stride, k, k_stride, v, v_stride, grad, grad_stride, dq, stats, items, context_rows,       \
                                       kv_heads, group, dim, scale);                                                                   \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) block_attention_keys_##DIM(                                                  \
        const float* __restrict__ q, int q_stride, const float* __restrict__ k, int k_stride, const float* __restrict__ v,             \
        int v_stride, const float* __restrict__ grad, int grad_stride, const float* __restrict__ stats, float* __restrict__ dk,        \
        float* __restrict__ dv, const KeyTile* __restrict__ tiles, const Span* __restrict__ spans, int context_rows, int kv_heads,     \
        int group, int dim, float scale) {                                                                                             \
        backward_keys<DIM, N, QUERIES>(q, q_stride, k, k_stride, v, v_stride, grad, grad_stride, stats, dk, dv, tiles, spans,          \
                                       context_rows, kv_heads, group, dim, scale);                                                     \
    }

BLOCK_ATTENTION(32, 4, 4, 32, 8)
BLOCK_ATTENTION(64, 4, 4, 32, 8)
BLOCK_ATTENTION(128, 4, 4, 32, 8)
BLOCK_ATTENTION(256, 2, 1, 16, 4)
