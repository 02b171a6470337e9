//! How the process gives memory back: not at all while it computes, all of it between times.
//!
//! Every operation allocates its result and frees it soon after. By default the C library returns blocks of that size to
//! the system at once and gets them back as fresh pages, which costs more than some operations. Loading a model frees several
//! times what the model takes, though, and caches are large and mostly empty: these two are told apart here.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether freed memory is kept.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
static KEEPS: AtomicBool = AtomicBool::new(false);
/// Blocks from this size on come from the system as fresh pages: usually, and for large memory that is filled bit by bit.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const FRESH_FROM: (i32, i32) = (32 << 20, 1 << 20);

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
        libc::mallopt(libc::M_MMAP_THRESHOLD, FRESH_FROM.0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TOP_PAD, 16 << 20);
        KEEPS.store(true, Ordering::Relaxed);
    }
}

/// Returns freed memory to the system; for the end of work that needed much more than what stays, such as loading a model.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call only touches memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Runs an allocation of large zeroed memory that is filled bit by bit, such as caches: pages that are never written take no
/// memory then, where kept memory would be cleared and so be taken whole.
pub fn on_fresh_pages<T>(allocate: impl FnOnce() -> T) -> T {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if KEEPS.load(Ordering::Relaxed) {
        // SAFETY: as in `keep_freed_memory`.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, FRESH_FROM.1) };
        let allocated = allocate();
        // SAFETY: as above.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, FRESH_FROM.0) };
        return allocated;
    }
    allocate()
}

#[cfg(test)]
mod tests {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the file is the kernel's and always there")]
    fn empty_caches_and_freed_memory_take_nothing() {
        use super::{keep_freed_memory, on_fresh_pages, return_freed_memory};

        const BLOCK: usize = 8 << 20;
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            4096 * pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
        };
        keep_freed_memory();
        // Kept memory that has been written, as loading leaves it.
        let blocks: Vec<Vec<u8>> = (0..32).map(|i| vec![i + 1; BLOCK]).collect();
        let full = resident();
        drop(blocks);
        return_freed_memory();
        let returned = resident();
        assert!(full > returned + 16 * BLOCK, "{full} bytes, then {returned}");
        let caches: Vec<Vec<u8>> = on_fresh_pages(|| (0..32).map(|_| vec![0; BLOCK]).collect());
        let empty = resident();
        // A free piece of the heap may still serve a few of them.
        assert!(empty < returned + 16 * BLOCK, "{returned} bytes, then {empty} with empty caches");
        assert_eq!(caches.iter().map(|cache| usize::from(cache[BLOCK / 2])).sum::<usize>(), 0);
    }
}
