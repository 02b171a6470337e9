//! How the process gives memory back: not at all while it computes.
//!
//! Every operation allocates its result and frees it soon after. By default the C library returns blocks of that size to
//! the system at once and gets them back as fresh pages, which costs more than some operations.

/// Keeps freed memory for the next allocation instead of returning it to the system.
///
/// For the start of a program that runs models; elsewhere than on Linux with glibc it does nothing.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls only set options of the allocator; an option that it refuses stays as it was.
    unsafe {
        // One arena, since results are allocated by one thread and freed by another; the largest block that may come
        // from it; the free memory at its end that is not trimmed.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TOP_PAD, 16 << 20);
    }
}
