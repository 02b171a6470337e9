//! Memory for packed weights: on cache-line borders, and on large pages where the system has them.
//!
//! A vector load that crosses a cache line costs two; a stream of weights over 4 KiB pages stops the hardware prefetcher
//! at every border.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A cache line and a vector register of AVX-512.
const LINE: usize = 64;
/// Size of a large page on x86-64 and on most aarch64 systems.
const LARGE_PAGE: usize = 2 << 20;

/// Types whose all-zero bytes are a value and that own nothing.
pub(crate) trait Plain: Copy + Send + Sync {}
impl Plain for f32 {}
impl Plain for half::bf16 {}
impl Plain for i8 {}
impl Plain for u8 {}
impl Plain for i16 {}

/// A zero-initialised array that starts on a cache line.
#[derive(Debug)]
pub(crate) struct Aligned<T: Plain> {
    data: NonNull<T>,
    len: usize,
    owns: PhantomData<T>,
}

// SAFETY: the array is owned like a `Vec<T>`, and `T` can be sent and shared.
unsafe impl<T: Plain> Send for Aligned<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Aligned<T> {}

impl<T: Plain> Aligned<T> {
    /// `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        // SAFETY: the memory is filled before it is read, and zero bytes are a `T`.
        unsafe {
            let array = Self::unfilled(len);
            array.data.write_bytes(0, len);
            array
        }
    }

    /// Memory for `len` elements.
    ///
    /// # Safety
    /// Every element is written before it is read.
    pub(crate) unsafe fn unfilled(len: usize) -> Self {
        if len == 0 {
            return Self { data: NonNull::dangling(), len, owns: PhantomData };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let data = unsafe { alloc(layout) };
        let Some(data) = NonNull::new(data.cast::<T>()) else { handle_alloc_error(layout) };
        if layout.align() == LARGE_PAGE {
            advise_large_pages(data.as_ptr().cast(), layout.size());
        }
        Self { data, len, owns: PhantomData }
    }

    /// Where the elements begin.
    pub(crate) fn start(&mut self) -> *mut T {
        self.data.as_ptr()
    }

    fn layout(len: usize) -> Layout {
        let bytes = len.checked_mul(size_of::<T>()).expect("the array's size fits an address");
        let align = if bytes >= LARGE_PAGE { LARGE_PAGE } else { LINE };
        Layout::from_size_align(bytes, align).expect("the array's size fits an address")
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `data` points to `len` initialised elements.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> Drop for Aligned<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the memory was allocated with this layout.
            unsafe { dealloc(self.data.as_ptr().cast(), Self::layout(self.len)) }
        }
    }
}

/// Asks for large pages; a system that has none leaves the memory as it is.
#[cfg(target_os = "linux")]
fn advise_large_pages(data: *mut u8, bytes: usize) {
    // SAFETY: the range was just allocated; the call changes how it is backed, not what it holds.
    unsafe {
        libc::madvise(data.cast(), bytes, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_large_pages(_data: *mut u8, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_start_on_a_line_and_hold_zeros() {
        for len in [0, 1, 63, 1000, LARGE_PAGE + 5] {
            let mut bytes = Aligned::<u8>::zeros(len);
            assert_eq!(bytes.len(), len);
            assert!(bytes.iter().all(|&byte| byte == 0));
            assert!(len == 0 || bytes.as_ptr().align_offset(LINE) == 0);
            if let Some(last) = bytes.last_mut() {
                *last = 7;
                assert_eq!(bytes[len - 1], 7);
            }
        }
    }
}
