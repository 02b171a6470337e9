// The accept-or-resample rule of speculative decoding and the first maximum of a row. See verify.rs.
#include "warp.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 1024;      // probabilities per partial sum
constexpr int MAX_CHUNKS = 1024;
constexpr double FLOOR = 1e-8;   // of draft probabilities, and of a residual's mass

// The first largest value of a row, a block per row; -1 for a row with a NaN, or whose maximum is infinite.
extern "C" __global__ void __launch_bounds__(THREADS) argmax_first(const float* __restrict__ x, int stride, int* __restrict__ out, int cols) {
    __shared__ float values[WARPS];
    __shared__ int places[WARPS];
    __shared__ int unusable;
    if (threadIdx.x == 0) unusable = 0;
    __syncthreads();
    const float* row = x + (size_t)blockIdx.x * stride;
    float best = -INFINITY;
    int place = cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        const float value = row[i];
        if (value != value) atomicAdd(&unusable, 1);
        if (value > best) best = value, place = i;  // places ascend, so the first of equals stays
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
        const float value = __shfl_xor_sync(ALL, best, other);
        const int at = __shfl_xor_sync(ALL, place, other);
        if (value > best || (value == best && at < place)) best = value, place = at;
    }
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best, places[threadIdx.x / 32] = place;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < WARPS; ++warp) {
        if (values[warp] > best || (values[warp] == best && places[warp] < place)) best = values[warp], place = places[warp];
    }
    out[blockIdx.x] = unusable || place == cols || best == INFINITY ? -1 : place;
}

struct Block {
    int target;  // first of its rows + 1 in the target's probabilities
    int draft;   // first of its rows in the draft's, in `tokens` and in `accept`
    int rows;    // tokens to verify
};

// A block of threads per draft block. `accept` holds a number in [0, 1) per token, `next` one per target row: what the row's
// draw uses if it comes to it. Writes two numbers: how many tokens are accepted, and the token after them.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
verify_blocks(const float* __restrict__ target, const float* __restrict__ draft, const int* __restrict__ tokens, const double* __restrict__ accept,
              const double* __restrict__ next, const Block* __restrict__ blocks, int* __restrict__ out, int vocab) {
    __shared__ double masses[MAX_CHUNKS];
    __shared__ double space[WARPS];
    __shared__ int accepted_space;
    const Block block = blocks[blockIdx.x];
    if (threadIdx.x == 0) {
        int k = 0;
        for (; k < block.rows; ++k) {
            const int token = tokens[block.draft + k];
            const double p = target[(size_t)(block.target + k) * vocab + token];
            const double q = draft[(size_t)(block.draft + k) * vocab + token];
            if (accept[block.draft + k] >= fmin(1.0, p / fmax(q, FLOOR))) break;
        }
        accepted_space = k;
    }
    __syncthreads();
    const int accepted = accepted_space;
    const float* p = target + (size_t)(block.target + accepted) * vocab;
    const float* q = accepted < block.rows ? draft + (size_t)(block.draft + accepted) * vocab : nullptr;
    double divisor = 0;  // mass that the weights are divided by; 0 for none
    if (q) {
        double mass = 0, p_mass = 0;
        for (int v = threadIdx.x; v < vocab; v += THREADS) {
            mass += fmaxf(p[v] - q[v], 0.0f);
            p_mass += p[v];
        }
        mass = block_sum<WARPS>(mass, space);
        p_mass = block_sum<WARPS>(p_mass, space);
        if (mass <= FLOOR) q = nullptr, mass = p_mass;
        divisor = mass;
    }
    const auto probability = [&](int v) -> float {
        const float weight = q ? fmaxf(p[v] - q[v], 0.0f) : p[v];
        return divisor > 0 ? (float)(weight / divisor) : weight;
    };
    const int chunks = (vocab + CHUNK - 1) / CHUNK;
    for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += WARPS) {
        double mass = 0;
        for (int v = chunk * CHUNK + threadIdx.x % 32; v < min(vocab, (chunk + 1) * CHUNK); v += 32) mass += probability(v);
        mass = warp_sum(mass);
        if (threadIdx.x % 32 == 0) masses[chunk] = mass;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) total += masses[chunk];
    double rest = next[block.target + accepted] * total;
    int chunk = 0;
    while (chunk < chunks && rest >= masses[chunk]) rest -= masses[chunk++];
    // Rounding can carry the rest past the end: then the last token with mass takes it.
    if (chunk == chunks) {
        while (chunk > 1 && masses[chunk - 1] <= 0) --chunk;
        --chunk;
        rest = INFINITY;
    }
    int token = chunk * CHUNK;
    for (int v = chunk * CHUNK; v < min(vocab, (chunk + 1) * CHUNK); ++v) {
        const float mass = probability(v);
        if (mass <= 0) continue;
        token = v;
        rest -= mass;
        if (rest < 0) break;
    }
    out[2 * blockIdx.x] = accepted;
    out[2 * blockIdx.x + 1] = token;
}
