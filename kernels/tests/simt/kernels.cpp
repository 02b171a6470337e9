// The crate's CUDA sources as C++, and the one entry by which the tests start a kernel by name.
#include "simt.h"
#include "warp.cuh"
#include "attention/attend.cuh"

// Each file in a namespace of its own, as each is a translation unit of its own for nvcc.
namespace adamw_file {
#include "adamw.cu"
}
namespace block {
#include "attention/block.cu"
}
namespace few_rows {
#include "linear/few_rows.cu"
}
namespace ragged {
#include "attention/ragged.cu"
}
namespace rms_norm {
#include "rms_norm.cu"
}
namespace rope_file {
#include "rope.cu"
}
namespace silu_mul {
#include "silu_mul.cu"
}
namespace verify {
#include "verify.cu"
}
namespace vocab_loss {
#include "vocab_loss.cu"
}

namespace {

struct Entry {
    const char* name;
    bool (*takes)(const char* arguments);
    void (*launch)(const unsigned* grid, const unsigned* threads, void** args);
};

#define KERNEL(module, name)                                                            \
    {#name, [](const char* arguments) { return simt::takes(module::name, arguments); }, \
     [](const unsigned* grid, const unsigned* threads, void** args) { simt::launch(module::name, grid, threads, args); }}

const Entry ENTRIES[] = {
    KERNEL(rms_norm, rms_norm_forward),
    KERNEL(rms_norm, rms_norm_backward),
    KERNEL(rms_norm, rms_norm_weight_parts),
    KERNEL(rms_norm, rms_norm_weight_sum),
    KERNEL(rope_file, rope),
    KERNEL(silu_mul, silu_mul_forward),
    KERNEL(silu_mul, silu_mul_backward),
    KERNEL(adamw_file, adamw),
    KERNEL(adamw_file, square_sums),
    KERNEL(verify, argmax_first),
    KERNEL(verify, verify_blocks),
    KERNEL(vocab_loss, vocab_loss_rows),
    KERNEL(vocab_loss, gather_rows),
    KERNEL(vocab_loss, add_rows),
    KERNEL(few_rows, linear_f32_1),
    KERNEL(few_rows, linear_f32_2),
    KERNEL(few_rows, linear_f32_4),
    KERNEL(few_rows, linear_f32_8),
    KERNEL(few_rows, linear_f32_16),
    KERNEL(few_rows, linear_bf16_1),
    KERNEL(few_rows, linear_bf16_2),
    KERNEL(few_rows, linear_bf16_4),
    KERNEL(few_rows, linear_bf16_8),
    KERNEL(few_rows, linear_bf16_16),
    KERNEL(ragged, ragged_attention_32),
    KERNEL(ragged, ragged_attention_64),
    KERNEL(ragged, ragged_attention_128),
    KERNEL(ragged, ragged_attention_256),
    KERNEL(ragged, ragged_attention_join),
    KERNEL(ragged, store_keys),
    KERNEL(ragged, store_values),
    KERNEL(block, block_attention_32),
    KERNEL(block, block_attention_64),
    KERNEL(block, block_attention_128),
    KERNEL(block, block_attention_256),
    KERNEL(block, block_attention_rows_32),
    KERNEL(block, block_attention_rows_64),
    KERNEL(block, block_attention_rows_128),
    KERNEL(block, block_attention_rows_256),
    KERNEL(block, block_attention_keys_32),
    KERNEL(block, block_attention_keys_64),
    KERNEL(block, block_attention_keys_128),
    KERNEL(block, block_attention_keys_256),
};

}  // namespace

// 0: done, 1: no such kernel, 2: it takes other arguments.
extern "C" int simt_launch(const char* name, const char* arguments, const unsigned* grid, const unsigned* threads, void** args) {
    for (const Entry& entry : ENTRIES) {
        if (strcmp(entry.name, name) != 0) continue;
        if (!entry.takes(arguments)) return 2;
        entry.launch(grid, threads, args);
        return 0;
    }
    return 1;
}
