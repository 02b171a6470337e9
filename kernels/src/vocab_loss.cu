// Rows of the fused vocabulary loss: from logits to terms and the gradient with respect to the logits. See vocab_loss.rs.
#include "warp.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;

struct Row {
    int target;  // row of the target's logits
    int label;   // draft token, -1 for none
    int place;   // row of the terms
    float ce, tv, kl;
};

// A block per row. `draft` [rows, vocab] holds logits and becomes their gradient.
// `target` [.., target_vocab] holds the target's logits, null when distributions are not asked for; draft token v is its
// token tokens[v], ascending, or v where tokens is null. What the target has elsewhere is `missing`.
extern "C" __global__ void __launch_bounds__(THREADS)
vocab_loss_rows(float* __restrict__ draft, const float* __restrict__ target, const int* __restrict__ tokens,
                const Row* __restrict__ rows, float* __restrict__ terms, int vocab, int target_vocab, float temperature) {
    __shared__ float space[WARPS];
    const Row row = rows[blockIdx.x];
    float* u = draft + (size_t)blockIdx.x * vocab;
    const float* t = target ? target + (size_t)row.target * target_vocab : nullptr;
    const float ce = row.label >= 0 ? row.ce : 0.0f;
    const bool with_kl = t && row.kl != 0;
    const bool tempered = with_kl && temperature != 1;
    const float cool = 1.0f / temperature;

    float largest = -INFINITY;
    for (int v = threadIdx.x; v < vocab; v += THREADS) largest = fmaxf(largest, u[v]);
    largest = block_max<WARPS>(largest, space);
    float total = 0, total_cool = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        total += expf(u[v] - largest);
        if (tempered) total_cool += expf((u[v] - largest) * cool);
    }
    total = block_sum<WARPS>(total, space);
    const float log_sum = largest + logf(total), inverse = 1.0f / total;
    const float label_logit = row.label >= 0 ? u[row.label] : 0.0f;
    if (!t) {
        __syncthreads();
        for (int v = threadIdx.x; v < vocab; v += THREADS) u[v] = ce * expf(u[v] - largest) * inverse - (v == row.label ? ce : 0.0f);
        if (threadIdx.x == 0) {
            terms[3 * row.place] = row.label >= 0 ? log_sum - label_logit : 0.0f;
            terms[3 * row.place + 1] = terms[3 * row.place + 2] = 0;
        }
        return;
    }
    const float inverse_cool = tempered ? 1.0f / block_sum<WARPS>(total_cool, space) : 0.0f;

    float t_largest = -INFINITY;
    for (int v = threadIdx.x; v < target_vocab; v += THREADS) t_largest = fmaxf(t_largest, t[v]);
    t_largest = block_max<WARPS>(t_largest, space);
    float t_total = 0, t_total_cool = 0;
    for (int v = threadIdx.x; v < target_vocab; v += THREADS) {
        t_total += expf(t[v] - t_largest);
        if (tempered) t_total_cool += expf((t[v] - t_largest) * cool);
    }
    const float t_inverse = 1.0f / block_sum<WARPS>(t_total, space);
    const float t_inverse_cool = tempered ? 1.0f / block_sum<WARPS>(t_total_cool, space) : 0.0f;

    // Sums over the vocabulary: |p - q|, p sign(p - q), q (log q - log p), and q of the tokens that the drafter lacks.
    const float u_log = tempered ? largest * cool - logf(inverse_cool) : log_sum;
    float distance = 0, signs = 0, divergence = 0, missing = 0, missing_cool = 0;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        const int token = tokens ? tokens[v] : v;
        const float p = expf(u[v] - largest) * inverse, q = expf(t[token] - t_largest) * t_inverse;
        distance += fabsf(p - q);
        signs += p > q ? p : p < q ? -p : 0.0f;
        if (with_kl) {
            const float w = tempered ? expf((t[token] - t_largest) * cool) * t_inverse_cool : q;
            if (w > 0) divergence += w * (logf(w) - (u[v] * cool - u_log));
        }
        if (tokens) {
            // The tokens between this draft token and the next, and for the first also those before it.
            const int end = v + 1 < vocab ? tokens[v + 1] : target_vocab;
            for (int other = v == 0 ? 0 : token + 1; other < end; ++other) {
                if (other == token) continue;
                missing += expf(t[other] - t_largest) * t_inverse;
                if (tempered) missing_cool += expf((t[other] - t_largest) * cool) * t_inverse_cool;
            }
        }
    }
    distance = block_sum<WARPS>(distance, space);
    signs = block_sum<WARPS>(signs, space);
    if (with_kl) divergence = block_sum<WARPS>(divergence, space);
    if (tokens) missing = block_sum<WARPS>(missing, space);
    if (tokens && tempered) missing_cool = block_sum<WARPS>(missing_cool, space);

    const float kept = 1.0f - missing, kept_cool = 1.0f - missing_cool;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        const int token = tokens ? tokens[v] : v;
        const float p = expf(u[v] - largest) * inverse, q = expf(t[token] - t_largest) * t_inverse;
        const float side = p > q ? 1.0f : p < q ? -1.0f : 0.0f;
        float slope = p * (ce + row.tv * (side - signs));
        if (tempered) {
            const float p_cool = expf((u[v] - largest) * cool) * inverse_cool;
            const float q_cool = expf((t[token] - t_largest) * cool) * t_inverse_cool;
            slope += row.kl * (kept_cool * p_cool - q_cool) * cool;
        } else if (with_kl) {
            slope += row.kl * (kept * p - q);
        }
        u[v] = slope - (v == row.label ? ce : 0.0f);
    }
    if (threadIdx.x == 0) {
        terms[3 * row.place] = row.label >= 0 ? log_sum - label_logit : 0.0f;
        terms[3 * row.place + 1] = distance + missing;
        terms[3 * row.place + 2] = divergence;
    }
}

// Row i of `out` is row index[i] of `from`; a block per row.
extern "C" __global__ void gather_rows(const float* __restrict__ from, int stride, const int* __restrict__ index, float* __restrict__ out, int cols) {
    const float* row = from + (size_t)index[blockIdx.x] * stride;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[(size_t)blockIdx.x * cols + i] = row[i];
}

struct Group {
    int row;           // of out
    int first, count;  // of members
};

// Adds the rows members[first..] of `from` to one row of `out`, in order; a block per group, groups of different rows.
extern "C" __global__ void add_rows(const float* __restrict__ from, const Group* __restrict__ groups, const int* __restrict__ members,
                                    float* __restrict__ out, int cols) {
    const Group group = groups[blockIdx.x];
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        float total = out[(size_t)group.row * cols + i];
        for (int member = 0; member < group.count; ++member) total += from[(size_t)members[group.first + member] * cols + i];
        out[(size_t)group.row * cols + i] = total;
    }
}
